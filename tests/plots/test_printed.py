"""The picture of printed against simulated numbers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from moesim.errors import ConfigError
from moesim.plots.drawing import all_policies, read_frames
from moesim.plots.style import drawn_wide, parse_width
from moesim.plots.validation import printed, printed_data

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "background" / "results.csv"

FRAME = pd.DataFrame(
    {
        "paper": ["dali", "dali", "daop", "daop", "odmoe"], "figure": list("abcde"), "system": list("vwxyz"),
        "over": ["", "base", "", "", ""], "kind": ["value", "gain", "below", "value", "value"],
        "published": [2.0, 38.0, 1.0, 4.5, 3.0], "simulated": [1.0, 17.0, 0.5, 4.4, None],
        "source": ["runs", "runs", "runs", "trace", "runs"],
    }
)  # fmt: skip


def test_gains_are_factors_and_only_what_runs_answer_is_shown():
    data = printed_data(FRAME)
    assert data["what"].tolist() == ["v", "w over base"]
    assert data["printed"].tolist() == [2.0, pytest.approx(1.38)]
    assert data["simulated"].tolist() == [1.0, pytest.approx(1.17)]


def test_rows_without_a_policy_have_no_colour():
    assert all_policies("papers", [], FRAME.assign(policy=["dali", None, float("nan"), "dali", "lru"]), "printed") == [
        "dali",
        "lru",
    ]


def test_each_number_is_a_marker_at_its_place():
    (axes,) = printed(FRAME).axes
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_linestyle() == "None"]
    assert points == [(2.0, 1.0)]
    lines = [line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() == "None"]
    assert lines == [[[2.0, 1.0], [pytest.approx(1.38), pytest.approx(1.17)]]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def markers(axes, filled: bool):
    return [
        line.get_xydata().tolist()
        for line in axes.lines
        if line.get_linestyle() == "None" and (line.get_markerfacecolor() == "#FFFFFF") != filled
    ]


def test_identified_values_have_a_panel_where_inconsistent_ones_are_hollow():
    frame = FRAME.assign(identified=[2.1, 40.0, None, 4.0, None], consistent=["yes", "no", "", "", ""])
    assert printed_data(frame)["identified"].tolist() == [2.1, pytest.approx(1.4)]
    derived, identified = printed(frame).axes
    assert markers(derived, filled=True) == [[[2.0, 1.0], [pytest.approx(1.38), pytest.approx(1.17)]]]
    assert markers(identified, filled=True) == [[[2.0, 2.1]]]
    assert markers(identified, filled=False) == [[[pytest.approx(1.38), pytest.approx(1.4)]]]
    assert derived.get_xlim() == identified.get_xlim() == identified.get_ylim()


def test_nothing_is_hollow_where_every_row_is_consistent():
    figure = printed(FRAME.assign(identified=[2.1, 40.0, None, 4.0, None], consistent="yes"))
    assert not [line for axes in figure.axes for line in markers(axes, filled=False)]
    assert "inconsistent with its paper" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_caption_counts_rows_and_names_where_they_are_printed():
    """Off by 2 and by 1.38 / 1.17 = 1.18: half within the geometric mean, 1.54."""
    frame = FRAME.assign(ref=["Fig. 1", None, "", "", ""], label=["derived", "spec-sheet, synthetic", "assumed", "", None])
    caption = printed.drawing(frame).caption
    assert "Simulated against printed numbers of papers: 2 rows that runs answer" in caption
    assert "Derived: half of 2 are within a factor of 1.54, 1 within 1.35 (grey)." in caption
    assert caption.endswith("Simulated, weakest source: synthetic. Printed in DALI: Fig. 1, b.")
    with pytest.raises(ConfigError, match="printed: expected a printed number that runs answer, got none"):
        printed(FRAME.assign(source="trace"))


def test_the_shipped_results_are_drawn_as_they_are():
    """Panels stand one above another in a column."""
    frame = read_frames("papers", [RESULTS], "printed")
    shapes = []
    for width in ("column", "page"):
        with drawn_wide(parse_width(width, "width")):
            data, figure, _ = printed.drawing(frame)
        shapes.append(figure.axes[0].get_gridspec().get_geometry())
    assert shapes == [(2, 1), (1, 2)]
    assert not data["what"].str.contains("nan").any()
    assert "over llama.cpp" in data["what"].iloc[0]
