"""Hit rates of policies' caches, without costs: for questions that need no machine.

Each policy runs on a machine whose copies take most of the time, and on one whose copies take none. Where its hit rates differ,
they depend on the machine, and none is returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moesim.core.units import as_share
from moesim.errors import ConfigError, TraceError
from moesim.experiment.config import parse_config
from moesim.experiment.report import LIFTS, over_lifts
from moesim.experiment.resolve import Experiment, remembered
from moesim.experiment.routing import choose_trace, read_trace
from moesim.experiment.run import run_experiment
from moesim.experiment.workers import Workers
from moesim.metrics import Value
from moesim.metrics.naming import policy_label
from moesim.model import ModelSpec
from moesim.trace import Trace
from moesim.trace.made import trace_label

PLACE: Final = "trace caches"
_MACHINE: Final = {
    "base": "rtx3090-epyc7532", "devices.gpu0.memory_bytes": "64 TiB", "devices.cpu0.memory_bytes": "64 TiB",
}  # fmt: skip
_LINK: Final = [f"links.cpu0->gpu0.{curve}" for curve in ("pinned", "pageable", "chunked")]
_MACHINES: Final = (
    _MACHINE,
    _MACHINE | {f"{key}.bytes_per_s": 1e14 for key in _LINK} | {f"{key}.latency_us": 0 for key in _LINK},
)
_SHAPE: Final = ("n_layers", "n_experts", "top_k")
_SIZES: Final = {
    "name": "any", "hidden": 4096, "expert_intermediate": 4096, "n_heads": 1, "n_kv_heads": 1, "head_dim": 64, "vocab": 64,
}  # fmt: skip
COLUMNS: Final = ("hit_rate_decode", "hit_rate_decode_warm")


@dataclass(frozen=True)
class CacheRates:
    """Hit rates of decoding, a row for each policy and size."""

    rows: Sequence[Mapping[str, Any]]  # of results; of assumed routing that of the middle lift, with all of them
    routing: str  # what it is
    n_layers: int
    refused: Mapping[str, str]  # policies without a rate, and why

    @property
    def assumed(self) -> bool:
        """Whether rates have a range over assumed lifts."""
        return any(row.get(LIFTS) for row in self.rows)


def cache_rates(
    policies: Sequence[Any], *, model: ModelSpec | None = None, trace: Any = None, hit_rate: str | None = None,
    slots: Sequence[Any] = (0.125, 0.25, 0.375, 0.5), batch: int = 1, requests: int = 8, prompt: int = 0, decode: int = 256,
    jobs: int | None = None, progress: bool = False, known: dict[str, Trace] | None = None,
) -> CacheRates:  # fmt: skip
    """Simulate caches of some sizes, slots of a layer or shares of its experts, on a trace or on made-up routing."""
    known = {} if known is None else known
    if trace is None:
        if model is None:
            raise ConfigError(f"{PLACE}: expected a trace or --model, got neither; add one")
        sizes = {"requests": batch * requests, "prompt": prompt, "decode": decode, "scores": True}
        trace, routing = choose_trace(model, sizes, hit_rate=hit_rate)
        n, shape = batch * requests, [getattr(model, name) for name in _SHAPE]
    elif model is not None or hit_rate is not None:
        raise ConfigError(f"{PLACE}: expected a trace alone, or --model perhaps with --hit-rate, got both; leave one out")
    else:
        read = remembered(known, trace, lambda: read_trace(trace, PLACE))
        routing, shape = f"trace {trace_label(trace)}", [getattr(read, name) for name in _SHAPE]
        n = min(batch * requests, read.n_requests // batch * batch)
    raw = {
        "model": dict(zip(_SHAPE, shape, strict=True)) | _SIZES, "hardware": list(_MACHINES),
        "trace": trace, "cache": {"ratio": [_ratio(one, shape[1]) for one in slots]},
        "workload": {"batch_size": batch, "requests": [list(range(n))]},
    }  # fmt: skip
    rows: list[Mapping[str, Value]] = []
    refused: dict[str, str] = {}
    experiments = []
    for policy in policies:  # all of them before the first run
        try:
            experiments.append(Experiment(parse_config({**raw, "policies": [policy]}, PLACE), PLACE, known=known))
        except TraceError as error:
            refused[policy if isinstance(policy, str) else policy_label(policy)] = str(error)
    with Workers(jobs) as workers:
        for experiment in experiments:
            found = run_experiment(experiment, workers=workers, progress=progress).rows
            rows += _judged(found[: len(found) // 2], found[len(found) // 2 :], refused)
    return CacheRates(over_lifts(rows), routing, shape[0], refused)


def _ratio(written: Any, n_experts: int) -> float:
    share = as_share(written)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < n_experts:
        most = n_experts - 1
        raise ConfigError(f"{PLACE}: --slots: expected 1 to {most} slots of a layer, or a share such as 25%, got {written!r}")
    return share / n_experts if share >= 1 else share


def _judged(
    slow: Sequence[Mapping[str, Value]], fast: Sequence[Mapping[str, Value]], refused: dict[str, str]
) -> Sequence[Mapping[str, Value]]:
    """Return the rows of one policy if both machines have the same rates."""
    for one, other in zip(slow, fast, strict=True):
        error = one.get("error") or other.get("error")
        if error or any(one[column] != other[column] for column in COLUMNS):
            why = "its hit rates depend on the machine; simulate it with moesim compare --hardware"
            refused[str(one["policy"])] = str(error or why)
            return []
    return slow
