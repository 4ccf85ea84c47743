"""The knobs of ``moesim whatif``, and what of a machine or an experiment each changes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from moesim.core.units import format_size, parse_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, HardwareError, InputError, unknown_name
from moesim.experiment.config import Config, parse_config
from moesim.hardware import HardwareProfile, hardware_names, load_hardware
from moesim.hardware.assembly import names_memory
from moesim.hardware.read import is_number, type_at
from moesim.hardware.schema import LANE
from moesim.hardware.types import Device
from moesim.model import load_model
from moesim.studies.identify.observations import read_bits
from moesim.studies.whatif.machines import (
    ONE,
    Overrides,
    Told,
    changed_number,
    constant_us,
    curves_of,
    faster_devices,
    faster_links,
    main_link,
    rate_of,
    replaced_device,
    shared_memories,
    wire_factors,
)
from moesim.studies.whatif.settings import JOINED, Base, Changed, Knob, Setting, quantity, shown

PCIE: Final = {gen: LANE[gen] for gen in (3, 4, 5)}
"""Bytes a second of one lane and direction by generation."""

_LANES = (1, 2, 4, 8, 16)
_PCIE = re.compile(r"PCIe (\d)(?:\.0)? x(\d+)")
_WANTED = re.compile(r"(?:gen\s*(\d)|(\d)\.0)?\s*(?:x\s*(\d+))?")
_MEMORY = re.compile(r"(\d+)\s*x\s*(DDR\d)(?:-(\d+))?")


def pcie_of(profile: HardwareProfile) -> tuple[int, int]:
    """Find the PCI Express that a profile describes."""
    refs = [n.ref for key, n in profile.numbers.items() if key.startswith("links.") and "gpu" in key]
    for text in (_said(profile), " ".join(refs)):
        found = {(int(gen), int(lanes)) for gen, lanes in _PCIE.findall(text)}
        if len(found) == 1 and (one := found.pop())[0] in PCIE:
            return one
    raise HardwareError(
        f"--vary pcie: expected {profile.name} to say which PCIe it has, such as 'PCIe 4.0 x16', in its description, got nothing "
        "clear; vary link.bytes_per_s instead"
    )


def parse_pcie(setting: Setting, was: tuple[int, int]) -> tuple[int, int]:
    """Read ``gen5``, ``x8`` or ``gen5x8``; what is left out is as it was. Raises `ConfigError`."""
    match = _WANTED.fullmatch(setting.text.lower())
    gen, lanes = (int(match[1] or match[2] or was[0]), int(match[3] or was[1])) if match and setting.text else (0, 0)
    if gen not in PCIE or lanes not in _LANES:
        known = ", ".join(f"gen{one}" for one in PCIE)
        raise ConfigError(f"--vary {setting}: expected {known}, x1 to x16, or both as gen5x16, got '{setting.text}'")
    if lanes < 8 and setting.factor() is not None:  # x8 and x16 are slots, but of other knobs x2 is a factor
        wanted = f"'pcie gen{gen}x{lanes}' for {lanes} lanes or 'link.bytes_per_s x{lanes}' for a factor"
        raise ConfigError(f"--vary {setting}: expected {wanted}, got '{setting.text}'")
    return gen, lanes


@dataclass(frozen=True)
class Memory:
    """Modules of main memory: channels, kind, and megatransfers a second where that is known."""

    channels: int
    kind: str
    speed: int | None

    def __str__(self) -> str:
        return f"{self.channels} x {self.kind}" + (f"-{self.speed}" if self.speed else "")

    def peak(self, beside: Memory) -> Fraction:
        """Return a number in proportion to the nominal rate; speeds count only where both are known."""
        return Fraction(self.channels * (self.speed if self.speed and beside.speed else 1))


def memory_of(profile: HardwareProfile) -> Memory:
    """Find the memory modules that a profile describes; `HardwareError` without any."""
    found = {Memory(int(n), kind, int(s) if s else None) for n, kind, s in _MEMORY.findall(_said(profile))}
    if len(found) != 1:
        raise HardwareError(
            f"--vary cpu.memory: expected {profile.name} to say which memory it has, such as '8 x DDR4-3200', in its "
            f"description, got {'nothing' if not found else 'several'}; vary cpu.memory_bandwidth instead"
        )
    return found.pop()


def _said(profile: HardwareProfile) -> str:
    return " ".join((profile.description, *profile.machine.values()))


def parse_memory(setting: Setting, was: Memory) -> Memory:
    """Read ``8xDDR5-4800``, a number of channels, or ``4->8`` from what the profile has."""
    text = setting.text.replace(" ", "")
    if match := re.fullmatch(r"(?:(\d+)->)?(\d+)", text):
        if match[1] and int(match[1]) != was.channels:
            raise ConfigError(
                f"--vary {setting}: expected {was.channels} channels before the arrow, as the profile says, got {match[1]}"
            )
        new = Memory(int(match[2]), was.kind, was.speed)
    elif match := re.fullmatch(r"(\d+)x(DDR\d)-(\d+)", text, re.IGNORECASE):
        new = Memory(int(match[1]), match[2].upper(), int(match[3]))
        if was.speed is None:
            raise ConfigError(
                f"--vary {setting}: expected a number of channels, since the profile says no speed ({was}), got '{setting.text}'"
            )
    else:
        raise ConfigError(
            f"--vary {setting}: expected modules such as 8xDDR5-4800, or channels such as 4->8, got '{setting.text}'"
        )
    if new.channels < 1 or new.speed == 0:
        raise ConfigError(f"--vary {setting}: expected at least one channel and a speed above 0, got '{setting.text}'")
    return new


def setting_knob(name: str, key: str, changes: str, unit: str, *, whole: bool | None = False, most: int | None = None) -> Knob:
    """Make a knob for a key of the experiment, as of ``--set``; `whole` None: as it is."""

    def is_whole(base: Base) -> bool:
        return type(current(base, key)) is int if whole is None else whole

    def read(base: Base) -> Fraction:
        value = current(base, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"--vary {name}: expected a number in {key} to multiply, got {value!r}; give a value instead")
        return Fraction(repr(value))

    def write(base: Base, value: Fraction, factor: Fraction | None) -> Changed:
        if not is_whole(base):
            return Changed(base.set(key, float(value)), factor)
        by = None if factor is None else Fraction(round(value)) / read(base)
        return Changed(base.set(key, round(value)), by, value=f"{name} {round(value)}")

    def scale(base: Base, factor: Fraction) -> Changed:
        value = read(base) * factor
        return write(base, max(ONE, value) if is_whole(base) else value, factor)

    def apply(base: Base, setting: Setting) -> Changed:
        factor, before = setting.factor(), current(base, key)
        if factor is not None:
            if not read(base):
                raise ConfigError(
                    f"--vary {setting}: expected a number above 0 in {key} to multiply, got 0; give a value instead"
                )
            return _not_rounded(setting, read(base), scale(base, factor))
        value = setting.number()
        if whole and value.denominator != 1:
            raise ConfigError(f"--vary {setting}: expected a whole number, got {setting.text}")
        return write(base, value, value / Fraction(repr(before)) if isinstance(before, int | float) and before else None)

    highest = None if most is None else lambda base: most / read(base)
    return Knob(name, f"xF, ±P%, {unit}", changes, apply, scale, read, unit, highest)


def _not_rounded(setting: Setting, before: Fraction, changed: Changed) -> Changed:
    """Refuse a factor that changes nothing, since the number is a whole one."""
    factor = setting.factor()
    if factor is None or changed.factor != 1 or factor == 1:
        return changed
    raise ConfigError(
        f"--vary {setting}: expected a factor that comes to another whole number than the {before} there is, got "
        f"{float(before * factor):.4g}; give a value, as in '{setting.knob} {before + 1}'"
    )


def current(base: Base, key: str) -> Any:
    """Look up a key of the experiment; a model's unchanged field comes from the model."""
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


