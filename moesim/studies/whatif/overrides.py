"""Changes of a machine as an experiment writes them: dotted keys of its profile with new numbers, each with its label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from moesim.errors import HardwareError
from moesim.hardware import HardwareProfile, weakest
from moesim.hardware.types import CostCurve, Device, Link
from moesim.studies.whatif.scaling import ONE, curves_of, faster_device, faster_transfer, shared_shares

_PROOF = {"published": "ref", "spec-sheet": "ref", "derived": "how", "assumed": "why"}
_OF_A_DEVICE = ("memory_bytes", "memory_bytes_per_s", "flops", "idle_w", "busy_w")
_PPM = 1_000_000

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """How changed numbers are labelled."""

    why: str  # what was changed, in words
    # the strongest label a changed number may have: `"derived"` for one computed from the profile's, `"assumed"` for one that was
    # made up. A weaker one stays
    source: str = "derived"

    def number(self, value: Any, *before: str) -> dict[str, Any]:
        """Write a number that comes of others with these labels."""
        source = weakest((self.source, *before))
        return {"value": value, "source": source, _PROOF[source]: self.why}


def changed_number(profile: HardwareProfile, key: str, value: Any, told: Told) -> Overrides:
    """Write one number of a profile anew."""
    return {key: told.number(value, profile.numbers[key].source)} if key in profile.numbers else {key: told.number(value)}


def _float(value: Fraction) -> float:
    return round(float(value), 9)


def written_curve(profile: HardwareProfile, curve: CostCurve, told: Told) -> dict[str, Any]:
    """Write a curve as a profile's file does.

    Gives ``form``, ``range`` and the numbers of the form, with ``shape``, or ``model`` and ``part``.
    """
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
    """Give devices a faster memory or more operations a second; see `moesim.studies.whatif.scaling.faster_device`."""
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
        for what, before, after in (("experts", device.experts, new.experts), ("parts", device.parts, new.parts)):
            if before:
                found[f"{key}.{what}"] = [written_curve(profile, curve, told) for curve in after]
    return found


def replaced_device(profile: HardwareProfile, name: str, other: HardwareProfile, new: Device, told: Told) -> Overrides:
    """Put another machine's device in the place of one: its memory, rates, curves and power; launches and router stay."""
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
    """Give transfer curves other rates and latencies."""
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
    """Give pairs of a host's experts and a link the rates that the capacity of the host's memory leaves them."""
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
    """Return the last link on the way of weights to the compute device. Raises `HardwareError` if they need none."""
    way = profile.path_between(profile.backing[0], profile.compute)
    if not way:
        raise HardwareError(
            f"{profile.name}: expected a link from {profile.backing[0]} to another device, got none; choose another knob"
        )
    return way[-1]
