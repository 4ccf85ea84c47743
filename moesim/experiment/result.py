"""Result folders that are there completely or not at all, and reading them back."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError

SUMMARY = "summary.json"


def check_folder(folder: Path) -> None:
    """Make sure that a folder can and may be written: it does not exist, is empty, or holds an earlier result.

    Parameters
    ----------
    folder : Path
        Where results should go.

    Raises
    ------
    ConfigError
        If it is a file, or a folder with anything else in it, which would be lost; or if it cannot be made.
    """
    try:
        exists = folder.exists()
        above = next(one for one in folder.absolute().parents if one.exists())
        with tempfile.TemporaryDirectory(dir=above, prefix=".moesim."):
            pass  # only trying tells: permissions say nothing to root, nor of a read-only disk
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{folder}: expected a folder that can be written, got: {reason}; choose another with --out") from None
    if not exists:
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder for the results, got a file; choose another with --out")
    if any(folder.iterdir()) and not (folder / SUMMARY).is_file():
        raise ConfigError(
            f"{folder}: expected a new folder or an earlier result, got a folder with other files; choose another with --out"
        )


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Write a folder so that no reader ever sees a part of it.

    Parameters
    ----------
    folder : Path
        Its final place; an earlier result there is replaced at the end.

    Yields
    ------
    Path
        An empty folder beside it, to be filled. If that fails, nothing changes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        made.chmod(0o755)  # mkdtemp makes it private
        yield made
        if folder.exists():
            before = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            os.replace(folder, before / "old")
            os.replace(made, folder)
            shutil.rmtree(before)
        else:
            os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_summary(folder: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a result folder.

    Parameters
    ----------
    folder : Path
        A result.

    Returns
    -------
    dict
        ``moesim`` (version), ``key`` and ``runs``: one dict of settings, labels and metrics a run.

    Raises
    ------
    ConfigError
        If there is none.
    """
    path = folder / SUMMARY
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected the summary of a result, got: {' '.join(str(error).split())}") from None
    return summary
