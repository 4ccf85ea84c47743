"""Metrics by columns are those of plain loops over the records; those of a run in pieces are those of the whole."""

from __future__ import annotations

import gc
import pickle
from random import Random
from typing import Any, get_type_hints

import numpy as np
import pytest

from moesim.core.processes import paused
from moesim.core.record_table import Coded, Lists, RecordTable
from moesim.engine import chosen, simulate
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.metrics import Summary, bytes_moved, counts, fidelity, fidelity_fresh_decode, summarise
from moesim.metrics.breakdown import TimeByCause, _Ends, breakdown
from moesim.metrics.columns import sums
from moesim.metrics.hits import hit_rates
from moesim.metrics.latency import latency, token_times
from moesim.metrics.machine import Machine
from moesim.metrics.utilisation import busy, utilisation
from moesim.model import load_model
from moesim.policies.registry import POLICIES, make_policy
from moesim.records import KINDS, Records
from moesim.testing.traces import synthetic_trace
from moesim.trace.predictors import PredictorSet
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.free_kit import outcome
from tests.metrics import plain_kit
from tests.policies.golden_kit import CASES, SETTINGS, run_case

DEVICES = {"gpu0": "gpu", "gpu1": "gpu", "cpu0": "cpu", "disk0": "disk"}


def machine_of(records: Records, media: dict[str, str]) -> Machine:
    """Know of the links that a random machine used."""
    return Machine(DEVICES, tuple(sorted({r.link for r in (*records.transfers, *records.activations)})), media)


def check(records: Records, machine: Machine, seed: int) -> None:
    plain = plain_kit.time_by_cause(records, machine)
    split = breakdown(records, machine.kinds, machine.media)
    assert [tuple(window) for window in split.windows] == [window for window, _ in plain]
    assert split.ns.tolist() == [ns for _, ns in plain]
    row = summarise(records, machine, split=split)
    expected = plain_kit.row(records, machine, plain)
    assert {key: repr(row[key]) for key in expected} == {key: repr(value) for key, value in expected.items()}
    alone = {
        **hit_rates(records, machine.kinds), **utilisation(busy(records, machine.kinds, machine.links)), **bytes_moved(records),
        **counts(records, machine.kinds), **fidelity(records), "fidelity_fresh_decode": fidelity_fresh_decode(records),
    }  # fmt: skip
    assert {key: repr(row[key]) for key in alone} == {key: repr(value) for key, value in alone.items()}
    rng = Random(seed)
    for _ in range(3):
        times, summary = TimeByCause(machine.kinds, machine.media), Summary(machine)
        parts = []
        for piece, settled in plain_kit.pieces(records, rng):
            settled_ns = rng.choice([settled, settled, max(0, settled - rng.randrange(5_000)), 0])  # less may be known
            parts.append(times.add(piece, settled_ns))
            summary.add(piece, settled_ns)
        parts.append(times.rest())
        assert [window for part in parts for window in part.windows] == split.windows
        assert np.array_equal(np.concatenate([part.ns for part in parts]), split.ns)
        assert repr(summary.row()) == repr(row)


@pytest.mark.long
def test_any_records():
    media = dict.fromkeys(plain_kit.LINKS[:2], "root")
    for seed in range(60):
        records = plain_kit.drawn(Random(seed))
        check(records, Machine(plain_kit.DEVICES, plain_kit.LINKS, media if seed % 2 else {}), seed)


def test_sums_are_exact_whatever_floats_hold():
    codes = np.array([0, 2, 0, 2])
    for large in (1, 2**53, 2**61):
        assert sums(codes, np.array([large, 3, 1, large]), 4).tolist() == [large + 1, 0, large + 3, 0]


