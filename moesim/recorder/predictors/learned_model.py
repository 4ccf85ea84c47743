"""The small networks of the learned predictor, one for each layer: what they read, and how they are built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from torch import Tensor, nn

from moesim.recorder.errors import RecordError

#: Groups of layers, from the input to the output of the model.
GROUPS = ("input", "middle", "output")

_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class LearnedOptions:
    """Sizes and rates; the defaults are the paper's where it prints them."""

    # pca_outer, pca_middle: components of the state that are kept; no more than its width
    pca_outer: int = 256
    pca_middle: int = 512
    width: int = 384  # of the hidden layers
    # dropout, noise, masking: share of hidden units dropped; standard deviation of the noise on the features, each of which has
    # about unit variance; share of the features masked
    dropout: float = 0.1
    noise: float = 0.05
    masking: float = 0.1
    # focal_weight, focal_power: lambda and gamma of the loss
    focal_weight: float = 1.0
    focal_power: float = 2.0
    # experts activated more rarely than this share of the uniform frequency are weighted as if they had it
    least_frequency: float = 0.1
    # rate_outer, rate_middle, decay_outer, decay_middle: peak learning rates and weight decays of AdamW
    rate_outer: float = 1e-3
    rate_middle: float = 2e-3
    decay_outer: float = 1e-2
    decay_middle: float = 5e-2
    epochs: int = 30
    warmup_epochs: int = 5
    batch_tokens: int = 512
    max_batches: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = 1 if field.name in ("pca_outer", "pca_middle", "width", "epochs", "batch_tokens", "max_batches") else 0
            highest = {"dropout": 0.99, "masking": 0.99}.get(field.name, float("inf"))
            if not lowest <= value <= highest:
                wanted = f"{lowest} to {highest}" if highest < float("inf") else f"at least {lowest}"
                raise RecordError(f"learned predictor: {field.name}: expected {wanted}, got {value}")


@dataclass(frozen=True)
class Features:
    """Projection of a state onto its principal components, each scaled to unit variance."""

    mean: Tensor
    components: Tensor

    @classmethod
    def fit(cls, states: NDArray[Any], n: int) -> Features:
        """Find the principal components of states, (n_rows, hidden); no more than there are rows or values."""
        mean = states.mean(axis=0, dtype=np.float64)
        hidden = states.shape[1]
        covariance = np.zeros((hidden, hidden))
        for start in range(0, len(states), _CHUNK_ROWS):
            centred = states[start : start + _CHUNK_ROWS].astype(np.float64) - mean
            covariance += centred.T @ centred / len(states)
        n = min(n, hidden, max(1, len(states) - 1))
        variances, vectors = eigh(covariance, subset_by_index=[hidden - n, hidden - 1])
        # Directions in which nothing varies must not be blown up.
        scale = np.sqrt(np.maximum(variances[::-1], 1e-6 * variances[-1] + 1e-12))
        # One layout in memory, whether fitted or read from a file: products may differ in the last bit otherwise.
        return cls(*(torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in (mean, vectors[:, ::-1] / scale)))

    def of(self, states: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any], n_experts: int) -> Tensor:
        """Put together what a network reads."""
        projected = (torch.from_numpy(states.astype(np.float32)) - self.mean) @ self.components
        ids = torch.from_numpy(experts.astype(np.int64))
        blank = torch.zeros(len(ids), n_experts)
        given = torch.from_numpy(weights.astype(np.float32))
        return torch.cat([projected, blank.scatter(1, ids, 1.0), blank.scatter(1, ids, given)], dim=1)


def _block(n_in: int, n_out: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, n_out), nn.GELU(), nn.Dropout(dropout))


class Shallow(nn.Module):
    """One block and an output: the layers near the model's input and output."""

    def __init__(self, n_features: int, n_experts: int, options: LearnedOptions) -> None:
        super().__init__()
        self.first = _block(n_features, options.width, options.dropout)
        self.last = nn.Linear(options.width, n_experts)

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, n_experts) of features (n, n_features)."""
        logits: Tensor = self.last(self.first(features))
        return logits


class Gated(nn.Module):
    """A block, two more as a residual that a gating unit modulates, and an output: the middle layers."""

    def __init__(self, n_features: int, n_experts: int, options: LearnedOptions) -> None:
        super().__init__()
        width = options.width
        self.first = _block(n_features, width, options.dropout)
        self.residual = nn.Sequential(_block(width, width, options.dropout), _block(width, width, options.dropout))
        self.gate = nn.Linear(width, width)
        self.last = nn.Linear(width, n_experts)

    def forward(self, features: Tensor) -> Tensor:
        """Logits (n, n_experts) of features (n, n_features)."""
        state = self.first(features)
        logits: Tensor = self.last(state + self.gate(state).sigmoid() * self.residual(state))
        return logits


def network(group: str, n_features: int, n_experts: int, options: LearnedOptions) -> nn.Module:
    """Build the network of a layer of a group, with random weights."""
    return (Gated if group == "middle" else Shallow)(n_features, n_experts, options)


def eighths(n_layers: int) -> tuple[str, ...]:
    """Group of each layer: the first and the last eighth, at least one each, are input and output."""
    ends = max(1, round(n_layers / 8))
    return group_names(n_layers, ends, n_layers - ends)


def fitted_groups(accuracy: NDArray[Any]) -> tuple[str, ...]:
    """Group the layers by how well gate reuse predicts them."""
    values = np.asarray(accuracy, np.float64)
    n_layers = len(values)
    if n_layers < 4:
        return eighths(n_layers)

    def spread(first: int, last: int) -> float:
        return float(np.square(values[first:last] - values[first:last].mean()).sum())

    cuts = [(a, b) for a in range(2, n_layers - 1) for b in range(a + 1, n_layers)]
    a, b = min(cuts, key=lambda cut: spread(1, cut[0]) + spread(*cut) + spread(cut[1], n_layers))
    return group_names(n_layers, a, b)


def group_names(n_layers: int, first_middle: int, first_output: int) -> tuple[str, ...]:
    """Name the group of each layer from where the middle and the output group begin."""
    return tuple(GROUPS[(layer >= first_middle) + (layer >= first_output)] for layer in range(n_layers))
