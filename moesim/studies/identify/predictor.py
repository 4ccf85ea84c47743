"""Predictions of rows from constants: closed forms where nothing moves, else the engine."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy as shallow
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml

from moesim.core.files import Journal, OutputFolder, write_bytes
from moesim.core.units import slots_of
from moesim.engine import simulate
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.store import code_digest
from moesim.hardware import HardwareProfile, build_profile
from moesim.hardware.costs import CostModel
from moesim.policies.registry import make_policy
from moesim.studies.identify.cases import STEPS, Case, decode_workload, placement_of, routing, shape_of
from moesim.studies.identify.fit import Machine, Priors, Vector, roomy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.workload import Workload


_WARM: Final = 16
"""Tokens of the prompt that fills a dynamic policy's cache."""


def engine_log_time(case: Case, raw: Mapping[str, Any], place: str) -> float:
    """Simulate a case."""
    return _static(case, raw, place) if case.static else _dynamic(case, raw, place)


def _static(case: Case, raw: Mapping[str, Any], place: str) -> float:
    hardware = build_profile(roomy(raw, build_profile(raw, place), place), place)
    slots = slots_of(case.setting.cache.get("ratio", 1.0), case.model.n_layers * case.model.n_experts)
    records = simulate(
        model=case.model, costs=CostModel(case.model, hardware, extrapolate=True),
        workload=decode_workload(case), policy=make_policy(case.setting.policy, case.observation.place),
        cache_slots={name: slots for name, device in hardware.devices.items() if device.role == "accelerator"},
    )  # fmt: skip
    times = [step.end - step.begin for step in records.steps]
    return math.log(sum(times) / len(times))


def _dynamic(case: Case, raw: Mapping[str, Any], place: str) -> float:
    one = case.observation
    prefill = one.kind == "prefill"
    prompt = one.context if prefill else min(one.context, _WARM) or 1
    decode = 1 if prefill else min(one.decode, 2 * STEPS)
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        free = bool(getattr(make_policy(case.setting.policy), "routing_free", False))
        trace = routing(shape_of(case.model), one.batch, prompt, decode, signals=not free).write(
            Path(folder) / "routing.safetensors"
        )
        machine = Path(folder) / "machine.yaml"
        contents = {key: value for key, value in roomy(raw, build_profile(raw, place), place).items() if key != "anchors"}
        write_bytes(machine, yaml.safe_dump(contents, sort_keys=False).encode())
        config = {
            "model": case.spec,
            "hardware": str(machine),
            "trace": str(trace),
            "workload": {
                "batch_size": one.batch, "prompt_tokens": prompt, "decode_tokens": decode, "prefill_chunk": one.ubatch,
            },
            "cache": dict(case.setting.cache),
            "policies": [dict(case.setting.policy)],
            "extrapolate": True,
            "engine": "machine",
            "timeline": None,
        }  # fmt: skip
        where = one.place or f"row {one.row}"
        outcome = run_experiment(Experiment(parse_config(config, where), where)).outcomes[0]
    if outcome.failure is not None:
        raise ConfigError(f"{where}: setting: expected one that can be simulated, got: {outcome.failure}")
    if prefill:
        return math.log(one.batch * prompt / float(str(outcome.row["prefill_tokens_per_s"])) * 1e9)
    return math.log(one.batch / float(str(outcome.row["decode_tokens_per_s"])) * 1e9)


