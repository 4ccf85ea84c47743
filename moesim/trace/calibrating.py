"""Additions to a trace: calibration tables, uniform weights and scores.

Tables are counted from held-back tokens, which are left out of the trace: a policy must not know what it is
asked. Whole requests are drawn with a seed, since in many recordings kinds of text take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_pairs
from moesim.errors import InputError
from moesim.trace import Trace
from moesim.trace.derived import subset
from moesim.trace.files import mapped, pieces
from moesim.trace.parts import HELD_BACK, POPULARITY
from moesim.trace.stats.calibration import (
    EMBEDDING,
    MAPS,
    MATRICES,
    RESIDUAL,
    Counts,
    embedding_signal,
    map_rows,
    mean_steps,
    of_iterations,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

FREQUENCY_DECODE = "activation_frequency_decode"
ALL = ("activation_frequency", FREQUENCY_DECODE, "coactivation", RESIDUAL, MATRICES, MAPS)
LATER = (MATRICES, MAPS)
"""Tables that a trace may get although it has others."""


@dataclass(frozen=True)
class Additions:
    """Additions to a trace."""

    # part of the requests (or of each request) that is held back for calibration tables; None: no tables
    share: float | None = None
    seed: int = 0  # of the choice of requests
    # one of "requests", "ends": whole requests; or the last tokens of each: of those decoded, or of the prompt where none were
    # decoded
    held_back: str = HELD_BACK[0]
    # weights, scores: make them up: 1 / top_k for each chosen expert, and 0 for the scores of all others
    weights: bool = False
    scores: bool = False

    @property
    def any(self) -> bool:
        return self.share is not None or self.weights or self.scores


@dataclass(frozen=True)
class _Span:
    """Rows of one request that are held back."""

    request: int
    first: int
    stop: int
    n_prompt: int


def extend(trace: Trace, additions: Additions, place: str, folder: Path | None = None) -> Trace:
    """Add to a trace what it lacks."""
    if not additions.any:
        raise InputError(f"{place}: expected something to add, got nothing; give --share, --weights uniform or --scores uniform")
    _check_made_up(trace, additions, place)
    check_size(additions, trace.n_layers, trace.n_experts, place)
    trace = _with_uniform(trace, additions, folder)
    if additions.share is not None:
        trace = _calibrated(trace, additions.share, additions, place, folder)
    return trace


def with_popularity(trace: Trace, counts: NDArray[np.float64], source: str) -> Trace:
    """Add the table of frequencies from counts of another recording of the same model, of each layer and expert."""
    if trace.label == "synthetic" or trace.tables:
        got = (
            f"tables {', '.join(sorted(trace.tables))}"
            if trace.tables
            else "a synthetic one, whose experts are not those counted"
        )
        raise InputError(f"{source}: expected a recorded trace without calibration tables, got {got}; choose another trace")
    table = (counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    header = {**trace.header, POPULARITY: Path(source).name}
    header |= _absent(header, "calibration tables", [f"calibration table {name}" for name in ALL[1:]])
    return replace(trace, tables={ALL[0]: table}, header=header)


def check_size(additions: Additions, n_layers: int, n_experts: int, place: str) -> None:
    """Refuse tables for too many experts before any is made."""
    if additions.share is not None:
        check_pairs(f"{place}: calibration", n_layers, n_experts)


def _check_made_up(trace: Trace, additions: Additions, place: str) -> None:
    has = [name for name in ("scores", "weights") if getattr(trace, name) is not None]
    for name, asked in (("weights", additions.weights), ("scores", additions.scores)):
        if asked and has:
            raise InputError(
                f"--{name} uniform: expected a trace without weights and scores, got {' and '.join(has)} in {place}; leave it "
                "out: policies that read scores take the recorded weights where there are no scores"
            )


def _calibrated(trace: Trace, share: float, additions: Additions, place: str, folder: Path | None) -> Trace:
    if not 0 < share < 1:
        raise InputError(f"{place}: expected a share to hold back, above 0 and below 1, got {share:g}; for example 0.25")
    has = trace.tables
    weighed = trace.scores is not None or trace.weights is not None
    wanted = [name for name in (LATER if has else ALL) if name not in has and (weighed or name != MAPS)]
    if not wanted:
        raise InputError(
            f"{place}: expected a trace without calibration tables, got {', '.join(sorted(has))}; use it as it is, or "
            "calibrate the trace from which it was made"
        )
    choose = _whole_requests if additions.held_back == "requests" else _ends
    held, kept, n_rows = choose(trace, share, additions.seed, place)
    tables = {**has, **{name: table for name, table in _tables(trace, held).items() if name in wanted}}
    n_tokens = sum(span.stop - span.first for span in held)
    facts = {"what": additions.held_back, "share": share, "seed": additions.seed, "n": len(held), "rows": n_tokens}
    listed = [_entry(trace, span) for span in held]
    left = subset(trace, kept, n_rows, folder)
    if has:  # which were counted from other requests
        facts["tables"] = wanted
        before = left.header.get("calibration_requests")
        listed = [*(before if isinstance(before, list) else [before] if before else []), *listed]
    header = {**left.header, "held_back": {**facts, "of": trace.n_requests}, "calibration_requests": listed}
    names = [name for name in ALL if name not in tables]
    header |= _absent(header, "calibration tables", [f"calibration table {name}" for name in names])
    if MAPS in wanted and trace.embeddings is not None:
        past = _held_embeddings(trace, held)
        left = replace(left, signals={**left.signals, EMBEDDING: embedding_signal(left, past, tables[MAPS], folder)})
    return replace(left, tables=tables, header=header)


def _whole_requests(trace: Trace, share: float, seed: int, place: str) -> tuple[list[_Span], list[int], None]:
    n = trace.n_requests
    if n < 2:
        raise InputError(
            f"{place}: expected two or more requests, some to hold back and some to simulate, got 1; add --hold-back ends to "
            "hold back the end of the request instead"
        )
    n_held = min(max(1, round(share * n)), n - 1)
    held = np.sort(np.random.default_rng(seed).permutation(n)[:n_held]).tolist()
    kept = np.delete(np.arange(n), held).tolist()
    return [_span(trace, request, 0) for request in held], kept, None


def _ends(trace: Trace, share: float, seed: int, place: str) -> tuple[list[_Span], list[int], list[int]]:
    table = trace.requests
    total = table.n_prompt + table.n_decode
    cut_from = np.where(table.n_decode > 0, table.n_decode, table.n_prompt)
    n_held = np.minimum(np.maximum(1, np.rint(share * cut_from).astype(np.int64)), total - 1)
    if not n_held.any():
        raise InputError(f"{place}: expected requests of two or more tokens, got one token each; leave --hold-back ends out")
    left = (total - n_held).tolist()
    return [_span(trace, r, keep) for r, keep in enumerate(left) if n_held[r]], list(range(len(total))), left


def _span(trace: Trace, request: int, skipped: int) -> _Span:
    table = trace.requests
    first, n_prompt = int(table.first_row[request]), int(table.n_prompt[request])
    stop = first + n_prompt + int(table.n_decode[request])
    return _Span(request, first + skipped, stop, max(0, n_prompt - skipped))


def _tables(trace: Trace, held: Sequence[_Span]) -> dict[str, NDArray[Any]]:
    hidden = 0 if trace.inputs is None else trace.inputs.values.shape[2]
    counts = Counts(trace.n_layers, trace.n_experts, hidden)
    n_inputs = 0
    for span in held:
        left = span.n_prompt
        for piece in pieces(trace.experts[span.first : span.stop]):
            counts.add(np.asarray(piece), max(0, left))
            left -= len(piece)
        if trace.inputs is not None:
            first, last = np.searchsorted(trace.inputs.rows, (span.first, span.stop)).tolist()
            counts.add_inputs(trace.inputs.values[first:last].sum(axis=0, dtype=np.float64))
            n_inputs += last - first
    tables = counts.tables()
    if not counts.arrays["decode"].any():
        del tables[FREQUENCY_DECODE]
    del tables[RESIDUAL]
    if n_inputs:
        tables[RESIDUAL] = mean_steps(counts.arrays["inputs"], n_inputs)
    if trace.scores is not None or trace.weights is not None:
        tables[MAPS] = np.stack([_expert_map(trace, span.first + row) for span, row in _iterations(held)], axis=1)
    return tables


def _iterations(held: Sequence[_Span]) -> list[tuple[_Span, int]]:
    places = map_rows([span.n_prompt for span in held], [span.stop - span.first for span in held])
    return [(held[number], row) for number, row in places]


def _held_embeddings(trace: Trace, held: Sequence[_Span]) -> NDArray[np.float64]:
    assert trace.embeddings is not None
    table, found = trace.requests, []
    for span, places in groupby(_iterations(held), key=itemgetter(0)):
        first = int(table.first_row[span.request])
        whole = of_iterations(trace.embeddings[first : span.stop], int(table.n_prompt[span.request]))
        found.append(whole[[span.first - first + row for _, row in places]])
    return np.concatenate(found)


def _expert_map(trace: Trace, row: int) -> NDArray[np.float16]:
    if trace.scores is not None:
        return np.asarray(trace.scores[row], np.float16)
    found = np.zeros((trace.n_layers, trace.n_experts), np.float16)
    assert trace.weights is not None
    np.put_along_axis(found, np.asarray(trace.experts[row], np.int64), np.asarray(trace.weights[row]), axis=1)
    return found


def _entry(trace: Trace, span: _Span) -> dict[str, Any]:
    n_rows, start = span.stop - span.first, span.first - int(trace.requests.first_row[span.request])
    entry = {"request": span.request, "first_row": start, "n_prompt": span.n_prompt, "n_decode": n_rows - span.n_prompt}
    names, hashes = (_listed(trace.header.get(key), span.request) for key in ("requests", "trace_requests"))
    if isinstance(hashes, dict):
        entry = {**hashes, **entry}
    return entry if names is None else {**entry, "name": names}


def _listed(entries: Any, request: int) -> Any:
    return entries[request] if isinstance(entries, list) and request < len(entries) else None


def _with_uniform(trace: Trace, additions: Additions, folder: Path | None) -> Trace:
    names = [name for name, asked in (("weights", additions.weights), ("scores", additions.scores)) if asked]
    if not names:
        return trace
    each = np.float16(1 / trace.top_k)
    weights = np.broadcast_to(each, trace.experts.shape) if additions.weights else trace.weights
    scores = _uniform_scores(trace, each, folder) if additions.scores else trace.scores
    header = {**trace.header, "made_up": [*trace.made_up, *names]}
    for name in names:
        header |= _absent(header, name, [])
    return replace(trace, weights=weights, scores=scores, header=header)


def _uniform_scores(trace: Trace, each: np.float16, folder: Path | None) -> NDArray[Any]:
    shape = (trace.n_rows, trace.n_layers, trace.n_experts)
    if folder is None:
        scores: NDArray[Any] = np.zeros(shape, np.float16)
    else:
        with (folder / "uniform_scores").open("w+b") as file:
            scores = mapped(file, np.float16, shape)
    first = 0
    for part in pieces(scores):
        np.put_along_axis(part, np.asarray(trace.experts[first : first + len(part)], np.int64), each, axis=2)
        first += len(part)
    return scores


def _absent(header: Mapping[str, Any], gone: str, lacking: Sequence[str]) -> dict[str, Any]:
    if not isinstance(absent := header.get("absent"), list):
        return {}
    return {"absent": sorted({*(name for name in absent if name != gone), *lacking})}
