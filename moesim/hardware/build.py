"""From the contents of a hardware profile's YAML to a checked `HardwareProfile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from moesim.hardware.check import check_machine
from moesim.hardware.implied import whole_form
from moesim.hardware.numbers import BytePoints, Flops, Points, Rate, Sourced, Strict, Time
from moesim.hardware.read import refusal, validate
from moesim.hardware.schema import Curve, ExpertCostFile, ProfileFile
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
    """Convert the numbers of a part of the file, by name."""
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
    usual = {"per_expert_us": Fraction(0), "per_row_us": Fraction(0), "read_bytes_per_s": memory_bytes_per_s}
    return ExpertCost(**usual | _given(cost))


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
        operations=given.operations or "", cores=tuple(given.cores or ()), **numbers,
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
