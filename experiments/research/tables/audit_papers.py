"""Audit the papers' claims: each printed speed-up next to the largest that machines around the paper's own reach.

A printed loss, as of a system without one of its parts, is next to the largest loss. The machines are the corners of a range:
rates of link, CPU memory, CPU operations and GPU memory at half or twice the profile's. A speed-up that rises or falls with
each of them is largest at a corner; nothing says that every one does.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Final

from experiments.research.tables.command import PAPERS, begin_papers, parser, run, write
from moesim.core.table import Format, render, render_records
from moesim.errors import ConfigError, InputError
from moesim.experiment.config import Config, load_config
from moesim.experiment.sweep import expand, quick
from moesim.experiment.workers import Workers
from moesim.metrics.naming import policy_label
from moesim.studies.league import Meetings
from moesim.studies.papers.compare import check_answers, choose, compare, figures
from moesim.studies.papers.published import PUBLISHED, RATIOS, Published, paper_folder, read_published
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
        """Return everything by name."""
        one = self.published
        return {
            "paper": one.paper, "figure": one.figure, "claim": one.what, "kind": one.kind, "unit": one.unit,
            "published": one.published, "own": self.own, "largest": self.largest, "machine": self.machine,
            "n_machines": self.n_machines, "within": self.within,
        }  # fmt: skip


def is_loss(row: Published) -> bool:
    """Whether a printed ratio is the loss of a system without one of its parts."""
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
                raw = dict(scale(Base(raw, "audit_papers"), factor).raw)
            except InputError:
                continue
        moved.append((json.dumps(raw, sort_keys=True), systems))
    return moved


def table(found: Sequence[Audited], form: Format) -> str:
    """Write claims, as printed, on the paper's own machine, and at most."""
    if form.for_programs:
        return render_records([one.record() for one in found], form)
    head = ["figure", "claim", "printed", "own machine", "at most", "on", "within"]
    rows = [
        [
            one.published.name,
            one.published.what,
            *(_figure(value, one) for value in (one.published.published, one.own, one.largest)),
            one.machine,
            "yes" if one.within else "no",
        ]
        for one in found
    ]
    within = sum(one.within for one in found)
    notes = [
        f"at most: the largest ratio, or for a loss the smallest, of {len(machines())} machines: the paper's own, and those "
        f"whose link, CPU memory, CPU operations and GPU memory have {FACTOR} times or 1/{FACTOR} of its rates",
        f"{within} of {len(found)} printed ratios are within reach of one of these machines",
    ]
    return render(head, rows, form, head[2:5]) + "\n" + ("\n\n" if form is Format.MD else "\n").join(notes) + "\n"


def _figure(value: float, one: Audited) -> str:
    return f"{value:.3g} %" if one.published.kind == "gain" else f"x{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each printed speed-up next to the largest of 17 machines around its paper's; takes an hour.

    The machines have rates of link, CPU memory, CPU operations and GPU memory at half or twice the profile's.
    """
    options = parser("experiments.research.tables.audit_papers", main.__doc__, jobs=True)
    options.add_argument("names", nargs="*", metavar="PAPER[/FIGURE]", help="papers or figures; default: all")
    options.add_argument("--quick", action="store_true", help="first value of each sweep and at most 4 decode tokens")
    return run(_audit, options, arguments)


def _audit(given: Namespace) -> None:
    folder = paper_folder()
    chosen = choose(figures(read_published(folder / PUBLISHED), folder), given.names)
    rows = [row for one in chosen for row in one.rows]
    configs = {name: load_config(folder / f"{name}.yaml") for one in chosen for name in one.experiments}
    check_answers(rows, configs, str(folder / PUBLISHED))
    if given.quick:
        configs = {name: quick(config) for name, config in configs.items()}
    begin_papers(given.out)
    with Workers(given.jobs) as workers:
        kept = None if given.out is None else given.out / "audit"
        found = audit(rows, configs, Meetings("audit_papers", workers, kept, progress=True))
    if not found:
        raise ConfigError("audit_papers: expected a printed speed-up that runs answer, got none; name another figure")
    sys.stdout.write(table(found, given.form))
    if given.out is not None:
        write(given.out, {"audit.csv": table(found, Format.CSV).encode()}, PAPERS, owned=True)


if __name__ == "__main__":
    sys.exit(main())
