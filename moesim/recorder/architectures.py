"""Where each architecture keeps its routers, and how they turn a state into a choice.

What a router chose is read from the model itself (see `moesim.recorder.hooks`). The rules here are needed for
what the model does not hand out: its scores, the rank order where it returns the chosen experts unsorted, and
what the same router would say about another layer's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moesim.recorder.errors import RecordError

#: What a MoE block calls its experts, in every architecture of transformers 5.
EXPERTS = "experts"


@dataclass(frozen=True)
class Rule:
    """How logits become scores, and what experts are ranked by."""

    score: str = "softmax"  # `softmax` or `sigmoid` of the logits, over all experts
    # attribute of the router, (n_experts,): added to the scores before ranking, and not part of the weights
    correction: str | None = None
    # with expert groups, the value that a group is chosen by: `max` of its experts' ranked scores, or the sum of its best two
    # (`top2`)
    group_by: str | None = None
    groups: tuple[int, int] = (1, 1)  # number of groups, and how many of them a token may use


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    router: str  # path of the router inside a decoder layer
    weights: str  # how the model makes weights of the scores, for the header of a trace
    rule: Rule = field(default_factory=Rule)


_NORMALISED = "softmax over all experts, divided by the sum over the chosen ones"
_BY_CONFIG = "softmax over all experts; divided by the sum over the chosen ones if norm_topk_prob"
_SCALED = "sigmoid; divided by the sum over the chosen ones if norm_topk_prob; times routed_scaling_factor"

#: By ``config.model_type``. Moonlight is a DeepSeek-V3. The groups of DeepSeek are read from the config.
ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": Architecture("mlp.gate", _NORMALISED),
    "phimoe": Architecture("mlp.router", "sparsemixer: softmax over the experts close to the best, for each of two choices"),
    "qwen2_moe": Architecture("mlp.gate", _BY_CONFIG),
    "qwen3_moe": Architecture("mlp.gate", _BY_CONFIG),
    "olmoe": Architecture("mlp.gate", _BY_CONFIG),
    "deepseek_v2": Architecture("mlp.gate", "softmax over all experts, times routed_scaling_factor", Rule(group_by="max")),
    "deepseek_v3": Architecture("mlp.gate", _SCALED, Rule("sigmoid", "e_score_correction_bias", "top2")),
    "gpt_oss": Architecture("mlp.router", "softmax over the logits of the chosen experts"),
}


@dataclass(frozen=True, eq=False)
class Router:
    """The router of one layer."""

    name: str  # of the module in the model
    # module, experts: the router, and the experts beside it
    module: nn.Module
    experts: nn.Module
    linear: nn.Module  # what holds its weight: the router itself, or a part of it
    rule: Rule

    def gate(self) -> Gate:
        """Copy what is needed to apply this router to other states, in float32."""
        with _at_hand(self.linear), _at_hand(self.module):
            weight, bias = (_copy(getattr(self.linear, name, None)) for name in ("weight", "bias"))
            correction = _copy(getattr(self.module, self.rule.correction)) if self.rule.correction else None
        if weight is None:
            raise RecordError(f"{self.name}: expected a weight, got none; this router cannot be read")
        return Gate(weight, bias, correction, self.rule)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float32, copy=True)


def _at_hand(module: nn.Module) -> AbstractContextManager[Any]:
    """Bring parameters that accelerate has offloaded back for a moment."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    context: AbstractContextManager[Any] = align_module_device(module, execution_device=torch.device("cpu"))
    return context


class Gate:
    """A router's function, detached from the model: logits, scores and ranking of any state."""

    def __init__(self, weight: Tensor, bias: Tensor | None, correction: Tensor | None, rule: Rule) -> None:
        self.rule = rule
        self._tensors = (weight, bias, correction)

    @property
    def weight(self) -> Tensor:
        """Of the router, (n_experts, hidden) float32."""
        return self._tensors[0]

    @property
    def n_experts(self) -> int:
        """Experts it chooses from."""
        return int(self.weight.shape[0])

    @property
    def ranks_by_scores(self) -> bool:
        """Whether the scores alone give the order of the experts."""
        return self._tensors[2] is None and self.rule.groups[0] == self.rule.groups[1]

    def to(self, device: torch.device) -> Gate:
        """Move it."""
        if self.weight.device != device:
            moved = [None if tensor is None else tensor.to(device) for tensor in self._tensors]
            self._tensors = (moved[0], moved[1], moved[2])  # type: ignore[assignment]
        return self

    def logits(self, states: Tensor) -> Tensor:
        """Logits of states, (n, hidden) to (n, n_experts) float32."""
        return nn.functional.linear(states.float(), self._tensors[0], self._tensors[1])

    def scores(self, logits: Tensor) -> Tensor:
        """Scores of logits, float32."""
        return logits.float().sigmoid() if self.rule.score == "sigmoid" else logits.float().softmax(dim=-1)

    def ranking(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Find what this router ranks its experts by."""
        correction, (n_groups, n_kept) = self._tensors[2], self.rule.groups
        if correction is None and n_groups == n_kept:
            return logits.float(), None
        values = self.scores(logits)
        if correction is not None:
            values = values + correction
        if n_groups == n_kept:
            return values, None
        grouped = values.view(len(values), n_groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
        group_value = best.sum(dim=-1) if self.rule.group_by == "top2" else best[..., 0]
        kept = torch.zeros_like(group_value, dtype=torch.bool).scatter_(1, group_value.topk(n_kept, dim=-1).indices, True)
        return values, kept.repeat_interleave(grouped.shape[-1], dim=1)

    def best(self, logits: Tensor, n: int) -> Tensor:
        """Ids of the n best experts of each row, best first, (rows, n) int64; the lower id among equals."""
        values, allowed = self.ranking(logits)
        order = values.sort(dim=-1, descending=True, stable=True).indices
        if allowed is not None:
            barred = (~allowed).gather(1, order).to(torch.uint8)
            order = order.gather(1, barred.sort(dim=-1, stable=True).indices)
        return order[:, :n]

    def in_rank_order(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Places that put chosen ids into rank order, (rows, top_k) int64; the lower id among equals."""
        by_id = ids.sort(dim=-1).indices
        values = self.ranking(logits)[0].gather(1, ids.gather(1, by_id))
        return by_id.gather(1, values.sort(dim=-1, descending=True, stable=True).indices)


def find_routers(model: Any) -> list[Router]:
    """Find the routers of a model of a known architecture, in layer order; dense layers have none."""
    kind = str(model.config.model_type)
    if kind not in ARCHITECTURES:
        raise RecordError(f"model_type '{kind}': expected one of {', '.join(sorted(ARCHITECTURES))}; it may still be detected")
    architecture = ARCHITECTURES[kind]
    rule = _with_groups(architecture.rule, model.config)
    found = [
        Router(name, module, getattr(block, EXPERTS), module, rule)
        for name, module, block in children(model)
        if name.endswith(f".{architecture.router}") and hasattr(block, EXPERTS)
    ]
    if not found:
        raise RecordError(f"model of type '{kind}': expected routers at 'layers.N.{architecture.router}', got none")
    return found


def children(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Every module with its name and its parent."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name:
            yield name, module, modules[name.rpartition(".")[0]]


def _with_groups(rule: Rule, config: Any) -> Rule:
    if rule.group_by is None or getattr(config, "topk_method", None) == "greedy":
        return Rule(rule.score, rule.correction)
    groups = (int(config.n_group or 1), int(config.topk_group or 1))
    return Rule(rule.score, rule.correction, rule.group_by, groups)
