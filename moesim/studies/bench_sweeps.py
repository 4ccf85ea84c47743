"""What a sweep costs beside its runs, and what more processes gain, measured in one go on one machine."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.runner import run_one

_MODEL = {"base": "mixtral-8x7b", "expert_bits": 4}
_HARDWARE = "rtx3090-epyc7532"
_PLACE = "bench"


@dataclass(frozen=True)
class SweepCost:
    """What was measured."""

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
        """How many times as fast several processes are."""
        return self.one_s / self.several_s

    def record(self) -> dict[str, Any]:
        """Give everything by name."""
        return asdict(self) | {"speedup": self.speedup}

    def cells(self) -> list[str]:
        """Write the figures for the table."""
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
        "model": _MODEL, "hardware": _HARDWARE, "cache": {"ratio": 0.5}, "policies": ["lru"],
        "trace": {"synthesize": "mixtral-8x7b", "requests": 4, "prompt": 8, "decode": tokens},
        "workload": {"prompt_tokens": 8, "decode_tokens": tokens}, "decision_us": list(range(n_runs)),
    }  # fmt: skip
    return Experiment(parse_config(raw, _PLACE), _PLACE)


def _sweep(experiment: Experiment, jobs: int) -> float:
    with TemporaryDirectory() as folder:
        return _timed(lambda: run_experiment(experiment, jobs=jobs, folder=Path(folder)))


def _timed(do: Any) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began
