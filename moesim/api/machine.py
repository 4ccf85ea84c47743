"""What this machine does: experiments replayed or validated on it, and its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
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
from moesim.live.execution import live_execution, live_machine, replayed


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

    Raises
    ------
    InputError
        If PyTorch is absent, or the profile is of another machine.
    """
    made = _of_this_machine("replay", experiment, overrides, quick)
    output = None if out is None else Output(made, Path(out))
    with live_machine(made, backend, memory, None if disk is None else Path(disk)) as machine:
        found = run_experiment(made, keep=lambda index: True, progress=progress, execution=live_execution(machine))
    if output is not None:
        output.write(found)
    done = {index: one for index, one in enumerate(found.outcomes) if one.records is not None}
    folder = None if output is None else output.folder
    return Result(found.rows, None, folder, outcomes=done)  # no simulation would give these records again


def _of_this_machine(verb: str, experiment: Any, overrides: Any, quick: bool) -> Experiment:
    config, place, given = parsed(verb, experiment, overrides)
    config = replayed(config, place, verb)
    return Experiment(made_quick(config, place) if quick else config, place, known=given)


@checked("validate", repeats="count", memory="size")
def validate(
    experiment: str | Path | Mapping[str, Any] | None = None, out: str | Path | None = None, *, public: bool = False,
    engines: str | Path | None = None, repeats: int = 3, resume: bool = True, only_compare: bool = False,
    overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False, backend: str = "cpu", memory: str | None = None,
    disk: str | Path | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Simulate and replay an experiment here, or simulate what others measured, and compare.

    Parameters
    ----------
    experiment, overrides, quick, backend, memory, disk, progress
        As of `moesim.replay`.
    out : str or Path, optional
        Folder of the measurements, tables and figures; needed with an experiment.
    public : bool
        Compare with the published measurements that are shipped, instead of an experiment.
    engines : str or Path, optional
        Compare with measured speeds of engines in a CSV table, instead of an experiment.
    repeats : int
        Replays of each run, interleaved.
    resume, only_compare : bool
        Keep the measurements that are in the folder; replay nothing, but compare with these.

    Returns
    -------
    Study
        ``table`` and ``text()``; ``failures`` names hits and bytes that differ although no clock decides them.

    Raises
    ------
    InputError
        If there is no experiment or no folder, or measurements are of another experiment.
    """
    folder = None if out is None else Path(out)
    if public:
        return _public(folder, progress)
    if engines is not None:
        return _engines(Path(engines), progress)
    if folder is None:
        raise ConfigError("validate: expected a folder, got nothing; name one for measurements, tables and figures")
    check_own_folder(folder, "validate")
    if experiment is None:
        raise ConfigError("validate: expected an experiment, got nothing; name a file, or compare with public measurements")
    from moesim.studies.validation.report import Report  # Matplotlib takes most of a second to import
    from moesim.studies.validation.run import validate as run_both

    made = _of_this_machine("validate", experiment, overrides, quick)
    if only_compare:
        found = run_both(made, folder, None, progress=progress)
    else:
        how = {"backend": backend, "memory": memory}
        with live_machine(made, backend, memory, None if disk is None else Path(disk)) as machine:
            execution = live_execution(machine)
            found = run_both(made, folder, execution, repeats=repeats, resume=resume, how=how, progress=progress)
    report = Report(found)
    report.write(folder)
    return _answer(report, report.results(), report.table, report.problems)


def _answer(found: Any, rows: list[dict[str, Any]], text: Any, failures: Sequence[str] = ()) -> Study:
    return Study(found, list(failures), "validate", rows, text, lambda: {"results.csv": text(Format.CSV).encode()})


def _public(out: Path | None, progress: bool) -> Study:
    from moesim.studies.validation.public import plain, run_public, text

    found = run_public(out, progress=progress)
    return _answer(found, plain(found.frame), partial(text, found))


def _engines(rows: Path, progress: bool) -> Study:
    from moesim.studies.validation.engines import run_engines, text
    from moesim.studies.validation.public import plain

    found = run_engines(rows, progress=progress)
    return _answer(found, plain(found.frame), partial(text, found))
