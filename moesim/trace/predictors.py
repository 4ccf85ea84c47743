"""Predictions of routing: recorded, statistical, synthetic, oracle.

Answers depend on the step and the layer alone, never on the order of the questions. Whether and when a policy
hears one is the engine's business.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moesim.core.gate import check_made
from moesim.errors import ConfigError, unknown_name
from moesim.trace.stats.prediction import coactivation_scores, conditional, pair_counts, top_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.trace import Trace
    from moesim.trace.workload import Step, Workload

Prediction = tuple[NDArray[Any], NDArray[Any] | None]


class Predictor(Protocol):
    """A source of predictions.

    One that has ``all_layers(step)`` and ``first_layer`` returns by them the ids of a whole step at once,
    equal to `predict` layer by layer; the native engine then asks it once a step.
    """

    name: str
    label: str
    """Label of a result that used it; empty if nothing."""

    def needs_layer(self, layer: int) -> int | None:
        """Return the layer whose gate input must exist before ``layer`` can be predicted, if any."""

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Predict a layer for the rows of a micro-batch.

        Returns
        -------
        ids : (n_rows, top_k) integer
            Expert ids, best first.
        scores : (n_rows, top_k), (n_rows, n_experts) or None
            Of the ids, or of all experts.

            None stands for no prediction.
        """


LOOKAHEAD = 1  # layers, of co-activation and of a made-up prediction


class Frequency:
    """The experts used most often so far, whatever the token.

    Parameters
    ----------
    trace : Trace
        With the table ``activation_frequency``, unless it is counted.
    workload : Workload or None
        None: use the calibration table (for decode steps ``activation_frequency_decode``, if there is one).
        Otherwise count the steps of this workload before the one that is predicted.

    Raises
    ------
    ConfigError
        If there is neither a table nor a workload.
    """

    name = "frequency"
    label = ""

    def __init__(self, trace: Trace, workload: Workload | None = None) -> None:
        self._top_k = trace.top_k
        self._past: _Past | None = None
        self._ready: dict[tuple[str, int, int], tuple[NDArray[Any], NDArray[Any]]] = {}
        if workload is None:
            both = _table(trace, "activation_frequency")
            self._tables = {"prefill": both, "decode": trace.tables.get("activation_frequency_decode", both)}
        else:
            shape = (trace.n_layers, trace.n_experts)
            self._past = _Past(workload, shape, lambda counts, layers: counts.__iadd__(_stack_loads(layers)))

    def needs_layer(self, layer: int) -> int | None:
        return None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        n_rows = step.micro[mb].n_rows
        if self._past is not None:
            return self._rank(self._past.before(step.index)[layer], n_rows) if step.index else None
        key = (step.phase, layer, n_rows)
        if key not in self._ready:
            self._ready[key] = self._rank(self._tables[step.phase][layer], n_rows)
        return self._ready[key]

    def _rank(self, frequency: NDArray[Any], n_rows: int) -> tuple[NDArray[Any], NDArray[Any]]:
        scores = np.asarray(frequency, np.float64) / max(float(np.sum(frequency)), 1e-300)
        ids = np.argsort(-scores, kind="stable")[: self._top_k]
        return np.broadcast_to(ids, (n_rows, len(ids))), np.broadcast_to(scores, (n_rows, len(scores)))


class Coactivation:
    """The experts that most often followed those which the layer before has just chosen.

    The score of expert j of layer l + 1 is the sum over the row's experts i of layer l of P(j | i).

    Parameters
    ----------
    trace : Trace
        With the table ``coactivation``, unless it is counted.
    workload : Workload or None
        None: use the calibration table. Otherwise count the steps of this workload before the one that is
        predicted.

    Raises
    ------
    ConfigError
        If there is neither a table nor a workload.
    """

    name = "coactivation"
    label = ""

    def __init__(self, trace: Trace, workload: Workload | None = None) -> None:
        self._top_k = trace.top_k
        self._past: _Past | None = None
        if workload is None:
            self._shares = [conditional(t) for t in np.asarray(_table(trace, "coactivation"))]
        else:
            shape = (trace.n_layers, trace.n_experts, trace.n_experts)
            self._past = _Past(workload, shape, _add_pairs)

    def needs_layer(self, layer: int) -> int | None:
        return layer - LOOKAHEAD if layer >= LOOKAHEAD else None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        if layer < LOOKAHEAD or (self._past is not None and step.index == 0):
            return None
        before = layer - LOOKAHEAD
        shares = self._shares[before] if self._past is None else conditional(self._past.before(step.index)[before])
        scores = coactivation_scores(shares, step.micro[mb].layers[before].experts)
        return np.argsort(-scores, axis=-1, kind="stable")[:, : self._top_k], scores


