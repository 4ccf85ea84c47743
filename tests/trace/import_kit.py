"""Small files in every format that can be imported, all with the same routing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import InputError
from moesim.trace import Trace
from moesim.trace.formats.contract import Options
from moesim.trace.formats.importing import Imported, import_trace
from moesim.trace.formats.tabular_export import export_csv, export_parquet

LAYERS, EXPERTS, TOP_K = 3, 7, 2
PROMPT, DECODE = 3, 4
ROWS = PROMPT + DECODE


def routing(n_rows: int = ROWS, seed: int = 0, layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K) -> np.ndarray:
    """Distinct ids, (n_rows, layers, top_k)."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(experts), (n_rows, layers, 1)), axis=2)[..., :top_k].copy()


IDS = routing()
WEIGHTS = np.random.default_rng(1).random(IDS.shape).astype(np.float16)


def trace(**changes: Any) -> Trace:
    """The trace that all of these files hold."""
    given: dict[str, Any] = {"experts": IDS, "weights": WEIGHTS, "n_prompt": [PROMPT], "n_decode": [DECODE]}
    given |= {"n_experts": EXPERTS, "model": "tiny", "label": "measured"}
    return Trace.build(**(given | changes))


def write_npy(path: Path) -> None:
    np.save(path, IDS.astype(np.int32))


def write_vllm_npz(path: Path) -> None:
    np.savez_compressed(path, routed_experts=IDS.astype(np.uint8), prompt_token_ids=np.arange(PROMPT))


def response(ids: np.ndarray, prompt: int = PROMPT) -> dict[str, Any]:
    """What an SGLang server answers; one token more is generated than is run through the model."""
    text = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    meta = {"id": "x", "prompt_tokens": prompt, "completion_tokens": len(ids) - prompt + 1, "routed_experts": text}
    return {"text": "...", "meta_info": meta}


def write_sglang(path: Path) -> None:
    path.write_text(json.dumps(response(IDS)) + "\n")


def write_positions(path: Path) -> None:
    """Prefill layer by layer, at -3, -2, -1; decode token by token, from 0."""
    lines = ["pos,layer,id0,id1"]
    lines += [f"{t - PROMPT},{layer},{IDS[t, layer, 0]},{IDS[t, layer, 1]}" for layer in range(LAYERS) for t in range(PROMPT)]
    later = ((t, layer) for t in range(PROMPT, ROWS) for layer in range(LAYERS))
    lines += [f"{t - PROMPT},{layer},{IDS[t, layer, 0]},{IDS[t, layer, 1]}" for t, layer in later]
    path.write_text("\n".join(lines) + "\n")


def write_passes(path: Path) -> None:
    """The prompt in one pass over the layers, then a pass a token."""
    spans = [range(PROMPT), *([t] for t in range(PROMPT, ROWS))]
    cells = [(layer, IDS[t, layer, rank]) for span in spans for layer in range(LAYERS) for t in span for rank in range(TOP_K)]
    path.write_text("layer,expert\n" + "".join(f"{layer},{expert}\n" for layer, expert in cells))


def bigmoe_lines(last_layer_of_prompt: bool = True) -> list[str]:
    """A route trace; in a real one the last layer holds the final prompt token only."""
    lines = ["# route_trace v1", f"# model=/x/tiny.gguf arch=a n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={TOP_K}"]
    lines += [f"# layer={layer} expert_bytes={1000 + layer} dense_bytes=50" for layer in range(LAYERS)]
    lines += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    order = [(t, layer) for layer in range(LAYERS) for t in range(PROMPT)]
    order += [(t, layer) for t in range(PROMPT, ROWS) for layer in range(LAYERS)]
    for t, layer in order:
        if last_layer_of_prompt or t >= PROMPT - 1 or layer < LAYERS - 1:
            for slot in range(TOP_K):
                cell = (t, layer, slot)
                lines.append(f"0,{int(t >= PROMPT)},{t},{layer},{slot},{IDS[cell]},{float(WEIGHTS[cell])!r},0,{1000 + layer}")
    return lines


