"""Checks across the parts of a hardware profile: what is well-formed but no machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations

from moesim.errors import HardwareError, unknown_name
from moesim.hardware.read import refusal
from moesim.hardware.types import CostCurve, Device, HardwareProfile

_AGREE = Fraction(1, 10)
"""By how much two curves may differ where both hold, as a share of the larger: they were measured apart."""


def check_machine(profile: HardwareProfile, place: str) -> None:
    """Refuse a profile that is no machine."""
    problems = [" ".join(problem.split()) for problem in _problems(profile)]  # a name may hold anything; a message is one line
    if problems:
        raise refusal(place, problems)


def _problems(profile: HardwareProfile) -> Iterator[str]:
    """Find what is wrong, from the outside in; what depends on a wrong name is passed over."""
    yield from _compute(profile)
    yield from _links(profile)
    yield from _backing(profile)
    for device in profile.devices.values():
        yield from _curves(device)
    yield from _cores(profile)
    yield from _contention(profile)


def _unknown(profile: HardwareProfile, key: str, name: str) -> Iterator[str]:
    if name not in profile.devices:
        yield f"{key}: {unknown_name('device', name, profile.devices)}"


def _compute(profile: HardwareProfile) -> Iterator[str]:
    yield from _unknown(profile, "compute", profile.compute)
    if profile.compute in profile.devices and profile.devices[profile.compute].role == "storage":
        yield f"compute: expected a device that computes, got '{profile.compute}', which is a disk; name a GPU or CPU"


def _links(profile: HardwareProfile) -> Iterator[str]:
    for link in profile.links:
        key = f"links.{link.name}"
        for end in (link.src, link.dst):
            yield from _unknown(profile, key, end)
        if link.src == link.dst:
            yield f"{key}: expected two devices, got the same twice"
        if {profile.devices[end].role for end in (link.src, link.dst) if end in profile.devices} == {"storage"}:
            yield f"{key}: expected a disk at one end at most, got two; copy by way of a device with memory"


def _backing(profile: HardwareProfile) -> Iterator[str]:
    for name in profile.backing:
        yield from _unknown(profile, "backing", name)
        if not {name, profile.compute} <= profile.devices.keys():
            continue
        if profile.devices[name].role == "accelerator":
            yield f"backing: expected a host or a disk, got '{name}', which is an accelerator"
        try:
            profile.path_between(name, profile.compute)
            profile.path_between(profile.compute, name)
        except HardwareError as error:
            yield str(error).removeprefix(f"{profile.path}: ")


def _cores(profile: HardwareProfile) -> Iterator[str]:
    """A core is one device's; the links that it copies for may name it as well."""
    for one, two in combinations([device for device in profile.devices.values() if device.cores], 2):
        common = sorted(set(one.cores) & set(two.cores))
        if common and one.host == two.host:
            got = f"{common[0]}, which is {one.name}'s as well"
            yield f"devices.{two.name}.cores: expected cores of its own, got {got}; give it to one of them"


def _contention(profile: HardwareProfile) -> Iterator[str]:
    computing = [device.name for device in profile.devices.values() if device.role != "storage"]
    activities = [f"{name}.{what}" for name in computing for what in ("experts", "dense", "side")]
    activities += [link.name for link in profile.links]
    seen: dict[frozenset[str], int] = {}
    for index, pair in enumerate(profile.contention):
        for end in (pair.a, pair.b):
            if end not in activities:
                yield f"contention.{index}: {unknown_name('activity', end, activities)}"
        if pair.a == pair.b:
            yield f"contention.{index}: expected two activities, got '{pair.a}' twice"
        before = seen.setdefault(frozenset((pair.a, pair.b)), index)
        if before != index:
            got = f"'{pair.a}' and '{pair.b}' as in contention.{before}"
            yield f"contention.{index}: expected each pair once, got {got}; remove one"


def _curves(device: Device) -> Iterator[str]:
    yield from _disagreements(device.experts)
    yield from _disagreements(device.parts)
    for curve in device.parts:
        if curve.part == "context" and not any(c.part == "attention" and c.model == curve.model for c in device.parts):
            yield f"{curve.key}: expected a curve 'attention' of {curve.model} next to its 'context', got none; add it"


def _disagreements(curves: Sequence[CostCurve]) -> Iterator[str]:
    for one, two in combinations(curves, 2):
        if (one.shape, one.model, one.part) != (two.shape, two.model, two.part):
            continue
        first, last = max(one.first, two.first), min(one.last, two.last)
        inside = {n for curve in (one, two) for n in (*(n for n, _ in curve.points), curve.knee) if first < n < last}
        for n in sorted({first, last} | inside) if first <= last else []:
            us = one.us(n), two.us(n)
            if abs(us[0] - us[1]) > _AGREE * max(us):
                got = f"{float(us[1]):g} us instead of {float(us[0]):g} at {n} rows"
                yield (
                    f"{two.key}: expected what {one.key} says where both hold, {first}..{last}, got {got}; "
                    "let their ranges not overlap"
                )
                break
