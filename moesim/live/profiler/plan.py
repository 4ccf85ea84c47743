"""Plan of a measurement: probes in blocks, and about how much memory and time they need."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moesim.core.units import format_bytes, format_memory
from moesim.errors import CapacityError, ConfigError
from moesim.live.kernels.plans import ExpertShape
from moesim.live.profiler import probes as grid
from moesim.live.profiler.probes import (
    FILE_BLOCK,
    LIMIT_US,
    PARTS,
    RING,
    SENTINEL_COPY,
    Device,
    Layout,
    Needs,
    Probe,
    Tier,
    Wanted,
    all_shapes,
    cache_bytes,
    needs_of,
    subject_of,
    turning_bytes,
    turning_choices,
)

VARIANTS: Final = ("resident", "host", "fetched")
"""Where experts run: resident on the accelerator, on the host, or on the accelerator after they were fetched."""


MODES: Final = {"quick": 5, "full": 7}  # modes, and how often each measures by default

FEWEST_REPEATS: Final = 5


@dataclass(frozen=True)
class Block:
    """Probes that are measured in turn, with the same things in memory."""

    name: str
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class Plan:
    """All that is to be measured."""

    layout: Layout  # what the machine is measured as
    wanted: tuple[Wanted, ...]  # models and shapes
    mode: str  # one of "quick", "full": how fine the grids are
    seed: int  # of the order and of all random contents
    repeats: int  # times that each probe is measured
    blocks: tuple[Block, ...]  # in the order in which they are measured
    sentinels: tuple[Probe, ...]  # measured before everything else and after it
    file_bytes: int  # of the file on the disk; 0 without one
    turning: Mapping[str, int]  # bytes that take turns in each place, so that none is in a cache when it comes again
    notes: tuple[str, ...]  # what is not as might be expected, a sentence each

    @property
    def probes(self) -> list[Probe]:
        return [probe for block in self.blocks for probe in block.probes]

    @property
    def digest(self) -> str:
        """Text that is the same for equal plans only."""
        sizes = [self.file_bytes, sorted(self.turning.items())]
        content = [self.mode, self.seed, self.repeats, sizes, [probe.id for probe in (*self.sentinels, *self.probes)]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def order(self, block: Block, repeat: int) -> list[Probe]:
        found = list(block.probes)
        random.Random(f"{self.seed}/{block.name}/{repeat}").shuffle(found)
        return found

    def needs(self, probes: Sequence[Probe]) -> Needs:
        return needs_of(probes, self.layout, self.wanted, self.file_bytes, self.turning)

    def required_bytes(self) -> dict[str, tuple[int, str]]:
        """Return the most bytes that any block needs in each place, and that block."""
        most: dict[str, tuple[int, str]] = {}
        for name, probes in [("sentinel", self.sentinels), *((block.name, block.probes) for block in self.blocks)]:
            for place, n_bytes in self.needs(probes).required_bytes(self.layout).items():
                most[place] = max(most.get(place, (0, "")), (n_bytes, name))
        return most

    def check_memory(self, budgets: dict[str, int]) -> None:
        options = {"cpu": "--memory", "disk": "--disk: free space"}
        for place, (n_bytes, block) in self.required_bytes().items():
            if place in budgets and n_bytes > budgets[place]:
                raise CapacityError(
                    f"{options.get(place, f'memory of {place}')}: expected at least {format_memory(n_bytes, least=True)} "
                    f"({block}), got {format_memory(budgets[place])}; give more, or measure fewer or smaller models"
                )


def pair_runs(mode: str) -> int:
    """Return how many executions of each activity of a pair are counted in one repeat."""
    return 20 if mode == "full" else 8


def make_plan(
    layout: Layout, wanted: Sequence[Wanted], *, mode: str = "full", seed: int = 0, repeats: int | None = None,
    budgets: dict[str, int] | None = None, powered: Sequence[str] = (),
) -> Plan:  # fmt: skip
    """Make the plan of a measurement."""
    if mode not in MODES:
        raise ConfigError(f"--mode: expected {' or '.join(MODES)}, got {mode!r}")
    repeats = MODES[mode] if repeats is None else repeats
    if repeats < FEWEST_REPEATS:
        raise ConfigError(f"--repeats: expected at least {FEWEST_REPEATS}, so that there is a spread, got {repeats}")
    if not wanted:
        raise ConfigError("--model: expected at least one model, got none")
    notes = [each.note for each in wanted if each.note]
    largest, cache = grid.LARGEST_COPY, cache_bytes("cpu")
    room = (budgets or {}).get("cpu")
    turning = _turning(layout, wanted, mode, room)
    if turning["cpu"] < RING * cache:
        notes.append(
            f"what takes turns has {format_memory(turning['cpu'])}: {turning['cpu'] / cache:.2g} times the last-level cache that "
            f"this machine reports ({format_memory(cache)}) since {RING} times do not fit into --memory; what is still in that "
            "cache is read faster than from memory"
        )
    while room is not None and largest > grid.SMALLEST_COPY and _copies_need(largest, layout, wanted, turning) > room:
        largest //= 2
    if largest < grid.LARGEST_COPY:
        notes.append(f"copies go up to {format_memory(largest)}: larger ones do not fit into --memory")
    wanted = [_with_sizes(layout, wanted[0], turning, room), *wanted[1:]]
    if len(wanted[0].sizes) < len(grid.SIZES):
        known = {shape.n_bytes for shape in wanted[0].sizes}
        missing = [format_bytes(s.n_bytes) for s in grid.sized_shapes(wanted[0].shapes[0].bits) if s.n_bytes not in known]
        notes.append(f"no experts of {', '.join(missing)} are read: they do not fit into --memory")
    file_bytes = _file_bytes(mode, largest, budgets or {}) if layout.disk is not None else 0
    blocks = _blocks(layout, wanted, mode, largest)
    if powered:
        both = [Probe("power", name, variant=variant, unit="watts") for name in powered for variant in ("idle", "busy")]
        blocks.append(Block("power", tuple(both)))
    random.Random(seed).shuffle(blocks)
    return Plan(layout, tuple(wanted), mode, seed, repeats, tuple(blocks), _sentinels(layout), file_bytes, turning, tuple(notes))


def _blocks(layout: Layout, wanted: Sequence[Wanted], mode: str, largest: int) -> list[Block]:
    blocks = [*_model_blocks(layout, wanted, mode), *_copy_blocks(layout, wanted, mode, largest)]
    blocks.append(Block("latencies", tuple(_latencies(layout, wanted, mode))))
    blocks += [Block(f"experts of {format_bytes(s.n_bytes)}", _size_probes(layout, s)) for each in wanted for s in each.sizes]
    return [*blocks, *(Block("pairs", _pairs(tier)) for tier in layout.tiers if not _has_disk(tier))]


def _size_probes(layout: Layout, shape: ExpertShape) -> tuple[Probe, ...]:
    """Return the probes of experts that processors read one row of, all threads at work."""
    which = {"subject": subject_of(shape), "bits": shape.bits, "unit": "rows"}
    processors = [device for device in layout.devices.values() if device.kind == "cpu"]
    return tuple(Probe("expert", device.name, threads=device.threads, **which) for device in processors)  # type: ignore[arg-type]


def _with_sizes(layout: Layout, wanted: Wanted, turning: Mapping[str, int], room: int | None) -> Wanted:
    """Add the experts of other sizes that fit into memory."""
    found = []
    for shape in grid.sized_shapes(wanted.shapes[0].bits):
        needed = needs_of(_size_probes(layout, shape), layout, [replace(wanted, sizes=(shape,))], 0, turning)
        if room is None or needed.required_bytes(layout).get("cpu", 0) <= room:
            found.append(shape)
    return replace(wanted, sizes=tuple(found))


def _turning(layout: Layout, wanted: Sequence[Wanted], mode: str, room: int | None) -> dict[str, int]:
    """Return the bytes that take turns in each place: in host memory as wanted, else what fits."""
    turning, file_bytes = turning_bytes(layout), FILE_BLOCK if layout.disk is not None else 0
    blocks = [_sentinels(layout), *(block.probes for block in _blocks(layout, wanted, mode, grid.SMALLEST_COPY))]
    for turning["cpu"] in turning_choices(cache_bytes("cpu")):
        needed = (needs_of(probes, layout, wanted, file_bytes, turning).required_bytes(layout) for probes in blocks)
        if room is None or all(each["cpu"] <= room for each in needed):
            break
    return turning


def _copies_need(largest: int, layout: Layout, wanted: Sequence[Wanted], turning: Mapping[str, int]) -> int:
    link = next(iter(layout.tiers[0].links))
    probe = Probe("copy", link.name, size=largest, unit="bytes")
    return needs_of([probe], layout, wanted, 0, turning).required_bytes(layout)["cpu"]


def _file_bytes(mode: str, largest: int, budgets: dict[str, int]) -> int:
    """Return the file's size: a power of two, which all copies tile, beyond caches if allowed."""
    most = 2**33 if mode == "full" else 2**31
    room = min(budgets.get("disk", most), budgets.get("cpu", most))
    size = max(largest, FILE_BLOCK)
    while 2 * size <= min(most, room):
        size *= 2
    return size


