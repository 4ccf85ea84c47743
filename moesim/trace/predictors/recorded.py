"""Sources of predictions: recorded, statistical, synthetic, oracle.

A predictor answers what it says about one layer of one step. Whether and when a policy hears it is the
engine's business: only after the prediction has been paid for, and not before the state it needs exists.
Answers depend on nothing but the step and the layer, never on the order of the questions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import ConfigError, unknown_name
from moesim.trace.predictors.contract import Prediction, Predictor
from moesim.trace.predictors.statistical import Coactivation, Frequency
from moesim.trace.predictors.synthetic import LOOKAHEAD, Synthetic
from moesim.trace.stats.prediction import top_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.workload import Step, Workload

SHADOW = "shadow"
"""How the names of whole models that decode alongside begin."""
MADE_UP = ("synthetic:", "oracle")
"""Sources made from the true routing, which may answer in a shadow's name."""


class RecordedSignal:
    """A prediction that was recorded with the trace.

    Parameters
    ----------
    trace : Trace
        What was recorded.
    name : str
        One of its signals.
    width : int or None
        Ids to give for each row; None: top_k. A signal holds up to 2 * top_k.

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
        """Tell the layer whose state was read; None where none was, or where the signal says nothing."""
        offset = self._signal.needs_layer_offset
        if offset is None or layer < max(offset, self._signal.first_layer):
            return None
        return layer - offset

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Look the recorded prediction up; None if a row or the layer is not covered."""
        if layer < self.first_layer or (gathered := self._gather(step)) is None:
            return None
        if self._found is None:  # all layers of a step at once
            self._found = _split(step, *gathered)
        return self._found[mb][layer]

    def all_layers(self, step: Step) -> NDArray[Any] | None:
        """Look up the ids that `predict` gives, of all rows and layers, (n_rows, n_layers, k); None if a row is not covered."""
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
    """The true routing, known from the start; with the gate weights as scores."""

    name = "oracle"
    label = "oracle"

    def needs_layer(self, layer: int) -> int | None:
        """Tell that nothing is needed."""
        return None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Read the future."""
        routed = step.micro[mb].layers[layer]
        return routed.experts, routed.weights


def split_width(source: str) -> tuple[str, int | None]:
    """Tell the name of a source from how many ids a row it shall tell; None: top_k.

    >>> split_width("signal:gate_next1:top3"), split_width("shadow-int8:T1:KV1")
    (('signal:gate_next1', 3), ('shadow-int8:T1:KV1', None))
    """
    name, found, width = source.rpartition(":top")
    return (name, int(width)) if found and width.isdecimal() else (source, None)


def make_predictor(source: str, trace: Trace, workload: Workload, seed: int = 0) -> Predictor:
    """Make a predictor by name.

    Parameters
    ----------
    source : str
        ``"oracle"``; ``"synthetic:0.8"``, or by layer ``"synthetic:0.4,0.7,0.8"``; ``"frequency"`` or
        ``"coactivation"``, from calibration tables if the trace has them and else counted during the run, which
        the suffix ``":running"`` forces; a signal of the trace by its name, with or without ``"signal:"``
        before it; ``"signal:gate_next1:top3"``, which tells three ids a row instead of top_k, as far as it holds
        them; ``"shadow-int8:synthetic:0.8"`` or ``"shadow-int8:oracle"``, which says the same as without the
        shadow's name, but costs what the shadow costs and like it needs no state of the model.
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
