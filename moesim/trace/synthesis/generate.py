"""Make a synthetic trace: request by request, on disk if wanted, labelled as what it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from moesim.core.processes import in_threads
from moesim.errors import ConfigError
from moesim.trace import GateInputs, Signal, Trace
from moesim.trace.files import mapped
from moesim.trace.stats.balance import activation_frequency, used
from moesim.trace.stats.calibration import MAPS, MATRICES, MOST, map_rows
from moesim.trace.stats.prediction import coactivation
from moesim.trace.synthesis.exact import on_grid, powers, softmax
from moesim.trace.synthesis.model import (
    CALIBRATION,
    REQUEST,
    SyntheticModel,
    draw_model,
    request_states,
    unread_parts,
    workload_offsets,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.synthesis.parameter_set import ParameterSet

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]

#: A signal holds the scores of all experts if there are no more than this many, else its top 2 k.
DENSE_EXPERTS = 16
LOOKAHEADS = (1, 2, 3)
_PIECE = 1024
"""Rows at once: what is made of them stays in a core's cache, which halves the time."""


def top_ids(logits: F32, n: int) -> NDArray[np.int64]:
    """Find the n largest, best first; (..., n) int64."""
    n_experts = logits.shape[-1]
    if n * 4 >= n_experts:
        return np.argsort(-logits, axis=-1, kind="stable")[..., :n]
    table = np.ascontiguousarray(logits).reshape(-1, n_experts)
    found = [_top_ids(part, n) for part in np.split(table, range(_PIECE, len(table), _PIECE))]
    return np.concatenate(found).reshape(*logits.shape[:-1], n)


def _top_ids(table: F32, n: int) -> NDArray[np.int64]:
    """Find the n largest of each row by a float's ordered bits, the last of which are the id."""
    n_experts = table.shape[1]
    n_bits = (n_experts - 1).bit_length()
    keys = (table + np.float32(0)).view(np.int32)  # 0 makes both zeros one
    keys ^= (keys >> 31) & np.int32(2**31 - 1)
    keys &= np.int32(-1 << n_bits)
    keys |= np.arange(n_experts, dtype=np.int32)
    keys.partition(n_experts - n - 1, axis=-1)
    best = np.sort(keys[:, n_experts - n - 1 :], axis=-1)[:, ::-1]  # the n largest, and the next to tell ties by
    ids: NDArray[np.int64] = (best[:, :n] & ((1 << n_bits) - 1)).astype(np.int64)
    best = best >> n_bits
    near = (best[:, 1:] == best[:, :-1]).any(axis=1)  # too near to order by the bits that are left
    ids[near] = _among_equals(table[near], n)
    return ids


def _among_equals(table: F32, n: int) -> NDArray[np.int64]:
    """Find the n largest of rows with near equals: of equal ones the lower ids."""
    return np.argsort(-table, axis=-1, kind="stable")[:, :n]


def _at(table: NDArray[Any], columns: NDArray[np.int64]) -> NDArray[Any]:
    firsts = np.arange(0, table.size, table.shape[1])[:, None]
    return table.ravel().take(columns + firsts)


def softmax_at(logits: F32, ids: NDArray[np.int64]) -> F32:
    """Compute `softmax` of the largest over all, equal to the bit."""
    n_experts, n = logits.shape[-1], ids.shape[-1]
    table = np.ascontiguousarray(logits).reshape(-1, n_experts)
    chosen = ids.reshape(len(table), n)
    found = np.empty(chosen.shape, np.float32)
    for first in range(0, len(table), _PIECE):
        here = slice(first, first + _PIECE)
        all_powers = powers(table[here], _at(table[here], chosen[here, :1]))
        found[here] = _at(all_powers, chosen[here]) / all_powers.sum(axis=1, keepdims=True, dtype=np.float64)
    return found.reshape(ids.shape)


def route(logits: F32, top_k: int, renormalise: bool) -> tuple[NDArray[np.int64], F32]:
    """Choose experts and weigh them as the architecture does."""
    ids = top_ids(logits, top_k)
    if renormalise:
        return ids, softmax(np.take_along_axis(logits, ids, axis=-1))
    return ids, softmax_at(logits, ids)


def read_gates(model: SyntheticModel, points: F64, offsets: F64, lookahead: int = 0) -> F32:
    """Apply routers to inputs on the grid."""
    found = np.empty((len(points) - lookahead, points.shape[1], model.bias.shape[1]), np.float32)
    for layer, logits32 in enumerate(found):  # one at a time, which stays in a core's cache
        logits = points[layer] @ model.gates[layer + lookahead].T
        logits += model.bias[layer + lookahead] + offsets[layer + lookahead]  # exact, in any order
        np.multiply(logits, model.parameters.temperature, out=logits32, casting="same_kind")
    return found


