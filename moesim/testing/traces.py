"""Made-up traces for tests and benchmarks: cheap, seeded, and labelled synthetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace import Signal, Trace
from moesim.trace.stats.balance import activation_frequency, used
from moesim.trace.stats.calibration import EMBEDDING, MAPS, MATRICES, MOST, map_rows
from moesim.trace.stats.prediction import coactivation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_DENSE_UP_TO = 16  # experts up to which a signal is recorded dense
_RANGE = 4.0  # between the largest and the smallest logit of a token


def synthetic_trace(
    n_layers: int = 4,
    n_experts: int = 8,
    top_k: int = 2,
    n_requests: int = 4,
    prompt: int | Sequence[int] = 16,
    decode: int | Sequence[int] = 16,
    seed: int = 0,
    skew: float = 0.5,
    reuse: float = 0.3,
    *,
    scores: bool = False,
    calibration: bool = False,
    signals: Mapping[str, float] | None = None,
) -> Trace:
    """Make a trace up.

    >>> trace = synthetic_trace(n_layers=2, n_requests=3, prompt=5, decode=[4, 6, 5])
    >>> trace.label, trace.experts.shape, trace.requests.n_decode.tolist()
    ('synthetic', (30, 2, 2), [4, 6, 5])
    """
    rng = np.random.default_rng(seed)
    lengths = [np.broadcast_to(np.asarray(n, np.int64), (n_requests,)) for n in (prompt, decode)]
    popularity = np.log(np.arange(1, n_experts + 1, dtype=np.float64)) * -skew
    popularity = rng.permuted(np.tile(popularity, (n_layers, 1)), axis=1)
    full, ids, weights = _route(rng, popularity, lengths[0] + lengths[1], top_k, reuse)
    tables = {}
    if calibration:
        phase = _phases(*lengths)
        likely, other, _ = _route(rng, popularity, lengths[0] + lengths[1], top_k, reuse)
        ends = np.cumsum(lengths[0] + lengths[1])
        tables = _tables(other, phase, n_experts) | _matrices(likely, other, ends, lengths[0])
    return Trace.build(
        experts=ids, weights=weights, n_prompt=lengths[0], n_decode=lengths[1], n_experts=n_experts,
        model=f"synthetic-{n_layers}x{n_experts}", label="synthetic", scores=full if scores else None,
        signals={name: _signal(rng, name, ids, full, r) for name, r in (signals or {}).items()},
        tables=tables,
        header={"source": f"moesim.testing.synthetic_trace, seed {seed}, skew {skew}, reuse {reuse}"},
    )  # fmt: skip


def _phases(n_prompt: NDArray[np.int64], n_decode: NDArray[np.int64]) -> NDArray[np.int64]:
    pairs = np.stack([n_prompt, n_decode], axis=1).ravel()
    return np.repeat(np.tile([0, 1], len(n_prompt)), pairs)


def _route(
    rng: np.random.Generator, popularity: NDArray[np.float64], n_tokens: NDArray[np.int64], top_k: int, reuse: float
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Draw softmax scores, ids in rank order and weights, request after request."""
    n_layers, n_experts = popularity.shape
    logits = np.empty((len(n_tokens), int(n_tokens.max()), n_layers, n_experts), np.float32)
    before = None
    for t in range(logits.shape[1]):
        drawn = popularity + rng.gumbel(size=(len(n_tokens), n_layers, n_experts))
        if before is not None:
            kept = rng.random(before.shape) < reuse
            held = np.take_along_axis(drawn, before, axis=2)
            # Above everything that was drawn, in the order of the draw.
            np.put_along_axis(drawn, before, np.where(kept, held + np.ptp(drawn), held), axis=2)
        logits[:, t] = drawn
        before = np.argsort(-drawn, axis=2, kind="stable")[:, :, :top_k]  # a partition's order depends on the processor
    present = np.arange(logits.shape[1]) < n_tokens[:, None]
    flat = logits[present]
    # What is used again was drawn far above the rest; a softmax of that would give everything to one expert.
    flat *= _RANGE / np.ptp(flat, axis=2, keepdims=True)
    # Exponentials of 32 bits differ from processor to processor; of 64 bits, the first 24 do not.
    powers = np.exp((flat - flat.max(axis=2, keepdims=True)).astype(np.float64))
    softmax = (powers / powers.sum(axis=2, keepdims=True)).astype(np.float32)
    ids = np.argsort(-flat, axis=2, kind="stable")[:, :, :top_k]
    chosen = np.take_along_axis(softmax, ids, axis=2)
    return softmax, ids, chosen / chosen.sum(axis=2, keepdims=True)


def _tables(ids: NDArray[np.int64], phase: NDArray[np.int64], n_experts: int) -> dict[str, NDArray[Any]]:
    return {
        "activation_frequency": activation_frequency(ids, n_experts).astype(np.float32),
        "activation_frequency_decode": activation_frequency(ids[phase == 1], n_experts).astype(np.float32),
        "coactivation": coactivation(ids, n_experts).astype(np.float32),
    }


def _matrices(
    scores: NDArray[np.float32], ids: NDArray[np.int64], ends: NDArray[np.int64], n_prompt: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    starts = np.concatenate([[0], ends[:-1]])
    places = map_rows(n_prompt.tolist(), (ends - starts).tolist())
    counts = [used(ids[start:end], scores.shape[2]) for start, end in zip(starts, ends, strict=True)]
    return {
        MATRICES: np.stack(counts[:MOST], axis=1).astype(np.float32),
        MAPS: np.stack([scores[starts[request] + row] for request, row in places], axis=1).astype(np.float16),
    }


def _signal(rng: np.random.Generator, name: str, ids: NDArray[np.int64], full: NDArray[np.float32], recall: float) -> Signal:
    """Predict the true ids with some of them pushed below the rest."""
    n_rows, _, top_k = ids.shape
    n_experts = full.shape[2]
    said = full.copy()
    lost = rng.random(ids.shape) >= recall
    others = full + rng.random(full.shape)
    np.put_along_axis(others, ids, -1.0, axis=2)
    best_others = np.argsort(-others, axis=2, kind="stable")[:, :, :top_k]
    of_ids, of_others = (np.take_along_axis(full, which, axis=2) for which in (ids, best_others))
    if n_experts >= 2 * top_k:  # swap the scores of what is lost with those of others
        np.put_along_axis(said, ids, np.where(lost, of_others, of_ids), axis=2)
        np.put_along_axis(said, best_others, np.where(lost, of_ids, of_others), axis=2)
    rows = np.arange(n_rows, dtype=np.int32)
    at_any_time = {"lookahead": 0, "needs_layer_offset": None, "first_layer": 0}
    facts: dict[str, Any] = at_any_time if name.startswith(("shadow", EMBEDDING)) else {}
    if n_experts <= _DENSE_UP_TO:
        return Signal(name, rows, said.astype(np.float16), **facts)
    width = min(2 * top_k, n_experts)
    best = np.argsort(-said, axis=2, kind="stable")[:, :, :width]
    kind = np.uint8 if n_experts <= 256 else np.uint16
    return Signal(name, rows, np.take_along_axis(said, best, axis=2).astype(np.float16), best.astype(kind), **facts)
