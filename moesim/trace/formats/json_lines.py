"""JSON Lines: {"layer_idx", "token_idx", "selected_ids", "gate_weights"}, one object for each token and layer.

``gate_weights`` may be missing from all lines; ``request`` and ``phase`` are read where they are there. Fields of other names are
given with ``--column``. Without a request, a new one begins whenever the first token and layer come again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moesim.trace.formats.contract import Format, Options, Part, Probe, Store
from moesim.trace.formats.table import MAPPED, OPTIONAL, REQUIRED, add_entries, step_columns
from moesim.trace.formats.tables import read_json_lines
from moesim.trace.formats.visits import Visits

_FIELDS = {"layer": "layer_idx", "position": "token_idx", "expert": "selected_ids"}


def matches(probe: Probe) -> bool:
    """Tell whether the first line is an object with the fields of this format."""
    return probe.is_json and set(_FIELDS.values()) <= set(probe.json_names)


def read(path: Path, options: Options, store: Store) -> Part:
    """Read a file; see `Format`."""
    columns = _columns(path, options.columns)
    with Visits(str(path), store) as visits:
        for _, batch in read_json_lines(path, columns):
            add_entries(visits, batch)
        return visits.finish(options.incomplete)


def _columns(path: Path, named: Mapping[str, str]) -> dict[str, str]:
    present = Probe(path).json_names
    optional = {"weight": "gate_weights", "request": "request", "phase": "phase"}
    found = {ours: there for ours, there in optional.items() if there in present}
    found |= step_columns(found, named)
    return _FIELDS | found | dict(named)


FORMAT = Format(
    "jsonl",
    "JSON Lines {layer_idx, token_idx, selected_ids, gate_weights}, or fields named with --column",
    matches,
    read,
    None,
    REQUIRED + OPTIONAL + MAPPED,
)
