"""Frames of a run: rows by step and by layer, and Parquet files whose bytes depend on their content alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.atomic import write_bytes
from moesim.metrics.causes import CAUSES

if TYPE_CHECKING:
    from moesim.experiment.runner import Outcome


def write_frame(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as Parquet.

    Parameters
    ----------
    path : Path
        The file.
    rows : sequence of mapping
        Columns are the keys in the order in which they first occur; what a row lacks is null. A column of integers and
        floats is one of floats.

    Returns
    -------
    Path
        The file.
    """
    columns = dict.fromkeys(key for row in rows for key in row)
    arrays = {key: _column([row.get(key) for row in rows]) for key in columns}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(arrays), sink, compression="zstd")
    return write_bytes(path, sink.getvalue().to_pybytes())


def _column(values: list[Any]) -> Any:
    if any(isinstance(value, float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values)


def step_frame(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Give one row a step: times, tokens, and time by cause.

    Parameters
    ----------
    outcome : Outcome
        With records.

    Yields
    ------
    dict
        ``run``, ``policy``, the fields of `StepRecord` (ns), and ``time_<cause>_ns``.
    """
    records, split = outcome.records, outcome.split
    assert records is not None and split is not None
    for step in sorted(records.steps, key=lambda s: s.step):
        causes = split.select({step.step})
        yield {**_run(outcome), **step._asdict(), **{f"time_{cause}_ns": causes[cause] for cause in CAUSES}}


def layer_frame(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Give one row a layer visit: times, lookups, hits, and time by cause.

    Parameters
    ----------
    outcome : Outcome
        With records.

    Yields
    ------
    dict
        ``run``, ``policy``, ``step``, ``layer``, ``begin`` and ``end`` (ns), ``n_active`` and ``n_hits`` (lookups of all
        micro-batches), and ``time_<cause>_ns``.
    """
    records, split = outcome.records, outcome.split
    assert records is not None and split is not None
    lookups: dict[tuple[int, int], tuple[int, int]] = {}
    for lookup in records.lookups:
        active, hits = lookups.get((lookup.step, lookup.layer), (0, 0))
        lookups[lookup.step, lookup.layer] = (active + len(lookup.active), hits + sum(lookup.hits))
    for window, ns in zip(split.windows, split.ns.tolist(), strict=True):
        if window.layer < 0:
            continue
        active, hits = lookups.get((window.step, window.layer), (0, 0))
        yield {
            **_run(outcome), "step": window.step, "layer": window.layer, "begin": window.begin, "end": window.end,
            "n_active": active, "n_hits": hits, **{f"time_{cause}_ns": n for cause, n in zip(CAUSES, ns, strict=True)},
        }  # fmt: skip


def _run(outcome: Outcome) -> dict[str, Any]:
    return {"run": outcome.row["run"], "policy": outcome.row["policy"]}
