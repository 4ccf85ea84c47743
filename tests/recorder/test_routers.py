"""Routers are found by what they are, and refused by name with what was found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from moesim.recorder import RecordError
from moesim.recorder.hooks import RoutingHooks, Wanted
from moesim.recorder.recording import record_requests
from moesim.recorder.routers import PROBE_ROWS, Answer, Watch, find_routers
from tests.recorder.architectures_kit import build
from tests.recorder.record_kit import COMMON, EXPERTS, HIDDEN, tiny

PROMPT = [5, 17, 3, 42, 7]
REFUSED = {
    "deepseek_v4": ({"num_experts_per_tok": 3}, r"mlp.gate \(DeepseekV4HashRouter\) also reads input_ids"),
    "inkling_text": (
        {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts": EXPERTS, "num_experts_per_tok": 3},
        r"mlp.gate \(InklingTopkRouter\) maps a state by 9 x 32",
    ),
    "jetmoe": (
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 3, "kv_channels": 8},
        r"self_attention \(JetMoeAttention\): expected one router next to its experts, got 0",
    ),
    "longcat_flash": (
        {"n_routed_experts": EXPERTS, "zero_expert_num": 2, "moe_topk": 3, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16,
         "num_layers": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16},
        r"mlp.router \(LongcatFlashTopkRouter\) maps a state by 10 x 32, 2 of them experts without weights",
    ),
    "zaya": ({"num_experts": EXPERTS, "num_experts_per_tok": 1}, r"mlp.gate \(ZayaRouter\) maps a state by 256 x 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_refused(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(RecordError, match=f"model of type '{name}': .*{message}") as error:
        find_routers(build(name, **config))
    assert "\n" not in str(error.value)


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


class Chooser(nn.Linear):
    """A router with a score function and a way to choose."""

    def __init__(self, how: str = "") -> None:
        super().__init__(HIDDEN, EXPERTS)
        self.how = how
        self.calls = 0

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(states)
        if self.how == "no score":
            return (logits.exp() + 1).log().topk(2, dim=-1)
        if self.how == "fails":
            raise ValueError("no states of\nthis kind")
        if self.how == "memory":
            self.calls += 1
            logits = logits + self.calls * torch.arange(EXPERTS)
        weights, ids = logits.softmax(dim=-1).topk(2, dim=-1)
        return weights, ids


def with_block(**parts: nn.Module) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**{**COMMON, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 1})
    )
    if parts:
        model.model.layers[0].mlp = Block(**parts)
    return model.eval()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "got no such module; layer 0 has"),
        ({"judge": nn.Linear(HIDDEN, 5)}, r"mlp \(Block\): .* got 0: model.layers.0.mlp.judge \(Linear\) maps a state by 5 x 32"),
        ({"norm": nn.LayerNorm(HIDDEN)}, r"got 0: model.layers.0.mlp.norm \(LayerNorm\) maps a state by nothing"),
        (
            {"one": nn.Linear(HIDDEN, EXPERTS), "two": nn.Linear(HIDDEN, EXPERTS)},
            r"got 2: model.layers.0.mlp.one \(Linear\); model.layers.0.mlp.two \(Linear\)",
        ),
        ({"router": nn.Linear(HIDDEN, EXPERTS)}, r"top k, by its configuration, got 1 routers \(8 experts, top unknown\)"),
        ({"router": Chooser("no score")}, r"router \(Chooser\) scores experts by neither softmax nor sigmoid"),
        ({"router": Chooser("fails")}, r"router \(Chooser\) cannot be run by itself: no states of this kind"),
    ],
)
def test_others_are_refused_with_what_was_found(parts: dict[str, nn.Module], message: str) -> None:
    with pytest.raises(RecordError, match=message) as error:
        find_routers(with_block(**parts))
    assert "\n" not in str(error.value)


def test_the_one_with_a_choice_is_the_router() -> None:
    """A part of the width of the experts that chooses nothing is not taken for one."""
    (router,) = find_routers(with_block(shape=nn.Linear(HIDDEN, EXPERTS), judge=Chooser()))
    assert (router.name, router.top_k, router.score, router.ranks_by_scores) == ("model.layers.0.mlp.judge", 2, "softmax", True)
    assert router.hidden == HIDDEN


def test_what_the_configuration_says_is_compared() -> None:
    model = tiny("mixtral")
    model.config.num_experts_per_tok = 1
    try:
        with pytest.raises(RecordError, match=r"expected 3 layers of 8 experts, top 1, .* got 3 routers \(8 experts, top 2\)"):
            find_routers(model)
    finally:
        model.config.num_experts_per_tok = 2


def test_a_choice_that_is_not_the_routers_is_refused() -> None:
    model = tiny("mixtral")
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _a, out: (out[0], out[1], (out[2] + 1) % EXPERTS))
    try:
        with pytest.raises(RecordError, match=r"layers.1.mlp.gate \(MixtralTopKRouter\): expected the experts \[.*\] .* got \["):
            list(record_requests(model, [PROMPT], [1]))
    finally:
        handle.remove()


def test_a_choice_that_depends_on_more_than_the_state_is_refused() -> None:
    (router,) = find_routers(with_block(judge=Chooser("memory")))
    states = torch.randn(PROBE_ROWS, HIDDEN)
    with pytest.raises(RecordError, match=r"judge \(Chooser\): expected a choice that depends on the state alone"):
        router.check(states, router.ask(states))


def test_a_failing_router_leaves_nothing_behind() -> None:
    """The model's own error comes through, and later operations are not watched."""
    model = with_block(judge=Chooser())
    routers = find_routers(model)
    model.model.layers[0].mlp.judge.how = "fails"
    with pytest.raises(ValueError, match="no states"), RoutingHooks(routers, Wanted()):
        model(input_ids=torch.tensor([PROMPT]))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_ranks_by_hand() -> None:
    values = torch.tensor([[0.1, 0.5, 0.5, -torch.inf], [0.3, 0.2, 0.1, 0.0]])
    answer = Answer(values, values)
    assert answer.best(3).tolist() == [[1, 2, 0], [0, 1, 2]]
    ids = torch.tensor([[0, 2], [2, 1]])
    assert ids.gather(1, answer.in_rank_order(ids)).tolist() == [[2, 0], [1, 2]]
    answer.check(torch.tensor([[2, 1], [1, 0]]), "here")
    with pytest.raises(RecordError, match=r"here: expected the experts \[1, 2\] that it ranks first, got \[0, 2\]"):
        answer.check(ids, "here")


def test_a_watch_sees_the_last_choice_among_all() -> None:
    """As of groups of experts: the first top-k is among groups, the second within them."""
    with Watch(4) as watch:
        logits = nn.functional.linear(torch.eye(4), torch.tensor([[4.0, 1, 2, 3]] * 4).T)
        scores = logits.sigmoid()
        scores.view(4, 2, 2).topk(1)
        (scores + 1).topk(2)
    answer = watch.answer()
    assert torch.equal(answer.values, scores + 1) and torch.equal(answer.scores, scores)
    assert watch.score == "sigmoid" and watch.chosen is not None and watch.chosen.shape == (4, 2)
