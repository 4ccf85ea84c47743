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

_UNITS: Final = (
    ("flops", (1e9, "GFLOP/s")), ("bytes_per_s", (1e9, "GB/s")), ("_bytes", (1e9, "GB")), ("_us", (1.0, "us")), ("_w", (1.0, "W"))
)  # fmt: skip


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
        least, most = (load_hardware(at_end(written, machine, key, end), place) for end in number.interval)
        found.append(Ends(key, number.interval, (least, most)))
    return tuple(found)


def at_end(written: Any, machine: HardwareProfile, key: str, value: float) -> dict[str, Any]:
    """Write the machine with another value of one number, under its label."""
    number: dict[str, Any] = {"value": int(value) if isinstance(machine.numbers[key].value, int) else value}
    number |= {"source": "assumed", "why": "an end of its interval"}
    return {**(written if isinstance(written, Mapping) else {"base": written}), key: number}


def vary(
    ends: Sequence[Ends], used: Collection[str], row: Mapping[str, Value], again: Callable[[HardwareProfile], Mapping[str, Value]]
) -> dict[str, Value]:
    """Run a run again at the ends of the intervals of the numbers it used, one number at a time.

    The least and the most speed of decoding and energy of a token at any end, the nominal one included; ``varied``, a text for
    the notes about the numbers that move them by half a percent or more. None and an empty text if the run used no number with
    an interval, or decoded nothing. Power counts in the energy alone, which has an answer only where no device lacks its power.
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
        if round(low) or round(high):  # what moves nothing by a percent is not worth a reader's time
            told.append(f"{word} {_percent(low)} to {_percent(high)} % over {interval_text(end.key, end.interval)}")
    speeds = {LEAST: min(moved[SPEED]), MOST: max(moved[SPEED])} if times else {}
    energies = {ENERGY_LEAST: min(moved[ENERGY]), ENERGY_MOST: max(moved[ENERGY])} if moved[ENERGY] else {}
    return nothing | speeds | energies | {"varied": "; ".join(told)}


def interval_text(key: str, interval: tuple[float, float]) -> str:
    """Name a number and its interval.

    >>> interval_text("devices.cpu0.expert_cost.few_row_flops", (41e9, 234e9))
    'cpu0.expert_cost.few_row_flops 41 to 234 GFLOP/s'
    >>> interval_text("devices.gpu0.operation_us", (1.1, 3.0))
    'gpu0.operation_us 1.1 to 3 us'
    """
    scale, unit = next((told for end, told in _UNITS if key.endswith(end)), (1.0, ""))
    low, high = (f"{float(f'{value / scale:.3g}'):,g}" for value in interval)
    return f"{key.removeprefix('devices.')} {low} to {high} {unit}".rstrip()


def _percent(value: float) -> str:
    return f"{round(value):+d}" if round(value) else "0"
