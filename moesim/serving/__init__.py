"""Requests that arrive while others are served: arrivals, schedulers, and the steps they make."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moesim.core.units import NS_PER_S
from moesim.errors import ConfigError, WorkloadError
from moesim.serving import schedulers as _  # noqa: F401, they register themselves
from moesim.serving.arrivals import Asked, Closed, Conversations, Open, asked_of
from moesim.serving.audit import check_promises
from moesim.serving.drafts import read_drafts
from moesim.serving.files import read_requests
from moesim.serving.request_file import RequestFile
from moesim.serving.requests import Request, RequestRecord
from moesim.serving.scheduler import SCHEDULERS, Rows, Scheduler, make_scheduler
from moesim.serving.steps import ServedWorkload
from moesim.trace.workload import Workload, compose
from moesim.trace.workload.compose import REUSE_SHIFTED
from moesim.trace.workload.spec import POISSON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.arrivals import Source
    from moesim.trace import Trace
    from moesim.trace.workload import WorkloadSpec

__all__ = [
    "SCHEDULERS", "Request", "RequestFile", "RequestRecord", "Rows", "Scheduler", "ServedWorkload", "composed", "file_of",
    "make_scheduler",
]  # fmt: skip


def composed(
    trace: Trace, spec: WorkloadSpec, *, require_signals: Collection[str] = frozenset(), file: RequestFile | None = None
) -> Workload:
    """Compose what was asked for: batches that are there from the start, or a `ServedWorkload` of requests that arrive."""
    if not spec.served:
        return compose(trace, spec, require_signals=require_signals)
    return served(trace, spec, require_signals, file or file_of(spec))


def file_of(spec: WorkloadSpec) -> RequestFile | None:
    """Read the file of requests that a workload names, if it does; WorkloadError names the key."""
    if spec.file is None:
        return None
    key, name, most = spec.file
    try:
        return read_requests(name, most)
    except WorkloadError as error:
        random = f", or set it to {POISSON}" if key == "arrivals" and not Path(name).suffix else ""
        raise WorkloadError(f"workload.{key}: {error}{random}") from None


def served(trace: Trace, spec: WorkloadSpec, require_signals: Collection[str], file: RequestFile | None) -> ServedWorkload:
    """Compose a served workload."""
    table, wanted = trace.requests, frozenset(require_signals)
    usable = [i for i in range(len(table)) if wanted.issubset(table.signals[i]) and table.n_prompt[i] + table.n_decode[i] > 0]
    if not usable:
        raise WorkloadError(
            f"workload: expected a recorded request with signals {sorted(wanted)}, got none; choose another trace"
        )
    order = np.array(usable)[np.random.default_rng(spec.seed).permutation(len(usable))]
    asked = asked_of(spec, file)
    try:
        scheduler = make_scheduler(spec.scheduler_options)
    except ConfigError as error:  # whoever asks says of which file
        raise WorkloadError(str(error)) from None
    scheduler.longest, scheduler.at_once = int((asked.prompt + asked.answer).max()), asked.at_once(spec.closed)
    check_promises(scheduler)
    end_ns = None if spec.until_s is None else round(spec.until_s * NS_PER_S)

    def source() -> Source:
        if asked.sessions is not None:
            return Conversations(asked, asked.sessions, spec.closed or 0, round((spec.think_s or 0) * NS_PER_S))
        if spec.closed is not None:
            return Closed(spec.closed, round((spec.think_s or 0) * NS_PER_S), asked)
        return Open(asked)

    read = order[np.arange(len(asked)) % len(order)]
    beyond = (asked.prompt > table.n_prompt[read]) | (asked.answer > table.n_decode[read] + 1)
    labels = [REUSE_SHIFTED] if len(asked) > len(order) or beyond.any() else []
    if file is not None and file.failed:
        labels.append(f"{file.failed} failed requests of {file.name} left out")
    if file is not None and file.assumed:
        labels.append(f"tokens of {file.name}: {file.assumed}")
    labels += _refused(asked, scheduler)
    drafts = None if spec.drafts is None else read_drafts(json.loads(str(spec.drafts)))
    scheduler.window = 1 if drafts is None else 1 + drafts.n
    if drafts is not None and not scheduler.drafts:
        labels.append(f"{scheduler.name} has no drafts in its released form")
    return ServedWorkload(
        spec, tuple(labels), trace=trace, scheduler=scheduler, make_source=source, asked=asked, end_ns=end_ns, drafts=drafts,
        order=tuple(order.tolist()),
    )  # fmt: skip


def _refused(asked: Asked, scheduler: Scheduler) -> Sequence[str]:
    """Name the requests that the scheduler can never serve; WorkloadError if these are all."""
    room = scheduler.longest_possible
    (long,) = np.nonzero(asked.prompt + asked.answer > room)
    if not len(long):
        return []
    first = f"request {long[0]} of {asked.prompt[long[0]]} + {asked.answer[long[0]]} tokens"
    if len(long) == len(asked):
        raise WorkloadError(
            f"workload.scheduler: expected room for a request, got {room} tokens of KV cache for one in {scheduler.name}; all "
            f"{len(long)} are longer, the first {first}; raise kv_tokens, or the rows of a step where it cuts no prompts"
        )
    refused = f"{len(long)} of {len(asked)} requests refused"
    return [f"{refused} (longer than the {room} tokens of KV cache for one): first {first}"]
