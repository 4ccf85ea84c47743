"""Speculative decoding: tokens that a drafter proposes, and how many of them the model accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.errors import IN_RANGE, WorkloadError, unknown_name

if TYPE_CHECKING:
    import numpy as np

    from moesim.hardware.costs import CostModel
    from moesim.serving.requests import Request

BY: Final = ("mtp", "ngram", "model")
"""Kinds of drafters: a head of the model, copies from the text so far, a small model of its own."""
MOST: Final = 64
"""Tokens of a draft."""
_KEYS: Final = ("by", "n", "accept", "proposed", "draft_ms")


@dataclass(frozen=True)
class Drafts:
    """A drafter as a workload asks for it.

    Of `BY`, ``mtp`` is one more layer of the model, with its experts and the LM head, run once for each draft; ``ngram`` costs
    nothing; ``model`` is another model.

    A drafter with a least probability (llama.cpp's ``--spec-draft-p-min``) stops before the first draft that falls below it: it
    has run for that draft, too. How long its drafts get is given, not simulated. Whether it goes on does not depend on whether
    the model accepts what it has proposed so far (assumed).
    """

    n: int  # tokens that it proposes for each sequence and step
    # (n,) share of windows in which the draft at a position, and all before it, are accepted; of those that have so many drafts
    accept: tuple[float, ...]
    by: str = "mtp"
    draft_ms: float | None = None  # of one draft of all sequences, of another model
    proposed: tuple[float, ...] | None = None  # (n,) share of windows with a draft at a position; None: all have n

    def propose(self, request: Request, rng: np.random.Generator) -> None:
        """Draw how many drafts follow the newest token of a request, none beyond its answer."""
        drawn = self.n if self.proposed is None else _reached(self.proposed, rng)
        request.drafts, request.draft_runs = drawn, min(drawn + 1, self.n)
        request.limit_drafts(request.answer - request.generated - 1)

    def accepted(self, n: int, rng: np.random.Generator) -> int:
        """Draw how many of the first n drafts are accepted."""
        return _reached(self.accept[:n], rng)

    def ns(self, runs: Sequence[DraftRun], costs: CostModel, device: str) -> int:
        """Return the time to propose what a step verifies."""
        if self.draft_ms is not None:
            return round(len(runs) * self.draft_ms * 1e6)
        if self.by == "ngram":
            return 0
        return sum(costs.draft_ns(device, run.n_sequences, run.work2) for run in runs)


def _reached(shares: Sequence[float], rng: np.random.Generator) -> int:
    """Draw a position of falling shares of windows that reach it."""
    drawn = float(rng.random())
    return sum(drawn < share for share in shares)


class DraftRun(NamedTuple):
    """One run of the drafter in a step: the next draft of each sequence that has not stopped."""

    n_sequences: int
    work2: int  # attention, of all of them


def draft_runs(requests: Sequence[Request]) -> tuple[DraftRun, ...]:
    """Return the runs that propose the drafts of a step, one after another."""
    found = []
    for i in range(max((one.draft_runs for one in requests), default=0)):
        own = [one for one in requests if one.draft_runs > i]
        found.append(DraftRun(len(own), sum(2 * one.computed + 1 for one in own)))
    return tuple(found)


def read_drafts(written: Mapping[str, Any], place: str = "workload.drafts") -> Drafts:
    """Read what a workload asks for; `WorkloadError` names what is wrong."""
    for key in written:
        if key == "p_min":
            raise WorkloadError(
                f"{place}.p_min: expected proposed, the share of windows with a draft at each position, got a probability, which "
                f"no trace has; count drafts of a log"
            )
        if key not in _KEYS:
            raise WorkloadError(f"{place}: {unknown_name('key', key, _KEYS)}")
    n, by, draft_ms = written.get("n"), written.get("by", "mtp"), written.get("draft_ms")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST:
        raise WorkloadError(f"{place}.n: expected drafts of a step, 1 to {MOST}, got {n!r}; {IN_RANGE}")
    if by not in BY:
        raise WorkloadError(f"{place}.by: {unknown_name('drafter', str(by), BY)}")
    if (draft_ms is None) == (by == "model"):
        got = "none" if draft_ms is None else repr(draft_ms)
        remedy = "add it" if draft_ms is None else "leave it out"
        raise WorkloadError(
            f"{place}.draft_ms: expected milliseconds of a draft with by: model and with no other, got {got}; {remedy}"
        )
    if draft_ms is not None and not (_is_number(draft_ms) and 0 <= draft_ms < 1e6):
        raise WorkloadError(f"{place}.draft_ms: expected milliseconds, got {draft_ms!r}")
    proposed = written.get("proposed")
    shares = None if proposed is None else _shares(proposed, n, f"{place}.proposed", "proposed")
    return Drafts(n, _shares(written.get("accept"), n, f"{place}.accept", "accepted"), by, draft_ms, shares)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shares(written: Any, n: int, place: str, done: str) -> tuple[float, ...]:
    """Return the share of windows that come to each position: powers of one number, or as listed."""
    if _is_number(written) and 0 <= written <= 1:
        return tuple(written ** (i + 1) for i in range(n))
    listed = written if isinstance(written, Sequence) and not isinstance(written, str) else ()
    right = all(_is_number(one) and 0 <= one <= 1 for one in listed) and sorted(listed, reverse=True) == list(listed)
    if len(listed) < n or not right:
        raise WorkloadError(
            f"{place}: expected a share for each draft given that all before it are {done}, or {n} falling shares of "
            f"windows by position, got {'none' if written is None else repr(written)}; write a number such as 0.8, or {n}"
        )
    return tuple(listed[:n])
