"""What results rest on is the same to the byte on other kinds of processors, with other libraries and numbers of cores.

Each case of `CASES` makes something of fixed inputs. It runs in one process for each of `SETTINGS`, where NumPy, OpenBLAS, Arrow
and the C library are kept from instructions that this processor has, and Python counts other cores than there are.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

try:
    from numpy._core import _multiarray_umath as _numpy
except ImportError:  # NumPy 1
    from numpy.core import _multiarray_umath as _numpy  # type: ignore[attr-defined, no-redef]

_WIDE = [name for name in _numpy.__cpu_dispatch__ if _numpy.__cpu_features__.get(name)]  # used where there is more than the least
_AVX2 = bool(_numpy.__cpu_features__.get("AVX2"))
_LEAST = "Prescott" if "SSE2" in _numpy.__cpu_features__ else "ARMV8"  # names of OpenBLAS
_MASKED = "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4"

SETTINGS: dict[str, dict[str, str]] = {  # name -> variables of the environment, and the number of cores
    "as it is": {"CORES": "1"},
    "no wide vectors": {
        "NPY_DISABLE_CPU_FEATURES": ",".join(name for name in _WIDE if "512" in name or "V4" in name),
        "OPENBLAS_CORETYPE": "Haswell" if _AVX2 else _LEAST, "ARROW_USER_SIMD_LEVEL": "AVX2", "CORES": "3",
    },
    "no vectors": {
        "NPY_DISABLE_CPU_FEATURES": ",".join(_WIDE), "OPENBLAS_CORETYPE": _LEAST, "OPENBLAS_NUM_THREADS": "2",
        "ARROW_USER_SIMD_LEVEL": "NONE", "GLIBC_TUNABLES": _MASKED, "CORES": "64",
    },
}  # fmt: skip


def routing() -> Any:
    """Routing that tests and `moesim check` make up."""
    from moesim.testing.traces import synthetic_trace

    trace = synthetic_trace(
        n_layers=4, n_experts=16, top_k=4, n_requests=3, scores=True, calibration=True, signals={"gate_next1": 0.7}
    )
    return [trace.experts.tolist(), trace.signals["gate_next1"].scores.tolist()]


def synthetic() -> Any:
    """Synthetic models and traces of all shipped parameters."""
    from tests.trace.test_synthesis import digests

    return digests()


def workloads() -> Any:
    """Steps of batches."""
    from moesim.trace.workload import WorkloadSpec, compose
    from tests.trace.test_workload import TRACES, WORKLOADS, digest

    return {name: digest(compose(TRACES[trace], WorkloadSpec(**spec))) for name, (trace, spec, _) in WORKLOADS.items()}


def costs() -> Any:
    """Times of every shipped machine, and labels of their numbers."""
    from moesim.hardware import hardware_names, load_hardware
    from moesim.hardware.costs import CostModel
    from moesim.model import builtin_models

    found: dict[str, Any] = {}
    for machine in hardware_names():
        profile = load_hardware(machine)
        for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
            model = CostModel(builtin_models()[name], profile, extrapolate=True)
            for device in profile.devices.values():
                if device.kind != "disk":
                    rows = (1, 2, 3, 7, 64, 1000)
                    found[f"{machine} {name} {device.name}"] = [
                        [model.expert_ns(device.name, n), model.dense_ns(device.name, n)] for n in rows
                    ]
    assert found
    return found


def results(folder: Path) -> Any:
    """All files of an experiment: records, tables, summary, figures, timeline; with repeats, intervals and a swept size."""
    from moesim.cli.main import main
    from tests.experiment.experiment_kit import write_yaml

    workload = {"batch_size": 3, "prompt_tokens": 3, "decode_tokens": 3}
    policies = ["on-demand", "lru", "belady", "fiddler", "dali", "daop-paper", "moe-lightning"]
    plots = ["decode_speed", "breakdown"]
    path = write_yaml(folder, trace="small.safetensors", workload=workload, policies=policies, plots=plots, repeat=2)
    assert main(["run", path.name, "--out", "out", "--jobs", "1"]) == 0
    files = sorted(path for path in (folder / "out").rglob("*") if path.is_file() and "manifest" not in path.name)
    assert len(files) > 10
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def statistics() -> Any:
    """Statistics of routing, as `moesim trace stats` reports them."""
    from moesim.trace.stats.report import plain, report
    from tests.trace.test_workload import TRACES

    return {name: plain(report(TRACES[name])) for name in ("small", "wide")}


def intervals() -> Any:
    """Means, medians and their intervals: Student's t, resampling, quantiles, a fitted line."""
    from types import SimpleNamespace

    from moesim.core.student import mean, student_t
    from moesim.studies.lookahead import relation
    from moesim.studies.validation.report import errors_of

    numbers = np.random.default_rng(1).integers(1, 10**6, 97) / 1e6
    measured = SimpleNamespace(spread=0.1, repeat_error=None)
    compared: Any = [SimpleNamespace(error=lambda *_, e=e, **__: e, measured=lambda *_: measured) for e in numbers]
    lines: Any = [
        SimpleNamespace(model=f"m{i % 4}", slots=2 + i, top_k=2, half=float(1 + i * one)) for i, one in enumerate(numbers[:20])
    ]
    return [
        [student_t(0.95, n) for n in range(2, 9)], vars(mean(numbers.tolist(), 0.9)), vars(errors_of(compared)),
        vars(relation(lines)),
    ]  # fmt: skip


