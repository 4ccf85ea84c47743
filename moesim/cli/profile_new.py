"""``moesim profile new``: a profile from a few numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from moesim.cli.options import Overwrite, name_or_mapping
from moesim.cli.outputs import all_or_none, check_out, note_written
from moesim.core.files import write_bytes
from moesim.core.text import say
from moesim.errors import ConfigError, HardwareError
from moesim.hardware import load_hardware
from moesim.hardware.load import short_form, short_text
from moesim.hardware.problems import reading_remarks
from moesim.hardware.short import expert_of

FOLDER = Path("hardware_profiles")
"""Where profiles are found by name."""


def new(
    name: Annotated[str, typer.Argument(help="Of the profile, such as mybox.")],
    pcie: Annotated[str | None, typer.Option(metavar="RATE", help="Of a copy to the GPU, such as 25GB/s.")] = None,
    transfer: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an expert's copy to the GPU, such as 14.2ms; instead of --pcie.")
    ] = None,
    cpu: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an expert on the CPU: '1.5ms + 400us/token', or 2ms/token.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an expert on the GPU: 200us (few tokens), or '200us + 10us/token'.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of the GPU's memory, such as 936GB/s.", show_default="that of --gpu's experts"),
    ] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, such as 12GiB.")] = None,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the host, such as 64GiB.")] = None,
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
    """Write a profile from the numbers that a paper prints; all else is derived from them, or a default that says so.

    Example: moesim profile new mybox --pcie 25GB/s --cpu "1.5ms + 400us/token" --gpu 200us --vram 12GiB --ram 64GiB
    """  # fmt: skip
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"profile new: expected a name of letters, digits, dots and dashes, got '{name}'; choose another")
    path = out or FOLDER / f"{name}.yaml"
    numbers = {"pcie": pcie, "transfer": transfer, "cpu": cpu, "gpu": gpu, "gpu_memory": gpu_memory, "vram": vram, "ram": ram}
    form = short_form(name, numbers, None if of is None else name_or_mapping(of, "--for"), source, ref)
    try:
        machine = load_hardware(form, "profile new")
    except HardwareError as error:
        raise _in_options(error, source) from None
    check_out(path, suffix=".yaml", overwrite=overwrite)
    with all_or_none(path):
        write_bytes(path, short_text(form).encode())
        note_written([path], "profile new")
    say(f"times are of {expert_of(form)}" + ("; --for names another" if of is None else ""))
    if gpu_memory is None:
        rate = machine.devices["gpu0"].memory_bytes_per_s
        say(f"attention reads at {rate / 1e9:.4g} GB/s, as an expert in {gpu}; --gpu-memory gives the GPU's own rate")
    for remark in reading_remarks(machine):
        say(remark)
    say(f"wrote {path}")


def _in_options(error: HardwareError, source: str) -> ConfigError:
    """Name options instead of keys."""
    options = [_option(problem, source) for problem in error.problems or (str(error),)]
    return ConfigError("profile new: " + " | ".join(dict.fromkeys(options)))


def _option(problem: str, source: str) -> str:
    key, colon, said = problem.partition(": ")
    if colon and said.endswith(f"beside source: {source}, got nothing; add it"):
        return f"--source {source}: expected --ref with what the numbers are from, got nothing; add it"
    key = key.removeprefix("numbers.").replace("_", "-")
    return f"--{key}: {said}" if colon and re.fullmatch(r"[a-z-]+", key) and key != "numbers" else problem
