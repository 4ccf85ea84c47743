"""Batches by the scheduler `static` against the same batches known from the start."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moesim.serving import composed
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import Script, machine, on_demand, play, tiny_model

PROMPT, DECODE = 5, 4


def recorded(n: int) -> Trace:
    rng = np.random.default_rng(3)
    rows = np.array([[rng.choice(4, 2, replace=False) for _ in range(2)] for _ in range(n * (PROMPT + DECODE))], np.uint8)
    weights = np.broadcast_to(np.array([0.75, 0.25]), rows.shape)
    return Trace.build(
        experts=rows, weights=weights, n_prompt=[PROMPT] * n, n_decode=[DECODE] * n, n_experts=4, model="tiny", label="synthetic"
    )  # fmt: skip


def first(fetch: Any, view: Any) -> Any:
    return next(
        (unit for unit in view.residents(fetch.device, fetch.pool) if not view.is_in_use(*unit, fetch.device)), None
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["simpy", "native"])
@pytest.mark.parametrize(("size", "batches", "chunk"), [(1, 3, None), (3, 1, None), (3, 2, None), (3, 1, 4), (2, 2, 7)])
def test_batches_are_the_same_to_the_nanosecond(size: int, batches: int, chunk: int | None, engine: str):
    n = size * batches
    trace = recorded(n)
    known = WorkloadSpec(
        batch_size=size, n_batches=batches, prompt_tokens=PROMPT, decode_tokens=DECODE, prefill_chunk=chunk, seed=2
    )  # fmt: skip
    scheduler = {"name": "static", "size": size} | ({"prefill_chunk": chunk} if chunk else {})
    served = WorkloadSpec(
        closed=n, n_requests=n, prompt_tokens=PROMPT, answer_tokens=DECODE + 1, scheduler=json.dumps(scheduler), seed=2
    )  # fmt: skip
    works = [compose(trace, known), composed(trace, served)]
    found = []
    for work in works:
        heard: list[Any] = []
        policy = Script(routed=on_demand, slots=4, evict=first, hear=["StepBegin"])
        policy.decide = _listening(policy.decide, heard)  # type: ignore[method-assign]
        records = play(policy, work, machine(), model=tiny_model(), engine=engine)
        found.append(([step._replace(batch=0) for step in records.steps], list(records.tasks), list(records.transfers), heard))
        assert len(records.steps) == batches * (DECODE + -(-size * PROMPT // (chunk or size * PROMPT)))
    assert found[0][0][-1].end == found[1][0][-1].end
    assert found[0] == found[1]


def _listening(decide: Any, heard: list[Any]) -> Any:
    def listen(event: Any, view: Any) -> Any:
        if type(event).__name__ == "StepBegin":
            heard.append((event.step, event.phase, event.requests.tolist(), event.last_chunk))
        return decide(event, view)

    return listen
