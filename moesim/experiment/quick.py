"""Make an experiment small, to see whether it works at all."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from moesim.experiment.config import Config

QUICK_DECODE_TOKENS = 4


def quick(config: Config) -> Config:
    """Take the first value of each sweep, one batch, and at most a few decode tokens; all policies stay.

    Parameters
    ----------
    config : Config
        An experiment.

    Returns
    -------
    Config
        A smaller one.
    """
    workload = _first(config.workload)
    tokens = workload.decode_tokens
    fewer = min(QUICK_DECODE_TOKENS, tokens if isinstance(tokens, int) else QUICK_DECODE_TOKENS)
    return config.model_copy(
        update={
            "zip": [],
            "model": _one(config.model),
            "hardware": _one(config.hardware),
            "trace": _shorter(_one(config.trace), fewer, workload.batch_size),
            "workload": workload.model_copy(update={"decode_tokens": fewer, "n_batches": 1}),
            "cache": _first(config.cache),
            "transfer": _first(config.transfer),
            "decision_us": _one(config.decision_us),
            "predictors": {source: _one(other) for source, other in config.predictors.items()},
        }
    )


def _shorter(trace: Any, decode: int, batch: int) -> Any:
    """Make no more synthetic routing than one batch takes."""
    if isinstance(trace, str):
        return trace
    trace = {key: _one(value) for key, value in trace.items()}
    return trace | {"requests": min(batch, trace.get("requests", 1)), "decode": min(decode, trace.get("decode", 0))}


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _first(part: Any) -> Any:
    assert isinstance(part, BaseModel)
    return part.model_copy(update={name: _one(getattr(part, name)) for name in type(part).model_fields})
