"""Prefetching as many experts as the link has time for: PreScope's rule, for compositions.

"PreScope: Unleashing the Power of Prefetching for Resource-Constrained MoE Inference", arXiv, 2025; the system itself is
`moesim.policies.systems.prescope`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from moesim.model import ModelSpec
from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.counting import add_rows
from moesim.policies.algorithms.presched import prefetch_count
from moesim.policies.base import CostTable, twin
from moesim.policies.options import option
from moesim.policies.parts import Part, Setup, Unit, source_needs
from moesim.policies.parts.prefetch import Lane, Source
from moesim.policy import Predict, Predicted, Routed, StepBegin, View

PUBLISHED_HIT = 0.94  # the least that the paper prints for its predictor's "hot Top-4"
_PRIOR_WEIGHT = 1  # visits of a layer that the prior counts for


class Foresight:
    """What is predicted about the layer ahead, and how often predictions of each rank have come true.

    ``prior_hit`` is the probability that a predicted expert is wanted, before anything has been seen.
    """

    def __init__(self, model: ModelSpec, prior_hit: float, add_rows: Callable[..., object] = add_rows) -> None:
        self._top_k = model.top_k
        self._add_rows = add_rows
        self._prior = prior_hit
        self._n_rows = 0
        self._routed_rows = 0
        self._active: set[int] = set()
        self._about = (-1, -1)  # step and layer that the counts speak about
        self._counted_rows = 0
        self._counts: dict[int, int] = {}
        self._said: dict[int, Sequence[int]] = {}
        self._hits: dict[int, list[list[float]]] = {}  # layer -> rank -> [came true, said]

    def step_begin(self, event: StepBegin) -> None:
        """Learn how many rows the step has."""
        self._n_rows = len(event.requests)

    def routed(self, event: Routed) -> bool:
        """Take a micro-batch in; say whether it was the layer's last, and if so compare with what was said."""
        if not event.mb:
            self._active.clear()
            self._routed_rows = 0
        self._active.update(event.active)
        self._routed_rows += len(event.experts)
        if self._routed_rows < self._n_rows:
            return False
        said = self._said.pop(event.layer, None)
        if said:
            ranks = self._hits.setdefault(event.layer, [])
            while len(ranks) < len(said):
                ranks.append([self._prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT])
            for rank, expert in zip(ranks, said, strict=False):
                rank[0] += expert in self._active
                rank[1] += 1
        return True

    def predicted(self, event: Predicted) -> dict[int, int] | None:
        """Count predicted rows; return those of each expert once all micro-batches are in, else None."""
        if self._about != (event.step, event.layer):
            self._about = (event.step, event.layer)
            self._counted_rows = 0
            self._counts = {}
        self._add_rows(self._counts, event.ids, self._top_k)
        self._counted_rows += len(event.ids)
        return self._counts if self._counted_rows >= self._n_rows else None

    def say(self, layer: int, experts: Sequence[int]) -> Callable[[int], float]:
        """Remember what is predicted, busiest first; return the probability that the expert of a rank is wanted."""
        self._said[layer] = experts
        ranks = self._hits.get(layer, ())

        def hit_rate(rank: int) -> float:
            if rank >= len(ranks):
                return self._prior
            hits, trials = ranks[rank]
            return hits / trials

        return hit_rate


def absent(counts: Mapping[int, int], layer: int, gpu: str, view: View) -> list[int]:
    """Return the predicted experts that are neither on a GPU nor on their way to it, busiest first, ties to the lower id."""
    resident = view.residency(layer, gpu)
    found = sorted([e for e in counts if not resident[e] and not view.is_pending(layer, e, gpu)])
    found.sort(key=lambda e: -counts[e])
    return found


def where(layer: int, experts: Sequence[int], gpu: str, view: View) -> tuple[list[int], list[int], list[int]]:
    """Split experts of a layer into those that are on a GPU, those on their way to it, and the others, each in the order given."""
    resident = view.residency(layer, gpu)
    here, coming, neither = [], [], []
    for expert in experts:
        if resident[expert]:
            here.append(expert)
        elif view.is_pending(layer, expert, gpu):
            coming.append(expert)
        else:
            neither.append(expert)
    return here, coming, neither


