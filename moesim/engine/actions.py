"""Telling the policy, and carrying out what it returns: validation first, then effect, in the order returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any

from moesim.engine import movement, runs
from moesim.engine.checks import device_of, fail, short_repr, unit_of
from moesim.engine.lanes import submit, submit_next, wake
from moesim.engine.machine import AHEAD, Task
from moesim.engine.state import State, gate_input_exists, when_gate_input
from moesim.engine.visit import SKIPPED, bits_of, rows_of
from moesim.errors import unknown_name
from moesim.policy import Action, Drop, Fetch, Move, Predict, Run, Send, Skip

WRONG_TYPE = "give integers for layers, rows and urgency, sequences of integers for experts, names for devices and pools"
_ABOUT_EXPERTS = frozenset({Fetch, Drop, Move, Run, Skip})


def tell(state: State, event: Any) -> None:
    """Tell the policy an event that it listens to, and apply its answer; while it decides, the event waits."""
    if type(event) not in state.listens:
        return
    if state.deciding:
        state.unheard.append(lambda: tell(state, event))
        return
    actions = state.policy.decide(event, state.view)
    if actions:
        apply(state, actions)


def collected(state: State, actions: Iterable[Any]) -> list[Any]:
    """Collect an answer before any of it takes effect: a generator must not see its own consequences."""
    if isinstance(actions, Action):  # a tuple itself: its fields are no actions
        fail(state, f"decide returned a bare {actions!r}", "return a list of actions")
    if not isinstance(actions, Iterable):
        fail(state, f"decide returned {short_repr(actions)}", "return a list of actions")
    return list(actions)


def apply(state: State, actions: Iterable[Any]) -> None:
    """Apply the actions returned for one event; Runs among them that share a device and layer form a group."""
    if type(actions) is not list and type(actions) is not tuple:
        actions = collected(state, actions)
    groups: runs.Groups = {}
    for action in actions:
        kind = type(action)
        try:
            if kind in _ABOUT_EXPERTS and _is_empty(action):
                continue
            if kind is Run:
                runs.run(state, action, groups)
            elif kind in _APPLY:
                _APPLY[kind](state, action)
            else:
                fail(state, f"decide returned {action!r}", "return Fetch, Drop, Move, Run, Skip, Predict or Send")
        except TypeError:
            fail(state, f"decide returned {short_repr(action)}", WRONG_TYPE)
    for group in groups.values():
        runs.launch(state, group)
    if state.thread is not None:
        submit_next(state, state.thread)


def _is_empty(action: Any) -> bool:
    """Whether an action names no expert, or no row."""
    if not len(action.experts):
        return True
    return type(action) in (Run, Skip) and action.rows is not None and not len(action.rows)


def skip(state: State, action: Skip) -> None:
    """Leave open slots of the present layer out."""
    layer, experts, rows = index(action.layer), action.experts, action.rows
    visit = state.visit
    if visit is None or layer != visit.layer or visit.mbs_left:
        fail(state, f"Skip(L{layer})", "skip slots of the present layer, once it is routed")
    for expert in map(index, experts):
        unit_of(state, layer, expert, "Skip")
        named = rows_of(visit.unserved[expert]) if rows is None else list(map(index, rows))
        chosen = bits_of(row for row in named if row >= 0)
        if not chosen or chosen & ~visit.unserved[expert] or chosen.bit_count() != len(named):
            what = f"Skip(L{layer}/E{expert}): rows {named[:8]} are not routed to it, or are served"
            fail(state, what, "skip only open slots")
        visit.serve(expert, chosen, SKIPPED, False)


def predict(state: State, action: Predict) -> None:
    """Submit the task of a prediction, which waits for the state that it needs."""
    step, layer = index(action.step), index(action.layer)
    _, _, source, name, lane_name = action
    device = device_of(state, name, "Predict")
    if step != state.step.index:
        fail(state, f"Predict(step {step}, L{layer}): this is step {state.step.index}", "predict within the present step")
    unit_of(state, layer, 0, "Predict")
    predictor = state.predictors.get(source)
    if predictor is None:
        fail(state, f"Predict: {unknown_name('source', source, state.predictors)}", "list it in Policy.needs")
    if lane_name not in ("main", "side"):
        fail(state, f"Predict(L{layer}): lane '{lane_name}'", "lanes are 'main' and 'side'")
    if lane_name == "side" and device.side.plain:
        what = f"Predict(L{layer}, {name}): the profile has no rate for the side lane"
        fail(state, what, f"measure a contention pair with '{name}.side', or use lane='main'")
    work = state.costs.predict_ns(name, state.step_rows, source)
    lane = device.main if lane_name == "main" else device.side
    key = next(state.task_numbers) + (AHEAD if lane_name == "main" else 0)
    task = Task(key, "predict", step, layer, -1, state.step_rows, work, state.now, state.now)
    task.then = lambda: state.predicted.append((step, layer, source, predictor))
    needed = predictor.needs_layer(layer)
    if needed is not None and not gate_input_exists(state, needed):
        task.waits = 1
        when_gate_input(state, needed, lambda: wake(state, task))
    submit(state, lane, task)


_APPLY: dict[type, Callable[[State, Any], None]] = {
    Fetch: movement.fetch, Drop: movement.drop, Move: movement.move, Send: movement.send, Skip: skip, Predict: predict,
}  # fmt: skip
