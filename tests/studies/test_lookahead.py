"""What looking ahead is worth: by hand, and the fit of exact power laws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moesim.cli.trace_lookahead import layers_table, trace_lookahead
from moesim.core.table import Format
from moesim.experiment.routing import read_trace
from moesim.experiment.workers import Workers
from moesim.plots.studies import lookahead
from moesim.studies.lookahead import Line, look_ahead, records, relation, see_layers
from moesim.testing.traces import synthetic_trace


def _line(trace: str, ratio: int, half: float) -> Line:
    """Give a line whose gap is closed on a straight line up to twice the window of its half."""
    return Line(trace, trace, 4 * ratio, 0.5, 4, 10, {0: 100, round(2 * half): 0}, 0)


def test_the_gap_closed_and_the_window_of_half_of_it_by_hand():
    one = Line("m", "t", 2, 0.25, 2, 10, {0: 100, 1: 90, 2: 70, 4: 50, 8: 41}, 40)
    assert [round(one.closed(window), 3) for window in one.misses] == [0, 0.167, 0.5, 0.833, 0.983]
    assert one.half == 2
    other = Line("m", "t", 2, 0.25, 2, 10, {0: 100, 1: 90, 4: 60}, 40)
    assert other.half == pytest.approx(1 + 3 * (0.5 - 1 / 6) / (4 / 6 - 1 / 6))
    assert Line("m", "t", 2, 0.25, 2, 10, {0: 100, 1: 90}, 40).half is None
    assert math.isnan(Line("m", "t", 2, 0.25, 2, 10, {0: 40, 1: 40}, 40).closed(1))


@pytest.mark.parametrize(("exponent", "confirms"), [(1.39, True), (1.2, False)])
def test_a_power_law_is_found_again(exponent: float, confirms: bool):
    """Five traces whose exponents lie around it: the interval holds it, and the published one only where it is that one."""
    lines = [
        _line(f"trace{i}", ratio, 1000 * ratio ** (exponent + off))
        for i, off in enumerate((-0.04, -0.02, 0.0, 0.02, 0.04))
        for ratio in (2, 4, 8)
    ]
    found = relation(lines)
    assert found is not None
    assert (found.exponent, found.factor, found.n) == (pytest.approx(exponent, abs=1e-3), pytest.approx(1000, rel=0.01), 15)
    assert exponent - 0.04 <= found.low < exponent < found.high <= exponent + 0.04
    assert found.confirms is confirms


def test_too_few_sizes_say_nothing():
    lines = [Line("m", "t", slots, 0.5, 4, 10, {0: 100, 1: 0}, 0) for slots in (8, 16)]
    assert relation(lines) is None
    assert relation([lines[0]] * 5) is None


def test_lines_of_a_trace_hold_what_the_counting_says():
    trace = synthetic_trace(n_layers=2, n_experts=8, top_k=2, n_requests=2, prompt=2, decode=12)
    lines = look_ahead(trace, "made", shares=(0.25, 0.5), windows=(1, 4))
    assert [(one.slots, one.tokens, list(one.misses)) for one in lines] == [(2, 24, [0, 1, 4]), (4, 24, [0, 1, 4])]
    for one in lines:
        assert one.misses[0] >= one.misses[1] >= one.misses[4] >= one.fewest > 0
    assert lines[0].fewest > lines[1].fewest
    assert len(records(lines)) == 6


def test_the_command_writes_table_data_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = []
    for seed in (0, 1):
        trace = synthetic_trace(n_layers=2, n_experts=16, top_k=2, n_requests=2, prompt=2, decode=40, seed=seed)
        paths.append(str(trace.write(tmp_path / f"made{seed}.safetensors")))
    trace_lookahead(paths, max_tokens=60, out=tmp_path / "out", form=Format.MD)
    said = capsys.readouterr().out
    assert said.count("made0") == said.count("made1") == 5
    assert "published: 0.51 (slots / k)^1.39" in said
    frame = pd.read_csv(tmp_path / "out" / "lookahead.csv")
    drawing = lookahead.drawing(frame)
    left, right = drawing.figure.axes
    assert len(left.lines) == 1  # one model
    halves = frame.drop_duplicates(["trace", "slots"])["half_window"]
    assert np.allclose(sorted(right.lines[0].get_ydata()), sorted(halves))  # type: ignore[arg-type]


def test_layers_ahead_close_a_share_of_the_gap():
    """Two layers close no less than one; a machine that is too small says so."""
    with Workers(1) as workers:
        made = read_trace("mini-mixtral", "x")
        found, missing = see_layers("mini-mixtral", made, "rtx3090-epyc7532", workers, layers=(1, 2), shares=(0.25,))
        none, why = see_layers("mini-mixtral", made, "rtx5070-ryzen9600x", workers, layers=(1,), shares=(0.75,))
    assert (missing, none) == ([], []) and "mini-mixtral, 75% cached: gpu0 of rtx5070" in why[0]
    one, two = found
    assert one.on_demand == two.on_demand < one.tokens_per_s <= two.tokens_per_s
    assert 0 < one.closed <= two.closed < 1
    assert one.label == "oracle"
    said = layers_table(found, why, Format.MD)
    assert "| mini-mixtral | 25 % |" in said and why[0] in said
