"""How far results move over the intervals of a profile's numbers, and a cache of no expert."""

from __future__ import annotations

from typing import Any

from moesim.experiment.config import parse_config
from moesim.experiment.report import split_notes
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.runner import ENERGY, ENERGY_LEAST, ENERGY_MOST, LEAST, MOST, SPEED, Ends, vary

SLOPE = "devices.cpu0.expert_cost.few_row_flops"


def rows(policies: list[Any], *, hardware: Any = "rtx3090-epyc7532", batch: int = 4, **more: Any) -> list[dict[str, Any]]:
    raw = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": hardware, "trace": "mini-mixtral", "policies": policies,
        "workload": {"batch_size": batch, "prompt_tokens": 4, "decode_tokens": 4}, "cache": {"ratio": 0.5},
    }  # fmt: skip
    return run_experiment(Experiment(parse_config(raw | more, "x.yaml"), "x.yaml")).rows


def test_a_run_is_repeated_at_both_ends_of_the_slope():
    found = rows(["llama-cpp", "lru"], intervals=True)
    ends = [rows(["llama-cpp"], hardware={"base": "rtx3090-epyc7532", SLOPE: value})[0][SPEED] for value in (41e9, 234e9)]
    assert [found[0][LEAST], found[0][MOST]] == ends
    low, high = (round(100 * (end / found[0][SPEED] - 1)) for end in ends)
    assert low < 0 < high
    told = "; ".join(split_notes(found[0])[0])
    assert f"speed {low:+d} to {high:+d} % over cpu0.expert_cost.few_row_flops 41 to 234 GFLOP/s" in told
    assert found[1][LEAST] is None  # lru never computes on the CPU
    assert not any("speed" in note for note in split_notes(found[1])[0])


def test_watts_with_an_interval_move_the_energy():
    idle = "devices.cpu0.idle_w"
    (found,) = rows(["lru"], intervals=True)
    ends = [rows(["lru"], hardware={"base": "rtx3090-epyc7532", idle: value})[0][ENERGY] for value in (40, 110)]
    assert ends[0] < found[ENERGY] < ends[1]
    assert [found[ENERGY_LEAST], found[ENERGY_MOST]] == ends
    low, high = (round(100 * (end / found[ENERGY] - 1)) for end in ends)
    assert f"energy {low:+d} to {high:+d} % over cpu0.idle_w 40 to 110 W" in "; ".join(split_notes(found)[0])
    assert found[LEAST] is None  # no time depends on a number with an interval


def test_a_number_that_moves_nothing_is_not_told_of():
    def again(machine: Any) -> dict[str, float]:
        return {SPEED: machine}

    ends: Any = [Ends("devices.gpu0.operation_us", (1.1, 3.0), (100.3, 99.8)), Ends(SLOPE, (41e9, 2.5e12), (99.7, 104.0))]
    found = vary(ends, [end.key for end in ends], {SPEED: 100.0}, again)
    assert found["varied"] == "speed 0 to +4 % over cpu0.expert_cost.few_row_flops 41 to 2,500 GFLOP/s"
    assert (found[LEAST], found[MOST]) == (99.7, 104.0)
    assert vary(ends[::-1], [end.key for end in ends], {SPEED: 100.0}, again) == found  # each number by itself
    lower: Any = [Ends("devices.gpu0.operation_us", (1.1, 3.0), (99.4, 99.6))]
    told = vary(lower, [lower[0].key], {SPEED: 100.0}, again)["varied"]
    assert told == "speed -1 to 0 % over gpu0.operation_us 1.1 to 3 us"
    upper: Any = [Ends("devices.gpu0.operation_us", (1.1, 3.0), (100.4, 100.6))]
    told = vary(upper, [upper[0].key], {SPEED: 100.0}, again)["varied"]
    assert told == "speed 0 to +1 % over gpu0.operation_us 1.1 to 3 us"
    nothing = {LEAST: None, MOST: None, ENERGY_LEAST: None, ENERGY_MOST: None, "varied": ""}
    assert vary(upper, [upper[0].key], {SPEED: None}, again) == vary([], [], {SPEED: 100.0}, again) == nothing
    assert vary(upper, [], {SPEED: 100.0}, again) == nothing  # the run does not use it
    assert vary(upper, [], {SPEED: 100.0, ENERGY: 5.0}, again) == nothing  # nor is it power
    stopped = vary(upper, [upper[0].key], {SPEED: 100.0, ENERGY: 5.0}, lambda machine: {SPEED: machine, ENERGY: None})
    assert (stopped[MOST], stopped[ENERGY_LEAST], stopped[ENERGY_MOST]) == (100.6, 0.0, 5.0)


def test_one_row_an_expert_uses_no_slope():
    assert (
        rows(["all-cpu"], batch=1, intervals=True, workload={"batch_size": 1, "prompt_tokens": 1, "decode_tokens": 4})[0][LEAST]
        is None
    )


def test_what_was_not_varied_is_said():
    notes, costs = split_notes(rows(["llama-cpp"], engine="machine")[0])
    assert costs == ["interval not varied (set intervals: true): cpu0.expert_cost.few_row_flops 41 to 234 GFLOP/s"]
    assert not any("interval" in note for note in notes)


def test_a_sweep_of_the_slope_changes_results():
    found = rows(["llama-cpp"], hardware={"base": "rtx3090-epyc7532", SLOPE: [41e9, 98e9, 234e9]})
    speeds = [row[SPEED] for row in found]
    assert speeds == sorted(speeds)
    assert len(set(speeds)) == 3
