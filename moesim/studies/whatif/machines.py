"""Machines with a faster part: how each number of a profile changes, and its override.

A profile states costs, not their causes. How each kind of number answers to a faster part is written here once, for
`moesim.studies.whatif.knobs` and `moesim.studies.whatif.limits`; `docs/guide/whatif.md` has the rules in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from moesim.errors import HardwareError
from moesim.hardware import HardwareProfile, weakest
from moesim.hardware.types import CostCurve, Device, ExpertCost, Link, Pair, Transfer

ONE = Fraction(1)
_PPM = 1_000_000
_ALL_READING = ("context",)  # parts that do nothing but read memory


def faster_curve(
    curve: CostCurve, reading_us: Fraction, memory: Fraction, compute: Fraction, floor_us: Fraction = Fraction(0)
) -> CostCurve:
    """Return the curve of a kernel on a device whose memory or processor is faster.

    >>> curve = CostCurve("", "flat_linear", 1, 8, Fraction(100), Fraction(30), knee=4)
    >>> [int(faster_curve(curve, Fraction(100), Fraction(2), ONE).us(n)) for n in (1, 4, 8)]
    [50, 50, 170]
    """
    rows = {curve.first, curve.last, *(n for n, _ in curve.points)} | ({curve.knee} if curve.form == "flat_linear" else set())
    inside = sorted(n for n in rows if curve.first <= n <= curve.last)

    def changed(n_rows: int) -> Fraction:
        whole = curve.us(n_rows)
        # Measured times go up and down; only what all larger numbers of rows take as well is computing.
        computing = max(Fraction(0), min(whole, *(curve.us(n) for n in inside if n >= n_rows)) - reading_us)
        reading = whole - computing
        return max(reading / memory, min(reading, floor_us)) + computing / compute

    if curve.first == curve.last:
        return replace(curve, form="linear", base_us=changed(curve.first), slope_us=Fraction(0), points=())
    for n0, n1 in pairwise(inside):  # where reading ends and computing begins to show
        us0, us1 = curve.us(n0) - reading_us, curve.us(n1) - reading_us
        if us0 * us1 < 0:
            crossing = n0 + (n1 - n0) * us0 / (us0 - us1)
            rows |= {math.floor(crossing), math.ceil(crossing)}
    points = tuple((n, changed(n)) for n in sorted(rows) if curve.first <= n <= curve.last)
    return replace(curve, form="points", points=points, base_us=Fraction(0), slope_us=Fraction(0), knee=0)


def _faster_curves(device: Device, curves: Sequence[CostCurve], memory: Fraction, compute: Fraction) -> tuple[CostCurve, ...]:
    found = []
    for curve in curves:
        same = [c for c in curves if (c.shape, c.model, c.part) == (curve.shape, curve.model, curve.part)]
        reading = min(same, key=lambda c: c.first).us(1)
        part = curve.part or "expert"
        if part in _ALL_READING:
            reading = max(curve.us(n) for n in (curve.first, curve.last, *(n for n, _ in curve.points)))
        floor = device.launch_us * device.launches.get(part, 1) if part not in _ALL_READING else Fraction(0)
        found.append(faster_curve(curve, reading, memory, compute, floor))
    return tuple(found)


def _faster_experts(cost: ExpertCost | None, memory: Fraction, compute: Fraction) -> ExpertCost | None:
    """Return the constants of experts with a faster memory or processor; fixed costs stay."""
    if cost is None:
        return None
    return replace(
        cost,
        read_bytes_per_s=round(cost.read_bytes_per_s * memory),
        few_row_flops=round(cost.few_row_flops * compute),
        many_row_flops=round(cost.many_row_flops * compute),
        read_rates=tuple((size, round(rate * memory)) for size, rate in cost.read_rates),
    )


def faster_device(device: Device, memory: Fraction = ONE, compute: Fraction = ONE) -> Device:
    """Return a device with a faster memory or more operations a second."""
    return replace(
        device,
        memory_bytes_per_s=round(device.memory_bytes_per_s * memory),
        flops=round(device.flops * compute),
        expert_cost=_faster_experts(device.expert_cost, memory, compute),
        experts=_faster_curves(device, device.experts, memory, compute),
        parts=_faster_curves(device, device.parts, memory, compute),
    )


def curves_of(link: Link) -> list[Transfer]:
    """List the distinct transfer curves of a link, that of activations last."""
    return list({curve.key: curve for curve in (*link.curves.values(), *([link.activation] if link.activation else []))}.values())


def constant_us(transfer: Transfer) -> Fraction:
    """Return a copy's latency: stated, or of the line through the two smallest copies."""
    if not transfer.points:
        return transfer.latency_us
    (n0, us0), (n1, us1) = transfer.points[:2]
    return max(Fraction(0), us0 - (us1 - us0) * Fraction(n0, n1 - n0))


