"""``moesim recommend``: which placement suits a machine, how sure that is, and what to type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.advice.folder import write_folder
from moesim.advice.recommend import recommend as search
from moesim.advice.setting import Asked
from moesim.advice.show import output
from moesim.commands.runs import Jobs
from moesim.limits import BITS, TOKENS
from moesim.output_folder import check_own_folder
from moesim.table import Format
from moesim.text import say
from moesim.yaml_reader import read_yaml_value


def recommend(
    hardware: Annotated[str, typer.Option(help="Name or path of a profile, or {base: NAME, key: value}.")],
    model: Annotated[str | None, typer.Option(help="Name, path of a config.json, or {base: NAME, field: value}.")] = None,
    vram: Annotated[str | None, typer.Option(help="Memory of the GPU, such as 12GiB. [default: the profile's]")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of the host, such as 64GiB. [default: the profile's]")] = None,
    bits: Annotated[
        float | None,
        typer.Option(min=0, max=BITS.most, help="Bits per weight. [default: 4.5 for models given with 16, else the model's]"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Prompt tokens.")] = 512,
    decode: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Tokens to decode.")] = 128,
    context: Annotated[
        int | None, typer.Option(min=1, max=TOKENS.most, help="Tokens of a request in the KV cache. [default: prompt and decode]")
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Name or path of a trace. [default: one that fits]")] = None,
    gguf: Annotated[Path | None, typer.Option(help="Instead of --model: a GGUF file says shapes and bytes.")] = None,
    lossy: Annotated[bool, typer.Option("--lossy", help="Policies that change what the model computes as well.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: nothing is written.")] = None,
    jobs: Jobs = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the advice.")] = Format.TABLE,
) -> int:
    """Find the best placement of a model's experts on a machine, with an interval, runners-up and flags to type.

    Example: moesim recommend --model mixtral-8x7b --hardware rtx3090-epyc7532 --vram 20GiB --ram 64GiB --decode 16
    """
    if out is not None:
        check_own_folder(out, "recommend")
    asked = Asked(
        _value(model, "--model"),
        _value(hardware, "--hardware"),
        vram,
        ram,
        bits,
        batch,
        prompt,
        decode,
        context,
        trace,
        gguf,
        lossy,
    )
    advice = search(asked, jobs=jobs, progress=True)
    sys.stdout.write(output(advice, form))
    if out is not None:
        write_folder(advice, out)
        say(f"wrote {out}")
    return 0


def _value(text: str | None, option: str) -> Any:
    """Read a mapping in braces; everything else is a name or a path."""
    return read_yaml_value(text, f"recommend: {option}") if text is not None and text.lstrip().startswith("{") else text
