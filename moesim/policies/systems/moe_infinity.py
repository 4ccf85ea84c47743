"""MoE-Infinity: as published, by past sequences like the present one; as released, by use.

L. Xue et al., "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert Cache", arXiv:2401.14361;
code: EfficientMoE/MoE-Infinity.

Idea: the matrix of a past sequence, tokens by layer and expert, shows what to prefetch and keep. The released blocks of Mixtral,
DeepSeek, Switch and NLLB have this commented out: ``moe-infinity-code``, an LFU cache. ``moe-infinity-paper`` is the method.

| point | paper says | released code does | we do |
|---|---|---|---|
| prefetch | by the closest past sequence | modules that only the blocks of Grok and Arctic call; off by default | ``-code``: none; ``-paper``: as the modules |
| past sequences | matrices of a data set, collected ahead | up to 1000, from the run | of calibration (``capacity``); ``online`` adds those of the run |
| match at layer l | rows 0 to l | masks these rows, so that the later ones are compared | ``-paper``: rows 0 to l; ``mask: later`` is the code: of equals the first |
| several sequences | - | one by one | the mean over those of the step |
| priority of an expert of layer j | its share, nearer layers weighing more | (p + 1e-8) (1 - (j - l) / (L + 1)); layers passed 0 | the same; p is the share within the layer |
| queue | by priority, on-demand copies first | every expert from the present layer on; on-demand copies first, which drop what is queued for layers passed | the same (``begin``), one at a time, as the link is free |
| what a prefetch replaces | - | unclear: its candidates are protected | what has a lower priority (``replaces``) |
| victim | lowest activation ratio, nearer layers weighing more | ``-code``: the lowest count of uses over all layers, scanned expert by expert, then layer by layer: the first strict minimum | the same; ``-paper``: the lowest priority, scanned likewise |
| counts | of the sequence | of the whole run, kept when evicted; the reset at a sequence's end is never reached | the same |
| start | - | empty cache | the same |
| order on demand | - | one thread: ascending id; each copy ends before the next expert is looked at | the same for both: a hit waits for the misses before it |
| locked | experts of the present layer | what is queued, until it has run | active experts of the present layer; if all cached are locked, those that have run, then those still to run (``victims``) |
| eviction | free | free: the host copy stays | the same |
| size of the cache | - | free space shrinks at hits too, so that it never fills (a defect) | the granted slots |
| CPU | computes nothing | the same | the same |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moesim.errors import CapacityError
from moesim.policies.base import CACHE, PolicyBase, gpu_of, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import Part, Setup, Swap, Unit
from moesim.policies.parts.replacement import UNROUTED_FIRST, PresentVisit, Victims, first_resident
from moesim.policy import DEMAND, PREFETCH, Action, Drop, Fetch, Fetched, Placement, Pool, Routed, Run, StepBegin, View

if TYPE_CHECKING:
    from numpy.typing import NDArray


# ------------- expert activation matrices (EAM): how often each expert of each layer served a sequence, and what that says
Mask = Literal["seen", "later"]
SMALLEST = 1e-8  # added to each share, so that nearness still counts among experts that were never used (released code)


def unit_rows(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Scale each row to a Euclidean length of 1; a row of zeros stays.

    >>> unit_rows(np.array([[3, 4], [0, 0]])).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    length = np.sqrt(np.square(counts, dtype=np.float64).sum(axis=-1, keepdims=True))
    found: NDArray[np.float64] = np.divide(counts, length, out=np.zeros(counts.shape), where=length > 0)
    return found


def shares(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Scale each row to a sum of 1; a row of zeros stays.

    >>> shares(np.array([[3, 1], [0, 0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    total = counts.sum(axis=-1, keepdims=True, dtype=np.float64)
    found: NDArray[np.float64] = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    return found


def remaining_priority(probability: NDArray[Any], layer: int) -> NDArray[np.float64]:
    """Weigh the experts still to come by their expected share in their layer, nearer ones more.

    ``(p + 1e-8) (1 - (j - l) / (L + 1))`` in row j >= l of L rows, l the layer that the pass is at, and 0 in the rows passed.

    >>> remaining_priority(np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]), 1).round(4).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.1875, 0.5625]]
    """
    n_layers = len(probability)
    ahead = np.arange(n_layers) - layer
    decay = np.where(ahead >= 0, 1 - ahead / (n_layers + 1), 0.0)
    return np.asarray((probability + SMALLEST) * decay[:, None])


def least_visited(visits: NDArray[Any], may_go: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the expert that MoE-Infinity's code evicts: the first least count that may go.

    Scanned expert by expert over all layers: of equals the lowest expert, then the lowest layer. None if none may go.

    >>> least_visited(np.array([[2, 1], [1, 1]]), np.array([[True, True], [False, True]]))
    (0, 1)
    """
    best = np.where(may_go, visits, np.inf).T.ravel()
    at = int(best.argmin())
    if best[at] == np.inf:
        return None
    expert, layer = divmod(at, len(visits))
    return layer, expert


