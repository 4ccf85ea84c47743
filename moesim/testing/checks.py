"""For authors of policies: a fake view, a tiny model and machine, and the checks that every policy should pass.

>>> from moesim.policies.on_demand import OnDemand
>>> check_policy(OnDemand)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from moesim.costs import CostModel
from moesim.engine import EngineOptions, simulate
from moesim.errors import CapacityError
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


def check_policy(make: Callable[[], Any], *, slots: Sequence[int] = (4, 8, 16, 32)) -> None:
    """Check a policy as the registry's own are checked.

    It must declare what the contract asks, store its options unchanged, place what fits, and run tiny workloads on the
    engine - prefill and decode, one request and several, one micro-batch and several, with and without decision time -
    each twice with the same result, while every routed expert is executed for exactly its rows if it is ``exact``.
    The engine itself checks every action.

    Parameters
    ----------
    make : callable
        The class, or a function without parameters that returns a new policy.
    slots : sequence of int
        Cache slots to try, of 32 experts in all. A policy may refuse fewer than 32 with a CapacityError.

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
    for n_slots in slots:
        for batch, micro_batches, decision_ns in ((1, 1, 0), (4, 1, 0), (4, 2, 0), (4, 4, 700)):
            workload = tiny_workload(policy, batch, micro_batches)
            try:
                first = run_tiny(make(), workload, n_slots, decision_ns)
            except CapacityError:
                assert n_slots < 32, f"{policy!r}: does not fit even with a slot for every expert"
                continue
            again = run_tiny(make(), workload, n_slots, decision_ns)
            assert first == again, f"{policy!r}: two runs of the same inputs differ"
            if policy.exact:
                _check_served(policy, workload[1], first)


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


def run_tiny(policy: Any, workload: tuple[Trace, Workload], slots: int = 16, decision_ns: int = 0, **changes: Any) -> Records:
    """Simulate a tiny workload on the tiny machine and return the records.

    Parameters
    ----------
    policy : Policy
        Whose decisions.
    workload : tuple of Trace and Workload
        From `tiny_workload`.
    slots : int
        Cache slots of the GPU, of 32 experts in all.
    decision_ns : int
        Time charged for each decision at Routed.
    **changes
        Fields of the model other than `tiny_model`'s.
    """
    trace, steps = workload
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(steps))
    tables = {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs}
    model = tiny_model(**changes)
    return simulate(
        model=model,
        costs=CostModel(model, tiny_machine()),
        workload=steps,
        policy=policy,
        cache_slots={"gpu0": slots},
        predictors=PredictorSet(trace, steps, {}, 0),
        tables=tables,
        options=EngineOptions(decision_ns=decision_ns),
        policy_name=type(policy).__name__,
    )


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


def _check_served(policy: Any, workload: Workload, records: Records) -> None:
    """Check that each routed expert of each layer visit was executed for exactly the rows routed to it."""
    ran: dict[tuple[int, int, int], int] = {}
    for task in records.tasks:
        if task.kind == "expert":
            key = (task.step, task.layer, task.expert)
            ran[key] = ran.get(key, 0) + task.rows
    wanted: dict[tuple[int, int, int], int] = {}
    for step in workload.steps:
        for micro in step.micro:
            for layer, routing in enumerate(micro.layers):
                for expert in routing.active:
                    key = (step.index, layer, expert)
                    wanted[key] = wanted.get(key, 0) + routing.loads[expert]
    assert ran == wanted, f"{policy!r}: experts were executed for other rows than were routed to them"
