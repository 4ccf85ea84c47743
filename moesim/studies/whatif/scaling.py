"""A machine with another memory, processor, GPU or link: what of a profile's numbers changes, and how.

A profile states costs, not their causes. How each kind of number answers to a faster part is said here once, for
`moesim.studies.whatif.knobs` (which writes it as overrides of a profile) and `moesim.studies.whatif.limits` (which asks what
a part that took no time would save). `docs/guide/whatif.md` has the rules in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from moesim.hardware.types import CostCurve, Device, ExpertCost, HardwareProfile, Link, Pair, Transfer

ONE = Fraction(1)
_PPM = 1_000_000
_ALL_READING = ("context",)  # parts that do nothing but read memory


def faster_curve(
    curve: CostCurve, reading_us: Fraction, memory: Fraction, compute: Fraction, floor_us: Fraction = Fraction(0)
) -> CostCurve:
    """Give the curve of a kernel on a device whose memory or processor is faster.

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
    """Give the constants of experts with a faster memory or processor; what an expert or row takes whatever its size stays."""
    if cost is None:
        return None
    return replace(
        cost,
        read_bytes_per_s=round(cost.read_bytes_per_s * memory),
        few_row_flops=round(cost.few_row_flops * compute),
        many_row_flops=round(cost.many_row_flops * compute),
    )


def faster_device(device: Device, memory: Fraction = ONE, compute: Fraction = ONE) -> Device:
    """Give a device with a faster memory or more operations a second."""
    return replace(
        device,
        memory_bytes_per_s=round(device.memory_bytes_per_s * memory),
        flops=round(device.flops * compute),
        expert_cost=_faster_experts(device.expert_cost, memory, compute),
        experts=_faster_curves(device, device.experts, memory, compute),
        parts=_faster_curves(device, device.parts, memory, compute),
    )


# ------------------------------------------------------------------------------------------------------------------ links


def curves_of(link: Link) -> list[Transfer]:
    """List the distinct transfer curves of a link, that of activations last."""
    return list({curve.key: curve for curve in (*link.curves.values(), *([link.activation] if link.activation else []))}.values())


def constant_us(transfer: Transfer) -> Fraction:
    """Return what a copy takes whatever its size: the latency, or the line through the two smallest copies at 0 bytes."""
    if not transfer.points:
        return transfer.latency_us
    (n0, us0), (n1, us1) = transfer.points[:2]
    return max(Fraction(0), us0 - (us1 - us0) * Fraction(n0, n1 - n0))


def rate_of(transfer: Transfer) -> Fraction:
    """Return bytes a second of large copies: the stated rate, or that of the largest measured copy without its constant part."""
    if not transfer.points:
        return Fraction(transfer.bytes_per_s)
    n_bytes, us = transfer.points[-1]
    moving = us - constant_us(transfer)
    return n_bytes * _PPM / moving if moving else Fraction(0)


def faster_transfer(transfer: Transfer, rate: Fraction = ONE, latency: Fraction = ONE) -> Transfer:
    """Give a transfer curve with another rate or latency."""
    if not transfer.points:
        return replace(transfer, latency_us=transfer.latency_us * latency, bytes_per_s=round(transfer.bytes_per_s * rate))
    fixed = constant_us(transfer)
    points = tuple((n, fixed * latency + max(us - fixed, Fraction(0)) / rate) for n, us in transfer.points)
    return replace(transfer, points=points)


def wire_factors(link: Link, factor: Fraction) -> dict[str, Fraction]:
    """Say by how much each transfer curve gets faster when only the wire does."""
    fastest = rate_of(link.curves["pinned"]) if "pinned" in link.curves else max(rate_of(c) for c in link.curves.values())
    found = {}
    for curve in curves_of(link):
        own = rate_of(curve)
        wire = min(1 / fastest, 1 / own)
        found[curve.key] = (1 / own) / (1 / own - wire + wire / factor)
    return found


# ------------------------------------------------------------------------------------------------------------- contention


def shared_memory(profile: HardwareProfile, pair: Pair) -> tuple[Device, Link] | None:
    """Tell whether a pair is about the memory of a host: its experts beside a link whose copies no core of it makes."""
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
    """Share a memory's capacity between the experts of a processor and a link, after one of them has become faster.

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
    """Give the rates of a pair, ``a`` and ``b``, on the changed machine; as they are if the pair is not about a host's memory."""
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
