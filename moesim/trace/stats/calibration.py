"""Calibration: tables and embeddings of requests that are not simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_pairs
from moesim.trace.files import empty
from moesim.trace.parts import Signal
from moesim.trace.stats.balance import used
from moesim.trace.stats.prediction import coactivation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

RESIDUAL = "residual"
"""Name of the table of mean steps between the inputs of routers, and of the signal that is made with it."""
MATRICES = "activation_matrices"
MAPS = "expert_maps"
MOST = 1000
"""Activation matrices and expert maps that are kept at most: what the systems store that use them, MoE-Infinity and FineMoE."""


class Counts:
    """Counts of calibration, request by request."""

    def __init__(self, n_layers: int, n_experts: int, hidden: int) -> None:
        check_pairs("calibration tables", n_layers, n_experts)
        self._n_experts = n_experts
        # `prefill` and `decode` (n_layers, n_experts) int64: rows that used an expert; `pairs` (n_layers, n_experts, n_experts)
        # int64: rows that used i in l and j in l + 1; `inputs` (n_layers, hidden) float64: sum of the routers' inputs; `rows`
        # (1,) int64
        self.arrays: dict[str, NDArray[Any]] = {
            "prefill": np.zeros((n_layers, n_experts), np.int64),
            "decode": np.zeros((n_layers, n_experts), np.int64),
            "pairs": np.zeros((n_layers, n_experts, n_experts), np.int64),
            "inputs": np.zeros((n_layers, hidden), np.float64),
            "rows": np.zeros(1, np.int64),
            # (n_layers, n_requests, n_experts) int32: tokens of each request, of the first `MOST`, that used each expert
            "matrices": np.zeros((n_layers, 0, n_experts), np.int32),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays = {name: np.array(arrays[name]) for name in self.arrays}

    def add(self, experts: NDArray[Any], n_prompt: int) -> None:
        """Count a request, (n_rows, n_layers, top_k), the prompt first."""
        self.arrays["prefill"] += used(experts[:n_prompt], self._n_experts)
        self.arrays["decode"] += used(experts[n_prompt:], self._n_experts)
        self.arrays["pairs"] += coactivation(experts, self._n_experts).astype(np.int64)
        self.arrays["rows"] += len(experts)
        if self.arrays["matrices"].shape[1] < MOST:
            matrix = used(experts, self._n_experts).astype(np.int32)
            self.arrays["matrices"] = np.concatenate([self.arrays["matrices"], matrix[:, None]], axis=1)

    def add_inputs(self, sums: NDArray[np.float64]) -> None:
        """Add the sum of the routers' inputs over the rows of some requests."""
        self.arrays["inputs"] += sums

    def tables(self) -> dict[str, NDArray[Any]]:
        both = self.arrays["prefill"] + self.arrays["decode"]
        return {
            "activation_frequency": _shares(both),
            "activation_frequency_decode": _shares(self.arrays["decode"]),
            "coactivation": self.arrays["pairs"].astype(np.float32),
            RESIDUAL: mean_steps(self.arrays["inputs"], int(self.arrays["rows"][0])),
            MATRICES: self.arrays["matrices"].astype(np.float32),
        }


def mean_steps(sums: NDArray[np.float64], n_rows: int) -> NDArray[np.float16]:
    """Compute the mean step from the input of each router to that of the next."""
    steps = np.diff(sums, axis=0) / max(1, n_rows)
    return np.concatenate([steps, np.zeros_like(sums[:1])]).astype(np.float16)


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.asarray(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)), np.float32)


def map_rows(n_prompt: Sequence[int], n_rows: Sequence[int]) -> list[tuple[int, int]]:
    """Choose rows of expert maps: the last of each prompt and each decoded one."""
    rows = [
        (request, row)
        for request, (prompt, n) in enumerate(zip(n_prompt, n_rows, strict=True))
        for row in range(max(0, prompt - 1), n)
    ]
    if len(rows) <= MOST:
        return rows
    return [rows[place * len(rows) // MOST] for place in range(MOST)]


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
    """Compute the cosine of each row of ``present`` with each of ``past``; 0 without a length."""
    past, present = np.asarray(past, np.float64), np.asarray(present, np.float64)
    lengths = np.sqrt(np.square(present).sum(axis=1)[:, None] * np.square(past).sum(axis=1))
    products = present @ past.T
    return np.asarray(np.divide(products, lengths, out=np.zeros(products.shape), where=lengths > 0))


def closest(past: NDArray[Any], present: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Find for each row of ``present`` the row of ``past`` with the largest cosine."""
    found = cosines(past, present)
    best = found.round(DECIMALS).argmax(axis=1)
    return best, found[np.arange(len(best)), best]


def of_iterations(embeddings: NDArray[Any], n_prompt: int) -> NDArray[np.float64]:
    """Embed each row: the mean of the prompt up to it, or the decoded token."""
    found = np.array(embeddings, np.float64)
    found[:n_prompt] = np.cumsum(found[:n_prompt], axis=0) / np.arange(1, n_prompt + 1)[:, None]
    return found


def embedding_signal(trace: Trace, past: NDArray[np.float64], maps: NDArray[Any], folder: Path | None) -> Signal:
    """Make a signal: for every row the map of the past iteration with the closest embedding."""
    found = empty((trace.n_rows, trace.n_layers, trace.n_experts), np.dtype(np.float16), folder)
    totals = np.asarray(maps, np.float64).sum(axis=2, keepdims=True)
    shares = np.divide(maps, totals, out=np.zeros(maps.shape), where=totals > 0)
    for rows, embeddings in _pieces(trace):
        index, cosine = closest(past, embeddings)
        found[rows] = shares[:, index].swapaxes(0, 1) * np.clip(cosine, 0, 1)[:, None, None]
    return Signal(EMBEDDING, np.arange(trace.n_rows, dtype=np.int32), found, None, 0, None, 0, ABOUT)


def _pieces(trace: Trace) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    assert trace.embeddings is not None
    table = trace.requests
    for first, prompt, decode in zip(table.first_row.tolist(), table.n_prompt.tolist(), table.n_decode.tolist(), strict=True):
        whole = of_iterations(trace.embeddings[first : first + prompt + decode], prompt)
        for start in range(0, len(whole), _ROWS):
            piece = whole[start : start + _ROWS]
            yield slice(first + start, first + start + len(piece)), piece
