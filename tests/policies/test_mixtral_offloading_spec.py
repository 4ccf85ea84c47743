"""Speculative loading of Mixtral-Offloading on the toy machine, to the nanosecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.policies.registry import make_policy
from moesim.records import Records
from tests.engine.engine_kit import Oracle, cpu, flat, gpu, link, machine, play, tasks, tiny_model, transfers, workload

TOY = {"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()}
TOKEN = [[0, 2], [1, 0]]  # layer: experts; residents are 2 and 3 of each layer


def run(requests: Any = ((TOKEN,),), predictor: Any = None, options: Any = None, hardware: Any = None, **more: Any) -> Records:
    policy = make_policy({"name": "mixtral-offloading-spec", "source": "told", **(options or {})})
    predictors = {"told": predictor or Oracle()}
    return play(policy, workload(list(requests)), hardware or machine(TOY), predictors=predictors, slots={"gpu0": 4}, **more)


def test_right_guesses_are_copied_behind_demand_loads_and_enter_the_cache_when_used() -> None:
    # gpu0       |DDDDD|P|22|        |00|DDDDD|                  |0|1|
    # cpu0->gpu0 |     |0/0         |1/0      |1/1               |
    #            0    100 110      1100      2100               3100      1/0 is there before layer 1 is routed at 1300
    records = run()
    down = [t for t in transfers(records) if t[2] == "cpu0->gpu0"]
    assert down == [
        (100, 1100, "cpu0->gpu0", "demand 0/0"),
        (1100, 2100, "cpu0->gpu0", "demand 1/0"),
        (2100, 3100, "cpu0->gpu0", "demand 1/1"),
    ]
    assert [t.submitted for t in records.transfers if t.link == "cpu0->gpu0"] == [100, 110, 110]
    back = [t for t in transfers(records) if t[2] == "gpu0->cpu0"]
    assert back == [
        (100, 1100, "gpu0->cpu0", "write-back 0/3"), (1300, 2300, "gpu0->cpu0", "write-back 1/2"),
        (2300, 3200, "gpu0->cpu0", "write-back 1/3"),
    ]  # fmt: skip
    assert [t.left for t in records.transfers if t.left] == [100], "that of 1/3 is under way at the end"
    assert records.pool_peak_bytes["gpu0", "ahead"] == 1000, "1/0 is in the cache as 1/1 begins"
    assert [(t[0], t[3]) for t in tasks(records) if t[3] in ("E0x1", "E1x1")] == [(1100, "E0x1"), (2100, "E0x1"), (3100, "E1x1")]


def test_a_guess_that_is_there_is_moved_not_copied() -> None:
    fast = machine(TOY, {"cpu0->gpu0": link(100), "gpu0->cpu0": link(100)})
    records = run(hardware=fast)
    assert [(t.layer, t.expert, t.cause) for t in records.transfers if t.link == "cpu0->gpu0"] == [
        (0, 0, "demand"), (1, 0, "prefetch"), (1, 1, "prefetch")
    ]  # fmt: skip
    assert [(v.layer, v.hits) for v in records.lookups] == [(0, (0, 1)), (1, (1, 1))]
    again = run([[TOKEN, TOKEN]], hardware=fast)
    assert sum(t.link == "cpu0->gpu0" for t in again.transfers) == 3, "they are cached now"


class Wrong(Oracle):
    """Always says expert 0, and then 1."""

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None]:
        return np.zeros_like(step.micro[mb].layers[layer].experts) + np.arange(2), None


def test_wrong_guesses_are_dropped_and_leave_the_cache_as_it_is() -> None:
    token = [[2, 3], [2, 3]]  # all cached
    records = run([[token, token]], Wrong())
    assert {(t.layer, t.expert) for t in records.transfers} == {(1, 0)}, "0 is dropped while it is copied, 1 before"
    assert [(e.layer, e.expert, e.pool, e.reason, e.used) for e in records.evictions] == [(1, 0, "ahead", "drop", False)]


def test_all_experts_at_a_low_width() -> None:
    narrow = {"hidden": 5, "intermediate": 50, "bits": 4.0}
    fast, slow = gpu(predict={"told": 10}), cpu()
    fast["experts"].append(flat(60, shape=narrow))
    slow["experts"].append(flat(150, shape=narrow))
    more: dict[str, Any] = {"hardware": machine({"gpu0": fast, "cpu0": slow}), "model": tiny_model(expert_bits=[16, 4])}
    records = run(options={"bits": 4}, **more)
    assert {t.n_bytes + t.left for t in records.transfers} == {250} and {t.bits for t in records.transfers} == {4}
    assert {(r.kind, r.slots) for r in records.inexact} == {("reduced", 2)}
    assert records.pool_peak_bytes["gpu0", "cache"] == 4 * 250
    assert run(**more).inexact == []
    message = "policy mixtral-offloading-spec: bits: expected a width of the model, 16 or 4, got 8; "
    with pytest.raises(ConfigError, match=message + "choose one of these, or set model.expert_bits to a list with 8"):
        run(options={"bits": 8}, **more)
