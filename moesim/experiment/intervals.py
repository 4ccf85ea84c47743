"""How far a result moves over the intervals of the profile's numbers: each run again at both ends of each number it used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moesim.hardware import HardwareProfile, load_hardware

if TYPE_CHECKING:
    from moesim.metrics import Value

SPEED: Final = "decode_tokens_per_s"
ENERGY: Final = "energy_j_per_token"
"""What the columns ``least`` and ``most`` are of."""

LEAST, MOST = f"{SPEED}_least", f"{SPEED}_most"
ENERGY_LEAST, ENERGY_MOST = f"{ENERGY}_least", f"{ENERGY}_most"

NOT_VARIED: Final = "interval not varied (set intervals: true): "
"""How the note begins that names the intervals over which a run was not repeated."""


@dataclass(frozen=True)
class Ends:
    """A number of a profile with an interval, and the machines that have its ends instead."""

    key: str
    interval: tuple[float, float]
    machines: tuple[HardwareProfile, HardwareProfile]


def ends_of(written: Any, machine: HardwareProfile, place: str) -> tuple[Ends, ...]:
    """Make the machines at the ends of all intervals of a profile's costs."""
    found = []
    for key, number in machine.numbers.items():
        if number.interval is None:
            continue
        least, most = (load_hardware(_changed(written, machine, key, end), place) for end in number.interval)
        found.append(Ends(key, number.interval, (least, most)))
    return tuple(found)


def _changed(written: Any, machine: HardwareProfile, key: str, value: float) -> dict[str, Any]:
    """Write the machine with another value of one number, under its label."""
    number: dict[str, Any] = {"value": int(value) if isinstance(machine.numbers[key].value, int) else value}
    number |= {"source": "assumed", "why": "an end of its interval"}
    return {**(written if isinstance(written, Mapping) else {"base": written}), key: number}


def vary(
    ends: Sequence[Ends], used: Collection[str], row: Mapping[str, Value], again: Callable[[HardwareProfile], Mapping[str, Value]]
) -> dict[str, Value]:
    """Run a run again at the ends of the intervals of the numbers it used, one number at a time.

    The least and the most speed of decoding and energy of a token at any end, the nominal one included; ``varied``, a text for
    the notes. None and an empty text if the run used no number with an interval, or decoded nothing. Power counts in the energy
    alone, which has an answer only where no device lacks its power.
    """
    speed, energy = row.get(SPEED), row.get(ENERGY)
    times = [end for end in ends if end.key in used]
    watts = [end for end in ends if end.key.endswith("_w")] if isinstance(energy, float) else []
    nothing: dict[str, Value] = {LEAST: None, MOST: None, ENERGY_LEAST: None, ENERGY_MOST: None, "varied": ""}
    if not isinstance(speed, float) or not times + watts:
        return nothing
    moved: dict[str, list[float]] = {SPEED: [speed], ENERGY: [energy] if isinstance(energy, float) else []}
    told = []
    for end in times + watts:
        metrics = [again(machine) for machine in end.machines]
        for name, values in moved.items():
            values += [float(found[name] or 0) for found in metrics] if values else []
        word, name = ("speed", SPEED) if end in times else ("energy", ENERGY)
        first, *others = moved[name][0], *moved[name][-2:]
        low, high = (100 * (value / first - 1) for value in (min(first, *others), max(first, *others)))
        told.append(f"{word} {low:+.0f} to {high:+.0f} % over {interval_text(end.key, end.interval)}")
    speeds = {LEAST: min(moved[SPEED]), MOST: max(moved[SPEED])} if times else {}
    energies = {ENERGY_LEAST: min(moved[ENERGY]), ENERGY_MOST: max(moved[ENERGY])} if moved[ENERGY] else {}
    return nothing | speeds | energies | {"varied": "; ".join(told)}


def interval_text(key: str, interval: tuple[float, float]) -> str:
    """Name a number and its interval.

    >>> interval_text("devices.cpu0.expert_cost.few_row_flops", (41e9, 234e9))
    'cpu0.expert_cost.few_row_flops 4.1e+10..2.34e+11'
    """
    return f"{key.removeprefix('devices.')} {interval[0]:g}..{interval[1]:g}"
