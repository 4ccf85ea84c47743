"""Recording of a model's routing, and a predictor learned from it, from Python. Both need PyTorch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.outputs import all_or_none, check_out, note_written
from moesim.api.studies import Study
from moesim.api.traces import WrittenTrace, read_named
from moesim.core.limits import COUNT
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.text import note
from moesim.errors import ConfigError, install, unknown_name
from moesim.recorder import check_model_name
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.shards import parts_folder


@checked(
    "trace.record", model="path", limit="count", max_prompt_tokens="count", max_new_tokens="whole", seed="whole",
    batch_size="count", lookahead="whole", signal_requests="whole",
)  # fmt: skip
def record(
    model: str | Path, prompts: str | Path, out: str | Path, *, name: str | None = None, revision: str | None = None,
    dtype: str = "auto", device_map: str | None = None, gpu_memory: str | None = None, cpu_memory: str | None = None,
    load_in_4bit: bool = False, load_in_8bit: bool = False, stream_layers: bool = False, memory: str | None = None,
    field: str = "prompt", whole_file: bool = False, chat_template: bool = False, limit: int | None = None,
    max_prompt_tokens: int | None = None, max_new_tokens: int = 128, ignore_eos: bool = False, temperature: float = 0.0,
    top_p: float = 1.0, seed: int = 0, batch_size: int = 1, scores: bool | None = None, lookahead: int = 3,
    signal_requests: int | None = None, keep_inputs: int | str = 0, keep_embeddings: bool = False,
    calibrate: str | Path | None = None, calibration: str | Path | None = None, shadow: Sequence[str] = (),
    overwrite: bool = False, progress: bool = True,
) -> WrittenTrace:  # fmt: skip
    """Record which experts a model's routers choose. After a stop, the same call goes on where it was.

    Parameters
    ----------
    model : str or Path
        A transformers model's folder, or its name on the hub.
    prompts : str or Path
        Text, a prompt a line, or JSONL.
    out : str or Path
        The trace to write, ``NAME.safetensors``.
    name : str, optional
        Of the model in the trace.
    revision : str, optional
        Branch, tag or commit on the hub.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        Of the weights.
    device_map : str, optional
        ``"auto"`` (over GPUs and CPU), or a device.
    gpu_memory, cpu_memory : str, optional
        For weights, of each GPU and of the host, such as ``"22GiB"``.
    load_in_4bit, load_in_8bit : bool
        Quantise linear layers with bitsandbytes.
    stream_layers : bool
        Keep one layer in memory, `memory` at most, such as ``"6GB"``; generates nothing.
    field : str
        JSON field of the prompt.
    whole_file, chat_template : bool
        The text file is one prompt; apply the tokenizer's chat template.
    limit, max_prompt_tokens : int, optional
        Read so many prompts; cut longer ones.
    max_new_tokens, ignore_eos
        Tokens to generate per prompt, and whether to go on at the end of a text.
    temperature, top_p, seed
        Of the sampling; 0: greedy.
    batch_size : int
        Requests at once.
    scores : bool, optional
        Keep the scores of all experts; default: of up to 16.
    lookahead : int
        Record the signals gate_next1 to gate_nextN.
    signal_requests : int, optional
        Signals for so many first requests only.
    keep_inputs : int or "all"
        Requests whose router inputs are kept.
    keep_embeddings : bool
        Keep embeddings, which identify tokens.
    calibrate, calibration : str or Path, optional
        Other prompts to calibrate with first; or a trace or tables calibrated before.
    shadow : sequence of str
        Signals of copies of the model, ``"int8"``, ``"nf4"`` or ``"fp16"``, perhaps with ``":T1:KV1"``.
    overwrite, progress : bool
        Replace a trace that is there; show a bar.

    Returns
    -------
    WrittenTrace
        ``trace``, ``paths`` and ``text()``.

    Raises
    ------
    InputError
        If packages are absent, the model or a prompt cannot be used, or a file is at `out`.
    """
    path = Path(out)
    if load_in_4bit and load_in_8bit:
        raise ConfigError("--load-in-4bit and --load-in-8bit: expected one of them, got both; leave one out")
    check_out(path, suffix=SUFFIX, overwrite=overwrite or os.path.isdir(parts_folder(path)))  # a recording that was begun goes on
    check_model_name(str(model))
    try:
        from moesim.recorder.loading import LoadOptions, quiet
        from moesim.recorder.session import RecordOptions, record_trace
    except ModuleNotFoundError as error:
        raise ConfigError(f"moesim trace record: expected the package {error.name}, got none; {install('record')}") from None
    load = LoadOptions(
        model=str(model), revision=revision, dtype=dtype, device_map=device_map, gpu_memory=gpu_memory, cpu_memory=cpu_memory,
        stream_layers=stream_layers, memory=memory, bits=4 if load_in_4bit else 8 if load_in_8bit else None,
    )  # fmt: skip
    options = RecordOptions(
        load=load, prompts=Path(prompts), out=path, name=name, prompt_field=field, whole_file=whole_file,
        chat_template=chat_template, limit=limit, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos, temperature=temperature, top_p=top_p, seed=seed, batch_size=batch_size, scores=scores,
        lookahead=lookahead, signal_requests=signal_requests, input_requests=_kept(keep_inputs), embeddings=keep_embeddings,
        calibrate=None if calibrate is None else Path(calibrate), calibration=None if calibration is None else Path(calibration),
        shadows=tuple(shadow), overwrite=overwrite, progress=progress, warn=lambda text: note(f"moesim: warning: {text}"),
    )  # fmt: skip
    quiet()
    written = record_trace(options)
    found = Trace.read(written, verify=False)
    size = written.stat().st_size / 1e6
    return WrittenTrace([written], f": {found.n_rows} rows of {found.n_requests} requests, {size:.1f} MB")


def _kept(keep_inputs: int | str) -> int | None:
    if keep_inputs == "all":
        return None
    if isinstance(keep_inputs, bool) or not isinstance(keep_inputs, int) or not 0 <= keep_inputs <= COUNT.most:
        raise ConfigError(f"--keep-inputs: expected a number of requests or 'all', got {str(keep_inputs)!r}")
    return keep_inputs


GROUPS = ("eighths", "fitted")


@checked("trace.learn", predictor="path", epochs="count", seed="whole", batch="count")
def learn(
    calibration: str | Path | Trace, for_: str | Path | Trace, out: str | Path, *, predictor: str | Path | None = None,
    epochs: int = 30, seed: int = 0, groups: str = "eighths", options: Mapping[str, Any] | None = None, batch: int = 64,
    overwrite: bool = False, progress: bool = True,
) -> Study:  # fmt: skip
    """Train PreScope's learned predictor on one trace, and write another with the signal ``learned``.

    Parameters
    ----------
    calibration, for_ : str, Path or Trace
        The trace to train on, and that to predict for; both have gate inputs, and no request in common.
    out : str or Path
        Where to write the latter with the signal, ``NAME.safetensors``.
    predictor : str or Path, optional
        Where to keep the trained networks.
    epochs : int
        Passes over the calibration tokens.
    seed : int
        Of initial weights, noise and order.
    groups : {"eighths", "fitted"}
        First and last eighth of the layers, or fitted to gate reuse.
    options : mapping, optional
        Other sizes and rates, such as ``{"width": 256}``.
    batch : int
        Tokens of a batch, for the accuracy of the busiest experts.
    overwrite, progress : bool
        Replace files that are there; show a bar.

    Returns
    -------
    Study
        ``table``, the accuracy on requests that it has not seen, and ``text()``; ``notes`` what was written.

    Raises
    ------
    InputError
        If PyTorch is absent, the traces do not fit each other, or a file is there.
    """
    path, kept = Path(out), None if predictor is None else Path(predictor)
    if groups not in GROUPS:
        raise ConfigError(f"--groups: {unknown_name('word', groups, GROUPS)}")
    check_out(path, suffix=SUFFIX, overwrite=overwrite)
    if kept is not None:
        check_out(kept, overwrite=overwrite, option="--predictor")
        if kept.resolve() == path.resolve():
            raise ConfigError(f"--predictor {kept}: expected another file than --out, got the same; choose another name")
    try:
        from moesim.recorder import learned  # PyTorch takes seconds to import
    except ModuleNotFoundError as error:
        raise ConfigError(f"moesim trace learn: expected the package {error.name}, got none; {install('record')}") from None

    kinds = {one.name: str(one.type) for one in fields(learned.LearnedOptions)}
    chosen = learned.LearnedOptions(**{**_sizes(options or {}, kinds), "epochs": epochs, "seed": seed})
    (ours, place), (theirs, other) = ((read_named(one)[0], _place(one)) for one in (calibration, for_))
    learned.check_same_model(ours, theirs, (place, other))
    learned.check_no_shared_requests(ours.header, theirs.header, (place, other))
    with Progress(ours.n_layers - 1, enabled=progress) as bar:
        bar.describe("training, layer by layer")
        predictors = learned.train_on(
            ours, chosen, fit_groups=groups == "fitted", place=place, on_layer=lambda layer, loss: bar.advance(1)
        )
    result = learned.with_signal(theirs, learned.learned_signal(predictors, theirs, other), predictors)
    rows = learned.accuracy(result, ours, predictors.groups, batch)
    with all_or_none(path, *([] if kept is None else [kept])):
        result.write(path)
        if kept is not None:
            learned.save_predictors(predictors, kept)
            note_written([kept], "trace learn")
    return Study(
        predictors, [], "trace learn", rows, lambda form: _accuracy_table(rows, form),
        lambda: {"accuracy.csv": render_records(rows, Format.CSV).encode()}, [f"wrote {out}"],
    )  # fmt: skip


def _place(trace: str | Path | Trace) -> str:
    return trace.model if isinstance(trace, Trace) else str(find_trace(trace))


def _sizes(given: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Check other options than epochs and seed, which have arguments of their own."""
    known = sorted(set(kinds) - {"epochs", "seed"})
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"--option {name}={value}: expected NAME=VALUE with one of {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int if kinds[name] == "int" else int | float):
            raise ConfigError(f"--option {name}={value}: expected {kinds[name]} after '{name}=', got {value!r}")
    return {name: value if kinds[name] == "int" else float(value) for name, value in given.items()}


def _accuracy_table(rows: list[dict[str, Any]], form: Format) -> str:
    if form.for_programs:
        return render_records(rows, form)
    columns = list(rows[0])
    cells = [
        ["-" if row[c] != row[c] else f"{row[c]:z.4f}" if isinstance(row[c], float) else str(row[c]) for c in columns]
        for row in rows
    ]
    return render(columns, cells, form, columns[2:])
