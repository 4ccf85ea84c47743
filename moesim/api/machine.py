"""Experiments carried out on this machine, and simulations next to measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.result import Result
from moesim.api.run import parsed
from moesim.api.studies import Study
from moesim.core.files import check_own_folder
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import quick as made_quick
from moesim.studies.replay import live_execution, live_machine, replayed


@checked("replay", memory="size")
def replay(
    experiment: str | Path | Mapping[str, Any], *, overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False,
    backend: str = "cpu", memory: str | None = None, disk: str | Path | None = None, out: str | Path | None = None,
    progress: bool = True,
) -> Result:  # fmt: skip
    """Carry out an experiment on this machine: same policies, rules and metrics, on a real clock.

    Parameters
    ----------
    experiment, overrides, quick, out, progress
        As of `moesim.run`; its hardware is this machine's profile.
    backend : {"cpu", "cuda"}
        ``"cpu"``: cores, memory and disk stand for all devices.
    memory : str, optional
        Host memory to use, such as ``"8GB"``; default: half of what is available.
    disk : str or Path, optional
        Folder for the experts, if the profile keeps them on a disk.

    Returns
    -------
    Result
        Only `out` writes its folder.
    """
    config, place, given = parsed("replay", experiment, overrides)
    config = replayed(config, place, "replay")
    made = Experiment(made_quick(config, place) if quick else config, place, known=given)
    output = None if out is None else Output(made, Path(out))
    with live_machine(made, backend, memory, None if disk is None else Path(disk)) as machine:
        found = run_experiment(made, keep=lambda index: True, progress=progress, execution=live_execution(machine))
    if output is not None:
        output.write(found)
    done = {index: one for index, one in enumerate(found.outcomes) if one.records is not None}
    folder = None if output is None else output.folder
    return Result(found.rows, None, folder, outcomes=done)  # no simulation would give these records again


@checked("validate", repeats="count", engines="path", memory="size")
def validate(
    experiment: str | Path | Mapping[str, Any] | None = None, *, out: str | Path | None = None, repeats: int = 3,
    resume: bool = True, only_compare: bool = False, public: bool = False, engines: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False, backend: str = "cpu", memory: str | None = None,
    disk: str | Path | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Compare simulated times with those of replays on this machine, or with published ones.

    Parameters
    ----------
    experiment, overrides, quick, backend, memory, disk, progress
        As of `moesim.replay`.
    out : str or Path, optional
        Folder of measurements, tables and figures; needed with an experiment.
    repeats : int
        Replays of each run, interleaved.
    resume : bool
        Keep the measurements that are in the folder.
    only_compare : bool
        Replay nothing: compare with the measurements in the folder.
    public : bool
        Compare with published measurements instead of an experiment.
    engines : str or Path, optional
        Compare with measured speeds of engines, rows of a CSV file, instead.

    Returns
    -------
    Study
        ``table``, ``text()``; ``failures`` names runs whose hits or bytes had to be equal and are not, ``notes`` what was
        written.

    Raises
    ------
    InputError
        If what was asked for is wrong.
    """
    asked = {
        "out": out, "experiment": experiment, "repeats": repeats != 3, "resume": not resume, "only_compare": only_compare,
        "public": public, "engines": engines, "overrides": overrides, "quick": quick, "backend": backend != "cpu",
        "memory": memory, "disk": disk,
    }  # fmt: skip
    given = {name for name, value in asked.items() if value}
    if public:
        _check_unused("public", given - {"public", "out"})
        return _public(None if out is None else Path(out), progress)
    if engines is not None:
        _check_unused("engines", given - {"engines"})
        return _engines(Path(engines), progress)
    if out is None:
        raise ConfigError("validate: expected --out FOLDER, got nothing; name one for measurements, tables and figures")
    folder = Path(out)
    check_own_folder(folder, "validate")
    if only_compare:
        _check_unused("only-compare", given - {"only_compare", "out", "experiment", "overrides", "quick"})
    if experiment is None:
        raise ConfigError("validate: expected an experiment, got nothing; name a file, or compare with --public")
    from moesim.studies.validation.report import Report  # Matplotlib takes most of a second to import
    from moesim.studies.validation.run import validate as run_both

    config, place, known = parsed("validate", experiment, overrides)
    config = replayed(config, place, "validate")
    made = Experiment(made_quick(config, place) if quick else config, place, known=known)
    if only_compare:
        found = run_both(made, folder, None, progress=progress)
    else:
        how = {"backend": backend, "memory": memory}
        with live_machine(made, backend, memory, None if disk is None else Path(disk)) as machine:
            execution = live_execution(machine)
            found = run_both(made, folder, execution, repeats=repeats, resume=resume, how=how, progress=progress)
    report = Report(found)
    notes = [f"wrote {path}" for path in report.write(folder)]
    return Study(
        report, list(report.problems), "validate", report.results(), report.table,
        lambda: {"results.csv": report.table(Format.CSV).encode()}, notes,
    )  # fmt: skip


_OPTIONS = {"experiment": "EXPERIMENT.yaml", "overrides": "--set"}


def _check_unused(mode: str, given: set[str]) -> None:
    for name in sorted(given):
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        raise ConfigError(f"validate --{mode}: expected no {option}, which changes nothing here; leave it out")


def _public(out: Path | None, progress: bool) -> Study:
    from moesim.studies.validation.public import group_table, plain, run_public, table

    result = run_public(out, progress=progress)

    def text(form: Format) -> str:
        groups = "" if form.for_programs else "\n" + group_table(result.sweeps, form)
        return table(result.frame, form) + groups + (f"{result.summary}\n" if form is Format.TABLE else "")

    notes = [] if out is None else [f"wrote {out}"]
    return Study(result, [], "validate", plain(result.frame), text, lambda: {"public.csv": text(Format.CSV).encode()}, notes)


def _engines(rows: Path, progress: bool) -> Study:
    from moesim.studies.validation.engines import run_engines, summary, table
    from moesim.studies.validation.public import plain

    result = run_engines(rows, progress=progress)

    def text(form: Format) -> str:
        return table(result, form) + ("\n" + "\n".join(summary(result)) + "\n" if form is Format.TABLE else "")

    return Study(result, [], "validate", plain(result.frame), text, lambda: {"engines.csv": text(Format.CSV).encode()})
