"""Read rates by size in an identification: one factor on all points, and how little one size says of another."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moesim.hardware import load_hardware, read_profile
from moesim.studies.identify.fit import Machine
from moesim.studies.identify.identify import identify
from moesim.studies.identify.sizes import exponents, widening
from tests.hardware.costs_kit import number
from tests.studies.identify_kit import ROOMY, rows

SMALL, LARGE = "qwen3-30b-a3b", "mixtral-8x7b"
SETTINGS = [(SMALL, "Q4_K_M", f"n_cpu_moe={n}", 1) for n in (0, 24, 48)] + [(LARGE, "Q4_K_M", "n_cpu_moe=32", 1)]
POINTS = [{"bytes": size, "bytes_per_s": number(rate)} for size, rate in (("2 MB", 40e9), ("200 MB", 60e9))]
KEYS = [f"devices.cpu0.expert_cost.read_rates.{i}.bytes_per_s" for i in range(2)]


def observed(speeds: tuple[float, ...]) -> list[Any]:
    """Return rows of small experts that were observed, and one of large ones to be predicted."""
    roles = ["identification"] * 3 + ["check"]
    return [
        row.model_copy(update={"value": speed, "role": role})
        for row, speed, role in zip(rows(SETTINGS), speeds, roles, strict=True)
    ]


@pytest.fixture(scope="module")
def one_rate() -> Any:
    return identify(ROOMY, observed((150.0, 55.0, 33.0, 6.0)), free=["cpu_read_rate"], leave_out=False)


def test_a_curve_keeps_its_shape():
    raw, path, _ = read_profile(ROOMY | {"devices.cpu0.expert_cost.read_rates": POINTS})
    machine = Machine(raw, str(path), ["cpu_read_rate"])
    assert machine.constants[0].keys == ("devices.cpu0.memory_bytes_per_s", *KEYS)
    rates = machine.with_factors([math.log(1.5)]).devices["cpu0"].expert_cost.read_rates
    assert rates == ((2_000_000, 60 * 10**9), (200_000_000, 90 * 10**9))


def test_rows_of_one_size_say_less_of_another(one_rate: Any):
    rate = number(one_rate.predictor.machine.base.devices["cpu0"].memory_bytes_per_s, "published")
    known = {"devices.cpu0.expert_cost.read_rates": [{"bytes": size, "bytes_per_s": rate} for size in ("2 MB", "200 MB")]}
    curve = identify(ROOMY | known, observed((150.0, 55.0, 33.0, 6.0)), free=["cpu_read_rate"], leave_out=False)
    alike, apart = [(found.predictions[2], found.predictions[3]) for found in (one_rate, curve)]
    assert [alike[0].low, alike[0].high] == pytest.approx([apart[0].low, apart[0].high], rel=1e-6)  # the size that was seen
    assert alike[1].predicted == pytest.approx(apart[1].predicted, rel=1e-6)
    ratios = alike[1].high / apart[1].high, apart[1].low / alike[1].low
    below, above = exponents()
    assert 1 < ratios[1] < ratios[0] < 40 ** (above - below)  # known hosts read large experts faster more often than slower


def test_the_identified_profile_has_the_wider_interval_at_other_sizes(one_rate: Any):
    cost = one_rate.profile.devices["cpu0"].expert_cost
    sizes, rates = zip(*cost.read_rates, strict=True)
    assert len(set(rates)) == 1 and sizes[-1] == 187_000_000 and len(sizes) == 2  # what was seen is the smallest
    near, far = (one_rate.profile.numbers[f"devices.cpu0.expert_cost.read_rates.{i}.bytes_per_s"] for i in range(2))
    assert near == one_rate.profile.numbers["devices.cpu0.memory_bytes_per_s"] and far.source == "assumed"
    below, above = widening(sizes[1], [sizes[0]])
    assert far.interval == pytest.approx((near.interval[0] * math.exp(below), near.interval[1] * math.exp(above)), rel=1e-4)
    again = load_hardware(one_rate.raw)
    assert again.numbers == one_rate.profile.numbers
