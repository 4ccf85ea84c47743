"""The measurement of a machine with a GPU: whole on the processor, its steps' ends, and its CUDA calls on a stand-in."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moesim  # noqa: E402
from experiments.research import measure_machine as script  # noqa: E402
from experiments.research.measure_machine import SMALL, Setting, Step, main, run_step, run_steps  # noqa: E402
from moesim.hardware import load_hardware  # noqa: E402
from moesim.live.profiler import bench, probes  # noqa: E402
from tests.live.profiler_kit import MODEL, StandIn, shrink  # noqa: E402
from tests.research.steps_kit import dies, hangs, raises  # noqa: E402

FILES = {"machine.yaml", "profile.zip", "report.json", "samples.csv.gz", "validation.zip"}


def samples_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(gzip.decompress((out / "samples.csv.gz").read_bytes()).decode().splitlines()))


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the processor alone")
def test_a_machine_without_a_gpu_is_measured_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "out"), "--small", "--minutes", "60"]) == 0
    assert "finds no CUDA GPU: only the processor is measured" in capfd.readouterr().out
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert set(files) == FILES and max(files.values()) < 16 * 2**20
    steps = {one["name"]: one for one in json.loads((tmp_path / "out" / "report.json").read_text())["steps"]}
    assert list(steps) == [step.name for step in script.STEPS]
    for step in script.STEPS:
        expected = ("skipped", "it needs a CUDA GPU") if step.needs_gpu else ("measured", None)
        assert (steps[step.name]["state"], steps[step.name].get("reason")) == expected
    rows = samples_of(tmp_path / "out")
    assert {row["step"] for row in rows} == {"copies", "contention", "accelerator experts", "host experts"}
    assert all(int(row["ns"]) > 0 and int(row["bytes"]) > 0 for row in rows)
    assert {row["rows"] for row in rows if row["kind"] == "expert"} == {"1", "4"}
    together = {(row["device"], row["subject"]) for row in rows if row["variant"] == "together"}
    assert together == {(row["device"], row["subject"]) for row in rows if row["variant"] == "alone"} and len(together) > 4
    profile = tmp_path / "out" / "machine.yaml"
    assert load_hardware(profile).compute == "core0"
    found = moesim.compare(["lru", "fiddler"], hardware=str(profile), model=SMALL.models[2], cache=0.5, prompt=4, decode=4)
    assert (found.table["decode_tokens_per_s"] > 0).all()
    with zipfile.ZipFile(tmp_path / "out" / "validation.zip") as pack:
        assert sum(name.endswith("/results.csv") for name in pack.namelist()) == 3


@pytest.mark.parametrize(
    ("run", "seconds", "reason"),
    [
        (raises, 600, "ValueError: on purpose"),
        (hangs, 1, "it did not end within 1 s"),
        (dies, 600, "its process ended with code 3"),
    ],
)
def test_a_step_that_fails_or_hangs_is_named(tmp_path: Path, run: Any, seconds: float, reason: str):
    found = run_step(Step("one", 1, run), Setting(SMALL, tmp_path), time.monotonic() + seconds)
    assert found["state"] == "failed" and found["reason"].startswith(reason)


def test_each_step_has_its_share_and_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, work = [100.0], {"a": 5.0, "b": 50.0, "d": 1.0}
    ends = {}

    def stand_in(step: Step, setting: Setting, until: float) -> dict[str, Any]:
        ends[step.name] = until
        if step.name == "d":  # what is on the disk while it is executed, and after a kill
            last = json.loads((tmp_path / "out" / "report.json").read_text())["steps"][-1]
            assert (last["state"], last["reason"]) == ("failed", "the measurement was ended meanwhile")
        now[0] += work[step.name]
        return {"name": step.name, "state": "failed" if step.name == "a" else "measured"}

    monkeypatch.setattr(script, "run_step", stand_in)
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(script, "time", clock)
    shares = {"a": 10, "gpu": 10, "b": 30, "c": 4, "d": 8}
    steps = [Step(name, seconds, raises, name == "gpu") for name, seconds in shares.items()]
    report = run_steps(steps, Setting(SMALL, tmp_path), tmp_path / "out", {}, 8)
    assert ends == {"a": 110, "b": 150, "d": 162}  # the GPU's ten seconds are b's
    assert [one["state"] for one in report] == ["failed", "skipped", "measured", "skipped", "measured"]
    assert report[3]["reason"] == "no time: 0 of 4 s are left"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["steps"] == report


def test_calls_on_a_gpu_are_warmed_up_captured_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream == "stream"
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 0.5

    @contextmanager
    def inside(name: str, **_: Any) -> Any:
        log.append(f"[{name}")
        yield
        log.append("]")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

        def __str__(self) -> str:
            return "capture"

    for name, value in {
        "Event": Event, "Stream": lambda device: "stream", "stream": inside, "CUDAGraph": Graph, "set_device": log.append,
        "graph": lambda graph, stream: inside(str(graph)), "synchronize": lambda: log.append("idle"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    stream = script.Stream("cuda:0")
    stream.graph(lambda: log.append("call"))()
    assert log == ["cuda:0", "idle", "[stream", "call", "call", "call", "]", "idle", "[capture", "call", "]", "replay"]
    log.clear()
    assert stream.time(lambda: log.append("call"))["device"] == 500
    assert log == ["idle", "[stream", "event", "call", "event", "wait", "]"]
    monkeypatch.setattr(probes, "l3_bytes", lambda: 2**16)
    setting = Setting(SMALL, tmp_path)
    assert script.launches(setting, time.monotonic() + 600) == [] == script.graphs(setting, time.monotonic() + 600)
    script.collect(setting, tmp_path / "out", {}, [{"name": "launches"}, {"name": "graphs"}])
    rows = samples_of(tmp_path / "out")
    assert {(row["variant"], row["calls"]) for row in rows if row["kind"] == "launch"} == {
        (f"{how} {what}", n) for how in ("eager", "graph") for what in ("launch", "device", "wait") for n in ("1", "10")
    }
    experts = {(row["variant"], row["format"], row["rows"]) for row in rows if row["kind"] == "expert"}
    assert experts == {(v, b, n) for v in ("products", "products in a graph") for b in ("bf16", "int8") for n in ("1", "4")}


def test_the_steps_of_a_gpu_copy_from_ordinary_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch.setattr)
    monkeypatch.setattr(bench, "Machine", StandIn)
    setting, until = Setting(replace(SMALL, models=(MODEL,), bits=(16,)), tmp_path, "cuda:0"), time.monotonic() + 600
    assert (
        script.copies(setting, until) == script.contention(setting, until) == script.experts("accelerator", setting, until) == []
    )
    script.collect(setting, tmp_path / "out", {}, [{"name": name} for name in ("copies", "contention", "accelerator experts")])
    rows = samples_of(tmp_path / "out")
    found = {(row["step"], row["device"], row["subject"], row["variant"]) for row in rows}
    links, kinds = ("cpu0->gpu0", "gpu0->cpu0"), ("pinned", "pageable")
    assert {("copies", link, "", kind) for link in links for kind in (*kinds, "chunked")} < found
    busy = [(link, "cpu0.experts") for link in links]
    sides = [(*side, f"{kind} {how}") for side in busy for kind in kinds for how in ("alone", "together")]
    assert {("contention", *side) for side in sides} < found
    assert {row["device"] for row in rows if row["kind"] == "expert"} == {"gpu0"}


def test_wrong_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine").touch()
    for arguments, message in (
        ([str(tmp_path)], "OUT: expected an empty or new folder"),
        ([str(tmp_path / "new"), "--minutes", "nan"], "--minutes: expected a number above 0 and up to 60, got nan"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    command = [sys.executable, "-S", "-m", "experiments.research.measure_machine", str(tmp_path / "new")]  # -S: no packages
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 2 and "got none of: torch, numpy, " in done.stderr and len(done.stderr.splitlines()) == 1
