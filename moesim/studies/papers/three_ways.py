"""Each printed number answered three ways: by the derived profile, by what other tables of its paper tell, or inconsistent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO

import pandas as pd

from moesim.core.text import cell, uncell
from moesim.studies.papers.identify import Identified
from moesim.studies.papers.published import Published

COLUMNS = ("identified", "ratio_identified", "with_all", "consistent")
_DERIVED = ("simulated", "low", "high", "ratio", "n_runs", "costs", "routing", "label")
_PUBLISHED = [one.name for one in fields(Published)]


def three_ways(papers: pd.DataFrame, found: Mapping[str, Identified]) -> pd.DataFrame:
    """Put identified answers beside derived ones.

    Its figures with ``identified`` (the row's table left out), its ratio to the printed number, ``with_all`` (all tables tell)
    and ``consistent``: whether those constants meet the row.
    """
    answers = {answer.published: answer for one in found.values() for answer in one.answers}
    rows = papers[papers["table"] == "figure"].reset_index(drop=True)
    mine = [answers.get(published(row)) for _, row in rows.iterrows()]
    numbers = {
        "identified": [None if one is None else one.left_out for one in mine],
        "ratio_identified": [None if one is None else one.ratio(one.left_out) for one in mine],
        "with_all": [None if one is None else one.everything for one in mine],
    }
    words = ["" if one is None or one.consistent is None else "yes" if one.consistent else "no" for one in mine]
    return rows.assign(**{name: pd.Series(values, dtype=float) for name, values in numbers.items()}, consistent=words)


def read_results(source: Path | IO[str]) -> pd.DataFrame:
    """Read ``papers.csv`` or ``results.csv``: words as they are, numbers that are missing as such."""
    numbers = (*_DERIVED[:4], *COLUMNS[:3])
    return pd.read_csv(source, keep_default_na=False, na_values={name: [""] for name in numbers}).map(uncell)


def write_results(frame: pd.DataFrame) -> str:
    """Write what `three_ways` gave as CSV."""
    return str(frame[[*_PUBLISHED, *_DERIVED, *COLUMNS]].map(cell).to_csv(index=False, lineterminator="\n", float_format="%.5g"))


def write_constants(found: Mapping[str, Identified]) -> str:
    """Write the constants as CSV: by plan, and by the block that was left out (empty: none), in SI units and microseconds."""
    records = [
        {
            "plan": plan, "block": out, "constant": name, "value": value, "derived": one.base[name],
            "prior_below": one.prior[name][0], "prior_above": one.prior[name][1], "sigma": None if out else one.sigma[name],
        }
        for plan, one in found.items() for out, constants in one.constants.items() for name, value in constants.items()
    ]  # fmt: skip
    return str(pd.DataFrame(records).to_csv(index=False, lineterminator="\n", float_format="%.4g"))


def published(row: Mapping[str, object] | pd.Series) -> Published:
    """Read the printed number of a row of a table."""
    told = {name: str(row.get(name, "")) for name in _PUBLISHED}
    return Published(**{**told, "published": float(told["published"])})  # type: ignore[arg-type]