DECIMALS = 12  # to which likenesses are compared, so that rounding breaks no tie


class Past:
    """Activation matrices of finished sequences, and of those under way.

    ``stored`` (n_layers, n, n_experts) are there from the start, as far as the capacity goes. With ``learns``, those of the
    run that are over are stored too.

    With the mask ``seen``, the method's intent, rows 0 .. l are compared, l being the layer that was routed last. ``later`` is the
    released code: rows 0 .. l of the stored ones are overwritten by a constant, so that they differ in the rows after l only. In
    the first pass of a sequence these are empty, and the first one is found. Sums of cosines of the rows, each scaled to a sum
    of 1, are compared to 12 decimals; a row of zeros has cosine 0.
    """

    def __init__(
        self, capacity: int, n_layers: int, n_experts: int, *, stored: NDArray[Any] | None = None, learns: bool = True,
        mask: Mask = "seen",
    ) -> None:  # fmt: skip
        self._learns, self._mask = learns, mask
        self._capacity = capacity
        self._shape = (n_layers, n_experts)
        self._n_stored = 0  # ever; the oldest are replaced
        self._shares = np.zeros((0, *self._shape))  # of what is stored
        self._units = np.zeros((n_layers, 0, n_experts))  # the same by layer, rows of length 1
        self._counts: dict[int, NDArray[Any]] = {}  # request -> its matrix so far
        self._decoded: set[int] = set()  # requests of the last decode step
        self._order: list[int] = []  # requests of this step
        self._row_of: NDArray[Any] = np.zeros(0, np.int64)  # of the step's rows, in that order
        self._present = np.zeros((0, *self._shape))  # matrices of the requests of this step
        self._likeness = np.zeros((0, 0))  # (requests, stored): sum of the cosines of the rows compared
        self._cosines: NDArray[Any] | None = None  # (n_layers, requests, stored), before this step; for the mask "later"
        for matrix in () if stored is None else stored.swapaxes(0, 1)[:capacity]:
            self._store(matrix)

    def begin(self, requests: NDArray[Any], decode: bool) -> None:
        """Begin a step; a request that has decoded and is not in a later decode step is over."""
        for at, request in enumerate(self._order):
            self._counts[request] = self._present[at]
        order, self._row_of = np.unique(requests, return_inverse=True)
        self._order = order.tolist()
        if decode:
            for over in sorted(self._decoded.difference(self._order)):
                matrix = self._counts.pop(over)
                if self._learns:
                    self._store(matrix)
            self._decoded = set(self._order)
        empty = np.zeros(self._shape)
        self._present = np.stack([self._counts.get(request, empty) for request in self._order])
        self._likeness = np.zeros((len(self._order), len(self._shares)))
        if self._mask == "later":
            self._cosines = unit_rows(self._present).swapaxes(0, 1) @ self._units.swapaxes(1, 2)

    def count(self, layer: int, experts: NDArray[Any], first_row: int) -> None:
        """Count what the rows of a micro-batch use, and compare the layer with the stored ones."""
        rows = self._row_of[first_row : first_row + len(experts)]
        row = self._present[:, layer]
        np.add.at(row, (rows[:, None], experts), 1)
        if self._cosines is not None:
            self._likeness = self._cosines[layer + 1 :].sum(axis=0)
        elif len(self._shares):
            these = np.unique(rows)
            self._likeness[these] += unit_rows(row[these]) @ self._units[layer].T

    def priority(self, layer: int) -> NDArray[Any]:
        """Weigh all experts by the closest past of each sequence of this step; of equals the first."""
        # The released code masks the rows up to this layer and compares the others, empty in the first pass.
        if len(self._shares):
            expected = self._shares[self._likeness.round(DECIMALS).argmax(axis=1)]
        else:
            expected = shares(self._present)
        return remaining_priority(expected.mean(axis=0), layer)

    def _store(self, counts: NDArray[Any]) -> None:
        units = unit_rows(counts)
        if len(self._shares) < self._capacity:
            self._shares = np.concatenate([self._shares, shares(counts)[None]])
            self._units = np.concatenate([self._units, units[:, None]], axis=1)
        else:
            at = self._n_stored % self._capacity
            self._shares[at] = shares(counts)
            self._units[:, at] = units
        self._n_stored += 1


