"""What the quantised weights of a checkpoint stand for: MXFP4, and FP8 with a scale for a block, a row or a whole weight.

Each is dequantised by its definition, in float32, and rounded to the model's type once. Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesim.recorder.errors import RecordError

#: Values of the 16 codes of FP4 (E2M1): a sign, two bits of exponent, one of mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_CODES = torch.cat([_E2M1, -_E2M1])
#: Values of the two codes in each byte, the lower four bits first; both are looked up as one number of 64 bits.
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=1).view(torch.int64).flatten()
#: Types of weights that are not quantised, as safetensors calls them.
FLOATS = ("F64", "F32", "F16", "BF16")
_BLOCK = 32  # values of MXFP4 that share a scale
_E8M0_BIAS = 127
_SUFFIXES = ("_scale", "_scale_inv")  # of the keys of scales of FP8, after those of their weights
_PIECE = 2**20  # values that are dequantised at once
#: Bytes at most for what is dequantised at once, beside codes and result.
WORKING_BYTES = 16 * _PIECE
_TOLD = ("format", "bits", "load_in_4bit", "load_in_8bit", "expert_dtype")
"""Of a configuration that is refused, what is told beside its method."""


@dataclass(frozen=True)
class Mxfp4:
    """A stack of weights: blocks of 32 FP4 codes, two a byte, and a power of two for each block."""

    code_types: ClassVar = ("U8",)
    scale_types: ClassVar = ("U8",)

    def __str__(self) -> str:
        return f"MXFP4 in blocks of {_BLOCK}"

    def scales_of(self, keys: Collection[str]) -> dict[str, tuple[str, str]]:
        """Find the weights, by name: keys of codes and of scales."""
        names = [key.removesuffix("_blocks") for key in keys if key.endswith("_blocks")]
        return {name: (f"{name}_blocks", f"{name}_scales") for name in names if f"{name}_scales" in keys}

    def shape(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
        """Give the shape of the weight; None: the two do not fit together."""
        if len(codes) != 4 or codes[:-1] != scales or codes[-1] != _BLOCK // 2:
            return None
        return codes[0], codes[2] * _BLOCK, codes[1]

    def pieces(self, codes: Tensor, scales: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Dequantise one of a stack to float32, in pieces with their places; the model has the transpose."""
        for rows in _pieces(len(codes), codes[0].numel() * 2):
            values = _PAIRS.index_select(0, codes[rows].flatten().int()).view(torch.float32).view(*scales[rows].shape, _BLOCK)
            values *= (scales[rows].float() - _E8M0_BIAS).exp2()[..., None]  # 255, which is no number, gives infinity
            yield (slice(None), rows), values.flatten(-2).T


@dataclass(frozen=True)
class Fp8:
    """Codes in E4M3, each times the scale of its block."""

    code_types: ClassVar = ("F8_E4M3",)
    scale_types: ClassVar = (*FLOATS, "F8_E8M0")

    block: tuple[int, int] | None = None  # None: a scale for the whole weight, or for each row

    def __str__(self) -> str:
        return "FP8 with a scale for a weight or a row" if self.block is None else "FP8 in blocks of {} x {}".format(*self.block)

    def scales_of(self, keys: Collection[str]) -> dict[str, tuple[str, str]]:
        """Find the weights, by name: keys of codes and of scales."""
        return {key: (key, key + suffix) for suffix in _SUFFIXES for key in keys if key + suffix in keys}

    def shape(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
        """Give the shape of the weight; None: the two do not fit together."""
        return codes if len(codes) == 2 and self._block(codes, scales) is not None else None

    def _block(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        n_rows, n_columns = codes
        if self.block is None:
            if scales in ((), (1,), (1, 1)):
                return n_rows, n_columns
            return (1, n_columns) if scales in ((n_rows, 1), (n_rows,)) else None
        return self.block if scales == (ceil(n_rows / self.block[0]), ceil(n_columns / self.block[1])) else None

    def pieces(self, codes: Tensor, scales: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Dequantise one weight to float32, in pieces with their places."""
        n_rows, n_columns = codes.shape
        block = self._block((n_rows, n_columns), tuple(scales.shape))
        assert block is not None  # the shapes were checked before
        grid = scales.float().reshape(ceil(n_rows / block[0]), -1)
        for rows in _pieces(n_rows, n_columns):
            scale = grid[torch.arange(n_rows)[rows] // block[0]]
            yield rows, codes[rows].float() * scale.repeat_interleave(block[1], dim=1)[:, :n_columns]


Rule = Mxfp4 | Fp8


def _pieces(n_rows: int, n_columns: int) -> Iterator[slice]:
    step = max(1, _PIECE // n_columns)
    for first in range(0, n_rows, step):
        yield slice(first, min(first + step, n_rows))


def find_rule(config: Any, name: str) -> Rule | None:
    """Find out how a checkpoint is quantised; None: not at all."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return None
    stated: dict[str, Any] = quantised.to_dict() if hasattr(quantised, "to_dict") else dict(quantised)
    method = getattr(stated.get("quant_method"), "value", stated.get("quant_method"))
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and stated.get("expert_dtype", "fp8") == "fp8":
        return Fp8(_block(stated.get("weight_block_size")))
    if method == "compressed-tensors" and stated.get("format") == "float-quantized":
        groups = [group.get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
        blocks = {_block(weights.get("block_structure")) for weights in groups}
        if len(blocks) == 1 and all(map(_is_fp8, groups)):
            return Fp8(blocks.pop())
    told = [str(method), *(f"{key} {stated[key]}" for key in _TOLD if stated.get(key))]
    raise RecordError(
        f"{name}: --stream-layers: expected weights that are not quantised, or are in MXFP4 or FP8, got {', '.join(told)}; "
        "leave the option out, or use a checkpoint in bfloat16"
    )


def _block(stated: Any) -> tuple[int, int] | None:
    if stated is None:
        return None
    if not (isinstance(stated, list | tuple) and len(stated) == 2 and all(type(n) is int and n > 0 for n in stated)):
        raise ValueError(f"blocks of {stated} in its quantization_config instead of two positive numbers")
    return stated[0], stated[1]


def _is_fp8(weights: Mapping[str, Any]) -> bool:
    kinds = weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)
    return kinds == ("float", 8, True) and weights.get("strategy") in ("tensor", "channel", "block")
