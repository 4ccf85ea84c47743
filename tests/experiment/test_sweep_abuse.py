"""Sweeps as they go wrong: interrupted, killed, two at once, damaged files, full and read-only disks, folders that vanish."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from moesim.cli.main import main
from moesim.core.files import FILE, OutputFolder
from moesim.experiment.store import Store
from tests.experiment.sweep_kit import BARE, Counted, _context, content, lines, same, start, start_and_kill, write

GRID: dict[str, Any] = {"cache": {"ratio": [0.25, 0.375, 0.5]}, "policies": ["on-demand", "lru"]}  # six runs


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counted:
    monkeypatch.chdir(tmp_path)
    return Counted(monkeypatch)


def interrupt() -> None:
    raise KeyboardInterrupt


def rows_of(out: Path) -> pd.DataFrame:
    return pd.read_parquet(out / "dataset")


def run(file: Path, out: Path | str, *options: str) -> int:
    return main(["run", str(file), "--out", str(out), "--jobs", "1", *options])


# ---- interrupted and resumed


@pytest.mark.parametrize("k", [0, 1, 4, 5])
def test_an_interrupted_sweep_goes_on_and_ends_in_the_same_bytes(
    k: int, counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write(tmp_path, **GRID, frames=True)  # with timeline and frames: records are kept
    assert run(file, "whole") == 0
    assert counted() == 6
    counted.before[k] = interrupt
    capsys.readouterr()
    assert run(file, "broken") == 130
    assert lines(capsys) == ["moesim: interrupted; finished runs are kept in broken; the same command goes on"]
    assert counted() == k
    assert len(Store(tmp_path / "broken").read()) == k
    assert run(file, "broken") == 0
    assert counted() == 6 - k
    assert (f"{k} of 6 runs were in broken already" in lines(capsys)) == (k > 0)
    same(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_is_stored_before_it_is_counted(jobs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("moesim.experiment.run._Shown.done", lambda *_: interrupt())
    assert main(["run", str(write(tmp_path, **GRID)), "--out", str(tmp_path / "out"), "--jobs", jobs]) == 130
    assert len(Store(tmp_path / "out").read()) == 1


def test_an_extended_sweep_runs_what_is_new_only(counted: Counted, tmp_path: Path):
    assert run(write(tmp_path, **GRID), "out") == 0
    counted()
    more = write(tmp_path, **{**GRID, "cache": {"ratio": [0.25, 0.375, 0.5, 0.625]}})
    assert run(more, "out") == 0
    assert counted() == 2  # the timeline's records are of the first setting, and are still there
    assert run(more, "fresh") == 0
    shown = [{k: v for k, v in content(tmp_path / o).items() if not k.startswith("dataset")} for o in ("out", "fresh")]
    assert shown[0] == shown[1]
    assert sorted(rows_of(tmp_path / "out")["key"]) == sorted(rows_of(tmp_path / "fresh")["key"])


def test_a_run_whose_records_are_wanted_now_is_done_again(counted: Counted, tmp_path: Path):
    assert run(write(tmp_path, **GRID, **BARE), "out") == 0
    counted()
    assert run(write(tmp_path, **GRID), "out") == 0
    assert counted.policies == ["on-demand", "lru"], "of the first setting, which the timeline shows"
    counted()
    assert run(write(tmp_path, **GRID), "out") == 0
    assert counted() == 0


def test_failed_runs_are_tried_again_and_others_are_not(counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path, policies=["on-demand", "lru"], cache={"ratio": [0.001, 0.25]}, **BARE)
    for n in (4, 1):  # LRU needs a slot a layer
        assert run(file, "out") == 1
        assert counted() == n
        (line,) = [line for line in lines(capsys) if line.startswith("moesim: ")]
        assert line.startswith("moesim: run 1 (lru, cache 0.001, batch 1): policy LRU on gpu0: expected at least 1 cache slots")
    assert len(rows_of(tmp_path / "out")) == 3
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["runs"][1]["error"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_fail_fast_stops_and_keeps_what_is_done(jobs: str, counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path, policies=["on-demand", "lru"], cache={"ratio": [0.001, *(i / 16 for i in range(2, 16))]}, **BARE)
    assert main(["run", str(file), "--out", "out", "--jobs", jobs, "--fail-fast"]) == 1
    said = lines(capsys)
    assert [line for line in said if line.startswith("moesim: run 1 (lru, cache 0.001, batch 1): ")]
    assert any(line.startswith("stopped at the first failure: ") for line in said)
    n = len(Store(tmp_path / "out").read())
    assert n == 1 if jobs == "1" else n < 29  # of several processes, what is in flight is given up
    assert not (tmp_path / "out" / "summary.json").exists(), "half a result is no result"
    counted()
    assert run(file, "out") == 1
    assert counted() == 30 - n


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_nothing_is_written_if_every_run_is_impossible(jobs: str, counted: Counted, tmp_path: Path):
    file = write(tmp_path, policies=["lru"], cache={"ratio": [0.001, 0.002]}, **BARE)
    assert main(["run", str(file), "--out", "out", "--jobs", jobs]) == 2
    assert not (tmp_path / "out").exists()


def test_a_sweep_killed_between_its_last_run_and_the_end(counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write(tmp_path, **GRID)
    assert run(file, "whole") == 0
    with monkeypatch.context() as patched:
        patched.setattr(Store, "merge", lambda self: interrupt())
        assert run(file, "broken") == 130
    counted()
    assert run(file, "broken") == 0
    assert counted() == 0
    same(tmp_path / "whole", tmp_path / "broken")


# ---- killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Give a folder with an experiment and its result, and at how many moments it can be killed."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, cache={"ratio": [0.25, 0.5, 0.75]}, policies=["on-demand", "lru", "fiddler"])
    process = start_and_kill(folder, 10**9, "run", "sweep.yaml", "--out", "out", "--jobs", "1")
    process.join()
    assert process.exitcode == 0
    return folder, int((folder / "moments.txt").read_text())


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_killed_at_random_moments_the_dataset_opens_and_the_sweep_goes_on(
    whole: tuple[Path, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Killed before it opens, moves, makes or removes a file of its result."""
    folder, n_moments = whole
    monkeypatch.chdir(folder)
    rng, found = random.Random(6), set()
    for moment in sorted(rng.sample(range(n_moments), 20)):
        out = folder / f"killed-{moment}"
        process = start_and_kill(folder, moment, "run", "sweep.yaml", "--out", out.name, "--jobs", "1")
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if list((out / "dataset").glob("[!.]*")):
            assert set(rows_of(out)["policy"]) <= {"on-demand", "lru", "fiddler"}
        n = len(Store(out).read())
        found.add(n)
        assert lines(capsys) == [], "no damaged file"
        if (out / "summary.json").exists():  # where there is a summary, all that belongs to it is there
            key = json.loads((out / "summary.json").read_text())["key"]
            assert yaml.safe_load((out / "config.resolved.yaml").read_text())["key"] == key
        assert run(folder / "sweep.yaml", out) == 0
        if n:
            assert f"{n} of 9 runs were in" in capsys.readouterr().err
        capsys.readouterr()
        same(folder / "out", out)
        shutil.rmtree(out)
    assert len(found) > 5, "the moments were spread"