class Surrogate:
    """The closed form of one case."""

    def __init__(self, case: Case, hardware: HardwareProfile) -> None:
        self.case = case
        model = case.model
        workload = decode_workload(case)
        placement = placement_of(case, hardware, workload)
        compute = hardware.compute
        self._at = {
            part: [placement.parts.get((part, layer), compute) for layer in range(model.n_layers)]
            for part in ("attention", "dense", "shared")
        }
        self._ends = {part: placement.parts.get((part, -1), compute) for part in ("embedding", "leading", "head")}
        gpu = placement.pools[0].device if placement.pools else compute
        on_gpu = np.zeros((model.n_layers, model.n_experts), bool)
        for copy in placement.copies:
            on_gpu[copy.layer, list(copy.experts)] = True
        self.devices = {True: gpu, False: hardware.backing[0]}
        self.batch = case.observation.batch
        self.work2 = round(sum(step.micro[0].work2 for step in workload.steps) / len(workload.steps))
        self._members: dict[tuple[str, str, str], list[int]] = {}
        for layer, where in enumerate(zip(*(self._at[part] for part in ("attention", "dense", "shared")), strict=True)):
            self._members.setdefault((where[0], where[1], where[2]), []).append(layer)
        self._counts = {where: self._count(workload, on_gpu, where) for where in (True, False)}

    def _count(self, workload: Workload, on_gpu: NDArray[np.bool_], where: bool) -> NDArray[np.int64]:
        """Count experts by rows, (step, layer, rows), on the GPU or elsewhere."""
        steps = workload.steps
        n_layers = len(on_gpu)
        found = np.zeros((len(steps), n_layers, self.batch + 1), np.int64)
        for s, step in enumerate(steps):
            for layer in range(n_layers):
                routed = step.micro[0].layers[layer]
                for expert, load in zip(routed.active, (routed.rows[e] for e in routed.active), strict=True):
                    if bool(on_gpu[layer, expert]) is where:
                        found[s, layer, load] += 1
        return found

    def log_time(self, costs: CostModel) -> float:
        """Return the logarithm of the mean time of a decode step, ns, with these costs."""
        model, rows, work2 = costs.model, self.batch, self.work2
        at = self._ends["embedding"]
        time = float(costs.embedding_ns(at, rows))
        leading = costs.leading_ns(self._ends["leading"], rows, work2, rows)
        if leading:
            time += self._cross(costs, at, self._ends["leading"]) + leading
            at = self._ends["leading"]
        for (attention, rest, _), layers in self._members.items():
            time += len(layers) * self._cross(costs, attention, rest)
            for layer, n in Counter(model.alike[layer] for layer in layers).items():
                each = costs.attention_ns(attention, rows, work2, rows, layer) + costs.dense_ns(rest, rows, layer)
                time += n * each
        for layer in range(model.n_layers):
            attention = self._at["attention"][layer]
            if at != attention:
                time += self._cross(costs, at, attention)
            at = self._at["dense"][layer]
        head = self._ends["head"]
        return math.log(time + self._layers(costs) + self._cross(costs, at, head) + costs.head_ns(head, rows))

    def _layers(self, costs: CostModel) -> float:
        """Return the mean time of shared and routed experts of all layers; lanes overlap."""
        experts = {where: self._experts(costs, where) for where in (True, False)}
        total = 0.0
        for (_, home, shared), layers in self._members.items():
            lanes = {shared: np.full((len(experts[True]), len(layers)), float(costs.shared_ns(shared, self.batch)))}
            for where, works in experts.items():
                work, device = works[:, layers], self.devices[where]
                away = device != home
                there = self._cross(costs, home, device) if away else 0.0
                back = self._cross(costs, device, home) if away else 0.0
                free = np.maximum(lanes.get(device, np.zeros_like(work)), there)
                lanes[device] = np.where(work > 0, free + work + back, lanes.get(device, np.zeros_like(work)))
            total += float(np.max(np.stack(list(lanes.values())), axis=0).sum())
        return total / len(experts[True])

    def _experts(self, costs: CostModel, where: bool) -> NDArray[np.float64]:
        counts = self._counts[where]
        n = counts.sum(axis=2)
        if not n.any():
            return np.zeros(n.shape)
        device, submit = self.devices[where], costs.host_expert_ns()
        most = int(np.flatnonzero(counts.sum(axis=(0, 1)))[-1])
        here = counts[:, :, : most + 1] @ np.asarray(costs.expert_table(device, most)[: most + 1], float)
        if submit:
            if costs.host_shared() and not where:
                here = here + n * submit
            else:
                here = np.maximum(here + submit, n * submit + here / np.maximum(n, 1))
        table = costs.more_rows_table(device) or [0]
        more = table[min(self.batch, len(table) - 1)]
        return np.where(n > 0, here + costs.first_extra_ns(device) + more, 0.0)

    def _cross(self, costs: CostModel, src: str, dst: str) -> float:
        return 0.0 if src == dst else float(sum(costs.activation_ns(link, self.batch) for link in costs.path(src, dst)))


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
        self.of = [at[case.observation.of] if case.observation.of else -1 for case in cases]
        self.mix = np.eye(len(cases))  # from times to values as observed: a ratio is a difference of two
        for index, other in enumerate(self.of):
            if other >= 0:
                self.mix[index, other] = -1.0
        self.observed = np.array([case.observation.log_time for case in cases])
        self.correction = np.zeros(len(cases))
        self._around = np.zeros(len(machine.constants))
        self._middle = np.zeros(len(cases))
        self._slopes = np.zeros((len(cases), len(machine.constants)))
        self._last: tuple[bytes, Vector] | None = None

    @property
    def priors(self) -> Priors:
        return Priors.of(self.machine.constants)

    @property
    def dynamic(self) -> list[int]:
        return [index for index, form in enumerate(self._forms) if form is None]

    def times(self, logs: Vector) -> Vector:
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
        """Return each row's value as observed: a time, or the difference of two."""
        key = logs.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = (key, self.mix @ self.times(logs))
        return self._last[1]

    def slopes(self, logs: Vector, *, both: bool = False) -> Vector:
        found = np.empty((len(self.cases), len(logs)))
        middle = self.values(logs)
        for k in range(len(logs)):
            step = np.zeros(len(logs))
            step[k] = STEP
            up = self.values(logs + step)
            found[:, k] = (up - self.values(logs - step)) / (2 * STEP) if both else (up - middle) / STEP
        return found

    def by_others(self, machine: Machine) -> Vector:
        """Return the derivatives by another set of the machine's constants, at their base."""
        other, n = shallow(self), len(machine.constants)
        other.machine, other._last = machine, None
        other._around, other._middle, other._slopes = np.zeros(n), self._middle.copy(), np.zeros((len(self.cases), n))
        other.linearise(other._around)
        return other.slopes(other._around)

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
        raw = self.machine.changed(logs.tolist())
        return np.array([self.memo.value(case, raw, self.machine.place) for case in self.cases])

    def correct(self, logs: Vector, engine: Vector) -> float:
        """Use the engine's value, of closed forms where they differ by more than `AGREE`; return the most these do."""
        apart = engine - self.times(logs)
        static = [index for index, form in enumerate(self._forms) if form is not None]
        worst = float(np.abs(apart[static]).max(initial=0.0))
        if worst > AGREE:
            self.correction[static] += apart[static]
        self._middle[self.dynamic] = engine[self.dynamic]
        self._around, self._last = logs.copy(), None
        return worst
