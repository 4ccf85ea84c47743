"""Tables of routing: CSV, Parquet and JSON, as people log them.

A line holds one expert, or the experts of a token in a layer: in a list, in one cell, or in a column each. Columns are found by
their names (``names.yaml``) or named by the user: `REQUIRED`, `OPTIONAL`, and instead of the phase ``step``, the forward pass.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import JSON, ROUTING, check_expansion, read_bytes, read_text
from moesim.errors import TraceError
from moesim.trace.formats.contract import NO_PHASE, TEXT_REMEDY, Format, Options, Part, Probe, Store, reading, wrong
from moesim.trace.formats.records import PHASES, facts_in, known, read_records
from moesim.trace.formats.visits import complete_tokens, counted

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    Table = dict[str, NDArray[Any]]
    Columns = Mapping[str, str | tuple[str, ...]]  # our name -> theirs, or a column for each expert

REQUIRED = ("layer", "position", "expert")
OPTIONAL = ("request", "phase", "rank", "weight")
MAPPED = ("step",)
"""Read if the user maps it only: many things are called so."""
_MAP = "map them with --column OURS=NAME"
#: Key of what a table cannot hold, in the metadata of a Parquet file and in the file next to a CSV.
FACTS_KEY = "moesim"
#: Facts that stay in the header itself, with their kinds: a table must not turn a miniature or made-up routing into a recording.
KEPT = {"miniature": bool, "miniature_of": str, "synthesis": dict}
#: Columns of numbers that are not whole; all others are.
_FRACTIONS = ("weight",)
_ROWS = "rows of a table"


def read_csv(path: Path, columns: Columns, *, names: Sequence[str] | None = None, skip: int = 0, delimiter: str = ",") -> Table:
    """Read columns of a CSV file, by our names."""
    import pyarrow as pa
    from pyarrow import csv

    types = {theirs: pa.string() if ours in ("request", "phase") else pa.int64() for ours, theirs in columns.items()
             if isinstance(theirs, str) and ours not in ("expert", "weight")}  # fmt: skip
    read = csv.ReadOptions(column_names=None if names is None else list(names), skip_rows=skip)
    convert = csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) and file.seek(-1, io.SEEK_END) >= 0 and file.read(1) != b"\n":
            remedy = "a number cut short looks like another: it is truncated, or add a line end"
            raise wrong(f"{path}: last line", "an end of line", "none", remedy)
    source: Any = path
    if re.search(rb",\s*\[", head := Probe(path).head) and b'"[' not in head:  # a list as it was printed
        with reading(path, _ROWS):
            source = pa.py_buffer(re.sub(rb"\[[^]\n]*\]", rb'"\g<0>"', read_bytes(path, ROUTING)))
    parse = csv.ParseOptions(delimiter=delimiter)
    with reading(path, _ROWS):
        table = csv.read_csv(source, read_options=read, parse_options=parse, convert_options=convert)
    return _numbers(path, table, columns)


def read_parquet(path: Path, columns: Columns) -> Table:
    """Read columns of a Parquet file, by our names."""
    from pyarrow import parquet

    with reading(path, _ROWS), parquet.ParquetFile(path) as file:
        facts = file.metadata
        expanded = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
        check_expansion(path, max(expanded, 8 * facts.num_rows * facts.num_columns), path.stat().st_size)
        _check_columns(path, columns, file.schema_arrow.names)
        names = [name for theirs in columns.values() for name in _listed(theirs)]
        table = file.read(columns=names, use_threads=False)
    return _numbers(path, table, columns)


def _numbers(path: Path, table: pa.Table, columns: Columns) -> Table:
    found = {}
    with reading(path, _ROWS):
        _check_columns(path, columns, table.column_names)
        for ours, theirs in columns.items():
            values = [_values(path, ours, table.column(name).combine_chunks()) for name in _listed(theirs)]
            found[ours] = values[0] if isinstance(theirs, str) else np.stack(values, axis=1)
    return found


def _listed(theirs: str | tuple[str, ...]) -> tuple[str, ...]:
    return (theirs,) if isinstance(theirs, str) else theirs


def _check_columns(path: Path, columns: Columns, present: Sequence[str]) -> None:
    for ours, theirs in columns.items():
        for name in _listed(theirs):
            if present.count(name) != 1:
                got = ", ".join(str(name) for name in present[:40])
                raise wrong(path, f"one column '{name}' for {ours}", got, f"map it with --column {ours}=NAME")


def _values(path: Path, ours: str, column: pa.Array) -> NDArray[Any]:
    import pyarrow as pa

    place = f"{path}: {ours}"
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise wrong(f"{place} of row {row}", "a value", "none", "give all rows of a table the same columns")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        if ours not in ("expert", "weight"):
            return _texts(place, ours, column)
        column = _cells(column)
    kind, width = pa.float64() if ours in _FRACTIONS else pa.int64(), 0
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column, width = column.flatten(), _width(place, column)
        if column.null_count:
            raise wrong(place, "a value in all lists", "none", "write all values")
    values: NDArray[Any] = np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
    return values.reshape(-1, width) if width else values


def _cells(column: pa.Array) -> pa.Array:
    """Split cells such as ``[3, 17]``, ``3 17`` or ``3;17``."""
    import pyarrow.compute as pc

    plain = pc.replace_substring_regex(column, r"[\[\](),;|\s]+", " ")
    return pc.split_pattern(pc.utf8_trim_whitespace(plain), " ")


def _width(place: str, column: pa.Array) -> int:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    bad = np.flatnonzero((lengths != lengths[0]) | (lengths == 0))
    if len(bad):
        row = int(bad[0])
        expected = f"{lengths[0]} values as in the row before" if lengths[0] else "at least one value"
        remedy = "every token uses the same number of experts"
        raise wrong(f"{place} of row {row}", expected, f"{lengths[row]}", remedy)
    return int(lengths[0])


def _texts(place: str, ours: str, column: pa.Array) -> NDArray[Any]:
    encoded = column.dictionary_encode()
    numbers: NDArray[Any] = encoded.indices.to_numpy(zero_copy_only=False)
    if ours == "request":
        return numbers
    if ours == "phase":
        named = [PHASES.get(name.lower()) for name in encoded.dictionary.to_pylist()]
        if None in named:
            got = encoded.dictionary[named.index(None)]
            raise wrong(place, "prefill or decode, or 0 or 1", repr(str(got)), NO_PHASE)
        phases: NDArray[np.uint8] = np.asarray(named, np.uint8)[numbers]
        return phases
    raise wrong(f"{place} of row 0", "a number", repr(str(column[0])), f"map another column with --column {ours}=NAME")


def facts_path(path: Path) -> Path:
    """Return the file next to a CSV with what the CSV cannot hold."""
    return path.with_name(f"{path.name}.json")


def read_csv_file(path: Path, options: Options, store: Store) -> Part:
    """Read a CSV, the lines with ``#`` before it, and the facts next to it."""
    described, probe = facts_path(path), Probe(path)
    facts = _parse(described, read_text(described, JSON, "facts of the table", error=TraceError)) if described.is_file() else {}
    columns = find_columns(path, probe.csv_names, options.columns)
    table = read_csv(path, columns, skip=len(probe.preamble), delimiter=probe.delimiter)
    said = dict(re.findall(r"(\w+)\s*[=:]\s*([^\s,;]+)", " ".join(probe.preamble)))
    numbers = {key: int(value) for key, value in said.items() if re.fullmatch("[0-9]{1,9}", value)}
    return _exported(path, read_table(path, table, facts_in(said | numbers), options, store), facts)


