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
from moesim.trace.derived import subset
from moesim.trace.synthesis.figures import measure, needs_inputs
from moesim.trace.synthesis.generate import N_CALIBRATION, synthesize
from moesim.trace.synthesis.parameter_set import NUMBERS, ParameterSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.synthesis.figures import Figure, Targets

    _Measured = Callable[[ParameterSet, int], list[float]]

#: Which figure tells most about a parameter. A parameter is fitted if that figure is among the targets.
DETERMINED_BY = {
    "popularity": "entropy", "popularity_tail": "top_over_uniform", "topic_share": "reuse@8",
    "topic_persistence": "lru@50", "topic_concentration": "lru@25", "context_persistence": "reuse@1",
    "spectrum": "recall@coactivation", "innovation": "recall@gate_next1", "mean_read": "recall@residual",
    "mean_turn": "cosine@gate_next1", "first_turn": "cosine@gate_next1:1", "unread_share": "cosine@residual",
    "first_innovation": "cosine@residual:1", "temperature": "top_weight", "locality_spread": "reuse@1:q90",
    "popularity_spread": "entropy:q90", "opening": "union@8", "workload_spread": "distinct@8", "shallow": "lru@25:layer0",
    "shallow_layers": "lru@25:layer1-3", "prompt_loss": "lru@25:prompt",
}  # fmt: skip

_WHOLE = (":1", ":q90", ":layer0", ":layer1-3", ":prompt")
"""What follows a figure that determines another parameter than the figure alone; other suffixes do not."""
_FEW_SEEDS = 2  # of the search; the polish uses all of them
_STEPS = 8
_POLISH_STEPS = 3
_STEP = 0.15  # of a derivative, on a parameter's own scale: large against the grain of a statistic of a finite sample
_FURTHEST = 1.5  # that one step may change a parameter, on its own scale
_DAMPING = 0.3
#: Parameters that only change what happens between layers, or how large the weights are.
_ACROSS = (
    "innovation", "first_innovation", "settling", "mean_share", "mean_read", "mean_turn", "first_turn", "unread_share",
    "temperature",
)  # fmt: skip
_LAYERS_ALONG, _LAYERS_APART, _LAYERS_ACROSS = 8, 12, 24
_PAIRS = 64  # pairs of experts that a token uses in neighbouring layers, for each cell of a co-occurrence table
_ROWS_PREDICTED = 1024  # rows that recall of signals is measured on
_ROWS_READ = 512  # rows that cosines are measured on


def free_parameters(targets: Targets) -> tuple[str, ...]:
    """Return which parameters a fit to these targets changes."""
    if targets.fit:
        return targets.fit
    figures = [figure.name for sample in targets.samples for figure in sample.fitted]
    names = {name if name.endswith(_WHOLE) else name.partition(":")[0] for name in figures}
    return tuple(parameter for parameter, figure in DETERMINED_BY.items() if figure in names)


def simulate(parameters: ParameterSet, targets: Targets, seed: int, names: Sequence[str]) -> dict[str, float]:
    """Measure figures on a synthetic trace of the sample's size."""
    return _simulate(parameters.replace(**targets.shape), targets, targets.n_decode, seed, names)