def rate_of(transfer: Transfer) -> Fraction:
    """Return bytes/s of large copies: stated, or of the largest copy without its constant part."""
    if not transfer.points:
        return Fraction(transfer.bytes_per_s)
    n_bytes, us = transfer.points[-1]
    moving = us - constant_us(transfer)
    return n_bytes * _PPM / moving if moving else Fraction(0)


def faster_transfer(transfer: Transfer, rate: Fraction = ONE, latency: Fraction = ONE) -> Transfer:
    """Return a transfer curve with another rate or latency."""
    if not transfer.points:
        return replace(transfer, latency_us=transfer.latency_us * latency, bytes_per_s=round(transfer.bytes_per_s * rate))
    fixed = constant_us(transfer)
    points = tuple((n, fixed * latency + max(us - fixed, Fraction(0)) / rate) for n, us in transfer.points)
    return replace(transfer, points=points)


def wire_factors(link: Link, factor: Fraction) -> dict[str, Fraction]:
    """Return the factor of each transfer curve when only the wire gets faster."""
    fastest = rate_of(link.curves["pinned"]) if "pinned" in link.curves else max(rate_of(c) for c in link.curves.values())
    found = {}
    for curve in curves_of(link):
        own = rate_of(curve)
        wire = min(1 / fastest, 1 / own)
        found[curve.key] = (1 / own) / (1 / own - wire + wire / factor)
    return found


def shared_memory(profile: HardwareProfile, pair: Pair) -> tuple[Device, Link] | None:
    """Return host and link if a pair is of the host's memory: experts, and copies without core."""
    links = {link.name: link for link in profile.links}
    for experts, other in ((pair.a, pair.b), (pair.b, pair.a)):
        name, _, what = experts.partition(".")
        if what != "experts" or other not in links or name not in profile.devices:
            continue
        device, link = profile.devices[name], links[other]
        if device.role == "host" and not link.cores and name in (link.src, link.dst):
            return None if pair.a_rate_ppm == pair.b_rate_ppm == _PPM else (device, link)
    return None


def shared_rates(
    kept: tuple[Fraction, Fraction], drawn: tuple[Fraction, Fraction], memory: Fraction, link: Fraction
) -> tuple[Fraction, Fraction]:
    """Share a memory's capacity between experts and a link after one became faster.

    >>> before = (Fraction(66, 100), Fraction(86, 100))
    >>> [f"{float(share):.3f}" for share in shared_rates(before, (Fraction(66), Fraction(24)), ONE, ONE)]
    ['0.660', '0.860']
    >>> [f"{float(share):.3f}" for share in shared_rates(before, (Fraction(66), Fraction(24)), Fraction(2), ONE)]
    ['0.791', '1.000']
    """
    capacity = memory * (kept[0] * drawn[0] + kept[1] * drawn[1])
    experts, copies = drawn[0] * memory, drawn[1] * link
    ratio = kept[0] / kept[1]
    share = capacity / (ratio * experts + copies)
    if share >= 1:
        return min(ONE, (capacity - copies) / experts), ONE
    if ratio * share >= 1:
        return ONE, min(ONE, (capacity - experts) / copies)
    return ratio * share, share


