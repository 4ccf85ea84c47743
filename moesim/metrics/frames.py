"""Frames of a run: rows by step and by layer, and deterministic Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from moesim.metrics.breakdown import CAUSES
from moesim.metrics.columns import by_text, columns_of
from moesim.metrics.hits import flatten_lookups
from moesim.metrics.naming import CACHE_SETTINGS, HOW, WORKLOAD
from moesim.serving.requests import RequestRecord

if TYPE_CHECKING:
    import pandas as pd

    from moesim.metrics.breakdown import Breakdown
    from moesim.metrics.outcome import Outcome
    from moesim.records import Records
    from moesim.serving.steps import Served

IDENTITY: Final = (
    "run", "key", "policy", "model", "hardware", "trace", "routing", "source_label", *CACHE_SETTINGS, "cache_share",
    *WORKLOAD, "repeat", *HOW, "notes", "requests_drawn", "fidelity_fresh_decode",
)  # fmt: skip
"""Columns of a run's row, as far as it has them, that stand in every row of its frames: which run it is, what qualifies it."""

_Ints = NDArray[np.int64]


def frame_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as a Parquet file.

    Parameters
    ----------
    rows : sequence of mapping
        Columns are the keys in the order in which they first occur; what a row lacks is null. A column of
        integers and floats is one of floats.

    Returns
    -------
    bytes
    """
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns_of(rows)), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def step_frame(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield one row a step: times, tokens, lookups and hits, and time by cause.

    Parameters
    ----------
    outcome : Outcome
        With records.

    Yields
    ------
    dict
        Of `IDENTITY` what the run's row has, the fields of `StepRecord` (ns), ``token`` (number of the decode
        step within its batch, from 1; None in prefill and under ``refill``), ``lookups``, ``hits`` and
        ``resident``, and ``time_<cause>_ns``.
    """
    records, split = _kept(outcome)
    looked = flatten_lookups(records, outcome.machine.kinds)
    n = 1 + int(records.steps.column("step").max(initial=-1))
    flags = (looked.first, looked.first & looked.hit, looked.first & looked.resident)
    lookups, hits, resident = (np.bincount(looked.step[flag], minlength=n).tolist() for flag in flags)
    causes = np.zeros((n, len(CAUSES)), np.int64)
    inside = split.windows.column("step")
    np.add.at(causes, inside[inside >= 0], split.ns[inside >= 0])
    identity, tokens = _identity(outcome), _tokens(records, bool(outcome.row.get("refill")))
    for step in sorted(records.steps, key=lambda s: s.step):
        yield {
            **identity, **step._asdict(), "token": tokens[step.step], "lookups": lookups[step.step], "hits": hits[step.step],
            "resident": resident[step.step], **_times(causes[step.step]),
        }  # fmt: skip


