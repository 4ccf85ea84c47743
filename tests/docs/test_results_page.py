"""The page of results says what its tables say: every number on it is looked up in results.csv and constants.csv."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from experiments.research.tables.identify_papers import published, read_results
from moesim.studies.papers.published import PUBLISHED, paper_folder, read_published
from tests.docs.claims_kit import CANNOT, NOT_REPRODUCED, REPRODUCED, SETUP, SIMULATED, read_claims
from tests.docs.results_kit import KINDS, Summary, summaries

DOCS = Path(__file__).resolve().parents[2] / "docs"
FRAME = read_results(DOCS / "background" / "results.csv")
CONSTANTS = pd.read_csv(DOCS / "background" / "constants.csv", keep_default_na=False, na_values={"sigma": [""]})
PAGE = (DOCS / "background" / "results.md").read_text(encoding="utf-8")
NAMES = {"dali": "DALI", "hybrimoe": "HybriMoE", "prescope": "PreScope", "daop": "DAOP", "odmoe": "OD-MoE"}
AGAIN = "results.csv has changed or the page has; write what the table says, as here"


@cache
def all_summaries() -> dict[str, Summary]:
    return {one.paper: one for one in summaries(FRAME)}


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Give the tables in a text, each as its heads and its rows."""
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.M):
        heads, rule, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        assert set("".join(rule)) <= set("-:")
        yield heads, rows


def section(title: str) -> str:
    return re.split(rf"^## {re.escape(title)}$", PAGE, flags=re.M)[1].partition("\n## ")[0]