def write_bigmoe(path: Path) -> None:
    path.write_text("\n".join(bigmoe_lines()) + "\n")


def json_rows() -> list[dict[str, Any]]:
    places = [(t, layer) for t in range(ROWS) for layer in range(LAYERS)]
    return [
        {"layer_idx": layer, "token_idx": t, "selected_ids": IDS[t, layer].tolist(), "gate_weights": WEIGHTS[t, layer].tolist()}
        for t, layer in places
    ]


def write_json_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in json_rows()))


def write_npz(path: Path) -> None:
    np.savez(path, topk_ids=IDS.astype(np.int8), topk_probs=WEIGHTS, seq_offsets=np.array([0, ROWS]), names=np.array(["first"]))


def write_token_lines(path: Path) -> None:
    """A line about the file, then a line for each token with all its layers."""
    meta = {"type": "meta", "model_id": "tiny", "num_experts": EXPERTS, "top_k": TOP_K}
    lines = [meta, *({"token": t, "experts": IDS[t].tolist(), "weights": WEIGHTS[t].tolist()} for t in range(ROWS))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_cells(path: Path) -> None:
    places = [(t, layer) for layer in range(LAYERS) for t in range(ROWS)]
    lines = [f'{t},{layer},"{IDS[t, layer].tolist()}"' for t, layer in places]
    path.write_text("\n".join(["token_idx,layer_id,topk_ids", *lines, ""]))


def write_routes(path: Path) -> None:
    """Lines of a pass in a layer: the prompt at once, then token by token; slots of a cache are not read."""
    spans = [range(PROMPT), *([t] for t in range(PROMPT, ROWS))]
    cells = [(number, layer, [one for t in span for one in IDS[t, layer]], len(span))
             for number, span in enumerate(spans) for layer in range(LAYERS)]  # fmt: skip
    lines = [f"route {n} {layer} {TOP_K} {many} {' '.join(f'{one}:{one - 3}' for one in ids)}" for n, layer, ids, many in cells]
    path.write_text("\n".join([*lines, ""]))


def strata_words(windows: list[tuple[list[int], int, int]], tags: bool = True) -> bytes:
    """Windows of tokens, how many drafts were accepted, and the phase; a token of -1 is a draft that was rejected."""

    def record(layer: int, ids: Any, weights: Any) -> bytes:
        return np.array([layer, len(ids), *ids], "<i4").tobytes() + np.asarray(weights, "<f4").tobytes()

    def tag(number: int, *values: int) -> bytes:
        return record(number, values, [0] * len(values))

    found = tag(-2, 2) + tag(-4, 0, 1, 2) + tag(-3, 0) if tags else b""
    for number, (tokens, accepted, phase) in enumerate(windows):
        for layer in range(LAYERS):
            for t in tokens:
                found += record(layer, IDS[t, layer] if t >= 0 else [0, 1], WEIGHTS[t, layer])
        found += tag(-1, number, len(tokens), accepted, phase) if tags else b""
    return found


def write_strata(path: Path) -> None:
    path.write_bytes(strata_words([([0, 1, 2], 0, 0), ([3, 4, -1], 1, 1), ([5, -1], 0, 1), ([6], 0, 1)]))


def recorded(mode: int, tokens: list[int], number: int, positions: list[int] | None = None) -> dict[str, Any]:
    """A pass as SGLang's recorder keeps it: a dense layer first, and room for four experts; ids are those of copies."""
    import torch

    ids = torch.full((LAYERS + 1, len(tokens), 4), -1, dtype=torch.int32)
    ids[1:, :, :TOP_K] = torch.tensor(IDS[tokens].transpose(1, 0, 2).astype(np.int32)) + 1
    return {"forward_pass_id": number, "rank": 0, "input_ids": tokens, "positions": positions or tokens,
            "extend_seq_lens": [len(tokens)] if mode == 1 else None, "forward_mode": mode, "topk_ids_of_layer": ids,
            "misc_objects": [], "global_physical_count": torch.ones((LAYERS + 1, EXPERTS + 1), dtype=torch.int32)}  # fmt: skip


def save_recorded(path: Path, passes: list[dict[str, Any]]) -> None:
    import torch

    copies = torch.tensor([EXPERTS - 1, *range(EXPERTS)]).repeat(LAYERS + 1, 1)  # expert 6 has two copies
    torch.save({"records": passes, "last_physical_to_logical_map": copies}, path)


def write_recorded(path: Path) -> None:
    save_recorded(path, [recorded(1, list(range(PROMPT)), 0), *(recorded(2, [t], t) for t in range(PROMPT, ROWS))])


def write_csv(path: Path) -> None:
    export_csv(trace(), path)


def write_parquet(path: Path) -> None:
    export_parquet(trace(), path)


def refused(call: Callable[[], Any], *words: str) -> str:
    """Call what must fail with one line that holds all the words."""
    with pytest.raises(InputError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    return text


@dataclass(frozen=True)
class Source:
    """How a file is written, and what the user has to say about it."""

    format: str
    file: str
    write: Callable[[Path], None]
    weighted: bool
    options: dict[str, Any] = field(default_factory=dict)
    label: str | None = None

    def make(self, folder: Path) -> Path:
        path = folder / self.file
        self.write(path)
        return path

    def load(self, path: Path, out: Path, **changes: Any) -> Imported:
        return import_trace([path], out, Options(**(self.options | changes)), form=self.format, label=self.label)

    def refused(self, path: Path, out: Path, *words: str, **changes: Any) -> str:
        """Import what must fail with one line that holds all the words; nothing is written."""
        before = sorted(path.parent.rglob("*"))
        text = refused(lambda: self.load(path, out, **changes), *words)
        assert sorted(path.parent.rglob("*")) == before
        return text


_KNOWN = {"n_experts": EXPERTS, "model": "tiny"}
_PROMPT = _KNOWN | {"n_prompt": (PROMPT,)}
_AXES = {"axes": ("tokens", "layers", "ids")}
_MAPPED = {"columns": {"expert": "topk_ids", "weight": "topk_probs", "offsets": "seq_offsets", "name": "names"}}
SOURCES = {
    "vllm-npy": Source("vllm", "a.npy", write_npy, False, _PROMPT),
    "vllm-npz": Source("vllm", "a.npz", write_vllm_npz, False, _KNOWN),
    "sglang": Source("sglang", "a.json", write_sglang, False, _KNOWN | {"n_layers": LAYERS, "top_k": TOP_K}),
    "llama-cpp-positions": Source("llama-cpp", "a.csv", write_positions, False, _KNOWN),
    "llama-cpp-passes": Source("llama-cpp", "a.csv", write_passes, False, _PROMPT | {"top_k": TOP_K}),
    "llama-cpp-routes": Source("llama-cpp", "a.txt", write_routes, False, _PROMPT),
    "strata": Source("strata", "a.bin", write_strata, True, _KNOWN),
    "token-lines": Source("jsonl", "a.jsonl", write_token_lines, True, {"n_prompt": (PROMPT,)}, "measured"),
    "cells": Source("csv", "a.csv", write_cells, False, _PROMPT, "measured"),
    "bigmoe": Source("bigmoe-route", "a.csv", write_bigmoe, True),
    "jsonl": Source("jsonl", "a.jsonl", write_json_lines, True, _PROMPT, "measured"),
    "npz": Source("npz", "a.npz", write_npz, True, _PROMPT | _MAPPED | _AXES, "measured"),
    "csv": Source("csv", "a.csv", write_csv, True),
    "parquet": Source("parquet", "a.parquet", write_parquet, True),
}
if find_spec("torch"):
    SOURCES["sglang-recorder"] = Source("sglang-recorder", "a.pt", write_recorded, False, _KNOWN)
