"""Places of routers by architecture, and how they turn a state into a choice.

The model itself has the choices (`moesim.recorder.hooks`); rules here are for scores, ranks and states of other layers. An
unknown architecture is searched for a module next to one called ``experts`` with one row an expert, and refused unless a known
rule explains choice and weights of every router on a few tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moesim.recorder import RecordError

EXPERTS = "experts"  # what a MoE block calls its experts, in every architecture of transformers 5


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
    # module, experts: the router, and the experts next to it
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
        return int(self.weight.shape[0])

    @property
    def ranks_by_scores(self) -> bool:
        return self._tensors[2] is None and self.rule.groups[0] == self.rule.groups[1]

    def to(self, device: torch.device) -> Gate:
        if self.weight.device != device:
            moved = [None if tensor is None else tensor.to(device) for tensor in self._tensors]
            self._tensors = (moved[0], moved[1], moved[2])  # type: ignore[assignment]
        return self

    def logits(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states.float(), self._tensors[0], self._tensors[1])

    def scores(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.rule.score == "sigmoid" else logits.float().softmax(dim=-1)

    def ranking(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
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
        """Return the n best experts of each row, (rows, n) int64; the lower id among equals first."""
        values, allowed = self.ranking(logits)
        order = values.sort(dim=-1, descending=True, stable=True).indices
        if allowed is not None:
            barred = (~allowed).gather(1, order).to(torch.uint8)
            order = order.gather(1, barred.sort(dim=-1, stable=True).indices)
        return order[:, :n]

    def in_rank_order(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return places that sort chosen ids by rank, (rows, top_k) int64; lower ids first."""
        by_id = ids.sort(dim=-1).indices
        values = self.ranking(logits)[0].gather(1, ids.gather(1, by_id))
        return by_id.gather(1, values.sort(dim=-1, descending=True, stable=True).indices)


def find_routers(model: Any) -> list[Router]:
    """Find the routers of a known architecture, in layer order; dense layers have none."""
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


PROBE_TOKENS = 48  # tokens on which the rule of an unknown router is found
TOLERANCE = 3e-2  # relative difference of weights and scores that is put down to rounding
TIE = 5e-3  # values that differ by less than this share of the largest one are ties: what bfloat16 cannot tell apart


def routers_of(model: Any) -> list[Router]:
    """Find the routers of any model, in layer order."""
    routers = find_routers(model) if model.config.model_type in ARCHITECTURES else _detect(model)
    widths = {len(router.gate().weight) for router in routers}
    if len(widths) != 1:
        raise RecordError(f"routers: expected the same number of experts in every layer, got {sorted(widths)}")
    return routers


def weights_formula(model: Any) -> str:
    """Describe how a model makes weights of scores, for the header of a trace."""
    known = ARCHITECTURES.get(model.config.model_type)
    return known.weights if known else "as the model does (architecture detected)"


def _detect(model: Any) -> list[Router]:
    candidates: dict[str, list[Router]] = defaultdict(list)
    beside: dict[str, list[str]] = {}
    for name, module, block in children(model):
        if not hasattr(block, EXPERTS) or module is getattr(block, EXPERTS):
            continue
        parent = name.rpartition(".")[0]
        beside.setdefault(parent, []).append(f"{name} ({type(module).__name__})")
        linear = _linear(module, _expert_count(getattr(block, EXPERTS), model.config))
        if linear is not None:
            candidates[parent].append(Router(name, module, getattr(block, EXPERTS), linear, Rule()))
    kind = model.config.model_type
    if not beside:
        modules = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if ".layers.0." in name})
        raise RecordError(
            f"model of type '{kind}': expected a router next to a module '{EXPERTS}', got no such module; layer 0 has {modules}"
        )
    unclear = next((parent for parent in beside if len(candidates[parent]) != 1), None)
    if unclear is not None:
        raise RecordError(
            f"model of type '{kind}': expected one linear router next to {unclear}.{EXPERTS}, got {len(candidates[unclear])}; "
            f"modules there: {', '.join(beside[unclear])}"
        )
    return _with_rules(model, [found[0] for found in candidates.values()])


def _expert_count(experts: nn.Module, config: Any) -> int:
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    for holder in (experts, config):
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if isinstance(count := getattr(holder, name, None), int):
                return count
    return max((p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3), default=0)


def _linear(module: nn.Module, n_experts: int) -> nn.Module | None:
    """Find what has a weight with a row an expert: the module or one part of it."""
    weights = [(part, getattr(part, "weight", None)) for part in module.modules()]
    found = [part for part, w in weights if isinstance(w, Tensor) and w.ndim == 2 and w.shape[0] == n_experts]
    return found[0] if len(found) == 1 else None


