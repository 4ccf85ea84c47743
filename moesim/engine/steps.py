"""Order of a forward pass: steps, layer visits and the events of the policy (rules 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.core.limits import RUN_NS
from moesim.core.units import ceil_div
from moesim.engine.actions import apply, collected
from moesim.engine.lanes import submit, wake
from moesim.engine.links import cross
from moesim.engine.memory import Unit
from moesim.engine.state import Call, DeviceState, Pass, State, fail
from moesim.engine.visit import Visit, gate_mass, inexact_records, rows_of
from moesim.errors import HardwareError
from moesim.policy import KV, LayerBegin, LayerEnd, Predicted, Routed, StepBegin, StepEnd
from moesim.records import DecisionRecord, InexactRecord, LayerRecord, LookupRecord, StepRecord
from moesim.trace.workload import MicroBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def report(state: State, kind: Any, *fields: Any) -> None:
    """Report an event to a policy that listens, and apply its answer; it waits during decisions."""
    if kind not in state.listens:
        return
    if state.deciding.under_way:
        state.deciding.unheard.append(lambda: report(state, kind, *fields))
        return
    actions = state.policy.decide(kind(*fields), state.view)
    if actions:
        apply(state, actions)


# -------------------------------------------------------------------------------------- phases: what follows what, and where
class Phase(NamedTuple):
    """One task of the dense part, or of a part of the step."""

    kind: str
    device: DeviceState
    work: int  # ns
    parts: tuple[str, ...]  # whose weights or cache it reads, if they are streamed
    rows: int  # that cross to it, in rows as wide as hidden states


def layer_phases(state: State, layer: int, micro: MicroBatch) -> list[Phase]:
    """List the phases of a layer's dense part for a micro-batch; the last is followed by Routed."""
    costs, layout, rows, n = state.costs, state.forward.layout, micro.n_rows, _n_requests_of(state, micro)
    attention, dense = layout.attention_at[layer], layout.dense_at[layer]
    at = layer % state.model.n_layers
    core = layout.core_at.get(at) if state.step.phase == "decode" else None
    rest = costs.dense_ns(dense.name, rows, at)
    before = costs.layer_host_ns(dense.name) if rows else 0
    host = [Phase("host", dense, before, (), rows)] if before else []
    if core is not None:  # the cache is read elsewhere: projections where attention is, the rest where the cache is
        there, back = (ceil_div(rows * width, state.model.hidden) for width in state.model.core_widths(at))
        return [
            Phase("attention", attention, costs.attention_ns(attention.name, rows, 0, n, at), ("attention",), rows),
            Phase("attention", core, costs.core_ns(core.name, rows, micro.work2, n, at), (), there),
            Phase("dense", dense, rest, ("dense",), back),
            *host,
        ]
    work = costs.attention_ns(attention.name, rows, micro.work2, n, at)
    if attention is dense:
        return [Phase("dense", dense, rest + work, ("attention", "dense", KV), rows), *host]
    first = Phase("attention", attention, work, ("attention", KV), rows)
    return [first, Phase("dense", dense, rest, ("dense",), rows), *host]


def step_phases(state: State, *names: str) -> list[Phase]:
    """List the step's parts that run where they live, without those that cost nothing."""
    step, costs, layout = state.step, state.costs, state.forward.layout
    found = []
    for name in names:
        at = layout.step_parts[name].name
        rows = step.n_head_rows if name == "head" else step.n_tokens
        if not rows:
            work = 0
        elif name == "leading":
            work = costs.leading_ns(at, rows, step.work2, n_requests(step.requests, 0, rows))
        else:
            work = (costs.embedding_ns if name == "embedding" else costs.head_ns)(at, rows)
        if work or (layout.streams is not None and layout.streams.holds(name, -1)):
            found.append(Phase(name, layout.step_parts[name], work, (name,), rows))
    return found


def _drafts(state: State) -> list[Phase]:
    """Return the task that proposes the drafts of the step, where the LM head is."""
    device = state.forward.layout.step_parts["head"]
    work = state.step.draft_ns(state.costs, device.name)
    return [Phase("draft", device, work, (), state.step.n_tokens)] if work else []


def walk(
    state: State, phases: Sequence[Phase], src: DeviceState, layer: int, mb: int, rows: int, then: Call | None
) -> None:  # fmt: skip
    """Bring the hidden state to the first phase's device, submit its task, then go on."""
    if not phases:
        assert then is not None
        then()
        return
    phase, others = phases[0], phases[1:]

    def go_on() -> None:
        walk(state, others, phase.device, layer, mb, rows, then)

    def run() -> None:
        task = state.new_task(phase.kind, layer, mb, rows, phase.work, go_on if others or then is not None else None)
        if state.forward.layout.streams is not None:
            state.forward.layout.streams.read(state, task, *phase.parts)
        submit(state, phase.device.main, task)

    cross(state, src, phase.device, layer, phase.rows, "hidden", run)


def n_requests(requests: NDArray[Any], first: int, n_rows: int) -> int:
    """Count the requests among rows of a step."""
    return len(set(requests[first : first + n_rows].tolist()))


