"""No command replaces, removes or renames a file that moesim did not write, whatever its name and wherever it lies."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import yaml

from moesim.cli.main import main
from moesim.core.files import FILE, Manifest, OutputFolder, State, check_own_folder, check_verified, checked_line, read_verified
from moesim.errors import ConfigError, InputError
from moesim.experiment.store import DATASET, RECORDS
from tests.cli.output_kit import COMMANDS, everything
from tests.experiment.experiment_kit import small
from tests.experiment.sweep_kit import lines


# -------------------------------------------------------------------------------------------------------------- the list of files
def test_the_list_tells_what_stands_at_a_path(tmp_path: Path):
    out = OutputFolder(tmp_path / "out", "run")
    out.put({"a": b"1", "deep/b": b"2", "c": b"3"})
    (tmp_path / "out" / "c").write_bytes(b"4")
    (tmp_path / "out" / "d").write_bytes(b"5")
    (tmp_path / "out" / "link").symlink_to(tmp_path / "out" / "deep")
    found = Manifest(tmp_path / "out")
    assert (found.owner, found.paths(), found.paths(under="deep/"), found.paths(by="plot")) == (
        "run", ["a", "c", "deep/b"], ["deep/b"], [],
    )  # fmt: skip
    states = {name: found.state(name) for name in ("a", "deep/b", "c", "d", "e", "link/b", "a/b", "deep")}
    assert states == {
        "a": State.OURS, "deep/b": State.OURS, "c": State.CHANGED, "d": State.FOREIGN, "e": State.ABSENT, "link/b": State.FOREIGN,
        "a/b": State.FOREIGN, "deep": State.FOREIGN,
    }  # fmt: skip


def test_the_list_has_the_same_bytes_whatever_came_before(tmp_path: Path):
    one, other = OutputFolder(tmp_path / "one", "run"), OutputFolder(tmp_path / "other", "run")
    one.put({"a": b"1", "b": b"2"})
    other.put({"b": b"0", "c": b"3"})
    other.put({"b": b"2"})
    other.put({"a": b"1"}, replace=["c"])
    assert everything(tmp_path / "one") == everything(tmp_path / "other")


def test_a_path_out_of_the_folder_is_not_believed(tmp_path: Path):
    out = OutputFolder(tmp_path / "out", "run")
    out.put({"a": b"1"})
    (tmp_path / "mine").write_text("x")
    with (tmp_path / "out" / FILE).open("ab") as file:
        file.write(checked_line({"path": "../mine", "sha256": None, "by": "run"}))
    assert Manifest(tmp_path / "out").paths() == ["a"]
    out.replace({})
    assert (tmp_path / "mine").read_text() == "x"


@pytest.mark.parametrize("name", ["a", "deep/b"])
def test_a_list_with_a_damaged_line_never_makes_a_foreign_file_ours(name: str, tmp_path: Path):
    """Any bit of the list may flip: a file is then ours as before, or not at all."""
    out, rng = OutputFolder(tmp_path / "out", "run"), random.Random(3)
    out.put({"a": b"1", "deep/b": b"2"})
    place = tmp_path / "out" / FILE
    data = place.read_bytes()
    for _ in range(300):
        at = rng.randrange(len(data))
        place.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        found = Manifest(tmp_path / "out")
        assert set(found.paths()) <= {"a", "deep/b"}
        assert found.state(name) in (State.OURS, State.FOREIGN)
        assert len(found.paths()) + found.marked < 3, "one line is lost"


# -------------------------------------------------------------------------------------------------------------------- writing
def test_a_foreign_file_in_the_way_stops_everything(tmp_path: Path):
    out = OutputFolder(tmp_path, "plot", owned=False)
    (tmp_path / "b").write_text("mine")
    with pytest.raises(
        InputError, match="b: expected nothing there, or what moesim wrote, got a file that moesim did not write; mo"
    ):
        out.put({"a": b"1", "b": b"2"})
    assert set(everything(tmp_path)) == {"b", FILE}
    assert out.put({"a": b"1"}) == [tmp_path / "a"]
    (tmp_path / "a").write_text("edited")
    with pytest.raises(InputError, match="a file that moesim wrote and that was changed since; move it away"):
        out.put({"a": b"2"})
    assert (tmp_path / "a").read_text() == "edited"


def test_a_link_on_the_way_is_named(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "deep").symlink_to("elsewhere")
    for put in (OutputFolder(tmp_path, "plot", owned=False).put, OutputFolder(tmp_path, "plot", owned=False).check_free):
        with pytest.raises(InputError, match=r"deep: expected a folder or nothing there, got a link to elsewhere; move it away"):
            put({"deep/a": b"1"})
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_changed_file_of_a_result_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = OutputFolder(tmp_path / "out", "run")
    for n in range(3):
        out.replace({"a": b"1", "last": b"x%d" % n}, last="last")
        (tmp_path / "out" / "a").write_text(f"mine {n}")
    assert {name: text for name, text in everything(tmp_path / "out").items() if name != FILE} == {
        "a": b"mine 2", "last": b"x2", "_changed.a": b"mine 0", "_changed.2.a": b"mine 1",
    }  # fmt: skip
    assert [line.rpartition("kept as ")[2] for line in lines(capsys)] == ["_changed.a", "_changed.2.a"]
    assert Manifest(tmp_path / "out").state("_changed.a") is State.FOREIGN


def test_a_folder_that_cannot_be_had(tmp_path: Path):
    for name, make in {
        "file": lambda path: path.write_text("x"),
        "dangling": lambda path: path.symlink_to("nowhere"),
        "other": lambda path: (path.mkdir(), (path / "thesis.tex").write_text("x")),
        "other command": lambda path: OutputFolder(path, "whatif").put({"a": b"1"}),
        "named files": lambda path: OutputFolder(path, "plot", owned=False).put({"a": b"1"}),
        "old": lambda path: (
            [(path / name).mkdir(parents=True) for name in ("dataset",)] + [(path / "summary.json").write_text("{}")]
        ),
    }.items():
        make(tmp_path / name)  # type: ignore[no-untyped-call]
        before = everything(tmp_path)
        with pytest.raises(ConfigError) as error:
            check_own_folder(tmp_path / name, "run")
        ours = "expected a new folder or a result of `moesim run`, got"
        expected = {
            "file": f"expected a folder that can be written, got: {tmp_path / name} is a file; ",
            "dangling": f"expected a folder that can be written, got: {tmp_path / name} is a link to nowhere, where nothing is; ",
            "other": f"{ours} a folder with other files; ",
            "other command": f"{ours} one of `moesim whatif`; ",
            "named files": f"{ours} a folder with other files; ",
            "old": f"{ours} a result of an older version, which has no list of its files ({FILE}); move it away, or ",
        }[name]
        assert str(error.value) == f"{tmp_path / name}: {expected}choose another with --out"
        assert everything(tmp_path) == before
    for name in ("new", "empty", "ours"):
        if name != "new":
            (tmp_path / name).mkdir()
        if name == "ours":
            OutputFolder(tmp_path / name, "run").put({"a": b"1"})
        check_own_folder(tmp_path / name, "run")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    check_own_folder(tmp_path / "link", "run")


def test_a_file_that_is_read_back_must_hold_what_was_written(tmp_path: Path):
    out = OutputFolder(tmp_path / "out", "run")
    out.put({"summary.json": b"{}", "frames/a.parquet": b"x"})
    assert read_verified(tmp_path / "out" / "summary.json") == b"{}"
    check_verified(tmp_path / "out" / "frames" / "a.parquet")
    (tmp_path / "out" / "frames" / "a.parquet").write_bytes(b"y")
    with pytest.raises(InputError, match=r"a\.parquet: expected what moesim wrote, got another content"):
        check_verified(tmp_path / "out" / "frames" / "a.parquet")
    (tmp_path / "elsewhere").write_bytes(b"z")
    assert read_verified(tmp_path / "elsewhere") == b"z", "no list says what it should hold"


# ---------------------------------------------------------------------------------------------------------------- every command
RESULT = {"cache": {"ratio": [0.25, 0.5]}, "frames": True, "plots": ["decode_speed"]}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with an experiment, its trace and a result."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "small.yaml").write_text(yaml.safe_dump(small(folder, **RESULT)))
    assert main(["run", str(folder / "small.yaml"), "--out", str(folder / "result"), "--jobs", "1"]) == 0
    return folder


def litter(folder: Path, rng: random.Random) -> dict[str, bytes]:
    """Strew foreign files, with names like those of moesim among them, into a folder and the folders in it; give them."""
    known = [path.name for path in folder.rglob("*") if path.is_file()] + ["summary.json", "NOTES.md", "x.arrow", ".hidden"]
    places = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    made = {}
    for number in range(12):
        place = rng.choice(places)
        if rng.random() < 0.3:
            place = place / rng.choice(["paper", DATASET, RECORDS, "frames", ".new.abc", "plots", "_x"])
            if place.exists() and not place.is_dir():
                continue
            place.mkdir(exist_ok=True)
        name = rng.choice(known)
        name = rng.choice(
            [name, f".{name}", f"_{name}", f"{name}.{number}", f"run-{number:032x}.parquet", f"{number:032x}.arrow"]
        )
        path = place / name
        if not path.exists():
            path.write_bytes(rng.randbytes(rng.randrange(40)))
            made[str(path.relative_to(folder))] = path.read_bytes()
    return made


SLOW = {"papers", "validate"}  # seconds each; they write as the others do


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in COMMANDS], ids=str
)
def test_foreign_files_survive_every_command(
    command: str, bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Into an earlier result of the command, and once more over what that has left."""
    _slim(command, monkeypatch)
    monkeypatch.chdir(bench)
    rng, out = random.Random(command), tmp_path / "out"
    arguments = [word.replace("OUT", str(out)) for word in COMMANDS[command]]
    assert main(arguments) == 0
    foreign = litter(out, rng)
    before = everything(bench)
    for _ in range(2):
        code = main(arguments)
        err = capsys.readouterr().err
        assert code in (0, 2), err
        found = everything(out)
        assert {name: found.get(name) for name in foreign} == foreign, err
        foreign |= litter(out, rng)
    assert everything(bench) == before, "what a command reads stays as it is"


