"""Checks of a run's records that trust neither engine nor metrics: each from the rules in docs/reference/engine.md."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from moesim.hardware import HardwareProfile
from moesim.metrics.breakdown import breakdown
from moesim.metrics.machine import Machine
from moesim.model import ModelSpec
from moesim.policy import Placement
from moesim.records import Records


def overlaps(spans: Iterable[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """Give the first pair of spans that overlap."""
    return [pair for pair in pairwise(sorted(spans)) if pair[0][1] > pair[1][0]][:1]


def faults(records: Records, hardware: HardwareProfile, model: ModelSpec, placement: Placement) -> list[str]:
    """List what is wrong with a run; empty if nothing is."""
    return [
        *_lanes(records), *_links(records, hardware), *_bytes(records, model), *_pools(records, hardware, model, placement),
        *_memory(records, hardware), *_weights(records, hardware, placement), *_hits(records, hardware, placement),
        *_layers(records), *_sum(records, hardware), *_cut_off(records), *_balance(records, hardware, model),
        *_slowed(records, hardware),
    ]  # fmt: skip


def _lanes(records: Records) -> list[str]:
    lanes = defaultdict(list)
    for task in records.tasks:
        lanes[task.device, task.lane].append((task.start, task.end))
    found = [f"lane {lane} runs two tasks: {both}" for lane, spans in lanes.items() for both in overlaps(spans)]
    for task in records.tasks:
        if not task.submitted <= task.ready <= task.start <= task.end or task.end - task.start < task.work:
            found.append(f"a task begins before it is ready, or is shorter than its work: {task}")
    return found


def _links(records: Records, hardware: HardwareProfile) -> list[str]:
    media = {link.name: link.medium or link.name for link in hardware.links}
    busy = defaultdict(list)
    for transfer in records.transfers:
        busy[media[transfer.link]].append((transfer.start, transfer.end))
        if not transfer.submitted <= transfer.start <= transfer.end:
            return [f"a transfer begins before it is asked for: {transfer}"]
    return [f"two transfers on {medium}: {both}" for medium, spans in busy.items() for both in overlaps(spans)]


def _bytes(records: Records, model: ModelSpec) -> list[str]:
    """The pieces of a fetch that has arrived are one expert, on each link that it passed."""
    moved: Counter[tuple[int, str]] = Counter()
    of_fetch, arrived = {}, set()
    for transfer in records.transfers:
        if transfer.expert >= 0 and transfer.cause not in ("message", "activation"):
            moved[transfer.fetch, transfer.link] += transfer.n_bytes + transfer.left
            of_fetch[transfer.fetch] = model.expert_bytes(transfer.layer, transfer.bits)
            if transfer.last:
                arrived.add(transfer.fetch)
    return [
        f"fetch {fetch} moved {n} bytes over {link}, an expert has {of_fetch[fetch]}"
        for (fetch, link), n in moved.items()
        if n > of_fetch[fetch] or (fetch in arrived and n != of_fetch[fetch])
    ][:3]


Lives = dict[tuple[str, int, int, float | None], list[tuple[int, int]]]
_FOREVER = 1 << 62


def _lives(records: Records, hardware: HardwareProfile, placement: Placement) -> Lives:
    """When each copy was on a device: from its arrival to its eviction."""
    came, went = defaultdict(list), defaultdict(list)
    for copy in placement.copies:
        for expert in copy.experts:
            came[copy.device, copy.layer, expert, copy.bits].append(0)
    for transfer in records.transfers:
        if transfer.last and transfer.expert >= 0 and transfer.cause not in ("message", "activation", "write-back"):
            came[hardware.link(transfer.link).dst, transfer.layer, transfer.expert, transfer.bits].append(transfer.end)
    for gone in records.evictions:
        went[gone.device, gone.layer, gone.expert, gone.bits].append(gone.time)
    return {
        unit: list(zip(sorted(times), [*sorted(went[unit]), *[_FOREVER] * len(times)], strict=False))
        for unit, times in came.items()
    }


def _weights(records: Records, hardware: HardwareProfile, placement: Placement) -> list[str]:
    lives = _lives(records, hardware, placement)
    found = [f"{unit} is there twice: {both}" for unit, spans in lives.items() for both in overlaps(spans)]
    for task in records.tasks:
        if task.kind == "expert" and task.device not in hardware.backing:
            spans = lives.get((task.device, task.layer, task.expert, task.bits), [])
            if not any(begin <= task.start and task.end <= end for begin, end in spans):
                found.append(f"computed without its weights: {task}")
    return found[:3]


def _hits(records: Records, hardware: HardwareProfile, placement: Placement) -> list[str]:
    """A hit is an expert on an accelerator when its layer is routed; a copy that ends then counts, one that goes then may."""
    accelerators = [name for name, device in hardware.devices.items() if device.kind == "gpu"]
    lives = _lives(records, hardware, placement)
    widths = {bits for _, _, _, bits in lives}  # a copy of any width is a hit
    for visit in records.lookups:
        for expert, hit in zip(visit.active, visit.hits, strict=True):
            spans = [
                span for device in accelerators for bits in widths for span in lives.get((device, visit.layer, expert, bits), [])
            ]
            surely = any(begin <= visit.time < end for begin, end in spans)
            maybe = any(begin <= visit.time <= end for begin, end in spans)
            if hit != surely and not (maybe and any(visit.time == end for _, end in spans)):
                return [f"expert {expert} of layer {visit.layer} at {visit.time}: hit {hit}, there {spans}"]
    return []


def _pools(records: Records, hardware: HardwareProfile, model: ModelSpec, placement: Placement) -> list[str]:
    sizes: Counter[tuple[str, str]] = Counter()
    for pool in placement.pools:
        sizes[pool.device, pool.name] += sum(pool.sizes(model.n_layers)) + pool.landing
    return [
        f"pool {pool} held {peak} bytes, its size is {sizes[pool]}"
        for pool, peak in records.pool_peak_bytes.items()
        if peak > sizes[pool] and pool[0] not in hardware.backing
    ]


def _memory(records: Records, hardware: HardwareProfile) -> list[str]:
    found = [
        f"{m.device} held {m.n_bytes} bytes"
        for m in records.memory
        if not 0 <= m.n_bytes <= hardware.devices[m.device].memory_bytes
    ]
    peaks = records.peak_bytes.items()
    return found[:1] + [f"{name}: peak {n} bytes" for name, n in peaks if n > hardware.devices[name].memory_bytes]


def _layers(records: Records) -> list[str]:
    """Layers follow each other, experts run within their visit at most as early as their router, steps in order."""
    found = [f"layers overlap: {both}" for both in overlaps((layer.begin, layer.end) for layer in records.layers)]
    found += [f"steps overlap: {both}" for both in overlaps((step.begin, step.end) for step in records.steps)]
    ends = {(layer.step, layer.layer): layer.end for layer in records.layers}
    routed: dict[tuple[int, int], int] = {}
    for visit in records.lookups:
        routed.setdefault((visit.step, visit.layer), visit.time)
    inexact = {(one.step, one.layer) for one in records.inexact}
    late = {(one.step, one.layer) for one in records.inexact if one.kind == "late"}  # they keep the next layer open instead
    for task in records.tasks:
        key = (task.step, task.layer)
        if task.kind == "expert" and (
            task.end > ends[key[0], key[1] + (key in late)] or (key not in inexact and task.start < routed[key])
        ):
            found.append(f"an expert outside its visit: {task}")
    if records.makespan_ns != max(step.end for step in records.steps):
        found.append("the makespan is not the end of the last step")
    return found[:3]


def _sum(records: Records, hardware: HardwareProfile) -> list[str]:
    machine = Machine.of(hardware)
    total = sum(breakdown(records, machine.kinds, machine.media).total().values())
    return [] if total == records.makespan_ns else [f"time by cause adds up to {total} ns of {records.makespan_ns}"]


def _cut_off(records: Records) -> list[str]:
    """What the end of the run cut off ends there, has not arrived, and is the last on its link."""
    cut = [transfer for transfer in records.transfers if transfer.left]
    found = [f"cut off, but not by the end of the run: {t}" for t in cut if t.end != records.makespan_ns or t.last or t.left < 0]
    later = [t for t in records.transfers for one in cut if t.link == one.link and t is not one and t.end > one.start]
    return (found + [f"on a link with one that is cut off: {t}" for t in later])[:3]


def _balance(records: Records, hardware: HardwareProfile, model: ModelSpec) -> list[str]:
    """Memory changes as copies begin to come, leave, and pass by; at the begin of a step the KV cache changes it, too."""
    expected: Counter[tuple[str, int]] = Counter()
    ways: dict[int, dict[str, list[Any]]] = {}  # fetch -> its links in order, and the pieces on each
    for t in sorted(records.transfers, key=lambda t: t.start):
        if t.expert >= 0:
            ways.setdefault(t.fetch, {}).setdefault(t.link, []).append(t)
    for way in ways.values():
        places = [(hardware.link(link).dst, pieces) for link, pieces in way.items()]
        for at, (device, pieces) in enumerate(places):
            n_bytes = model.expert_bytes(pieces[0].layer, pieces[0].bits)
            expected[device, pieces[0].start] += n_bytes
            if at and sum(piece.n_bytes for piece in pieces) == n_bytes:  # it has left the device before
                expected[places[at - 1][0], pieces[-1].end] -= n_bytes
    for gone in records.evictions:
        expected[gone.device, gone.time] -= model.expert_bytes(gone.layer, gone.bits)
    levels: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for m in records.memory:
        levels[m.device].append((m.time, m.n_bytes))
    actual: Counter[tuple[str, int]] = Counter()
    for device, found in levels.items():
        for (_, before), (time, after) in pairwise(found):
            actual[device, time] += after - before
    kv = {step.begin for step in records.steps}
    first = {device: found[0][0] for device, found in levels.items()}
    return [
        f"memory of {device} changed by {actual[device, time]} bytes at {time} ns, copies say {expected[device, time]}"
        for device, time in sorted(actual.keys() | expected.keys())
        if device not in hardware.backing and time not in kv and time > first.get(device, -1)
        and actual[device, time] != expected[device, time]
    ][:3]  # fmt: skip


def _slowed(records: Records, hardware: HardwareProfile) -> list[str]:
    """Whatever took longer than alone overlaps with something that slows it down."""
    others: dict[str, set[str]] = defaultdict(set)
    for pair in hardware.contention:
        others[pair.a].add(pair.b)
        others[pair.b].add(pair.a)
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for t in records.transfers:
        spans[t.link].append((t.start, t.end))

    def activity(task: Any) -> str:
        return f"{task.device}.{'side' if task.lane == 'side' else 'experts' if task.kind == 'expert' else 'dense'}"

    for task in records.tasks:
        spans[activity(task)].append((task.start, task.end))
    starts = {name: (sorted(found), max(end - start for start, end in found)) for name, found in spans.items()}

    def overlaps_with(name: str, task: Any) -> bool:
        found, longest = starts.get(name, ([], 0))
        near = found[bisect_left(found, (task.start - longest,)) : bisect_left(found, (task.end,))]
        return any(end > task.start for _, end in near)

    return [
        f"slower than alone, and nothing that slows it down went on: {task}"
        for task in records.tasks
        if task.end - task.start > task.work and not any(overlaps_with(name, task) for name in others[activity(task)])
    ][:3]
