"""Sweeps on a real Dask scheduler with real workers, each a process; they are killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.experiment import workers
from tests.experiment.experiment_kit import write_yaml
from tests.experiment.pool_kit import (
    ROOT,
    alive,
    begun,
    fragments,
    hold,
    let_go,
    same_folders,
    start,
    without_progress,
    write_policies,
)
from tests.waiting import HANG_S, wait_until

distributed = pytest.importorskip("distributed", reason="Dask (the extra cluster) is not installed")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

N = 16
SEEDS = {"prompt_tokens": 6, "decode_tokens": 3, "seed": list(range(N))}


class Dask:
    """A scheduler and workers of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._n = 0
        self.workers: list[subprocess.Popen[str]] = []
        file = folder / "scheduler.json"
        arguments = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
        self.scheduler = start(folder, "-m", "dask", "scheduler", *arguments, log=folder / "scheduler.log")
        try:
            wait_until(lambda: file.exists() and file.read_text().endswith("}"), "a scheduler")
        except BaseException:
            self.close()
            raise
        self.address: str = json.loads(file.read_text())["address"]

    def add(self, *, path: Path = ROOT, nanny: bool = False, inside: Path | None = None) -> subprocess.Popen[str]:
        """Start a worker, and wait until the scheduler knows it; with a nanny, one that dies is started again."""
        self._n += 1
        log = self.folder / f"worker{self._n}.log"
        options = ("--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1", "--nanny" if nanny else "--no-nanny")
        worker = start(inside or self.folder, "-m", "dask", "worker", self.address, *options, path=path, log=log)
        self.workers.append(worker)
        wait_until(lambda: "Registered to" in log.read_text(), "a worker")
        return worker

    def have(self, n: int) -> None:
        """See to it that there are so many plain workers."""
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        while len(self.workers) < n:
            self.add()
        for worker in self.workers[n:]:
            self.kill(worker)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a process and its children, and wait until it is gone."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process in self.workers:
            self.workers.remove(process)

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            if process.poll() is None:
                self.kill(process)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them work: the policies' module and the trace lie there."""
    folder = tmp_path_factory.mktemp("cluster")
    write_policies(folder, "cluster_policies")
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Dask]:
    dask = Dask(folder)
    yield dask
    dask.close()


