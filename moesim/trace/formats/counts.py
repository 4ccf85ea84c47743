"""How often each expert of each layer was used, without tokens: what is left of routing as popularity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import ROUTING, check_made
from moesim.core.limits import EXPERTS, LAYERS
from moesim.core.units import format_memory
from moesim.trace.formats.contract import COUNTS, Probe, archive_shapes, open_array, reading, wrong
from moesim.trace.formats.records import documents, known
from moesim.trace.formats.sglang import RECORDER, load_recorded
from moesim.trace.formats.tables import read_csv

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOGICAL = "logical_count"
_WHAT = "counts of each expert in each layer"


def refuse_counts(path: Path, probe: Probe) -> None:
    """Raise `TraceError` for a file that holds counts."""
    if _columns(probe) or b'"' + _LOGICAL.encode() + b'"' in probe.head[:4096] or _LOGICAL in probe.shapes:
        raise wrong(path, "routes", "counts", COUNTS.format(path))


def _columns(probe: Probe) -> dict[str, str]:
    names = {ours: some[0] for ours, some in known(tuple(probe.csv_names)).items()}
    wanted = ("layer", "expert", "count")
    return {ours: names[ours] for ours in wanted} if set(wanted) <= set(names) and "position" not in names else {}


def read_counts(path: Path, n_layers: int, n_experts: int) -> NDArray[np.float64]:
    """Read counts of a model with so many layers and experts; layers that were never used are left out."""
    if not path.is_file() or path.stat().st_size > ROUTING.most:
        raise wrong(path, f"a file of at most {format_memory(ROUTING.most)}", "none, or a larger one", "check the path")
    with reading(path, _WHAT):
        counts = np.asarray(_array(path, Probe(path)), np.float64)
        if counts.ndim == 3:  # of each pass
            counts = counts.sum(axis=0)
    if counts.ndim != 2 or counts.shape[1] > n_experts or not (np.isfinite(counts) & (counts >= 0)).all():
        raise wrong(path, f"{_WHAT}, at least 0, of up to {n_experts} experts", f"shape {counts.shape}", "choose another trace")
    counts = counts if len(counts) == n_layers else counts[counts.any(axis=1)]
    if (n_used := int(counts.any(axis=1).sum())) != n_layers:
        raise wrong(path, f"counts of {n_layers} layers as the trace has", f"{n_used} with any", "choose another trace")
    return np.pad(counts, ((0, 0), (0, n_experts - counts.shape[1])))


def _array(path: Path, probe: Probe) -> Any:
    if RECORDER.matches(probe):
        loaded = load_recorded(path)
        if _LOGICAL in loaded:
            return loaded[_LOGICAL]
        counts = sum(np.asarray(one["global_physical_count"], np.int64) for one in loaded["records"])
        experts = np.asarray(loaded["last_physical_to_logical_map"])  # an expert may have copies
        found = np.zeros((len(experts), int(experts.max()) + 1), np.int64)
        np.add.at(found, (np.arange(len(experts))[:, None], experts), counts)
        return found
    if probe.head.startswith(b"\x93NUMPY"):
        return open_array(path)
    if probe.head.startswith(b"PK"):
        archive_shapes(path)
        with np.load(path, allow_pickle=False) as archive:
            return archive[_LOGICAL if _LOGICAL in archive else archive.files[0]]
    if probe.is_json:
        return next(documents(path))[1][_LOGICAL]
    columns = _columns(probe)
    if not columns:
        raise wrong(path, "the columns layer, expert and count", ", ".join(probe.csv_names)[:200] or "no table", "name them so")
    table = read_csv(path, columns, skip=len(probe.preamble), delimiter=probe.delimiter)
    layer, expert = table["layer"], table["expert"]
    if not len(layer) or layer.min() < 0 or layer.max() > LAYERS.most or expert.min() < 0 or expert.max() >= EXPERTS.most:
        raise wrong(path, "layers and experts within their limits", "none, or others")
    shape = (int(layer.max()) + 1, int(expert.max()) + 1)
    check_made(path, "counts", shape, 8, "check the columns")
    found = np.zeros(shape, np.float64)
    np.add.at(found, (layer, expert), table["count"])
    return found
