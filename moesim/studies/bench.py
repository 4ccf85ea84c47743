"""Simulated runs' speed over bare SimPy's in one process; costs of decisions and sweeps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from simpy import Environment

from moesim.core.processes import paused
from moesim.core.units import NS_PER_S
from moesim.engine import chosen, simulate
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.runner import run_one
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.composed import in_python
from moesim.policies.registry import POLICIES, make_policy
from moesim.policy import Action, Fetch, Policy, Routed, Victim, View
from moesim.records import Records
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import Workload, WorkloadSpec, compose

N_TIMEOUTS = 100_000
PROMPT_TOKENS = 16
HARDWARE = "rtx3090-epyc7532"
CACHED = 0.5  # share of all experts
RECALL = 0.8  # of the signals that a policy reads


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    name: str  # for the table
    model: str  # a built-in model; its experts are taken as 4 bits wide, so that half of them fit
    policy: str  # a registered policy
    contention: bool = False  # keep the profile's contention pairs; else they are left out
    batch: int = 1  # requests decoded together
    python: bool = False  # on either engine the policy decides in Python, also where the native one could decide for it


CASES = (
    Case("Mixtral 32x8 top-2, lru", "mixtral-8x7b", "lru"),
    Case("Mixtral, lru in Python", "mixtral-8x7b", "lru", python=True),
    Case("Mixtral, dali", "mixtral-8x7b", "dali"),
    Case("Mixtral, dali in Python", "mixtral-8x7b", "dali", python=True),
    Case("Qwen3 48x128 top-8, lru", "qwen3-30b-a3b", "lru"),
    Case("Qwen3, lru in Python", "qwen3-30b-a3b", "lru", python=True),
    Case("Qwen3, dali", "qwen3-30b-a3b", "dali"),
    Case("Qwen3, dali in Python", "qwen3-30b-a3b", "dali", python=True),
    Case("Qwen3, dali, batch 8", "qwen3-30b-a3b", "dali", batch=8),
    Case("Mixtral, hybrimoe-paper, batch 8", "mixtral-8x7b", "hybrimoe-paper", batch=8),
    Case("Mixtral, prescope, batch 8", "mixtral-8x7b", "prescope", batch=8),
    Case("Mixtral, dali, CPU and link contend", "mixtral-8x7b", "dali", contention=True),
)
"""Shapes and policies. DALI computes on the CPU too, so that activations cross; in the last case memory is shared as well."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one case."""

    case: str  # its name
    n_runs: int  # expert runs in one simulation
    simulated_ns: int  # makespan of the simulation
    # wall_s, timeout_s: wall time of each repeat of the simulation, and of `N_TIMEOUTS` bare timeouts right before it
    wall_s: tuple[float, ...]
    timeout_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [(wall / self.n_runs) / (bare / N_TIMEOUTS) for wall, bare in zip(self.wall_s, self.timeout_s, strict=True)]

    def record(self) -> dict[str, Any]:
        return {
            **{key: value for key, value in asdict(self).items() if not isinstance(value, tuple)},
            "engine": chosen(),
            "runs_per_s_best": self.n_runs / min(self.wall_s),
            "runs_per_s_median": self.n_runs / median(self.wall_s),
            "timeouts_per_s_best": N_TIMEOUTS / min(self.timeout_s),
            "timeouts_per_run_best": min(self.ratios),
            "timeouts_per_run_median": median(self.ratios),
            "simulated_over_wall": self.simulated_ns / NS_PER_S / median(self.wall_s),
        }

    def cells(self) -> list[str]:
        figures = self.record()
        speeds = [f"{figures[key]:,.0f}" for key in ("runs_per_s_best", "runs_per_s_median", "timeouts_per_s_best")]
        ratios = [f"{figures[key]:.2f}" for key in ("timeouts_per_run_best", "timeouts_per_run_median")]
        return [self.case, f"{self.n_runs:,}", *speeds, *ratios, f"{figures['simulated_over_wall']:.1f}"]


