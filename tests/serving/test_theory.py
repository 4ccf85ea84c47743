"""Queues whose waiting times are known: one server with a fixed time of service."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.core.units import NS_PER_S
from tests.serving.serving_kit import MADE, run

ONE = {"name": "llama-server", "parallel": 1}
SAME = {"trace": MADE | {"requests": 1}}  # every request reads the rows of one, beginning elsewhere: the same work


def service_ns() -> int:
    """Time of a request of one token that is alone."""
    served = run({"closed": 1, "n_requests": 1, "prompt_tokens": 6, "answer_tokens": 1, "scheduler": ONE}, **SAME).served
    assert served is not None
    return served.requests[0].end


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_waiting_times_follow_lindleys_recursion_to_the_nanosecond(engine: str):
    each = service_ns()
    asked = {"arrivals": "poisson", "rate": 0.7 * NS_PER_S / each, "n_requests": 40, "prompt_tokens": 6, "answer_tokens": 1}
    served = run(asked | {"scheduler": ONE}, engine=engine, **SAME).served
    assert served is not None
    free = 0
    for one in served.requests:
        assert one.start == max(one.arrival, free)
        assert one.end == one.start + each == one.first
        free = one.end
    assert len({one.start - one.arrival for one in served.requests}) > 10, "some waited"


def test_the_mean_wait_is_that_of_pollaczek_and_khinchine():
    each, load, n = service_ns(), 0.5, 1500
    asked = {"arrivals": "poisson", "rate": load * NS_PER_S / each, "n_requests": n, "prompt_tokens": 6, "answer_tokens": 1}
    served = run(asked | {"scheduler": ONE}, **SAME).served
    assert served is not None
    waits = np.array([one.start - one.arrival for one in served.requests]) / each
    batches = waits.reshape(30, -1).mean(axis=1)  # waits of neighbours depend on each other, those of batches hardly
    error = batches.std(ddof=1) / np.sqrt(len(batches))
    assert abs(waits.mean() - load / (2 * (1 - load))) < 3.5 * error
    assert error < 0.1


@pytest.mark.parametrize("users", [1, 2, 5])
def test_users_who_think_are_served_as_often_as_a_closed_queue_allows(users: int):
    each = service_ns()
    think = 2 * each
    asked = {"closed": users, "think_s": think / NS_PER_S, "n_requests": 30, "prompt_tokens": 6, "answer_tokens": 1}
    served = run(asked | {"scheduler": ONE}, **SAME).served
    assert served is not None
    ends = np.sort([one.end for one in served.requests])
    cycle = max(each * users, each + think)  # of all users, once they are spread out
    assert ends[-1] - ends[-1 - users] == cycle
    assert served.inside_ns == sum(one.end - one.arrival for one in served.requests)
