"""A trace that is still being recorded: a folder with one trace for each batch of requests.

======================================  ==============================================================================
``manifest.json``                       ``options`` that made it, ``header`` of the trace to be, ``n_requests`` in all
``FIRST-STOP.safetensors``              trace of the requests from FIRST up to STOP; there completely or not at all
``calibration.safetensors``             calibration tables, once they are complete (before that, counts)
``KIND.LAYER.FIRST-STOP.safetensors``   of requests that are recorded layer by layer: KIND is ``states``, those behind so
                                        many layers, or ``routing``, that of a layer
======================================  ==============================================================================

Whatever stops the recording, the folder can be read, and the recording can go on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core import files
from moesim.core.files import checked_line, read_checked_line
from moesim.core.gate import JSON, read_bytes
from moesim.errors import TraceError
from moesim.trace.check import check_trace
from moesim.trace.files import joined, read_file, write_file
from moesim.trace.format import REQUIRED, SCHEMA_VERSION, checksums, read_container, verify_checksums, write_container
from moesim.trace.parts import GateInputs, Recorded, Signal, header_object

if TYPE_CHECKING:
    from numpy.typing import NDArray

PARTS_SUFFIX = ".parts"
"""Of the folder of a recording that is not finished."""
MANIFEST = "manifest.json"
"""The file in it that tells it from others."""
CALIBRATION = "calibration.safetensors"

_JOINED = "joined.safetensors"
_REMOVING = "manifest.removing.json"  # the manifest's name while the folder is removed
_DIGITS = 8
_OURS = re.compile(
    rf"calibration\.safetensors|joined\.safetensors|((states|routing)\.\d{{4}}\.)?\d{{{_DIGITS}}}-\d{{{_DIGITS}}}\.safetensors"
)
_HALF_WRITTEN = re.compile(rf"\.(manifest\.json|{_OURS.pattern})\.\w{{8}}")  # as of `moesim.core.files.writing`


@dataclass(frozen=True)
class Shard:
    """One file of the folder."""

    path: Path
    # first, stop: its requests, `stop` not included
    first: int
    stop: int


def parts_folder(out: str | Path) -> Path:
    """Return the folder of the parts of a trace that is to be written to `out`."""
    return Path(f"{out}{PARTS_SUFFIX}")


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Begin a folder, with a line of JSON and its check."""
    files.write_bytes(folder / MANIFEST, checked_line(manifest))


