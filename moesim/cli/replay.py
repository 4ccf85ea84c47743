"""``moesim replay``: an experiment run on this machine instead of simulated."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Quick, Set, replayed
from moesim.cli.runs import As, report_failures
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import load_config
from moesim.experiment.folder import Output
from moesim.experiment.report import result_table
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import Execution
from moesim.experiment.sweep import quick
from moesim.metrics.naming import LIVE

Backend = Annotated[str, typer.Option("--backend", help="cpu: cores, memory and disk stand for all devices; cuda: GPUs.")]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Host memory to use, such as '8 GB'.", show_default="half of what is available")
]
Disk = Annotated[Path | None, typer.Option("--disk", help="Folder for the experts, if the profile keeps them on a disk.")]


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The experiment; its hardware is this machine's profile.")],
    overrides: Set = [],  # noqa: B006  (typer copies it)
    backend: Backend = "cpu",
    memory: Memory = None,
    disk: Disk = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: results/NAME-replay.")] = None,
    small: Quick = False,
    form: As = Format.TABLE,
) -> int:
    """Run an experiment for real on this machine. Policies, rules and metrics are the same.

    Example: moesim replay experiments/replay.yaml --memory 2GB
    """
    config = replayed(load_config(file, overrides), str(file), "replay")
    if small:
        config = quick(config, str(file))
    experiment = Experiment(config, str(file))
    output = Output(experiment, out or Path(f"results/{config.name or file.stem}-replay"))
    with live_machine(experiment, backend, memory, disk) as machine:
        results = run_experiment(experiment, keep=output.kept.get, progress=True, execution=live_execution(machine))
    sys.stdout.write(result_table(results.rows, form))
    output.write(results)
    say(f"wrote {output.folder}")
    return report_failures(results)


def live_machine(experiment: Experiment, backend: str, memory: str | None, disk: Path | None):  # type: ignore[no-untyped-def]
    """Make the machine of a replay: the one profile that all runs of the experiment name."""
    from moesim.live.kernels import require_torch

    require_torch()
    from moesim.live import LiveMachine

    profiles = {spec.hardware.name: spec.hardware for spec in experiment.specs}
    if len(profiles) > 1:
        raise ConfigError(f"{experiment.place}: hardware: expected one profile, this machine's, got {', '.join(profiles)}")
    (hardware,) = profiles.values()
    budget = None if memory is None else parse_bytes(memory, "--memory")
    return LiveMachine(hardware, backend=backend, memory_bytes=budget, disk=disk)


def live_execution(machine) -> Execution:  # type: ignore[no-untyped-def]
    """Wrap a live machine as an execution of runs."""
    from moesim.live import replay as carry_out

    hardware = machine.hardware
    fields = [key for key in ("host_expert_us", "host_shared") if getattr(hardware, key)]
    thread = [f"{', '.join(fields)}: for simulations; the thread of a replay takes the time that it takes"] if fields else []

    def notes() -> list[str]:
        return [f"{LIVE} ({machine.backend})", *thread, *([machine.store.aliased] if machine.store.aliased else [])]

    return Execution(partial(carry_out, machine), True, notes)
