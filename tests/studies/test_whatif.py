"""What-if: closed forms, limits, where the limit changes, the command, and what it prints and refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from moesim.cli.whatif import whatif as command
from moesim.core.record_table import RecordTable
from moesim.core.table import Format
from moesim.errors import ConfigError, InputError
from moesim.experiment.config import parse_config
from moesim.experiment.runner import run_one
from moesim.hardware import load_hardware
from moesim.metrics.breakdown import CAUSES, Breakdown, Window
from moesim.model import load_model
from moesim.records import Records, StepRecord
from moesim.studies.whatif.knobs import KNOBS, change
from moesim.studies.whatif.limits import RESOURCES, Limits, limits_of
from moesim.studies.whatif.settings import Base, Changed, parse_vary, single
from moesim.studies.whatif.show import knob_table, table
from moesim.studies.whatif.study import RATES, Crossing, Line, Runs, Shot, halved_and_doubled, records, search, whatif
from tests.experiment.experiment_kit import resolve, small, write_yaml

MODEL = load_model({"base": "mixtral-8x7b", "expert_bits": 4})
BYTES = MODEL.expert_bytes(0)
RATE = BYTES * 1000  # an expert takes a millisecond
INSTANT = 1e17
ROUTER_US = 500.0  # of each layer, on the GPU's side: nothing makes it faster
FREE = {
    "base": "rtx3090-epyc7532",
    **{f"devices.gpu0.{key}": INSTANT for key in ("memory_bytes_per_s", "flops")},
    "devices.gpu0.launch_us": 0, "devices.gpu0.router_us": ROUTER_US, "devices.gpu0.experts": [],
    **{f"links.{link}.{curve}.latency_us": 0 for link in ("cpu0->gpu0", "gpu0->cpu0") for curve in ("pinned", "activation")},
    "links.cpu0->gpu0.pinned.bytes_per_s": RATE,
}  # fmt: skip
"""A machine where nothing takes time but copies of experts, a millisecond each, and the router's way, half of one a layer."""


def base(folder: Path, **changes: Any) -> Base:
    return single(parse_config(small(folder, **changes), "small.yaml"), "small.yaml")


def lines_of(one: Base, *vary: str, **options: Any) -> list[Line]:
    return whatif(one, [together for text in vary for together in parse_vary(text)], **options)


def linked(folder: Path, **changes: Any) -> Base:
    return base(folder, **{"hardware": FREE, "policies": ["on-demand"], **changes})


# ------------------------------------------------------------------------------------------------------------- closed form


def test_doubling_the_link_halves_what_waits_for_it(tmp_path: Path):
    """On demand, batch 1: 2 experts a layer, one copy after the other, and nothing else but the router's way."""
    as_is, half, double = lines_of(linked(tmp_path), "link.bytes_per_s x0.5,x2", look=False)
    layer_s = {line.name: 2e-3 / float(line.changed.factor or 1) + ROUTER_US * 1e-6 for line in (as_is, half, double)}
    for line in (as_is, half, double):
        expected = 1 / (MODEL.n_layers * layer_s[line.name])
        assert line.shot.row["decode_tokens_per_s"] == pytest.approx(expected, rel=1e-5), line.name
        assert line.shot.limits is not None
        assert line.shot.limits.shares["link"] == pytest.approx(1 - ROUTER_US * 1e-6 / layer_s[line.name], rel=1e-4)
    assert double.change("decode_tokens_per_s") == pytest.approx(2.5 / 1.5 - 1, rel=1e-4)
    bound = linked(tmp_path, hardware={**FREE, "devices.gpu0.router_us": 0})
    _, twice = lines_of(bound, "link.bytes_per_s x2", look=False)
    assert twice.change("decode_tokens_per_s") == pytest.approx(1, rel=1e-4)
    assert twice.change("ttft_mean_ns") == pytest.approx(-0.5, rel=1e-4)