def bare_timeouts(n: int) -> float:
    """Time a process, in s, that yields ``timeout(1)`` on an empty heap: the table's unit."""
    env = Environment()

    def process() -> Generator[Any, None, None]:
        for _ in range(n):
            yield env.timeout(1)

    env.process(process())
    began = time.perf_counter()
    env.run()
    return time.perf_counter() - began


def run_case(case: Case, repeats: int, tokens: int) -> Measured:
    """Measure simulation and bare timeouts in turns."""
    model = load_model({"base": case.model, "expert_bits": 4})
    hardware = load_hardware(HARDWARE)
    if not case.contention:
        hardware = replace(hardware, contention=())
    policy = make_policy(case.policy)
    if case.python:
        in_python(policy)
    signals = sorted(need.removeprefix("signal:") for need in policy.needs if need.startswith("signal:"))
    trace = synthetic_trace(
        model.n_layers, model.n_experts, model.top_k, case.batch, PROMPT_TOKENS, tokens, calibration=True,
        signals=dict.fromkeys(signals, RECALL),
    )  # fmt: skip
    spec = WorkloadSpec(batch_size=case.batch, prompt_tokens=PROMPT_TOKENS, decode_tokens=tokens)
    workload = compose(trace, spec)
    slots = {"gpu0": int(CACHED * model.n_layers * model.n_experts)}

    def simulation() -> tuple[float, int, int]:
        costs = CostModel(model, hardware)
        predictors = PredictorSet(trace, workload, {}, 0)
        gc.collect()
        with paused():  # as `moesim run` does
            began = time.perf_counter()
            records = simulate(
                model=model, costs=costs, workload=workload, policy=policy, cache_slots=slots, predictors=predictors,
                tables=trace.tables, policy_name=case.policy,
            )  # fmt: skip
            wall = time.perf_counter() - began
        return wall, sum(task.expert >= 0 for task in records.tasks), records.makespan_ns

    _, n_runs, simulated = simulation()
    walls, bare = [], []
    for _ in range(repeats):
        bare.append(bare_timeouts(N_TIMEOUTS))
        walls.append(simulation()[0])
    return Measured(case.name, n_runs, simulated, tuple(walls), tuple(bare))


# ---------------------------------------------------------------------------------------------------------- decisions
DECIDING_MODEL = "deepseek-v2-lite"  # all its experts fit on one GPU at 4 bits, which all-gpu needs
DECIDING_BATCHES = (1, 8)
YARDSTICK = "dali"  # whose greedy rule the others' decisions are measured by


