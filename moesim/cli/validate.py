"""``moesim validate``: runs of an experiment simulated and replayed here, side by side."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from moesim.api.machine import validate as run_both
from moesim.cli.options import Quick, Set
from moesim.cli.outputs import print_answer
from moesim.cli.replay import Backend, Disk, Memory
from moesim.cli.runs import As
from moesim.core.limits import REPEATS
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError


def validate(
    context: typer.Context,
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
    if public:
        _check_options(context, "public", ("public", "out", "form"))
    elif engines is not None:
        _check_options(context, "engines", ("engines", "form"))
    elif out is None:
        raise ConfigError("validate: expected --out FOLDER, got nothing; name one for measurements, tables and figures")
    elif only_compare:
        _check_options(context, "only-compare", ("only_compare", "out", "file", "overrides", "small", "form"))
    if memory is not None:
        parse_bytes(memory, "--memory")
    found = run_both(
        file, out, public=public, engines=engines, repeats=repeats, resume=resume, only_compare=only_compare,
        overrides=overrides, quick=small, backend=backend, memory=memory, disk=disk,
    )  # fmt: skip
    code = print_answer(found, form, None, "validate")
    if out is not None:
        say(f"wrote {out}")
    return code


def _check_options(context: typer.Context, mode: str, used: Collection[str]) -> None:
    for parameter in context.command.params:
        name, given = str(parameter.name), context.get_parameter_source(str(parameter.name))
        if name not in used and given is not None and given.name == "COMMANDLINE":
            raise ConfigError(f"validate --{mode}: expected no {parameter.opts[0]}, which changes nothing here; leave it out")