def test_half_written_files_of_a_killed_sweep_are_no_data_and_go_away(counted: Counted, tmp_path: Path):
    file, out = write(tmp_path, **GRID), tmp_path / "out"
    assert run(file, "whole") == 0
    counted()
    counted.before[3] = interrupt
    assert run(file, out) == 130
    for name in (".moesim-0123456789abcdef", ".moesim-ffffffffffffffff"):
        (out / name).write_bytes(b"PAR1 half")
    (out / FILE).write_bytes((out / FILE).read_bytes() + b'{"temporary": [".moes')
    assert len(rows_of(out)) == 3
    assert run(file, out) == 0
    same(tmp_path / "whole", out)


def test_a_sweep_killed_before_its_first_run_ended_goes_on(counted: Counted, tmp_path: Path):
    """The folder holds nothing but its list, which may be empty."""
    for name, begun in {"no-list": None, "empty": b"", "torn": b'{"mani'}.items():
        (tmp_path / name).mkdir()
        if begun is not None:
            (tmp_path / name / FILE).write_bytes(begun)
        assert run(write(tmp_path, **GRID), name) == 0
    same(tmp_path / "no-list", tmp_path / "empty")


# ---- two at once


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_made_up_routing_for_other_processes_is_not_in_the_way(jobs: str, counted: Counted, tmp_path: Path):
    made = {"synthesize": "mixtral-8x7b", "requests": 2, "prompt": 6, "decode": 3}
    file = write(tmp_path, **GRID, trace=made)
    assert main(["run", str(file), "--out", "out", "--jobs", jobs]) == 0
    assert main(["run", str(file), "--out", "out", "--jobs", jobs, "--set", "cache.ratio=[0.25, 0.625]"]) == 0
    assert len(rows_of(tmp_path / "out")) == 8
    assert run(file, "whole") == 0
    assert run(file, "whole", "--set", "cache.ratio=[0.25, 0.625]") == 0
    same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("different", [False, True])
