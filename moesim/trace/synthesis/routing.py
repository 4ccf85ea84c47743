"""From states to what a recorder sees: ids and weights, and what routers say about layers ahead of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.synthesis.exact import on_grid, powers, softmax

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.synthesis.model import SyntheticModel

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
    """Find the n largest of each row, by integers: the ordered bits of a float, the last few replaced by the expert's number."""
    n_experts = table.shape[1]
    n_bits = (n_experts - 1).bit_length()
    keys = (table + np.float32(0)).view(np.int32)  # 0 makes both zeros one
    keys ^= (keys >> 31) & np.int32(2**31 - 1)
    keys &= np.int32(-1 << n_bits)
    keys |= np.arange(n_experts, dtype=np.int32)
    keys.partition(n_experts - n - 1, axis=1)
    best = np.sort(keys[:, n_experts - n - 1 :], axis=1)[:, ::-1]  # the n largest, and the next to tell ties by
    ids: NDArray[np.int64] = (best[:, :n] & ((1 << n_bits) - 1)).astype(np.int64)
    best = best >> n_bits
    near = (best[:, 1:] == best[:, :-1]).any(axis=1)  # too near to order by the bits that are left
    ids[near] = _among_equals(table[near], n)
    return ids


def _among_equals(table: F32, n: int) -> NDArray[np.int64]:
    """Find the n largest of rows in which several are equal or nearly so: of equal ones the lower ids."""
    return np.argsort(-table, axis=1, kind="stable")[:, :n]


def _at(table: NDArray[Any], columns: NDArray[np.int64]) -> NDArray[Any]:
    """Take of each row the given columns."""
    firsts = np.arange(0, table.size, table.shape[1])[:, None]
    return table.ravel().take(columns + firsts)


def softmax_at(logits: F32, ids: NDArray[np.int64]) -> F32:
    """Compute the softmax over all, of some that begin with the largest; equal to the bit to `softmax` of all."""
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


def read_gates(model: SyntheticModel, points: F64, lookahead: int = 0) -> F32:
    """Apply routers to the inputs, put on the grid, of their own or of an earlier layer."""
    found = np.empty((len(points) - lookahead, points.shape[1], model.bias.shape[1]), np.float32)
    for layer, logits32 in enumerate(found):  # one at a time, which stays in a core's cache
        logits = points[layer] @ model.gates[layer + lookahead].T
        logits += model.bias[layer + lookahead]
        np.multiply(logits, model.parameters.temperature, out=logits32, casting="same_kind")
    return found


def signal_logits(model: SyntheticModel, inputs: F32, points: F64, residual: NDArray[np.float16] | None) -> dict[str, F32]:
    """Compute what gate reuse and its residual form say, by name, of the inputs as they are and put on the grid."""
    ahead = [n for n in LOOKAHEADS if n < len(inputs)]
    found = {f"gate_next{n}": read_gates(model, points, n) for n in ahead}
    if residual is not None and ahead:
        step = residual[:, None, : inputs.shape[2]].astype(np.float32)
        found["residual"] = read_gates(model, on_grid(inputs + step), 1)
    return found


def signal_facts(name: str) -> dict[str, Any]:
    """Describe a signal as a trace's header does: lookahead, needs_layer_offset, first_layer, about."""
    ahead = 1 if name == "residual" else int(name.removeprefix("gate_next"))
    plus = " plus calibration/residual[l - 1]" if name == "residual" else ""
    about = f"softmax of synthetic router l applied to the input of router l - {ahead}{plus}"
    return {"lookahead": ahead, "needs_layer_offset": ahead, "first_layer": ahead, "about": about}
