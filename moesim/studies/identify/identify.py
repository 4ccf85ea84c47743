"""From observed speeds to an identified machine: fit, intervals, and what is unexplained."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np

from moesim.core.table import written
from moesim.core.units import format_memory
from moesim.errors import ConfigError, InputError
from moesim.hardware import HardwareProfile, build_profile, override, read_profile
from moesim.policies.registry import make_policy
from moesim.studies.identify.bench import Bench
from moesim.studies.identify.cases import Case, choices, decode_workload, make_cases, needed_bytes, placement_of
from moesim.studies.identify.fit import Z90, Constant, Fit, Machine, Problem, Vector, check_free
from moesim.studies.identify.model_error import ModelError, Posterior, own_variance, shipped
from moesim.studies.identify.observations import Observation, check_rows, contradict, read_bits
from moesim.studies.identify.predictor import AGREE, STEP, Memo, Predictor

NARROWS: Final = 0.5
"""A constant is identified if its interval is at most this share of its prior's."""

UNEXPLAINED: Final = 3.0
"""Standard deviations beyond which no constants explain a row."""


@dataclass(frozen=True)
class Estimate:
    """A constant after the observations."""

    constant: Constant
    # value, low, high: of the first number that it scales, with its interval of 90 %
    value: float
    low: float
    high: float
    # prior_low, prior_high: the same before any observation
    prior_low: float
    prior_high: float
    identified: bool  # the observations narrow the prior's interval at least to half
    moves: bool  # some row depends on it
    beside: str = ""  # the constant that it can be exchanged with most, if rows determine only their sum


@dataclass(frozen=True)
class Prediction:
    """A row and its prediction by the identified machine."""

    case: Case
    # observed, predicted: in the unit of the row
    observed: float
    predicted: float
    # low, high: interval of 90 % for another measurement of it
    low: float
    high: float
    ratio: float  # predicted over observed speed
    z: float  # standard deviations between them
    status: str  # ``used``, ``check``, ``set aside`` (no constants explain it) or ``beyond memory``
    left_out: float | None = None  # ratio where its block was left out of the identification


@dataclass(frozen=True)
class Identified:
    """An identified machine."""

    profile: HardwareProfile  # its numbers labelled
    raw: dict[str, Any]  # contents of the profile's file
    constants: tuple[Estimate, ...]
    predictions: tuple[Prediction, ...]  # in the order of the rows
    # (model, bits) of rows -> the choice that fits best, where there was one, with how much worse others are
    bits: Mapping[tuple[str, str], list[tuple[str, float]]]
    fit: Fit
    predictor: Predictor
    engine_difference: float  # largest difference of closed form and engine at the optimum, as a share
    posterior: Posterior  # predictions of any rows
    left_out_by: str  # what was left out together: blocks, or single rows
    base: str  # the profile that it began with
    observations: tuple[Observation, ...]
    bench: Bench | None = None  # the file that the rows are from: what else it had, and why that was not used


_CLIFF: Final = 1.05
"""A row that needs more than this times the GPU's memory is beyond the cliff."""


def where(rows: Sequence[Observation]) -> str:
    """Name the file of the rows."""
    return rows[0].place.rpartition(":")[0] if rows and rows[0].place else "observations"


def check_gpu(cases: Sequence[Case], machine: Machine) -> None:
    """Refuse settings that need a GPU where the profile has none, and machines with several."""
    gpus = [name for name, device in machine.base.devices.items() if device.role == "accelerator"]
    if len(gpus) > 1:
        raise ConfigError(
            f"{machine.place}: expected a machine with one GPU, as settings of observations are of one, got {len(gpus)} "
            f"({', '.join(gpus)}); name a profile with one"
        )
    if machine.base.devices[machine.gpu].role == "accelerator":
        return
    for case in cases:
        one = case.observation
        if case.setting.policy["name"] != "all-cpu":
            raise ConfigError(
                f"{one.place or 'row ' + one.row}: setting: expected all_cpu next to a profile without a GPU, "
                f"{machine.place}, got '{one.setting}'; write all_cpu, or name a profile with a GPU"
            )


