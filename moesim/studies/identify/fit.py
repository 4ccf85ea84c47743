"""The most likely constants: observed rows and priors in one sum of squares, in logarithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from moesim.studies.identify.constants import Z90, Priors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.studies.identify.predictor import Predictor

    Vector = NDArray[Any]

UNKNOWN_SPREAD: Final = 0.03
"""One standard deviation of an observation whose spread is not known, as a share of its value."""

MODEL_ERROR: Final = 0.02
"""What the simulator itself is believed to miss a real speed by, added in squares to a known spread."""

_FAR: Final = 8.0
"""Bounds of the search, in standard deviations of the prior."""


@dataclass(frozen=True)
class Fit:
    """The optimum."""

    logs: Vector  # logarithm of each constant's factor
    squares: float  # sum of squares there, priors included
    covariance: Vector  # of the logarithms, around the optimum
    slopes: Vector  # of the rows' values, (rows, constants)
    inflation: float  # by how much rows scatter more than their spreads say; at least 1


def spreads(predictor: Predictor) -> Vector:
    """Give one standard deviation of the logarithm of each row."""
    return np.array([row_spread(case.observation.spread, case.observation.value) for case in predictor.cases])


def row_spread(spread: float | None, value: float) -> float:
    """Give one standard deviation of the logarithm of a value."""
    return UNKNOWN_SPREAD if spread is None else float(np.hypot(spread / value, MODEL_ERROR))


def softened(off: Vector) -> Vector:
    """Shrink residuals to the roots of SciPy's ``soft_l1``: their squares grow like the residual where it is large."""
    found: Vector = off * np.sqrt(2 / (1 + np.sqrt(1 + off**2)))
    return found


class Told(Protocol):
    """What tells the logarithms of rows, and their derivatives, from the logarithms of constants' factors."""

    @property
    def priors(self) -> Priors: ...
    @property
    def observed(self) -> Vector: ...
    def values(self, logs: Vector) -> Vector: ...
    def slopes(self, logs: Vector, *, both: bool = False) -> Vector: ...


class Problem:
    """Some rows of a predictor, and the priors."""

    def __init__(self, predictor: Told, rows: list[int], sigma: Vector, loss: Literal["linear", "soft_l1"] = "linear") -> None:
        self.predictor = predictor
        self.rows = rows
        self.sigma = sigma[rows]
        self.priors = predictor.priors
        self.inflation = 1.0
        self.loss = loss

    def residuals(self, logs: Vector) -> Vector:
        """Residuals of rows, then of priors, in standard deviations."""
        off = self._off(logs)
        return np.concatenate([softened(off) if self.loss == "soft_l1" else off, logs / self.priors.at(logs)])

    def _off(self, logs: Vector) -> Vector:
        found: Vector = (self.predictor.values(logs) - self.predictor.observed)[self.rows] / (self.sigma * self.inflation)
        return found

    def slopes(self, logs: Vector) -> Vector:
        """Derivatives of `residuals`."""
        rows = self.predictor.slopes(logs)[self.rows] / (self.sigma * self.inflation)[:, None]
        if self.loss == "soft_l1":
            root = np.sqrt(1 + self._off(logs) ** 2)
            rows = rows * (np.sqrt((1 + root) / 2) / root)[:, None]  # the derivative of `softened`
        return np.vstack([rows, np.diag(1 / self.priors.at(logs))])

    def fit(self, start: Vector | None = None, *, inflate: bool = True) -> Fit:
        """Find the optimum; scatter beyond what spreads say widens them, and the optimum is found again."""
        logs = self._search(np.zeros(len(self.priors.below)) if start is None else start)
        if inflate:
            slopes = self.slopes(logs)
            off = self.residuals(logs)[: len(self.rows)]
            told = float(np.sum(1 - np.diag(np.linalg.inv(slopes.T @ slopes)) / self.priors.at(logs) ** 2))
            free = len(self.rows) - told
            scatter = float(off @ off) / free if free >= 1 else 1.0
            if scatter > 1:
                self.inflation = float(np.round(np.sqrt(scatter), 9))
                logs = self._search(logs)
        full = self.predictor.slopes(logs, both=True)
        rows = full[self.rows] / (self.sigma * self.inflation)[:, None]
        information = rows.T @ rows + np.diag(self.priors.at(logs) ** -2.0)
        off = self.residuals(logs)
        covariance = np.round(np.linalg.inv(information), 12)  # as in `_search`
        return Fit(logs, float(off @ off), np.asarray(covariance, float), full, self.inflation)

    def _search(self, start: Vector) -> Vector:
        if not len(start):
            return start
        from scipy.optimize import least_squares  # takes most of a second to import, and an advice needs none

        low, high = -_FAR * self.priors.below, _FAR * self.priors.above
        found = least_squares(
            self.residuals,
            np.clip(start, 0.99 * low, 0.99 * high),
            jac=self.slopes,
            bounds=(low, high),
            x_scale=(self.priors.below + self.priors.above) / 2,
            xtol=1e-4,
            ftol=1e-5,
            gtol=1e-4,
            max_nfev=60,
        )
        # Libraries add in an order that suits the processor. Digits that differ are far below the tolerance: they are cut.
        return np.round(np.asarray(found.x, float), 9)

    def interval(self, fit: Fit, k: int) -> tuple[float, float]:
        """Find where the sum of squares, least over all other constants, rises by 1.645 squared: nine of ten by likelihood."""
        low = self._side(fit, k, -1.0)
        high = self._side(fit, k, 1.0)
        return low, high

    def _side(self, fit: Fit, k: int, sign: float) -> float:
        """Follow the valley outwards from the optimum, other constants by chords with the slopes of the optimum."""
        # Where rows say nothing of a constant the first step rises by just this much, give or take the last digit.
        rise, step = Z90**2 * (1 + 1e-6), Z90 * float(np.sqrt(fit.covariance[k, k]))
        others = [j for j in range(len(fit.logs)) if j != k]
        rows = fit.slopes[self.rows] / (self.sigma * self.inflation)[:, None]
        along = fit.covariance[:, k] / fit.covariance[k, k]

        def least(distance: float) -> float:
            logs = fit.logs + sign * distance * along
            best = np.inf
            for _ in range(4):
                off = self.residuals(logs)
                now = float(off @ off)
                if now > best - 1e-3:
                    return min(now, best)
                best = now
                logs = logs.copy()
                slopes = np.vstack([rows, np.diag(1 / self.priors.at(logs))])
                logs[others] -= np.linalg.lstsq(slopes[:, others], off)[0]
            return best

        near, far = 0.0, step
        base = fit.squares
        for _ in range(6):
            if least(far) - base >= rise:
                break
            near, far = far, 1.6 * far
        for _ in range(5):
            middle = 0.5 * (near + far)
            near, far = (near, middle) if least(middle) - base >= rise else (middle, far)
            if far - near < 0.03 * far:
                break
        return float(fit.logs[k] + sign * 0.5 * (near + far))
