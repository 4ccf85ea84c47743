"""The public measurements: one line of a CSV file a check, with what predicts it or why nothing can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from moesim.errors import ConfigError
from moesim.studies.validation.public_rows import check_run, check_words, read_rows, run_values, shipped_table

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
