"""The tables of public measurements: single figures (``public.csv``) and sweeps of llama.cpp's options (``public_sweeps.csv``).

One line a check, with what predicts it or why nothing can. No speed of a machine goes into its profile. A setting whose
source says that it exceeds the GPU's memory is no check of speeds, but of whether the simulator refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final, TypeVar

from moesim.core.csv_reader import read_lines
from moesim.core.data import data_dirs
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name

FOLDER = "validation"  # below experiments

Row = TypeVar("Row")


def shipped_table(name: str, what: str) -> Path:
    """Return a shipped table. Raises `ConfigError` if there is none."""
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / name).is_file():
            return folder / FOLDER / name
    raise ConfigError(f"experiments/{FOLDER}/{name}: expected {what}, got no such file")


def read_rows(path: Path, columns: Sequence[str], what: str, build: Callable[[dict[str, str], str], Row]) -> list[Row]:
    """Read a table whose rows have names of their own."""
    lines = list(read_lines(path, columns, what))
    found = [build(texts, place) for texts, place in lines]
    names = [texts["check"] for texts, _ in lines]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: check: expected each name once, got '{name}' {names.count(name)} times; rename one")
    return found


def check_words(texts: Mapping[str, str], place: str, known: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` unless each of these columns has one of its words."""
    for key, words in known.items():
        if texts[key] not in words:
            raise ConfigError(f"{place}: {key}: {unknown_name(key, texts[key], words)}")


def check_run(texts: Mapping[str, str], place: str, needed: Sequence[str], run: Sequence[str]) -> bool:
    """Return whether a row has a run, whose columns are then complete; otherwise they are empty."""
    runs = texts["status"] != "not predicted"
    for key in (*needed, *(run if runs else ())):
        if not texts[key]:
            raise ConfigError(f"{place}: {key}: expected a value, got nothing; every row of this status needs one")
    for key in () if runs else run:
        if texts[key]:
            raise ConfigError(f"{place}: {key}: expected nothing where nothing is predicted, got {texts[key]!r}; remove it")
    return runs


def run_values(
    texts: Mapping[str, str], place: str, folder: Path, *, numbers: Sequence[str], yaml: Sequence[str], least: int = 0
) -> dict[str, Any]:
    """Read the columns of a run that are more than text."""
    values: dict[str, Any] = {}
    for key in numbers:
        if not texts[key].isdecimal() or int(texts[key]) < least:
            bound = f" of at least {least}" if least else ""
            raise ConfigError(f"{place}: {key}: expected a whole number{bound}, got {texts[key]!r}; correct it")
        values[key] = int(texts[key])
    for key in yaml:
        values[key] = read_yaml_value(texts[key], f"{place}: {key}")
    spec = values["spec"]
    if isinstance(spec, dict) and str(spec.get("base", "")).endswith(".json"):
        values["spec"] = spec | {"base": str(folder / spec["base"])}
    return values


FILE = "public.csv"
STATUSES = ("predicted", "calibration", "not predicted")
"""A prediction; a run from which numbers of its own profile come; a measurement that says too little."""

MARKS = ("M", "m", "W")
"""Measured with method and machine stated; either of them thin; a secondary page."""

METRICS = ("decode_tokens_per_s", "prefill_tokens_per_s")


@dataclass(frozen=True)
class Check:
    """A measurement, and the run that predicts it."""

    # check, row: unique name, and the number of the table row it belongs to
    check: str
    row: str
    # model, weights, machine, setting: what was measured, in words
    model: str
    weights: str
    machine: str
    setting: str
    measured: tuple[float, ...]  # tokens/s: more than one: two engines, or a range
    # unit, mark, source: unit, how well the measurement is described (`MARKS`), and where it was found
    unit: str
    mark: str
    source: str
    status: str  # one of `STATUSES`. Without a prediction all that follows is empty, but for `how`
    # spec, hardware, policy, cache: as in an experiment; a model's base that ends in `.json` lies beside the table
    spec: Any
    hardware: Any
    routing: str  # name of the parameters of the synthetic routing, whose shape becomes the model's
    policy: Any
    cache: Any
    # prompt, decode: tokens
    prompt: int
    decode: int
    metric: str  # one of `METRICS`
    how: str  # what the prediction rests on, or why there is none

    @property
    def value(self) -> float:
        """Measured value, tokens/s: the geometric mean if there are several."""
        return self.measured[0] if len(self.measured) == 1 else geometric_mean(self.measured)

    @property
    def profile(self) -> str:
        """Name of the hardware profile; empty without a prediction."""
        return str(self.hardware["base"] if isinstance(self.hardware, Mapping) else self.hardware or "")


