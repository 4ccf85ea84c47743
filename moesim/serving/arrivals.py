"""Which requests arrive, and when: a Poisson process, users that wait for their answers, or a file."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from moesim.core.limits import RUN_NS, TOKENS
from moesim.core.units import NS_PER_S
from moesim.errors import IN_RANGE, WorkloadError, unknown_name
from moesim.trace.workload.spec import ANSWER, POISSON, PROMPT, REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from moesim.serving.request_file import RequestFile, Sessions
    from moesim.serving.requests import Request
    from moesim.trace.workload import WorkloadSpec

_P90: Final = NormalDist().inv_cdf(0.9)
_QUANTILES: Final = ("p50", "p90", "most")


class Arrival(NamedTuple):
    """A request that arrives."""

    ns: int
    prompt: int
    answer: int
    user: int = -1
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    follows: int = 0  # tokens of the answer that the blocks cover, too


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


@dataclass(frozen=True, eq=False)
class Asked:
    """Requests of a workload, in the order in which they arrive; arrays of shape (n_requests,)."""

    prompt: NDArray[np.int64]  # tokens
    answer: NDArray[np.int64]
    ns: NDArray[np.int64] | None  # when each arrives, or each session of them; None: when a user has its answer
    file: RequestFile | None  # where their lengths are from
    sessions: Sessions | None = None  # if they are turns, each of which waits for the one before

    def __len__(self) -> int:
        return len(self.prompt)

    def at_once(self, users: int | None) -> int:
        """Count those that can be there together: of each user or session one."""
        each = len(self) if self.sessions is None else len(np.unique(self.sessions.session[: len(self)]))
        return min(users or each, each)

    @property
    def n_rows(self) -> int:
        """Rows that are computed if nothing is computed twice: the last token of an answer is not."""
        return int((self.prompt + self.answer - 1).sum())

    @property
    def block(self) -> int:
        """Tokens of a block whose content is known; 0: no content is."""
        return self.file.block if self.file is not None else 0

    def arrival(self, i: int, ns: int, user: int = -1) -> Arrival:
        """Return a request that arrives now."""
        # Of a file that is read again the content is not the same again.
        file, answer = self.file, int(self.answer[i])
        if file is None or i >= len(file):
            return Arrival(ns, int(self.prompt[i]), answer, user, (), self.block)
        follows = int(file.sessions.follows[i]) if file.sessions is not None and answer == file.answer[i] else 0
        return Arrival(ns, int(self.prompt[i]), answer, user, file.blocks(i), self.block, follows)


class Open:
    """Requests that arrive whatever the server does."""

    def __init__(self, asked: Asked) -> None:
        assert asked.ns is not None
        self._asked, self._ns, self._next = asked, asked.ns, 0

    def next_ns(self) -> int | None:
        return int(self._ns[self._next]) if self._next < len(self._ns) else None

    def take(self) -> Arrival:
        i = self._next
        self._next += 1
        return self._asked.arrival(i, int(self._ns[i]))

    def ended(self, request: Request, now_ns: int) -> None:
        """It changes nothing."""


class Closed:
    """Users of whom each asks again, after a time to think, once its answer is there."""

    def __init__(self, users: int, think_ns: int, asked: Asked) -> None:
        self._ready = [(0, user) for user in range(users)]  # a heap
        self._think_ns, self._asked, self._next = think_ns, asked, 0

    def next_ns(self) -> int | None:
        return self._ready[0][0] if self._ready and self._next < len(self._asked) else None

    def take(self) -> Arrival:
        ns, user = heapq.heappop(self._ready)
        i = self._next
        self._next += 1
        return self._asked.arrival(i, ns, user)

    def ended(self, request: Request, now_ns: int) -> None:
        heapq.heappush(self._ready, (now_ns + self._think_ns, request.user))


class Conversations:
    """Sessions that begin at given times, or one after another for each user; a turn arrives a time after the last answer."""

    def __init__(self, asked: Asked, sessions: Sessions, users: int, think_ns: int) -> None:
        self._asked, self._think_ns = asked, think_ns
        self._wait_ns, self._ends = sessions.wait_ns, np.append(np.diff(sessions.session[: len(asked)]) != 0, True)
        starts = [0, *(np.nonzero(self._ends)[0][:-1] + 1).tolist()]
        self._later: list[int] = []  # first turns of the sessions that begin when a user is free, the next one last
        if asked.ns is None:
            self._ready = [(0, first, user) for user, first in enumerate(starts[:users])]  # a heap
            self._later = starts[users:][::-1]
        else:
            self._ready = list(zip(asked.ns.tolist(), starts, itertools.repeat(-1)))  # in order, so a heap
        self._taken, self._inside = 0, dict[int, int]()  # requests that are served, by number

    def next_ns(self) -> int | None:
        return self._ready[0][0] if self._ready else None

    def take(self) -> Arrival:
        ns, i, user = heapq.heappop(self._ready)
        self._inside[self._taken] = i
        self._taken += 1
        return self._asked.arrival(i, ns, user)

    def ended(self, request: Request, now_ns: int) -> None:
        i = self._inside.pop(request.number)
        if not self._ends[i]:
            heapq.heappush(self._ready, (now_ns + int(self._wait_ns[i]), i + 1, request.user))
        elif self._later:
            heapq.heappush(self._ready, (now_ns + self._think_ns, self._later.pop(), request.user))


def asked_of(spec: WorkloadSpec, file: RequestFile | None) -> Asked:
    """Return the requests of a served workload; `file` is the one that it names."""
    if file is None:
        n = spec.n_requests or REQUESTS
        prompt, answer = _lengths(spec, n)
    else:
        n = spec.n_requests or len(file)
        if (spec.lengths is None or file.sessions is not None) and n > len(file):
            raise WorkloadError(f"workload.n_requests: expected at most the {len(file)} that {file.name} has, got {n}; lower it")
        rows = np.arange(n) % len(file)
        prompt, answer = file.prompt[rows], file.answer[rows]
    if spec.prompt_tokens is not None:
        prompt = np.full(n, spec.prompt_tokens)
    if spec.answer_tokens is not None:
        answer = np.full(n, spec.answer_tokens)
    known = file if spec.prompt_tokens is None else None
    if file is None or file.sessions is None:
        return Asked(prompt, answer, None if spec.closed is not None else _times(spec, np.arange(n), file), known)
    firsts = np.nonzero(np.diff(file.sessions.session[:n], prepend=-1))[0]
    return Asked(prompt, answer, None if spec.closed is not None else _times(spec, firsts, file), known, file.sessions)


def _times(spec: WorkloadSpec, which: NDArray[np.int64], file: RequestFile | None) -> NDArray[np.int64]:
    """Return when the requests `which` of a file, or so many others, arrive."""
    if spec.arrivals == POISSON:
        assert spec.rate is not None
        return gamma_times(spec.rate, len(which), spec.seed, 1.0 if spec.burstiness is None else spec.burstiness)
    assert file is not None
    if file.ns is None:
        raise WorkloadError(
            f"workload.arrivals: expected times of arrival in {file.name}, got lengths alone; name their column time_s, "
            f"or set arrivals: {POISSON}, rate and lengths: {file.name}"
        )
    return file.ns[which] if spec.rate is None else scaled(file.ns[which], spec.rate)


def gamma_times(rate: float, n: int, seed: int, shape: float = 1.0) -> NDArray[np.int64]:
    """Draw the times in ns of n arrivals, `rate` a second on average, with gaps of a gamma distribution.

    Their coefficient of variation is one over the root of `shape`: 1 is a Poisson process, less comes in bursts. The first
    request arrives after a gap.

    >>> gamma_times(2.0, 3, 0).tolist()
    [339965952, 849764503, 859667834]
    """
    return _whole(np.cumsum(np.random.default_rng(seed).gamma(shape, NS_PER_S / rate / shape, n)))


def scaled(ns: NDArray[np.int64], rate: float) -> NDArray[np.int64]:
    """Stretch times that begin at 0 so that they have a mean gap of one over `rate`.

    >>> scaled(np.array([0, 1, 5, 6]), rate=0.5).tolist()
    [0, 1000000000, 5000000000, 6000000000]
    """
    if len(ns) > 1 and not ns[-1]:
        raise WorkloadError(
            f"workload.rate: expected requests that arrive at different times, got {len(ns)} at once; leave it out"
        )
    return _whole(ns / max(1, ns[-1]) * ((len(ns) - 1) * NS_PER_S / rate))


def _whole(times: NDArray[np.float64]) -> NDArray[np.int64]:
    """Round times to ns; no run lasts longer than a year."""
    if times[-1] > RUN_NS:
        raise WorkloadError(f"workload.rate: expected all requests within a year, got {times[-1] / NS_PER_S:g} s; raise it")
    found: NDArray[np.int64] = np.rint(times).astype(np.int64)
    return found


def _lengths(spec: WorkloadSpec, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw lengths, or repeat the usual ones."""
    found = {"prompt": np.full(n, PROMPT), "answer": np.full(n, ANSWER)}
    written: dict[str, Any] = {} if spec.lengths is None else json.loads(spec.lengths)  # type: ignore[arg-type]
    rng = np.random.default_rng([spec.seed, 1])  # apart from the times
    normal = {name: rng.standard_normal(n) for name in found}
    for name, quantiles in written.items():
        if name not in found:
            raise WorkloadError(f"workload.lengths: {unknown_name('key', name, found)}")
        found[name] = drawn_lengths(quantiles, normal[name], f"workload.lengths.{name}")
    return found["prompt"], found["answer"]


