"""The learned predictor on traces: trained on one, it becomes a signal of another, with its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.recorder import RecordError
from moesim.recorder.learned import GROUPS, LearnedOptions, Predictors, eighths, fitted_groups, predict, train_predictors
from moesim.recorder.signals import DENSE_EXPERTS, pack
from moesim.trace import GateInputs, Signal, Trace
from moesim.trace.stats.balance import used
from moesim.trace.stats.batches import workloads
from moesim.trace.stats.prediction import recall, top_ids

NAME = "learned"
RIVALS = ("gate_next1", "residual")  # predictors that it is compared with, where the trace has them
#: PreScope's accuracy: so many experts are named as the busiest, each is right within so many of the true ones.
HOT_NAMED, HOT_RIGHT = 4, 6

_CHUNK_ROWS = 1024
_HASHES = ("text_sha256", "tokens_sha256")
_SAME = ("model", "n_layers", "n_experts", "top_k", "routers_sha256")


def check_no_shared_requests(calibration: Mapping[str, Any], trace: Mapping[str, Any], places: tuple[str, str]) -> None:
    """Check that no request of one trace is in another."""
    ours = _requests(calibration, places[0])
    for number, marks in enumerate(_requests(trace, places[1])):
        for other, those in enumerate(ours):
            if marks & those:
                raise RecordError(
                    f"{places[1]}: trace_requests[{number}]: expected a request that the predictor was not trained on, got "
                    f"request {other} of {places[0]}; record other prompts for calibration"
                )


def _requests(header: Mapping[str, Any], place: str) -> list[set[tuple[str, str]]]:
    """What each request of a trace can be recognised by."""
    listed = header.get("trace_requests")
    if not isinstance(listed, list) or not listed:
        raise RecordError(
            f"{place}: header.trace_requests: expected a list of requests, got {listed!r}; without it nothing shows that "
            "calibration and trace are apart: record it with moesim trace record"
        )
    found = []
    for number, request in enumerate(listed):
        facts = request if isinstance(request, dict) else {}
        hashes = {(key, str(value)) for key, value in facts.items() if key in _HASHES}
        if not hashes and "file" in facts and "start" in facts:
            hashes = {("file", f"{facts['file']}:{facts['start']}")}
        if not hashes:
            raise RecordError(f"{place}: header.trace_requests[{number}]: expected a hash, or file and start, got {request!r}")
        found.append(hashes)
    return found


def check_same_model(calibration: Trace, trace: Trace, places: tuple[str, str]) -> None:
    """Check that two traces with gate inputs are of the same model."""
    for found, place in zip((calibration, trace), places, strict=True):
        _learnable(found, place)
    pairs = [(key, calibration.header.get(key), trace.header.get(key)) for key in _SAME]
    pairs.append(
        ("hidden", _learnable(calibration, places[0])[0].values.shape[2], _learnable(trace, places[1])[0].values.shape[2])
    )
    for key, ours, theirs in pairs:
        if ours is not None and theirs is not None and ours != theirs:
            raise RecordError(
                f"{places[0]}: {key}: expected {theirs!r} as in {places[1]}, got {ours!r}; record both with one model"
            )


def _learnable(trace: Trace, place: str) -> tuple[GateInputs, NDArray[Any]]:
    """Gate inputs and weights of a trace that must have both."""
    if trace.inputs is None or not len(trace.inputs.rows):
        raise RecordError(
            f"{place}: inputs: expected the inputs of the routers, got none; record it with moesim trace record --keep-inputs all"
        )
    if trace.weights is None:
        raise RecordError(f"{place}: weights: expected gate weights, got none; record it with moesim trace record")
    return trace.inputs, trace.weights


def train_on(
    trace: Trace, options: LearnedOptions, *, fit_groups: bool = False, place: str = "calibration",
    on_layer: Callable[[int, float], None] = lambda layer, loss: None,
) -> Predictors:  # fmt: skip
    """Train predictors on all rows of a trace that have gate inputs."""
    inputs, weights = _learnable(trace, place)
    groups = eighths(trace.n_layers)
    if fit_groups:
        if RIVALS[0] not in trace.signals:
            raise RecordError(f"{place}: signals: expected '{RIVALS[0]}' to fit groups of layers to, got {sorted(trace.signals)}")
        groups = fitted_groups(_recall(trace, trace.signals[RIVALS[0]], trace.signals[RIVALS[0]].rows))
    facts = {"trained_on": trace.header.get("trace_requests", []), "n_tokens": len(inputs.rows), "model": trace.model}
    experts = np.asarray(trace.experts)[inputs.rows]
    given = inputs.values, experts, np.asarray(weights)[inputs.rows], trace.n_experts
    return train_predictors(*given, options, groups=groups, facts=facts, on_layer=on_layer)


def learned_signal(predictors: Predictors, trace: Trace, place: str = "trace") -> Signal:
    """Predict every row of a trace that has gate inputs."""
    inputs, weights = _learnable(trace, place)
    scores, ids = [], []
    for part in _chunks(len(inputs.rows)):
        rows = inputs.rows[part]
        dense = predict(predictors, inputs.values[part], np.asarray(trace.experts[rows]), np.asarray(weights[rows]))
        best = np.argsort(-dense, axis=-1, kind="stable")[..., : trace.top_k]
        kept, which = pack(dense, best, dense=trace.n_experts <= DENSE_EXPERTS)
        kept[:, 0] = 0  # nothing comes before the first layer
        scores.append(kept)
        if which is not None:
            which[:, 0] = 0
            ids.append(which)
    about = "networks trained on other requests, from the input, the experts and the gate weights of router l - 1"
    return Signal(NAME, np.asarray(inputs.rows), np.concatenate(scores), np.concatenate(ids) if ids else None, 1, 1, 1, about)


def _chunks(n_rows: int) -> Iterator[slice]:
    for start in range(0, n_rows, _CHUNK_ROWS):
        yield slice(start, start + _CHUNK_ROWS)


def with_signal(trace: Trace, signal: Signal, predictors: Predictors) -> Trace:
    """Add the signal to a trace; the header says which requests it was trained on."""
    facts = {**predictors.facts, "options": asdict(predictors.options), "groups": list(predictors.groups)}
    return replace(trace, signals={**trace.signals, NAME: signal}, header={**trace.header, NAME: facts})


def accuracy(
    trace: Trace, calibration: Trace, groups: tuple[str, ...], batch_tokens: int = 64, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare the learned predictor with others, group by group: recall, and the share of 4 named experts among the 6 busiest."""
    signals = [trace.signals[name] for name in (NAME, *RIVALS) if name in trace.signals]
    rows = signals[0].rows
    for signal in signals[1:]:
        rows = np.intersect1d(rows, signal.rows)
    if not len(rows):
        raise RecordError(
            f"signals: expected rows that all of {[s.name for s in signals]} cover, got none; record them for the same"
        )
    said = {signal.name: top_ids(signal, np.isin(signal.rows, rows), trace.top_k) for signal in signals}
    said["frequency"] = np.broadcast_to(_most_frequent(calibration), (len(rows), trace.n_layers, trace.top_k))
    true = np.asarray(trace.experts)[rows]
    by_layer = {
        name: (recall(ids, true), hot_accuracy(ids, true, trace.n_experts, batch_tokens, seed)) for name, ids in said.items()
    }
    table = []
    for group in (*GROUPS, "all"):
        layers = [n for n in range(1, trace.n_layers) if group in (groups[n], "all")]
        if layers:
            row: dict[str, Any] = {"group": group, "layers": f"{layers[0]}-{layers[-1]}", "n_tokens": len(rows)}
            for name, (found, hot) in by_layer.items():
                row |= {f"{name} recall": float(found[layers].mean()), f"{name} hot": float(hot[layers].mean())}
            table.append(row)
    return table