def test_the_limit_changes_where_it_must(tmp_path: Path):
    """2 ms of copies a layer against 0.7: the link is the limit until it is 2 / 0.7 times as fast."""
    _, line = lines_of(linked(tmp_path, hardware={**FREE, "devices.gpu0.router_us": 700}), "link.bytes_per_s x2")
    assert line.crossing is not None
    assert (line.base.limits or Limits({})).limit == "link"
    assert line.crossing.limit == "GPU launches"
    assert 2 / 0.7 <= line.crossing.factor <= 2 / 0.7 * 1.05
    assert line.at == pytest.approx(float(line.crossing.factor) * RATE)
    record = line.record()
    assert (record["next_limit"], record["next_factor"]) == ("GPU launches", float(line.crossing.factor))


def test_no_change_is_said_with_how_far_it_was_looked_for(tmp_path: Path):
    _, slower, memory = lines_of(linked(tmp_path), "link.bytes_per_s x0.5", "gpu.memory_bandwidth x2")
    assert slower.crossing == Crossing(None, Fraction(1, 8))
    assert memory.effect == "not limiting"
    assert memory.crossing == Crossing(None, Fraction(8))


def test_a_search_ends_where_it_cannot_be_carried_out(tmp_path: Path):
    _, batch = lines_of(linked(tmp_path, workload={"batch_size": 3, "decode_tokens": 2}), "batch x2")
    assert batch.crossing is not None
    assert (batch.crossing.limit, batch.crossing.factor) == (None, 2)  # the trace has 8 requests
    assert "requests" in batch.crossing.error
    _, cache = lines_of(linked(tmp_path, cache={"ratio": 0.5}, policies=["lru"]), "cache x1.5")
    assert cache.crossing is not None
    assert (cache.crossing.limit, cache.crossing.factor) == (None, 1)  # all experts do not fit into 24 GiB
    assert "needs" in cache.crossing.error


def test_a_search_among_whole_numbers_stops_between_two():
    asking, asked = search("link", up=True), []
    factor = next(asking)
    with pytest.raises(StopIteration) as end:
        for _ in range(20):
            asked.append(factor)
            whole = Fraction(round(factor))
            factor = asking.send(Crossing("link" if whole < 3 else "CPU", whole))
    assert end.value.value == Crossing("CPU", Fraction(3))
    assert len(asked) < 8


def test_a_search_goes_no_further_than_its_reach():
    asking = search("link", up=True, reach=Fraction(3))
    asked = [next(asking)]
    with pytest.raises(StopIteration) as end:
        while True:
            asked.append(asking.send(Crossing("link", asked[-1])))
    assert asked == [2, 3]
    assert end.value.value == Crossing(None, Fraction(3))


# ------------------------------------------------------------------------------------------------------------------ limits


def test_the_limit_is_the_largest_resource_of_the_largest_part():
    shares = {"link": 0.4, "CPU memory": 0.3, "CPU compute": 0.25, "GPU memory": 0.05}
    assert Limits(shares).limit == "CPU memory"
    assert Limits(shares).text() == "link 40 %, CPU memory 30 %, CPU compute 25 %"
    assert Limits({"link": 0.5, "GPU memory": 0.5}).limit == "link"


BOUND = {
    "CPU memory": {"devices.cpu0.memory_bytes_per_s": 1e9},
    "CPU compute": {"devices.cpu0.expert_cost.few_row_flops": 1e9},
    "GPU memory": {"devices.gpu0.memory_bytes_per_s": 1e8, "devices.gpu0.experts": []},
    "GPU compute": {"devices.gpu0.flops": 1e7, "devices.gpu0.experts": []},
    "GPU launches": {"devices.gpu0.launch_us": 1e5},
    "activations": {"links.cpu0->gpu0.activation.latency_us": 1e6},
}


