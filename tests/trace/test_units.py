"""Gate, up and down as units of their own: traces, models, and caches that hold part of an expert."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.cli.main import main
from moesim.engine import simulate
from moesim.errors import ModelError, TraceError
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.operations import operations
from moesim.hardware.costs.provenance import NO_CURVE
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.trace import Trace, find_trace
from moesim.trace.derived import split_experts
from moesim.trace.parts import Signal
from moesim.trace.workload import WorkloadSpec, compose

BASE = {"base": "mixtral-8x7b", "expert_bits": 4}
SMALL = BASE | {"n_layers": 1, "top_k": 1}


def _trace(experts: list[int]) -> Trace:
    ids = np.array(experts, np.uint8).reshape(-1, 1, 1)
    return Trace.build(experts=ids, n_prompt=[0], n_decode=[len(ids)], n_experts=8, model="mixtral-8x7b", label="synthetic")


def _run(trace: Trace, model: dict[str, Any], slots: int, policy: dict[str, Any]) -> Records:
    spec, hardware = load_model(model), replace(load_hardware("rtx3090-epyc7532"), contention=())
    return simulate(
        model=spec, costs=CostModel(spec, hardware), workload=compose(trace, WorkloadSpec()), policy=make_policy(policy),
        cache_slots={"gpu0": slots},
    )  # fmt: skip


def test_a_model_counts_units():
    whole, split = load_model(BASE), load_model(BASE | {"units_per_expert": 3})
    assert (split.n_experts, split.top_k) == (24, 6)
    assert 3 * split.expert_bytes() == whole.expert_bytes()
    for figure in ("experts_bytes_total", "dense_params", "attention_bytes", "total_params", "active_params"):
        assert getattr(split, figure) == getattr(whole, figure)
    assert "units_per_expert=3" in split.labels and "units_per_expert" not in whole.figures()
    assert load_model(BASE | {"units_per_expert": 3, "top_k": 1}).top_k == 3  # what is written counts experts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"units_per_expert": 2}, "expected 1 .* or 3"),
        ({"units_per_expert": 0}, "positive integer"),
        ({"units_per_expert": True}, "positive integer"),
        ({"units_per_expert": 3, "expert_bias": True}, "same size, got 3 with expert_bias"),
        ({"units_per_expert": 3, "expert_bits": 4, "n_experts": 9, "top_k": 10}, "top_k"),
    ],
)
def test_units_that_cannot_be(change: dict[str, Any], says: str):
    with pytest.raises(ModelError, match=says):
        load_model({"base": "mixtral-8x7b"} | change)


def test_costs_are_of_one_matrix():
    hardware = load_hardware("rtx3090-epyc7532")
    whole, split = (CostModel(load_model(m), hardware) for m in (BASE, BASE | {"units_per_expert": 3}))
    assert split.dense_ns("gpu0", 4) == whole.dense_ns("gpu0", 4)  # the router is the same
    assert split.expert_ns("gpu0", 1) < whole.expert_ns("gpu0", 1)
    assert any(note.startswith(f"{NO_CURVE}single matrices of 4096x14336") for note in split.notes())
    fused, apart = (operations("llama.cpp", "gpu", load_model(m)) for m in (BASE, BASE | {"units_per_expert": 3}))
    assert apart["experts"] == fused["experts"] + 3  # up quantises and multiplies, and the activation is a kernel
    assert {k: v for k, v in apart.items() if k != "experts"} == {k: v for k, v in fused.items() if k != "experts"}


def test_a_trace_is_split():
    rng = np.random.default_rng(0)
    scores = rng.random((4, 2, 4)).astype(np.float16)
    experts = np.array([[[2, 0], [1, 3]]] * 4, np.uint8)
    dense = Signal("dense", np.arange(4, dtype=np.int32), scores)
    listed = Signal("listed", np.arange(4, dtype=np.int32), scores[..., :2], experts)
    tables = {
        "activation_frequency": np.full((2, 4), 0.25, np.float32), "coactivation": rng.random((2, 4, 4)).astype(np.float32),
        "residual": rng.random((2, 8)).astype(np.float16),
    }  # fmt: skip
    trace = Trace.build(
        experts=experts, weights=np.full((4, 2, 2), 0.5), n_prompt=[1, 1], n_decode=[1, 1], n_experts=4, model="tiny",
        label="measured", scores=scores, signals={"dense": dense, "listed": listed}, tables=tables,
    )  # fmt: skip
    made = split_experts(trace, 3, "t")
    assert made.experts[0, 0].tolist() == [6, 7, 8, 0, 1, 2]
    assert (made.n_experts, made.top_k, made.label) == (12, 6, "measured")
    assert made.weights is not None and made.scores is not None
    assert np.allclose(made.weights.sum(2), 1, atol=1e-3) and np.allclose(made.scores.sum(2), scores.sum(2), atol=1e-2)
    assert (made.signals["dense"].scores == np.repeat(scores, 3, axis=2)).all()
    ids = made.signals["listed"].ids
    assert ids is not None and ids[0, 1].tolist() == [3, 4, 5, 9, 10, 11]
    assert np.allclose(made.tables["activation_frequency"].sum(1), 1)
    assert (made.tables["coactivation"][:, 3:6, 9:] == tables["coactivation"][:, 1, 3][:, None, None]).all()
    assert (made.tables["residual"] == tables["residual"]).all()
    assert "3 units per expert" in made.remarks
    with pytest.raises(TraceError, match="split"):
        split_experts(made, 3, "t")


def _hits(records: Records) -> list[tuple[int, ...]]:
    return [lookup.hits for lookup in records.lookups]


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_whole_experts_are_a_special_case(slots: int):
    rng = np.random.default_rng(slots)
    trace = _trace(rng.integers(0, 8, 200).tolist())
    whole = _hits(_run(trace, SMALL, slots, {"name": "lru"}))
    split = _hits(_run(split_experts(trace, 3, "t"), SMALL | {"units_per_expert": 3}, 3 * slots, {"name": "lru"}))
    assert split == [hits * 3 for hits in whole]


def test_a_cache_holds_part_of_an_expert():
    """Four slots. Experts 0, 1, 0: of 0, which starts whole next to a third of 1, what was used longest ago makes room for 1."""
    trace = split_experts(_trace([0, 1, 0]), 3, "t")
    model = SMALL | {"units_per_expert": 3}
    assert _hits(_run(trace, model, 4, {"name": "lru"})) == [(1, 1, 1), (1, 0, 0), (0, 0, 1)]
    whole = _hits(_run(_trace([0, 1, 0]), SMALL, 4 // 3, {"name": "lru"}))
    assert whole == [(1,), (0,), (0,)]


def test_matrices_are_admitted_one_by_one():
    """At most two uploads a layer, each after a second miss, into a pool of all layers."""
    policy = {"name": "background-cache", "scope": "global", "admission": "demand", "inserts": 2, "cached_rows": 1}
    trace = split_experts(_trace([7] * 6), 3, "t")
    hits = _hits(_run(trace, SMALL | {"units_per_expert": 3}, 6, policy))
    assert [sum(one) for one in hits] != [3 * (one[0]) for one in hits]  # an expert is there in part
    assert hits[0] == (0, 0, 0) and hits[-1] == (1, 1, 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "split.safetensors"
    assert main(["trace", "split", "mini-mixtral", "--out", str(out)]) == 0
    made, source = Trace.read(out), Trace.read(find_trace("mini-mixtral"))
    assert (made.experts == split_experts(source, 3, "t").experts).all()
    capsys.readouterr()
    for arguments in (["mini-mixtral", "--out", str(out)], [str(out), "--out", str(tmp_path / "again.safetensors")]):
        assert main(["trace", "split", *arguments]) == 2
        assert "expected" in capsys.readouterr().err
