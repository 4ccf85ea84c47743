"""Make an experiment small, to see whether it works at all."""

from __future__ import annotations

from typing import Any

from moesim.experiment.config import CacheConfig, Config, TransferConfig, WorkloadConfig
from moesim.experiment.spec import Point
from moesim.experiment.sweep import expand
from moesim.trace.made import shortened

QUICK_DECODE_TOKENS = 4


def quick(config: Config, place: str = "experiment", *, imports: bool = True) -> Config:
    """Take the first setting of the grid, one batch, and at most a few decode tokens; all its policies stay."""
    points = expand(config, place, imports=imports)
    first = points[0]
    tokens = first.workload["decode_tokens"]
    fewer = min(QUICK_DECODE_TOKENS, tokens if isinstance(tokens, int) else QUICK_DECODE_TOKENS)
    workload = {**first.workload, "decode_tokens": fewer, "n_batches": 1}
    # no more synthetic routing than one batch takes
    trace = first.trace if isinstance(first.trace, str) else shortened(first.trace, first.workload["batch_size"], fewer)
    small = {**first.written(), "workload": workload, "trace": trace}
    sections = {"workload": WorkloadConfig, "cache": CacheConfig, "transfer": TransferConfig}
    update = {key: sections[key](**value) if key in sections else value for key, value in small.items()}
    return config.model_copy(update={**update, "zip": [], "exclude": [], "repeat": 1, "policies": _policies(points)})


def _policies(points: list[Point]) -> list[Any]:
    return [dict(point.policy) for point in points if point.setting == points[0].setting]
