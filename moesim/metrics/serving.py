"""Measures of a served workload, as serving benchmarks define them: `docs/reference/metrics.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from moesim.core.units import NS_PER_S
from moesim.errors import SimulationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.serving.steps import Served

PERCENTS: Final = (50, 90, 99)
GREW: Final = "the queue grew to "
"""Beginning of the note of a run in which requests come faster than they are served."""


class Times(NamedTuple):
    """Times of the requests that have their whole answer, ns, shape (n,) each."""

    ttft: NDArray[np.int64]  # from arrival to the first token
    tpot: NDArray[np.float64]  # mean between its tokens; 0 for an answer of one
    e2e: NDArray[np.int64]  # from arrival to the last token
    n_tokens: NDArray[np.int64]  # of the answer

    @classmethod
    def of(cls, served: Served) -> Times:
        done = [one for one in served.requests if one.end >= 0]
        arrival, first, end, n = (
            np.array([getattr(one, name) for one in done], np.int64) for name in ("arrival", "first", "end", "generated")
        )
        return cls(first - arrival, (end - first) / np.maximum(n - 1, 1), end - arrival, n)

    def good(self, limits: Mapping[str, float]) -> NDArray[np.bool_]:
        """Whether each request keeps within all limits, in seconds."""
        found = np.ones(len(self.ttft), bool)
        for name, most in limits.items():
            found &= getattr(self, name.removesuffix("_s")) <= most * NS_PER_S
        return found


def measures(served: Served, n_slots: int, limits: Mapping[str, float]) -> dict[str, float | int | None]:
    """Summarise what became of the requests of a run, under the keys of "Served requests" in `docs/reference/metrics.md`."""
    # `n_slots` are the requests that the scheduler has at once; a request within all `limits` (seconds) is good. Percentiles are
    # interpolated as NumPy does, and as the benchmarks of serving do.
    check_little(served)
    times, duration = Times.of(served), served.end_ns
    row: dict[str, float | int | None] = {
        "n_requests_arrived": len(served.requests), "n_requests_finished": len(times.e2e),
        "n_requests_unfinished": served.unfinished, "n_requests_refused": sum(one.refused for one in served.requests),
        "n_preemptions": sum(one.preempted for one in served.requests),
    }  # fmt: skip
    gaps = np.frombuffer(served.gaps, np.int64) if served.gaps else np.zeros(0, np.int64)
    for name, values in (("ttft", times.ttft), ("tpot", times.tpot[times.n_tokens > 1]), ("itl", gaps), ("e2e", times.e2e)):
        row[f"{name}_mean_ns"] = float(values.mean()) if len(values) else None
        for percent in PERCENTS:
            row[f"{name}_p{percent}_ns"] = float(np.percentile(values, percent)) if len(values) else None
    per_s = NS_PER_S / duration if duration else 0.0
    row |= {
        "answer_tokens_per_s": sum(one.generated for one in served.requests) * per_s,
        "requests_per_s": len(times.e2e) * per_s,
        "goodput_per_s": int(times.good(limits).sum()) * per_s if limits else None,
        "queue_mean": served.queue_ns / duration if duration else None,
        "inside_mean": served.inside_ns / duration if duration else None,
        "slots_used": served.slots_ns / (n_slots * duration) if duration else None,
        "queue_at_last_arrival": queue_at_end(served),
    }
    return row


def check_little(served: Served) -> None:
    """Raise `SimulationError` unless the time spent inside is the number inside, added up."""
    spent = sum((one.end if one.end >= 0 else served.end_ns) - one.arrival for one in served.requests if not one.refused)
    if spent != served.inside_ns:
        raise SimulationError(f"requests spent {spent} ns inside, and the number inside adds up to {served.inside_ns}; report it")


def queue_at_end(served: Served) -> int:
    """Count the requests that had no step yet when the last one arrived."""
    last = max((one.arrival for one in served.requests), default=0)
    return sum(not one.refused and (one.start < 0 or one.start > last) for one in served.requests)


def grew_to(served: Served) -> int:
    """Return the requests inside at the last arrival if these are a fifth of all, and their number grew by half; else 0."""
    # grew by half: from the second to the last quarter of arrivals, on average
    came = np.array(sorted(one.arrival for one in served.requests if not one.refused), np.int64)
    ends = np.array(sorted(one.end for one in served.requests if one.end >= 0 and not one.refused), np.int64)
    inside, quarter = np.arange(1, len(came) + 1) - np.searchsorted(ends, came, "right"), len(came) // 4
    if not quarter or inside[-1] <= len(came) / 5:
        return 0
    return int(inside[-1]) if inside[-quarter:].mean() > 1.5 * inside[quarter : 2 * quarter].mean() else 0


def notes(served: Served) -> list[str]:
    """Note a queue that grew, and requests that had not ended."""
    n, open_loop = len(served.requests), any(one.user < 0 for one in served.requests)  # users wait for their answers
    inside = grew_to(served) if open_loop else 0
    found = [f"{GREW}{inside} of {n} requests: they come faster than they are served"] if inside else []
    return found + ([f"{served.unfinished} of {n} requests had not ended"] if served.unfinished else [])
