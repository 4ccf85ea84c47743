"""Contents of a trace as plain data: arrays, header, signals; and the table of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

HELD_BACK = ("requests", "ends")
"""Sources of calibration tables: whole requests, which are then not in the trace, or the last tokens of each."""
MADE_UP = ("weights", "scores")
"""Arrays that may be made up: the same number for each chosen expert."""
UNITS = "units_per_expert"
"""Key of a trace whose ids are those of an expert's matrices, one after the other."""
POPULARITY = "popularity_of"
"""Key of a trace whose table of frequencies is that of a file of counts, with the file's name."""
_COUNTS = {"n": 1, "of": 1, "rows": 1, "seed": 0}


def made_up(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the arrays of a trace that are made up."""
    return tuple(header.get("made_up", ()))


def remarks(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe what was added to the routing of a trace, without commas."""
    found = [f"{name} uniform over the chosen" for name in made_up(header)]
    if (units := header.get(UNITS, 1)) > 1:
        found.append(f"{units} units per expert")
    if (held := header.get("held_back")) is not None:
        if held["what"] == "requests":
            text = f"{held['n']} held-back request{'s' * (held['n'] > 1)} (seed {held['seed']})"
        else:
            text = f"the held-back end of each request ({held['rows']} tokens in all)"
        found.insert(0, f"calibrated on {text}")
    if isinstance(name := header.get(POPULARITY), str):
        found.insert(0, f"popularity counted in {name[:80].replace(',', ' ')}")
    return tuple(found)


def check_additions(header: Mapping[str, Any], place: str) -> None:
    """Check the entries of a header from which remarks are made."""
    names = header.get("made_up", [])
    if not isinstance(names, list) or any(name not in MADE_UP for name in names) or len(set(map(str, names))) != len(names):
        raise _wrong(f"{place}: header.made_up", f"some of {', '.join(MADE_UP)}", names)
    units = header.get(UNITS, 1)
    if not isinstance(units, int) or isinstance(units, bool) or units < 1:
        raise _wrong(f"{place}: header.{UNITS}", "an integer of at least 1", units)
    held = header.get("held_back")
    if held is None:
        return
    if not isinstance(held, dict) or held.get("what") not in HELD_BACK:
        raise _wrong(f"{place}: header.held_back", f"what, one of {', '.join(HELD_BACK)}, and numbers", held)
    for key, least in _COUNTS.items():
        value = held.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(f"{place}: header.held_back.{key}", f"an integer of at least {least}", value)


def _wrong(place: str, expected: str, got: object) -> TraceError:
    return TraceError(f"{place}: expected {expected}, got {repr(got)[:200]}; import or calibrate the trace again")


PREFILL = 0
DECODE = 1


@dataclass(frozen=True, eq=False)
class Signal:
    """Recorded predictions about layers, made before their routers chose.

    Attributes
    ----------
    name : str
        ``gate_next1``, ``residual``, ``learned``, ``shadow-int8:T1:KV1`` and so on.
    rows : (n,) int32
        Rows of the trace that it covers, ascending.
    scores : (n, n_layers, n_experts) or (n, n_layers, m) float16
        ``[:, l]`` is about layer l. Dense if `ids` is None, else the scores of those ids, best first.
    ids : (n, n_layers, m) uint8 or uint16, or None
        Predicted experts, best first.
    lookahead : int
        Layers between the one whose state was read and the one it is about.
    needs_layer_offset : int or None
        The prediction about layer l can be made once layer ``l - needs_layer_offset`` has its state; None: at
        any time.
    first_layer : int
        Layers before this one have no source; their entries are zero and mean nothing.
    about : str
        How it was made, one line.
    """

    name: str
    rows: NDArray[Any]
    scores: NDArray[Any]
    ids: NDArray[Any] | None = None
    lookahead: int = 1
    needs_layer_offset: int | None = 1
    first_layer: int = 1
    about: str = ""


@dataclass(frozen=True, eq=False)
class GateInputs:
    """Inputs of the routers, from which predictors can be trained.

    Attributes
    ----------
    rows : (n,) int32
        Rows of the trace that it covers, ascending.
    values : (n, n_layers, hidden) float16
        Input of each layer's router.
    """

    rows: NDArray[Any]
    values: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Requests:
    """The requests of a trace, one entry each."""

    first_row: NDArray[np.int64]  # first of its rows, which lie together
    # n_prompt, n_decode: recorded rows of each phase
    n_prompt: NDArray[np.int64]
    n_decode: NDArray[np.int64]
    prompt_offset: NDArray[np.int64]  # position of the first recorded row: tokens before it whose routing was not recorded
    signals: tuple[tuple[str, ...], ...]  # names of the signals that cover it, sorted (see `Trace.has_signal`)

    def __len__(self) -> int:
        return len(self.first_row)


@dataclass(frozen=True, eq=False)
class Recorded:
    """Contents of a trace; `moesim.trace.Trace` describes each part."""

    experts: NDArray[Any]
    weights: NDArray[Any] | None
    request: NDArray[Any]
    position: NDArray[Any]
    phase: NDArray[Any]
    scores: NDArray[Any] | None = None
    embeddings: NDArray[Any] | None = None
    inputs: GateInputs | None = None
    signals: dict[str, Signal] = field(default_factory=dict)
    tables: dict[str, NDArray[Any]] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        return len(self.request)

    @property
    def n_layers(self) -> int:
        return int(self.header["n_layers"])

    @property
    def n_experts(self) -> int:
        return int(self.header["n_experts"])

    @property
    def top_k(self) -> int:
        return int(self.header["top_k"])

    @property
    def n_requests(self) -> int:
        return int(self.request[-1]) + 1


def tabulate(trace: Recorded) -> Requests:
    """Find where each request of a trace lies and which signals cover it."""
    first = np.searchsorted(trace.request, np.arange(trace.n_requests, dtype=np.int32)).astype(np.int64)
    total = np.diff(np.append(first, trace.n_rows))
    decode = np.add.reduceat((trace.phase == DECODE).astype(np.int64), first)
    covering = {name: _covered(trace, signal, first) for name, signal in sorted(trace.signals.items())}
    signals = tuple(tuple(name for name, mask in covering.items() if mask[r]) for r in range(len(first)))
    return Requests(first, total - decode, decode, trace.position[first].astype(np.int64), signals)


def _covered(trace: Recorded, signal: Signal, first: NDArray[np.int64]) -> NDArray[np.bool_]:
    missing = np.ones(trace.n_rows, bool)
    missing[signal.rows] = False
    if len(signal.rows) and not (trace.phase[signal.rows] == PREFILL).any():
        missing &= trace.phase == DECODE  # recorded in decode only, which is as much as it can cover
    some = np.bincount(trace.request[signal.rows], minlength=len(first)) > 0
    return np.asarray(some & ~np.logical_or.reduceat(missing, first))


def header_object(header: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    """Take an object out of a header."""
    value = header.get(key)
    if not isinstance(value, dict):
        raise TraceError(f"{place}: header.{key}: expected an object, got {value!r}; record the trace again")
    return value


def read_inputs(arrays: Mapping[str, NDArray[Any]], place: str) -> GateInputs | None:
    """Take the gate inputs of a file, if it has any."""
    names = ("input_rows", "inputs")
    found = [arrays[name] for name in names if name in arrays]
    if not found:
        return None
    if len(found) < len(names):
        raise TraceError(f"{place}: expected both 'inputs' and 'input_rows', got one of them; record the trace again")
    return GateInputs(*found)


def read_signals(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any], place: str) -> dict[str, Signal]:
    """Put the signals of a file together from its arrays and header."""
    found = {name.split("/", 1)[1] for name in arrays if name.startswith("signals/")}
    if found != set(facts):
        raise TraceError(f"{place}: signals: expected {sorted(facts)} of the header, got {sorted(found)}; record the trace again")
    signals = {}
    for name in sorted(found):
        if f"signal_rows/{name}" not in arrays:
            raise TraceError(f"{place}: signals/{name}: expected 'signal_rows/{name}', got none; record it again")
        try:
            rows, scores, ids = arrays[f"signal_rows/{name}"], arrays[f"signals/{name}"], arrays.get(f"signal_ids/{name}")
            signals[name] = Signal(name, rows, scores, ids, **facts[name])
        except TypeError:
            raise TraceError(
                f"{place}: header.signals.{name}: expected lookahead, needs_layer_offset, first_layer and "
                f"about, got {facts[name]!r}; record the trace again"
            ) from None
    return signals