def _n_requests_of(state: State, micro: MicroBatch) -> int:
    return n_requests(state.step.requests, micro.first_row, micro.n_rows)


def dense_ns(state: State, layer: int) -> int:
    """Return the time of a layer's dense part over all micro-batches of the present step."""
    phases = (phase for micro in state.forward.micro for phase in layer_phases(state, layer, micro))
    return sum(phase.work for phase in phases if phase.kind != "host")


# ------------------------------------------------------------------------------------------------------------------ steps
def next_step(state: State) -> None:
    """Begin the next step; after the last the run is over, whatever is still in flight."""
    step = state.steps.after(state.now)
    if step is None:
        state.over = True
        return
    if isinstance(step, int):  # no request is there before
        state.carrier.after(step - state.now, lambda: setattr(state.instant, "goes_on", lambda: next_step(state)))
        return
    many = max(micro.n_rows for micro in step.micro) >= state.offload_from
    layout = state.layouts[-1 if many else 0]
    first = layout.step_parts["embedding"]
    state.forward = Pass(step, layout, state.now, first)
    if layout.streams is not None:
        layout.streams.begin_step(state)
    report(state, StepBegin, step.index, step.phase, step.requests, step.last_chunk)
    _reserve_kv(state, step.kv_tokens, step.n_active)  # in what a policy gave up, perhaps
    phases = [*_drafts(state), *step_phases(state, "embedding", "leading")]
    state.forward.hidden_at = phases[-1].device if phases else first
    walk(state, phases, first, -1, 0, step.n_tokens, lambda: begin_layer(state, 0))


def _reserve_kv(state: State, tokens: int, requests: int) -> None:
    """Hold the KV of the active requests at their final lengths."""
    for name, n_bytes in state.kv_at(tokens, requests).items():
        memory = state.devices[name].memory
        change = n_bytes - memory.kv
        if change:
            memory.kv += change
            memory.add(change, state.now)


def check_length(path: str, now: int, step: int) -> None:
    """Stop a run long before nanoseconds have more than 64 bits."""
    if now > RUN_NS:
        raise HardwareError(
            f"{path}: expected a run of at most a year of simulated time, got {now / RUN_NS:.3g} after step {step}; "
            f"correct the rates and times of the profile, or run less"
        )


def _end_step(state: State) -> None:
    step, now, forward = state.step, state.now, state.forward
    check_length(state.costs.hardware.path, now, step.index)
    sizes = (step.batch, step.n_tokens, step.n_sequences)
    state.records.steps.append(StepRecord(forward.began, now, step.index, step.phase, *sizes, forward.gate_mass))
    report(state, StepEnd, step.index)
    if state.progress is not None:
        state.progress(step.index)
    next_step(state)


# ----------------------------------------------------------------------------------------------------------------- layers
def begin_layer(state: State, layer: int) -> None:
    """Begin a visit of a layer: report it, then submit its dense part for every micro-batch."""
    forward = state.forward
    visit = forward.visit = forward.visit_of(layer)
    del forward.future[layer]
    visit.begin, forward.reached = state.now, layer
    if forward.layout.streams is not None:
        forward.layout.streams.begin_layer(state, layer)
    report(state, LayerBegin, visit.step, layer)
    hidden, forward.hidden_at = forward.hidden_at, forward.layout.dense_at[layer]
    for mb, micro in enumerate(forward.micro):
        walk(state, layer_phases(state, layer, micro), hidden, layer, mb, micro.n_rows, None)


def end_layer(state: State, visit: Visit) -> None:
    """Close a visit whose work is all done, and go on to the next layer or the LM head."""
    forward = state.forward
    _check_served(state, visit)
    if not state.policy.exact:
        forward.gate_mass += gate_mass(visit.weights)
    state.records.layers.append(LayerRecord(visit.begin, state.now, visit.step, visit.layer))
    forward.visit = None
    report(state, LayerEnd, visit.step, visit.layer)
    if visit.layer + 1 < state.model.n_layers:
        begin_layer(state, visit.layer + 1)
    else:
        head = step_phases(state, "head")
        walk(state, head, forward.hidden_at, -1, 0, state.step.n_head_rows, lambda: _end_step(state))


def _check_served(state: State, visit: Visit) -> None:
    excess = visit.serve_substitutes()
    if excess is not None:
        what = f"Run(E{excess[0]}) for row {excess[1]}: every slot of that row is served already"
        fail(state, what, "leave the row out, or Run fewer experts for it")
    served = [(kind, expert, rows_of(rows)) for kind, expert, rows in visit.inexact]
    inexact = inexact_records(visit.step, visit.layer, visit.experts, visit.weights, served)
    if inexact and state.policy.exact:
        what = f"an exact policy served slots otherwise than fresh: {kinds(inexact)}"
        fail(state, what, "run what is routed on fresh inputs, or set exact = False")
    state.records.inexact.extend(inexact)


def kinds(inexact: Sequence[InexactRecord]) -> str:
    """List how many slots were served in which way."""
    return ", ".join(f"{r.slots} {r.kind}" for r in inexact)


