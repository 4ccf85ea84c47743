"""The league: settings and their draws, who is decided to be the best, the map's machines, and what the command writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.cli.league import league, table
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment.config import parse_config
from moesim.experiment.report import waited
from moesim.hardware import load_hardware
from moesim.studies.league import (
    ALONE,
    CPU_COST,
    NOISE,
    League,
    Setting,
    _rows_add,
    cpu_cost_ends,
    decide,
    map_of,
    near,
    ratio_of,
    record,
    settings_of,
)
from moesim.studies.league import league as meet
from tests.experiment.experiment_kit import small, write_yaml

RATIOS, SHARES = (0.125, 2.0), (0.25, 0.75)
SYSTEMS = ["on-demand", "lru", "fiddler", "daop-paper"]
WORK = {"batch_size": [1, 2], "prompt_tokens": 6, "decode_tokens": 2, "seed": [0, 1]}


def _config(folder: Path, **changes: Any) -> Any:
    return parse_config(small(folder, policies=SYSTEMS, workload=WORK, **changes), "small.yaml")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> League:
    folder = tmp_path_factory.mktemp("league")
    return meet(_config(folder), "small.yaml", ratios=RATIOS, shares=SHARES, jobs=1)


# --------------------------------------------------------------------------------------------------------- who is the best


def test_the_margin_is_a_geometric_mean_over_draws_with_the_interval_of_student():
    one = decide({"a": [2.0, 8.0, 4.0], "b": [1.0, 4.0, 2.0], "c": [1.0, 1.0, 1.0]})
    assert one.margin is not None
    assert (one.best, one.speed, one.second, one.margin.value, one.margin.factor) == ("a", pytest.approx(4), "b", 2, 1)
    assert one.certain


@pytest.mark.parametrize(
    ("speeds", "ends", "doubts"),
    [
        ({"a": [10.0, 8.0, 9.0], "b": [9.0, 9.0, 8.0]}, [], (NOISE,)),  # 1.11, 0.89, 1.13
        ({"a": [10.0], "b": [5.0]}, [], (NOISE,)),  # nothing is known of one draw
        ({"a": [9.0, 9.0], "b": [9.0, 9.0]}, [], (NOISE,)),
        ({"a": [9.0, 9.0]}, [{"a": 8.0}], (ALONE,)),
        ({"a": [9.0, 9.1], "b": [5.0, 5.1]}, [{"a": 9.0, "b": 8.9}, {"a": 9.0, "b": 9.0}], (CPU_COST,)),
        ({"a": [9.0, 9.1], "b": [5.0, 5.1], "c": [4.0, 4.0]}, [{"a": 9.0, "b": 8.9, "c": 9.2}], (CPU_COST,)),
        ({"a": [9.0, 9.1], "b": [5.0, 5.1]}, [{"a": 9.0, "b": 8.9}, {"a": 7.0, "b": 5.0}], ()),
    ],
)
def test_what_makes_a_setting_doubtful(speeds: dict[str, list[float]], ends: list[dict[str, float]], doubts: Sequence[str]):
    assert decide(speeds, ends).doubts == doubts


def test_two_systems_are_near_the_best_at_least():
    assert near({"a": 1.0, "b": 10.0, "c": 2.0}) == ["b", "c"]
    assert near({"a": 8.8, "b": 10.0, "c": 8.6}) == ["b", "a"]
    assert near(dict.fromkeys("abcdefg", 1.0)) == list("abcde")
    assert near(dict.fromkeys("abcdefg", 1.0), most=None) == list("abcdefg")
    assert near({"a": 1.0}) == ["a"]


# ---------------------------------------------------------------------------------------------------- settings and machines


def test_points_that_differ_in_policy_trace_or_seed_alone_are_one_setting(tmp_path: Path):
    one, two = settings_of(_config(tmp_path), "small.yaml")
    assert (one.batch, two.batch, len(one.draws), len(two.draws)) == (1, 2, 2, 2)
    assert [raw["workload"]["seed"] for raw in one.raws()] == [0, 1]


def _base(folder: Path) -> Setting:
    return settings_of(_config(folder), "small.yaml")[0]


def test_a_machine_of_the_map_has_the_ratio_that_was_asked_for(tmp_path: Path):
    for cell in map_of(_base(tmp_path), RATIOS, SHARES, "x"):
        machine = load_hardware(cell.raws()[0]["hardware"], "x")
        assert float(ratio_of(machine, "x")) == pytest.approx(cell.ratio, rel=1e-6)
        own = load_hardware("rtx3090-epyc7532", "x")
        assert machine.devices["cpu0"].expert_cost == own.devices["cpu0"].expert_cost


@pytest.mark.parametrize("bits", [4, [[4, 2]]])
def test_the_memory_of_the_map_has_room_for_the_share_that_was_asked_for(tmp_path: Path, bits: Any):
    """What a system caches that keeps nothing next to it: one expert less at most. Copies at fewer bits do not count."""
    base = settings_of(_config(tmp_path, model={"base": "mixtral-8x7b", "expert_bits": bits}), "small.yaml")[0]
    for cell in map_of(base, RATIOS[:1], SHARES, "x"):
        rows = moesim.run(cell.raws()[0] | {"policies": ["moe-infinity-code"]}, progress=False).table
        assert cell.share is not None
        assert 0 <= cell.share * 32 * 8 - rows["cache_slots"][0] <= 1


def test_a_machine_of_the_map_has_the_memory_that_it_is_asked_for(tmp_path: Path):
    """Nine tenths of Mixtral's experts are more than the GPU of the profile holds."""
    base = settings_of(_config(tmp_path, hardware="rtx5070-ryzen9600x"), "small.yaml")[0]
    (cell,) = map_of(base, (0.5,), (0.9,), "x")
    assert cell.memory_bytes is not None
    assert cell.memory_bytes > load_hardware("rtx5070-ryzen9600x", "x").devices["gpu0"].memory_bytes
    rows = moesim.run(cell.raws()[0] | {"policies": ["moe-infinity-code"]}, progress=False).table
    assert rows["error"][0] is None
    assert rows["cache_slots"][0] in (229, 230)


