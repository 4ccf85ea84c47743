"""Run one resolved run: policy, costs, workload and engine meet here, and a row of facts and metrics comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from moesim.core import collector
from moesim.engine import chosen, simulate
from moesim.errors import MoesimError, PolicyError, describe_exception
from moesim.experiment.beginning import FirstSteps
from moesim.experiment.budget import granted_slots, initial_placement, slots_used
from moesim.experiment.intervals import interval_text, vary
from moesim.experiment.needs import SCORES
from moesim.hardware import LABELS, weakest
from moesim.hardware.costs import CostModel
from moesim.metrics import Value
from moesim.metrics.breakdown import Breakdown, breakdown
from moesim.metrics.chain import Chain
from moesim.metrics.machine import Machine
from moesim.metrics.naming import NOT_VARIED
from moesim.metrics.outcome import Outcome
from moesim.metrics.summary import Summary
from moesim.policies.registry import make_policy
from moesim.records import Records, activities
from moesim.trace.predictors.chosen import FutureUse
from moesim.trace.workload.compose import drawn

if TYPE_CHECKING:
    from moesim.experiment.spec import RunSpec
    from moesim.hardware import HardwareProfile
    from moesim.policy import Placement
    from moesim.trace import Trace
    from moesim.trace.workload import Workload


class Inputs(Protocol):
    """What runs share: an experiment, or what a worker process holds of one."""

    @property
    def place(self) -> str: ...
    def trace(self, spec: RunSpec) -> Trace: ...
    def workload(self, spec: RunSpec) -> Workload: ...
    def signals(self, spec: RunSpec) -> frozenset[str]: ...


def _nothing() -> list[str]:
    return []


@dataclass(frozen=True)
class Execution:
    """How a run is carried out."""

    call: Callable[..., Records]  # with the arguments and the result of `moesim.engine.simulate`
    measured: bool = False  # times are measured, so that no cost of the profile decides how far a result can be trusted
    notes: Callable[[], list[str]] = _nothing  # what results carry beside their label; asked after the run


SIMULATED = Execution(simulate)
Kept = bool | int
"""Records to keep of a run: all, none, or those of so many first steps."""
Examine = Callable[[Any, "RunSpec", Outcome], Any]
"""What a study looks for in the records of a run; it goes to the process that has them, so it is a function of a module."""


def run_one(
    inputs: Inputs,
    spec: RunSpec,
    *,
    keep: Kept = False,
    progress: Callable[[int], None] | None = None,
    execution: Execution = SIMULATED,
    examine: Examine | None = None,
) -> Outcome:
    """Run one run."""
    machine = Machine.of(spec.hardware)
    failure: MoesimError
    if spec.refusal is not None:
        return Outcome({**spec.row(), "error": str(spec.refusal)}, machine, failure=spec.refusal)
    try:
        with collector.paused():
            outcome = _run(inputs, spec, machine, True if examine is not None else keep, progress, execution)
            if examine is None:
                return outcome
            found = examine(inputs, spec, outcome)
            return replace(outcome, found=found) if keep else replace(outcome, records=None, split=None, found=found)
    except MoesimError as error:
        failure = error
    except Exception as error:
        # A policy may be anybody's code: what it raises ends this run and no other.
        failure = PolicyError(f"policy {spec.point.policy['name']} raised {describe_exception(error)}")
    return Outcome({**spec.row(), "error": str(failure)}, machine, failure=failure)


def _run(
    inputs: Inputs,
    spec: RunSpec,
    machine: Machine,
    keep: Kept,
    progress: Callable[[int], None] | None,
    execution: Execution,
) -> Outcome:
    trace, workload = inputs.trace(spec), inputs.workload(spec)
    done = _carry_out(inputs, spec, machine, progress, execution, keep)
    policy, costs, metrics = done.policy, done.costs, done.metrics
    labels = [*(["measured"] if execution.measured else costs.labels(done.activities)), trace.label, *done.labels]
    oracle = "oracle:routing" in policy.needs
    labels += ["oracle"] if oracle else []
    labels += ["assumed"] if spec.assumes or (trace.made_up and SCORES & policy.needs) else []
    notes = notes_of(spec, trace, workload, assumes_memory=not done.placement.enforce_capacity, signals=inputs.signals(spec))
    if own := spec.own_transfer(policy):
        notes.append(f"transfers of its own: {own}")
    notes += [*([] if execution.measured else costs.notes()), *execution.notes()]
    if "scores-or-weights" in policy.needs and trace.recorded_scores is None:
        notes.append("scores of the chosen experts only")
    varied = _varied(inputs, spec, machine, execution, done)
    notes += [str(varied.pop("varied"))] if varied.get("varied") else []
    row: dict[str, Value] = {
        **spec.row(),
        "cache_slots": done.slots,
        "cache_slots_used": slots_used(done.placement, spec.model),
        "cache_share": done.slots / (spec.model.n_layers * spec.model.n_experts),
        "routing": trace.origin,
        "source_label": weakest([label for label in labels if label in LABELS]),
        "cost_label": "measured" if execution.measured else weakest(costs.labels(done.activities)),
        "engine": "replay" if execution.measured else chosen(),
        "notes": ", ".join(notes),
        "workload_digest": workload.digest,
        "requests_drawn": ",".join(map(str, sorted(set(workload.requests)))),
        "error": None,
        "own_transfer": spec.own_transfer(policy),
        "prefetches": bool(getattr(policy, "prefetches", False)),
        **metrics,
        **{key: value for key, value in varied.items() if key != "varied"},
        **{f"count_{name}": count for name, count in getattr(policy, "counters", {}).items()},
    }
    return Outcome(row, machine, done.records, done.split if keep is True else None, None, costs.provenance())


def _varied(inputs: Inputs, spec: RunSpec, machine: Machine, execution: Execution, done: _Done) -> dict[str, Value]:
    """Run again at the ends of intervals, or say that it was not done; times that were measured have no such numbers."""
    intervals = {} if execution.measured else done.costs.intervals()
    if execution.measured or not spec.point.intervals:
        said = [interval_text(key, interval) for key, interval in intervals.items()]
        return {"varied": f"{NOT_VARIED}{'; '.join(said)}" if said else ""}
    nominal = done.slots  # a budget is the nominal machine's: only costs move

    def again(hardware: HardwareProfile) -> Mapping[str, Value]:
        moved = replace(spec, hardware=hardware, cache_slots=nominal)
        return _carry_out(inputs, moved, Machine.of(hardware), None, execution, False).metrics

    return vary(spec.ends, intervals, done.metrics, again)


@dataclass(frozen=True)
class _Done:
    """A run that has been carried out, before it is a row."""

    policy: Any
    costs: CostModel
    slots: int
    placement: Placement
    records: Records | None  # if they are to be kept
    split: Breakdown | None
    activities: frozenset[str]
    metrics: Mapping[str, Value]
    labels: tuple[str, ...]


class _Found:
    """What a result has of the records, which may come in pieces and are not kept."""

    def __init__(self, machine: Machine, split: Breakdown | None = None) -> None:
        self.summary = Summary(machine, split)
        self.activities: set[str] = set()

    def add(self, records: Records, settled_ns: int = 0) -> None:
        """Take the next records in."""
        self.summary.add(records, settled_ns)
        self.activities |= activities(records)


def _carry_out(
    inputs: Inputs, spec: RunSpec, machine: Machine, progress: Callable[[int], None] | None, execution: Execution, keep: Kept
) -> _Done:
    trace, workload = inputs.trace(spec), inputs.workload(spec)
    policy: Any = make_policy(spec.point.policy, inputs.place)
    tables = {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs}
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))
    slots = granted_slots(spec, workload, policy, tables)
    per_device = {name: slots for name, kind in machine.kinds.items() if kind == "gpu"}
    placed: list[Placement] = []
    if execution.measured:
        placed.append(initial_placement(spec.model, spec.costs(policy), workload, policy, per_device, tables))
    sources, costs = spec.sources(trace, workload), spec.costs(policy)
    found, first = _Found(machine), FirstSteps(keep) if keep else None
    in_pieces = keep is not True and not execution.measured

    def take(records: Records, settled_ns: int) -> None:
        found.add(records, settled_ns)
        if first is not None:
            first.add(records, settled_ns)

    records = execution.call(
        model=spec.model, costs=costs, workload=workload, policy=policy, cache_slots=per_device, predictors=sources,
        tables=tables, options=spec.options, policy_name=spec.policy_name, progress=progress,
        **({"sink": take} if in_pieces else {}), **({} if execution.measured else {"placed": placed.append}),
    )  # fmt: skip
    split = None
    if not in_pieces:
        if execution.measured:  # nothing begins at the very nanosecond at which what it waited for has ended
            split = Chain(records, machine.kinds, machine.media).breakdown()
        else:
            split = breakdown(records, machine.kinds, machine.media)
        found = _Found(machine, split)
        found.add(records)
    metrics = spec.metrics(found.summary, workload)
    kept = None if first is None else first.of(records) if in_pieces else records
    return _Done(policy, costs, slots, placed[0], kept, split, frozenset(found.activities), metrics, sources.labels)


def notes_of(spec: RunSpec, trace: Trace, workload: Workload, *, assumes_memory: bool, signals: frozenset[str]) -> list[str]:
    """List what a reader must know beside the source label."""
    notes = []
    if trace.origin == "synthetic":
        notes.append(f"synthetic routing of {trace.model}")
    elif trace.origin == "miniature":
        of = trace.header.get("miniature_of", spec.model.name)
        notes.append("miniature" + (f" of {of}" if of != spec.model.name else ""))
    elif trace.model != spec.model.name:
        notes.append(f"routing of {trace.model}")
    notes.append(drawn(trace, workload, signals))
    notes += list(workload.labels)
    notes += trace.remarks
    if workload.spec != spec.workload:
        notes.append(f"prompts in steps of at most {spec.prompt_rows} rows (its engine's)")
    if assumes_memory:
        notes.append("assumes-memory")
    return notes + spec.notes()
