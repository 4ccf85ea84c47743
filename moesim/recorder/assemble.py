"""From recordings to a trace, and what its header says about where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from moesim.recorder import loading
from moesim.recorder.detect import weights_formula
from moesim.recorder.options import RecordOptions
from moesim.recorder.prompts import Prompt, file_sha256
from moesim.recorder.recording import Recorder, Recording
from moesim.recorder.signals import SignalFacts
from moesim.trace import GateInputs, Signal, Trace

RECORDER = "moesim.recorder 2"


def to_trace(recordings: Sequence[Recording], n_experts: int, facts: dict[str, SignalFacts], header: dict[str, Any]) -> Trace:
    """Put recordings together as a trace."""
    starts = np.cumsum([0, *(len(r.tokens) for r in recordings)])[:-1]
    signals = {}
    for name, fact in facts.items():
        having = [(r.signals[name], start) for r, start in zip(recordings, starts, strict=True) if name in r.signals]
        if having:
            rows = [start + part.first_row + np.arange(len(part.scores)) for part, start in having]
            ids = [part.ids for part, _ in having if part.ids is not None]
            scores = np.concatenate([part.scores for part, _ in having])
            signals[name] = Signal(
                name, np.concatenate(rows).astype(np.int32), scores, np.concatenate(ids) if ids else None, **asdict(fact)
            )
    kept = [(r.inputs, start) for r, start in zip(recordings, starts, strict=True) if r.inputs is not None]
    inputs = None
    if kept:
        rows = [start + np.arange(len(values)) for values, start in kept]
        inputs = GateInputs(np.concatenate(rows).astype(np.int32), np.concatenate([values for values, _ in kept]))

    def of_rows(arrays: list[NDArray[Any] | None]) -> NDArray[Any] | None:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present) if len(present) == len(arrays) else None

    return Trace.build(
        experts=np.concatenate([r.experts for r in recordings]),
        weights=np.concatenate([r.weights for r in recordings]),
        scores=of_rows([r.scores for r in recordings]),
        embeddings=of_rows([r.embeddings for r in recordings]),
        inputs=inputs,
        n_prompt=[r.n_prompt for r in recordings],
        n_decode=[r.n_decode for r in recordings],
        n_experts=n_experts,
        model=str(header["model"]),
        label="measured",
        signals=signals,
        header=header,
    )


def request_entry(prompt: Prompt, n_decode: int) -> dict[str, Any]:
    """Say in a header which request was recorded."""
    hashes = {"text_sha256": prompt.text_sha256, "tokens_sha256": prompt.tokens_sha256}
    return {**hashes, "n_prompt": len(prompt.tokens), "n_decode": n_decode}


def model_facts(recorder: Recorder, quantised: dict[str, Any] | None) -> dict[str, Any]:
    """Say in a header which model was recorded, and by what."""
    model = recorder.model
    return {
        "architecture": model.config.model_type,
        "revision": getattr(model.config, "_commit_hash", None) or "local",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": quantised,
        "config_sha256": loading.config_sha256(model),
        "routers_sha256": loading.routers_sha256(recorder.routers),
        "recorder": RECORDER,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def trace_header(options: RecordOptions, facts: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Make the header of a trace, but for its requests."""
    greedy = options.temperature == 0
    nucleus = f", top-p {options.top_p:g}" if options.top_p < 1 else ""
    files = {"prompts": options.prompts, "calibration_prompts": options.calibrate, "calibration_file": options.calibration}
    alone = ", requests with a shadow one at a time" if options.shadows and options.batch_size > 1 else ""
    rule = recorder.gates[0].rule
    in_groups = f", in the best {rule.groups[1]} of {rule.groups[0]} groups" if rule.groups[0] > rule.groups[1] else ""
    how = {
        "sampling": "greedy" if greedy else f"temperature {options.temperature:g}{nucleus}, seeded per request",
        "batching": f"{options.batch_size} at a time{alone}, padded on the left; no row of padding is recorded",
        "ends": f"after {options.max_new_tokens} tokens" + ("" if options.ignore_eos else " or at the end of text"),
    }
    if options.load.stream_layers:
        how = {
            "sampling": f"none: the texts are given; the last {options.max_new_tokens} tokens of each count as generated",
            "batching": "one text at a time through one layer after another, all its tokens at once",
            "ends": "with the text",
        }
    return {
        **facts,
        "model": options.name or Path(options.load.model).name,
        "hidden": recorder.gates[0].weight.shape[1],
        "score_function": rule.score,
        "ranked_by": f"score{f' + {rule.correction}' if rule.correction else ''}{in_groups}",
        "weight_formula": weights_formula(recorder.model),
        "seed": options.seed,
        **how,
        **{name: {"file": path.name, "sha256": file_sha256(path)} for name, path in files.items() if path is not None},
    }


def resolved_options(
    options: RecordOptions, facts: dict[str, Any], prompts: Sequence[Prompt], calibration: Sequence[Prompt]
) -> dict[str, Any]:
    """List everything that the bytes of the trace depend on, by the name of its option."""
    newer = {"--keep-embeddings": options.embeddings, "--stream-layers": options.load.stream_layers}
    newer = {name: value for name, value in newer.items() if value}  # older recordings, begun without a word of it, go on
    return {
        "model": options.name or Path(options.load.model).name,
        **{f"model's {name}": value for name, value in facts.items()},
        "--prompts": file_sha256(options.prompts),
        "prompts' tokens": [prompt.tokens_sha256 for prompt in prompts],
        "--calibrate": None if options.calibrate is None else file_sha256(options.calibrate),
        "calibration's tokens": [prompt.tokens_sha256 for prompt in calibration],
        "--calibration": None if options.calibration is None else file_sha256(options.calibration),
        "--device-map": options.load.device_map,
        "--max-new-tokens": options.max_new_tokens,
        "--ignore-eos": options.ignore_eos,
        "--temperature": options.temperature,
        "--top-p": options.top_p,
        "--seed": options.seed,
        "--batch-size": options.batch_size,
        "--scores": options.scores,
        "--lookahead": options.lookahead,
        "--signal-requests": options.signal_requests,
        "--keep-inputs": options.input_requests,
        "--shadow": list(options.shadows),
        **newer,
    }
