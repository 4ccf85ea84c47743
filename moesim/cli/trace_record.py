"""``moesim trace record``: record the routing of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.outputs import check_out
from moesim.core.limits import COUNT, LAYERS, TOKENS
from moesim.core.text import say, shown
from moesim.errors import ConfigError
from moesim.recorder.model_name import check_model_name
from moesim.trace import SUFFIX, Trace
from moesim.trace.shards import parts_folder

_MODEL, _PROMPTS, _SIGNALS, _DECODING = "Model", "Prompts", "What to record", "Decoding"
_HOTTEST = 1000  # beyond, all tokens are as likely as each other


def trace_record(
    model: Annotated[str, typer.Argument(help="Folder of a transformers model, or its name on the Hugging Face hub.")],
    prompts: Annotated[Path, typer.Option(help="Text file, a prompt a line, or JSON Lines (.jsonl).", rich_help_panel=_PROMPTS)],
    out: Annotated[Path, typer.Option("--out", help="Trace to write; must end in .safetensors.")],
    name: Annotated[str | None, typer.Option(help="Name of the model in the trace.", rich_help_panel=_MODEL)] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=_MODEL)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.", rich_help_panel=_MODEL)] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread layers over GPUs and CPU; or a device.", rich_help_panel=_MODEL)
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="For weights, of each GPU, such as 22GiB.", rich_help_panel=_MODEL)
    ] = None,
    cpu_memory: Annotated[
        str | None, typer.Option(help="For weights, of the host, such as 60GiB.", rich_help_panel=_MODEL)
    ] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Quantise linear layers with bitsandbytes (CUDA).", rich_help_panel=_MODEL)
    ] = False,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", help="The same to 8 bits.", rich_help_panel=_MODEL)] = False,
    field: Annotated[str, typer.Option(help="Field of each JSON line that is the prompt.", rich_help_panel=_PROMPTS)] = "prompt",
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="The text file is one prompt.", rich_help_panel=_PROMPTS)
    ] = False,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put each prompt through the tokenizer's template.", rich_help_panel=_PROMPTS)
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, max=COUNT.most, help="Read so many prompts.", rich_help_panel=_PROMPTS)
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=COUNT.most, help="Cut longer prompts.", rich_help_panel=_PROMPTS)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=0, max=TOKENS.most, help="Tokens to generate for each prompt.", rich_help_panel=_DECODING)
    ] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on at the end of a text.", rich_help_panel=_DECODING)
    ] = False,
    temperature: Annotated[float, typer.Option(max=_HOTTEST, help="0: greedy.", rich_help_panel=_DECODING)] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens of this share.", rich_help_panel=_DECODING)
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=COUNT.most, help="Of the sampling.", rich_help_panel=_DECODING)] = 0,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=TOKENS.most, help="Requests at once; requests with a shadow one at a time.", rich_help_panel=_DECODING
        ),
    ] = 1,
    scores: Annotated[
        bool | None,
        typer.Option(
            "--scores/--no-scores",
            help="Scores of all experts.  [default: if there are 16 or fewer]",
            rich_help_panel=_SIGNALS,
            show_default=False,
        ),
    ] = None,
    lookahead: Annotated[
        int, typer.Option(min=0, max=LAYERS.most, help="Record gate_next1 to gate_nextN.", rich_help_panel=_SIGNALS)
    ] = 3,
    signal_requests: Annotated[
        int | None, typer.Option(min=0, max=TOKENS.most, help="Signals for the first N requests only.", rich_help_panel=_SIGNALS)
    ] = None,
    keep_inputs: Annotated[
        str, typer.Option(metavar="N|all", help="Keep what the routers read, for the first N requests.", rich_help_panel=_SIGNALS)
    ] = "0",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Other prompts, to calibrate with first: tables and the signal residual.", rich_help_panel=_SIGNALS),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Trace or tables with a calibration made before.", rich_help_panel=_SIGNALS)
    ] = None,
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:T1:KV1]",
            help="Signal of a copy quantised to int8, nf4 or fp16, aligned every so many tokens; may be given several times.",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is there.")] = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar on a terminal.")] = True,
) -> None:
    """Record which experts a model's routers choose, while it reads prompts and generates.

    What is finished is kept in OUT.parts: after a kill, the same command goes on where it was.

    Example: moesim trace record MODEL --prompts prompts.txt --out mine.safetensors
    """
    if load_in_4bit and load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit: expected one of them, got both")
    check_out(out, suffix=SUFFIX, overwrite=overwrite or os.path.isdir(parts_folder(out)))  # a recording that was begun goes on
    check_model_name(model)
    try:
        from moesim.recorder.loading import LoadOptions, quiet
        from moesim.recorder.options import RecordOptions
        from moesim.recorder.session import record_trace
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"moesim trace record: expected the package {error.name}, got none; pip install 'moesim[record]'"
        ) from None
    options = RecordOptions(
        load=LoadOptions(
            model=model,
            revision=revision,
            dtype=dtype,
            device_map=device_map,
            gpu_memory=gpu_memory,
            cpu_memory=cpu_memory,
            bits=4 if load_in_4bit else 8 if load_in_8bit else None,
        ),
        prompts=prompts,
        out=out,
        name=name,
        prompt_field=field,
        whole_file=whole_file,
        chat_template=chat_template,
        limit=limit,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        scores=scores,
        lookahead=lookahead,
        signal_requests=signal_requests,
        input_requests=_count(keep_inputs),
        calibrate=calibrate,
        calibration=calibration,
        shadows=tuple(shadow or ()),
        overwrite=overwrite,
        progress=progress,
        warn=lambda text: say(f"moesim: warning: {text}"),
    )
    quiet()
    path = record_trace(options)
    found = Trace.read(path, verify=False)
    print(f"{shown(str(path))}: {found.n_rows} rows of {found.n_requests} requests, {path.stat().st_size / 1e6:.1f} MB")


def _count(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or len(text) > len(str(COUNT.most)):
        raise ConfigError(f"--keep-inputs: expected a number of requests or 'all', got '{text}'")
    return int(text)
