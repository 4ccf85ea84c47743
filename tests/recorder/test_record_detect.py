"""Architectures that the recorder does not know: detected, or refused with the names found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="recorder tests need torch: install moesim[record]")
pytest.importorskip("transformers", reason="recorder tests need transformers: install moesim[record]")

import torch
from torch import Tensor, nn
from transformers import AfmoeConfig, AutoModelForCausalLM, Glm4MoeConfig, GraniteMoeConfig, LlamaConfig

from moesim.recorder import RecordError
from moesim.recorder.loading import describe_quantisation, quantisation
from moesim.recorder.recording import Plan, record_requests
from moesim.recorder.routers import Rule, find_routers, routers_of
from tests.recorder.record_kit import COMMON as KIT
from tests.recorder.record_kit import EXPERTS, HIDDEN, tiny

COMMON = {**KIT, "num_key_value_heads": 2, "intermediate_size": 24}
PROMPT = [5, 17, 3, 42, 7]


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.copy_(0.3 * torch.randn(EXPERTS))
    return model


def glm(**more: Any) -> Any:
    shape = {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3}
    return random_model(Glm4MoeConfig(**COMMON, **shape, first_k_dense_replace=1, **more))


def test_sigmoid_with_a_correction_is_detected() -> None:
    model = glm(n_group=1, topk_group=1)
    routers = routers_of(model)
    assert [router.name for router in routers] == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    assert {router.rule for router in routers} == {Rule("sigmoid", "e_score_correction_bias")}
    (recording,) = record_requests(model, [PROMPT], [4], plan=Plan(scores=True, n_inputs=None))
    assert recording.inputs is not None
    assert recording.scores is not None
    for layer, router in enumerate(routers):
        states = torch.from_numpy(recording.inputs[:, layer].astype(np.float32))
        scores = torch.sigmoid(states @ router.module.weight.detach().T)
        ids = (scores + router.module.e_score_correction_bias).sort(dim=1, descending=True).indices[:, :3]
        np.testing.assert_array_equal(recording.experts[:, layer], ids)
        np.testing.assert_allclose(recording.scores[:, layer], scores, atol=2e-2)  # inputs are kept in half precision
        chosen = scores.gather(1, ids)
        np.testing.assert_allclose(recording.weights[:, layer], chosen / chosen.sum(dim=1, keepdim=True), atol=1e-2)


def test_softmax_is_detected() -> None:
    model = random_model(GraniteMoeConfig(**COMMON, num_local_experts=EXPERTS, num_experts_per_tok=2))
    assert {router.rule for router in routers_of(model)} == {Rule("softmax")}
    (recording,) = record_requests(model, [PROMPT], [2])
    np.testing.assert_allclose(recording.weights.sum(axis=-1), 1, rtol=1e-5)


def test_a_linear_layer_inside_the_router_is_detected() -> None:
    shape = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    model = random_model(AfmoeConfig(**COMMON, **shape))
    with pytest.raises(RecordError, match="to choose the best experts by softmax or sigmoid"):
        routers_of(model)  # a fresh one has weights of zero, which tell nothing
    for layer in model.model.layers[1:]:
        nn.init.normal_(layer.mlp.router.gate.weight, generator=torch.Generator().manual_seed(2))
    (router, *_) = routers_of(model)
    assert router.linear is router.module.gate
    assert router.rule == Rule("sigmoid")


def test_expert_groups_that_are_not_in_the_table_are_refused() -> None:
    with pytest.raises(
        RecordError, match=r"type 'glm4_moe': expected model.layers.1.mlp.gate to choose the best experts by softmax"
    ):
        routers_of(glm(n_group=4, topk_group=1))


class Block(nn.Module):
    """Experts next to something."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, states: Tensor) -> Tensor:
        for part in (part for name, part in self.named_children() if name != "experts"):
            part(states)
        return states


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "got no such module"),
        ({"judge": nn.Linear(HIDDEN, 5)}, r"got 0; modules there: model.layers.0.mlp.judge \(Linear\)"),
        (
            {"one": nn.Linear(HIDDEN, EXPERTS), "two": nn.Linear(HIDDEN, EXPERTS)},
            r"got 2; modules there: model.layers.0.mlp.one \(Linear\), model.layers.0.mlp.two",
        ),
        (
            {"router": nn.Linear(HIDDEN, EXPERTS)},
            "expected ids and weights of the chosen experts from model.layers.0.mlp.router or .* got neither",
        ),
    ],
)
def test_others_are_refused_with_the_names_found(parts: dict[str, nn.Module], message: str) -> None:
    model = random_model(LlamaConfig(**{**COMMON, "num_hidden_layers": 1}))
    if parts:
        model.model.layers[0].mlp = Block(**parts)
    with pytest.raises(RecordError, match=message):
        routers_of(model)


def test_a_table_entry_that_does_not_fit_is_told() -> None:
    model = tiny("mixtral")
    router = model.model.layers[1].mlp.gate
    handle = router.register_forward_hook(lambda _m, _a, out: (out[0], out[1], (out[2] + 1) % EXPERTS))
    try:
        with pytest.raises(
            RecordError, match=r"layers.1.mlp.gate: expected the experts \[.*\] by the rule of this architecture, got \["
        ):
            list(record_requests(model, [PROMPT], [1]))
    finally:
        handle.remove()
    with pytest.raises(RecordError, match="model_type 'llama': expected one of deepseek_v2"):
        find_routers(random_model(LlamaConfig(**COMMON)))


def test_the_share_that_was_quantised_is_told() -> None:
    model = random_model(LlamaConfig(**COMMON))
    assert quantisation(model, None) is None
    packed = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn"})
    before = sum(parameter.numel() for parameter in model.parameters())
    layer = packed(HIDDEN, 24, bias=False)
    layer.weight = nn.Parameter(torch.zeros(HIDDEN * 24 // 2, 1))  # two weights a byte
    model.model.layers[0].mlp.gate_proj = layer
    facts = quantisation(model, 4)
    assert facts is not None
    assert facts["share"] == pytest.approx(HIDDEN * 24 / before, abs=1e-4)
    assert describe_quantisation(facts).startswith("4% of the weights are quantised (bitsandbytes nf4): routing may differ")
