"""Vary one thing at a time: speed, what limits it, and where on the knob that changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from moesim.core.text import note
from moesim.errors import ConfigError, InputError, MoesimError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, read_inputs
from moesim.experiment.run import run_experiment
from moesim.experiment.workers import Workers
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.studies.whatif.knobs import change, knob_of
from moesim.studies.whatif.limits import RESOURCES, Limits, limits_of
from moesim.studies.whatif.settings import JOINED, Base, Changed, Setting

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.metrics.outcome import Outcome
    from moesim.trace import Trace


METRICS: Final = ("decode_tokens_per_s", "ttft_mean_ns", "makespan_ns", "hit_rate", "cache_slots", "contention_ns")
"""Metrics that are kept of a run."""
_WORDS: Final = ("source_label", "notes", "routing", "fidelity_fresh", "fidelity_fresh_decode", *SETTINGS, *CACHE_SETTINGS)
_CURVES = ("linear", "flat_linear", "points")


@dataclass(frozen=True)
class Shot:
    """The facts of one simulated run."""

    row: Mapping[str, Value]  # its metrics and settings that are reported
    limits: Limits | None  # None if it failed
    used: frozenset[str]  # keys of the profile's numbers that its costs come from
    error: MoesimError | None = None  # why it failed
    # rooflines, curves: costs that come of a device's rates alone, and of a curve of the profile
    rooflines: frozenset[str] = frozenset()
    curves: frozenset[str] = frozenset()


Works = Sequence[tuple[Mapping[str, Any], int]]
"""Experiments, and the number of the run in each."""


class Runs:
    """Runs of one study, each once."""

    def __init__(
        self, place: str, jobs: int | None, progress: bool, simulate: Callable[[Works], list[Shot]] | None = None
    ) -> None:
        self._place, self._progress = place, progress
        self._simulate = simulate or self._sweep
        self._known: dict[tuple[str, int], Shot] = {}
        self._traces: dict[str, Trace] = {}
        self._workers = Workers(jobs)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: Any) -> None:
        self._workers.__exit__(*error)

    def read_inputs(self, raws: Iterable[Mapping[str, Any]]) -> None:
        for raw in raws:
            read_inputs(raw, self._place, self._traces)

    def shots(self, works: Works) -> list[Shot]:
        keys = [(json.dumps(_without_words(raw), sort_keys=True), index) for raw, index in works]
        missing = {key: work for key, work in zip(keys, works, strict=True) if key not in self._known}
        self._known.update(zip(missing, self._simulate(list(missing.values())), strict=True))
        return [self._known[key] for key in keys]

    def _sweep(self, works: Works) -> list[Shot]:
        """Run all as one sweep; an experiment that cannot be resolved is a failed shot."""
        experiments: dict[str, Experiment | Shot] = {}
        found: list[Shot | None] = []
        runs = []
        for raw, index in works:
            key = json.dumps(raw, sort_keys=True)
            if key not in experiments:
                try:
                    experiments[key] = Experiment(parse_config(dict(raw), self._place), self._place, known=self._traces)
                except MoesimError as error:
                    experiments[key] = Shot({}, None, frozenset(), error)
            one = experiments[key]
            found.append(one if isinstance(one, Shot) else None)
            if isinstance(one, Experiment):
                runs.append((one, one.specs[index]))
        if not runs:
            return [shot for shot in found if shot]
        done = run_experiment(Experiment.joined(runs), progress=self._progress, examine=limits_of, workers=self._workers)
        outcomes = iter(done.outcomes)
        return [shot or _shot(next(outcomes)) for shot in found]


def _without_words(value: Any) -> Any:
    """Return what a run depends on: all but the words next to numbers."""
    if isinstance(value, Mapping):
        words = ("how", "why", "ref") if "source" in value else ()
        return {key: _without_words(inner) for key, inner in value.items() if key not in words}
    return [_without_words(inner) for inner in value] if isinstance(value, list) else value


def _shot(outcome: Outcome) -> Shot:
    if outcome.failure is not None:
        return Shot({"policy": outcome.row["policy"]}, None, frozenset(), outcome.failure)
    costs = outcome.provenance or {}
    return Shot(
        {name: outcome.row.get(name) for name in ("policy", *METRICS, *_WORDS)},
        outcome.found,
        frozenset(number for cost in costs.values() for number in cost["numbers"]),
        rooflines=frozenset(name for name, cost in costs.items() if cost["form"] == "roofline"),
        curves=frozenset(name for name, cost in costs.items() if cost["form"].partition(",")[0] in _CURVES),
    )


REACH = Fraction(8)
"""The search goes from the machine as it is to eight times as much, or an eighth."""
CLOSE = 1.05
"""It ends when the factors before and after the change differ by no more than 5 %."""


@dataclass(frozen=True)
class Crossing:
    """The limit of a run at a factor: where the search asked, at last where it changes."""

    limit: str | None  # what limits it; None if it could not be carried out, or in the end if there is no change in reach
    # the factor that was simulated, which of whole numbers may be another than was asked for; in the end the smallest change at
    # which the next limit was seen, or how far the search went
    factor: Fraction
    error: str = ""  # why it could not be carried out, or why the search went no further, if that was not for its reach


Asking = Generator[Fraction, Crossing, Crossing]
Axis = tuple[str, str, bool]
"""A policy, a knob, and whether the knob goes up."""


def search(limit: str, up: bool, reach: Fraction = REACH) -> Asking:
    """Look for the factor at which a limit changes.

    >>> def run(asking):
    ...     factor = next(asking)
    ...     while True:
    ...         factor = asking.send(Crossing("link" if factor < 3 else "CPU", factor))
    >>> try:
    ...     run(search("link", up=True))
    ... except StopIteration as end:
    ...     print(end.value.limit, 3 <= end.value.factor <= 3 * 1.05)
    CPU True
    """
    before = step = Fraction(1)
    found: Crossing | None = None
    while step < reach and found is None:
        step = min(step * 2, reach)
        answer = yield step if up else 1 / step
        if answer.limit is None:
            return Crossing(None, before, answer.error)
        if answer.limit != limit:
            found = answer
        else:
            before = answer.factor
    if found is None:
        return Crossing(None, before)
    while max(found.factor / before, before / found.factor) > CLOSE:
        answer = yield Fraction(math.sqrt(found.factor * before)).limit_denominator(10_000)
        if answer.limit is None or answer.factor in (before, found.factor):
            break  # between two whole numbers
        if answer.limit != limit:
            found = answer
        else:
            before = answer.factor
    return found


def search_all(
    base: Base, wanted: Mapping[Axis, Fraction], index: Mapping[str, int], limits: Mapping[str, Limits | None], runs: Runs
) -> dict[Axis, Crossing]:
    """Run searches side by side: each round simulates the next factor of every one."""
    found: dict[Axis, Crossing] = {}
    going: dict[Axis, Asking] = {}
    asked: dict[Axis, Fraction] = {}
    for key, reach in wanted.items():
        policy, name, up = key
        highest, before = knob_of(name).highest, limits[policy]
        assert before is not None
        if up and highest is not None:
            reach = min(reach, highest(base))
        if reach <= 1:
            found[key] = Crossing(None, Fraction(1))
            continue
        going[key] = search(before.limit, up, reach)
        asked[key] = next(going[key])
    while going:
        answers: dict[Axis, Crossing] = {}
        changes: dict[Axis, Changed] = {}
        for key in going:
            scale = knob_of(key[1]).scale
            assert scale is not None
            try:
                changes[key] = scale(base, asked[key])
            except InputError as error:
                answers[key] = Crossing(None, asked[key], str(error))
        shots = runs.shots([(changed.raw, index[key[0]]) for key, changed in changes.items()])
        for (key, changed), shot in zip(changes.items(), shots, strict=True):
            limit = shot.limits.limit if shot.limits else None
            answers[key] = Crossing(limit, asked[key] if changed.factor is None else changed.factor, str(shot.error or ""))
        for key, answer in answers.items():
            try:
                asked[key] = going[key].send(answer)
            except StopIteration as end:
                found[key] = end.value
                del going[key]
    return found


RATES = ("link.bytes_per_s", "cpu.memory_bandwidth", "cpu.compute", "gpu.memory_bandwidth", "gpu.compute")
"""Knobs of the machine of which more should be better."""
_NOISE = 0.005  # less is shown as 0 % or so: schedules wander by as much, and a mark would alarm


@dataclass(frozen=True)
class Line:
    """One varied setting under one policy."""

    policy: str  # with its options
    settings: tuple[Setting, ...]  # what was varied; empty for the experiment as it is
    changed: Changed  # the experiment that it gave
    # base, shot: the run as it is, and this one
    base: Shot
    shot: Shot
    crossing: Crossing | None = None  # where along the knob the limit changes; None where that was not looked for
    at: Fraction | None = None  # the knob's number there

    @property
    def name(self) -> str:
        return self.changed.name or JOINED.join(str(one) for one in self.settings) or "as it is"

    @property
    def effect(self) -> str:
        """The effect: ``changed``, ``not limiting``, ``not used``, ``same`` or ``failed``."""
        if self.shot.error is not None:
            return "failed"
        if self.shot is self.base:
            return "same"
        if any(self.shot.row[key] != self.base.row[key] for key in METRICS if key != "contention_ns"):
            return "changed"
        keys = self.changed.keys
        contended = any(key.startswith("contention.") for key in keys) and self.base.row["contention_ns"]
        used = not keys or contended or any(u == key or u.startswith(f"{key}.") for u in self.shot.used for key in keys)
        return "not limiting" if used else "not used"

    @property
    def is_oracle(self) -> bool:
        return self.base.row.get("source_label") == "oracle"

    @property
    def fresh(self) -> float | None:
        """Share of the gate weight computed as recorded, of decoding if there is any."""
        for key in ("fidelity_fresh_decode", "fidelity_fresh"):
            if isinstance(share := self.shot.row.get(key), int | float):
                return float(share)
        return None

    @property
    def anomalies(self) -> tuple[str, ...]:
        """Metrics that go the wrong way with a faster or slower part by more than 0.5 %."""
        factor = self.changed.factor
        if len(self.settings) != 1 or self.settings[0].knob not in (*RATES, "pcie", "cpu.memory") or factor in (None, 1):
            return ()
        assert factor is not None
        towards = 1 if factor > 1 else -1
        better = {"decode_tokens_per_s": towards, "ttft_mean_ns": -towards}
        return tuple(key for key, sign in better.items() if sign * (self.change(key) or 0.0) < -_NOISE)

    @property
    def uneven(self) -> tuple[str, ...]:
        """Costs that moved between curve and roofline, which differ more than the variation does."""
        one, two = self.base, self.shot
        return tuple(sorted((one.curves & two.rooflines) | (one.rooflines & two.curves)))

    def change(self, key: str) -> float | None:
        """Return a metric's change as a share; None where it has no meaning."""
        before, after = self.base.row.get(key), self.shot.row.get(key)
        if not isinstance(before, int | float) or not isinstance(after, int | float) or not before:
            return None
        return after / before - 1

    def record(self) -> dict[str, Any]:
        limits, before, crossing = self.shot.limits, self.base.limits, self.crossing
        assert before is not None
        row, base = self.shot.row, self.base.row
        factor = self.changed.factor
        return {
            "policy": self.policy,
            "knob": JOINED.join(one.knob for one in self.settings),
            "setting": JOINED.join(one.text for one in self.settings),
            "value": self.changed.value or None,
            "factor": None if factor is None else float(factor),
            "decode_tokens_per_s": row.get("decode_tokens_per_s"),
            "base_decode_tokens_per_s": base["decode_tokens_per_s"],
            "decode_change": self.change("decode_tokens_per_s"),
            "ttft_mean_ns": row.get("ttft_mean_ns"),
            "base_ttft_mean_ns": base["ttft_mean_ns"],
            "ttft_change": self.change("ttft_mean_ns"),
            "effect": self.effect,
            "limit": limits.limit if limits else None,
            "limit_share": limits.shares[limits.limit] if limits else None,
            "fidelity_fresh_decode": row.get("fidelity_fresh_decode"),
            "base_fidelity_fresh_decode": base.get("fidelity_fresh_decode"),
            "base_limit": before.limit,
            "base_limit_share": before.shares[before.limit],
            "next_limit": crossing.limit if crossing else None,
            "next_factor": float(crossing.factor) if crossing and crossing.limit else None,
            "next_value": float(self.at) if self.at is not None else None,
            "searched_to": float(crossing.factor) if crossing and not crossing.limit else None,
            "search_error": crossing.error or None if crossing else None,
            **{f"share.{name}": limits.shares[name] if limits else None for name in RESOURCES},
            **{f"base_share.{name}": before.shares[name] for name in RESOURCES},
            "source_label": row.get("source_label"),
            "base_source_label": base["source_label"],
            "anomalies": ", ".join(self.anomalies) or None,
            "changed": self.changed.note or None,
            "uneven_costs": ", ".join(self.uneven) or None,
            "error": None if self.shot.error is None else str(self.shot.error),
            **{key: base.get(key) for key in (*SETTINGS, *CACHE_SETTINGS, "cache_slots", "hit_rate", "routing", "notes")},
        }  # fmt: skip


