"""A router's answer to the state of an earlier layer, which is known before its own.

Gate reuse (HybriMoE, DAOP, AdapMoE, Fate, Mixtral-Offloading) reads the input of router l - n with router l. DALI first adds
the mean step from one router's input to the next, found in other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim.recorder.routers import Router
from moesim.trace.stats.calibration import RESIDUAL

DENSE_EXPERTS = 16  # a signal is stored as scores of all experts if there are no more than this many


@dataclass(frozen=True)
class SignalFacts:
    """A signal in a header, with the fields of `moesim.trace.Signal`."""

    lookahead: int
    needs_layer_offset: int | None
    first_layer: int
    about: str


@dataclass(frozen=True)
class SignalPlan:
    """Which signals to compute from the inputs of the routers.

    Attributes
    ----------
    top_k : int
        Experts of a token; twice as many are kept.
    lookahead : int
        ``gate_next1`` to ``gate_next<lookahead>``.
    residual : (n_layers, hidden) float16 or None
        Mean step from the input of each layer's router to the next one's; None: no signal ``residual``.
    """

    top_k: int
    lookahead: int = 3
    residual: NDArray[np.float16] | None = None

    def facts(self, n_layers: int, score: str = "softmax") -> dict[str, SignalFacts]:
        found = {
            f"gate_next{n}": SignalFacts(n, n, n, f"{score} of router l applied to the input of router l - {n}")
            for n in range(1, min(self.lookahead, n_layers - 1) + 1)
        }
        if self.residual is not None and n_layers > 1:
            about = f"{score} of router l applied to the input of router l - 1 plus calibration/residual[l - 1]"
            found[RESIDUAL] = SignalFacts(1, 1, 1, about)
        return found

    def from_layer(self, layer: int, states: Tensor, routers: Sequence[Router]) -> dict[str, Tensor]:
        """Compute what the routers of later layers say about a layer's router inputs, (n, hidden).

        Returns arrays of `moesim.recorder.hooks.Captured`, (n, ...), about the layer that many layers ahead.
        """
        found: dict[str, Tensor] = {}
        for n in range(1, min(self.lookahead, len(routers) - 1 - layer) + 1):
            found |= self._read(f"gate_next{n}", states, routers[layer + n])
        if self.residual is not None and layer + 1 < len(routers):
            step = torch.from_numpy(self.residual[layer].astype(np.float32)).to(states.device)
            found |= self._read(RESIDUAL, (states.float() + step).to(states.dtype), routers[layer + 1])
        return found

    def _read(self, name: str, states: Tensor, router: Router) -> dict[str, Tensor]:
        answer = router.ask(states)
        if router.n_experts <= DENSE_EXPERTS and router.ranks_by_scores:
            return {f"signals/{name}": answer.scores.half()}
        ids = answer.best(2 * self.top_k)
        return {f"signals/{name}": answer.scores.gather(1, ids).half(), f"signal_ids/{name}": ids.int()}


def pack(scores: NDArray[Any], best: NDArray[Any], *, dense: bool) -> tuple[NDArray[np.float16], NDArray[Any] | None]:
    """Round scores, and keep the best of them or all."""
    n_experts, top_k = scores.shape[-1], best.shape[-1]
    order = _ranked(scores, best.astype(np.int64))
    if dense:
        return _keep_order(scores.astype(np.float16), order), None
    kept = order[..., : min(2 * top_k, n_experts)]
    return np.take_along_axis(scores, kept, axis=-1).astype(np.float16), kept.astype(np.uint8 if n_experts <= 256 else np.uint16)


def _ranked(scores: NDArray[Any], best: NDArray[np.int64]) -> NDArray[np.int64]:
    keys = scores.astype(np.float64)
    places = np.broadcast_to(np.arange(best.shape[-1], 0, -1) + keys.max(initial=0), best.shape)
    np.put_along_axis(keys, best, places, axis=-1)
    return np.argsort(-keys, axis=-1, kind="stable")


def _keep_order(rounded: NDArray[np.float16], order: NDArray[np.int64]) -> NDArray[np.float16]:
    """Raise scores, from the last rank up, where a reader would rank them differently."""
    ranked = np.take_along_axis(rounded, order, axis=-1)
    for rank in range(ranked.shape[-1] - 2, -1, -1):
        below = ranked[..., rank + 1]
        # Among equal scores a reader takes the lower id first.
        floor = np.where(order[..., rank] < order[..., rank + 1], below, np.nextafter(below, np.float16(np.inf)))
        ranked[..., rank] = np.maximum(ranked[..., rank], floor)
    np.put_along_axis(rounded, order, ranked, axis=-1)
    return rounded