COLUMNS = tuple(field.name for field in fields(Check))
_RUN = ("spec", "hardware", "routing", "policy", "cache", "prompt", "decode", "metric")  # empty without a prediction
_YAML = ("spec", "hardware", "policy", "cache")


def checks_file() -> Path:
    """Return the shipped table of public measurements. Raises `ConfigError` if there is none."""
    return shipped_table(FILE, "the table of public measurements")


def read_checks(path: Path) -> list[Check]:
    """Read public measurements."""
    return read_rows(path, COLUMNS, "a table of public measurements", lambda texts, place: _check(texts, place, path.parent))


def _check(texts: dict[str, str], place: str, folder: Path) -> Check:
    check_words(texts, place, {"status": STATUSES, "mark": MARKS})
    values: dict[str, Any] = {**texts, "measured": _numbers(texts["measured"], f"{place}: measured")}
    if not check_run(texts, place, ("source", "how"), _RUN):
        return Check(**values | {"prompt": 0, "decode": 0})
    check_words(texts, place, {"metric": METRICS})
    return Check(**values | run_values(texts, place, folder, numbers=("prompt", "decode"), yaml=_YAML, least=1))


def _numbers(text: str, place: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split("|"))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        raise ConfigError(f"{place}: expected numbers above 0 with | between them, got {text!r}; correct them")
    return found


SWEEPS: Final = "public_sweeps.csv"
SWEEP_STATUSES: Final = ("predicted", "cliff", "not predicted")
"""A prediction; a setting that exceeds the GPU's memory; one that says too little or needs what is not here."""
RATES: Final = ("measured", "other")
"""Whether the source gives a measured memory rate of the machine."""
PLACES: Final = ("gpu", "mixed", "cpu")
"""Where the layers' experts are: all on the GPU, some on the CPU, everything on the CPU."""
KINDS: Final = ("tg", "pp")
"""Decode and prefill, in the words of llama-bench."""


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
    # status, place: one of `SWEEP_STATUSES`, and of `PLACES`. Without a run, `place` and all that follows but `how` is empty or 0
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


SWEEP_COLUMNS: Final = tuple(field.name for field in fields(Sweep))
_KNOWN: Final = {"rate": RATES, "thin": ("yes", "no"), "kind": KINDS, "status": SWEEP_STATUSES}
_SWEEP_RUN: Final = ("place", "layers_on_cpu", "layers", "spec", "hardware", "routing", "policy", "depth")
_NUMBERS: Final = ("layers_on_cpu", "layers", "depth")


def sweeps_file() -> Path:
    """Return the shipped table of sweeps. Raises `ConfigError` if there is none."""
    return shipped_table(SWEEPS, "the table of public sweeps")


def read_sweeps(path: Path) -> list[Sweep]:
    """Read sweeps."""
    return read_rows(path, SWEEP_COLUMNS, "a table of public sweeps", lambda texts, place: _sweep(texts, place, path.parent))


def _sweep(texts: dict[str, str], place: str, folder: Path) -> Sweep:
    check_words(texts, place, _KNOWN)
    values: dict[str, Any] = {**texts, "measured": _speed(texts["measured"], f"{place}: measured")}
    if not check_run(texts, place, ("machine", "model", "source", "how"), _SWEEP_RUN):
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
