"""Quantised copies of a model, on any device: what a shadow of it would compute with fewer bits a weight.

Weights are quantised and dequantised again at once ("fake" quantisation): the copy has the values of the
quantised weights in the type of the original, so it takes as much memory as the original, runs wherever that runs,
and routes as the quantised model would. Activations are not rounded.

=============  ==================================================  ==================================================
point          what is published                                   what is done here
=============  ==================================================  ==================================================
``int8``       LLM.int8() (Dettmers et al. 2022): weights per      weights as published; activations stay as they are
               output channel by their largest absolute value,
               activations per token, outlier features in 16 bits
``nf4``        QLoRA (Dettmers et al. 2023): blocks of 64, scaled  as published, without double quantisation
               by their largest absolute value; the scales
               quantised again on request
``fp16``       the model in half precision                         every parameter rounded to half precision;
                                                                   arithmetic in the type of the original
what is kept   bitsandbytes quantises linear layers; embeddings,   the same, with stacked experts quantised (each
               norms and the output head stay                      expert a matrix of its own) and routers kept [choice:
                                                                   no system says; whoever shrinks a model spares them]
=============  ==================================================  ==================================================
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor, nn

from moesim.errors import unknown_name
from moesim.recorder.architectures import Router
from moesim.recorder.errors import RecordError

#: What `quantised_copy` knows.
KINDS = ("fp16", "int8", "nf4")

#: Weights that share a scale in NF4 (QLoRA, section 3).
BLOCK = 64

_INT8_MAX = 127


def normal_float_levels() -> NDArray[np.float32]:
    """Compute the 16 levels of NormalFloat4.

    QLoRA, section 3 and appendix E: levels at quantiles of a standard normal distribution, so that normally
    distributed weights use all of them equally often, scaled to [-1, 1]. To have an exact 0, 8 quantiles are taken
    of the positive half and 7 of the negative one. The outermost quantile is the mean of those that 15 and 16
    intervals would leave half an interval of probability beyond: ``1 - (1/30 + 1/32) / 2``.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    positive = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(outermost, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([negative, [0.0], positive]))
    return np.asarray(levels / levels.max(), np.float32)


_LEVELS = torch.from_numpy(normal_float_levels())


def quantise(weight: Tensor, kind: str) -> Tensor:
    """Quantise a matrix and dequantise it again.

    With a the largest absolute value of an output channel (``int8``) or of a block (``nf4``), no weight moves by
    more than ``a / 254``, or ``a`` times half of the widest gap between two levels.
    """
    _check_kind(kind)
    if kind == "fp16":
        return weight.half().to(weight.dtype)
    return _int8(weight) if kind == "int8" else _nf4(weight)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise RecordError(unknown_name("quantisation", kind, KINDS))


def _int8(weight: Tensor) -> Tensor:
    values = weight.double()  # in which 127 a / 127 is a again, so that quantising twice changes nothing
    largest = values.abs().amax(dim=1, keepdim=True)
    steps = torch.round(values * _INT8_MAX / torch.where(largest > 0, largest, 1.0))
    return (steps * largest / _INT8_MAX).to(weight.dtype)


def _nf4(weight: Tensor) -> Tensor:
    levels = _LEVELS.to(weight.device)
    flat = weight.float().reshape(-1)
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scaled = blocks / torch.where(largest > 0, largest, 1.0)
    nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)
    return (levels[nearest] * largest).reshape(-1)[: len(flat)].view(weight.shape).to(weight.dtype)


def quantised_copy(model: Any, kind: str, routers: Sequence[Router]) -> Any:
    """Copy a model with quantised weights."""
    _check_kind(kind)
    chosen = _chosen(model, kind, routers)
    twin = copy.deepcopy(model).requires_grad_(False)
    twin.train(False)
    _quantise_inside(twin, kind, chosen)
    return twin


def _quantise_inside(model: Any, kind: str, names: set[str]) -> None:
    """Quantise the named parameters of a model in place."""
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        if parameter.is_meta:
            raise RecordError(
                f"shadow {kind}: expected all weights in memory, got '{name}' elsewhere; "
                "load the model without offloading, or leave the shadow out"
            )
        for part in _parts(model, name, parameter.data):
            part.copy_(quantise(part, kind))


def _chosen(model: Any, kind: str, routers: Sequence[Router]) -> set[str]:
    """Names of the parameters to quantise."""
    if kind == "fp16":
        return {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    kept_modules = [m for m in model.modules() if isinstance(m, nn.Embedding)] + [
        model.get_output_embeddings(),
        *(r.module for r in routers),
    ]
    kept = {id(parameter) for module in kept_modules if module is not None for parameter in module.parameters()}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and parameter.is_floating_point() and id(parameter) not in kept and not name.endswith("bias")
    }


def _parts(model: Any, name: str, values: Tensor) -> Iterator[Tensor]:
    """Views of the matrices of a parameter as (n_outputs, n_inputs); of a vector, itself."""
    owner = model.get_submodule(name.rpartition(".")[0])
    for matrix in values.view(-1, *values.shape[-2:]) if values.ndim > 2 else [values]:
        yield matrix.T if values.ndim > 2 and getattr(owner, "is_transposed", False) else matrix
