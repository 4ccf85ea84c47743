"""Values of ``--vary``, and the experiment that they change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from moesim.core.units import parse_bytes
from moesim.errors import ConfigError
from moesim.experiment.config import Config, apply_override
from moesim.experiment.sweep import KEYS, Point, expand
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.assembly import names_memory
from moesim.hardware.engines import MACHINE, OWN
from moesim.model import ModelSpec, load_model
from moesim.policies.registry import make_policy

JOINED = " & "
_SCALE = re.compile(r"[x×]\s*([0-9.]+(?:[eE][+-]?\d+)?(?:/[0-9.]+)?)")
_PERCENT = re.compile(r"([+-])\s*([0-9.]+)\s*%")
# What says how settings are combined, of which there is one; what is left behind of runs; systems, which whoever asks adds.
_LEFT_OUT = ("zip", "include", "exclude", "repeat", "policies")
_NOTHING: dict[str, Any] = {"plots": [], "timeline": None, "frames": False}


@dataclass(frozen=True)
class Setting:
    """One value of one knob, as written."""

    knob: str  # its name, or a key of the experiment or the profile
    text: str  # the value: `x2`, `+50%`, or anything the knob knows

    def __str__(self) -> str:
        return f"{self.knob} {self.text}"

    def factor(self) -> Fraction | None:
        """Return what to multiply by, for ``xF`` and a percentage; None for a value."""
        if match := _SCALE.fullmatch(self.text):
            found = _fraction(match[1], self)
        elif match := _PERCENT.fullmatch(self.text):
            found = 1 + (-1 if match[1] == "-" else 1) * _fraction(match[2], self) / 100
        else:
            return None
        if found <= 0:
            raise ConfigError(f"--vary {self}: expected a factor above 0, got {self.text}")
        return found

    def number(self) -> Fraction:
        return _fraction(self.text, self)

    def rate(self) -> Fraction:
        size = self.text.removesuffix("/s")
        if size != self.text:
            return Fraction(parse_bytes(size.strip(), f"--vary {self}"))
        return _fraction(self.text, self, "; a rate has its unit as in '50 GB/s'")


def shown(factor: Fraction) -> str:
    """Write a factor, such as ``x1.5``."""
    return f"x{float(factor):.6g}"


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def quantity(value: Fraction, unit: str) -> str:
    """Write a number with its unit, rates with a prefix.

    >>> quantity(Fraction(24 * 10**9), "bytes/s")
    '24 GB/s'
    """
    number = float(value)
    if not unit.endswith("/s"):
        return f"{number:.3g}{' ' + unit if unit else ''}"
    scale, prefix = next((s, p) for s, p in _PREFIXES if number >= s or s == 1.0)
    return f"{number / scale:.3g} {prefix}{unit.replace('bytes', 'B').replace('operations', 'op')}"


def _fraction(text: str, setting: Setting, remedy: str = "") -> Fraction:
    top, _, bottom = text.partition("/")
    try:
        numbers = float(top), float(bottom or 1)
        if not all(number == 0 or 1e-100 <= abs(number) <= 1e100 for number in numbers):
            raise ValueError(text)
        return Fraction(repr(numbers[0])) / Fraction(repr(numbers[1]))  # the shortest form of a float is what was written
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--vary {setting}: expected xF, +P%, -P% or a number, got '{text}'{remedy}") from None


def parse_vary(text: str) -> list[tuple[Setting, ...]]:
    """Read one ``--vary``.

    >>> [[str(one) for one in together] for together in parse_vary("link.bytes_per_s x0.5,x2 & batch =4")]
    [['link.bytes_per_s x0.5', 'batch 4'], ['link.bytes_per_s x2', 'batch 4']]
    """
    found: list[tuple[Setting, ...]] = [()]
    if text.strip() == "drafts":  # as many as usual
        return [(Setting("drafts", ""),)]
    for part in text.split("&"):
        match = re.fullmatch(r"\s*([^\s=]+)\s*(?:\s|(?==))\s*(.*\S)\s*", part)
        values = [value.strip().removeprefix("=").strip() for value in match[2].split(",")] if match else []
        if match is None or not all(values):
            meant = f"; did you mean 'ram {part.strip()}'?" if names_memory(part) else ""
            raise ConfigError(
                f"--vary '{text}': expected a knob and values, such as 'link.bytes_per_s x0.5,x2', got '{part}'{meant}"
            )
        if re.fullmatch(r"\d+x", match[1]):
            raise ConfigError(f"--vary '{text}': expected a knob and values, got '{part}'; did you mean 'gpu {part.strip()}'?")
        if match[1] == "more":
            raise ConfigError(f"--vary '{text}': expected what there is then, such as 'ram 64gb' or 'gpu rtx 4090', got '{part}'")
        found = [(*before, Setting(match[1], value)) for before in found for value in values]
    return found


@dataclass(frozen=True)
class Base:
    """An experiment with one value of everything but the policies."""

    raw: Mapping[str, Any]  # as a file holds it
    place: str  # the file, for messages

    @cached_property
    def profile(self) -> HardwareProfile:
        return load_hardware(self.raw["hardware"], f"{self.place}: hardware", self.raw.get("engine"))

    @cached_property
    def model(self) -> ModelSpec:
        return load_model(self.raw["model"], f"{self.place}: model")

    def machine(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        hardware = self.raw["hardware"]
        return {**self.raw, "hardware": {**(hardware if isinstance(hardware, Mapping) else {"base": hardware}), **overrides}}

    def set(self, key: str, value: Any) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads(json.dumps(self.raw))
        apply_override(raw, f"{key}={json.dumps(value)}")
        return raw


@dataclass(frozen=True)
class Changed:
    """A varied experiment."""

    raw: Mapping[str, Any]  # as a file holds it
    factor: Fraction | None  # by what a number was multiplied; None where there is no such thing
    keys: tuple[str, ...] = ()  # keys of the profile that have another number
    note: str = ""  # what was done, where the knob's name does not say it
    value: str = ""  # the knob and the value that was used, where a factor comes to one that it does not name: `batch 2`
    name: str = ""  # what was varied, with the values that were used: `batch x2 = batch 2`


@dataclass(frozen=True)
class Knob:
    """Something that can be varied."""

    name: str  # as in `--vary`
    values: str  # which values it takes, for the table of knobs
    changes: str  # what it changes in the profile or the experiment
    apply: Callable[[Base, Setting], Changed]  # to a `Changed`. Raises `InputError` where the profile cannot express it
    scale: Callable[[Base, Fraction], Changed] | None = None  # likewise for any factor, to find where the limit changes
    read: Callable[[Base], Fraction] | None = None  # to the number at factor 1, in `unit`
    unit: str = ""  # of that number
    highest: Callable[[Base], Fraction] | None = None  # to the largest factor that makes sense


def single(config: Config, place: str) -> Base:
    """Take an experiment that sweeps nothing but its policies."""
    points = expand(config, place)
    order = list(Config.model_fields)
    swept = {
        key: values
        for name in sorted(KEYS, key=lambda name: order.index(KEYS[name].partition(".")[0]))
        if name != "policy"
        for key, values in _spread(name, [getattr(point, name) for point in points]).items()
        if len(values) > 1
    }
    if "repeat" in swept:
        swept = {key: values for key, values in swept.items() if not key.endswith(".seed")} | {"repeat": ["1", "..."]}
    if swept:
        told = " and ".join(f"{key} ({', '.join(values)})" for key, values in swept.items())
        fix = " ".join(f"--set {key}={values[0]}" for key, values in swept.items())
        raise ConfigError(f"{place}: expected one setting for each policy, got sweeps of {told}; fix with {fix}, or take --quick")
    raw = raw_at(config, points[0]) | {"policies": [dict(point.policy) for point in points]}
    if raw["engine"] == OWN:  # knobs change the numbers of one machine: that of the one engine of all policies
        engines = {getattr(make_policy(point.policy), "engine", "") for point in points}
        raw["engine"] = (engines.pop() or MACHINE) if len(engines) == 1 else MACHINE
    return Base(json.loads(json.dumps(raw)), place)


def raw_at(config: Config, point: Point) -> dict[str, Any]:
    """Write an experiment with the setting of one point, without policies, figures, timeline."""
    base = {key: value for key, value in config.model_dump(mode="json").items() if key not in _LEFT_OUT}
    return {**base, **point.written(), **_NOTHING}


def _spread(name: str, values: list[Any]) -> dict[str, list[str]]:
    """List the distinct values of a field of points, by the key that sets it."""
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values if isinstance(value, Mapping) for key in value)
        named = {f"{name}.{key}": [value.get(key) for value in values if isinstance(value, Mapping)] for key in keys}
    else:
        named = {KEYS[name]: values}
    return {
        key: list(dict.fromkeys(json.dumps(v) if not isinstance(v, str) else v for v in found)) for key, found in named.items()
    }
