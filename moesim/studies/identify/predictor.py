"""What a machine's constants say about all rows: closed forms where nothing moves, the engine where something does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesim.core.files import Journal, OutputFolder
from moesim.experiment.keys import code_digest
from moesim.hardware.costs import CostModel
from moesim.studies.identify.cases import Case
from moesim.studies.identify.constants import Machine, Priors, Vector
from moesim.studies.identify.engine import engine_log_time
from moesim.studies.identify.surrogate import Surrogate

STEP: Final = 0.02
"""Of a constant's logarithm, for differences: times are whole nanoseconds, and small ones would see their rounding."""

AGREE: Final = 0.01
"""The closed form and the engine agree to this, or the engine's values are used."""

MEMO: Final = "engine.jsonl"
OWNER: Final = "calibrate"


@dataclass
class Memo:
    """Values of the engine, by what they depend on; a store may keep them."""

    known: dict[str, float] = field(default_factory=dict)
    keep: Callable[[str, float], None] = lambda key, value: None
    runs: int = 0

    def value(self, case: Case, raw: Mapping[str, Any], place: str) -> float:
        """Simulate a case, unless that has been done."""
        one = case.observation
        about = [str(case.spec), dict(case.setting.policy), dict(case.setting.cache), one.batch, one.context, one.decode]
        text = json.dumps([*about, one.ubatch, one.kind, raw], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if key not in self.known:
            self.runs += 1
            self.known[key] = engine_log_time(case, raw, place)
            self.keep(key, self.known[key])
        return self.known[key]


@contextmanager
def memo_in(folder: Path | None) -> Iterator[Memo]:
    """Keep values in a folder as soon as they are there; without one, in memory."""
    if folder is None:
        yield Memo()
        return
    journal = Journal(OutputFolder(folder, OWNER), MEMO)
    code = code_digest()
    lines = journal.read() if journal.path.is_file() else []
    known = {str(line["key"]): float(line["value"]) for line in lines if line is not None and line.get("code") == code}
    # Nothing is made before there is something to keep: rows may yet be refused.
    yield Memo(known, lambda key, value: journal.append({"key": key, "value": value, "code": code}))


class Predictor:
    """Predicted logarithms of all rows, as functions of the constants' logarithms."""

    def __init__(self, machine: Machine, cases: Sequence[Case], memo: Memo) -> None:
        self.machine = machine
        self.cases = list(cases)
        self.memo = memo
        self._forms: list[Surrogate | None] = [Surrogate(case, machine.with_room) if case.static else None for case in cases]
        at = {case.name: index for index, case in enumerate(cases)}
        self._of = [at[case.observation.of] if case.observation.of else -1 for case in cases]
        self.observed = np.array([case.observation.log_time for case in cases])
        self.correction = np.zeros(len(cases))
        self._around = np.zeros(len(machine.constants))
        self._middle = np.zeros(len(cases))
        self._slopes = np.zeros((len(cases), len(machine.constants)))
        self._last: tuple[bytes, Vector] | None = None

    @property
    def priors(self) -> Priors:
        """Standard deviations of each constant's logarithm before any row."""
        return Priors.of(self.machine.constants)

    @property
    def dynamic(self) -> list[int]:
        """Rows that only the engine predicts."""
        return [index for index, form in enumerate(self._forms) if form is None]

    def times(self, logs: Vector) -> Vector:
        """Give the logarithm of each row's own time."""
        profile = self.machine.with_factors(logs.tolist())
        costs: dict[int, CostModel] = {}
        found = np.empty(len(self.cases))
        for index, (case, form) in enumerate(zip(self.cases, self._forms, strict=True)):
            if form is None:
                found[index] = self._middle[index] + self._slopes[index] @ (logs - self._around)
                continue
            key = hash(case.model)
            if key not in costs:
                costs[key] = CostModel(case.model, profile, extrapolate=True)
            found[index] = form.log_time(costs[key])
        return found + self.correction

    def values(self, logs: Vector) -> Vector:
        """Give each row's value as observed: a time, or the difference of two."""
        key = logs.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = (key, self._values(self.times(logs)))
        return self._last[1]

    def _values(self, times: Vector) -> Vector:
        return np.array([time - (times[of] if of >= 0 else 0.0) for time, of in zip(times, self._of, strict=True)])

    def slopes(self, logs: Vector, *, both: bool = False) -> Vector:
        """Give the derivatives of `values`, (rows, constants)."""
        found = np.empty((len(self.cases), len(logs)))
        middle = self.values(logs)
        for k in range(len(logs)):
            step = np.zeros(len(logs))
            step[k] = STEP
            up = self.values(logs + step)
            found[:, k] = (up - self.values(logs - step)) / (2 * STEP) if both else (up - middle) / STEP
        return found

    def linearise(self, logs: Vector) -> None:
        """Take the engine's values and slopes of dynamic rows around these constants."""
        rows = self.dynamic
        if not rows:
            return
        here = self.machine.changed(logs.tolist())
        for index in rows:
            self._middle[index] = self.memo.value(self.cases[index], here, self.machine.place)
        for k in range(len(logs)):
            step = logs.copy()
            step[k] += 5 * STEP
            there = self.machine.changed(step.tolist())
            for index in rows:
                value = self.memo.value(self.cases[index], there, self.machine.place)
                self._slopes[index, k] = (value - self._middle[index]) / (5 * STEP)
            self._around = logs.copy()
        self._last = None

    def engine(self, logs: Vector) -> Vector:
        """Simulate every row with these constants."""
        raw = self.machine.changed(logs.tolist())
        return np.array([self.memo.value(case, raw, self.machine.place) for case in self.cases])

    def correct(self, logs: Vector, engine: Vector) -> float:
        """Use the engine's value where the closed form differs by more than `AGREE`; give the largest difference there was."""
        apart = engine - self.times(logs)
        static = [index for index, form in enumerate(self._forms) if form is not None]
        worst = float(np.abs(apart[static]).max(initial=0.0))
        if worst > AGREE:
            self.correction[static] += apart[static]
            self._last = None
        return worst
