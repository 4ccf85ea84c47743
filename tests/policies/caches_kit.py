"""Caches of engines on a tiny machine: short runs, what they serve, copy and drop, and random instances to restate a rule on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moesim.policies.registry import make_policy
from moesim.records import Records
from tests.engine.engine_kit import cpu, gpu, link, machine, play, tiny_model, workload

FAST = machine({"gpu0": gpu(), "cpu0": cpu()}, {"cpu0->gpu0": link(100), "gpu0->cpu0": link()})
"""A copy takes 10 ns, so that it has arrived before anybody asks for it again."""
Unit = tuple[int, int]


def run(
    spec: Any, steps: Sequence[Any], slots: int, *, layers: int = 1, hardware: Any = FAST, least: int = 8, **more: Any
) -> Records:
    """Decode one token a step; ``steps`` has the experts of each layer, or of the only one."""
    rows = [step if layers > 1 else [step] for step in steps]
    n_experts = max(least, 1 + max(e for row in rows for of_layer in row for e in of_layer))
    top_k = len(rows[0][0])
    model = tiny_model(n_layers=layers, n_experts=n_experts, top_k=top_k)
    work = workload([rows], n_experts=n_experts, weights=[1 / top_k] * top_k, **more)
    return play(make_policy(spec), work, hardware, model=model, slots={"gpu0": slots})


def served(records: Records) -> list[list[int]]:
    """Return what ran on the GPU in each step."""
    on_gpu: list[list[int]] = [[] for _ in records.steps]
    for task in records.tasks:
        if task.expert >= 0 and task.device == "gpu0":
            on_gpu[task.step].append(task.expert)
    return on_gpu


def step_at(records: Records, time: int) -> int:
    """Return the step that goes on at a time; where one ends as another begins, the later."""
    return int(np.searchsorted([step.begin for step in records.steps], time, "right")) - 1


def copied(records: Records) -> list[tuple[int, int]]:
    """Return (step, expert) of each copy."""
    return [(step_at(records, t.submitted), t.expert) for t in records.transfers if t.expert >= 0]


class Step(NamedTuple):
    """What a cache does in a step."""

    on_gpu: list[list[int]]  # of each layer, ascending
    copies: list[Unit]  # in order
    leave: list[Unit]  # the cache, in order


def happened(records: Records, n_layers: int) -> list[Step]:
    """Return what happened in each step."""
    found = [Step([[] for _ in range(n_layers)], [], []) for _ in records.steps]
    for task in sorted(t for t in records.tasks if t.expert >= 0 and t.device == "gpu0"):
        found[task.step].on_gpu[task.layer].append(task.expert)
    for copy in records.transfers:
        if copy.expert >= 0 and copy.link == "cpu0->gpu0":
            found[step_at(records, copy.submitted)].copies.append((copy.layer, copy.expert))
    for gone in records.evictions:
        if gone.pool == "cache":
            found[step_at(records, gone.time)].leave.append((gone.layer, gone.expert))
    return [Step([sorted(ids) for ids in one.on_gpu], one.copies, one.leave) for one in found]
