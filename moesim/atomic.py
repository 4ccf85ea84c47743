"""Files that are there completely or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from moesim.errors import InputError


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write a file so that no reader ever sees a part of it.

    Parameters
    ----------
    path : str or Path
        Where to; its folder is made if need be, and what is there is replaced.
    data : bytes
        The whole content.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    InputError
        As of `writing`.
    """
    with writing(path) as file:
        file.write(data)
    return Path(path)


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place only when the block has ended without an error.

    Parameters
    ----------
    path : str or Path
        As for `write_bytes`.

    Yields
    ------
    file object
        Of a hidden file in the same folder.

    Raises
    ------
    InputError
        If no file can be written there.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"{target}: expected a file that can be written, got: {error.strerror}; choose another place") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
