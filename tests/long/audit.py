"""Checks of a run's records that trust neither engine nor metrics: each from the rules in docs/reference/engine.md."""

from __future__ import annotations

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
        *_layers(records), *_sum(records, hardware),
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
            moved[transfer.fetch, transfer.link] += transfer.n_bytes
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
    for visit in records.lookups:
        for expert, hit in zip(visit.active, visit.hits, strict=True):
            spans = [span for device in accelerators for span in lives.get((device, visit.layer, expert, None), [])]
            surely = any(begin <= visit.time < end for begin, end in spans)
            maybe = any(begin <= visit.time <= end for begin, end in spans)
            if hit != surely and not (maybe and any(visit.time == end for _, end in spans)):
                return [f"expert {expert} of layer {visit.layer} at {visit.time}: hit {hit}, there {spans}"]
    return []


def _pools(records: Records, hardware: HardwareProfile, model: ModelSpec, placement: Placement) -> list[str]:
    sizes: Counter[tuple[str, str]] = Counter()
    for pool in placement.pools:
        sizes[pool.device, pool.name] += sum(pool.sizes(model.n_layers))
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
    for task in records.tasks:
        key = (task.step, task.layer)
        if task.kind == "expert" and (task.end > ends[key] or (key not in inexact and task.start < routed[key])):
            found.append(f"an expert outside its visit: {task}")
    if records.makespan_ns != max(step.end for step in records.steps):
        found.append("the makespan is not the end of the last step")
    return found[:3]


def _sum(records: Records, hardware: HardwareProfile) -> list[str]:
    machine = Machine.of(hardware)
    total = sum(breakdown(records, machine.kinds, machine.media).total().values())
    return [] if total == records.makespan_ns else [f"time by cause adds up to {total} ns of {records.makespan_ns}"]
