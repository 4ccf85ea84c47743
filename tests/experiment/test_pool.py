"""Sweeps in several processes of this machine: who shares what, and what becomes of the rest when one is killed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.core.processes import in_threads, prepare_processes
from moesim.errors import ConfigError, SimulationError
from moesim.experiment import run_experiment
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import worth_processes
from moesim.experiment.runner import run_one
from moesim.experiment.sweep import RunSpec
from moesim.experiment.workers import Cluster, Processes, RefusedError, Work, _Working, do, outcomes_of, work_of
from moesim.metrics.outcome import Outcome
from tests.experiment.experiment_kit import resolve, write_trace, write_yaml
from tests.experiment.pool_kit import alive, begun, fragments, hold, let_go, same_folders, start, without_progress, write_policies
from tests.waiting import HANG_S, wait_until

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals")
SEEDS = {"prompt_tokens": 6, "decode_tokens": 3, "seed": list(range(6))}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def processes() -> Iterator[Processes]:
    pool = Processes(2)
    yield pool
    pool.close()
    assert not multiprocessing.active_children()


def works(experiment: Experiment) -> list[Work]:
    with work_of(experiment, None) as make:
        return [make(spec, False) for spec in experiment.specs]


class Pretended:
    """A pool in which a worker can die without a process; whenever somebody waits for runs, the oldest one ends."""

    def __init__(self, experiment: Experiment, width: int) -> None:
        self.experiment = experiment
        self.width = width
        self.errors: dict[int, Exception] = {}
        self.log: list[tuple[int, int]] = []  # each run that was given out, and next to how many others
        self._running: list[tuple[int, Future[Outcome]]] = []

    def submit(self, call: Callable[[Work], Outcome], work: Work) -> Future[Outcome]:
        assert call is do
        self.log.append((work.spec.index, len(self._running)))
        future: Future[Outcome] = Future()
        self._running.append((work.spec.index, future))
        return future

    def wait(self, *arguments: Any) -> Any:
        """End a run, then do what `concurrent.futures.wait` does."""
        index, future = self._running.pop(0)
        if index in self.errors:
            future.set_exception(self.errors[index])
        else:
            future.set_result(run_one(self.experiment, self.experiment.specs[index]))
        return wait(*arguments)

    def room(self) -> int:
        return self.width

    def died(self, error: BaseException) -> bool:
        if isinstance(error, BrokenExecutor):
            return True
        raise error

    def close(self) -> None:
        pass


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pool = Pretended(resolve(tmp_path, workload=SEEDS, policies=["lru"]), 2)
    monkeypatch.setattr("moesim.experiment.workers.wait", pool.wait)
    return pool


def pretend(pool: Pretended, known: dict[int, Outcome] | None = None) -> dict[int, Outcome]:
    with work_of(pool.experiment, None) as make:
        found = outcomes_of(pool.experiment.specs, lambda spec: make(spec, False), pool, lambda s: (known or {}).get(s.index))
        outcomes = [(spec.index, outcome) for spec, outcome in found]
    assert len(outcomes) == len(dict(outcomes)) == len(pool.experiment.specs)
    return dict(outcomes)


def test_a_run_whose_worker_died_is_tried_again_last_and_alone(pretended: Pretended):
    pretended.errors = {1: BrokenExecutor()}
    outcomes = pretend(pretended)
    assert [index for index, outcome in outcomes.items() if outcome.failure] == [1]
    assert "its worker process died, and again when it ran alone" in str(outcomes[1].row["error"])
    assert pretended.log[-1] == (1, 0)
    assert [index for index, _ in pretended.log] == [0, 1, 2, 3, 4, 5, 1]


def test_a_run_that_somebody_else_has_done_is_not_given_out(pretended: Pretended):
    there = run_one(pretended.experiment, pretended.experiment.specs[2])
    assert pretend(pretended, {2: there})[2] is there
    assert [index for index, _ in pretended.log] == [0, 1, 3, 4, 5]


def test_workers_that_join_are_given_runs(pretended: Pretended):
    pool = pretended
    pool.width = 1
    with work_of(pool.experiment, None) as make:
        found = outcomes_of(pool.experiment.specs, lambda spec: make(spec, False), pool, lambda spec: None)
        next(found)
        n = len(pool.log)
        pool.width = 4
        list(found)
    assert max(others for _, others in pool.log[:n]) == 0
    assert max(others for _, others in pool.log) == 3


def test_a_run_that_kills_its_process_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_policies(tmp_path, "deadly_policies")
    policies = [f"deadly_policies:{name}" for name in ("Noted", "Deadly")]
    write_yaml(
        tmp_path,
        workload=SEEDS | {"seed": [0, 1, 2]},
        policies=policies,
        exclude=[{"policies": policies[1], "workload.seed": [0, 2]}],
    )
    assert main(["run", "small.yaml", "--jobs", "2"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moesim: ")]
    assert len(lines) == 1
    assert re.fullmatch(r"moesim: run 2 \(deadly_policies:Deadly, .*\): its worker process died, and again when .*", lines[0])
    assert len(begun(tmp_path)) == 3 + 2
    assert main(["run", "small.yaml", "--jobs", "2"]) == 1
    assert "3 of 4 runs were in results/small already" in capsys.readouterr().err


@posix
def test_a_process_that_dies_idle_is_replaced(tmp_path: Path):
    experiment = resolve(tmp_path, policies=["lru"])
    pool = Processes(1)
    try:
        (work,) = works(experiment)
        first = pool.submit(do, work).result()
        (child,) = multiprocessing.active_children()
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        with work_of(experiment, None) as make:
            ((_, again),) = outcomes_of(experiment.specs, lambda spec: make(spec, False), pool, lambda spec: None)
    finally:
        pool.close()
    assert again.row == first.row
    assert again.failure is None


def test_a_process_reads_a_trace_once(tmp_path: Path):
    first, second = works(resolve(tmp_path))
    pool = Processes(1)
    try:
        pool.submit(do, first).result()
        Path(first.trace_path).unlink()
        assert pool.submit(do, second).result().failure is None  # without the file
        assert pool.submit(do, replace(first, trace_digest="0" * 64)).exception()  # which another run would have needed
    finally:
        pool.close()


def test_a_process_has_the_environment_of_the_one_that_asks(monkeypatch: pytest.MonkeyPatch):
    """What processes are forked from was started with an earlier pool."""
    seen = []
    for value in ("first", "second"):
        monkeypatch.setenv("MOESIM_OF_A_TEST", value)
        pool = Processes(1)
        try:
            seen.append(pool.submit(os.getenv, "MOESIM_OF_A_TEST").result())
        finally:
            pool.close()
    assert seen == ["first", "second"]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
def test_processes_map_the_same_file(tmp_path: Path, processes: Processes):
    write_trace(tmp_path / "small.safetensors", prompt=200, decode=200)
    both = [processes.submit(do, work) for work in works(resolve(tmp_path))]
    assert [future.result().failure for future in both] == [None, None]
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        text = Path(f"/proc/{child.pid}/smaps").read_text()
        lines = text[text.index(str(tmp_path / "small.safetensors")) - 100 :].splitlines()
        begin = next(i for i, line in enumerate(lines) if line.endswith("small.safetensors"))
        assert lines[begin].split()[1] == "r--s"  # shared, read only
        sizes = {line.split()[0]: int(line.split()[1]) for line in lines[begin + 1 : begin + 20] if line.endswith(" kB")}
        assert sizes["Size:"] >= 100
        assert sizes["Shared_Clean:"] + sizes["Shared_Dirty:"] == sizes["Rss:"] > 0
        assert sizes["Anonymous:"] == 0


def test_a_process_refuses_what_it_is_not_fit_for(tmp_path: Path):
    (work,) = works(resolve(tmp_path, policies=["lru"]))
    with pytest.raises(RefusedError, match=r"expected moesim's code 00000000.* install the same versions of moesim"):
        do(replace(work, code="0" * 64))
    with pytest.raises(RefusedError, match=r"expected the trace that the sweep began with .00000000.*, got another"):
        do(replace(work, trace_digest="0" * 64))
    with pytest.raises(RefusedError, match="policy lru: expected the source that the sweep began with, got another"):
        do(replace(work, policy_source="0" * 64))


@pytest.mark.parametrize("error", [RefusedError("not fit"), SimulationError("not fit"), RuntimeError("not fit")])
def test_what_is_no_death_ends_the_sweep(pretended: Pretended, error: Exception):
    pretended.errors = {1: error}
    with pytest.raises(type(error), match="not fit"):
        pretend(pretended)


@pytest.mark.long
@posix
def test_no_process_outlives_its_parent_and_the_rest_is_run_later(tmp_path: Path):
    write_policies(tmp_path, "killed_policies")
    write_yaml(tmp_path, workload=SEEDS | {"seed": list(range(20))}, policies=["killed_policies:Noted"])
    hold(tmp_path, 5)
    process = start(tmp_path, "-m", "moesim", "run", "small.yaml", "--jobs", "2")
    folder = tmp_path / "results/small"
    wait_until(lambda: fragments(folder) == 5 and len(begun(tmp_path)) == 7, "five runs, and two begun")
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    children = set(begun(tmp_path))
    assert len(children) == 2
    wait_until(lambda: not any(alive(child) for child in children), "no child left")
    assert fragments(folder) == 5
    let_go(tmp_path)
    again = start(tmp_path, "-m", "moesim", "run", "small.yaml", "--jobs", "2")
    _, err = again.communicate(timeout=HANG_S)
    assert err == "5 of 20 runs were in results/small already\nwrote results/small\n"
    assert len(begun(tmp_path)) - 7 == 20 - 5


@posix
def test_an_interrupt_ends_runs_at_once(tmp_path: Path):
    write_policies(tmp_path, "stopped_policies")
    write_yaml(tmp_path, policies=["stopped_policies:Noted", "stopped_policies:Endless"])
    process = start(tmp_path, "-m", "moesim", "run", "small.yaml", "--jobs", "2")
    wait_until(lambda: fragments(tmp_path / "results/small") == 1 and len(begun(tmp_path)) == 2, "one run of two")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: children too
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    (line,) = without_progress(err)
    assert line.startswith("moesim: interrupted")
    assert not any(alive(child) for child in begun(tmp_path))


def test_processes_change_no_byte(tmp_path: Path):
    write_yaml(tmp_path, workload=SEEDS, policies=["lru", "fiddler"], name="same")
    for jobs in "12":
        assert main(["run", "small.yaml", "--jobs", jobs, "--out", f"out{jobs}"]) == 0
    assert same_folders(tmp_path / "out1", tmp_path / "out2")


def test_made_up_routing_is_left_nowhere(tmp_path: Path):
    experiment = resolve(
        tmp_path, trace={"synthesize": "mixtral-8x7b", "requests": 1, "prompt": 6, "decode": 4}, policies=["lru"]
    )
    spec: RunSpec = experiment.specs[0]
    with work_of(experiment, tmp_path / "out") as make:
        path = Path(make(spec, False).trace_path)
        assert path.is_file()
        path.unlink()  # by a sweep next to this one
        assert make(spec, False).trace_path == str(path)
        assert path.is_file()
    assert not path.parent.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked")
def test_what_processes_are_forked_from_is_prepared_for_several_and_does_not_hear_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    blocked: list[set[Any]] = []
    monkeypatch.setattr(
        "multiprocessing.forkserver.ensure_running", lambda: blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    )
    prepare_processes(1)
    assert not blocked
    prepare_processes(2)
    assert [signal.SIGINT in signals for signals in blocked] == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_runs_are_tried_only_where_their_time_decides_or_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[int] = []
    monkeypatch.setattr("moesim.experiment.run.before", lambda experiment, specs: tried.append(len(specs)) or 0.0)
    experiment = resolve(tmp_path)
    run_experiment(experiment, jobs=1)
    assert not tried
    run_experiment(experiment, jobs=None)
    run_experiment(experiment, jobs=1, progress=True)
    assert tried == [len(experiment.specs)] * 2


def test_threads_answer_in_order_and_their_error_is_the_callers():
    told: list[None] = []
    assert in_threads(lambda n: n * n, range(5), lambda: told.append(None)) == [0, 1, 4, 9, 16]
    assert len(told) == 5
    with pytest.raises(ConfigError, match="3"):
        in_threads(_no_three, range(5))


def _no_three(n: int) -> None:
    if n == 3:
        raise ConfigError("3")


class Slow:
    """An answer that takes until its process has been told to end."""

    def __init__(self, begun: str) -> None:
        self.begun = begun

    def __reduce__(self) -> Any:
        Path(self.begun).touch()
        while not _Working.over:
            time.sleep(0.01)
        return str, ("answered",)


def test_a_process_is_not_ended_while_it_answers(tmp_path: Path):
    """Half an answer would be waited for for ever."""
    processes = Processes(1)
    future = processes.submit(Slow, str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists, "the answer begins")
    processes._end.close()
    assert future.result() == "answered"
    processes.close()


@pytest.mark.parametrize(("n_workers", "room"), [(0, 100), (3, 100), (50, 100), (51, 102), (400, 800)])
def test_a_cluster_has_two_runs_for_each_worker_and_some_for_those_that_may_come(n_workers: int, room: int):
    cluster = Cluster.__new__(Cluster)
    cluster._address, cluster._n_workers, cluster._looked, cluster._told = "tcp://x", 0, float("-inf"), False
    cluster._client = SimpleNamespace(ncores=lambda: {f"worker{i}": 1 for i in range(n_workers)})
    assert cluster.room() == room


def test_processes_are_started_for_long_sweeps_as_many_as_have_work():
    assert [worth_processes(took, 3, 8) for took in (0.0, 1e9)] == [1, 3]
    assert [worth_processes(1e9, n, 2) for n in (1, 2, 5)] == [1, 2, 2]
    assert [worth_processes(took, 3, 8) for took in (2.0, 2.001)] == [1, 3]  # seconds, of the start of a process
