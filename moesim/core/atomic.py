"""Files that are there completely or not at all, folders that one process at a time works in, and disks that fail."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from moesim.errors import InputError, WriteError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_DISKS = (*FULL, errno.EIO, errno.EROFS, errno.ESTALE)  # what writing to an open file can end in


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write a file so that no reader ever sees a part of it."""
    with writing(path) as file:
        file.write(data)
    return Path(path)


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place only when the block has ended without an error."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        if error.errno in FULL:
            raise write_error(target, error) from None
        raise InputError(f"{target}: expected a file that can be written, got: {error.strerror}; choose another place") from None
    try:
        with failing_as_one_line(target, Path(name)):
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(name, 0o666 & ~_umask())  # mkstemp makes it private
            os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def failing_as_one_line(target: Path, inside: Path) -> Iterator[None]:
    """Turn what a disk does wrong in a block into a `WriteError`; errors that are about other files stay what they are."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            ours = error.errno in _OF_DISKS
        else:
            ours = not isinstance(error.filename, int) and Path(os.fsdecode(error.filename)).is_relative_to(inside)
        if not ours:
            raise
        raise write_error(_named(error, target, inside), error) from None


def _named(error: OSError, target: Path, inside: Path) -> Path:
    """Give the file in a folder that an error is about, unless it is one in the making, whose name says nothing."""
    if target != inside or error.filename is None:
        return target
    path = Path(os.fsdecode(error.filename))
    return target if path.name.startswith(".") else path


def write_error(target: Path, error: OSError | InputError) -> WriteError:
    """Say in one line that a file could not be written, why, and what helps."""
    full = isinstance(error, OSError) and error.errno in FULL
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).removeprefix(f"{target}: ")
    remedy = "make room" if full else "mend that"
    return WriteError(f"{target}: expected to write it, got: {reason}; {remedy}, and run the same command again")


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Wait until no other process of this machine works in a folder, and keep them waiting; a killed one keeps nobody waiting."""
    handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        yield handle is not None and _lock(handle, shared)
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int, shared: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