class _Past:
    """Counts over all steps before a given one."""

    def __init__(self, workload: Workload, shape: tuple[int, ...], add: Callable[[NDArray[Any], Any], Any]) -> None:
        self._workload = workload
        self._add = add
        check_made("predictor", "counts", shape, 8, "choose another predictor")
        self._counts = np.zeros(shape, np.int64)
        self._done = 0

    def before(self, step: int) -> NDArray[np.int64]:
        if step < self._done:  # another run over the same workload
            self._counts[:] = 0
            self._done = 0
        for past in self._workload.steps[self._done : step]:
            for micro in past.micro:
                self._add(self._counts, micro.layers)
        self._done = step
        return self._counts


def _stack_loads(layers: Any) -> NDArray[np.int64]:
    return np.array([layer.rows for layer in layers], np.int64)


def _add_pairs(counts: NDArray[Any], layers: Any) -> None:
    for i in range(len(layers) - 1):
        counts[i] += pair_counts(layers[i].experts, layers[i + 1].experts, counts.shape[1])


def _table(trace: Trace, name: str) -> NDArray[Any]:
    if name not in trace.tables:
        raise ConfigError(f"predictor: the trace has no calibration table {name!r}; count with the suffix ':running'")
    return np.asarray(trace.tables[name])


_CELLS_AT_ONCE = 2**20  # (row, layer, expert) cells up to which all layers of a step are drawn together


class Synthetic:
    """The true routing, spoilt to a stated recall.

    Each routed expert is kept with probability ``recall`` and otherwise replaced in its place by one that was
    not routed, so that a row's ids stay distinct. The scores are the true gate weights by rank.

    Parameters
    ----------
    n_experts : int
        Experts of a layer. If fewer than top_k of them are not routed, recall cannot fall to 0.
    recall : float or sequence of float
        Expected share of routed experts among the predicted, 0 to 1; several: of layer 1, the first that is
        predicted, of layer 2 and so on, the last of them for all the rest. Without lookahead the first is
        layer 0.
    seed : int
        The same seed, step, layer and row give the same answer, in whatever order it is asked.
    lookahead : int
        Layers between the one whose state is needed and the one predicted; 0: no state is, as for a shadow.
    """

    label = "synthetic"

    def __init__(self, n_experts: int, recall: float | Sequence[float], seed: int = 0, lookahead: int = LOOKAHEAD) -> None:
        recalls = [float(one) for one in ([recall] if isinstance(recall, int | float) else recall)]
        wrong = [one for one in recalls if not 0.0 <= one <= 1.0]
        if wrong or not recalls:
            raise ConfigError(f"predictor synthetic: expected a recall from 0 to 1, got {wrong[0] if wrong else 'none'}")
        self.name = f"synthetic:{','.join(f'{one:g}' for one in recalls)}"
        self._n_experts = n_experts
        self._recalls = np.array(recalls)
        self._seed = seed
        self._lookahead = lookahead
        self._step: Step | None = None
        self._ready: dict[tuple[int, int], NDArray[Any]] = {}  # (micro-batch, layer) of that step -> ids

    def needs_layer(self, layer: int) -> int | None:
        return layer - self._lookahead if 0 < self._lookahead <= layer else None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        if layer < self._lookahead:
            return None
        if step is not self._step:
            self._step, self._ready = step, {}
        if (mb, layer) not in self._ready:
            micro = step.micro[mb]
            cells = micro.n_rows * len(micro.layers) * self._n_experts
            layers = range(len(micro.layers)) if cells <= _CELLS_AT_ONCE else [layer]
            ids = self._spoil(step, mb, layers)
            self._ready |= {(mb, which): part for which, part in zip(layers, ids, strict=True)}
        return self._ready[mb, layer], step.micro[mb].layers[layer].weights

    def _spoil(self, step: Step, mb: int, layers: Sequence[int]) -> NDArray[Any]:
        micro = step.micro[mb]
        routed = np.stack([micro.layers[layer].experts for layer in layers]).astype(np.int64)
        top_k = routed.shape[2]
        rows = np.arange(micro.first_row, micro.first_row + micro.n_rows)
        draws = uniform(self._seed, step.index, np.array(layers), rows, top_k + self._n_experts)
        nth_layer = np.clip(np.array(layers) - self._lookahead, 0, len(self._recalls) - 1)
        wrong = draws[..., :top_k] >= self._recalls[nth_layer][:, None, None]
        spoilt = np.nonzero(wrong.any(axis=2))  # most rows have no wrong slot, and need no order of the others
        kept, wrong, order = routed[spoilt], wrong[spoilt], draws[..., top_k:][spoilt]
        np.put_along_axis(order, kept, 2.0, axis=1)  # the routed ones come last
        others = np.argsort(order, axis=-1, kind="stable")
        # The i-th wrong slot of a row takes the i-th of the others, as far as there are any.
        nth = np.cumsum(wrong, axis=1) - 1
        wrong &= nth < self._n_experts - top_k
        routed[spoilt] = np.where(wrong, np.take_along_axis(others, np.clip(nth, 0, None), axis=-1), kept)
        return routed


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64: Steele, Lea, Flood, OOPSLA 2014
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST_SHIFT)


