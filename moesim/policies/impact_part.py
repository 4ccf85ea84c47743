"""HybriMoE's prefetch: what gains most in the plans of the layers ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.algorithms.counting import add_rows
from moesim.policies.algorithms.impact import Ahead, QueueMakespans, impact_driven
from moesim.policies.algorithms.queues import PAPER, replay
from moesim.policies.base import Range
from moesim.policies.parts import Part, Setup, Unit, source_needs
from moesim.policies.queue_parts import layer_timings
from moesim.policy import Predict, Predicted, Routed, View

GATES = "gate_next"


class ImpactDriven(Part):
    """HybriMoE's prefetch: what would shorten the plans of the next layers most, while the link is idle.

    Chosen once a layer visit and micro-batch, when the prediction about the next layer is in, which is asked for last; what
    is known of the layers behind it by then counts, from the latest prediction about each.
    """

    transient = False
    slots = 0
    predicts = True

    source: str = GATES
    """``"gate_next"``: the recorded answers ``gate_next1`` .. ``gate_next3`` of the following layers' gates to the present
    hidden state; any other source is asked for each of the layers."""
    lookahead: Annotated[int, Range(1, 3)] = 3
    """Layers ahead."""
    budget: Literal["ends", "begins", "none"] = "ends"
    """The last transfer must end, or begin, before the planned end of the layer; or whatever gains is fetched."""
    candidates: Annotated[int, Range(1)] = 8
    """Different numbers of rows tried in each layer, from the highest down."""
    lane: Literal["main", "side"] = "main"
    """Where the predictions are computed; ``"side"`` needs its rate in the profile."""

    reading = PAPER  # of the plans; a system sets that of its assignment

    @property
    def needs(self) -> frozenset[str]:
        """The sources' signals."""
        return frozenset().union(*(source_needs(self._source(n)) for n in range(1, self.lookahead + 1)))

    def _source(self, ahead: int) -> str:
        return f"signal:{GATES}{ahead}" if self.source == GATES else self.source

    def start(self, setup: Setup) -> None:
        """Forget an earlier run."""
        model = setup.view.model
        self._gpu, self._n_layers, self._top_k = setup.gpu, model.n_layers, model.top_k
        self._timings = layer_timings(setup)
        self._makespans = QueueMakespans(self._timings, self.reading)
        self._sources = [self._source(n) for n in range(self.lookahead + 1)]
        self._step = -1
        self._layer = -1  # routed last
        self._end_ns: float = 0  # planned end of it
        self._link_ns: float = 0  # planned end of its transfers
        self._rows: dict[int, dict[int, int]] = {}  # layer -> rows that each expert will have
        self._under_way: list[Unit] = []

    def native_state(self) -> dict[str, Any]:
        """Name the source of each layer ahead, and the reading, for the native engine."""
        return {"sources": self._sources[1:], **self.reading._asdict()}

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask about the layers ahead, the next one last, once per layer visit."""
        if event.step != self._step:
            self._step = event.step
            self._rows.clear()
        layer = self._layer = event.layer
        if event.mb:
            return ()
        self._end_ns = self._link_ns = view.now_ns
        step, device, lane = event.step, view.dense_device(layer), self.lane
        furthest = min(self.lookahead, self._n_layers - 1 - layer)
        return [Predict(step, layer + n, self._sources[n], device, lane) for n in range(furthest, 0, -1)]

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Note when this layer and its transfers will have ended, and choose nothing before the prediction."""
        layer, gpu, now = event.layer, self._gpu, view.now_ns
        costs = self._timings[layer]
        wanted = {(layer, e) for e in plan.gpu}
        self._under_way = [u for u in self._under_way if u not in wanted and view.is_pending(*u, gpu)]
        link, _ = self._queue(view)
        ready = {}
        for expert in plan.gpu:
            wait = view.remaining_ns(layer, expert, gpu)
            if view.is_resident(layer, expert, gpu) or 0 < wait < costs.transfer:
                ready[expert] = wait
                link = max(link, wait)
        ends = replay(plan, event.rows, costs, ready, link)
        self._end_ns = max(self._end_ns, now + max(ends.gpu, ends.cpu))
        self._link_ns = max(self._link_ns, now + ends.link)
        return ()

    def _queue(self, view: View) -> tuple[int, int]:
        """Return what is left of the prefetch in flight, and the time of those that are queued."""
        flying = queued = 0
        for unit in self._under_way:
            left = view.remaining_ns(*unit, self._gpu)
            if left < self._timings[unit[0]].transfer:
                flying = max(flying, left)
            else:
                queued += left
        return flying, queued

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Count predicted rows; choose once the next layer's are in."""
        self._count(event)
        if event.layer != self._layer + 1:
            return ()
        self._under_way = [u for u in self._under_way if view.is_pending(*u, self._gpu)]
        flying, queued = self._queue(view)
        now = view.now_ns
        idle = self._end_ns - now - max(self._link_ns - now, flying) - queued
        transfer = self._timings[event.layer].transfer
        if self.budget != "none" and idle < (transfer if self.budget == "ends" else 1):
            return ()
        known = [layer for layer in range(event.layer, event.layer + self.lookahead) if layer in self._rows]
        ahead = [ahead_of(layer, self._rows[layer], self._gpu, view) for layer in known]
        found = impact_driven(ahead, self._makespans, transfer, idle, self.budget, self.candidates)
        self._under_way += found
        return found

    def _count(self, event: Predicted) -> None:
        if not event.mb:
            self._rows[event.layer] = {}
        add_rows(self._rows.setdefault(event.layer, {}), event.ids, self._top_k)


def ahead_of(layer: int, rows: Mapping[int, int], gpu: str, view: View) -> Ahead:
    """Split the predicted rows of the experts of a layer by whether an expert is on a GPU or on its way."""
    resident = view.residency(layer, gpu)
    cached, missing = [], []
    for expert, n in rows.items():
        if resident[expert] or view.is_pending(layer, expert, gpu):
            cached.append(n)
        else:
            missing.append((expert, n))
    return Ahead(layer, cached, missing)
