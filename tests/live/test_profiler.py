"""Measuring a machine: plans, budgets, order, resuming, and profiles that say what was measured."""

from __future__ import annotations

import heapq
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import typer
import yaml
from matplotlib.figure import Figure

pytest.importorskip("torch")

from moesim.cli import profile as command
from moesim.core.files import FILE as LIST
from moesim.core.files import OutputFolder, checked_line, read_checked_line
from moesim.errors import CapacityError, ConfigError, HardwareError, InputError, LiveError, ModelError, MoesimError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.live.kernels import workers
from moesim.live.kernels.host import usable_cores
from moesim.live.kernels.plans import KernelError
from moesim.live.kernels.workers import Done
from moesim.live.profiler import bench as real
from moesim.live.profiler import probes
from moesim.live.profiler.bench import FILE, Machine, RealBench, Timed
from moesim.live.profiler.figure import draw
from moesim.live.profiler.measure import measure, sentinel_drift
from moesim.live.profiler.plan import make_plan
from moesim.live.profiler.probes import FOLLOWING, Host, Probe, Wanted, layout_of, rows_up_to, sized_shapes, subject_of
from moesim.live.profiler.request import describe_plan, find_gpu, prepare
from moesim.live.profiler.samples import COMMAND, PART
from moesim.model import builtin_models
from moesim.testing.traces import synthetic_trace
from tests.experiment.experiment_kit import SIGNALS
from tests.live.profiler_kit import EXPERT_BYTES, MODEL, FakeBench, StandIn, prepared, request, shrink, tiny, truth_us
from tests.waiting import Clock

TWO_CORES = layout_of([0, 1], disk=Path())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch.setattr)


CORES = usable_cores()[:2]
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two activities need two cores")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesim.live.profiler.request.usable_cores", lambda: [0, 1])


@pytest.fixture(autouse=True)
def quickly_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesim.live.profiler.measure.draw", lambda samples, fits: Figure((1, 1)))


@pytest.fixture
def real_cores(monkeypatch: pytest.MonkeyPatch, two_cores: None) -> None:
    monkeypatch.setattr("moesim.live.profiler.request.usable_cores", lambda: CORES)


def run(*arguments: str) -> None:
    try:
        typer.main.get_command(command.app)(list(arguments), standalone_mode=False)
    except MoesimError as error:
        error.args = (error.of_command or str(error),)  # as the command prints it
        raise