# -------------------------------------------------------------------------------------------------------------- policies
class FetchThread(PolicyBase):
    """A global cache; a layer's active experts go to the GPU one by one, by ascending id."""

    # Each is looked at when the copies of those before it are in, so that a hit waits for the misses before it.

    def place(self, view: View) -> Placement:
        name, model = type(self).__name__, view.model
        self._gpu = gpu_of(view, name)
        self._slots = min(view.cache_slots(self._gpu), model.n_layers * model.n_experts)
        if not self._slots:
            raise CapacityError(f"policy {name} on {self._gpu}: expected at least 1 cache slot, got 0; raise cache.ratio")
        shape = (model.n_layers, model.n_experts)
        self._visits = np.zeros(shape, np.int64, order="F")  # since the start, cached or not
        self._cached = np.zeros(shape, np.bool_, order="F")
        self._locked = np.zeros(shape, np.bool_, order="F")  # what the present layer visit uses
        self._at = (-1, -1)  # step and layer routed last
        self._turns: deque[Unit] = deque()  # active experts that the thread has not come to
        self._loading: Unit | None = None
        return Placement(pools=[Pool(self._gpu, CACHE, self._slots * slot_bytes(view))])

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        self.routed(event)
        return self.go_on(view)

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        unit = event.layer, event.expert
        self._cached[unit] = True
        if self._loading == unit:
            self._loading = None
        return self.go_on(view)

    def routed(self, event: Routed) -> None:
        """Queue and lock the active experts."""
        layer = event.layer
        if self._at != (event.step, layer):
            self._at = (event.step, layer)
            self._locked[:] = False
        self._locked[layer, event.active] = True
        waiting = set(self._turns)  # of an earlier micro-batch: its Run takes the rows of both
        self._turns.extend((layer, expert) for expert in event.active if (layer, expert) not in waiting)

    def go_on(self, view: View) -> list[Action]:
        """Run what is there until an expert is not; begin its copy."""
        actions: list[Action] = []
        while self._turns and self._loading is None:
            unit = layer, expert = self._turns.popleft()
            self._visits[unit] += 1
            if not view.is_resident(layer, expert, self._gpu):
                self._loading = unit
            # Of a resident a Fetch does nothing, unless it is evicted before a decision takes effect.
            actions += [Fetch(layer, (expert,), self._gpu, DEMAND), Run(layer, (expert,), self._gpu)]
        return actions

    def lowest(self, may_go: NDArray[np.bool_]) -> Unit | None:
        """Return who goes first of some: used least, scanned expert by expert over all layers."""
        return least_visited(self._visits, may_go)

    def spare(self) -> NDArray[np.bool_]:
        return np.asarray(self._cached & ~self._locked)

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the lowest not locked, else of those that have run, else of those still needed."""
        return self.idle(self.spare(), view) or self.of_the_layer(view)

    def of_the_layer(self, view: View) -> Unit | None:
        """Return the lowest where all others are locked: a layer may use more than the cache holds."""
        may_go = self._cached.copy()
        if self._turns:
            may_go[tuple(zip(*self._turns, strict=True))] = False
        return self.idle(may_go, view) or self.idle(self._cached.copy(), view)

    def idle(self, may_go: NDArray[np.bool_], view: View) -> Unit | None:
        """Return the lowest cached expert that is not in use, and forget it."""
        while (unit := self.lowest(may_go)) is not None:
            if not view.is_in_use(*unit, self._gpu):
                self.gone(unit)
                return unit
            may_go[unit] = False
        return None

    def gone(self, unit: Unit) -> None:
        self._cached[unit] = False


class PrefetchingThread(FetchThread):
    """The same, with prefetches: one at a time, as long as nothing is awaited on demand."""

    def place(self, view: View) -> Placement:
        self._ahead: Unit | None = None  # a prefetch under way
        return super().place(view)

    def go_on(self, view: View) -> list[Action]:
        """Serve the layer; when nothing is awaited, prefetch the best."""
        if self._ahead is not None and self._cached[self._ahead]:
            self._ahead = None
        actions = super().go_on(view)
        if self._loading is not None:
            if self._ahead == self._loading:
                self._ahead = None  # on demand now
            self.awaited(self._at[1])
            return actions + self._forget_passed(view)
        if self._ahead is None and (unit := self.next_ahead()) is not None:
            self._ahead = unit
            actions.append(Fetch(unit[0], (unit[1],), self._gpu, PREFETCH))
        return actions

    def next_ahead(self) -> Unit | None:
        """Take the next to prefetch from the queue, if there is one and a slot."""
        raise NotImplementedError

    def awaited(self, layer: int) -> None:
        """Note an on-demand copy, which drops what is queued for the layers passed."""

    @property
    def full(self) -> bool:
        return int(np.count_nonzero(self._cached)) >= self._slots

    def _forget_passed(self, view: View) -> list[Action]:
        """Cancel a prefetch for a layer that is passed, if it has not begun."""
        if self._ahead is None:
            return []
        layer, expert = self._ahead
        if layer >= self._at[1] or not view.is_pending(layer, expert, self._gpu):
            return []
        if view.remaining_ns(layer, expert, self._gpu) < view.costs.fetch_ns(view.host, self._gpu, None, layer):
            return []
        self._ahead = None
        return [Drop(layer, (expert,), self._gpu)]

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the lowest expert; for a prefetch, none that the present layer uses."""
        return self.idle(self.spare(), view) if fetch.urgency == PREFETCH else super().evict(fetch, view)


