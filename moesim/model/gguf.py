"""Read a model from a GGUF file: layers from tensors, and what a token keeps from metadata.

Bytes are added up, so that mixed types count as they are.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from moesim.core.limits import EXPERTS, LAYERS, WIDTH
from moesim.errors import ModelError
from moesim.model.check import is_int
from moesim.model.gguf_header import Tensor, read_header
from moesim.model.parts import Block, Mixer, Shape, Store, compressed, reusing
from moesim.model.spec import ModelSpec, of_shape

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_CLASSES: Final = (  # of tensors of a block, the first that matches
    ("experts", re.compile(r"ffn_(?:gate|up|down|gate_up)_(?:ch)?exps\.|ffn_(?:gate|up|down)\.\d+\.")),
    ("shared", re.compile(r"ffn_(?:gate|up|down|gate_up)_shexp\.|ffn_gate_inp_shexp\.")),
    (
        "router",
        re.compile(
            r"ffn_gate_inp|exp_probs_b|ffn_gate_tid2eid|ffn_latent|ffn_exp|\w*norm\w*\.(?:weight|bias)$|layer_output_scale|hc_"
        ),
    ),
    ("dense", re.compile(r"ffn_(?:gate|up|down)\.(?:weight|bias|scale)")),
)
_MIXER_NORM = re.compile(r"attn_(?:q|k|q_a|kv_a|sub|v)_norm|ssm_norm|indexer")
_FULL_EVERY: Final = {
    "gpt-oss": 2, "llama4": 4, "afmoe": 4, "exaone-moe": 4, "cohere2moe": 4, "gemma3": 6, "gemma4": 6, "laguna": 4,
    "deepseek4": 0,
}  # fmt: skip
_CHUNK: Final = {"llama4": 8192}  # tokens that a layer sees at most, where the engine's code has it and no key says it
"""Layers of which the last sees all tokens and the others a window, where the engine's code has it and no key says it."""


class _File:
    """Metadata and tensors of a model, of all its parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = [read_header(part) for part in parts_of(path)]
        self.fields: Mapping[str, Any] = headers[0].fields
        self.tensors: dict[str, Tensor] = {}
        for header in headers:
            self.tensors |= header.tensors
        self.unknown = tuple(dict.fromkeys(kind for header in headers for kind in header.unknown))
        self.whole = all(header.whole for header in headers)
        self.architecture = str(self.fields.get("general.architecture") or "")
        if not self.architecture:
            raise ModelError(f"{path}: general.architecture: expected a text in the metadata, got nothing; choose another file")
        wanted = self.fields.get("split.tensors.count")
        if is_int(wanted) and wanted > len(self.tensors):
            raise ModelError(
                f"{path}: expected {wanted} tensors in all parts of the model, got {len(self.tensors)}; "
                "put the parts, or their headers, into one folder under their names (NAME-00001-of-00002.gguf)"
            )

    def count(self, key: str, default: int | None = None, *, layer: int | None = None, most: float = WIDTH.most) -> int:
        """Return an integer of the architecture's metadata; of a list that of a layer, or the most."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name)
        if isinstance(value, list) and value and all(is_int(one) for one in value):
            value = max(value) if layer is None or layer >= len(value) else value[layer]
        if value is None and default is not None:
            return default
        if not is_int(value) or not 0 <= value <= most:
            raise ModelError(f"{self.path}: {name}: expected an integer from 0 to {most:.0f} in the metadata, got {value!r}")
        return int(value)


