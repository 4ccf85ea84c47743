"""Identification of a paper's platform from its printed rows, with a formula in the place of the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.research.tables.identify_papers import stretched
from experiments.research.tables.platform import Identified, Plan, Point, identify_paper, read_plans
from moesim.errors import ConfigError
from moesim.studies.identify.fit import Constant
from moesim.studies.papers.compare import Compared
from moesim.studies.papers.published import Published, paper_folder

PLAN = Plan.model_validate({"paper": "p", "hardware": "any", "spread": 0.02, "blocks": ["a", "b", "c"]})
BASE = {"rate": 2.0, "cost": 1.0}
CONSTANTS = [
    Constant("rate", ("rate",), BASE["rate"], "B/s", (math.log(3), math.log(3)), "assumed"),
    Constant("cost", ("cost",), BASE["cost"], "us", (math.log(3), math.log(3)), "assumed"),
]
TRUE = {"rate": 4.0, "cost": 0.5}


def row(figure: str, name: str, kind: str = "value", printed: float = 1.0, reading: str = "") -> Published:
    over = "other" if kind != "value" else ""
    words = {
        "paper": "p",
        "figure": figure,
        "quantity": "speed",
        "setting": name,
        "system": "s",
        "over": over,
        "reading": reading,
    }
    others = dict.fromkeys(("ref", "unit", "baseline_input", "baseline", "where", "remark", "why"), "")
    return Published(**words, **others, kind=kind, published=printed, source="runs", input="x", policy="y", metric="m")


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


def compared(rows: Sequence[Published], constants: Mapping[str, float], slower: float = 1.0) -> list[Compared]:
    """Give what an engine says of rows that it knows; ``slower``: of shortened runs, whose times are all off by a factor."""
    known = times(constants)
    off = {"value": slower, "speedup": 1.0, "gain": 1.0}
    return [Compared(one, known[one.setting] * off[one.kind] if one.setting in known else None, n_runs=1) for one in rows]


def identified(
    rows: Sequence[Published], plan: Plan = PLAN, constants: Sequence[Constant] = CONSTANTS, short: float = 1.0
) -> Identified:
    def machine(point: Point | None) -> dict[str, float]:
        if point is None:
            return BASE
        found = {c.name: c.base * math.exp(log) for c, log in zip(constants, point.logs, strict=True)}
        return {**found, "cost": found["cost"] * dict(point.bits).get("model", 1.0)}

    def evaluate(points: Sequence[Point | None], which: Sequence[int]) -> list[list[Compared]]:
        return [compared([rows[index] for index in which], machine(point), short) for point in points]

    return identify_paper(plan, constants, rows, compared(rows, BASE), evaluate, moves=4)


def test_true_constants_are_found_and_every_block_is_told_by_the_others():
    found = identified(ROWS)
    for constants in found.constants.values():
        for key, value in TRUE.items():
            assert abs(math.log(constants[key] / value)) < 0.15, (key, constants)
    for answer in found.answers:
        assert abs(math.log(answer.ratio(answer.left_out) or 0)) < 0.15
        assert answer.derived == pytest.approx(times(BASE)[answer.published.setting])
        assert answer.consistent
    assert max(found.sigma.values()) < 0.1


def test_shortened_runs_only_tell_how_rows_change():
    whole, short = identified(ROWS), identified(ROWS, short=0.7)
    for one, other in zip(whole.answers, short.answers, strict=True):
        assert other.left_out == pytest.approx(one.left_out, rel=1e-6)
        assert other.derived == one.derived


def test_a_block_that_contradicts_the_rest_is_not_met_by_the_rest():
    wrong = [row("a", "small", "value", 3 * ROWS[0].published), *ROWS[1:]]
    answer = identified(wrong).answers[0]
    assert (answer.ratio(answer.left_out) or 0) < 0.5
    assert answer.consistent is False


def test_what_no_row_tells_keeps_its_prior():
    idle = Constant("idle", ("idle",), 7.0, "us", (math.log(3), math.log(3)), "assumed")
    found = identified(ROWS, constants=[*CONSTANTS, idle])
    assert found.constants[""]["idle"] == pytest.approx(7.0)
    assert found.prior["idle"] == (math.log(3.0), math.log(3.0))
    assert found.sigma["idle"] == pytest.approx(math.log(3.0))


def test_a_row_without_a_run_takes_no_part():
    found = identified([*ROWS, row("c", "none")])
    assert found.answers[-1].left_out is None
    assert found.constants == identified(ROWS).constants


def test_a_reading_that_is_not_named_tells_nothing_and_is_answered():
    other = row("c", "large", "value", 50.0, reading="another")
    found = identified([*ROWS, other])
    assert found.constants == identified(ROWS).constants
    assert found.answers[-1].left_out is not None
    named = identified([*ROWS, other], plan=PLAN.model_copy(update={"readings": ["another"]}))
    assert named.constants[""] != found.constants[""]


def test_one_block_may_tell_all_others():
    both = [row("a", "small", "value", times(TRUE)["small"]), row("a", "large", "value", times(TRUE)["large"]), ROWS[3]]
    found = identified(both, plan=PLAN.model_copy(update={"blocks": ["a", "c"], "told_by": "a"}))
    assert found.constants["a"] == found.constants["c"] == found.constants[""]
    assert abs(math.log(found.constants["c"]["cost"] / TRUE["cost"])) < 0.1


def test_bits_that_are_not_printed_are_chosen_by_the_rows():
    plan = PLAN.model_copy(update={"bits": {"model": [16.0, 1.0]}})
    found = identified(
        ROWS, plan=plan, constants=[CONSTANTS[0], Constant("cost", ("cost",), 0.5, "us", (0.05, 0.05), "measured")]
    )
    assert found.bits == {out: {"model": 1.0} for out in ("", *PLAN.blocks)}


def test_totals_of_a_shortened_run_grow_with_its_tokens():
    """The prompt is never shortened: its time is that of loading experts more than of its rows."""
    short: dict[str, Any] = {
        "decode_tokens": 4, "n_batches": 1, "ttft_mean_ns": 100.0, "makespan_ns": 140, "time_dense_ns": 30,
        "decode_time_dense_ns": 10, "n_generated_tokens": 5, "energy_j": None,
    }  # fmt: skip
    found = stretched(short, 64)
    assert found["makespan_ns"] == 100 + 16 * 40
    assert found["ttft_mean_ns"] == 100
    assert found["time_dense_ns"] == 20 + 16 * 10
    assert found["n_generated_tokens"] == 65
    assert stretched(short, 4) == short


def test_shipped_plans_name_figures_and_numbers_that_there_are():
    from moesim.hardware import override, read_profile
    from moesim.studies.identify.fit import Machine
    from moesim.studies.papers.published import PUBLISHED, read_published

    folder = paper_folder()
    rows = read_published(folder / PUBLISHED)
    for name, plan in read_plans(folder).items():
        mine = [one for one in rows if one.paper == plan.paper]
        assert {plan.block_of(one) for one in mine} - {None} == set(plan.blocks), name
        assert set(plan.readings) <= {one.reading for one in mine}, name
        raw, _, _ = read_profile(plan.hardware)
        assert {c.name for c in Machine(override(raw, plan.start, name), name, plan.free, plan.more).constants} == {
            *plan.free,
            *plan.more,
        }


def test_a_wrong_plan_is_told(tmp_path: Path):
    (tmp_path / "_identify.yaml").write_text("dali: {hardware: x, decode_tokens: 0}\n")
    with pytest.raises(ConfigError, match=r"_identify.yaml: dali.decode_tokens: .* greater than or equal to 1, got 0"):
        read_plans(tmp_path)


def test_a_constant_that_no_row_is_met_by_stays_near_its_prior_and_the_engine_has_the_last_word():
    """The response to a small step promises faster runs; the engine says that they get slower further on."""

    def engine(rate: float) -> float:
        return 1 / rate if rate < 4 else rate / 16

    def evaluate(points: Sequence[Point | None], which: Sequence[int]) -> list[list[Compared]]:
        rates = [BASE["rate"] * math.exp(point.logs[0]) if point else BASE["rate"] for point in points]
        return [[Compared(rows[index], engine(rate), n_runs=1) for index in which] for rate in rates]

    rows = [row("a", "small", "value", 0.01), row("b", "large", "value", 0.01)]
    plan = PLAN.model_copy(update={"blocks": ["a", "b"]})
    found = identify_paper(plan, CONSTANTS[:1], rows, [Compared(one, engine(2.0), n_runs=1) for one in rows], evaluate)
    for constants in found.constants.values():
        assert 2.0 <= constants["rate"] < 8.0
    assert all((answer.left_out or 0) <= (answer.derived or 0) for answer in found.answers)
    assert all((answer.everything or 0) < (answer.derived or 0) for answer in found.answers)