def drawn_lengths(quantiles: Mapping[str, Any], normal: NDArray[np.float64], place: str = "lengths") -> NDArray[np.int64]:
    """Turn standard normal numbers into tokens of a lognormal distribution with some quantiles.

    >>> drawn_lengths({"p50": 100, "p90": 400, "most": 500}, np.array([-9.0, 0.0, 1.2815515655446004, 9.0])).tolist()
    [1, 100, 400, 500]
    """
    if not isinstance(quantiles, dict) or not {"p50", "p90"} <= set(quantiles):
        one = f"{place.rpartition('.')[2]}_tokens"
        raise WorkloadError(f"{place}: expected p50 and p90, and perhaps most, got {quantiles!r}; for one length use {one}")
    for key, value in quantiles.items():
        if key not in _QUANTILES:
            raise WorkloadError(f"{place}: {unknown_name('key', key, _QUANTILES)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= TOKENS.most:
            raise WorkloadError(f"{place}.{key}: expected 1 to {TOKENS.most:,} tokens, got {value!r}; {IN_RANGE}")
    p50, p90, most = quantiles["p50"], quantiles["p90"], quantiles.get("most", TOKENS.most)
    if not p50 <= p90 <= most:
        raise WorkloadError(f"{place}: expected p50 <= p90 <= most, got {p50}, {p90}, {most}; correct them")
    found = p50 * np.exp(normal * (math.log(p90 / p50) / _P90))
    tokens: NDArray[np.int64] = np.clip(np.rint(found), 1, most).astype(np.int64)
    return tokens
