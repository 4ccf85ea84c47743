"""The tables of public measurements: single figures (``public.csv``) and sweeps of llama.cpp's options (``public_sweeps.csv``).

One line a check, with what predicts it or why nothing can. No speed of a machine goes into its profile. A setting whose
source says that it exceeds the GPU's memory is no check of speeds, but of whether the simulator refuses it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from moesim.core.data import data_dirs
from moesim.core.gate import read_lines
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name

FOLDER = "validation"  # below experiments
_Words = Mapping[str, Sequence[str]]


def shipped_table(name: str, what: str) -> Path:
    """Return a shipped table. Raises `ConfigError` if there is none."""
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / name).is_file():
            return folder / FOLDER / name
    raise ConfigError(f"experiments/{FOLDER}/{name}: expected {what}, got no such file")


def _read(
    path: Path, row: type, what: str, *, words: _Words, run_words: _Words, needed: Sequence[str], run: Sequence[str],
    numbers: Sequence[str], least: int, yaml: Sequence[str], several: bool,
) -> Iterator[tuple[dict[str, Any], str]]:  # fmt: skip
    """Yield rows with names of their own; columns of a run are empty or 0 where nothing is predicted."""
    lines = list(read_lines(path, [field.name for field in fields(row)], what))
    for name, n in Counter(texts["check"] for texts, _ in lines).items():
        if n > 1:
            raise ConfigError(f"{path}: check: expected each name once, got '{name}' {n} times; rename one")
    for texts, place in lines:
        _check_words(texts, place, words)
        values: dict[str, Any] = {**texts, "measured": _measured(texts["measured"], place, several)}
        runs = texts["status"] != "not predicted"
        for key in (*needed, *(run if runs else ())):
            if not texts[key]:
                raise ConfigError(f"{place}: {key}: expected a value, got nothing; every row of this status needs one")
        for key in () if runs else run:
            if texts[key]:
                raise ConfigError(f"{place}: {key}: expected nothing where nothing is predicted, got {texts[key]!r}; remove it")
        if not runs:
            yield values | dict.fromkeys(numbers, 0), place
            continue
        _check_words(texts, place, run_words)
        for key in numbers:
            if not texts[key].isdecimal() or int(texts[key]) < least:
                bound = f" of at least {least}" if least else ""
                raise ConfigError(f"{place}: {key}: expected a whole number{bound}, got {texts[key]!r}; correct it")
            values[key] = int(texts[key])
        values |= {key: read_yaml_value(texts[key], f"{place}: {key}") for key in yaml}
        spec = values["spec"]
        if isinstance(spec, dict) and str(spec.get("base", "")).endswith(".json"):
            values["spec"] = spec | {"base": str(path.parent / spec["base"])}
        yield values, place


def _check_words(texts: Mapping[str, str], place: str, known: _Words) -> None:
    for key, words in known.items():
        if texts[key] not in words:
            raise ConfigError(f"{place}: {key}: {unknown_name(key, texts[key], words)}")


def _measured(text: str, place: str, several: bool) -> float | tuple[float, ...]:
    try:
        found = tuple(float(part) for part in (text.split("|") if several else [text]))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        expected = "numbers above 0 with | between them" if several else "tokens/s above 0"
        raise ConfigError(f"{place}: measured: expected {expected}, got {text!r}; correct it")
    return found if several else found[0]


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
    # spec, hardware, policy, cache: as in an experiment; a model's base that ends in `.json` lies next to the table
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
        return str(self.hardware["base"] if isinstance(self.hardware, Mapping) else self.hardware or "")


def checks_file() -> Path:
    """Return the shipped table of public measurements. Raises `ConfigError` if there is none."""
    return shipped_table(FILE, "the table of public measurements")


def read_checks(path: Path) -> list[Check]:
    """Read public measurements."""
    rows = _read(
        path, Check, "a table of public measurements", words={"status": STATUSES, "mark": MARKS}, run_words={"metric": METRICS},
        needed=("source", "how"), run=("spec", "hardware", "routing", "policy", "cache", "prompt", "decode", "metric"),
        numbers=("prompt", "decode"), least=1, yaml=("spec", "hardware", "policy", "cache"), several=True,
    )  # fmt: skip
    return [Check(**values) for values, _ in rows]


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
    # spec, hardware, policy: as in an experiment; a model's base that ends in `.json` lies next to the table
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


def sweeps_file() -> Path:
    """Return the shipped table of sweeps. Raises `ConfigError` if there is none."""
    return shipped_table(SWEEPS, "the table of public sweeps")


def read_sweeps(path: Path) -> list[Sweep]:
    """Read sweeps."""
    rows = _read(
        path, Sweep, "a table of public sweeps", run_words={"place": PLACES}, needed=("machine", "model", "source", "how"),
        words={"rate": RATES, "thin": ("yes", "no"), "kind": KINDS, "status": SWEEP_STATUSES}, least=0, several=False,
        run=("place", "layers_on_cpu", "layers", "spec", "hardware", "routing", "policy", "depth"),
        numbers=("layers_on_cpu", "layers", "depth"), yaml=("spec", "hardware", "policy"),
    )  # fmt: skip
    found = []
    for values, place in rows:
        if values["layers_on_cpu"] > values["layers"]:
            got = f"{values['layers_on_cpu']} of {values['layers']}"
            raise ConfigError(f"{place}: layers_on_cpu: expected at most the model's layers, got {got}; correct one")
        found.append(Sweep(**values))
    return found
