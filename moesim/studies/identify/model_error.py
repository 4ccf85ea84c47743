"""The model error: how far real speeds lie from predicted ones beyond what a profile's labels say, and which rows share it.

The logarithm of measured over predicted time of a row is what its uncertain constants do to it, a part that all rows of a
machine share, one that rows of a model and a kind of setting share (others the less, the farther their experts' sizes are
apart), and its own. One draw of the machine scales all: together they are Student's t. `model_error.csv` has the deviations.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.hardware import HardwareProfile
from moesim.studies.identify.fit import Fit, Machine, Vector, doubt, two_devices

if TYPE_CHECKING:
    from moesim.studies.identify.cases import Case
    from moesim.studies.identify.predictor import Predictor

FILE: Final = "model_error.csv"
LEVEL: Final = 0.9
"""Share of speeds that lie in their intervals."""


@dataclass(frozen=True)
class ModelError:
    """Deviations of the logarithm of a time, and how heavy their tails are."""

    machine: float = 0.0  # shared by all rows of a machine
    model: float = 0.0  # shared by the rows of one model, and partly by those of others
    row: float = 0.03  # of each row
    prompt: float = 0.0  # shared by the prompts of a machine
    copies: float = 0.0  # shared by rows whose experts are copied
    disk: float = 0.0  # shared by rows whose experts are read from a disk
    freedom: float = math.inf  # degrees of freedom of Student's t
    deviations: float = 0.0  # half the interval of 90 % before any row of a machine; 0: that t's
    deviations_80: float = 0.0  # and of 80 %

    def covariance(self, rows: Sequence[Case], others: Sequence[Case]) -> Vector:
        """Return the covariance of what rows share with others: (rows, others)."""
        found = np.empty((len(rows), len(others)))
        for i, one in enumerate(rows):
            for j, two in enumerate(others):
                apart = abs(math.log(one.expert_bytes / two.expert_bytes)) + (
                    (one.model.name, one.bits) != (two.model.name, two.bits)
                )
                apart += one.setting.family != two.setting.family
                found[i, j] = self.machine**2 + self.model**2 * math.exp(-apart)
                if one.observation.kind == two.observation.kind == "prefill":
                    found[i, j] += self.prompt**2
                elif not (one.static or two.static):
                    found[i, j] += self.copies**2
        return found

    def quantile(self, n: int = 0, level: float = LEVEL) -> float:
        """Return the standard deviations within which that share lies, after n rows of the machine."""
        if n == 0 and (known := {LEVEL: self.deviations, 0.8: self.deviations_80}.get(level)):
            return known
        from scipy.special import ndtri, stdtrit  # takes a third of a second to import

        half = (1 + level) / 2
        return float(ndtri(half) if math.isinf(self.freedom) else stdtrit(self.freedom + n, half))

    def factors(
        self, hardware: HardwareProfile, shares: Mapping[str, float], level: float = LEVEL, prompt: bool = False
    ) -> tuple[float, float]:
        """Return the factors on a predicted speed between which the real one lies; `shares` as of `time_shares`."""
        own = self.machine**2 + self.model**2 + self.row**2 + (self.prompt**2 if prompt else 0.0)
        own += (self.copies * shares.get("copies", 0.0)) ** 2 + (self.disk * shares.get("disk", 0.0)) ** 2
        ends = []
        for slower, sign in ((True, -1), (False, 1)):
            parts = [share * max(doubt(hardware, one, slower=slower) for one in _DECIDES[part]) for part, share in shares.items()]
            ends.append(math.exp(sign * self.quantile(level=level) * math.sqrt(own + sum(part**2 for part in parts))))
        return ends[0], ends[1]


_DECIDES: Final = {
    "cpu": ("cpu_read_rate",), "gpu": ("gpu_read_rate", "gpu_layer"), "copies": ("link_rate",), "disk": ("link_rate",)
}  # fmt: skip
"""Constants that decide how long each part of the time takes."""


def time_shares(row: Mapping[str, Any], hardware: HardwareProfile) -> dict[str, float]:
    """Return the shares of a run's decode time by what takes it: ``cpu``, ``gpu``, and ``copies`` or ``disk``."""
    times = {key: float(row.get(f"decode_time_{key}_ns") or 0) for key in _CAUSES}
    gpu, cpu = two_devices(hardware)
    # Layers without their experts are where the GPU works, if it works at all.
    dense = "gpu" if hardware.devices[gpu].role == "accelerator" and row.get(f"utilisation.{gpu}") else "cpu"
    away = "copies" if hardware.devices[cpu].role == "host" else "disk"
    parts = dict.fromkeys(("cpu", "gpu", away), 0.0)
    for cause, time in times.items():
        parts[{"cpu": "cpu", "gpu": "gpu", "dense": dense, "away": away}[_CAUSES[cause]]] += time
    whole = sum(parts.values()) or 1.0
    return {part: time / whole for part, time in parts.items()}