def clear_leftovers(folder: Path) -> None:
    """Remove half-written files of a kill."""
    for path in folder.glob(".*"):
        if _HALF_WRITTEN.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def remove(folder: Path) -> None:
    """Remove a recording; its folder stays if others' files are in it."""
    if not folder.is_dir() or folder.is_symlink():
        return
    if (folder / MANIFEST).exists():  # what a kill leaves of the folder must not be taken for a recording
        os.replace(folder / MANIFEST, folder / _REMOVING)
    clear_leftovers(folder)
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and not path.is_dir():
            path.unlink()
    (folder / _REMOVING).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def clear_removed(folder: Path) -> None:
    """Go on with `remove` where a kill has stopped it."""
    if (folder / _REMOVING).exists():
        remove(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest that a folder was begun with."""
    path = folder / MANIFEST
    try:
        manifest = read_checked_line(read_bytes(path, JSON))
    except FileNotFoundError:
        raise TraceError(f"{path}: expected the manifest of a recording, got nothing there; check the path") from None
    if manifest is None:
        got = "a damaged one, or one of an older version"
        raise TraceError(f"{path}: expected the manifest of a recording, got {got}; delete {folder} and record again")
    kinds = {"options": dict, "header": dict, "n_requests": int}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise TraceError(f"{path}: expected {sorted(kinds)}, got no {key}; delete {folder} and record again")
    return manifest


def shard_path(folder: Path, first: int, stop: int) -> Path:
    """Return the file of the requests from `first` up to `stop`."""
    return folder / f"{first:0{_DIGITS}}-{stop:0{_DIGITS}}.safetensors"


def layer_path(folder: Path, kind: str, layer: int, first: int, stop: int) -> Path:
    """Return the file of a layer's states or routing."""
    return folder / f"{kind}.{layer:04}.{shard_path(folder, first, stop).name}"


def is_begun(folder: Path) -> bool:
    """Return whether anything is recorded."""
    return bool(finished_shards(folder)) or any(folder.glob("states.*.safetensors"))


def finished_shards(folder: Path) -> list[Shard]:
    """Find the shards that follow each other from request 0 on."""
    found: list[Shard] = []
    for path in sorted(folder.glob(f"{'[0-9]' * _DIGITS}-{'[0-9]' * _DIGITS}.safetensors")):
        first, stop = (int(number) for number in path.stem.split("-"))
        if first != (found[-1].stop if found else 0):
            break
        found.append(Shard(path, first, stop))
    return found


def write_tables(path: Path, arrays: dict[str, NDArray[Any]], header: dict[str, Any]) -> None:
    """Write calibration tables or counts, with checksums."""
    write_container(path, arrays, {**header, "schema_version": SCHEMA_VERSION, "sha256": checksums(arrays)})


def write_calibration(path: Path, tables: dict[str, NDArray[Any]], requests: list[dict[str, Any]]) -> None:
    """Write calibration tables and the requests they were counted over."""
    write_tables(path, {f"calibration/{name}": table for name, table in tables.items()}, {"calibration_requests": requests})


def read_tables(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read arrays and header of calibration, or of a trace."""
    arrays, header = read_container(path)
    verify_checksums(str(path), arrays, header_object(header, "sha256", str(path)))
    return arrays, header


def calibration_tables(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Pick the calibration tables among the arrays of a file."""
    return {name.removeprefix("calibration/"): array for name, array in arrays.items() if name.startswith("calibration/")}


def read_shards(folder: str | Path) -> Recorded:
    """Read what is complete of a recording."""
    place = Path(folder)
    manifest = read_manifest(place)
    shards = finished_shards(place)
    if not shards:
        raise TraceError(f"{place}: expected at least one finished batch, got none; go on recording")
    traces = [read_file(shard.path) for shard in shards]
    requests = [entry for trace in traces for entry in trace.header["trace_requests"]]
    tables, calibrated = _calibration(place)
    base = {key: traces[0].header[key] for key in REQUIRED if key != "sha256"}
    header = {**manifest["header"], **base, "trace_requests": requests, **calibrated}
    if len(requests) < manifest["n_requests"]:
        header["incomplete"] = {"planned": manifest["n_requests"], "recorded": len(requests)}
    starts = np.cumsum([0, *(trace.n_rows for trace in traces)])[:-1]
    trace = Recorded(
        **{name: joined([getattr(t, name) for t in traces], place) for name in ("experts", "position", "phase")},
        weights=_optional([t.weights for t in traces], place),
        request=np.concatenate([t.request + np.int32(shard.first) for t, shard in zip(traces, shards, strict=True)]),
        scores=_optional([t.scores for t in traces], place),
        embeddings=_optional([t.embeddings for t in traces], place),
        inputs=_inputs(traces, starts, place),
        signals=_signals(traces, starts, place),
        tables=tables,
        header=header,
    )
    check_trace(trace, str(place))
    return trace


def join(folder: str | Path, out: str | Path) -> Path:
    """Put a finished recording together in one file."""
    trace = read_shards(folder)
    if "incomplete" in trace.header:
        missing = trace.header["incomplete"]
        raise TraceError(
            f"{folder}: expected {missing['planned']} recorded requests, got {missing['recorded']}; "
            "go on recording with the same command"
        )
    whole = write_file(trace, Path(folder, _JOINED))
    del trace
    os.replace(whole, out)
    remove(Path(folder))
    return Path(out)


def _calibration(folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    path = folder / CALIBRATION
    if not path.is_file():
        return {}, {}
    arrays, header = read_tables(path)
    tables = calibration_tables(arrays)
    return tables, {"calibration_requests": header["calibration_requests"]} if tables else {}


def _optional(parts: Sequence[NDArray[Any] | None], folder: Path) -> NDArray[Any] | None:
    present = [part for part in parts if part is not None]
    return joined(present, folder) if len(present) == len(parts) else None


def _shifted(rows: Iterable[tuple[NDArray[Any], np.int64]]) -> NDArray[np.int32]:
    return np.concatenate([(part + start).astype(np.int32) for part, start in rows])


def _inputs(traces: Sequence[Recorded], starts: NDArray[np.int64], folder: Path) -> GateInputs | None:
    having = [(trace.inputs, start) for trace, start in zip(traces, starts, strict=True) if trace.inputs is not None]
    if not having:
        return None
    return GateInputs(_shifted((part.rows, start) for part, start in having), joined([part.values for part, _ in having], folder))


def _signals(traces: Sequence[Recorded], starts: NDArray[np.int64], folder: Path) -> dict[str, Signal]:
    found = {}
    for name in sorted(set().union(*(trace.signals for trace in traces))):
        having = [(trace.signals[name], start) for trace, start in zip(traces, starts, strict=True) if name in trace.signals]
        found[name] = replace(
            having[0][0],
            rows=_shifted((part.rows, start) for part, start in having),
            scores=joined([part.scores for part, _ in having], folder),
            ids=_optional([part.ids for part, _ in having], folder),
        )
    return found