@pytest.mark.parametrize("resource", list(BOUND))
def test_a_machine_with_one_slow_part_is_limited_by_it(tmp_path: Path, resource: str):
    hardware = {"base": "rtx3090-epyc7532", **BOUND[resource]}
    # llama.cpp decides beforehand what the CPU computes, however slow that is.
    experiment = resolve(tmp_path, hardware=hardware, policies=["llama-cpp"], engine="machine",
        workload={"decode_tokens": 2, "batch_size": 2},
    )  # fmt: skip
    (spec,) = experiment.specs
    outcome = run_one(experiment, spec, keep=True)
    assert outcome.failure is None
    limits = limits_of(experiment, spec, outcome)
    assert limits.limit == resource
    assert limits.shares[resource] > 0.6
    assert sum(limits.shares.values()) == pytest.approx(1)
    assert list(limits.shares) == list(RESOURCES)


@pytest.mark.parametrize(
    ("cause", "resource"),
    [
        ("exposed_demand", "link"), ("exposed_prefetch", "link"), ("exposed_other_transfer", "link"),
        ("activation", "activations"), ("decision", "decisions"), ("predict", "predictor"), ("idle", "waiting"),
    ],
)  # fmt: skip
def test_causes_that_are_a_resource(tmp_path: Path, cause: str, resource: str):
    """A decode step of 10 ns next to a prefill of 90 that does not count."""
    experiment = resolve(tmp_path, policies=["lru"])
    outcome = run_one(experiment, experiment.specs[0], keep=True)
    steps = [StepRecord(0, 90, 0, "prefill", 0, 6, 1, 0.0), StepRecord(90, 100, 1, "decode", 0, 1, 1, 0.0)]
    ns = np.zeros((2, len(CAUSES)), np.int64)
    ns[0, CAUSES.index("dense")], ns[1, CAUSES.index(cause)] = 90, 10
    split = Breakdown(RecordTable(Window, [Window(0, 90, 0, 0), Window(90, 100, 1, 0)]), ns)
    made = replace(outcome, records=Records(steps=RecordTable(StepRecord, steps), makespan_ns=100), split=split)
    limits = limits_of(experiment, experiment.specs[0], made)
    assert limits.shares[resource] == 1
    assert limits.limit == resource


@pytest.mark.parametrize("hardware", ["a6000-xeon5220r", {"base": "rtx3090-epyc7532", "devices.gpu0.memory_bytes": "48 GiB"}])
def test_the_share_of_memory_is_what_faster_memory_saves(tmp_path: Path, hardware: Any):
    """All experts on the GPU: launches stay whatever the memory does, so they are none of its share."""
    one = base(tmp_path, hardware=hardware, policies=["all-gpu"], cache={"ratio": 1.0})
    as_is, fast = lines_of(one, "gpu.memory_bandwidth x1000", look=False)
    assert as_is.shot.limits is not None
    shares = as_is.shot.limits.shares
    saved = 1 - float(as_is.shot.row["decode_tokens_per_s"] or 0) / float(fast.shot.row["decode_tokens_per_s"] or 0)
    assert 0.1 < saved < 0.2
    assert shares["GPU memory"] == pytest.approx(saved, abs=0.005)
    assert shares["GPU launches"] == pytest.approx(1 - saved, abs=0.005)
    assert sum(shares.values()) == pytest.approx(1)


def test_where_reading_and_computing_take_equally_long_each_is_half(tmp_path: Path):
    """Neither alone saves anything: the CPU's experts by a roofline, with operations as slow as their weights are read."""
    ratio = 2 * MODEL.expert_params / MODEL.expert_bytes(0)
    slow = {"devices.cpu0.memory_bytes_per_s": 1e9, "devices.cpu0.flops": ratio * 1e9, "devices.cpu0.expert_cost": None}
    experiment = resolve(tmp_path, hardware={"base": "rtx3090-epyc7532", **slow}, policies=["llama-cpp"])
    outcome = run_one(experiment, experiment.specs[0], keep=True)
    shares = limits_of(experiment, experiment.specs[0], outcome).shares
    assert shares["CPU memory"] > 0.4
    assert shares["CPU memory"] == pytest.approx(shares["CPU compute"], rel=0.05)