def test_two_sweeps_into_one_folder(different: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    grids = [
        {"cache": {"ratio": [0.25, 0.5]}},
        {"cache": {"budget": ["12 GiB", "16 GiB"]}} if different else {"cache": {"ratio": [0.25, 0.5]}},
    ]
    files = [
        write(tmp_path, f"{i}.yaml", policies=["on-demand", "lru", "fiddler"], name="same", **g) for i, g in enumerate(grids)
    ]
    processes = [start(tmp_path, "run", file.name, "--out", "out", "--jobs", "1") for file in files]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0], [p.read_text() for p in tmp_path.glob("err-*")]
    out = tmp_path / "out"
    keys = list(rows_of(out)["key"])
    assert len(keys) == len(set(keys)) == (12 if different else 6)
    summary = json.loads((out / "summary.json").read_text())
    assert yaml.safe_load((out / "config.resolved.yaml").read_text())["key"] == summary["key"]
    assert pd.read_parquet(out / "runs.parquet")["key"].tolist() == [row["key"] for row in summary["runs"]]
    assert [p for p in content(out) if p.startswith(".") or "/." in p] == [FILE]
    counted = Counted(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for file in files:
        assert run(file, out) == 0
    assert counted() <= (6 if different else 0), "only records that the other sweep had no use for are made again"


def _replace_often(folder: str, who: str) -> None:
    for i in range(40):
        names = ("plots/a.csv", f"only-{who}", "runs.parquet", "summary.json")
        OutputFolder(Path(folder), "run").replace({name: f"{who} {i}".encode() for name in names}, last="summary.json")


def test_files_of_two_writers_are_never_mixed(tmp_path: Path):
    """Many times over, what takes a moment at the end of a sweep."""
    processes = [_context.Process(target=_replace_often, args=(str(tmp_path / "out"), who)) for who in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    found = content(tmp_path / "out")
    del found[FILE]
    (who,) = {text.decode().split()[0] for text in found.values()}
    assert set(found) == {"plots/a.csv", f"only-{who}", "runs.parquet", "summary.json"}
    assert len(set(found.values())) == 1


# ---- damaged files


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {"cut": cut, "empty": lambda _: b"", "text": lambda _: b"not this" * 99}


@pytest.mark.long
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", ["run", "part", "records"])
def test_damaged_files_are_told_of_and_done_again(
    what: str, how: str, counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, out = write(tmp_path, **GRID), tmp_path / "out"
    if what == "run":  # small files are there while a sweep goes on
        counted.before[5] = interrupt
    assert run(file, out) == (130 if what == "run" else 0)
    counted()
    pattern = {"run": "dataset/run-*", "part": "dataset/part-*", "records": "records/*.arrow"}[what]
    victim = sorted(out.glob(pattern))[0]
    victim.write_bytes(DAMAGE[how](victim.read_bytes()))
    capsys.readouterr()
    assert run(file, out) == 0
    n = {"run": 2, "part": 6, "records": 1}[what]  # of the sweep broken off, one run was missing anyway
    assert counted() == n
    (line,) = [line for line in lines(capsys) if line.startswith("moesim: ")]
    assert (
        line
        == f"moesim: {victim}: changed since moesim wrote it, so that its runs are done again; kept as _changed.{victim.name}"
    )
    assert len(rows_of(out)) == 6, "what was set aside does not hinder reading"
    assert [p.name for p in out.rglob("_changed.*")] == [f"_changed.{victim.name}"]
    assert run(file, out) == 0
    assert counted() == 0


@pytest.mark.parametrize("kind", ["run", "part"])
def test_a_flipped_bit_never_changes_a_row(kind: str, counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    if kind == "run":
        counted.before[1] = interrupt
    assert run(write(tmp_path, **GRID, **BARE), "out") == (130 if kind == "run" else 0)
    good = Store(tmp_path / "out").read()
    (path,) = (tmp_path / "out" / "dataset").iterdir()
    data, rng = path.read_bytes(), random.Random(1)
    capsys.readouterr()
    for _ in range(60):
        where = rng.randrange(len(data))
        path.write_bytes(data[:where] + bytes([data[where] ^ (1 << rng.randrange(8))]) + data[where + 1 :])
        assert Store(tmp_path / "out", read_only=True).read() == {}, where
        assert [line for line in lines(capsys) if "changed since" in line and "the folder stays as it is" in line]
    path.write_bytes(data)
    assert Store(tmp_path / "out").read() == good


def test_a_row_under_a_wrong_key_is_not_believed(counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(write(tmp_path, **GRID), "out") == 0
    (part,) = (tmp_path / "out" / "dataset").iterdir()
    frame = pd.read_parquet(part)
    frame.assign(row_json=list(reversed(frame["row_json"]))).to_parquet(part)
    assert Store(tmp_path / "out").read() == {}
    assert "changed since" in lines(capsys)[-1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["summary.json", "config.resolved.yaml", "runs.parquet", "timeline.json"])
@pytest.mark.parametrize("how", ["cut", "empty"])
def test_damaged_files_of_a_result_are_written_anew(name: str, how: str, counted: Counted, tmp_path: Path):
    file, out = write(tmp_path, **GRID), tmp_path / "out"
    assert run(file, out) == 0
    before = content(out)
    (out / name).write_bytes(DAMAGE[how]((out / name).read_bytes()))
    counted()
    assert run(file, out) == 0
    assert counted() == 0
    after = content(out)
    assert after.pop(f"_changed.{name}") == DAMAGE[how](before[name]), "it may have been changed on purpose"
    assert after == before


# ---- disks


class _Full:
    """A file on a disk that is full."""

    def __init__(self, file: Any, code: int) -> None:
        self._file, self._code = file, code

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._file.write(data[:10])
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("n", [0, 8, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4, 7, 9, 12, 13))])
def test_a_disk_that_fails_at_the_nth_file(
    n: int, code: int, counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The list of files; six runs with a file each; these merged; four files of the result; and the list with them."""
    file, out, opened = write(tmp_path, **GRID, **BARE), tmp_path / "out", 0
    assert run(file, "whole") == 0
    original = os.fdopen

    def fdopen(handle: int, mode: str) -> Any:
        nonlocal opened
        opened += 1
        return _Full(original(handle, mode), code) if opened > n else original(handle, mode)

    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("moesim.core.files.os.fdopen", fdopen)
        assert run(file, out) == (1 if n < 13 else 0)
    said = [line for line in lines(capsys) if line.startswith("moesim: ")]
    if n < 13:
        assert len(said) == 1 and os.strerror(code) in said[0] and said[0].endswith("run the same command again")
        assert ("; make room, and" in said[0]) == (code == errno.ENOSPC)
        assert not (out / "summary.json").exists()
        hidden = [name for name in content(out) if "/." in name or name.startswith(".")]
        assert hidden == [FILE] * (n > 0), "nothing half-written stays"
    counted()
    assert run(file, out) == 0
    assert counted() == 6 - min(max(n - 1, 0), 6), "finished runs were kept"
    same(tmp_path / "whole", out)


@pytest.mark.parametrize("out", ["/proc/results", "/sys/results", "/dev/null/results", "file/results", "file"])
def test_a_place_that_cannot_be_written(out: str, counted: Counted, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("mine")
    assert run(write(tmp_path, **GRID), out) == 2
    (line,) = lines(capsys)
    assert line.startswith("moesim: ") and "expected a folder" in line and "--out" in line
    assert counted() == 0


def test_a_folder_that_vanishes_in_mid_sweep_is_made_again(counted: Counted, tmp_path: Path):
    file, out = write(tmp_path, **GRID, **BARE), tmp_path / "out"
    assert run(file, "whole") == 0
    counted()
    counted.before[3] = lambda: shutil.rmtree(out)
    assert run(file, out) == 0
    summaries = [json.loads((tmp_path / o / "summary.json").read_text()) for o in ("whole", "out")]
    assert summaries[0] == summaries[1], "what was done is not lost to this result"
    counted()
    assert run(file, out) == 0
    assert counted() == 3, "it is lost to the next"
    same(tmp_path / "whole", out)
