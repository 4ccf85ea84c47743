"""A machine as devices and links, probes of one thing and size, and the memory they need."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from moesim.errors import ConfigError
from moesim.live.kernels.host import (
    available_gpu_bytes,
    available_memory_bytes,
    gpu_cache_bytes,
    gpu_power_w,
    gpu_total_bytes,
    l3_bytes,
    package_energy_uj,
)
from moesim.live.kernels.plans import ExpertShape, buffer_bytes, dense_bytes
from moesim.model import ModelSpec, bits_to_bytes


@dataclass(frozen=True)
class Device:
    """A device at ``"cpu"``, ``"disk"`` or ``"cuda:0"``; ``fewer``: other numbers of threads."""

    name: str
    kind: str
    role: str
    place: str
    cores: tuple[int, ...] = ()
    fewer: tuple[int, ...] = ()
    all_cores: bool = False  # of the machine: the power of its processor is this device's

    @property
    def threads(self) -> int | None:
        return len(self.cores) or None


@dataclass(frozen=True)
class Link:
    """A link of a profile, and the cores that copy over it (none: a copy engine, or any core)."""

    name: str
    cores: tuple[int, ...] = ()
    medium: str | None = None

    @property
    def ends(self) -> tuple[str, str]:
        src, _, dst = self.name.partition("->")
        return src, dst


@dataclass(frozen=True)
class Tier:
    """One profile, ``backing`` to ``compute``; ``like``: (activity, link, link measured)."""

    suffix: str
    words: str
    compute: str
    backing: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    pairs: tuple[tuple[str, str], ...]
    like: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Layout:
    """All profiles that one measurement gives."""

    tiers: tuple[Tier, ...]
    disk: Path | None = None

    @property
    def devices(self) -> dict[str, Device]:
        return {device.name: device for tier in self.tiers for device in tier.devices}

    @property
    def links(self) -> dict[str, Link]:
        return {link.name: link for tier in self.tiers for link in tier.links}

    @property
    def computing(self) -> list[Device]:
        devices = self.devices
        return [devices[name] for name in dict.fromkeys(tier.compute for tier in self.tiers)]

    @property
    def has_gpu(self) -> bool:
        return any(device.kind == "gpu" for device in self.devices.values())


def layout_of(cores: Sequence[int], *, gpu: int | None = None, disk: Path | None = None) -> Layout:
    """Decide what a machine is measured as."""
    cores = tuple(cores)
    if gpu is not None:
        if disk is not None:
            raise ConfigError("--disk: expected no disk next to a GPU, whose experts lie in host memory, got one; add --no-gpu")
        return Layout((_gpu_tier(cores, gpu),))
    tiers = [_memory_tier(cores)] if len(cores) > 1 else []
    tiers += [_disk_tier(cores)] if disk is not None else []
    if not tiers:
        raise ConfigError(f"profile measure: expected a GPU, a second core or a disk, got one core ({cores[0]}); give --disk DIR")
    return Layout(tuple(tiers), disk)


def _gpu_tier(cores: tuple[int, ...], index: int) -> Tier:
    half = len(cores) // 2
    host = Device("cpu0", "cpu", "host", "cpu", cores, (half,) if half else (), all_cores=True)
    gpu = Device("gpu0", "gpu", "accelerator", f"cuda:{index}")
    there, back = Link("cpu0->gpu0"), Link("gpu0->cpu0")
    pairs = (
        ("cpu0.experts", there.name), ("gpu0.experts", there.name), (there.name, back.name), ("cpu0.experts", back.name),
        ("gpu0.side", "gpu0.experts"),
    )  # fmt: skip
    return Tier("", "one GPU and its host", "gpu0", "cpu0", (gpu, host), (there, back), pairs)


def _memory_tier(cores: tuple[int, ...]) -> Tier:
    half = len(cores) // 2
    name = "core" if len(cores) == 2 else "cores"
    near = Device(f"{name}0", "cpu", "accelerator", "cpu", cores[:half])
    far = Device(f"{name}1", "cpu", "host", "cpu", cores[half:])
    into, back = f"{far.name}->{near.name}", f"{near.name}->{far.name}"
    carrier = far.cores[-1:]
    experts, dense, others = f"{near.name}.experts", f"{near.name}.dense", f"{far.name}.experts"
    return Tier(
        "",
        "some cores with a bounded cache of experts; the others with all experts in ordinary memory, and with the copying",
        near.name, far.name, (near, far), tuple(Link(link, carrier, "copies") for link in (into, back)),
        ((experts, others), (experts, into), (others, into), (dense, into), (dense, others)),
        tuple((activity, back, into) for activity in (experts, others, dense)),
    )  # fmt: skip


def _disk_tier(cores: tuple[int, ...]) -> Tier:
    fewer = (len(cores) // 2,) if len(cores) > 2 else ()  # of two cores, each alone is a device of the other tier
    host = Device("cpu0", "cpu", "accelerator", "cpu", cores, fewer, all_cores=True)
    read, write = "disk0->cpu0", "cpu0->disk0"
    pairs = (("cpu0.experts", read), ("cpu0.dense", read))
    words = "all cores with a bounded cache of experts in memory; all experts on a disk"
    disk = Device("disk0", "disk", "storage", "disk")
    links = (Link(read, (), "disk0"), Link(write, (), "disk0"))
    return Tier("-disk", words, "cpu0", "disk0", (host, disk), links, pairs)


class Host:
    """The machine, as far as nothing is allocated on it."""

    def free_bytes(self, place: str, disk: Path | None = None) -> int | None:
        """Return what is free of a place's memory, or of a folder's disk; None if unreported."""
        if place == "disk":
            return shutil.disk_usage(disk or Path()).free
        return available_memory_bytes() if place == "cpu" else available_gpu_bytes(place)

    def capacity_bytes(self, place: str, disk: Path | None = None) -> int:
        if place == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if place.startswith("cuda"):
            return gpu_total_bytes(place) or 0
        return self.free_bytes(place, disk) or 0

    def powered(self, devices: Sequence[Device]) -> list[str]:
        """Name devices of readable power: GPUs, and a processor whose cores are all one device."""
        found = []
        for device in devices:
            if device.kind == "gpu":
                told = gpu_power_w(index_of(device)) is not None
            else:
                told = device.all_cores and package_energy_uj() is not None
            found += [device.name] if told else []
        return found


def index_of(device: Device) -> int:
    """Return the number of a GPU."""
    return int(device.place.partition(":")[2] or 0)


PARTS: Final = ("attention", "context", "dense", "shared", "head", "embedding", "leading", "predict")
"""Kinds of probes of what is no routed expert; their subject is a model."""

LIMIT_US: Final = {"rows": 2e6, "tokens": 2e6, "bytes": 10e6}
"""Sizes whose one run would take longer are left out, us, by unit."""

FOLLOWING: Final = "following"  # variant of the expert right behind the first of a group, timed with it

QUICK_ROWS, FULL_ROWS = 64, 4096
QUICK_TOKENS, FULL_TOKENS = 2048, 16_384
SMALLEST_COPY, LARGEST_COPY = 2**16, 2**30


@dataclass(frozen=True)
class Probe:
    """One thing of one size whose time is measured."""

    # `expert`, `expert_first` (after something else), one of `PARTS`, `copy`, `disk_read`, `disk_write`, `activation`, `runtime`
    # (gaps between what is done), `pair` (of a size in bytes: of the copies in it), `power` or `sentinel`
    kind: str
    device: str  # name of the device or link; of a pair, the activity that is timed
    subject: str = ""  # shape of an expert (`4096x14336`), name of a model; of a pair, the activity next to it
    bits: float | None = None  # of an expert's weights
    threads: int | None = None  # of an operator on a processor
    variant: str = ""  # kind of transfer and the like; of a pair `alone` or `together`
    size: int = 1  # how much of it
    unit: str = "calls"  # of `size`: `rows`, `tokens`, `bytes` or `calls`

    @property
    def id(self) -> str:
        return "|".join(
            "" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in astuple(self)
        )

    @property
    def curve(self) -> tuple[Any, ...]:
        return (self.kind, self.device, self.subject, self.bits, self.threads, self.variant)


FIELDS: Final = tuple(field.name for field in fields(Probe))  # names of the fields of a probe, in order

Reading = tuple[Probe, float]  # a probe and one time of it in us; of a power, watts


def rows_up_to(last: int) -> list[int]:
    """Rows of experts: each up to 8, then two a doubling.

    >>> rows_up_to(32)
    [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32]
    """
    found, power = list(range(1, 9)), 8
    while power < last:
        found += [power + power // 2, 2 * power]
        power *= 2
    return [n for n in found if n <= last]


def part_rows_up_to(last: int) -> list[int]:
    """Rows of the other parts: fewer, since each step has each part once.

    >>> part_rows_up_to(32)
    [1, 2, 3, 4, 6, 8, 16, 32]
    """
    return [n for n in rows_up_to(last) if n <= 4 or n == 6 or not n & (n - 1)]


def byte_sizes(last: int, step: int, also: Sequence[int] = ()) -> list[int]:
    """Sizes of copies: powers of two by a factor, 64 KiB to ``last``, and experts' among them.

    >>> byte_sizes(2**20, 4, also=[300_000, 2**30])
    [65536, 262144, 300000, 1048576]
    """
    found, size = set(), SMALLEST_COPY
    while size <= last:
        found.add(size)
        size *= step
    return sorted(found | {last} | {n for n in also if SMALLEST_COPY <= n <= last})


def tokens_up_to(last: int) -> list[int]:
    """Tokens in the cache: 1, with which others are compared, then powers of two from 64.

    >>> tokens_up_to(256)
    [1, 64, 128, 256]
    """
    return [1, *(2**power for power in range(6, last.bit_length()))]


def sequences_of(n_rows: int) -> list[tuple[int, int]]:
    """Split rows into (new rows, context before): up to 16 decode, more are prompts of 64.

    >>> sequences_of(2), sequences_of(100)
    ([(1, 0), (1, 0)], [(64, 0), (36, 0)])
    """
    if n_rows <= 16:
        return [(1, 0)] * n_rows
    return [(min(64, n_rows - start), 0) for start in range(0, n_rows, 64)]


SUPPORTED_BITS: Final = (4, 8, 16, 32)  # precisions of experts for which there are kernels

RING: Final = 4  # how many times the last-level cache the buffers that take turns have together, where memory suffices

SENTINEL_COPY: Final = 2**26  # bytes of the copy that is a sentinel, and at most of those in pairs
RUNTIME_BYTES: Final = 320_000_000  # what a replay may use of host memory and disk: enough that weights are read from memory
RUNTIME_GPU_BYTES: Final = 1_000_000_000  # what it uses of a GPU, where every expert has a buffer
CONTEXT: Final = 64  # tokens in the cache of the dense part that goes on with or before something else

_DEFAULT_L3, _GPU_CACHE = 2**25, 2**27  # where the system does not say


def cache_bytes(place: str) -> int:
    """Return the size of the last cache before a place's memory."""
    return (l3_bytes() or _DEFAULT_L3) if place == "cpu" else gpu_cache_bytes(place) or _GPU_CACHE


