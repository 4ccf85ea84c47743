"""Constants of experts from measured times by rows."""

from __future__ import annotations

import numpy as np
import pytest

from moesim.live.profiler.profile import FEW, Curve, Line, linear

ROWS = np.array([1, 2, 3, 4, 6, 8, 16, 32, 64])
LINE = Line(65.0, 40.0, 80e9, 90e9, 900e9)


def curve(n_bytes: int, line: Line = LINE, rows: np.ndarray = ROWS, noise: float = 0.0, seed: int = 0) -> Curve:
    operations = n_bytes  # 16 bits: two operations for every two bytes
    few, many = np.minimum(rows, FEW) - 1, np.maximum(rows - FEW, 0)
    us = (
        line.per_expert_us
        + n_bytes / line.read_bytes_per_s * 1e6
        + few * (line.per_row_us + operations / line.few_row_flops * 1e6)
    )
    us = us + many * operations / (line.many_row_flops or 1.0) * 1e6
    return Curve(n_bytes, operations, rows, us * (1 + noise * np.random.default_rng(seed).standard_normal(len(rows))))


def test_what_made_the_times_is_found_again():
    found = linear([curve(17_000_000), curve(350_000_000)])
    assert found is not None
    for name, value in vars(LINE).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_noise_of_some_per_cent_leaves_the_rates_within_a_tenth():
    found = linear([curve(17_000_000, noise=0.03), curve(350_000_000, noise=0.03, seed=1)])
    assert found is not None
    for name in ("read_bytes_per_s", "few_row_flops", "many_row_flops"):
        assert getattr(found, name) == pytest.approx(getattr(LINE, name), rel=0.1), name


def test_of_one_size_nothing_tells_the_fixed_parts():
    found = linear([curve(17_000_000)])
    assert found is not None
    assert (found.per_expert_us, found.per_row_us) == (0, 0)
    one = curve(17_000_000)
    assert 17_000_000 / found.read_bytes_per_s * 1e6 == pytest.approx(one.us[0], rel=0.02)


def test_few_rows_as_fast_as_one_are_no_slower_than_many():
    flat = Line(0.0, 0.0, 80e9, 1e30, 900e9)
    found = linear([curve(17_000_000, flat)])
    assert found is not None
    assert found.few_row_flops == pytest.approx(found.many_row_flops)


def test_few_rows_alone_have_no_crossover():
    found = linear([curve(17_000_000, rows=ROWS[ROWS <= FEW])])
    assert found is not None
    assert found.many_row_flops is None


@pytest.mark.parametrize("rows", [np.array([1]), np.array([2, 4, 8]), np.array([16, 32])])
def test_without_one_row_and_another_there_is_nothing(rows: np.ndarray):
    assert linear([curve(17_000_000, rows=rows)]) is None
