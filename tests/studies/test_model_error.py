"""The model error: what rows share, what two of them say of others, and the range of a speed that was not observed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.research.tables.model_error import Rows, records
from moesim.hardware import load_hardware
from moesim.studies.identify.cases import make_cases
from moesim.studies.identify.fit import Z90, Problem
from moesim.studies.identify.identify import Identified, identify
from moesim.studies.identify.model_error import ModelError, shipped, shipped_rows, time_shares
from tests.studies.identify_kit import ROOMY, rows

SMALL, LARGE = "qwen3-30b-a3b", "mixtral-8x7b"
SETTINGS = [(SMALL, "Q4_K_M", "n_cpu_moe=24", 1), (SMALL, "Q4_K_M", "n_cpu_moe=48", 1), (SMALL, "Q4_K_M", "n_cpu_moe=36", 1),
            (LARGE, "Q4_K_M", "n_cpu_moe=32", 1), (SMALL, "Q4_K_M", "n_cpu_moe=0", 1)]  # fmt: skip
ERROR = ModelError(machine=0.05, model=0.05, row=0.02, freedom=5.0)


def known(speeds: tuple[float, float], error: ModelError, roles: str = "iiccc", **more: Any) -> Identified:
    told = {"i": "identification", "c": "check"}
    observed = [
        one.model_copy(update={"value": speed, "role": told[role]})
        for one, speed, role in zip(rows(SETTINGS), (*speeds, 40.0, 6.0, 150.0), roles, strict=True)
    ]
    return identify(ROOMY, observed, intervals=False, leave_out=False, error=error, **more)


def half(found: Identified, row: int) -> float:
    one = found.predictions[row]
    return math.log(one.high / one.low) / 2


def test_rows_share_what_their_model_and_setting_share():
    cases = make_cases(rows(SETTINGS))
    shared = ERROR.covariance(cases, cases)
    assert np.allclose(shared, shared.T) and np.linalg.eigvalsh(shared).min() > -1e-12
    assert shared[0, 1] == pytest.approx(0.05**2 + 0.05**2)
    size = math.log(cases[3].model.expert_bytes(0) / cases[0].model.expert_bytes(0))
    assert shared[0, 3] == pytest.approx(0.05**2 + 0.05**2 * math.exp(-1 - size), rel=1e-2)


def test_two_rows_say_more_of_their_sweep_than_of_another_model_or_place():
    found = known((52.0, 31.0), ERROR)
    before = known((52.0, 31.0), ERROR, "ciccc")
    inside, other, gpu = (half(found, row) for row in (2, 3, 4))
    assert inside < other < gpu
    assert inside < half(before, 2)


def test_without_a_model_error_two_rows_would_say_too_much():
    sure, unsure = known((52.0, 31.0), ModelError(row=0.02)), known((52.0, 31.0), ERROR)
    assert half(sure, 3) < half(unsure, 3)
    base = [math.log(one.constant.base) for one in unsure.constants]
    moved = [sum(abs(math.log(one.value) - b) for one, b in zip(each.constants, base, strict=True)) for each in (sure, unsure)]
    assert moved[1] < moved[0], "part of what rows are off is the model's, so constants stay nearer to the profile"


def test_a_constant_that_no_row_used_depends_on_widens_what_depends_on_it():
    """Rows on the processor alone say nothing of the GPU's rates."""
    settings = [(SMALL, "Q4_K_M", "ngl=0", 1), (SMALL, "Q4_K_M", "n_cpu_moe=0", 1)]
    observed = [
        one.model_copy(update={"value": speed, "role": role})
        for one, speed, role in zip(rows(settings), (20.0, 150.0), ("identification", "check"), strict=True)
    ]
    found = identify(ROOMY, observed, intervals=False, leave_out=False, error=ERROR)
    assert not any(one.moves for one in found.constants if one.constant.name.startswith("gpu_"))
    rates = [one.constant.sigmas for one in found.constants if one.constant.name == "gpu_read_rate"]
    assert half(found, 1) > 0.5 * Z90 * max(rates[0])


def test_a_machine_that_is_far_off_has_wider_intervals():
    near, far = known((52.0, 31.0), ERROR), known((20.0, 12.0), ERROR)
    assert 1.0 <= near.fit.inflation < 0.8 * far.fit.inflation
    assert half(far, 2) > 1.2 * half(near, 2)


