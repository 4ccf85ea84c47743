"""EdgeMoE: what it preloads by statistics, and which layers' experts leave first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.trace import Trace
from moesim.trace.predictors import make_predictor
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import cpu, gpu, machine, play, tiny_model

PAIRS = np.zeros((3, 4, 4), np.float32)
PAIRS[0, 0, 3], PAIRS[0, 0, 1], PAIRS[0, 2, 1] = 6, 2, 9  # after 0 comes 3 or 1, after 2 comes 1
PAIRS[1, 1, 0], PAIRS[1, 3, 0] = 5, 5
FREQUENCY = np.array([[0.25] * 4, [0.1, 0.2, 0.3, 0.4], [0.25] * 4], np.float32)


def run(row: Any, slots: int = 12, dense_ns: int = 4940, second: Any = None, hardware: Any = None, **options: Any) -> Records:
    """One request of one or two rows on three layers."""
    experts = np.array([row] if second is None else [row, second], np.uint8)
    trace = Trace.build(
        experts=experts, weights=np.full(experts.shape, 0.5), n_prompt=[0], n_decode=[len(experts)], n_experts=4, model="tiny",
        label="synthetic", prompt_offset=1, tables={"coactivation": PAIRS, "activation_frequency": FREQUENCY},
    )  # fmt: skip
    work = compose(trace, WorkloadSpec(batch_size=1, requests="all"))
    source = options.get("prefetch_source", "coactivation")
    hardware = hardware or machine({"gpu0": gpu(dense_ns=dense_ns, predict={source: 10}), "cpu0": cpu()})
    predictors = {source: make_predictor(source, trace, work)}
    policy = make_policy({"name": "edgemoe", **options})
    return play(policy, work, hardware, model=tiny_model(n_layers=3), slots={"gpu0": slots}, predictors=predictors)


def copies(records: Records) -> list[str]:
    return [f"{t.cause} {t.layer}/{t.expert}" for t in records.transfers]


def test_what_followed_in_calibration_is_preloaded() -> None:
    # After 0 and 2: 1 has 2/8 + 9/9, 3 has 6/8. A row uses two experts, so both are preloaded.
    records = run([[0, 2], [1, 3], [0, 1]])
    assert copies(records) == [
        "demand 0/0", "demand 0/2", "prefetch 1/1", "prefetch 1/3", "prefetch 2/0", "prefetch 2/1",
    ]  # fmt: skip
    assert [v.hits for v in records.lookups] == [(0, 0), (1, 1), (1, 1)]
    assert copies(run([[0, 2], [1, 3], [0, 1]], prefetch_size=1))[2:] == [
        "prefetch 1/1",
        "demand 1/3",
        "prefetch 2/0",
        "demand 2/1",
    ]


def test_frequency_predicts_the_same_for_every_token() -> None:
    assert copies(run([[0, 2], [1, 3], [0, 1]], prefetch_source="frequency"))[2:4] == ["prefetch 1/2", "prefetch 1/3"]


@pytest.mark.parametrize(("distance", "gone"), [("next-pass", [(0, 0), (0, 2)]), ("absolute", [(0, 0), (0, 2)])])
def test_the_layer_just_passed_goes_first(distance: str, gone: list[tuple[int, int]]) -> None:
    records = run([[0, 2], [1, 3], [0, 1]], slots=4, distance=distance)
    assert [(e.layer, e.expert) for e in records.evictions] == gone


@pytest.mark.parametrize(("distance", "gone"), [("next-pass", [(0, 0), (0, 2)]), ("absolute", [(2, 0), (2, 1)])])
def test_at_the_first_layer_the_distances_differ(distance: str, gone: list[tuple[int, int]]) -> None:
    """In the second pass layer 0 needs room. Its old experts are a whole pass away; the last layer is farthest in the stack."""
    row = [[0, 2], [1, 3], [0, 1]]
    records = run(row, 6, second=[[1, 3], *row[1:]], distance=distance)
    assert [(e.layer, e.expert) for e in records.evictions][:2] == gone
