"""Constants of experts of any shape, from measured times of experts by rows: see `moesim.hardware.costs.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

FEW: Final = 8
"""Rows up to which they are few: kernels for one row are used up to about here, by the engines whose source says so."""


@dataclass(frozen=True)
class Curve:
    """Measured times of one shape."""

    n_bytes: int  # of an expert
    operations: int  # of one row
    rows: NDArray[np.int64]  # shape (n,)
    us: NDArray[np.float64]  # shape (n,)


@dataclass(frozen=True)
class Line:
    """What `linear` finds; times in us, rates a second, ``many_row_flops`` None if no more than `FEW` rows were measured."""

    per_expert_us: float
    per_row_us: float
    read_bytes_per_s: float
    few_row_flops: float
    many_row_flops: float | None


def linear(curves: Sequence[Curve]) -> Line | None:
    """Fit the constants by least squares of relative errors, none of them negative."""
    few = [(c, n, us) for c in curves for n, us in zip(c.rows, c.us, strict=True) if n <= FEW]
    if not any(n == 1 for _, n, _ in few) or all(n == 1 for _, n, _ in few):
        return None
    sizes = len({c.n_bytes for c, _, _ in few}) > 1
    # Columns: 1 / read rate, 1 / few-row rate, and of several sizes what an expert and what a row takes; in us.
    matrix = np.array([[c.n_bytes * 1e6, (n - 1) * c.operations * 1e6, float(sizes), float(sizes) * (n - 1)] for c, n, _ in few])
    found = _relative(matrix, np.array([us for _, _, us in few]))
    many = _many(curves)
    slope = found[1] or (1 / many if many else 0.0)  # no slope among few rows: no slower than many
    if not found[0] or not slope:
        return None
    return Line(found[2], found[3], 1 / found[0], 1 / slope, None if many is None else max(many, 1 / slope))


def _many(curves: Sequence[Curve]) -> float | None:
    """Find the operations a second of rows beyond few: the slope of each curve there."""
    parts = [(c, c.rows > FEW) for c in curves if (c.rows > FEW).sum() > 1]
    if not parts:
        return None
    columns = len(parts) + 1
    rows, times = [], []
    for place, (curve, beyond) in enumerate(parts):
        for n, us in zip(curve.rows[beyond], curve.us[beyond], strict=True):
            line = [0.0] * columns
            line[0], line[1 + place] = n * curve.operations * 1e6, 1.0
            rows.append(line)
            times.append(us)
    slope = _relative(np.array(rows), np.array(times))[0]
    return 1 / slope if slope else None


def _relative(matrix: NDArray[np.float64], times: NDArray[np.float64]) -> list[float]:
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(matrix / scale / times[:, None], np.ones(len(times)))
    return [float(value) for value in found / scale]
