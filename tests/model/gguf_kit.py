"""GGUF files made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")


Q8_0, F16, F32, Q4_K = (getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "F16", "F32", "Q4_K"))


class Writer:
    """Writes tensors of zeros, of given shapes (width of a row last, as NumPy has it) and types."""

    def __init__(self, path: Path, architecture: str, **metadata: Any) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self.architecture = architecture
        self.bytes: dict[str, int] = {}
        for key, value in metadata.items():
            self.writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)

    def add(self, name: str, *shape: int, kind: Any = F16) -> Writer:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
        if kind in (F16, F32):
            self.writer.add_tensor(name, np.zeros(shape, np.float16 if kind == F16 else np.float32))
        else:
            self.writer.add_tensor(name, raw, raw_dtype=kind)
        self.bytes[name] = raw.nbytes
        return self

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


HIDDEN, HEADS, KV, HEAD, VOCAB = 256, 4, 2, 64, 96


def attention(w: Writer, layer: int) -> None:
    w.add(f"blk.{layer}.attn_q.weight", HEADS * HEAD, HIDDEN).add(f"blk.{layer}.attn_k.weight", KV * HEAD, HIDDEN)
    w.add(f"blk.{layer}.attn_v.weight", KV * HEAD, HIDDEN).add(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD)
    w.add(f"blk.{layer}.attn_norm.weight", HIDDEN, kind=F32).add(f"blk.{layer}.ffn_norm.weight", HIDDEN, kind=F32)


def experts(w: Writer, layer: int, n: int, width: int, kind: Any = Q8_0, down: Any = None) -> None:
    w.add(f"blk.{layer}.ffn_gate_inp.weight", n, HIDDEN, kind=F32)
    w.add(f"blk.{layer}.ffn_gate_exps.weight", n, width, HIDDEN, kind=kind)
    w.add(f"blk.{layer}.ffn_up_exps.weight", n, width, HIDDEN, kind=kind)
    w.add(f"blk.{layer}.ffn_down_exps.weight", n, HIDDEN, width, kind=down or kind)


def ends(w: Writer, output: bool = True) -> None:
    w.add("token_embd.weight", VOCAB, HIDDEN).add("output_norm.weight", HIDDEN, kind=F32)
    if output:
        w.add("output.weight", VOCAB, HIDDEN, kind=Q8_0)


def basic(path: Path, architecture: str, n_layers: int, **more: int) -> Writer:
    facts = {
        "block_count": n_layers, "embedding_length": HIDDEN, "feed_forward_length": 512,
        "expert_count": 8, "expert_used_count": 2,
        "attention__head_count": HEADS, "attention__head_count_kv": KV,
    }  # fmt: skip
    return Writer(path, architecture, **facts | more)


def whole(path: Path, architecture: str = "llama") -> bytes:
    w = basic(path, architecture, 1)
    attention(w, 0)
    experts(w, 0, 8, 64)
    ends(w)
    w.close()
    return path.read_bytes()
