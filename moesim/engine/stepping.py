"""Steps and layers: what follows what in a forward pass (rule 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moesim.engine.devices import DeviceState, Task
from moesim.engine.layer import Visit
from moesim.errors import HardwareError, PolicyError
from moesim.limits import RUN_NS
from moesim.policy import LayerBegin, LayerEnd, StepBegin, StepEnd
from moesim.records import LayerRecord, StepRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.workload import MicroBatch, Step

_new = tuple.__new__


class Stepper:
    """Walks through the workload: embedding, leading dense layers, MoE layers, LM head."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.hidden_at: DeviceState = engine.step_parts["embedding"]  # where the hidden state is
        self._steps: Iterator[Step] = iter(engine.workload.steps)
        self._began = 0
        self._gate_mass = 0.0
        self._dense_ns: dict[tuple[int, int], int] = {}  # (device, micro-batch) -> cost of a whole dense part in this step
        self._wants_begin = LayerBegin in engine.listens
        self._wants_end = LayerEnd in engine.listens
        self._exact = engine.policy.exact
        self._n_layers, self._n_experts, self._top_k = engine.model.n_layers, engine.model.n_experts, engine.model.top_k

    # -------------------------------------------------------------------------------------------------------------- steps
    def next_step(self) -> None:
        """Begin the next step; after the last the run is over, and what is still in flight has no end in the records."""
        step = next(self._steps, None)
        if step is None:
            self.engine.over = True
        else:
            self._begin_step(step)

    def _begin_step(self, step: Step) -> None:
        engine = self.engine
        engine.step = step
        engine.step_rows = step.n_tokens
        engine.micro = step.micro
        engine.n_mbs = len(engine.micro)
        engine.future.clear()
        engine.state_waiters.clear()
        self._dense_ns.clear()
        self._began = engine.now
        self._gate_mass = 0.0
        self._reserve_kv(step.kv_tokens)
        engine.reached = -1
        if StepBegin in engine.listens:
            engine.tell(StepBegin(step.index, step.phase, step.requests, step.last_chunk))
        self.hidden_at = engine.step_parts["embedding"]
        costs = engine.costs

        def leading() -> None:
            more = (step.work2, len(set(step.requests.tolist())))
            self._step_part("leading", costs.leading_ns, step.n_tokens, more, lambda: self.begin_layer(0))

        self._step_part("embedding", costs.embedding_ns, step.n_tokens, (), leading)

    def _reserve_kv(self, tokens: int) -> None:
        """Hold the KV of the active requests at their final lengths."""
        engine = self.engine
        per_layer = engine.model.kv_bytes_per_token_per_layer
        for name, layers in engine.kv_layers.items():
            memory = engine.by_name[name].memory
            change = tokens * per_layer * layers - memory.kv
            if change:
                memory.kv += change
                memory.add(change, engine.now)

    def _step_part(self, part: str, cost: Callable[..., int], rows: int, more: tuple[int, ...], then: Callable[[], None]) -> None:
        """Run embedding, leading layers or head where they live; a part that costs nothing is passed over."""
        engine = self.engine
        device = engine.step_parts[part]
        work = cost(device.name, rows, *more) if rows else 0
        if not work:
            then()
            return
        hidden, self.hidden_at = self.hidden_at, device

        def run() -> None:
            device.main.submit(self._task(part, -1, 0, rows, work, then))

        if hidden is device:
            run()
        else:
            engine.cross(hidden, device, -1, rows, "hidden", run)

    def _end_step(self) -> None:
        engine = self.engine
        self._check_clock()
        step = engine.step
        engine.records.steps.append(
            StepRecord(
                self._began,
                engine.now,
                step.index,
                step.phase,
                step.batch,
                step.n_tokens,
                step.n_sequences,
                self._gate_mass,
            )
        )
        if StepEnd in engine.listens:
            engine.tell(StepEnd(step.index))
        if engine.progress is not None:
            engine.progress(step.index)
        self.next_step()

    def _check_clock(self) -> None:
        """Stop long before nanoseconds have more than 64 bits: every cost may be thinkable, and so many of them are not."""
        engine = self.engine
        if engine.now > RUN_NS:
            got = f"{engine.now / RUN_NS:.3g} after step {engine.step.index}"
            raise HardwareError(
                f"{engine.costs.hardware.path}: expected a run of at most a year of simulated time, got {got}; correct the rates "
                "and times of the profile, or run less"
            )

    # ------------------------------------------------------------------------------------------------------------- layers
    def begin_layer(self, layer: int) -> None:
        """Begin a visit of a layer: tell the policy, then submit its dense part for every micro-batch."""
        engine = self.engine
        self._open_visit(layer)
        if self._wants_begin:
            engine.tell(_new(LayerBegin, (engine.step.index, layer)))
        attention, dense = engine.attention_at[layer], engine.dense_at[layer]
        hidden, self.hidden_at = self.hidden_at, dense
        for mb in range(engine.n_mbs):
            if attention is dense and dense is hidden:
                dense.main.submit(self._whole_dense(layer, mb, dense))
            else:
                self._dense_chain(layer, mb, hidden, attention, dense)

    def _open_visit(self, layer: int) -> None:
        engine = self.engine
        visit = engine.future.pop(layer, None) if engine.future else None
        if visit is None:
            visit = Visit(engine.step.index, layer, layer * self._n_experts, self._top_k, engine.n_mbs, engine.n_mbs)
        visit.begin = engine.now
        engine.visit = visit
        engine.reached = layer

    def _whole_dense(self, layer: int, mb: int, device: DeviceState) -> Task:
        """Attention and the rest on one device are one task."""
        engine = self.engine
        micro = engine.micro[mb]
        work = self._dense_ns.get((device.index, mb))
        if work is None:
            work = engine.costs.dense_ns(device.name, micro.n_rows) + self._attention_ns(device, micro)
            self._dense_ns[device.index, mb] = work
        number = engine.number = engine.number + 1
        return Task(number, "dense", engine.step.index, layer, mb, micro.n_rows, work, engine.now, engine.now)

    def dense_ns(self, layer: int) -> int:
        """Time of a layer's dense part for all micro-batches of the present step, one after the other."""
        engine = self.engine
        attention, dense = engine.attention_at[layer], engine.dense_at[layer]
        return sum(
            self._attention_ns(attention, micro) + engine.costs.dense_ns(dense.name, micro.n_rows) for micro in engine.micro
        )

    def _attention_ns(self, device: DeviceState, micro: MicroBatch) -> int:
        rows = slice(micro.first_row, micro.first_row + micro.n_rows)
        n_requests = len(set(self.engine.step.requests[rows].tolist()))
        return self.engine.costs.attention_ns(device.name, micro.n_rows, micro.work2, n_requests)

    def _dense_chain(self, layer: int, mb: int, hidden: DeviceState, attention: DeviceState, dense: DeviceState) -> None:
        """Attention and the rest on different devices, or the hidden state elsewhere: each waits for the one before."""
        engine = self.engine
        micro = engine.micro[mb]
        rows = micro.n_rows

        def run_dense() -> None:
            if attention is dense:
                dense.main.submit(self._whole_dense(layer, mb, dense))
                return
            work = engine.costs.dense_ns(dense.name, rows)
            dense.main.submit(self._task("dense", layer, mb, rows, work, None))

        def run_attention() -> None:
            work = self._attention_ns(attention, micro)
            attention.main.submit(self._task("attention", layer, mb, rows, work, to_dense))

        def to_dense() -> None:
            engine.cross(attention, dense, layer, rows, "hidden", run_dense)

        first = run_dense if attention is dense else run_attention
        if hidden is attention:
            first()
        else:
            engine.cross(hidden, attention, layer, rows, "hidden", first)

    def end_layer(self, visit: Visit) -> None:
        """Close a visit whose work is all done, and go on to the next layer or the LM head."""
        engine = self.engine
        layer = visit.layer
        self._close_visit(visit)
        if self._wants_end:
            engine.tell(_new(LayerEnd, (visit.step, layer)))
        if layer + 1 < self._n_layers:
            self.begin_layer(layer + 1)
        else:
            self._step_part("head", engine.costs.head_ns, engine.step.n_sequences, (), self._end_step)

    def _close_visit(self, visit: Visit) -> None:
        engine = self.engine
        if visit.has_slots:
            self._settle(visit)
        if not self._exact:
            self._gate_mass += visit.gate_mass()
        engine.records.layers.append(_new(LayerRecord, (visit.begin, engine.now, visit.step, visit.layer)))
        engine.visit = None

    def _settle(self, visit: Visit) -> None:
        engine = self.engine
        visit.settle_substitutes(f"step {visit.step}, layer {visit.layer}", f"[policy={engine.policy_name}]")
        inexact = visit.inexact_records()
        if inexact and engine.policy.exact:
            kinds = ", ".join(f"{r.slots} {r.kind}" for r in inexact)
            raise PolicyError(
                f"step {visit.step}, layer {visit.layer}: an exact policy settled slots otherwise than fresh: {kinds}; "
                f"run what is routed on fresh inputs, or set exact = False [policy={engine.policy_name}]"
            )
        engine.records.inexact.extend(inexact)

    def _task(self, kind: str, layer: int, mb: int, rows: int, work: int, then: Callable[[], None] | None) -> Task:
        engine = self.engine
        task = Task(engine.next_number(), kind, engine.step.index, layer, mb, rows, work, engine.now, engine.now)
        task.then = then
        return task
