"""The papers' claims audited: each printed speed-up beside the largest that machines around the paper's own give.

A printed loss, as of a system without one of its parts, is beside the largest loss. The machines are the corners of a range:
rates of link, CPU memory, CPU operations and GPU memory at half or twice the profile's. A speed-up that rises or falls with
each of them is largest at a corner; nothing says that every one does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Final

from moesim.errors import InputError
from moesim.experiment.config import Config
from moesim.experiment.sweep import expand
from moesim.metrics.naming import policy_label
from moesim.studies.league.meetings import Meetings
from moesim.studies.papers.compare import compare
from moesim.studies.papers.published import RATIOS, Published
from moesim.studies.whatif.knobs import knob_of
from moesim.studies.whatif.settings import Base, raw_at

KNOBS: Final = ("link.bytes_per_s", "cpu.memory_bandwidth", "cpu.compute", "gpu.memory_bandwidth")
FACTOR: Final = 2
"""The range goes from the profile's numbers divided by it to those times it."""
AS_IT_IS: Final = "the paper's own"

Machine = tuple[Fraction, ...]
"""A factor for each of `KNOBS`."""


@dataclass(frozen=True)
class Audited:
    """A printed speed-up or loss, and what machines around the paper's own give."""

    published: Published
    own: float  # simulated on the paper's own machine
    largest: float  # on any: the largest speed-up, or of a loss the smallest ratio
    machine: str  # which one that is
    n_machines: int

    @property
    def within(self) -> bool:
        """Whether any machine of the range gives as much as is printed."""
        one = self.published
        return self.largest <= one.published if is_loss(one) else self.largest >= one.published

    def record(self) -> dict[str, Any]:
        """Give everything by name."""
        one = self.published
        return {
            "paper": one.paper, "figure": one.figure, "claim": one.what, "kind": one.kind, "unit": one.unit,
            "published": one.published, "own": self.own, "largest": self.largest, "machine": self.machine,
            "n_machines": self.n_machines, "within": self.within,
        }  # fmt: skip


def is_loss(row: Published) -> bool:
    """Whether a printed ratio says what a system loses without one of its parts: it is slower than itself with other options."""
    return row.published < (0 if row.kind == "gain" else 1) and row.policy.split("(")[0] == row.baseline.split("(")[0]


def machines() -> list[Machine]:
    """List the machine as it is, then the corners."""
    ends = Fraction(1, FACTOR), Fraction(FACTOR)
    return [(Fraction(1),) * len(KNOBS), *product(ends, repeat=len(KNOBS))]


def named(machine: Machine) -> str:
    """Name a machine by what is faster and slower.

    >>> named((Fraction(1),) * 4), named((Fraction(1, 2), Fraction(2), Fraction(1), Fraction(1)))
    ("the paper's own", 'link / 2, CPU memory x 2')
    """
    words = ("link", "CPU memory", "CPU operations", "GPU memory")
    said = [f"{word} x {f}" if f > 1 else f"{word} / {1 / f}" for word, f in zip(words, machine, strict=True) if f != 1]
    return ", ".join(said) or AS_IT_IS


def audit(rows: Sequence[Published], configs: Mapping[str, Config], meetings: Meetings) -> list[Audited]:
    """Audit printed speed-ups."""
    claims = [row for row in rows if row.kind in RATIOS and row.source == "runs"]
    wanted = {name for row in claims for name in (row.experiment, row.baseline_experiment)}
    settings = {name: _settings(name, configs[name], claims) for name in sorted(wanted)}
    every = machines()
    asked = [(raw, systems) for machine in every for mine in settings.values() for raw, systems in _on(mine, machine)]
    answers = iter(meetings.rows(asked))
    simulated: list[dict[str, float]] = [{} for _ in claims]
    for machine in every:
        results = {name: [row for _ in mine for row in next(answers) if row is not None] for name, mine in settings.items()}
        for found, claim in zip(simulated, claims, strict=True):
            value = compare(claim, results).simulated
            if value is not None:
                found[named(machine)] = value
    return [_audited(claim, found) for claim, found in zip(claims, simulated, strict=True) if AS_IT_IS in found]


def _audited(claim: Published, found: Mapping[str, float]) -> Audited:
    best = (min if is_loss(claim) else max)(found, key=lambda name: found[name])
    return Audited(claim, found[AS_IT_IS], found[best], best, len(found))


_Setting = tuple[dict[str, Any], list[Mapping[str, Any]]]


def _settings(name: str, config: Config, claims: Sequence[Published]) -> list[_Setting]:
    """List the settings of an experiment with the systems that claims are about."""
    about = {row.policy for row in claims if row.experiment == name}
    about |= {row.baseline for row in claims if row.baseline_experiment == name}
    found: dict[str, _Setting] = {}
    for point in expand(config, name):
        if policy_label(point.policy) in about:
            raw = raw_at(config, point)
            found.setdefault(json.dumps([raw, point.repeat], sort_keys=True), (raw, []))[1].append(point.policy)
    return list(found.values())


def _on(settings: Sequence[_Setting], machine: Machine) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Move settings to another machine; a number that a profile lacks stays."""
    moved = []
    for raw, systems in settings:
        for knob, factor in zip(KNOBS, machine, strict=True):
            scale = knob_of(knob).scale
            assert scale is not None
            try:
                raw = dict(scale(Base(raw, "papers --audit"), factor).raw)
            except InputError:
                continue
        moved.append((json.dumps(raw, sort_keys=True), systems))
    return moved
