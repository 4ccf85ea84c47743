"""``moesim validate``: runs of an experiment simulated and replayed here, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Quick, Set
from moesim.cli.outputs import show
from moesim.cli.replay import Backend, Disk, Memory
from moesim.cli.runs import As
from moesim.core.limits import REPEATS
from moesim.core.table import Format
from moesim.core.text import complain, say


def validate(
    file: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.yaml]", help="The experiment.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the measurements, tables and figures.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=REPEATS.most, help="Replays of each run, interleaved.")] = 3,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Keep the measurements that are in the folder.")] = True,
    only_compare: Annotated[
        bool, typer.Option("--only-compare", help="Replay nothing: compare the simulator with the measurements in the folder.")
    ] = False,
    public: Annotated[bool, typer.Option("--public", help="Compare with published measurements instead.")] = False,
    engines: Annotated[
        Path | None, typer.Option("--engines", metavar="ROWS.csv", help="Compare with measured speeds of engines instead.")
    ] = None,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    small: Quick = False,
    backend: Backend = "cpu",
    memory: Memory = None,
    disk: Disk = None,
    form: As = Format.TABLE,
) -> int:
    """Compare simulated times with replayed or published ones.

    Hits and bytes must be the same wherever no clock has a say in a policy's decisions; if they are not, the exit code is 1. A
    missed goal is only reported.

    Example: moesim validate --public
    """
    from moesim.api.machine import validate as compare

    found = compare(
        file, out=out, repeats=repeats, resume=resume, only_compare=only_compare, public=public, engines=engines,
        overrides=overrides, quick=small, backend=backend, memory=memory, disk=disk,
    )  # fmt: skip
    show(found.text(form), form)
    for line in found.notes:
        say(line)
    for line in found.failures:
        complain(f"moesim: {line}")
    return 1 if found.failures else 0
