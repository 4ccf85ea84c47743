"""Whether the number of requests inside grew while they came."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.metrics.serving import grew_to
from moesim.serving.requests import RequestRecord
from moesim.serving.steps import Served


def served(arrivals, ends) -> Served:
    records = [
        RequestRecord(i, 0, int(came), int(came), int(end), int(end), 1, 2, 2, 0, 0, 0)
        for i, (came, end) in enumerate(zip(arrivals, ends, strict=True))
    ]
    return Served(records, None, 0, 0, 0, 0, int(max(ends)))  # type: ignore[arg-type]


def test_as_many_inside_from_the_first_quarter_on_are_no_queue_that_grew():
    came = np.arange(100) * 10
    assert grew_to(served(came, came + 245)) == 0  # 25 inside


def test_a_server_of_two_thirds_of_the_rate():
    came = np.arange(100) * 10
    assert grew_to(served(came, (np.arange(100) + 1) * 15)) == 34  # by 990 ns 66 have ended


@pytest.mark.parametrize("seed", range(5))
def test_a_loaded_queue_that_does_not_grow(seed: int):
    """M/D/1 at four fifths of what it serves."""
    came = np.cumsum(np.random.default_rng(seed).exponential(1250, 400)).astype(np.int64)
    free, ends = 0, []
    for arrival in came:
        free = max(free, int(arrival)) + 1000
        ends.append(free)
    assert grew_to(served(came, ends)) == 0
