"""What interventions are set up with, measured on calibration text that is in neither training nor test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fidelity.intervened import moe_layers
from fidelity.interventions import Routing
from moesim.policies.parts.placement import per_layer_top_with_remainder
from moesim.trace.stats.balance import activation_frequency


@dataclass(frozen=True)
class Calibration:
    """Measured on a model's own routing.

    Attributes
    ----------
    frequency : (n_layers, n_experts) float64
        Share of the activations of the layer.
    sensitivity : (n_layers,) float64, nats^2
        See `sensitivity_terms`.
    shares : (n_rows, n_layers, top_k - 1) float32
        Share of the row's gate weight that each expert but the first has.
    cosine, reuse_recall : (n_layers - 1,) float64
        Of each layer but the first: mean cosine of its router's input with the previous one's, and the share of
        its chosen experts that the router also chooses for the previous input. What staleness and prediction
        cost depends on these.
    """

    frequency: NDArray[np.float64]
    sensitivity: NDArray[np.float64]
    shares: NDArray[np.float32]
    cosine: NDArray[np.float64]
    reuse_recall: NDArray[np.float64]

    @property
    def top_k(self) -> int:
        """Experts a row."""
        return int(self.shares.shape[2]) + 1

    def resident(self, ratio: float) -> Tensor:
        """Place the most frequent experts of each layer, and what is left over by frequency (DAOP's start).

        Parameters
        ----------
        ratio : float
            Share of all experts that fits.

        Returns
        -------
        Tensor of bool, (n_layers, n_experts)
        """
        table = torch.zeros(self.frequency.shape, dtype=torch.bool)
        chosen = per_layer_top_with_remainder(self.frequency.tolist(), round(ratio * self.frequency.size))
        for layer, experts in enumerate(chosen):
            table[layer, experts] = True
        return table

    def thresholds(self, skipped: float, by_sensitivity: bool) -> Tensor:
        """Thresholds of `Skip` at which a share of all experts but the first is skipped on the calibration text.

        Parameters
        ----------
        skipped : float
            0 to 1.
        by_sensitivity : bool
            ``sqrt(T / sensitivity_l)`` with one T for all layers, as AdapMoE's code; otherwise one threshold.

        Returns
        -------
        Tensor of float64, (n_layers,)
        """
        scale = np.sqrt(self.sensitivity) if by_sensitivity else np.ones_like(self.sensitivity)
        limit = np.quantile(self.shares * scale[None, :, None], skipped)
        return torch.from_numpy(limit / scale)


def calibrate(model: Any, batches: Iterable[Tensor]) -> Calibration:
    """Measure on the exact model.

    Parameters
    ----------
    model : transformers causal language model
    batches : iterable of Tensor of int64, (n_windows, window)
    """
    ids, shares, terms, cosines, recalls = [], [], [], [], []
    parameters = list(model.parameters())
    wanted = [p.requires_grad for p in parameters]
    for parameter in parameters:
        parameter.requires_grad_(False)  # only the gate weights' gradients are needed
    try:
        with _WeightGradients(model) as hooks:
            for batch in batches:
                logits = model(input_ids=batch, use_cache=False).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
                routings, gradients = hooks.take(loss)
                ids.append(torch.stack([r.ids for r in routings], dim=1))
                shares.append(torch.stack([(r.weights / r.weights.sum(1, keepdim=True))[:, 1:] for r in routings], dim=1))
                both = zip(routings, gradients, strict=True)
                later = list(pairwise(routings))
                cosines.append(torch.stack([F.cosine_similarity(a.inputs, b.inputs) for a, b in later], dim=1))
                recalls.append(torch.stack([_reuse_recall(b) for _, b in later], dim=1))
                terms.append(torch.stack([sensitivity_terms(r.weights, g) for r, g in both], dim=1))
    finally:
        for parameter, before in zip(parameters, wanted, strict=True):
            parameter.requires_grad_(before)
    return Calibration(
        activation_frequency(torch.cat(ids).numpy(), routings[0].scores.shape[1]),
        torch.cat(terms).double().mean(dim=(0, 2)).numpy(),
        torch.cat(shares).float().numpy(),
        torch.cat(cosines).double().mean(dim=0).numpy(),
        torch.cat(recalls).double().mean(dim=0).numpy(),
    )


def _reuse_recall(routing: Routing) -> Tensor:
    predicted = routing.predicted().ids
    return (routing.ids.unsqueeze(2) == predicted.unsqueeze(1)).any(dim=2).float().mean(dim=1)


def sensitivity_terms(weights: Tensor, gradients: Tensor) -> Tensor:
    """How much leaving out each expert but the first would move the loss, over its squared share of the weight.

    Parameters
    ----------
    weights, gradients : Tensor, (n_rows, top_k)
        Gate weights in rank order, and the loss's derivatives by them.

    Returns
    -------
    Tensor, (n_rows, top_k - 1), nats^2
        With a the expert's share of the weight, leaving it out and giving the others its weight moves the layer's output by
        a d, so the loss by a (g . d), and to second order (with the Fisher matrix for the curvature) by a^2 (g . d)^2 / 2.
        This is (g . d)^2. For top-2, d is the difference of the two experts' outputs.

    Notes
    -----
    AdapMoE (Zhong et al. 2024) skips the second of two experts if a^2 times a weight of the layer that stands for its
    sensitivity is below a constant; its 32 weights are Mixtral-8x7B's. These are the model's own, by the same criterion.
    """
    whole = weights.sum(dim=1, keepdim=True)
    mean = (weights * gradients).sum(dim=1, keepdim=True)  # g . output
    moved = (mean - whole * gradients) / (1 - weights / whole)
    return moved[:, 1:] ** 2


class _WeightGradients:
    """Context manager that keeps each pass's routing, and gives the loss's derivatives by the gate weights."""

    def __init__(self, model: Any) -> None:
        self._layers = moe_layers(model)
        self._handles: list[Any] = []
        self._seen: list[tuple[Routing, Tensor, Tensor]] = []

    def __enter__(self) -> _WeightGradients:
        self._handles = [g.register_forward_hook(partial(self._nudge, i)) for i, (g, _) in enumerate(self._layers)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _nudge(self, layer: int, gate: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> Any:
        logits, weights, ids = outputs
        nudge = torch.zeros_like(weights, requires_grad=True)
        detached = (logits.detach(), weights.detach(), ids)
        order = detached[1].argsort(dim=1, descending=True, stable=True)
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        previous = self._seen[-1][0].inputs if layer else None
        self._seen.append((Routing.read(layer, gate, rows, previous, detached), nudge, order))
        return logits, weights + nudge, ids

    def take(self, loss: Tensor) -> tuple[list[Routing], list[Tensor]]:
        """Hand over the layers' routing and the derivatives in rank order, and forget the pass."""
        seen, self._seen = self._seen, []
        gradients = torch.autograd.grad(loss, [nudge for _, nudge, _ in seen])
        return [r for r, _, _ in seen], [g.gather(1, order) for g, (_, _, order) in zip(gradients, seen, strict=True)]