def _recall(trace: Trace, signal: Signal, rows: NDArray[Any]) -> NDArray[np.float64]:
    return recall(top_ids(signal, np.isin(signal.rows, rows), trace.top_k), np.asarray(trace.experts)[rows])


def _most_frequent(trace: Trace) -> NDArray[np.int64]:
    """The top_k most activated experts of each layer, (n_layers, top_k)."""
    return np.argsort(-used(np.asarray(trace.experts), trace.n_experts), axis=1, kind="stable")[:, : trace.top_k]


def hot_accuracy(said: NDArray[Any], true: NDArray[Any], n_experts: int, batch_tokens: int, seed: int) -> NDArray[np.float64]:
    """Return PreScope's "hot Top-4" by layer: the share of the experts named as busiest that are among the busiest."""
    n_rows, n_layers = true.shape[:2]
    if n_experts <= HOT_RIGHT:
        return np.full(n_layers, np.nan)
    size = min(batch_tokens, n_rows)
    batches = np.random.default_rng(seed).permutation(n_rows)[: n_rows // size * size].reshape(-1, size)
    found = np.empty(n_layers)
    for layer in range(n_layers):
        expected, actual = (workloads(ids[:, layer][batches], n_experts) for ids in (said, true))
        named = np.argsort(-expected, axis=1, kind="stable")[:, :HOT_NAMED]
        least = np.maximum(1, np.sort(actual, axis=1)[:, -HOT_RIGHT])
        found[layer] = (np.take_along_axis(actual, named, axis=1) >= least[:, None]).mean()
    return found
