"""Answers beside each other: what is written of them is read again, and summed up by paper."""

from __future__ import annotations

import io
import math
from dataclasses import asdict

import pandas as pd
import pytest

from experiments.research.tables.identify_papers import published, read_results, three_ways, write_constants, write_results
from experiments.research.tables.platform import Answer, Identified
from moesim.studies.papers.published import Published
from tests.docs.results_kit import orders, summaries

WORDS = dict.fromkeys(("ref", "unit", "baseline_input", "baseline", "where", "remark", "why"), "")


def printed(system: str, value: float, kind: str = "value", over: str = "", source: str = "runs") -> Published:
    told = {"input": "x", "policy": "y", "metric": "m"} if source else dict.fromkeys(("input", "policy", "metric"), "")
    words = {"paper": "p", "figure": "f", "quantity": "speed", "setting": "s", "system": system, "over": over, "reading": ""}
    return Published(**words, **WORDS, **told, kind=kind, published=value, source=source)


ROWS = [printed("+ prefetch", 38.0, "gain", "base"), printed("a", 4.0), printed("b", 2.0), printed("=c", 1.0, source="")]
SIMULATED = [20.0, 2.0, 3.0, math.nan]
RATIOS = [1.2 / 1.38, 0.5, 1.5, math.nan]
# Left out: 38 % is met, 4 is missed by 2 even by constants that it told, 2 has 2.2.
ANSWERS = [
    Answer(ROWS[0], "f", 20.0, 38.0, 38.0),
    Answer(ROWS[1], "g", 2.0, 1.0, 2.0),
    Answer(ROWS[2], "g", 3.0, 2.2, 2.1),
]
FOUND = {"p": Identified({}, {}, {}, {}, {}, ANSWERS)}
PAPERS = pd.DataFrame(
    [
        {"table": "figure", "quick": False, **asdict(row), "simulated": value, "low": value, "high": value, "ratio": ratio,
         "n_runs": 1, "costs": "assumed", "routing": "synthetic", "label": "assumed"}
        for row, value, ratio in zip(ROWS, SIMULATED, RATIOS, strict=True)
    ]
)  # fmt: skip


def test_what_is_written_is_read_again():
    frame = three_ways(PAPERS, FOUND)
    again = read_results(io.StringIO(write_results(frame)))
    assert [published(row) for _, row in again.iterrows()] == ROWS
    assert again["consistent"].tolist() == ["yes", "no", "yes", ""]
    for name in ("simulated", "ratio", "identified", "ratio_identified", "with_all"):
        assert again[name].tolist() == pytest.approx(frame[name].tolist(), rel=1e-4, nan_ok=True), name
    assert write_results(again) == write_results(frame)


def test_no_spreadsheet_takes_a_word_for_a_formula():
    lines = write_results(three_ways(PAPERS, FOUND)).splitlines()
    assert not [cell for line in lines for cell in line.split(",") if cell.startswith(("=", "+"))]


def test_the_summary_counts_rows_factors_and_orders():
    (one,) = summaries(three_ways(PAPERS, FOUND))
    assert (one.paper, one.rows, one.told, one.inconsistent) == ("p", 3, 3, 1)
    assert one.derived == pytest.approx((1.5, 2.0))
    assert one.identified == pytest.approx((1.1, 4.0))
    assert one.consistent == pytest.approx((1.05, 1.1))
    assert one.orders == (1, 2)  # a > b is simulated the other way, + prefetch > base is as printed
    assert one.orders_identified == (1, 2)


def test_orders_are_counted_by_figure():
    assert orders(three_ways(PAPERS, FOUND)) == {("p", "f"): ((1, 2), (1, 2))}
    assert orders(three_ways(PAPERS, {})) == {("p", "f"): ((1, 2), (0, 0))}
    assert orders(three_ways(PAPERS.assign(simulated=math.nan), {})) == {}


def test_a_paper_of_which_nothing_is_identified_has_no_such_factors():
    (one,) = summaries(three_ways(PAPERS, {}))
    assert (one.told, one.identified, one.consistent, one.inconsistent) == (0, None, None, 0)
    assert one.orders_identified == (0, 0)


def test_constants_are_written_by_the_block_that_is_left_out():
    constants = {"": {"rate": 2e10}, "f": {"rate": 3e10}}
    found = {"p": Identified(constants, {"": {}, "f": {}}, {"rate": 4e10}, {"rate": (0.5, 0.3)}, {"rate": 0.1}, [])}
    assert write_constants(found).splitlines() == [
        "plan,block,constant,value,derived,prior_below,prior_above,sigma",
        "p,,rate,2e+10,4e+10,0.5,0.3,0.1",
        "p,f,rate,3e+10,4e+10,0.5,0.3,",
    ]
