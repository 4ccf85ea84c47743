"""What offloading systems execute when they do not compute exactly what was routed, as decisions on one layer's rows.

All decisions are of one token and use what is known in that token's own pass, and a fixed placement.
`fidelity.intervened` carries them out in a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fidelity.settlement import Ledger, settle
from moesim.errors import InputError

_TOLERANCE = 1e-4  # of gate weights recomputed in float32
_PROBES = 64  # states of which a router is asked what it does with scores


@dataclass(frozen=True)
class Routing:
    """What one router did with all rows of a pass.

    Attributes
    ----------
    layer : int
        MoE layer, from 0.
    inputs : Tensor, (n_rows, hidden)
        What the router read.
    previous : Tensor or None, (n_rows, hidden)
        What the router of the MoE layer before read; None for the first.
    scores : Tensor of float32, (n_rows, n_experts)
        Softmax of the router's logits.
    ids, weights : Tensor, (n_rows, top_k)
        In rank order, weights as the model uses them.
    gate : nn.Module
        The router.
    """

    layer: int
    inputs: Tensor
    previous: Tensor | None
    scores: Tensor
    ids: Tensor
    weights: Tensor
    gate: nn.Module

    @classmethod
    def read(cls, layer: int, gate: nn.Module, inputs: Tensor, previous: Tensor | None, outputs: Any) -> Routing:
        """Take a router's inputs and its (logits, weights, ids), and put the slots into rank order."""
        logits, weights, ids = outputs
        order = weights.argsort(dim=1, descending=True, stable=True)  # some routers do not sort
        scores = logits.float().softmax(dim=1)
        return cls(layer, inputs, previous, scores, ids.gather(1, order), weights.gather(1, order), gate)

    def predicted(self) -> Routing:
        """What this router says of the previous layer's input (gate reuse)."""
        if self.previous is None:
            raise ValueError(f"MoE layer {self.layer} has no layer before it to predict it from")
        return Routing.read(self.layer, self.gate, self.inputs, self.previous, self.gate.forward(self.previous))


@dataclass(frozen=True)
class Plan:
    """What a layer executes, (n_rows, n_slots) each.

    Attributes
    ----------
    ids : Tensor of int64
    weights : Tensor
        With which the outputs are added; 0 where skipped.
    stale : Tensor of bool
        Run on the previous layer's router input.
    late : Tensor of bool
        Run on this layer's input, added to the next MoE layer's output.
    skipped : Tensor of bool
    """

    ids: Tensor
    weights: Tensor
    stale: Tensor
    late: Tensor
    skipped: Tensor

    @classmethod
    def exact(cls, routing: Routing) -> Plan:
        """Execute what was routed."""
        none = torch.zeros_like(routing.ids, dtype=torch.bool)
        return cls(routing.ids, routing.weights, none, none, none)

    def is_exact(self, routing: Routing) -> bool:
        """Tell whether this is what was routed."""
        odd = self.stale | self.late | self.skipped
        return not odd.any() and torch.equal(self.ids, routing.ids) and torch.equal(self.weights, routing.weights)

    def record(self, routing: Routing, ledger: Ledger) -> None:
        """Enter the gate mass of the routing that this plan was made for."""
        late = ((routing.ids.unsqueeze(2) == self.ids.unsqueeze(1)) & self.late.unsqueeze(1)).any(dim=2)
        ledger.add(routing.weights, settle(routing.ids, self.ids, self.stale, self.skipped), late)


class Intervention(Protocol):
    """Decides what a layer executes."""

    def plan(self, routing: Routing) -> Plan:
        """Decide for all rows of a layer."""
        ...


@dataclass(frozen=True)
class Daop:
    """DAOP's decode: experts of a layer predicted from the layer before, so that the CPU can start early.

    Attributes
    ----------
    resident : Tensor of bool, (n_layers, n_experts)
        On the GPU, for good.
    predict : bool
        Take experts and weights that the layer's router gives for the previous layer's input; the real ones
        are never used. Otherwise take those of the layer's own input.
    degrade : bool
        If more than ``top_k // 2`` chosen experts are not resident, replace the lowest-scored of these by the
        best-scored resident ones that are not chosen, as far as there are any ("graceful degradation"). The
        paper says it for two of two; the rule for more is its extension.
    stale : bool
        Experts that are not resident read the previous layer's input (pre-calculation on the CPU).
    first : int
        All of it from this MoE layer on; 5 in DAOP, since earlier layers predict badly. At least 1.
    """

    resident: Tensor
    predict: bool = True
    degrade: bool = True
    stale: bool = True
    first: int = 5

    def plan(self, routing: Routing) -> Plan:
        """Decide for all rows of a layer."""
        if routing.layer < max(1, self.first):
            return Plan.exact(routing)
        seen = routing.predicted() if self.predict else routing
        resident = self.resident[routing.layer]
        ids, weights = degraded(seen, resident) if self.degrade else (seen.ids, seen.weights)
        none = torch.zeros_like(ids, dtype=torch.bool)
        return Plan(ids, weights, ~resident[ids] if self.stale else none, none, none)