class Clocked:
    """A policy with a clock around its decisions, views included."""

    def __init__(self, policy: Policy, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._policy, self._clock_ns = policy, clock_ns
        self.exact = policy.exact
        self.listens = policy.listens
        self.needs = policy.needs
        self.place = policy.place
        self.decide_ns = self.evict_ns = 0  # what its decisions took so far
        self.routed_ns: list[int] = []  # what each answer to Routed took

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        began = self._clock_ns()
        answer = tuple(self._policy.decide(event, view))  # a generator works only when it is read
        took = self._clock_ns() - began
        self.decide_ns += took
        if type(event) is Routed:
            self.routed_ns.append(took)
        return answer

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        began = self._clock_ns()
        victim = self._policy.evict(fetch, view)
        self.evict_ns += self._clock_ns() - began
        return victim


@dataclass(frozen=True)
class Deciding:
    """The time of one policy's decisions."""

    policy: str  # its registered name
    batch: int  # requests decoded together
    n_runs: int  # expert runs of one simulation
    # decide_ns, evict_ns: time in either call for each expert run; the least of all repeats
    decide_ns: float
    evict_ns: float
    ratio: float  # time in both, over that of `YARDSTICK` in this process

    def cells(self) -> list[str]:
        times = [f"{ns:,.0f}" for ns in (self.decide_ns, self.evict_ns)]
        return [self.policy, str(self.batch), f"{self.n_runs:,}", *times, f"{self.ratio:.2f}"]


def run_deciding(repeats: int, tokens: int, names: Iterable[str] = tuple(POLICIES)) -> list[Deciding]:
    """Measure policies' decisions in turns over the same made-up routing."""
    names = list(dict.fromkeys([YARDSTICK, *names]))
    model = load_model({"base": DECIDING_MODEL, "expert_bits": 4})
    needs = frozenset().union(*(make_policy(name).needs for name in names))
    signals = sorted(need.removeprefix("signal:") for need in needs if need.startswith("signal:"))
    trace = synthetic_trace(
        model.n_layers, model.n_experts, model.top_k, max(DECIDING_BATCHES), PROMPT_TOKENS, tokens, calibration=True, scores=True,
        signals=dict.fromkeys(signals, RECALL),
    )  # fmt: skip
    found = []
    for batch in DECIDING_BATCHES:
        workload = compose(trace, WorkloadSpec(batch_size=batch, prompt_tokens=PROMPT_TOKENS, decode_tokens=tokens))
        _time_deciding(YARDSTICK, model, trace, workload)  # prepares the routing, which all runs over a workload share
        rounds = [{name: _time_deciding(name, model, trace, workload) for name in names} for _ in range(repeats)]
        best = {name: min((one[name] for one in rounds), key=lambda times: times[1] + times[2]) for name in names}
        unit = sum(best[YARDSTICK][1:])
        rows = [Deciding(name, batch, n, decide, evict, (decide + evict) / unit) for name, (n, decide, evict) in best.items()]
        found += sorted(rows, key=lambda row: row.ratio)
    return found


def _time_deciding(name: str, model: Any, trace: Trace, workload: Workload) -> tuple[int, float, float]:
    policy: Any = make_policy(name)
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))
    hardware = load_hardware(getattr(policy, "profile", "") or HARDWARE)
    if getattr(policy, "low_bits", ()):
        model = replace(model, low_bits=(model.expert_bits / 2,))
    slots = int(CACHED * model.n_layers * model.n_experts)
    timed = Clocked(policy)
    gc.collect()
    with paused():
        records = simulate(
            model=model, costs=CostModel(model, hardware), workload=workload, policy=timed,
            tables={name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs},
            cache_slots={name: slots for name, device in hardware.devices.items() if device.kind == "gpu"},
            predictors=PredictorSet(trace, workload, {}, 0), policy_name=name,
        )  # fmt: skip
    n_runs = sum(task.expert >= 0 for task in records.tasks)
    return n_runs, timed.decide_ns / n_runs, timed.evict_ns / n_runs


AXES = {
    "tokens": (256, 1024, 4096, 16384, 65536),
    "batch": (1, 4, 16, 64, 128),
    "experts": (8, 32, 128, 256),
    "layers": (8, 16, 32, 64),
}
"""What varies, and its values; the rest is as in `_BASE`."""
_BASE = {"tokens": 256, "batch": 1, "experts": 32, "layers": 16}
_TOP_K = 2
_SMALL = {"base": "qwen3-30b-a3b", "expert_bits": 4, "top_k": _TOP_K, "expert_intermediate": 256}  # half of them fit


@dataclass(frozen=True)
class Growth:
    """Measurements at one value."""

    varied: str
    value: int
    n_runs: int  # experts executed
    n_slots: int  # experts chosen by rows: a run serves all rows of a step that chose its expert
    cpu_s: float  # of this process, for routing and simulation
    # ns_per_run, ns_per_slot: of that; ratio: of the first of them to the first value's
    ns_per_run: float
    ns_per_slot: float
    ratio: float

    def cells(self) -> list[str]:
        counts = (self.value, self.n_runs, self.n_slots)
        times = (f"{self.cpu_s:.2f} s", f"{self.ns_per_run:,.0f}", f"{self.ns_per_slot:,.0f}", f"{self.ratio:.2f}")
        return [self.varied, *(f"{count:,}" for count in counts), *times]


