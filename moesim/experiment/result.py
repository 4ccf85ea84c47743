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
DATASET, RECORDS = "dataset", "records"  # what grows while runs are done, and stays when the rest is replaced


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
    if any(folder.iterdir()) and not (folder / SUMMARY).is_file() and not (folder / DATASET).is_dir():
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
    """Write the files of a result, but for what grows run by run, so that a reader hardly ever sees old and new ones together.

    Parameters
    ----------
    folder : Path
        The result folder; what is in it beside `DATASET` and `RECORDS` is replaced at the end.

    Yields
    ------
    Path
        An empty folder inside it, to be filled. If that fails, nothing changes. The summary is put in place last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder, prefix=".new."))
    try:
        yield made
        old = Path(tempfile.mkdtemp(dir=folder, prefix=".old."))
        names = {path.name for path in made.iterdir()}
        try:
            for path in folder.iterdir():
                if path.name not in (*names, DATASET, RECORDS) and not path.name.startswith("."):
                    os.replace(path, old / path.name)
            for name in sorted(names, key=lambda name: name == SUMMARY):
                if (folder / name).is_dir():
                    os.replace(folder / name, old / name)
                os.replace(made / name, folder / name)
        finally:
            shutil.rmtree(old, ignore_errors=True)
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
    if not path.is_file() and (folder / DATASET).is_dir():
        raise ConfigError(f"{path}: expected a summary, got an unfinished sweep; run the same command again to go on")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or not isinstance(summary.get("runs"), list):
            raise ValueError("no runs in it")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected the summary of a result, got: {' '.join(str(error).split())}") from None
    return summary
