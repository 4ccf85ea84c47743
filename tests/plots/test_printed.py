"""The picture of printed against simulated numbers."""

from __future__ import annotations

import pandas as pd
import pytest

from moesim.plots.printed import printed, printed_data

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
