"""``moesim validate``: runs of an experiment simulated and replayed here, side by side."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Quick, Set
from moesim.cli.outputs import show
from moesim.cli.replay import Backend, Disk, Memory
from moesim.cli.runs import As
from moesim.core.files import check_own_folder
from moesim.core.limits import REPEATS
from moesim.core.table import Format
from moesim.core.text import complain, say
from moesim.errors import ConfigError
from moesim.experiment.config import load_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import quick
from moesim.studies.replay import live_execution, live_machine, replayed


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
        return _public(out, form)
    if engines is not None:
        _check_options(context, "engines", ("engines", "form"))
        return _engines(engines, form)
    if out is None:
        raise ConfigError("validate: expected --out FOLDER, got nothing; name one for measurements, tables and figures")
    check_own_folder(out, "validate")
    if only_compare:
        _check_options(context, "only-compare", ("only_compare", "out", "file", "overrides", "small", "form"))
    if file is None:
        raise ConfigError("validate: expected an experiment, got nothing; name a file, or compare with --public")
    from moesim.studies.validation.report import Report  # Matplotlib takes most of a second to import
    from moesim.studies.validation.run import validate as run_both

    config = replayed(load_config(file, overrides), str(file), "validate")
    experiment = Experiment(quick(config, str(file)) if small else config, str(file))
    if only_compare:
        found = run_both(experiment, out, None, progress=True)
    else:
        how = {"backend": backend, "memory": memory}
        with live_machine(experiment, backend, memory, disk) as machine:
            execution = live_execution(machine)
            found = run_both(experiment, out, execution, repeats=repeats, resume=resume, how=how, progress=True)
    report = Report(found)
    show(report.table(form), form)
    for path in report.write(out):
        say(f"wrote {path}")
    for line in report.problems:
        complain(f"moesim: {line}")
    return 1 if report.problems else 0


def _public(out: Path | None, form: Format) -> int:
    from moesim.studies.validation.public import group_table, run_public, table

    result = run_public(out, progress=True)
    show(table(result.frame, form), form)
    if not form.for_programs:
        show("\n" + group_table(result.sweeps, form), form)
    if form is Format.TABLE:
        show(f"{result.summary}\n")
    if out is not None:
        say(f"wrote {out}")
    return 0


def _engines(rows: Path, form: Format) -> int:
    from moesim.studies.validation.engines import run_engines, summary, table

    result = run_engines(rows, progress=True)
    show(table(result, form), form)
    if form is Format.TABLE:
        show("\n" + "\n".join(summary(result)) + "\n")
    return 0


def _check_options(context: typer.Context, mode: str, used: Collection[str]) -> None:
    for parameter in context.command.params:
        name, given = str(parameter.name), context.get_parameter_source(str(parameter.name))
        if name not in used and given is not None and given.name == "COMMANDLINE":
            raise ConfigError(f"validate --{mode}: expected no {parameter.opts[0]}, which changes nothing here; leave it out")
