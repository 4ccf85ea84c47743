"""Pre-gated MoE on the toy machine, to the nanosecond: two buffers, and copies one layer ahead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems.pre_gated import Arena
from moesim.policy import StepBegin
from moesim.records import Records
from moesim.testing import FakeView
from tests.engine.engine_kit import Oracle, cpu, gpu, machine, play, tasks, transfers, workload

TOY = {"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()}
TOKEN = [[0, 2], [1, 0]]  # layer: experts


def run(requests: Any, predictor: Any = None, links: Any = None, **more: Any) -> Records:
    policy = make_policy({"name": "pre-gated", "source": "told"})
    predictors = {"told": predictor or Oracle()}
    return play(policy, workload(requests), machine(TOY, links), predictors=predictors, **more)


def test_the_next_layer_is_copied_while_this_one_computes() -> None:
    # gpu0       |DDDDD|P|            |00|22|DDDDD|           |00|11|
    # cpu0->gpu0 |     |0/0    |0/2   |1/0    |1/1           |
    #            0    100    1100   2100     3100          4100  4300
    records = run([[TOKEN]])
    down = [(100, "demand 0/0"), (1100, "demand 0/2"), (2100, "demand 1/0"), (3100, "demand 1/1")]
    assert transfers(records) == [(at, at + 1000, "cpu0->gpu0", what) for at, what in down]
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (100, 110, "gpu0", "predict"), (2100, 2200, "gpu0", "E0x1"), (2200, 2300, "gpu0", "E2x1"),
        (2300, 2400, "gpu0", "dense"), (4100, 4200, "gpu0", "E0x1"), (4200, 4300, "gpu0", "E1x1"),
    ]  # fmt: skip
    assert [t.submitted for t in records.transfers] == [100, 100, 110, 110]


class Wrong(Oracle):
    """Always says experts 2 and 3."""

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None]:
        return np.full_like(step.micro[mb].layers[layer].experts, 2) + np.arange(2), None


def test_wrong_guesses_are_copied_too_and_dropped() -> None:
    records = run([[TOKEN]], Wrong())
    assert {(t.layer, t.expert) for t in records.transfers} == {(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)} | {
        (t.layer, t.expert) for t in records.transfers if t.expert == 3
    }
    assert {(t.layer, t.expert) for t in records.tasks if t.kind == "expert"} == {(0, 0), (0, 2), (1, 0), (1, 1)}
    assert records.inexact == []


@pytest.mark.parametrize("method", ["prefetch-all", "on-demand"])
def test_the_methods_it_is_compared_with(method: str) -> None:
    # on demand    |DDDDD|0/0|0/2|00|22|DDDDD|1/0|1/1|00|11|
    # prefetch-all |DDDDD|0/0|0/2|00|22|DDDDD|
    #                            |1/0|1/1|1/2|1/3|00|11|
    policy = make_policy({"name": "pre-gated", "method": method})
    assert policy.needs == frozenset()
    records = play(policy, workload([[TOKEN]]), machine(TOY))
    down = [(100, "demand 0/0"), (1100, "demand 0/2")]
    whole = method == "prefetch-all"
    down += [(2100 + 1000 * e, f"demand 1/{e}") for e in range(4)] if whole else [(2400, "demand 1/0"), (3400, "demand 1/1")]
    assert transfers(records) == [(at, at + 1000, "cpu0->gpu0", what) for at, what in down]
    assert [t.submitted for t in records.transfers] == ([100] * 6 if whole else [100, 100, 2400, 2400])
    assert [t.start for t in records.tasks if t.kind == "expert"][2:] == ([6100, 6200] if whole else [4400, 4500])
    assert not any(t.kind == "predict" for t in records.tasks)


def test_prompts_may_copy_on_demand() -> None:
    request = [TOKEN, TOKEN]  # a token of a prompt, and a generated one
    policy = make_policy({"name": "pre-gated", "source": "told", "prompts_on_demand": True})
    records = play(policy, workload([request], prompt=1), machine(TOY), predictors={"told": Oracle()})
    assert [(t.step, t.layer) for t in records.tasks if t.kind == "predict"] == [(1, 1)]
    assert [t.submitted for t in records.transfers[:4]] == [100, 100, 2400, 2400]


def test_what_is_cached_is_not_copied_again() -> None:
    # 4 slots hold all. With 3, 1/1 takes the place of 0/0, which layer 0 still needs: it goes to the buffer. In the next token
    # each expert is asked for just after it has left.
    policy = make_policy({"name": "pre-gated", "source": "told", "cache": "lru"})
    records = play(policy, workload([[TOKEN, TOKEN]]), machine(TOY), predictors={"told": Oracle()}, slots={"gpu0": 4})
    assert [(t.layer, t.expert) for t in records.transfers] == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert records.pool_peak_bytes["gpu0", "cache"] == 4000 and records.pool_peak_bytes["gpu0", "even"] == 0
    policy = make_policy({"name": "pre-gated", "source": "told", "cache": "lru"})
    tight = play(policy, workload([[TOKEN, TOKEN]]), machine(TOY), predictors={"told": Oracle()}, slots={"gpu0": 3})
    assert [(t.layer, t.expert) for t in tight.transfers] == [(0, 0), (0, 2), (1, 0), (1, 1)] * 2
    assert tight.pool_peak_bytes["gpu0", "even"] > 0
    assert tight.inexact == []


@pytest.mark.parametrize("rule", ["lfu", "lru", "lifo"])
def test_the_cache_of_requests_restated(rule: Any) -> None:
    """Each key with its requests since it came in, and the times at which it came in and was changed last."""
    rng = random.Random(3)
    for capacity in (0, 1, 3, 5):
        arena, kept = Arena[int](capacity, rule), dict[int, list[int]]()
        for now in range(400):
            key = rng.randrange(8)
            leaves = None
            if rng.random() < 0.05:
                arena.reset()
                kept = {one: [1, came, changed] for one, (_, came, changed) in kept.items()}
            if rng.random() < 0.05:
                arena.discard(key)
                kept.pop(key, None)
                continue
            if key in kept:
                kept[key] = [kept[key][0] + 1, kept[key][1], now]
            elif not capacity:
                leaves = key
            else:
                if len(kept) == capacity:
                    worth = {one: {"lfu": (n, changed), "lru": (changed, 0), "lifo": (-came, 0)}[rule]
                             for one, (n, came, changed) in kept.items()}  # fmt: skip
                    leaves = min(worth, key=worth.__getitem__)
                    del kept[leaves]
                kept[key] = [1, now, now]
            assert arena.request(key) == leaves and all((one in arena) == (one in kept) for one in range(8))


def test_counts_begin_anew_after_a_prompt() -> None:
    policy: Any = make_policy({"name": "pre-gated", "cache": "lfu"})
    view = FakeView(slots=4)
    policy.place(view)

    def counts(phase: str) -> list[int]:
        policy.on_step_begin(StepBegin(0, phase, np.zeros(1, int), True), view)
        found = list(policy._arena._counts.values())
        for unit in ((0, 1), (0, 1), (2, 3)):
            policy._arena.request(unit)
        return found

    phases = ["prefill", "prefill", "decode", "decode", "prefill", "decode"]
    assert [counts(phase) for phase in phases] == [[], [2, 1], [1, 1], [3, 2], [5, 3], [1, 1]]
