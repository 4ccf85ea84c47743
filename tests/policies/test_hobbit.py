"""HOBBIT: precision by gate weight, prefetch for the first layer with a miss, and the victim with the lowest score.

Experts of 16 bits have 1000 bytes and take 100 ns on the GPU, those of 4 bits 250 bytes and 60 ns. A link moves a byte a ns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.metrics import fidelity
from moesim.policies.registry import make_policy
from moesim.records import Records
from tests.engine.engine_kit import Oracle, cpu, flat, gpu, machine, play, tasks, tiny_model, workload

HEAVY, LIGHT, SLIGHT = (0.5, 0.5), (0.75, 0.25), (0.9375, 0.0625)  # both high; high and low; high and skipped


def two_widths(dense_ns: int = 40, **more: Any) -> Any:
    fast = gpu(predict={"told": 10}, dense_ns=dense_ns)
    fast["experts"].append(flat(60, shape={"hidden": 5, "intermediate": 50, "bits": 4.0}))
    return machine({"gpu0": fast, "cpu0": cpu()}, **more)


def run(rows: Any, weights: Any, *, slots: int = 8, bits: Any = (16, 4), says: Any = None, hardware: Any = None,
        **options: Any) -> Records:  # fmt: skip
    """One request of one row a step; without a predictor nothing is prefetched, with one dense parts take 5000 ns."""
    policy = make_policy({"name": "hobbit", **({"source": "told"} if says else {"depth": 0}), **options})
    table = np.array(weights, np.float64)
    table = table[:, None, :] if table.ndim == 2 else table  # of each row the same in all layers
    work = workload([rows], weights=table)
    model = tiny_model(n_layers=len(rows[0]), expert_bits=list(bits))
    hardware = hardware or two_widths(4940 if says else 40)
    return play(policy, work, hardware, model=model, slots={"gpu0": slots}, predictors={"told": says} if says else None)


def copies(records: Records) -> list[str]:
    return [f"{t.cause} {t.layer}/{t.expert}" + (f" at {t.bits:g}" if t.bits else "") for t in records.transfers]


def ran(records: Records) -> list[tuple[int, int, float | None]]:
    return [(t.step, t.expert, t.bits) for t in records.tasks if t.kind == "expert"]


# ---------------------------------------------------------------------------------------------------------- a miss, a hit
def test_a_miss_is_copied_at_the_precision_of_its_gate_weight() -> None:
    # gpu0       |DDDDD|         |00|  |2|
    # cpu0->gpu0       |0: 1000  |2: 250|
    #            0    100       1100  1350
    records = run([[[0, 2]]], LIGHT)
    assert [(t.start, t.end, t.expert, t.n_bytes, t.bits) for t in records.transfers] == [
        (100, 1100, 0, 1000, None), (1100, 1350, 2, 250, 4),
    ]  # fmt: skip
    assert tasks(records) == [(0, 100, "gpu0", "dense"), (1100, 1200, "gpu0", "E0x1"), (1350, 1410, "gpu0", "E2x1")]


def test_fidelity_shows_what_is_reduced_and_what_is_skipped() -> None:
    shown = fidelity(run([[[0, 2]], [[1, 3]]], [LIGHT, SLIGHT]))
    assert shown["fidelity_reduced"] == 0.25 / 2
    assert shown["fidelity_skipped"] == 0.0625 / 2
    assert shown["fidelity_fresh"] == 1 - 0.3125 / 2
    assert shown["n_inexact_slots"] == 2
    whole = fidelity(run([[[0, 2]], [[1, 3]]], [LIGHT, SLIGHT], low_precision=False, low_weight=0))
    assert (whole["fidelity_fresh"], whole["n_inexact_slots"]) == (1, 0)


def test_a_hit_runs_at_the_width_that_is_there() -> None:
    high_first = run([[[0, 2]], [[0, 2]], [[0, 2]]], [HEAVY, LIGHT, SLIGHT])
    assert ran(high_first) == [(step, expert, None) for step in range(3) for expert in (0, 2)]
    low_first = run([[[0, 2]], [[0, 2]]], [LIGHT, SLIGHT])
    assert ran(low_first) == [(0, 0, None), (0, 2, 4), (1, 0, None), (1, 2, 4)]
    assert len(low_first.transfers) == 2


def test_the_heaviest_row_of_a_step_decides() -> None:
    rows = [[[[0, 2]]], [[[2, 1]]]]  # two requests: 2 is light in the first, heavy in the second
    model, policy = tiny_model(n_layers=1, expert_bits=[16, 4]), make_policy({"name": "hobbit", "depth": 0})
    records = play(policy, workload(rows, weights=LIGHT), two_widths(), model=model, slots={"gpu0": 8})
    assert copies(records) == ["demand 0/0", "demand 0/2", "demand 0/1 at 4"]


# -------------------------------------------------------------------------------------------------------------- prefetch
class Weighed(Oracle):
    """The true routing with its weights, next to the ids or for all experts."""

    def __init__(self, dense: bool) -> None:
        super().__init__(None)
        self.dense = dense

    def predict(self, step: Any, mb: int, layer: int) -> Any:
        routed = step.micro[mb].layers[layer]
        ids, weights = np.asarray(routed.experts, np.int64), np.asarray(routed.weights)
        if self.dense:
            weights, beside = np.zeros((len(ids), 4)), weights
            np.put_along_axis(weights, ids, beside, axis=1)
        return ids, weights


@pytest.mark.parametrize(("says", "second"), [(Weighed(False), " at 4"), (Weighed(True), " at 4"), (Oracle(None), "")])
def test_a_layer_is_prefetched_at_the_precision_that_its_predicted_weights_choose(says: Any, second: str) -> None:
    records = run([[[0, 2], [1, 3]]], LIGHT, says=says, depth=1)
    assert copies(records)[2:] == ["prefetch 1/1", f"prefetch 1/3{second}"]


@pytest.mark.parametrize(("depth", "begins"), [(1, [10_220, 15_430]), (2, [5020, 10_240]), (4, [5020, 10_250])])
def test_the_first_following_layer_with_a_miss_is_prefetched(depth: int, begins: list[int]) -> None:
    """In the second step layers 2 and 3 lack expert 3.

    Two layers ahead, layer 0 finds that layer 1 lacks nothing and fetches for layer 2, not for 3; layer 1 then fetches for 3. A
    layer takes 5000 ns, 200 for its experts, and 10 for each prediction; a fetch begins when the predictions up to it are in.
    """
    first = [[0, 1], [0, 1], [0, 1], [0, 1]]
    second = [[0, 1], [0, 1], [0, 3], [0, 3]]
    records = run([first, second], [HEAVY, HEAVY], says=Oracle(None), slots=16, depth=depth)
    begin = records.steps[1].begin
    prefetched = [t for t in records.transfers if t.start >= begin and t.cause == "prefetch"]
    assert [(t.layer, t.expert) for t in prefetched] == [(2, 3), (3, 3)]
    assert [t.start - begin for t in prefetched] == begins


def test_each_layer_ahead_has_a_recorded_signal_of_its_own() -> None:
    assert make_policy({"name": "hobbit", "depth": 4}).needs == {
        "scores-or-weights", "signal:gate_next1", "signal:gate_next2", "signal:gate_next3", "signal:gate_next4",
    }  # fmt: skip
    assert make_policy({"name": "hobbit", "depth": 0}).needs == {"scores-or-weights"}


# --------------------------------------------------------------------------------------------------------------- victims
def gone(records: Records) -> list[tuple[int, int, float | None]]:
    return [(e.layer, e.expert, e.bits) for e in records.evictions]


def only(name: str) -> dict[str, float]:
    return {f"{one}_weight": float(one == name) for one in ("lru", "lfu", "lhu", "fld")}


@pytest.mark.parametrize(("score", "victim"), [("lru", (0, 0, None)), ("lfu", (0, 2, None))])
def test_recency_and_frequency(score: str, victim: Any) -> None:
    """Before the last step expert 0 was used in steps 1 to 3, expert 2 in steps 3 and 4."""
    rows = [[[0, 1]], [[0, 1]], [[0, 2]], [[1, 2]], [[1, 3]]]
    assert gone(run(rows, [HEAVY] * 5, slots=3, **only(score))) == [victim]


@pytest.mark.parametrize(("score", "victim"), [("lfu", (0, 0, None)), ("lhu", (0, 1, 4))])
def test_use_at_high_precision(score: str, victim: Any) -> None:
    """Expert 0 was used once, at high precision; expert 1 four times, at low precision."""
    rows = [[[0, 1]], [[2, 1]], [[2, 1]], [[2, 1]], [[2, 3]]]
    assert gone(run(rows, [*[LIGHT] * 4, HEAVY], slots=3, **only(score))) == [victim]


@pytest.mark.parametrize(("score", "victim"), [("lru", (1, 1, None)), ("lfu", (1, 1, None)), ("fld", (0, 0, None))])
def test_layer_distance(score: str, victim: Any) -> None:
    """Layer 0 needs room. Its own experts, 0 in use and 1 just used, wait for a whole pass; layer 1 comes next."""
    rows = [[[0, 1], [0, 1]], [[0, 1], [0, 2]], [[0, 3], [0, 2]]]
    assert gone(run(rows, [HEAVY] * 3, slots=5, **only(score))) == [victim]


def test_a_low_copy_beside_a_high_one_goes_first() -> None:
    rows = [[[0, 2]], [[2, 1]], [[2, 3]]]
    assert gone(run(rows, [LIGHT, HEAVY, HEAVY], slots=4)) == [(0, 2, 4)]


def test_what_is_prefetched_stays_until_its_layer_is_routed() -> None:
    records = run([[[0, 2], [1, 3]]], HEAVY, says=Oracle(None), slots=3)
    assert gone(records) == [(0, 0, None)]
    assert [v.hits for v in records.lookups][1] == (1, 1)


# --------------------------------------------------------------------------------------------------------------- refusals
def test_a_model_of_one_width_is_refused_unless_low_precision_is_off() -> None:
    with pytest.raises(ConfigError) as error:
        run([[[0, 2]]], LIGHT, bits=[16])
    assert str(error.value) == (
        "policy hobbit: expected a model with experts at two widths, got one of 16 bits; "
        "set model.expert_bits to two, such as [[16, 8]], or low_precision: false"
    )
    assert copies(run([[[0, 2]]], LIGHT, bits=[16], low_precision=False)) == ["demand 0/0", "demand 0/2"]


def test_thresholds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected low_weight below high_weight, got 0.5 and 0.5; change one, or set"):
        run([[[0, 2]]], LIGHT, high_weight=0.5, low_weight=0.5)


# ---------------------------------------------------------------------------------------------------------- the functions
