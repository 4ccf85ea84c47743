"""Intervals: from constructed residuals by hand."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from moesim.core.student import Mean, mean, student_t
from moesim.errors import ConfigError
from moesim.studies.advice.recommend import LEVEL, Residual, evidence, indistinguishable, interval, mixed, read_residuals


def table(ratios: list[float], experts: str = "cpu") -> list[Residual]:
    return [Residual(str(i), "derived", experts, ratio) for i, ratio in enumerate(ratios)]


def test_order_statistics_of_a_constructed_table():
    ratios = [0.5 + 0.05 * i for i in range(19)]  # 19 figures: 2 of 20 places on either side
    found = evidence(table(random.Random(1).sample(ratios, 19)) + table([9.0], "gpu"), "derived", "cpu")
    assert (found.low, found.high, found.n) == (pytest.approx(0.55), pytest.approx(1.35), 19)
    assert found.level == pytest.approx(0.8)
    few = evidence(table([0.7, 0.9, 1.1]), "derived", "cpu")
    assert (few.low, few.high, few.level) == (0.7, 1.1, pytest.approx(0.5))  # and says how little that is


def test_a_new_figure_of_the_kind_is_inside_as_often_as_is_said():
    draw = random.Random(7)
    inside = 0
    for _ in range(2000):
        *known, new = [math.exp(draw.gauss(-0.2, 0.3)) for _ in range(14)]
        found = evidence(table(known), "derived", "cpu")
        inside += found.low <= new <= found.high
    assert inside / 2000 == pytest.approx(found.level, abs=0.03)


def test_kinds_are_mixed_by_time():
    cpu, gpu = evidence(table([0.8, 1.0]), "derived", "cpu"), evidence(table([0.4, 1.0], "gpu"), "derived", "gpu")
    assert mixed(cpu, gpu, 0.0) == (0.8, 1.0) and mixed(cpu, gpu, 1.0) == (pytest.approx(0.4), 1.0)
    assert 0.4 < mixed(cpu, gpu, 0.5)[0] < 0.8


def test_the_interval_grows_with_each_thing_that_is_unsure():
    speed = Mean(20.0, 1.1, 5)
    plain = interval(Mean(20.0, 1.0, 5), (0.8, 1.0))
    assert plain == (pytest.approx(16.0), pytest.approx(20.0))
    wider = interval(speed, (0.8, 1.0))
    widest = interval(speed, (0.8, 1.0), routing=0.7)
    assert widest[0] < wider[0] < plain[0] and widest[1] > wider[1] > plain[1]
    assert interval(speed, (0.8, 1.0), 0.7) == pytest.approx(interval(speed, (0.8, 1.0), 1 / 0.7))


def test_student_t():
    assert student_t(0.95, 5) == pytest.approx(2.776, abs=1e-3) and student_t(0.8, 2) == pytest.approx(3.078, abs=1e-3)
    found = mean([10.0, 12.0, 11.0], 0.95)
    assert found.value == pytest.approx((10 * 12 * 11) ** (1 / 3)) and found.factor > 1
    assert mean([10.0], LEVEL).factor == 1 and mean([10.0], LEVEL).n == 1


def test_placements_are_told_apart_by_their_ratio_on_the_same_requests():
    best = [10.0, 20.0, 30.0, 15.0, 25.0]
    assert not indistinguishable(best, [one * 0.97 for one in best])  # speeds vary threefold, the ratio does not
    assert indistinguishable(best, [one * factor for one, factor in zip(best, (0.9, 1.1, 0.95, 1.04, 1.0), strict=True)])
    assert not indistinguishable([10.0], [10.0])  # of one request nothing is known


def test_a_wrong_line_of_a_table_is_named(tmp_path: Path):
    path = tmp_path / "r.csv"
    path.write_text("figure,profile,experts,ratio\na,measured,any,1.25\n")
    assert read_residuals(path) == [Residual("a", "measured", "any", 1.25)]
    for line in ("b,measured,any,x", "b,guessed,any,1", "b,derived,cpu,-1"):
        path.write_text(f"figure,profile,experts,ratio\n{line}\n")
        with pytest.raises(ConfigError, match=r"r\.csv:2: expected"):
            read_residuals(path)
