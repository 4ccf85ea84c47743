"""The public measurements: one line of a CSV file a check, with what predicts it or why nothing can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from moesim.errors import ConfigError
from moesim.validation.public_rows import check_run, check_words, read_rows, run_values, shipped_table

FILE = "public.csv"
STATUSES = ("predicted", "calibration", "not predicted")
"""A prediction; a run from which numbers of its own profile come; a measurement that says too little."""

MARKS = ("M", "m", "W")
"""Measured with method and machine stated; either of them thin; a secondary page."""

METRICS = ("decode_tokens_per_s", "prefill_tokens_per_s")


@dataclass(frozen=True)
class Check:
    """A measurement, and the run that predicts it.

    Attributes
    ----------
    check, row : str
        Unique name, and the number of the table row it belongs to.
    model, weights, machine, setting : str
        What was measured, in words.
    measured : tuple of float, tokens/s
        More than one: two engines, or a range.
    unit, mark, source : str
        Unit, how well the measurement is described (`MARKS`), and where it was found.
    status : str
        One of `STATUSES`. Without a prediction all that follows is empty, but for ``how``.
    spec, hardware, policy, cache : Any
        As in an experiment; a model's base that ends in ``.json`` lies beside the table.
    routing : str
        Name of the parameters of the synthetic routing, whose shape becomes the model's.
    prompt, decode : int
        Tokens.
    metric : str
        One of `METRICS`.
    how : str
        What the prediction rests on, or why there is none.
    """

    check: str
    row: str
    model: str
    weights: str
    machine: str
    setting: str
    measured: tuple[float, ...]
    unit: str
    mark: str
    source: str
    status: str
    spec: Any
    hardware: Any
    routing: str
    policy: Any
    cache: Any
    prompt: int
    decode: int
    metric: str
    how: str

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
    """Read public measurements.

    Parameters
    ----------
    path : Path
        A CSV file with the columns of `COLUMNS`.

    Returns
    -------
    list of Check
        In the order of the file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a column, number or word in it is wrong.
    """
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
