"""A hardware profile as frozen dataclasses with plain numbers, and the source labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from moesim.core.table import Facts
from moesim.core.units import format_bytes
from moesim.errors import HardwareError, unknown_name

LABELS = ("measured", "published", "derived", "spec-sheet", "identified", "extrapolated", "synthetic", "assumed", "oracle")
"""Source labels, strongest first. The first five and ``assumed`` occur in profiles, the others in results."""

OPERATIONS: Mapping[str, str] = {
    "move": "give memory of the KV cache to experts, or back, while no request is there",
    "lookup": "find the slots of a layer's chosen experts, by kernels and tables on the GPU",
    "plan": "the same by the engine's code on the host: lists, locks, victims",
    "readback": "bring a layer's chosen experts to the host before it decides",
    "split": "enter and leave a layer's part on the CPU that has nothing to compute",
    "handover": "ask a helper thread to compute experts, and see that it is done",
    "sync": "wait once more during a copy from page-locked memory",
    "sync_pageable": "wait once more during a copy from a mapped file or other pageable memory",
    "table": "write a slot's new owner to the GPU after an upload",
}
"""Operations of an engine's code on the host for a cache; an engine profile has the time of one."""

TRANSFERS = ("pinned", "pageable", "chunked")  # kinds of transfer of weights over a link


def weakest(labels: Iterable[str]) -> str:
    """Return the weakest of some `LABELS`; ``"measured"`` if there are none.

    >>> weakest(["published", "spec-sheet", "measured"])
    'spec-sheet'
    """
    return max(labels, key=LABELS.index, default=LABELS[0])


@dataclass(frozen=True)
class Number:
    """A number of a profile as written, with its source label and words."""

    value: Any
    source: str
    ref: str
    interval: tuple[float, float] | None = None


def between(points: Sequence[tuple[int, Fraction]], size: int) -> Fraction:
    """Interpolate points of (size, us) linearly; outside, the nearest segment goes on."""
    upper = max(1, next((i for i, (n, _) in enumerate(points) if n >= size), len(points) - 1))
    (n0, us0), (n1, us1) = points[upper - 1], points[upper]
    return us0 + (us1 - us0) * Fraction(size - n0, n1 - n0)


@dataclass(frozen=True)
class CostCurve:
    """Time as a function of rows."""

    key: str  # where in the profile it is, for messages and provenance
    # `"linear"`: base + slope rows; `"flat_linear"`: base up to `knee` rows, then slope for each row beyond; `"points"`: straight
    # lines between `points`
    form: str
    # first, last: rows for which it holds
    first: int
    last: int
    # base_us, slope_us: microseconds, and microseconds a row
    base_us: Fraction = Fraction(0)
    slope_us: Fraction = Fraction(0)
    knee: int = 0  # rows up to which `flat_linear` is flat
    points: tuple[tuple[int, Fraction], ...] = ()  # rows, microseconds
    shape: tuple[int, int, float] | None = None  # hidden width, expert width, bits of an expert curve
    # model, part: what a curve of a dense part is of
    model: str = ""
    part: str = ""
    first_extra_us: Fraction | None = None  # extra of the first expert of a group

    def us(self, n_rows: int) -> Fraction:
        """Evaluate exactly, between points on linear axes."""
        if self.form == "points":
            return between(self.points, n_rows)
        return self.base_us + self.slope_us * (n_rows if self.form == "linear" else max(0, n_rows - self.knee))


