"""Everything that the five papers print as a number: ``experiments/papers/claims.csv``, and what became of it.

``python -m tests.docs.claims_kit`` writes statuses and simulated numbers anew, from ``docs/background/results.csv``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pandas as pd

from experiments.research.tables.identify_papers import read_results
from experiments.research.tables.platform import MISSED
from moesim.core.gate import read_lines
from moesim.studies.papers.published import BOUNDS, RATIOS

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "experiments" / "papers" / "claims.csv"
SIMULATED, REPRODUCED, NOT_REPRODUCED, CANNOT, SETUP = STATUSES = (
    "simulated", "reproduced", "not reproduced", "cannot be simulated", "setup",
)  # fmt: skip
UNITS = {("%", "share"): 0.01, ("%", "x"): 0.01, ("s", "ms"): 1000.0}  # printed unit, unit of the row: factor
ROUNDED = 0.0101  # a printed ratio of two rounded numbers, and the ratio of these
NUMBERS = "simulated "  # how the reason of a claim begins that rows answer


@dataclass(frozen=True)
class Claim:
    """A printed value, or a group of them that share one reason."""

    paper: str
    place: str  # figure, table or section, as printed
    quantity: str
    setting: str
    value: str  # as printed; several in a group; empty where a picture has bars and no numbers
    unit: str
    metric: str  # the column of a run's results that it would be, or that of ``published.csv``
    # one of `STATUSES`. Of a claim that rows with a simulated number answer: "reproduced" if all of them meet it, "not
    # reproduced" if none does, "simulated" if some readings do
    status: str
    row: str  # ``figure; key=value``: rows of that figure with these words in these columns; `` | `` between alternatives
    why: str  # simulated numbers, or why there are none


def read_claims() -> list[Claim]:
    return [Claim(**line.texts) for line in read_lines(CLAIMS, [one.name for one in fields(Claim)], "the table of claims")]


def rows_of(claim: Claim, results: pd.DataFrame) -> pd.DataFrame:
    """Select what answers a claim."""
    found = pd.Series(False, index=results.index)
    for one in claim.row.split(" | ") if claim.row else ():
        figure, *parts = one.split("; ")
        mine = (results["paper"] == claim.paper) & (results["figure"] == figure)
        for key, word in (part.split("=", 1) for part in parts):
            mine &= results[key].str.contains(word, regex=False) if key == "setting" else results[key] == word
        found |= mine
    return results[found]


def meets(row: pd.Series) -> bool:
    """Say whether a simulated number is as printed: by the factor of the results page, a ratio also on the same side of 1."""
    kind, printed, simulated = row["kind"], row["published"], row["simulated"]
    if kind in BOUNDS:
        return bool(simulated < printed if kind == "below" else simulated > printed)
    if kind == "place":
        return bool(row["low"] == row["high"] == printed)
    one = 0 if kind == "gain" else 1
    right = kind not in RATIOS or (simulated > one) == (printed > one)
    return bool(right and 1 / MISSED <= row["ratio"] <= MISSED)


def judged(claim: Claim, results: pd.DataFrame) -> Claim:
    """Give a claim with the status and the numbers that results have for it; as it is where they have none."""
    rows = rows_of(claim, results)
    rows = rows[rows["simulated"].notna()]
    if rows.empty:
        return claim
    met = [meets(row) for _, row in rows.iterrows()]
    status = REPRODUCED if all(met) else SIMULATED if any(met) else NOT_REPRODUCED
    numbers = [f"{value:.3g}" for value in rows["simulated"]]
    return replace(claim, status=status, why=NUMBERS + "; ".join(dict.fromkeys(numbers)))


def same_number(claim: Claim, row: pd.Series) -> bool:
    """Say whether a row has the printed value of the claim that names it."""
    value = float(claim.value) * UNITS.get((claim.unit, row["unit"]), 1.0)
    return bool(abs(value - row["published"]) <= ROUNDED * abs(row["published"]))


def results() -> pd.DataFrame:
    return read_results(ROOT / "docs" / "background" / "results.csv")


def write(claims: Sequence[Claim]) -> None:
    with CLAIMS.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, [one.name for one in fields(Claim)], lineterminator="\n")
        out.writeheader()
        out.writerows(asdict(claim) for claim in claims)


if __name__ == "__main__":
    frame = results()
    old = read_claims()
    new = [judged(claim, frame) for claim in old]
    write(new)
    sys.stdout.write(f"{sum(a != b for a, b in zip(old, new, strict=True))} of {len(new)} claims changed\n")
