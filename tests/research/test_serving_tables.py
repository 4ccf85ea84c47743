"""The tables of served runs and drafts: fits, unions, gains, and lines of the page as the command prints them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from experiments.research.tables import serving
from experiments.research.tables.serving import Step, drafts, drafts_summary, each, rises, streams, streams_summary, unions
from moesim.core.table import Format
from moesim.trace import Trace

PAGE = serving.PAGE.read_text(encoding="utf-8")
ROWS = {
    part: list(csv.reader(serving.all_of(part).read_text(encoding="utf-8").splitlines()))
    for part in ("streams", "unions", "drafts", "peers")
}


def lines_of(path: Path, numbers: tuple[int, ...], into: Path) -> Path:
    lines = path.read_text(encoding="utf-8").splitlines()
    into.write_text("\n".join([lines[0], *(lines[n - 1] for n in numbers)]) + "\n", encoding="utf-8")
    return into


def test_two_rows_are_those_of_the_table(tmp_path: Path):
    one, four = streams(lines_of(serving.STREAMS, (10, 12), tmp_path / "two.csv"))
    assert one.fitted == pytest.approx(one.measured) and abs(four.error) < 0.2
    for found, line in ((one, 10), (four, 12)):
        (written,) = list(csv.reader(serving.streams_table([found], Format.CSV).splitlines()))[1:]
        (printed,) = [row for row in ROWS["streams"] if row[:2] == [str(line), found.machine]]
        assert written[1:8] == printed[1:8]  # all but the fit, which has other rows of the machine


def step(streams: int, measured: float, predicted: float, machine: str = "m") -> Step:
    return Step("2", machine, "model", "setting", streams, measured, predicted, 0.5 * predicted, 2 * predicted)


def test_more_streams_raise_the_total_if_a_step_grows_less():
    found = rises([step(1, 10, 10), step(2, 15, 25), step(4, 40, 45)])
    assert [(few.streams, more.streams, was, own) for few, more, was, own in found] == [(1, 2, True, False), (2, 4, False, True)]
    *errors, signs = streams_summary([step(1, 10, 10), step(2, 15, 15), step(4, 20, 25), step(1, 5, 5, "n"), step(8, 10, 8, "n")])
    assert [line.partition(": ")[2] for line in errors] == [
        "median error 25 % of 1, worst 25 %",
        "median error 20 % of 1, worst 20 %",
    ]
    assert signs.endswith("right in 3 of 3 pairs")


def test_unions_of_neighbours_and_of_other_requests():
    decode = np.array([[0, 1], [0, 1], [0, 2], [0, 2], [4, 5], [4, 5], [4, 6], [4, 6]])
    prompt = np.full((2, 2), [3, 7])
    experts = np.concatenate([prompt, decode[:4], prompt, decode[4:]])[:, None]
    trace = Trace.build(experts=experts, n_prompt=[2, 2], n_decode=[4, 4], n_experts=8, model="tiny", label="synthetic")
    two, four = unions(trace, (2,))[0], unions(trace, (1,))[0]
    assert (two.neighbours, two.independent) == (1.0, 2.0) and two.even == pytest.approx(8 * (1 - 0.75**2) / 2)
    assert (four.neighbours, four.independent) == (1.0, 1.0)


@pytest.mark.parametrize(("share", "n"), [(0.77, 1), (0.9, 3), (0.5, 8)])
def test_each_draft_has_the_share_that_gives_the_mean(share: float, n: int):
    assert each(sum(share ** (i + 1) for i in range(n)) / n, n) == pytest.approx(share)


def test_drafts_pay_if_they_are_accepted(tmp_path: Path):
    path = tmp_path / "drafts.csv"
    path.write_text(
        "model,hardware,policy,drafter,by,n,accept,draft_ms,draft_ms_most,task,ratio,note\n"
        "mixtral-8x7b,rtx3090-epyc7532,on-demand,copies,ngram,1,1,,,all accepted,1.1,\n"
        "mixtral-8x7b,rtx3090-epyc7532,on-demand,slow,model,1,0 ,1,500,none accepted,1.1,\n",
        encoding="utf-8",
    )
    good, bad = drafts(path, tokens=12)
    assert 1 < good.predicted < 2 and good.right and good.low == good.high
    assert bad.low < bad.predicted < 1 and not bad.right
    said, size = drafts_summary([good, bad])
    assert size.startswith("predicted over measured: median ")
    assert said.startswith("gain or loss right in 1 of 2 rows; in 1 at")


def test_the_tables_have_every_row_of_their_files():
    for path, name in ((serving.STREAMS, "streams"), (serving.DRAFTS, "drafts")):
        n_rows = len(path.read_text(encoding="utf-8").splitlines()) - 1
        assert [row[0] for row in ROWS[name][1:]] == [str(n) for n in range(2, n_rows + 2)]


def test_the_rows_of_the_page_are_those_of_the_tables():
    shown = {"streams": [], "unions": [row for row in ROWS["unions"][1:] if row[1] == "8"]}
    shown |= {"drafts": [row for row in ROWS["drafts"] if row[-1] == "wrong"], "peers": [*ROWS["peers"][1:4], ROWS["peers"][-1]]}
    for name, rows in shown.items():
        part = PAGE.partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]
        lines = [line.strip("| ") for line in part.splitlines() if line.startswith("| ")]
        assert lines[1:] == [" | ".join(row) for row in rows]
    right = sum(row[-1] == "right" for row in ROWS["drafts"])
    assert f"gain or loss right in {right} of {len(ROWS['drafts']) - 1} rows" in PAGE
