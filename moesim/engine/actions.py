"""Carrying out what a policy returned: validation first, then effect, in the order returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from moesim.engine.devices import AHEAD, DeviceState, Task
from moesim.engine.layer import FRESH, SKIPPED, STALE, Early, Group, Visit
from moesim.engine.memory import PoolState
from moesim.engine.movement import Movement
from moesim.errors import PolicyError, unknown_name
from moesim.policy import Action, Drop, Fetch, Move, Predict, Run, Send, Skip
from moesim.units import format_ns

if TYPE_CHECKING:
    from moesim.engine.core import Engine


_ABOUT_EXPERTS = frozenset({Fetch, Drop, Move, Run, Skip})


def _is_empty(action: Any) -> bool:
    """Whether an action names no expert, or no row."""
    if not len(action.experts):
        return True
    return type(action) in (Run, Skip) and action.rows is not None and not len(action.rows)


class Actions:
    """Applies actions to the engine's state."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.n_experts = engine.model.n_experts
        self.n_layers = engine.model.n_layers
        movement = Movement(engine, self)
        self._apply: dict[type, Callable[[Any], None]] = {
            Fetch: movement.fetch, Drop: movement.drop, Move: movement.move, Send: movement.send,
            Skip: self._skip, Predict: self._predict,
        }  # fmt: skip

    def apply(self, actions: Iterable[Any]) -> None:
        """Apply the actions returned for one event; Runs among them that share a device and layer form a group."""
        groups: dict[tuple[int, int], Group] | None = None
        if type(actions) is not list and type(actions) is not tuple:
            if isinstance(actions, Action):  # a tuple itself: its fields are no actions
                self.fail(f"decide returned a bare {actions!r}", "return a list of actions")
            actions = list(actions)  # collected before any takes effect: a generator must not see its own consequences
        for action in actions:
            kind = type(action)
            if kind in _ABOUT_EXPERTS and _is_empty(action):
                continue
            if kind is Run:
                if groups is None:
                    groups = {}
                self._run(action, groups)
            else:
                handler = self._apply.get(kind)
                if handler is None:
                    self.fail(f"decide returned {action!r}", "return Fetch, Drop, Move, Run, Skip, Predict or Send")
                handler(action)
        if groups:
            for group in groups.values():
                self._launch(group)
        if self.engine.thread is not None:
            self.engine.thread.advance()

    def fail(self, what: str, remedy: str) -> NoReturn:
        engine = self.engine
        layer = engine.visit.layer if engine.visit is not None else engine.reached
        where = f"t={format_ns(engine.now)}, step {engine.step.index}, layer {layer}"
        raise PolicyError(f"{where}: {what}; {remedy} [policy={engine.policy_name}]")

    def device(self, name: str, what: str) -> DeviceState:
        device = self.engine.by_name.get(name)
        if device is None:
            self.fail(f"{what}: {unknown_name('device', name, self.engine.by_name)}", "name a device of the profile")
        return device

    def unit(self, layer: int, expert: int, what: str) -> int:
        if not (0 <= layer < self.n_layers and 0 <= expert < self.n_experts):
            self.fail(
                f"{what}(L{layer}/E{expert}): no such unit",
                f"layers are 0..{self.n_layers - 1}, experts 0..{self.n_experts - 1}",
            )
        return layer * self.n_experts + expert

    def pool(self, device: DeviceState, name: str, what: str) -> PoolState:
        pool = device.memory.pools.get(name)
        if pool is None:
            self.fail(
                f"{what}: {unknown_name('pool', name, device.memory.pools)}",
                f"declare Pool('{device.name}', '{name}', ...) in place()",
            )
        return pool

    # ----------------------------------------------------------------------------------------------------------- runs
    def _run(self, action: Run, groups: dict[tuple[int, int], Group]) -> None:
        layer, experts, name, rows, inputs_from, part = action
        engine = self.engine
        device = engine.by_name.get(name) or self.device(name, "Run")
        if not device.computes:
            self.fail(f"Run(L{layer}, {name}): a disk computes nothing", "run experts where the dense part runs")
        if part != "expert":
            self.fail(
                f"Run(L{layer}, {name}): {unknown_name('part', part, ['expert'])}",
                "this model has experts of one precision",
            )
        visit = engine.visit
        if visit is None or layer != visit.layer or visit.mbs_left == engine.n_mbs or inputs_from is not None:
            visit = self._visit_for(layer, rows, inputs_from, name)
        group: Group | None = None
        if device is not engine.dense_at[layer] or device.first_extra or rows is not None:
            read = layer if inputs_from is None else inputs_from
            key = (device.index, read * self.n_layers + layer)
            group = groups.get(key)
            if group is None:
                group = groups[key] = Group(visit, device)
                group.inputs_from = read
        copies = device.memory.copies
        now = engine.now
        main = device.main
        pending = visit.pending
        base = visit.base
        n_experts = self.n_experts
        step = visit.step
        mb = engine.mb
        taken: Sequence[int] | None = None  # by this Run, where that is not simply all rows routed to the expert
        for expert in experts:
            unit = base + expert
            if rows is None:
                n_rows = pending[expert] if 0 <= expert < n_experts else 0
                if not n_rows:
                    self._nothing_to_run(layer, expert, name)
                if group is not None:
                    group.union |= self._row_bits(visit, expert)
                if engine.n_mbs > 1 or visit.has_slots:
                    if engine.names_rows:
                        taken = visit.rows_of(expert)
                    visit.note_taken(expert)
                pending[expert] = 0
                visit.open += 1 - n_rows  # its slots are settled, the task is to be done
            else:
                n_rows = self._take_rows(visit, layer, expert, rows, inputs_from)
                visit.open += 1
                assert group is not None
                for row in rows:
                    group.union |= 1 << int(row)  # a NumPy integer would overflow
            work = device.expert_ns.get(n_rows)
            if work is None:
                work = engine.expert_ns(device, n_rows)
            number = engine.number = engine.number + 1
            task = Task(number, "expert", step, layer, mb, n_rows, work, now, now, expert, unit, visit, group)
            task.row_ids = taken if rows is None else rows
            copy = copies.get(unit)
            if copy is not None:
                copy.pins += 1
            else:
                transfer = device.pending.get(unit)
                if transfer is None:
                    self.fail(
                        f"Run(L{layer}/E{expert}, {name}): not resident and no fetch pending",
                        f"return Fetch(L{layer}/E{expert}, {name}) before it",
                    )
                transfer.waiting.append(task)
                task.waits = 1
            if group is None:
                if engine.thread is not None:
                    engine.thread.take(task)
                main.submit(task)
            else:
                group.tasks.append(task)

    def _visit_for(self, layer: int, rows: Sequence[int] | None, inputs_from: int | None, name: str) -> Visit:
        """Return the visit that a Run belongs to when it is not simply the present, routed layer."""
        engine = self.engine
        now_layer = engine.visit.layer if engine.visit is not None else engine.reached + 1
        if not now_layer <= layer < self.n_layers:
            self.fail(
                f"Run(L{layer}, {name}): that layer is over or does not exist",
                "run experts of this layer or a later one of this step",
            )
        routed = layer == now_layer and engine.visit is not None and engine.visit.mbs_left < engine.n_mbs
        if inputs_from is not None and not 0 <= inputs_from <= layer:
            self.fail(f"Run(L{layer}, {name}): inputs_from={inputs_from}", f"name a layer in 0..{layer}")
        if not routed and rows is None:
            self.fail(f"Run(L{layer}, {name}): not routed yet", "name its rows, or wait for Routed")
        if inputs_from is not None and rows is None:
            self.fail(f"Run(L{layer}, {name}): inputs_from without rows", "name the rows that read the other state")
        if layer == now_layer and engine.visit is not None:
            return engine.visit
        return engine.future_visit(layer)

    def _nothing_to_run(self, layer: int, expert: int, name: str) -> NoReturn:
        self.unit(layer, expert, "Run")
        self.fail(
            f"Run(L{layer}/E{expert}, {name}): no row is routed to it, or all have been taken",
            "run each active expert once; name rows to run another expert instead",
        )

    def _row_bits(self, visit: Visit, expert: int) -> int:
        """Rows that a Run of `expert` with rows=None takes, as bits."""
        if self.engine.step_rows == 1:
            return 1
        if visit.has_slots or len(visit.experts) > 1:
            return sum(1 << row for row in visit.rows_of(expert))
        mask = np.packbits((visit.experts[0] == expert).any(axis=1), bitorder="little")
        return int.from_bytes(mask.tobytes(), "little")

    def _take_rows(self, visit: Visit, layer: int, expert: int, rows: Sequence[int], inputs_from: int | None) -> int:
        self.unit(layer, expert, "Run")
        n_step = self.engine.step_rows
        if any(not 0 <= r < n_step for r in rows) or len(set(rows)) != len(rows):
            self.fail(f"Run(L{layer}/E{expert}): rows {list(rows)[:8]}", f"name distinct rows in 0..{n_step - 1}")
        stale = inputs_from is not None and inputs_from != layer
        if max(rows) < visit.routed_rows:
            visit.settle(expert, rows, STALE if stale else FRESH, stale)
        else:
            visit.add_early(Early(expert, rows, stale))
        return len(rows)

    def _launch(self, group: Group) -> None:
        """Submit a group: at once where the hidden state is, else when its rows have crossed."""
        engine = self.engine
        visit = group.visit
        layer = visit.layer
        group.left = len(group.tasks)
        group.rows = group.union.bit_count()
        home = engine.dense_at[group.inputs_from]
        far = group.device is not home
        ready = engine.state_is_there(group.inputs_from)
        if not ready and group.inputs_from == layer:  # the micro-batches it reads may be routed, if not all are
            ready = group.union.bit_length() <= visit.routed_rows
        for task in group.tasks:
            if far or not ready:
                task.waits += 1
            if engine.thread is not None:
                engine.thread.take(task)
            group.device.main.submit(task)
        visit.open += 1  # the group itself: until its outputs are back

        def wake() -> None:
            for task in group.tasks:
                group.device.main.wake(task)

        def inputs_ready() -> None:
            if far:
                engine.cross(home, group.device, layer, group.rows, "in", wake, group)
            elif not ready:
                wake()

        if ready:
            inputs_ready()
        else:
            engine.when_state(group.inputs_from, inputs_ready)

    def _skip(self, action: Skip) -> None:
        layer, experts, rows = action
        visit = self.engine.visit
        if visit is None or layer != visit.layer or visit.mbs_left:
            self.fail(f"Skip(L{layer})", "skip slots of the present layer, once it is routed")
        for expert in experts:
            self.unit(layer, expert, "Skip")
            chosen = visit.rows_of(expert) if rows is None else list(rows)
            routed = set(visit.rows_of(expert))
            if not chosen or not routed.issuperset(chosen) or len(set(chosen)) != len(chosen):
                self.fail(
                    f"Skip(L{layer}/E{expert}): rows {chosen[:8]} are not routed to it, or are settled",
                    "skip only open slots",
                )
            visit.settle(expert, chosen, SKIPPED, False)

    # ------------------------------------------------------------------------------------------------ predictions, messages
    def _predict(self, action: Predict) -> None:
        step, layer, source, name, lane = action
        engine = self.engine
        device = self.device(name, "Predict")
        if step != engine.step.index:
            self.fail(
                f"Predict(step {step}, L{layer}): this is step {engine.step.index}",
                "predict within the present step",
            )
        self.unit(layer, 0, "Predict")
        predictor = engine.predictors.get(source)
        if predictor is None:
            self.fail(f"Predict: {unknown_name('source', source, engine.predictors)}", "list it in Policy.needs")
        if lane not in ("main", "side"):
            self.fail(f"Predict(L{layer}): lane '{lane}'", "lanes are 'main' and 'side'")
        if lane == "side" and device.side.expert_activity not in engine.contention.partners:
            self.fail(
                f"Predict(L{layer}, {name}): the profile has no rate for the side lane",
                f"measure a contention pair with '{name}.side', or use lane='main'",
            )
        work = engine.costs.predict_ns(name, engine.step_rows, source)
        target = device.main if lane == "main" else device.side
        key = engine.next_number() + (AHEAD if lane == "main" else 0)

        def done() -> None:
            engine.predicted.append((step, layer, source, predictor))

        task = Task(key, "predict", step, layer, -1, engine.step_rows, work, engine.now, engine.now)
        task.then = done
        needed = predictor.needs_layer(layer)
        if needed is not None and not engine.state_is_there(needed):
            task.waits = 1
            engine.when_state(needed, lambda: target.wake(task))
        target.submit(task)