def read_parquet_file(path: Path, options: Options, store: Store) -> Part:
    """Read a Parquet file."""
    names, metadata = Probe(path).parquet
    facts = _parse(path, metadata[FACTS_KEY.encode()]) if FACTS_KEY.encode() in metadata else {}
    table = read_parquet(path, find_columns(path, names, options.columns))
    return _exported(path, read_table(path, table, {}, options, store), facts)


def read_json_file(path: Path, options: Options, store: Store) -> Part:
    """Read JSON Lines, or a JSON document."""
    table, facts = read_records(path, options.columns, options.axes)
    return read_table(path, table, facts, options, store)


def find_columns(path: Path, present: Sequence[str], mapped: Mapping[str, str]) -> dict[str, str | tuple[str, ...]]:
    """Find our columns in a table, by the user's names or by known ones."""
    names = known(tuple(present))
    found: dict[str, Any] = {ours: names[ours][0] for ours in (*REQUIRED, *OPTIONAL) if ours in names} | dict(mapped)
    for ours in ("expert", "weight"):
        if ours not in found and (numbered := _family(ours, present)):
            found[ours] = numbered
    if "step" in found:
        found.pop("phase", None)
    if not {"layer", "expert"} & set(found):
        raise wrong(path, f"the columns {', '.join(REQUIRED)}", repr(", ".join(present)[:120]), f"{_MAP}; {TEXT_REMEDY}")
    lacks = [ours for ours in ("layer", "expert") if ours not in found] + [ours for ours in mapped if mapped[ours] not in present]
    if lacks:
        what = " and ".join(f"a column '{found.get(ours, ours)}' for {ours}" for ours in lacks)
        maps = " ".join(f"--column {ours}=NAME" for ours in lacks)
        raise wrong(path, what, ", ".join(present)[:300] or "none", f"map it with {maps}")
    return found


