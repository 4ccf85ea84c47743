"""The league: settings and their draws, joint draws of costs, who is decided to be the best, and what the command writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.cli.league import league
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment.config import load_config, parse_config
from moesim.experiment.report import waited
from moesim.hardware import load_hardware
from moesim.studies.league import (
    ALONE,
    COST_DRAWS,
    COSTS,
    ENGINE,
    REQUESTS,
    ROUTING,
    League,
    System,
    costed,
    decide,
    near,
    record,
    settings_of,
    systems_of,
)
from moesim.studies.league import league as meet
from moesim.studies.league_table import table
from tests.experiment.experiment_kit import small, write_yaml

MACHINE = "RTX 3060 + Ryzen 7 5700X + 64GB DDR4-3200"
ENGINES, RULES = ["llama-cpp-fit", "pooled-cache"], ["lru", "fiddler", "on-demand"]
WORK = {"batch_size": [1, 2], "prompt_tokens": 6, "decode_tokens": 2, "seed": [0, 1]}


def _config(folder: Path, **changes: Any) -> Any:
    asked = {"policies": [*ENGINES, *RULES, "daop-paper"], "workload": WORK, "hardware": MACHINE, **changes}
    return parse_config(small(folder, **asked), "small.yaml")


def _made(folder: Path, **changes: Any) -> Any:
    """An experiment whose routing the league chooses."""
    return _config(folder, **({"trace": None, "cache": {"ratio": 1.0}} | changes))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> League:
    return meet(_config(tmp_path_factory.mktemp("league")), "small.yaml", jobs=1)


# --------------------------------------------------------------------------------------------------------- who is the best


def test_the_margin_is_a_geometric_mean_over_draws_with_the_interval_of_student():
    one = decide({"a": [2.0, 8.0, 4.0], "b": [1.0, 4.0, 2.0], "c": [1.0, 1.0, 1.0]})
    assert one.margin is not None
    assert (one.best, one.speed, one.second, one.margin.value, one.margin.factor) == ("a", pytest.approx(4), "b", 2, 1)
    assert one.undone == ()


SURE = {"a": [9.0, 9.1], "b": [5.0, 5.1]}


@pytest.mark.parametrize(
    ("speeds", "costs", "routing", "undone"),
    [
        ({"a": [10.0, 8.0, 9.0], "b": [9.0, 9.0, 8.0]}, [], [], (REQUESTS,)),  # 1.11, 0.89, 1.13
        ({"a": [10.0], "b": [5.0]}, [], [], (REQUESTS,)),  # nothing is known of one draw
        ({"a": [9.0, 9.0], "b": [9.0, 9.0]}, [], [], (REQUESTS,)),
        ({"a": [9.0, 9.0]}, [{"a": 8.0}], [], (ALONE,)),
        (SURE, [{"a": 9.0, "b": 8.9}, {"a": 9.0, "b": 9.0}], [], (COSTS,)),
        (SURE | {"c": [4.0, 4.0]}, [{"a": 9.0, "b": 8.9, "c": 9.2}], [{"a": 1.0, "b": 2.0}], (COSTS, ROUTING)),
        (SURE, [{"b": 5.0}], [], (COSTS,)),  # the best does not run there
        (SURE, [{"a": 9.0, "b": 8.9}], [{"a": 7.0}], ()),
    ],
)
def test_what_undoes_an_order(speeds: dict[str, list[float]], costs: Any, routing: Any, undone: Sequence[str]):
    assert decide(speeds, costs, routing).undone == undone


def test_two_systems_are_near_the_best_at_least():
    assert near({"a": 1.0, "b": 10.0, "c": 2.0}, 1.5, 3) == ["b", "c"]
    assert near({"a": 8.8, "b": 10.0, "c": 6.0}, 1.5, 3) == ["b", "a"]
    assert near(dict.fromkeys("abcdefg", 1.0), 1.5, 3) == list("abc")
    assert near({"a": 1.0}, 1.5, 3) == ["a"]


# ------------------------------------------------------------------------------------------------------- settings and costs


def test_points_that_differ_in_policy_trace_or_seed_alone_are_one_setting(tmp_path: Path):
    one, two = settings_of(_config(tmp_path), "small.yaml")
    assert (one.batch, two.batch, len(one.draws), len(two.draws), one.ends) == (1, 2, 2, 2, ())
    assert [raw["workload"]["seed"] for raw in one.draws] == [0, 1]


def test_routing_that_is_not_given_is_the_usual_and_both_ends_of_what_is_to_be_expected(tmp_path: Path):
    one = settings_of(_made(tmp_path), "small.yaml")[0]
    assert [(raw["trace"]["synthesize"], raw["trace"]["seed"]) for raw in one.draws] == [("mixtral-8x7b", 0), ("mixtral-8x7b", 1)]
    low, high = (raw["trace"]["lift"] for raw in one.ends)
    assert 0 <= low < high
    (other, *_) = settings_of(_made(tmp_path, model={"base": "glm-4.5-air", "expert_bits": 4}), "small.yaml")
    assert low < high and other.ends[0]["trace"]["lift"] < other.draws[0]["trace"]["lift"] < other.ends[1]["trace"]["lift"]


def test_a_cache_of_the_whole_memory_leaves_room_for_the_same_context_whatever_the_length(tmp_path: Path):
    one = settings_of(_made(tmp_path), "small.yaml")[1]
    full, short = (one.of_length(one.draws[0], n)["cache"]["budget"] for n in (2, 1))
    model, memory = one.spec, one.machine.devices["gpu0"].memory_bytes
    assert full == memory - model.all_kv_bytes(2 * 4096, 2) + model.all_kv_bytes(2 * 8, 2)
    assert full - short == model.all_kv_bytes(2 * 8, 2) - model.all_kv_bytes(2 * 7, 2)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (MACHINE, ""),
        ("RTX 4090 + Ryzen 9 9950X + 128GB DDR5-5600", "fits in the GPU"),
        ("RTX 3060 + Ryzen 7 5700X + 16GB DDR4", "needs "),
    ],
)
def test_settings_without_anything_to_offload_or_room_for_it_are_left_out(tmp_path: Path, machine: str, why: str):
    one = settings_of(
        _made(tmp_path, model={"base": "mixtral-8x7b", "expert_bits": 3.5, "other_bits": 4}, hardware=machine), "x"
    )[0]
    assert why in one.left_out and bool(why) == bool(one.left_out)


RATE = "devices.gpu0.memory_bytes_per_s"


def test_a_draw_of_costs_moves_all_numbers_within_their_intervals_and_the_same_for_all_systems(tmp_path: Path):
    raw = settings_of(_made(tmp_path), "x")[0].draws[0]
    systems = [System({}, "a", True, "llama.cpp"), System({}, "b", True, "freetoken")]
    plain = [load_hardware(MACHINE, "x", one.costs_of) for one in systems]
    assert costed(raw, systems[0], 0, "x")["hardware"] == {"base": MACHINE}
    parts = set()
    for draw in range(1, COST_DRAWS + 1):
        drawn = [load_hardware((made := costed(raw, one, draw, "x"))["hardware"], "x", made["engine"]) for one in systems]
        places = []
        for before, after in zip(plain, drawn, strict=True):
            for key, number in before.numbers.items():
                if number.interval is None or key.endswith("_bytes"):
                    assert after.numbers[key].value == number.value
                else:
                    assert number.interval[0] <= after.numbers[key].value <= number.interval[1]
            low, high = before.numbers[RATE].interval
            places.append(math.log(after.numbers[RATE].value / low) / math.log(high / low))
        assert places[0] == pytest.approx(places[1], abs=1e-6)
        parts.add(int(COST_DRAWS * places[0]))
    assert parts == set(range(COST_DRAWS))


def test_a_rule_is_charged_for_what_caches_of_the_stated_engine_do_in_each_layer(tmp_path: Path):
    systems, out = systems_of(_made(tmp_path), "x")
    assert [one.label for one in systems if one.released] == ENGINES
    assert list(out) == ["daop-paper"]
    rule = next(one for one in systems if one.label == "lru")
    made = costed(settings_of(_made(tmp_path), "x")[0].draws[0], rule, 0, "x")
    host = load_hardware(MACHINE, "x", ENGINE).host_us
    charged = load_hardware(made["hardware"], "x", made["engine"]).devices["gpu0"].router_us
    assert (made["engine"], float(charged)) == (ENGINE, pytest.approx(float(host["readback"] + host["plan"])))


# --------------------------------------------------------------------------------------------------------------- the league


def test_the_best_of_the_table_is_the_fastest_of_plain_runs_among_engines_and_among_rules(found: League, tmp_path: Path):
    asked = small(tmp_path, policies=ENGINES, workload=WORK, hardware=MACHINE, engine=ENGINE)
    rows = moesim.run(asked, progress=False).table
    assert len(found.cells) == 4
    for one in found.cells:
        mine = rows[rows["batch_size"] == one.setting.batch]
        speed = mine["decode_tokens_per_s"] if one.phase == "decode" else 1e9 / mine["ttft_mean_ns"]
        means = speed.groupby(mine["policy"]).agg(lambda values: float(values.prod()) ** (1 / len(values)))
        assert one.released is not None and one.rules is not None
        assert (one.released.best, one.released.speed) == (means.idxmax(), pytest.approx(means.max()))
        assert one.released.second in ENGINES
        assert {one.rules.best, one.rules.second} <= set(RULES)
        assert record(one)["rule_over_best"] == pytest.approx(one.rules.speed / one.released.speed)


def test_a_rank_is_by_how_many_times_slower_a_system_is_than_the_fastest_of_its_kind(found: League):
    assert {one.system for one in found.released} == set(ENGINES)
    assert {one.system for one in found.rules} == set(RULES)
    for ranks in (found.released, found.rules):
        assert ranks[0].batch_size == ranks[0].median == 1
    assert "rules, if built, batch 2" in table(found, Format.TABLE)
    assert "left out: daop-paper: it changes" in table(found, Format.TABLE)


# -------------------------------------------------------------------------------------------------------------- the command


def test_a_league_that_was_done_is_found_and_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    work = {"batch_size": 1, "prompt_tokens": 6, "decode_tokens": 2, "seed": [0, 1]}
    file, out = write_yaml(tmp_path, policies=[*ENGINES, "lru"], workload=work, hardware=MACHINE), tmp_path / "out"
    said, files = [], []
    for _ in range(2):
        league(file, out=out, jobs=1, form=Format.MD)
        said.append(capsys.readouterr().out)
        files.append({path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.suffix != ".jsonl"})
    assert set(files[0]) == {"league.csv", "crossover.png", "crossover.pdf", "crossover.txt"}
    assert files[0] == files[1]
    n_runs = said[0].splitlines()[-1].split()[0]
    assert said[0].replace("of which 0", f"of which {n_runs}") == said[1]


def test_a_machine_and_a_model_take_the_place_of_the_experiments(capsys: pytest.CaptureFixture[str]):
    few = ["policies=[llama-cpp-fit, lru]", "workload.prompt_tokens=4"]
    league(hardware=MACHINE, model="mixtral-8x7b", overrides=few, small=True, jobs=1, form=Format.JSON)
    rows = json.loads(capsys.readouterr().out)
    assert {(row["hardware"], row["phase"]) for row in rows} == {
        ("rtx-3060+ryzen-7-5700x+64gb-ddr4-3200", "decode"),
        ("rtx-3060+ryzen-7-5700x+64gb-ddr4-3200", "prompt"),
    }
    assert rows[0]["model"] == "mixtral-8x7b (expert_bits=4.85, other_bits=5.35)"
    assert rows[0]["routings"] == 3


def test_the_shipped_league_has_settings_on_each_machine_but_the_one_that_has_room_for_all():
    met = [one for one in settings_of(load_config(Path("league")), "league") if not one.left_out]
    machines = {one.hardware.partition("+")[0] for one in met}
    assert machines == {"rtx-4060-laptop", "rtx-3060", "rtx-5070", "rtx-4090", "l40s"}
    assert {one.batch for one in met} == {1, 4, 16}


def test_all_that_is_wrong_is_said_before_anything_runs(tmp_path: Path):
    file = write_yaml(tmp_path, policies=["llama-cpp-fit"], hardware=MACHINE, trace=["missing-one", "missing-two"])
    with pytest.raises(ConfigError, match=r"missing-one.*missing-two"):
        league(file, out=tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()


def test_who_runs_nowhere_is_named_with_the_reason_and_nobody_at_all_is_an_error(tmp_path: Path):
    """exllamav3 has no backend for this GPU; 100 MB are too few for everybody."""
    systems = ["llama-cpp-fit", "exllamav3"]
    amd = _config(tmp_path, policies=systems, hardware="RX 6700 XT + Ryzen 7 5800X + 64GB DDR4-3200")
    never = meet(amd, "small.yaml", jobs=1).never
    assert list(never) == ["exllamav3"] and "which runs on cuda" in never["exllamav3"]
    none = _config(tmp_path, cache={"budget": "100 MB"})
    with pytest.raises(ConfigError, match=r"small\.yaml: expected a system that runs in some setting, got none: .*budget"):
        meet(none, "small.yaml", jobs=1)


def test_what_it_waited_for_is_of_the_phase():
    row = {"n_decode_tokens": 4, "time_gpu_experts_ns": 60, "time_exposed_demand_ns": 50,
           "decode_time_gpu_experts_ns": 55, "decode_time_exposed_demand_ns": 10}  # fmt: skip
    assert waited(row) == waited(row, "decode") == "GPU experts 85%"
    assert waited(row, "prompt") == "demand fetch 89%"  # 40 of 45
