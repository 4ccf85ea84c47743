"""Keep the load of every layer's experts balanced while training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moesim.recorder.routers import find_routers


def layer_balance_loss(logits: list[Tensor], top_k: int) -> tuple[Tensor, float]:
    """Load-balancing loss, each layer on its own.

    Parameters
    ----------
    logits : list of Tensor, n_layers x (n_tokens, n_experts)
    top_k : int

    Returns
    -------
    loss : Tensor, ()
        Mean over layers of ``n_experts * sum_e f_e P_e`` with f_e the share of the layer's slots that went to
        e and P_e the mean probability of e: 1 when balanced.
    imbalance : float
        Load of the busiest expert over the uniform load, mean over layers.

    Notes
    -----
    Switch Transformers (Fedus et al. 2021), equations 4 to 6, for top-k. The library's own loss puts the
    layers together first, which lets layers that prefer different experts cancel out.
    """
    terms = []
    peaks = []
    for layer in logits:
        n_experts = layer.shape[-1]
        probabilities = layer.float().softmax(dim=-1)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices.reshape(-1)
        share = torch.bincount(chosen, minlength=n_experts).float() / chosen.numel()
        terms.append(n_experts * (share * probabilities.mean(dim=0)).sum())
        peaks.append(float(share.max()) * n_experts)
    return torch.stack(terms).mean(), sum(peaks) / len(peaks)


class RouterLogits:
    """Context manager that collects the router logits of every layer of one forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.logits: list[Tensor] = []
        self._gates = [router.module for router in find_routers(model)]
        self._handles: list[Any] = []

    def __enter__(self) -> RouterLogits:
        self._handles = [gate.register_forward_hook(self._collect) for gate in self._gates]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _collect(self, _module: nn.Module, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
        self.logits.append(outputs[0])

    def take(self) -> list[Tensor]:
        """Hand over the logits since the last call, one Tensor a layer."""
        taken, self.logits = self.logits, []
        return taken
