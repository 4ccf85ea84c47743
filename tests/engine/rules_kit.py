"""Copies, workloads and policies that the tests of the rules share."""

from __future__ import annotations

from typing import Any

from moesim.policy import Copy, Fetch, Pool, Routed, Run
from tests.engine.engine_kit import cpu, gpu, machine, workload

ALL = [Copy(layer, range(4), "gpu0") for layer in (0, 1)]
ONE = workload([[[[0, 1], [2, 3]]]])  # one request, one decode step: layer 0 -> 0, 1; layer 1 -> 2, 3
TWO = workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]])  # row 1: layer 0 -> 1, 2


def on_gpu(event: Routed, view: Any) -> list[Any]:
    return [Run(event.layer, event.active, "gpu0")]


def on_demand(event: Routed, view: Any) -> list[Any]:
    return [Fetch(event.layer, event.active, "gpu0"), Run(event.layer, event.active, "gpu0")]


def idle(fetch: Fetch, view: Any) -> tuple[int, int] | None:
    """Name the first idle resident of the pool."""
    for layer, expert in view.residents(fetch.device, fetch.pool):
        if not view.is_in_use(layer, expert, fetch.device):
            return layer, expert
    return None


def two_gpus(**links: Any) -> Any:
    names = ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0", "gpu0->gpu1", "gpu1->gpu0")
    return machine({"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}, {n: links[n] for n in names if n in links})


POOLS = [Pool("gpu0", "cache", 8000), Pool("gpu1", "cache", 8000)]
