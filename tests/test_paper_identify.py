"""Identification of a paper's platform from its printed rows, with a formula in the place of the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from moesim.errors import ConfigError
from moesim.studies.paper_identify import Plan, identify_paper, read_plans
from moesim.studies.papers import Compared
from moesim.studies.published import Published, paper_folder

PLAN = Plan.model_validate(
    {
        "hardware": "any", "decode_tokens": 4, "spread": 0.02, "blocks": ["a", "b", "c"],
        "constants": {"rate": {"value": 2.0, "factor": 3.0, "step": 1.3}, "cost": {"value": 1.0, "factor": 3.0, "step": 1.3}},
    }
)  # fmt: skip
TRUE = {"rate": 4.0, "cost": 0.5}


def row(figure: str, name: str, kind: str = "value", printed: float = 1.0) -> Published:
    over = "other" if kind != "value" else ""
    return Published(
        paper="p", figure=figure, ref="", quantity="speed", setting=name, system="s", over=over, reading="", kind=kind, unit="",
        published=printed, source="runs", input="x", policy="y", baseline_input="", baseline="", metric="m", where="", remark="",
        why="",
    )  # fmt: skip


def times(constants: Mapping[str, float]) -> dict[str, float]:
    """Compute what an engine would say: times of 1 and of 8 units of work, and a gain of what costs nothing over what does."""
    rate, cost = constants["rate"], constants["cost"]
    return {
        "small": 1 / rate + cost,
        "large": 8 / rate + cost,
        "ratio": (8 / rate + cost) / (1 / rate),
        "gain": 100 * cost * rate,
    }


KINDS = {"small": ("a", "value"), "large": ("b", "value"), "ratio": ("b", "speedup"), "gain": ("c", "gain")}
ROWS = [row(figure, name, kind, times(TRUE)[name]) for name, (figure, kind) in KINDS.items()]


def evaluate(points: Sequence[Mapping[str, float] | None]) -> list[list[Compared]]:
    derived = {"rate": 2.0, "cost": 1.0}
    return [[Compared(one, times(point or derived)[one.setting], n_runs=1) for one in ROWS] for point in points]


def test_true_constants_are_found_and_every_block_is_told_by_the_others():
    found = identify_paper(PLAN, ROWS, evaluate, rounds=3)
    for constants in found.constants.values():
        for key, value in TRUE.items():
            assert abs(math.log(constants[key] / value)) < 0.1, (key, constants)
    for answer in found.answers:
        assert abs(math.log(answer.ratio(answer.left_out) or 0)) < 0.1
        assert answer.derived == pytest.approx(times({"rate": 2.0, "cost": 1.0})[answer.published.setting])
    assert max(found.sigma.values()) < 0.1


def test_a_block_that_contradicts_the_rest_is_not_met_by_the_rest():
    wrong = [row("a", "small", "value", 3 * ROWS[0].published), *ROWS[1:]]

    def same(points: Sequence[Mapping[str, float] | None]) -> list[list[Compared]]:
        return [[Compared(mine, one.simulated) for mine, one in zip(wrong, found, strict=True)] for found in evaluate(points)]

    answer = identify_paper(PLAN, wrong, same, rounds=3).answers[0]
    assert (answer.ratio(answer.left_out) or 0) < 0.5


def test_what_no_row_tells_keeps_its_prior():
    plan = PLAN.model_copy(update={"constants": {**PLAN.constants, "idle": PLAN.constants["cost"]}})
    found = identify_paper(plan, ROWS, evaluate)
    assert found.constants[""]["idle"] == pytest.approx(1.0)
    assert found.sigma["idle"] == pytest.approx(math.log(3.0))


def test_a_row_without_a_run_takes_no_part():
    missing = [*ROWS, row("c", "none")]

    def some(points: Sequence[Mapping[str, float] | None]) -> list[list[Compared]]:
        return [[*found, Compared(missing[-1])] for found in evaluate(points)]

    found = identify_paper(PLAN, missing, some, rounds=2)
    assert found.answers[-1].left_out is None
    assert found.constants[""]["rate"] == pytest.approx(identify_paper(PLAN, ROWS, evaluate, rounds=2).constants[""]["rate"])


def test_shipped_plans_name_figures_and_numbers_that_there_are():
    from moesim.hardware import load_hardware
    from moesim.studies.published import PUBLISHED, read_published

    folder = paper_folder()
    rows = read_published(folder / PUBLISHED)
    for paper, plan in read_plans(folder).items():
        blocks = {plan.block_of(one) for one in rows if one.paper == paper}
        assert set(plan.blocks) <= blocks, paper
        numbers = {key: {"value": c.value, "source": "assumed", "why": "a test"} for key, c in plan.constants.items()}
        assert load_hardware({"base": plan.hardware, **numbers}).overrides


def test_a_wrong_plan_is_told(tmp_path: Path):
    (tmp_path / "_identify.yaml").write_text("dali: {hardware: x, decode_tokens: 0}\n")
    with pytest.raises(ConfigError, match=r"_identify.yaml: dali.decode_tokens: .* greater than or equal to 1, got 0"):
        read_plans(tmp_path)
