"""Frames of runs: by hand on small records, and they add up to the rows of the runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.core.record_table import RecordTable
from moesim.experiment.runner import run_one
from moesim.metrics.breakdown import breakdown
from moesim.metrics.frames import IDENTITY, _link_busy, frame_bytes, layer_frame, step_frame
from moesim.metrics.machine import Machine
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.metrics.outcome import Outcome
from moesim.records import LayerRecord, LookupRecord, Records, StepRecord, TaskRecord, TransferRecord
from tests.effort import lines_run
from tests.experiment.experiment_kit import resolve

MACHINE = Machine({"gpu0": "gpu", "gpu1": "gpu", "cpu0": "cpu"}, ("cpu0->gpu0",))


def outcome(records: Records, **row) -> Outcome:
    split = breakdown(records, MACHINE.kinds)
    return Outcome({"run": 0, "policy": "mine", **row}, MACHINE, records, split)


def task(start: int, end: int, device: str, step: int, layer: int, expert: int = 0) -> TaskRecord:
    kind = "expert" if expert >= 0 else "dense"
    return TaskRecord(start, end, device, "main", kind, step, layer, 0, expert, 1, end - start, start, start)


def transfer(start: int, end: int) -> TransferRecord:
    return TransferRecord(start, end, "cpu0->gpu0", "demand", 0, 0, 1, 0, start, 0, True, False)


def two_batches() -> Records:
    """Each batch: a prefill step and two decode steps of one layer, 100 ns a step."""
    run = Records(makespan_ns=600)
    for number in range(6):
        begin, phase = 100 * number, "decode" if number % 3 else "prefill"
        run.steps.append(StepRecord(begin, begin + 100, number, phase, number // 3, 1, 1, 0.0))
        run.layers.append(LayerRecord(begin, begin + 90, number, 0))
        run.tasks.append(task(begin, begin + 10, "gpu0", number, 0, -1))
        run.tasks.append(task(begin + 10, begin + 20, "gpu0", number, 0, 2))
        run.tasks.append(task(begin + 20, begin + 30, "gpu0" if number in (3, 5) else "cpu0", number, 0, 5))
        hits = (1, 0) if number < 3 else (1, 1)
        run.lookups.append(LookupRecord(begin + 10, number, 0, 0, (2, 5), (1, 1), hits, (0, 0)))
    # A second micro-batch: expert 5 was fetched for the first and does not count again, expert 7 does.
    run.lookups.append(LookupRecord(550, 5, 0, 1, (5, 7), (1, 1), (1, 0), (0, 0)))
    return run


def test_steps_number_the_tokens_of_each_batch_and_count_lookups_once():
    steps = pd.DataFrame(step_frame(outcome(two_batches())))
    assert [None if pd.isna(token) else token for token in steps["token"]] == [None, 1, 2, None, 1, 2]
    assert steps["lookups"].tolist() == [2, 2, 2, 2, 2, 3]
    assert steps["hits"].tolist() == [1, 1, 1, 2, 1, 2]
    assert steps["resident"].tolist() == [1, 1, 1, 2, 2, 2]
    assert steps["policy"].tolist() == ["mine"] * 6
    times = steps.filter(regex="^time_").sum(axis=1)
    assert times.tolist() == [100] * 6


def test_steps_come_in_order_whatever_order_they_are_recorded_in():
    run, other = two_batches(), two_batches()
    other.steps = RecordTable(StepRecord, reversed(list(run.steps)))
    for frame in (step_frame, layer_frame):
        assert list(frame(outcome(other))) == list(frame(outcome(run)))
        assert list(frame(outcome(Records()))) == []
    renumbered = RecordTable(StepRecord, (step._replace(step=5 - step.step) for step in run.steps))
    assert [row["step"] for row in step_frame(outcome(Records(makespan_ns=600, steps=renumbered)))] == list(range(6))


def test_under_refill_a_step_has_no_token_index():
    steps = list(step_frame(outcome(two_batches(), refill=True)))
    layers = list(layer_frame(outcome(two_batches(), refill=True)))
    assert {row["token"] for row in [*steps, *layers]} == {None}


def test_layers_say_phase_and_token_and_count_micro_batches_both_ways():
    layers = pd.DataFrame(layer_frame(outcome(two_batches())))
    last = layers.iloc[-1]
    assert (last["phase"], last["token"], last["step"], last["layer"]) == ("decode", 2, 5, 0)
    assert (last["n_active"], last["n_hits"], last["lookups"], last["hits"]) == (4, 3, 3, 2)
    assert (layers["hits"].tolist(), layers["resident"].tolist()) == ([1, 1, 1, 2, 1, 2], [1, 1, 1, 2, 2, 2])
    assert layers.iloc[0]["phase"] == "prefill"


def test_busy_and_done_times_of_a_visit():
    """Routed at 100. CPU: 110 to 410 and 410 to 510. GPUs: 120 to 220 and 300 to 420 on one, 130 to 430 on the other."""
    run = Records(makespan_ns=1000)
    run.steps.append(StepRecord(0, 1000, 0, "decode", 0, 1, 1, 0.0))
    run.layers += [LayerRecord(0, 520, 0, 0), LayerRecord(520, 900, 0, 1)]
    run.lookups += [LookupRecord(at, 0, layer, 0, (0,), (1,), (1,), (0,)) for at, layer in ((100, 0), (600, 1))]
    run.tasks += [
        task(0, 100, "gpu0", 0, 0, -1), task(110, 410, "cpu0", 0, 0), task(410, 510, "cpu0", 0, 0, 1),
        task(120, 220, "gpu0", 0, 0), task(300, 420, "gpu0", 0, 0), task(130, 430, "gpu1", 0, 0),
        task(520, 590, "cpu0", 0, 1),  # begun and ended before this layer was routed
    ]  # fmt: skip
    run.transfers += [transfer(50, 250), transfer(400, 700), transfer(950, 1000)]
    first, second = layer_frame(outcome(run))
    assert (first["cpu_busy_ns"], first["cpu_longest_ns"], first["cpu_done_ns"]) == (400, 400, 410)
    assert (first["gpu_busy_ns"], first["gpu_longest_ns"], first["gpu_done_ns"]) == (520, 300, 330)
    assert (second["cpu_busy_ns"], second["cpu_done_ns"], second["gpu_busy_ns"], second["gpu_done_ns"]) == (70, 0, 0, 0)
    assert (first["link_busy_ns"], second["link_busy_ns"]) == (200 + 120, 180)


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(intervals, st.lists(st.integers(0, 120), min_size=2, max_size=6, unique=True).map(sorted))
def test_link_time_in_windows_is_that_of_every_nanosecond(transfers, edges):
    found = _link_busy(
        Records(transfers=RecordTable(TransferRecord, (transfer(*one) for one in transfers))), *np.array(list(pairwise(edges))).T
    )
    busy = np.zeros(121, int)
    for start, end in transfers:
        busy[start:end] += 1
    assert found.tolist() == [int(busy[begin:end].sum()) for begin, end in pairwise(edges)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Three policies, two batches of four requests, in one micro-batch and in two."""
    folder = tmp_path_factory.mktemp("sweep")
    workload = {"batch_size": 4, "prompt_tokens": 6, "decode_tokens": 3, "n_batches": 2, "micro_batches": [1, 2]}
    experiment = resolve(folder, workload=workload, policies=["lru", "fiddler", "dali"])
    return [run_one(experiment, spec, keep=True) for spec in experiment.specs]


