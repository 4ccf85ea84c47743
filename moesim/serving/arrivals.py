"""When requests arrive: a Poisson process, users that wait for their answers, or times of a file."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from moesim.core.units import NS_PER_S

if TYPE_CHECKING:
    from moesim.serving.requests import Request


class Arrival(NamedTuple):
    """A request that arrives."""

    ns: int
    prompt: int
    answer: int
    user: int = -1
    blocks: tuple[int, ...] = ()


class Source(Protocol):
    """Where requests come from."""

    def next_ns(self) -> int | None:
        """Return when the next request arrives; None: no other, or none before one that is served ends."""
        ...

    def take(self) -> Arrival:
        """Return that request."""
        ...

    def ended(self, request: Request, now_ns: int) -> None:
        """Take note that a request has its answer."""
        ...


class Open:
    """Requests that arrive whatever the server does."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._next = next(arrivals, None)

    def next_ns(self) -> int | None:
        return None if self._next is None else self._next.ns

    def take(self) -> Arrival:
        found, self._next = self._next, next(self._arrivals, None)
        assert found is not None
        return found

    def ended(self, request: Request, now_ns: int) -> None:
        """It changes nothing."""


class Closed:
    """Users of whom each asks again, after a time to think, once its answer is there."""

    def __init__(self, users: int, think_ns: int, lengths: Iterator[tuple[int, int]], most: int) -> None:
        self._ready = [(0, user) for user in range(users)]  # a heap
        self._think_ns, self._lengths, self._left = think_ns, lengths, most

    def next_ns(self) -> int | None:
        return self._ready[0][0] if self._ready and self._left else None

    def take(self) -> Arrival:
        ns, user = heapq.heappop(self._ready)
        self._left -= 1
        return Arrival(ns, *next(self._lengths), user)

    def ended(self, request: Request, now_ns: int) -> None:
        heapq.heappush(self._ready, (now_ns + self._think_ns, request.user))


def poisson(rate: float, n: int, seed: int) -> Iterator[int]:
    """Yield the times in ns of n arrivals of a Poisson process, `rate` of them a second on average; the first is a gap away."""
    rng, now = np.random.default_rng(seed), 0.0
    for _ in range(n):
        now += rng.exponential(NS_PER_S / rate)
        yield round(now)


def same(prompt: int, answer: int) -> Iterator[tuple[int, int]]:
    """Yield the same lengths for every request."""
    return repeat((prompt, answer))