def number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def factor(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def factors(row: pd.Series) -> str:
    if row["kind"] not in KINDS:
        return "-"
    return "; ".join(f"{factor(row[name]):.2f}" for name in ("ratio", "ratio_identified") if not pd.isna(row[name]))


def word(row: pd.Series) -> str:
    if row["consistent"] == "no":
        return f"inconsistent: {number(row['with_all'])}"
    return "yes" if row["consistent"] == "yes" else "-"


def cells(row: pd.Series) -> tuple[str, ...]:
    """Write a row of results.csv as a section has it, without its name."""
    unit = "" if row["unit"] == "share" else row["unit"]
    printed = f"{number(row['published'])} {unit}".strip()
    return printed, f"{number(row['simulated'])}; {number(row['identified'])}", factors(row), word(row)


def ends(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else "{:.2f}; {:.2f}".format(*pair)


def test_the_table_has_every_printed_number_as_it_is_now():
    assert [published(row) for _, row in FRAME.iterrows()] == read_published(paper_folder() / PUBLISHED)


def summary_cells(one: Summary) -> list[str]:
    known = (FRAME[FRAME["paper"] == one.paper]["consistent"] != "").any()  # else one row tells, and none can contradict it
    consistent, inconsistent = (ends(one.consistent), str(one.inconsistent)) if known else ("-", "-")
    derived, told = ("{} of {}".format(*pair) if pair[1] else "-" for pair in (one.orders, one.orders_identified))
    same = ends(one.derived_told)
    return [str(one.rows), ends(one.derived), str(one.told), same, ends(one.identified), consistent, inconsistent, derived, told]


def test_the_summary_is_that_of_the_table():
    _, rows = next(tables(PAGE))
    assert {row[0]: row[1:] for row in rows} == {NAMES[one.paper]: summary_cells(one) for one in all_summaries().values()}, AGAIN


def misses() -> list[tuple[str, list[str]]]:
    """Give the lines of the table of largest misses, each with its paper."""
    (heads, rows), *_ = tables(section("Largest misses"))
    assert heads == ["paper", "number", "printed", "derived; identified", "factors", "consistent"]
    papers = {name: paper for paper, name in NAMES.items()}
    return [(papers[row[0]], row[2:]) for row in rows]


def test_every_miss_is_a_row_of_the_table():
    known = {(str(row["paper"]), cells(row)) for _, row in FRAME.iterrows()}
    for paper, rest in misses():
        close = [one for of, one in known if of == paper and one[0] == rest[0]]
        assert (paper, tuple(rest)) in known, f"{AGAIN}: {close}"


@pytest.mark.parametrize("paper", FRAME["paper"].unique())
def test_the_worst_rows_of_a_paper_are_shown(paper: str):
    one = all_summaries()[paper]
    shown = [rest[2].split("; ") for of, rest in misses() if of == paper]
    for place, pair in ((0, one.derived), (1, one.identified)):
        if pair is not None:
            assert f"{pair[1]:.2f}" in {factors[place] for factors in shown if len(factors) > place}, AGAIN


AIMS: dict[str, Callable[[], tuple[list[float], float | None, float | None]]] = {}


def aim(name: str, median: float | None, worst: float | None):
    def add(rows: Callable[[], pd.DataFrame]) -> Callable[[], pd.DataFrame]:
        AIMS[name] = lambda: ([factor(ratio) for ratio in rows()["ratio_identified"]], median, worst)
        return rows

    return add


TOLD = FRAME[FRAME["identified"].notna()]
LOADED = ("", "KTransformers: others loaded in prefill")


@aim("DALI, consistent rows", 1.15, 1.35)
def _dali() -> pd.DataFrame:
    return TOLD[(TOLD["paper"] == "dali") & (TOLD["consistent"] == "yes")]


@aim("HybriMoE, Table III, the rest loaded, from one row", None, 1.5)
def _table3() -> pd.DataFrame:
    mine = TOLD[(TOLD["figure"] == "table3") & TOLD["reading"].isin(LOADED)]
    return mine[~((mine["system"] == "baseline") & (mine["unit"] == "s"))]  # the row that tells


@aim("PreScope, absolute speeds", None, 1.4)
def _prescope() -> pd.DataFrame:
    return TOLD[(TOLD["paper"] == "prescope") & (TOLD["kind"] == "value")]


def test_aims_that_are_met_and_missed_are_named():
    (heads, rows), *_ = [one for one in tables(PAGE) if one[0][0] == "aim"]
    assert heads[1:] == ["rows", "median", "worst", "result"]
    assert [row[0] for row in rows] == list(AIMS)
    for name, n, median, worst, result in rows:
        found, most, most_worst = AIMS[name]()
        middle, last = pd.Series(found).median(), max(found)
        assert n == str(len(found))
        assert median == f"{middle:.2f}" + ("" if most is None else f" of {most:g}")
        assert worst == f"{last:.2f}" + ("" if most_worst is None else f" of {most_worst:g}")
        missed = [w for w, a, b in (("median", middle, most), ("worst", last, most_worst)) if b is not None and a > b]
        assert result == ("met" if not missed else f"{' and '.join(missed)} missed"), AGAIN


def test_what_misses_dali_s_aim_is_counted():
    mine = _dali()
    beyond = mine[mine["ratio_identified"].map(factor) > 1.35]
    times = (TOLD["figure"] == "exact") & (TOLD["kind"] == "value")
    of_table_4 = beyond["figure"] == "exact"
    assert f"{of_table_4.sum()} of the {times.sum()} times in DALI's Table 4" in PAGE, AGAIN
    assert sorted(beyond["figure"][~of_table_4]) == ["fig12", "table9"]  # named on the page


def test_all_claims_are_counted():
    counts = Counter((claim.paper, claim.status) for claim in read_claims())
    (_, rows), *_ = tables(section("Every printed number"))
    order = (REPRODUCED, SIMULATED, NOT_REPRODUCED, CANNOT, SETUP)
    names = {name: paper for paper, name in NAMES.items()}
    assert {row[0]: row[1:] for row in rows} == {name: [str(counts[paper, s]) for s in order] for name, paper in names.items()}, (
        AGAIN
    )


SCALE = {
    "cpu_few_row_rate": 1e9, "cpu_read_rate": 1e9, "link_rate": 1e9, "cpu_per_expert": 1, "cpu_per_row": 1,
    "host_per_expert": 1,
}  # fmt: skip


def constant(plan: str, name: str) -> str:
    mine = CONSTANTS[(CONSTANTS["plan"] == plan) & (CONSTANTS["constant"] == name) & (CONSTANTS["block"] == "")]
    if mine.empty:
        return "-"
    row = mine.iloc[0]
    told = row["sigma"] < 0.8 * (row["prior_below"] + row["prior_above"]) / 2
    value = f"{row['value'] / SCALE[name]:.3g} x/ {math.exp(row['sigma']):.2f}" if told else "prior"
    return f"{row['derived'] / SCALE[name]:.3g}: {value}"


def test_constants_are_those_of_the_table():
    (heads, rows), *_ = [one for one in tables(PAGE) if one[0][0] == "constant"]
    plans = {name: plan for plan, name in NAMES.items()}
    names = [row[0].split("`")[1] for row in rows]
    assert names == list(SCALE)
    for name, (_, *told) in zip(names, rows, strict=True):
        assert told == [constant(plans[head], name) for head in heads[1:]], AGAIN


def known_numbers(paper: str) -> set[str]:
    """Write every number of a paper as prose may: with one or two figures behind the point."""
    mine = FRAME[FRAME["paper"] == paper]
    values = [v for name in ("published", "simulated", "low", "high", "identified", "with_all") for v in mine[name].dropna()]
    values += [factor(v) for name in ("ratio", "ratio_identified") for v in mine[name].dropna() if v > 0]
    values += [factor(v) for v in (mine["with_all"] / mine["published"]).dropna() if v > 0]
    told = CONSTANTS[CONSTANTS["plan"] == paper]
    values += [value / SCALE.get(name, 1e9) for name, value in zip(told["constant"], told["value"], strict=True)]
    return {f"{abs(value):.{digits}f}" for value in values for digits in (1, 2)}


@pytest.mark.parametrize("paper", NAMES)
def test_decimals_in_the_prose_are_numbers_of_the_tables(paper: str):
    (prose,) = re.findall(rf"^\* \*\*{NAMES[paper]}\.\*\*(.*?)(?=^\* |^#)", section("Largest misses") + "\n#", re.M | re.S)
    prose = re.sub(r"`[^`]*`|\([^)]*\.md[^)]*\)|[\d.]+ bits", "", prose)
    for text in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", prose):
        assert text in known_numbers(paper), f"{text}: {AGAIN}"


def test_a_number_that_is_not_in_the_table_fails():
    """What the tests above look for differs from what they find as soon as a digit does."""
    changed = FRAME.copy()
    changed["identified"] *= 1.1
    shown = {tuple(rest) for paper, rest in misses() if paper == "dali"}
    assert not shown <= {cells(row) for _, row in changed[changed["paper"] == "dali"].iterrows()}


def test_the_tables_are_as_the_command_writes_them():
    text = (DOCS / "background" / "results.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert set(CONSTANTS["plan"]) == set(NAMES)
