"""``moesim recommend``: an engine's best setting on a machine, how fast it is, and what would help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import HitRate, Jobs, name_or_mapping
from moesim.core.files import check_own_folder
from moesim.core.limits import TOKENS
from moesim.core.table import Format
from moesim.core.text import say


def recommend(
    model: Annotated[
        str | None,
        typer.Option(
            help="Name, path of a config.json, folder or GGUF file, or {base: NAME, field: value}.",
            show_default="that of --calibrate",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Parts joined by +, name or path of a profile, or {base: NAME, key: value}.", show_default="that of --calibrate"
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="Whose command is wanted; NAME@BUILD has a build's costs.")] = "llama.cpp",
    context: Annotated[
        int | None,
        typer.Option(min=1, max=TOKENS.most, help="Tokens of a request for which there must be room.", show_default="16384"),
    ] = None,
    bits: Annotated[
        str,
        typer.Option(
            metavar="QUANT|BITS",
            help="Such as Q4_K_M, 4.5, or 4.85/5.35 for experts/rest.",
            show_default="Q4_K_M, or the model's",
        ),
    ] = "",
    vram: Annotated[str | None, typer.Option(help="Memory of the GPU, such as 12GiB.", show_default="the profile's")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of the host, such as 64GiB.", show_default="the profile's")] = None,
    batch: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Prompt tokens.")] = 512,
    decode: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Tokens to decode where engines are compared.")] = 128,
    calibrate: Annotated[
        Path | None, typer.Option(help="Observed speeds, as of 'moesim calibrate': identifies the machine first.")
    ] = None,
    all_engines: Annotated[bool, typer.Option("--all-engines", help="Compare placements of all engines, too.")] = False,
    long: Annotated[bool, typer.Option("--long", help="Print all that is known.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out other engines and prompts of other machines.")] = False,
    trace: Annotated[str | None, typer.Option(help="Routing where engines are compared.", show_default="as of compare")] = None,
    hit_rate: HitRate = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: nothing is written.")] = None,
    jobs: Jobs = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the answer.")] = Format.TABLE,
) -> int:
    """Find the best setting for a model on a machine.

    Prints the command, its speed with an interval, and what would help.

    Example: moesim recommend --model qwen3-30b-a3b --hardware rtx2070s-i5-12400f --quick
    """
    if out is not None:
        check_own_folder(out, "recommend")
    from moesim.api.answers import recommend as search
    from moesim.studies.advice.screen import output

    answer = search(
        None if model is None else name_or_mapping(model, "recommend: --model"),
        None if hardware is None else name_or_mapping(hardware, "recommend: --hardware"), engine=engine,
        vram=vram, ram=ram, bits=bits, batch=batch, prompt=prompt, decode=decode, context=context, trace=trace, hit_rate=hit_rate,
        calibrate=calibrate, all_engines=all_engines, quick=quick, jobs=jobs,
    )  # fmt: skip
    sys.stdout.write(output(answer, form, long=long))
    if out is not None:
        answer.save(out)
        say(f"wrote {out}")
    return 0
