"""The compiled twins of functions of the metrics give what their references give, on any input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moesim.engine import native
from moesim.metrics import activities, arrivals, critical_path
from moesim.metrics.twins import twin

Rng = np.random.Generator


def whole(rng: Rng, low: int, high: int, n: int, kind: type = np.int64) -> Any:
    return rng.integers(low, high, n).astype(kind)


def ends_drawn(rng: Rng) -> tuple[Any, ...]:
    n, n_places = int(rng.integers(0, 40)), int(rng.integers(1, 6))
    end = whole(rng, 1, int(rng.choice([3, 30, 2**60])), n)
    if n and rng.random() < 0.5:  # stretches that are sorted
        end = np.concatenate([np.sort(part) for part in np.split(end, np.sort(rng.integers(0, n, 3)))])
    return end, whole(rng, 0, 5, n, np.int8), whole(rng, 0, n_places, n, np.int16), whole(rng, 0, n_places, n_places, np.int16)


def walk_drawn(rng: Rng) -> tuple[Any, ...]:
    end, rank, place, order = ends_drawn(rng)
    n, n_places, few = len(end), len(order), int(rng.choice([2, 4]))
    end = end % int(rng.choice([5, 40, 1000])) + 1
    start = np.maximum(0, end - whole(rng, 1, int(rng.choice([2, 10, 200])), n))
    columns = {
        "start": start, "end": end, "rank": rank, "cause": whole(rng, 0, 9, n, np.int8), "place": place,
        "wants": whole(rng, 0, 256, n, np.int16) * whole(rng, 0, 2, n, np.int16),
        "traits": np.bitwise_or.reduce(np.int16(1) << whole(rng, 0, 11, 2 * n, np.int16).reshape(2, n), axis=0).astype(np.int16),
        "step": whole(rng, -1, few, n, np.int32), "layer": whole(rng, -1, few, n, np.int32),
        "expert": whole(rng, -1, few, n, np.int32), "fetch": whole(rng, -1, few, n),
    }  # fmt: skip
    edges = np.unique(whole(rng, 0, int(end.max(initial=1)) + 5, int(rng.integers(2, 12))))
    windows = np.stack((edges[:-1], edges[1:], *(whole(rng, -1, few, len(edges) - 1) for _ in range(2))))
    places = np.stack([whole(rng, -2, few, n_places) for _ in range(4)])
    by_end = activities.by_end(end, rank, place, order)
    return columns, by_end[: int(rng.integers(0, n + 1))] if rng.random() < 0.3 else by_end, places, windows


def demand_drawn(rng: Rng) -> tuple[Any, ...]:
    n_arrived, n_runs = (int(rng.integers(0, 60)) * int(rng.random() < 0.95) for _ in range(2))
    experts, steps = int(rng.choice([1, 3, 6, 100_000])), int(rng.choice([1, 4, 1_000_000]))
    latest = int(rng.choice([3, 40, 10**15]))
    keys = [np.stack([whole(rng, 0, 2, n), whole(rng, 0, 3, n), whole(rng, 0, experts, n)]) for n in (n_arrived, n_runs)]
    when = [whole(rng, 0, latest, n) for n in (n_arrived, n_runs)]
    if rng.random() < 0.7:
        when = [np.sort(one) for one in when]
    step = whole(rng, 0, steps, n_runs)
    arrived = np.concatenate((keys[0], when[0][None], whole(rng, 0, 2, n_arrived)[None]))
    runs = np.concatenate((keys[1], when[1][None], (np.sort(step) if rng.random() < 0.7 else step)[None]))
    return arrived, runs, int(rng.integers(0, latest + 2)) if rng.random() < 0.7 else None


def rows_drawn(rng: Rng) -> tuple[Any, ...]:
    n_rows, n, n_more = (int(rng.integers(low, 20)) for low in (1, 0, 0))
    columns = [whole(rng, -5, 2**60, n_more) for _ in range(n_rows)]
    return whole(rng, -5, 2**60, n_rows * n).reshape(n_rows, n), rng.random(n_more) < rng.random(), *columns


CASES: dict[Callable[..., Any], Callable[[Rng], tuple[Any, ...]]] = {
    activities.by_end: ends_drawn, critical_path.charged: walk_drawn, arrivals.settle: demand_drawn,
    arrivals.longer: rows_drawn,
}  # fmt: skip


@pytest.mark.skipif(not native.AVAILABLE, reason="the native engine is not built")
@pytest.mark.parametrize("n_cases", [1000, pytest.param(3000, marks=pytest.mark.long)])
@pytest.mark.parametrize("reference", CASES, ids=lambda reference: reference.__name__)
def test_twins_are_equal(reference: Callable[..., Any], n_cases: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MOESIM_ENGINE", raising=False)
    other = twin(reference)
    assert other is not reference
    some = 0
    for seed in range(n_cases):
        given = CASES[reference](np.random.default_rng(seed))
        expected, got = reference(*given), other(*given)
        for one, two in zip(*(found if isinstance(found, tuple) else (found,) for found in (expected, got)), strict=True):
            assert np.array_equal(one, two) and np.shape(one) == np.shape(two), seed
        some += bool(np.any(expected if not isinstance(expected, tuple) else expected[1]))
    assert some > n_cases / 6


def test_no_twin_beside_simpy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOESIM_ENGINE", "simpy")
    assert all(twin(reference) is reference for reference in CASES)
