"""Iterations compared by the embeddings of their tokens: which past one the present one is most like, and a signal of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.files import empty
from moesim.trace.parts import Signal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

EMBEDDING = "embedding"
"""Name of the signal."""
ABOUT = (
    "expert map of the held-back iteration with the closest embedding: its probabilities (sum 1) times the cosine (0 to 1); a "
    "prompt's row counts as the mean embedding of the prompt up to it"
)
DECIMALS = 12
"""To which cosines are compared, so that rounding breaks no tie."""
_ROWS = 512  # compared at a time


def cosines(past: NDArray[Any], present: NDArray[Any]) -> NDArray[np.float64]:
    """Compute the cosine of each row of ``present`` with each row of ``past``, (n_present, n_past); 0 where either has no length.

    >>> cosines(np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([[0.0, 2.0], [0.0, 0.0]])).tolist()
    [[0.0, 0.8], [0.0, 0.0]]
    """
    past, present = np.asarray(past, np.float64), np.asarray(present, np.float64)
    lengths = np.sqrt(np.square(present).sum(axis=1)[:, None] * np.square(past).sum(axis=1))
    products = present @ past.T
    return np.asarray(np.divide(products, lengths, out=np.zeros(products.shape), where=lengths > 0))


def closest(past: NDArray[Any], present: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Find for each row of ``present`` the row of ``past`` with the largest cosine, of equals (to 12 decimals) the first.

    Returns indices and cosines, (n_present,) each.
    """
    found = cosines(past, present)
    best = found.round(DECIMALS).argmax(axis=1)
    return best, found[np.arange(len(best)), best]


def of_iterations(embeddings: NDArray[Any], n_prompt: int) -> NDArray[np.float64]:
    """Embed the iteration that ends with each row of a request: the mean of the prompt up to it, or the decoded token's own.

    >>> of_iterations(np.array([[2.0], [4.0], [7.0]]), 2).ravel().tolist()
    [2.0, 3.0, 7.0]
    """
    found = np.array(embeddings, np.float64)
    found[:n_prompt] = np.cumsum(found[:n_prompt], axis=0) / np.arange(1, n_prompt + 1)[:, None]
    return found


def embedding_signal(trace: Trace, past: NDArray[np.float64], maps: NDArray[Any], folder: Path | None) -> Signal:
    """Tell for every row of a trace the map, of (n_layers, n_past, n_experts), of the iteration with the closest embedding."""
    found = empty((trace.n_rows, trace.n_layers, trace.n_experts), np.dtype(np.float16), folder)
    totals = np.asarray(maps, np.float64).sum(axis=2, keepdims=True)
    shares = np.divide(maps, totals, out=np.zeros(maps.shape), where=totals > 0)
    for rows, embeddings in _pieces(trace):
        index, cosine = closest(past, embeddings)
        found[rows] = shares[:, index].swapaxes(0, 1) * np.clip(cosine, 0, 1)[:, None, None]
    return Signal(EMBEDDING, np.arange(trace.n_rows, dtype=np.int32), found, None, 0, None, 0, ABOUT)


def _pieces(trace: Trace) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Give the embeddings of a trace's iterations, and their rows, some at a time."""
    assert trace.embeddings is not None
    table = trace.requests
    for first, prompt, decode in zip(table.first_row.tolist(), table.n_prompt.tolist(), table.n_decode.tolist(), strict=True):
        whole = of_iterations(trace.embeddings[first : first + prompt + decode], prompt)
        for start in range(0, len(whole), _ROWS):
            piece = whole[start : start + _ROWS]
            yield slice(first + start, first + start + len(piece)), piece
