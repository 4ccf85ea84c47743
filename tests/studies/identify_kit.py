"""Synthetic observations: true constants drawn around a profile, speeds from the closed form, noise as stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moesim.hardware import read_profile
from moesim.studies.identify.cases import make_cases
from moesim.studies.identify.fit import Machine
from moesim.studies.identify.model_error import ModelError
from moesim.studies.identify.observations import Observation, observation
from moesim.studies.identify.predictor import Memo, Predictor

BASE = "ryzen7950x-rtx4080"
NOISE = ModelError(row=0.03)
"""Of machines that are what the simulator says, but for noise."""
SETTINGS = (
    ("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=0", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=16", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=32", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=48", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "ngl=0", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=48", 8),
    ("qwen3-30b-a3b", "Q8_0", "n_cpu_moe=48", 1),
    ("mixtral-8x7b", "Q4_K_M", "n_cpu_moe=32", 1),
    ("mixtral-8x7b", "Q4_K_M", "n_cpu_moe=20", 1),
    ("mixtral-8x7b", "Q4_K_M", "n_cpu_moe=32", 4),
    ("mixtral-8x7b", "Q4_K_M", "n_cpu_moe=32", 16),
    ("deepseek-v2-lite", "Q8_0", "n_cpu_moe=27", 1),
    ("deepseek-v2-lite", "Q8_0", "ngl=0", 1),
)
ROOMY: dict[str, Any] = {"base": BASE, "devices.gpu0.memory_bytes": "64 GiB"}


def rows(settings: Sequence[tuple[str, str, str, int]] = SETTINGS, **more: Any) -> list[Observation]:
    return [
        observation(
            {"row": str(n), "model": model, "bits": bits, "setting": setting, "batch": batch, "value": 1.0, "unit": "tokens/s"}
            | more
        )
        for n, (model, bits, setting, batch) in enumerate(settings)
    ]


class Truth:
    """A machine near the base, and what it would be observed to do."""

    def __init__(self, settings: Sequence[tuple[str, str, str, int]] = SETTINGS) -> None:
        raw, path, _ = read_profile(ROOMY)
        self.machine = Machine(raw, str(path))
        self.plain = rows(settings)
        self.predictor = Predictor(self.machine, make_cases(self.plain), Memo())

    def draw(self, seed: int) -> tuple[dict[str, float], list[Observation]]:
        """Draw constants from their priors, and observations with noise."""
        rng = np.random.default_rng(seed)
        below, above = np.array([constant.sigmas for constant in self.machine.constants]).T
        side = np.where(rng.random(len(below)) < below / (below + above), -below, above)  # of two halves that meet at the base
        logs = side * np.abs(rng.standard_normal(len(side)))
        times = self.predictor.values(logs) + NOISE.row * rng.standard_normal(len(self.plain))
        observed = [
            one.model_copy(update={"value": one.batch / math.exp(time) * 1e9})
            for one, time in zip(self.plain, times, strict=True)
        ]
        true = {c.name: c.base * math.exp(log) for c, log in zip(self.machine.constants, logs, strict=True)}
        return true, observed
