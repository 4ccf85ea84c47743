"""Experts whose time is linear in their rows, and the host thread that submits them."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.core.units import NS_PER_S, ceil_div
from moesim.errors import HardwareError
from moesim.hardware.costs.curves import linear_ns
from moesim.hardware.types import ExpertCost
from tests.hardware.costs_kit import costs, machine, number, tiny_model


def cost(**numbers):
    return {"expert_cost": {key: number(value) for key, value in numbers.items()}}


def test_one_row_is_reading_and_each_further_row_is_a_slope():
    model = tiny_model()
    found = costs(machine(cpu=cost(per_expert_us=5, per_row_us=2, read_bytes_per_s=2e9, few_row_flops=1e10)))
    reading, row = ceil_div(model.expert_bytes(0) * NS_PER_S, 2 * 10**9), 2 * model.expert_params * NS_PER_S / 1e10
    assert found.expert_ns("cpu0", 0) == 0
    assert found.expert_ns("cpu0", 1) == 5000 + reading
    assert found.expert_ns("cpu0", 4) == pytest.approx(5000 + reading + 3 * (2000 + row), abs=1)


def test_reading_goes_at_the_memorys_rate_unless_said():
    stated = costs(machine(cpu=cost(read_bytes_per_s=1e9, few_row_flops=1e10)))
    taken = costs(machine(cpu=cost(few_row_flops=1e10)))
    assert stated.expert_table("cpu0", 8) == taken.expert_table("cpu0", 8)
    assert "devices.cpu0.memory_bytes_per_s" in taken.provenance()["expert @cpu0"]["numbers"]
    assert "devices.cpu0.memory_bytes_per_s" not in stated.provenance()["expert @cpu0"]["numbers"]


def test_many_rows_go_at_their_own_rate_beyond_the_crossover():
    found = costs(machine(cpu=cost(few_row_flops=1e9, per_row_us=3, many_row_flops=1e11, crossover_rows=4)))
    times = found.expert_table("cpu0", 12)
    few, many = times[2] - times[1], times[12] - times[11]
    assert times[4] - times[3] == pytest.approx(few, abs=1)
    assert many == pytest.approx((few - 3000) / 100, abs=1)
    assert times[5] - times[4] == pytest.approx(many, abs=1)  # no jump where one rate takes over from the other


def test_a_measured_curve_wins():
    from tests.hardware.costs_kit import curve

    both = costs(machine(cpu=cost(few_row_flops=1e9) | curve("linear", base_us=2.5, per_token_us=0.5)))
    assert both.expert_ns("cpu0", 3) == 4000


def test_the_label_is_derived_at_best_and_the_interval_is_told():
    wide = number(1e10) | {"interval": [5e9, 2e10]}
    found = costs(machine(cpu={"expert_cost": {"few_row_flops": wide}}))
    found.expert_ns("cpu0", 1)
    assert found.intervals() == {}  # one row has no slope
    found.expert_ns("cpu0", 2)
    assert found.intervals() == {"devices.cpu0.expert_cost.few_row_flops": (5e9, 2e10)}
    assert "derived" in found.labels()


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(10**3, 10**12), st.integers(10**3, 10**14),
    st.integers(10**3, 10**15), st.integers(1, 64), st.integers(1, 10**9),
)  # fmt: skip
def test_time_never_falls_and_is_continuous(per_expert, per_row, rate, few, many, crossover, n_bytes):
    line = ExpertCost(Fraction(per_expert), Fraction(per_row), rate, few, many, crossover)
    times = [linear_ns(line, n_bytes, 2 * n_bytes, n) for n in range(1, 80)]
    assert all(a <= b for a, b in pairwise(times))
    steps = [b - a for a, b in pairwise(times)]
    slopes = per_row * 1000 + 2 * n_bytes * NS_PER_S / few, 2 * n_bytes * NS_PER_S / many
    assert max(steps) <= max(slopes) + 1


@pytest.mark.parametrize(
    ("given_cost", "said"),
    [
        (cost(per_row_us=1), "few_row_flops"),
        (cost(few_row_flops=1e9, crossover_rows=4), "many_row_flops: expected many_row_flops and crossover_rows together"),
        (cost(few_row_flops=1e9, many_row_flops=1e9, crossover_rows=0), "crossover_rows: expected at least 1 row"),
        (cost(few_row_flops=90), "expected operations per second"),
        (cost(few_row_flops=1e9) | {"launches": {"expert": number(3)}}, "launches.expert: expected none next to expert_cost"),
        ({"expert_cost": {"few_row_flops": number(1e9) | {"interval": [2e9, 3e9]}}}, "interval: expected [least, most]"),
        ({"expert_cost": {"few_row_flops": number(1e9) | {"interval": [2e9]}}}, "expected [least, most]"),
        ({"expert_cost": {"few_row_flops": number(1e9) | {"interval": [1, 3e9]}}}, "expected operations per second"),
    ],
)  # fmt: skip
def test_what_is_refused(given_cost, said):
    with pytest.raises(HardwareError) as caught:
        machine(cpu=given_cost)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_row_is_never_faster_than_the_device_unpacks() -> None:
    """Reading 1000 bytes at 1 GB/s takes 1 us; 4000 operations at 1 GFLOP/s take 4 us, and further rows come on top."""
    cost = ExpertCost(Fraction(0), Fraction(0), 10**9, 10**9)
    assert [linear_ns(cost, 1000, 4000, n, flops) for n, flops in ((1, 0), (1, 10**9), (1, 10**12), (2, 10**9))] == [
        1000,
        4000,
        1000,
        8000,
    ]
