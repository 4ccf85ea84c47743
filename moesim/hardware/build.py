"""From the contents of a hardware profile's YAML to a checked `HardwareProfile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

from moesim.errors import HardwareError, unknown_name
from moesim.hardware.read import refusal, validate
from moesim.hardware.schema import BytePoints, Curve, ExpertCostFile, Flops, Points, ProfileFile, Rate, Sourced, Strict, Time
from moesim.hardware.short import whole_form
from moesim.hardware.types import TRANSFERS, CostCurve, Device, ExpertCost, HardwareProfile, Link, Number, Pair, Transfer, weakest

_PPM = 1_000_000
_ROLES = {"gpu": "accelerator", "cpu": "host", "disk": "storage"}


def build_profile(
    raw: Mapping[str, Any], place: str, *, path: str | None = None, overrides: tuple[str, ...] = ()
) -> HardwareProfile:
    """Build a profile from the contents of its YAML; ``place`` is the file or key for messages."""
    checked = validate(whole_form(raw, place), place)
    if nameless := [name for name in checked.links if len(name.split("->")) != 2 or not all(name.split("->"))]:
        raise refusal(place, [_misnamed(" ".join(name.split())) for name in nameless])
    links = tuple(_link(name, checked) for name in checked.links)
    profile = HardwareProfile(
        name=checked.name, path=path or place, description=" ".join(checked.description.split()),
        corrections=tuple(" ".join(note.split()) for note in checked.corrections), compute=checked.compute,
        backing=tuple(checked.backing), devices={name: _device(name, checked) for name in checked.devices},
        links=links, contention=tuple(_pair(index, checked) for index in range(len(checked.contention))),
        host_us={name: _plain(one) for name, one in checked.host_us.items()},
        numbers=dict(_numbers(checked, "")), overrides=overrides, machine=dict(checked.machine),
        **{"platform_w": None} | _given(checked),
    )  # fmt: skip
    check_machine(profile, place)
    return profile


def _plain(number: Any) -> Any:
    """Convert a number of the file: times to exact decimals, rates to integers."""
    if isinstance(number, Points | BytePoints):
        return tuple((int(n), Fraction(repr(us))) for n, us in number.value)
    if isinstance(number, Time):
        return Fraction(repr(number.value))
    return round(number.value) if isinstance(number, Rate | Flops) else number.value


def _given(part: Strict) -> dict[str, Any]:
    return {name: _plain(one) for name, one in part if isinstance(one, Sourced)}


def _numbers(value: Any, key: str) -> Iterator[tuple[str, Number]]:
    if isinstance(value, Sourced):
        yield key, Number(value.value, value.source, value.proof(), value.interval)  # type: ignore[attr-defined]
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{key}.{index}")
    elif hasattr(type(value), "model_fields"):
        for name in type(value).model_fields:
            if name != "anchors":
                yield from _numbers(getattr(value, name), f"{key}.{name}" if key else name)


_NAMES = {"flat_us": "base_us", "per_token_us": "slope_us", "knee_tokens": "knee"}


def _curve(curve: Curve, key: str) -> CostCurve:
    shape = getattr(curve, "shape", None)
    return CostCurve(
        key, curve.form, *curve.range,
        shape=(shape.hidden, shape.intermediate, float(shape.bits)) if shape else None,
        model=getattr(curve, "model", ""), part=getattr(curve, "part", ""),
        **{_NAMES.get(name, name): number for name, number in _given(curve).items()},
    )  # fmt: skip


def _expert_cost(cost: ExpertCostFile | None, memory_bytes_per_s: int) -> ExpertCost | None:
    if cost is None:
        return None
    given = _given(cost)
    read = round(memory_bytes_per_s * Fraction(repr(given.pop("read_share", 1.0))))
    usual = {"per_expert_us": Fraction(0), "per_row_us": Fraction(0), "read_bytes_per_s": read}
    rates = tuple((point.bytes, round(point.bytes_per_s.value)) for point in cost.read_rates)
    largest = {"read_bytes_per_s": rates[-1][1]} if rates else {}
    return ExpertCost(**usual | given | largest, read_rates=rates)


def _device(name: str, profile: ProfileFile) -> Device:
    given = profile.devices[name]
    key, numbers = f"devices.{name}", _given(given)
    return Device(
        name=name, kind=given.kind, host=given.host,
        launches={part: count.value for part, count in given.launches.items()},
        experts=tuple(_curve(curve, f"{key}.experts.{i}") for i, curve in enumerate(given.experts)),
        parts=tuple(_curve(curve, f"{key}.parts.{i}") for i, curve in enumerate(given.parts)),
        predict={source: _curve(curve, f"{key}.predict.{source}") for source, curve in given.predict.items()},
        role=given.role or _ROLES[given.kind],
        expert_cost=_expert_cost(given.expert_cost, numbers.get("memory_bytes_per_s", 0)),
        operations=given.operations or "", cores=tuple(given.cores or ()), memory_of=given.memory_of or "", **numbers,
    )  # fmt: skip


def _misnamed(link: str) -> str:
    return f"links.{link}: expected a name such as 'cpu0->gpu0', got '{link}'; rename it"


def _link(name: str, profile: ProfileFile) -> Link:
    given = profile.links[name]
    ends = name.split("->")
    curves = {}
    for kind in TRANSFERS:
        which = kind if getattr(given, kind) else "any"
        curve = getattr(given, which)
        if curve:
            curves[kind] = Transfer(f"links.{name}.{which}", **_given(curve))
    activation, share = None, False
    if given.activation:
        activation = Transfer(f"links.{name}.activation", **_given(given.activation))
        share = given.activation.share_link
    return Link(name, ends[0], ends[1], given.medium, curves, activation, share, tuple(given.cores or ()))


def _pair(index: int, profile: ProfileFile) -> Pair:
    given = profile.contention[index]
    source = weakest((given.a_rate.source, given.b_rate.source))
    return Pair(given.a, given.b, round(given.a_rate.value * _PPM), round(given.b_rate.value * _PPM), source)


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
    yield from _one_memory(profile)
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


def _one_memory(profile: HardwareProfile) -> Iterator[str]:
    """A memory is shared by a host and an accelerator, whose rates together its own bounds."""
    pairs = {frozenset((pair.a, pair.b)) for pair in profile.contention}
    for device in profile.devices.values():
        if not device.memory_of:
            continue
        key, other = f"devices.{device.name}.memory_of", profile.devices.get(device.memory_of)
        yield from _unknown(profile, key, device.memory_of)
        if other is None:
            continue
        if (device.role, other.role, device.host) != ("accelerator", "host", other.host):
            yield f"{key}: expected a host next to an accelerator, got '{other.name}'; name the processor whose memory it shares"
        elif device.memory_bytes > other.memory_bytes:
            got = f"got {device.memory_bytes}; correct one"
            yield f"{key}: expected memory_bytes of at most {other.memory_bytes}, those of {other.name}, {got}"
        elif frozenset((a := f"{other.name}.experts", b := f"{device.name}.experts")) not in pairs:
            rates = other.memory_bytes_per_s, device.memory_bytes_per_s
            share = f"{max(rates) / sum(rates):.2f} each if they read together what the faster one reads alone"
            yield f"{key}: expected contention of {a} with {b}, got none; add rates, {share}"


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