@dataclass
class _Probe:
    router: Router
    states: Tensor | None = None
    logits: Tensor | None = None
    weights: Tensor | None = None
    ids: Tensor | None = None

    def after_router(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = [*args, *kwargs.values()][0]
        self.states = states.detach().reshape(-1, states.shape[-1]).cpu()
        self._take(*read_choice(output, self.router.gate().n_experts))

    def before_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.ids is None:
            self._take(None, *read_choice([*args, *kwargs.values()][1:], self.router.gate().n_experts)[1:])

    def _take(self, logits: Tensor | None, weights: Tensor | None, ids: Tensor | None) -> None:
        flat = [None if t is None else t.detach().reshape(-1, t.shape[-1]).cpu() for t in (logits, weights, ids)]
        self.logits = flat[0] if flat[0] is not None else self.logits
        if flat[1] is not None and flat[2] is not None:
            self.weights, self.ids = flat[1].float(), flat[2].long()


def _with_rules(model: Any, routers: list[Router]) -> list[Router]:
    probes = [_Probe(router) for router in routers]
    handles = [p.router.module.register_forward_hook(p.after_router, with_kwargs=True) for p in probes]
    handles += [p.router.experts.register_forward_pre_hook(p.before_experts, with_kwargs=True) for p in probes]
    tokens = torch.randint(0, model.config.vocab_size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            model(input_ids=tokens.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    kind = model.config.model_type
    for probe in probes:
        if probe.ids is None:
            raise RecordError(
                f"model of type '{kind}': expected ids and weights of the chosen experts from {probe.router.name} or for the "
                f"experts next to it, got neither; this architecture cannot be recorded"
            )
    corrections = [*_corrections(probes[0].router), None]
    fits: list[tuple[float, Rule]] = []
    for score, correction in product(("softmax", "sigmoid"), corrections):
        rule = Rule(score, correction)
        worst = max(_misfit(rule, probe) for probe in probes)
        if worst <= TOLERANCE:
            fits.append((worst, rule))
    if fits:
        rule = min(fits, key=lambda fit: fit[0])[1]  # the first among equals: with a correction, if there is one
        return [replace(probe.router, rule=rule) for probe in probes]
    raise RecordError(
        f"model of type '{kind}': expected {probes[0].router.name} to choose the best experts by softmax or sigmoid of its "
        f"logits, with {corrections[:-1] or 'nothing'} added, got another choice or other weights; this architecture cannot be "
        "recorded"
    )


def _corrections(router: Router) -> list[str]:
    """Name attributes that may be added to a router's scores; a plain ``bias`` is of its logits."""
    width = len(router.gate().weight)
    named = [*router.module.named_buffers(recurse=False), *router.module.named_parameters(recurse=False)]
    return [name for name, tensor in named if tensor.shape == (width,) and name != "bias" and "bias" in name]


def _misfit(rule: Rule, probe: _Probe) -> float:
    """Return how far weights and a rule's scores differ; infinite for another choice."""
    assert probe.states is not None
    assert probe.ids is not None
    assert probe.weights is not None
    gate = replace(probe.router, rule=rule).gate()
    logits = (gate.logits(probe.states) if probe.logits is None else probe.logits).float()
    try:
        check_choice(gate, logits, probe.ids, probe.router.name)
    except RecordError:
        return math.inf
    if float((logits.max(dim=1).values - logits.min(dim=1).values).max()) < TOLERANCE:
        return math.inf
    factor = probe.weights / gate.scores(logits).gather(1, probe.ids)
    if probe.ids.shape[1] > 1:
        return float((factor.max(dim=1).values / factor.min(dim=1).values).max()) - 1
    # With one expert there is nothing to compare within a row.
    return 0.0 if bool((probe.weights == 1).all()) else float(factor.max() / factor.min()) - 1


def read_choice(output: Any, n_experts: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Identify logits, weights and ids by type and width."""
    tensors = [t for t in (output if isinstance(output, tuple | list) else (output,)) if isinstance(t, Tensor) and t.ndim]
    ids = next((t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool), None)
    floats = [t for t in tensors if t.is_floating_point()]
    weights = None if ids is None else next((t for t in floats[::-1] if t.shape == ids.shape), None)
    logits = next((t for t in floats if t.shape[-1] == n_experts and t is not weights), None)
    return logits, weights, ids


def check_choice(gate: Gate, logits: Tensor, ids: Tensor, place: str) -> None:
    """Check that a router chose the experts that come first by its rule, up to ties."""
    values, allowed = gate.ranking(logits)
    tie = TIE * values.abs().max(dim=-1).values
    if allowed is not None:
        values = values.masked_fill(~allowed, -torch.inf)
    chosen = values.gather(1, ids)
    others = values.scatter(1, ids, -torch.inf).max(dim=-1).values
    worst = chosen.min(dim=-1).values
    wrong = ((others - worst) > tie).nonzero()
    if len(wrong):
        row = int(wrong[0])
        expected = gate.best(logits[row : row + 1], ids.shape[1])[0].tolist()
        raise RecordError(
            f"{place}: expected the experts {sorted(expected)} by the rule of this architecture, got "
            f"{sorted(ids[row].tolist())}; this version of the model's code routes in another way"
        )
