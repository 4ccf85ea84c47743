"""The knobs of ``moesim whatif``: what can be varied by name, and what of a machine or an experiment each changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from moesim.errors import ConfigError, HardwareError, InputError
from moesim.experiment.config import parse_config
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.types import Device
from moesim.studies.whatif.nominal import PCIE, memory_of, parse_memory, parse_pcie, pcie_of
from moesim.studies.whatif.number_knobs import cache, cache_highest, cache_scale, cache_size, raw_knob, setting_knob
from moesim.studies.whatif.overrides import (
    Overrides,
    Told,
    faster_devices,
    faster_links,
    main_link,
    replaced_device,
    shared_memories,
)
from moesim.studies.whatif.scaling import ONE, constant_us, curves_of, rate_of, wire_factors
from moesim.studies.whatif.settings import JOINED, Base, Changed, Knob, Setting, quantity, shown

_GB = 10**9
_FURTHEST = 1000
"""Largest factor, and the inverse of the smallest: beyond lies a slip of the unit."""


def _by_role(profile: HardwareProfile, role: str) -> list[Device]:
    found = [device for device in profile.devices.values() if device.role == role]
    if not found:
        raise HardwareError(f"{profile.name}: expected a device in the role of {role}, got none; choose another knob")
    return found


# ------------------------------------------------------------------------------------------------------ numbers of machines


def _scaled(
    name: str, unit: str, changes: str, read: Callable[[Base], Fraction], overrides: Callable[[Base, Fraction, Told], Overrides]
) -> Knob:
    """Make a knob that multiplies numbers of the profile by one factor; a value is one of what `read` gives."""

    def change(base: Base, factor: Fraction, source: str, what: str) -> Changed:
        if factor == ONE:
            return Changed(base.raw, ONE)
        found = overrides(base, factor, Told(f"what-if: {what}", source))
        if not found:
            raise HardwareError(f"--vary {what}: {base.profile.name} has no such number; choose another knob")
        return Changed(base.machine(found), factor, tuple(found))

    def apply(base: Base, setting: Setting) -> Changed:
        factor = setting.factor()
        if factor is not None:
            return change(base, factor, "derived", str(setting))
        before = read(base)
        if not before:
            raise HardwareError(
                f"--vary {setting}: expected a number above 0 in {base.profile.name} to relate it to, got 0; set a raw key"
            )
        value = setting.rate() if unit == "bytes/s" else setting.number()
        if value <= 0:
            raise ConfigError(f"--vary {setting}: expected a number above 0, got {setting.text}")
        return change(base, value / before, "assumed", str(setting))

    def scale(base: Base, factor: Fraction) -> Changed:
        return change(base, factor, "derived", f"{name} {shown(factor)}")

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


# ---------------------------------------------------------------------------------------------------------- PCIe and memory


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


# --------------------------------------------------------------------------------------------------------------------- GPUs


def _gpu(base: Base, setting: Setting) -> Changed:
    other = load_hardware(setting.text, f"--vary {setting}")
    profile = base.profile
    gpus = [device for device in other.devices.values() if device.kind == "gpu" and device.role == "accelerator"]
    replaced = [device for device in profile.devices.values() if device.kind == "gpu" and device.role == "accelerator"]
    for machine, found in ((other, gpus), (profile, replaced)):
        if not found:
            raise HardwareError(f"--vary {setting}: expected a GPU in {machine.name}, got none; choose another knob")
    new = next((device for device in gpus if device.name == other.compute), gpus[0])
    told = Told(f"what-if: GPU of {other.name}")
    overrides = {k: v for device in replaced for k, v in replaced_device(profile, device.name, other, new, told).items()}
    memory = f"{new.memory_bytes / 2**30:.3g} GiB instead of {replaced[0].memory_bytes / 2**30:.3g}"
    words = f"GPU of {other.name}: {memory}; cache and link stay unless varied with it (&)"
    return Changed(base.machine(overrides), None, tuple(overrides), words)


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
            "gpu", "name of a profile", "memory, rates, curves and power of the GPUs are those of that machine's GPU; launches, "
            "the router's way, links and cache stay", _gpu,
        ),
        setting_knob("model.expert_bits", "model.expert_bits", "bits a weight of routed experts", "bits", most=16),
        setting_knob("batch", "workload.batch_size", "requests that run together", "requests", whole=True),
        Knob(
            "cache", "xF, ±P%, a share, a size", "experts that each GPU caches: a share of all, or what fits into a budget",
            cache, cache_scale, cache_size, "", cache_highest,
        ),
        setting_knob("decision_us", "decision_us", "time charged for each decision of a policy", "us"),
        setting_knob("prompt", "workload.prompt_tokens", "prompt tokens of each request", "tokens", whole=True),
        setting_knob("decode", "workload.decode_tokens", "decoded tokens of each request", "tokens", whole=True),
    )
}  # fmt: skip


def knob_of(name: str) -> Knob:
    """Find a knob: one of `KNOBS`, or a key of the profile or the experiment. Raises `ConfigError` if there is neither."""
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
    """Refuse a factor, and a value of the machine, that is out of all proportion to what is there."""
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
