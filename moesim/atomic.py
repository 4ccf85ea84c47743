"""Files that are there completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
