"""A disk that is full while a command writes: one line, exit code 1, and the same command again does all that it should."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.cli.main import main
from tests.cli.output_kit import everything
from tests.experiment.experiment_kit import small, write_trace

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "small.yaml", "--out", "out/r", "--jobs", "1"),
    "whatif": ("whatif", "small.yaml", "--no-next", "--vary", "link.bytes_per_s x2", "--jobs", "1", "--out", "out/w"),
    "plot": ("plot", "decode_speed", "result", "--out", "out/p"),
    "report": ("report", "result", "--out", "out/r.html"),
    "profile new": ("profile", "new", "mybox", "--pcie", "25GB/s", "--cpu", "1.5ms + 400us/token", "--gpu", "200us", "--vram",
                    "12GiB", "--ram", "64GiB", "--out", "out/mybox.yaml"),
    "profile detect": ("profile", "detect", "--out", "out/here.yaml"),
    "import": ("trace", "import", "t.csv", "--out", "out/t.safetensors"),
    "calibrate": ("trace", "calibrate", "plain.safetensors", "--share", "0.3", "--out", "out/c.safetensors"),
    "split": ("trace", "split", "small.safetensors", "--out", "out/s.safetensors"),
    "synthesize": ("trace", "synthesize", "--parameters", "mixtral-8x7b", "--requests", "1", "--prompt", "2", "--decode", "2",
                   "--out", "out/s.safetensors"),
    "export": ("trace", "export", "./small.safetensors", "--format", "csv", "--out", "out/e.csv"),
    "export of Parquet": ("trace", "export", "./small.safetensors", "--format", "parquet", "--out", "out/e.parquet"),
    "export for libCacheSim": ("trace", "export", "./small.safetensors", "--format", "oracleGeneral", "--object-size", "9",
                               "--out", "out/e.bin"),
}  # fmt: skip

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(32)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with what the commands read, and an empty one for what they write; pictures are not drawn, but written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moesim.plots.style.rendered", lambda _, suffixes=("png", "pdf"): dict.fromkeys(suffixes, PICTURE))
    write_trace(tmp_path / "small.safetensors", n_layers=4)
    write_trace(tmp_path / "plain.safetensors", n_layers=4, calibration=False, signals={})
    model = {"base": "mixtral-8x7b", "expert_bits": 4, "n_layers": 4}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small(tmp_path, model=model, policies=["lru"], timeline=None)))
    assert main(["run", "small.yaml", "--out", "result", "--jobs", "1"]) == 0
    assert main(["trace", "export", "./small.safetensors", "--format", "csv", "--out", "t.csv"]) == 0
    (tmp_path / "out").mkdir()
    capsys.readouterr()
    return tmp_path


class _Disk:
    """A disk below a folder that has room for a number of writes, as the functions through which moesim writes see it."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room, self.n = folder, room, 0

    def take(self, handle: int) -> None:
        """Count a write, if it is to a file of this disk."""
        try:
            path = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            return
        if path.startswith(f"{self.folder}/"):
            self.n += 1
            if self.n > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full(folder: Path, room: int) -> Iterator[_Disk]:
    """Let writes below a folder fail but for the first ones: of files opened by Python, of handles, and room for mapped files."""
    disk = _Disk(folder, room)
    fdopen, write, allocate, real_open = os.fdopen, os.write, os.posix_fallocate, Path.open

    def watched(file: Any) -> Any:
        return _Watched(file, disk) if getattr(file, "writable", bool)() else file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdopen", lambda handle, *more, **options: watched(fdopen(handle, *more, **options)))
        patch.setattr(Path, "open", lambda self, *more, **options: watched(real_open(self, *more, **options)))
        patch.setattr(os, "write", lambda handle, data: (disk.take(handle), write(handle, data))[1])
        patch.setattr(os, "posix_fallocate", lambda handle, *span: (disk.take(handle), allocate(handle, *span))[1])
        yield disk


class _Watched:
    """A file whose writes a disk counts."""

    def __init__(self, file: Any, disk: _Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        self._disk.take(self._file.fileno())
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux which file a handle is of")
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] if one == "report" else []) for one in COMMANDS])
def test_the_same_command_after_a_full_disk(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    out, arguments = here / "out", list(COMMANDS[name])
    outside = {path: data for path, data in everything(here).items() if not path.startswith("out")}
    with full(out, 10**9) as disk:
        assert main(arguments) == 0
    wanted = sorted(everything(out))
    n = disk.n
    assert n, "the command writes there"
    refusals = 0
    for room in sorted({0, n // 2, n - 1}):
        empty(out)
        capsys.readouterr()
        with full(out, room):
            code = main(arguments)
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moesim: ")]
        if code == 0:  # the list of files could not be tidied up
            assert sorted(everything(out)) == wanted
            continue
        assert code == 1, (room, said)
        assert len(said) == 1 and "No space left on device; make room, and run the same command again" in said[0]
        left = [path for path in everything(out) if Path(path).name.startswith(".") and not path.endswith("manifest.jsonl")]
        assert not left, "nothing half-made"
        refusals += 1
        assert main(arguments) == 0, capsys.readouterr().err
        assert sorted(everything(out)) == wanted
        assert {path: data for path, data in everything(here).items() if not path.startswith("out")} == outside
    assert refusals


def empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_full_disk_of_scratch_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What is full may be the folder of scratch files, of which no command knows."""

    def fail(verb: str | None) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/a")

    monkeypatch.setattr("moesim.cli.main._command", fail)
    assert main(["list", "models"]) == 1
    assert capsys.readouterr().err == (
        "moesim: /scratch/a: expected to write it, got: No space left on device; make room, and run the same command again\n"
    )
