"""The audit of printed speed-ups: machines around a paper's own, and the largest speed-up among them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest

import moesim
from experiments.research.tables.audit_papers import AS_IT_IS, Audited, audit, machines, named, table
from moesim.core.table import Format
from moesim.experiment.config import parse_config
from moesim.experiment.workers import Workers
from moesim.studies.league.league import Meetings
from moesim.studies.papers.published import Published
from moesim.studies.whatif.knobs import knob_of
from moesim.studies.whatif.settings import Base
from tests.experiment.experiment_kit import small

BLANK = Published(**{one.name: 0.0 if one.name == "published" else "" for one in fields(Published)})  # type: ignore[arg-type]
CLAIM = replace(
    BLANK, paper="p", figure="f", quantity="speed", system="LRU", over="on demand", kind="speedup", unit="x", published=1.2,
    source="runs", input="small", policy="lru", baseline="on-demand", metric="decode_tokens_per_s",
)  # fmt: skip

# DALI with all on the GPU, over itself: slower, and a thousand times slower. A cache beside it is no part of it.
PART = replace(CLAIM, policy="dali(assignment=all-gpu)", baseline="dali")
LOSSES = [
    replace(PART, kind="gain", unit="%", published=-0.01),
    replace(PART, published=0.001),
    replace(PART, policy="lru", published=0.5),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Audited], Path]:
    folder = tmp_path_factory.mktemp("audit")
    policies = ["on-demand", "lru", "fiddler", {"name": "dali", "assignment": "all-gpu"}, "dali"]
    config = parse_config(small(folder, policies=policies), "small.yaml")
    other = replace(CLAIM, policy="fiddler", published=1000.0)
    with Workers(1) as workers:
        meetings = Meetings("audit", workers)
        rows = [CLAIM, other, replace(CLAIM, kind="value"), replace(CLAIM, policy="kt-layer"), *LOSSES]
        return audit(rows, {"p/small": config}, meetings), folder


def test_the_machines_are_the_paper_s_own_and_every_corner():
    every = machines()
    assert len(set(every)) == len(every) == 17
    assert named(every[0]) == AS_IT_IS
    assert {factor for machine in every[1:] for factor in machine} == {Fraction(1, 2), Fraction(2)}


def test_only_speed_ups_that_runs_answer_are_audited(found: tuple[list[Audited], Path]):
    assert [(one.published.policy, one.n_machines) for one in found[0]] == [
        ("lru", 17), ("fiddler", 17), ("dali(assignment=all-gpu)", 17), ("dali(assignment=all-gpu)", 17), ("lru", 17)
    ]  # fmt: skip


def test_the_speed_ups_are_those_of_plain_runs(found: tuple[list[Audited], Path]):
    one, folder = found[0][0], found[1]
    raw = small(folder, policies=["on-demand", "lru"])

    def speedup(raw: object) -> float:
        speeds = moesim.run(json.loads(json.dumps(raw)), progress=False).table["decode_tokens_per_s"]
        return float(speeds[1] / speeds[0])

    assert one.own == pytest.approx(speedup(raw))
    best = next(machine for machine in machines() if named(machine) == one.machine)
    knobs = ("link.bytes_per_s", "cpu.memory_bandwidth", "cpu.compute", "gpu.memory_bandwidth")
    for knob, factor in zip(knobs, best, strict=True):
        scale = knob_of(knob).scale
        assert scale is not None
        raw = dict(scale(Base({"transfer": {"curve": "pinned"}, **raw}, "x"), factor).raw)
    assert one.largest == pytest.approx(speedup(raw))
    assert one.largest >= one.own


def test_a_claim_is_within_reach_or_not(found: tuple[list[Audited], Path]):
    assert [one.within for one in found[0][:2]] == [True, False]  # 1.49 on the own machine; nobody is 1000 times as fast
    said = table(found[0], Format.MD)
    assert "3 of 5 printed ratios" in said
    assert json.loads(table(found[0], Format.JSON))[1]["within"] is False


def test_a_printed_loss_is_beside_the_largest_loss(found: tuple[list[Audited], Path]):
    lost, least, other = found[0][2:]
    assert [lost.within, least.within] == [True, False]
    assert lost.machine == least.machine
    assert lost.largest == pytest.approx(100 * (least.largest - 1))
    assert least.largest <= least.own < 1, "the loss is the largest, the ratio the smallest"
    assert other.largest >= other.own, "another system's ratio below one is no loss of a part"