def test_the_ends_of_the_cost_a_row_are_those_of_the_profile(tmp_path: Path):
    ends = cpu_cost_ends(_base(tmp_path).raws()[0], "x")
    costs = [load_hardware(raw["hardware"], "x").devices["cpu0"].expert_cost for raw in ends]
    assert [cost.few_row_flops for cost in costs if cost] == [41_000_000_000, 234_000_000_000]


# --------------------------------------------------------------------------------------------------------------- the league


def test_the_best_of_the_table_is_the_fastest_of_plain_runs(found: League, tmp_path: Path):
    rows = moesim.run(small(tmp_path, policies=SYSTEMS, workload=WORK), progress=False).table
    exact = rows[rows["policy"] != "daop-paper"]
    for one in found.table:
        mine = exact[exact["batch_size"] == one.setting.batch]
        speed = mine["decode_tokens_per_s"] if one.phase == "decode" else 1e9 / mine["ttft_mean_ns"]
        means = speed.groupby(mine["policy"]).agg(lambda values: float(values.prod()) ** (1 / len(values)))
        assert one.contest.best == means.idxmax()
        assert one.contest.speed == pytest.approx(means.max())
        assert one.contest.second == means.drop(means.idxmax()).idxmax()
    assert len(found.table) == 4


def test_inexact_systems_stand_beside_and_never_win(found: League):
    for row in [record(one) for one in found.table]:
        assert row["best"] != "daop-paper" == row["inexact"]
        assert 0 < row["inexact_fresh"] <= 1