def shared_shares(
    profile: HardwareProfile, pair: Pair, memory: Fraction = ONE, link: Fraction = ONE
) -> tuple[Fraction, Fraction]:
    """Return the rates of a pair on the changed machine."""
    rates = Fraction(pair.a_rate_ppm, _PPM), Fraction(pair.b_rate_ppm, _PPM)
    found = shared_memory(profile, pair)
    if found is None:
        return rates
    device, copied = found
    drawn = Fraction(device.memory_bytes_per_s), max(rate_of(curve) for curve in copied.curves.values())
    if pair.b == copied.name:
        return shared_rates(rates, drawn, memory, link)
    experts, copies = shared_rates((rates[1], rates[0]), drawn, memory, link)
    return copies, experts


_PROOF = {"published": "ref", "spec-sheet": "ref", "derived": "how", "assumed": "why"}
_OF_A_DEVICE = ("memory_bytes", "memory_bytes_per_s", "flops", "idle_w", "busy_w")

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """The label of changed numbers."""

    why: str  # what was changed, in words
    # the strongest label a changed number may have: `"derived"` for one computed from the profile's, `"assumed"` for one that was
    # made up. A weaker one stays
    source: str = "derived"

    def number(self, value: Any, *before: str) -> dict[str, Any]:
        source = weakest((self.source, *before))
        return {"value": value, "source": source, _PROOF[source]: self.why}


def changed_number(profile: HardwareProfile, key: str, value: Any, told: Told) -> Overrides:
    """Write one number of a profile anew."""
    if key not in profile.numbers:
        return {key: told.number(value)}
    before = profile.numbers[key]
    found, here = told.number(value, before.source), before.value
    if before.interval and isinstance(value, int | float) and isinstance(here, int | float) and here:
        ends = [end * value / here for end in before.interval]  # as sure as it was
        found["interval"] = [min(1.0, end) for end in ends] if key.endswith("_rate") else ends  # nothing keeps more than its rate
    return {key: found}


def _float(value: Fraction) -> float:
    return round(float(value), 9)


def written_curve(profile: HardwareProfile, curve: CostCurve, told: Told) -> dict[str, Any]:
    """Write a curve as a profile's file does."""
    before = [number.source for key, number in profile.numbers.items() if key.startswith(f"{curve.key}.")]

    def number(value: Any) -> dict[str, Any]:
        return told.number(value, *before)

    written: dict[str, Any] = {"form": curve.form, "range": [curve.first, curve.last]}
    if curve.form == "points":
        written["points"] = number([[float(n), _float(us)] for n, us in curve.points])
    elif curve.form == "linear":
        written |= {"base_us": number(_float(curve.base_us)), "per_token_us": number(_float(curve.slope_us))}
    else:
        written |= {"flat_us": number(_float(curve.base_us)), "per_token_us": number(_float(curve.slope_us))}
        written["knee_tokens"] = number(curve.knee)
    if curve.shape is not None:
        hidden, intermediate, bits = curve.shape
        written["shape"] = {"hidden": hidden, "intermediate": intermediate, "bits": bits}
        if curve.first_extra_us is not None:
            written["first_extra_us"] = number(_float(curve.first_extra_us))
    else:
        written |= {"model": curve.model, "part": curve.part}
    return written