@pytest.mark.parametrize("command", ["run", "compare", "whatif", "regret", "validate", "papers"])
def test_a_folder_with_other_files_is_refused(
    command: str, bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(bench)
    out = tmp_path / "thesis"
    for name in ("dataset/x", "records/y", "summary.json", "thesis.tex"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    before = everything(out)
    assert main([word.replace("OUT", str(out)) for word in COMMANDS[command]]) == 2
    (line,) = lines(capsys)
    assert line.startswith(f"moesim: {out}: expected a new folder or a result of `moesim ") and line.endswith(
        "another with --out"
    )
    assert everything(out) == before


def _slim(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the commands that compute or draw for long short: which files they write matters here, not what is in them."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, buffer, **_: buffer.write(b"a picture"))
    if command == "validate":
        monkeypatch.setattr(
            "moesim.studies.validation.public.predict", lambda check, folder: {"predicted": check.value, "label": "assumed"}
        )
    if command == "stats":
        from moesim.plots import trace_report

        monkeypatch.setattr(trace_report, "FIGURES", {"popularity": trace_report.FIGURES["popularity"]})


# --------------------------------------------------------------------------------------------------- files of a result, read back
@pytest.mark.parametrize(
    "name", ["summary.json", "config.resolved.yaml", "runs.parquet", "timeline.json", "plots/decode_speed.txt"]
)
def test_a_result_that_was_changed_is_not_reported(
    name: str, bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(bench / "result", tmp_path / "out")
    place = tmp_path / "out" / name
    data = place.read_bytes()
    place.write_bytes(data[:-2] + b" " + data[-2:])
    before = everything(tmp_path)
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == 2
    (line,) = lines(capsys)
    assert line == (
        f"moesim: {place}: expected what moesim wrote, got another content (the sha256 in {FILE} differs); "
        "run the command that wrote it again"
    )
    assert everything(tmp_path) == before


def test_reading_commands_change_nothing(bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Damaged records are no records: the run is simulated once more."""
    out = tmp_path / "out"
    shutil.copytree(bench / "result", out)
    for path in (out / RECORDS).iterdir():
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    before = everything(tmp_path)
    assert main(["diff", f"{out}:0", f"{out}:1"]) == 0
    said = lines(capsys)
    assert len(said) == 2 and all(
        "changed since moesim wrote it, so that it counts as not there; the folder stays as it is" in line for line in said
    )
    assert everything(tmp_path) == before


def test_a_name_cannot_hold_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    for name in ("../../escaped", "/tmp/x", "a/b", "a\\b", "..", ".hidden", "C:x", "a\nb", "a\x1b[2J", " a", "x" * 101):
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(small(tmp_path, name=name)))
        assert main(["run", "x.yaml"]) == 2
        (line,) = lines(capsys)
        if "\x1b" in name:  # refused wherever it stands
            assert line.startswith("moesim: x.yaml: expected text that can be shown")
        else:
            assert line.startswith("moesim: x.yaml: name: expected at most 100 characters that name a folder") and "--out" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.safetensors", "x.yaml"]