@dataclass(frozen=True)
class ExpertCost:
    """Time of an expert of any shape, linear in its rows; see `moesim.hardware.costs.curves`."""

    per_expert_us: Fraction  # what an expert takes whatever its rows and size
    per_row_us: Fraction  # what each row after the first takes whatever its size
    read_bytes_per_s: int  # rate at which an expert's weights are read; of the largest of `read_rates`
    few_row_flops: int  # operations a second for each row after the first, up to the crossover
    # many_row_flops, crossover_rows: operations a second for rows beyond `crossover_rows`; 0 and 0 if there is no crossover
    many_row_flops: int = 0
    crossover_rows: int = 0
    read_rates: tuple[tuple[int, int], ...] = ()  # bytes of an expert, bytes a second, ascending; empty: one rate for all sizes

    def figures(self) -> dict[str, Any]:
        """Return what a hash is made of: without points as before there were any."""
        return {name: value for name, value in vars(self).items() if name != "read_rates" or value}

    def reading_s(self, n_bytes: int) -> Fraction:
        """Return the time to read an expert once: linear in bytes between points, at the nearest point's rate outside."""
        # Time is linear, not the rate: it is exact without a logarithm, falls nowhere if no point's does, and the rate is between
        # those of both points. A line continued outside could pass zero, or a rate that no point reached: hence constant rates.
        if not self.read_rates:
            return Fraction(n_bytes, self.read_bytes_per_s)
        points = [self.read_rates[i] for i in self.points_of(n_bytes)]
        if len(points) == 1:
            return Fraction(n_bytes, points[0][1])
        return between([(size, Fraction(size, rate)) for size, rate in points], n_bytes)

    def points_of(self, n_bytes: int) -> tuple[int, ...]:
        """Return which of `read_rates` the time of an expert rests on: one or two neighbours."""
        upper = bisect_left(self.read_rates, (n_bytes, 0))
        if upper == len(self.read_rates):
            return (upper - 1,)
        return (upper,) if upper == 0 or self.read_rates[upper][0] == n_bytes else (upper - 1, upper)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device; see ``hardware_profiles/README.md`` for the meaning of each key."""

    # name, kind, host: name, `"gpu"`, `"cpu"` or `"disk"`, and the machine it sits in
    name: str
    kind: str
    host: str
    # memory_bytes, workspace_bytes: capacity, and what the software needs of it apart from weights, KV cache and pools
    memory_bytes: int
    workspace_bytes: int = 0
    # memory_bytes_per_s, flops: rates that kernels reach, for rooflines; 0 for a disk
    memory_bytes_per_s: int = 0
    flops: int = 0
    launch_us: Fraction = Fraction(0)  # start-up of one kernel or operator
    launches: Mapping[str, int]  # kernels of each part (1 where not given)
    router_us: Fraction = Fraction(0)  # time for the router's result to reach the host, once a layer
    first_extra_us: Fraction | None = None  # extra of the first expert of a group, unless the expert curve has its own
    wake_us: Fraction = Fraction(0)  # time to wake its threads for a group of experts, in addition
    more_rows: tuple[tuple[int, Fraction], ...] = ()  # rows, us: what a group of so many takes in addition, by other kernels
    # experts, parts: curves of experts, and of other parts of a layer
    experts: tuple[CostCurve, ...]
    parts: tuple[CostCurve, ...]
    predict: Mapping[str, CostCurve]  # curves of predictors by source name
    # idle_w, busy_w: W: power
    idle_w: float | None = None
    busy_w: float | None = None
    # the part it plays: `"accelerator"` (computes, with a bounded cache; a GPU unless the profile says otherwise), `"host"`
    # (computes from host memory; a CPU likewise) or `"storage"` (a disk; computes nothing)
    role: str = "accelerator"
    expert_cost: ExpertCost | None = None  # time of experts of which no curve is
    # engine whose operations are counted from the model (`moesim.hardware.costs.operations`), instead of launches; empty: none
    operations: str = ""
    # operation_us, token_us, latent_attention_us: time of one operation next to reading; fixed work of the host a step, charged
    # to the head; what latent attention takes a layer besides, where the engine leaves it to the host
    operation_us: Fraction = Fraction(0)
    token_us: Fraction = Fraction(0)
    latent_attention_us: Fraction = Fraction(0)
    cores: tuple[int, ...] = ()  # processor cores that it is, where the profile is of a part of a processor; empty: all
    memory_of: str = ""  # host whose memory it shares, of which `memory_bytes` is what it may have; empty: it has its own

    def figures(self) -> dict[str, Any]:
        """Return what a hash is made of: what came later only where it is used."""
        return {name: value for name, value in vars(self).items() if name not in ("wake_us", "memory_of", "more_rows") or value}


@dataclass(frozen=True)
class Transfer:
    """Time of a copy: latency + bytes / rate, or lines between ``points`` of (bytes, us)."""

    key: str
    latency_us: Fraction = Fraction(0)
    bytes_per_s: int = 0
    points: tuple[tuple[int, Fraction], ...] = ()


@dataclass(frozen=True)
class Link:
    """A directed link between two devices; links with the same ``medium`` are serial together."""

    name: str
    src: str
    dst: str
    medium: str | None
    curves: Mapping[str, Transfer]
    activation: Transfer | None
    share_link: bool
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two activities and their rates while both run, in parts per million of those alone."""

    # Activities: "<device>.experts", "<device>.dense", "<device>.side", and names of links.

    a: str
    b: str
    a_rate_ppm: int
    b_rate_ppm: int
    source: str


