"""Busy times of devices and links, their overlap, and energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.core.units import NS_PER_S
from moesim.records import Records

Intervals = NDArray[np.int64]
_NONE: Final = np.zeros((0, 2), np.int64)


def union(intervals: Iterable[tuple[int, int]] | Intervals, until: int) -> Intervals:
    """Merge intervals that touch or overlap."""
    pairs = intervals if isinstance(intervals, np.ndarray) else np.array(list(intervals), np.int64).reshape(-1, 2)
    return _merged(np.minimum(pairs, until))


def _merged(pairs: Intervals) -> Intervals:
    start, end = pairs[:, 0], pairs[:, 1]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    if (start >= end).any():
        long = start < end
        start, end = start[long], end[long]
    if not len(start):
        return _NONE
    reach = np.maximum.accumulate(end)
    new = np.flatnonzero(start[1:] > reach[:-1])
    return np.stack((start[np.append(0, new + 1)], reach[np.append(new, -1)]), axis=1)


def length(intervals: Intervals) -> int:
    """Add up disjoint intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def common_ns(a: Intervals, b: Intervals) -> int:
    """Return the time that two sets of disjoint intervals have in common."""
    return length(a) + length(b) - length(_merged(np.concatenate((a, b))))


class Covered:
    """The time covered by intervals that come in pieces; of what is settled, the length is kept."""

    def __init__(self) -> None:
        self._ns = 0
        self._open = _NONE

    def add(self, pieces: Sequence[Intervals], settled_ns: int) -> Intervals:
        """Add intervals, and return them merged; none comes later that begins before `settled_ns`."""
        merged = _merged(np.concatenate(pieces)) if len(pieces) != 1 else _merged(pieces[0])
        if len(self._open) and len(merged):
            self._open = _merged(np.concatenate((self._open, merged)))
        elif len(merged):
            self._open = merged
        if settled_ns and len(self._open):
            self._ns += length(np.minimum(self._open, settled_ns))
            self._open = np.maximum(self._open[self._open[:, 1] > settled_ns], settled_ns)
        return merged

    def ns(self, until: int) -> int:
        return self._ns + length(np.minimum(self._open, until))


@dataclass(frozen=True)
class Busy:
    """Busy times of devices and links.

    Attributes
    ----------
    devices, links, control : dict of str to int, ns
        Time in which any lane of a device was busy, in which a link had transfers, and its control lane
        activations.
    to_gpu, moving, computing, either : int, ns
        Time in which any link with a GPU at an end had transfers; any link; in which any device was busy; and
        any of both.
    makespan_ns : int
        End of the last step.
    """

    devices: dict[str, int]
    links: dict[str, int]
    control: dict[str, int]
    to_gpu: int
    moving: int
    computing: int
    either: int
    makespan_ns: int

    def share(self, ns: int) -> float | None:
        """Return the share of the makespan that a time takes; None for an empty run."""
        return ns / self.makespan_ns if self.makespan_ns else None


class BusyTime:
    """Busy times of devices and links in a run that comes in pieces."""

    def __init__(self, kinds: Mapping[str, str], links: Iterable[str]) -> None:
        self._devices = {name: Covered() for name in kinds}
        self._links = {name: Covered() for name in links}
        self._control = {name: Covered() for name in self._links}
        self._with_gpu = [name for name in self._links if "gpu" in {kinds[end] for end in name.split("->")}]
        self._to_gpu, self._moving, self._computing, self._either = (Covered() for _ in range(4))

    def add(self, records: Records, settled_ns: int = 0) -> None:
        on_device = _add(self._devices, records.tasks, "device", settled_ns)
        on_link = _add(self._links, records.transfers, "link", settled_ns)
        _add(self._control, records.activations, "link", settled_ns)
        self._to_gpu.add([on_link[name] for name in self._with_gpu] or [_NONE], settled_ns)
        computing = self._computing.add(list(on_device.values()) or [_NONE], settled_ns)
        moving = self._moving.add(list(on_link.values()) or [_NONE], settled_ns)
        self._either.add([computing, moving], settled_ns)

    def busy(self, makespan_ns: int) -> Busy:
        devices, links, control = (
            {name: one.ns(makespan_ns) for name, one in of.items()} for of in (self._devices, self._links, self._control)
        )
        to_gpu, moving, computing, either = (
            one.ns(makespan_ns) for one in (self._to_gpu, self._moving, self._computing, self._either)
        )
        return Busy(devices, links, control, to_gpu, moving, computing, either, makespan_ns)


def _add(to: Mapping[str, Covered], table: RecordTable[Any], place: str, settled_ns: int) -> dict[str, Intervals]:
    """Add the intervals of records to what they occupied; return those of each place."""
    codes, names = table.texts(place)
    intervals = np.stack((table.column("start"), table.column("end")), axis=1)
    found = dict.fromkeys(to, _NONE)
    for code, n in enumerate(np.bincount(codes, minlength=len(names)).tolist()):
        if n:
            of_place = intervals if n == len(codes) else intervals[np.flatnonzero(codes == code)]
            found[names[code]] = to[names[code]].add([of_place], settled_ns)
    for name in to.keys() - {name for name, one in found.items() if len(one)}:
        to[name].add([_NONE], settled_ns)
    return found


def busy(records: Records, kinds: Mapping[str, str], links: Iterable[str]) -> Busy:
    """Add up the busy times of a run.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device of the machine, idle ones included.
    links : iterable of str
        All links of the machine.

    Returns
    -------
    Busy
        Times up to the makespan.
    """
    times = BusyTime(kinds, links)
    times.add(records)
    return times.busy(records.makespan_ns)


def utilisation(times: Busy) -> dict[str, float | None]:
    """Return utilisation of each device and link, PCIe share and overlap.

    Parameters
    ----------
    times : Busy
        Busy times.

    Returns
    -------
    dict of str to float or None
        Shares in [0, 1]: ``utilisation.<device>``, ``utilisation.<link>``, ``control_utilisation.<link>``,
        ``pcie_share``, and ``overlap_share`` (None if no link was ever busy).
    """
    shares: dict[str, float | None] = {}
    shares.update({f"utilisation.{name}": times.share(ns) for name, ns in times.devices.items()})
    shares.update({f"utilisation.{name}": times.share(ns) for name, ns in times.links.items()})
    shares.update({f"control_utilisation.{name}": times.share(ns) for name, ns in times.control.items()})
    shares["pcie_share"] = times.share(times.to_gpu)
    common = times.moving + times.computing - times.either
    shares["overlap_share"] = common / times.moving if times.moving else None
    return shares


def energy_j(times: Busy, power_w: Mapping[str, tuple[float, float]], platform_w: float) -> float:
    """Return a run's energy: platform and idle power * makespan + (busy - idle) * busy time.

    Parameters
    ----------
    times : Busy
        Busy times.
    power_w : mapping of str to (float, float), W
        Idle and busy power of each device.
    platform_w : float, W
        Power of everything else, drawn all the time.

    Returns
    -------
    float, J
    """
    total = platform_w * times.makespan_ns
    for name, (idle, working) in power_w.items():
        total += idle * times.makespan_ns + (working - idle) * times.devices[name]
    return total / NS_PER_S
