"""llama.cpp's automatic placement, and from how many rows on it copies experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.policies.registry import make_policy
from moesim.policies.systems.llama_cpp import Fit, LlamaCpp, LlamaCppFit, false_position, fitted
from moesim.policy import Fetch, Run
from moesim.testing import FakeView, routed, tiny_model

# ------------------------------------------------------------------------------------------------------------- thresholds


def test_the_threshold_by_bytes_of_a_weight_rounds_down() -> None:
    # Weights of 4.5 bits have 0.5625 bytes: 60 rows a byte are 33 rows an expert, so 132 of top-2 among 8.
    policy = LlamaCpp(n_cpu_moe=4, op_offload_rule="rows-per-expert", op_offload_per_byte=60.0)
    view = FakeView(tiny_model(expert_bits=4.5), slots=0)
    view.use(policy.place(view))
    assert [type(next(iter(policy.decide(routed([[0, 1]] * n), view)))) for n in (131, 132)] == [Run, Fetch]


@pytest.mark.parametrize(("options", "on_cpu"), [({"n_cpu_moe": 3}, False), ({"n_gpu_layers": 2}, True), ({}, False)])
def test_leading_layers_go_with_dense_parts_and_not_with_experts(options: dict[str, int], on_cpu: bool) -> None:
    view = FakeView(tiny_model(n_dense_layers=1, dense_intermediate=8), slots=32)
    assert (("leading", -1) in LlamaCpp(**options).place(view).parts) is on_cpu


def test_options_of_the_other_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option 'n_cpu_moe'"):
        make_policy({"name": "llama-cpp-fit", "n_cpu_moe": 3})


# ----------------------------------------------------------------------------------------------------------------- search
def restated(dense: Sequence[int], experts: Sequence[int], rest: int, target: int, n_mats: int) -> Fit:
    """Try every count, as it is told."""
    n = len(dense)
    if rest + sum(dense) + sum(experts) <= target:
        return Fit(n, n, "none")
    n_dense = max([d for d in range(n + 1) if rest + sum(dense[n - d :]) <= target], default=0)
    if n_dense < n:
        return Fit(n_dense, 0, "none")
    base = rest + sum(dense)
    full = max(f for f in range(n + 1) if base + sum(experts[:f]) <= target)
    fraction: Any = "none"
    for name, share in (("up", Fraction(1, n_mats)), ("gate and up", Fraction(max(1, n_mats - 1), n_mats))):
        # A part of a byte takes a whole one.
        if base + sum(experts[:full]) + -(-share.numerator * experts[full] // share.denominator) < target:
            fraction = name
        else:
            break
    return Fit(n_dense, full, fraction)


def test_the_search_finds_what_trying_everything_finds() -> None:
    draw = random.Random(20260101)
    found = set()
    for _ in range(500):
        n = draw.randint(1, 8)
        dense = [draw.randint(0, 9) for _ in range(n)]
        experts = [draw.randint(1, 40) for _ in range(n)]
        given = dense, experts, draw.randint(0, 9), draw.randint(0, 40 * n), draw.choice([2, 3])
        fit = fitted(*given)
        assert fit == restated(*given), given
        found.add((fit.dense == n, fit.full == n, fit.fraction))
    assert len(found) == 5, "all kinds of answers occur"


def test_the_search_asks_for_few_loads() -> None:
    asked: list[int] = []

    def memory(count: int) -> int:
        asked.append(count)
        return 1000 + 330 * count + (5000 if count > 20 else 0)  # a buffer that grows at some layer

    assert false_position(memory, 9000, 60) == 20
    assert len(asked) <= 8 and len(set(asked)) == len(asked)
    assert false_position(memory, 900, 60) == 0 and false_position(memory, 10**6, 60) == 60


# -------------------------------------------------------------------------------------------------------------- placement
@pytest.mark.parametrize(
    ("slots", "layers", "taken"),
    [(0, 0, 0), (7, 0, 2), (8, 1, 0), (10, 1, 0), (11, 1, 1), (13, 1, 1), (14, 1, 2), (31, 3, 2), (32, 4, 0), (40, 4, 0)],
)
def test_the_first_layers_come_to_the_gpu_first(slots: int, layers: int, taken: int) -> None:
    view, policy = FakeView(slots=slots), LlamaCppFit()  # 4 layers of 8 experts
    placement = policy.place(view)
    view.use(placement)
    assert [copy.layer for copy in placement.copies] == list(range(layers))
    assert placement.parts == {("embedding", -1): "cpu0"}
    a_third = -(-8 * view.model.expert_bytes(0) // 3)
    assert sum(placement.reserved.values()) == pytest.approx(taken * a_third, abs=1)
    device = "gpu0" if layers == 4 else "cpu0"
    assert list(policy.decide(routed([[0, 1]] * 3, layer=3), view)) == [Run(3, [0, 1], device)]
    if layers:
        assert list(policy.decide(routed([[0, 1]] * 3, layer=0), view)) == [Run(0, [0, 1], "gpu0")]
    if layers < 4:
        assert next(iter(policy.decide(routed([[0, 1]] * 32, layer=3), view))) == Fetch(3, [0, 1], "gpu0", 0, "staging")


def test_it_is_the_mirror_image_of_n_cpu_moe() -> None:
    for slots in (8, 16, 24, 32):
        first, last = ([copy.layer for copy in cls().place(FakeView(slots=slots)).copies] for cls in (LlamaCppFit, LlamaCpp))
        assert first == [3 - layer for layer in reversed(last)]
