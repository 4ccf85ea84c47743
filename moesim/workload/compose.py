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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from moesim.errors import WorkloadError
from moesim.workload.routing import LayerRouting, MicroBatch, RoutingSource
from moesim.workload.selection import Admitted, select
from moesim.workload.steps import Step, schedule

if TYPE_CHECKING:
    from collections.abc import Collection

    from moesim.trace import Trace

__all__ = ["Admitted", "LayerRouting", "MicroBatch", "Step", "Workload", "WorkloadSpec", "compose"]


@dataclass(frozen=True)
class WorkloadSpec:
    """What to run: how many requests at once, how long, and in which groups.

    Parameters
    ----------
    batch_size : int
        Requests active at once.
    prompt_tokens : int or None
        Tokens of each prompt; None: as recorded, which makes prompts ragged. 0: requests begin with their first decoded
        token, and contexts count from there.
    decode_tokens : int or None
        Decode steps of each request; None: as recorded.
    n_batches : int
        Batches, one after another; all their requests are distinct.
    seed : int
        Seed of the choice of requests.
    micro_batches : int
        Groups into which each step is split; a step with fewer sequences has fewer.
    prefill_chunk : int or None
        Most tokens of a prefill step, over all its requests, first come first served; None: all prompts in
        one step.
    refill : bool
        Admit the next request as soon as one leaves, so that ``n_batches * batch_size`` requests pass
        through.
    reuse : "shifted" or None
        How to go beyond what was recorded; None: not at all.
    requests : None, "all" or sequence of int
        None: chosen with the seed. "all": every request that qualifies, in trace order. Or just these, in
        this order. With "all" or a list, the number of batches follows from it.

    Raises
    ------
    WorkloadError
        If a value is out of range.
    """

    batch_size: int = 1
    prompt_tokens: int | None = None
    decode_tokens: int | None = None
    n_batches: int = 1
    seed: int = 0
    micro_batches: int = 1
    prefill_chunk: int | None = None
    refill: bool = False
    reuse: str | None = None
    requests: str | tuple[int, ...] | list[int] | None = None

    def __post_init__(self) -> None:
        smallest = {"batch_size": 1, "prompt_tokens": 0, "decode_tokens": 0, "n_batches": 1, "seed": 0}
        smallest |= {"micro_batches": 1, "prefill_chunk": 1}
        may_be_none = {"prompt_tokens", "decode_tokens", "prefill_chunk"}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is None and name in may_be_none:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise WorkloadError(f"workload.{name}: expected an integer of at least {least}, got {value!r}")
        if self.prompt_tokens == self.decode_tokens == 0:
            raise WorkloadError("workload: expected prompt_tokens or decode_tokens of at least 1, got 0 of both; ask for some")
        if not isinstance(self.refill, bool):
            raise WorkloadError(f"workload.refill: expected true or false, got {self.refill!r}")
        if self.reuse not in (None, "shifted"):
            raise WorkloadError(f"workload.reuse: expected 'shifted' or nothing, got {self.reuse!r}")
        if self.micro_batches > self.batch_size:
            raise WorkloadError(
                f"workload.micro_batches: expected at most batch_size = {self.batch_size}, got "
                f"{self.micro_batches}; a micro-batch holds whole requests"
            )
        if isinstance(self.requests, list):
            object.__setattr__(self, "requests", tuple(self.requests))
        self._check_requests()

    def _check_requests(self) -> None:
        if self.requests is None:
            return
        named = self.requests
        if named != "all" and not (
            isinstance(named, tuple) and named and all(isinstance(r, int) and not isinstance(r, bool) for r in named)
        ):
            raise WorkloadError(f"workload.requests: expected 'all' or a list of request numbers, got {named!r}")
        if self.n_batches != 1:
            raise WorkloadError(
                f"workload.n_batches: expected 1 (the default) beside workload.requests, got {self.n_batches}"
                "; the number of batches follows from the requests"
            )
        if isinstance(named, tuple) and len(set(named)) != len(named) and self.reuse is None:
            raise WorkloadError("workload.requests: a request is named twice; name it once, or set reuse: shifted")


@dataclass(frozen=True)
class Workload:
    """The steps of a workload, in order.

    Attributes
    ----------
    spec : WorkloadSpec
        What was asked for.
    steps : list of Step
        The steps.
    admitted : tuple of Admitted
        The requests in the order of their admission; `Step.requests` counts in it.
    labels : tuple of str
        What a result must say: ``"prompt-truncated"``, ``"reuse-shifted"``.
    digest : str
        sha256 of the specification and the trace.
    """

    spec: WorkloadSpec
    steps: list[Step]
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
        return max(s.n_tokens for s in self.steps)

    @property
    def peak_kv_tokens(self) -> int:
        """Most tokens of KV cache reserved at once."""
        return max(s.kv_tokens for s in self.steps)


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
    steps = list(schedule(admitted, spec))
    source = RoutingSource(trace, sum(s.n_tokens for s in steps), sum(s.n_micro for s in steps))
    for step in steps:
        step.source = source
    asked = {**asdict(spec), "require_signals": sorted(require_signals), "trace": trace.digest}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return Workload(spec, steps, tuple(admitted), labels, digest)
