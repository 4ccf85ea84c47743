"""``moesim profile``: write, measure, check, show and compare profiles of machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moesim.cli.help import Commands
from moesim.cli.options import Overwrite, Printed, name_or_mapping
from moesim.cli.outputs import show as print_table
from moesim.core.limits import BITS, COUNT, PROCESSES, REPEATS
from moesim.core.table import Format
from moesim.core.text import say, shown_lines

app = Commands(help="Write, measure, show and compare profiles of machines.")
# Each command imports the function that it calls: it needs every policy.


def _option(*names: str, help: str, least: int | None = None, most: float | None = None, default: bool | str = True) -> Any:
    return typer.Option(*names, help=help, min=least, max=most, show_default=default)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Of the profile, such as mybox.")],
    pcie: Annotated[
        str | None, typer.Option(metavar="LINK|RATE", help="Of each GPU: 4x16, B450, OCuLink; or its rate, such as 25GB/s.")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an expert's copy to the GPU, such as 14.2ms; instead of --pcie.")
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(metavar="CPU|TIME", help="'ryzen 5 5600', 60GB/s; or the time of an expert: '1.5ms + 400us/token'."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="GPU|TIME", help="'rtx 3060', '2x rtx 3090'; or the time of an expert: 200us.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of the GPU's memory, such as 936GB/s.", show_default="that of --gpu's experts"),
    ] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, such as 12GiB.")] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the host, such as '2x32 ddr4-3200' or 64GiB.")
    ] = None,
    disk: Annotated[str | None, typer.Option(metavar="KIND", help="Of the drive: nvme5, nvme4, nvme3, sata, hdd.")] = None,
    system: Annotated[
        str | None, typer.Option("--os", metavar="NAME", help="windows, linux, macos, wsl2.", show_default="linux")
    ] = None,
    paste: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE|-",
            help="Outputs of nvidia-smi, lscpu, nvbandwidth, MLC and others, in any order; options win.",
        ),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="MODEL",
            help="Whose expert the times are of: a name, or {base: NAME, expert_bits: 4}.",
            show_default="{base: mixtral-8x7b, expert_bits: 4}",
        ),
    ] = None,
    source: Annotated[
        Literal["published", "spec-sheet", "derived", "assumed"], typer.Option(help="Label of all these numbers.")
    ] = "assumed",
    ref: Annotated[
        str | None, typer.Option(help="Where they are from, such as 'Paper, Table 3'.", show_default="typed in")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Where to write it.", show_default="hardware_profiles/NAME.yaml")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a profile from parts, or numbers that a paper prints. It names what is assumed.

    Example: moesim profile new mybox --gpu "rtx 3060" --cpu "ryzen 5 5600" --ram "2x32 ddr4-3200" --pcie 4x16
    """
    from moesim import profile as profiles

    found = profiles.new(
        name, gpu=gpu, cpu=cpu, ram=ram, pcie=pcie, disk=disk, os=system, from_=paste, transfer=transfer, gpu_memory=gpu_memory,
        vram=vram, for_=None if of is None else name_or_mapping(of, "--for"), source=source, ref=ref, out=out,
        overwrite=overwrite,
    )  # fmt: skip
    for line in [*found.notes, f"wrote {found.path}"]:
        say(line)


@app.command("check")
def check(profile: Annotated[str, typer.Argument(metavar="NAME|FILE.yaml", help="A profile.")]) -> int:
    """Print all that is missing or wrong in a profile, a line each.

    A complete profile: what is assumed, and which policies cannot copy.

    Exit code 0: complete; 2: something is missing or wrong.

    Example: moesim profile check rtx3090-epyc7532
    """
    from moesim import profile as profiles

    found = profiles.check(profile)
    print_table(shown_lines(found.text()))
    return 2 if found.problems else 0


@app.command("detect")
def detect(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Where to write it, named like the machine.", show_default="printed"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a profile of this machine by its parts. Nothing is measured.

    Example: moesim profile detect --out mybox.yaml
    """
    from moesim import profile as profiles

    found = profiles.detect(out=out, overwrite=overwrite)
    if found.path is None:
        sys.stdout.write(shown_lines(found.text()))
    else:
        say(f"wrote {found.path}")
    for line in found.notes:
        say(line)


@app.command("measure")
def measure(
    name: Annotated[str, typer.Argument(help="Of the profile, such as my-machine.")],
    model: Annotated[
        list[str] | None,
        _option(
            help="Built-in name, config.json or YAML of a model; several times; 'all': every built-in one.",
            default="mixtral-8x7b, deepseek-v2-lite",
        ),
    ] = None,
    bits: Annotated[
        list[float] | None,
        _option(help="Of the experts' weights; several times.", least=0, most=BITS.most, default="each model's own"),
    ] = None,
    mode: Annotated[str, _option(help="quick: up to 64 rows; full: up to 4096.")] = "full",
    disk: Annotated[Path | None, _option(help="Folder on the disk to measure.", default="that of --out, without a GPU")] = None,
    no_disk: Annotated[bool, _option("--no-disk", help="Measure no disk.")] = False,
    gpu: Annotated[int | None, _option(help="Which GPU.", least=0, most=PROCESSES.most, default="the first, if any")] = None,
    no_gpu: Annotated[bool, _option("--no-gpu", help="Measure cores, memory and disk only.")] = False,
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
    """Measure this machine and write it as a profile.

    It has the costs of experts, dense parts and copies.

    Random weights take as long as trained ones. No setting of the machine is changed. After a kill, the same command goes
    on where it was.

    Example: moesim profile measure my-machine --mode quick --memory 2GB --dry-run
    """
    from moesim import profile as profiles

    found = profiles.measure(
        name, model=[name_or_mapping(one, "--model") for one in model or ("mixtral-8x7b", "deepseek-v2-lite")], bits=bits or (),
        mode=mode, disk=disk, no_disk=no_disk, gpu=gpu, no_gpu=no_gpu, memory=memory, repeats=repeats, seed=seed, out=out,
        resume=resume, overwrite=overwrite, dry_run=dry_run, progress=progress,
    )  # fmt: skip
    sys.stdout.write(found.text() if dry_run else shown_lines(found.text()))


@app.command("show")
def show(
    profile: Annotated[str, typer.Argument(metavar="NAME|FILE.yaml", help="A profile.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Whose experts are computed and sent; a name, or {base: NAME, expert_bits: 4}; several times."),
    ] = None,
) -> None:
    """Print a profile: its numbers and their sources.

    Example: moesim profile show rtx3090-epyc7532
    """
    from moesim import profile as profiles

    print_table(profiles.show(profile, model=[name_or_mapping(one, "--model") for one in model or ()]).text())


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
    from moesim import profile as profiles

    sys.stdout.write(profiles.compare(a, b, model=name_or_mapping(model, "--model")).text(form))