def test_any_steps():
    for seed in range(300):
        rng = Random(seed)
        records = plain_kit.drawn_steps(rng)
        for last_chunks in (None, {step.step for step in records.steps if rng.random() < 0.5}):
            ttft, between = plain_kit.token_times(records, last_chunks)
            assert token_times(records, last_chunks) == (ttft, between)
            found = latency(records, last_chunks)
            n = sum(n for _, n in between)
            assert found["tpot_mean_ns"] == (sum(time * n for time, n in between) / n if n else None)
            for percent in (50, 90, 99):
                assert found[f"tpot_p{percent}_ns"] == plain_kit.percentile(between, percent)


def test_random_runs():
    found = [outcome(seed, chosen())[0] for seed in range(40)]
    ended = [records for records in found if isinstance(records, Records)]
    assert len(ended) > 20
    for seed, records in enumerate(ended):
        links = sorted({r.link for r in records.transfers})
        check(records, machine_of(records, dict.fromkeys(links, "root") if seed % 2 else {}), seed)


# A quarter of the policies each time, which have every kind of record; the others with `make test-long`.
OFTEN = [pytest.param(n, marks=[] if n % 4 == 0 else [pytest.mark.long]) for n in range(len(POLICIES))]


@pytest.mark.parametrize("number", OFTEN)
def test_every_policy(number: int):
    name = f"{sorted(POLICIES)[number]}, {list(SETTINGS)[number % len(SETTINGS)]}"
    whole, machine = run_case(CASES[name]), Machine.of(load_hardware(CASES[name].machine))
    check(whole, machine, number)
    handed_out = Summary(machine)
    run_case(CASES[name], sink=handed_out.add, piece=1)
    assert repr(handed_out.row()) == repr(summarise(whole, machine))


def test_columns_go_without_the_cycle_collector():
    with paused():
        summary = Summary(Machine(plain_kit.DEVICES, plain_kit.LINKS, {}))
        gc.collect()
        for piece, settled_ns in plain_kit.pieces(plain_kit.drawn(Random(1)), Random(2)):
            for name in KINDS:
                columns = getattr(piece, name)
                columns.fill({field: _column(columns, field, hint) for field, hint in get_type_hints(columns.kind).items()})
            summary.add(piece, settled_ns)
        del piece, columns
        assert gc.collect() == 0  # objects in cycles


def _column(table: RecordTable[Any], field: str, hint: Any) -> Any:
    if hint is str:
        return Coded(*table.texts(field))
    return Lists(*table.lists(field)) if hint == tuple[int, ...] else table.column(field)


def test_what_is_kept_grows_with_the_steps_alone():
    machine = Machine.of(load_hardware("rtx3090-epyc7532"))
    sizes, n_steps = [], []
    for tokens in (10, 40):
        trace = synthetic_trace(32, 8, 2, 1, 4, tokens, calibration=True, signals={"residual": 0.8})
        model, hardware = load_model({"base": "mixtral-8x7b", "expert_bits": 4}), load_hardware("rtx3090-epyc7532")
        workload = compose(trace, WorkloadSpec(prompt_tokens=4, decode_tokens=tokens))
        records = simulate(
            model=model, costs=CostModel(model, hardware), workload=workload, policy=make_policy("dali"), tables=trace.tables,
            cache_slots={"gpu0": 128}, predictors=PredictorSet(trace, workload, {}, 0),
        )  # fmt: skip
        summary = Summary(machine)
        for piece, settled_ns in plain_kit.pieces(records, Random(3)):
            summary.add(piece, settled_ns)
        assert {"prefetch", "demand"} <= {r.cause for r in records.transfers}
        assert summary.row() == summarise(records, machine)
        sizes.append(len(pickle.dumps(summary)))
        n_steps.append(len(records.steps))
    assert sizes[1] - sizes[0] < 200 * (n_steps[1] - n_steps[0])  # bytes; the records of a step are a hundred times as many


def test_whether_any_of_what_ended_at_an_instant_is_of_a_kind():
    index = _Ends(np.array([1, 1, 3, 5, 5, 5]))
    assert index.any_of(np.array([False, True, False, False, False, True])).tolist() == [True, False, True]
    assert index.any_of(np.array([False, False, True, False, False, False])).tolist() == [False, True, False]
