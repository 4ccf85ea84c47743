"""Measure this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.outputs import check_out_folder
from moesim.core.text import note
from moesim.core.units import parse_bytes
from moesim.live.kernels import require_torch
from moesim.model import ModelSpec, builtin_models, load_model

Model = str | Path | Mapping[str, Any] | ModelSpec


@checked("profile.measure", memory="size", repeats="count")
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
        Measure nothing.

    Returns
    -------
    list of Path, or str
        The profiles; with `dry_run` the plan.

    Raises
    ------
    InputError
        If PyTorch is absent, the memory does not suffice, or a profile of the name is there.
    """
    from moesim.live.profiler.request import describe_plan, prepare, requested

    named = list(model) if isinstance(model, list | tuple) else [model]
    models = builtin_models().values() if named == ["all"] else map(_model, named)
    if not dry_run:
        check_out_folder(Path(out), option="profile.measure: out:")
        require_torch()
    prepared = prepare(
        requested(
            name, tuple(models), tuple(bits), mode, None if memory is None else parse_bytes(memory, "profile.measure: memory"),
            disk=None if disk is None else Path(disk), no_disk=no_disk, gpu=gpu, no_gpu=no_gpu, out=Path(out), seed=seed,
            repeats=repeats, resume=resume, overwrite=overwrite, dry_run=dry_run,
        )
    )  # fmt: skip
    if dry_run:
        return describe_plan(prepared)
    from moesim.live.profiler.measure import measure as carry_out  # PyTorch takes seconds to import

    return carry_out(prepared, progress=progress, warn=lambda text: note(f"moesim: warning: {text}"))


def _model(model: Any) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_model(model, "profile.measure: model")