def _model_blocks(layout: Layout, wanted: Sequence[Wanted], mode: str) -> list[Block]:
    rows = grid.rows_up_to(grid.QUICK_ROWS if mode == "quick" else grid.FULL_ROWS)
    known: set[tuple[str, float]] = set()
    blocks = []
    for each in wanted:
        found: list[Probe] = []
        for shape in each.shapes:
            key = (subject_of(shape), shape.bits)
            if key not in known:
                known.add(key)
                for device in layout.devices.values():
                    found += _experts(device, shape, rows)
        for device in layout.computing:
            found += _parts(device, each, mode)
        blocks.append(Block(f"model {each.model.name}", tuple(found)))
    return blocks


def _experts(device: Device, shape: ExpertShape, rows: Sequence[int]) -> list[Probe]:
    if device.place == "disk":
        return []
    found = []
    for threads in (device.threads, *device.fewer):
        which = {"device": device.name, "subject": subject_of(shape), "bits": shape.bits, "threads": threads, "unit": "rows"}
        found += [Probe("expert", size=n, **which) for n in rows]  # type: ignore[arg-type]
        found.append(Probe("expert_first", size=1, **which))  # type: ignore[arg-type]
    return found


def _parts(device: Device, wanted: Wanted, mode: str) -> list[Probe]:
    model, quick = wanted.model, mode == "quick"
    rows = grid.part_rows_up_to(grid.QUICK_ROWS if quick else grid.FULL_ROWS)
    tokens = grid.tokens_up_to(grid.QUICK_TOKENS if quick else grid.FULL_TOKENS)
    sizes = dict.fromkeys(PARTS, rows) | {"context": tokens, "head": [n for n in rows if n <= grid.QUICK_ROWS]}
    if not model.shared_params:
        del sizes["shared"]
    if not model.n_dense_layers:
        del sizes["leading"]
    return [
        Probe(kind, device.name, model.name, None, device.threads, "", n, "tokens" if kind == "context" else "rows")
        for kind, some in sizes.items()
        for n in some
    ]


