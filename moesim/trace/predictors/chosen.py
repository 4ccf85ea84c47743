"""The prediction sources of one run, made when a policy first asks, so that a result knows which were used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moesim.errors import ConfigError
from moesim.trace.predictors.contract import Predictor
from moesim.trace.predictors.recorded import MADE_UP, SHADOW, make_predictor, split_width

if TYPE_CHECKING:
    from moesim.trace import Trace
    from moesim.trace.workload import Workload

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
        """Give a source; KeyError if there is none of that name."""
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
        """List what could be asked for."""
        return iter(dict.fromkeys((*ALWAYS, *self._trace.signals, *self._stand_ins)))

    def __len__(self) -> int:
        """Count what could be asked for."""
        return len(list(iter(self)))

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the sources that were asked for, sorted."""
        return tuple(sorted({made.label for made in self._made.values() if made.label}))


def stand_in(source: str, stand_ins: Mapping[str, str]) -> str:
    """Tell which source answers for another.

    >>> stand_in("signal:residual", {"residual": "synthetic:0.9"}), stand_in("frequency", {})
    ('synthetic:0.9', 'frequency')
    """
    named = stand_ins.get(source, stand_ins.get(source.removeprefix("signal:")))
    return named if named is not None else stand_ins.get("*", source)
