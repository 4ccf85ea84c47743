"""Figures of an experiment: those it asks for, each once, the same bytes whichever process draws them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.experiment import Results, figures, run_experiment
from moesim.experiment.figures import draw
from moesim.experiment.output import Output
from moesim.experiment.pool import Processes, Workers
from moesim.metrics.outcome import Outcome
from tests.experiment.experiment_kit import resolve

PLOTS = ["decode_speed", "hit_rate", "gantt", "decode_speed"]
KINDS = {"decode_speed", "hit_rate", "gantt"}


class Here(Processes):
    """A pool that draws at once, in this process; of the figures that it is told to lose, the process dies."""

    def __init__(self, room: int = 2, lost: str = "") -> None:
        self._n, self._lost = room, lost
        self.drawn: list[str] = []

    def submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.drawn.append(arguments[0].name)
        if arguments[0].name == self._lost:
            future.set_exception(BrokenProcessPool("gone"))
        else:
            future.set_result(call(*arguments, **options))
        return future

    def room(self) -> int:
        return self._n


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("drawing")
    experiment = resolve(folder, plots=PLOTS, cache={"ratio": [0.25, 0.5]})
    kept = Output(experiment, folder / "out").kept
    results = run_experiment(experiment, keep=kept.__contains__)
    return results, {str(results.outcomes[i].row["policy"]): results.outcomes[i] for i in kept}


def workers_with(pool: Processes) -> Workers:
    workers = Workers(None)
    workers.pool = pool
    return workers


def kinds_of(files: dict[str, bytes]) -> set[str]:
    return {name.split(".")[0] for name in files}


def test_processes_draw_the_same_bytes(ran: tuple[Results, dict[str, Outcome]]) -> None:
    results, runs = ran
    here, nothing = draw(PLOTS, results.outcomes, runs)
    with Workers(2) as workers:
        workers.pool = Processes(2)
        there, refused = draw(PLOTS, results.outcomes, runs, workers)
    assert (kinds_of(here), nothing, refused) == (KINDS, [], [])
    assert here == there and list(here) == list(there)


def test_each_figure_is_drawn_once_and_no_other(
    ran: tuple[Results, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    results, runs = ran
    drawn: list[str] = []
    whole = figures._draw
    monkeypatch.setattr(figures, "_draw", lambda one: drawn.append(one.name) or whole(one))  # type: ignore[func-returns-value]
    pool = Here()
    files, _ = draw(PLOTS, results.outcomes, runs, workers_with(pool))
    assert sorted(drawn) == sorted({name.rpartition(".")[0] for name in files if name.endswith(".png")})
    assert set(pool.drawn) == {name for name in drawn if not name.startswith("gantt")}  # records stay where they are
    assert draw([], results.outcomes, runs, workers_with(pool)) == ({}, [])


def test_a_figure_whose_process_died_is_drawn_here(ran: tuple[Results, dict[str, Outcome]]) -> None:
    results, runs = ran
    whole, _ = draw(["decode_speed", "hit_rate"], results.outcomes, runs)
    found, refused = draw(["decode_speed", "hit_rate"], results.outcomes, runs, workers_with(Here(lost="decode_speed")))
    assert (found, refused) == (whole, [])


def test_what_cannot_be_drawn_is_one_line_in_any_process(
    ran: tuple[Results, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    results, runs = ran
    whole = figures._draw
    refuse = ConfigError("plot hit_rate: expected more, got less")
    monkeypatch.setattr(figures, "_draw", lambda one: refuse if one.kind == "hit_rate" else whole(one))
    for workers in (None, workers_with(Here())):
        files, left_out = draw(PLOTS, results.outcomes, runs, workers)
        assert kinds_of(files) == KINDS - {"hit_rate"}
        assert left_out == ["plots: hit_rate is left out: plot hit_rate: expected more, got less"]


def test_processes_are_started_for_many_figures_only(
    ran: tuple[Results, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    results, runs = ran
    started: list[int] = []

    def make(jobs: int | None, scheduler: str | None, worth: Callable[[], int]) -> Processes | None:
        started.append(worth())
        return None

    monkeypatch.setattr("moesim.experiment.pool.make_pool", make)
    monkeypatch.setattr(figures, "usable_cores", lambda: 8)
    draw(["decode_speed", "hit_rate"], results.outcomes, runs, Workers(None))
    assert started == []
    draw(["decode_speed", "prefill_speed", "hit_rate", "breakdown"], results.outcomes, runs, Workers(None))
    assert len(started) == 1 and 2 <= started[0] <= 8
    draw(["decode_speed", "prefill_speed", "hit_rate", "breakdown"], results.outcomes, runs, Workers(None, "tcp://cluster:1"))
    assert len(started) == 1  # a cluster's workers may have other fonts


def test_the_command_draws_in_the_processes_of_its_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve(tmp_path, plots=["decode_speed"])
    output = Output(experiment, tmp_path / "out")
    pool = Here()
    output.write(run_experiment(experiment, keep=output.kept.__contains__), workers_with(pool))
    assert pool.drawn == ["decode_speed"] and (tmp_path / "out/plots/decode_speed.png").is_file()