@pytest.fixture
def dask(running: Dask) -> Iterator[Dask]:
    """A scheduler that goes in the end, so that a sweep that waits for workers in vain ends."""
    end = threading.Timer(HANG_S, running.scheduler.kill)
    end.start()
    yield running
    end.cancel()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The sweep carried out in this process."""
    sweep(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "small.yaml", "--out", "alone", "--jobs", "1"]) == 0
    return folder / "alone"


def sweep(folder: Path, policy: str = "Noted", **changes: Any) -> None:
    write_yaml(folder, **{"policies": [f"cluster_policies:{policy}"], "workload": SEEDS, "name": "sweep", **changes})


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(workers.Cluster, "_WAIT_S", HANG_S)
    (folder / "begun.log").unlink(missing_ok=True)
    let_go(folder)


def when(n: int, out: Path, dask: Dask, do: Callable[[], None]) -> threading.Thread:
    """Hold a sweep after so many runs; once its folder holds them and each worker has begun another, do something and let go.

    If that fails, the sweep ends rather than waits for ever.
    """
    hold(dask.folder, n)

    def wait() -> None:
        try:
            wait_until(lambda: fragments(out) == n and len(begun(dask.folder)) == n + len(dask.workers), f"{n} runs")
            do()
        except BaseException:
            dask.kill(dask.scheduler)
            raise
        finally:
            let_go(dask.folder)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_cluster_changes_nothing_and_says_nothing(dask: Dask, alone: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    dask.have(2)
    (folder / "begun.log").unlink(missing_ok=True)
    capsys.readouterr()
    both = when(0, folder / "both", dask, lambda: None)
    assert main(["run", "small.yaml", "--out", "both", "--scheduler", dask.address]) == 0
    both.join()
    assert without_progress(capsys.readouterr().err) == ["wrote both"]
    assert same_folders(folder / "both", alone)
    assert len(begun(folder)) == N
    assert len(set(begun(folder))) == 2


def test_what_is_closed_has_left_the_scheduler_though_something_still_refers_to_it(dask: Dask):
    cluster = workers.Cluster(dask.address)
    cluster.close()
    with distributed.Client(dask.address, set_as_default=False, name="other") as client:
        known = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients))
    assert not [name for name in known if "moesim" in name]


def test_a_worker_is_killed(dask: Dask, alone: Path, folder: Path):
    dask.have(2)
    (folder / "begun.log").unlink(missing_ok=True)
    pid = dask.workers[0].pid
    killer = when(4, folder / "killed", dask, lambda: dask.kill(dask.workers[0]))
    assert main(["run", "small.yaml", "--out", "killed", "--scheduler", dask.address]) == 0
    killer.join()
    assert len(dask.workers) == 1
    assert same_folders(folder / "killed", alone)
    assert N < len(begun(folder)) <= N + begun(folder).count(pid)  # what it had in hand, and at most what it had done


@pytest.mark.long
def test_all_workers_go_and_another_one_joins(dask: Dask, alone: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    dask.have(2)
    said: list[str] = []

    def all_go() -> None:
        dask.have(0)
        wait_until(lambda: bool(said.append(capsys.readouterr().err)) or "no workers" in "".join(said), "a word about it")
        dask.add()

    killer = when(4, folder / "joined", dask, all_go)
    assert main(["run", "small.yaml", "--out", "joined", "--scheduler", dask.address]) == 0
    killer.join()
    assert "".join(said) == f"moesim: {dask.address}: no workers; waiting for some\n"
    assert same_folders(folder / "joined", alone)


@pytest.mark.long
def test_the_scheduler_is_killed(alone: Path, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    write_policies(tmp_path, "cluster_policies")
    dask = Dask(tmp_path)
    try:
        dask.have(1)
        killer = when(4, folder / "lost", dask, lambda: dask.kill(dask.scheduler))
        arguments = ["run", "small.yaml", "--out", "lost"]
        assert main([*arguments, "--scheduler", dask.address]) == 1
        killer.join()
        assert capsys.readouterr().err == (
            f"moesim: --scheduler {dask.address}: lost the scheduler, or it was restarted; "
            "finished runs are kept, run the same command again to go on\n"
        )
        n_kept = fragments(folder / "lost")
        assert n_kept == 4
    finally:
        dask.close()
    assert main([*arguments, "--jobs", "1"]) == 0
    assert capsys.readouterr().err == f"{n_kept} of {N} runs were in lost already\nwrote lost\n"
    assert len(begun(folder)) == N - n_kept
    assert same_folders(folder / "lost", alone)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://127.0.0.1:1", "Timed out trying to connect to tcp://127.0.0.1:1 after "),
        ("nowhere", "missing port number in address 'nowhere'"),
        ("http://127.0.0.1:8786", "unknown address scheme 'http'"),
    ],
)
def test_no_scheduler(
    address: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers.Cluster, "_WAIT_S", 0.5)
    sweep(folder)
    assert main(["run", "small.yaml", "--out", "none", "--scheduler", address]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"moesim: --scheduler {address}: expected a Dask scheduler such as tcp://HOST:8786, got: {reason}")
    assert err.count("\n") == 1
    assert not (folder / "none").exists()


@pytest.mark.long
def test_a_worker_with_other_code_is_refused(dask: Dask, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shutil.copytree(ROOT / "moesim", tmp_path / "moesim", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "moesim/engine/core.py").open("a") as file:
        file.write("# changed\n")
    sweep(folder)
    dask.have(0)
    other = dask.add(path=tmp_path)
    assert main(["run", "small.yaml", "--out", "other", "--scheduler", dask.address]) == 1
    dask.kill(other)
    err = capsys.readouterr().err
    assert f"process {other.pid}: expected moesim's code " in err
    assert err.count("\n") == 1
    assert not begun(folder)


def test_a_worker_with_another_policy_is_refused(
    dask: Dask, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    sweep(folder)
    dask.have(1)
    module = folder / "cluster_policies.py"
    assert main(["run", "small.yaml", "--quick", "--out", "first", "--scheduler", dask.address]) == 0
    text = module.read_text()
    module.write_text(text.replace("version = 1", "version = 2"))  # the worker has imported the old one
    monkeypatch.delitem(sys.modules, "cluster_policies")
    capsys.readouterr()
    try:
        assert main(["run", "small.yaml", "--quick", "--out", "first", "--scheduler", dask.address]) == 1
    finally:
        module.write_text(text)
        monkeypatch.undo()
    err = capsys.readouterr().err
    assert "policy cluster_policies:Noted: expected the source that the sweep began with, got another; start the workers" in err
    assert err.count("\n") == 2 and err.startswith("1 run of first was computed with other code or inputs, and will be computed ")


def test_workers_with_several_threads_are_told_of_once(capsys: pytest.CaptureFixture[str]):
    cluster: Any = object.__new__(workers.Cluster)
    cluster._address, cluster._told, cluster._n_workers = "tcp://a:1", False, 0
    said = []
    for threads in ({}, {"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2}, {}):
        cluster._tell(threads)
        cluster._n_workers = len(threads)
        said.append(capsys.readouterr().err.partition("; ")[0])
    assert said == ["", "", "moesim: tcp://a:1: workers have several threads, whose runs take turns", "",
                    "moesim: tcp://a:1: no workers"]  # fmt: skip


def test_made_up_routing_goes_through_the_result_folder(dask: Dask, folder: Path):
    dask.have(1)
    trace = {"synthesize": "mixtral-8x7b", "requests": 2, "prompt": 8, "decode": 4}
    write_yaml(folder, trace=trace, policies=["lru"], timeline=None)
    assert main(["run", "small.yaml", "--out", "made", "--jobs", "1"]) == 0
    assert main(["run", "small.yaml", "--out", "made2", "--scheduler", dask.address]) == 0
    assert same_folders(folder / "made", folder / "made2")
    assert not (folder / "made2/dataset/.traces").exists()


SCHEDULER = """
from moesim.serving.schedulers.static import Static