@dataclass(frozen=True)
class Skip:
    """AdapMoE's adaptive gating: run fewer experts where the gate gives the last ones little.

    Attributes
    ----------
    thresholds : Tensor, (n_layers,)
        An expert other than the first is left out if its share of the row's gate weight is below this. AdapMoE
        has top-2; for more the rule is taken for each expert.
    rescale : bool
        The rest gets the whole weight, as a router of fewer experts would give it; otherwise it keeps its own.
    """

    thresholds: Tensor
    rescale: bool = True

    def plan(self, routing: Routing) -> Plan:
        """Decide for all rows of a layer."""
        exact = Plan.exact(routing)
        whole = routing.weights.sum(dim=1, keepdim=True)
        skipped = routing.weights / whole < self.thresholds[routing.layer]
        skipped[:, 0] = False
        weights = routing.weights.masked_fill(skipped, 0.0)
        if self.rescale:
            scaled = weights * (whole / weights.sum(dim=1, keepdim=True))
            weights = torch.where(skipped.any(dim=1, keepdim=True), scaled, weights)
        return Plan(exact.ids, weights, exact.stale, exact.late, skipped)


@dataclass(frozen=True)
class Defer:
    """KTransformers' expert deferral: the last experts run on the CPU while the next layer is computed.

    Attributes
    ----------
    resident : Tensor of bool, (n_layers, n_experts)
        On the GPU, and so never deferred.
    n_deferred : int
        Lowest-weighted experts of a row that are deferred if they are not resident. Their outputs are added to the next MoE
        layer's; nothing of the last layer is deferred.
    """

    resident: Tensor
    n_deferred: int

    def plan(self, routing: Routing) -> Plan:
        """Decide for all rows of a layer."""
        exact = Plan.exact(routing)
        if routing.layer == len(self.resident) - 1:
            return exact
        rank = torch.arange(routing.ids.shape[1], device=routing.ids.device)
        late = (rank >= len(rank) - self.n_deferred) & ~self.resident[routing.layer][routing.ids]
        return Plan(exact.ids, exact.weights, exact.stale, late, exact.skipped)


def degraded(seen: Routing, resident: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the lowest-scored experts that are not resident, see `Daop`.

    Parameters
    ----------
    seen : Routing
        The experts chosen, true or predicted.
    resident : Tensor of bool, (n_experts,)

    Returns
    -------
    ids, weights : Tensor, (n_rows, top_k)
        Weights as the router would give the new experts, see `gate_weights`; rows without a replacement are
        as they were.
    """
    ids, top_k = seen.ids, seen.ids.shape[1]
    absent = ~resident[ids]
    free = seen.scores.masked_fill(~resident, -1.0).scatter(1, ids, -1.0)
    n_extra = (absent.sum(dim=1, keepdim=True) - top_k // 2).clamp(min=0)
    n_extra = n_extra.minimum((free >= 0).sum(dim=1, keepdim=True))
    from_last = absent.flip(1).cumsum(dim=1).flip(1)  # 1 for the lowest-scored absent one
    replaced = absent & (from_last <= n_extra)
    candidates = free.topk(min(top_k, free.shape[1]), dim=1).indices
    turn = (replaced.cumsum(dim=1) - 1).clamp(min=0)  # which candidate it gets
    new = torch.where(replaced, candidates.gather(1, turn), ids)
    scores = seen.scores.gather(1, new)
    order = scores.argsort(dim=1, descending=True, stable=True)
    new, scores = new.gather(1, order), scores.gather(1, order)
    changed = replaced.any(dim=1, keepdim=True)
    weights = gate_weights(seen.gate, scores, seen.inputs.shape[1])
    return torch.where(changed, new, ids), torch.where(changed, weights.to(seen.weights.dtype), seen.weights)


def gate_weights(gate: nn.Module, scores: Tensor, hidden: int) -> Tensor:
    """Give chosen scores, (n_rows, top_k), the weights that the router would give them, found out by asking it.

    Raises
    ------
    InputError
        If its weights are neither the scores times a constant nor the scores over their sum times a constant.
    """
    states = torch.randn(_PROBES, hidden, generator=torch.Generator().manual_seed(0)).to(scores.device)
    probe = Routing.read(0, gate, states, None, gate.forward(states))
    chosen = probe.scores.gather(1, probe.ids)
    factor = probe.weights / chosen
    if _is_constant(factor):
        return scores * factor[0, 0]
    factor = factor * chosen.sum(dim=1, keepdim=True)
    if _is_constant(factor):
        return scores / scores.sum(dim=1, keepdim=True) * factor[0, 0]
    raise InputError(
        f"router {type(gate).__name__}: expected weights that are softmax scores, divided by their sum or not, got others; "
        "take a model of Mixtral's, Qwen3-MoE's or DeepSeek-V2's kind"
    )


def _is_constant(values: Tensor) -> bool:
    return torch.allclose(values, values[:1, :1].expand_as(values), rtol=_TOLERANCE)
