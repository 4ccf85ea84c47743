"""What the parts of a dense kernel are made of: planned tensors, norms, feed-forward blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.live.kernels.fill import normal_block, tile
from moesim.model import ModelSpec

EPSILON = 1e-6
"""Of the norms."""


class Planned(NamedTuple):
    """A tensor before it exists: its shape, and the inputs of a product with it (0: weights of a norm)."""

    shape: tuple[int, ...]
    inputs: int


Plan = dict[str, Planned]
Tensors = dict[str, Tensor]


def matrix(out: int, inputs: int) -> Planned:
    """Plan a matrix of a linear layer."""
    return Planned((out, inputs), inputs)


def norm_of(model: ModelSpec) -> Planned:
    """Plan a norm of the residual stream: LayerNorm with a bias, or RMSNorm."""
    return Planned((1 + model.norm_bias, model.hidden), 0)


def feed_forward_plan(model: ModelSpec, width: int, prefix: str) -> Plan:
    """Plan a feed-forward block of the width: three matrices (SwiGLU) or two (GELU), as the model's experts."""
    plan = {f"{prefix}_up": matrix(width, model.hidden), f"{prefix}_down": matrix(model.hidden, width)}
    return plan if model.n_mats == 2 else {f"{prefix}_gate": matrix(width, model.hidden), **plan}


def plan_bytes(plan: Plan, dtype: torch.dtype) -> int:
    """Tell what the tensors of a plan take."""
    return sum(math.prod(planned.shape) for planned in plan.values()) * dtype.itemsize


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
