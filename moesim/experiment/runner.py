"""One resolved run: policy, costs, workload and engine meet; results are a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from moesim.core.processes import paused
from moesim.core.units import format_memory
from moesim.engine import chosen, empty_view, simulate
from moesim.errors import CapacityError, MoesimError, PolicyError, describe_exception
from moesim.experiment.routing import SCORES, routing_labels, routing_notes
from moesim.experiment.sweep import Ends, RunSpec
from moesim.fits import lacking, paging_note, required_bytes, with_kv
from moesim.hardware import LABELS, HardwareProfile, load_hardware, weakest
from moesim.hardware.costs import CostModel
from moesim.metrics import Value, serving
from moesim.metrics.breakdown import Breakdown, breakdown
from moesim.metrics.chain import Chain
from moesim.metrics.columns import joined
from moesim.metrics.machine import Machine
from moesim.metrics.naming import NOT_VARIED
from moesim.metrics.outcome import Outcome
from moesim.metrics.summary import Summary
from moesim.model import ModelSpec
from moesim.policies.registry import make_policy
from moesim.policy import CACHE, Placement, Policy
from moesim.records import KINDS, Records, activities
from moesim.serving.steps import Served, ServedWorkload
from moesim.trace.predictors import FutureUse
from moesim.trace.workload import Workload
from moesim.trace.workload.compose import drawn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.hardware import HardwareProfile
    from moesim.metrics import Value
    from moesim.policy import Placement
    from moesim.trace import Trace
    from moesim.trace.workload import Workload


LEAST_TASKS: Final = 200_000
"""Tasks up to which a run is short: it is kept as a whole."""


class FirstSteps:
    """Keeps the records of a run's first steps, so that memory does not grow with its length."""

    def __init__(self, n_steps: int) -> None:
        self._n_steps = n_steps
        self._pieces: list[Records] = []
        self._n_tasks = 0
        self._over, self._cut = not n_steps, False

    def add(self, records: Records, settled_ns: int) -> None:
        """Take the next records, unless all that began in the first steps is there."""
        if self._over:
            self._cut = True
            return
        tables: dict[str, Any] = {name: getattr(records, name).taken() for name in KINDS}
        self._pieces.append(Records(**tables, used_fetches=set(records.used_fetches)))
        self._n_tasks += len(records.tasks)
        ends = sorted(int(end) for piece in self._pieces for end in piece.steps.column("end"))
        self._over = len(ends) >= self._n_steps and ends[self._n_steps - 1] <= settled_ns and self._n_tasks >= LEAST_TASKS

    def of(self, run: Records) -> Records:
        tables: dict[str, Any] = {
            name: joined(kind, [getattr(piece, name) for piece in self._pieces]) for name, kind in KINDS.items()
        }
        return Records(
            **tables, used_fetches=set().union(*(piece.used_fetches for piece in self._pieces)), peak_bytes=run.peak_bytes,
            pool_peak_bytes=run.pool_peak_bytes, makespan_ns=run.makespan_ns, served=run.served,
            first_steps=self._n_steps if self._cut else None,
        )  # fmt: skip


def initial_placement(
    model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy, cache_slots: Mapping[str, int],
    tables: Mapping[str, NDArray[Any]],
) -> Placement:  # fmt: skip
    """Ask a policy for its placement without running it; CapacityError if it needs more slots."""
    placement = policy.place(empty_view(model, costs, workload, policy, cache_slots, tables))
    return with_kv(model, costs.hardware, placement, workload.spec.kv_place)


