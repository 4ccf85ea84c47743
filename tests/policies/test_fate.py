"""Fate: cache by ARC, prefetch by the next layer's gate, and what is copied at which width.

Experts of 16 bits have 1000 bytes and take 100 ns on the GPU, those of 4 bits 250 bytes and 60 ns. A link moves a byte a ns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.metrics import fidelity
from moesim.policies.registry import make_policy, policy_info
from moesim.policies.systems.fate import shallow_favoring
from moesim.records import Records
from moesim.testing import run_tiny, tiny_workload
from moesim.trace.predictors import PredictorSet, make_predictor
from tests.engine.engine_kit import Oracle, cpu, flat, gpu, link, machine, pair, play, tasks, tiny_model, transfers, workload


def two_widths(links: Any = None, **more: Any) -> Any:
    fast = gpu(predict={"told": 10})
    fast["experts"].append(flat(60, shape={"hidden": 5, "intermediate": 50, "bits": 4.0}))
    return machine({"gpu0": fast, "cpu0": cpu()}, links, **more)


class Silent(Oracle):
    """Predicts nothing."""

    def predict(self, step: Any, mb: int, layer: int) -> Any:
        return None


class Says(Oracle):
    """Always says the same ids for the rows."""

    def __init__(self, *rows: list[int]) -> None:
        super().__init__()
        self.rows = rows

    def predict(self, step: Any, mb: int, layer: int) -> Any:
        return np.array(self.rows), None


def run(requests: Any, says: Any = None, *, slots: int = 0, bits: Any = (16, 4), hardware: Any = None, **options: Any) -> Records:
    micro_batches = options.pop("micro_batches", 1)
    policy = make_policy({"name": "fate", "source": "told", "shallow_layers": 0, **options})
    work = workload(requests, micro_batches=micro_batches)
    model = tiny_model(n_layers=len(requests[0][0]), expert_bits=list(bits))
    return play(policy, work, hardware or two_widths(), model=model, slots={"gpu0": slots}, predictors={"told": says or Silent()})


def copies(records: Records) -> list[str]:
    return [f"{t.cause} {t.layer}/{t.expert}" + (f" at {t.bits:g}" if t.bits else "") for t in records.transfers]


def ran(records: Records) -> list[tuple[int, int, int, float | None]]:
    return sorted((t.step, t.layer, t.expert, t.bits) for t in records.tasks if t.kind == "expert")


# ------------------------------------------------------------------------------------------------------------- in a run
def test_a_miss_is_copied_at_the_low_width_and_a_prefetch_at_the_full_one() -> None:
    # gpu0       |DDDDD|P|   |0 |      |2 |DDDDD|              |1 3|
    # cpu0->gpu0 |     |0/0  |0/2  |1/1: 1000   |1/3: 1000     |
    #            0    100   350   600          1600          2600
    records = run([[[[0, 2], [1, 3]]]], Oracle(), low_share=0.0)
    assert transfers(records) == [
        (100, 350, "cpu0->gpu0", "demand 0/0"), (350, 600, "cpu0->gpu0", "demand 0/2"),
        (600, 1600, "cpu0->gpu0", "demand 1/1"), (1600, 2600, "cpu0->gpu0", "demand 1/3"),
    ]  # fmt: skip
    assert [t.bits for t in records.transfers] == [4, 4, None, None]
    assert [t.submitted for t in records.transfers] == [100, 100, 110, 110]
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (100, 110, "gpu0", "predict"), (350, 410, "gpu0", "E0x1"), (600, 660, "gpu0", "E2x1"),
        (660, 760, "gpu0", "dense"), (1600, 1700, "gpu0", "E1x1"), (2600, 2700, "gpu0", "E3x1"),
    ]  # fmt: skip
    shown = fidelity(records)
    assert (shown["fidelity_reduced"], shown["fidelity_fresh"]) == (0.5, 0.5)


def test_without_compression_all_is_exact() -> None:
    work = [[[[0, 2], [1, 3]]]]
    for bits in ((16, 4), (16,)):
        records = run(work, Oracle(), compression=False, bits=bits)
        assert {(t.n_bytes, t.bits) for t in records.transfers} == {(1000, None)}
        assert records.inexact == []
    assert [make_policy({"name": "fate", "compression": one}).exact for one in (True, False)] == [False, True]
    assert [one.exact for one in policy_info(["fate", "fate-in-prescope"])] == [False, True]


def test_the_least_frequent_predicted_ones_have_the_low_width() -> None:
    """Two rows: of layer 1, expert 1 is predicted twice, 0 and 3 once; 0.3 of 4 is 1.2, one of them."""
    requests = [[[[0, 1], [1, 3]]], [[[0, 1], [0, 1]]]]
    fast = two_widths({"cpu0->gpu0": link(100), "gpu0->cpu0": link()})
    records = run(requests, Oracle(), hardware=fast)
    assert copies(records) == ["demand 0/0 at 4", "demand 0/1 at 4", "prefetch 1/1", "prefetch 1/0", "prefetch 1/3 at 4"]
    assert ran(records)[2:] == [(0, 1, 0, None), (0, 1, 1, None), (0, 1, 3, 4)]
    assert copies(run(requests, Oracle(), hardware=fast, low_share=1.0))[2:] == [f"prefetch 1/{e} at 4" for e in (1, 0, 3)]


def test_one_more_expert_than_the_model_uses_is_prefetched() -> None:
    fast = two_widths({"cpu0->gpu0": link(100), "gpu0->cpu0": link()})
    records = run([[[[0, 2], [1, 3]]]], Says([3, 1, 2, 0]), hardware=fast, low_share=0.0)
    assert copies(records)[2:] == ["prefetch 1/1", "prefetch 1/2", "prefetch 1/3"]
    assert [(e.layer, e.expert) for e in records.evictions if e.layer == 1] == [(1, 1), (1, 2), (1, 3)]


def test_wrong_prefetches_are_dropped_as_their_layer_ends() -> None:
    token = [[0, 1], [0, 1], [0, 1]]
    records = run([[token]], Says([2, 3, 0]), low_share=0.0)
    ahead = [c for c in copies(records) if "prefetch" in c]
    assert ahead == ["prefetch 1/2", "prefetch 2/2"], "1/3 still waits as layer 1 ends"
    assert records.transfers[-1].left, "2/2 is under way as the run ends"
    assert {(e.layer, e.expert) for e in records.evictions} >= {(1, 2)}
    assert {expert for _, _, expert, _ in ran(records)} == {0, 1}


def test_a_recorded_signal_is_asked_for_one_id_more() -> None:
    trace, work = tiny_workload(make_policy("fate"))
    step = work.steps[-1]
    usual, more = (make_predictor(f"signal:gate_next1{top}", trace, work) for top in ("", ":top3"))
    two, three = (one.predict(step, 0, 1) for one in (usual, more))
    assert two is not None
    assert three is not None
    assert (two[0].shape, three[0].shape) == ((1, 2), (1, 3))
    assert (three[0][:, :2] == two[0]).all()
    records = run_tiny(make_policy({"name": "fate", "low_share": 0.0}), (trace, work), 0)
    layers = [t for t in records.transfers if t.layer == 1 and t.bits is None and t.submitted >= records.steps[-1].begin]
    assert {t.expert for t in layers} == set(three[0].ravel().tolist())


# ---------------------------------------------------------------------------------------------------------------- cache


# --------------------------------------------------------------------------------------------------------------- the rest
def test_predictions_may_be_computed_beside_the_experts() -> None:
    beside = two_widths(contention=[pair("gpu0.side", "gpu0.experts", 1, 1)])
    assert (100, 110, "gpu0*", "predict") in tasks(run([[[[0, 2], [1, 3]]]], Oracle(), hardware=beside, lane="side"))


def test_a_model_of_one_width_is_refused_with_compression() -> None:
    with pytest.raises(ConfigError) as error:
        run([[[[0, 2]]]], bits=[16])
    assert str(error.value) == (
        "policy fate: expected a model with experts at two widths, got one of 16 bits; "
        "set model.expert_bits to two, such as [[16, 8]], or compression: false"
    )


# ---------------------------------------------------------------------------------------------------------- the functions


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (0, [0] * 6), (5, [5, 0, 0, 0, 0, 0]), (31, [8, 8, 8, 7, 0, 0]), (32, [8, 8, 8, 8, 0, 0]), (37, [8, 8, 8, 8, 3, 2]),
        (48, [8] * 6), (60, [8] * 6),
    ],
)  # fmt: skip
def test_shallow_layers_come_first(slots: int, expected: list[int]) -> None:
    assert shallow_favoring(slots, 6, 8) == expected
    assert shallow_favoring(slots, 2, 8) == [min(8, slots), max(0, min(8, slots - 8))]


def test_another_source_may_stand_in_for_the_signal_however_many_ids_are_asked_for() -> None:
    trace, work = tiny_workload(make_policy("fate"))
    step = work.steps[-1]
    for other in ("oracle", "synthetic:0.5"):
        found = PredictorSet(trace, work, {"gate_next1": other}, 0)["signal:gate_next1:top3"].predict(step, 0, 1)
        expected = make_predictor(other, trace, work).predict(step, 0, 1)
        assert found is not None
        assert expected is not None
        assert (found[0] == expected[0]).all()
    with pytest.raises(KeyError):
        PredictorSet(trace, work, {}, 0)["signal:gate_next9:top3"]
