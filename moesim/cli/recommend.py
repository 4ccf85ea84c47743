"""``moesim recommend``: which placement suits a machine, how sure that is, and what to type."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.options import Jobs, name_or_mapping
from moesim.core.atomic import write_bytes
from moesim.core.limits import BITS, TOKENS
from moesim.core.output_folder import check_own_folder
from moesim.core.processes import prepare_processes
from moesim.core.progress import telling
from moesim.core.table import Format, render_records
from moesim.core.text import say

if TYPE_CHECKING:
    from moesim.studies.advice.setting import Asked


def recommend(
    hardware: Annotated[str, typer.Option(help="Name or path of a profile, or {base: NAME, key: value}.")],
    model: Annotated[str | None, typer.Option(help="Name, path of a config.json, or {base: NAME, field: value}.")] = None,
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
    trace: Annotated[str | None, typer.Option(help="Name or path of a trace.", show_default="one that fits")] = None,
    gguf: Annotated[Path | None, typer.Option(help="Instead of --model: a GGUF file says shapes and bytes.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Observed speeds, as of 'moesim calibrate': identifies the machine first.")
    ] = None,
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
    prepare_processes(jobs)  # what it imports takes as long as the imports below
    from moesim.studies.advice.folder import write_folder
    from moesim.studies.advice.recommend import recommend as search
    from moesim.studies.advice.setting import Asked
    from moesim.studies.advice.show import output

    base = name_or_mapping(hardware, "recommend: --hardware")
    read_model = None if model is None else name_or_mapping(model, "recommend: --model")
    asked = Asked(read_model, base, vram, ram, bits, batch, prompt, decode, context, trace, gguf, lossy)
    if calibrate is not None:
        return _identified(
            calibrate, [read_model] if isinstance(read_model, str) and gguf is None else [], asked, out, jobs, form
        )
    advice = search(asked, jobs=jobs, progress=True)
    sys.stdout.write(output(advice, form))
    if out is not None:
        write_folder(advice, out)
        say(f"wrote {out}")
    return 0


def _identified(file: Path, models: list[str], asked: Asked, out: Path | None, jobs: int | None, form: Format) -> int:
    """Identify the machine, search on it, and add the curve over its settings."""
    from moesim.studies.advice.curve import check_machine, curve, curve_pictures, curve_records, curve_text, with_buffers
    from moesim.studies.advice.folder import write_folder
    from moesim.studies.advice.recommend import recommend as search
    from moesim.studies.advice.setting import look_up
    from moesim.studies.advice.show import output
    from moesim.studies.identify.identify import identify
    from moesim.studies.identify.reading import read_observations
    from moesim.studies.identify.report import remarks

    rows = read_observations(file, models)
    with telling(lines=True) as tell, tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        found = identify(asked.hardware, rows, leave_out=False, tell=tell)
        raw = {**found.raw, "name": f"{found.predictor.machine.base.name}-identified"}
        profile = write_bytes(Path(folder) / "identified.yaml", _dumped(raw))
        asked = replace(asked, hardware=str(profile))
        tell("placements")
        setting = look_up(asked, Path(folder))
        check_machine(setting)
        contents = _dumped(with_buffers(raw, setting))
        write_bytes(profile, contents)
        advice = search(asked, jobs=jobs, progress=not sys.stderr.isatty())  # a terminal has room for one thing that moves
        tell("settings of llama.cpp")
        points = curve(setting, found)
    said = remarks(found, [])
    observed = curve_text(points, setting, form) + "\n" + "".join(f"{'- ' * (form is Format.MD)}{one}\n" for one in said)
    text = output(advice, form, observed).replace(str(profile), profile.name)  # the folder is gone when it is read
    added = {"identified": said, "curve": curve_records(points)}
    if form is Format.JSON:
        text = json.dumps({**json.loads(text), **added}, indent=2) + "\n"
    sys.stdout.write(text)
    if out is not None:
        more = {"identified.yaml": contents, "curve.csv": render_records(curve_records(points), Format.CSV).encode()}
        more |= curve_pictures(points, setting, found)
        image = "![speed over --n-cpu-moe by context](curve.png)"
        page = f"{curve_text(points, setting, Format.MD)}\n{image}\n\n" + "".join(f"- {one}\n" for one in said)
        write_folder(advice, out, more, added=added, observed=page)
        say(f"wrote {out}")
    return 0


def _dumped(raw: Any) -> bytes:
    import yaml  # takes a while to import, and only this writes it

    return yaml.safe_dump(raw, sort_keys=False, width=120).encode()
