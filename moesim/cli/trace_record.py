"""``moesim trace record``: record the routing of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.core.limits import COUNT, LAYERS, TOKENS
from moesim.core.text import shown

_HOTTEST = 1000  # beyond, all tokens are as likely as each other


def trace_record(
    model: Annotated[str, typer.Argument(help="A transformers model's folder, or name on the hub.")],
    prompts: Annotated[Path, typer.Option(help="Text (a prompt a line) or JSONL.")],
    out: Annotated[Path, typer.Option("--out", help="Trace to write, NAME.safetensors.")],
    name: Annotated[str | None, typer.Option(help="Name of the model in the trace.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="Or float32, float16, bfloat16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="auto (over GPUs and CPU), or a device.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="For weights, of each GPU, such as 22GiB.")] = None,
    cpu_memory: Annotated[str | None, typer.Option(help="For weights, of the host, such as 60GiB.")] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Quantise linear layers with bitsandbytes (CUDA).")
    ] = False,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", help="The same to 8 bits.")] = False,
    stream_layers: Annotated[
        bool,
        typer.Option("--stream-layers", help="One layer in memory; generates nothing."),
    ] = False,
    memory: Annotated[str | None, typer.Option(help="Host memory with --stream-layers, such as 6GB.")] = None,
    field: Annotated[str, typer.Option(help="JSON field of the prompt.")] = "prompt",
    whole_file: Annotated[bool, typer.Option("--whole-file", help="The text file is one prompt.")] = False,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Apply the tokenizer's chat template.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, max=COUNT.most, help="Read so many prompts.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, max=COUNT.most, help="Cut longer prompts.")] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=TOKENS.most,
            help="Tokens to generate per prompt.",
        ),
    ] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on at the end of a text.")] = False,
    temperature: Annotated[float, typer.Option(max=_HOTTEST, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=COUNT.most, help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests at once; 1 with --shadow.")] = 1,
    scores: Annotated[
        bool | None,
        typer.Option("--scores/--no-scores", help="Scores of all experts.", show_default="up to 16"),
    ] = None,
    lookahead: Annotated[int, typer.Option(min=0, max=LAYERS.most, help="Record gate_next1 to gate_nextN.")] = 3,
    signal_requests: Annotated[
        int | None, typer.Option(min=0, max=TOKENS.most, help="Signals for the first N requests only.")
    ] = None,
    keep_inputs: Annotated[str, typer.Option(metavar="N|all", help="Keep inputs of routers.")] = "0",
    keep_embeddings: Annotated[bool, typer.Option("--keep-embeddings", help="Keep embeddings, which identify tokens.")] = False,
    calibrate: Annotated[Path | None, typer.Option(help="Other prompts, to calibrate with first.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Trace or tables calibrated before.")] = None,
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:T1:KV1]",
            help="Signal of a copy in int8, nf4 or fp16; repeat it.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing trace.")] = False,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar.")] = True,
) -> None:
    """Record which experts a model's routers choose.

    What is finished is kept in OUT.parts: after a kill, the same command goes on where it was.

    Example: moesim trace record MODEL --prompts prompts.txt --out mine.safetensors
    """
    from moesim.api.recording import record  # what knows every policy takes a while to import

    found = record(
        model, prompts, out, name=name, revision=revision, dtype=dtype, device_map=device_map, gpu_memory=gpu_memory,
        cpu_memory=cpu_memory, load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit, stream_layers=stream_layers, memory=memory,
        field=field, whole_file=whole_file, chat_template=chat_template, limit=limit, max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, temperature=temperature, top_p=top_p, seed=seed,
        batch_size=batch_size, scores=scores, lookahead=lookahead, signal_requests=signal_requests,
        keep_inputs=int(keep_inputs) if keep_inputs.isdecimal() else keep_inputs, keep_embeddings=keep_embeddings,
        calibrate=calibrate, calibration=calibration, shadow=shadow or (), overwrite=overwrite, progress=progress,
    )  # fmt: skip
    print(shown(found.text().removeprefix("wrote ").rstrip("\n")))