def _simulate(shaped: ParameterSet, targets: Targets, n_decode: int, seed: int, names: Sequence[str]) -> dict[str, float]:
    if not names:
        return {}
    signals = any(name.startswith("recall@") and name != "recall@coactivation" for name in names)
    tables = any("residual" in name for name in names)
    n = targets.n_requests
    if targets.workloads:
        shaped = shaped.replace(workload_requests=-(-n // targets.workloads))
    trace = synthesize(
        shaped, n_requests=n, n_prompt=targets.n_prompt, n_decode=n_decode, seed=seed,
        n_signal_requests=-(-_ROWS_PREDICTED // n_decode) if signals else 0,
        n_input_requests=-(-_ROWS_READ // n_decode) if needs_inputs(names) else 0,
        n_calibration=N_CALIBRATION if tables else 0,
    )  # fmt: skip
    if targets.workloads:
        trace = subset(trace, sorted(range(n), key=lambda number: (number % shaped.workload_requests, number)))
    return measure(trace, names, separate=targets.separate)


class Quick:
    """Simulates less, for the many tries of a fit."""

    # If layers are alike, statistics along the requests are those of every layer, whatever happens between layers: a
    # few layers do for them, and a parameter of the latter kind needs no new trace. If layers differ, a mean needs
    # some more of them, over the same depth. Statistics of pairs of layers need more layers and all requests, but
    # fewer tokens of each.

    def __init__(self, targets: Targets, names: Sequence[str]) -> None:
        self._targets = targets
        self._across = [name for name in names if name.startswith(("recall@", "cosine@", "top_weight"))]
        self._along = [name for name in names if name not in self._across]
        self._all_layers = any(":q" in name or ":layer" in name for name in self._along)
        rows = max(_ROWS_PREDICTED, _PAIRS * (targets.shape["n_experts"] / targets.shape["top_k"]) ** 2)
        self._n_decode = min(targets.n_decode, -(-int(rows) // targets.n_requests))
        self._known: dict[tuple[float, ...], dict[str, float]] = {}

    def __call__(self, parameters: ParameterSet, seed: int) -> dict[str, float]:
        shaped = parameters.replace(**self._targets.shape)
        key = (seed, *(value for name, value in shaped.values().items() if name not in _ACROSS))
        if key not in self._known:
            self._known[key] = _simulate(self._fewer(shaped), self._targets, self._targets.n_decode, seed, self._along)
        across = shaped if self._all_layers else shaped.replace(n_layers=min(shaped.n_layers, _LAYERS_ACROSS))
        return self._known[key] | _simulate(across, self._targets, self._n_decode, seed, self._across)

    def _fewer(self, p: ParameterSet) -> ParameterSet:
        """Leave layers out."""
        differ = p.locality_spread or p.popularity_spread or p.shallow
        n = _LAYERS_APART if differ else _LAYERS_ALONG
        if self._all_layers or p.n_layers <= n:
            return p
        return p.replace(n_layers=n, shallow_layers=p.shallow_layers * n / p.n_layers)


def most_traces(targets: Targets, n_seeds: int) -> int:
    """Count the synthetic traces that a fit makes at most."""
    n_slopes = 1 + len(free_parameters(targets))
    return len(targets.samples) * (n_slopes + (1 + _STEPS) * min(_FEW_SEEDS, n_seeds) + (1 + _POLISH_STEPS) * n_seeds)


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
        Where to start; what is not fitted stays as it is there, and counts as assumed.
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
    names = [[figure.name for figure in sample.fitted] for sample in targets.samples]
    quicks = [Quick(sample, wanted) for sample, wanted in zip(targets.samples, names, strict=True)]

    def quick(parameters: ParameterSet, seed: int) -> list[float]:
        found = [one(parameters, seed) for one in quicks]
        return [each[name] for each, wanted in zip(found, names, strict=True) for name in wanted]

    def whole(parameters: ParameterSet, seed: int) -> list[float]:
        found = [simulate(parameters, sample, seed, wanted) for sample, wanted in zip(targets.samples, names, strict=True)]
        return [each[name] for each, wanted in zip(found, names, strict=True) for name in wanted]

    place, slopes = problem.start, problem.slopes(problem.start, seeds[:1], quick)
    place, slopes = _descend(problem, place, slopes, seeds[:_FEW_SEEDS], quick, _STEPS)
    place, _ = _descend(problem, place, slopes, seeds, whole, _POLISH_STEPS)
    borrowed = {
        name: f"as fitted to {base.model}: no such figure of this model"
        for name, kind in base.origin.items()
        if kind == "fitted" and name not in free and base.model != targets.model
    }
    return base.replace(
        **problem.values(place),
        model=targets.model,
        **{key: value for key, value in targets.shape.items() if key != "top_k" or base.model != targets.model},
        fitted_to=f"{'; '.join(sample.source for sample in targets.samples)}; seeds {', '.join(str(seed) for seed in seeds)}",
        origin={name: "fitted" if name in free else "assumed" for name in NUMBERS},
        why={name: words for name, words in base.why.items() if name not in free} | borrowed,
    )


class _Problem:
    """Errors of the figures as a function of the free parameters."""

    def __init__(self, base: ParameterSet, targets: Targets, free: Sequence[str], progress: Callable[[int, float], None]) -> None:
        self._base, self._free, self._progress, self._n_samples = base, free, progress, len(targets.samples)
        figures = [figure for sample in targets.samples for figure in sample.fitted]
        self._wanted, self._tolerance = (np.asarray([getattr(f, what) for f in figures]) for what in ("value", "tolerance"))
        self._tries = 0
        self.lower, self.upper = (np.asarray([to_scale(name, NUMBERS[name][end]) for name in free]) for end in ("low", "high"))
        start = np.asarray([to_scale(name, getattr(base, name)) for name in free])
        self.start = np.clip(start, self.lower, self.upper)

    def values(self, place: NDArray[np.float64]) -> dict[str, float]:
        return {name: float(f"{from_scale(name, value):.4g}") for name, value in zip(self._free, place, strict=True)}

    def errors(self, place: NDArray[np.float64], seeds: Sequence[int], measured: _Measured) -> NDArray[np.float64]:
        """Return the errors of means over seeds."""
        tried = self._base.replace(**self.values(place))
        found = (np.mean([measured(tried, seed) for seed in seeds], axis=0) - self._wanted) / self._tolerance
        self._tries += len(seeds) * self._n_samples
        self._progress(self._tries, float(np.sqrt((found**2).mean())))
        return np.asarray(found, np.float64)

    def slopes(self, place: NDArray[np.float64], seeds: Sequence[int], measured: _Measured) -> NDArray[np.float64]:
        """Return the changes of errors with each parameter."""
        here = self.errors(place, seeds, measured)
        steps = np.where(place + _STEP <= self.upper, _STEP, -_STEP)
        return np.stack([(self.errors(place + d, seeds, measured) - here) / d.sum() for d in np.diag(steps)], axis=1)


def _descend(
    problem: _Problem, place: NDArray[np.float64], slopes: NDArray[np.float64], seeds: Sequence[int], measured: _Measured, n: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Take damped steps, and learn from each how the slopes change."""
    here, damping = problem.errors(place, seeds, measured), _DAMPING
    for _ in range(n):
        matrix = np.vstack([slopes, damping * np.eye(len(place))])  # figures that say the same twice leave it ill-conditioned
        step = np.linalg.lstsq(matrix, np.concatenate([-here, np.zeros(len(place))]), rcond=None)[0]
        there = np.clip(place + np.clip(step, -_FURTHEST, _FURTHEST), problem.lower, problem.upper)
        moved = there - place
        if not moved.any():
            break
        errors = problem.errors(there, seeds, measured)
        slopes = slopes + np.outer(errors - here - slopes @ moved, moved) / (moved @ moved)
        if errors @ errors < here @ here:
            place, here, damping = there, errors, damping / 2
        else:
            damping *= 4
    return place, slopes


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
SAMPLE = ("sample",)  # one more column in front, where there are several
HELD_OUT = ("held out", "error there")  # more columns, where some requests were held out
RIGHT = ("target", "fit", "error", "worst", "tolerance", *HELD_OUT)


@dataclass(frozen=True)
class Match:
    """One figure next to what synthetic traces have."""

    figure: Figure
    found: tuple[float, ...]  # one for each seed
    held_out: float | None = None  # the figure of requests that were held out; None if there are none
    sample: str = ""  # name of the sample; empty: the first, or only one

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
    matches = []
    for sample in targets.samples:
        found = [simulate(parameters, sample, seed, [figure.name for figure in sample.figures]) for seed in seeds]
        for figure in sample.figures:
            values = tuple(each[figure.name] for each in found)
            matches.append(Match(figure, values, (held_out or {}).get(figure.name), sample.name))
    return matches


def cells(matches: Sequence[Match]) -> list[list[str]]:
    """Write matches as rows of text."""
    several = any(m.sample for m in matches)
    return [
        [
            *([m.sample] if several else []),
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
