"""Klotski: micro-batches share each copied expert; hot ones are copied during attention.

Z. Fang et al., "Klotski: Efficient Mixture-of-Expert Inference via Expert-Aware Multi-Batch Pipeline", ASPLOS 2025
(arXiv:2502.06888); the authors' university's port to MindSpore, which the table follows.

| point | paper says | released code does | we do |
|---|---|---|---|
| micro-batches | several share each layer | 8 of 8 sequences | the workload's |
| hot experts | - | 2 a layer, copied while its attention and gate compute | ``n_hot``, by default top-k |
| choice, first layer | - | the two most popular | the same |
| choice, other layers | - | each row's experts of the layer before vote for the two each is used with most, one vote a row and expert | the same, for as many as a row is routed to |
| table | - | shipped for Mixtral, updated with every token | calibration's, a given one (``released``), or empty (``calibrated: false``); updated with every row |
| other experts | - | copied as gates finish, in order of first appearance | the same |
| link | - | hot first, then in the order of asking | the same; a hot copy is never overtaken or withdrawn |
| computing | - | hot experts of all micro-batches, then the others in copy order | the same; a kernel for each expert and micro-batch, or one for all (``merged``) |
| after the layer | - | everything is dropped: no cache | the same; ``hot_table``: the most frequent stay where the cache has slots, as PreScope gave to all it compares with |
| CPU | - | never computes | the same |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from moesim.core.gate import check_pairs
from moesim.policies.base import CACHE, PolicyBase, gpu_of, layer_residents, micro_batch_runs, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts.placement import global_top
from moesim.policies.released import Released, Tables
from moesim.policy import (
    DEMAND,
    PREFETCH,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerBegin,
    LayerEnd,
    Placement,
    Pool,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip

if TYPE_CHECKING:
    from numpy.typing import NDArray


def most_popular(counts: NDArray[Any], n: int) -> list[int]:
    """Return the n experts with the largest counts, largest first, ties to the lower id.

    >>> most_popular(np.array([1, 0, 2, 2]), 3)
    [2, 3, 0]
    """
    return [int(expert) for expert in np.argsort(-np.asarray(counts, np.float64), kind="stable")[:n]]


def hot_experts(previous: NDArray[Any], table: NDArray[Any], n_hot: int, *, partners: int = 2) -> list[int]:
    """Choose the hot experts of a layer by what its rows used in the layer before.

    Each expert used there votes for its ``partners``, used with it most often by ``table`` (before, here). Most votes first; of equals
    the lower id, among partners too.

    >>> table = np.array([[0, 0, 4, 3], [9, 8, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]])
    >>> hot_experts(np.array([[0, 1], [0, 2]]), table, 2)
    [2, 3]
    """
    voters = np.bincount(np.ravel(previous).astype(np.int64), minlength=len(table))
    who = np.flatnonzero(voters)
    chosen = np.argsort(-np.asarray(table[who], np.float64), axis=-1, kind="stable")[:, :partners]
    votes = np.zeros(table.shape[1], np.int64)
    np.add.at(votes, chosen, voters[who, None])
    return most_popular(votes, n_hot)


def in_order_of_appearance(experts: NDArray[Any], without: Collection[int] = ()) -> list[int]:
    """Return the experts of a micro-batch in order of first appearance, without some.

    >>> in_order_of_appearance(np.array([[3, 1], [0, 3]]), without={1})
    [3, 0]
    """
    return [expert for expert in dict.fromkeys(np.ravel(experts).tolist()) if expert not in without]


LAYER = "layer"
"""The pool that holds the experts of the present layer."""


class Klotski(PolicyBase):
    """Hot experts are copied during attention and run first for all rows (Klotski, 2025)."""

    paper = "Klotski (ASPLOS 2025, arXiv:2502.06888)"
    missing = (
        "what the paper has beyond the released code, such as a plan for the number of micro-batches: the workload says it",
        "weights other than experts, and a KV cache, outside the GPU: they stay on it",
    )

    n_hot: int | None = option(
        None, "Experts a layer that are copied before its gate has chosen; None: as many as a row is routed to.", ge=1
    )
    calibrated: bool = option(True, "Start from the calibration table of co-activation; False: from an empty one.")
    released: Annotated[Released | None, Tables(("first", "coactivation"))] = option(
        None,
        "Counts to start from, as in the released code: of the experts of the first layer, and of pairs of an "
        "expert of a layer and one of the next, (layers - 1) x experts x experts.",
    )
    merged: bool = option(False, "One kernel of an expert for the rows of all micro-batches, instead of one for each.")
    hot_table: bool = option(
        False, "Keep the most frequent (layer, expert) pairs of the calibration table on the GPU, as many as the cache has slots."
    )

    @property
    def needs(self) -> frozenset[str]:
        found = frozenset({"table:coactivation"} if self.calibrated and self.released is None else ())
        return found | {"table:activation_frequency"} if self.hot_table else found

    def place(self, view: View) -> Placement:
        model, self._gpu = view.model, gpu_of(view, "klotski")
        experts = model.n_experts
        if self.released is not None:
            check_pairs("klotski", model.n_layers, experts)
            self._table, self._first = self._given(self.released, view)
        elif self.calibrated:
            self._table = np.array(view.tables["coactivation"], np.float64)
        else:
            check_pairs("klotski", model.n_layers, experts)
            self._table = np.zeros((model.n_layers, experts, experts))
        if self.released is None or "first" not in self.released:  # each row has top-k pairs with an expert of the first layer
            self._first = self._table[0].sum(axis=1) / model.top_k if len(self._table) else np.zeros(experts)
        self._n_hot = min(experts, self.n_hot or model.top_k)
        self._n_rows = 0
        self._routed: list[Routed] = []  # micro-batches of the present layer
        self._before = np.zeros((0, model.top_k), np.int64)  # of all rows in the layer before
        self._late: set[tuple[int, int]] = set()  # under way although their layer is over
        kept = self._kept(view) if self.hot_table else [[]]
        size = sum(len(hot) * model.expert_bytes(layer) for layer, hot in enumerate(kept))
        return Placement(
            copies=[Copy(layer, hot, self._gpu) for layer, hot in enumerate(kept) if hot],
            pools=[Pool(self._gpu, LAYER, experts * slot_bytes(view)), *([Pool(self._gpu, CACHE, size)] if size else [])],
        )

    def _kept(self, view: View) -> list[list[int]]:
        """List the experts of each layer that stay; to copy one again does nothing."""
        n = min(view.cache_slots(self._gpu), view.model.n_layers * view.model.n_experts)
        return global_top(view.tables["activation_frequency"].tolist(), n)

    def _given(self, released: Released, view: View) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the given counts of pairs and of the first layer; zeros of what is not given."""
        model = view.model
        shapes = {"coactivation": (model.n_layers - 1, model.n_experts, model.n_experts), "first": (model.n_experts,)}
        pairs, first = (
            released.table(name, shape, f"policy klotski: {model.name}") if name in released else np.zeros(shape)
            for name, shape in shapes.items()
        )
        return pairs, first

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._n_rows = len(event.requests)
        return ()

    def on_layer_begin(self, event: LayerBegin, view: View) -> list[Action]:
        """Copy the hot experts."""
        layer = event.layer
        self._routed = []
        if layer:
            hot = hot_experts(self._before, self._table[layer - 1], self._n_hot, partners=view.model.top_k)
        else:
            hot = most_popular(self._first, self._n_hot)
        self._hot = hot
        self._asked = list(hot)
        self._late.difference_update((layer, expert) for expert in hot)
        return [Fetch(layer, hot, self._gpu, PREFETCH, LAYER)]

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Copy the others as gates finish; run hot ones first."""
        layer, gpu = event.layer, self._gpu
        others = in_order_of_appearance(event.experts, self._asked)
        # One queue in the order of asking: the hot ones that still wait are asked for again, as urgently as the others.
        actions: list[Action] = [Fetch(layer, self._hot, gpu, DEMAND, LAYER)] if event.mb == 0 else []
        actions.append(Fetch(layer, others, gpu, DEMAND, LAYER))
        self._late.difference_update((layer, expert) for expert in others)
        self._asked += others
        self._routed.append(event)
        last = sum(len(one.experts) for one in self._routed) == self._n_rows
        if not self.merged:
            actions += micro_batch_runs(event, self._hot, gpu)
        elif last:
            actions.append(Run(layer, self._active(self._hot), gpu))
        if last:
            actions += self._rest(layer)
            self._learn(layer, np.concatenate([one.experts for one in self._routed]))
        return actions

    def _rest(self, layer: int) -> list[Action]:
        others = self._asked[len(self._hot) :]
        if self.merged:
            return [Run(layer, others, self._gpu)]
        return [run for expert in others for event in self._routed for run in micro_batch_runs(event, [expert], self._gpu)]

    def _active(self, experts: list[int]) -> list[int]:
        return [expert for expert in experts if any(event.rows[expert] for event in self._routed)]

    def _learn(self, layer: int, experts: Any) -> None:
        """Count the rows of the first layer, and the pairs of others with the layer before."""
        experts, n_experts = experts.astype(np.int64), len(self._first)
        if not layer:
            self._first += np.bincount(experts.ravel(), minlength=n_experts)
        else:
            pairs = self._before[:, :, None] * n_experts + experts[:, None, :]
            self._table[layer - 1] += np.bincount(pairs.ravel(), minlength=n_experts**2).reshape(n_experts, n_experts)
        self._before = experts

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        unit = event.layer, event.expert
        late = unit in self._late
        self._late.discard(unit)
        return (Drop(event.layer, (event.expert,), self._gpu),) if late else ()

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Drop the layer; a hot copy that nobody wanted is dropped as it arrives."""
        layer = event.layer
        self._late.update((layer, expert) for expert in self._hot if view.is_pending(layer, expert, self._gpu))
        return [Drop(layer, layer_residents(view, self._gpu, LAYER, layer), self._gpu)]