def with_their_engine(base: str | Mapping[str, Any], cases: Sequence[Case]) -> str | Mapping[str, Any]:
    """Return a machine with the engine of the rows' policies, if they have one in common and the machine names none."""
    raw, _, _ = read_profile(base, "hardware")
    engines = {str(getattr(make_policy(case.setting.policy), "engine", "")) for case in cases} - {""}
    if len(engines) != 1 or raw.get("engine") or (isinstance(base, Mapping) and "engine" in base):
        return base
    return {**(base if isinstance(base, Mapping) else {"base": base}), "engine": engines.pop()}


def none_used(cases: Sequence[Case], machine: Machine) -> str:
    """Return why no row is left: none is marked, or all need too much memory."""
    marked = [case.name for case in cases if case.observation.role == "identification"]
    if not marked:
        return "expected at least one row for identification, got none; mark one"
    memory = machine.base.devices[machine.gpu].memory_bytes
    return (
        f"expected a row for identification that fits into the {format_memory(memory)} of {machine.gpu}, got none: "
        f"{', '.join(marked)} would page over the link; add a row with fewer experts there, or correct the profile's memory_bytes"
    )


def statuses(cases: Sequence[Case], machine: Machine) -> list[str]:
    """Return the status of each row: used, check, or beyond memory."""
    memory = machine.base.devices[machine.gpu].memory_bytes
    found = []
    for case in cases:
        need = needed_bytes(case, machine.with_room, machine.gpu)
        beyond = need is not None and need > _CLIFF * memory
        found.append("beyond memory" if beyond else "used" if case.observation.role == "identification" else "check")
    names = {case.name: status for case, status in zip(cases, found, strict=True)}
    for index, case in enumerate(cases):  # a ratio is worth what its other row is
        if case.observation.of and names[case.observation.of] == "beyond memory":
            found[index] = "beyond memory"
    return found


def check_agreement(cases: Sequence[Case], room: HardwareProfile) -> None:
    """Refuse rows of one setting that contradict each other, unless both are only predicted."""
    for before, one in _pairs(cases, room):
        if "identification" in (one.role, before.role):
            _refuse(before, one)


def contradictions(cases: Sequence[Case], room: HardwareProfile) -> list[tuple[Observation, Observation]]:
    """List pairs of checks of one setting that contradict each other."""
    return [pair for pair in _pairs(cases, room) if all(one.role == "check" for one in pair)]


def _pairs(cases: Sequence[Case], room: HardwareProfile) -> Iterator[tuple[Observation, Observation]]:
    """Yield pairs of rows of one setting that differ by more than rows may."""
    groups: dict[Any, list[Observation]] = {}
    for case in cases:
        one = case.observation
        group = groups.setdefault(setting_key(case, room), [])
        yield from ((before, one) for before in group if contradict(before, one))
        group.append(one)


def setting_key(case: Case, room: HardwareProfile) -> tuple[Any, ...]:
    """Return the key that all rows of one setting share, however they are written."""
    one = case.observation
    chosen = read_bits(one.bits, one.place)
    open_bits = json.dumps(chosen) if len(chosen) > 1 else ""
    model = replace(case.model, name="any", source="", labels=())
    length = (one.context, one.decode) if one.kind == "decode" else (one.context, one.ubatch)
    return model, open_bits, _where(case, room), one.kind, one.batch, length, one.of


def _where(case: Case, room: HardwareProfile) -> Any:
    """Return where experts and layers are; the policy with its options, where something moves."""
    if case.static:
        try:
            placement = placement_of(case, room, decode_workload(case))
        except InputError:
            pass  # what is wrong is reported where the row is predicted
        else:
            experts = frozenset((copy.layer, expert, copy.device) for copy in placement.copies for expert in copy.experts)
            parts = {part: device for part, device in placement.parts.items() if part[0] != "embedding"}  # a few rows a token
            return experts, frozenset((part, device) for part, device in parts.items() if device != room.compute)
    return json.dumps([dict(case.setting.policy), dict(case.setting.cache)], sort_keys=True, default=str)


def _refuse(before: Observation, one: Observation) -> NoReturn:
    written = "" if one.setting == before.setting else f" (setting '{one.setting}' is '{before.setting}' there)"
    why = "remove one" + ("" if one.spread and before.spread else ", or give their spread")
    raise ConfigError(
        f"{one.place}: expected rows of one setting to agree, got {one.value:g} {one.unit} after {before.value:g} {before.unit} "
        f"at {before.place}{written}; {why}"
    )


