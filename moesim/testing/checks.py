"""For authors of policies: a fake view, a tiny model and machine, and the checks that every policy should pass.

>>> from moesim.policies.on_demand import OnDemand
>>> check_policy(OnDemand)
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from moesim.costs import CostModel
from moesim.engine import EngineOptions, simulate
from moesim.engine.budget import initial_placement
from moesim.errors import CapacityError, describe_exception
from moesim.hardware import HardwareProfile, load_hardware
from moesim.policy import Event
from moesim.predictors.chosen import PredictorSet
from moesim.predictors.future import FutureUse
from moesim.records import Records
from moesim.testing.fakes import CPU_NS_PER_ROW, GPU_NS, TRANSFER_NS, FakeView, routed, tiny_machine, tiny_model
from moesim.testing.traces import synthetic_trace
from moesim.workload import Workload, WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.trace import Trace

__all__ = [
    "CPU_NS_PER_ROW", "GPU_NS", "TRANSFER_NS", "FakeView", "check_policy", "routed", "run_tiny", "synthetic_trace",
    "tiny_machine", "tiny_model", "tiny_workload",
]  # fmt: skip


class _Case(NamedTuple):
    batch_size: int
    micro_batches: int
    decision_ns: int
    shape: Mapping[str, int] = MappingProxyType({})  # other than the tiny model's


_CASES = (_Case(1, 1, 0), _Case(4, 1, 0), _Case(4, 2, 0), _Case(4, 4, 700), _Case(4, 1, 0, {"top_k": 1}))


def check_policy(
    make: Callable[[], Any], *, slots: Sequence[int] = (1, 4, 12, 32), hardware: HardwareProfile | None = None
) -> None:
    """Check a policy as the registry's own are checked.

    It must declare what the contract asks, store its options unchanged, place what fits, and run tiny workloads on the engine:
    prefill and decode, one request and several, one micro-batch and several, one expert a token, with and without decision
    time. Each runs again, by a copy that has been through a pickle, with the same result, and at last the same object does. In
    every run each slot is settled once - each routed expert executed for exactly its rows, if the policy is ``exact`` - and
    nothing computes with weights that are not there. The engine itself checks every action.

    Parameters
    ----------
    make : callable
        The class, or a function without parameters that returns a new policy.
    slots : sequence of int
        Cache slots to try, of 32 experts in all; 4 are one a layer. A policy may refuse fewer than 32 with a CapacityError.
    hardware : HardwareProfile or None
        The machine; None: the ``profile`` that the policy names, else `tiny_machine`.

    Raises
    ------
    AssertionError
        If a check fails.
    MoesimError
        If the engine refuses an action, or a run cannot go on.
    """
    policy = make()  # Any: a class may declare listens and needs as attributes or as properties
    _check_declaration(policy)
    if inspect.isclass(make):
        _check_constructor(make)
    for case in _CASES:
        workload = tiny_workload(policy, case.batch_size, case.micro_batches, **case.shape)
        for n_slots in slots:
            _check_case(make, case, workload, n_slots, hardware)


def _check_case(
    make: Callable[[], Any],
    case: _Case,
    workload: tuple[Trace, Workload],
    slots: int,
    hardware: HardwareProfile | None,
) -> None:
    def run(policy: Any) -> Records:
        return run_tiny(policy, workload, slots, case.decision_ns, hardware=hardware, **case.shape)

    policy = make()
    try:
        records = run(policy)
    except CapacityError:
        assert slots < 32, f"{policy!r}: does not fit even with a slot for every expert"
        return
    assert records == run(_pickled(make())), f"{policy!r}: two runs of the same inputs differ"
    assert records == run(policy), f"{policy!r}: an object that has run differs from a new one; build its state in place()"
    check_slots(policy, workload, records)
    check_weights(policy, workload, records, slots, hardware, **case.shape)


def tiny_workload(policy: Any, batch_size: int = 1, micro_batches: int = 1, **shape: Any) -> tuple[Trace, Workload]:
    """Return a made-up trace that holds what a policy needs, and a small workload of it.

    Parameters
    ----------
    policy : Policy
        Its ``needs`` decide which signals, tables and scores the trace holds.
    batch_size, micro_batches : int
        Of the workload: prompts of 12 tokens, 8 decode steps.
    **shape
        Arguments of `moesim.testing.traces.synthetic_trace`, for another model than `tiny_model`.
    """
    signals = {need.removeprefix("signal:"): 0.8 for need in policy.needs if need.startswith("signal:")}
    trace = synthetic_trace(prompt=12, decode=8, scores=True, calibration=True, signals=signals, **shape)
    spec = WorkloadSpec(
        batch_size=batch_size,
        prompt_tokens=12,
        decode_tokens=8,
        micro_batches=micro_batches,
        prefill_chunk=24,
    )
    return trace, compose(trace, spec, require_signals=frozenset(signals))


def run_tiny(
    policy: Any,
    workload: tuple[Trace, Workload],
    slots: int = 16,
    decision_ns: int = 0,
    *,
    hardware: HardwareProfile | None = None,
    **changes: Any,
) -> Records:
    """Simulate a tiny workload on the tiny machine, or on the profile that the policy names, and return the records.

    Parameters
    ----------
    policy : Policy
        Whose decisions.
    workload : tuple of Trace and Workload
        From `tiny_workload`.
    slots : int
        Cache slots of each GPU, of 32 experts in all.
    decision_ns : int
        Time charged for each decision at Routed.
    hardware : HardwareProfile or None
        Another machine.
    **changes
        Fields of the model other than `tiny_model`'s.
    """
    trace, steps = workload
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(steps))
    return simulate(
        **_inputs(policy, workload, slots, hardware, changes),
        predictors=PredictorSet(trace, steps, {}, 0),
        options=EngineOptions(decision_ns=decision_ns),
        policy_name=type(policy).__name__,
    )


def check_slots(policy: Any, workload: tuple[Trace, Workload], records: Records) -> None:
    """Check that each slot of each layer visit was settled once, and as the policy declares.

    Raises
    ------
    AssertionError
        If a slot was settled twice or never, if an exact policy did not execute each expert for exactly the rows routed to it,
        or if the gate weights of what is not fresh do not add up.
    """
    ran: Counter[tuple[int, int, int]] = Counter()
    for task in records.tasks:
        if task.kind == "expert":
            ran[task.step, task.layer, task.expert] += task.rows
    wanted: Counter[tuple[int, int, int]] = Counter()
    mass: dict[int, float] = defaultdict(float)
    for step in workload[1].steps:
        for micro in step.micro:
            for layer, routing in enumerate(micro.layers):
                wanted.update({(step.index, layer, expert): routing.loads[expert] for expert in routing.active})
                mass[step.index] += 0 if routing.weights is None else routing.weights.sum(dtype=np.float64)
    if policy.exact:
        assert ran == wanted, f"{policy!r}: experts were executed for other rows than were routed to them"
        assert not records.inexact, f"{policy!r}: exact, and yet not all slots are fresh"
        return
    settled, slots = _by_visit(ran), _by_visit(wanted)
    for inexact in records.inexact:
        if inexact.kind == "skipped":
            settled[inexact.step, inexact.layer] += inexact.slots
    assert settled == slots, f"{policy!r}: rows executed and slots skipped are not the slots there were"
    lost: dict[int, float] = defaultdict(float)
    for inexact in records.inexact:
        lost[inexact.step] += inexact.mass or 0
    for done in records.steps:
        assert math.isclose(done.gate_mass, mass[done.step], rel_tol=1e-9), f"{policy!r}: gate weights of step {done.step}"
        assert lost[done.step] <= done.gate_mass * (1 + 1e-9), f"{policy!r}: more than all of step {done.step} is not fresh"


def check_weights(
    policy: Any,
    workload: tuple[Trace, Workload],
    records: Records,
    slots: int,
    hardware: HardwareProfile | None = None,
    **changes: Any,
) -> None:
    """Check that whatever was executed had its weights there from start to end; the arguments are those of `run_tiny`.

    Raises
    ------
    AssertionError
        If an expert was executed before its copy came, or beyond the eviction of it.
    """
    inputs = _inputs(policy, workload, slots, hardware, changes)
    machine = inputs["costs"].hardware
    copies = initial_placement(**inputs).copies
    stays: dict[tuple[str, int, int], list[tuple[int, str]]] = {}  # device, layer, expert -> when it came and went
    for copy in copies:
        for expert in copy.experts:
            stays[copy.device, copy.layer, expert] = [(0, "come")]
    for transfer in records.transfers:
        if transfer.last and transfer.expert >= 0:
            unit = (machine.link(transfer.link).dst, transfer.layer, transfer.expert)
            stays.setdefault(unit, []).append((transfer.end, "come"))
    for eviction in records.evictions:
        stays.setdefault((eviction.device, eviction.layer, eviction.expert), []).append((eviction.time, "go"))
    for task in records.tasks:
        if task.kind == "expert" and task.device not in machine.backing:
            history = stays.get((task.device, task.layer, task.expert), [])
            before = [what for time, what in sorted(history) if time <= task.start]
            within = [what for time, what in history if task.start < time < task.end]
            there = before[-1:] == ["come"] and "go" not in within
            assert there, f"{policy!r}: {task.device} computed expert {task.expert} of layer {task.layer} without its weights"


def _inputs(
    policy: Any,
    workload: tuple[Trace, Workload],
    slots: int,
    hardware: HardwareProfile | None,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `simulate` and `initial_placement` have in common."""
    trace, steps = workload
    profile = getattr(policy, "profile", "")
    machine = hardware or (_shipped(profile) if profile else tiny_machine())
    model = tiny_model(**changes)
    return {
        "model": model,
        "costs": CostModel(model, machine),
        "workload": steps,
        "policy": policy,
        "cache_slots": {name: slots for name, device in machine.devices.items() if device.kind == "gpu"},
        "tables": {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs},
    }