def _family(ours: str, present: Sequence[str]) -> tuple[str, ...]:
    """Return columns such as e0, e1 ..., in the order of their numbers."""
    families: dict[str, dict[int, str]] = {}
    for name in present:
        match = re.fullmatch(r"(.*?)[^A-Za-z0-9]*(\d{1,5})\W*", name)
        if match and ours in known((match[1],)):
            families.setdefault(match[1], {})[int(match[2])] = name
    for numbers in families.values():
        if sorted(numbers) in (list(range(len(numbers))), list(range(1, len(numbers) + 1))):
            return tuple(numbers[number] for number in sorted(numbers))
    return ()


def read_table(path: Path, table: Table, facts: Mapping[str, Any], options: Options, store: Store) -> Part:
    """Put a table into a store."""
    expert, notes = table.pop("expert"), []
    axis = "layer" if "layer" not in table and options.axes and options.axes[0] == "layers" else "position"
    if axis not in table:
        table[axis] = _counted(path, table, expert, axis)
        other = "layer" if axis == "position" else "position"
        notes = [f"no {axis} is given: the n-th line of a {other} is of its {axis} n, from 0"]
    if "layer" not in table:
        raise wrong(path, "the layer of each line", f"{', '.join(table)} only", "map it with --column layer=NAME")
    if facts.get("top_k", 0) not in (0, width := expert.shape[1] if expert.ndim == 2 else facts.get("top_k", 0)):
        raise wrong(path, f"{facts['top_k']} experts of a token as the file says first", width)
    names = {"position": "token", "weight": "weights"}
    columns: dict[str, Any] = {names.get(ours, ours): values for ours, values in table.items()}
    part = complete_tokens(str(path), store, options.incomplete, expert, **columns)
    said = {key: facts[key] for key in ("n_experts", "model") if key in facts}
    if part.n_prompt is None and "n_prompt" in facts and len(part.lengths) == 1:
        said["n_prompt"] = np.array([facts["n_prompt"]], np.int64)
    return replace(part, notes=(*notes, *part.notes), **said)


def _counted(path: Path, table: Table, expert: NDArray[Any], axis: str) -> NDArray[np.int64]:
    """Count the lines of each layer of a request as its tokens, or the other way round."""
    other = [name for name in ("request", "layer", "position") if name in table and name != axis]
    if expert.ndim == 1 or set(other) <= {"request"}:
        lacks = [name for name in ("layer", "position") if name not in table]
        maps = " ".join(f"--column {name}=NAME" for name in lacks)
        raise wrong(path, f"a column for {' and '.join(lacks)}", ", ".join(table) or "none", f"map it with {maps}")
    return counted(*(table[name] for name in other))


def _exported(path: Path, part: Part, facts: dict[str, Any]) -> Part:
    if not facts:
        return part
    n_rows = int(part.lengths.sum())
    if facts["n_rows"] != n_rows:
        remedy = "it is truncated or was changed; without those facts it is a table like any other"
        raise wrong(path, f"{facts['n_rows']} tokens as the facts with it say", n_rows, remedy)
    header = {"exported_from": facts, **{key: facts[key] for key in KEPT if key in facts}}
    said = {key: facts[key] for key in ("n_experts", "model", "label")}
    return replace(part, **said, facts=part.facts | header)


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


_NAMES = REQUIRED + OPTIONAL + MAPPED
_ABOUT = "a line for each expert, or for the experts of a token in a layer"
CSV = Format("csv", f"CSV: {_ABOUT}", lambda probe: len(probe.csv_names) >= 2, read_csv_file, None, _NAMES)
PARQUET = Format("parquet", f"Parquet: {_ABOUT}", lambda probe: probe.head.startswith(b"PAR1"), read_parquet_file, None, _NAMES)
JSON_LINES = Format(
    "jsonl", "JSON, one record a line or one document, of any nesting", lambda probe: probe.is_json, read_json_file, None, _NAMES,
)  # fmt: skip
