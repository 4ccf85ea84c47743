"""Values of odd types in actions, answers of evict and questions to the view: both engines take, or refuse, the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from moesim.engine.native import AVAILABLE
from moesim.errors import PolicyError
from moesim.policy import Copy, Drop, Fetch, Move, Pool, Predict, Run, Send, Skip, Work
from moesim.records import Records
from tests.engine.engine_kit import ONE, Oracle, Script, assert_same, idle, machine, pair, play, tiny_model, workload

ODD: list[Any] = [
    None, "x", "", 1.0, 0.0, 1.5, -1, -3, 99, 2**62, np.int64(1), np.uint8(0), True, [], (), [1], ["gpu0"], np.array([0]),
    np.array(1), {0}, range(1), "gpu0", np.str_("cpu0"), b"gpu0", [None], [0.0], [-1], [np.uint8(0)], [[0]], [0, 0], 4, 4.0,
]  # fmt: skip
ACTIONS: list[Any] = [
    Fetch(1, [1], "gpu0", 1, "cache", "cpu0", 16), Fetch(0, [0], "cpu0", 2), Drop(0, [0], "gpu0"), Move(0, [1], "gpu0", "b"),
    Run(0, [0], "gpu0"), Run(0, [0, 1], "cpu0", [0], 0), Run(0, [0, 1], "cpu0", late=True), Skip(0, [0, 1], [0]),
    Predict(0, 1, "told", "gpu0"), Send(5, "gpu0", "cpu0", "tag"), Work("lookup", "gpu0", 2),
]  # fmt: skip
QUESTIONS: dict[str, tuple[Any, ...]] = {
    "is_resident": (0, 1, "gpu0", None), "is_pending": (1, 1, "gpu0", None), "is_in_use": (0, 1, "cpu0", None),
    "remaining_ns": (1, 1, "gpu0", None), "residency": (0, "gpu0", None), "residents": ("gpu0", "cache", None, None),
    "free_bytes": ("gpu0", "cache", 0), "cache_slots": ("gpu0",), "dense_device": (0,), "dense_ns": (0,), "foresees": ("told", 0),
}  # fmt: skip
TOY, MODEL = machine(), tiny_model(low_bits=(4.0,))


@pytest.fixture
def both(engine: str) -> None:
    if engine == "simpy" or not AVAILABLE:
        pytest.skip("compares the engines, once, where both are")


def outcome(engine: str, actions: list[Any] | None = None, ask: Any = None, victim: Any = None) -> tuple[Any, ...]:
    """Play one decode step; return the records or the error, what the policy heard, and what the view said."""
    said: list[Any] = []

    def routed(event: Any, view: Any) -> list[Any]:
        if event.layer == 0 and actions is not None:
            return actions
        if event.layer == 1 and ask is not None:
            said.append(ask(view))
        return [Run(event.layer, event.active, "cpu0")]

    pools = [Pool("gpu0", "cache", 2000), Pool("gpu0", "b", 2000)]
    script = Script(
        copies=[Copy(0, [0, 1], "gpu0")],
        pools=pools,
        routed=routed,
        evict=[victim],
        exact=False,
        hear=["Fetched", "Ran", "Predicted", "Sent"],
    )
    found: Any
    try:
        found = play(script, ONE, TOY, model=MODEL, predictors={"told": Oracle()}, engine=engine)
    except Exception as error:
        found = type(error), str(error)
    return found, script.log, said


def assert_alike(**play: Any) -> None:
    (a, *more), (b, *others) = outcome("simpy", **play), outcome("native", **play)
    assert more == others
    if isinstance(a, Records) and isinstance(b, Records):
        assert_same(a, b)
    else:
        assert a == b


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("action", ACTIONS, ids=repr)
def test_odd_values_in_an_action(action: Any) -> None:
    for field, value in product(action._fields, ODD):
        assert_alike(actions=[action._replace(**{field: value})])


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("name", QUESTIONS)
def test_odd_questions_to_the_view(name: str) -> None:
    for at, value in product(range(len(QUESTIONS[name])), [*ODD, -2, -9, 3, 8]):
        arguments = [*QUESTIONS[name][:at], value, *QUESTIONS[name][at + 1 :]]

        def ask(view: Any, arguments: list[Any] = arguments) -> Any:
            try:
                return getattr(view, name)(*arguments)
            except TypeError:
                return TypeError  # its words and those of IndexError are Python's own
            except IndexError:
                return IndexError
            except (KeyError, ValueError, PolicyError) as error:
                return type(error), str(error)

        assert_alike(ask=ask)


@pytest.mark.usefixtures("both")
def test_odd_victims() -> None:
    pairs: list[Any] = [
        (0, 0), [0, 1], (0, 9), (0, -1), (-1, 0), (2, 0), (2**62, 0), (0, 0, 16), (0, 0, 4), (0, 0, None), (0, 0, 3), (0,), "ab",
        (0, 0, None, 1), np.array([0, 0], np.uint8), {0, 1}, {0: 1, 1: 0}, (0.0, 0), (0, None), ("a", 0), (True, False),
    ]  # fmt: skip
    for victim in [*pairs, *ODD]:
        assert_alike(actions=[Fetch(1, [0], "gpu0"), Run(0, [0, 1], "cpu0")], victim=victim)


def test_a_victim_of_a_layer_that_is_not_there_names_no_copy_of_another_width():
    """The number of a unit past the last layer is that of layer 0 at the next width."""
    script = Script(
        {("Routed", 0, 0, 0): [Fetch(1, [0], "gpu0"), Run(0, [0, 1], "cpu0")]},
        copies=[Copy(0, [0], "gpu0", bits=4.0)],
        pools=[Pool("gpu0", "cache", 1000)],
        evict=lambda fetch, view: (2, 0),
    )
    with pytest.raises(PolicyError, match=r"evict\(L1/E0, gpu0\) named L2/E0: not resident in pool 'cache'"):
        play(script, ONE, model=tiny_model(low_bits=(4.0,)))


def test_ids_as_a_trace_has_them_name_the_same_experts_as_integers():
    """Experts of a trace are bytes; the number of a unit is larger."""
    work = workload([[[[10, 199], [190, 20]]]], n_experts=200)
    model = tiny_model(n_experts=200)

    def played(kind: Any) -> tuple[Records, list[Any]]:
        seen = []

        def routed(event: Any, view: Any) -> list[Any]:
            experts = [kind(e) for e in event.experts[0]]
            seen.append([view.is_resident(kind(event.layer), e, "gpu0") for e in experts])
            seen.append([view.is_pending(event.layer, e, "gpu0") or view.is_in_use(event.layer, e, "cpu0") for e in experts])
            fetch, run = Fetch(kind(event.layer), experts, "gpu0"), Run(kind(event.layer), experts, "gpu0", [kind(0)])
            return [fetch, run, Drop(event.layer, experts, "gpu0"), Fetch(1, [kind(150)], "gpu0", kind(1))]

        script = Script(routed=routed, slots=4, evict=idle, copies=[Copy(1, [kind(190)], "gpu0")])
        return play(script, work, model=model), seen

    (a, seen), (b, said) = played(int), played(np.uint8)
    assert seen == said
    assert_same(a, b)
    assert all(type(x.expert) is int for x in [*b.transfers, *b.tasks])


def test_a_view_answers_after_the_run_what_it_did_at_its_end():
    kept: list[Any] = []

    def routed(event: Any, view: Any) -> list[Any]:
        kept.append(view)
        late = [Fetch(0, [3], "gpu0")] if event.layer else []
        return [*late, Run(event.layer, event.active, "cpu0")]

    records = play(Script(routed=routed), ONE, predictors={"told": Oracle()})
    view = kept[-1]
    (begun,) = [t for t in records.tasks if t.layer == 1 and t.kind == "dense"]
    assert view.now_ns == records.makespan_ns
    assert view.dense_ns(0) == begun.work == view.dense_ns(-1)
    assert view.foresees("told", 1)
    assert view.is_pending(0, 3, "gpu0")
    assert view.remaining_ns(0, 3, "gpu0") == begun.end + 1000 - records.makespan_ns


def test_a_predictor_that_waits_for_a_layer_past_the_last_never_speaks():
    class Late(Oracle):
        def needs_layer(self, layer: int) -> int:
            return 7

    script = Script(
        {("Routed", 0, 0, 0): [Predict(0, 1, "told", "gpu0", "side"), Run(0, [0, 1], "cpu0")]},
        routed=lambda event, view: [Run(event.layer, event.active, "cpu0")],
        hear=["Predicted"],
    )
    toy = machine(contention=[pair("gpu0.experts", "gpu0.side", 0.5, 0.5)])
    records = play(script, ONE, toy, predictors={"told": Late()})
    assert not [t for t in records.tasks if t.kind == "predict"] and "Predicted" not in [key[0] for _, key in script.log]


def test_a_view_of_a_machine_that_has_no_step_yet_foresees_as_the_predictor_does():
    class Blind(Oracle):
        def predict(self, step: Any, mb: int, layer: int) -> Any:
            return None if step is None else super().predict(step, mb, layer)

    script = Script(routed=lambda event, view: [Run(event.layer, event.active, "cpu0")])
    said = []
    place = script.place
    script.place = lambda view: said.append(view.foresees("told", 0)) or place(view)  # type: ignore[method-assign, func-returns-value]
    play(script, ONE, predictors={"told": Blind()})
    assert said == [False]


def test_what_is_foreseen_is_foreseen_of_every_micro_batch():
    class Half(Oracle):
        def predict(self, step: Any, mb: int, layer: int) -> Any:
            return super().predict(step, mb, layer) if mb == layer else None

    found = []

    def routed(event: Any, view: Any) -> list[Any]:
        found.append([view.foresees(name, 1) for name in ("told", "half")])
        return [Run(event.layer, event.active, "cpu0")]

    work = workload([[[[0, 1], [2, 3]]], [[[2, 3], [0, 1]]]], micro_batches=2)
    play(Script(routed=routed), work, predictors={"told": Oracle(), "half": Half()})
    assert found and all(one == [True, False] for one in found)