def fits() -> Any:
    """A fit of eight constants to forty rows, and the intervals of its constants."""
    from moesim.studies.identify.fit import Priors, Problem

    class Rows:
        priors = Priors(np.full(8, 0.3), np.full(8, 0.4))
        table = np.random.default_rng(2).integers(-100, 100, (40, 8)) / 100 * (np.arange(8) < 7)  # rows say nothing of the last
        observed = np.random.default_rng(3).integers(-100, 100, 40) / 500

        def values(self, logs: Any) -> Any:
            return (self.table * np.expm1(logs)).sum(axis=1)

        def slopes(self, logs: Any, *, both: bool = False) -> Any:
            return self.table * np.exp(logs)

    problem = Problem(Rows(), list(range(40)), np.diag(np.full(40, 4e-4)), freedom=5.0)
    found = problem.fit()
    ends = [problem.interval(found, k) for k in range(8)]
    return [found.logs.tolist(), found.covariance.tolist(), found.inflation, ends]


def plans() -> Any:
    """Optima that SciPy's solvers find."""
    from moesim.policies.parts.assignment import exact_assignment

    drawn = np.random.default_rng(4).integers(1, 10**6, (6, 2, 24))
    return [list(exact_assignment(gpu.tolist(), cpu.tolist(), gpu_first=500, cpu_first=700)) for gpu, cpu in drawn]


CASES: list[Callable[..., Any]] = [routing, synthetic, workloads, costs, results, statistics, intervals, fits, plans]


def run_all() -> dict[str, str]:
    """Run every case in a folder of its own; return what each makes, as text."""
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            made = case(Path(folder)) if case.__code__.co_argcount else case()
            found[case.__name__] = json.dumps(made, sort_keys=True, default=repr)
            os.chdir(ROOT)
    return found


def variables(name: str) -> dict[str, str]:
    return {key: value for key, value in SETTINGS[name].items() if value}


@cache
def made_under(name: str) -> dict[str, str]:
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables(name), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "as it is"])
def test_what_results_rest_on_is_the_same_to_the_byte(name: str):
    here, there = made_under("as it is"), made_under(name)
    assert list(here) == [case.__name__ for case in CASES]
    assert {case: there[case] == here[case] for case in here} == dict.fromkeys(here, True)


N = 48  # so many that a sort which is not stable moves equals


