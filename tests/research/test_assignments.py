"""Assignment rules on random layers, against the best execution."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest

from experiments.research.tables.assignments import (
    LOADS,
    REGIMES,
    RULES,
    SIZES,
    Result,
    draw,
    main,
    study,
    table,
)  # fmt: skip
from experiments.research.tables.schedule import optimal_schedule
from moesim.core.table import Format


@pytest.fixture(scope="module")
def mixed() -> dict[tuple[str, str], Result]:
    return {(one.kind, one.name): one for one in study("mixed", (3, 9), 150)}


def test_the_order_of_the_rules(mixed: dict[tuple[str, str], Result]):
    """Few experts, mixed costs, the plan's order on the GPU: the paper's queues are all but optimal, then the code's list."""
    means = {name: mixed["rule, in order", name].mean for name in RULES}
    order = ["queues", "two-ended", "greedy", "queues, free first", "threshold", "all-gpu", "all-cpu"]
    assert sorted(order, key=means.__getitem__) == order
    assert means["queues"] < 1.01
    assert means["exact"] < means["beam"] < means["greedy"]
    assert means["two-ended"] == pytest.approx(1.04, abs=0.03)
    assert means["greedy"] == pytest.approx(1.08, abs=0.03)
    assert means["threshold"] == pytest.approx(1.32, abs=0.06)


def test_no_rule_beats_the_best_and_no_bound_exceeds_it(mixed: dict[tuple[str, str], Result]):
    for (kind, name), one in mixed.items():
        assert one.low <= one.mean <= one.high, name
        if kind == "bound":
            assert one.worst <= one.mean <= 1, name
        elif kind != "plan":
            assert 1 <= one.mean <= one.worst, name
    assert mixed["bound", "work per resource"].mean < mixed["bound", "work and pipeline"].mean
    assert mixed["plan", "planned optimum"].mean != pytest.approx(mixed["rule", "exact"].mean)  # a promise, not an execution


def test_a_gpu_that_takes_what_is_there_is_never_slower(mixed: dict[tuple[str, str], Result]):
    for name in RULES:
        assert mixed["rule", name].mean <= mixed["rule, in order", name].mean
    assert mixed["rule", "threshold"].mean < mixed["rule, in order", "threshold"].mean


def test_no_rule_is_as_near_where_the_gpus_time_grows_with_rows(mixed: dict[tuple[str, str], Result]):
    """The queues know the times of all three resources; what they do not know is which of two transfers is worth more."""
    growing = {one.name: one for one in study("growing", (3, 9), 150) if one.kind == "rule"}
    even = mixed["rule", "queues"]
    assert growing["queues"].optimal < 0.85 < 0.95 < even.optimal
    assert growing["queues"].mean > even.mean
    assert min(growing.values(), key=lambda one: one.mean).name == "queues"
    assert growing["queues"].worst > 1.05


def test_a_best_of_many_unequal_experts_is_a_best_of_all_splits():
    """11 and 12 experts: what is enumerated there is what the program finds, which larger layers of this regime rely on."""
    rng = random.Random(3)
    for _ in range(6):
        layer, _ = draw(rng, REGIMES["growing"], (11, 12))
        found = optimal_schedule(layer, enumerate_up_to=0).makespan
        assert found == pytest.approx(optimal_schedule(layer).makespan, rel=1e-6)


def test_instances_are_as_described():
    rng = random.Random(0)
    cached = set()
    for regime in REGIMES.values():
        for sizes in SIZES:
            layer, rows = draw(rng, regime, sizes)
            assert sizes[0] <= len(rows) == len(layer.active) <= sizes[1]
            assert set(rows) <= set(LOADS)
            fits = [
                (each, row)
                for each in regime.gpu
                for row in regime.gpu_row or (0,)
                if list(layer.gpu_time) == [round(1000 * (each + row * w)) for w in rows]
            ]
            assert fits
            assert layer.transfer / 1000 in regime.transfer
            cached.add(sum(layer.resident) / len(rows))
    assert min(cached) < 0.3 < 0.7 < max(cached)


def test_assignments_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--instances", "2", "--regimes", "balanced", "-o", "md", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "| balanced | greedy |" in said
    assert "3-9 experts" in said
    assert "2 random layers each" in said
    rows = list(csv.DictReader((tmp_path / "out" / "assignments.csv").read_text().splitlines()))
    assert {row["kind"] for row in rows} == {"rule", "rule, in order", "bound", "plan"}
    assert (tmp_path / "out" / "assignments.png").stat().st_size > 1000
    assert len(json.loads(table(study("balanced", (3, 9), 3), Format.JSON))) == 2 * len(RULES) + 3
