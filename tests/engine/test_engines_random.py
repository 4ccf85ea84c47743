"""Both engines on random runs with what `wild_kit` leaves out: widths, late runs, streams, host threads, disks."""

from __future__ import annotations

import pytest

from moesim.engine.native import AVAILABLE
from tests.engine.free_kit import assert_alike


def test_both_engines_on_any_actions(engine: str) -> None:
    if engine == "simpy" or not AVAILABLE:
        pytest.skip("compares the engines, once, where both are")
    found = [assert_alike(seed) for seed in range(120)]
    ended = [records for records in found if records is not None]
    assert 60 < len(ended) < 120
    assert {x.kind for r in ended for x in r.inexact} >= {"late", "reduced", "skipped"}
    moved = [x for r in ended for x in r.transfers]
    assert {x.cause for x in moved} == {"demand", "prefetch", "update", "write-back", "message", "activation"}
    assert {x.link for x in moved} >= {"disk0->cpu0", "gpu0->cpu0", "gpu0->gpu1"}
    assert {x.kind for r in ended for x in r.tasks} >= {"expert", "attention", "dense", "shared", "predict", "leading"}
    assert sum(x.end - x.start == 13 for r in ended for x in r.decisions) > 100
