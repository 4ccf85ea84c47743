"""From observed speeds to an identified machine: fit, intervals, what is left out, and what no constants explain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile, build_profile, override, read_profile
from moesim.identify.agreement import check_agreement
from moesim.identify.cases import Case, choices, make_cases, needed_bytes, roomy
from moesim.identify.constants import Z90, Constant, Machine, check_free
from moesim.identify.fit import Fit, Problem, spreads
from moesim.identify.observations import Observation, check_rows
from moesim.identify.predictor import AGREE, STEP, Memo, Predictor
from moesim.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

NARROWS: Final = 0.5
"""A constant is identified if its interval is at most this share of its prior's."""

UNEXPLAINED: Final = 3.0
"""Standard deviations beyond which no constants explain a row."""

_ASIDE: Final = 4.0
"""Standard deviations beyond which a row is set aside, so that it does not bend the rest; at most one row in five."""

_CLIFF: Final = 1.05
"""A row that needs more than this times the GPU's memory is beyond the cliff."""

_MATTERS: Final = 1e-3
"""A constant whose factor of e moves no row by this share is not asked about."""

_CHOICES: Final = 32
_ROUNDS: Final = 3


@dataclass(frozen=True)
class Estimate:
    """What is known of a constant after the observations.

    Attributes
    ----------
    constant : Constant
    value, low, high : float
        Of the first number that it scales, with its interval of 90 %.
    prior_low, prior_high : float
        The same before any observation.
    identified : bool
        The observations narrow the prior's interval at least to half.
    moves : bool
        Some row depends on it.
    beside : str
        The constant that it can be exchanged with most, if rows tell only their sum.
    """

    constant: Constant
    value: float
    low: float
    high: float
    prior_low: float
    prior_high: float
    identified: bool
    moves: bool
    beside: str = ""


@dataclass(frozen=True)
class Prediction:
    """A row beside what the identified machine says of it.

    Attributes
    ----------
    case : Case
    observed, predicted : float
        In the unit of the row.
    low, high : float
        Interval of 90 % for another measurement of it.
    ratio : float
        Predicted over observed speed.
    z : float
        Standard deviations between them.
    status : str
        ``used``, ``check``, ``set aside`` (no constants explain it) or ``beyond memory``.
    left_out : float or None
        Ratio where its block was left out of the identification.
    """

    case: Case
    observed: float
    predicted: float
    low: float
    high: float
    ratio: float
    z: float
    status: str
    left_out: float | None = None