class ActivationAware(Part):
    """The least likely by similar past sequences (MoE-Infinity), or the least used (its code)."""

    admits = True

    reading: Literal["paper", "code"] = option(
        "paper", "By the closest past sequence, or by the count of visits since the start."
    )
    capacity: int = option(1000, "Past sequences kept; ``paper`` only. The released code keeps 1000.", ge=1)
    victims: Victims = option(
        UNROUTED_FIRST,
        "Routed experts of the present layer visit are named only if there are no others, or like any other; "
        "they leave after their run.",
    )

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        model = setup.view.model
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        shape = (model.n_experts, model.n_layers)  # expert by expert: the first smallest is the one the ties go to
        self._members = np.zeros(shape, np.bool_)
        self._visits = np.zeros(shape)
        self._values: NDArray[Any] | None = None  # of the members, inf for others; None: to be worked out
        self._past = Past(self.capacity, model.n_layers, model.n_experts) if self.reading == "paper" else None
        self._now = model.n_layers - 1  # the layer routed last
        self._visit = PresentVisit()
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def step_begin(self, event: StepBegin) -> None:
        if self._past is not None:
            self._past.begin(event.requests, event.phase == "decode")

    def used(self, event: Routed) -> None:
        self._now = event.layer
        self._visit.add(event)
        self._values = None
        self._visits[event.active, event.layer] += 1
        if self._past is not None:
            self._past.count(event.layer, event.experts, event.first_row)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        self._members[list(experts), layer] = True
        self._values = None

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        if self._values is None:
            value = self._visits if self._past is None else self._past.priority(self._now).T
            self._values = np.where(self._members, value, np.inf)
        values = self._values[:, fetch.layer] if self._per_layer else self._values.ravel()
        found = first_resident(self._ranked(values, fetch.layer), self._visit.spared(self.victims), self._gpu, view)
        if found is not None:
            layer, expert = found
            self._members[expert, layer] = False
            self._values[expert, layer] = np.inf
        return found

    def _ranked(self, values: NDArray[Any], layer: int) -> Iterator[Unit]:
        """Go through the members by ascending value, of equals the first."""
        left = values.copy()
        while left[i := int(left.argmin())] != np.inf:
            yield (layer, i) if self._per_layer else divmod(i, self._members.shape[1])[::-1]
            left[i] = np.inf

    def layer_end(self, step: int, layer: int) -> Swap | None:
        return None