def signal_logits(
    model: SyntheticModel, inputs: F32, points: F64, offsets: F64, residual: NDArray[np.float16] | None
) -> dict[str, F32]:
    """Compute the logits of gate reuse and its residual form, by name."""
    ahead = [n for n in LOOKAHEADS if n < len(inputs)]
    found = {f"gate_next{n}": read_gates(model, points, offsets, n) for n in ahead}
    if residual is not None and ahead:
        step = residual[:, None, : inputs.shape[2]].astype(np.float32)
        found["residual"] = read_gates(model, on_grid(inputs + step), offsets, 1)
    return found


def signal_facts(name: str) -> dict[str, Any]:
    """Describe a signal as a trace's header does."""
    ahead = 1 if name == "residual" else int(name.removeprefix("gate_next"))
    plus = " plus calibration/residual[l - 1]" if name == "residual" else ""
    about = f"softmax of synthetic router l applied to the input of router l - {ahead}{plus}"
    return {"lookahead": ahead, "needs_layer_offset": ahead, "first_layer": ahead, "about": about}


GENERATOR = "moesim.trace.synthesis 2"
#: Requests of the calibration tables, with their rows of prompt and of decode. They are none of the trace.
N_CALIBRATION, CALIBRATION_PROMPT, CALIBRATION_DECODE = 16, 64, 128

MOST_ROWS = 2**31 - 1
"""Rows of a trace: signals number them with 32 bits."""

_NOTE = (
    "Synthetic: no model was run. Routing follows from topics, context and a state that turns from layer to layer, with "
    "parameters fitted to statistics of the model's routing where they are known; see docs/guide/synthesis.md."
)


