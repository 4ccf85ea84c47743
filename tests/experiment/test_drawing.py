"""Figures of an experiment: those it asks for, each once, the same bytes whichever process draws them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.errors import ConfigError
from moesim.experiment import Results, run_experiment
from moesim.experiment import folder as figures
from moesim.experiment.folder import Output, draw, read_plots
from moesim.experiment.workers import Processes, Workers
from moesim.metrics.outcome import Outcome
from tests.experiment.experiment_kit import resolve

NAMES = ["decode_speed", "hit_rate", "gantt", "decode_speed"]
PLOTS = read_plots(NAMES, "x")
FEW = read_plots(["decode_speed", "hit_rate"], "x")
MANY = read_plots(["decode_speed", "prefill_speed", "hit_rate", "breakdown"], "x")
KINDS = {"decode_speed", "hit_rate", "gantt"}


class Here(Processes):
    """A pool that draws at once, in this process; of the figures that it is told to lose, the process dies."""

    def __init__(self, room: int = 2, lost: str = "", why: type[Exception] = BrokenProcessPool) -> None:
        self._n, self._lost, self._why = room, lost, why
        self.drawn: list[str] = []

    def submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.drawn.append(arguments[0].name)
        if arguments[0].name == self._lost:
            future.set_exception(self._why("gone"))
        else:
            future.set_result(call(*arguments, **options))
        return future

    def room(self) -> int:
        return self._n


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("drawing")
    experiment = resolve(folder, plots=NAMES, cache={"ratio": [0.25, 0.5]})
    kept = Output(experiment, folder / "out").kept
    results = run_experiment(experiment, keep=kept.__contains__)
    return results, {str(results.outcomes[i].row["policy"]): results.outcomes[i] for i in kept}


def workers_with(pool: Processes) -> Workers:
    workers = Workers(None)
    workers.pool = pool
    return workers


def kinds_of(files: dict[str, bytes]) -> set[str]:
    return {name.split(".")[0] for name in files}


@pytest.mark.long
def test_processes_draw_the_same_bytes(ran: tuple[Results, dict[str, Outcome]]) -> None:
    results, runs = ran
    here, nothing = draw(PLOTS, results.outcomes, runs)
    with Workers(2) as workers:
        workers.pool = Processes(2)
        there, refused = draw(PLOTS, results.outcomes, runs, workers)
    assert (kinds_of(here), nothing, refused) == (KINDS, [], [])
    assert here == there and list(here) == list(there)


def test_figures_of_a_folder_are_found_by_their_names(tmp_path: Path) -> None:
    assert figures._figures_there(tmp_path, {"gantt"}) == []
    (tmp_path / "plots").mkdir()
    found = ["gantt.png", "gantt.csv", "gantt.policy=lru.txt", "gantt-2.pdf"]
    for name in (*found, "gantt.bak", "gantt.policy.txt", "hit_rate.png", "a b.png", ".png"):
        (tmp_path / "plots" / name).touch()
    assert sorted(figures._figures_there(tmp_path, {"gantt", "gantt-2"})) == sorted(f"plots/{name}" for name in found)


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


def test_a_figure_whose_process_died_is_drawn_here(
    ran: tuple[Results, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    results, runs = ran
    monkeypatch.setattr(figures, "_draw", lambda one: {f"{one.name}.png": one.asked.kind.encode()})
    whole, _ = draw(MANY, results.outcomes, runs)
    pool = Here(lost="hit_rate")
    assert draw(MANY, results.outcomes, runs, workers_with(pool)) == (whole, [])
    assert pool.drawn == ["decode_speed", "hit_rate"] and list(whole) == [f"{one.name}.png" for one in MANY]
    with pytest.raises(ZeroDivisionError, match="gone"):
        draw(MANY, results.outcomes, runs, workers_with(Here(lost="hit_rate", why=ZeroDivisionError)))


def test_without_processes_figures_are_drawn_in_their_order(
    ran: tuple[Results, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    results, runs = ran
    drawn: list[str] = []
    monkeypatch.setattr(figures, "_draw", lambda one: drawn.append(one.name) or {f"{one.name}.png": b""})  # type: ignore[func-returns-value]
    draw(PLOTS, results.outcomes, runs)
    assert drawn == ["decode_speed", "hit_rate", "gantt"]


@pytest.mark.long
def test_what_cannot_be_drawn_is_one_line_in_any_process(
    ran: tuple[Results, dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    results, runs = ran
    whole = figures._draw
    refuse = ConfigError("plot hit_rate: expected more, got less")
    monkeypatch.setattr(figures, "_draw", lambda one: refuse if one.asked.kind == "hit_rate" else whole(one))
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

    monkeypatch.setattr("moesim.experiment.workers.make_pool", make)
    monkeypatch.setattr(figures, "usable_cores", lambda: 8)
    monkeypatch.setattr(figures, "_draw", lambda one: {f"{one.name}.png": b""})
    draw(FEW, results.outcomes, runs, Workers(None))
    assert started == []
    files, _ = draw(MANY, results.outcomes, runs, Workers(None))
    assert started == [len(files) // 2] and 1 < started[0] < 8
    monkeypatch.setattr(figures, "usable_cores", lambda: 1)
    draw(MANY, results.outcomes, runs, Workers(None))
    assert started[1:] == [1]
    draw(MANY, results.outcomes, runs, Workers(None, "tcp://cluster:1"))
    assert len(started) == 2  # a cluster's workers may have other fonts


@pytest.mark.parametrize(
    ("folder", "plots", "ends"), [(True, ["hit_rate"], ", then figures"), (True, [], ""), (False, ["hit_rate"], "")]
)
def test_long_sweeps_say_whether_figures_follow(
    folder: bool, plots: list[str], ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr("moesim.experiment.run.before", lambda experiment, specs: 60.0 * len(specs))
    experiment = resolve(tmp_path, plots=plots, policies=["lru", "on-demand"])
    run_experiment(experiment, folder=tmp_path / "out" if folder else None, jobs=1, progress=True)
    assert capsys.readouterr().err.splitlines()[0] == f"2 runs, about 2 min{ends}"


def test_the_command_draws_in_the_processes_of_its_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve(tmp_path, plots=["decode_speed"])
    output = Output(experiment, tmp_path / "out")
    pool = Here()
    output.write(run_experiment(experiment, keep=output.kept.__contains__), workers_with(pool))
    assert pool.drawn == ["decode_speed"] and (tmp_path / "out/plots/decode_speed.png").is_file()


@pytest.mark.parametrize(("fails", "told"), [([False, False], True), ([True, False], True), ([True, True], False)])
def test_what_is_left_out_is_told_unless_no_run_succeeded(
    fails: list[bool], told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(figures, "draw", lambda *_, **__: ({}, ["plots: hit_rate is left out: why"]))
    results = run_experiment(resolve(tmp_path, plots=["hit_rate"], policies=["lru", "on-demand"]))
    outcomes = [
        replace(one, failure=ConfigError("x") if fail else None) for one, fail in zip(results.outcomes, fails, strict=True)
    ]
    Output(results.experiment, tmp_path / "out").write(Results(results.experiment, outcomes))
    assert ("moesim: plots: hit_rate is left out: why" in capsys.readouterr().err.splitlines()) is told


def test_figures_are_drawn_again_only_if_something_of_them_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    drawn: list[str] = []
    monkeypatch.setattr(
        figures,
        "_draw",
        lambda one: drawn.append(one.name) or {f"{one.name}.{end}": b"of " + one.name.encode() for end in ("csv", "png")},
    )  # type: ignore[func-returns-value]
    results = run_experiment(resolve(tmp_path, plots=["decode_speed"]))

    def again(plots: list[Any], rows: Results = results) -> list[str]:
        drawn.clear()
        experiment = resolve(tmp_path, plots=plots)
        Output(experiment, tmp_path / "out").write(Results(experiment, rows.outcomes))
        assert (tmp_path / "out/plots/decode_speed.png").read_bytes() == b"of decode_speed"
        return list(drawn)

    assert again(["decode_speed"]) == ["decode_speed"]
    assert again(["decode_speed"]) == again(["decode_speed"]) == []
    assert again(["hit_rate", "decode_speed"]) == ["hit_rate", "decode_speed"]
    files = yaml.safe_load((tmp_path / "out/config.resolved.yaml").read_text())["figures"]["files"]
    assert files == [f"{name}.{end}" for name in ("decode_speed", "hit_rate") for end in ("csv", "png")]
    assert again(["decode_speed"]) == ["decode_speed"]
    (tmp_path / "out/plots/decode_speed.png").unlink()
    assert again(["decode_speed"]) == ["decode_speed"]
    (tmp_path / "out/plots/decode_speed.png").write_bytes(b"painted over")
    assert again(["decode_speed"]) == ["decode_speed"]
    assert again([{"kind": "decode_speed", "width": "page"}]) == ["decode_speed"]
    faster = [replace(one, row={**one.row, "decode_tokens_per_s": 1.0}) for one in results.outcomes]
    assert again(["decode_speed"], Results(results.experiment, faster)) == ["decode_speed"]
    monkeypatch.setattr("moesim.experiment.folder.package_digest", lambda name: "other code")
    assert again(["decode_speed"], Results(results.experiment, faster)) == ["decode_speed"]
    assert again(["decode_speed"], Results(results.experiment, faster)) == []


# --------------------------------------------------------------------------------------------------------------------- mappings
COLUMN = {"kind": "speedup", "baseline": "lru", "width": "column", "medium": "paper", "where": {"cache": 0.5}}


def test_an_entry_has_the_options_of_the_command_line(ran: tuple[Results, dict[str, Outcome]]) -> None:
    """The second figure of a kind has a number; both have the colours of the whole experiment, and what they were asked for."""
    results, runs = ran
    policies = [str(row["policy"]) for row in results.rows]
    whole, second = read_plots(["speedup", COLUMN, "speedup"], "x", policies)
    assert (whole.name, second.name, second.where) == ("speedup", "speedup-2", [("cache", "0.5")])
    files, refused = draw([whole, second], results.outcomes, runs)
    assert refused == [] and kinds_of(files) == {"speedup", "speedup-2"}
    assert files["speedup-2.txt"].startswith(b"Speed-up over lru ")
    assert b"cache 0.5" in files["speedup-2.txt"] and not files["speedup.txt"].startswith(b"Speed-up over lru ")
    assert size_of(files["speedup-2.png"])[0] == pytest.approx(300 * 3.35, abs=2)  # 300 dots an inch: for a paper


def test_a_figure_has_the_names_of_its_labels(ran: tuple[Results, dict[str, Outcome]]) -> None:
    results, runs = ran
    named: dict[str, Any] = {"label": {"lru": "Ours"}, "for": "paper"}
    asked = read_plots(
        [{"kind": "speedup", "baseline": "lru", **named}, {"kind": "gantt", "policies": "lru", **named}], "x", ["lru"]
    )
    files, refused = draw(asked, results.outcomes, runs)
    assert refused == [] and files["speedup.txt"].startswith(b"Speed-up over Ours ")
    assert {line.partition(",")[0] for line in files["gantt.csv"].decode().splitlines()[1:]} == {"Ours"}
    with pytest.raises(ConfigError, match="label: unknown policy of this experiment 'dali'"):
        read_plots([{"kind": "speedup", "label": {"dali": "Ours"}}], "x", ["lru"])
    with pytest.raises(ConfigError, match="label: expected a mapping of policies to names"):
        read_plots([{"kind": "speedup", "label": "Ours"}], "x", ["lru"])


@pytest.mark.parametrize("policy", ["my-name", {"w_size": 2}])
def test_a_policy_of_a_figure_is_written_as_in_the_experiment(policy: Any) -> None:
    assert read_plots([{"kind": "gantt", "policies": {"name": "dali", "w_size": 2}}], "x", ["dali(w_size=2)"])
    with pytest.raises(ConfigError, match=r"unknown policy of this experiment '(my-name|{'w_size)"):
        read_plots([{"kind": "gantt", "policies": policy}], "x", ["lru"])


def test_a_figure_of_records_has_the_policies_that_are_asked_for(ran: tuple[Results, dict[str, Outcome]]) -> None:
    results, runs = ran
    files, _ = draw(read_plots([{"kind": "gantt", "policies": "lru", "layers": [0, 1]}], "x"), results.outcomes, runs)
    assert {line.partition(",")[0] for line in files["gantt.csv"].decode().splitlines()[1:]} == {"lru"}
    _, refused = draw(read_plots([{"kind": "gantt", "policies": ["dali"]}], "x"), results.outcomes, runs)
    assert refused[0].startswith("plots: gantt is left out: plot gantt: policies: unknown policy of the first setting 'dali'")


def test_a_figure_of_records_may_show_another_setting_than_the_first(tmp_path: Path) -> None:
    chosen = {"kind": "gantt", "where": {"cache": 0.5}, "layers": [0, 1]}
    experiment = resolve(tmp_path, plots=[chosen], cache={"ratio": [0.25, 0.5]})
    kept = Output(experiment, tmp_path / "out").kept
    results = run_experiment(experiment, keep=kept.__contains__)
    first = {str(outcome.row["policy"]): outcome for outcome in results.outcomes if outcome.row["cache_ratio"] == 0.25}
    files, refused = draw(read_plots([chosen], "x"), results.outcomes, first)
    assert refused == [] and b"cache 0.5" in files["gantt.txt"] and b"cache 0.25" not in files["gantt.txt"]
    assert {line.partition(",")[0] for line in files["gantt.csv"].decode().splitlines()[1:]} == set(first)
    _, refused = draw(read_plots([chosen | {"where": {"cache": 0.6}}], "x"), results.outcomes, first)
    assert "where: expected cache_ratio to be one of 0.25, 0.5, got '0.6'" in refused[0]


def size_of(png: bytes) -> tuple[int, ...]:
    return struct.unpack(">II", png[16:24])


def test_an_option_of_nothing_is_as_if_it_were_not_there() -> None:
    plain, nothing = (read_plots([{"kind": "speedup", **more}], "a.yaml") for more in ({}, {"metric": None}))
    assert nothing == plain
    named = [read_plots([{"kind": "speedup", "baseline": one}], "a.yaml", ["lru"]) for one in ("lru", {"name": "lru"})]
    assert named[0] == named[1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "speedup", "x": "batch_size"},
         "plot speedup: expected no option x, which changes nothing in it; its options: baseline, metric"),
        ({"kind": "speedup", "baseline": "lri"}, "baseline: unknown policy of this experiment 'lri'; did you mean 'lru'?"),
        ({"kind": "speedup", "width": 90}, "width: expected column, page, slide, or 2.5 to 20 inches, got '90'"),
        ({"kind": "speedup", "medium": "papr"}, "medium: unknown medium 'papr'; did you mean 'paper'?"),
        ({"kind": "speedup", "where": "batch=4"}, "where: expected a mapping of columns to values, got 'batch=4'"),
        ({"kind": "speedo"}, "unknown plot 'speedo'; did you mean 'speedup'?"),
        ({"kind": 3}, "kind: expected the name of a kind of figure, got 3"),
        ({"kind": "latency_cdf"}, "expected frames for 'latency_cdf', got none"),
    ],
)  # fmt: skip
def test_an_entry_is_checked_before_anything_runs(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"a.yaml: plots\[1\]: {re.escape(message)}"):
        read_plots(["decode_speed", entry], "a.yaml", ["lru"], frames=False)