def test_frames_add_up_to_the_row(sweep: list[Outcome]):
    for one in sweep:
        row, records = one.row, one.records
        steps, layers = pd.DataFrame(step_frame(one)), pd.DataFrame(layer_frame(one))
        for frame in (steps, layers):
            assert frame["lookups"].sum() == row["n_lookups"]
            assert frame["resident"].sum() / row["n_lookups"] == row["resident_rate"]
            assert frame["hits"].sum() / frame["lookups"].sum() == pytest.approx(row["hit_rate"])
            decode = frame[frame["phase"] == "decode"]
            assert decode["hits"].sum() / decode["lookups"].sum() == pytest.approx(row["hit_rate_decode"])
            assert sorted(decode["token"].unique()) == [1, 2, 3]
        assert steps.groupby("token").size().tolist() == [2, 2, 2]  # two batches
        experts = [t for t in records.tasks if t.expert >= 0]
        ran = {kind: sum(t.end - t.start for t in experts if t.device == f"{kind}0") for kind in ("gpu", "cpu")}
        assert {kind: layers[f"{kind}_busy_ns"].sum() for kind in ran} == ran
        moved = sum(t.end - t.start for t in records.transfers)
        between = one.split.windows.column("layer") < 0
        outside = _link_busy(records, *(one.split.windows.column(name)[between] for name in ("begin", "end"))).sum()
        assert layers["link_busy_ns"].sum() + outside == moved
        assert (layers["cpu_done_ns"] <= layers["end"] - layers["begin"]).all()


def test_rows_tell_the_runs_apart(sweep: list[Outcome]):
    frame = pd.DataFrame(row for one in sweep for row in step_frame(one))
    assert {*SETTINGS, *CACHE_SETTINGS} <= set(IDENTITY)
    assert {*SETTINGS, *CACHE_SETTINGS} <= set(frame)
    assert frame.groupby(["policy", "micro_batches"])["run"].nunique().tolist() == [1] * len(sweep)
    assert set(frame["source_label"]) == {one.row["source_label"] for one in sweep}


def test_a_frame_survives_the_disk(sweep: list[Outcome], tmp_path: Path):
    rows = [row for one in sweep for row in layer_frame(one)]
    read = pd.read_parquet(io.BytesIO(frame_bytes(rows)))
    assert read["gpu_busy_ns"].tolist() == [row["gpu_busy_ns"] for row in rows]
    assert read["token"].isna().sum() == sum(row["token"] is None for row in rows) > 0


def of_steps(n: int) -> Outcome:
    """A run of so many steps of 40 layers, 10 experts each."""
    run = Records(makespan_ns=40_000 * n)
    for number in range(n):
        begin = 40_000 * number
        run.steps.append(StepRecord(begin, begin + 40_000, number, "decode", 0, 1, 1, 0.0))
        for layer in range(40):
            at = begin + 1000 * layer
            run.layers.append(LayerRecord(at, at + 1000, number, layer))
            run.lookups.append(LookupRecord(at, number, layer, 0, tuple(range(10)), (1,) * 10, (1,) * 10, (0,) * 10))
            run.tasks += [task(at + 100 * i, at + 100 * i + 100, "gpu0", number, layer, i) for i in range(10)]
            run.transfers += [transfer(at + 500 * i, at + 500 * i + 500) for i in range(2)]
    return outcome(run)


@pytest.mark.parametrize(("frame", "rows_a_step"), [(step_frame, 1), (layer_frame, 40)])
def test_twice_as_many_steps_are_twice_the_work(frame: Callable[[Outcome], Iterable[object]], rows_a_step: int):
    assert len(list(frame(of_steps(8)))) == 8 * rows_a_step
    few, more, many = of_steps(4), of_steps(8), of_steps(16)  # of which no column has been asked for
    lines = [lines_run(lambda one=one: list(frame(one))) for one in (few, more, many)]  # of which some do not depend on the steps
    assert 1.8 < (lines[2] - lines[1]) / (lines[1] - lines[0]) < 2.1
