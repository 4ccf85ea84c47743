"""Plain CSV and Parquet: a line for each expert of a token in a layer, in columns that the user names.

Columns: ``layer``, ``position`` (of the token in its request) and ``expert``; where the source has them also ``request``,
``phase`` (prefill or decode), ``rank`` and ``weight``; instead of the phase ``step``, the number of the forward pass, of
which the first of each request is its prompt. In Parquet, ``expert`` and ``weight`` may be lists: one line for
each token and layer. `tabular_export` writes these, with what a table cannot hold (the number of experts, the model, the
label) beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesim.core.gate import JSON, read_text
from moesim.errors import TraceError
from moesim.trace.formats.contract import TEXT_REMEDY, Format, Options, Part, Probe, Store, wrong
from moesim.trace.formats.tables import Batch, read_csv, read_parquet
from moesim.trace.formats.visits import Visits

REQUIRED = ("layer", "position", "expert")
OPTIONAL = ("request", "phase", "rank", "weight")
MAPPED = ("step",)
"""Read if the user maps it only: many things are called so."""
_MAP = "map them with --column OURS=NAME"
#: Key of what a table cannot hold, in the metadata of a Parquet file and in the file beside a CSV.
FACTS_KEY = "moesim"
#: Facts that stay in the header itself, with their kinds: a table must not turn a miniature or made-up routing into a recording.
KEPT = {"miniature": bool, "miniature_of": str, "synthesis": dict}


def facts_path(path: Path) -> Path:
    """Give the file beside a CSV that says what the CSV cannot."""
    return path.with_name(f"{path.name}.json")


def matches_csv(probe: Probe) -> bool:
    """Tell whether a file is text with separated columns."""
    return len(probe.csv_names) >= 2


def matches_parquet(probe: Probe) -> bool:
    """Tell whether a file begins as Parquet does."""
    return probe.head.startswith(b"PAR1")


def read_csv_file(path: Path, options: Options, store: Store) -> Part:
    """Read a CSV; see `Format`."""
    beside = facts_path(path)
    facts = _parse(beside, read_text(beside, JSON, "facts of the table", error=TraceError)) if beside.is_file() else {}
    columns = _columns(path, Probe(path).csv_names, options)
    return _read(path, read_csv(path, columns), facts, options, store)


def read_parquet_file(path: Path, options: Options, store: Store) -> Part:
    """Read a Parquet file; see `Format`."""
    names, metadata = Probe(path).parquet
    facts = _parse(path, metadata[FACTS_KEY.encode()]) if FACTS_KEY.encode() in metadata else {}
    return _read(path, read_parquet(path, _columns(path, names, options)), facts, options, store)


def _columns(path: Path, present: Sequence[str], options: Options) -> dict[str, str]:
    columns = {ours: options.columns.get(ours, ours) for ours in REQUIRED}
    for ours in OPTIONAL:
        if ours in options.columns or ours in present:
            columns[ours] = options.columns.get(ours, ours)
    columns |= step_columns(columns, options.columns)
    if not set(REQUIRED) & set(options.columns) and not {columns[ours] for ours in REQUIRED} & set(present):
        raise wrong(path, f"the columns {', '.join(REQUIRED)}", repr(", ".join(present)[:120]), f"{_MAP}; {TEXT_REMEDY}")
    for ours, there in columns.items():
        if there not in present:
            got = ", ".join(present)[:300]
            raise wrong(path, f"a column '{there}' for {ours}", got or "none", f"map it with --column {ours}=NAME")
    return columns


def step_columns(columns: dict[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Give the column of forward passes if the user maps one; a column of phases that nobody mapped is then left out."""
    if "step" not in mapped:
        return {}
    columns.pop("phase", None)
    return {"step": mapped["step"]}


def _read(path: Path, batches: Iterator[tuple[int, Batch]], facts: dict[str, Any], options: Options, store: Store) -> Part:
    with Visits(str(path), store) as visits:
        for _, batch in batches:
            add_entries(visits, batch)
        part = visits.finish(options.incomplete)
    exported = {"exported_from": facts, **{key: facts[key] for key in KEPT if key in facts}} if facts else {}
    n_rows = int(part.lengths.sum())
    if facts and facts["n_rows"] != n_rows:
        remedy = "it is truncated or was changed; without those facts it is a table like any other"
        raise wrong(path, f"{facts['n_rows']} tokens as the facts with it say", n_rows, remedy)
    return replace(
        part,
        n_experts=facts.get("n_experts"),
        model=facts.get("model"),
        label=facts.get("label"),
        facts=part.facts | exported,
    )


def add_entries(visits: Visits, batch: Batch) -> None:
    """Put the columns of a table where they belong."""
    columns = {"weight": "weights", "request": "request", "rank": "rank", "phase": "phase", "step": "step"}
    more = {name: batch[ours] for ours, name in columns.items() if ours in batch}
    visits.add(batch["expert"], batch["layer"], batch["position"], **more)


def _parse(place: Path, text: str | bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{place}: {FACTS_KEY}", "JSON", error, "export the trace again") from None
    if isinstance(facts, dict) and FACTS_KEY in facts:
        facts = facts[FACTS_KEY]
    kinds = {"n_experts": int, "n_rows": int, "model": str, "label": str}
    if not isinstance(facts, dict) or any(type(facts.get(key)) is not kind for key, kind in kinds.items()):
        raise wrong(f"{place}: {FACTS_KEY}", "n_experts, n_rows, model and label", repr(facts)[:200], "export the trace again")
    for key, kind in KEPT.items():
        if key in facts and type(facts[key]) is not kind:
            expected = f"{kind.__name__} as the trace had"
            raise wrong(f"{place}: {FACTS_KEY}.{key}", expected, repr(facts[key])[:200], "export the trace again")
    return facts


_ABOUT = "with layer, position, expert, or columns named with --column"
CSV = Format("csv", f"CSV {_ABOUT}", matches_csv, read_csv_file, None, REQUIRED + OPTIONAL + MAPPED)
PARQUET = Format("parquet", f"Parquet {_ABOUT}", matches_parquet, read_parquet_file, None, REQUIRED + OPTIONAL + MAPPED)