# ---------------------------------------------------------------------------------------------------- Routed and Predicted
def routed(state: State, mb: int) -> None:
    """Submit the shared experts of a routed micro-batch, and ask the policy."""
    if state.deciding.under_way:
        state.deciding.undecided.append(mb)
        return
    forward, visit, micro = state.forward, state.forward.visit, state.forward.micro[mb]
    assert visit is not None
    layer = visit.layer
    experts, weights, scores, rows, active = micro.layers[layer]
    visit.route(experts, weights)
    _look_up(state, visit, mb, rows, active)
    forward.mb = mb
    if not visit.mbs_left:
        for call in forward.gate_input_waiters.pop(layer, ()):
            call()
    if state.model.n_shared > 0:
        _submit_shared(state, visit, mb)
    if Routed not in state.listens:
        return
    event = Routed(visit.step, layer, mb, experts, weights, scores, rows, active, micro.first_row)
    actions = state.policy.decide(event, state.view)
    if state.options.decision_ns:
        _charge(state, visit, active, collected(state, actions or ()))
    elif actions:
        apply(state, actions)


def predicted(state: State, step: int, layer: int, source: str, predictor: Any) -> None:
    """Report a prediction that was paid for, unless its step is over."""
    if step != state.step.index or Predicted not in state.listens:
        return
    if state.deciding.under_way:
        state.deciding.unheard.append(lambda: predicted(state, step, layer, source, predictor))
        return
    for mb in range(len(state.forward.micro)):
        answer = predictor.predict(state.step, mb, layer)
        if answer is not None:
            report(state, Predicted, step, layer, mb, answer[0], answer[1], source)


def _copies_of(state: State, layer: int, expert: int) -> list[Unit]:
    """Name an expert at each width."""
    return [Unit(layer, expert, bits) for bits in (None, *state.model.low_bits)]


def _look_up(state: State, visit: Visit, mb: int, rows: Sequence[int], active: Sequence[int]) -> None:
    """Record which of the active experts are on a GPU, or on their way to one."""
    gpus = state.gpus
    hits, flying = [], []
    for expert in active:
        units = _copies_of(state, visit.layer, expert)
        hits.append(int(any(unit in gpu.memory.copies for gpu in gpus for unit in units)))
        flying.append(int(any(unit in gpu.pending for gpu in gpus for unit in units)))
    of_active = tuple(rows[e] for e in active)
    where = (state.now, visit.step, visit.layer, mb)
    state.records.lookups.append(LookupRecord(*where, tuple(active), of_active, tuple(hits), tuple(flying)))


def _charge(state: State, visit: Visit, active: Sequence[int], actions: list[Any]) -> None:
    """Delay the effect of a decision; what the layer needs stays in use meanwhile."""
    # Until then the policy hears nothing else: an answer to it would take effect before the decision it builds on.
    # Experts that the decision drops are dropped at once, so that a later Fetch of them is a copy. What was dropped before, and
    # was still in use, stays until the decision may have run it.
    mb, now = state.forward.mb, state.now
    state.records.decisions.append(DecisionRecord(now, now + state.options.decision_ns, visit.step, visit.layer))
    visit.hold()
    state.deciding.under_way = True
    units = [unit for expert in active for unit in _copies_of(state, visit.layer, expert)]
    held = []
    for device in state.devices.values():
        for unit in units:
            copy = device.memory.copies.get(unit) or device.pending.get(unit)
            if copy is not None:
                copy.in_use += 1
                held.append((device, unit, copy.fetch))

    def take_effect() -> None:
        state.forward.mb = mb
        dropped = []
        for device, unit, fetch in held:
            copy, coming = device.memory.copies.get(unit), device.pending.get(unit)
            if copy is not None and copy.fetch == fetch:
                if copy.leaves:
                    dropped.append((device, unit))
                else:
                    copy.in_use -= 1
            elif coming is not None and coming.fetch == fetch:  # else it was given up
                coming.in_use -= 1
        apply(state, actions)
        visit.let_go()
        for device, unit in dropped:
            device.memory.release(unit, state.now)
        state.deciding.under_way = False
        unheard, state.deciding.unheard = state.deciding.unheard, []
        for call in unheard:
            call()
        if state.deciding.undecided:
            state.instant.routed.append(state.deciding.undecided.pop(0))

    state.carrier.after(state.options.decision_ns, take_effect)


def _submit_shared(state: State, visit: Visit, mb: int) -> None:
    """Submit shared experts for every row, before the routed ones of the same device."""
    layer, rows, layout = visit.layer, state.forward.micro[mb].n_rows, state.forward.layout
    device, home = layout.shared_at[layer], layout.dense_at[layer]
    visit.hold()

    def done() -> None:
        cross(state, device, home, layer, rows, "out", visit.let_go, task)

    task = state.new_task("shared", layer, mb, rows, state.costs.shared_ns(device.name, rows, layer), done)
    task.waits = 1
    if layout.streams is not None:
        layout.streams.read(state, task, "shared")
    submit(state, device.main, task)
    cross(state, home, device, layer, rows, "in", lambda: wake(state, task), task)
