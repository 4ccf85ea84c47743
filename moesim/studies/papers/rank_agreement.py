"""Rank agreement: whether the systems of a printed figure are in the same order when simulated.

Absolute figures rest on costs that nobody has printed; an order says which design is better, which is what papers are read
for. Values give an order, and so do ratios over a common baseline, or chains of ratios: all are put on one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from moesim.studies.papers.published import BOUNDS

if TYPE_CHECKING:
    from moesim.studies.papers.compare import Compared

Scores = tuple[float, float]  # logarithms of what is printed and of what is simulated, on a scale of their own
_ABSOLUTE = ""  # the node that values are ratios over


@dataclass(frozen=True)
class Agreement:
    """The order of the systems of one figure and setting."""

    # paper, figure, quantity, setting, reading: what is ranked, as in the table
    paper: str
    figure: str
    quantity: str
    setting: str
    reading: str
    systems: tuple[str, ...]  # in the printed order, the largest figure first
    order: str  # the same in words, with `=` between systems whose printed figures are equal
    # Kendall's tau-b of printed and simulated figures; None for two systems, whose one pair says it all, and where all are
    # simulated to be equal
    tau: float | None
    pairs: int  # pairs of systems whose printed figures differ
    # wrong, tied: those of them that are simulated in the other order, and those simulated to be equal: the one that is printed
    # to be larger first
    wrong: tuple[tuple[str, str], ...]
    tied: tuple[tuple[str, str], ...]

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if self.pairs == 1:
            return "1 pair, disagrees" if self.wrong else "1 pair, simulated equal" if self.tied else "1 pair, agrees"
        tau = "" if self.tau is None else f"tau {self.tau:.2f}, "
        return f"{tau}{self.pairs - len(self.wrong) - len(self.tied)} of {self.pairs} pairs agree"

    @property
    def amiss(self) -> str:
        """The pairs that are not in the printed order, in words."""
        return "; ".join([*(f"{a} > {b}" for a, b in self.wrong), *(f"{a} > {b} (simulated equal)" for a, b in self.tied)])

    def record(self) -> dict[str, Any]:
        """Give everything by name."""
        return {
            "paper": self.paper, "figure": self.figure, "quantity": self.quantity, "setting": self.setting,
            "reading": self.reading, "n_systems": len(self.systems), "systems": self.order, "tau": self.tau,
            "pairs": self.pairs, "pairs_wrong": len(self.wrong), "pairs_tied": len(self.tied), "wrong": self.amiss,
            "verdict": self.verdict,
        }  # fmt: skip


def agreements(compared: Iterable[Compared]) -> list[Agreement]:
    """Rank the systems of every figure and setting for which at least two have a printed and a simulated figure."""
    groups: dict[tuple[str, str, str, str], list[Compared]] = {}
    for one in compared:
        row = one.published
        if one.simulated is not None and row.kind != "place" and row.source != "costs":  # costs are inputs, not systems
            groups.setdefault((row.paper, row.figure, row.quantity, row.setting), []).append(one)
    found = []
    for key, rows in groups.items():
        readings = list(dict.fromkeys(one.published.reading for one in rows if one.published.reading)) or [""]
        for reading in readings:
            mine = [one for one in rows if one.published.reading in ("", reading)]
            found += [_agreement(key, reading, scores) for scores in _scales(mine)]
    return found


def _agreement(key: tuple[str, str, str, str], reading: str, scores: Mapping[str, Scores]) -> Agreement:
    systems = sorted(scores, key=lambda name: -scores[name][0])
    pairs = [(a, b) for a, b in combinations(systems, 2) if scores[a][0] > scores[b][0]]
    wrong = tuple((a, b) for a, b in pairs if scores[a][1] < scores[b][1])
    tied = tuple((a, b) for a, b in pairs if scores[a][1] == scores[b][1])
    tau = None
    if len(systems) > 2 and pairs:
        from scipy.stats import kendalltau  # SciPy takes most of a second to import

        found = float(kendalltau(*zip(*(scores[name] for name in systems), strict=True)).statistic)
        tau = None if math.isnan(found) else found
    order = systems[0] + "".join(f" {'>' if (a, b) in pairs else '='} {b}" for a, b in pairwise(systems))
    return Agreement(*key, reading, tuple(systems), order, tau, len(pairs), wrong, tied)


def _scales(rows: Sequence[Compared]) -> list[dict[str, Scores]]:
    """Put systems on common scales: one for each set that values and ratios connect, where at least two differ in print."""
    edges: dict[str, list[tuple[str, Scores]]] = {}
    for one in sorted(rows, key=lambda one: bool(one.published.over)):  # a value counts before what ratios would make of it
        step = _step(one)
        system, other = one.published.system, one.published.over or _ABSOLUTE
        edges.setdefault(other, []).append((system, step))
        edges.setdefault(system, []).append((other, (-step[0], -step[1])))
    bounds = {one.published.system: one.published.kind for one in rows if one.published.kind in BOUNDS}
    scales, left = [], sorted(edges, key=lambda name: name != _ABSOLUTE)
    while left:
        scale = _reach(edges, left[0])
        left = [name for name in left if name not in scale]
        scale.pop(_ABSOLUTE, None)
        known = _without_useless_bounds({name: (round(a, 9), round(b, 9)) for name, (a, b) in scale.items()}, bounds)
        if len({printed for printed, _ in known.values()}) > 1:
            scales.append(known)
    return scales


def _reach(edges: Mapping[str, Sequence[tuple[str, Scores]]], start: str) -> dict[str, Scores]:
    scale, waiting = {start: (0.0, 0.0)}, [start]
    while waiting:
        here = waiting.pop(0)
        for there, step in edges[here]:
            if there not in scale:
                scale[there] = (scale[here][0] + step[0], scale[here][1] + step[1])
                waiting.append(there)
    return scale


def _step(one: Compared) -> Scores:
    """Logarithms of what one row says about its system, of its value or of the ratio."""
    factors = [one.published.published, one.simulated or 0.0]
    if one.published.kind == "gain":
        factors = [1 + factor / 100 for factor in factors]
    printed, simulated = (math.log(factor) if factor > 0 else -math.inf for factor in factors)
    return printed, simulated


def _without_useless_bounds(scale: Mapping[str, Scores], bounds: Mapping[str, str]) -> dict[str, Scores]:
    """Leave out systems of which only a bound is printed, unless it says on which side of all the others they are."""
    values = [printed for name, (printed, _) in scale.items() if name not in bounds]
    told = {"below": lambda at: all(at <= value for value in values), "above": lambda at: all(at >= value for value in values)}
    return {name: found for name, found in scale.items() if name not in bounds or told[bounds[name]](found[0])}
