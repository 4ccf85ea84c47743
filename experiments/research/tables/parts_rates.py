"""Compare the rates that follow from the names of parts with measured ones, by kind of rate and platform.

``experiments/validation/measured_rates.csv`` has the measured rates: a machine, its parts, a rate in GB/s (products of matrices:
TFLOP/s), how it was measured and by whom. Shares were set
and ranges widened with these rows at hand, until nine of ten were inside: a fit, not a forecast.

    python -m experiments.research.tables.parts_rates            # a row a kind and platform
    python -m experiments.research.tables.parts_rates --rows     # every measured rate
"""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from experiments.research.tables import command
from moesim.core.table import render
from moesim.hardware.assembly import Assembly
from moesim.hardware.parts import read_parts
from moesim.hardware.rates import assembled

FILE: Final = Path(__file__).parents[2] / "validation" / "measured_rates.csv"
PLACES: Final = {
    "gpu memory": ("devices", "gpu0", "memory_bytes_per_s"), "gpu matrix": ("devices", "gpu0", "flops"),
    "cpu memory": ("devices", "cpu0", "memory_bytes_per_s"), "cpu experts": ("devices", "cpu0", "memory_bytes_per_s"),
    "link": ("links", "cpu0->gpu0", "pinned", "bytes_per_s"), "disk": ("links", "disk0->cpu0", "any", "bytes_per_s"),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A measured rate, and the derived one with its range."""

    machine: str
    what: str
    platform: str
    measured: float
    derived: float
    least: float
    most: float
    method: str
    source: str

    @property
    def ratio(self) -> float:
        return self.derived / self.measured

    @property
    def inside(self) -> bool:
        return self.least <= self.measured <= self.most


def answers(path: Path = FILE) -> list[Answer]:
    """Derive every measured rate from the parts of its machine."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_answer(row) for row in csv.DictReader(file)]


def _answer(row: dict[str, str]) -> Answer:
    parts = {"cpu": "ryzen 9 7950x", "disk": row["parts"]} if row["what"] == "disk" else read_parts(row["parts"], row["machine"])
    made = assembled(parts, row["machine"])
    number: Any = made
    for key in PLACES[row["what"]]:
        number = number[key]
    value, (least, most) = number["value"], number["interval"]
    if row["what"] == "cpu experts":
        share = made["devices"]["cpu0"]["expert_cost"]["read_share"]
        value, least, most = value * share["value"], least * share["interval"][0], most * share["interval"][1]
    scale = 1e12 if row["what"] == "gpu matrix" else 1e9
    machine = Assembly(parts, row["machine"])
    if row["what"] == "link":
        platform = made["machine"]["link"].partition(" x")[0]
    elif row["what"] == "disk":
        platform = row["parts"]
    else:
        platform = (machine.gpus[0] if row["what"].startswith("gpu") else machine.cpu).platform
    return Answer(
        row["machine"], row["what"], platform, float(row["value"]), value / scale, least / scale, most / scale,
        row["method"], row["source"],
    )  # fmt: skip


HEAD: Final = ["rate", "platform", "n", "median", "nine of ten", "inside"]


def table(found: Sequence[Answer]) -> list[list[str]]:
    """Return derived over measured by kind and platform: median, the range of nine of ten, how many lie inside their ranges."""
    return [list(row) for row in _rows(found)]


def _rows(found: Sequence[Answer]) -> Iterator[tuple[str, ...]]:
    for what in dict.fromkeys(one.what for one in found):
        of = [one for one in found if one.what == what]
        yield what, "all", *_summary(of)
        for platform in sorted({one.platform for one in of}):
            yield "", platform, *_summary([one for one in of if one.platform == platform])


def _summary(found: Sequence[Answer]) -> tuple[str, ...]:
    ratios = sorted(one.ratio for one in found)
    left = len(ratios) // 20  # at each end
    low, high = ratios[left], ratios[-1 - left]
    return (
        str(len(found)),
        f"{median(ratios):.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{sum(one.inside for one in found)} of {len(found)}",
    )


def _work(given: Namespace) -> None:
    found = answers()
    if not given.rows:
        sys.stdout.write(render(HEAD, table(found), given.form, HEAD[2:]))
        return
    rows = [
        [one.machine, one.what, one.platform, f"{one.measured:g}", f"{one.derived:.4g}", f"{one.least:.4g} to {one.most:.4g}",
         f"{one.ratio:.2f}", "" if one.inside else "outside", one.method, one.source]
        for one in found
    ]  # fmt: skip
    head = ["machine", "rate", "platform", "measured", "derived", "range", "ratio", "", "method", "source"]
    sys.stdout.write(render(head, rows, given.form))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = command.parser("experiments.research.tables.parts_rates", __doc__)
    options.add_argument("--rows", action="store_true", help="every measured rate")
    return command.run(_work, options, arguments)


if __name__ == "__main__":
    sys.exit(main())
