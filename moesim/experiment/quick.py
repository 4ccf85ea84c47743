"""Make an experiment small, to see whether it works at all."""

from __future__ import annotations

from typing import Any

from moesim.experiment.config import CacheConfig, Config, TransferConfig, WorkloadConfig
from moesim.experiment.sweep import Point, expand

QUICK_DECODE_TOKENS = 4


def quick(config: Config, place: str = "experiment", *, imports: bool = True) -> Config:
    """Take the first setting of the grid, one batch, and at most a few decode tokens; all its policies stay.

    Parameters
    ----------
    config : Config
        An experiment.
    place : str
        The file, for messages.
    imports : bool
        As of `moesim.experiment.sweep.expand`.

    Returns
    -------
    Config
        A smaller one.

    Raises
    ------
    ConfigError
        As of `moesim.experiment.sweep.expand`.
    """
    points = expand(config, place, imports=imports)
    first = points[0]
    tokens = first.workload["decode_tokens"]
    fewer = min(QUICK_DECODE_TOKENS, tokens if isinstance(tokens, int) else QUICK_DECODE_TOKENS)
    return config.model_copy(
        update={
            "zip": [],
            "exclude": [],
            "repeat": 1,
            "model": first.model,
            "hardware": first.hardware,
            "trace": _shorter(first.trace, fewer, first.workload["batch_size"]),
            "workload": WorkloadConfig(**{**first.workload, "decode_tokens": fewer, "n_batches": 1}),
            "cache": CacheConfig(ratio=first.ratio, budget=first.budget_bytes),
            "policies": _policies(points),
            "transfer": TransferConfig(curve=first.curve, chunk=first.chunk_bytes),
            "decision_us": first.decision_us,
            "predictors": dict(first.predictors),
            "extrapolate": first.extrapolate,
            "intervals": first.intervals,
            "warm_up_steps": first.warm_up_steps,
        }
    )


def _policies(points: list[Point]) -> list[Any]:
    return [dict(point.policy) for point in points if point.setting == points[0].setting]


def _shorter(trace: Any, decode: int, batch: int) -> Any:
    """Make no more synthetic routing than one batch takes."""
    if isinstance(trace, str):
        return trace
    return {**trace, "requests": _least(trace.get("requests", 1), batch), "decode": _least(trace.get("decode", 0), decode)}


def _least(value: Any, limit: int) -> Any:
    return min(value, limit) if isinstance(value, int) else value  # what is no number is refused where it is read