def faster_devices(
    profile: HardwareProfile, devices: Iterable[Device], memory: Fraction, compute: Fraction, told: Told
) -> Overrides:
    """Write devices with a faster memory or more operations a second; see `faster_device`."""
    found: Overrides = {}
    for device in devices:
        new, key = faster_device(device, memory, compute), f"devices.{device.name}"
        if memory != ONE:
            found |= changed_number(profile, f"{key}.memory_bytes_per_s", float(new.memory_bytes_per_s), told)
        if compute != ONE:
            found |= changed_number(profile, f"{key}.flops", float(new.flops), told)
        for name in ("read_bytes_per_s", "few_row_flops", "many_row_flops"):
            written = f"{key}.expert_cost.{name}"
            if written in profile.numbers and getattr(new.expert_cost, name) != getattr(device.expert_cost, name):
                found |= changed_number(profile, written, float(getattr(new.expert_cost, name)), told)
        for i, (_, rate) in enumerate(new.expert_cost.read_rates if new.expert_cost and memory != ONE else ()):
            found |= changed_number(profile, f"{key}.expert_cost.read_rates.{i}.bytes_per_s", float(rate), told)
        for what, before, after in (("experts", device.experts, new.experts), ("parts", device.parts, new.parts)):
            if before:
                found[f"{key}.{what}"] = [written_curve(profile, curve, told) for curve in after]
    return found


def replaced_device(profile: HardwareProfile, name: str, other: HardwareProfile, new: Device, told: Told) -> Overrides:
    """Put another machine's device in the place of one; launches and router stay."""
    found: Overrides = {}
    prefix = f"devices.{new.name}."
    for key, number in other.numbers.items():
        what = key.removeprefix(prefix)
        if key.startswith(prefix) and (what in _OF_A_DEVICE or what.startswith("expert_cost.")):
            found[f"devices.{name}.{what}"] = Told(f"{told.why}: {number.ref}").number(number.value, number.source)
    for what, curves in (("experts", new.experts), ("parts", new.parts)):
        if curves or getattr(profile.devices[name], what):
            found[f"devices.{name}.{what}"] = [written_curve(other, curve, told) for curve in curves]
    return found


def faster_links(profile: HardwareProfile, factors: Mapping[str, Fraction], told: Told, *, latency: Fraction = ONE) -> Overrides:
    """Write transfer curves with other rates and latencies."""
    found: Overrides = {}
    for curve in (one for link in profile.links for one in curves_of(link)):
        if curve.key not in factors:
            continue
        new = faster_transfer(curve, factors[curve.key], latency)
        if curve.points:
            points = [[float(n), _float(us)] for n, us in new.points]
            found |= changed_number(profile, f"{curve.key}.points", points, told)
            continue
        if new.bytes_per_s != curve.bytes_per_s:
            found |= changed_number(profile, f"{curve.key}.bytes_per_s", float(new.bytes_per_s), told)
        if new.latency_us != curve.latency_us:
            found |= changed_number(profile, f"{curve.key}.latency_us", _float(new.latency_us), told)
    return found


def shared_memories(
    profile: HardwareProfile, told: Told, *, memory: Fraction = ONE, hosts: Sequence[str] = (), links: Mapping[str, Fraction] = {}
) -> Overrides:
    """Write the rates that a host's memory leaves to experts and a link."""
    found: Overrides = {}
    for index, pair in enumerate(profile.contention):
        host = next((end.partition(".")[0] for end in (pair.a, pair.b) if "->" not in end), "")
        link = next((links[end] for end in (pair.a, pair.b) if end in links), ONE)
        rates = shared_shares(profile, pair, memory if host in hosts else ONE, link)
        for key, rate, before in (("a_rate", rates[0], pair.a_rate_ppm), ("b_rate", rates[1], pair.b_rate_ppm)):
            if round(rate * _PPM) != before:
                found |= changed_number(profile, f"contention.{index}.{key}", round(float(rate), 6), told)
    return found


def main_link(profile: HardwareProfile) -> Link:
    """Return the last link of weights to the compute device. Raises `HardwareError` without one."""
    way = profile.path_between(profile.backing[0], profile.compute)
    if not way:
        raise HardwareError(
            f"{profile.name}: expected a link from {profile.backing[0]} to another device, got none; choose another knob"
        )
    return way[-1]
