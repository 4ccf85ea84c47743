"""The public measurements: one line of a CSV file a check, with what predicts it or why nothing can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from moesim.csv_reader import read_lines
from moesim.data import data_dirs
from moesim.errors import ConfigError, unknown_name
from moesim.yaml_reader import read_yaml_value

FOLDER = "validation"  # below experiments
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
    """Return the shipped table of public measurements.

    Raises
    ------
    ConfigError
        If there is none.
    """
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / FILE).is_file():
            return folder / FOLDER / FILE
    raise ConfigError(f"experiments/{FOLDER}/{FILE}: expected the table of public measurements, got no such file")


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
    found = [_check(*line, path.parent) for line in read_lines(path, COLUMNS, "a table of public measurements")]
    names = [check.check for check in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: check: expected each name once, got '{name}' {names.count(name)} times; rename one")
    return found


def _check(texts: dict[str, str], place: str, folder: Path) -> Check:
    for key, known in (("status", STATUSES), ("mark", MARKS)):
        if texts[key] not in known:
            raise ConfigError(f"{place}: {key}: {unknown_name(key, texts[key], known)}")
    values: dict[str, Any] = {**texts, "measured": _numbers(texts["measured"], f"{place}: measured")}
    runs = texts["status"] != "not predicted"
    for key in ("source", "how", *(_RUN if runs else ())):
        if not texts[key]:
            raise ConfigError(f"{place}: {key}: expected a value, got nothing; every check needs one")
    if not runs:
        for key in _RUN:
            if texts[key]:
                raise ConfigError(f"{place}: {key}: expected nothing where nothing is predicted, got {texts[key]!r}; remove it")
        return Check(**values | {"prompt": 0, "decode": 0})
    if texts["metric"] not in METRICS:
        raise ConfigError(f"{place}: metric: {unknown_name('metric', texts['metric'], METRICS)}")
    for key in ("prompt", "decode"):
        if not texts[key].isdecimal() or not int(texts[key]):
            raise ConfigError(f"{place}: {key}: expected a number of tokens of at least 1, got {texts[key]!r}; correct it")
        values[key] = int(texts[key])
    for key in _YAML:
        values[key] = read_yaml_value(texts[key], f"{place}: {key}")
    spec = values["spec"]
    if isinstance(spec, dict) and str(spec.get("base", "")).endswith(".json"):
        values["spec"] = spec | {"base": str(folder / spec["base"])}
    return Check(**values)


def _numbers(text: str, place: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split("|"))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        raise ConfigError(f"{place}: expected numbers above 0 with | between them, got {text!r}; correct them")
    return found
