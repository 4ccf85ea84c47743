"""Profiles of machines: measure this one, find what is wrong with one, put two next to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.outputs import check_out_folder
from moesim.api.studies import Study
from moesim.core.table import Format
from moesim.core.text import note
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.problems import find_problems
from moesim.live.kernels import require_torch
from moesim.model import ModelSpec, builtin_models, load_model

Machine = str | Path | Mapping[str, Any] | HardwareProfile
Model = str | Path | Mapping[str, Any] | ModelSpec


@checked(
    "profile.measure", name="text", mode="text", disk="path", no_disk="flag", no_gpu="flag", memory="size", repeats="count",
    out="path", resume="flag", overwrite="flag", dry_run="flag", progress="flag",
)  # fmt: skip
def measure(
    name: str, *, model: Model | Sequence[Model] = ("mixtral-8x7b", "deepseek-v2-lite"), bits: Sequence[float] = (),
    mode: str = "full", disk: str | Path | None = None, no_disk: bool = False, gpu: int | None = None, no_gpu: bool = False,
    memory: str | None = None, repeats: int | None = None, seed: int = 0, out: str | Path = "hardware_profiles",
    resume: bool = True, overwrite: bool = False, dry_run: bool = False, progress: bool = True,
) -> list[Path] | str:  # fmt: skip
    """Measure what experts, dense parts and copies cost on this machine, and write it as a profile.

    Parameters
    ----------
    name : str
        Of the profile.
    model : str, Path, mapping, ModelSpec, or sequence of them
        As of `moesim.load_model`; ``"all"``: every built-in one.
    bits : sequence of float
        Of the experts' weights; default: each model's own.
    mode : {"full", "quick"}
        Up to 4096 rows, or up to 64.
    disk, no_disk, gpu, no_gpu
        Folder on the disk, and number of the GPU, to measure; or leave them out. Default: the first GPU, if any; without one
        the disk of `out`.
    memory : str, optional
        Host memory to use, such as ``"8GB"``; default: half of what is available.
    repeats, seed : int
        Of each probe, at least 5; of the order and the random weights.
    out : str or Path
        Folder of profiles.
    resume, overwrite : bool
        Go on with what was interrupted; replace a profile that is there.
    dry_run : bool
        Return the plan as text; measure nothing.

    Returns
    -------
    list of Path, or str
        The profiles.

    Raises
    ------
    InputError
        If PyTorch is absent, the memory does not suffice, or a profile of the name is there.
    """
    for what, both in (("disk", disk is not None and no_disk), ("gpu", gpu is not None and no_gpu)):
        if both:
            raise ConfigError(f"profile.measure: expected {what} or no_{what}, got both; leave one out")
    named = list(model) if isinstance(model, list | tuple) else [model]
    models = builtin_models().values() if named == ["all"] else map(_model, named)
    folder = Path(out)
    if not dry_run:
        check_out_folder(folder, option="profile.measure: out:")
        require_torch()
    from moesim.live.profiler.request import Request, describe_plan, find_gpu, prepare

    which = None if no_gpu else find_gpu(gpu)
    place = None if disk is None else Path(disk)
    if place is None and which is None and not no_disk:
        if not dry_run:
            folder.mkdir(parents=True, exist_ok=True)
        place = folder if folder.is_dir() else Path()
    budget = None if memory is None else parse_bytes(memory, "profile.measure: memory")
    request = Request(
        name, tuple(models), tuple(bits), mode, budget, place, which, folder, seed, repeats, resume=resume, overwrite=overwrite
    )
    prepared = prepare(request)
    if dry_run:
        return describe_plan(prepared)
    from moesim.live.profiler.measure import measure as carry_out  # PyTorch takes seconds to import

    return carry_out(prepared, progress=progress, warn=lambda text: note(f"moesim: warning: {text}"))


def _model(model: Any) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_model(model, "model")


@checked("profile.check", profile="path")
def check(profile: str | Path) -> list[str]:
    """Find all that is missing or wrong in a profile.

    Parameters
    ----------
    profile : str or Path
        A name of ``moesim list hardware``, or a path.

    Returns
    -------
    list of str
        One line each; empty if it is complete.
    """
    return find_problems(str(profile), "profile check")


@checked("profile.compare")
def compare(a: Machine, b: Machine, *, model: Model = "mixtral-8x7b") -> Study:
    """Put what two machines cost next to each other.

    Parameters
    ----------
    a, b : str, Path, mapping or HardwareProfile
        As of `moesim.load_hardware`.
    model : str, Path, mapping or ModelSpec
        Whose experts and dense part are costed.

    Returns
    -------
    Study
        ``table``, ``text()`` and ``save(folder)``.
    """
    from moesim.live.profiler.show import compare as rows_of
    from moesim.live.profiler.show import table

    one, two = (each if isinstance(each, HardwareProfile) else load_hardware(each, "profile compare") for each in (a, b))
    rows = rows_of(one, two, _model(model))
    text = partial(table, rows, one.name, two.name)
    return Study(rows, [], "profile compare", rows, text, lambda: {"compare.csv": text(Format.CSV).encode()})