def test_of_equals_the_lower_id_is_first():
    """Every third of 48 experts has the larger value."""
    from moesim.policies.algorithms.hybrimoe import credit_by_id
    from moesim.policies.systems.finemoe import RenewedQueue, map_ranks
    from moesim.policies.systems.klotski import hot_experts, most_popular
    from moesim.policies.systems.ktransformers import split_late
    from moesim.trace import Signal
    from moesim.trace.predictors import Coactivation, Frequency
    from moesim.trace.stats.balance import workload_correlation
    from moesim.trace.stats.caches import static_hits
    from moesim.trace.stats.locality import by_score
    from moesim.trace.stats.prediction import top_ids
    from moesim.trace.synthesis.figures import _most
    from moesim.trace.synthesis.generate import _among_equals
    from moesim.trace.synthesis.generate import top_ids as largest

    rows = np.where(np.arange(2 * N) % 3, 0.25, 0.5).reshape(2, N)
    expected = [*range(0, N, 3), *(e for e in range(N) if e % 3)]
    signal = Signal("residual", np.arange(2, dtype=np.int32), rows[:, None].astype(np.float16), None, 0, None, 0)
    orders: dict[str, Any] = {
        "map_ranks": np.argsort(map_ranks(rows).place[1]), "most_popular": most_popular(rows[1], N), "_most": _most(rows, N)[1],
        "by_score": by_score(rows)[1], "top_ids": top_ids(signal, [1], N)[0, 0],
        "largest": largest(rows.astype(np.float32), N)[1], "_among_equals": _among_equals(rows.astype(np.float32), N)[1],
    }  # fmt: skip
    assert {name: list(order) for name, order in orders.items()} == dict.fromkeys(orders, expected)
    assert hot_experts(np.array([[0], [0]]), rows, 20, partners=20) == sorted(expected[:20])
    assert split_late(np.arange(N)[None], N - 20, {*range(N)}, rows[:1])[0] == sorted(expected[:20])
    assert credit_by_id(rows[:1], 20)[0].nonzero()[0].tolist() == sorted(expected[:20])
    hits = static_hits(np.arange(N)[None], rows[:1], range(N + 1))[:, 0]
    assert hits.tolist() == [0, *np.cumsum(expected)]
    tables = {"activation_frequency": rows, "coactivation": np.stack([rows[1]] * N)[None]}
    trace: Any = SimpleNamespace(top_k=20, n_layers=2, n_experts=N, tables=tables)
    micro = SimpleNamespace(n_rows=1, layers=[SimpleNamespace(experts=np.array([[0]]))] * 2)
    step: Any = SimpleNamespace(phase="decode", micro=[micro])
    for predictor in (Frequency(trace), Coactivation(trace)):
        assert predictor.predict(step, 0, 1)[0].tolist() == [expected[:20]]
    chosen = np.array([*(expected[:16] + expected[at : at + 4] for at in (16, 20, 24)), expected[28:]])[:, None]
    correlation = workload_correlation(chosen, [np.array([[0, 1, 2, 3], [0, 0, 0, 0]])], N)
    assert correlation is not None and correlation["kept"] == 1
    queue, queued = RenewedQueue(2, N), []
    queue.renew(rows, np.ones((2, N), np.bool_))
    while queue:
        queued.append(queue.first)
        queue.pop()
    assert queued == [(layer, e) for at in (slice(16), slice(16, N)) for layer in (0, 1) for e in expected[at]]


if __name__ == "__main__" and sys.argv[1:]:  # for `make test-narrow`
    print(*(f"{key}={value}" for key, value in variables(sys.argv[1]).items()))
elif __name__ == "__main__":
    n_cores = int(os.environ.pop("CORES"))
    os.cpu_count = lambda: n_cores
    if hasattr(os, "sched_getaffinity"):
        os.sched_getaffinity = lambda _: set(range(n_cores))
    sys.path[:0] = [str(ROOT)]
    print(json.dumps(run_all()))
