"""The files of a result folder, read and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.core.files import read_verified
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.experiment.store import SUMMARY, read_summary

RUNS = "runs.parquet"
RESOLVED = "config.resolved.yaml"
TIMELINE = "timeline.json"


@dataclass(frozen=True)
class ResultFolder:
    """A result folder in memory.

    Attributes
    ----------
    path : Path
        The folder.
    version : str
        Of moesim, as written with the result.
    key : str or None
        Hash of all that decides the results.
    rows : list of dict
        One a run, as in ``runs.parquet``; at least one, each with a ``policy``.
    resolved : dict
        ``config.resolved.yaml``.
    resolved_text : str
        The same as written.
    events : list or None
        Trace events of ``timeline.json``, if there is one.
    """

    path: Path
    version: str
    key: str | None
    rows: list[dict[str, Any]]
    resolved: dict[str, Any]
    resolved_text: str
    events: list[Any] | None


def read_folder(path: Path) -> ResultFolder:
    """Read a result folder.

    Parameters
    ----------
    path : Path
        As `moesim run --out` wrote it.

    Returns
    -------
    ResultFolder
        All but its figures.

    Raises
    ------
    ConfigError
        If there is no such folder, it is not a result, or a file of it cannot be read.
    """
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing there"
        raise ConfigError(f"{path}: expected the folder of a result, got {got}; make one with moesim run --out")
    if not (path / SUMMARY).is_file():
        raise ConfigError(f"{path}: expected the folder of a result, got one without {SUMMARY}; make one with moesim run --out")
    summary = read_summary(path)
    rows = _rows(path / RUNS)
    listed = summary.get("runs") if isinstance(summary, dict) else None
    if not isinstance(listed, list) or len(listed) != len(rows):
        got = f"{len(listed)}" if isinstance(listed, list) else "none"
        raise ConfigError(f"{path / SUMMARY}: expected the {len(rows)} runs of {RUNS}, got {got}; run the experiment again")
    text, resolved = _resolved(path / RESOLVED)
    key = summary.get("key")
    return ResultFolder(
        path=path,
        version=str(summary.get("moesim", "unknown")),
        key=None if key is None else str(key),
        rows=rows,
        resolved=resolved,
        resolved_text=text,
        events=_events(path / TIMELINE),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(read_verified(path))).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: expected the runs of a result as Parquet, got: {_line(error)}; run it again") from None
    if not rows or "policy" not in rows[0]:
        got = "no runs" if not rows else "no such column"
        raise ConfigError(f"{path}: expected one row a run with its policy, got {got}; run the experiment again")
    return rows


def _resolved(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = read_verified(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected the configuration of a result, got: {_line(error)}; run it again") from None
    found = read_yaml_value(text, str(path))
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected the configuration of a result, got {type(found).__name__}; run it again")
    return text, found


def _events(path: Path) -> list[Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(read_verified(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected trace events as JSON, got: {_line(error)}; run it again") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise ConfigError(f"{path}: expected a list of trace events, got {type(events).__name__}; run it again")
    return events


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
