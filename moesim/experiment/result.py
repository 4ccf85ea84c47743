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

from moesim.atomic import failing_as_one_line, locked
from moesim.errors import ConfigError

SUMMARY = "summary.json"
DATASET, RECORDS = "dataset", "records"  # what grows while runs are done, and stays when the rest is replaced
_NEW, _OLD = ".new.", ".old."  # beginnings of names; a killed process may leave some behind
_LEFT_BEHIND = (_NEW, _OLD, ".traces.", ".moesim.")


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
        place = folder if folder.is_dir() else next(one for one in folder.absolute().parents if one.exists())
        with tempfile.TemporaryDirectory(dir=place, prefix=".moesim."):
            pass  # only trying tells: permissions say nothing to root, nor of a read-only disk
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{folder}: expected a folder that can be written, got: {reason}; choose another with --out") from None
    if not exists:
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder for the results, got a file; choose another with --out")
    ours = (folder / SUMMARY).is_file() or (folder / DATASET).is_dir() or (folder / RECORDS).is_dir()
    if not ours and any(not path.name.startswith(_LEFT_BEHIND) for path in folder.iterdir()):
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


@contextmanager
def replace_files(folder: Path) -> Iterator[Path]:
    """Write the files of a result, but for what grows run by run, so that all of them come from one writer.

    Parameters
    ----------
    folder : Path
        The result folder; what is in it beside `DATASET` and `RECORDS` is replaced at the end. One process at a time does so.

    Yields
    ------
    Path
        An empty folder inside it, to be filled. If that fails, nothing changes. An earlier summary goes first, and the new one is
        put in place last: where there is one, the other files belong to it.

    Raises
    ------
    WriteError
        If the disk is full or fails.
    """
    with failing_as_one_line(folder, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder) as alone:
            if alone:
                _clear(folder)
            made = Path(tempfile.mkdtemp(dir=folder, prefix=_NEW))
            try:
                yield made
                _put_in_place(made, folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what killed processes left behind: nobody else writes here now."""
    for path in folder.iterdir():
        if path.name.startswith((_NEW, _OLD)):
            shutil.rmtree(path, ignore_errors=True)


def _put_in_place(made: Path, folder: Path) -> None:
    old = Path(tempfile.mkdtemp(dir=folder, prefix=_OLD))
    try:
        before = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        for name in sorted(set(before) - {DATASET, RECORDS}, key=lambda name: name != SUMMARY):
            os.replace(folder / name, old / name)
        for path in sorted(made.iterdir(), key=lambda path: path.name == SUMMARY):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(old, ignore_errors=True)


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
    if not path.is_file() and (folder / DATASET).is_dir():
        raise ConfigError(f"{path}: expected a summary, got an unfinished sweep; run the same command again to go on")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or not isinstance(summary.get("runs"), list):
            raise ValueError("no runs in it")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected the summary of a result, got: {' '.join(str(error).split())}") from None
    return summary
