"""Quantise weights, and say what the quantised ones stand for: by the definitions of the formats, in float64 of numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FP4 = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
Stored = dict[str, torch.Tensor]


def fp8(codes: np.ndarray) -> np.ndarray:
    """Values of E4M3: a sign, four bits of exponent with a bias of 7, three of mantissa."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 128, -values, values)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Places in a table."""
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middles, values)]


def to_mxfp4(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Quantise a stack (experts, inputs, outputs); give what is stored, and the weight that it stands for."""
    values = weight.double().numpy().swapaxes(1, 2)
    blocks = values.reshape(*values.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    codes = nearest(blocks / 2.0 ** exponents[..., None], FP4)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    meant = (FP4[codes] * 2.0 ** exponents[..., None]).reshape(values.shape).swapaxes(1, 2)
    stored = {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).astype(np.uint8)}
    return {key: torch.tensor(np.ascontiguousarray(value)) for key, value in stored.items()}, torch.tensor(
        meant, dtype=torch.float32
    )


def to_fp8(name: str, weight: torch.Tensor, block: tuple[int, int], suffix: str) -> tuple[Stored, torch.Tensor]:
    """Quantise a weight in blocks; those at the ends may be smaller."""
    values = weight.double().numpy()
    rows, columns = (np.arange(n) // size for n, size in zip(values.shape, block, strict=True))
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, (rows[:, None], columns), (np.abs(values) / 448).astype(np.float32))
    spread = scales[rows[:, None], columns]
    table = fp8(np.arange(256))
    table[[0x7F, 0xFF]] = np.inf, -np.inf  # no numbers
    codes = nearest(values / spread, table).astype(np.uint8)
    meant = fp8(codes).astype(np.float32) * spread  # in float32, as the format's own code does
    stored = {name: torch.tensor(codes).view(torch.float8_e4m3fn), name + suffix: torch.tensor(scales)}
    return stored, torch.tensor(meant)


def save_quantised(
    folder: Path, plain: Path, config: dict[str, Any], quantise: Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor] | None]
) -> None:
    """Write a checkpoint again: quantised into `folder`, and what that stands for in place of the weights that were there."""
    weights = load_file(plain / "model.safetensors")
    stored: Stored = {}
    for name, weight in list(weights.items()):
        made = quantise(name, weight)
        if made is None:
            stored[name] = weight
        else:
            stored |= made[0]
            weights[name] = made[1].contiguous()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    folder.mkdir(exist_ok=True)
    for path in plain.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, config)


def set_config(folder: Path, quantised: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
