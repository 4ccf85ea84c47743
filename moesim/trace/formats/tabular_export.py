"""A trace as CSV or Parquet: one line for each expert of a token in a layer.

Weights are exact: float16 as float32. What a table cannot hold (number of experts, model, label, the rest of
the header) is in the metadata of the Parquet file, and in ``NAME.csv.json`` next to ``NAME.csv``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core import files
from moesim.trace import Trace
from moesim.trace.formats.tables import FACTS_KEY, facts_path

if TYPE_CHECKING:
    import pyarrow as pa

_CELLS = 2**20  # lines in memory at once
_PHASES = ("prefill", "decode")


def export_csv(trace: Trace, out: Path) -> list[Path]:
    """Write a CSV and the file next to it.

    Parameters
    ----------
    trace : Trace
    out : Path
        Where to; complete or not there at all.

    Returns
    -------
    list of Path
        The CSV, and the file next to it.
    """
    from pyarrow import csv

    schema = _schema(trace)
    with files.writing(out) as file:
        options = csv.WriteOptions(quoting_style="none")
        with csv.CSVWriter(file, schema, write_options=options) as writer:
            for batch in _batches(trace, schema):
                writer.write_batch(batch)
        beside = files.write_bytes(facts_path(out), (_facts(trace) + "\n").encode())
    return [out, beside]


def export_parquet(trace: Trace, out: Path) -> list[Path]:
    """Write a Parquet file; parameters and result as of `export_csv`."""
    from pyarrow import parquet

    schema = _schema(trace).with_metadata({FACTS_KEY: _facts(trace)})
    with files.writing(out) as file, parquet.ParquetWriter(file, schema) as writer:
        for batch in _batches(trace, schema):
            writer.write_batch(batch)
    return [out]


def _facts(trace: Trace) -> str:
    header = {key: value for key, value in trace.header.items() if key not in ("sha256", "signals")}
    return json.dumps({FACTS_KEY: {**header, "n_rows": trace.n_rows}}, sort_keys=True)


def _schema(trace: Trace) -> pa.Schema:
    import pyarrow as pa

    names = pa.dictionary(pa.int8(), pa.string())
    fields = [("request", pa.int32()), ("position", pa.int32()), ("phase", names), ("layer", pa.uint16())]
    fields += [("rank", pa.uint16()), ("expert", pa.uint16())]
    fields += [] if trace.recorded_weights is None else [("weight", pa.float32())]
    return pa.schema(fields)


def _batches(trace: Trace, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    n_layers, top_k = trace.n_layers, trace.top_k
    step = max(1, _CELLS // (n_layers * top_k))
    layers = np.repeat(np.arange(n_layers, dtype=np.uint16), top_k)
    ranks = np.tile(np.arange(top_k, dtype=np.uint16), n_layers)
    for start in range(0, trace.n_rows, step):
        rows = slice(start, start + step)
        n = len(trace.request[rows])
        columns: list[Any] = [np.repeat(values[rows], n_layers * top_k) for values in (trace.request, trace.position)]
        codes = np.repeat(trace.phase[rows], n_layers * top_k).astype(np.int8)
        columns.append(pa.DictionaryArray.from_arrays(codes, list(_PHASES)))
        columns += [np.tile(layers, n), np.tile(ranks, n), trace.experts[rows].reshape(-1).astype(np.uint16)]
        if (weights := trace.recorded_weights) is not None:
            columns.append(weights[rows].reshape(-1).astype(np.float32))
        yield pa.RecordBatch.from_arrays([pa.array(c) for c in columns], schema=schema)
