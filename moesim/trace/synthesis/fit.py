"""Find the parameters with which synthetic traces have the figures that are wanted.

Nonlinear least squares on errors in tolerances. Each try draws with the same seeds, so that a change of a
figure is due to the change of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.errors import ConfigError
from moesim.trace.synthesis.figures import measure, needs_inputs
from moesim.trace.synthesis.generate import N_CALIBRATION, synthesize
from moesim.trace.synthesis.parameter_set import NUMBERS, ParameterSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.synthesis.figures import Figure, Targets

    _Measured = Callable[[ParameterSet, int], dict[str, float]]

#: Which figure tells most about a parameter. A parameter is fitted if that figure is among the targets.
DETERMINED_BY = {
    "popularity": "entropy", "popularity_tail": "top_over_uniform", "topic_share": "reuse@8",
    "topic_persistence": "lru@50", "topic_concentration": "lru@25", "context_persistence": "reuse@1",
    "spectrum": "recall@coactivation", "innovation": "recall@gate_next1", "mean_read": "recall@residual",
    "mean_turn": "cosine@gate_next1", "first_turn": "cosine@gate_next1:1", "unread_share": "cosine@residual",
    "first_innovation": "cosine@residual:1", "temperature": "top_weight", "locality_spread": "reuse@1:q90",
    "popularity_spread": "entropy:q90", "opening": "union@8",
}  # fmt: skip

_AND = " | and: "  # between what several fits were to
_FEW_SEEDS = 2  # of the search; the polish uses all of them
_POLISH_STEPS = 4
_DAMPING = 0.3
_STEP = 0.15  # of a derivative, on a parameter's own scale: large against the grain of a statistic of a finite sample
_MOST_TRIES = 12
_NEAR = 0.25  # tolerances (root mean square) at which the polish takes over
_ENOUGH = 0.02  # stop when a step improves the sum of squares by less than this share
#: Parameters that only change what happens between layers, or how large the weights are.
_ACROSS = (
    "innovation", "first_innovation", "settling", "mean_share", "mean_read", "mean_turn", "first_turn", "unread_share",
    "temperature",
)  # fmt: skip
_LAYERS_ALONG = 8
_PAIRS = 64  # pairs of experts that a token uses in neighbouring layers, for each cell of a co-occurrence table
_ROWS_PREDICTED = 1024  # rows that recall of signals is measured on
_ROWS_READ = 512  # rows that cosines are measured on


def free_parameters(targets: Targets) -> tuple[str, ...]:
    """Return which parameters a fit to these targets changes."""
    if targets.fit:
        return targets.fit
    whole = (":1", ":q90")  # the others tell as much as the figure without what is behind the colon
    names = {figure.name if figure.name.endswith(whole) else figure.name.partition(":")[0] for figure in targets.fitted}
    return tuple(parameter for parameter, figure in DETERMINED_BY.items() if figure in names)


def simulate(parameters: ParameterSet, targets: Targets, seed: int, names: Sequence[str]) -> dict[str, float]:
    """Measure figures on a synthetic trace of the sample's size."""
    return _simulate(parameters.replace(**targets.shape), targets, targets.n_decode, seed, names)