def cache(base: Base, setting: Setting) -> Changed:
    """Set the cache to a share of experts, a budget, or a multiple; may raise `ConfigError`."""
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
        factor, told = setting.factor(), f"what-if: {setting}"
        if factor is not None:
            return _not_rounded(setting, read(base), change(base, read(base) * factor, factor, Told(told)))
        if key.endswith("_bytes") and setting.text[-1:].isalpha():
            value = Fraction(parse_bytes(setting.text, f"--vary {setting}"))
        else:
            value = setting.rate() if key.endswith("bytes_per_s") else setting.number()
        before = read(base) if key in base.profile.numbers else Fraction(0)
        return change(base, value, value / before if before else None, Told(told, "assumed"))

    def scale(base: Base, factor: Fraction) -> Changed:
        return change(base, read(base) * factor, factor, Told(f"what-if: {name} {shown(factor)}"))

    return Knob(name, "", "this number", apply, scale, read)


_GB = 10**9
_FURTHEST = 1000
"""Largest factor, and the inverse of the smallest: beyond lies a slip of the unit."""


def _by_role(profile: HardwareProfile, role: str) -> list[Device]:
    found = [device for device in profile.devices.values() if device.role == role]
    if not found:
        raise HardwareError(f"{profile.name}: expected a device in the role of {role}, got none; choose another knob")
    return found


