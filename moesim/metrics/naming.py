"""Names of policies, models and machines with what was changed in them, and hashes of inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec


SETTINGS = (
    "model", "hardware", "trace", "transfer_curve", "chunk_bytes", "decision_ns", "predictors", "batch_size", "prompt_tokens",
    "decode_tokens", "n_batches", "seed", "micro_batches", "prefill_chunk", "refill", "reuse", "requests", "extrapolate",
    "warm_up",
)  # fmt: skip
"""Columns of a result row that say what was asked for, but for the policy and its cache."""
CACHE_SETTINGS = ("cache_ratio", "cache_budget_bytes")
LIVE = "live replay"
"""How the note begins that results of a replay carry."""


def policy_label(policy: Mapping[str, Any]) -> str:
    """Write a policy and its options in one word or so.

    >>> policy_label({"name": "lru"}), policy_label({"name": "hybrimoe", "alpha": 0.5})
    ('lru', 'hybrimoe(alpha=0.5)')
    """
    options = ",".join(f"{key}={_written(value)}" for key, value in policy.items() if key != "name")
    return str(policy["name"]) + (f"({options})" if options else "")


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return policy_label(value) if "name" in value else json.dumps(value, sort_keys=True)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def model_label(model: ModelSpec) -> str:
    """Name a model with what was changed in it."""
    return model.name + (f" ({', '.join(model.labels)})" if model.labels else "")


def hardware_label(hardware: HardwareProfile) -> str:
    """Name a machine with what was changed in it."""
    numbers = hardware.numbers
    changed = ", ".join(f"{key}={numbers[key].value if key in numbers else 'changed'}" for key in hardware.overrides)
    return hardware.name + (f" ({changed})" if changed else "")


def fingerprint(value: Any) -> str:
    """Hash anything with sha256: what JSON can hold, and the ``repr`` of the rest, in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain, separators=(",", ":")).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return vars(value) if hasattr(value, "__dict__") else str(value)
