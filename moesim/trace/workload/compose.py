"""Requests of a trace -> batched steps: prefill, decode, chunks, micro-batches.

A recorded request is batch-1 data, and the routing of a token does not depend on its batch, so any requests
can be batched. A step has one phase. Within it the rows of a request are contiguous and in token order.

How requests are chosen and cut:

* A request qualifies if it has at least ``decode_tokens`` decode rows and a prompt of at least
  ``prompt_tokens``. Prompts of exactly that length come first; of a longer one the *last* ``prompt_tokens``
  tokens are used, since decode follows them, with contexts counted as if the prompt began there. That is
  labelled ``prompt-truncated``.
* A prompt whose routing was not recorded has a length but no rows: such a request starts in decode.
* ``reuse: shifted`` fills up with copies of the same requests. Copy c of C reads prompt and decode rows
  rotated by c/C of their number, so copies are as far apart in time as can be. If no request is long enough,
  rows repeat from the start. Both are labelled ``reuse-shifted``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from moesim.trace.workload.selection import Admitted, select
from moesim.trace.workload.spec import WorkloadSpec
from moesim.trace.workload.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from moesim.trace import Trace


@dataclass(frozen=True)
class Workload:
    """The steps of a workload, in order.

    Attributes
    ----------
    spec : WorkloadSpec
        What was asked for.
    steps : sequence of Step
        The steps, each made when it is asked for.
    admitted : tuple of Admitted
        The requests in the order of their admission; `Step.requests` counts in it.
    labels : tuple of str
        What a result must say: ``"prompt-truncated"``, ``"reuse-shifted"``.
    digest : str
        sha256 of the specification and the trace.
    """

    spec: WorkloadSpec
    steps: Steps
    admitted: tuple[Admitted, ...]
    labels: tuple[str, ...]
    digest: str

    @property
    def requests(self) -> tuple[int, ...]:
        """Trace request of each admitted one."""
        return tuple(a.request for a in self.admitted)

    @property
    def label(self) -> str:
        """The labels in one string, empty if there are none."""
        return ", ".join(self.labels)

    @property
    def max_tokens(self) -> int:
        """Rows of the largest step."""
        return max(s.n_tokens for s in self.steps.stretches)

    def within(self, prompt_rows: int | None) -> WorkloadSpec:
        """Ask for the same with prefill steps of so many rows at most, unless it says itself how many; None: any number."""
        if prompt_rows is None or self.spec.prefill_chunk is not None:
            return self.spec
        longer = any(s.n_tokens > prompt_rows for s in self.steps.stretches if s.phase == "prefill")
        return replace(self.spec, prefill_chunk=prompt_rows) if longer else self.spec

    @property
    def peak_kv_tokens(self) -> int:
        """Most tokens of KV cache reserved at once."""
        return max(s.kv_tokens for s in self.steps.stretches)


def compose(trace: Trace, spec: WorkloadSpec, *, require_signals: Collection[str] = frozenset()) -> Workload:
    """Compose requests of a trace into batched steps.

    Parameters
    ----------
    trace : Trace
        What was recorded.
    spec : WorkloadSpec
        What is asked for.
    require_signals : collection of str
        Signals of the trace that must cover every request chosen. A signal that covers no prompt row at all
        needs to cover the decode rows only.

    Returns
    -------
    Workload
        The steps, whose routing is looked up when first used.

    Raises
    ------
    WorkloadError
        If too few requests qualify; the message tells how many do, and what the trace holds.
    """
    admitted, labels = select(trace, spec, require_signals)
    asked = {**asdict(spec), "require_signals": sorted(require_signals), "trace": trace.digest}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return Workload(spec, Steps(admitted, spec, trace), tuple(admitted), labels, digest)


def drawn(trace: Trace, workload: Workload, signals: Collection[str]) -> str:
    """Say how many requests were drawn from how many, and which signals leave others out."""
    n_drawn, recorded = len(set(workload.requests)), trace.requests.signals
    n_covered = sum(set(signals).issubset(names) for names in recorded)
    text = f"{n_drawn} request{'s' if n_drawn > 1 else ''} of "
    if n_covered == len(recorded):
        return f"{text}{n_covered}"
    which = f"signal {' and '.join(sorted(signals))}" if len(signals) < 3 else f"the {len(signals)} signals needed"
    return f"{text}the {n_covered} with {which}"