def _copy_blocks(layout: Layout, wanted: Sequence[Wanted], mode: str, largest: int) -> list[Block]:
    step = 4 if mode == "quick" else 2
    experts = [shape.n_bytes for each in wanted for shape in each.shapes]
    blocks = []
    for tier in layout.tiers:
        to_disk = _has_disk(tier)
        found: list[Probe] = []
        variants: tuple[str, ...]
        for link in tier.links:
            if to_disk:  # files are tiled by powers of two
                read = link.ends[0] == tier.backing
                kind, variants = ("disk_read", ("direct", "page cache")) if read else ("disk_write", ("direct",))
                sizes = grid.byte_sizes(largest, step)
            else:
                kind, variants = "copy", transfers(tier)
                sizes = grid.byte_sizes(largest, step, experts)
            found += [Probe(kind, link.name, variant=variant, size=n, unit="bytes") for variant in variants for n in sizes]
        found += _pairs(tier) if to_disk else ()  # while there is a file
        blocks.append(Block("disk" if to_disk else "copies", tuple(found)))
    return blocks


def _has_disk(tier: Tier) -> bool:
    return any(device.place == "disk" for device in tier.devices)


def _pairs(tier: Tier) -> tuple[Probe, ...]:
    return tuple(Probe("pair", a, b, unit="runs") for a, b in tier.pairs)


