"""``moesim profile``: write, measure, show and compare profiles of machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.cli.options import Printed, name_or_mapping
from moesim.cli.outputs import check_out_folder
from moesim.cli.profile_check import check
from moesim.cli.profile_detect import detect
from moesim.cli.profile_new import new
from moesim.core.limits import BITS, COUNT, PROCESSES, REPEATS
from moesim.core.table import Format
from moesim.core.text import say, shown
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError
from moesim.hardware import load_hardware
from moesim.live.kernels import require_torch
from moesim.live.profiler.show import compare as compare_profiles
from moesim.live.profiler.show import page
from moesim.live.profiler.show import table as comparison_table
from moesim.model import ModelSpec, builtin_models, load_model

app = typer.Typer(
    no_args_is_help=True, help="Write, measure, show and compare profiles of machines.", pretty_exceptions_enable=False
)


def _model(text: str) -> ModelSpec:
    return load_model(name_or_mapping(text, "--model"), "--model")


app.command("new")(new)
app.command("check")(check)
app.command("detect")(detect)

_ALL = "all"
_WHAT, _HOW = "What to measure", "How"


def _option(
    *names: str, help: str, panel: str = _HOW, least: int | None = None, most: float | None = None, default: bool | str = True
) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, min=least, max=most, show_default=default)


@app.command("measure")
def measure(
    name: Annotated[str, typer.Argument(help="Of the profile, such as my-machine.")],
    model: Annotated[
        list[str] | None,
        _option(
            help="Built-in name, config.json or YAML of a model; several times; 'all': every built-in one.",
            panel=_WHAT,
            default="mixtral-8x7b, deepseek-v2-lite",
        ),
    ] = None,
    bits: Annotated[
        list[float] | None,
        _option(help="Of the experts' weights; several times.", panel=_WHAT, least=0, most=BITS.most, default="each model's own"),
    ] = None,
    mode: Annotated[str, _option(help="quick: up to 64 rows; full: up to 4096.", panel=_WHAT)] = "full",
    disk: Annotated[
        Path | None, _option(help="Folder on the disk to measure.", panel=_WHAT, default="that of --out, without a GPU")
    ] = None,
    no_disk: Annotated[bool, _option("--no-disk", help="Measure no disk.", panel=_WHAT)] = False,
    gpu: Annotated[
        int | None, _option(help="Which GPU.", panel=_WHAT, least=0, most=PROCESSES.most, default="the first, if any")
    ] = None,
    no_gpu: Annotated[bool, _option("--no-gpu", help="Measure cores, memory and disk only.", panel=_WHAT)] = False,
    memory: Annotated[str | None, _option(help="Host memory to use, such as 8GB.", default="half of what is available")] = None,
    repeats: Annotated[
        int | None, _option(help="Of each probe, at least 5.", least=1, most=REPEATS.most, default="quick 5, full 7")
    ] = None,
    seed: Annotated[int, _option(help="Of the order and the random weights.", least=0, most=COUNT.most)] = 0,
    out: Annotated[Path, _option("--out", help="Folder of profiles.")] = Path("hardware_profiles"),
    resume: Annotated[bool, _option("--resume/--no-resume", help="Go on with what was interrupted.")] = True,
    overwrite: Annotated[bool, _option("--overwrite", help="Replace a profile that is there.")] = False,
    dry_run: Annotated[bool, _option("--dry-run", help="Print the plan; measure nothing.")] = False,
    progress: Annotated[bool, _option("--progress/--no-progress", help="Show a bar on a terminal.")] = True,
) -> None:
    """Measure what experts, dense parts and copies cost on this machine, and write it as a profile.

    Random weights take as long as trained ones. No setting of the machine is changed. After a kill, the same command goes
    on where it was.

    Example: moesim profile measure my-machine --mode quick --memory 2GB --dry-run
    """
    for what, both in (("disk", disk is not None and no_disk), ("gpu", gpu is not None and no_gpu)):
        if both:
            raise ConfigError(f"--{what} and --no-{what}: expected one of them, got both")
    named = model or ["mixtral-8x7b", "deepseek-v2-lite"]
    models = tuple(builtin_models().values()) if named == [_ALL] else tuple(_model(each) for each in named)
    budget = None if memory is None else parse_bytes(memory, "--memory")
    if not dry_run:
        check_out_folder(out, option="--out")
        require_torch()
    from moesim.live.kernels.host import has_torch
    from moesim.live.profiler.request import Request, describe_plan, find_gpu, prepare

    which = None if no_gpu else find_gpu(gpu)
    if disk is None and which is None and not no_disk:
        if not dry_run:
            out.mkdir(parents=True, exist_ok=True)
        disk = out if out.is_dir() else Path()
    request = Request(
        name, models, tuple(bits or ()), mode, budget, disk, which, out, seed, repeats, resume=resume, overwrite=overwrite
    )
    prepared = prepare(request)
    if dry_run:
        sys.stdout.write(describe_plan(prepared))
        if which is None and not no_gpu and not has_torch():
            say("PyTorch is not installed, so that no GPU was looked for")
        return
    from moesim.live.profiler.measure import measure as carry_out  # PyTorch takes seconds to import

    paths = carry_out(prepared, progress=progress, warn=lambda text: say(f"moesim: warning: {text}"))
    for path in paths:
        print(shown(str(path)))


@app.command("show")
def show(
    profile: Annotated[str, typer.Argument(metavar="NAME|FILE.yaml", help="A profile.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Whose experts are computed and sent; a name, or {base: NAME, expert_bits: 4}; several times."),
    ] = None,
) -> None:
    """Print what a profile says, and how well that is founded.

    Example: moesim profile show rtx3090-epyc7532
    """
    models = [_model(each) for each in model or ()]
    sys.stdout.write(page(load_hardware(profile, "profile show"), models))


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A profile.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    model: Annotated[str, typer.Option(help="Whose experts and dense part are costed.")] = "mixtral-8x7b",
    form: Printed = Format.TABLE,
) -> None:
    """Print two profiles side by side.

    Example: moesim profile compare rtx3090-epyc7532 zen4-2core
    """
    one, two = load_hardware(a, "profile compare"), load_hardware(b, "profile compare")
    rows = compare_profiles(one, two, _model(model))
    sys.stdout.write(comparison_table(rows, one.name, two.name, form))
