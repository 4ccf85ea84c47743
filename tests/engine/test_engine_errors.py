"""What the engine refuses, and what it says: time, step, layer, unit, policy and a remedy, in one line."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError, HardwareError, MoesimError, PolicyError
from moesim.policies.registry import make_policy
from moesim.policy import Copy, Drop, Fetch, Move, Placement, Pool, Predict, Run, Send, Skip, Work
from moesim.testing import run_tiny, tiny_workload
from tests.engine.engine_kit import Oracle, Script, cpu, gpu, link, machine, on_demand, play, tiny_model, workload

ALL = [Copy(layer, range(4), "gpu0") for layer in (0, 1)]
ONE = workload([[[[0, 1], [2, 3]]]])
AT_ROUTED = "t=100 ns, step 0, layer 0: "


def refused(error: type[MoesimError], run: Any) -> str:
    with pytest.raises(MoesimError) as caught:
        run()
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(" [policy=wild]")
    return message.removesuffix(" [policy=wild]")


def at_routed(*actions: Any, **more: Any) -> str:
    """Return what is said when the policy answers the first Routed with these actions."""
    options = {"copies": ALL, "hear": ["Routed"]} | more
    script = Script({("Routed", 0, 0, 0): list(actions)}, **options)
    message = refused(PolicyError, lambda: play(script, ONE, predictors={"told": Oracle()}, name="wild"))
    assert message.startswith(AT_ROUTED)
    return message.removeprefix(AT_ROUTED)


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("run", "decide returned 'run'; return Fetch, Drop, Move, Run, Skip, Predict, Send or Work"),
        (Fetch(0, [0], "gpu7"), "Fetch: unknown device 'gpu7'; did you mean 'gpu0'? known: cpu0, gpu0; name a device of the "
                                "profile"),
        (Fetch(0, [9], "gpu0"), "Fetch(L0/E9): no such unit; layers are 0..1, experts 0..3"),
        (Fetch(2, [0], "gpu0"), "Fetch(L2/E0): no such unit; layers are 0..1, experts 0..3"),
        (Fetch(0, [-1], "gpu0"), "Fetch(L0/E-1): no such unit; layers are 0..1, experts 0..3"),
        (
            Fetch(0, [0], "gpu0", pool="cash"),
            "Fetch(L0, gpu0): unknown pool 'cash'; did you mean 'cache'? known: cache; declare Pool('gpu0', 'cash', ...) in "
            "place()",
        ),
        (Fetch(0, [0], "gpu0", -1), "Fetch(L0, gpu0): urgency -1; classes start at 0 (demand)"),
        (Drop(0, [0], "cpu0"), "Drop(L0, cpu0): copies on a backing device stay; drop copies on other devices only"),
        (Drop(0, [0], "x"), "Drop: unknown device 'x'; known: cpu0, gpu0; name a device of the profile"),
        (Drop(0, [4], "gpu0"), "Drop(L0/E4): no such unit; layers are 0..1, experts 0..3"),
        (Move(0, [0], "gpu0", "b"), "Move(L0, gpu0): unknown pool 'b'; known: cache; declare Pool('gpu0', 'b', ...) in place()"),
        (Move(0, [7], "gpu0", "cache"), "Move(L0/E7): no such unit; layers are 0..1, experts 0..3"),
        (Run(0, [0], "tpu"), "Run: unknown device 'tpu'; known: cpu0, gpu0; name a device of the profile"),
        (
            Run(0, [0], "gpu0", bits=2),
            "Run(L0, gpu0): no experts of 2 bits; set model.expert_bits to a list with 2; it has 16",
        ),
        (
            Fetch(0, [0], "gpu0", bits=4),
            "Fetch(L0/E0): no experts of 4 bits; set model.expert_bits to a list with 4; it has 16",
        ),
        (
            Run(0, [2], "gpu0"),
            "Run(L0/E2, gpu0): no row is routed to it, or all have been taken; run each active expert once; "
            "name rows to run another expert instead",
        ),
        (Run(0, [4], "gpu0"), "Run(L0/E4): no such unit; layers are 0..1, experts 0..3"),
        (Run(0, [0], "gpu0", [1]), "Run(L0/E0): rows [1]; name distinct rows in 0..0"),
        (Run(0, [0], "gpu0", [0, 0]), "Run(L0/E0): rows [0, 0]; name distinct rows in 0..0"),
        (Run(0, [0], "gpu0", range(9)), "Run(L0/E0): rows [0, 1, 2, 3, 4, 5, 6, 7]; name distinct rows in 0..0"),
        (Run(1, [2], "gpu0"), "Run(L1, gpu0): not routed yet; name its rows, or wait for Routed"),
        (Run(2, [2], "gpu0", [0]), "Run(L2, gpu0): that layer is over or does not exist; run experts of this layer or a "
                                   "later one of this step"),
        (Run(1, [2], "gpu0", [0], inputs_from=2), "Run(L1, gpu0): inputs_from=2; name a layer in 0..1"),
        (Run(0, [0], "gpu0", inputs_from=0), "Run(L0, gpu0): inputs_from without rows; name the rows that read the other state"),
        (Skip(1, [0]), "Skip(L1); skip slots of the present layer, once it is routed"),
        (Skip(0, [2]), "Skip(L0/E2): rows [] are not routed to it, or are served; skip only open slots"),
        (Skip(0, [0], [0, 0]), "Skip(L0/E0): rows [0, 0] are not routed to it, or are served; skip only open slots"),
        (Skip(0, [0], range(9)), "Skip(L0/E0): rows [0, 1, 2, 3, 4, 5, 6, 7] are not routed to it, or are served; skip only open "
                                 "slots"),
        (Skip(0, [8]), "Skip(L0/E8): no such unit; layers are 0..1, experts 0..3"),
        (Work("lookup", "gpu0", -1), "Work('lookup', gpu0, -1); give a number of operations, and a CPU or GPU"),
        (Work("lookup", "gpu9"), "Work: unknown device 'gpu9'; did you mean 'gpu0'? known: cpu0, gpu0; name a "
                                 "device of the profile"),
        (Predict(1, 1, "told", "gpu0"), "Predict(step 1, L1): this is step 0; predict within the present step"),
        (Predict(0, 5, "told", "gpu0"), "Predict(L5/E0): no such unit; layers are 0..1, experts 0..3"),
        (Predict(0, 1, "tell", "gpu0"), "Predict: unknown source 'tell'; known: told; list it in Policy.needs"),
        (Predict(0, 1, "told", "gpu9"), "Predict: unknown device 'gpu9'; did you mean 'gpu0'? known: cpu0, gpu0; name a "
                                        "device of the profile"),
        (Predict(0, 1, "told", "gpu0", "third"), "Predict(L1): lane 'third'; lanes are 'main' and 'side'"),
        (
            Predict(0, 1, "told", "gpu0", "side"),
            "Predict(L1, gpu0): the profile has no rate for the side lane; measure a contention pair with 'gpu0.side', or "
            "use lane='main'",
        ),
        (Send(1, "gpu0", "gpu0", "x"), "Send(1, gpu0, gpu0); send at least one byte between two devices"),
        (Send(0, "gpu0", "cpu0", "x"), "Send(0, gpu0, cpu0); send at least one byte between two devices"),
        (Send(1, "gpu0", "cpu9", "x"), "Send: unknown device 'cpu9'; did you mean 'cpu0'? known: cpu0, gpu0; name a device "
                                       "of the profile"),
    ],
)  # fmt: skip
def test_actions_that_make_no_sense(action: Any, says: str) -> None:
    assert at_routed(action) == says


def test_run_of_what_is_not_there() -> None:
    says = "Run(L0/E0, gpu0): not resident and no fetch pending; return Fetch(L0/E0, gpu0) before it"
    assert at_routed(Run(0, [0], "gpu0"), copies=[]) == says
    assert at_routed(Drop(0, [0], "gpu0"), Run(0, [0], "gpu0")) == says
    assert at_routed(Fetch(0, [0], "gpu0"), Drop(0, [0], "gpu0"), Run(0, [0], "gpu0"), copies=[]) == says


@pytest.mark.parametrize("decision_ns", [0, 7])
def test_one_action_without_a_list(decision_ns: int) -> None:
    script = Script({("Routed", 0, 0, 0): lambda event, view: Run(0, [0, 1], "gpu0")}, copies=ALL)
    message = refused(PolicyError, lambda: play(script, ONE, name="wild", decision_ns=decision_ns))
    assert message.startswith(f"{AT_ROUTED}decide returned a bare Run(layer=0, experts=[0, 1], device='gpu0', ")
    assert message.endswith("; return a list of actions")


@pytest.mark.parametrize("decision_ns", [0, 7])
@pytest.mark.parametrize("answer", [42, True, object, "run all"])
def test_an_answer_that_is_no_list(answer: Any, decision_ns: int) -> None:
    script = Script({("Routed", 0, 0, 0): lambda event, view: answer}, copies=ALL)
    message = refused(PolicyError, lambda: play(script, ONE, name="wild", decision_ns=decision_ns))
    assert message == f"{AT_ROUTED}decide returned {answer!r}; return a list of actions"


@pytest.mark.parametrize(
    "action",
    [
        Fetch("x", [0], "gpu0"), Fetch(0, [None], "gpu0"), Fetch(0, 1, "gpu0"), Fetch(0, [0], "gpu0", "high"),  # type: ignore[arg-type, list-item]
        Run(0, ["a"], "gpu0"), Run(0, [0], "gpu0", rows=5), Run(0, [0], "gpu0", rows=["x"]), Run(None, [0], "gpu0"),  # type: ignore[arg-type, list-item]
        Drop(0, [0], None), Skip(0, [0], rows="ab"), Move(0, ["x"], "gpu0", "cache"), Send("many", "gpu0", "cpu0", ""),  # type: ignore[arg-type, list-item]
    ],
    ids=repr,
)  # fmt: skip
def test_actions_of_wrong_types(action: Any) -> None:
    says = at_routed(action)
    remedy = "give integers for layers, rows and urgency, sequences of integers for experts, names for devices and pools"
    assert says == f"decide returned {' '.join(repr(action).split())[:80]}; {remedy}"


def test_no_placement() -> None:
    script = Script()
    script.place = lambda view: None  # type: ignore[assignment, method-assign]
    message = refused(PolicyError, lambda: play(script, ONE, name="wild"))
    assert message == "place(): expected a moesim.policy.Placement, got None; return one, Placement() if nothing is cached"


def test_move_and_drop_of_what_is_not_there() -> None:
    says = "Move(L0/E0, gpu0): neither resident nor being fetched; move only what is there or on its way"
    assert at_routed(Move(0, [0], "gpu0", "cache"), copies=[]) == says
    says = "Drop(L0/E0, gpu0): neither resident nor being fetched; drop only what is there"
    assert at_routed(Drop(0, [0], "gpu0"), copies=[]) == says


def test_move_into_a_full_pool() -> None:
    pools = [Pool("gpu0", "cache", 8000), Pool("gpu0", "b", 999)]
    says = at_routed(Move(0, [0], "gpu0", "b"), pools=pools)
    assert says == "Move(L0/E0, gpu0): pool 'b' is full; Drop or Move something out of it first"
    assert at_routed(Fetch(1, [0], "gpu0", pool="b"), copies=[ALL[0]], pools=pools) == (
        "Fetch(L1/E0, gpu0): pool 'b' holds 999 bytes, the expert has 1000; make the pool at least one expert large"
    )


def test_fetch_from_where_there_is_no_copy() -> None:
    devices = {"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}
    toy = machine(devices, {n: link() for n in ("cpu0->gpu0", "gpu0->cpu0", "gpu1->gpu0", "gpu0->gpu1")})
    for source in ("gpu1", "disk"):
        script = Script({("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0", source=source)]})
        message = refused(PolicyError, lambda script=script: play(script, ONE, toy, name="wild"))
        assert message == f"{AT_ROUTED}Fetch(L0/E0, gpu0): no copy on {source}; leave source out, or fetch it to there first"


def test_send_where_no_link_leads() -> None:
    devices = {"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}
    toy = machine(devices, {n: link() for n in ("cpu0->gpu0", "gpu0->cpu0")})
    script = Script({("Routed", 0, 0, 0): [Send(1, "gpu0", "gpu1", "x")]})
    with pytest.raises(HardwareError, match=r"links: expected a path gpu0 -> gpu1, got none; add a link"):
        play(script, ONE, toy)


@pytest.mark.parametrize(
    ("when", "action", "says"),
    [
        (("LayerEnd", 0, 0), Run(0, [0], "gpu0", [0]), "Run(L0, gpu0): that layer is over or does not exist"),
        (("Routed", 0, 1, 0), Run(0, [0], "gpu0", [0]), "Run(L0, gpu0): that layer is over or does not exist"),
        (("StepEnd", 0), Run(1, [0], "gpu0", [0]), "Run(L1, gpu0): that layer is over or does not exist"),
        (("LayerBegin", 0, 0), Run(0, [0], "gpu0"), "Run(L0, gpu0): not routed yet"),
        (("LayerBegin", 0, 0), Skip(0, [0]), "Skip(L0); skip slots of the present layer"),
        (("StepBegin", 1), Predict(0, 0, "told", "gpu0"), "Predict(step 0, L0): this is step 1"),
    ],
)
def test_actions_at_the_wrong_time(when: tuple[Any, ...], action: Any, says: str) -> None:
    script = Script({when: [action]}, copies=ALL, routed=lambda e, v: [Run(e.layer, e.active, "gpu0")])
    two = workload([[[[0, 1], [2, 3]]] * 2])
    message = refused(PolicyError, lambda: play(script, two, predictors={"told": Oracle()}, name="wild"))
    assert re.match(r"t=[0-9.]+ (ns|us), step [01], layer -?[01]: ", message)
    assert says in message


@pytest.mark.parametrize(
    ("victim", "says"),
    [
        ((0, 2), "not resident in pool 'cache'; name a resident of the pool that is full"),
        ((0, 9), "not resident in pool 'cache'; name a resident of the pool that is full"),
        ((1, -4), "not resident in pool 'cache'; name a resident of the pool that is full"),  # would alias L0/E0
        ((1, 0), "not resident in pool 'cache'; name a resident of the pool that is full"),  # in the other pool
    ],
)
def test_impossible_victims(victim: tuple[int, int], says: str) -> None:
    script = Script(
        {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Fetch(0, [1], "gpu0")]},
        copies=[Copy(0, [0], "gpu0"), Copy(1, [0], "gpu0", "b")],
        pools=[Pool("gpu0", "cache", 1000), Pool("gpu0", "b", 1000)], evict=[victim],
    )  # fmt: skip
    message = refused(PolicyError, lambda: play(script, ONE, name="wild"))
    assert message == f"{AT_ROUTED}evict(L0/E1, gpu0) named L{victim[0]}/E{victim[1]}: {says}"


@pytest.mark.parametrize(
    "victim", [3, (0, 1, 2, 3), (0, 1, "few"), (), "ab", (0.0, 0.0), (0, None), False, Fetch(0, [0], "gpu0")], ids=repr
)
def test_a_victim_that_is_no_pair(victim: Any) -> None:
    script = Script(
        {("Routed", 0, 0, 0): [Fetch(0, [1], "gpu0")]}, copies=[Copy(0, [0], "gpu0")], slots=1, evict=lambda fetch, view: victim
    )
    message = refused(PolicyError, lambda: play(script, ONE, name="wild"))
    assert message == (
        f"{AT_ROUTED}evict(L0/E1, gpu0): expected (layer, expert) or None, got {repr(victim)[:80]}; "
        "name a resident of the pool, or return None to wait"
    )


def test_a_victim_of_numpys_integers_is_a_pair() -> None:
    def first(fetch: Any, view: Any) -> Any:
        return next((np.array(unit) for unit in view.residents("gpu0", "cache") if not view.is_in_use(*unit, "gpu0")), None)

    script = Script({("Routed", 0, 0, 0): on_demand}, slots=1, routed=on_demand, evict=first)
    assert len(play(script, ONE).evictions) == 3


def test_victim_of_another_layers_pool() -> None:
    script = Script(
        {("Routed", 0, 0, 0): [Fetch(0, [1], "gpu0")]}, copies=[Copy(0, [0], "gpu0"), Copy(1, [0], "gpu0")],
        pools=[Pool("gpu0", "cache", 1000, per_layer=True)], evict=[(1, 0)],
    )  # fmt: skip
    message = refused(PolicyError, lambda: play(script, ONE, name="wild"))
    assert message == f"{AT_ROUTED}evict(L0/E1, gpu0) named L1/E0: another layer's pool; name an expert of layer 0"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(parts={("router", 0): "gpu0"}), "no part ('router', 0); layers 0..1 have ('attention', 'dense', 'shared', 'kv'), "
                                                "-1 has "
                                                "('embedding', 'leading', 'head')"),
        (Script(parts={("dense", 2): "gpu0"}), "no part ('dense', 2)"),
        (Script(parts={("dense", -1): "gpu0"}), "no part ('dense', -1)"),
        (Script(parts={("head", -1): "gpu3"}), "unknown device 'gpu3'; did you mean 'gpu0'? known: cpu0, gpu0"),
        (Script(pools=[Pool("gpu3", "cache", 1)]), "unknown device 'gpu3'; did you mean 'gpu0'? known: cpu0, gpu0"),
        (Script(pools=[Pool("gpu0", "a", 1), Pool("gpu0", "a", 2)]),
         "Pool('gpu0', 'a', 2, False, 0): expected one pool of that name, at least 0 bytes, on a device that backs no weights"),
        (Script(pools=[Pool("gpu0", "a", -1)]), "Pool('gpu0', 'a', -1, False, 0): expected one pool"),
        (Script(pools=[Pool("gpu0", "a", 1, landing=-1)]), "Pool('gpu0', 'a', 1, False, -1): expected one pool"),
        (Script(pools=[Pool("cpu0", "a", 1)]), "Pool('cpu0', 'a', 1, False, 0): expected one pool"),
        (Script(pools=[Pool("gpu0", "a", [1, -1], True)]), "Pool('gpu0', 'a', [1, -1], True, 0): expected one pool"),
        (Script(pools=[Pool("gpu0", "a", [1, 1, 1], True)]),
         "Pool('gpu0', 'a'): expected per_layer=True and one number of bytes for each of 2 layers, got per_layer=True and 3"),
        (Script(pools=[Pool("gpu0", "a", [1, 1])]),
         "Pool('gpu0', 'a'): expected per_layer=True and one number of bytes for each of 2 layers, got per_layer=False and 2"),
        (Script(copies=[Copy(0, [0], "gpu0", "b")]), "copies of layer 0 in pool 'b' of gpu0: declare that pool"),
        (Script(copies=[Copy(2, [0], "gpu0")]), "copies of layer 2, experts [0]: no such units in tiny"),
        (Script(copies=[Copy(0, [4], "gpu0")]), "copies of layer 0, experts [4]: no such units in tiny"),
        (Script(copies=[Copy(0, range(9), "gpu0")]), "copies of layer 0, experts [0, 1, 2, 3, 4, 5, 6, 7]: no such units in "
                                                     "tiny"),
        (Script(copies=[Copy(0, [0, 1, 0], "gpu0")]), "L0/E0 is placed twice on gpu0"),
        (Script(copies=ALL, slots=7), "pool 'cache' of gpu0 is too small for the copies of layer 1"),
    ],
)  # fmt: skip
def test_impossible_placements(script: Script, says: str) -> None:
    message = refused(PolicyError, lambda: play(script, ONE, name="wild"))
    assert message.startswith("place(): ") and says in message


def test_what_does_not_fit() -> None:
    toy = machine({"gpu0": gpu(memory=8_900, workspace=500), "cpu0": cpu()})
    message = refused(CapacityError, lambda: play(Script(copies=ALL), ONE, toy, name="wild"))
    assert message == (
        "gpu0 of toy: needs 8.771 KiB, has 8.691 KiB: pool:cache 7.812 KiB, workspace 500 B, weights 450 B, kv 32 B; "
        "loading would fail; lower the cache ratio, the batch or the context, or choose fewer bits (expert_bits of the model)"
    )
    play(Script(copies=ALL, enforce_capacity=False, routed=lambda e, v: [Run(e.layer, e.active, "gpu0")]), ONE, toy)
    host = machine({"gpu0": gpu(), "cpu0": cpu(memory=7_999)})
    message = refused(CapacityError, lambda: play(Script(), ONE, host, name="wild"))
    assert message.startswith("cpu0 of toy: needs 7.812 KiB, has 7.812 KiB: experts 7.812 KiB; ")


def test_tied_embeddings_are_held_once() -> None:
    model = tiny_model(tie_embeddings=True)
    script = Script(copies=ALL, routed=lambda e, v: [Run(e.layer, e.active, "gpu0")])
    records = play(script, ONE, model=model)
    assert records.peak_bytes["gpu0"] == model.non_expert_bytes + 8000 + 2 * 2 * model.kv_bytes(0, 1)


def test_a_policys_own_errors_pass_through() -> None:
    def broken(event: Any, view: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    with pytest.raises(RuntimeError, match="dictionary changed size"):
        play(Script({("Routed", 0, 0, 0): broken}), ONE)


def test_the_placement_sees_the_view() -> None:
    class Curious(Script):
        def place(self, view: Any) -> Placement:
            assert (view.devices, view.gpus, view.cpus) == (["gpu0", "cpu0"], ["gpu0"], ["cpu0"])
            assert (view.compute, view.host, view.max_tokens, view.now_ns) == ("gpu0", "cpu0", 1, 0)
            assert (view.cache_slots("gpu0"), view.cache_slots("cpu0")) == (5, 0)
            assert view.model.name == "tiny" and view.costs.expert_ns("cpu0", 2) == 500
            return super().place(view)

    play(Curious(copies=ALL, routed=lambda e, v: [Run(e.layer, e.active, "gpu0")]), ONE, slots={"gpu0": 5})


@pytest.mark.parametrize("decision_ns", [700, 5000, 50_000])
def test_decisions_longer_than_the_time_between_micro_batches_are_taken_one_after_the_other(decision_ns: int) -> None:
    policy = make_policy("lru")
    work = tiny_workload(policy, 4, 2)
    records = run_tiny(policy, work, 8, decision_ns)
    taken = [(d.start, d.end) for d in records.decisions]
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(taken))
    assert len(taken) == sum(len(step.micro) for step in work[1].steps) * 4


@pytest.mark.parametrize("replacement", ["lru", "fifo", "mrs"])
def test_what_is_on_its_way_stays_while_a_decision_that_needs_it_is_taken(replacement: str) -> None:
    # A prefetch that arrives and is evicted again before the decision takes effect would be fetched by nobody.
    spec = {"name": "hybrimoe-paper", "prefetch": {"name": "impact-driven", "budget": "none"}, "replacement": replacement}
    work = tiny_workload(make_policy(spec), 3, n_experts=24, top_k=4)
    records = run_tiny(make_policy(spec), work, 8, 5000, n_experts=24, top_k=4)
    assert len(records.steps) == len(work[1].steps)