def test_what_a_system_loses_everywhere_is_the_speed_of_plain_runs(found: League):
    """The two settings, and per batch the four corners of the map, one of which is its middle."""
    settings = [one.setting for one in (*found.table, *found.cells) if one.setting.batch == 2 and one.phase == "decode"]
    tables = [moesim.run(one.raws()[0] | {"policies": SYSTEMS[:3]}, progress=False).table for one in settings]
    behind = {
        name: [t["decode_tokens_per_s"].max() / t["decode_tokens_per_s"][t["policy"] == name].iloc[0] for t in tables]
        for name in SYSTEMS[:3]
    }
    mine = [one for one in found.everywhere if one.batch_size == 2]
    assert {one.system: (one.median, one.worst, one.settings, one.ran, one.fastest) for one in mine} == {
        name: (pytest.approx(sorted(of)[2]), pytest.approx(max(of)), 5, 5, of.count(1)) for name, of in behind.items()
    }
    assert [one.median for one in mine] == sorted(one.median for one in mine)
    assert f"in the 5 settings where all met: {mine[0].system} x{mine[0].median:.2f}" in table(found, Format.TABLE)


# -------------------------------------------------------------------------------------------------------------- the command


def test_a_league_that_was_done_is_found_and_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    work = {"batch_size": 1, "prompt_tokens": 6, "decode_tokens": 2, "seed": [0, 1]}
    file, out = write_yaml(tmp_path, policies=SYSTEMS[:3], workload=work), tmp_path / "out"
    said, files = [], []
    for _ in range(2):
        league(file, ratios="1/8,2", shares="0.5", out=out, jobs=1, form=Format.MD)
        said.append(capsys.readouterr().out)
        files.append({path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.suffix != ".jsonl"})
    assert (
        set(files[0])
        == {"league.csv", "everywhere.csv", "map.csv", "crossover.png", "crossover.pdf", "crossover.txt"}
        <= {*files[0]}
    )
    assert files[0] == files[1]
    n_runs = said[0].splitlines()[-1].split()[0]
    assert f"{n_runs} runs, of which {n_runs} had been done before" in said[1]
    assert said[0].replace("of which 0", f"of which {n_runs}") == said[1]


def test_another_machine_takes_the_place_of_the_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_yaml(tmp_path, policies=["lru", "on-demand"])
    league(file, hardware="rtx5070-ryzen9600x", mapped=False, jobs=1, form=Format.JSON)
    assert {row["hardware"] for row in json.loads(capsys.readouterr().out)} == {"rtx5070-ryzen9600x"}


@pytest.mark.parametrize(
    ("ratios", "said"), [("0,1", "above 0"), ("fast", "got 'fast'"), ("1/0", "got '1/0'"), ("5000", "up to 1000")]
)
def test_wrong_axes_are_refused_before_anything_runs(tmp_path: Path, ratios: str, said: str):
    with pytest.raises(ConfigError, match=f"league: --ratios: .*{said}"):
        league(write_yaml(tmp_path), ratios=ratios, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_who_runs_nowhere_is_told_with_the_reason_and_nobody_at_all_is_an_error(tmp_path: Path):
    """25 slots are too few for an engine with one a layer; 100 MB are too few for everybody."""
    systems = ["on-demand", "exllamav3"]
    tight = parse_config(small(tmp_path, policies=systems, workload=WORK, cache={"ratio": 0.1}), "small.yaml")
    (said,) = meet(tight, "small.yaml", jobs=1).never.items()
    assert said[0] == "exllamav3"
    assert "ran in no setting: " in said[1]
    assert "slots" in said[1]
    none = _config(tmp_path, cache={"budget": "100 MB"})
    with pytest.raises(ConfigError, match=r"small\.yaml: expected a system that runs in some setting, got none: .*budget"):
        meet(none, "small.yaml", jobs=1)


def test_what_it_waited_for_is_of_the_phase():
    row = {"n_decode_tokens": 4, "time_gpu_experts_ns": 60, "time_exposed_demand_ns": 50,
           "decode_time_gpu_experts_ns": 55, "decode_time_exposed_demand_ns": 10}  # fmt: skip
    assert waited(row) == waited(row, "decode") == "GPU experts 85%"
    assert waited(row, "prompt") == "demand fetch 89%"  # 40 of 45


def test_a_decode_step_of_one_request_has_no_further_rows(tmp_path: Path):
    setting = _base(tmp_path)
    assert [_rows_add(replace(setting, batch=batch), phase) for batch in (1, 2) for phase in ("decode", "prompt")] == [
        False, True, True, True,
    ]  # fmt: skip
