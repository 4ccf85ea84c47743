"""Find the routers of a model whose architecture is not in the table, or say what was found instead.

A router is a module beside one called ``experts``, with a weight of one row for each expert. How it makes scores
of logits is found by running the model on a few tokens and comparing: the experts chosen must be the best by some
known rule, and the weights in proportion to its scores. A model that fits no rule is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moesim.recorder.architectures import ARCHITECTURES, EXPERTS, Router, Rule, children, find_routers
from moesim.recorder.errors import RecordError
from moesim.recorder.hooks import check_choice, read_choice

#: Tokens on which the rule of an unknown router is found.
PROBE_TOKENS = 48
#: Relative difference of weights and scores that is put down to rounding.
TOLERANCE = 3e-2


def routers_of(model: Any) -> list[Router]:
    """Find the routers of any model, in layer order."""
    routers = find_routers(model) if model.config.model_type in ARCHITECTURES else _detect(model)
    widths = {len(router.gate().weight) for router in routers}
    if len(widths) != 1:
        raise RecordError(f"routers: expected the same number of experts in every layer, got {sorted(widths)}")
    return routers


def weights_formula(model: Any) -> str:
    """Say how a model makes weights of scores, for the header of a trace."""
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
            f"model of type '{kind}': expected a router beside a module '{EXPERTS}', got no such module; layer 0 has {modules}"
        )
    unclear = next((parent for parent in beside if len(candidates[parent]) != 1), None)
    if unclear is not None:
        raise RecordError(
            f"model of type '{kind}': expected one linear router beside {unclear}.{EXPERTS}, got {len(candidates[unclear])}; "
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
    """Find what has a weight with a row for each expert: the module or one part of it."""
    weights = [(part, getattr(part, "weight", None)) for part in module.modules()]
    found = [part for part, w in weights if isinstance(w, Tensor) and w.ndim == 2 and w.shape[0] == n_experts]
    return found[0] if len(found) == 1 else None


@dataclass
class _Probe:
    """What one router did in the trial run."""

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
    """Run the model on a few tokens, and find the rule that explains every router."""
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
                f"experts beside it, got neither; this architecture cannot be recorded"
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
    """Attributes of a router that are likely added to its scores; a plain ``bias`` is added to its logits."""
    width = len(router.gate().weight)
    named = [*router.module.named_buffers(recurse=False), *router.module.named_parameters(recurse=False)]
    return [name for name, tensor in named if tensor.shape == (width,) and name != "bias" and "bias" in name]


def _misfit(rule: Rule, probe: _Probe) -> float:
    """Tell by how much the weights differ from the scores of a rule, up to a factor that is the same for a row.

    Infinite if the rule does not give the choice, or if the logits are too alike to tell.
    """
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
