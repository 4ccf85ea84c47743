"""Speculative decoding: tokens that a drafter proposes, and how many of them the model accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.errors import WorkloadError, unknown_name

if TYPE_CHECKING:
    import numpy as np

    from moesim.hardware.costs import CostModel

BY: Final = ("mtp", "ngram", "model")
"""Kinds of drafters: a head of the model, copies from the text so far, a small model of its own."""
MOST: Final = 64
"""Tokens of a draft."""
_KEYS: Final = ("by", "n", "accept", "draft_ms")


@dataclass(frozen=True)
class Drafts:
    """A drafter as a workload asks for it.

    Of `BY`, ``mtp`` is one more layer of the model, with its experts and the LM head, run once for each draft; ``ngram`` costs
    nothing; ``model`` is another model.
    """

    n: int  # tokens that it proposes for each sequence and step
    accept: tuple[float, ...]  # (n,) share of windows in which the draft at a position, and all before it, are accepted
    by: str = "mtp"
    draft_ms: float | None = None  # of one draft of all sequences, of another model

    def accepted(self, n: int, rng: np.random.Generator) -> int:
        """Draw how many of the first n drafts are accepted."""
        drawn = float(rng.random())
        return sum(drawn < share for share in self.accept[:n])

    def ns(self, drafting: Drafting, costs: CostModel, device: str) -> int:
        """Return the time to propose what a step verifies."""
        if self.draft_ms is not None:
            return round(drafting.n * self.draft_ms * 1e6)
        if self.by == "ngram":
            return 0
        return drafting.n * costs.draft_ns(device, drafting.n_sequences, drafting.work2)


class Drafting(NamedTuple):
    """Drafts of a step."""

    n: int  # one after another
    n_sequences: int  # at once
    work2: int  # attention of one draft of all of them


def read_drafts(written: Mapping[str, Any], place: str = "workload.drafts") -> Drafts:
    """Read what a workload asks for; `WorkloadError` names what is wrong."""
    for key in written:
        if key not in _KEYS:
            raise WorkloadError(f"{place}: {unknown_name('key', key, _KEYS)}")
    n, by, draft_ms = written.get("n"), written.get("by", "mtp"), written.get("draft_ms")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST:
        raise WorkloadError(f"{place}.n: expected drafts of a step, 1 to {MOST}, got {n!r}")
    if by not in BY:
        raise WorkloadError(f"{place}.by: {unknown_name('drafter', str(by), BY)}")
    if (draft_ms is None) == (by == "model"):
        got = "none" if draft_ms is None else repr(draft_ms)
        raise WorkloadError(f"{place}.draft_ms: expected milliseconds of a draft with by: model and with no other, got {got}")
    if draft_ms is not None and not (_is_number(draft_ms) and 0 <= draft_ms < 1e6):
        raise WorkloadError(f"{place}.draft_ms: expected milliseconds, got {draft_ms!r}")
    return Drafts(n, _shares(written.get("accept"), n, place), by, draft_ms)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shares(written: Any, n: int, place: str) -> tuple[float, ...]:
    """Return the share of windows that accept up to each position: powers of one number, or as listed."""
    if _is_number(written) and 0 <= written <= 1:
        return tuple(written ** (i + 1) for i in range(n))
    listed = written if isinstance(written, Sequence) and not isinstance(written, str) else ()
    right = all(_is_number(one) and 0 <= one <= 1 for one in listed) and sorted(listed, reverse=True) == list(listed)
    if len(listed) < n or not right:
        raise WorkloadError(
            f"{place}.accept: expected a share for each draft given that all before it are accepted, or {n} falling shares of "
            f"windows by position, got {written!r}"
        )
    return tuple(listed[:n])
