"""One routed expert as a real computation: its bytes in one flat buffer, bound as matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moesim.live.kernels.memory import byte_block, generator, normal_block, tile
from moesim.live.kernels.plans import ExpertShape, KernelError

Weights = tuple[Tensor, ...]  # the matrices of one expert (gate, up, down; or up, down), as views of its flat buffer

_BYTE_STD, _NIBBLE_STD = math.sqrt((256**2 - 1) / 12), math.sqrt((16**2 - 1) / 12)  # of even distributions
_STRIDE = 7919  # matrices begin so far apart in a block of random numbers: it is prime to the block's length
_GROUPS = (128, 64, 32)  # weights along a row that share scale and zero point, in 4 bits
_INNER_TILES = (8, 4, 2)  # tiles of 16 in the layout of torch's CUDA kernel for 4 bits


class ExpertKernel:
    """Fills, binds and multiplies experts of one shape on one kind of device."""

    # Weights of 8 and 4 bits are integers in the layout of torch's mixed-precision products; their
    # scales are constants outside the flat buffer, which has exactly the model's bytes. Biases have
    # room there, and are not added.

    act_dtype: torch.dtype  # of inputs and outputs: bfloat16, or float32 for weights of 32 bits

    def __init__(self, shape: ExpertShape, device: str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.act_dtype = torch.float32 if shape.bits == 32 else torch.bfloat16
        up, down = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        self._matrices = [up] * (shape.n_mats - 1) + [down]  # (out, in) each
        self._multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = _plain
        self._stored, self._views = self.act_dtype, list[tuple[int, ...]](self._matrices)
        self._scales = [torch.empty(0)] * shape.n_mats
        self._blocks: list[Tensor] = []
        if shape.bits == 8:
            self._prepare_8_bits()
        elif shape.bits == 4:
            self._prepare_4_bits()
        self._sizes = [int(out * inner * shape.bits) // 8 for out, inner in self._matrices]

    def fill(self, flat: Tensor, seed: int) -> None:
        """Write random weights: finite, of deviation 1/sqrt(inputs), repeating after a block."""
        if not self._blocks:  # drawn once: drawing anew for thousands of experts would take minutes
            self._blocks = self._draw()
        start = 0
        for i, (size, block) in enumerate(zip(self._sizes, self._blocks, strict=True)):
            tile(flat[start : start + size].view(block.dtype), block, _STRIDE * (seed * len(self._sizes) + i))
            start += size
        flat[start:].zero_()

    def bind(self, flat: Tensor) -> Weights:
        """See a flat buffer as matrices; nothing is copied."""
        if flat.numel() != self.shape.n_bytes:
            raise ValueError(f"an expert of this shape has {self.shape.n_bytes} bytes, the buffer has {flat.numel()}")
        parts = torch.split(flat[: sum(self._sizes)], self._sizes)
        return tuple(part.view(self._stored).view(view) for part, view in zip(parts, self._views, strict=True))

    def run(self, weights: Weights, x: Tensor) -> Tensor:
        """Compute down(silu(gate(x)) * up(x)) with three matrices, down(gelu(up(x))) with two."""
        multiply, scales = self._multiply, self._scales
        if len(weights) == 2:
            return multiply(F.gelu(multiply(x, weights[0], scales[0])), weights[1], scales[1])
        inner = F.silu(multiply(x, weights[0], scales[0]), inplace=True).mul_(multiply(x, weights[1], scales[1]))
        return multiply(inner, weights[2], scales[2])

    def _draw(self) -> list[Tensor]:
        source = generator(0)
        if self.shape.bits < 16:
            return [byte_block(source).to(self.device)] * len(self._matrices)
        return [normal_block(1 / math.sqrt(inner), self._stored, source).to(self.device) for _, inner in self._matrices]

    def _prepare_8_bits(self) -> None:
        self._require("_weight_int8pack_mm")
        self._multiply, self._stored = _int8, torch.int8
        self._scales = [self._constant((out,), 1 / (_BYTE_STD * math.sqrt(inner))) for out, inner in self._matrices]

    def _prepare_4_bits(self) -> None:
        inputs = (self.shape.hidden, self.shape.intermediate)
        if any(width % 32 for width in inputs):
            raise KernelError(
                f"experts of 4 bits: expected widths divisible by 32, got hidden and intermediate {inputs}; choose 8 bits"
            )
        self._scales = []
        for out, inner in self._matrices:
            group = next(size for size in _GROUPS if inner % size == 0)
            scale = 1 / (_NIBBLE_STD * math.sqrt(inner))
            both = self._constant((inner // group, out, 2), scale)  # scale, and a zero point that makes the mean 0:
            both[..., 1] = scale / 2  # a weight is (nibble - 8) * scale + zero
            self._scales.append(both)
        if self.device.type == "cpu":
            self._require("_weight_int4pack_mm_for_cpu")
            self._multiply, self._stored = _int4_cpu, torch.uint8
            self._views = [(out, inner // 2) for out, inner in self._matrices]
        else:
            self._require("_weight_int4pack_mm")
            self._multiply, self._stored = _int4_cuda, torch.int32
            self._views = [_cuda_tiles(out, inner) for out, inner in self._matrices]

    def _constant(self, shape: tuple[int, ...], value: float) -> Tensor:
        return torch.full(shape, value, dtype=torch.bfloat16, device=self.device)

    def _require(self, operator: str) -> None:
        key = self.device.type.upper()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key):
            raise KernelError(
                f"experts of {self.shape.bits:g} bits on {self.device}: expected the operator {operator} in torch"
                f" {torch.__version__}, got none for {key}; choose 16 bits"
            )
        if key == "CUDA" and self.shape.bits == 4 and torch.cuda.get_device_capability(self.device) < (8, 0):
            raise KernelError(
                f"experts of 4 bits on {self.device}: expected compute capability 8.0 or more (Ampere), got"
                f" {'.'.join(map(str, torch.cuda.get_device_capability(self.device)))}; choose 16 bits"
            )


def _cuda_tiles(out: int, inner: int) -> tuple[int, ...]:
    tiles = next(n for n in _INNER_TILES if inner % (16 * n) == 0)
    return out // 8, inner // (16 * tiles), 32, tiles // 2  # of int32, eight weights each


def _group(x: Tensor, scales: Tensor) -> int:
    return x.shape[1] // scales.shape[0]


def _plain(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return F.linear(x, weight)


def _int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return torch._weight_int8pack_mm(x, weight, scales)


def _int4_cpu(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, _group(x, scales), scales)
    return result


def _int4_cuda(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._weight_int4pack_mm(x, weight, _group(x, scales), scales)
    return result


def serve(kernel: ExpertKernel, weights: Weights, x: Tensor, rows: Tensor, gates: Tensor, sums: Tensor) -> None:
    """Serve some rows by one expert, as a Run of one expert does."""
    outputs = kernel.run(weights, x.index_select(0, rows))
    sums.index_add_(0, rows, outputs.mul_(gates.unsqueeze(1)))
