"""Rule 10: a deadlock says who waits for what.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

import pytest

from moesim.errors import DeadlockError
from moesim.policy import Copy, Fetch, Pool, Run
from tests.engine.engine_kit import ALL, ONE, Script, cpu, gpu, link, machine, on_demand, on_gpu, play, tiny_model, workload


def test_rule_10_a_deadlock_names_two_runs_that_wait_for_a_fetch() -> None:
    """Of four: one for each row of the expert."""
    rows = workload([[[[0, 1], [2, 3]]]] * 4)
    runs = [Run(0, [0], "gpu0", [row]) for row in range(4)]
    script = Script({("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), *runs]}, copies=[Copy(1, [0], "gpu0")], slots=1)
    with pytest.raises(DeadlockError) as error:
        play(script, rows)
    assert str(error.value).count("Run(L0/E0, gpu0) waits for its fetch") == 2


def test_rule_10_a_deadlock_names_four_copies_that_wait_on_a_link() -> None:
    """Of seven: six experts are asked for at once, then another."""
    asked = [Fetch(0, range(4), "gpu0"), Fetch(1, [1, 2, 3], "gpu0")]
    script = Script({("Routed", 0, 0, 0): asked}, copies=[Copy(1, [0], "gpu0")], slots=1)
    with pytest.raises(DeadlockError) as error:
        play(script, ONE)
    message = str(error.value)
    assert message.count(" waits for memory in pool 'cache'") == 4
    assert all(f"Fetch(L0/E{expert}, gpu0, urgency=0) waits" in message for expert in range(4))


def test_rule_10_a_deadlock_names_eight_experts_that_nobody_serves() -> None:
    """Of ten, whose rows it counts."""
    rows = workload([[[[2 * row + 1, 2 * row]] * 2] for row in reversed(range(5))], n_experts=16)
    with pytest.raises(DeadlockError) as error:
        play(Script(hear=["Routed"]), rows, model=tiny_model(n_experts=16))
    assert "layer 0 has 10 unserved slots of experts [0, 1, 2, 3, 4, 5, 6, 7]: no Run or Skip names them" in str(error.value)


def test_rule_10_a_deadlock_names_a_copy_that_waits_for_memory_on_its_way() -> None:
    """On gpu1 there is room for one copy in transit, which waits for a place on gpu0."""
    devices = {"gpu0": gpu(), "gpu1": gpu(memory=1300), "cpu0": cpu()}
    toy = machine(devices, {n: link() for n in ("cpu0->gpu1", "gpu1->cpu0", "gpu1->gpu0", "gpu0->gpu1")})
    with pytest.raises(DeadlockError) as error:
        play(Script({("Routed", 0, 0, 0): on_demand}, copies=[Copy(1, [0], "gpu0")], slots=1), ONE, toy)
    assert "; ".join(
        [
            "Fetch(L0/E1, gpu0, urgency=0) waits for memory on gpu1 on its way (300 B claimed by nobody)",
            "Fetch(L0/E0, gpu0, urgency=0) waits for memory in pool 'cache' (1 kB of 1 kB used, evict returned None)",
            "Run(L0/E0, gpu0) waits for its fetch",
        ]
    ) in str(error.value)


def test_rule_10_a_deadlock_says_how_full_the_layer_of_a_pool_is() -> None:
    copies, pools = [Copy(0, [0, 1], "gpu0"), Copy(1, [0], "gpu0")], [Pool("gpu0", "cache", [2000, 1000], per_layer=True)]
    script = Script({("Routed", 0, 0, 0): on_gpu, ("Routed", 0, 1, 0): on_demand}, copies=copies, pools=pools)
    with pytest.raises(DeadlockError, match=r"Fetch\(L1/E2, .* in pool 'cache' \(1 kB of 1 kB used, evict returned None\)"):
        play(script, ONE)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(hear=["Routed"]), ["layer 0 has 2 unserved slots of experts [0, 1]: no Run or Skip names them"]),
        (
            Script({("Routed", 0, 0, 0): on_demand}, copies=[Copy(1, [0], "gpu0")], slots=1),
            [
                "Fetch(L0/E0, gpu0, urgency=0) waits for memory in pool 'cache' (1 kB of 1 kB used, evict returned None)",
                "Fetch(L0/E1, gpu0, urgency=0) waits for memory in pool 'cache' (1 kB of 1 kB used, "
                "evict is asked for those before it first)",
                "Run(L0/E0, gpu0) waits for its fetch",
            ],
        ),
        (
            Script({("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Run(1, [3], "cpu0", [0])], ("Routed", 0, 1, 0): []}, copies=ALL,
                   exact=False),
            ["layer 1 has 1 unserved slots of experts [2]"],
        ),
        (
            Script({("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(1, [3], "cpu0", [0])]}, copies=ALL),
            ["remains: 1 tasks on cpu0 wait for inputs; layer 0 has 1 unserved slots of experts [1]"],
        ),
    ],
)  # fmt: skip
def test_rule_10_a_deadlock_says_who_waits_for_what(script: Script, says: list[str]) -> None:
    with pytest.raises(DeadlockError) as error:
        play(script, ONE, name="lazy")
    message = str(error.value)
    assert message.startswith("t=") and "nothing can happen and work remains" in message
    assert message.endswith("[policy=lazy]") and "\n" not in message
    for part in says:
        assert part in message
    if script.asked:  # "returned None" is said of those for which it was asked, and of no others
        assert {(layer, expert) for _, layer, expert, _ in script.asked} == {(0, 0)}
        assert message.count("evict returned None") == 1
