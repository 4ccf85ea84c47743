"""HOBBIT, as others describe it: a miss is copied at high or low precision or skipped.

"HOBBIT: A Mixed Precision Expert Offloading System for Fast MoE Inference" was not read, and no scheduler code was found: each
point is as other papers describe it (OD-MoE above all), or a choice.

| point | paper says | released code does | we do |
|---|---|---|---|
| a miss | thresholds on the gate weight: high precision, low, or skipped | not read | the same (``high_weight``, ``low_weight``; values and units are choices) |
| several rows | not known | not read | as heavy as in the heaviest row, one precision for all; what one micro-batch skips is served if a later one loads it [choice] |
| widths | two | not read | the model's first two, as ``expert_bits: [[4, 2]]``; ``low_precision: false``: full width instead |
| a hit | not known | not read | at the width that is there; a low copy does not serve what must be high [choice] |
| an expert on its way | not known | not read | waited for, as if it were there [choice] |
| prediction | stacked gates, up to 4 layers ahead | not read | signals ``gate_next1`` .. (``depth``: 3, as traces usually have them) |
| prefetch | for the first following layer that has a miss | not read | the same; precision by the predicted weights, high where there are none [choice] |
| victim | the lowest weighted sum of LRU, LFU, LHU (use at high precision) and FLD (layer distance) | not read | the same; forms and weights are choices |
| the victim is in use | not known | not read | leaves once idle, the newcomer lands next to the cache [choice] |
| what is prefetched and not routed yet | not known | not read | goes last, and never for another prefetch [choice] |
| a low copy next to a high one | not known | not read | goes first [choice] |
| cache | not known | not read | one for all layers and widths, empty at the start [choice] |
| CPU | not known | not read | computes no expert [choice] |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from moesim.errors import CapacityError, ConfigError
from moesim.policies.base import PolicyBase, gpu_of, slot_bytes, staging_bytes
from moesim.policies.options import option
from moesim.policies.parts import Unit, source_needs
from moesim.policies.systems.hybrimoe import GATES
from moesim.policy import (
    CACHE,
    DEMAND,
    PREFETCH,
    Action,
    Fetch,
    Fetched,
    Placement,
    Pool,
    Predict,
    Predicted,
    Routed,
    Run,
    Skip,
    StepBegin,
    Victim,
    View,
)  # fmt: skip

if TYPE_CHECKING:
    from numpy.typing import NDArray


Precision = Literal["high", "low", "skip"]


class ScoreWeights(NamedTuple):
    """Weights of the four scores of a cached expert."""

    lru: float
    lfu: float
    lhu: float
    fld: float


def relative_weights(experts: NDArray[Any], weights: NDArray[Any]) -> dict[int, float]:
    """Return each expert's weight in its heaviest row, over that row's mean (a choice).

    Of two experts a row, 0.8 is a weight of 0.4. In a row of zeros all are equally heavy.

    >>> relative_weights(np.array([[3, 1], [1, 0]]), np.array([[0.75, 0.25], [0.5, 0.5]]))
    {0: 1.0, 1: 1.0, 3: 1.5}
    """
    of_row = np.asarray(weights, np.float64)
    whole = of_row.sum(axis=1, keepdims=True)
    shares = np.divide(of_row * of_row.shape[1], whole, out=np.ones_like(of_row), where=whole > 0)
    found, at = np.unique(experts, return_inverse=True)
    heaviest = np.zeros(len(found))
    np.maximum.at(heaviest, at.ravel(), shares.ravel())
    return dict(zip(found.tolist(), heaviest.tolist(), strict=True))


def choose_precision(weight: float, high_weight: float, low_weight: float) -> Precision:
    """Choose what becomes of a miss; the side of equality is a choice.

    >>> [choose_precision(weight, 0.8, 0.2) for weight in (1.5, 0.8, 0.5, 0.2, 0.1)]
    ['high', 'high', 'low', 'low', 'skip']
    """
    if weight < low_weight:
        return "skip"
    return "high" if weight >= high_weight else "low"


def victim_scores(
    last: NDArray[Any], uses: NDArray[Any], high_uses: NDArray[Any], layers: NDArray[Any],
    now: int, layer: int, n_layers: int, weights: ScoreWeights,
) -> NDArray[np.float64]:  # fmt: skip
    """Score cached experts; the one with the lowest score leaves first.

    The weighted sum of how recent the last use is (LRU), the share of steps with a use (LFU) and with one at high precision (LHU), and
    how soon the pass comes to the layer (FLD; the next is 1 away, the present one a whole pass). Steps count from 1; 0 in ``last``:
    never used. The four forms, from 0 to 1, are choices.

    >>> ones = np.array([1, 1])
    >>> victim_scores(ones * 3, ones * 2, ones, np.array([1, 0]), 4, 0, 2, ScoreWeights(1, 1, 1, 1)).tolist()
    [2.0, 1.5]
    """
    distance = (np.asarray(layers) - layer - 1) % n_layers + 1
    found: NDArray[np.float64] = (
        weights.lru * (last / now)
        + weights.lfu * (uses / now)
        + weights.lhu * (high_uses / now)
        + weights.fld * (1 - distance / n_layers)
    )
    return found


HIGH = None  # the full width, as the contract names it


class Hobbit(PolicyBase):
    """A miss is copied at full or lower width or skipped, by gate weight (HOBBIT, by others)."""

    paper = "HOBBIT (2024), as OD-MoE and other papers describe it"
    missing = (
        "its own paper was not read: each point is as other papers describe it",
        "the thresholds, what exactly they are compared with, and how they treat a batch: not known, options and choices",
        "the weights of the four victim scores and the scores' forms: not known; all weights are 1",
        "how the cache is divided between widths and layers, and what it holds at the start: not known; one cache, empty",
        "the fourth layer ahead: traces are usually recorded with three (moesim trace record --lookahead 4, depth: 4)",
        "stacked gates as one product: each layer's prediction is paid for on its own",
        "what becomes of wrong prefetches: not known; they are copied all the same",
        "what the CPU computes, and how prompts are treated: not known; the CPU computes no expert, prompts are as decoding",
    )
    exact = False
    low_bits = (8.0,)

    low_precision: bool = option(
        True, "Copy what is between the thresholds at the model's next lower width; false: at the full one."
    )
    high_weight: float = option(
        0.8,
        "Gate weight from which on a miss is copied at full width, in units of the mean weight of the experts "
        "of its row. Not the paper's number, which is not known: with two experts a row, 0.8 is a weight of "
        "0.4.",
        ge=0,
    )
    low_weight: float = option(
        0.2,
        "Gate weight, in the same units, below which a miss is skipped; 0: none is. Not the paper's number, which is not known.",
        ge=0,
        le=1,
    )
    depth: int = option(
        3, "Layers ahead that are predicted; 0: no prefetch. The paper's is up to 4, recorded traces usually have 3.", ge=0, le=4
    )
    source: str = option(
        GATES,
        '``"gate_next"``: the recorded answers ``gate_next1``, ``gate_next2`` and so on of the following '
        "layers' gates to the present hidden state; any other source is asked for each of the layers.",
    )
    lru_weight: float = option(
        1.0, "Weight of how recent the last use is in the score of a cached expert. The paper's weights are not known.", ge=0
    )
    lfu_weight: float = option(1.0, "Weight of the share of steps in which it was used.", ge=0)
    lhu_weight: float = option(1.0, "Weight of the share of steps in which it was used at full width.", ge=0)
    fld_weight: float = option(1.0, "Weight of how soon the pass comes to its layer.", ge=0)

    @property
    def needs(self) -> frozenset[str]:
        signals = (source_needs(self._source(ahead)) for ahead in range(1, self.depth + 1))
        return frozenset({"scores-or-weights"}).union(*signals)

    def _source(self, ahead: int) -> str:
        return f"signal:{GATES}{ahead}" if self.source == GATES else self.source

    def place(self, view: View) -> Placement:
        model = view.model
        self._gpu = gpu_of(view, "hobbit")
        if self.low_precision and len(model.widths) < 2:
            raise ConfigError(
                f"policy hobbit: expected a model with experts at two widths, got one of {model.expert_bits:g} bits; "
                f"set model.expert_bits to two, such as [[{model.expert_bits:g}, {model.expert_bits / 2:g}]], "
                "or low_precision: false"
            )
        if self.low_precision and self.low_weight >= self.high_weight:
            raise ConfigError(
                f"policy hobbit: expected low_weight below high_weight, got {self.low_weight:g} and {self.high_weight:g}; "
                "change one, or set low_precision: false"
            )
        slots = view.cache_slots(self._gpu)
        if slots < 1:
            raise CapacityError(f"policy hobbit on {self._gpu}: expected at least 1 cache slot, got 0; set a larger cache.ratio")
        self._low = model.widths[1] if self.low_precision else HIGH
        self._weights = ScoreWeights(self.lru_weight, self.lfu_weight, self.lhu_weight, self.fld_weight)
        self._layer = 0
        self._step = 0  # from 1
        self._rows = 0  # of the step
        self._skipped: set[int] = set()  # of the present layer, returned once all micro-batches are routed
        shape = (model.n_layers, model.n_experts)
        self._last = np.zeros(shape, np.int64)  # step of the last use, from 1
        self._uses = np.zeros(shape, np.int64)  # steps with a use
        self._last_high = np.zeros(shape, np.int64)
        self._high_uses = np.zeros(shape, np.int64)
        self._ahead = np.zeros(shape, np.bool_)  # prefetched for a layer before it was routed
        self._widths = (self._low, HIGH) if self.low_precision else (HIGH,)
        self._here = np.zeros((len(self._widths), *shape), np.bool_)  # on the GPU, by width
        self._asked: list[int] = []  # layers that are predicted, nearest first
        self._said: dict[tuple[int, int], Predicted] = {}  # (micro-batch, layer)
        self._walked: dict[int, int] = {}  # micro-batch -> how many of the layers asked about are done with
        self._leaving: set[tuple[int, ...]] = set()  # width, layer and expert of victims that are still in use
        return Placement(pools=[Pool(self._gpu, CACHE, slots * slot_bytes(view), landing=staging_bytes(view, None))])

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._step, self._rows = event.step + 1, len(event.requests)
        return ()

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        """Note which copies of the expert are on the GPU."""
        unit = event.layer, event.expert
        there = [self._is_resident(width, unit, view) for width in range(len(self._widths))]
        self._here[:, *unit] = [here and (width, *unit) not in self._leaving for width, here in enumerate(there)]
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Copy each expert at its precision, or skip it; run what is or comes there."""
        layer, gpu = event.layer, self._gpu
        self._layer = layer
        self._ahead[layer] = False
        high: list[int] = []
        low: list[int] = []
        for expert, weight in relative_weights(event.experts, _known(event.weights)).items():
            choice = self._choose(weight)
            if choice != "high" and self._is_there((layer, expert), HIGH, view):
                choice = "high"
            elif choice == "skip" and self.low_precision and self._is_there((layer, expert), self._low, view):
                choice = "low"
            if choice == "skip":
                self._skipped.add(expert)
            else:
                (high if choice == "high" else low).append(expert)
        self._skipped.difference_update(high, low)  # a Run takes what earlier micro-batches would have skipped, too
        for bits, experts in ((HIGH, high), (self._low, low)):
            for expert in experts:
                self._is_there((layer, expert), bits, view)  # what has left is to come anew
        self._count(layer, high, low)
        skipped: list[int] = []
        if event.first_row + len(event.experts) == self._rows:
            skipped, self._skipped = sorted(self._skipped), set()
        # Fetches of what is there change nothing, and make a prefetch that is under way urgent.
        return [
            Skip(layer, skipped),
            Fetch(layer, high, gpu, DEMAND),
            Fetch(layer, low, gpu, DEMAND, bits=self._low),
            Run(layer, high, gpu),
            Run(layer, low, gpu, bits=self._low),
            *(self._ask(event, view) if event.mb == 0 else ()),
        ]

    def _choose(self, weight: float) -> Precision:
        choice = choose_precision(weight, self.high_weight, self.low_weight)
        return "high" if choice == "low" and not self.low_precision else choice

    def _is_there(self, unit: Unit, bits: float | None, view: View) -> bool:
        return self._is_resident(self._widths.index(bits), unit, view) or view.is_pending(*unit, self._gpu, bits)

    def _count(self, layer: int, high: list[int], low: list[int]) -> None:
        """Note uses, once a step for all micro-batches."""
        used = np.array(high + low, np.int64)
        new = used[self._last[layer, used] != self._step]
        self._uses[layer, new] += 1
        self._last[layer, new] = self._step
        at_high = np.array(high, np.int64)
        new = at_high[self._last_high[layer, at_high] != self._step]
        self._high_uses[layer, new] += 1
        self._last_high[layer, new] = self._step

    def _ask(self, event: Routed, view: View) -> list[Action]:
        """Ask about the following layers, once a layer visit."""
        layer, last = event.layer, view.model.n_layers - 1
        sources = {layer + n: self._source(n) for n in range(1, min(self.depth, last - layer) + 1)}
        sources = {at: source for at, source in sources.items() if view.foresees(source, at)}
        self._asked, self._said, self._walked = list(sources), {}, {}
        device = view.dense_device(layer)
        return [Predict(event.step, at, source, device) for at, source in sources.items()]

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        """Walk the predicted layers up to the first with a miss, and fetch that."""
        mb = event.mb
        if event.step + 1 != self._step:
            return []
        self._said[mb, event.layer] = event
        actions: list[Action] = []
        while not actions and (done := self._walked.get(mb, 0)) < len(self._asked):
            said = self._said.get((mb, self._asked[done]))
            if said is None:
                return []
            actions = self._prefetch(said, view)
            self._walked[mb] = len(self._asked) if actions else done + 1
        return actions

    def _prefetch(self, event: Predicted, view: View) -> list[Action]:
        """Fetch what a layer is predicted to lack, unless it has been routed meanwhile."""
        layer, top_k = event.layer, view.model.top_k
        if layer <= self._layer:
            return []
        ids, scores = event.ids[:, :top_k], event.scores
        if scores is not None and scores.shape != event.ids.shape:
            scores = np.take_along_axis(scores, ids, axis=-1)
        heavy = relative_weights(ids, np.ones(ids.shape) if scores is None else scores[:, :top_k])
        choices = {expert: "high" if scores is None else self._choose(weight) for expert, weight in heavy.items()}
        high = [e for e, choice in choices.items() if choice == "high" and not self._is_there((layer, e), HIGH, view)]
        low = [e for e, choice in choices.items() if choice == "low" and not self._is_there((layer, e), HIGH, view)]
        low = [e for e in low if not self._is_there((layer, e), self._low, view)]
        self._ahead[layer, high + low] = True
        fetches = (Fetch(layer, high, self._gpu, PREFETCH), Fetch(layer, low, self._gpu, PREFETCH, bits=self._low))
        return [fetch for fetch in fetches if fetch.experts]

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        """Name the lowest score; of equals a low copy, the first layer, the lowest id."""
        for group in self._grouped(view)[: 2 if fetch.urgency == PREFETCH else 3]:
            at = int(group.argmin())
            if group.flat[at] != np.inf:
                width, layer, expert = (int(i) for i in np.unravel_index(at, group.shape))
                self._here[width, layer, expert] = False
                if view.is_in_use(layer, expert, self._gpu, self._widths[width]):
                    self._leaving.add((width, layer, expert))
                return layer, expert, self._widths[width]
        return None

    def _grouped(self, view: View) -> NDArray[np.float64]:
        """Score all copies, (3, n_widths, n_layers, n_experts); inf for who is not in a group."""
        # Groups in order of leaving: those that a high copy makes needless, others, prefetched ones.
        layers = np.arange(view.model.n_layers)[:, None]
        scores = victim_scores(
            self._last, self._uses, self._high_uses, layers, max(1, self._step), self._layer, view.model.n_layers, self._weights
        )
        needless = self._here & self._here[-1]
        needless[-1] = False
        awaited = self._here & ~needless & self._ahead
        return np.where((needless, self._here & ~needless & ~awaited, awaited), scores, np.inf)

    def _is_resident(self, width: int, unit: Unit, view: View) -> bool:
        """Whether a copy is on the GPU; one that is not has left, if it was to."""
        here = view.is_resident(*unit, self._gpu, self._widths[width])
        if not here:
            self._leaving.discard((width, *unit))
        return here


def _known(weights: Any) -> Any:
    """Return gate weights, without which nothing can be chosen."""
    if weights is None:
        raise ConfigError(
            "policy hobbit: expected a trace with gate weights, got one without; make some up with "
            "moesim trace calibrate --weights uniform, or choose another trace"
        )
    return weights
