"""What every run of a policy is checked for, and what its class must declare."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.experiment.runner import initial_placement
from moesim.hardware import HardwareProfile
from moesim.policies.options import options_of, wrong_declaration
from moesim.records import Records
from moesim.testing.runs import run_inputs
from moesim.trace.workload import Workload

if TYPE_CHECKING:
    from moesim.trace import Trace


class CheckError(AssertionError):
    """A policy does not do what the contract asks of it."""


def expect(holds: bool, message: str) -> None:
    """Raise a CheckError unless something holds."""
    if not holds:
        raise CheckError(message)


def check_slots(policy: Any, workload: tuple[Trace, Workload], records: Records) -> None:
    """Check that each slot of each layer visit was served once, and as the policy declares."""
    ran: Counter[tuple[int, int, int]] = Counter()
    for task in records.tasks:
        if task.kind == "expert":
            ran[task.step, task.layer, task.expert] += task.rows
    wanted: Counter[tuple[int, int, int]] = Counter()
    mass: dict[int, float] = defaultdict(float)
    for step in workload[1].steps:
        for micro in step.micro:
            for layer, routing in enumerate(micro.layers):
                wanted.update({(step.index, layer, expert): routing.rows[expert] for expert in routing.active})
                mass[step.index] += 0 if routing.weights is None else routing.weights.sum(dtype=np.float64)
    if policy.exact:
        expect(ran == wanted, "experts were executed for other rows than were routed to them")
        expect(not records.inexact, "exact, and yet not all slots are fresh")
        return
    served, slots = _by_visit(ran), _by_visit(wanted)
    for inexact in records.inexact:
        if inexact.kind == "skipped":
            served[inexact.step, inexact.layer] += inexact.slots
    expect(served == slots, "rows executed and slots skipped are not the slots there were")
    lost: dict[int, float] = defaultdict(float)
    for inexact in records.inexact:
        lost[inexact.step] += inexact.mass or 0
    for done in records.steps:
        expect(math.isclose(done.gate_mass, mass[done.step], rel_tol=1e-9), f"gate weights of step {done.step}")
        expect(lost[done.step] <= done.gate_mass * (1 + 1e-9), f"more than all of step {done.step} is not fresh")


def check_weights(
    policy: Any,
    workload: tuple[Trace, Workload],
    records: Records,
    slots: int,
    hardware: HardwareProfile | None = None,
    **changes: Any,
) -> None:
    """Check that whatever was executed had its weights there from start to end; the arguments are those of `run_tiny`."""
    inputs = run_inputs(policy, workload, slots, hardware, changes)
    machine = inputs["costs"].hardware
    copies = initial_placement(**inputs).copies
    stays: dict[tuple[Any, ...], list[tuple[int, str]]] = {}  # device, layer, expert, bits -> when it came and went
    for copy in copies:
        for expert in copy.experts:
            stays[copy.device, copy.layer, expert, copy.bits] = [(0, "come")]
    for transfer in records.transfers:
        if transfer.last and transfer.expert >= 0:
            unit = (machine.link(transfer.link).dst, transfer.layer, transfer.expert, transfer.bits)
            stays.setdefault(unit, []).append((transfer.end, "come"))
    for eviction in records.evictions:
        stays.setdefault((eviction.device, eviction.layer, eviction.expert, eviction.bits), []).append((eviction.time, "go"))
    for task in records.tasks:
        if task.kind == "expert" and task.device not in machine.backing:
            history = stays.get((task.device, task.layer, task.expert, task.bits), [])
            before = [what for time, what in sorted(history) if time <= task.start]
            within = [what for time, what in history if task.start < time < task.end]
            there = before[-1:] == ["come"] and "go" not in within
            expect(there, f"{task.device} computed expert {task.expert} of layer {task.layer} without its weights")


def _by_visit(of_expert: Mapping[tuple[int, int, int], int]) -> Counter[tuple[int, int]]:
    total: Counter[tuple[int, int]] = Counter()
    for (step, layer, _), rows in of_expert.items():
        total[step, layer] += rows
    return total


def check_declaration(policy: Any) -> None:
    """Check that ``exact``, ``listens`` and ``needs`` are there and are what the contract says."""
    lacking = [name for name in ("place", "decide", "evict") if not callable(getattr(policy, name, None))]
    expect(not lacking, f"expected the methods place, decide and evict, got no {', no '.join(lacking)}")
    wrong = wrong_declaration(policy)
    expect(not wrong, wrong)


def check_constructor(cls: Any, given: Mapping[str, Any]) -> None:
    """Check that a class stores every option under its own name, as it was given."""
    policy = cls(**given)
    for name, parameter in options_of(cls).items():
        wanted = given.get(name, parameter.default)
        expect(hasattr(policy, name), f"option {name}: expected the attribute {name}, got none; store it in __init__")
        stored = getattr(policy, name)
        expect(stored is wanted, f"option {name}: stored {stored!r}, got {wanted!r}; change it in place()")