def whatif(
    base: Base, variations: Sequence[tuple[Setting, ...]], *, look: bool = True, jobs: int | None = 1, progress: bool = False
) -> list[Line]:
    """Vary an experiment, one thing at a time; the settings of one variation together.

    Returns for each policy, in the experiment's order, the line as it is and of each variation, failed runs among them. With
    `look` it searches where along each knob the limit changes. Raises `InputError` if a knob or value is unknown, two come to the
    same, or the profile cannot express it, and `MoesimError` if a policy fails as it is.
    """
    changes = {together: change(base, together) for together in dict.fromkeys(variations)}
    _refuse_same(changes)
    names = [spec.policy_name for spec in Experiment(parse_config(base.raw, base.place), base.place).specs]
    with Runs(base.place, jobs, progress) as runs:
        runs.read_inputs(changed.raw for changed in changes.values())
        as_is = runs.shots([(base.raw, i) for i in range(len(names))])
        for name, shot in zip(names, as_is, strict=True):
            if shot.error is not None:
                raise type(shot.error)(f"{base.place}: {name}: {shot.error}")
        runs.shots([(changed.raw, i) for i in range(len(names)) for changed in changes.values()])
        lines = []
        for i, name in enumerate(names):
            lines.append(Line(name, (), Changed(base.raw, Fraction(1)), as_is[i], as_is[i]))
            for together, changed in changes.items():
                lines.append(Line(name, together, changed, as_is[i], runs.shots([(changed.raw, i)])[0]))
        return _with_crossings(base, lines, names, runs) if look else lines


