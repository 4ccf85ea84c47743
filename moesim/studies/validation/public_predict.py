"""The run that predicts a published measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.hardware import weakest
from moesim.model import ModelSpec, load_model
from moesim.studies.validation.public_checks import Check

_SEED: Final = 0
_UNINFORMED: Final = frozenset({"all-cpu", "all-gpu", "llama-cpp"})
"""Policies that read no calibration tables, which take most of the time to make for a short trace."""


def predict(check: Check, folder: Path) -> dict[str, Any]:
    """Run the simulator for a check.

    Gives ``predicted`` (tokens/s), ``label``, and the shares of the run's time.
    """
    model = load_model(check.spec, f"check {check.check}: spec")
    raw = {
        "model": check.spec,
        "hardware": check.hardware,
        "trace": str(_trace(check, model, folder)),
        "workload": {"batch_size": 1, "prompt_tokens": check.prompt, "decode_tokens": check.decode, "prefill_chunk": 512},
        "cache": check.cache,
        "policies": [check.policy],
        "timeline": None,
    }
    place = f"check {check.check}"
    outcome = run_experiment(Experiment(parse_config(raw, place), place)).outcomes[0]
    if outcome.failure is not None:
        raise type(outcome.failure)(f"{place}: {outcome.failure}")
    row, costs = outcome.row, outcome.provenance or {}
    times = {key[5:-3]: float(value) for key, value in row.items() if key.startswith("time_") and isinstance(value, (int, float))}
    total = sum(times.values())
    return {
        "predicted": float(str(row[check.metric])),
        # Of the costs alone: routing is synthetic everywhere, and matters little where all experts are in one place.
        "label": weakest(cost["source"] for cost in costs.values()),
        **{f"share_{cause}": time / total for cause, time in times.items()},
    }


def _trace(check: Check, model: ModelSpec, folder: Path) -> Path:
    """Make routing of the model's shape, or find what another check has made."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.generate import N_CALIBRATION

    policy = check.policy["name"] if isinstance(check.policy, Mapping) else check.policy
    plain = policy in _UNINFORMED
    shape = f"{model.n_layers}x{model.n_experts}x{model.top_k}{'-plain' if plain else ''}"
    path = folder / f"{check.routing}-{shape}-{check.prompt}+{check.decode}.safetensors"
    if not path.is_file():
        try:
            found = read_parameters(check.routing)
        except ConfigError as error:
            raise ConfigError(f"check {check.check}: routing: {error}") from None
        found = found.replace(n_layers=model.n_layers, n_experts=model.n_experts, top_k=model.top_k)
        synthesize(
            found,
            n_requests=1,
            n_prompt=check.prompt,
            n_decode=check.decode,
            seed=_SEED,
            n_signal_requests=0,
            folder=folder,
            n_calibration=0 if plain else N_CALIBRATION,
        ).write(path)
    return path