def synthesize(
    parameters: ParameterSet,
    *,
    n_requests: int,
    n_prompt: int,
    n_decode: int,
    seed: int = 0,
    first: int = 0,
    n_signal_requests: int | None = None,
    n_input_requests: int = 0,
    n_calibration: int = N_CALIBRATION,
    scores: bool = False,
    folder: Path | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Trace:
    """Make a synthetic trace.

    Request i is the same however many are made, and the routing is the same whatever is kept next to it.

    Parameters
    ----------
    parameters : ParameterSet
    n_requests : int
    n_prompt, n_decode : int
        Rows of each request; at least one together.
    seed : int
        Of routers, topics and requests.
    first : int
        Number of the first request, so that requests can be made some at a time.
    n_signal_requests : int or None
        So many requests, the first, carry ``gate_next1`` to ``gate_next3`` and ``residual``; None: all.
    n_input_requests : int
        So many, the first, carry the gate inputs.
    n_calibration : int
        Other requests, from which the calibration tables are counted. 0: no tables and no ``residual``.
    scores : bool
        Keep the softmax over all experts.
    folder : Path or None
        Where to keep the arrays as files until the trace is written; None: in memory.
    progress : callable
        Called with the number of rows that have been made since the last call.

    Returns
    -------
    Trace
        Labelled ``synthetic``.

    Raises
    ------
    ConfigError
        If there is nothing to make, or a number is negative.
    """
    _check_counts(n_requests, n_prompt, n_decode, n_calibration, seed, first)
    n_rows = n_prompt + n_decode
    with_signals = n_requests if n_signal_requests is None else min(n_signal_requests, n_requests)
    with threadpool_limits(1, "blas"):  # its threads wait for each other by turning: ten times as slow on a busy machine
        model = _drawn(parameters, seed)
        tables = _calibrated(parameters, seed, n_calibration, scores)
        n_inputs = min(n_input_requests, n_requests) * n_rows
        kept = _Kept(model, n_requests * n_rows, with_signals * n_rows, n_inputs, scores, folder)

        def make(number: int) -> None:
            _request(model, first + number, slice(number * n_rows, (number + 1) * n_rows), n_prompt, kept, tables.get("residual"))

        in_threads(make, range(n_requests), lambda: progress(n_rows))
    return Trace.build(
        experts=kept.experts, weights=kept.weights, scores=kept.scores, n_prompt=[n_prompt] * n_requests,
        n_decode=[n_decode] * n_requests, n_experts=parameters.n_experts, model=parameters.model,
        label="synthetic", inputs=kept.gate_inputs(), signals=kept.signals(), tables=tables,
        header=_header(parameters, seed, first, n_requests, n_prompt, n_decode, n_calibration),
    )  # fmt: skip


@lru_cache(maxsize=32)  # the largest takes 15 MB
def _drawn(parameters: ParameterSet, seed: int) -> SyntheticModel:
    return draw_model(parameters, seed)


@lru_cache(maxsize=4)  # the largest of the shipped parameters takes 16 MB
def _calibrated(parameters: ParameterSet, seed: int, n_requests: int, scores: bool) -> dict[str, NDArray[Any]]:
    tables = _calibrate(_drawn(parameters, seed), n_requests, scores)
    for table in tables.values():
        table.flags.writeable = False
    return tables


def _check_counts(n_requests: int, n_prompt: int, n_decode: int, n_calibration: int, seed: int, first: int) -> None:
    for name, value, least in (
        ("requests", n_requests, 1),
        ("prompt", n_prompt, 0),
        ("decode", n_decode, 0),
        ("prompt + decode", n_prompt + n_decode, 1),
        ("calibration requests", n_calibration, 0),
        ("seed", seed, 0),
        ("first request", first, 0),
    ):
        if value < least:
            raise ConfigError(f"synthetic trace: {name}: expected at least {least}, got {value}; ask for more")
    if (n_rows := n_requests * (n_prompt + n_decode)) > MOST_ROWS:
        raise ConfigError(f"synthetic trace: expected at most {MOST_ROWS} rows of all requests, got {n_rows}; ask for fewer")


class _Kept:
    """Arrays of a trace being made, in memory or mapped to files of a folder."""

    def __init__(
        self, model: SyntheticModel, n_rows: int, n_signal: int, n_inputs: int, scores: bool, folder: Path | None
    ) -> None:
        p = model.parameters
        self._folder = folder
        self._making = Lock()  # requests are made at the same time; the first to have a signal makes its arrays
        self._ids = np.dtype(np.uint8 if p.n_experts <= 256 else np.uint16)
        self.experts = self._make("experts", (n_rows, p.n_layers, p.top_k), self._ids)
        self.weights = self._make("weights", (n_rows, p.n_layers, p.top_k))
        self.scores = self._make("scores", (n_rows, p.n_layers, p.n_experts)) if scores else None
        self.inputs = self._make("inputs", (n_inputs, p.n_layers, 2 * p.width)) if n_inputs else None
        self.n_signal = n_signal
        self.signal_scores: dict[str, NDArray[Any]] = {}
        self.signal_ids: dict[str, NDArray[Any]] = {}

    def _make(self, name: str, shape: tuple[int, ...], dtype: Any = np.float16) -> NDArray[Any]:
        if self._folder is None:
            return np.zeros(shape, dtype)
        with (self._folder / name).open("w+b") as file:
            return mapped(file, dtype, shape)

    def put_signal(self, name: str, first: int, logits: NDArray[np.float32], top_k: int) -> None:
        n_ahead, n, n_experts = logits.shape
        n_layers = self.experts.shape[1]
        dense = n_experts <= DENSE_EXPERTS
        width = n_experts if dense else min(2 * top_k, n_experts)
        with self._making:
            if name not in self.signal_scores:
                self.signal_scores[name] = self._make(f"{name}.scores", (self.n_signal, n_layers, width))
                if not dense:
                    self.signal_ids[name] = self._make(f"{name}.ids", (self.n_signal, n_layers, width), self._ids)
        place = (slice(first, first + n), slice(n_layers - n_ahead, None))
        if dense:
            said = softmax(logits)
        else:
            ids = top_ids(logits, width)
            said = softmax_at(logits, ids)
            self.signal_ids[name][place] = ids.swapaxes(0, 1)
        self.signal_scores[name][place] = said.swapaxes(0, 1)

    def signals(self) -> dict[str, Signal]:
        rows = np.arange(self.n_signal, dtype=np.int32)
        return {
            name: Signal(name, rows, scores, self.signal_ids.get(name), **signal_facts(name))
            for name, scores in self.signal_scores.items()
        }

    def gate_inputs(self) -> GateInputs | None:
        return None if self.inputs is None else GateInputs(np.arange(len(self.inputs), dtype=np.int32), self.inputs)


def _request(
    model: SyntheticModel, number: int, rows: slice, n_prompt: int, kept: _Kept, residual: NDArray[np.float16] | None
) -> None:
    p = model.parameters
    first, n_rows = rows.start, rows.stop - rows.start
    unread = None
    if kept.inputs is not None and first < len(kept.inputs):
        unread = unread_parts(model, REQUEST, number, n_rows) + model.mean[:, None, p.width :]
    done, offsets = 0, workload_offsets(model, number)
    for states in request_states(model, REQUEST, number, n_rows, n_prompt):
        here = slice(first + done, first + done + states.shape[1])
        inputs = states + model.mean[:, None, : p.width]
        points = on_grid(inputs)
        logits = read_gates(model, points, offsets)
        ids, weights = route(logits, p.top_k, p.renormalise)
        kept.experts[here], kept.weights[here] = ids.swapaxes(0, 1), weights.swapaxes(0, 1)
        if kept.scores is not None:
            kept.scores[here] = softmax(logits).swapaxes(0, 1)
        if here.start < kept.n_signal:
            for name, said in signal_logits(model, inputs, points, offsets, residual).items():
                kept.put_signal(name, here.start, said, p.top_k)
        if unread is not None and kept.inputs is not None:
            kept.inputs[here, :, : p.width] = inputs.swapaxes(0, 1)
            kept.inputs[here, :, p.width :] = unread[:, done : done + states.shape[1]].swapaxes(0, 1)
        done += states.shape[1]


def _calibrate(model: SyntheticModel, n_requests: int, scores: bool) -> dict[str, NDArray[Any]]:
    if not n_requests:
        return {}
    p, n_rows = model.parameters, CALIBRATION_PROMPT + CALIBRATION_DECODE
    experts = np.empty((n_requests, n_rows, p.n_layers, p.top_k), np.uint16)
    step = np.zeros((p.n_layers, 2 * p.width))
    of_maps: dict[int, list[int]] = {}
    for number, row in map_rows([CALIBRATION_PROMPT] * n_requests, [n_rows] * n_requests) if scores else ():
        of_maps.setdefault(number, []).append(row)

    def make(number: int) -> tuple[NDArray[np.float64], NDArray[np.float16] | None]:
        own = np.concatenate(list(request_states(model, CALIBRATION, number, n_rows, CALIBRATION_PROMPT)), axis=1)
        unread = unread_parts(model, CALIBRATION, number, n_rows)
        whole = on_grid(np.concatenate([own, unread], axis=2) + model.mean[:, None])
        logits = read_gates(model, whole[:, :, : p.width], workload_offsets(model, number))
        experts[number] = top_ids(logits, p.top_k).swapaxes(0, 1)
        maps = softmax(logits[:, of_maps[number]]).astype(np.float16) if number in of_maps else None
        return np.diff(whole.sum(axis=1) / n_rows, axis=0) / n_requests, maps

    made = in_threads(make, range(n_requests))
    for one, _ in made:
        step[:-1] += one
    maps = [one for _, one in made if one is not None]  # (n_layers, n_iterations, n_experts) of each request
    rows = experts.reshape(-1, p.n_layers, p.top_k)
    decode = experts[:, CALIBRATION_PROMPT:].reshape(-1, p.n_layers, p.top_k)
    return {
        "activation_frequency": activation_frequency(rows, p.n_experts).astype(np.float32),
        "activation_frequency_decode": activation_frequency(decode, p.n_experts).astype(np.float32),
        "coactivation": coactivation(rows, p.n_experts).astype(np.float32),
        "residual": step.astype(np.float16),
        MATRICES: np.stack([used(one, p.n_experts) for one in experts[:MOST]], axis=1).astype(np.float32),
        **({MAPS: np.concatenate(maps, axis=1)} if maps else {}),
    }


def _header(
    p: ParameterSet, seed: int, first: int, n_requests: int, n_prompt: int, n_decode: int, n_calibration: int
) -> dict[str, Any]:
    def requests(stream: str, n: int, prompt: int, decode: int, first: int = 0) -> dict[str, Any]:
        return {"seed": seed, "stream": stream, "first": first, "n": n, "n_prompt": prompt, "n_decode": decode}

    return {
        "note": _NOTE,
        "recorder": GENERATOR,
        "seed": seed,
        "hidden": 2 * p.width,
        "synthesis": {
            "fitted_to": p.fitted_to,
            "parameters": p.stated(),
            "origin": {name: p.origin[name] for name in p.origin if name in p.stated()},
            "sha256": hashlib.sha256(p.to_yaml().encode()).hexdigest(),
        },
        "trace_requests": requests("request", n_requests, n_prompt, n_decode, first),
        "calibration_requests": requests("calibration", n_calibration, CALIBRATION_PROMPT, CALIBRATION_DECODE),
    }
