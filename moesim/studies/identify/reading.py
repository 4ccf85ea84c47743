"""Reads observed speeds: a table of ours, or what llama-bench wrote."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from moesim.core.data import shipped
from moesim.core.gate import TABLE, read_text
from moesim.errors import ConfigError, unknown_name
from moesim.studies.identify.llama_bench import bench_rows, is_bench
from moesim.studies.identify.observations import COLUMNS, REQUIRED, Observation, check_rows, observation


def read_observations(path: Path, models: Sequence[str] = ()) -> list[Observation]:
    """Read observed speeds; the format is told by the content.

    Parameters
    ----------
    path : Path
        A CSV table with the columns of `Observation` (those without a default are required), or what ``llama-bench -o json``,
        ``-o jsonl`` or ``-o csv`` wrote.
    models : sequence of str
        What the rows of llama-bench may be of: names, or ``TYPE=NAME``.

    Returns
    -------
    list of Observation

    Raises
    ------
    ConfigError
        One line with place, expected, got and remedy.
    """
    path = shipped(path)
    text = read_text(path, TABLE, "a table of observed speeds", encoding="utf-8-sig")
    found = bench_rows(text, path, models) if is_bench(text) else list(_table(text, path))
    if not found:
        raise ConfigError(f"{path}: expected at least one observation, got none; add a row")
    check_rows(found)
    return found


def _table(text: str, path: Path) -> list[Observation]:
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"{path}: expected a table of observed speeds, got: {error}; check its quotes") from None
    head = [name.strip() for name in rows[0]] if rows else []
    for name in head:
        if name not in COLUMNS:
            raise ConfigError(f"{path}:1: {unknown_name('column', name, COLUMNS)}")
    missing = [name for name in REQUIRED if name not in head]
    if missing:
        raise ConfigError(f"{path}:1: expected the column {missing[0]}, got {','.join(head) or 'nothing'}; add it")
    if len(set(head)) != len(head):
        raise ConfigError(f"{path}:1: expected each column once, got {','.join(head)}; remove one")
    found = []
    for number, cells in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        place = f"{path}:{number}"
        if len(cells) != len(head):
            raise ConfigError(f"{place}: expected {len(head)} fields, got {len(cells)}; quote fields that contain a comma")
        texts = {name: cell.strip() for name, cell in zip(head, cells, strict=True)}
        kept = {name: cell for name, cell in texts.items() if cell or name in REQUIRED}
        found.append(observation({"row": str(number - 1), **kept, "place": place}))
    return found
