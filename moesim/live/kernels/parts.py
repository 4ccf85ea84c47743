"""What the parts of a dense kernel are made of: planned tensors, norms, feed-forward blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.live.kernels.fill import normal_block, tile
from moesim.live.kernels.plans import Plan

EPSILON = 1e-6
"""Of the norms."""


Tensors = dict[str, Tensor]


def make(plan: Plan, dtype: torch.dtype, device: torch.device, source: torch.Generator) -> Tensors:
    """Allocate a plan's tensors: products random with standard deviation 1/sqrt(inputs), norms one, their biases zero."""
    tensors = {}
    for name, (shape, inputs) in plan.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if inputs:
            tile(tensor.view(-1), normal_block(1 / math.sqrt(inputs), dtype, source))
        else:
            tensor.fill_(1)
            tensor[1:].zero_()
        tensors[name] = tensor
    return tensors


def normalise(x: Tensor, weights: Tensor) -> Tensor:
    """Apply RMSNorm (weights of one row), or LayerNorm (weights, biases) over the last dimension."""
    if weights.shape[0] == 2:
        return F.layer_norm(x, x.shape[-1:], weights[0], weights[1], EPSILON)
    return F.rms_norm(x, x.shape[-1:], weights[0], EPSILON)


def feed_forward(x: Tensor, tensors: Tensors, prefix: str) -> Tensor:
    """Compute a feed-forward block planned by `feed_forward_plan`."""
    if f"{prefix}_gate" not in tensors:
        return F.linear(F.gelu(F.linear(x, tensors[f"{prefix}_up"])), tensors[f"{prefix}_down"])
    inner = F.silu(F.linear(x, tensors[f"{prefix}_gate"]), inplace=True).mul_(F.linear(x, tensors[f"{prefix}_up"]))
    return F.linear(inner, tensors[f"{prefix}_down"])
