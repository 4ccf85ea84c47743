"""The prediction sources of one run, made when a policy first asks, and the routing still to come for oracles."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moesim.errors import ConfigError
from moesim.trace.predictors.sources import MADE_UP, SHADOW, Predictor, make_predictor, split_width

if TYPE_CHECKING:
    from moesim.trace import Trace
    from moesim.trace.workload import Workload

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
        """Return when an expert is used next."""
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
        """Return a source; KeyError if there is none of that name."""
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
    """Return which source answers for another."""
    named = stand_ins.get(source, stand_ins.get(source.removeprefix("signal:")))
    return named if named is not None else stand_ins.get("*", source)
