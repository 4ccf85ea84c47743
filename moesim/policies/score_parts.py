"""Parts that go by the router's recent scores: HybriMoE's cache (MRS), and the prefetch of its released code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.scores import recent_scores, recent_weights
from moesim.policies.base import Range
from moesim.policies.declare import option_of
from moesim.policies.parts import Part, Setup, Unit
from moesim.policies.parts.prefetch import Over
from moesim.policies.parts.replacement import LRU
from moesim.policies.visit import Victims
from moesim.policy import Fetch, Predict, Predicted, Routed, StepBegin, View
from moesim.trace.stats.caches import MRS_ALPHA

SCORES = frozenset({"scores-or-weights"})
Credit = Literal["own", "by-id"]


class RecentScores:
    """One score S for each expert of each layer: S <- alpha TopP(s) + (1 - alpha) S at every visit (HybriMoE, eq. 3).

    ``p`` scores of a row count, 2 top_k by default; where only the weights of the chosen are known, at most top_k. Of several rows
    the mean counts, or the first. ``credit`` gives each expert its own score, or one by its id (`credit_by_id`).

    >>> from moesim.testing import routed
    >>> scores = RecentScores(1, 8, 2, 0.5, None, "mean")
    >>> scores.update(routed([[3, 1], [3, 0]]))
    >>> scores.of(0)
    [0.125, 0.125, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        alpha: float,
        p: int | None,
        tokens: Literal["mean", "first"],
        credit: Credit = "own",
    ) -> None:
        self._alpha, self._first, self._by_id = alpha, tokens == "first", credit == "by-id"
        self._p = 2 * top_k if p is None else p
        self._s = [[0.0] * n_experts for _ in range(n_layers)]

    def update(self, event: Routed) -> None:
        """Move the scores of a layer on by one visit; a micro-batch is a visit."""
        before = self._s[event.layer]
        rows = slice(1) if self._first else slice(None)
        if event.scores is not None:
            found = recent_scores(before, event.scores[rows], self._p, self._alpha, self._by_id)
        elif event.weights is not None:
            found = recent_weights(before, event.experts[rows], event.weights[rows], self._p, self._alpha, self._by_id)
        else:
            raise RuntimeError("recent scores: the trace was promised to hold scores or weights, and holds neither")
        self._s[event.layer] = found

    def of(self, layer: int) -> list[float]:
        """Return the scores of a layer."""
        return self._s[layer]

    def native_state(self) -> dict[str, Any] | None:
        """Give None where rows have one score: the order in which NumPy adds those is its own; else there is nothing to tell."""
        return None if len(self._s[0]) == 1 else {}


def _recent_scores(part: MRS | MRSScore, view: View) -> RecentScores:
    model = view.model
    shape = model.n_layers, model.n_experts, model.top_k
    return RecentScores(*shape, part.alpha, part.p, part.tokens, part.credit)


class MRS(LRU, fixed=("use_order",)):
    """HybriMoE's minus recent score: the resident with the smallest S; among equals the least recently used.

    The scores move before the layer evicts, so that what the router wants now is protected. Where a trace has no full
    scores, the weights of the chosen experts stand in for them, which makes p = top_k.
    """

    needs = SCORES
    use_order = "id"

    alpha: Annotated[float, Range(0, 1)] = MRS_ALPHA
    """Weight of the present visit."""
    p: Annotated[int, Range(1)] | None = None
    """Scores of a row that count; None: twice the model's top_k."""
    tokens: Literal["mean", "first"] = "mean"
    """With several rows: the mean over them, or the first row only."""
    credit: Credit = "own"
    """Each expert is credited with its own score, as the paper says, or as the released code does: of the p experts with the
    largest scores, the one with the lowest id gets the largest, the next id the second largest, and so on."""
    victims: Victims = "idle"
    """Routed experts of the present layer visit are named only if there are no others, or, as in paper and code, by their
    scores like any other; they leave after their run."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with all scores 0."""
        self._ranked: dict[int, list[Unit]] = {}  # pool -> its members by score, until scores or members change
        super().start(setup, residents)
        self._recent = _recent_scores(self, setup.view)

    def native_state(self) -> dict[str, Any] | None:
        """Say whether the native engine can decide."""
        return self._recent.native_state()

    def used(self, event: Routed) -> None:
        """Mark the active experts as used, and move the scores of their layer on."""
        super().used(event)
        self._recent.update(event)
        self._ranked.pop(event.layer if self._per_layer else 0, None)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Count them as members, the most recent ones."""
        super().inserted(layer, experts)
        self._ranked.pop(layer if self._per_layer else 0, None)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the one with the smallest score, and forget it."""
        pool = fetch.layer if self._per_layer else 0
        members, of = self._members[pool], self._recent.of
        ranked = self._ranked.get(pool)
        if ranked is None:
            ranked = self._ranked[pool] = sorted(members, key=lambda unit: of(unit[0])[unit[1]])
        found = self.first_resident(ranked, view)
        if found is not None:
            ranked.remove(found)
            del members[found]
        return found


class MRSScore(Part):
    """The prefetch of HybriMoE's released code: the experts of the next layer with the largest S, without any prediction.

    Only in steps of one row, and only if the GPU has something to do in this layer.
    """

    needs = SCORES
    transient = False
    slots = 0
    predicts = False

    size: Annotated[int, Range(1)] = 1
    """Experts of a layer visit to prefetch."""
    over: Over = "all"
    """Take the top ``size`` of all experts and skip those on the GPU, or of those that are not on the GPU."""
    alpha: float = option_of(MRS)
    p: int | None = option_of(MRS)
    tokens: Literal["mean", "first"] = option_of(MRS, default="first")
    credit: Credit = option_of(MRS, default="by-id")

    def start(self, setup: Setup) -> None:
        """Begin with all scores 0."""
        self._gpu, self._n_layers = setup.gpu, setup.view.model.n_layers
        self._rows = 1
        self._recent = _recent_scores(self, setup.view)

    def step_begin(self, event: StepBegin) -> None:
        """Learn how many rows the step has."""
        self._rows = len(event.requests)

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Move the scores on, and ask for no prediction."""
        self._recent.update(event)
        return ()

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose in the next layer, largest S first, then lowest id."""
        layer = event.layer + 1
        if self._rows > 1 or not plan.gpu or layer == self._n_layers:
            return ()
        scores, resident = self._recent.of(layer), view.residency(layer, self._gpu)
        ids = range(len(scores)) if self.over == "all" else [e for e, here in enumerate(resident) if not here]
        best = sorted(ids, key=lambda e: -scores[e])[: self.size]
        return [(layer, e) for e in best if not resident[e]]

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Choose no expert: nothing was asked."""
        return ()