@dataclass(frozen=True)
class Identified:
    """An identified machine.

    Attributes
    ----------
    profile : HardwareProfile
        Its numbers labelled.
    raw : dict
        Contents of the profile's file.
    constants : tuple of Estimate
    predictions : tuple of Prediction
        In the order of the rows.
    bits : mapping
        (model, bits) of rows -> the choice that fits best, where there was one, with how much worse others are.
    fit : Fit
    predictor : Predictor
    engine_difference : float
        Largest difference of closed form and engine at the optimum, as a share.
    inflation : float
        By how much rows scatter more than their spreads say.
    left_out_by : str
        What was left out together: blocks, or single rows.
    """

    profile: HardwareProfile
    raw: dict[str, Any]
    constants: tuple[Estimate, ...]
    predictions: tuple[Prediction, ...]
    bits: Mapping[tuple[str, str], list[tuple[str, float]]]
    fit: Fit
    predictor: Predictor
    engine_difference: float
    inflation: float
    left_out_by: str
    notes: tuple[str, ...] = field(default=())

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Interval of each constant by name."""
        return {one.constant.name: (one.low, one.high) for one in self.constants}


def identify(
    base: str | Mapping[str, Any],
    observations: Sequence[Observation],
    *,
    free: Sequence[str] = (),
    seed: int = 0,
    name: str = "identified",
    memo: Memo | None = None,
    intervals: bool = True,
    leave_out: bool = True,
    agree: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Identified:
    """Identify a machine.

    Parameters
    ----------
    base : str or mapping
        The profile to begin with, as of `moesim.hardware.load_hardware`: its labels say how tightly each number is held.
    observations : sequence of Observation
        Rows with role ``identification`` move constants; the others are predicted.
    free : sequence of str
        Constants to free; all if empty.
    seed : int
        Kept with the result: nothing here is drawn, except routing that is made up, always with the same seed.
    name : str
        Of the identified profile.
    memo : Memo, optional
        Values of the engine that are known.
    intervals, leave_out : bool
        Whether to look for intervals by likelihood (else they are those of a parabola), and to leave blocks out.
    agree : bool
        Refuse rows of one setting that contradict each other.
    tell : callable
        Told what is being done.

    Returns
    -------
    Identified

    Raises
    ------
    InputError
        If a row, a model, a setting or the profile is wrong, or no row is left for the identification.
    """
    check_free(free)
    raw, path, _ = read_profile(base, "hardware")
    place = path or "hardware"
    check_rows(observations)
    memo = memo or Memo()
    start = Machine(raw, place, free)
    cases = make_cases(observations)
    _check_gpu(cases, start)
    if agree:
        check_agreement(cases, _room(start))
    status = _statuses(cases, start)
    if "used" not in status:
        raise ConfigError(f"{_where(observations)}: {_none_used(cases, start)}")
    tell("which constants matter")
    machine, still = _that_matter(start, cases, status, memo)
    bits, table = _choose_bits(machine, observations, memo, tell)
    if bits:
        cases = make_cases(observations, bits)
        status = _statuses(cases, start)
    predictor = Predictor(machine, cases, memo)
    sigma = spreads(predictor)
    fit, problem, difference, status = _fit(predictor, sigma, status, tell)
    left_out, by = _left_out(predictor, sigma, status, fit, tell) if leave_out else ({}, "nothing")
    estimates = _estimates(machine, problem, fit, intervals, tell) + tuple(_untouched(one) for one in still)
    contents = _profile(start, machine, estimates, fit, raw, name, status, place)
    return Identified(
        profile=build_profile(contents, place),
        raw=contents,
        constants=estimates,
        predictions=_predictions(predictor, fit, sigma, status, left_out),
        bits=table,
        fit=fit,
        predictor=predictor,
        engine_difference=difference,
        inflation=fit.inflation,
        left_out_by=by,
        notes=(f"seed {seed}",),
    )


def _where(rows: Sequence[Observation]) -> str:
    return rows[0].place.rpartition(":")[0] if rows and rows[0].place else "observations"


def _check_gpu(cases: Sequence[Case], machine: Machine) -> None:
    """Refuse settings that need a GPU where the profile has none."""
    if machine.base.devices[machine.gpu].role == "accelerator":
        return
    for case in cases:
        one = case.observation
        if case.setting.policy["name"] != "all-cpu":
            raise ConfigError(
                f"{one.place or 'row ' + one.row}: setting: expected all_cpu beside a profile without a GPU, "
                f"{machine.place}, got '{one.setting}'; write all_cpu, or name a profile with a GPU"
            )


def _none_used(cases: Sequence[Case], machine: Machine) -> str:
    """Say why no row is left: none is marked, or all need too much memory."""
    marked = [case.name for case in cases if case.observation.role == "identification"]
    if not marked:
        return "expected at least one row for identification, got none; mark one"
    memory = machine.base.devices[machine.gpu].memory_bytes
    return (
        f"expected a row for identification that fits into the {format_bytes(memory)} of {machine.gpu}, got none: "
        f"{', '.join(marked)} would page over the link; add a row with fewer experts there, or correct the profile's memory_bytes"
    )


def _room(machine: Machine) -> HardwareProfile:
    return build_profile(roomy(machine.raw, machine.base, machine.place), machine.place)


def _statuses(cases: Sequence[Case], machine: Machine) -> list[str]:
    room = _room(machine)
    memory = machine.base.devices[machine.gpu].memory_bytes
    found = []
    for case in cases:
        need = needed_bytes(case, room, machine.gpu)
        beyond = need is not None and need > _CLIFF * memory
        found.append("beyond memory" if beyond else "used" if case.observation.role == "identification" else "check")
    names = {case.name: status for case, status in zip(cases, found, strict=True)}
    for index, case in enumerate(cases):  # a ratio is worth what its other row is
        if case.observation.of and names[case.observation.of] == "beyond memory":
            found[index] = "beyond memory"
    return found


def _that_matter(start: Machine, cases: Sequence[Case], status: Sequence[str], memo: Memo) -> tuple[Machine, list[Constant]]:
    """Keep the constants on which a row of the identification depends; the others stay as they are."""
    used = [case for case, one in zip(cases, status, strict=True) if one == "used"]
    names = {case.observation.of for case in used}
    probe = Predictor(start, [*used, *(c for c in cases if c.name in names and c not in used)], memo)
    zero = np.zeros(len(start.constants))
    probe.linearise(zero)
    slopes = np.zeros((len(probe.cases), len(zero)))
    for k, constant in enumerate(start.constants):
        step = np.zeros(len(zero))
        step[k] = 2 * constant.sigma  # far, as a cost may be hidden behind another near the base
        up, down = probe.values(step), probe.values(-step)
        slopes[:, k] = np.maximum(np.abs(up - probe.values(zero)), np.abs(down - probe.values(zero))) / (2 * constant.sigma)
    matters = np.abs(slopes).max(axis=0) > _MATTERS
    kept = [constant.name for constant, one in zip(start.constants, matters, strict=True) if one]
    still = [constant for constant, one in zip(start.constants, matters, strict=True) if not one]
    if not kept:
        raise ConfigError(f"{start.place}: expected a row that depends on a free constant, got none; free others or add rows")
    return Machine(start.raw, start.place, kept), still


def _fit(
    predictor: Predictor, sigma: Vector, status: list[str], tell: Callable[[str], None]
) -> tuple[Fit, Problem, float, list[str]]:
    """Fit, hold closed forms against the engine, and set aside what no constants explain."""
    status = list(status)
    logs = np.zeros(len(predictor.machine.constants))
    difference = 0.0
    for turn in range(_ROUNDS):
        tell(f"fit {turn + 1}")
        predictor.linearise(logs)
        problem = Problem(predictor, [i for i, one in enumerate(status) if one == "used"], sigma)
        fit = problem.fit(logs)
        while _set_aside(predictor, fit, sigma, status):
            problem = Problem(predictor, [i for i, one in enumerate(status) if one == "used"], sigma)
            fit = problem.fit(fit.logs)
        moved = float(np.max(np.abs(fit.logs - logs), initial=0.0))
        logs = fit.logs
        tell("the engine at the optimum")
        apart = predictor.correct(logs, predictor.engine(logs))
        difference = apart if turn == 0 else difference
        if apart <= AGREE and (not predictor.dynamic or moved < 3 * STEP):
            break
    return fit, problem, difference, status


def _set_aside(predictor: Predictor, fit: Fit, sigma: Vector, status: list[str]) -> bool:
    """Set the worst row aside if it is far off, and rows are left to tell."""
    used = [i for i, one in enumerate(status) if one == "used"]
    gone = status.count("set aside")
    if len(used) < 6 or gone + 1 > len(used) // 5:
        return False
    off = np.abs(predictor.values(fit.logs) - predictor.observed)[used] / sigma[used]
    worst = int(np.argmax(off))
    if off[worst] <= _ASIDE or off[worst] < 3 * np.median(off):
        return False
    status[used[worst]] = "set aside"
    return True


def _left_out(
    predictor: Predictor, sigma: Vector, status: Sequence[str], fit: Fit, tell: Callable[[str], None]
) -> tuple[dict[int, float], str]:
    """Predict each block by constants that its rows had no part in; each row, if there is but one block."""
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
        rest = [i for i in used if i not in rows and predictor._of[i] not in rows]
        if not rest:
            continue
        without = Problem(predictor, rest, sigma).fit(fit.logs)
        off = predictor.values(without.logs) - predictor.observed
        found |= {i: math.exp(-off[i]) for i in rows}
    return found, by


def _estimates(
    machine: Machine, problem: Problem, fit: Fit, intervals: bool, tell: Callable[[str], None]
) -> tuple[Estimate, ...]:
    deviations = np.sqrt(np.diag(fit.covariance))
    correlation = fit.covariance / np.outer(deviations, deviations)
    found = []
    for k, constant in enumerate(machine.constants):
        tell(f"interval of {constant.name}")
        low, high = fit.logs[k] - Z90 * deviations[k], fit.logs[k] + Z90 * deviations[k]
        if intervals:
            low, high = problem.interval(fit, k)
        identified = high - low <= NARROWS * 2 * Z90 * constant.sigma
        others = [j for j in range(len(deviations)) if j != k]
        partner = min(others, key=lambda j: correlation[k, j], default=None) if others else None
        beside = ""
        if partner is not None and not identified:
            strongest = max(others, key=lambda j: abs(correlation[k, j]))
            beside = machine.constants[strongest].name if abs(correlation[k, strongest]) > 0.4 else ""
        base, sigma = constant.base, constant.sigma
        found.append(
            Estimate(
                constant, base * math.exp(fit.logs[k]), base * math.exp(low), base * math.exp(high),
                base * math.exp(-Z90 * sigma), base * math.exp(Z90 * sigma), identified, True, beside,
            )
        )  # fmt: skip
    return tuple(found)


def _untouched(constant: Constant) -> Estimate:
    low, high = (constant.base * math.exp(sign * Z90 * constant.sigma) for sign in (-1, 1))
    return Estimate(constant, constant.base, low, high, low, high, False, False)


def _profile(
    start: Machine, machine: Machine, estimates: Sequence[Estimate], fit: Fit, raw: Mapping[str, Any], name: str,
    status: Sequence[str], place: str,
) -> dict[str, Any]:  # fmt: skip
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


def _predictions(
    predictor: Predictor, fit: Fit, sigma: Vector, status: Sequence[str], left_out: Mapping[int, float]
) -> tuple[Prediction, ...]:
    values = predictor.values(fit.logs)
    slopes = predictor.slopes(fit.logs)
    found = []
    for index, case in enumerate(predictor.cases):
        one = case.observation
        wide = Z90 * math.sqrt(float(slopes[index] @ fit.covariance @ slopes[index]) + sigma[index] ** 2)
        ends = sorted(one.in_unit(values[index] + sign * wide) for sign in (-1, 1))
        off = values[index] - predictor.observed[index]
        found.append(
            Prediction(
                case, one.value, one.in_unit(values[index]), ends[0], ends[1], math.exp(-off), float(off / sigma[index]),
                status[index], left_out.get(index),
            )
        )  # fmt: skip
    return tuple(found)


def _choose_bits(
    machine: Machine, rows: Sequence[Observation], memo: Memo, tell: Callable[[str], None]
) -> tuple[dict[tuple[str, str], Mapping[str, Any]], dict[tuple[str, str], list[tuple[str, float]]]]:
    """Try each choice of bits where they are not known; the one that fits best is taken."""
    open_choices = choices(rows)
    if not open_choices:
        return {}, {}
    keys = list(open_choices)
    combinations = list(itertools.product(*open_choices.values()))
    if len(combinations) > _CHOICES:
        raise ConfigError(
            f"{_where(rows)}: bits: expected at most {_CHOICES} combinations of choices, got {len(combinations)}; leave some out"
        )
    squares = []
    for number, chosen in enumerate(combinations, 1):
        tell(f"bits: {number} of {len(combinations)}")
        cases = make_cases(rows, dict(zip(keys, chosen, strict=True)))
        predictor = Predictor(machine, cases, memo)
        predictor.linearise(np.zeros(len(machine.constants)))
        used = [i for i, one in enumerate(_statuses(cases, machine)) if one == "used"]
        squares.append(Problem(predictor, used, spreads(predictor)).fit(inflate=False).squares if used else math.inf)
    best = int(np.argmin(squares))
    table: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for place, key in enumerate(keys):
        least: dict[str, float] = {}
        for chosen, square in zip(combinations, squares, strict=True):
            words = "/".join(f"{bits:g}" for bits in dict.fromkeys(chosen[place].values()))
            least[words] = min(least.get(words, math.inf), square - squares[best])
        table[key] = sorted(least.items(), key=lambda item: item[1])
    return dict(zip(keys, combinations[best], strict=True)), table
