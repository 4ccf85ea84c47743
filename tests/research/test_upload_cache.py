"""The cache of llama.cpp PR 27861 on the machine that measured it: which settings are faster than no cache."""

from __future__ import annotations

from experiments.research.tables.upload_cache import settings


def test_uploads_outrun_the_worker_as_shipped_and_not_if_they_are_issued_early():
    speeds, hits = {}, {}
    for name, _, speed, _, rate in settings(tokens=400):
        speeds[name], hits[name] = speed, rate
    none, one, shipped, four, early = speeds
    assert speeds[four] < speeds[shipped] < speeds[none] < speeds[one] < speeds[early] * 1.05
    assert hits[shipped] < 30 and hits[early] > 75
