"""Machines drawn at random, observed with noise and identified again: how often the true constants lie in their intervals."""

from __future__ import annotations

import pytest

from moesim.studies.identify.identify import identify
from tests.long.kit import Tally
from tests.studies.identify_kit import NOISE, ROOMY, Truth

LEAST = 0.85
"""Share of the intervals of 90 % that must hold the truth, of identified constants of all machines together."""


def test_true_constants_lie_in_their_intervals(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    first = request.config.getoption("--campaign-seed")
    tally, truth = Tally("machines", request.config.getoption("--campaign-log")), Truth()
    inside: dict[str, list[bool]] = {}
    for seed in range(first, first + request.config.getoption("--machines")):
        true, observed = truth.draw(1000 + seed)
        found = identify(ROOMY, observed, leave_out=False, error=NOISE)
        for one in found.constants:
            if one.identified:
                inside.setdefault(one.constant.name, []).append(one.low <= true[one.constant.name] <= one.high)
        tally.add("machines", "identified")
    pooled = [held for each in inside.values() for held in each]
    with capsys.disabled():
        for name, each in inside.items():
            print(f"\n{name}: {sum(each)} of {len(each)} inside", end="")
        print(f"\nall: {sum(pooled)} of {len(pooled)}, {100 * sum(pooled) / len(pooled):.0f} %")
    assert sum(pooled) >= LEAST * len(pooled)