_CAUSES: Final = {
    "dense": "dense", "gpu_experts": "gpu", "cpu_experts": "cpu", "exposed_demand": "away", "exposed_prefetch": "away",
    "exposed_other_transfer": "away", "activation": "gpu",
}  # fmt: skip


def shipped_rows() -> list[dict[str, str]]:
    """Read the shipped table: name, value and source of each deviation."""
    with (Path(__file__).parent / FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def shipped() -> ModelError:
    """Return the deviations that public rows have."""
    return ModelError(**{row["name"]: float(row["value"]) for row in shipped_rows()})


class Posterior:
    """Predicted logarithms of a machine's times after some rows, these among them."""

    def __init__(
        self, error: ModelError, predictor: Predictor, fit: Fit, used: Sequence[int], still: Machine | None = None
    ) -> None:
        self.error, self.fit, self._predictor, self._used = error, fit, predictor, list(used)
        self._still = still  # the machine with the constants that no row used depends on, where there are such
        shared = predictor.mix @ error.covariance(predictor.cases, predictor.cases) @ predictor.mix.T
        self._inverse = np.linalg.inv((shared + own_variance(error, predictor))[np.ix_(used, used)])
        self._slopes = predictor.slopes(fit.logs)[self._used]
        self._off = (predictor.values(fit.logs) - predictor.observed)[self._used]

    def mean(self, new: Predictor) -> Vector:
        """Return the expected logarithms of new rows."""
        return np.asarray(new.values(self.fit.logs) - self._across(new) @ self._inverse @ self._off, float)

    def _across(self, new: Predictor) -> Vector:
        shared = self.error.covariance(new.cases, self._predictor.cases)
        return np.asarray((new.mix @ shared @ self._predictor.mix.T)[:, self._used], float)

    def joint(self, new: Predictor) -> tuple[Vector, Vector]:
        """Return the covariance of new rows, and that with the constants: (rows, constants)."""
        error, across = self.error, self._across(new)
        weights = across @ self._inverse
        along = new.slopes(self.fit.logs) - weights @ self._slopes
        alone = new.mix @ error.covariance(new.cases, new.cases) @ new.mix.T + own_variance(error, new) - weights @ across.T
        if self._still is not None:
            rest = new.by_others(self._still) * np.sqrt(np.mean(np.square(self._still.sigmas), axis=1))
            alone = alone + rest @ rest.T
        with_constants = along @ self.fit.covariance
        return with_constants @ along.T + self.fit.inflation**2 * alone, with_constants

    def at(self, new: Predictor) -> tuple[Vector, Vector]:
        """Return of new rows the mean, and half the width of the interval."""
        covariance, _ = self.joint(new)
        return self.mean(new), self.error.quantile(len(self._used)) * np.sqrt(np.diag(covariance))


def own_variance(error: ModelError, predictor: Predictor) -> Vector:
    """Return the covariance of what each row has of its own: the model's part, and its spread."""
    rows = [case.observation for case in predictor.cases]
    spreads = [0.0 if one.spread is None else (one.spread / one.value) ** 2 for one in rows]
    return np.asarray(error.row**2 * predictor.mix @ predictor.mix.T + np.diag(spreads), float)
