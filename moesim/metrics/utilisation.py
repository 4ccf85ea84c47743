"""How busy devices and links were, how much of it overlapped, and what energy that took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesim.core.units import NS_PER_S
from moesim.records import Records

Intervals = NDArray[np.int64]


def union(intervals: Iterable[tuple[int, int]], until: int) -> Intervals:
    """Merge intervals that touch or overlap.

    >>> union([(0, 4), (2, 5), (7, 12)], until=10).tolist()
    [[0, 5], [7, 10]]
    """
    pairs = np.array(sorted(intervals), dtype=np.int64).reshape(-1, 2)
    pairs = np.minimum(pairs, until)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    if not len(pairs):
        return pairs
    reach = np.maximum.accumulate(pairs[:, 1])
    new = np.append(True, pairs[1:, 0] > reach[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(pairs)) - 1
    return np.stack((pairs[first, 0], reach[last]), axis=1)


def length(intervals: Intervals) -> int:
    """Add up disjoint intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def common_ns(a: Intervals, b: Intervals) -> int:
    """Time that two sets of disjoint intervals have in common.

    >>> common_ns(union([(0, 5)], 10), union([(3, 4), (4, 9)], 10))
    2
    """
    both = [(int(s), int(e)) for s, e in np.concatenate((a, b))]
    until = max((e for _, e in both), default=0)
    return length(a) + length(b) - length(union(both, until))


@dataclass(frozen=True)
class Busy:
    """When devices and links were occupied.

    Attributes
    ----------
    devices, links, control : dict of str to ndarray of int64, shape (n, 2), ns
        Busy intervals of each device (all its lanes), of each link with transfers, and of its
        control lane with activations.
    makespan_ns : int
        End of the last step.
    """

    devices: dict[str, Intervals]
    links: dict[str, Intervals]
    control: dict[str, Intervals]
    makespan_ns: int

    def share(self, intervals: Intervals) -> float | None:
        """Share of the makespan that intervals take; None for an empty run."""
        return length(intervals) / self.makespan_ns if self.makespan_ns else None


def busy(records: Records, devices: Iterable[str], links: Iterable[str]) -> Busy:
    """Collect the busy intervals of a run.

    Parameters
    ----------
    records : Records
        Records of one run.
    devices, links : iterable of str
        All devices and links of the machine, idle ones included.

    Returns
    -------
    Busy
        Intervals clipped to the makespan.
    """
    on_device: dict[str, list[tuple[int, int]]] = {name: [] for name in devices}
    on_link: dict[str, list[tuple[int, int]]] = {name: [] for name in links}
    on_control: dict[str, list[tuple[int, int]]] = {name: [] for name in on_link}
    for task in records.tasks:
        on_device[task.device].append((task.start, task.end))
    for transfer in records.transfers:
        on_link[transfer.link].append((transfer.start, transfer.end))
    for activation in records.activations:
        on_control[activation.link].append((activation.start, activation.end))
    until = records.makespan_ns
    return Busy(
        {name: union(found, until) for name, found in on_device.items()},
        {name: union(found, until) for name, found in on_link.items()},
        {name: union(found, until) for name, found in on_control.items()},
        until,
    )


def _together(several: Iterable[Intervals], until: int) -> Intervals:
    return union([(int(s), int(e)) for one in several for s, e in one.tolist()], until)


def utilisation(times: Busy, kinds: Mapping[str, str]) -> dict[str, float | None]:
    """Utilisation of each device and link, PCIe share and overlap.

    Parameters
    ----------
    times : Busy
        Busy intervals.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.

    Returns
    -------
    dict of str to float or None
        Shares in [0, 1]: ``utilisation.<device>``, ``utilisation.<link>``, ``control_utilisation.<link>``,
        ``pcie_share``, and ``overlap_share`` (None if no link was ever busy).
    """
    shares: dict[str, float | None] = {}
    shares.update({f"utilisation.{name}": times.share(found) for name, found in times.devices.items()})
    shares.update({f"utilisation.{name}": times.share(found) for name, found in times.links.items()})
    shares.update({f"control_utilisation.{name}": times.share(found) for name, found in times.control.items()})
    until = times.makespan_ns
    to_gpu = [found for name, found in times.links.items() if "gpu" in {kinds[end] for end in name.split("->")}]
    shares["pcie_share"] = times.share(_together(to_gpu, until))
    computing = _together(times.devices.values(), until)
    moving = _together(times.links.values(), until)
    whole = length(moving)
    shares["overlap_share"] = common_ns(moving, computing) / whole if whole else None
    return shares


def energy_j(times: Busy, power_w: Mapping[str, tuple[float, float]], platform_w: float) -> float:
    """Energy of a run.

    Parameters
    ----------
    times : Busy
        Busy intervals.
    power_w : mapping of str to (float, float), W
        Idle and busy power of each device.
    platform_w : float, W
        Power of everything else, drawn all the time.

    Returns
    -------
    float, J
        (platform + sum of idle) * makespan + sum of (busy - idle) * busy time.
    """
    total = platform_w * times.makespan_ns
    for name, (idle, working) in power_w.items():
        total += idle * times.makespan_ns + (working - idle) * length(times.devices[name])
    return total / NS_PER_S