def test_intervals_of_a_drawn_machine_hold_as_often_as_they_say():
    """Times drawn with the covariance of the model error, by a linear machine without constants that move."""
    draw = np.random.default_rng(5)
    cases = make_cases(rows(SETTINGS))
    shared = ERROR.covariance(cases, cases) + ERROR.row**2 * np.eye(len(cases))
    lower, used, n = np.linalg.cholesky(shared), [0, 1], 4000
    weights = shared[2:, :2] @ np.linalg.inv(shared[:2, :2])
    deviation = np.sqrt(np.diag(shared[2:, 2:] - weights @ shared[:2, 2:]))
    inside = 0
    for _ in range(n):
        off = lower @ draw.standard_normal(len(cases)) * math.sqrt(ERROR.freedom / draw.chisquare(ERROR.freedom))
        squares = off[:2] @ np.linalg.solve(shared[:2, :2], off[:2])
        scale = max(1.0, (ERROR.freedom + squares) / (ERROR.freedom + len(used)))
        wide = ERROR.quantile(len(used)) * math.sqrt(scale) * deviation
        inside += int(np.sum(np.abs(off[2:] - weights @ off[:2]) <= wide))
    assert 0.9 <= inside / n / 3 < 0.95  # scales below 1 are not used, so a little wider


def test_inflation_is_the_scale_of_students_t():
    class Still:
        priors: Any = type("None_", (), {"below": np.zeros(0), "above": np.zeros(0), "at": lambda self, logs: np.zeros(0)})()
        observed = np.array([0.0, 0.3, 0.4])

        def values(self, logs: Any) -> Any:
            return np.zeros(3)

        def slopes(self, logs: Any, *, both: bool = False) -> Any:
            return np.zeros((3, 0))

    fit = Problem(Still(), [1, 2], np.eye(3) * 0.01, freedom=3.0).fit()
    assert fit.squares == pytest.approx(25.0)
    assert fit.inflation == pytest.approx(math.sqrt((3 + 25) / (3 + 2)))


def test_a_range_follows_labels_shares_and_what_is_assumed():
    sheet = {"source": "spec-sheet", "ref": "a test"}
    measured = load_hardware(
        {**ROOMY, "devices.cpu0.memory_bytes_per_s": {"value": 70e9, "source": "published", "ref": "a test"}}
    )
    vague = load_hardware({**ROOMY, "devices.cpu0.memory_bytes_per_s": {"value": 70e9, **sheet}})
    cpu, copies = {"cpu": 1.0}, {"cpu": 0.5, "copies": 0.5}
    low, high = shipped().factors(measured, cpu)
    assert low < 1 < high and low == pytest.approx(1 / high)
    wide = shipped().factors(vague, cpu)
    assert wide[0] < low and wide[1] < high, "a data sheet says what no program exceeds"
    assert shipped().factors(measured, copies)[0] < replace(shipped(), copies=0.0).factors(measured, copies)[0]
    assert shipped().factors(measured, cpu, 0.8)[0] > low


def test_shares_of_time_are_of_the_parts_that_work():
    hardware = load_hardware(ROOMY)
    row = {f"decode_time_{key}_ns": value for key, value in (("dense", 30), ("cpu_experts", 60), ("exposed_demand", 10))}
    assert time_shares(row | {"utilisation.gpu0": 0.3}, hardware) == {"cpu": 0.6, "gpu": 0.3, "copies": 0.1}
    assert time_shares(row | {"utilisation.gpu0": 0.0}, hardware) == {"cpu": 0.9, "gpu": 0.0, "copies": 0.1}


def test_each_deviation_has_a_source_and_intervals_before_any_row_are_those_that_machines_left_out_had():
    error, heavy = shipped(), replace(shipped(), deviations=0.0, deviations_80=0.0)
    assert error.quantile(level=0.8) == error.deviations_80 < error.quantile() == error.deviations < heavy.quantile()
    assert error.quantile(2) == heavy.quantile(2), "after rows of the machine: Student's t"
    assert all(row["source"].startswith(("estimated: ", "derived: ", "assumed: ")) for row in shipped_rows())


def test_deviations_are_those_within_which_rows_lie():
    """Nine of ten of these rows are at most 0.9 of their deviations off, four of five 0.8."""
    reached = np.arange(1, 11) / 10
    prompts = pd.DataFrame({"machine": ["a", "a", "b"], "ratio": [math.exp(0.2), math.exp(0.4), math.exp(-0.4)]})
    error = replace(ERROR, machine=0.1, model=0.2)
    one = {"a": Rows(np.zeros(10), np.eye(10), np.eye(10))}
    known = {row["name"]: row for row in records(error, one, reached, prompts)}
    assert float(known["prompt"]["value"]) == 0.27, "root of (0.3**2 + 0.4**2) / 2 - 0.1**2 - 0.2**2"
    found = [float(known[name]["value"]) for name in ("deviations", "deviations_80")]
    assert found == pytest.approx([0.91, 0.82])
