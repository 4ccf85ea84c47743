"""Parts of the cost model: the roofline, and the ledger of the numbers that were used."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from typing import Any

from moesim.core.limits import COST_NS
from moesim.core.units import NS_PER_S, ceil_div
from moesim.errors import HardwareError
from moesim.hardware.types import LABELS, Device, HardwareProfile, weakest

_COMPOSED = ("roofline", "linear in rows")
"""Forms of a time that no curve holds: it is computed from several numbers, so that its label is `derived` at best."""


class Roofline:
    """Time of one part on one device: launch + max(bytes / rate, operations / rate, the other launches).

    The launches of a part run ahead of the device, so they hide behind long kernels and dominate short ones.
    """

    __slots__ = ("first_ns", "floor_ns", "flops", "place", "rate")

    def __init__(self, device: Device, launches: int, place: str, chain_us: Fraction | None = None) -> None:
        self.place = place
        counted = chain_us is not None
        self.first_ns = round(chain_us * 1000) if chain_us is not None else round(device.launch_us * 1000) if launches else 0
        self.floor_ns = 0 if counted else round(device.launch_us * 1000 * max(0, launches - 1))
        self.rate = device.memory_bytes_per_s
        self.flops = device.flops

    def ns(self, n_bytes: int, operations: int) -> int:
        """Time for these bytes read and operations done, rounded up. Raises `HardwareError` as `within_a_day`."""
        reading = ceil_div(n_bytes * NS_PER_S, self.rate)
        return within_a_day(self.first_ns + max(reading, ceil_div(operations * NS_PER_S, self.flops), self.floor_ns), self.place)


def within_a_day(ns: int, place: str) -> int:
    """Give a time back, unless it is longer than any single task or copy; then raise `HardwareError`."""
    if ns > COST_NS:
        raise HardwareError(
            f"{place}: expected at most a day for a single task or copy, got {ns / COST_NS:.3g} days; correct the rate or time "
            "there, or ask for less at once"
        )
    return ns


class Ledger:
    """Which numbers of a profile a cost model has used, and for what."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self._hardware = hardware
        self._used: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._of = ""  # what a cost's name begins with

    def of(self, what: str) -> Ledger:
        """Return this ledger for costs of something else, such as experts of fewer bits."""
        other = Ledger(self._hardware)
        other._used, other._of = self._used, f"{what}: "
        return other

    def note(self, cost: str, form: str, *keys: str) -> None:
        """Note that a cost of a form comes from the numbers at these dotted keys; absent ones are defaults of 0 or 1."""
        self._used[self._of + cost] = (form, tuple(key for key in keys if key in self._hardware.numbers))

    def add(self, cost: str, form: str, *keys: str) -> None:
        """Note more numbers of a cost that several calls make up, as more rows use more constants."""
        before = self._used.get(self._of + cost, (form, ()))[1]
        self.note(cost, form, *dict.fromkeys((*before, *keys)))

    def intervals(self) -> dict[str, tuple[float, float]]:
        """List the intervals of the numbers used, by dotted key."""
        used = dict.fromkeys(key for _, keys in self._used.values() for key in keys)
        found = {key: self._hardware.numbers[key].interval for key in used}
        return {key: interval for key, interval in found.items() if interval is not None}

    def _labels_of(self, form: str, keys: tuple[str, ...]) -> list[str]:
        labels = [self._hardware.numbers[key].source for key in keys]
        labels += ["derived"] if form in _COMPOSED else []
        return labels + (["extrapolated"] if "extrapolated" in form else [])

    def labels(self, activities: Collection[str] | None = None) -> tuple[str, ...]:
        """Distinct source labels, strongest first, those of contention included.

        A pair counts if both its activities are among ``activities``; without these, always, since it may act at any
        time, except that of a side lane, which counts once a prediction has been costed on its device.
        """
        found = {label for form, keys in self._used.values() for label in self._labels_of(form, keys)}
        found |= {pair.source for pair in self._hardware.contention if self._may_act({pair.a, pair.b}, activities)}
        return tuple(sorted(found, key=LABELS.index))

    def _may_act(self, pair: set[str], activities: Collection[str] | None) -> bool:
        if activities is not None:
            return pair.issubset(activities)
        predicts = {f"{cost.rpartition('@')[2]}.side" for cost in self._used if cost.startswith("predict")}
        return all(end in predicts for end in pair if end.endswith(".side"))

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Describe every cost used; see `CostModel.provenance`."""
        told = {}
        for cost, (form, keys) in sorted(self._used.items()):
            numbers = {key: self._hardware.numbers[key] for key in keys}
            told[cost] = {
                "form": form,
                "source": weakest(self._labels_of(form, keys)),
                "ref": " | ".join(dict.fromkeys(number.ref for number in numbers.values())),
                "numbers": {k: {"value": n.value, "source": n.source, "ref": n.ref} for k, n in numbers.items()},
            }
        return told
