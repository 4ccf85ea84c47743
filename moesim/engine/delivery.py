"""Telling the policy what the router and the predictors said, and charging for its decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moesim.engine.devices import Task
from moesim.engine.layer import Visit
from moesim.policy import Predicted, Routed
from moesim.records import DecisionRecord, LookupRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.predictors import Predictor

_new = tuple.__new__


class Delivery:
    """Delivers Routed and Predicted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.wants_routed = Routed in engine.listens
        self.wants_predicted = Predicted in engine.listens
        self.has_shared = engine.model.n_shared > 0
        self.decision_ns = engine.options.decision_ns
        self._deciding = False
        self._waiting: list[int] = []  # micro-batches routed meanwhile: decisions are taken one at a time

    def routed(self, mb: int) -> None:
        """A micro-batch of the present layer has been routed."""
        if self._deciding:
            self._waiting.append(mb)
            return
        engine = self.engine
        visit = engine.visit
        assert visit is not None
        micro = engine.micro[mb]
        layer = visit.layer
        experts, weights, scores, loads, active = micro.layers[layer]
        visit.route(experts, weights, loads, micro.n_rows)
        self._look_up(visit, mb, loads, active)
        engine.mb = mb
        if not visit.mbs_left:
            if visit.early:
                visit.settle_early()
            for call in engine.state_waiters.pop(layer, ()):
                call()
        if self.has_shared:
            self._submit_shared(visit, mb)
        if not self.wants_routed:
            return
        event = _new(Routed, (visit.step, layer, mb, experts, weights, scores, loads, active, micro.first_row))
        actions = engine.policy.decide(event, engine.view)
        if self.decision_ns:
            self._charge(visit, active, list(actions or ()))
        elif actions:
            engine.actions.apply(actions)

    def _look_up(self, visit: Visit, mb: int, loads: Sequence[int], active: Sequence[int]) -> None:
        """Record which of the active experts are on a GPU, or on their way to one."""
        engine = self.engine
        base = visit.base
        gpus = engine.gpus
        if len(gpus) == 1:
            resident = gpus[0].memory.resident
            pending = gpus[0].pending
            hits = tuple([resident[base + e] for e in active])
            flying = tuple([1 if base + e in pending else 0 for e in active]) if pending else (0,) * len(hits)
        else:
            hits = tuple([int(any(g.memory.resident[base + e] for g in gpus)) for e in active])
            flying = tuple([int(any(base + e in g.pending for g in gpus)) for e in active])
        rows = tuple([loads[e] for e in active])
        engine.records.lookups.append(_new(LookupRecord, (engine.now, visit.step, visit.layer, mb, active, rows, hits, flying)))

    def _charge(self, visit: Visit, active: Sequence[int], actions: list[Any]) -> None:
        """Delay the effect of a decision; what the layer needs, there or on its way, stays pinned meanwhile."""
        engine = self.engine
        mb = engine.mb
        now = engine.now
        engine.records.decisions.append(DecisionRecord(now, now + self.decision_ns, visit.step, visit.layer))
        visit.open += 1
        self._deciding = True
        pinned = []
        for device in engine.devices:
            for expert in active:
                unit = visit.base + expert
                copy = device.memory.copies.get(unit) or device.pending.get(unit)
                if copy is not None:
                    copy.pins += 1
                    pinned.append((device, unit, copy.fetch))

        def apply() -> None:
            engine.mb = mb
            engine.actions.apply(actions)
            visit.open -= 1
            for device, unit, fetch in pinned:
                copy = device.memory.copies.get(unit)
                coming = device.pending.get(unit)
                if copy is not None and copy.fetch == fetch:
                    device.memory.unpin(unit, engine.now)
                elif coming is not None and coming.fetch == fetch:  # else it was given up
                    coming.pins -= 1
            self._deciding = False
            if self._waiting:
                engine.routed.append(self._waiting.pop(0))

        engine.after(self.decision_ns, apply)

    def _submit_shared(self, visit: Visit, mb: int) -> None:
        """Shared experts run for every row, before the routed ones of the same device."""
        engine = self.engine
        layer = visit.layer
        rows = engine.micro[mb].n_rows
        device = engine.shared_at[layer]
        home = engine.dense_at[layer]
        visit.open += 1

        def over() -> None:
            visit.open -= 1

        def done() -> None:
            if device is home:
                over()
            else:
                engine.cross(device, home, layer, rows, "out", over, task)

        work = engine.costs.shared_ns(device.name, rows)
        task = Task(engine.next_number(), "shared", visit.step, layer, mb, rows, work, engine.now, engine.now)
        task.then = done
        if device is not home:
            task.waits = 1
            engine.cross(home, device, layer, rows, "in", lambda: device.main.wake(task), task)
        device.main.submit(task)

    def predicted(self, step: int, layer: int, source: str, predictor: Predictor) -> None:
        """A prediction has been paid for; one that comes after its step is of no use and is not told."""
        engine = self.engine
        if step != engine.step.index or not self.wants_predicted:
            return
        for mb in range(engine.n_mbs):
            answer = predictor.predict(engine.step, mb, layer)
            if answer is not None:
                engine.tell(Predicted(step, layer, mb, answer[0], answer[1], source))