def _scaled(
    name: str, unit: str, changes: str, read: Callable[[Base], Fraction], overrides: Callable[[Base, Fraction, Told], Overrides]
) -> Knob:
    """Make a knob that multiplies numbers of the profile by a factor; values are of `read`."""

    def change(base: Base, factor: Fraction, what: str, source: str = "derived") -> Changed:
        if factor == ONE:
            return Changed(base.raw, ONE)
        found = overrides(base, factor, Told(f"what-if: {what}", source))
        if not found:
            raise HardwareError(f"--vary {what}: {base.profile.name} has no such number; choose another knob")
        return Changed(base.machine(found), factor, tuple(found))

    def apply(base: Base, setting: Setting) -> Changed:
        if (factor := setting.factor()) is not None:
            return change(base, factor, str(setting))
        if not (before := read(base)):
            raise HardwareError(
                f"--vary {setting}: expected a number above 0 in {base.profile.name} to relate it to, got 0; set a raw key"
            )
        value = setting.rate() if unit == "bytes/s" else setting.number()
        if value <= 0:
            raise ConfigError(f"--vary {setting}: expected a number above 0, got {setting.text}")
        return change(base, value / before, str(setting), "assumed")

    def scale(base: Base, factor: Fraction) -> Changed:
        return change(base, factor, f"{name} {shown(factor)}")

    values = f"xF, ±P%, {unit}" + (" or as 50 GB/s" if unit == "bytes/s" else "")
    return Knob(name, values, changes, apply, scale, read, unit)


def _device_knob(name: str, role: str, memory: bool, changes: str) -> Knob:
    def read(base: Base) -> Fraction:
        profile = base.profile
        devices = _by_role(profile, role)
        main = next((d for d in devices if d.name in (profile.compute, *profile.backing)), devices[0])
        return Fraction(main.memory_bytes_per_s if memory else main.flops)

    def overrides(base: Base, factor: Fraction, told: Told) -> Overrides:
        profile = base.profile
        devices = _by_role(profile, role)
        found = faster_devices(profile, devices, factor if memory else ONE, ONE if memory else factor, told)
        if memory:
            found |= shared_memories(profile, told, memory=factor, hosts=[device.name for device in devices])
        return found

    return _scaled(name, "bytes/s" if memory else "operations/s", changes, read, overrides)


def _link_rates(base: Base, factor: Fraction, told: Told) -> Overrides:
    profile = base.profile
    found = faster_links(profile, {c.key: factor for link in profile.links for c in curves_of(link)}, told)
    return found | shared_memories(profile, told, links={link.name: factor for link in profile.links})


def _link_latencies(base: Base, factor: Fraction, told: Told) -> Overrides:
    curves = [curve for link in base.profile.links for curve in curves_of(link)]
    return faster_links(base.profile, {curve.key: ONE for curve in curves}, told, latency=factor)


def _curve_used(base: Base) -> Any:
    link = main_link(base.profile)
    return link.curves.get(base.raw["transfer"]["curve"]) or next(iter(link.curves.values()))


