"""Runs of an experiment carried out on this machine, instead of simulated."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.core.units import parse_bytes
from moesim.errors import ConfigError
from moesim.experiment.config import Config, refuse_served
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import Execution
from moesim.metrics.naming import LIVE

if TYPE_CHECKING:
    from moesim.live.machine import LiveMachine


def replayed(config: Config, place: str, verb: str) -> Config:
    """Return an experiment with what moesim's own runtime does: the machine's costs, and pinned copies if none are asked for."""
    refuse_served(config, place, verb)
    transfer = config.transfer
    if transfer.curve == "own":
        transfer = transfer.model_copy(update={"curve": "pinned"})
    return config.model_copy(update={"engine": "machine", "transfer": transfer})


def live_machine(experiment: Experiment, backend: str, memory: str | None, disk: Path | None) -> LiveMachine:
    """Make the machine of a replay: the one profile that all runs of the experiment name."""
    from moesim.live.kernels import require_torch

    require_torch()
    from moesim.live import LiveMachine

    profiles = {spec.hardware.name: spec.hardware for spec in experiment.specs}
    if len(profiles) > 1:
        raise ConfigError(f"{experiment.place}: hardware: expected one profile, this machine's, got {', '.join(profiles)}")
    (hardware,) = profiles.values()
    budget = None if memory is None else parse_bytes(memory, "memory")
    return LiveMachine(hardware, backend=backend, memory_bytes=budget, disk=disk)


def live_execution(machine: LiveMachine) -> Execution:
    """Wrap a live machine as an execution of runs."""
    from moesim.live import replay as carry_out

    hardware = machine.hardware
    fields = [key for key in ("host_expert_us", "host_shared") if getattr(hardware, key)]
    thread = [f"{', '.join(fields)}: for simulations; the thread of a replay takes the time that it takes"] if fields else []

    def notes() -> list[str]:
        return [f"{LIVE} ({machine.backend})", *thread, *([machine.store.aliased] if machine.store.aliased else [])]

    return Execution(partial(carry_out, machine), True, notes)