class Alone(Static):
    pass
"""


def test_a_worker_elsewhere_serves_requests_of_a_file_with_a_scheduler_of_ones_own(
    dask: Dask, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (folder / "cluster_scheduler.py").write_text(SCHEDULER)
    (folder / "requests.csv").write_text("time_s,prompt,answer\n0,4,2\n1,5,3\n2,3,2\n")
    workload = {"arrivals": "requests.csv", "scheduler": ["vllm", "cluster_scheduler:Alone"]}
    write_yaml(folder, workload=workload, policies=["lru"], timeline=None, name="served")
    assert main(["run", "small.yaml", "--out", "served1", "--jobs", "1"]) == 0
    dask.have(0)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # it sees the module, and not the file
    worker = dask.add(inside=tmp_path)
    assert main(["run", "small.yaml", "--out", "served2", "--scheduler", dask.address]) == 0
    assert same_folders(folder / "served1", folder / "served2")
    dask.kill(worker)
    monkeypatch.delenv("PYTHONPATH")
    worker = dask.add(inside=tmp_path)
    capsys.readouterr()
    assert main(["run", "small.yaml", "--out", "served3", "--scheduler", dask.address]) == 1
    dask.kill(worker)
    assert f"process {worker.pid}: policy or scheduler: cannot import module 'cluster_scheduler'" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_kills_its_workers_fails_alone(dask: Dask, folder: Path, capsys: pytest.CaptureFixture[str]):
    dask.have(0)
    worker = dask.add(nanny=True)
    sweep(
        folder, policies=["cluster_policies:Noted", "cluster_policies:Deadly"], workload=SEEDS | {"seed": [0, 1]}, timeline=None
    )
    sweep_file = folder / "small.yaml"
    sweep_file.write_text(sweep_file.read_text() + 'exclude: [{"policies": "cluster_policies:Deadly", "workload.seed": 1}]\n')
    assert main(["run", "small.yaml", "--out", "deadly", "--scheduler", dask.address]) == 1
    dask.kill(worker)
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("moesim: run")]
    assert len(lines) == 1
    assert "Deadly" in lines[0]
    assert lines[0].endswith("its worker process died, and again when it ran alone: killed, or out of memory")


@pytest.mark.long
def test_an_interrupt_leaves_the_cluster_at_once(dask: Dask, folder: Path):
    dask.have(1)
    sweep(folder)
    hold(folder, 2)
    process = start(folder, "-m", "moesim", "run", "small.yaml", "--out", "stopped", "--scheduler", dask.address)
    wait_until(lambda: fragments(folder / "stopped") == 2 and len(begun(folder)) == 3, "two runs, and the third begun")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)  # while the third run waits
    assert process.returncode == 130
    assert err.startswith("moesim: interrupted")
    assert err.count("\n") == 1
    assert alive(dask.workers[0].pid)
    assert len(begun(folder)) == 3