def test_a_decision_that_takes_time_is_a_limit(tmp_path: Path):
    experiment = resolve(tmp_path, decision_us=1e6, policies=["lru"])
    outcome = run_one(experiment, experiment.specs[0], keep=True)
    assert limits_of(experiment, experiment.specs[0], outcome).limit == "decisions"


# ----------------------------------------------------------------------------------------------------------------- effects


def test_what_changes_nothing_says_which_way(tmp_path: Path):
    one = base(tmp_path, policies=["lru", "fiddler"])
    lines = lines_of(one, "cpu.memory_bandwidth x2", "link.bytes_per_s x1", look=False)
    effects = {(line.policy, line.name): line.effect for line in lines}
    assert effects["lru", "cpu.memory_bandwidth x2"] == "not used"  # it never computes on the CPU
    assert effects["fiddler", "cpu.memory_bandwidth x2"] == "changed"
    assert effects["lru", "link.bytes_per_s x1"] == effects["lru", "as it is"] == "same"
    text = table(lines, Format.TABLE)
    assert "none: not used" in text


def test_a_change_of_the_kind_of_cost_is_marked(tmp_path: Path):
    """The profile has a curve of 4-bit experts on its GPU and none of 6-bit ones."""
    _, line = lines_of(base(tmp_path, policies=["lru"]), "model.expert_bits 6", look=False)
    assert line.uneven == ("expert @gpu0",)
    text = table([line], Format.TABLE)
    assert "* model.expert_bits 6: expert @gpu0" in text
    assert " %*" in text


def test_a_faster_part_that_makes_it_slower_is_pointed_out(tmp_path: Path):
    as_is, line = lines_of(base(tmp_path, policies=["lru"]), "link.bytes_per_s x2", look=False)
    assert not line.anomalies
    swapped = replace(line, base=line.shot, shot=line.base)
    assert swapped.anomalies
    first = replace(
        line, shot=replace(line.shot, row={**line.shot.row, "ttft_mean_ns": 2 * float(line.base.row["ttft_mean_ns"] or 0)})
    )
    assert first.anomalies
    assert "a schedule's anomaly, or memory that two share: lru, link.bytes_per_s x2" in table([as_is, swapped], Format.TABLE)


def test_a_setting_that_fails_is_a_row(tmp_path: Path):
    as_is, failed = lines_of(base(tmp_path, policies=["lru"]), "batch 99")
    assert (as_is.effect, failed.effect) == ("same", "failed")
    assert failed.record()["error"]
    assert failed.record()["decode_tokens_per_s"] is None


def test_an_experiment_that_fails_as_it_is_is_an_error(tmp_path: Path):
    with pytest.raises(InputError, match="lru"):
        lines_of(base(tmp_path, policies=["lru"], cache={"ratio": 1.0}, model="mixtral-8x7b"), "batch 2")


# -------------------------------------------------------------------------------------------------------------------- runs


def test_equal_runs_are_simulated_once_whatever_the_words_beside_their_numbers():
    calls: list[tuple[str, int]] = []

    def simulate(works: Sequence[tuple[Mapping[str, Any], int]]) -> list[Shot]:
        calls.extend((json.dumps(raw), index) for raw, index in works)
        return [Shot({"policy": "p"}, None, frozenset())] * len(works)

    def raw(why: str, value: float) -> dict[str, Any]:
        return {"hardware": {"base": "x", "devices.cpu0.flops": {"value": value, "source": "derived", "how": why}}}

    with Runs("x.yaml", 1, False, simulate) as runs:
        runs.shots([(raw("a", 1.0), 0), (raw("b", 1.0), 0), (raw("a", 2.0), 0), (raw("a", 1.0), 1)])
        runs.shots([(raw("c", 2.0), 0)])
        assert len(calls) == 3


def test_without_anything_to_vary_the_machine_is(tmp_path: Path):
    found = halved_and_doubled(base(tmp_path))
    assert [str(one) for (one,) in found] == [f"{knob} {by}" for knob in RATES for by in ("x0.5", "x2")]