def estimate(machine: Machine, problem: Problem, fit: Fit, intervals: bool, tell: Callable[[str], None]) -> tuple[Estimate, ...]:
    """Return each constant with its interval: by likelihood, or that of a parabola."""
    deviations = np.sqrt(np.diag(fit.covariance))
    correlation = fit.covariance / np.outer(deviations, deviations)
    found = []
    for k, constant in enumerate(machine.constants):
        tell(f"interval of {constant.name}")
        low, high = fit.logs[k] - Z90 * deviations[k], fit.logs[k] + Z90 * deviations[k]
        if intervals:
            low, high = problem.interval(fit, k)
        identified = high - low <= NARROWS * constant.width
        others = [j for j in range(len(deviations)) if j != k]
        partner = min(others, key=lambda j: correlation[k, j], default=None) if others else None
        beside = ""
        if partner is not None and not identified:
            strongest = max(others, key=lambda j: abs(correlation[k, j]))
            beside = machine.constants[strongest].name if abs(correlation[k, strongest]) > 0.4 else ""
        base = constant.base
        found.append(
            Estimate(
                constant, base * math.exp(fit.logs[k]), base * math.exp(low), base * math.exp(high),
                constant.at(-Z90), constant.at(Z90), identified, True, beside,
            )
        )  # fmt: skip
    return tuple(found)


def profile_contents(
    start: Machine, machine: Machine, estimates: Sequence[Estimate], name: str, status: Sequence[str], place: str
) -> dict[str, Any]:
    """Write identified and undetermined numbers into a profile, with intervals."""
    values: dict[str, Any] = {}
    n_rows = status.count("used")
    for one in estimates:
        if not one.moves:
            continue
        for key in one.constant.keys:
            here = float(machine.base.numbers[key].value)
            scale = here / one.constant.base
            value, low, high = (float(f"{scale * number:.6g}") for number in (one.value, one.low, one.high))
            ends = [min(low, value), max(high, value)]
            if one.identified:
                how = f"moesim calibrate: {n_rows} observed speeds on the base {here:g} ({one.constant.label})"
                values[key] = {"value": value, "source": "identified", "how": how, "interval": ends}
            else:
                why = (
                    f"moesim calibrate: {n_rows} observed speeds do not tell it"
                    + (f" from {one.beside}" if one.beside else "")
                    + f", held by the base {here:g} ({one.constant.label})"
                )
                values[key] = {"value": value, "source": "assumed", "why": why, "interval": ends}
    contents = override(dict(start.raw), values, place)
    contents.pop("anchors", None)
    contents["name"] = name
    told = str(contents.get("description", "")).strip()
    contents["description"] = f"Identified from {n_rows} observed speeds by moesim calibrate. Before that: {told}"
    return contents


def predictions(
    predictor: Predictor, posterior: Posterior, own: Vector, status: Sequence[str], left_out: Mapping[int, float]
) -> tuple[Prediction, ...]:
    """Predict each row by the identified machine and what its rows share with those used; `own`: deviations of rows."""
    values, wide = posterior.at(predictor)
    found = []
    for index, case in enumerate(predictor.cases):
        one = case.observation
        ends = sorted(one.in_unit(values[index] + sign * wide[index]) for sign in (-1, 1))
        off = values[index] - predictor.observed[index]
        alone = own[index] if status[index] == "used" else wide[index] / Z90
        found.append(
            Prediction(
                case, one.value, one.in_unit(values[index]), ends[0], ends[1], math.exp(-off), float(off / alone),
                status[index], left_out.get(index),
            )
        )  # fmt: skip
    return tuple(found)


_ASIDE: Final = 4.0
"""Standard deviations beyond which a row is set aside, so that it does not bend the rest; at most one row in five."""

_MATTERS: Final = 1e-3
"""A constant whose factor of e moves no row by this share is not asked about."""

_CHOICES: Final = 32
_ROUNDS: Final = 3