def _wire(base: Base, factor: Fraction, told: Told) -> Changed:
    """Make the links between hosts and GPUs of one machine faster by the wire alone."""
    profile = base.profile
    kinds = {"gpu", "cpu"}
    links = [
        link
        for link in profile.links
        if {profile.devices[link.src].kind, profile.devices[link.dst].kind} == kinds
        and profile.devices[link.src].host == profile.devices[link.dst].host
    ]
    by_curve = {key: by for link in links for key, by in wire_factors(link, factor).items()}
    found = faster_links(profile, by_curve, told)
    found |= shared_memories(profile, told, links={link.name: factor for link in links})
    slow = by_curve.get(_curve_used(base).key, factor)
    note = (
        "" if slow == factor else f"; {base.raw['transfer']['curve']} copies only {shown(slow)}, the processor's own copy stays"
    )
    return Changed(base.machine(found), factor, tuple(found), f"{told.why.removeprefix('what-if: ')}{note}")


def _pcie(base: Base, setting: Setting) -> Changed:
    was = pcie_of(base.profile)
    new = parse_pcie(setting, was)
    if "parts" in _parts_of(base):  # what follows from a link follows anew
        return _part("pcie")(base, replace(setting, text=f"{new[0]}x{new[1]}"))
    factor = Fraction(new[1], was[1]) * Fraction(PCIE[new[0]]) / Fraction(PCIE[was[0]])
    rates = [float(PCIE[gen] * lanes / _GB) for gen, lanes in (was, new)]
    words = f"PCIe {was[0]}.0 x{was[1]} to {new[0]}.0 x{new[1]}, nominal {rates[0]:.1f} to {rates[1]:.1f} GB/s (PCI-SIG)"
    return _wire(base, factor, Told(f"what-if: {words}")) if factor != ONE else Changed(base.raw, factor, (), words)


def _memory(base: Base, setting: Setting) -> Changed:
    was, new = memory_of(base.profile), parse_memory(setting, memory_of(base.profile))
    factor = new.peak(was) / was.peak(new)
    words = f"{was} to {new}, {shown(factor)} of the nominal rate, if as large a share of it is reached"
    found = _memory_scale(base, factor)
    return Changed(found.raw, factor, found.keys, words)


def _memory_scale(base: Base, factor: Fraction) -> Changed:
    return KNOBS["cpu.memory_bandwidth"].scale(base, factor)  # type: ignore[misc]


def _part(name: str) -> Callable[[Base, Setting], Changed]:
    """Return the knob of a part: the machine is derived anew; of a profile without parts, devices are replaced."""

    def apply(base: Base, setting: Setting) -> Changed:
        try:
            raw = base.machine({f"parts.{name}": _memory_text(base, setting.text) if name == "ram" else setting.text})
            found = load_hardware(raw["hardware"], f"--vary {setting}", raw.get("engine"))
        except HardwareError:
            if "parts" in _parts_of(base):
                raise
            return _without_parts(name, base, setting)
        if name == "pcie" and (link := found.machine.get("link")) == base.profile.machine.get("link"):
            return Changed(raw, None, (), f"the link stays {link}: card, processor and board allow no more")
        return Changed(raw, None, tuple(found.numbers), f"{found.machine.get(name, setting.text)}; the rest as it is")

    return apply


def _memory_text(base: Base, text: str) -> str:
    """Add the kind and speed of the machine's memory where a text has neither."""
    if re.search(r"(?i)ddr|dimm|\d{4,5}", text) or not names_memory(text):
        return text
    found = re.search(r"(?i)\b(?:lp)?ddr\dx?(?:[- ]?\d{4,5})?\b", base.profile.machine.get("memory", ""))
    return f"{text} {found[0]}" if found else text


def _parts_of(base: Base) -> Mapping[str, Any]:
    """Return the keys of a machine that is written by its parts; none of another."""
    written = base.raw["hardware"]
    name = written.get("base", written) if isinstance(written, Mapping) else written
    return {"parts": name} if isinstance(name, str) and "+" in name else name if isinstance(name, Mapping) else {}


