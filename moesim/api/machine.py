"""Experiments carried out on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.result import Result
from moesim.api.run import parsed
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