def samples_of(out: Path, name: str = "mine") -> pd.DataFrame:
    return pd.read_csv(out / name / "samples.csv", keep_default_na=False, na_values={"bits": "", "threads": ""})


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize("name", list(builtin_models()))
def test_every_built_in_model_has_a_plan(name: str, mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    model = builtin_models()[name]
    plan = make_plan(TWO_CORES, [Wanted.of(model)], mode=mode)
    ids = [probe.id for probe in plan.probes]
    assert len(set(ids)) == len(ids)
    experts = {probe.size for probe in plan.probes if probe.kind == "expert" and probe.device == "cpu0"}
    assert experts == set(rows_up_to(64 if mode == "quick" else 4096))
    copies = [probe.size for probe in plan.probes if probe.kind == "copy" and probe.device == "core1->core0"]
    assert copies[0] == 2**16 and copies[-1] == 2**30
    assert plan.wanted[0].shapes[0].n_bytes in copies  # measured, not interpolated
    kinds = {probe.kind for probe in plan.probes}
    assert ("shared" in kinds) == bool(model.n_shared) and ("leading" in kinds) == bool(model.n_dense_layers)
    assert any("4.25" in note for note in plan.notes) == name.startswith("gpt-oss")
    required = plan.required_bytes()
    assert required["cpu"][0] > 2 * plan.wanted[0].shapes[0].n_bytes + model.attention_bytes


def test_a_shape_that_two_models_share_is_measured_once():
    models = [builtin_models()[name] for name in ("deepseek-v2-lite", "moonlight-16b-a3b")]
    plan = make_plan(TWO_CORES, [Wanted.of(model) for model in models], mode="quick")
    own = subject_of(plan.wanted[0].shapes[0])
    experts = [
        probe for probe in plan.probes if (probe.kind, probe.device, probe.size, probe.subject) == ("expert", "core0", 1, own)
    ]
    assert len(experts) == 1
    assert {probe.subject for probe in plan.probes if probe.kind == "attention"} == {model.name for model in models}


def test_processors_read_experts_of_three_sizes_as_far_as_memory_allows():
    wanted = [Wanted.of(tiny())]
    sizes = [shape.n_bytes for shape in sized_shapes(16)]
    plan = make_plan(TWO_CORES, wanted, mode="quick")
    assert [block.name for block in plan.blocks if block.name.startswith("experts of")] and len(plan.wanted[0].sizes) == 3
    for device in ("core0", "core1"):
        subjects = {subject_of(shape) for shape in plan.wanted[0].sizes}
        assert {(p.subject, p.size) for p in plan.probes if p.device == device and p.subject in subjects} == {
            (s, 1) for s in subjects
        }
    block = next(block for block in plan.blocks if block.probes[0].subject == subject_of(plan.wanted[0].sizes[2]))
    room = plan.needs(block.probes).required_bytes(plan.layout)["cpu"]
    less = make_plan(TWO_CORES, wanted, mode="quick", budgets={"cpu": room - 1})
    assert [shape.n_bytes for shape in less.wanted[0].sizes] == sizes[:2]
    assert any(note.startswith("no experts of ") and "--memory" in note for note in less.notes)


def test_what_finds_no_time_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr("moesim.live.profiler.samples.time", clock)
    ready = prepared(tmp_path, models=(tiny(), replace(tiny(), name="second", hidden=256)))
    blocks = sorted(ready.plan.blocks, key=lambda block: block.name == "model second")
    ready = replace(ready, plan=replace(ready.plan, blocks=tuple(blocks)))

    class Slow(FakeBench):
        def prepare(self, probes: Sequence[Probe]) -> None:
            super().prepare(probes)
            clock.advance(10**12 * any(probe.subject == "second" for probe in probes))

    [path] = measure(ready, bench=Slow(), progress=False, until=clock.monotonic() + 100)
    parts = {part["model"] for part in yaml.safe_load(path.read_text())["devices"]["core0"]["parts"]}
    report = json.loads((tmp_path / "mine" / "measurement.json").read_text())
    assert parts == {"tiny"} == set(report["models"])
    assert "no time was left for all of: model second" in report["notes"]
    with pytest.raises(ConfigError, match=r"expected time for copies and a model, got too little for .*copies"):
        measure(prepared(tmp_path, name="none"), bench=FakeBench(), progress=False, until=0.0)


def test_a_pair_of_a_size_copies_as_many_bytes(tmp_path: Path):
    plan = prepared(tmp_path).plan
    sized, own = Probe("pair", "core0.experts", "core1->core0", size=3 * 2**18, unit="bytes"), probes.pair_copy
    assert plan.needs([sized]).copies == {"core0": 3 * 2**18, "core1": 3 * 2**18}
    assert set(plan.needs([replace(sized, unit="runs")]).copies.values()) == {own(plan.wanted[0].shapes[0])}


def test_arenas_stay_page_locked_as_long_as_they_live(monkeypatch: pytest.MonkeyPatch):
    locked: set[int] = set()
    status = SimpleNamespace(cudaHostRegister=lambda pointer, *_: locked.add(pointer) or 0, cudaHostUnregister=locked.discard)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.cudart", lambda: status)
    arena = Machine().arena(2**20, "cpu", 0, pinned=True)
    assert locked == {arena.part(0, 2**20).data_ptr()}
    del arena
    assert not locked


def test_several_precisions_are_several_shapes():
    plan = make_plan(TWO_CORES, [Wanted.of(tiny(), (16, 8))], mode="quick")
    assert {probe.bits for probe in plan.probes if probe.kind == "expert"} == {16, 8}


def test_layouts_of_machines():
    (tier,) = layout_of([0, 1, 2, 3], gpu=1).tiers
    assert [(d.name, d.place, d.threads, d.fewer) for d in tier.devices] == [
        ("gpu0", "cuda:1", None, ()),
        ("cpu0", "cpu", 4, (2,)),
    ]
    memory, disk = layout_of([0, 1, 4, 5], disk=Path()).tiers
    assert [(d.name, d.cores) for d in memory.devices] == [("cores0", (0, 1)), ("cores1", (4, 5))]
    assert [(d.name, d.cores, d.fewer) for d in disk.devices] == [("cpu0", (0, 1, 4, 5), (2,)), ("disk0", (), ())]
    assert [tier.suffix for tier in layout_of([3], disk=Path()).tiers] == ["-disk"]
    with pytest.raises(ConfigError, match="a second core or a disk"):
        layout_of([3])
    with pytest.raises(ConfigError, match="add --no-gpu"):
        layout_of([0, 1], gpu=0, disk=Path())


def test_the_order_is_shuffled_and_seeded(tmp_path: Path):
    def orders(seed: int) -> list[list[str]]:
        plan = prepared(tmp_path, seed=seed).plan
        return [[probe.id for probe in plan.order(plan.blocks[0], repeat)] for repeat in range(3)]

    first = orders(0)
    assert first == orders(0) != orders(1)
    assert first[0] != first[1] and sorted(first[0]) == sorted(first[1])
    bench = FakeBench()
    measure(prepared(tmp_path), bench=bench)
    assert bench.timed[0].kind == bench.timed[-1].kind == "sentinel"  # first and last
    assert samples_of(tmp_path).groupby("order")["kind"].nunique().max() == 1


def test_too_little_memory_is_refused_before_anything_is_made(tmp_path: Path):
    with pytest.raises(CapacityError, match=r"--memory: expected at least .* MiB \(.*\), got 2.861 MiB; give more"):
        prepared(tmp_path, memory_bytes=3_000_000)
    with pytest.raises(CapacityError, match="--memory: expected at most"):
        prepared(tmp_path, memory_bytes=10**15)
    assert list(tmp_path.iterdir()) == []


def test_copies_that_do_not_fit_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesim.live.profiler.probes.LARGEST_COPY", 2**30)
    whole, less = (
        make_plan(TWO_CORES, [Wanted.of(tiny())], mode="quick", budgets={"cpu": budget}) for budget in (3 * 10**9, 10**9)
    )
    assert not whole.notes and max(p.size for p in whole.probes if p.kind == "copy") == 2**30
    assert less.notes == ("copies go up to 256 MiB: larger ones do not fit into --memory",)
    less.check_memory({"cpu": 10**9})


CACHES = [None, 2**15, 2**25, 96 * 2**20, 480 * 2**20, 2**30]  # that a system may report; None: it reports nothing


@pytest.mark.parametrize("cores", [2, 3, 64])
@pytest.mark.parametrize("cache", CACHES)
def test_a_measurement_fits_into_memory_whatever_cache_is_reported(
    cache: int | None, cores: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    monkeypatch.setattr(probes, "l3_bytes", lambda: cache)
    layout, budget = layout_of(range(cores), disk=Path()), {"cpu": 5 * 10**9}
    models = [Wanted.of(model) for model in builtin_models().values()]
    for wanted in (*([model] for model in models), models):
        plan = make_plan(layout, wanted, mode="quick", budgets=budget)
        plan.check_memory(budget)
        turning = [note for note in plan.notes if "takes turns" in note]
        wished = 4 * (cache or 2**25)
        assert min(wished, 2**27) <= plan.turning["cpu"] <= wished and bool(turning) == (plan.turning["cpu"] < wished)


def test_a_profile_says_by_how_much_the_cache_is_too_large_for_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "l3_bytes", lambda: 2**28)
    warned: list[str] = []
    plan = prepared(tmp_path, memory_bytes=2_500_000_000).plan
    (path,) = measure(prepared(tmp_path, memory_bytes=2_500_000_000), bench=FakeBench(), warn=warned.append)
    times = plan.turning["cpu"] / 2**28
    assert 1 < times < 4 and plan.digest != prepared(tmp_path, overwrite=True, memory_bytes=9_000_000_000).plan.digest
    (note,) = [text for text in warned if "takes turns" in text]
    assert f"{times:.2g} times the last-level cache that this machine reports (256 MiB)" in note
    assert note in load_hardware(path).corrections


@needs_two_cores
@pytest.mark.usefixtures("real_cores")
def test_the_budget_is_what_is_used(tmp_path: Path):
    """What is allocated for a block is what was announced for it."""
    plan = prepared(tmp_path).plan
    for block in plan.blocks:
        bench = RealBench(plan, machine := CountingMachine())
        bench.prepare(block.probes)
        announced = plan.needs(block.probes).required_bytes(plan.layout)["cpu"]
        bench.close()
        assert 0 < machine.n_bytes <= announced


class CountingMachine(Machine):
    n_bytes = 0

    def ring(self, shape: Any, place: str, turning: int, seed: int) -> Any:
        self.n_bytes += shape.n_bytes * probes.ring_length(shape.n_bytes, turning)
        return super().ring(shape, place, turning, seed)

    def arena(self, n_bytes: int, place: str, seed: int, *, pinned: bool = False) -> Any:
        made = super().arena(n_bytes, place, seed, pinned=pinned)
        self.n_bytes += made.n_bytes
        return made

    def dense(self, need: Any, seed: int) -> Any:
        made = super().dense(need, seed)
        self.n_bytes += made.n_bytes
        return made


def test_samples_of_a_known_machine_give_back_its_costs(tmp_path: Path):
    paths = measure(prepared(tmp_path, disk=tmp_path), bench=FakeBench())
    assert [path.name for path in paths] == ["mine.yaml", "mine-disk.yaml"]
    memory, disk = (load_hardware(path) for path in paths)
    line = memory.devices["core1"].expert_cost  # of 3 us a row, and one shape
    assert line is not None and line.per_row_us == 0
    assert 2e6 * 3 * 128 * 256 / line.few_row_flops == pytest.approx(3, rel=0.05)
    model = tiny()
    costs = CostModel(model, memory)
    for rows in (1, 3, 5, 8):
        assert costs.expert_ns("core0", rows) == 1000 * (100 + 3 * rows + 2)  # and 2 us from one to the next
        assert costs.expert_ns("core1", rows) == 1000 * (200 + 3 * rows + 3)
        assert costs.shared_ns("core0", rows) == 1000 * (10 + rows + 2)
        assert costs.dense_ns("core0", rows) == 20_000 + 250 * rows + 25_000  # the time of the runtime itself
        assert costs.head_ns("core0", rows) == 1000 * (500 + rows)
        assert costs.embedding_ns("core0", rows) == 5000 + 125 * rows
        assert costs.attention_ns("core0", rows, rows * (2 * 12 + 1)) == 1000 * (80 + rows) + context_ns(rows, 12)
        leading = costs.leading_ns("core0", rows, rows)
        assert leading - costs.attention_ns("core0", rows, rows) == 1000 * (30 + 2 * rows)
        assert costs.predict_ns("core0", rows, "gate_next1") == 7000 + 500 * rows
    assert costs.first_extra_ns("core0") == 40_000
    assert costs.fetch_ns("core1", "core0") == 1000 * (5 + EXPERT_BYTES // 1024 // 8 + 4)  # the last from one copy to the next
    one_row, more = (60_000 - 25_000) // 2, 1000 * (7 * 128 * 2) // 1024 // 2  # half of what the runtime takes more; copying
    assert costs.activation_ns(memory.link("core0->core1"), 8) == one_row + more
    rates = {(pair.a, pair.b): (pair.a_rate_ppm, pair.b_rate_ppm) for pair in memory.contention}
    assert rates["core0.experts", "core1.experts"] == (800_000, 500_000)
    assert rates["core0.dense", "core1->core0"] == (1_000_000, 625_000)  # never faster than alone
    assert rates["core0.experts", "core0->core1"] == rates["core0.experts", "core1->core0"] == (800_000, 625_000)
    assert memory.devices["core0"].memory_bytes_per_s == round(EXPERT_BYTES * 1e6 / 103)
    assert memory.devices["core1"].flops == round(2e6 * 3 * 128 * 256 * 8 / 224)
    assert memory.link("core1->core0").cores == (1,) and memory.link("core1->core0").medium == "copies"
    from_disk = CostModel(model, disk)
    assert from_disk.expert_ns("cpu0", 2) == 58_000
    assert from_disk.transfer_ns(disk.link("disk0->cpu0"), 2**18) == 1000 * (50 + 256 + 4)
    assert from_disk.transfer_ns(disk.link("cpu0->disk0"), 2**20) == 1000 * (90 + 2048 + 4)
    assert memory.labels == ("measured", "derived")
    assert set(costs.labels(())) == {"measured"}


def test_rates_by_size_are_of_experts_with_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "SIZES", ((64, 2**17), (128, 2**20), (128, 2**22)))
    times = {shape.n_bytes: us for shape, us in zip(sized_shapes(16), (90.0, 180.0, 500.0), strict=True)}
    by_subject = {subject_of(shape): times[shape.n_bytes] for shape in sized_shapes(16)}

    def truth(probe: Probe) -> float:
        return by_subject.get(probe.subject, truth_us(probe)) if probe.kind == "expert" else truth_us(probe)

    (path,) = measure(prepared(tmp_path), bench=FakeBench(truth))
    profile = load_hardware(path)
    cost = profile.devices["core0"].expert_cost
    assert cost is not None and cost.per_expert_us == 0
    known = {EXPERT_BYTES: 103.0} | times  # the model's own expert is a point as well
    kept = [(size, us) for size, us in sorted(known.items()) if not any(n > size and t <= us for n, t in known.items())]
    assert [size for size, _ in cost.read_rates] == [size for size, _ in kept] and len(kept) >= 3
    for size, us in kept:
        assert cost.reading_s(size) * 10**6 == pytest.approx(us, rel=1e-6)
    numbers = {key: number for key, number in profile.numbers.items() if ".core0.expert_cost.read_rates." in key}
    for number in numbers.values():
        assert number.source == "measured" and "with one row" in number.ref and number.interval is not None


def context_ns(rows: int, context: int) -> int:
    """What reading keys and values adds: the rows see context and half of themselves, and one row sees itself anyway."""
    seen = -(-rows * (2 * context + 1) // 2)
    return round(1000 * 0.5 * (seen - 1))


def test_every_number_says_how_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesim.live.profiler.measure.draw", draw)
    (path,) = measure(prepared(tmp_path), bench=FakeBench())
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Measured with moesim profile measure, ")
    numbers = load_hardware(path).numbers
    curve = numbers["devices.core0.experts.0.points"]
    assert curve.source == "measured" and "weights not in the cache" in curve.ref and "5 repeats" in curve.ref
    assert "interquartile range / median 0 % in the middle, at most 0 % (at 1 rows)" in curve.ref
    assert "the ratio was 1.25" in " ".join(number.ref for number in numbers.values())
    report = json.loads((tmp_path / "mine" / "measurement.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("moesim profile measure mine --model tiny --mode quick --seed 0")
    assert report["sentinels"]["expert"]["drift"] == 0
    assert {file.name for file in (tmp_path / "mine").iterdir()} == {"samples.csv", "fits.csv", "curves.png", "measurement.json"}


def test_times_that_fall(tmp_path: Path):
    """Copies are made monotone, experts are written as they are as long as the format takes them."""

    def noisy(probe: Probe) -> float:
        us = truth_us(probe)
        if probe.kind == "copy" and probe.size == 2**18:
            return us * 0.25
        if probe.kind == "expert" and probe.size == 4:
            return us * (0.9 if probe.device == "core0" else 0.4)
        return us

    (path,) = measure(prepared(tmp_path), bench=FakeBench(noisy))
    profile = load_hardware(path)
    times = [us for _, us in profile.link("core1->core0").curves["pinned"].points]
    assert (times == sorted(times) and times[0] == times[2]) or times[0] == times[1]
    assert "made monotone" in profile.numbers["links.core1->core0.any.points"].ref
    costs = CostModel(tiny(), profile)
    assert costs.expert_ns("core0", 4) == round(112_000 * 0.9) + 2000
    assert "made monotone" not in profile.numbers["devices.core0.experts.0.points"].ref
    assert "made monotone" in profile.numbers["devices.core1.experts.0.points"].ref
    assert costs.expert_ns("core1", 4) <= costs.expert_ns("core1", 5)


def test_sizes_that_take_too_long_are_left_out(tmp_path: Path):
    def slow(probe: Probe) -> float:
        return truth_us(probe) * (4e4 if probe.kind == "expert" and probe.device == "core1" else 1)

    bench = FakeBench(slow)
    (path,) = measure(prepared(tmp_path), bench=bench)
    profile = load_hardware(path)
    assert profile.devices["core0"].experts[0].last == 8
    assert profile.devices["core1"].experts[0].last == 2  # each run takes 8 s: only what makes a curve
    skipped = json.loads((tmp_path / "mine" / "measurement.json").read_text(encoding="utf-8"))["skipped"]
    assert len(skipped) == 6 and all("one run would take about" in why for why in skipped.values())
    assert not [probe for probe in bench.warmed if probe.id in skipped]
    with pytest.raises(HardwareError, match=r"at 3 tokens \(measured 1\.\.2\)"):
        CostModel(tiny(), profile).expert_ns("core1", 3)


def test_sentinels_tell_of_a_machine_that_throttles(tmp_path: Path):
    told: list[str] = []
    measure(prepared(tmp_path), bench=FakeBench(), warn=told.append)
    assert not told

    def throttling(probe: Probe) -> float:
        return truth_us(probe) * (1.5 if (probe.kind, probe.subject, probe.variant) == ("sentinel", "expert", "end") else 1)

    measure(prepared(tmp_path, overwrite=True), bench=FakeBench(throttling), warn=told.append)
    assert len(told) == 1 and "the sentinel 'expert' took 100 to 150 us" in told[0] and "50 %" in told[0]
    found = sentinel_drift(samples_of(tmp_path), 5)
    assert found["expert"]["drift"] == pytest.approx(0.5) and found["copy"]["drift"] == 0
    assert found["expert"]["first_us"] == 100 and found["expert"]["last_us"] == 150


def test_a_gpu_machine_of_known_costs(tmp_path: Path):
    (path,) = measure(prepare(request(tmp_path, gpu=0), StandIn()), bench=FakeBench())
    profile = load_hardware(path)
    costs = CostModel(tiny(), profile)
    assert costs.expert_ns("gpu0", 4) == 34_000 and costs.expert_ns("cpu0", 4) == 65_000
    by_kind = {kind: CostModel(tiny(), profile, transfer=kind) for kind in ("pinned", "pageable", "chunked")}
    times = [by_kind[kind].fetch_ns("cpu0", "gpu0") for kind in ("pinned", "chunked", "pageable")]
    assert times == [33_000, 40_000, 83_000]
    gpu, cpu = profile.devices["gpu0"], profile.devices["cpu0"]
    assert (gpu.idle_w, gpu.busy_w, cpu.busy_w) == (40, 150, None)
    pairs = {frozenset((pair.a, pair.b)) for pair in profile.contention}
    assert {frozenset(("cpu0->gpu0", "gpu0->cpu0")), frozenset(("gpu0.side", "gpu0.experts"))} < pairs
    fewer = samples_of(tmp_path).query("kind == 'expert' and device == 'cpu0' and threads == 1")
    assert len(fewer) == 5 * 8  # in the samples, not in the profile
    assert [curve.part for curve in cpu.parts] == []


def test_an_interrupted_measurement_goes_on(tmp_path: Path):
    first = FakeBench(die_after=200)
    with pytest.raises(KeyboardInterrupt):
        measure(prepared(tmp_path), bench=first)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", LIST}  # no profile, half or whole
    part = tmp_path / "mine" / PART
    with part.open("a", encoding="utf-8") as file:
        file.write('{"probe":"expert|core0|1')  # what a kill leaves of a line
    second = FakeBench()
    measure(prepared(tmp_path), bench=second)
    assert not part.exists() and (tmp_path / "mine.yaml").exists()
    plan = prepared(tmp_path, overwrite=True).plan
    count = {probe: (first.timed + second.timed).count(probe) for probe in plan.probes}
    assert set(count.values()) == {plan.repeats}
    samples = samples_of(tmp_path)
    assert samples["order"].is_monotonic_increasing
    further = {"pair": 3, "expert_first": 1, "runtime": 1}  # readings of a repeat beyond one
    more = plan.repeats * sum(further.get(probe.kind, 0) for probe in plan.probes if probe.variant != "fetched")
    assert len(samples) == len(first.timed) + len(second.timed) + more
    starts = samples[(samples["kind"] == "sentinel") & (samples["variant"] == "start")]
    assert len(starts) == 2 * len(plan.sentinels) * plan.repeats  # once a session
    report = json.loads((tmp_path / "mine" / "measurement.json").read_text(encoding="utf-8"))
    assert report["sessions"] == 2


def test_what_is_not_this_measurement_is_refused(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        measure(prepared(tmp_path), bench=FakeBench(die_after=20))
    part = tmp_path / "mine" / PART
    before = part.read_bytes()
    with pytest.raises(ConfigError, match="the same models, mode, seed, repeats and memory, got other ones; measure under"):
        measure(prepared(tmp_path, seed=1), bench=FakeBench())
    first, *rest = before.splitlines(keepends=True)
    header = read_checked_line(first)
    assert header is not None
    header["machine"]["processor"] = "another one"
    part.write_bytes(b"".join([checked_line(header), *rest]))
    with pytest.raises(ConfigError, match="measurement of this machine, got processor 'another one' instead of"):
        measure(prepared(tmp_path), bench=FakeBench())
    part.write_text("no measurement\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="got something else; measure under another name, or add --no-resume"):
        measure(prepared(tmp_path), bench=FakeBench())
    assert part.read_text(encoding="utf-8") == "no measurement\n"
    bench = FakeBench()
    measure(prepared(tmp_path, resume=False), bench=bench)
    assert len(bench.timed) > 20 and not part.exists()


def test_a_profile_that_is_not_valid_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Host, "capacity_bytes", lambda *_: -1)
    with pytest.raises(HardwareError, match=r"mine\.yaml: devices\.core0\.memory_bytes"):
        measure(prepared(tmp_path), bench=FakeBench())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [PART]  # and can go on, or be looked at
    monkeypatch.undo()


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.live.profiler_kit import request, shrink
import moesim.live.profiler.request as asked
from moesim.live.profiler.measure import measure
from moesim.core.files import Journal
shrink(setattr, 4)
asked.usable_cores = lambda: {cores}
write, left = Journal.append, {lines}

def write_and_die(journal, line):
    global left
    left -= 1
    if left:
        return write(journal, line)
    with journal.path.open("ab") as file:
        file.write(b'{{"probe":"expert|core0|1')  # a kill may leave part of a line
    os.kill(os.getpid(), signal.SIGKILL)

Journal.append = write_and_die
measure(asked.prepare(request(Path({out!r}))), progress=False)
"""


@pytest.mark.long
@needs_two_cores
@pytest.mark.usefixtures("real_cores")
def test_a_real_measurement_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch.setattr, 4)
    part = tmp_path / "mine" / PART
    script = KILLED.format(cores=CORES, lines=59, tests=str(Path(__file__).parent), out=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert part.read_bytes().count(b"\n") == 59
    kept = [json.loads(line) for line in part.read_bytes().split(b"\n")[1:-1]]
    kept = [line for line in kept if "probe" in line]
    assert not (tmp_path / "mine.yaml").exists()
    plan = prepared(tmp_path).plan
    assert len(kept) < plan.repeats * len(plan.probes)
    (path,) = measure(prepared(tmp_path), progress=False)
    samples = samples_of(tmp_path)
    for line in kept:
        rows = samples[samples["order"] == line["order"]]
        assert rows["time_us"].tolist() == pytest.approx([reading[-1] for reading in line["readings"]], abs=6e-4)
    timed = samples[~samples["kind"].isin(["pair", "sentinel"]) & (samples["variant"] != FOLLOWING)]
    keys = ["kind", "device", "subject", "bits", "threads", "variant", "size"]
    n = timed.groupby(keys, dropna=False)["repeat"].agg(["nunique", "size"])
    assert (n["nunique"] == plan.repeats).all() and (n["size"] == plan.repeats).all()
    assert len(n) == sum(probe.kind != "pair" for probe in plan.probes)
    assert (timed["time_us"] > 0).all()
    simulate(path, tmp_path)


def simulate(path: Path, folder: Path) -> None:
    """The profile says what a small experiment needs to know."""
    trace = folder / "tiny.safetensors"
    synthetic_trace(
        n_layers=2, n_experts=4, top_k=2, n_requests=4, prompt=2, decode=4, calibration=True, signals=SIGNALS
    ).write(trace)  # fmt: skip
    model = folder / "tiny-model.yaml"
    model.write_text(json.dumps(MODEL), encoding="utf-8")
    config = {
        "model": str(model), "hardware": str(path), "trace": str(trace), "cache": {"ratio": 0.5}, "policies": ["lru", "fiddler"],
        "workload": {"prompt_tokens": 2, "decode_tokens": 4, "batch_size": 2},
    }  # fmt: skip
    results = run_experiment(Experiment(parse_config(config, "tiny.yaml"), "tiny.yaml"))
    assert [row["error"] for row in results.rows] == [None, None]
    assert all(row["source_label"] in ("derived", "synthetic") for row in results.rows)


@pytest.mark.long
def test_the_disk_tier_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Real reads and writes of a real file, which is gone in the end."""
    monkeypatch.setattr("moesim.live.profiler.request.usable_cores", lambda: CORES[:1])
    shrink(monkeypatch.setattr, 2, 2**18)
    (tmp_path / FILE).write_bytes(b"of somebody else")
    with pytest.raises(InputError, match=r"profile\.tmp: expected nothing there, or what moesim wrote, got"):
        measure(prepared(tmp_path, disk=tmp_path, memory_bytes=400_000_000), progress=False)
    (tmp_path / FILE).unlink()
    OutputFolder(tmp_path, COMMAND, owned=False).grow(FILE).write_bytes(b"left by one that was killed")
    (path,) = measure(prepared(tmp_path, disk=tmp_path, memory_bytes=400_000_000), progress=False)
    assert path.name == "mine-disk.yaml"
    profile = load_hardware(path)
    assert profile.devices["disk0"].role == "storage" and profile.backing == ("disk0",)
    assert CostModel(tiny(), profile).fetch_ns("disk0", "cpu0") > 0
    reads = samples_of(tmp_path).query("kind == 'disk_read'")
    assert set(reads["variant"]) == {"direct", "page cache"}
    assert {file.name for file in tmp_path.iterdir()} == {"mine", "mine-disk.yaml", LIST}


def test_all_probes_of_a_gpu_machine_are_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch.setattr, 4, 2**18)
    (path,) = measure(prepare(request(tmp_path, gpu=0), StandIn()), progress=False)
    profile = load_hardware(path)
    assert set(profile.link("cpu0->gpu0").curves) == {"pinned", "pageable", "chunked"}
    assert len(profile.contention) == 5 and profile.devices["gpu0"].busy_w == 200
    simulate(path, tmp_path)


def test_weights_take_turns_until_they_have_left_the_cache(tmp_path: Path):
    plan = prepared(tmp_path).plan
    bench = RealBench(plan, Machine())
    own = subject_of(plan.wanted[0].shapes[0])
    bench.prepare([probe for probe in plan.probes if probe.subject == own or probe.kind == "copy"])
    (ring,) = bench._rings.values()
    places = [ring.next()[0].data_ptr() for _ in range(20)]
    n = len(set(places))
    assert n * EXPERT_BYTES >= 4 * probes.cache_bytes("cpu") and places[:n] == places[n : 2 * n]
    arena = bench._arenas["core0", False]
    parts = {arena.part(turn, 2**16).data_ptr() for turn in range(100)}
    assert len(parts) * 2**16 >= 4 * probes.cache_bytes("cpu")
    bench.close()


def test_small_parts_find_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The router's weights would stay in the cache from one run to the next: something else is read before."""
    plan = prepared(tmp_path, models=(builtin_models()["olmoe"],)).plan
    bench = RealBench(plan, Machine())
    some = {kind: next(probe for probe in plan.probes if probe.kind == kind) for kind in ("attention", "dense", "expert_first")}
    bench.prepare(list(some.values()))
    before = {kind: bench._maker(probe)[1]().before for kind, probe in some.items()}
    assert before["attention"] == () and bench._flushes["cpu"] in before["dense"]
    (busy,) = before["expert_first"]
    looks = count(0, 1e-3)  # each look at the clock is a millisecond later
    monkeypatch.setattr(real, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    busy()
    assert next(looks) >= real.BEFORE_FIRST_S == 5e-3
    bench.close()


class Line:
    """Stands for the queue of what is done: gives it in the order in which it ends on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0
        self.coming: list[tuple[int, int, Done]] = []

    def get(self) -> Done:
        self.now, _, done = heapq.heappop(self.coming)
        return done


class Lane:
    """A worker on that clock; each call tells how long it takes."""

    def __init__(self, line: Line) -> None:
        self.line, self.free = line, 0

    def submit(self, key: int, call: Any, tag: int) -> None:
        start = max(self.free, self.line.now)
        self.free = start + call()
        heapq.heappush(self.line.coming, (self.free, len(self.line.coming) + 1000 * tag, Done(tag, start, self.free, None)))


def test_a_pair_counts_only_what_ran_while_both_went_on(tmp_path: Path):
    bench = RealBench(prepared(tmp_path).plan, Machine())
    line = Line()
    bench._done = line  # type: ignore[assignment]

    def side(*first_ns: int, then_ns: int) -> tuple[Any, Any]:
        times = chain(first_ns, repeat(then_ns))
        return Lane(line), lambda: Timed(lambda: next(times))

    assert bench._loop([side(50_000, then_ns=1_000)], 8) == [1.0]  # alone: the first and the last are left out
    line.now = 0
    short, long = side(90_000, *[5_000] * 82, then_ns=1_000), side(500_000, then_ns=40_000)  # 90 + 82 x 5 = 500 us
    assert bench._loop([short, long], 8) == [1.0, 40.0]
    line.now = 0
    held_up, other = side(*[1_000] * 12, 900_000, then_ns=1_000), side(15_000, then_ns=10_000)
    assert bench._loop([held_up, other], 8)[1] == 10.0  # one run of the first lasted as long as all of the second's
    bench.close()


@needs_two_cores
@pytest.mark.usefixtures("real_cores")
def test_a_pair_gives_four_readings(tmp_path: Path):
    plan = prepared(tmp_path).plan
    bench = RealBench(plan, Machine())
    probe = next(probe for probe in plan.probes if probe.kind == "pair")
    bench.prepare([probe])
    readings = bench.time(probe, 0.0)
    bench.close()
    one, two = sorted((probe.device, probe.subject))
    assert sorted((r.device, r.subject, r.variant) for r, _ in readings) == [
        (one, two, "alone"),
        (one, two, "together"),
        (two, one, "alone"),
        (two, one, "together"),
    ]
    assert all(us > 0 for _, us in readings)


def test_what_comes_before_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    bench = RealBench(prepared(tmp_path).plan, Machine())
    worker = bench._worker(("coordinator",), "cpu", usable_cores())
    assert bench._run(worker, [lambda: clock.advance(20_000_000), lambda: None]) == [20_000.001, 0.001]
    with pytest.raises(LiveError, match="expected a call to end well, got ZeroDivisionError"):
        bench._run(worker, [lambda: 1 // 0])
    bench.close()


def test_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run("measure", "mine", "--model", "olmoe", "--mode", "quick", "--dry-run", "--no-gpu", "--memory", "1.5GB")
    said = capsys.readouterr().out
    plan = prepare(request(tmp_path, models=(builtin_models()["olmoe"],), disk=tmp_path, memory_bytes=1_500_000_000)).plan
    assert f"mine: quick, {len(plan.probes)} probes of 5 repeats" in said
    assert "of 1.397 GiB" in said and "time: about" in said and "model olmoe: 24 expert" in said
    assert list(tmp_path.iterdir()) == []


def test_a_plan_needs_no_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """It is the same but for a GPU, which nobody has looked for; to measure needs it."""
    known = [
        "measure", "mine", "--model", "olmoe", "--mode", "quick", "--memory", "1.5GB", "--no-disk", "--out",
        str(tmp_path / "o"),
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run(*known, "--dry-run", "--no-gpu")
    plan = capsys.readouterr().out
    monkeypatch.setattr("moesim.live.kernels.host._torch", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run(*known, "--dry-run")
    said = capsys.readouterr()
    assert said.out == plan and said.err == "PyTorch is not installed, so that no GPU was looked for\n"
    with pytest.raises(KernelError, match="expected the package torch, got none"):
        run(*known)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mixtrl"], "unknown model 'mixtrl'; did you mean 'mixtral-8x7b'"),
        (["--gpu", "7"], "expected one of the 0 GPUs that PyTorch finds, got 7; add --no-gpu"),
        (["--repeats", "4"], "--repeats: expected at least 5"),
        (["--mode", "slow"], "--mode: expected quick or full, got 'slow'"),
        (["--memory", "lots"], "--memory: expected a size"),
        (["--disk", "nowhere"], "--disk: expected a folder, got nowhere"),
        (["--disk", ".", "--no-disk"], "--disk and --no-disk: expected one of them"),
        (["--gpu", "0", "--no-gpu"], "--gpu and --no-gpu: expected one of them"),
        (["--bits", "5"], "expected expert_bits of 4, 8, 16 or 32"),
        (["--model", "olmoe", "--model", "olmoe"], "expected each model once"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moesim.live.profiler.request.n_gpus", lambda: 0)
    with pytest.raises(InputError) as caught:
        run("measure", "mine", "--out", str(tmp_path / "out"), *arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.yaml")) and not list(tmp_path.rglob(PART))


def test_a_name_that_is_taken_or_no_name(tmp_path: Path):
    measure(prepared(tmp_path), bench=FakeBench())
    with pytest.raises(ConfigError, match=r"mine\.yaml: expected nothing there, got a file; add --overwrite"):
        prepared(tmp_path)
    with pytest.raises(ConfigError, match="NAME: expected letters"):
        prepared(tmp_path, name="../mine")
    with pytest.raises(ModelError, match="unknown model"):
        run("measure", "x", "--model", "nothing", "--dry-run")


def test_the_first_gpu_is_measured_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moesim.live.profiler.request.n_gpus", lambda: 0)
    assert find_gpu(None) is None
    monkeypatch.setattr("moesim.live.profiler.request.n_gpus", lambda: 2)
    assert find_gpu(None) == 0 and find_gpu(1) == 1


def test_a_plan_is_described(tmp_path: Path):
    said = describe_plan(prepared(tmp_path, disk=tmp_path))
    assert "disk: 6 disk_read, 3 disk_write, 2 pair" in said and "pairs: 5 pair" in said


def test_show_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, two = measure(prepared(tmp_path, disk=tmp_path), bench=FakeBench())
    run("show", str(one))
    assert "core1->core0" in capsys.readouterr().out
    model = tmp_path / "tiny.yaml"
    model.write_text(json.dumps(MODEL), encoding="utf-8")
    run("compare", str(one), str(two), "--model", str(model), "-o", "csv")
    first = capsys.readouterr().out.splitlines()[1]
    assert first.startswith('"expert, 1 row, accelerator",us,105.0,55.0,')


def test_windows_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(HardwareError, match=r"got Windows; use WSL 2"):
        prepare(request(tmp_path))
