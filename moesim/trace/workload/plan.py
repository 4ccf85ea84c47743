"""Which requests run together, and for how long: a workload as stretches of steps in which the same requests take part."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from moesim.trace.workload.selection import Admitted
    from moesim.trace.workload.spec import WorkloadSpec


class Stretch(NamedTuple):
    """Steps on end with the same requests: one step of prefill, or steps of decode until a request comes or goes."""

    phase: str  # `"prefill"` or `"decode"`
    batch: int
    n_steps: int
    # requests of the stretch as places in Workload.requests, rows of this phase that each has had before, rows in each step
    slots: NDArray[np.int64]
    done: NDArray[np.int64]
    counts: NDArray[np.int64]
    last_chunk: bool
    kv_tokens: int  # in each of its steps

    @property
    def n_tokens(self) -> int:
        """Rows of each of its steps."""
        return int(self.counts.sum())


class Progress(NamedTuple):
    """How far the requests of a stretch are, one entry each."""

    before: NDArray[np.int64]  # rows that it has had before, prompt and decode
    begins: NDArray[np.bool_]  # it is admitted at the first step
    produces: NDArray[np.bool_]  # a token comes of each step: not so for a prompt's earlier chunks
    ends: NDArray[np.bool_]  # it leaves at the end of the last step


class Requests:
    """The admitted requests as columns, one entry each."""

    def __init__(self, admitted: Sequence[Admitted]) -> None:
        self.admitted = admitted
        self.context = np.array([one.context for one in admitted], np.int64)
        self.n_prompt = np.array([len(one.prompt_rows) for one in admitted], np.int64)
        self.n_decode = np.array([len(one.decode_rows) for one in admitted], np.int64)
        self.final_tokens = self.context + self.n_prompt + self.n_decode

    def progress(self, stretch: Stretch) -> Progress:
        """Say how far the requests of a stretch are."""
        n_prompt, n_decode = self.n_prompt[stretch.slots], self.n_decode[stretch.slots]
        done, new = stretch.done, stretch.counts * stretch.n_steps
        if stretch.phase == "decode":
            everywhere = np.ones(len(done), bool)
            return Progress(n_prompt + done, (done == 0) & (n_prompt == 0), everywhere, done + new == n_decode)
        whole = done + new == n_prompt
        return Progress(done, done == 0, whole, whole & (n_decode == 0))


def plan(requests: Requests, spec: WorkloadSpec) -> Iterator[Stretch]:
    """Lay requests out in stretches: in order of admission, each batch prefill first."""
    n, begun = len(requests.admitted), 0
    slots = done = np.empty(0, np.int64)  # those active, in the order of admission, and the decode rows that they have had
    batch = -1
    while begun < n or len(slots):
        if begun < n and (not len(slots) or (spec.refill and len(slots) < spec.batch_size)):
            new = np.arange(begun, min(n, begun + spec.batch_size - len(slots)))
            begun = int(new[-1]) + 1
            batch = 0 if spec.refill else batch + 1
            yield from _prefill(requests, new, slots, batch, spec.prefill_chunk)
            new = new[requests.n_decode[new] > 0]
            slots, done = np.concatenate([slots, new]), np.concatenate([done, np.zeros_like(new)])
        if len(slots):
            n_steps = int((requests.n_decode[slots] - done).min())
            if begun < n and spec.refill and len(slots) < spec.batch_size:
                n_steps = 1
            kv_tokens = int(requests.final_tokens[slots].sum())
            yield Stretch("decode", batch, n_steps, slots, done, np.ones_like(slots), True, kv_tokens)
            done = done + n_steps
            going_on = done < requests.n_decode[slots]
            slots, done = slots[going_on], done[going_on]


def _prefill(
    requests: Requests, new: NDArray[np.int64], active: NDArray[np.int64], batch: int, chunk: int | None
) -> Iterator[Stretch]:
    """Plan the prefill steps of requests admitted together; those without prompt rows have none."""
    new = new[requests.n_prompt[new] > 0]
    if not len(new):
        return
    ends = np.cumsum(requests.n_prompt[new])  # of each prompt, in rows of all of them
    starts = ends - requests.n_prompt[new]
    total = int(ends[-1])
    held = int(requests.final_tokens[active].sum())
    for first in range(0, total, chunk or total):
        last = min(first + (chunk or total), total)
        here = slice(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(starts, last)))
        slots, done = new[here], np.maximum(first - starts[here], 0)
        counts = np.minimum(ends[here], last) - starts[here] - done
        held += int(requests.final_tokens[slots[done == 0]].sum())
        yield Stretch("prefill", batch, 1, slots, done, counts, last == total, held)
        over = (ends[here] <= last) & (requests.n_decode[slots] == 0)
        held -= int(requests.final_tokens[slots[over]].sum())
