"""Cases carried out by the engine: what a closed form is held against, and what predicts where there is none."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core.files import write_bytes
from moesim.core.units import slots_of
from moesim.engine import simulate
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.hardware import build_profile
from moesim.hardware.costs import CostModel
from moesim.policies.registry import make_policy
from moesim.studies.identify.cases import STEPS, Case, decode_workload, routing, shape_of
from moesim.studies.identify.constants import roomy

_WARM: Final = 16
"""Tokens of the prompt that fills a dynamic policy's cache."""


def engine_log_time(case: Case, raw: Mapping[str, Any], place: str) -> float:
    """Simulate a case."""
    return _static(case, raw, place) if case.static else _dynamic(case, raw, place)


def _static(case: Case, raw: Mapping[str, Any], place: str) -> float:
    hardware = build_profile(roomy(raw, build_profile(raw, place), place), place)
    slots = slots_of(case.setting.cache.get("ratio", 1.0), case.model.n_layers * case.model.n_experts)
    records = simulate(
        model=case.model,
        costs=CostModel(case.model, hardware, extrapolate=True),
        workload=decode_workload(case),
        policy=make_policy(case.setting.policy, case.observation.place),
        cache_slots={name: slots for name, device in hardware.devices.items() if device.role == "accelerator"},
    )
    times = [step.end - step.begin for step in records.steps]
    return math.log(sum(times) / len(times))


def _dynamic(case: Case, raw: Mapping[str, Any], place: str) -> float:
    one = case.observation
    prefill = one.kind == "prefill"
    prompt = one.context if prefill else min(one.context, _WARM) or 1
    decode = 1 if prefill else min(one.decode, 2 * STEPS)
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        trace = routing(shape_of(case.model), one.batch, prompt, decode).write(Path(folder) / "routing.safetensors")
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
            "timeline": None,
        }  # fmt: skip
        where = one.place or f"row {one.row}"
        outcome = run_experiment(Experiment(parse_config(config, where), where)).outcomes[0]
    if outcome.failure is not None:
        raise ConfigError(f"{where}: setting: expected one that can be simulated, got: {outcome.failure}")
    if prefill:
        return math.log(one.batch * prompt / float(str(outcome.row["prefill_tokens_per_s"])) * 1e9)
    return math.log(one.batch / float(str(outcome.row["decode_tokens_per_s"])) * 1e9)
