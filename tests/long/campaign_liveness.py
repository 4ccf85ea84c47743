"""Every policy and part with random options, machines and workloads: each run ends, and both engines agree on what happened."""

from __future__ import annotations

import pytest

from moesim.policies.registry import POLICIES
from tests.long.kit import Tally
from tests.policies.liveness_kit import draw, verdict

BOTH = 10  # every tenth run is played on both engines


def test_every_run_ends(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    seed, only = request.config.getoption("--campaign-seed"), request.config.getoption("--only-kinds")
    n, one = request.config.getoption("--liveness"), request.config.getoption("--liveness-case")
    tally, ended = Tally("liveness", request.config.getoption("--campaign-log")), set()
    for number in range(n) if one is None else [one]:
        case = draw(seed, number)
        if only and case.subject.name not in only:
            continue
        outcome, finding = verdict(case, both=one is not None or number % BOTH == 0)
        repeat = f"pytest tests/long/campaign_liveness.py --campaign-seed {seed} --liveness-case {number}"
        tally.add(case.machine, outcome, finding and f"{case}: {finding}\n  repeat it: {repeat}")
        if outcome.startswith("ended"):
            ended.add(case.subject.name)
    tally.finish(capsys)
    if n >= 3000 and one is None and not only:
        assert set(POLICIES) <= ended, f"no run of these was possible: {sorted(set(POLICIES) - ended)}"
