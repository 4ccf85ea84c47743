"""From observed speeds to an identified machine: fit, intervals, what is left out, and what no constants explain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from moesim.core.table import written
from moesim.errors import ConfigError
from moesim.hardware import build_profile, read_profile
from moesim.studies.identify.cases import Case, choices, make_cases
from moesim.studies.identify.constants import Constant, Machine, Vector, check_free
from moesim.studies.identify.estimates import estimate, predictions, profile_contents, untouched
from moesim.studies.identify.fit import Fit, Problem, spreads
from moesim.studies.identify.observations import Observation, check_rows
from moesim.studies.identify.predictor import AGREE, STEP, Memo, Predictor
from moesim.studies.identify.results import Identified
from moesim.studies.identify.status import check_agreement, check_gpu, none_used, statuses, where

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
    check_gpu(cases, start)
    if agree:
        check_agreement(cases, start.with_room)
    status = statuses(cases, start)
    if "used" not in status:
        raise ConfigError(f"{where(observations)}: {none_used(cases, start)}")
    tell("which constants matter")
    machine, still = _that_matter(start, cases, status, memo)
    bits, table = _choose_bits(machine, observations, memo, tell)
    if bits:
        cases = make_cases(observations, bits)
        status = statuses(cases, start)
    predictor = Predictor(machine, cases, memo)
    sigma = spreads(predictor)
    fit, problem, difference, status = _fit(predictor, sigma, status, tell)
    left_out, by = _left_out(predictor, sigma, status, fit, tell) if leave_out else ({}, "nothing")
    estimates = estimate(machine, problem, fit, intervals, tell) + tuple(untouched(one) for one in still)
    contents = profile_contents(start, machine, estimates, fit, raw, name, status, place)
    return Identified(
        profile=build_profile(contents, place),
        raw=contents,
        constants=estimates,
        predictions=predictions(predictor, fit, sigma, status, left_out),
        bits=table,
        fit=fit,
        predictor=predictor,
        engine_difference=difference,
        inflation=fit.inflation,
        left_out_by=by,
        base=base if isinstance(base, str) else written(base),
        observations=tuple(observations),
        notes=(f"seed {seed}",),
    )


def _that_matter(start: Machine, cases: Sequence[Case], status: Sequence[str], memo: Memo) -> tuple[Machine, list[Constant]]:
    """Keep the constants on which a row of the identification depends; the others stay as they are."""
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
            f"{where(rows)}: bits: expected at most {_CHOICES} combinations of choices, got {len(combinations)}; leave some out"
        )
    squares = []
    for number, chosen in enumerate(combinations, 1):
        tell(f"bits: {number} of {len(combinations)}")
        cases = make_cases(rows, dict(zip(keys, chosen, strict=True)))
        predictor = Predictor(machine, cases, memo)
        predictor.linearise(np.zeros(len(machine.constants)))
        used = [i for i, one in enumerate(statuses(cases, machine)) if one == "used"]
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
