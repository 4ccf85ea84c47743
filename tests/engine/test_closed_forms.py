"""Whole runs whose makespan a formula gives, exact to the ns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.policy import PREFETCH, Copy, Drop, Fetch, Pool, Routed, Run
from tests.engine.engine_kit import EXPERT_BYTES, Script, cpu, gpu, link, machine, play, tiny_model, workload

LAYERS, EXPERTS, STEPS = 3, 6, 4
DENSE, GPU, CPU_BASE, CPU_ROW, HEAD = 100, 100, 300, 100, 70


def _model(**changes: Any) -> Any:
    return tiny_model(n_layers=LAYERS, n_experts=EXPERTS, **changes)


def _routing(n_requests: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [[[rng.permutation(EXPERTS)[:2].tolist() for _ in range(LAYERS)] for _ in range(STEPS)] for _ in range(n_requests)]


def _work(n_requests: int = 1) -> Any:
    return workload(_routing(n_requests), n_experts=EXPERTS)


def _active(work: Any) -> list[list[list[int]]]:
    """Rows of each active expert, by step and layer."""
    return [[[n for n in layer.rows if n] for layer in step.micro[0].layers] for step in work.steps]


EVERYTHING = [Copy(layer, range(EXPERTS), "gpu0") for layer in range(LAYERS)]
ROOM = LAYERS * EXPERTS


def _resident(event: Routed, view: Any) -> list[Any]:
    return [Run(event.layer, event.active, "gpu0")]


@pytest.mark.parametrize("n_requests", [1, 3])
def test_all_resident(n_requests: int) -> None:
    """Every step takes embedding + L dense + (number of active experts) g + head."""
    work = _work(n_requests)
    toy = machine({"gpu0": gpu(embedding_ns=30, head_ns=HEAD), "cpu0": cpu()})
    records = play(Script(copies=EVERYTHING, slots=ROOM, routed=_resident), work, toy, model=_model())
    steps = [30 + sum(DENSE + GPU * len(rows) for rows in layers) + HEAD for layers in _active(work)]
    assert [s.end - s.begin for s in records.steps] == steps
    assert records.makespan_ns == sum(steps)
    if n_requests == 1:  # L (dense + k g) a token
        assert records.makespan_ns == STEPS * (30 + LAYERS * (DENSE + 2 * GPU) + HEAD)


@pytest.mark.parametrize(("bytes_per_ns", "latency"), [(1, 0), (4, 13), (100, 0)])
def test_no_cache_on_the_gpu(bytes_per_ns: int, latency: int) -> None:
    """Each layer takes dense + n t + g while the copies (t) are the slower ones, else dense + t + n g."""
    work = _work(2)
    toy = machine(links={"cpu0->gpu0": link(bytes_per_ns, latency), "gpu0->cpu0": link()})

    def routed(event: Routed, view: Any) -> list[Any]:
        layer, active = event.layer, event.active
        return [Fetch(layer, active, "gpu0"), Run(layer, active, "gpu0"), Drop(layer, active, "gpu0")]

    records = play(Script(slots=EXPERTS, routed=routed), work, toy, model=_model())
    t = latency + EXPERT_BYTES // bytes_per_ns
    expected = sum(
        DENSE + (n * t + GPU if t >= GPU else t + n * GPU)
        for layers in _active(work) for rows in layers for n in [len(rows)]
    )  # fmt: skip
    assert records.makespan_ns == expected
    assert len(records.transfers) == len(records.evictions) == sum(len(rows) for layers in _active(work) for rows in layers)


def test_no_gpu_experts() -> None:
    """Experts on the CPU: dense + rows in + the experts one after the other + rows out."""
    work = _work(3)

    def routed(event: Routed, view: Any) -> list[Any]:
        return [Run(event.layer, event.active, "cpu0")]

    records = play(Script(routed=routed), work, model=_model())
    cross = 10 + 10 * 3
    expected = sum(DENSE + 2 * cross + sum(CPU_BASE + CPU_ROW * n for n in rows) for layers in _active(work) for rows in layers)
    assert records.makespan_ns == expected


class _Ahead(Script):
    """Knows the routing: while a layer computes it loads the next one's experts, and drops its own at its end."""

    def __init__(self, work: Any) -> None:
        super().__init__(slots=4, pools=[Pool("gpu0", "cache", 4 * EXPERT_BYTES)], hear=["LayerBegin", "LayerEnd", "Routed"])
        self.sequence = [layer.active for step in work.steps for layer in step.micro[0].layers]
        self.at = 0

    def decide(self, event: Any, view: Any) -> Any:
        kind = type(event).__name__
        if kind == "Routed":
            return [Run(event.layer, event.active, "gpu0")]
        if kind == "LayerEnd":
            self.at += 1
            return [Drop(event.layer, self.sequence[self.at - 1], "gpu0")]
        actions = [Fetch(event.layer, self.sequence[0], "gpu0")] if self.at == 0 else []
        if self.at + 1 < len(self.sequence):
            actions.append(Fetch((event.layer + 1) % LAYERS, self.sequence[self.at + 1], "gpu0", PREFETCH))
        return actions


@pytest.mark.parametrize("bytes_per_ns", [10, 8])
def test_perfect_prefetch_hides_copies_that_are_shorter_than_the_computation(bytes_per_ns: int) -> None:
    """Two copies (t each) during dense + 2 g = 300 of the layer before: only the first layer waits for any.

    Its copies begin with the step, so it takes max(dense, t) + ... = 2 t + g where t >= g.
    """
    work = _work()
    toy = machine(links={"cpu0->gpu0": link(bytes_per_ns), "gpu0->cpu0": link()})
    records = play(_Ahead(work), work, toy, model=_model())
    t = EXPERT_BYTES // bytes_per_ns
    first = max(DENSE, t, 2 * t - GPU) + 2 * GPU
    assert records.makespan_ns == first + (STEPS * LAYERS - 1) * (DENSE + 2 * GPU)


def test_a_saturated_link_sets_the_pace() -> None:
    """The link never rests: the run takes all copies, then the last expert."""
    work = _work()
    records = play(_Ahead(work), work, model=_model())
    n_copies = 2 * STEPS * LAYERS
    assert records.makespan_ns == n_copies * EXPERT_BYTES + GPU
    assert sum(t.end - t.start for t in records.transfers) == n_copies * EXPERT_BYTES


@pytest.mark.parametrize("chunk", [1000, 250, 300])
def test_chunks_cost_a_latency_each(chunk: int) -> None:
    """The same with chunks: every piece pays the latency."""
    work = _work()
    toy = machine(links={"cpu0->gpu0": link(latency_ns=20), "gpu0->cpu0": link()})
    records = play(_Ahead(work), work, toy, model=_model(), chunk_bytes=chunk)
    pieces = -(-EXPERT_BYTES // chunk)
    assert records.makespan_ns == 2 * STEPS * LAYERS * (EXPERT_BYTES + 20 * pieces) + GPU
