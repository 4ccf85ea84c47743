"""Arithmetic of synthetic routing, which is the same to the bit on every machine.

A last bit decides between experts, so only operations that IEEE 754 rounds exactly are used; sums and products that a library
may order freely are of numbers on a grid, and random numbers come from a generator's raw bits, which NumPy keeps.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]

GRID: Final = 2.0**-12
"""Of states, means and router weights: products are multiples of its square, of which float64 holds 2^53."""
_QUANTILES: Final = 2**16
_QUANTILE_GRID: Final = 2.0**-20
"""Of the normal quantiles: far coarser than errors of `inv_cdf`, so that all machines round to the same."""
_LOG2: Final = (0.6931471803691238, 1.9082149292705877e-10)
"""Upper bits of the logarithm of 2, whose product with a small integer is exact, and the rest."""
_POWERS_PER_UNIT: Final = 4096
_LEAST_POWER: Final = 18
"""Smaller than half of the smallest float16 are powers of e below minus this."""


def _normal_quantiles() -> F64:
    lower = [NormalDist().inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES // 2)]
    on_grid = np.rint(np.asarray(lower) / _QUANTILE_GRID) * _QUANTILE_GRID
    return np.concatenate([on_grid, -on_grid[::-1]]).astype(np.float64)


_NORMAL64: Final = _normal_quantiles()
_NORMAL: Final = _NORMAL64.astype(np.float32)


class Draws:
    """Random numbers of one stream; a seed and a key name it."""

    def __init__(self, seed: int, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))

    def raw(self, n: int) -> NDArray[np.uint64]:
        """Draw 64 bits each."""
        return np.asarray(self._bits.random_raw(n), np.uint64)

    def normals(self, *shape: int) -> F32:
        """Draw normal quantiles of 16 bits each, at most 4.33 away."""
        n = math.prod(shape)
        parts = self.raw(-(-n // 4)).astype("<u8", copy=False).view("<u2")[:n]
        return _NORMAL.take(parts, mode="clip").reshape(shape)  # all are within; "raise" takes four times as long

    def uniforms(self, n: int) -> F64:
        """Draw from [0, 1), on a grid of 2^-53."""
        return np.asarray((self.raw(n) >> np.uint64(11)) * 2.0**-53, np.float64)

    def order(self, n: int) -> NDArray[np.int64]:
        """Draw a permutation."""
        return np.argsort(self.raw(n), kind="stable")


def normal_quantiles(n: int) -> F64:
    """Return the normal quantiles at (i + 1/2) / n."""
    place = np.clip((np.arange(n) + 0.5) / n * _QUANTILES - 0.5, 0, _QUANTILES - 1)
    below = np.minimum(place.astype(np.int64), _QUANTILES - 2)
    part = place - below
    return np.asarray(_NORMAL64[below] * (1 - part) + _NORMAL64[below + 1] * part, np.float64)


def on_grid(values: ArrayLike) -> F64:
    """Round to multiples of `GRID`, whose sums and products are exact."""
    return np.asarray(np.rint(np.multiply(values, 1 / GRID, dtype=np.float64)) * GRID, np.float64)


def total(values: Iterable[float] | NDArray[Any]) -> float:
    """Add numbers up and round once."""
    return math.fsum(values.tolist() if isinstance(values, np.ndarray) else values)


def exp(values: ArrayLike) -> F64:
    """Compute powers of e to about 1e-15."""
    x = np.asarray(values, np.float64)
    twos = np.rint(x / (_LOG2[0] + _LOG2[1]))
    rest = (x - twos * _LOG2[0]) - twos * _LOG2[1]
    series = np.ones_like(rest)
    for k in range(13, 0, -1):
        series = 1 + series * rest / k
    return np.asarray(np.ldexp(series, twos.astype(np.int64)), np.float64)


def log(values: ArrayLike) -> F64:
    """Compute natural logarithms to about 1e-15."""
    x = np.asarray(values, np.float64)
    part, twos = np.frexp(x)
    y = (twos + 2 * part - 2) * _LOG2[0]
    for _ in range(3):  # errors of 6e-2, 2e-5, 1e-15
        power = exp(y)
        y = y + 2 * (x - power) / (x + power)
    return np.asarray(y, np.float64)


_POWERS: Final = np.rint(exp(-np.arange(_LEAST_POWER * _POWERS_PER_UNIT + 1) / _POWERS_PER_UNIT) * 2.0**24).astype(np.float32)


def powers(logits: F32, largest: F32) -> F32:
    """Compute e^(logit - largest) in units of 2^-24, as integers."""
    steps = (largest - logits) * np.float32(_POWERS_PER_UNIT)
    steps += np.float32(0.5)
    np.minimum(steps, np.float32(len(_POWERS) - 1), out=steps)
    return np.asarray(_POWERS.take(steps.astype(np.int32), mode="clip"), np.float32)


def softmax(logits: F32) -> F32:
    """Compute the softmax over the last axis; (..., n) float32."""
    found = powers(logits, logits.max(axis=-1, keepdims=True))
    return np.asarray(found / found.sum(axis=-1, keepdims=True, dtype=np.float64), np.float32)