class MoEInfinityCode(FetchThread):
    """One fetch thread, and a global cache by use since the start (MoE-Infinity's code)."""

    paper = "MoE-Infinity (arXiv:2401.14361), its released code"
    missing = (
        "the defect that free space shrinks at hits too, so that the released cache never fills",
        "more than one GPU, each with a fetch thread",
    )

    victims: Victims = option(
        UNROUTED_FIRST,
        "What the present layer visit is routed to goes only if nothing else is idle, or, once it has run, like any other.",
    )

    def evict(self, fetch: Fetch, view: View) -> Unit | None:
        return super().evict(fetch, view) if self.victims == UNROUTED_FIRST else self.of_the_layer(view)


class MoEInfinityPaper(PrefetchingThread):
    """Prefetch and keep what the closest past sequence used next (MoE-Infinity, 2024)."""

    paper = "MoE-Infinity (arXiv:2401.14361)"
    missing = (
        "the released modules' cache score, with a decay for encoder and decoder halves: the prefetch priority ranks the cache",
        "the time of the match: the experiment's decision_us stands for it",
        "more than one GPU, each with a fetch thread",
    )
    needs = frozenset({"table:activation_matrices"})

    mask: Mask = option(
        "seen", "Rows of the matrices that are compared at layer l: 0 to l, or, as in the released modules, those after l."
    )
    begin: Literal["present", "next"] = option(
        "present", "The first layer of which experts are prefetched; in the released modules the present one."
    )
    replaces: Literal["lower", "any"] = option(
        "lower", "Which cached experts a prefetch may replace: those of a lower priority than its own, or any that is not locked."
    )
    capacity: int = option(1000, "Matrices kept.", ge=1)
    online: bool = option(False, "Sequences of the run that are over are stored, too; the oldest matrix is replaced.")

    def place(self, view: View) -> Placement:
        model = view.model
        stored = view.tables["activation_matrices"]
        self._past = Past(
            self.capacity, model.n_layers, model.n_experts, stored=stored, learns=self.online, mask=self.mask
        )  # fmt: skip
        self._priority = self._from_best = np.zeros((model.n_layers, model.n_experts))
        self._queued = np.zeros((model.n_layers, model.n_experts), np.bool_)  # since the last match, and not asked for yet
        return super().place(view)

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._past.begin(event.requests, event.phase == "decode")
        return ()

    def routed(self, event: Routed) -> None:
        super().routed(event)
        self._past.count(event.layer, event.experts, event.first_row)
        self._priority = self._past.priority(event.layer)
        self._from_best = -self._priority
        self._queued[:] = False
        self._queued[event.layer + (self.begin == "next") :] = True

    def lowest(self, may_go: NDArray[np.bool_]) -> Unit | None:
        return least_visited(self._priority, may_go)

    def next_ahead(self) -> Unit | None:
        """Take the best expert that is not there, if there is a slot; of equals the lowest id."""
        unit = least_visited(self._from_best, self._queued & ~self._cached)
        if unit is None:
            return None
        if self.full:
            victim = self.lowest(self.spare())
            if victim is None or (self.replaces == "lower" and self._priority[victim] >= self._priority[unit]):
                return None
        self._queued[unit] = False
        return unit
