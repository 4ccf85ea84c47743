"""Thousands of flipped bits, in every kind of file that is read back: what is read is as before, or refused, or made again."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.core.files import FILE
from moesim.errors import InputError
from tests.experiment.experiment_kit import write_trace
from tests.experiment.sweep_kit import content
from tests.long.kit import TINY, Called, Tally, call, complaint, flipped, in_child, shared_out

Look = Callable[[], tuple[Called, Any]]
"""Reads a folder, the present one, and gives what became of that and what was seen."""


@dataclass
class Subject:
    """Files of one kind, and what reads them."""

    folder: Path  # pristine
    readers: dict[str, list[Look]]  # pattern of files -> what reads them
    weight: int
    seen: dict[Look, Any] = field(default_factory=dict)  # of the pristine folder


def command(*arguments: str, made: str = "", suffixes: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Look:
    """Run a command; what is seen is what it prints, or what files it makes."""

    def look() -> tuple[Called, Any]:
        called = call(*arguments)
        if not made:
            return called, called.out
        place = Path(made)
        files = content(place) if place.is_dir() else {made: place.read_bytes()} if place.exists() else {}
        wanted = {n: data for n, data in files.items() if not suffixes or n.endswith(suffixes)}
        return called, {n: data for n, data in wanted.items() if not any(fnmatch(n, pattern) for pattern in without)}

    return look


def library(do: Callable[[], Any]) -> Look:
    """Call a function of the library; an `InputError` counts as a refusal."""

    def look() -> tuple[Called, Any]:
        try:
            return Called(0, "", "", ""), do()
        except InputError as error:
            return Called(2, "", f"moesim: {error}\n", ""), None

    return look


AGAIN = command("run", "full.yaml", "--out", "out", "--jobs", "1", made="out", without=(FILE, "*_changed.*"))
DIFF = command("diff", "out:0", "out:1", "-o", "json")
SPEED = command("plot", "decode_speed", "out", "--out", "p", made="p", suffixes=(".csv", ".txt"))
GANTT = command("plot", "gantt", "out", "--out", "p", made="p", suffixes=(".csv", ".txt"))
PAGE = command("report", "out", "--out", "p.html", made="p.html")
FULL = {**TINY, "policies": ["on-demand", "lru"], "timeline": {"policies": ["lru"]}, "frames": True, "plots": ["decode_speed"]}


def prepared(folder: Path, **changes: Any) -> Path:
    """Make a folder with a trace and an experiment."""
    folder.mkdir()
    write_trace(folder / "small.safetensors", n_layers=4)
    (folder / "full.yaml").write_text(yaml.safe_dump(FULL | changes))
    return folder


def results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Subject]]:
    """Give a finished result and one that was broken off."""
    for name in ("result", "broken off"):
        prepared(folder / name)
        monkeypatch.chdir(folder / name)
        if name == "result":
            assert call("run", "full.yaml", "--out", "out", "--jobs", "1").code == 0
    with monkeypatch.context() as patched:
        from tests.experiment.sweep_kit import Counted

        counted = Counted(patched)
        counted.before[1] = interrupt
        assert call("run", "full.yaml", "--out", "out", "--jobs", "1").code == 130
    yield "result", Subject(folder / "result", {
        "out/dataset/*": [AGAIN, DIFF], "out/records/*": [AGAIN, DIFF, GANTT], "out/summary.json": [AGAIN, DIFF, SPEED, PAGE],
        "out/runs.parquet": [AGAIN, PAGE], "out/config.resolved.yaml": [AGAIN, DIFF, PAGE], "out/timeline.json": [AGAIN, PAGE],
        "out/frames/*": [AGAIN, PAGE], "out/plots/*": [AGAIN, PAGE], f"out/{FILE}": [AGAIN, DIFF, SPEED, PAGE],
    }, 1300)  # fmt: skip
    yield "broken off", Subject(folder / "broken off", {"out/*": [AGAIN]}, 250)


def interrupt() -> None:
    raise KeyboardInterrupt


def of_traces(folder: Path) -> Iterator[tuple[str, Subject]]:
    """Give a trace next to an experiment that runs it."""
    place = prepared(folder / "trace", policies=["lru"], timeline=None, frames=False, plots=[])
    run = command("run", "full.yaml", "--out", "out", "--quick", "--jobs", "1", "-o", "csv")
    export = command("trace", "export", "./small.safetensors", "--format", "csv", "--out", "e/t.csv", made="e")
    readers = [run, run, command("trace", "stats", "./small.safetensors", "-q"), export]
    yield "trace", Subject(place, {"small.safetensors": readers}, 450)


def studies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Subject]]:
    """Give what studies leave, with the study again as what reads it."""
    for name, arguments in {
        "what-if": ["whatif", "full.yaml", "--quick", "--no-next", "--vary", "link.bytes_per_s x2"],
        "regret": ["regret", "full.yaml", "--quick", "--policies", "lru", "--jobs", "1"],
    }.items():
        place = prepared(folder / name, policies=["lru"], timeline=None, frames=False, plots=[])
        monkeypatch.chdir(place)
        assert call(*arguments, "--out", "out").code == 0
        again = command(*arguments, "--out", "out", made="out", without=(FILE, "*_changed.*"))
        yield name, Subject(place, {"out/*": [again]}, 60)


def validations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Subject]]:
    """Give measurements of a validation, by a stand-in for the machine."""
    from moesim.api import machine
    from tests.studies.validation_kit import stand_in

    monkeypatch.setattr(machine, "live_machine", lambda *_: nullcontext())
    monkeypatch.setattr(machine, "live_execution", lambda _: stand_in(link=1.2))
    place = prepared(folder / "validation", timeline=None, frames=False, plots=[])
    monkeypatch.chdir(place)
    done = call("validate", "full.yaml", "--out", "out", "--repeats", "1")
    assert done.code == 0, done
    compare = command("validate", "full.yaml", "--out", "out", "--only-compare", "-o", "csv")
    of_folder = command("validate", "out/experiment.yaml", "--out", "out", "--only-compare", "-o", "csv")
    yield (
        "validation",
        Subject(place, {"out/measurements.jsonl": [compare], f"out/{FILE}": [compare], "out/experiment.yaml": [of_folder]}, 250),
    )


def measurements(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Subject]]:
    """Give a measurement of a machine that was broken off, on a bench whose times are known."""
    from moesim.live.profiler.measure import measure
    from tests.live import profiler_kit as kit

    kit.shrink(monkeypatch.setattr, 4)
    place = folder / "profile"
    place.mkdir()
    monkeypatch.chdir(place)

    def go_on(die_after: int | None = None) -> dict[str, Any]:
        measure(kit.prepared(Path("out")), bench=kit.FakeBench(die_after=die_after), progress=False)
        profile: dict[str, Any] = yaml.safe_load(Path("out/mine.yaml").read_text())
        return {key: profile[key] for key in ("devices", "links")}

    with pytest.raises(KeyboardInterrupt):
        go_on(200)
    yield "profile", Subject(place, {"out/mine/samples.jsonl.part": [library(go_on)], f"out/{FILE}": [library(go_on)]}, 200)


def recordings(folder: Path) -> Iterator[tuple[str, Subject]]:
    """Give the parts of a recording, and predictors that were learned."""
    import torch

    from moesim.recorder.learned import load_predictors, predict, save_predictors, train_predictors
    from moesim.trace import Trace
    from tests.recorder import learned_kit, record_kit

    torch.set_num_threads(1)
    folder = folder / "recorder"
    folder.mkdir()
    home = record_kit.make_home(folder / "home")
    place = folder / "parts"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        from moesim.recorder import session

        patch.setattr(session.shards, "join", lambda *_: interrupt())
        with suppress(InputError):  # Typer turns the interrupt into an end without a trace
            record_kit.run(home, place / "out" / "t.safetensors", "--calibrate", str(home / "others.txt"))

    def go_on() -> bytes:
        record_kit.run(home, Path("out/t.safetensors").absolute(), "--calibrate", str(home / "others.txt"))
        return Path("out/t.safetensors").read_bytes()

    read = library(lambda: Trace.read("out/t.safetensors.parts").digest)
    yield "recording", Subject(place, {"out/t.safetensors.parts/*": [read] * 9 + [library(go_on)]}, 250)
    data = learned_kit.synthetic(60, 0)
    predictors = train_predictors(*data, learned_kit.EXPERTS, learned_kit.QUICK)
    (folder / "predictors").mkdir()
    save_predictors(predictors, folder / "predictors" / "p.safetensors")

    def foresee() -> tuple[bytes, Any]:
        found = load_predictors("p.safetensors")
        return predict(found, *data).tobytes(), (found.options, found.groups, found.facts)

    yield "predictors", Subject(folder / "predictors", {"p.safetensors": [library(foresee)]}, 150)


@pytest.mark.usefixtures("no_pictures")
def test_flipped_bits(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed, only = request.config.getoption("--campaign-seed"), request.config.getoption("--only-kinds")
    tally, subjects = Tally("flipped bits", request.config.getoption("--campaign-log")), dict(results(tmp_path, monkeypatch))
    subjects |= dict(of_traces(tmp_path)) | dict(studies(tmp_path, monkeypatch)) | dict(validations(tmp_path, monkeypatch))
    if find_spec("torch"):
        subjects |= dict(measurements(tmp_path, monkeypatch)) | dict(recordings(tmp_path))
    counts = shared_out(request.config.getoption("--flips"), {name: subject.weight for name, subject in subjects.items()})
    for name, subject in subjects.items():
        for number in range(counts[name] if not only or name in only else 0):
            monkeypatch.chdir(tmp_path)
            rng = random.Random(f"{seed} {name} {number}")
            kind, outcome, finding = case(subject, tmp_path / "work" / "here", rng, monkeypatch)
            tally.add(f"{name} {kind}", outcome, finding and f"case {number}: {finding}")
    tally.finish(capsys)


def case(subject: Subject, work: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """Flip a bit of one file, read it, and compare with what was read before."""
    patterns = {
        pattern: sorted(str(p.relative_to(subject.folder)) for p in subject.folder.rglob("*") if p.is_file() and
                        fnmatch(str(p.relative_to(subject.folder)), pattern))
        for pattern in subject.readers
    }  # fmt: skip
    pattern = rng.choice([one for one, files in patterns.items() if files])
    file, reader = rng.choice(patterns[pattern]), rng.choice(subject.readers[pattern])

    def fresh() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(subject.folder, work)
        monkeypatch.chdir(work)

    if reader not in subject.seen:
        fresh()
        found = in_child(reader)
        assert not isinstance(found, str) and found[0].code == 0, found
        subject.seen[reader] = found[1]
    fresh()
    data, bit = flipped((work / file).read_bytes(), rng)
    (work / file).write_bytes(data)
    found = in_child(reader)
    where = f"bit {bit} of {file}"
    if isinstance(found, str):
        return pattern, "crash", f"{where}: {found}"
    called, seen = found
    wrong = complaint(called)
    if called.code == 1:
        wrong = wrong or f"exit code 1: {called.err}"
    if called.code == 0 and seen != subject.seen[reader]:
        wrong = wrong or f"silently different: {difference(subject.seen[reader], seen)}; said {called.err!r}"
    if reader is AGAIN and file != f"out/{FILE}" and not any(kept == data for kept in content(work).values()):
        wrong = wrong or f"the changed file is gone; said {called.err!r}"
    outcome = "refused" if called.code == 2 else "the same" if called.code == 0 else f"exit {called.code}"
    return pattern, outcome, wrong and f"{where}: {wrong}"


def difference(a: Any, b: Any) -> str:
    """Show where two things that were seen differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = [name for name in sorted({*a, *b}, key=str) if a.get(name) != b.get(name)]
        return f"{names}: " + (difference(a.get(names[0]), b.get(names[0])) if names else "")
    a, b = str(a), str(b)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[max(0, at - 40) : at + 60]!r} -> {b[max(0, at - 40) : at + 60]!r}"
