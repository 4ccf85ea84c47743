"""Knobs that are numbers of the experiment, and raw keys of the experiment or of its hardware profile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from moesim.core.units import format_size, parse_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, HardwareError, unknown_name
from moesim.experiment.config import Config
from moesim.hardware.places import is_number, type_at
from moesim.studies.whatif.overrides import Told, changed_number
from moesim.studies.whatif.settings import Base, Changed, Knob, Setting, shown


def setting_knob(name: str, key: str, changes: str, unit: str, *, whole: bool | None = False, most: int | None = None) -> Knob:
    """Make a knob for a number of the experiment, at a key as ``--set`` spells it; `whole` None: as the number there is."""

    def is_whole(base: Base) -> bool:
        before = current(base, key)
        return whole if whole is not None else isinstance(before, int) and not isinstance(before, bool)

    def read(base: Base) -> Fraction:
        value = current(base, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"--vary {name}: expected a number in {key} to multiply, got {value!r}; give a value instead")
        return Fraction(repr(value))

    def to(base: Base, value: Fraction, factor: Fraction) -> Changed:
        if not is_whole(base):
            return Changed(base.set(key, float(value)), factor)
        written = max(1, round(value))
        return Changed(base.set(key, written), Fraction(written) / read(base), value=f"{name} {written}")

    def apply(base: Base, setting: Setting) -> Changed:
        factor = setting.factor()
        if factor is not None:
            if not read(base):
                raise ConfigError(
                    f"--vary {setting}: expected a number above 0 in {key} to multiply, got 0; give a value instead"
                )
            changed = to(base, read(base) * factor, factor)
            if changed.factor == 1 != factor:
                raise _rounded(setting, read(base), factor)
            return changed
        value, before = setting.number(), current(base, key)
        if whole and value.denominator != 1:
            raise ConfigError(f"--vary {setting}: expected a whole number, got {setting.text}")
        written = int(value) if whole else float(value)
        known = isinstance(before, int | float) and before
        factor = value / Fraction(repr(before)) if known else None
        return Changed(base.set(key, written), factor, value=f"{name} {written}" if whole else "")

    def scale(base: Base, factor: Fraction) -> Changed:
        return to(base, read(base) * factor, factor)

    return Knob(
        name, f"xF, ±P%, {unit}", changes, apply, scale, read, unit, None if most is None else lambda base: most / read(base)
    )


def _rounded(setting: Setting, before: Fraction, factor: Fraction) -> ConfigError:
    """Say that a factor changes nothing, since the number is a whole one."""
    return ConfigError(
        f"--vary {setting}: expected a factor that comes to another whole number than the {before} there is, got "
        f"{float(before * factor):.4g}; give a value, as in '{setting.knob} {before + 1}'"
    )


def current(base: Base, key: str) -> Any:
    """Look a key of the experiment up; a field of the model that is not changed comes from the model."""
    first, _, rest = key.partition(".")
    if first == "model":
        return getattr(base.model, rest, None)
    here: Any = base.raw
    for step in key.split("."):
        if isinstance(here, list) and step.isdecimal() and int(step) < len(here):
            here = here[int(step)]
        elif isinstance(here, Mapping):
            here = here.get(step)
        else:
            return None
    return here


def cache_size(base: Base) -> Fraction:
    """Return the cache as it is: a share of all experts, or bytes."""
    return Fraction(repr(next(iter(base.raw["cache"].values()))))


def cache_highest(base: Base) -> Fraction:
    """Return the factor at which the cache holds all experts; of a budget that is not known, and the placement will say."""
    return 1 / cache_size(base) if "ratio" in base.raw["cache"] else Fraction(10**9)


def cache(base: Base, setting: Setting) -> Changed:
    """Set the cache to a share of all experts, to a budget, or to a multiple of whichever it is. Raises `ConfigError`."""
    key, before = next(iter(base.raw["cache"].items()))
    factor = setting.factor()
    if factor is not None:
        return cache_scale(base, factor)
    if setting.text[-1:].isalpha():
        n_bytes = parse_bytes(setting.text, f"--vary {setting}")
        known = Fraction(n_bytes, before) if key == "budget" and before else None
        return Changed({**base.raw, "cache": {"budget": n_bytes}}, known, value=_cache_value("budget", n_bytes))
    value = setting.number()
    if not 0 <= value <= 1:
        raise ConfigError(f"--vary {setting}: expected a share in [0, 1] or a size such as '12 GiB', got {setting.text}")
    known = value / Fraction(repr(before)) if key == "ratio" and before and value else None
    return Changed({**base.raw, "cache": {"ratio": float(value)}}, known, value=_cache_value("ratio", float(value)))


def _cache_value(key: str, value: float) -> str:
    return f"cache {value:.6g}" if key == "ratio" else f"cache {format_size(value)}"


def cache_scale(base: Base, factor: Fraction) -> Changed:
    """Multiply the cache, a share or a budget. Raises `ConfigError` beyond all experts."""
    key, before = next(iter(base.raw["cache"].items()))
    value = Fraction(repr(before)) * factor
    if key == "ratio" and value > 1:
        raise ConfigError(f"--vary cache {shown(factor)}: expected a share of at most 1, got {float(value):g}")
    written = float(value) if key == "ratio" else int(value)
    return Changed({**base.raw, "cache": {key: written}}, factor, value=_cache_value(key, written))


# --------------------------------------------------------------------------------------------------------------- raw keys


def raw_knob(name: str, known: Iterable[str]) -> Knob:
    """Make a knob of a key of the profile or of the experiment, as ``--set`` spells it."""
    key = name.removeprefix("hardware.")
    steps: list[str | int] = [int(step) if step.isdecimal() else step for step in key.split(".")]
    if key != name or (steps[0] not in Config.model_fields and type_at(steps[:1]) is not None):
        return _raw_profile(name, key, is_number(steps))
    if steps[0] not in Config.model_fields:
        raise ConfigError(f"--vary {name}: {unknown_name('knob', name, known)}; or a key as --set spells it")

    knob = setting_knob(name, name, "this key", "", whole=None)

    def apply(base: Base, setting: Setting) -> Changed:
        if setting.factor() is not None:
            return knob.apply(base, setting)
        before, value = current(base, name), read_yaml_value(setting.text, f"--vary {name}")
        if isinstance(value, list | dict) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"--vary {setting}: expected one finite number or word, got {setting.text}")
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) and v for v in (before, value))
        return Changed(base.set(name, value), Fraction(repr(value)) / Fraction(repr(before)) if numeric else None)

    return replace(knob, apply=apply, read=None)


def _raw_profile(name: str, key: str, numeric: bool) -> Knob:
    def read(base: Base) -> Fraction:
        if key not in base.profile.numbers:
            raise HardwareError(f"--vary {name}: {unknown_name('number', key, base.profile.numbers)}")
        value = base.profile.numbers[key].value
        if isinstance(value, list):
            raise HardwareError(f"--vary {name}: expected a single number, got measured points; choose a knob that scales them")
        return Fraction(repr(value))

    def change(base: Base, value: Any, factor: Fraction | None, told: Told) -> Changed:
        before = base.profile.numbers[key].value if key in base.profile.numbers else None
        whole = isinstance(before, int) and isinstance(value, Fraction)
        written = round(value) if whole else float(value) if isinstance(value, Fraction) else value
        if whole and before and factor is not None:
            factor = Fraction(round(value), before)
        found = base.machine(changed_number(base.profile, key, written, told))
        return Changed(found, factor, (key,), value=f"{name} {written}" if whole else "")

    def apply(base: Base, setting: Setting) -> Changed:
        if not numeric:
            raise HardwareError(
                f"--vary {setting}: expected a key of a number of a profile, got '{key}'; moesim profile show lists them"
            )
        factor = setting.factor()
        if factor is not None:
            changed = change(base, read(base) * factor, factor, Told(f"what-if: {setting}"))
            if changed.factor == 1 != factor:
                raise _rounded(setting, read(base), factor)
            return changed
        told = Told(f"what-if: {setting}", "assumed")
        if key.endswith("_bytes") and setting.text[-1:].isalpha():
            value = Fraction(parse_bytes(setting.text, f"--vary {setting}"))
        else:
            value = setting.rate() if key.endswith("bytes_per_s") else setting.number()
        before = read(base) if key in base.profile.numbers else Fraction(0)
        return change(base, value, value / before if before else None, told)

    def scale(base: Base, factor: Fraction) -> Changed:
        return change(base, read(base) * factor, factor, Told(f"what-if: {name} {shown(factor)}"))

    return Knob(name, "", "this number", apply, scale, read)