def slots_used(placement: Placement, model: ModelSpec) -> int:
    """Count the cache slots over all layers that a placement can use on its fullest device."""
    # Fewer than are granted where a policy keeps no cache, whole layers, or the same number in every
    # layer; more where it holds experts whatever is granted. The size of the largest expert is that of
    # a slot.
    slot = max(model.expert_bytes(layer) for layer in range(model.n_layers))
    count: dict[str, int] = {}
    for pool in placement.pools:
        if pool.name == CACHE:
            most = model.n_experts * (1 if pool.per_layer else model.n_layers)
            fit = sum(min(n_bytes // slot, most) for n_bytes in pool.sizes(model.n_layers))
            fit -= placement.lent.get(pool.device, 0) // slot
            held = sum(len(copy.experts) for copy in placement.copies if (copy.device, copy.pool) == (pool.device, CACHE))
            count[pool.device] = max(fit, held)  # experts smaller than the largest may be there beyond what fits
    return max(count.values(), default=0)


def granted_slots(spec: RunSpec, workload: Workload, policy: Policy, tables: Mapping[str, NDArray[Any]]) -> int:
    """Return the cache slots of each GPU: those of a share, or as many as fit a budget."""
    if spec.cache_slots is not None:
        return spec.cache_slots
    budget = spec.point.budget_bytes
    assert budget is not None
    return slots_within(budget, spec.model, spec.costs(policy), workload, policy, tables, spec.policy_name)


def slots_within(
    budget_bytes: int, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy,
    tables: Mapping[str, NDArray[Any]], policy_name: str,
) -> int:  # fmt: skip
    """Find the most cache slots over all layers with which each GPU keeps within a budget."""
    # Weights, KV cache, workspace and all pools count. What a policy needs grows with its slots, so a
    # binary search finds it. CapacityError if not even the smallest working cache fits.
    gpus = [name for name, device in costs.hardware.devices.items() if device.role == "accelerator"]
    granted: dict[str, int] = {}
    view = empty_view(model, costs, workload, policy, granted, tables)

    @cache  # the three searches ask in part the same
    def needed(slots: int) -> tuple[int, str]:
        """Return the most bytes that a GPU needs, and its name; no name for too few slots."""
        granted.update(dict.fromkeys(gpus, slots))
        try:
            placement = policy.place(view)
        except CapacityError:
            return 0, ""
        placement = with_kv(model, costs.hardware, placement, workload.spec.kv_place)
        need = required_bytes(
            model, costs.hardware, workload.peak_kv_tokens, placement, workload.peak_requests, draft_head=workload.draft_head
        )
        return max((sum(need[gpu].values()), gpu) for gpu in gpus)

    def first(low: int, high: int, found: Callable[[int], bool], guesses: Sequence[int]) -> int:
        """Find the first number in low..high from which `found` holds; guesses are tried first."""
        for at in guesses:
            if low <= at < high:
                low, high = (low, at) if found(at) else (at + 1, high)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if found(middle) else (middle + 1, high)
        return low

    n_units = model.n_layers * model.n_experts
    fewest = first(0, n_units, lambda slots: needed(slots)[1] != "", [0])
    least, where = needed(fewest)
    if least > budget_bytes:
        raise CapacityError(
            f"cache.budget: expected at least {format_memory(least, least=True)}, which {where} of {costs.hardware.name} "
            f"needs with {fewest} cache slots, got {format_memory(budget_bytes)}; raise the budget, or lower "
            f"{workload.takes_memory} [policy={policy_name}]"
        )
    # Where every slot is one expert, exactly; where layers have equal shares, within a layer's rounding.
    fit = fewest + (budget_bytes - least) // max(model.expert_bytes(layer) for layer in range(model.n_layers))
    guesses = [fit + 1, fit, fit + 1 + model.n_layers, fit - model.n_layers]
    too_many = first(fewest, n_units + 1, lambda slots: slots > n_units or needed(slots)[0] > budget_bytes, guesses)
    most = needed(too_many - 1)[0]
    # Slots that change nothing (a remainder that does not reach every layer) are not told as cache.
    return first(fewest, too_many - 1, lambda slots: needed(slots)[0] >= most, [too_many - 2])


SPEED: Final = "decode_tokens_per_s"
ENERGY: Final = "energy_j_per_token"
"""Metrics that have columns ``least`` and ``most``."""

LEAST, MOST = f"{SPEED}_least", f"{SPEED}_most"
ENERGY_LEAST, ENERGY_MOST = f"{ENERGY}_least", f"{ENERGY}_most"

_UNITS: Final = (
    ("flops", (1e9, "GFLOP/s")), ("bytes_per_s", (1e9, "GB/s")), ("_bytes", (1e9, "GB")), ("_us", (1.0, "us")), ("_w", (1.0, "W"))
)  # fmt: skip


def ends_of(written: Any, machine: HardwareProfile, place: str, engine: str | None = None) -> tuple[Ends, ...]:
    """Make the machines at the ends of all intervals of a profile's costs."""
    found = []
    for key, number in machine.numbers.items():
        if number.interval is None:
            continue
        least, most = (load_hardware(at_end(written, machine, key, end), place, engine) for end in number.interval)
        found.append(Ends(key, number.interval, (least, most)))
    return tuple(found)


def at_end(written: Any, machine: HardwareProfile, key: str, value: float) -> dict[str, Any]:
    """Write the machine with another value of one number, under its label."""
    number: dict[str, Any] = {"value": int(value) if isinstance(machine.numbers[key].value, int) else value}
    number |= {"source": "assumed", "why": "an end of its interval"}
    return {**(written if isinstance(written, Mapping) else {"base": written}), key: number}


def vary(
    ends: Sequence[Ends], used: Collection[str], row: Mapping[str, Value], again: Callable[[HardwareProfile], Mapping[str, Value]]
) -> dict[str, Value]:
    """Run again at the ends of the intervals of the run's numbers, one number at a time."""
    # Returns the least and most speed of decoding and energy of a token, the nominal one included, and
    # "varied", a text about numbers that move them by half a percent or more; None and an empty text
    # without intervals or decoding. Power counts in the energy alone, which needs the power of every
    # device.
    speed, energy = row.get(SPEED), row.get(ENERGY)
    times = [end for end in ends if end.key in used]
    watts = [end for end in ends if end.key.endswith("_w")] if isinstance(energy, float) else []
    nothing: dict[str, Value] = {LEAST: None, MOST: None, ENERGY_LEAST: None, ENERGY_MOST: None, "varied": ""}
    if not isinstance(speed, float) or not times + watts:
        return nothing
    moved: dict[str, list[float]] = {SPEED: [speed], ENERGY: [energy] if isinstance(energy, float) else []}
    told = []
    for end in times + watts:
        metrics = [again(machine) for machine in end.machines]
        for name, values in moved.items():
            values += [float(found[name] or 0) for found in metrics] if values else []
        word, name = ("speed", SPEED) if end in times else ("energy", ENERGY)
        first, *others = moved[name][0], *moved[name][-2:]
        low, high = (100 * (value / first - 1) for value in (min(first, *others), max(first, *others)))
        if round(low) or round(high):  # what moves nothing by a percent is not worth a reader's time
            told.append(f"{word} {_percent(low)} to {_percent(high)} % over {interval_text(end.key, end.interval)}")
    speeds = {LEAST: min(moved[SPEED]), MOST: max(moved[SPEED])} if times else {}
    energies = {ENERGY_LEAST: min(moved[ENERGY]), ENERGY_MOST: max(moved[ENERGY])} if moved[ENERGY] else {}
    return nothing | speeds | energies | {"varied": "; ".join(told)}


def interval_text(key: str, interval: tuple[float, float]) -> str:
    """Name a number and its interval.

    >>> interval_text("devices.cpu0.expert_cost.few_row_flops", (41e9, 234e9))
    'cpu0.expert_cost.few_row_flops 41 to 234 GFLOP/s'
    >>> interval_text("devices.gpu0.operation_us", (1.1, 3.0))
    'gpu0.operation_us 1.1 to 3 us'
    """
    scale, unit = next((told for end, told in _UNITS if key.endswith(end)), (1.0, ""))
    low, high = (f"{float(f'{value / scale:.3g}'):,g}" for value in interval)
    return f"{key.removeprefix('devices.')} {low} to {high} {unit}".rstrip()


def _percent(value: float) -> str:
    return f"{round(value):+d}" if round(value) else "0"


class Inputs(Protocol):
    """Inputs that runs share: of an experiment, or of a worker's part of one."""

    @property
    def place(self) -> str: ...
    def trace(self, spec: RunSpec) -> Trace: ...
    def workload(self, spec: RunSpec) -> Workload: ...
    def signals(self, spec: RunSpec) -> frozenset[str]: ...


def _nothing() -> list[str]:
    return []


@dataclass(frozen=True)
class Execution:
    """Way to execute a run."""

    call: Callable[..., Records]  # with the arguments and the result of `moesim.engine.simulate`
    measured: bool = False  # times are measured, so that no cost of the profile decides how far a result can be trusted
    notes: Callable[[], list[str]] = _nothing  # what results carry with their label; asked after the run


SIMULATED = Execution(simulate)
Kept = bool | int
"""Records to keep of a run: all, none, or those of so many first steps; 0: what became of its requests alone."""
Examine = Callable[[Any, "RunSpec", Outcome], Any]
"""A question of a study to the records of a run: a function of a module, for it goes to the process that has them."""


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
        with paused():
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
    labels = [
        *(["measured"] if execution.measured else costs.labels(done.activities)),
        *routing_labels(trace, workload),
        *done.labels,
    ]
    oracle = "oracle:routing" in policy.needs
    labels += ["oracle"] if oracle else []
    labels += ["assumed"] if spec.assumes or (trace.made_up and SCORES & policy.needs) else []
    notes = notes_of(spec, trace, workload, assumes_memory=not done.placement.enforce_capacity, signals=inputs.signals(spec))
    if own := spec.own_transfer(policy):
        notes.append(f"transfers of its own: {own}")
    notes += [*([] if execution.measured else costs.notes()), *execution.notes()]
    if "scores-or-weights" in policy.needs and trace.recorded_scores is None:
        notes.append("scores of the chosen experts only")
    if done.served is not None and isinstance(workload, ServedWorkload):
        notes += serving.notes(done.served)
    notes += [*idle_gpus(metrics, machine), *_paging(spec, workload, done.placement)]
    varied = _varied(inputs, spec, machine, execution, done)
    notes += [str(varied.pop("varied"))] if varied.get("varied") else []
    row: dict[str, Value] = {
        **spec.row(), "cache_slots": done.slots, "cache_slots_used": slots_used(done.placement, spec.model),
        "cache_share": done.slots / (spec.model.n_layers * spec.model.n_experts), "routing": trace.origin,
        "source_label": weakest([label for label in labels if label in LABELS]),
        "cost_label": "measured" if execution.measured else weakest(costs.labels(done.activities)),
        "engine": "replay" if execution.measured else chosen(), "notes": ", ".join(notes),
        "workload_digest": workload.digest,
        "requests_drawn": ",".join(map(str, sorted(set(workload.requests)))), "error": None,
        "own_transfer": spec.own_transfer(policy), "prefetches": bool(getattr(policy, "prefetches", False)),
        **metrics, **{key: value for key, value in varied.items() if key != "varied"},
        **{f"count_{name}": count for name, count in getattr(policy, "counters", {}).items()},
    }  # fmt: skip
    return Outcome(row, machine, done.records, done.split if keep is True else None, None, costs.provenance())


def _varied(inputs: Inputs, spec: RunSpec, machine: Machine, execution: Execution, done: _Done) -> dict[str, Value]:
    """Run again at the ends of intervals, or note why not; measured times have none."""
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
    policy: Any
    costs: CostModel
    slots: int
    placement: Placement
    records: Records | None  # if they are to be kept
    split: Breakdown | None
    activities: frozenset[str]
    metrics: Mapping[str, Value]
    labels: tuple[str, ...]
    served: Served | None


class _Found:
    """Numbers of the records, which may come in pieces and are not kept."""

    def __init__(self, machine: Machine, split: Breakdown | None = None) -> None:
        self.summary = Summary(machine, split)
        self.activities: set[str] = set()

    def add(self, records: Records, settled_ns: int = 0) -> None:
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
    found, first = _Found(machine), None if keep is False else FirstSteps(keep)
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
    return _Done(
        policy, costs, slots, placed[0], kept, split, frozenset(found.activities), metrics, sources.labels, found.summary.served
    )


def idle_gpus(metrics: Mapping[str, Value], machine: Machine) -> list[str]:
    """Name the GPUs of a machine with several that compute, send and receive nothing in a run."""
    gpus = [name for name, kind in machine.kinds.items() if kind == "gpu"]
    used = {
        place for name in machine.links for place in name.split("->")
        if metrics[f"utilisation.{name}"] or metrics[f"control_utilisation.{name}"]
    } | {name for name in gpus if metrics[f"utilisation.{name}"]}  # fmt: skip
    return [f"{name} is idle (this is the speed without it)" for name in gpus if len(gpus) > 1 and name not in used]


def _paging(spec: RunSpec, workload: Workload, placement: Placement) -> list[str]:
    """Name the hosts that lack a little memory for experts that are mapped from a file."""
    if placement.host_experts != "mapped":
        return []
    need = required_bytes(
        spec.model, spec.hardware, workload.peak_kv_tokens, placement, workload.peak_requests, draft_head=workload.draft_head
    )
    found = {name: lacking(needed, spec.hardware.devices[name].memory_bytes, placement) for name, needed in need.items()}
    return [paging_note(spec.model, name, need[name], lacks) for name, lacks in found.items() if lacks]


def notes_of(spec: RunSpec, trace: Trace, workload: Workload, *, assumes_memory: bool, signals: frozenset[str]) -> list[str]:
    """List what a reader must know in addition to the source label."""
    notes = routing_notes(trace, workload, spec.model)
    notes.append(drawn(trace, workload, signals))
    notes += list(workload.labels)
    notes += trace.remarks
    if workload.spec != spec.workload:
        notes.append(f"prompts in steps of at most {spec.prompt_rows} rows (its engine's)")
    if assumes_memory:
        notes.append("assumes-memory")
    return notes + spec.notes()
