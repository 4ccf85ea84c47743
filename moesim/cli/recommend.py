"""``moesim recommend``: which placement suits a machine, how sure that is, and what to type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Engine, HitRate, Jobs, name_or_mapping, with_engine
from moesim.core.files import check_own_folder
from moesim.core.limits import BITS, TOKENS
from moesim.core.processes import prepare_processes
from moesim.core.table import Format
from moesim.core.text import say


def recommend(
    model: Annotated[str, typer.Option(help="Name, path of a config.json, folder or GGUF file, or {base: NAME, field: value}.")],
    hardware: Annotated[str, typer.Option(help="Name or path of a profile, or {base: NAME, key: value}.")],
    vram: Annotated[str | None, typer.Option(help="Memory of the GPU, such as 12GiB.", show_default="the profile's")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of the host, such as 64GiB.", show_default="the profile's")] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            min=0, max=BITS.most, help="Bits per weight.", show_default="4.5 for models given with 16, else the model's"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Prompt tokens.")] = 512,
    decode: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Tokens to decode.")] = 128,
    context: Annotated[
        int | None,
        typer.Option(min=1, max=TOKENS.most, help="Tokens of a request in the KV cache.", show_default="prompt and decode"),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Name or path of a trace.", show_default="as of compare")] = None,
    hit_rate: HitRate = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Observed speeds, as of 'moesim calibrate': identifies the machine first.")
    ] = None,
    engine: Engine = None,
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
    prepare_processes(jobs)  # what it imports takes as long as the import below
    from moesim.api.answers import recommend as search

    advice = search(
        name_or_mapping(model, "recommend: --model"),
        with_engine(name_or_mapping(hardware, "recommend: --hardware"), engine),
        vram=vram, ram=ram, bits=bits, batch=batch, prompt=prompt, decode=decode, context=context, trace=trace, hit_rate=hit_rate,
        calibrate=calibrate, lossy=lossy, jobs=jobs,
    )  # fmt: skip
    sys.stdout.write(advice.text(form))
    if out is not None:
        advice.save(out)
        say(f"wrote {out}")
    return 0