def _refuse_same(changes: Mapping[tuple[Setting, ...], Changed]) -> None:
    known: dict[str, str] = {}
    for together, changed in changes.items():
        name = JOINED.join(str(one) for one in together)
        if changed.value in known:
            raise ConfigError(
                f"--vary {name}: expected another value than that of '{known[changed.value]}', got {changed.value} for both; "
                "leave one out"
            )
        known[changed.value] = name


def _axis(together: Sequence[Setting], changed: Changed) -> tuple[str, bool] | None:
    """Name the knob along which to look, and whether upwards; None if there is none."""
    if len(together) != 1 or changed.factor in (None, 1) or knob_of(together[0].knob).scale is None:
        return None
    assert changed.factor is not None
    return together[0].knob, changed.factor > 1


def _with_crossings(base: Base, lines: Sequence[Line], names: Sequence[str], runs: Runs) -> list[Line]:
    wanted: dict[Axis, Fraction] = {}
    axes = [_axis(line.settings, line.changed) for line in lines]
    for line, axis in zip(lines, axes, strict=True):
        if axis is not None and line.effect in ("changed", "not limiting"):
            assert line.changed.factor is not None
            key, far = (line.policy, *axis), max(line.changed.factor, 1 / line.changed.factor)
            wanted[key] = max(wanted.get(key, REACH), far)
    limits = {line.policy: line.base.limits for line in lines}
    found = search_all(base, wanted, {name: i for i, name in enumerate(names)}, limits, runs)

    def complete(line: Line, axis: tuple[str, bool] | None) -> Line:
        if axis is None or (crossing := found.get((line.policy, *axis))) is None:
            return line
        read = knob_of(axis[0]).read
        return replace(line, crossing=crossing, at=read(base) * crossing.factor if read is not None and crossing.limit else None)

    return [complete(line, axis) for line, axis in zip(lines, axes, strict=True)]


def records(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the records of all varied settings, without the lines of experiments as they are."""
    return [line.record() for line in lines if line.settings]


def halved_and_doubled(base: Base) -> list[tuple[Setting, ...]]:
    """Halve and double each of `RATES`, but for those that the profile cannot express."""
    variations: list[tuple[Setting, ...]] = []
    for knob in RATES:
        both = [(Setting(knob, "x0.5"),), (Setting(knob, "x2"),)]
        try:
            change(base, both[0])
        except InputError as error:
            note(f"moesim: left out: {error}")
        else:
            variations += both
    return variations