# ----------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def cli() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("whatif")(command)
    return app


def call(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value or 0), result.stdout


def test_the_command(tmp_path: Path, cli: typer.Typer):
    path = write_yaml(tmp_path, policies=["lru", "fiddler"])
    out = tmp_path / "out"
    code, text = call(
        cli, str(path), "--vary", "link.bytes_per_s x0.5,x2", "--vary", "pcie gen5 & cache 0.5", "--no-next", "--out", str(out)
    )
    assert code == 0
    rows = text.splitlines()
    assert sum(row.startswith("lru") for row in rows) == sum(row.startswith("fiddler") for row in rows) == 4
    assert "pcie gen5 & cache 0.5: PCIe 4.0 x16 to 5.0 x16" in text
    frame = pd.read_parquet(out / "whatif.parquet")
    contract = {
        "policy", "knob", "setting", "factor", "decode_tokens_per_s", "base_decode_tokens_per_s", "limit", "base_limit",
        "source_label", "model", "hardware", "trace", "cache_ratio",
    }  # fmt: skip
    assert contract <= set(frame.columns)
    assert len(frame) == 6
    assert frame["factor"].isna().tolist() == [False, False, True] * 2
    assert frame["source_label"].notna().all()
    assert len(pd.read_csv(out / "whatif.csv")) == 6
    assert frame["next_limit"].isna().all()


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "md"])
def test_forms(tmp_path: Path, cli: typer.Typer, form: str):
    path = write_yaml(tmp_path, policies=["lru"])
    _, text = call(cli, str(path), "--quick", "--vary", "link.bytes_per_s x2", "-o", form)
    if form == "md":
        assert text.startswith("| policy | what if |")
        return
    if form == "csv":
        (row,) = pd.read_csv(pd.io.common.StringIO(text)).to_dict("records")  # type: ignore[attr-defined]
    else:
        (row,) = json.loads(text) if form == "json" else [json.loads(line) for line in text.splitlines()]
    assert (row["policy"], row["knob"], row["setting"], row["factor"]) == ("lru", "link.bytes_per_s", "x2", 2)
    assert row["base_limit"] == "link"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected an experiment, or model with hardware"),
        (["small.yaml", "--vary", "nothing x2"], "unknown knob 'nothing'"),
        (["small.yaml", "--set", "cache.ratio=[0.25,0.5]"], "--set cache.ratio=0.25"),
        (["absent.yaml"], "expected an experiment file"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(
    tmp_path: Path, cli: typer.Typer, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], words: str
):
    write_yaml(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        call(cli, *arguments, "--out", "made")
    assert words in (error.value.of_command or str(error.value))
    assert "\n" not in str(error.value)
    assert not Path("made").exists()


def test_the_table_of_knobs_lists_them_all(cli: typer.Typer):
    code, text = call(cli, "--knobs")
    assert code == 0
    assert all(name in text for name in KNOBS)
    assert len(json.loads(knob_table(Format.JSON))) == len(KNOBS) + 2


LINK = "links.cpu0->gpu0.pinned.bytes_per_s"


def settings(*vary: str) -> list[Any]:
    return [together for text in vary for together in parse_vary(text)]


def vary(one: Base, text: str) -> Changed:
    (together,) = parse_vary(text)
    return change(one, together)


def unsearched(one: Base, *texts: str) -> list[Line]:
    return whatif(one, settings(*texts), look=False)


def rows_of(text: str) -> dict[str, str]:
    """Give the lines of a table that begin with a policy, by policy and what was varied."""
    found = [re.split(r"\s{2,}", line) for line in text.splitlines() if re.match(r"(lru|belady|daop|fiddler)", line)]
    return {f"{cells[0]}: {cells[1]}": "  ".join(cells) for cells in found}


# ----------------------------------------------------------------------------------------------- exactness and oracles


def test_a_policy_that_is_not_exact_says_how_much_is(tmp_path: Path):
    lines = unsearched(base(tmp_path, policies=["lru", "daop-paper"]), "link.bytes_per_s x2")
    text = table(lines, Format.TABLE)
    share = {line.policy: line.fresh for line in lines if not line.settings}
    assert share["lru"] == 1
    assert share["daop-paper"] is not None
    assert share["daop-paper"] < 1
    rows = rows_of(text)
    assert f"{math.floor(1000 * share['daop-paper']) / 10:.1f}*" in rows["daop-paper: as it is"]  # rounded down
    assert "  100  " in rows["lru: as it is"]
    assert "fresh %" in text.splitlines()[0]
    assert "* in fresh %: not exact" in text
    (exact, other) = records(lines)
    assert (exact["fidelity_fresh_decode"], other["base_fidelity_fresh_decode"]) == (1, share["daop-paper"])


# ------------------------------------------------------------------------------------------------------- what it is about


def printed(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_setting_as_it_is_is_named_and_quick_says_so(tmp_path: Path, cli: typer.Typer):
    path = write_yaml(tmp_path, policies=["lru"], cache={"ratio": [0.25, 0.5]}, workload={"prompt_tokens": 5, "decode_tokens": 3})
    arguments = (str(path), "--vary", "batch 2", "--no-next")
    quickly = printed(cli, *arguments, "--quick")
    whole = printed(cli, *arguments, "--set", "cache.ratio=0.5")
    for text, cache in ((quickly, "0.25"), (whole, "0.5")):
        (line,) = (line for line in text.splitlines() if line.startswith("as it is:"))
        assert set(line.removeprefix("as it is: ").split(", ")) == {"batch 1", f"cache {cache}", "prompt 5", "decode 3"}
    made = "made small by --quick: these numbers say nothing about the experiment"
    assert made in quickly
    assert made not in whole
    assert '"quick":true' in printed(cli, *arguments, "--quick", "-o", "jsonl").replace(" ", "")


def test_a_budget_is_a_size(tmp_path: Path):
    text = table(unsearched(base(tmp_path, policies=["lru"], cache={"budget": "8 GB"})), Format.TABLE)
    assert "cache 8 GB" in text


# ------------------------------------------------------------------------------------------------- values that were used


def test_a_factor_of_a_whole_number_says_what_it_came_to(tmp_path: Path):
    lines = unsearched(base(tmp_path, policies=["lru"]), "batch x2,+160%", "cache x2 & batch x4", "batch 6")
    assert [line.name for line in lines] == [
        "as it is", "batch x2 = batch 2", "batch +160% = batch 3", "cache x2 = cache 0.5 & batch x4 = batch 4", "batch 6",
    ]  # fmt: skip
    assert "batch x2 = batch 2" in table(lines, Format.TABLE)
    assert "tok/s, batch 1" in table(lines[:1], Format.TABLE) and "tok/s, batch" not in table(lines, Format.TABLE)
    assert [record["setting"] for record in records(lines)][:2] == ["x2", "+160%"]
    assert [record["value"] for record in records(lines)][:2] == ["batch 2", "batch 3"]


@pytest.mark.parametrize("text", ["batch x1.2", "batch x0.5", "workload.batch_size x1.4", "devices.gpu0.launches.expert x1.01"])
def test_a_factor_that_comes_to_what_is_there_is_refused(tmp_path: Path, text: str):
    with pytest.raises(InputError, match="expected a factor that comes to another whole number than the") as error:
        vary(base(tmp_path), text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("texts", [["batch x1.6,x2"], ["batch 2", "batch x2"], ["cache 0.5,x2"], ["batch x2 & cache 0.5,x2"]])
def test_two_that_come_to_the_same_are_refused(tmp_path: Path, texts: list[str]):
    with pytest.raises(InputError, match="for both; leave one out"):
        unsearched(base(tmp_path), *texts)


# ------------------------------------------------------------------------------------------------------ figures and marks


def with_row(line: Line, **changes: float) -> Line:
    factors = {key: float(line.base.row[key] or 0) * factor for key, factor in changes.items()}
    return replace(line, shot=replace(line.shot, row={**line.shot.row, **factors}))


def test_an_anomaly_is_marked_where_it_is(tmp_path: Path):
    as_is, line = unsearched(base(tmp_path, policies=["lru"]), "link.bytes_per_s x2")
    slower = with_row(line, decode_tokens_per_s=0.9, ttft_mean_ns=0.5)
    later = with_row(line, decode_tokens_per_s=1.5, ttft_mean_ns=1.1)
    (first,) = rows_of(table([slower], Format.TABLE)).values()
    (second,) = rows_of(table([later], Format.TABLE)).values()
    assert "-10.0 % !" in first
    assert "-50.0 % !" not in first
    assert "+10.0 % !" in second
    assert second.count("!") == first.count("!") == 1
    assert "!" not in table([as_is, line], Format.TABLE)
    assert slower.record()["anomalies"] == "decode_tokens_per_s"


# ------------------------------------------------------------------------------------------------------ units and bounds


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("link.bytes_per_s 50GB/s", LINK, 50e9),
        ("link.bytes_per_s 50 GB/s", LINK, 50e9),
        (f"{LINK} 20 GiB/s", LINK, 20 * 2**30),
        ("cpu.memory_bandwidth 0.2 TB/s", "devices.cpu0.memory_bytes_per_s", 0.2e12),
        ("hardware.devices.cpu0.memory_bytes 512 GB", "devices.cpu0.memory_bytes", 512e9),
    ],
)
def test_rates_have_their_unit(tmp_path: Path, text: str, key: str, value: float):
    one = base(tmp_path)
    changed = vary(one, text)
    number = load_hardware(changed.raw["hardware"]).numbers[key]
    assert float(number.value) == pytest.approx(value)  # type: ignore[arg-type]
    assert number.source == "assumed"
    before = one.profile.numbers[key].value
    assert not isinstance(before, list)
    assert float(changed.factor or 0) == pytest.approx(value / float(before))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link.bytes_per_s 1e30", "expected x1/1000 to x1000 of what is there ("),
        ("link.bytes_per_s 50", "expected x1/1000 to x1000 of what is there ("),
        ("link.bytes_per_s x1e9", "expected x1/1000 to x1000"),
        ("link.bytes_per_s x0.0001", "expected x1/1000 to x1000"),
        ("cpu.memory_bandwidth 1 B/s", "expected x1/1000 to x1000"),
        (f"{LINK} 50", "expected x1/1000 to x1000"),
        ("devices.gpu0.launch_us 1e9", "expected x1/1000 to x1000"),
        ("cpu.memory 8xDDR4-99999999", "expected x1/1000 to x1000 of what is there, got"),
        ("batch x5000", "expected x1/1000 to x1000"),
        ("link.bytes_per_s 50GB", "a rate has its unit as in '50 GB/s'"),
        ("link.bytes_per_s 50/s", "expected a size with a unit"),
        ("link.bytes_per_s 50 Gb it/s", "expected a size"),
        ("hardware.devices.cpu0.memory_bytes 5 GeB", "expected a size"),
        ("devices.gpu0.launch_us -1", "--vary devices.gpu0.launch_us -1: small.yaml: hardware: "),
        ("workload.bach 2", "--vary workload.bach 2: "),
    ],
)
def test_what_cannot_be_is_a_wrong_input_before_anything_runs(tmp_path: Path, text: str, words: str):
    with pytest.raises(InputError) as error:
        vary(base(tmp_path), text)
    assert words in str(error.value)
    assert text in str(error.value)
    assert "contention" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_thousand_times_as_much_is_still_a_machine(tmp_path: Path):
    one = base(tmp_path)
    for factor in (Fraction(1000), Fraction(1, 1000)):
        changed = vary(one, f"link.bytes_per_s x{float(factor):g}")
        assert changed.factor == factor
        assert load_hardware(changed.raw["hardware"]).contention