def measure_growth(repeats: int, most_tokens: int) -> Iterator[Growth]:
    """Measure every axis with `lru`; the least time of the repeats counts."""
    _run(**_BASE)  # what is imported and remembered once
    for varied, values in AXES.items():
        first = 0.0
        for value in values:
            if varied == "tokens" and value > most_tokens:
                continue
            found = [_run(**(_BASE | {varied: value})) for _ in range(repeats)]
            n_runs, cpu_s = found[0][0], min(cpu for _, cpu in found)
            size = _BASE | {varied: value}
            n_slots = (size["tokens"] + 1) * size["batch"] * size["layers"] * _TOP_K
            each = cpu_s / n_runs * 1e9
            first = first or each
            yield Growth(varied, value, n_runs, n_slots, cpu_s, each, cpu_s / n_slots * 1e9, each / first)


def _run(tokens: int, batch: int, experts: int, layers: int) -> tuple[int, float]:
    """Return how many experts ran, and the CPU time; records are counted and dropped."""
    model = load_model({**_SMALL, "n_experts": experts, "n_layers": layers})
    trace = synthetic_trace(layers, experts, model.top_k, batch, 1, tokens)
    n_runs = 0

    def count(records: Records, _: int) -> None:
        nonlocal n_runs
        n_runs += int(np.count_nonzero(records.tasks.column("expert") >= 0))

    gc.collect()
    with paused():
        began = time.process_time()
        simulate(
            model=model, costs=CostModel(model, load_hardware(HARDWARE)), workload=compose(trace, WorkloadSpec(batch_size=batch)),
            policy=make_policy("lru"), cache_slots={"gpu0": layers * experts // 2}, sink=count,
        )  # fmt: skip
        return n_runs, time.process_time() - began


@dataclass(frozen=True)
class SweepCost:
    """Measurements of sweeps."""

    n_runs: int  # runs of each sweep
    processes: int  # of the second
    run_s: float  # median time of one run by itself
    # one_s, several_s: best time of the sweep in this process, and in several, starting them included
    one_s: float
    several_s: float
    # best time of a sweep of very short runs in this process, less that of its runs by themselves, by run: hashing inputs,
    # keeping each result on disk
    overhead_ms: float

    @property
    def speedup(self) -> float:
        return self.one_s / self.several_s

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup}

    def cells(self) -> list[str]:
        times = f"{self.run_s * 1e3:.0f} ms", f"{self.one_s:.1f} s", f"{self.several_s:.1f} s"
        return [str(self.n_runs), *times, f"{self.speedup:.2f}", f"{self.overhead_ms:.1f} ms"]


def measure_sweep(n_runs: int, processes: int, repeats: int, tokens: int) -> SweepCost:
    """Measure sweeps of made-up routing."""
    long, short = _experiment(n_runs, tokens), _experiment(n_runs, 1)
    run_s = median(_timed(lambda spec=spec: run_one(long, spec)) for spec in long.specs[:5])
    one, several, extra = [], [], []
    for _ in range(repeats):
        one.append(_sweep(long, 1))
        several.append(_sweep(long, processes))
        alone = _timed(lambda: [run_one(short, spec) for spec in short.specs])
        extra.append((_sweep(short, 1) - alone) / n_runs * 1e3)
    return SweepCost(n_runs, processes, run_s, min(one), min(several), min(extra))


def _experiment(n_runs: int, tokens: int) -> Experiment:
    raw = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "cache": {"ratio": 0.5},
        "policies": ["lru"],
        "trace": {"synthesize": "mixtral-8x7b", "requests": 4, "prompt": 8, "decode": tokens},
        "workload": {"prompt_tokens": 8, "decode_tokens": tokens}, "decision_us": list(range(n_runs)),
    }  # fmt: skip
    return Experiment(parse_config(raw, "bench"), "bench")


def _sweep(experiment: Experiment, jobs: int) -> float:
    with TemporaryDirectory() as folder:
        return _timed(lambda: run_experiment(experiment, jobs=jobs, folder=Path(folder)))


def _timed(do: Any) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began