def parts_of(path: Path) -> list[Path]:
    """List the files of a model: itself, or all parts of one that is split."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    n_parts = int(found[3])
    paths = [path.with_name(f"{found[1]}-{number:05d}-of-{n_parts:05d}.gguf") for number in range(1, n_parts + 1)]
    if missing := next((part for part in paths if not part.is_file()), None):
        raise ModelError(
            f"{missing}: expected {n_parts} parts of a split GGUF file, got nothing there; put all parts, or the first megabytes "
            "of each, into one folder"
        )
    return paths


def read_gguf(path: Path) -> ModelSpec:
    """Read a model from a GGUF file, the first part of a split one, or the headers alone."""
    file = _File(path)
    predicted = file.count("nextn_predict_layers", 0)
    n_blocks = file.count("block_count", most=LAYERS.most) - predicted
    by_block: dict[int, dict[str, Tensor]] = defaultdict(dict)
    ends: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        if (found := _BLOCK.fullmatch(name)) is None:
            ends[name] = tensor
        elif int(found[1]) < n_blocks:
            by_block[int(found[1])][found[2]] = tensor
    embedding = ends.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path}: expected the tensor token_embd.weight with two axes, got none; fetch the file anew")
    hidden, vocab = embedding.shape
    n_experts = _n_experts(file, by_block)
    first = next((layer for layer in range(n_blocks) if _by_class(by_block[layer])["experts"]), None)
    if n_experts < 1 or first is None:
        raise ModelError(f"{path}: expected tensors of routed experts (blk.N.ffn_down_exps), got none; choose another model")
    routed = by_block[first]
    down = next((t for name, t in routed.items() if name.startswith(("ffn_down_exps.", "ffn_down.0."))), None)
    if down is None or len(down.shape) < 2:
        raise ModelError(f"{path}: expected the tensors ffn_gate, ffn_up and ffn_down of experts, got only some; fetch it anew")
    classes = _by_class(routed)
    experts = sum(tensor.params for _, tensor in classes["experts"])
    shared = sum(tensor.params for _, tensor in classes["shared"])
    router = sum(t.params for name, t in classes["router"] if "norm" not in name and "scale" not in name)
    blocks = [_block(file, layer, by_block[layer], n_experts, router) for layer in range(n_blocks)]
    lookup = [tensor for name, tensor in ends.items() if name.startswith("per_layer_token_embd")]
    output = ends.get("output.weight")
    small = [t for name, t in ends.items() if not name.startswith(("token_embd.", "output.", "per_layer_token_embd", "rope_"))]
    head = [*small, output or embedding]
    notes = ["left out: layers that predict further tokens"] if predicted else []
    notes += [f"{kind} is not known: bytes up to the next tensor" for kind in file.unknown]
    shape = Shape(
        name=_name(file), hidden=hidden, vocab=vocab, blocks=tuple(blocks), n_experts=n_experts,
        top_k=file.count("expert_used_count", most=n_experts), mats=2 + any("gate" in name for name, _ in classes["experts"]),
        expert_width=down.shape[0], expert_input=down.shape[1], expert_params=experts // n_experts,
        router_params=router, shared_params=shared,
        n_shared=_n_shared(file, routed, down.shape[0]), tied=output is None, head_params=sum(tensor.params for tensor in small),
        embedding_bytes=embedding.n_bytes, head_bytes=sum(tensor.n_bytes for tensor in head),
        lookup_params=sum(t.params for t in lookup), lookup_bytes=sum(t.n_bytes for t in lookup),
        notes=tuple(notes),
        source=f"{path.name} (GGUF, {file.architecture}{'' if file.whole else ', header only'})",
    )  # fmt: skip
    if shape.top_k < 1:
        raise ModelError(f"{path}: {file.architecture}.expert_used_count: expected at least 1, got {shape.top_k}")
    return of_shape(shape, _fields(file, routed))


def _fields(file: _File, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return widths and flags of attention of a layer with experts, if of a plain kind."""
    flags: dict[str, Any] = {name: any(tensor in tensors for tensor in wanted) for name, wanted in _FLAGS.items()}
    heads = file.count("attention.head_count") or 1
    key = file.count("attention.key_length", file.count("embedding_length", 0) // heads)
    value, rank = file.count("attention.value_length", key), file.count("attention.kv_lora_rank", 0)
    if rank:
        # Newer files give the lengths of the compressed cache, and those of the heads under names of their own.
        key, value = file.count("attention.key_length_mla", key), file.count("attention.value_length_mla", value)
        rope = file.count("rope.dimension_count", 0)
        if not 0 < rope < key:
            return {}
        return flags | {
            "n_heads": heads, "n_kv_heads": heads, "head_dim": key, "kv_lora_rank": rank, "rope_head_dim": rope,
            "nope_head_dim": key - rope, "v_head_dim": value, "q_lora_rank": file.count("attention.q_lora_rank", 0),
        }  # fmt: skip
    kv = file.count("attention.head_count_kv", heads)
    if "attn_output.weight" not in tensors or not kv or heads % kv or not key:
        return {}
    norm = tensors.get("attn_q_norm.weight")
    kind = "none" if norm is None else "head" if norm.shape[0] == key else "full"
    return flags | {"n_heads": heads, "n_kv_heads": kv, "head_dim": max(key, value), "qk_norm": kind}


_FLAGS: Final = {
    "expert_bias": ["ffn_down_exps.bias"], "router_bias": ["ffn_gate_inp.bias", "exp_probs_b.bias"],
    "qkv_bias": ["attn_q.bias", "attn_qkv.bias"], "out_bias": ["attn_output.bias"], "norm_bias": ["attn_norm.bias"],
    "attention_sinks": ["attn_sinks.weight"], "shared_gate": ["ffn_gate_inp_shexp.weight"],
}  # fmt: skip
"""Fields that a tensor of a block shows."""


def _n_experts(file: _File, by_block: Mapping[int, Mapping[str, Tensor]]) -> int:
    """Return a layer's experts: by its tensors, whatever the metadata has, if one holds all."""
    for tensors in by_block.values():
        for name, tensor in tensors.items():
            if name.startswith("ffn_down_exps.") and len(tensor.shape) == 3 and tensor.shape[2] <= EXPERTS.most:
                return tensor.shape[2]
    return file.count("expert_count", 0, most=EXPERTS.most)


def _name(file: _File) -> str:
    given = file.fields.get("general.name")
    name = given if isinstance(given, str) and given.strip() else _PART.sub(r"\1", file.path.name).removesuffix(".gguf")
    return "-".join(name.lower().split())


def _n_shared(file: _File, tensors: Mapping[str, Tensor], width: int) -> int:
    down = tensors.get("ffn_down_shexp.weight")
    return 0 if down is None else file.count("expert_shared_count", 0) or max(down.shape[0] // width, 1)


def _by_class(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """Sort a block's tensors: experts, shared, router (with norms), dense, mixer."""
    found: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        kind = "mixer" if _MIXER_NORM.match(name) else next((kind for kind, form in _CLASSES if form.match(name)), "mixer")
        found[kind].append((name, tensor))
    return found


def _block(file: _File, layer: int, tensors: Mapping[str, Tensor], n_experts: int, router: int) -> Block:
    classes = _by_class(tensors)
    n_bytes = {kind: sum(tensor.n_bytes for _, tensor in found) for kind, found in classes.items()}
    params = {kind: sum(tensor.params for _, tensor in found) for kind, found in classes.items()}
    norms = max(0, params.get("router", 0) - bool(params.get("experts")) * router)
    mixer = _mixer(file, layer, dict(classes["mixer"]))
    return Block(
        mixer, bool(params.get("experts")), params.get("dense", 0), norms, n_bytes.get("mixer", 0), n_bytes.get("dense", 0),
        n_bytes.get("router", 0), n_bytes.get("shared", 0), -(-n_bytes.get("experts", 0) // n_experts),
    )  # fmt: skip


def _mixer(file: _File, layer: int, tensors: Mapping[str, Tensor]) -> Mixer | None:
    """Return what mixes tokens: its kind from the tensors, what is kept from the metadata."""
    weights = tuple((name, tensor.params) for name, tensor in tensors.items())
    if not weights:
        return None
    if any(name.startswith(("ssm_", "attn_f", "shortconv")) for name in tensors) and "attn_output.weight" not in tensors:
        return _linear(file, layer, tensors, weights)
    heads = file.count("attention.head_count", layer=layer) or 1
    rank = file.count("attention.kv_lora_rank", 0)
    index = any(name.startswith("indexer") for name in tensors)
    read = file.count("attention.indexer.top_k") if index else None
    if rank and any(name.startswith("attn_kv_a") for name in tensors):
        rope = file.count("rope.dimension_count", 0)
        stores = [Store(rank + rope, 2 * heads * (2 * rank + rope), read=read)]
        if index:
            width, n = file.count("attention.indexer.key_length"), file.count("attention.indexer.head_count")
            stores.append(Store(width, 2 * n * width))
        key = file.count("attention.key_length_mla", file.count("attention.key_length", rank + rope))
        value = file.count("attention.value_length_mla", file.count("attention.value_length", key))
        kind, crosses = "latent" if read is None else f"latent, {read} chosen tokens", (heads * key + rank + rope, heads * value)
        return Mixer(kind, weights, tuple(stores), crosses=crosses)
    kv = file.count("attention.head_count_kv", heads, layer=layer)
    window = _window(file, layer)
    ratios = file.fields.get(f"{file.architecture}.attention.compress_ratios")
    if isinstance(ratios, list) and layer < len(ratios) and is_int(ratios[layer]) and window is not None:  # DeepSeek-V4
        names = {"index_heads": "head_count", "index_width": "key_length", "read": "top_k"}
        own = {name: file.count(f"attention.indexer.{key}", 1) for name, key in names.items()}
        width = file.count("attention.key_length")
        return replace(compressed(1, heads, width, 1, 1, 1, window=window, per=max(ratios[layer], 0), **own), weights=weights)
    ending = "_swa" if window is not None and f"{file.architecture}.attention.key_length_swa" in file.fields else ""
    hidden = file.count("embedding_length", 0)
    key = file.count(f"attention.key_length{ending}", hidden // heads)
    value = file.count(f"attention.value_length{ending}", key)
    store = Store(kv * (key + value), 2 * heads * (key + value), kept=window)
    crosses = heads * key + kv * (key + value), heads * value
    found = Mixer("grouped" if window is None else f"grouped, window {window}", weights, (store,), crosses=crosses)
    own_until = file.count("block_count", most=LAYERS.most) - file.count("attention.shared_kv_layers", 0)
    return found if layer < own_until else reusing(found)


def _window(file: _File, layer: int) -> int | None:
    """Return the tokens that a layer sees at most."""
    size = file.count("attention.sliding_window", 0) or file.count("attention.chunk_size", _CHUNK.get(file.architecture, 0))
    if not size:
        return None
    pattern = file.fields.get(f"{file.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list) and pattern:
        return size if pattern[layer % len(pattern)] else None
    every = pattern if is_int(pattern) else _FULL_EVERY.get(file.architecture)
    return size if every is not None and (every == 0 or (layer + 1) % every) else None


def _linear(file: _File, layer: int, tensors: Mapping[str, Tensor], weights: tuple[tuple[str, int], ...]) -> Mixer:
    """Return a mixer with a state: of a state space, a delta net or a convolution."""
    if any(name.startswith("shortconv") for name in tensors):
        kernel, hidden = file.count("shortconv.l_cache"), file.count("embedding_length")
        state = 2 * (kernel - 1) * hidden
        return Mixer("convolution", weights, (), state, 2 * kernel * hidden, (hidden, hidden))
    if (width := file.count("kda.head_dim", 0)) and "ssm_conv1d_q.weight" in tensors:
        inner = file.count("attention.head_count", layer=layer) * width or file.count("embedding_length")
        kernel = file.count("ssm.conv_kernel", 4)
        state = 4 * inner * width + 2 * (kernel - 1) * 3 * inner
        return Mixer("linear, Kimi delta", weights, (), state, 7 * inner * width, (3 * inner, inner))
    inner, n, kernel = file.count("ssm.inner_size"), file.count("ssm.state_size"), file.count("ssm.conv_kernel")
    mixed = inner + 2 * file.count("ssm.group_count", 0) * n
    kind = "linear, gated delta net" if "attn_gate.weight" in tensors or "attn_qkv.weight" in tensors else "state space"
    return Mixer(kind, weights, (), 4 * inner * n + 2 * (kernel - 1) * mixed, 6 * inner * n, (mixed, inner))
