"""What a miniature's trace leaves out, so that its file is small: rows and ids of signals, and digits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesim.trace import Signal, Trace

#: A weight is a multiple of 1/512, a score of the router of 1/256; both are exact in half precision.
WEIGHT_PARTS, SCORE_PARTS = 512, 256
#: Bits of the mantissa that scores next to ids keep: within 6 %. Dense ones keep all, since their order tells the ids.
SIGNAL_BITS = 3
#: Bits of the mantissa of half precision.
_HALF_BITS = 10

ROUTING = f"weights are multiples of 1/{WEIGHT_PARTS} and scores of 1/{SCORE_PARTS}, with the sum of each row kept to such a part"
SIGNALS = f"scores of signals keep {SIGNAL_BITS} bits of their mantissa"


def slim(trace: Trace) -> Trace:
    """Leave out of a miniature's trace what makes the file large and is of little use.

    Parameters
    ----------
    trace : Trace
        As it was recorded; a trace that is slim already stays as it is.

    Returns
    -------
    Trace
        Without the routers' inputs, which were for the learned signal; without prompts in the signals; with the best
        1.5 top_k ids of each signal, and top_k of the shadow, which stands for a model and not for scores; with
        co-activations as whole numbers; rounded as `ROUTING` and, where a signal has ids, `SIGNALS` say; the header has that.
    """
    sparse = any(signal.ids is not None for signal in trace.signals.values())
    counts = trace.tables["coactivation"]
    return replace(
        trace,
        inputs=None,
        weights=None if trace.weights is None else _in_parts(trace.weights, WEIGHT_PARTS, 1),
        scores=None if trace.scores is None else _in_parts(trace.scores, SCORE_PARTS, 0, _turns(trace)),
        signals={name: _slim_signal(trace, name, signal) for name, signal in trace.signals.items()},
        tables={**trace.tables, "coactivation": counts.astype(np.uint16 if counts.max() < 2**16 else np.uint32)},
        header={**trace.header, "rounding": f"{ROUTING}; {SIGNALS}" if sparse else ROUTING},
    )


def _slim_signal(trace: Trace, name: str, signal: Signal) -> Signal:
    decode = np.asarray(trace.phase)[signal.rows] == 1
    scores, ids = signal.scores[decode], signal.ids
    if ids is not None:
        most = trace.top_k if name.startswith("shadow") else trace.top_k * 3 // 2
        ids, scores = ids[decode][..., :most], _short(scores[..., :most])
    return replace(signal, rows=signal.rows[decode], ids=ids, scores=scores)


def _turns(trace: Trace) -> NDArray[np.uint8]:
    """Whose turn it is among equal scores: the routed experts in their order, then the others."""
    turns = np.full((trace.n_rows, trace.n_layers, trace.n_experts), trace.top_k, np.uint8)
    rank = np.broadcast_to(np.arange(trace.top_k, dtype=np.uint8), trace.experts.shape)
    np.put_along_axis(turns, trace.experts.astype(np.int64), rank, axis=-1)
    return turns


def _in_parts(values: NDArray[Any], parts: int, least: int, turns: NDArray[np.uint8] | None = None) -> NDArray[np.float16]:
    """Round to multiples of 1/parts, at least so many: by largest remainder, so that sums and order stay."""
    exact = np.asarray(values, np.float64) * parts
    whole = np.maximum(np.floor(exact), least)
    missing = np.rint(exact.sum(axis=-1)) - whole.sum(axis=-1)
    by_remainder = np.lexsort((np.zeros_like(exact) if turns is None else turns, whole - exact), axis=-1)
    rank = np.argsort(by_remainder, axis=-1, kind="stable")
    whole += rank < missing[..., None]
    largest = np.arange(whole.shape[-1]) == whole.argmax(axis=-1)[..., None]
    whole += largest * np.minimum(missing, 0)[..., None]  # what the least part added too much
    return (whole / parts).astype(np.float16)


def _short(scores: NDArray[np.float16]) -> NDArray[np.float16]:
    """Round the mantissa; what was no larger than another stays so."""
    lost = _HALF_BITS - SIGNAL_BITS
    bits = scores.view(np.uint16).astype(np.uint32) + (1 << (lost - 1))
    return np.asarray(bits >> lost << lost, np.uint16).view(np.float16)
