"""Sweeps of llama.cpp's options on machines of other people: one line of a CSV file a setting, and the run that predicts it.

No speed of a machine goes into its profile. Rows that cannot be predicted are listed with the reason; a setting whose source
says that it exceeds the GPU's memory is no check of speeds, but of whether the simulator refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from moesim.errors import CapacityError, ConfigError
from moesim.studies.validation.public_checks import Check
from moesim.studies.validation.public_predict import predict
from moesim.studies.validation.public_rows import check_run, check_words, read_rows, run_values, shipped_table

SWEEPS: Final = "public_sweeps.csv"
STATUSES: Final = ("predicted", "cliff", "not predicted")
"""A prediction; a setting that exceeds the GPU's memory; one that says too little or needs what is not here."""
RATES: Final = ("measured", "other")
"""Whether the source gives a measured memory rate of the machine."""
PLACES: Final = ("gpu", "mixed", "cpu")
"""Where the layers' experts are: all on the GPU, some on the CPU, everything on the CPU."""
KINDS: Final = ("tg", "pp")
"""Decode and prefill, in the words of llama-bench."""
_DECODE: Final = 8
"""Tokens that a prediction decodes: where nothing moves, each takes the same time but for the growing context."""


@dataclass(frozen=True)
class Sweep:
    """A setting of a machine, what was measured, and the run that predicts it."""

    # check, machine: unique name, and the machine it belongs to
    check: str
    machine: str
    # rate, thin: one of `RATES`; `yes` where machine or method is thinly described
    rate: str
    thin: str
    # model, weights, engine, setting, context, kind, source: what was measured, in words; `kind` is one of `KINDS`
    model: str
    weights: str
    engine: str
    setting: str
    context: str
    kind: str
    measured: float  # tokens/s: speed
    # status, place: one of `STATUSES`, and of `PLACES`. Without a run, `place` and all that follows but `how` is empty or 0
    status: str
    place: str
    # layers_on_cpu, layers: layers whose experts are on the CPU, of how many
    layers_on_cpu: int
    layers: int
    # spec, hardware, policy: as in an experiment; a model's base that ends in `.json` lies beside the table
    spec: Any
    hardware: Any
    routing: str  # parameters of the synthetic routing
    policy: Any
    depth: int  # tokens before the decoded ones
    source: str
    how: str  # what the prediction rests on, or why there is none

    @property
    def curve(self) -> str:
        """Name of the line that the row is a point of: model and weights."""
        return f"{self.model} {self.weights}"


COLUMNS: Final = tuple(field.name for field in fields(Sweep))
_KNOWN: Final = {"rate": RATES, "thin": ("yes", "no"), "kind": KINDS, "status": STATUSES}
_RUN: Final = ("place", "layers_on_cpu", "layers", "spec", "hardware", "routing", "policy", "depth")
_NUMBERS: Final = ("layers_on_cpu", "layers", "depth")


def sweeps_file() -> Path:
    """Return the shipped table of sweeps. Raises `ConfigError` if there is none."""
    return shipped_table(SWEEPS, "the table of public sweeps")


def read_sweeps(path: Path) -> list[Sweep]:
    """Read sweeps."""
    return read_rows(path, COLUMNS, "a table of public sweeps", lambda texts, place: _sweep(texts, place, path.parent))


def _sweep(texts: dict[str, str], place: str, folder: Path) -> Sweep:
    check_words(texts, place, _KNOWN)
    values: dict[str, Any] = {**texts, "measured": _speed(texts["measured"], f"{place}: measured")}
    if not check_run(texts, place, ("machine", "model", "source", "how"), _RUN):
        return Sweep(**values | {"layers_on_cpu": 0, "layers": 0, "depth": 0})
    check_words(texts, place, {"place": PLACES})
    values |= run_values(texts, place, folder, numbers=_NUMBERS, yaml=("spec", "hardware", "policy"))
    if values["layers_on_cpu"] > values["layers"]:
        got = f"{values['layers_on_cpu']} of {values['layers']}"
        raise ConfigError(f"{place}: layers_on_cpu: expected at most the model's layers, got {got}; correct one")
    return Sweep(**values)


def _speed(text: str, place: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not math.isfinite(speed) or speed <= 0:
        raise ConfigError(f"{place}: expected tokens/s above 0, got {text!r}; correct it")
    return speed


def predict_sweep(sweep: Sweep, folder: Path) -> dict[str, Any]:
    """Run the simulator for a setting.

    As of `moesim.studies.validation.public_predict.predict`; for a setting that exceeds the memory only ``refused``.
    """
    check = Check(
        check=sweep.check, row=sweep.machine, model=sweep.model, weights=sweep.weights, machine=sweep.machine,
        setting=sweep.setting, measured=(sweep.measured,), unit="tokens/s", mark="m" if sweep.thin == "yes" else "M",
        source=sweep.source, status=sweep.status, spec=sweep.spec, hardware=sweep.hardware, routing=sweep.routing,
        policy=sweep.policy, cache={"ratio": 1.0}, prompt=sweep.depth, decode=_DECODE, metric="decode_tokens_per_s",
        how=sweep.how,
    )  # fmt: skip
    if sweep.status == "not predicted":
        return {}
    try:
        found = predict(check, folder)
    except CapacityError:
        if sweep.status != "cliff":
            raise
        return {"refused": True}
    return {"refused": False} if sweep.status == "cliff" else found