def most_absent(view: View, residents: Sequence[Sequence[int]] = ()) -> int:
    """Return how many experts of a layer can be wanted and not be resident, at most."""
    model = view.model
    least = min((len(experts) for experts in residents), default=0)
    return max(1, min(model.n_experts - least, view.max_tokens * model.top_k))


class CrossLayer(Part):
    """Fetch the busiest predicted experts of the next layer, as many as fit into the time in which the link is idle.

    That is the time between the layer's last load and the end of the CPU's work, as planned, and the next layer's dense part:
    PreScope's equations 6 and 7, behind any assignment.
    """

    predicts = True
    transient = True

    source: Source = option("signal:learned", "Prediction source.")
    size: int | None = option(
        None, "Slots of its pool, which also bound what it fetches; None: for all experts that could be wanted.", ge=1
    )
    order: Literal["busiest", "printed"] = option("busiest", "Busiest first, or as PreScope's loop is printed, busiest last.")
    prior_hit: float = option(
        PUBLISHED_HIT, "Probability that a predicted expert is wanted, until something has been seen.", ge=0, le=1
    )
    lane: Lane = option("main")

    @property
    def needs(self) -> frozenset[str]:
        """The source's signal."""
        return source_needs(self.source)

    @property
    def slots(self) -> int:
        """Experts that its pool holds."""
        return self._slots

    def start(self, setup: Setup) -> None:
        """Prepare costs; forget an earlier run."""
        view, self._gpu = setup.view, setup.gpu
        model = view.model
        self._n_layers = model.n_layers
        self._cpu_ns = CostTable(view, setup.cpu) if setup.cpu else None
        self._load_ns = [view.costs.fetch_ns(view.host, setup.gpu, None, layer) for layer in range(model.n_layers)]
        self._slots = most_absent(view) if self.size is None else self.size
        self._foresight = Foresight(model, self.prior_hit, twin(add_rows, view))
        self._absent = twin(absent, view)
        self._rows = 0
        self._gap = 0  # of the layer routed last
        self._chosen: Sequence[int] = ()  # for that layer

    def step_begin(self, event: StepBegin) -> None:
        """Learn how many rows the step has."""
        self._rows = len(event.requests)
        self._foresight.step_begin(event)

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask about the next layer, once per layer visit."""
        self._foresight.routed(event)
        if event.mb or event.layer + 1 >= self._n_layers:
            return ()
        return (Predict(event.step, event.layer + 1, self.source, view.dense_device(event.layer), self.lane),)

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose nothing yet; work out how long the link will be idle before the CPU is done."""
        layer, gpu = event.layer, self._gpu
        whole = self._load_ns[layer]
        if not event.mb:
            self._gap = 0
        if self._cpu_ns is not None:
            self._gap += sum([self._cpu_ns[event.rows[e]] for e in plan.cpu])
        for expert in plan.gpu:
            if view.is_pending(layer, expert, gpu):
                self._gap -= view.remaining_ns(layer, expert, gpu)
            elif not view.is_resident(layer, expert, gpu):
                self._gap -= whole
        if not event.mb:
            for expert in self._chosen:  # for nothing; those that have not begun do not hold up the link
                if expert not in plan.gpu and view.is_pending(layer, expert, gpu):
                    left = view.remaining_ns(layer, expert, gpu)
                    self._gap -= left if left < whole else 0
            self._chosen = ()
        return ()

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Count predicted rows; once all are in, choose as many as fit."""
        counts = self._foresight.predicted(event)
        if counts is None:
            return ()
        layer = event.layer
        wanted = self._absent(counts, layer, self._gpu, view)
        hit_rate = self._foresight.say(layer, wanted)
        dense = view.dense_ns(layer) + view.costs.shared_ns(view.compute, self._rows)
        share = (self._gap + dense) / self._load_ns[layer]
        chosen = wanted[: prefetch_count(share, min(len(wanted), self._slots), hit_rate)]
        if self.order == "printed":
            chosen.reverse()
        self._chosen = chosen
        return [(layer, expert) for expert in chosen]
