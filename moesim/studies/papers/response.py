"""How the printed rows of a paper answer to constants: a formula around the base, moved to what the engine says elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from moesim.studies.identify.constants import Constant, Priors, Vector

_STEP: Final = 0.7
"""The engine is asked this far from the base, of a constant's logarithm, or two standard deviations if that is less."""

_LEAST: Final = 0.05  # of a row's time that is left, however cheap a constant becomes


@dataclass(frozen=True)
class Point:
    """A machine: logarithms of the constants' factors, and bits by model where they are free."""

    logs: tuple[float, ...]
    bits: tuple[tuple[str, float], ...] = ()


def point_at(logs: Vector, bits: tuple[tuple[str, float], ...]) -> Point:
    """Round a machine: last digits depend on how arrays lie in memory, and runs are found again by their constants."""
    return Point(tuple(round(float(log), 5) for log in logs), bits)


@dataclass(frozen=True)
class Response:
    """Logarithms of all rows as functions of those of the constants' factors.

    With one constant dearer by a factor f, a time with a share s of it becomes 1 + s (f - 1) times as long. A row that falls is
    taken as the inverse of one that rises.
    """

    observed: Vector
    priors: Priors
    dearer: Vector  # 1 for costs, -1 for rates
    signs: Vector  # rows x constants
    shares: Vector
    base: Vector
    secants: Vector  # added to the slopes

    @classmethod
    def around_base(
        cls, observed: Vector, constants: Sequence[Constant], ask: Callable[[Sequence[Point]], list[Vector]],
        bits: tuple[tuple[str, float], ...],
    ) -> Response:  # fmt: skip
        priors = Priors.of(constants)
        dearer = np.array([-1.0 if constant.unit.endswith("/s") else 1.0 for constant in constants])
        step = np.minimum(2 * priors.at(dearer), _STEP)
        middle, *others = ask([point_at(move, bits) for move in (0 * step, *np.diag(dearer * step))])
        change = np.array(others).T - middle[:, None]
        shares = np.expm1(np.abs(change)) / np.expm1(step)
        return cls(observed, priors, dearer, np.sign(change), shares, middle, 0 * shares)

    def _left(self, logs: Vector) -> Vector:
        found: Vector = np.maximum(1 + self.shares * np.expm1(self.dearer * logs), _LEAST)
        return found

    def values(self, logs: Vector) -> Vector:
        """Give the logarithm of each row."""
        found: Vector = self.base + (self.signs * np.log(self._left(logs))).sum(axis=1) + self.secants @ logs
        return found

    def slopes(self, logs: Vector, *, both: bool = False) -> Vector:
        """Give the derivatives, (rows, constants)."""
        found: Vector = self.signs * self.dearer * self.shares * np.exp(self.dearer * logs) / self._left(logs) + self.secants
        return found

    def through(self, logs: Vector, values: Vector, since: Vector | None = None) -> Response:
        """Move it to what the engine says at a point; given the point before, it goes on through that one (Broyden's update)."""
        off, secants = values - self.values(logs), self.secants
        if since is not None:
            move = (logs - since) / self.priors.at(logs) ** 2
            secants = secants + np.outer(off, move) / (move @ (logs - since))
            off = off - (secants - self.secants) @ logs
        return replace(self, base=self.base + off, secants=secants)