def identify(
    base: str | Mapping[str, Any],
    observations: Sequence[Observation],
    *,
    free: Sequence[str] = (),
    name: str = "identified",
    memo: Memo | None = None,
    intervals: bool = True,
    leave_out: bool = True,
    agree: bool = True,
    error: ModelError | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Identified:
    """Identify a machine, whose labels in the base profile hold each number.

    Rows with role ``identification`` move constants (`free`; all if empty), others are predicted. Without `intervals` those of
    a parabola are returned instead of those by likelihood; `leave_out` predicts each block by the others, `agree` refuses rows of
    one setting that contradict each other. `memo` has known values of the engine, `error` the model's (that of public rows if
    none). Raises `InputError` if no row is left.
    """
    check_free(free)
    error = error or shipped()
    check_rows(observations)
    cases = make_cases(observations)
    base = with_their_engine(base, cases)
    raw, path, _ = read_profile(base, "hardware")
    place = path or "hardware"
    memo = memo or Memo()
    start = Machine(raw, place, free)
    check_gpu(cases, start)
    if agree:
        check_agreement(cases, start.with_room)
    status = statuses(cases, start)
    if "used" not in status:
        raise ConfigError(f"{where(observations)}: {none_used(cases, start)}")
    tell("which constants matter")
    machine, still = _that_matter(start, cases, status, memo)
    bits, table = _choose_bits(machine, observations, memo, error, tell)
    if bits:
        cases = make_cases(observations, bits)
        status = statuses(cases, start)
    predictor = Predictor(machine, cases, memo)
    rows = _Rows(predictor, error)
    fit, problem, difference, status = _fit(rows, status, tell)
    unmoved = Machine(start.raw, start.place, [one.name for one in still]) if still else None
    posterior = Posterior(error, predictor, fit, problem.rows, unmoved)
    left_out, by = _left_out(rows, status, fit, tell) if leave_out else ({}, "nothing")
    estimates = estimate(machine, problem, fit, intervals, tell) + tuple(
        Estimate(one, one.base, *(2 * (one.at(-Z90), one.at(Z90))), False, False)
        for one in still  # no row depends on it
    )
    contents = profile_contents(start, machine, estimates, name, status, place)
    return Identified(
        profile=build_profile(contents, place), raw=contents, constants=estimates,
        predictions=predictions(predictor, posterior, rows.own, status, left_out), bits=table, fit=fit,
        predictor=predictor, engine_difference=difference, posterior=posterior, left_out_by=by,
        base=base if isinstance(base, str) else written(base), observations=tuple(observations),
    )  # fmt: skip


def _that_matter(start: Machine, cases: Sequence[Case], status: Sequence[str], memo: Memo) -> tuple[Machine, list[Constant]]:
    used = [case for case, one in zip(cases, status, strict=True) if one == "used"]
    names = {case.observation.of for case in used}
    probe = Predictor(start, [*used, *(c for c in cases if c.name in names and c not in used)], memo)
    zero = np.zeros(len(start.constants))
    probe.linearise(zero)
    here, matters = probe.values(zero), []
    for unit, constant in zip(np.eye(len(zero)), start.constants, strict=True):
        steps = (-2 * constant.sigmas[0], 2 * constant.sigmas[1])  # far, as a cost may be hidden behind another near the base
        matters.append(max(np.abs(probe.values(step * unit) - here).max() / abs(step) for step in steps) > _MATTERS)
    kept = [constant.name for constant, one in zip(start.constants, matters, strict=True) if one]
    still = [constant for constant, one in zip(start.constants, matters, strict=True) if not one]
    if not kept:
        raise ConfigError(f"{start.place}: expected a row that depends on a free constant, got none; free others or add rows")
    return Machine(start.raw, start.place, kept), still


class _Rows:
    """Rows of a predictor with the covariance of their errors."""

    def __init__(self, predictor: Predictor, error: ModelError) -> None:
        self.predictor = predictor
        self.error = error
        alone = own_variance(error, predictor)
        self.own = np.sqrt(np.diag(alone))
        self.covariance = alone + predictor.mix @ error.covariance(predictor.cases, predictor.cases) @ predictor.mix.T

    def problem(self, rows: list[int]) -> Problem:
        return Problem(self.predictor, rows, self.covariance, freedom=self.error.freedom)

    def mean(self, fit: Fit, used: Sequence[int]) -> Vector:
        """Return the expected logarithm of each row, by those used."""
        return Posterior(self.error, self.predictor, fit, used).mean(self.predictor)


def _fit(rows: _Rows, status: list[str], tell: Callable[[str], None]) -> tuple[Fit, Problem, float, list[str]]:
    """Fit, hold closed forms against the engine, and set aside what no constants explain."""
    predictor, status = rows.predictor, list(status)
    logs = np.zeros(len(predictor.machine.constants))
    difference = 0.0
    for turn in range(_ROUNDS):
        tell(f"fit {turn + 1}")
        predictor.linearise(logs)
        problem = rows.problem([i for i, one in enumerate(status) if one == "used"])
        fit = problem.fit(logs)
        while _set_aside(rows, fit, status):
            problem = rows.problem([i for i, one in enumerate(status) if one == "used"])
            fit = problem.fit(fit.logs)
        moved = float(np.max(np.abs(fit.logs - logs), initial=0.0))
        logs = fit.logs
        tell("the engine at the optimum")
        apart = predictor.correct(logs, predictor.engine(logs))
        difference = apart if turn == 0 else difference
        if apart <= AGREE and (not predictor.dynamic or moved < 3 * STEP):
            break
    return fit, problem, difference, status


def _set_aside(rows: _Rows, fit: Fit, status: list[str]) -> bool:
    """Set the worst row aside if it is far off, and enough rows are left."""
    used = [i for i, one in enumerate(status) if one == "used"]
    gone = status.count("set aside")
    if len(used) < 6 or gone + 1 > len(used) // 5:
        return False
    off = np.abs((rows.mean(fit, used) - rows.predictor.observed) / rows.own)[used]
    worst = int(np.argmax(off))
    if off[worst] <= _ASIDE or off[worst] < 3 * np.median(off):
        return False
    status[used[worst]] = "set aside"
    return True


def _left_out(known: _Rows, status: Sequence[str], fit: Fit, tell: Callable[[str], None]) -> tuple[dict[int, float], str]:
    """Predict each block by the others; each row, if there is one block."""
    predictor = known.predictor
    used = [i for i, one in enumerate(status) if one == "used"]
    blocks: dict[str, list[int]] = {}
    for i in used:
        blocks.setdefault(predictor.cases[i].block, []).append(i)
    by = "blocks"
    if len(blocks) == 1:
        blocks, by = {str(i): [i] for i in used}, "single rows"
    found: dict[int, float] = {}
    if len(used) < 2:
        return found, "nothing"
    for number, (_, rows) in enumerate(blocks.items(), 1):
        tell(f"left out: {number} of {len(blocks)}")
        rest = [i for i in used if i not in rows and predictor.of[i] not in rows]
        if not rest:
            continue
        off = known.mean(known.problem(rest).fit(fit.logs), rest) - predictor.observed
        found |= {i: math.exp(-off[i]) for i in rows}
    return found, by


def _choose_bits(
    machine: Machine, rows: Sequence[Observation], memo: Memo, error: ModelError, tell: Callable[[str], None]
) -> tuple[dict[tuple[str, str], Mapping[str, Any]], dict[tuple[str, str], list[tuple[str, float]]]]:
    """Try each choice of unknown bits and take the one that fits best."""
    open_choices = choices(rows)
    if not open_choices:
        return {}, {}
    keys = list(open_choices)
    combinations = list(itertools.product(*open_choices.values()))
    if len(combinations) > _CHOICES:
        raise ConfigError(
            f"{where(rows)}: bits: expected at most {_CHOICES} combinations of choices, got {len(combinations)}; leave some out"
        )
    squares = []
    for number, chosen in enumerate(combinations, 1):
        tell(f"bits: {number} of {len(combinations)}")
        cases = make_cases(rows, dict(zip(keys, chosen, strict=True)))
        predictor = Predictor(machine, cases, memo)
        predictor.linearise(np.zeros(len(machine.constants)))
        used = [i for i, one in enumerate(statuses(cases, machine)) if one == "used"]
        squares.append(_Rows(predictor, error).problem(used).fit().squares if used else math.inf)
    best = int(np.argmin(squares))
    table: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for place, key in enumerate(keys):
        least: dict[str, float] = {}
        for chosen, square in zip(combinations, squares, strict=True):
            words = "/".join(f"{bits:g}" for bits in dict.fromkeys(chosen[place].values()))
            least[words] = min(least.get(words, math.inf), square - squares[best])
        table[key] = sorted(least.items(), key=lambda item: item[1])
    return dict(zip(keys, combinations[best], strict=True)), table