def turning_bytes(layout: Layout) -> dict[str, int]:
    """Return the bytes that must take turns in each place so that none is in a cache."""
    return {place: RING * cache_bytes(place) for place in {device.place for device in layout.devices.values()} - {"disk"}}


def turning_choices(cache: int) -> list[int]:
    """Return how many bytes may take turns, most first; least: beyond an unreported cache."""
    least = min(RING * cache, RING * _DEFAULT_L3)
    return [*range(RING * cache, least, -max(1, cache // 4)), least]


@dataclass(frozen=True)
class Wanted:
    """A model, and the shapes of experts that are measured for it."""

    model: ModelSpec
    shapes: tuple[ExpertShape, ...]
    sizes: tuple[ExpertShape, ...] = ()  # experts of other sizes, of which processors read one row: a rate depends on them

    @classmethod
    def of(cls, model: ModelSpec, bits: Iterable[float] = ()) -> Wanted:
        """Take experts at some precisions; by default the model's, or the nearest with a kernel."""
        own = model.expert_bits
        if model.expert_bytes_by_layer is None and own not in SUPPORTED_BITS:
            own = min(SUPPORTED_BITS, key=lambda known: abs(known - model.expert_bits))
        return cls(model, tuple(ExpertShape.of(replace(model, expert_bits=each)) for each in (tuple(bits) or (own,))))

    @property
    def note(self) -> str:
        """Describe what is not measured as the model has it; empty if all is."""
        bits = self.model.expert_bits
        if len(self.shapes) == 1 and bits not in SUPPORTED_BITS:
            return f"{self.model.name}: experts of {bits:g} bits are measured at {self.shapes[0].bits:g}, which has a kernel"
        return ""


SIZES: Final = ((1024, 2_000_000), (4096, 16_000_000), (4096, 100_000_000))
"""Hidden widths of a small, a middle and a large expert whose reading is measured, and about their bytes."""


def sized_shapes(bits: float) -> list[ExpertShape]:
    """Return the experts of `SIZES` at a precision.

    >>> [shape.n_bytes for shape in sized_shapes(4)]
    [1966080, 15728640, 100663296]
    """
    found = []
    for hidden, n_bytes in SIZES:
        intermediate = 256 * max(1, round(8 * n_bytes / (3 * hidden * bits) / 256))
        found.append(ExpertShape(hidden, intermediate, bits, 3, bits_to_bytes(3 * hidden * intermediate, bits)))
    return found


def all_shapes(wanted: Iterable[Wanted]) -> dict[tuple[str, float], ExpertShape]:
    """Return all shapes that are measured, by subject and bits."""
    return {(subject_of(shape), shape.bits): shape for each in wanted for shape in (*each.shapes, *each.sizes)}


def subject_of(shape: ExpertShape) -> str:
    """Name the shape of an expert, such as ``4096x14336``."""
    return f"{shape.hidden}x{shape.intermediate}" + ("" if shape.n_mats == 3 else f" ({shape.n_mats} matrices)")


@dataclass
class DenseNeed:
    """Abilities that a model's dense kernel must have."""

    model: ModelSpec
    place: str
    turning: int  # bytes of attention's weights that take turns
    max_rows: int = 1
    max_tokens: int = CONTEXT
    with_head: bool = False

    @property
    def distinct_layers(self) -> int:
        """Layers enough that attention's weights have left the cache when a layer comes again."""
        each = max(1, self.model.attention_bytes)
        return min(self.model.n_layers, max(2, math.ceil(self.turning / each)))

    @property
    def options(self) -> dict[str, int | bool]:
        return {
            "distinct_layers": self.distinct_layers, "max_rows": self.max_rows,
            "max_kv_tokens": self.max_rows + self.max_tokens, "with_head": self.with_head,
        }  # fmt: skip

    @property
    def n_bytes(self) -> int:
        model, act = self.model, bits_to_bytes(1, self.model.other_bits)
        widths = 8 * model.hidden + 3 * max(model.shared_intermediate, model.dense_intermediate)
        widths += 4 * model.n_heads * (model.head_dim + model.kv_lora_rank) + 2 * model.n_experts
        head = 64 * model.vocab * 4 * act if self.with_head else 0
        return dense_bytes(model, **self.options) + self.max_rows * widths * act + head  # type: ignore[arg-type]


@dataclass
class Needs:
    """Requirements of some probes."""

    turning: Mapping[str, int]  # bytes that take turns in each place
    # shapes and most rows, by subject, bits and place
    experts: dict[tuple[str, float, str], tuple[ExpertShape, int]] = field(default_factory=dict)
    dense: dict[tuple[str, str], DenseNeed] = field(default_factory=dict)  # by model and place
    copies: dict[str, int] = field(default_factory=dict)  # bytes: largest copy from or to each device
    file_bytes: int = 0  # of the file on the disk
    crossing_bytes: int = 0  # largest activations that cross
    runtimes: set[str] = field(default_factory=set)  # devices of the dense part on whose tiers replays are run

    def add_expert(self, shape: ExpertShape, place: str, rows: int) -> None:
        key = (subject_of(shape), shape.bits, place)
        self.experts[key] = (shape, max(rows, self.experts[key][1] if key in self.experts else 0))

    def add_dense(self, model: ModelSpec, place: str, rows: int = 1, tokens: int = 1, *, head: bool = False) -> None:
        need = self.dense.setdefault((model.name, place), DenseNeed(model, place, self.turning[place]))
        need.max_rows, need.max_tokens = max(need.max_rows, rows), max(need.max_tokens, tokens)
        need.with_head |= head

    def add_copy(self, link: Link, n_bytes: int) -> None:
        for end in link.ends:
            self.copies[end] = max(n_bytes, self.copies.get(end, 0))

    def required_bytes(self, layout: Layout) -> dict[str, int]:
        needed: dict[str, int] = {}

        def add(place: str, n_bytes: int) -> None:
            needed[place] = needed.get(place, 0) + n_bytes

        for (_, _, place), (shape, rows) in self.experts.items():
            act = 4 if shape.bits == 32 else 2
            add(place, buffer_bytes(ring_length(shape.n_bytes, self.turning[place]), shape.n_bytes))
            add(place, shape.n_bytes + rows * (4 * shape.hidden + 3 * shape.intermediate) * act)  # libraries re-order weights
        for need in self.dense.values():
            add(need.place, need.n_bytes)
        for device, size in self.copies.items():
            place = layout.devices[device].place
            if place != "disk":
                kinds = 2 if place == "cpu" and layout.has_gpu else 1  # pinned and pageable
                add(place, kinds * buffer_bytes(1, max(size, self.turning[place])))
        for place, turning in self.turning.items():
            add(place, buffer_bytes(1, flush_bytes(place, turning)) + 3 * self.crossing_bytes)
        for tier in layout.tiers:
            if tier.compute in self.runtimes:
                for place in {device.place for device in tier.devices}:
                    add(place, RUNTIME_BYTES if place in ("cpu", "disk") else RUNTIME_GPU_BYTES)
        if self.file_bytes:
            add("disk", self.file_bytes)
            add("cpu", FILE_BLOCK)
        return needed


FILE_BLOCK: Final = 2**26  # bytes that the file on the disk is written at a time


def pair_copy(shape: ExpertShape, pair: Probe | None = None) -> int:
    """Return a pair's copy in bytes: its own size, or about an expert's, which tiles files."""
    if pair is not None and pair.unit == "bytes":
        return pair.size
    return min(1 << (shape.n_bytes.bit_length() - 1), SENTINEL_COPY)


def ring_length(n_bytes: int, turning: int) -> int:
    """Return how many buffers a ring has: at least two, and together ``turning`` bytes."""
    return max(2, math.ceil(turning / n_bytes))


def flush_bytes(place: str, turning: int) -> int:
    """Return the bytes that empty a place's cache: one half of its size is copied to the other."""
    return min(2 * cache_bytes(place), turning)


def needs_of(
    probes: Iterable[Probe], layout: Layout, wanted: Sequence[Wanted], file_bytes: int, turning: Mapping[str, int]
) -> Needs:
    """Find what probes need."""
    needs, devices = Needs(turning), layout.devices
    models: Mapping[str, ModelSpec] = {each.model.name: each.model for each in wanted}
    shapes = all_shapes(wanted)
    first, shape = wanted[0].model, wanted[0].shapes[0]
    for probe in probes:
        if probe.kind in ("expert", "expert_first"):
            assert probe.bits is not None
            place = devices[probe.device].place
            needs.add_expert(shapes[probe.subject, probe.bits], place, probe.size)
            if probe.kind == "expert_first":
                needs.add_dense(first, place)
        elif probe.kind in PARTS:
            rows, tokens = (probe.size, 1) if probe.unit == "rows" else (1, probe.size)
            place = devices[probe.device].place
            needs.add_dense(models[probe.subject], place, rows, tokens, head=probe.kind in ("head", "embedding"))
        elif probe.kind in ("copy", "disk_read", "disk_write"):
            needs.add_copy(layout.links[probe.device], probe.size)
        elif probe.kind == "runtime":
            needs.runtimes.add(probe.device)
        elif probe.kind == "activation":
            needs.crossing_bytes = max(needs.crossing_bytes, probe.size)
        elif probe.kind == "pair":
            for activity in (probe.device, probe.subject):
                _add_activity(needs, activity, layout, first, shape, pair_copy(shape, probe))
        elif probe.kind == "power" or (probe.kind == "sentinel" and probe.subject == "expert"):
            needs.add_expert(shape, devices[probe.device].place, 1)
        elif probe.kind == "sentinel":
            needs.add_copy(layout.links[probe.device], SENTINEL_COPY)
    if any(layout.devices[name].place == "disk" for name in needs.copies):
        needs.file_bytes = file_bytes
    return needs


def _add_activity(needs: Needs, activity: str, layout: Layout, model: ModelSpec, shape: ExpertShape, copied: int) -> None:
    if activity in layout.links:
        needs.add_copy(layout.links[activity], copied)
        return
    device, _, what = activity.partition(".")
    place = layout.devices[device].place
    if what == "experts":
        needs.add_expert(shape, place, 1)
    else:
        needs.add_dense(model, place)
