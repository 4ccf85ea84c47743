"""Steps and layer visits: what follows what in a forward pass (rule 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moesim.core.limits import RUN_NS
from moesim.core.units import ceil_div
from moesim.engine.actions import tell
from moesim.engine.checks import fail
from moesim.engine.lanes import submit
from moesim.engine.links import cross
from moesim.engine.machine import DeviceState, Task
from moesim.engine.state import State, new_task, new_visit
from moesim.engine.visit import Visit, gate_mass, inexact_records, rows_of
from moesim.errors import HardwareError
from moesim.policy import KV, LayerBegin, LayerEnd, StepBegin, StepEnd
from moesim.records import InexactRecord, LayerRecord, StepRecord
from moesim.trace.workload import MicroBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_new: Any = tuple.__new__


# ------------------------------------------------------------------------------------------------------------------ steps
def next_step(state: State) -> None:
    """Begin the next step; after the last the run is over, whatever is still in flight."""
    step = next(state.steps, None)
    if step is None:
        state.over = True
        return
    state.step = step
    state.step_rows = step.n_tokens
    state.micro = step.micro
    state.n_mbs = len(state.micro)
    state.future.clear()
    state.gate_input_waiters.clear()
    state.dense_memo.clear()
    state.step_began = state.now
    state.gate_mass = 0.0
    state.layout = state.layouts[-1 if max(micro.n_rows for micro in state.micro) >= state.offload_from else 0]
    _reserve_kv(state, step.kv_tokens)
    if state.layout.streams is not None:
        state.layout.streams.begin_step(state)
    state.reached = -1
    tell(state, StepBegin(step.index, step.phase, step.requests, step.last_chunk))
    state.hidden_at = state.layout.step_parts["embedding"]

    def leading() -> None:
        more = (step.work2, n_requests(step.requests, 0, step.n_tokens))
        _step_part(state, "leading", state.costs.leading_ns, step.n_tokens, more, lambda: begin_layer(state, 0))

    _step_part(state, "embedding", state.costs.embedding_ns, step.n_tokens, (), leading)


def _reserve_kv(state: State, tokens: int) -> None:
    """Hold the KV of the active requests at their final lengths."""
    per_layer = state.model.kv_bytes_per_token_per_layer
    for name, layers in state.kv_layers.items():
        memory = state.by_name[name].memory
        change = tokens * per_layer * layers - memory.kv
        if change:
            memory.kv += change
            memory.add(change, state.now)


def _step_part(
    state: State, part: str, cost: Callable[..., int], rows: int, more: tuple[int, ...], then: Callable[[], None]
) -> None:  # fmt: skip
    """Run embedding, leading layers or head where they live; a part that costs nothing is passed over."""
    device = state.layout.step_parts[part]
    work = cost(device.name, rows, *more) if rows else 0
    streamed = state.layout.streams is not None and state.layout.streams.holds(part, -1)
    if not work and not streamed:
        then()
        return
    hidden, state.hidden_at = state.hidden_at, device

    def run() -> None:
        _submit_part(state, device, new_task(state, part, -1, 0, rows, work, then), part)

    cross(state, hidden, device, -1, rows, "hidden", run)


def check_length(path: str, now: int, step: int) -> None:
    """Stop a run long before nanoseconds have more than 64 bits."""
    if now > RUN_NS:
        raise HardwareError(
            f"{path}: expected a run of at most a year of simulated time, got {now / RUN_NS:.3g} after step {step}; "
            f"correct the rates and times of the profile, or run less"
        )


def _end_step(state: State) -> None:
    step, now = state.step, state.now
    check_length(state.costs.hardware.path, now, step.index)
    state.records.steps.append(
        StepRecord(state.step_began, now, step.index, step.phase, step.batch, step.n_tokens, step.n_sequences, state.gate_mass)
    )
    tell(state, StepEnd(step.index))
    if state.progress is not None:
        state.progress(step.index)
    next_step(state)


# ----------------------------------------------------------------------------------------------------------------- layers
def begin_layer(state: State, layer: int) -> None:
    """Begin a visit of a layer: tell the policy, then submit its dense part for every micro-batch."""
    visit = state.future.pop(layer, None) or new_visit(state, layer)
    visit.begin = state.now
    state.visit = visit
    state.reached = layer
    if state.layout.streams is not None:
        state.layout.streams.begin_layer(state, layer)
    if LayerBegin in state.listens:
        tell(state, _new(LayerBegin, (visit.step, layer)))
    attention, dense = state.layout.attention_at[layer], state.layout.dense_at[layer]
    hidden, state.hidden_at = state.hidden_at, dense
    for mb in range(state.n_mbs):
        _submit_dense(state, layer, mb, hidden, attention, dense)


def _submit_dense(
    state: State, layer: int, mb: int, hidden: DeviceState, attention: DeviceState, dense: DeviceState
) -> None:  # fmt: skip
    """Submit attention and the rest. On one device they are one task; else each waits for the one before to cross."""
    micro = state.micro[mb]
    rows = micro.n_rows

    def run_whole() -> None:
        work = state.dense_memo.get((dense.index, mb))
        if work is None:
            work = state.costs.dense_ns(dense.name, rows) + _attention_ns(state, dense, micro)
            state.dense_memo[dense.index, mb] = work
        _submit_part(state, dense, new_task(state, "dense", layer, mb, rows, work), "attention", "dense", KV)

    def run_attention() -> None:
        work = _attention_ns(state, attention, micro)
        _submit_part(state, attention, new_task(state, "attention", layer, mb, rows, work, to_dense), "attention", KV)

    def to_dense() -> None:
        cross(state, attention, dense, layer, rows, "hidden", run_rest)

    def run_rest() -> None:
        _submit_part(state, dense, new_task(state, "dense", layer, mb, rows, state.costs.dense_ns(dense.name, rows)), "dense")

    core = state.layout.core_at.get(layer) if state.step.phase == "decode" else None
    if core is not None:
        _submit_apart(state, layer, mb, (hidden, attention, core, dense), run_rest)
    else:
        cross(state, hidden, attention, layer, rows, "hidden", run_whole if attention is dense else run_attention)


def _submit_apart(
    state: State, layer: int, mb: int, devices: tuple[DeviceState, ...], then: Callable[[], None]
) -> None:  # fmt: skip
    """Submit attention whose cache is read elsewhere: projections where attention is, the rest where the cache is."""
    hidden, attention, core, dense = devices
    micro, model = state.micro[mb], state.model
    rows = micro.n_rows
    there, back = (ceil_div(rows * width, model.hidden) for width in model.core_widths)  # in rows as wide as hidden states

    def project() -> None:
        work = state.costs.attention_ns(attention.name, rows, 0)
        _submit_part(state, attention, new_task(state, "attention", layer, mb, rows, work, to_core), "attention")

    def to_core() -> None:
        cross(state, attention, core, layer, there, "hidden", attend)

    def attend() -> None:
        work = _core_ns(state, core, micro)
        submit(state, core.main, new_task(state, "attention", layer, mb, rows, work, to_dense))

    def to_dense() -> None:
        cross(state, core, dense, layer, back, "hidden", then)

    cross(state, hidden, attention, layer, rows, "hidden", project)


def _submit_part(state: State, device: DeviceState, task: Task, *parts: str) -> None:
    """Submit a task of the dense part; what of its parts is streamed is copied first."""
    if state.layout.streams is not None:
        state.layout.streams.read(state, task, *parts)
    submit(state, device.main, task)


def _attention_ns(state: State, device: DeviceState, micro: MicroBatch) -> int:
    return state.costs.attention_ns(device.name, micro.n_rows, micro.work2, n_requests(state.step.requests, *micro[:2]))


def _core_ns(state: State, device: DeviceState, micro: MicroBatch) -> int:
    return state.costs.core_ns(device.name, micro.n_rows, micro.work2, n_requests(state.step.requests, *micro[:2]))


def n_requests(requests: NDArray[Any], first: int, n_rows: int) -> int:
    """Count the requests among rows of a step."""
    return len(set(requests[first : first + n_rows].tolist()))


def dense_ns(state: State, layer: int) -> int:
    """Time of a layer's dense part for all micro-batches of the present step, one after the other."""
    attention, dense = state.layout.attention_at[layer], state.layout.dense_at[layer]
    core = state.layout.core_at.get(layer % state.model.n_layers) if state.step.phase == "decode" else None

    def attending(micro: MicroBatch) -> int:
        if core is None:
            return _attention_ns(state, attention, micro)
        return state.costs.attention_ns(attention.name, micro.n_rows, 0) + _core_ns(state, core, micro)

    return sum(attending(micro) + state.costs.dense_ns(dense.name, micro.n_rows) for micro in state.micro)


def end_layer(state: State, visit: Visit) -> None:
    """Close a visit whose work is all done, and go on to the next layer or the LM head."""
    if visit.substitutes or visit.inexact:
        _check_served(state, visit)
    if not state.policy.exact:
        state.gate_mass += gate_mass(visit.weights)
    state.records.layers.append(_new(LayerRecord, (visit.begin, state.now, visit.step, visit.layer)))
    state.visit = None
    if LayerEnd in state.listens:
        tell(state, _new(LayerEnd, (visit.step, visit.layer)))
    if visit.layer + 1 < state.model.n_layers:
        begin_layer(state, visit.layer + 1)
    else:
        _step_part(state, "head", state.costs.head_ns, state.step.n_sequences, (), lambda: _end_step(state))


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
    """Say how many slots were served in which way."""
    return ", ".join(f"{r.slots} {r.kind}" for r in inexact)