@dataclass(frozen=True, repr=False)
class HardwareProfile(Facts):
    """A machine.

    Attributes
    ----------
    name, path, description : str
        Name, file and one paragraph.
    corrections : tuple of str
        Where the profile differs from what was printed about the machine.
    compute : str
        Default device of everything that is not a routed expert.
    backing : tuple of str
        CPU devices that hold all experts.
    devices : mapping of str to Device
    links : tuple of Link
    contention : tuple of Pair
        What slows down what.
    platform_w : float or None, W
        Power of the rest of the machine.
    host_expert_us : Fraction, us
        Time of the thread that submits experts, for each of them, one after the other.
    host_shared : bool
        Whether that thread also computes the host's experts, so that it submits nothing meanwhile.
    host_us : mapping of str to Fraction, us
        Time of each of the host's `OPERATIONS`; 0 of what is not there.
    machine : mapping of str to str
        What was measured, in words: processor, memory, software.
    numbers : mapping of str to Number
        Every number of the file by its dotted key, with its source.
    overrides : tuple of str
        Dotted keys that an experiment has changed.
    written : str, mapping or None
        The argument of `moesim.hardware.load_hardware`.
    """

    name: str
    path: str
    description: str
    corrections: tuple[str, ...]
    compute: str
    backing: tuple[str, ...]
    devices: Mapping[str, Device]
    links: tuple[Link, ...]
    contention: tuple[Pair, ...]
    platform_w: float | None
    numbers: Mapping[str, Number]
    overrides: tuple[str, ...] = field(default=())
    machine: Mapping[str, str] = field(default_factory=dict)
    host_expert_us: Fraction = Fraction(0)
    host_shared: bool = False
    host_us: Mapping[str, Fraction] = field(default_factory=dict)
    written: Any = field(default=None, compare=False, repr=False)
    # of `moesim.hardware.load`, which builds on this module
    from_numbers: ClassVar[Callable[..., HardwareProfile]]
    from_parts: ClassVar[Callable[..., HardwareProfile]]

    def figures(self) -> dict[str, Any]:
        """Return all that decides what a run takes and stands in results: not the origin."""
        found = {name: value for name, value in vars(self).items() if name not in ("path", "written")}
        return found if self.host_us else {name: value for name, value in found.items() if name != "host_us"}

    def __repr__(self) -> str:
        return f"<Hardware: {self.name}, {', '.join(self.devices)}>"

    def facts(self) -> dict[str, Any]:
        gpus = [device for device in self.devices.values() if device.kind == "gpu"]
        return {
            "name": self.name,
            "devices": list(self.devices),
            "GPU memory": format_bytes(max((gpu.memory_bytes for gpu in gpus), default=0)),
            "links": len(self.links),
            "sources": list(self.labels),
            "description": " ".join(self.description.split()),
        }

    @property
    def labels(self) -> tuple[str, ...]:
        """Distinct source labels of all numbers, strongest first."""
        return tuple(sorted({number.source for number in self.numbers.values()}, key=LABELS.index))

    def link(self, name: str) -> Link:
        for link in self.links:
            if link.name == name:
                return link
        raise HardwareError(f"{self.path}: {unknown_name('link', name, [link.name for link in self.links])}")

    def path_between(self, src: str, dst: str) -> tuple[Link, ...]:
        """Find the links from one device to another: fewest hops, then by name."""
        for device in (src, dst):
            if device not in self.devices:
                raise HardwareError(f"{self.path}: {unknown_name('device', device, self.devices)}")
        ways: dict[str, tuple[Link, ...]] = {src: ()}
        while dst not in ways:
            longer = [
                (*way, link) for here, way in ways.items() for link in self.links if link.src == here and link.dst not in ways
            ]
            if not longer:
                raise HardwareError(f"{self.path}: links: expected a path {src} -> {dst}, got none; add a link")
            for way in sorted(longer, key=lambda way: [link.name for link in way]):
                ways.setdefault(way[-1].dst, way)  # the first by name wins
        return ways[dst]
