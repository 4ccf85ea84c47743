"""``moesim replay``: an experiment run on this machine instead of simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.api.machine import replay as carry_out
from moesim.cli.options import Quick, Set
from moesim.cli.runs import As, report_failures
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.units import parse_bytes
from moesim.experiment.config import load_config
from moesim.experiment.report import result_table

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
    if memory is not None:
        parse_bytes(memory, "--memory")
    folder = out or Path(f"results/{load_config(file, overrides).name or file.stem}-replay")
    found = carry_out(file, overrides=overrides, quick=small, backend=backend, memory=memory, disk=disk, out=folder)
    sys.stdout.write(result_table(found.rows, form))
    say(f"wrote {folder}")
    return report_failures(found)
