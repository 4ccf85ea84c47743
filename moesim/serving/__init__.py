"""Requests that arrive while others are served: arrivals, schedulers, and the steps they make."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from moesim.core.units import NS_PER_S
from moesim.errors import WorkloadError
from moesim.serving import schedulers as _  # noqa: F401, they register themselves
from moesim.serving.arrivals import Arrival, Closed, Open, poisson, same
from moesim.serving.drafts import read_drafts
from moesim.serving.requests import Request, RequestRecord
from moesim.serving.scheduler import SCHEDULERS, Rows, Scheduler, make_scheduler
from moesim.serving.steps import ServedWorkload
from moesim.trace.workload import Workload, compose
from moesim.trace.workload.compose import REUSE_SHIFTED
from moesim.trace.workload.spec import ANSWER, PROMPT, REQUESTS

if TYPE_CHECKING:
    from moesim.serving.arrivals import Source
    from moesim.trace import Trace
    from moesim.trace.workload import WorkloadSpec

__all__ = ["SCHEDULERS", "Request", "RequestRecord", "Rows", "Scheduler", "ServedWorkload", "composed", "make_scheduler"]


def composed(trace: Trace, spec: WorkloadSpec, *, require_signals: Collection[str] = frozenset()) -> Workload:
    """Compose what was asked for: batches that are there from the start, or requests that arrive.

    Parameters
    ----------
    trace : Trace
        Routing of the requests.
    spec : WorkloadSpec
    require_signals : collection of str
        Signals of the trace that must cover every request that is read.

    Returns
    -------
    Workload
        Of requests that arrive a `ServedWorkload`.

    Raises
    ------
    WorkloadError
        If no request of the trace will do, or the scheduler is asked for what it does not have.
    """
    return served(trace, spec, require_signals) if spec.served else compose(trace, spec, require_signals=require_signals)


def served(trace: Trace, spec: WorkloadSpec, require_signals: Collection[str]) -> ServedWorkload:
    """Compose a served workload."""
    table, wanted = trace.requests, frozenset(require_signals)
    usable = [i for i in range(len(table)) if wanted.issubset(table.signals[i]) and table.n_prompt[i] + table.n_decode[i] > 0]
    if not usable:
        raise WorkloadError(
            f"workload: expected a recorded request with signals {sorted(wanted)}, got none; choose another trace"
        )
    order = tuple(usable[i] for i in np.random.default_rng(spec.seed).permutation(len(usable)))
    prompt, answer = spec.prompt_tokens or PROMPT, spec.answer_tokens or ANSWER
    n_requests = spec.n_requests or REQUESTS
    scheduler = make_scheduler(spec.scheduler_options)
    scheduler.longest = prompt + answer
    end_ns = None if spec.until_s is None else round(spec.until_s * NS_PER_S)

    def source() -> Source:
        lengths = same(prompt, answer)
        if spec.closed is not None:
            return Closed(spec.closed, round((spec.think_s or 0) * NS_PER_S), lengths, n_requests)
        assert spec.rate is not None
        times = poisson(spec.rate, n_requests, spec.seed)
        return Open(Arrival(ns, *one) for ns, one in zip(times, lengths, strict=False))

    drafts = None if spec.drafts is None else read_drafts(json.loads(str(spec.drafts)))
    longest_decode = int(max(table.n_decode[i] for i in usable))
    wraps = n_requests > len(usable) or answer > longest_decode + 1
    return ServedWorkload(
        spec, (REUSE_SHIFTED,) if wraps else (), trace=trace, scheduler=scheduler, make_source=source, n_requests=n_requests,
        longest=prompt + answer, answer=answer, end_ns=end_ns, order=order, drafts=drafts,
    )  # fmt: skip
