"""Sums of ``results.csv``, as the page of results has them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import pandas as pd

from experiments.research.tables.identify_papers import published
from moesim.studies.papers.compare import Agreement, Compared, agreements

KINDS = ("value", "speedup", "gain")


@dataclass(frozen=True)
class Summary:
    """What a paper's rows come to. Factors are the larger of simulated / printed and its inverse."""

    paper: str
    rows: int  # numbers that runs answer: values, ratios and gains
    derived: tuple[float, float]  # median and worst factor of the derived profile over them
    told: int  # those that have an identified answer
    # derived_told, identified: median and worst factor over those, by either profile
    derived_told: tuple[float, float] | None
    identified: tuple[float, float] | None
    # the same by the identified one, of those that the rest of the paper does not contradict
    consistent: tuple[float, float] | None
    inconsistent: int  # those that it does
    # orders, orders_identified: pairs of systems in the printed order, and all
    orders: tuple[int, int]
    orders_identified: tuple[int, int]


def summaries(frame: pd.DataFrame) -> list[Summary]:
    """Sum up a table of `three_ways`, paper by paper."""
    found = []
    for paper, every in frame.groupby("paper", sort=False):
        rows = every[every["kind"].isin(KINDS) & (every["source"] == "runs") & every["simulated"].notna()]
        told = rows[rows["identified"].notna()]
        derived, identified = _factors(rows["ratio"]), _factors(told["ratio_identified"])
        found.append(
            Summary(
                str(paper),
                len(rows),
                _ends(derived) or (1.0, 1.0),
                len(told),
                _ends(_factors(told["ratio"])),
                _ends(identified),
                _ends(_factors(told[told["consistent"] != "no"]["ratio_identified"])),
                int((told["consistent"] == "no").sum()),
                _orders(every, "simulated"),
                _orders(told, "identified"),
            )
        )
    return found


def _factors(ratios: pd.Series) -> list[float]:
    return [max(ratio, 1 / ratio) for ratio in map(float, ratios)]


def _ends(factors: list[float]) -> tuple[float, float] | None:
    return (median(factors), max(factors)) if factors else None


def _orders(rows: pd.DataFrame, column: str) -> tuple[int, int]:
    rows = rows[rows[column].notna()]
    compared = [Compared(published(row), float(row[column])) for _, row in rows.iterrows()]
    ranks: list[Agreement] = agreements(compared)
    return sum(one.pairs - len(one.wrong) - len(one.tied) for one in ranks), sum(one.pairs for one in ranks)
