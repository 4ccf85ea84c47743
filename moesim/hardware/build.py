"""From the contents of a hardware profile's YAML to a checked `HardwareProfile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from moesim.errors import HardwareError
from moesim.hardware.check import check_machine
from moesim.hardware.curve_schema import Curve, ExpertCostFile
from moesim.hardware.numbers import Sourced
from moesim.hardware.read import validate
from moesim.hardware.schema import ProfileFile, TransferFile
from moesim.hardware.types import (
    TRANSFERS,
    CostCurve,
    Device,
    ExpertCost,
    HardwareProfile,
    Link,
    Number,
    Pair,
    Transfer,
    weakest,
)

_PPM = 1_000_000
_ROLES = {"gpu": "accelerator", "cpu": "host", "disk": "storage"}


def build_profile(
    raw: Mapping[str, Any], place: str, *, path: str | None = None, overrides: tuple[str, ...] = ()
) -> HardwareProfile:
    """Build a profile from what the YAML holds; ``place`` is the file or key for messages. Raises `HardwareError`."""
    checked = validate(raw, place)
    links = tuple(_link(name, checked, place) for name in checked.links)
    profile = HardwareProfile(
        name=checked.name,
        path=path or place,
        description=" ".join(checked.description.split()),
        corrections=tuple(" ".join(note.split()) for note in checked.corrections),
        compute=checked.compute,
        backing=tuple(checked.backing),
        devices={name: _device(name, checked) for name in checked.devices},
        links=links,
        contention=tuple(_pair(index, checked) for index in range(len(checked.contention))),
        platform_w=checked.platform_w.value if checked.platform_w else None,
        numbers=dict(_numbers(checked, "")),
        overrides=overrides,
        machine=dict(checked.machine),
        host_expert_us=_exact(checked.host_expert_us),
        host_shared=checked.host_shared.value if checked.host_shared else False,
    )
    check_machine(profile, place)
    return profile


def _exact(number: Any) -> Fraction:
    """Take a number of the file at its decimal value, so that results do not depend on binary rounding."""
    return Fraction(0) if number is None else Fraction(repr(number.value))


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


def _curve(curve: Curve, key: str) -> CostCurve:
    shape = getattr(curve, "shape", None)
    extra = getattr(curve, "first_extra_us", None)
    flat = curve.form == "flat_linear"
    return CostCurve(
        key=key,
        form=curve.form,
        first=curve.range[0],
        last=curve.range[1],
        base_us=_exact(curve.flat_us if flat else curve.base_us),
        slope_us=_exact(curve.per_token_us),
        knee=curve.knee_tokens.value if curve.knee_tokens else 0,
        points=tuple((int(n), Fraction(repr(us))) for n, us in curve.points.value) if curve.points else (),
        shape=(shape.hidden, shape.intermediate, float(shape.bits)) if shape else None,
        model=getattr(curve, "model", ""),
        part=getattr(curve, "part", ""),
        first_extra_us=_exact(extra) if extra else None,
    )


def _expert_cost(cost: ExpertCostFile | None, memory_bytes_per_s: int) -> ExpertCost | None:
    if cost is None:
        return None
    return ExpertCost(
        per_expert_us=_exact(cost.per_expert_us),
        per_row_us=_exact(cost.per_row_us),
        read_bytes_per_s=round(cost.read_bytes_per_s.value) if cost.read_bytes_per_s else memory_bytes_per_s,
        few_row_flops=round(cost.few_row_flops.value),
        many_row_flops=round(cost.many_row_flops.value) if cost.many_row_flops else 0,
        crossover_rows=cost.crossover_rows.value if cost.crossover_rows else 0,
    )


def _device(name: str, profile: ProfileFile) -> Device:
    given = profile.devices[name]
    key = f"devices.{name}"
    rate = round(given.memory_bytes_per_s.value) if given.memory_bytes_per_s else 0
    return Device(
        name=name,
        kind=given.kind,
        host=given.host,
        memory_bytes=given.memory_bytes.value,
        workspace_bytes=given.workspace_bytes.value if given.workspace_bytes else 0,
        memory_bytes_per_s=rate,
        flops=round(given.flops.value) if given.flops else 0,
        launch_us=_exact(given.launch_us),
        launches={part: count.value for part, count in given.launches.items()},
        router_us=_exact(given.router_us),
        first_extra_us=_exact(given.first_extra_us) if given.first_extra_us else None,
        experts=tuple(_curve(curve, f"{key}.experts.{i}") for i, curve in enumerate(given.experts)),
        parts=tuple(_curve(curve, f"{key}.parts.{i}") for i, curve in enumerate(given.parts)),
        predict={source: _curve(curve, f"{key}.predict.{source}") for source, curve in given.predict.items()},
        idle_w=given.idle_w.value if given.idle_w else None,
        busy_w=given.busy_w.value if given.busy_w else None,
        role=given.role or _ROLES[given.kind],
        expert_cost=_expert_cost(given.expert_cost, rate),
        operations=given.operations or "",
        operation_us=_exact(given.operation_us),
        token_us=_exact(given.token_us),
        latent_attention_us=_exact(given.latent_attention_us),
        cores=tuple(given.cores or ()),
    )


def _link(name: str, profile: ProfileFile, place: str) -> Link:
    given = profile.links[name]
    ends = name.split("->")
    if len(ends) != 2 or not all(ends):
        shown = " ".join(name.split())
        raise HardwareError(f"{place}: links.{shown}: expected a name such as 'cpu0->gpu0', got '{shown}'; rename it")
    curves = {}
    for kind in TRANSFERS:
        which = kind if getattr(given, kind) else "any"
        curve = getattr(given, which)
        if curve:
            curves[kind] = _transfer(curve, f"links.{name}.{which}")
    activation, share = None, False
    if given.activation:
        activation = _transfer(given.activation, f"links.{name}.activation")
        share = given.activation.share_link
    return Link(name, ends[0], ends[1], given.medium, curves, activation, share, tuple(given.cores or ()))


def _transfer(curve: TransferFile, key: str) -> Transfer:
    rate = round(curve.bytes_per_s.value) if curve.bytes_per_s else 0
    points = tuple((int(n), Fraction(repr(us))) for n, us in curve.points.value) if curve.points else ()
    return Transfer(key, _exact(curve.latency_us), rate, points)


def _pair(index: int, profile: ProfileFile) -> Pair:
    given = profile.contention[index]
    source = weakest((given.a_rate.source, given.b_rate.source))
    return Pair(given.a, given.b, round(given.a_rate.value * _PPM), round(given.b_rate.value * _PPM), source)
