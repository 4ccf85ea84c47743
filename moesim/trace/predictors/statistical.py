"""Predictions from what was seen before: in calibration, or so far in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_made
from moesim.errors import ConfigError
from moesim.trace.stats.prediction import coactivation_scores, conditional, pair_counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.predictors.contract import Prediction
    from moesim.trace.workload import Step, Workload

LOOKAHEAD = 1  # layers, of co-activation


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
        """Tell that nothing is needed."""
        return None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Give the same answer for every row; None as long as nothing has been counted."""
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

    Notes
    -----
    The score of expert j of layer l + 1 is the sum over the row's experts i of layer l of P(j | i).
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
        """Tell the layer before; None for layer 0, which is not predicted."""
        return layer - LOOKAHEAD if layer >= LOOKAHEAD else None

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Score by the experts of the layer before; None for layer 0 and while nothing has been counted."""
        if layer < LOOKAHEAD or (self._past is not None and step.index == 0):
            return None
        before = layer - LOOKAHEAD
        shares = self._shares[before] if self._past is None else conditional(self._past.before(step.index)[before])
        scores = coactivation_scores(shares, step.micro[mb].layers[before].experts)
        return np.argsort(-scores, axis=1, kind="stable")[:, : self._top_k], scores


class _Past:
    """Counts over all steps before a given one, kept up to date when questions come in order of time."""

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