def layer_frame(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield one row a layer visit: times, lookups, hits, experts, links, and time by cause.

    Parameters
    ----------
    outcome : Outcome
        With records.

    Yields
    ------
    dict
        Of `IDENTITY` what the run's row has; ``step``, ``layer``, ``phase``, ``token``; ``begin`` and ``end``
        (ns); ``n_active`` and ``n_hits`` (of all micro-batches), ``lookups``, ``hits`` and ``resident`` (an
        expert once a visit); ``<kind>_busy_ns``, ``<kind>_longest_ns`` and ``<kind>_done_ns`` of the experts
        on GPUs (``gpu``) and CPUs (``cpu``), ``link_busy_ns``, as `docs/reference/metrics.md` defines them;
        and ``time_<cause>_ns``.
    """
    import pandas as pd  # takes longer to import than a short run

    records, split = _kept(outcome)
    steps, layers, begin, end = (split.windows.column(name) for name in ("step", "layer", "begin", "end"))
    visits = np.flatnonzero(layers >= 0)
    places = pd.MultiIndex.from_arrays([steps[visits], layers[visits]], names=_VISIT)
    experts = _experts(records, outcome.machine.kinds, places)
    counts = _lookups(records, outcome.machine.kinds).reindex(places, fill_value=0).join(experts).to_dict("records")
    moving = _link_busy(records, begin[visits], end[visits]).tolist()
    phases = {s.step: s.phase for s in records.steps}
    identity, tokens = _identity(outcome), _tokens(records, bool(outcome.row.get("refill")))
    for visit, counted, link_ns in zip(visits.tolist(), counts, moving, strict=True):
        window = split.windows[visit]
        yield {
            **identity, "step": window.step, "layer": window.layer, "phase": phases[window.step], "token": tokens[window.step],
            "begin": window.begin, "end": window.end, **{str(name): n for name, n in counted.items()}, "link_busy_ns": link_ns,
            **_times(split.ns[visit]),
        }  # fmt: skip


def request_table(row: Mapping[str, Any], served: Served) -> pa.Table:
    """Make a table of one row a request: the fields of `RequestRecord`, times with ``_ns``, and the measures of each."""
    # Null: it was not so far, or there is none. `docs/reference/metrics.md` defines ttft_ns, tpot_ns and e2e_ns.
    values = np.array(served.requests, np.int64).reshape(-1, len(RequestRecord._fields))
    found = dict(zip(RequestRecord._fields, values.T, strict=True))
    times = {f"{name}_ns" if name in _TIMES else name: pa.array(one, mask=one < 0) for name, one in found.items()}
    first, end, n = found["first"], found["end"], found["generated"]
    n_rows = len(values)
    return pa.table(
        {
            "run": pa.repeat(pa.scalar(row["run"], pa.int64()), n_rows), "policy": pa.repeat(str(row["policy"]), n_rows), **times,
            "ttft_ns": pa.array(first - found["arrival"], mask=first < 0),
            "tpot_ns": pa.array((end - first) / np.maximum(n - 1, 1), mask=(end < 0) | (n < 2)),
            "e2e_ns": pa.array(end - found["arrival"], mask=end < 0),
        }
    )  # fmt: skip


def request_bytes(tables: Iterator[pa.Table]) -> bytes:
    """Write the requests of runs, one run after another, as one Parquet file; nothing if there are none."""
    sink = pa.BufferOutputStream()
    writer = None
    for table in tables:
        writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is None:
        return b""
    writer.close()
    data: bytes = sink.getvalue().to_pybytes()
    return data


_TIMES: Final = ("arrival", "start", "first", "end")
_VISIT: Final = ["step", "layer"]
_KINDS: Final = ("gpu", "cpu")
_NEVER: Final = 2**62  # ns


def _kept(outcome: Outcome) -> tuple[Records, Breakdown]:
    assert outcome.records is not None and outcome.split is not None
    return outcome.records, outcome.split


def _identity(outcome: Outcome) -> dict[str, Any]:
    return {column: outcome.row[column] for column in IDENTITY if column in outcome.row}


def _times(ns: _Ints) -> dict[str, int]:
    return {f"time_{cause}_ns": n for cause, n in zip(CAUSES, ns.tolist(), strict=True)}


def _tokens(records: Records, refill: bool) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    before: dict[int, int] = {}
    for step in sorted(records.steps, key=lambda s: s.step):
        found[step.step] = None
        if step.phase == "decode" and not refill:
            found[step.step] = before[step.batch] = before.get(step.batch, 0) + 1
    return found


def _lookups(records: Records, kinds: Mapping[str, str]) -> pd.DataFrame:
    """Count the lookups of each visit: of each micro-batch by itself, and each expert once."""
    import pandas as pd

    looked = flatten_lookups(records, kinds)
    first, hit = looked.first, looked.hit
    flags = {"n_active": np.ones_like(hit), "n_hits": hit, "lookups": first, "hits": first & hit}
    flags["resident"] = first & looked.resident
    return pd.DataFrame({"step": looked.step, "layer": looked.layer, **flags}).groupby(_VISIT).sum()


def _experts(records: Records, kinds: Mapping[str, str], visits: pd.MultiIndex) -> pd.DataFrame:
    """Sum what the experts of each visit did on the GPUs and on the CPUs."""
    import pandas as pd

    table, looked_up = records.tasks, records.lookups
    runs = table.column("expert") >= 0
    start, end = table.column("start"), table.column("end")
    columns = {"step": table.column("step"), "layer": table.column("layer"), "ns": end - start, "end": end}
    device, names = table.texts("device")
    tasks = pd.DataFrame({name: values[runs] for name, values in {**columns, "device": device}.items()})
    kind_of = by_text((tasks["device"].to_numpy(), names), lambda name: _KINDS.index(kinds[name]) if name in kinds else -1)
    looked = pd.DataFrame({name: looked_up.column(name) for name in (*_VISIT, "time")})
    routed = looked.groupby(_VISIT)["time"].first().reindex(visits, fill_value=_NEVER)  # lookups are in order of time
    found = {}
    for number, kind in enumerate(_KINDS):
        mine = tasks[kind_of == number].groupby([*_VISIT, "device"]).agg({"ns": "sum", "end": "max"})
        side = mine.groupby(_VISIT).agg(busy=("ns", "sum"), longest=("ns", "max"), end=("end", "max"))
        side = side.reindex(visits, fill_value=0).astype(np.int64)
        found[f"{kind}_busy_ns"], found[f"{kind}_longest_ns"] = side["busy"], side["longest"]
        found[f"{kind}_done_ns"] = (side["end"] - routed).clip(lower=0)
    return pd.DataFrame(found)


def _link_busy(records: Records, begin: _Ints, end: _Ints) -> _Ints:
    """Add up over links the time of transfers within each window."""
    ends = [np.sort(records.transfers.column(name)) for name in ("start", "end")]

    def until(t: _Ints) -> _Ints:
        """Return the busy time before t: of each transfer t - start, less t - end once it is over."""
        total = np.zeros(len(t), np.int64)
        for times, sign in zip(ends, (1, -1), strict=True):
            n = np.searchsorted(times, t)
            total += sign * (n * t - np.append(0, np.cumsum(times))[n])
        return total

    return until(end) - until(begin)
