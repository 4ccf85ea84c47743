"""No slot that is granted is lost: how slots are dealt out to layers, and what policies do with them."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.cli.main import main
from moesim.core.table import Format
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.report import result_table
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import slots_used
from moesim.experiment.sweep import expand
from moesim.model import ModelSpec
from moesim.plots.captions import caption
from moesim.policies.base import deal_slots
from moesim.policies.options import options_of
from moesim.policies.registry import POLICIES, make_policy, policy_class
from moesim.policy import Copy, Placement, Pool
from moesim.testing import FakeView, run_tiny, tiny_model, tiny_workload

SPLIT = sorted(name for name in POLICIES if "slots_split" in options_of(policy_class(name)))
PER_LAYER: dict[str, dict[str, Any]] = {
    "static": {"scope": "per-layer", "placement": "random"},
    "fate": {"compression": False, "shallow_layers": 0},
}


@given(st.integers(0, 400), st.integers(1, 60), st.integers(1, 9))
def test_slots_are_dealt_out_evenly(n_slots: int, n_layers: int, n_experts: int) -> None:
    dealt = deal_slots(n_slots, n_layers, n_experts)
    assert len(dealt) == n_layers
    assert sum(dealt) == min(n_slots, n_layers * n_experts)
    assert max(dealt) - min(dealt) <= 1
    assert max(dealt) <= n_experts
    assert deal_slots(n_slots, n_layers, n_experts, "equal") == [min(dealt)] * n_layers
    extra = [layer for layer, slots in enumerate(dealt) if slots > min(dealt)]
    gaps = [after - before for before, after in pairwise(extra)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1, "not evenly spaced"
    assert sum(dealt[: n_layers // 2]) - sum(dealt[(n_layers + 1) // 2 :]) in (-1, 0, 1), "one half of the stack has more"


def test_a_cache_of_153_slots_over_32_layers() -> None:
    dealt = deal_slots(153, 32, 8)
    assert (sum(dealt), dealt.count(5), dealt.count(4)) == (153, 25, 7)
    assert [layer for layer, slots in enumerate(dealt) if slots == 4] == [2, 6, 11, 16, 20, 25, 29]


def test_a_share_of_k_in_n_is_k_slots_of_each_layer() -> None:
    """No double is exactly k/n, and the product with n lies below k for many of them."""
    base: dict[str, Any] = {**CONFIG, "policies": ["lru"]}
    below = 0
    for n in range(1, 129):
        texts = [f"{k}/{n}" for k in range(n + 1)]
        points = expand(parse_config({**base, "cache": {"ratio": texts}}, "slots.yaml"), "slots.yaml")
        assert [point.ratio for point in points] == [k / n for k in range(n + 1)]
        for layers in (1, 26, 27, 48, 61):
            model = tiny_model(n_layers=layers, n_experts=n, top_k=1)
            assert [point.cache_slots(model) for point in points] == [k * layers for k in range(n + 1)]
            below += sum(int(Fraction(k / n) * n * layers) < k * layers for k in range(n + 1))
    assert below > 1000  # what rounding down alone loses a slot of


def test_a_share_between_two_numbers_of_slots_is_rounded_down() -> None:
    model = tiny_model(n_layers=4, n_experts=8)
    for share, slots in ((0.3, 9), (9.999999 / 32, 9), (1 - 2 / 3, 10), (0.1 + 0.2, 9), (1e-6, 0), (1.0, 32)):
        (point,) = expand(parse_config({**CONFIG, "policies": ["lru"], "cache": {"ratio": share}}, "slots.yaml"), "slots.yaml")
        assert point.cache_slots(model) == slots


def test_these_policies_have_slots_for_each_layer() -> None:
    assert SPLIT == [
        "belady", "composed", "dali", "dali-multi-gpu", "fifo", "hybrimoe-code", "hybrimoe-paper", "lfu", "lru",
        "mixtral-offloading", "random", "s3-fifo", "static",
    ]  # fmt: skip


def cache_of(policy: Any, view: FakeView) -> tuple[list[int], Placement]:
    """Return the slots of each layer."""
    placement = policy.place(view)
    (pool,) = (pool for pool in placement.pools if pool.name == "cache" and pool.device == "gpu0")
    assert pool.per_layer
    return [n_bytes // view.model.expert_bytes(0) for n_bytes in pool.sizes(view.model.n_layers)], placement


@pytest.mark.parametrize("name", SPLIT)
def test_a_policy_uses_every_slot_or_as_many_in_each_layer(name: str) -> None:
    for slots, dealt in ((13, [3, 4, 3, 3]), (14, [4, 3, 4, 3]), (12, [3] * 4)):
        view = FakeView(slots=slots)
        here, placement = cache_of(make_policy({"name": name, **PER_LAYER.get(name, {})}), view)
        assert here == dealt
        assert slots_used(placement, view.model) == slots
        assert [len(copy.experts) for copy in placement.copies if copy.device == "gpu0"] == dealt
        equal, placement = cache_of(make_policy({"name": name, **PER_LAYER.get(name, {}), "slots_split": "equal"}), view)
        assert equal == [3] * 4
        assert slots_used(placement, view.model) == 12


@pytest.mark.parametrize("name", ["lru", "lfu", "belady", "dali", "hybrimoe-paper", "hybrimoe-code", "mixtral-offloading"])
def test_the_slot_more_is_filled_and_never_exceeded(name: str) -> None:
    policy = make_policy(name)
    records = run_tiny(policy, tiny_workload(policy, 4), 13)
    landing = 0 if name == "dali" else 2  # copies whose victims are still to run
    assert 13 <= records.pool_peak_bytes["gpu0", "cache"] / tiny_model().expert_bytes(0) <= 13 + landing


# ------------------------------------------------------------------------------------------------------ what is reported
def test_slots_of_experts_of_different_sizes() -> None:
    """A slot is one of the largest; what was put in may be more."""
    model: ModelSpec = tiny_model()
    size = model.expert_bytes(0)
    assert slots_used(Placement(), model) == 0
    assert slots_used(Placement(pools=[Pool("gpu0", "cache", 3 * size - 1), Pool("gpu0", "staging", 9 * size)]), model) == 2
    assert slots_used(Placement(pools=[Pool("gpu0", "cache", [size, 99 * size, 0, 0], True)]), model) == 1 + 8
    held = Placement(copies=[Copy(0, [0, 1, 2], "gpu0")], pools=[Pool("gpu0", "cache", 3 * size - 1)])
    assert slots_used(held, model) == 3
    two = Placement(pools=[Pool("gpu0", "cache", 2 * size), Pool("gpu1", "cache", 5 * size)])
    assert slots_used(two, model) == 5


CONFIG: dict[str, Any] = {
    "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532",
    "trace": {"synthesize": "mixtral-8x7b", "requests": 1, "prompt": 8, "decode": 2}, "cache": {"ratio": [0.6, 0.5]},
    "workload": {"batch_size": 1, "prompt_tokens": 8, "decode_tokens": 2},
    "policies": ["lru", {"name": "lru", "slots_split": "equal"}, "on-demand", "llama-cpp"],
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [dict(row) for row in run_experiment(Experiment(parse_config(CONFIG, "slots.yaml"), "slots.yaml")).rows]


def test_rows_say_how_many_slots_are_granted_and_used(rows: list[dict[str, Any]]) -> None:
    found = {(row["policy"], row["cache_ratio"]): (row["cache_slots_used"], row["cache_slots"]) for row in rows}
    assert found == {
        ("lru", 0.6): (153, 153), ("lru(slots_split=equal)", 0.6): (128, 153), ("on-demand", 0.6): (0, 153),
        ("llama-cpp", 0.6): (152, 153),
        ("lru", 0.5): (128, 128), ("lru(slots_split=equal)", 0.5): (128, 128), ("on-demand", 0.5): (0, 128),
        ("llama-cpp", 0.5): (128, 128),
    }  # fmt: skip


def test_the_table_says_it_where_they_differ(rows: list[dict[str, Any]]) -> None:
    lines = [line.split("|") for line in result_table(rows, Format.MD, wide=True).splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in lines[0]]
    found = {tuple(line[heads.index(name)].strip() for name in ("cache", "slots")) for line in lines[2:]}
    assert found == {
        ("0.6", "153"), ("0.6", "128 of 153"), ("0.6", "0 of 153"), ("0.6", "152 of 153"), ("0.5", "128"), ("0.5", "0 of 128"),
    }  # fmt: skip


def test_captions_say_it(rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    said = "Cache slots used, where these are not the granted ones: lru(slots_split=equal) 128 of 153, on-demand none, "
    assert said + "llama-cpp 152 of 153." in caption("What.", frame)
    assert "slots used" not in caption("What.", frame[frame["policy"] == "lru"])
    assert "slots used" not in caption("What.", frame.drop(columns="cache_slots_used"))
    many = pd.concat([frame.assign(cache_slots=n, cache_slots_used=n - n % 8) for n in (9, 17, 26, 35)])
    assert "lru 8 to 32 of 9 to 35," in caption("What.", many)


def test_results_have_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "slots.yaml"
    file.write_text(json.dumps(CONFIG | {"policies": ["lru"]}))
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 0
    frame = pd.read_parquet(tmp_path / "out" / "runs.parquet")
    assert frame[["cache_slots", "cache_slots_used"]].to_numpy().tolist() == [[153, 153], [128, 128]]