def uniform(seed: int, step: int, layers: NDArray[Any], rows: NDArray[Any], n: int) -> NDArray[np.float64]:
    """Draw numbers that depend on their place alone: a counter hashed with SplitMix64."""
    state = np.zeros(1, np.uint64)
    for word in (np.array([seed]), np.array([step]), layers[:, None, None], rows[:, None], np.arange(n)):
        state = _mix(state + (word.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


SHADOW = "shadow"
"""How the names of whole models that decode alongside begin."""
MADE_UP = ("synthetic:", "oracle")
"""Sources made from the true routing, which may answer in a shadow's name."""


class RecordedSignal:
    """A prediction that was recorded with the trace.

    Parameters
    ----------
    trace : Trace
    name : str
        One of its signals.
    width : int or None
        Ids for each row; None: top_k. A signal holds up to 2 * top_k.

    Raises
    ------
    ConfigError
        If the trace has no such signal.
    """

    label = ""

    def __init__(self, trace: Trace, name: str, width: int | None = None) -> None:
        if name not in trace.signals:
            raise ConfigError(unknown_name("signal", name, trace.signals))
        self.name = name
        self._signal = trace.signals[name]
        self.first_layer = self._signal.first_layer  # that is covered
        self._width = trace.top_k if width is None else width
        self._place = np.full(len(trace.request), -1, np.int64)  # trace row -> row of the signal
        self._place[self._signal.rows] = np.arange(len(self._signal.rows))
        self._step: Step | None = None  # asked about last
        self._gathered: tuple[NDArray[Any], NDArray[Any]] | None = None  # ids and scores of its rows
        self._found: list[list[Prediction]] | None = None  # of its micro-batches and layers, once one is asked for

    def needs_layer(self, layer: int) -> int | None:
        offset = self._signal.needs_layer_offset
        if offset is None or layer < max(offset, self._signal.first_layer):
            return None
        return layer - offset

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        if layer < self.first_layer or (gathered := self._gather(step)) is None:
            return None
        if self._found is None:  # all layers of a step at once
            self._found = _split(step, *gathered)
        return self._found[mb][layer]

    def all_layers(self, step: Step) -> NDArray[Any] | None:
        """Return the ids of `predict` of all rows and layers; None if a row is not covered."""
        found = self._gather(step)
        return None if found is None else found[0]

    def _gather(self, step: Step) -> tuple[NDArray[Any], NDArray[Any]] | None:
        if step is not self._step:
            self._step, self._gathered, self._found = step, self._read(step), None
        return self._gathered

    def _read(self, step: Step) -> tuple[NDArray[Any], NDArray[Any]] | None:
        places = self._place[step.rows]
        if (places < 0).any():
            return None
        scores = self._signal.scores[places]
        if self._signal.ids is not None:
            scores = scores[..., : self._width]
        return top_ids(self._signal, places, self._width), scores


def _split(step: Step, ids: NDArray[Any], scores: NDArray[Any]) -> list[list[Prediction]]:
    found = []
    for micro in step.micro:
        rows = slice(micro.first_row, micro.first_row + micro.n_rows)
        found.append(list(zip(ids[rows].swapaxes(0, 1), scores[rows].swapaxes(0, 1), strict=True)))
    return found


class Oracle:
    """The true routing, with the gate weights as scores."""

    name = "oracle"
    label = "oracle"

    def needs_layer(self, layer: int) -> int | None:
        return None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        routed = step.micro[mb].layers[layer]
        return routed.experts, routed.weights


def split_width(source: str) -> tuple[str, int | None]:
    """Split the name of a source from the ids it is asked for a row; None: top_k."""
    name, found, width = source.rpartition(":top")
    return (name, int(width)) if found and width.isdecimal() else (source, None)


def make_predictor(source: str, trace: Trace, workload: Workload, seed: int = 0) -> Predictor:
    """Make a predictor by name.

    Parameters
    ----------
    source : str
        ``"oracle"``; ``"synthetic:0.8"``, or by layer ``"synthetic:0.4,0.7,0.8"``; ``"frequency"`` or
        ``"coactivation"``, from calibration tables if the trace has them and else counted during the run,
        which the suffix ``":running"`` forces; a signal of the trace by its name, with or without
        ``"signal:"`` before it; ``"signal:gate_next1:top3"``, with three ids a row instead of top_k;
        ``"shadow-int8:synthetic:0.8"`` or ``"shadow-int8:oracle"``, the same as without the shadow's name,
        but at the shadow's cost and, like it, without a state of the model.
    trace : Trace
        What was recorded.
    workload : Workload
        What will run.
    seed : int
        Seed of a synthetic one.

    Returns
    -------
    Predictor

    Raises
    ------
    ConfigError
        If nothing has that name, or the recall is not a number from 0 to 1.
    """
    if source in trace.signals:
        return RecordedSignal(trace, source)
    kind, _, rest = source.partition(":")
    if kind == "signal":
        name, width = split_width(rest)
        return RecordedSignal(trace, name, width)
    lookahead = LOOKAHEAD
    if kind.startswith(SHADOW) and rest.startswith(MADE_UP):
        source, lookahead = rest, 0
        kind, _, rest = source.partition(":")
    if source == "oracle":
        return Oracle()
    if kind == "synthetic" and rest:
        try:
            recalls = [float(one) for one in rest.split(",")]
        except ValueError:
            raise ConfigError(
                f"predictor {source!r}: expected a recall such as synthetic:0.8, or one a layer such as synthetic:0.4,0.7,0.8"
            ) from None
        return Synthetic(trace.n_experts, recalls, seed, lookahead)
    if kind == "frequency" and rest in ("", "running"):
        return Frequency(trace, workload if rest or "activation_frequency" not in trace.tables else None)
    if kind == "coactivation" and rest in ("", "running"):
        return Coactivation(trace, workload if rest or "coactivation" not in trace.tables else None)
    known = ["oracle", "synthetic:<recall>", "frequency", "coactivation", *trace.signals]
    raise ConfigError(unknown_name("predictor", source, known))


NEVER = 2**62
"""Answer of `FutureUse.next_use` for an expert that is not used again."""


class FutureUse:
    """When each expert will be used."""

    def __init__(self, workload: Workload) -> None:
        self._steps: dict[tuple[int, int], list[int]] = {}
        for step in workload.steps:
            for mb in step.micro:
                for layer, routing in enumerate(mb.layers):
                    for expert in routing.active:
                        uses = self._steps.setdefault((layer, expert), [])
                        if not uses or uses[-1] != step.index:
                            uses.append(step.index)

    def next_use(self, layer: int, expert: int, step: int) -> int:
        uses = self._steps.get((layer, expert), [])
        at = bisect_right(uses, step)
        return uses[at] if at < len(uses) else NEVER


ALWAYS = ("oracle", "frequency", "coactivation", "synthetic:<recall>")
"""Sources that need no recording."""


class PredictorSet(Mapping[str, Predictor]):
    """Prediction sources by name."""

    def __init__(self, trace: Trace, workload: Workload, stand_ins: Mapping[str, str], seed: int) -> None:
        self._trace = trace
        self._workload = workload
        self._stand_ins = stand_ins
        self._seed = seed
        self._made: dict[str, Predictor] = {}

    def __getitem__(self, source: str) -> Predictor:
        if source not in self._made:
            name, _ = split_width(source)
            other = stand_in(name, self._stand_ins)
            actual = source if other == name else other
            if source.removeprefix("signal:").startswith(SHADOW) and actual.startswith(MADE_UP):
                actual = f"{SHADOW}:{actual}"  # like what it stands for, it needs no state of the model
            try:
                self._made[source] = make_predictor(actual, self._trace, self._workload, self._seed)
            except ConfigError:
                raise KeyError(source) from None
        return self._made[source]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*ALWAYS, *self._trace.signals, *self._stand_ins)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(sorted({made.label for made in self._made.values() if made.label}))


def stand_in(source: str, stand_ins: Mapping[str, str]) -> str:
    """Return which source answers for another."""
    named = stand_ins.get(source, stand_ins.get(source.removeprefix("signal:")))
    return named if named is not None else stand_ins.get("*", source)