def transfers(tier: Tier) -> tuple[str, ...]:
    """Name the kinds of transfer between the memories of a tier; unnamed if all are alike."""
    return ("pinned", "pageable", "chunked") if any(device.kind == "gpu" for device in tier.devices) else ("",)


def _latencies(layout: Layout, wanted: Sequence[Wanted], mode: str) -> list[Probe]:
    found = [Probe("runtime", tier.compute, variant=variant) for tier in layout.tiers for variant in variants_of(tier)]
    sizes = {each.model.activation_bytes(n) for each in wanted for n in (1, 2, 4, 8, 16, 64, 256, 1024, 4096)}
    if mode == "quick":
        sizes = {each.model.activation_bytes(n) for each in wanted for n in (1, 8, 64, 512)}
    for tier in layout.tiers:
        if not _has_disk(tier):
            link = tier.links[0].name
            found += [Probe("activation", link, variant="round trip", size=n, unit="bytes") for n in sorted(sizes)]
    return found


def _sentinels(layout: Layout) -> tuple[Probe, ...]:
    tier = layout.tiers[0]
    device = next(device for device in tier.devices if device.place == "cpu")
    found = [Probe("sentinel", device.name, "expert", threads=device.threads)]
    for link in tier.links[:1]:
        if "disk" not in {layout.devices[end].place for end in link.ends}:
            found.append(Probe("sentinel", link.name, "copy", size=SENTINEL_COPY, unit="bytes"))
    return tuple(found)


def variants_of(tier: Tier) -> tuple[str, ...]:
    """Return how the runtime can be measured on a tier: nothing runs on a disk."""
    return tuple(one for one in VARIANTS if one != "host" or "disk" not in {device.place for device in tier.devices})


_RATES: Final = {"cpu": (1e10, 1.5e11), "gpu": (5e11, 3e13)}  # bytes/s, operations/s of one thread or GPU
_COPY_RATE, _DISK_RATE, _STEP_S, _FLUSH_S = 1e10, 1e9, 50e-6, 6e-3
_LONG_S = 0.25  # what takes longer is not carried out once more to warm up


def estimate_s(plan: Plan) -> float:
    """Guess how long a plan takes, in seconds."""
    total = sum(_all_repeats_s(plan, probe) for probe in plan.probes) + 2 * len(plan.sentinels) * plan.repeats * 0.01
    return total + 1.0 * len(plan.blocks) + plan.file_bytes / _DISK_RATE


def _all_repeats_s(plan: Plan, probe: Probe) -> float:
    one = _once_s(plan, probe)
    if one > LIMIT_US.get(probe.unit, 1e12) / 1e6:
        return 0.0
    return one * (1 + plan.repeats * (1 if one > _LONG_S else 2))


def _once_s(plan: Plan, probe: Probe) -> float:
    if probe.kind in ("copy", "disk_read", "disk_write", "activation"):
        return _STEP_S + probe.size / (_DISK_RATE if probe.kind.startswith("disk") else _COPY_RATE)
    if probe.kind == "pair":
        return 2 * pair_runs(plan.mode) * plan.wanted[0].shapes[0].n_bytes / _RATES["cpu"][0]
    if probe.kind in ("power", "runtime"):
        return 1.0 if probe.kind == "power" else _STEP_S
    device = plan.layout.devices[probe.device]
    rate, flops = (each * (probe.threads or 1) for each in _RATES[device.kind])
    params, n_bytes = _weights(plan, probe)
    rows = probe.size if probe.unit == "rows" else 1
    return _STEP_S + _FLUSH_S + n_bytes / rate + 2 * rows * params / flops


def _weights(plan: Plan, probe: Probe) -> tuple[int, int]:
    if probe.bits is not None:
        shape = all_shapes(plan.wanted)[probe.subject, probe.bits]
        return shape.n_mats * shape.hidden * shape.intermediate, shape.n_bytes
    model = next(each.model for each in plan.wanted if each.model.name == probe.subject)
    params = {
        "head": model.head_params, "shared": model.shared_params, "embedding": 0, "dense": model.dense_params,
        "leading": model.leading_params, "predict": model.dense_params,
    }.get(probe.kind, model.attention_params)  # fmt: skip
    return params, 2 * params