def _by_visit(of_expert: Mapping[tuple[int, int, int], int]) -> Counter[tuple[int, int]]:
    total: Counter[tuple[int, int]] = Counter()
    for (step, layer, _), rows in of_expert.items():
        total[step, layer] += rows
    return total


def _pickled(policy: Any) -> Any:
    """Send a policy through a pickle, as runs in other processes do; one whose class no other process could find, as it is."""
    cls = type(policy)
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not cls:
        return policy
    try:
        return ForkingPickler.loads(ForkingPickler.dumps(policy))
    except Exception as error:  # pickling raises whatever it meets
        raise AssertionError(f"{policy!r}: cannot be sent to another process: {describe_exception(error)}") from error


@cache
def _shipped(profile: str) -> HardwareProfile:
    return load_hardware(profile)


def _check_declaration(policy: Any) -> None:
    known = set(get_args(Event))
    assert isinstance(policy.exact, bool), f"{policy!r}: expected exact to be a bool, got {policy.exact!r}"
    for name, value in (("listens", policy.listens), ("needs", policy.needs)):
        assert isinstance(value, frozenset), f"{policy!r}: expected {name} to be a frozenset, got {value!r}"
    assert policy.listens <= known, f"{policy!r}: listens names no event: {policy.listens - known}"
    for need in policy.needs:
        kind, _, rest = need.partition(":")
        fine = need in ("scores", "scores-or-weights", "oracle:routing") or (kind in ("signal", "table") and bool(rest))
        assert fine, f"{policy!r}: needs {need!r}; expected 'scores', 'signal:<name>', 'table:<name>' and so on"


def _check_constructor(cls: Any) -> None:
    """Check that every option is stored under its own name, as it was given."""
    if cls.__init__ is object.__init__:
        return
    policy = cls()
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        stored = getattr(policy, name, inspect.Parameter.empty)
        assert stored is parameter.default, f"{policy!r}: option {name}: stored {stored!r}, got {parameter.default!r}"