def _without_parts(name: str, base: Base, setting: Setting) -> Changed:
    """Put a GPU or CPU of the catalogue, or of another profile, in the place of a profile's; or other memory modules."""
    profile = base.profile
    if name == "ram":
        modules = re.sub(r"(?i)^(\d+)x\d+\s*(?:gi?b)?\s*(ddr\d)", r"\1x\2", setting.text)
        return _memory(base, replace(setting, text=modules))
    known = setting.text in hardware_names() or setting.text.endswith((".yaml", ".yml"))
    other = load_hardware(setting.text if known else {"parts": {name: setting.text}}, f"--vary {setting}", base.raw.get("engine"))
    role = "accelerator" if name == "gpu" else "host"
    news, olds = _by_role(other, role), _by_role(profile, role)
    new = next((device for device in news if device.name in (other.compute, *other.backing)), news[0])
    what = f"{name.upper()} of {other.name}"
    told = Told(f"what-if: {what}")
    overrides = {k: v for old in olds for k, v in replaced_device(profile, old.name, other, new, told).items()}
    if name == "cpu":
        overrides = {key: value for key, value in overrides.items() if not key.endswith(".memory_bytes")}
    memory = f": {new.memory_bytes / 2**30:.3g} GiB instead of {olds[0].memory_bytes / 2**30:.3g}" if name == "gpu" else ""
    return Changed(
        base.machine(overrides), None, tuple(overrides), f"{what}{memory}; cache and link stay unless varied with it (&)"
    )


def _threads(base: Base, setting: Setting) -> Changed:
    """Let fewer or more threads compute: operations in proportion, and reading if they are too few for the memory."""
    was = int(base.profile.machine.get("threads", 0))
    number = setting.number()
    if not was or number.denominator != 1 or number < 1:
        got = "a whole number of at least 1, got " + setting.text if was else "a profile with machine.threads, got none; name it"
        raise ConfigError(f"--vary {setting}: expected {got}")
    host = _by_role(base.profile, "host")[0]
    told = Told(f"what-if: {setting}, each thread reads {_A_THREAD / 1e9:g} GB/s", "assumed")
    compute = Fraction(number, was)
    memory = min(Fraction(1), number * _A_THREAD / host.memory_bytes_per_s) if number < was else Fraction(1)
    found = faster_devices(base.profile, _by_role(base.profile, "host"), memory, compute, told)
    return Changed(base.machine({**found, "machine.threads": str(number)}), None, tuple(found), f"{number} of {was} threads")


_A_THREAD: Final = 9 * 10**9
"""Bytes a second that a thread unpacks at 4 bits: the middle of 8 (IQ4_XS, 2 and 3 threads of a Core i5-12400F, rows of
experiments/validation/public_sweeps.csv) and 10 (Q4_0, Zen 4, ik_llama.cpp#54)."""


def _bits(base: Base, setting: Setting) -> Changed:
    """Quantise experts and the rest."""
    model = base.raw["model"]
    chosen = read_bits(setting.text, f"--vary {setting}", load_model(model, f"--vary {setting}"))
    if len(chosen) != 1 or not chosen[0]:
        raise ConfigError(f"--vary {setting}: expected one choice of bits, got '{setting.text}'; give one")
    raw = {**base.raw, "model": {**(model if isinstance(model, Mapping) else {"base": model}), **chosen[0]}}
    return Changed(raw, None)


# ---------------------------------------------------------------------------------------------------------------- catalogue

KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        _scaled(
            "link.bytes_per_s", "bytes/s", "the rate of every transfer curve of every link, activations included; what "
            "host memory leaves links and CPU experts while both run", lambda base: rate_of(_curve_used(base)), _link_rates,
        ),
        _scaled(
            "link.latency", "us", "the time of every copy that does not depend on its size",
            lambda base: constant_us(_curve_used(base)), _link_latencies,
        ),
        Knob(
            "pcie", "gen3, gen4, gen5, x8, gen5x16", "as link.bytes_per_s for links between a host and its GPUs, by the ratio of "
            "the nominal rates (PCI-SIG); of a pageable copy only the wire's part", _pcie,
            lambda base, factor: _wire(base, factor, Told(f"what-if: pcie {shown(factor)}")),
        ),
        _device_knob(
            "cpu.memory_bandwidth", "host", True, "the memory's rate of hosts; the time of a curve's first row; the capacity "
            "that CPU experts and links share",
        ),
        Knob(
            "cpu.memory", "8xDDR5-4800, 4->8 (channels), 8", "as cpu.memory_bandwidth, by the ratio of the nominal rates; the "
            "profile must say what it has", _memory, _memory_scale,
        ),
        _device_knob("cpu.compute", "host", False, "operations per second of hosts; what a curve's further rows add"),
        _device_knob("gpu.memory_bandwidth", "accelerator", True, "the same of accelerators, never below the launches' time"),
        _device_knob("gpu.compute", "accelerator", False, "the same of accelerators"),
        Knob(
            "gpu", "rtx 4090, a profile", "another GPU: of a machine from its parts all that follows; of a profile memory, "
            "rates, curves, power, while launches, the router's way, links and cache stay", _part("gpu"),
        ),
        Knob("cpu", "ryzen 9 7950x, a profile", "another CPU, as gpu", _part("cpu")),
        Knob("ram", "2x32 ddr5-6000, 64GB", "other memory modules; of a profile as cpu.memory", _part("ram")),
        Knob("threads", "a number", "the rate at which hosts compute, and read with few threads", _threads),
        Knob("bits", "4.8, Q4_K_M, 4.85/5.35", "bits a weight of experts and of the rest", _bits),
        setting_knob("model.expert_bits", "model.expert_bits", "bits a weight of routed experts", "bits", most=16),
        setting_knob("batch", "workload.batch_size", "requests that run together", "requests", whole=True),
        Knob(
            "cache", "xF, ±P%, a share, a size", "experts that each GPU caches: a share of all, or what fits into a budget",
            cache, cache_scale, cache_size, "",
            lambda base: 1 / cache_size(base) if "ratio" in base.raw["cache"] else Fraction(10**9),
        ),
        setting_knob("decision_us", "decision_us", "time charged for each decision of a policy", "us"),
        setting_knob("prompt", "workload.prompt_tokens", "prompt tokens of each request", "tokens", whole=True),
        setting_knob("decode", "workload.decode_tokens", "decoded tokens of each request", "tokens", whole=True),
    )
}  # fmt: skip


def knob_of(name: str) -> Knob:
    """Find a knob: one of `KNOBS`, or a key of profile or experiment; else `ConfigError`."""
    return KNOBS[name] if name in KNOBS else raw_knob(name, KNOBS)


def change(base: Base, together: Iterable[Setting]) -> Changed:
    """Vary an experiment."""
    settings = list(together)
    done: list[Changed] = []
    for setting in settings:
        found = knob_of(setting.knob).apply(base, setting)
        _refuse_far(base, setting, found)
        base = Base(json.loads(json.dumps(found.raw)), base.place)
        done.append(found)
    names = [
        f"{setting} = {found.value}" if found.value and setting.factor() is not None else str(setting)
        for setting, found in zip(settings, done, strict=True)
    ]
    try:
        parse_config(json.loads(json.dumps(base.raw)), base.place)
        if any(found.keys for found in done):
            assert base.profile  # read here, so that a machine that cannot be is a wrong input and no failed run
    except InputError as error:
        raise type(error)(f"--vary {JOINED.join(names)}: {error}") from None
    return Changed(
        base.raw,
        done[0].factor if len(done) == 1 else None,
        tuple(key for found in done for key in found.keys),
        "; ".join(found.note for found in done if found.note),
        JOINED.join(found.value or str(setting) for setting, found in zip(settings, done, strict=True)),
        JOINED.join(names),
    )


def _refuse_far(base: Base, setting: Setting, found: Changed) -> None:
    """Refuse a factor, or a value of the machine, out of all proportion to what is there."""
    factor = found.factor if setting.factor() is None else setting.factor()
    if factor is None or factor <= 0 or not (found.keys or setting.factor()) or Fraction(1, _FURTHEST) <= factor <= _FURTHEST:
        return
    knob = knob_of(setting.knob)
    unit = knob.unit or ("bytes/s" if setting.knob.endswith("bytes_per_s") else "")
    there = f" ({quantity(knob.read(base), unit)})" if knob.read is not None else ""
    raise ConfigError(
        f"--vary {setting}: expected x1/{_FURTHEST} to x{_FURTHEST} of what is there{there}, got x{float(factor):.3g}; "
        "check the unit"
    )
