"""Files that a command, or a function of the same name, writes: checked before it does any work."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moesim.core.files import Manifest, OutputFolder, State, listing, nearest_folder
from moesim.errors import ConfigError, WriteError
from moesim.trace.format import is_trace


def check_out(path: Path, *, suffix: str | None = None, overwrite: bool = False, option: str = "--out") -> None:
    """Check that a file can be written; nothing is made or left behind."""
    try:
        if path.is_dir():
            example = path / f"NAME{suffix or ''}"
            raise ConfigError(f"{option} {path}: expected a file to write, got a folder; add a name such as {example}")
        if suffix is not None and path.suffix != suffix:
            raise ConfigError(f"{option} {path}: expected a name that ends in {suffix}, got '{path.name}'; rename it")
        if path.is_symlink():
            raise ConfigError(f"{option} {path}: expected nothing there, got a link to {os.readlink(path)}; choose another name")
        if path.exists() and not overwrite:
            raise ConfigError(f"{option} {path}: expected nothing there, got a file; add --overwrite or choose another name")
        if path.exists():
            _check_replaceable(path, option)
        _try_writing(nearest_folder(path.parent), path.name)
        Manifest(path.parent)  # the file will be listed there
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: expected a file that can be written, got: {error.strerror}; choose another"
        ) from None


def _check_replaceable(path: Path, option: str) -> None:
    found = listing(path)
    ours = found is not None and found[0].state(found[1]) is State.OURS
    if found is not None and ours and found[0].part_of_result(found[1]):
        got = f"a file of the result of `moesim {found[0].owner}`"
        raise ConfigError(f"{option} {path}: expected nothing there, got {got}; choose another name")
    if not (ours or is_trace(path)):
        raise ConfigError(
            f"{option} {path}: expected nothing there, or what moesim wrote, got a file that it did not write, or that was "
            "changed since; move it away or choose another name"
        )


def check_out_folder(path: Path, *, option: str) -> None:
    """Check that files can be written into a folder, whether it is there yet or not."""
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{option} {path}: expected a folder, got a file; choose another name")
        _try_writing(nearest_folder(path), "file")
        Manifest(path)
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: expected a folder that can be written, got: {error.strerror}; choose another"
        ) from None


def note_written(paths: Iterable[Path], command: str) -> None:
    """List files written by other means, so that they may be replaced later."""
    for path in paths:
        OutputFolder(path.parent, command, owned=False).note([path.name])


@contextmanager
def all_or_none(*paths: Path) -> Iterator[None]:
    """Remove what a block has written if it cannot write all of these files."""
    before = {path: _identity(path) for path in paths}
    try:
        yield
    except WriteError:
        for path in paths:
            if _identity(path) != before[path]:
                with suppress(OSError):
                    path.unlink()
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _try_writing(folder: Path, name: str) -> None:
    """Write a temporary file, the only sure test: root passes all checks of permissions."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}."):
        pass
