"""The result folder of an experiment: names of its files, and reading it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from moesim.core.manifest import read_verified
from moesim.errors import ConfigError, InputError

OWNER: Final = "run"
"""The command whose result it is; `compare` and `replay` write the same."""
SUMMARY: Final = "summary.json"
DATASET: Final = "dataset"
RECORDS: Final = "records"
GROWING: Final = (f"{DATASET}/", f"{RECORDS}/")
"""What grows while runs are done, and stays when the rest is replaced."""


def read_summary(folder: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a result folder.

    Gives ``moesim`` (version), ``key`` and ``runs``: one dict of settings, labels and metrics a run.
    """
    path = folder / SUMMARY
    if not path.is_file() and (folder / DATASET).is_dir():
        raise ConfigError(f"{path}: expected a summary, got an unfinished sweep; run the same command again to go on")
    try:
        summary: dict[str, Any] = json.loads(read_verified(path))
        if not isinstance(summary, dict) or not isinstance(summary.get("runs"), list):
            raise ValueError("no runs in it")
        for number, row in enumerate(summary["runs"]):
            _check_row(row, number)
    except InputError as error:
        raise ConfigError(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected the summary of a result, got: {' '.join(str(error).split())}; run it again"
        ) from None
    return summary


def _check_row(row: object, number: int) -> None:
    """Raise `ValueError` unless a row maps names to plain values, and says which run it is."""
    if not isinstance(row, dict):
        raise ValueError(f"runs[{number}] is no mapping")
    if not (isinstance(row.get("policy"), str) and type(row.get("run")) is int):
        raise ValueError(f"runs[{number}] has no number of its run or no policy")
    for name, value in row.items():
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"runs[{number}].{name} is no plain value")