def _simulate(shaped: ParameterSet, targets: Targets, n_decode: int, seed: int, names: Sequence[str]) -> dict[str, float]:
    signals = any(name.startswith("recall@") and name != "recall@coactivation" for name in names)
    tables = any("residual" in name for name in names)
    trace = synthesize(
        shaped, n_requests=targets.n_requests, n_prompt=0, n_decode=n_decode, seed=seed,
        n_signal_requests=-(-_ROWS_PREDICTED // n_decode) if signals else 0,
        n_input_requests=-(-_ROWS_READ // n_decode) if needs_inputs(names) else 0,
        n_calibration=N_CALIBRATION if tables else 0,
    )  # fmt: skip
    return measure(trace, names, separate=targets.separate)


class Quick:
    """Simulates less, for the many tries of a fit."""

    # If layers are alike, statistics along the requests are those of every layer, whatever happens between layers: a
    # few layers do for them, and a parameter of the latter kind needs no new trace. Statistics of pairs of layers
    # need all layers and all requests, but fewer tokens of each.

    def __init__(self, targets: Targets, names: Sequence[str]) -> None:
        self._targets = targets
        self._across = [name for name in names if name.startswith(("recall@", "cosine@", "top_weight"))]
        self._along = [name for name in names if name not in self._across]
        rows = max(_ROWS_PREDICTED, _PAIRS * (targets.shape["n_experts"] / targets.shape["top_k"]) ** 2)
        self._n_decode = min(targets.n_decode, -(-int(rows) // targets.n_requests))
        self._known: dict[tuple[float, ...], dict[str, float]] = {}

    def __call__(self, parameters: ParameterSet, seed: int) -> dict[str, float]:
        shaped = parameters.replace(**self._targets.shape)
        key = (seed, *(value for name, value in shaped.values().items() if name not in _ACROSS))
        if key not in self._known:
            spread = shaped.locality_spread or shaped.popularity_spread or any(":q" in name for name in self._along)
            few = shaped if spread else shaped.replace(n_layers=min(shaped.n_layers, _LAYERS_ALONG))
            self._known[key] = _simulate(few, self._targets, self._targets.n_decode, seed, self._along)
        return self._known[key] | _simulate(shaped, self._targets, self._n_decode, seed, self._across)


def most_traces(targets: Targets, n_seeds: int) -> int:
    """Count the synthetic traces that a fit makes at most."""
    n_places = _MOST_TRIES * (1 + len(free_parameters(targets)))  # one at each, and one next to it for each slope
    return n_places * min(_FEW_SEEDS, n_seeds) + (1 + _POLISH_STEPS) * n_seeds


def fit(
    base: ParameterSet,
    targets: Targets,
    seeds: Sequence[int],
    progress: Callable[[int, float], None] = lambda tries, error: None,
) -> ParameterSet:
    """Fit parameters to targets.

    Parameters
    ----------
    base : ParameterSet
        Where to start; what is not fitted stays as it is there, and counts as assumed unless it was fitted to
        other figures of the same model.
    targets : Targets
    seeds : sequence of int
        Statistics are means over them.
    progress : callable
        Called with the number of synthetic traces so far and the root mean square error in tolerances.

    Returns
    -------
    ParameterSet

    Raises
    ------
    ConfigError
        If the targets determine no parameter.
    """
    free = free_parameters(targets)
    if not free:
        raise ConfigError(f"fit to {targets.model}: expected figures that determine parameters, got none; add reuse@1")
    problem = _Problem(base, targets, free, progress)
    place, slopes = _search(problem, Quick(targets, [figure.name for figure in targets.fitted]), seeds[:_FEW_SEEDS])
    place = _polish(problem, place, slopes, seeds)
    source = f"{targets.source}; seeds {', '.join(str(seed) for seed in seeds)}"
    earlier = [part for part in base.fitted_to.split(_AND) if base.model == targets.model and not part.startswith(targets.source)]
    kept = base.origin if earlier else {}  # what was fitted to other figures of the same model stays fitted
    origin = {name: "fitted" if name in free else kept.get(name, "assumed") for name in NUMBERS}
    borrowed = {
        name: f"as fitted to {base.model}: no such figure of this model"
        for name, kind in base.origin.items()
        if kind == "fitted" and origin[name] == "assumed" and base.model != targets.model
    }
    return base.replace(
        **problem.values(place),
        model=targets.model,
        **{key: value for key, value in targets.shape.items() if key != "top_k"},
        fitted_to=_AND.join([*earlier, source]),
        origin=origin,
        why={name: words for name, words in base.why.items() if name not in free} | borrowed,
    )


class _Problem:
    """Errors of the figures as a function of the free parameters."""

    def __init__(self, base: ParameterSet, targets: Targets, free: Sequence[str], progress: Callable[[int, float], None]) -> None:
        self._base, self.targets, self._free, self._progress = base, targets, free, progress
        self._known: dict[tuple[bytes, tuple[int, ...]], NDArray[np.float64]] = {}
        self._tries = 0
        self.lower, self.upper = (np.asarray([to_scale(name, NUMBERS[name][end]) for name in free]) for end in ("low", "high"))
        start = np.asarray([to_scale(name, getattr(base, name)) for name in free])
        self.start = np.clip(start, self.lower + _STEP, self.upper - _STEP)

    def values(self, place: NDArray[np.float64]) -> dict[str, float]:
        return {name: float(f"{from_scale(name, value):.4g}") for name, value in zip(self._free, place, strict=True)}

    def errors(self, place: NDArray[np.float64], seeds: Sequence[int], measured: _Measured) -> NDArray[np.float64]:
        """Return the errors of means over seeds."""
        key = (place.tobytes(), tuple(seeds))
        if key not in self._known:
            figures = self.targets.fitted
            tried = self._base.replace(**self.values(place))
            found = [measured(tried, seed) for seed in seeds]
            mean = np.asarray([np.mean([each[figure.name] for each in found]) for figure in figures])
            wanted, tolerance = (np.asarray([getattr(f, what) for f in figures]) for what in ("value", "tolerance"))
            self._known[key] = (mean - wanted) / tolerance
            self._tries += len(seeds)
            self._progress(self._tries, float(np.sqrt((self._known[key] ** 2).mean())))
        return self._known[key]


class _Good(Exception):
    """The search is as near as it needs to be; holds where."""


def _search(problem: _Problem, quick: Quick, seeds: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Find a place with small errors on small samples, and the slopes near it."""
    from scipy.optimize import least_squares  # takes long to import, which every command would pay

    latest: NDArray[np.float64] | None = None

    def errors(place: NDArray[np.float64]) -> NDArray[np.float64]:
        return problem.errors(place, seeds, quick)

    def slopes(place: NDArray[np.float64]) -> NDArray[np.float64]:
        nonlocal latest
        here = errors(place)
        if latest is not None and np.sqrt((here**2).mean()) < _NEAR:
            raise _Good(place)
        steps = np.where(place + _STEP <= problem.upper, _STEP, -_STEP)
        latest = np.stack([(errors(place + d) - here) / d.sum() for d in np.diag(steps)], axis=1)
        return latest

    bounds = (problem.lower, problem.upper)
    try:
        found = least_squares(errors, problem.start, jac=slopes, bounds=bounds, ftol=_ENOUGH, xtol=1e-3, max_nfev=_MOST_TRIES)
        place = found.x
    except _Good as stop:
        place = stop.args[0]
    assert latest is not None
    return place, latest


def _polish(
    problem: _Problem, place: NDArray[np.float64], slopes: NDArray[np.float64], seeds: Sequence[int]
) -> NDArray[np.float64]:
    """Take a few more steps on whole samples, with the slopes as they are."""
    targets = problem.targets
    names = [figure.name for figure in targets.fitted]

    def whole(parameters: ParameterSet, seed: int) -> dict[str, float]:
        return simulate(parameters, targets, seed, names)

    here = problem.errors(place, seeds, whole)
    damped = np.vstack([slopes, _DAMPING * np.eye(len(place))])  # figures that say the same twice leave it ill-conditioned
    size = 1.0
    for _ in range(_POLISH_STEPS):
        step = size * np.linalg.lstsq(damped, np.concatenate([-here, np.zeros(len(place))]), rcond=None)[0]
        there = np.clip(place + step, problem.lower, problem.upper)
        errors = problem.errors(there, seeds, whole)
        if errors @ errors < here @ here:
            place, here = there, errors
        else:
            size /= 3
    return place


def to_scale(name: str, value: float) -> float:
    """Put a parameter on its own scale: logarithm, logit or as it is."""
    scale = NUMBERS[name]["scale"]
    if scale == "log":
        return float(np.log(value))
    if scale == "log1p":  # may be 0
        return float(np.log1p(value))
    if scale == "logit":
        inside = min(max(value, 1e-4), 1 - 1e-4)
        return float(np.log(inside / (1 - inside)))
    return float(value)


def from_scale(name: str, value: float) -> float:
    """Undo `to_scale`, within the parameter's bounds."""
    scale, low, high = (NUMBERS[name][key] for key in ("scale", "low", "high"))
    raw = value
    if scale == "log":
        raw = np.exp(value)
    elif scale == "log1p":
        raw = np.expm1(value)
    elif scale == "logit":
        raw = 1 / (1 + np.exp(-value))
    return float(min(max(raw, low), high))


COLUMNS = ("figure", "source", "target", "fit", "error", "worst", "tolerance", "role", "met")
HELD_OUT = ("held out", "error there")  # more columns, where some requests were held out
RIGHT = ("target", "fit", "error", "worst", "tolerance", *HELD_OUT)


@dataclass(frozen=True)
class Match:
    """One figure next to what synthetic traces have."""

    figure: Figure
    found: tuple[float, ...]  # one for each seed
    held_out: float | None = None  # the figure of requests that were held out; None if there are none

    @property
    def mean(self) -> float:
        return float(np.mean(self.found))

    @property
    def error(self) -> float:
        return self.mean - self.figure.value

    @property
    def worst(self) -> float:
        return max((value - self.figure.value for value in self.found), key=abs)

    @property
    def met(self) -> bool:
        return abs(self.worst) <= self.figure.tolerance


def report(
    parameters: ParameterSet, targets: Targets, seeds: Sequence[int], held_out: Mapping[str, float] | None = None
) -> list[Match]:
    """Compare synthetic traces with targets."""
    names = [figure.name for figure in targets.figures]
    found = [simulate(parameters, targets, seed, names) for seed in seeds]
    return [
        Match(figure, tuple(each[figure.name] for each in found), (held_out or {}).get(figure.name)) for figure in targets.figures
    ]


def cells(matches: Sequence[Match]) -> list[list[str]]:
    """Write matches as rows of text."""
    return [
        [
            m.figure.name,
            m.figure.source,
            f"{m.figure.value:.3f}",
            f"{m.mean:.3f}",
            f"{m.error:+z.3f}",
            f"{m.worst:+z.3f}",
            f"{m.figure.tolerance:.3f}",
            "fitted" if m.figure.fitted else "check",
            "yes" if m.met else f"no, off by {abs(m.worst):.3f}",
            *([] if m.held_out is None else [f"{m.held_out:.3f}", f"{m.mean - m.held_out:+z.3f}"]),
        ]
        for m in matches
    ]
