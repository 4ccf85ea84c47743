"""Read a model from the keys of ``config.json``, whatever its name: layers, as parts.

An architecture that needs to be known by name is a row of families.yaml: what its code has and its keys do not say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from moesim.core.limits import EXPERTS, LAYERS, WIDTH
from moesim.errors import ModelError
from moesim.model.check import is_int
from moesim.model.parts import (
    Block,
    Mixer,
    Shape,
    bits_to_bytes,
    block_sparse,
    compressed,
    delta_net,
    grouped,
    kimi_delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    repeated,
    reusing,
    routed_heads,
    short_convolution,
)  # fmt: skip
from moesim.model.quantised import Precision, read_precision
from moesim.model.spec import ModelSpec, of_shape

NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys that hold the language part of a model that also sees or hears."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_attention_groups", "attn_config.kv_n_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_EXPERTS = (
    "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "ffn_config.moe_num_experts",
    "moe_config.moe_num_experts", "moe_num_primary_experts",
)  # fmt: skip
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
    "num_selects", "router_topk", "num_selected_experts", "ffn_config.moe_top_k", "moe_config.moe_top_k",
    "moe_num_active_primary_experts",
)  # fmt: skip
_SPELLINGS = {  # of the keys read here: in files of Mistral and DeepSeek, of Megatron, and of single classes
    "dim": "hidden_size", "inter_dim": "intermediate_size", "hidden_dim": "intermediate_size", "n_inner": "intermediate_size",
    "moe_inter_dim": "moe_intermediate_size", "moe.expert_hidden_dim": "moe_intermediate_size",
    "num_routed_experts": "n_routed_experts", "num_moe_experts": "num_experts", "moe.num_experts": "num_experts",
    "n_activated_experts": "num_experts_per_tok", "moe_router_topk": "num_experts_per_tok",
    "moe.num_experts_per_tok": "num_experts_per_tok", "moe.num_shared_experts": "n_shared_experts",
    "n_dense_layers": "first_k_dense_replace", "moe.first_k_dense_replace": "first_k_dense_replace",
    "moe_layer_layout": "moe_layer_freq", "moe_every_n_layers": "moe_layer_interval", "moe_layer_frequency": "moe_layer_interval",
    "num_query_groups": "num_key_value_heads", "n_head_kv": "num_key_value_heads", "use_qkv_bias": "qkv_bias",
    "qk_layernorm": "use_qk_norm", "moe_router_enable_expert_bias": "use_routing_bias", "tied_embeddings": "tie_word_embeddings",
    "tie_embedding": "tie_word_embeddings", "num_mtp_layers": "num_nextn_predict_layers",
    "indexer_n_heads": "index_n_heads", "indexer_head_dim": "index_head_dim", "indexer_budget": "index_topk_blocks",
    "attention_kv_lora_dim": "kv_lora_rank", "attention_q_lora_dim": "q_lora_rank", "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim", "attention_v_dim": "v_head_dim",
}  # fmt: skip
_EXPERT_WIDTH = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size", "moe_ffn_hidden_size",
    "expert_intermediate_size",
)  # fmt: skip
_EXPERT_INPUT = ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size", "shared_experts_intermediate_size",
)  # fmt: skip
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_DENSE_WIDTH = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "d_ff")
_WINDOW = ("sliding_window", "sliding_window_size", "window_size")

_WORDS = {  # what words of layer_types have in them, the first that matches
    "chunked": re.compile("chunk"), "window": re.compile("slid|window|swa|local"),
    "linear": re.compile("linear|mamba|recurr|conv|kda|ssm|delta|lightning|gla$"),
    "full": re.compile("full|global|attention|hybrid|sparse"),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Facts about an architecture that its code has and its keys lack."""

    qk_norm: str = "none"  # none, head, full, asked: a head where use_qk_norm is true
    qkv_bias: bool = False  # where attention_bias is not given
    out_bias: bool | None = None  # None: as the bias of queries, keys and values
    gate: str = ""  # of the output of attention: "wide" (as many weights as the output), "head"
    full_decay: bool = False  # of Kimi's delta attention, and its gate: not of low rank
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    norm_bias: bool = False
    shared_gate: bool = False
    norms: int = 2  # a layer
    tied: bool = False  # where tie_word_embeddings is not given
    mats: int = 3
    parallel: str = ""  # key of the width of a dense part next to routed experts
    mixers: int = 1  # attention blocks of a layer (LongCat has two, each with a dense part)
    window_in_use: bool = True  # False: `sliding_window` without a list of layers is not used by the code
    routed_heads: bool = False  # attention has experts, too: each token chooses its query heads
    refused: str = ""  # why it cannot be read
    experts_at: str = ""  # name of the routed experts in a layer, where it is not that of the feed-forward part


_PLAIN = Family(qk_norm="asked")


def packaged_table(name: str) -> dict[str, Any]:
    """Read a table of this package, with the safe loader that is compiled where there is one: ten times as fast."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found


@cache
def families() -> Mapping[str, Family]:
    """Read what is known of architectures by name; one without a row is read by its keys alone."""
    return {name: Family(**row) for name, row in packaged_table("families.yaml").items()}


class Keys:
    """Keys of a config, its nested ones with a dot; it notes which were read."""

    def __init__(self, data: Mapping[str, Any], place: object) -> None:
        self.data, self.place = data, place
        self.read: set[str] = set()

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that is there; null counts as absent."""
        for key in keys:
            value: Any = self.data
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                self.read.update(keys)
                return value
        return None

    def wrong(self, key: str, expected: str, got: object) -> ModelError:
        return ModelError(f"{self.place}: {key}: expected {expected}, got {got!r}")

    def count(self, *keys: str, default: int | None = None, least: int = 0, most: float = WIDTH.most) -> int:
        """Return an integer under the first key present; of a list with one value a layer, that value."""
        value = self.get(*keys)
        if isinstance(value, list) and value and all(is_int(one) for one in value):
            if len(set(value)) > 1:
                key = next(key for key in keys if self.get(key) is not None)
                raise self.wrong(key, "one value for all layers", value)
            value = value[0]
        if value is None:
            if default is None:
                raise ModelError(f"{self.place}: expected {' or '.join(keys)}, got none of these keys; add one")
            return default
        if not is_int(value) or not least <= value <= most:
            key = next(key for key in keys if self.get(key) is not None)
            raise self.wrong(key, f"an integer from {least} to {most:.0f}", value)
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def mapping(self, *keys: str) -> dict[str, Any]:
        """Return a mapping under the first key that is there; empty if none is."""
        value = self.get(*keys)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(keys[0], "a mapping", value)
        return dict(value or {})

    def each(self, key: str, n: int) -> list[Any] | None:
        """Return a list of one value a layer; longer ones have layers that predict ahead."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < n:
            raise self.wrong(key, f"a list of {n} values, one a layer", value)
        return value[:n]

    def indices(self, key: str) -> frozenset[int] | None:
        """Return a list of layers, also one written as text."""
        value = self.get(key)
        if isinstance(value, str):
            value = [int(part) if part.strip().isdigit() else part for part in value.split(",")]
        if value is None:
            return None
        if not isinstance(value, list) or not all(is_int(one) for one in value):
            raise self.wrong(key, "a list of layers", value)
        return frozenset(value)


def _nested(data: Mapping[str, Any]) -> str | None:
    """Return the key of the part that is for language: a known one, or where layers with experts are, if they are not here."""
    parts = [key for key, value in data.items() if isinstance(value, Mapping)]
    known = next((key for key in NESTED if key in parts), None)
    if known is not None or Keys(data, "").get(*_LAYERS) is not None:
        return known
    return next((key for key in parts if all(Keys(data[key], "").get(*keys) is not None for keys in (_LAYERS, _EXPERTS))), None)


def language_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language part's keys as they are spelt here, with quantisation and tying of the outer level."""
    while (key := _nested(data)) is not None:
        outer, data = data, data[key]
        kept = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "architectures", "model_type")
        data = {one: outer[one] for one in kept if outer.get(one) is not None} | {
            one: value for one, value in data.items() if value is not None
        }
        if isinstance(outer.get("tie_word_embeddings"), bool):  # the head belongs to the whole
            data["tie_word_embeddings"] = outer["tie_word_embeddings"]
    found, given = dict(data), Keys(data, "")
    for other, key in _SPELLINGS.items():
        if found.get(key) is None and (value := given.get(other)) is not None:
            found[key] = value
            found.pop(other, None)
    if isinstance(width := found.get("moe_intermediate_size"), list) and len(width) == 2:  # experts of text, and of pictures
        found |= {key: value[0] for key, value in found.items() if isinstance(value, list) and len(value) == 2 and "moe" in key}
        found["vision_experts"] = width[1]
    return found


def read_model(data: Mapping[str, Any], extra: Mapping[str, Any] | None, name: str, place: object) -> ModelSpec:
    """Read a model from its config, and its bytes from that or ``hf_quant_config.json``."""
    keys = Keys(language_part(data), place)
    known = known_of(keys)
    family = families().get(known, _PLAIN)
    shape = _shape(data, keys, family, known, extra, name)
    precision = read_precision(keys.data, extra, name, place)
    bits = {"expert_bits": precision.of(*_expert_names(family, 0)), "other_bits": precision.plain}
    return of_shape(shape, {**_widths(keys, family, shape), **bits, "act_bits": max(precision.plain, 16)})


def known_of(keys: Keys) -> str:
    """Return the name of an architecture, without the ending that a part of a model has."""
    kind = keys.get("model_type")
    kind = kind.lower().removesuffix("_text").removesuffix("_vl") if isinstance(kind, str) else ""
    if kind not in families() and isinstance(names := keys.get("architectures"), list) and names:
        return _by_class().get(_letters(str(names[0]).partition("For")[0]), kind)
    return kind


@cache
def _by_class() -> Mapping[str, str]:
    return {_letters(name): name for name in families()}


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _widths(keys: Keys, family: Family, shape: Shape) -> dict[str, Any]:
    """Return widths of attention, if all layers have the same but for windows."""
    gated = family.shared_gate and shape.shared_params > 0
    if len({block.mixer.params if block.mixer else 0 for block in shape.blocks}) > 1 or family.mixers > 1:
        return {"shared_gate": True} if gated else {}
    bias = _has_bias(keys, family)
    flags = {
        "qkv_bias": bias, "out_bias": bias if family.out_bias is None else family.out_bias, "qk_norm": _qk_norm(keys, family),
        "norm_bias": family.norm_bias, "attention_sinks": family.sinks, "expert_bias": family.expert_bias,
        "router_bias": family.router_bias, "head_bias": keys.flag("lm_head_bias", default=False),
        "shared_gate": gated,
    }  # fmt: skip
    if keys.get("kv_lora_rank"):
        nope, rope = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
        heads = keys.count(*_HEADS)
        latent_bias = keys.flag("attention_bias", default=False)
        return flags | {
            "n_heads": heads, "n_kv_heads": heads, "head_dim": nope + rope, "nope_head_dim": nope, "rope_head_dim": rope,
            "v_head_dim": keys.count("v_head_dim"), "kv_lora_rank": keys.count("kv_lora_rank"),
            "q_lora_rank": keys.count("q_lora_rank", default=0), "qkv_bias": latent_bias, "out_bias": latent_bias,
            "qk_norm": "none",
        }  # fmt: skip
    if any(block.mixer and not block.mixer.kind.startswith("grouped") for block in shape.blocks):
        return {}
    h, k, a = _heads(keys, shape.hidden)
    return flags | {"n_heads": h, "n_kv_heads": k, "head_dim": a} if h % k == 0 else {}


def _shape(
    data: Mapping[str, Any], keys: Keys, family: Family, known: str, extra: Mapping[str, Any] | None, name: str
) -> Shape:  # fmt: skip
    place = keys.place
    if family.refused:
        expected = "a decoder whose layers have experts of their own"
        raise ModelError(f"{place}: {known}: expected {expected}, got {family.refused}; choose another model")
    if keys.flag("is_encoder_decoder", default=False):
        got = "an encoder and a decoder; choose another model"
        raise ModelError(f"{place}: is_encoder_decoder: expected a decoder alone, got {got}")
    hidden, vocab = keys.count(*_HIDDEN, least=1), keys.count("vocab_size", default=1, least=1)
    unnamed = [] if keys.get("vocab_size") else ["vocab_size is not given: embedding and output head count as nothing"]
    words = _block_words(keys)
    n = len(words) if words else keys.count(*_LAYERS, least=1, most=LAYERS.most)
    routed = [word == "moe" for word in words] if words else _routed(keys, n)
    if not any(routed):
        raise ModelError(f"{place}: expected at least one layer with routed experts, got {n} dense ones; choose another model")
    n_experts = keys.count(*_EXPERTS, least=1, most=EXPERTS.most)
    top_k = keys.count(*_TOP_K, least=1, most=n_experts)
    mats = 2 if family.mats == 2 or keys.get("mlp_hidden_act") == "relu2" else 3
    width = keys.count(*_EXPERT_WIDTH, "intermediate_size", least=1)
    if keys.get("num_selects") is not None and keys.get(*_EXPERT_WIDTH) is None:  # a dense part, cut into experts
        width = max(width // n_experts, 1)
    expert_input = keys.count(*_EXPERT_INPUT, default=hidden, least=1)
    shared_width = _shared_width(keys, width)
    shared = mats * hidden * shared_width
    zero = keys.count("zero_expert_num", default=0)
    bias = family.router_bias or keys.flag("use_routing_bias", default=False) or keys.get("topk_method") == "noaux_tc"
    gate = bool(shared and family.shared_gate) * hidden
    projections = 2 * hidden * expert_input if expert_input != hidden else 0
    dense = mats * hidden * keys.count(*_DENSE_WIDTH, default=0)
    parallel = 0
    width_key = "intermediate_size" if keys.get("residual_moe") is True else family.parallel
    if width_key and keys.get("enable_moe_block") is not False:
        parallel = mats * hidden * keys.count(width_key)
    if family.mixers > 1:
        parallel = family.mixers * dense
    precision = read_precision(keys.data, extra, name, place)
    keys.read |= {"dtype", "torch_dtype", "quantization_config", "quantization", "expert_dtype"}
    biases = (mats - 1) * width + hidden if family.expert_bias else 0
    biases += mats * hidden * keys.count("parallel_expert_intermediate_size", default=0) // 2  # one for each two experts
    streams, head_streams = _streams(keys, hidden)
    norms = (hidden if words else family.norms * hidden * (1 + family.norm_bias)) + streams
    router = (n_experts + zero) * (hidden + bias)
    blocks = []
    mixers = _mixers(keys, family, n, hidden, words)
    mixers = [reusing(mixer) if mixer and again else mixer for mixer, again in zip(mixers, _reuses(keys, n), strict=True)]
    for layer, mixer in enumerate(mixers):
        own_dense = (dense if words[layer] == "mlp" else 0) if words else parallel if routed[layer] else dense
        blocks.append(_block(layer, mixer, routed[layer], own_dense, norms, (router, projections, shared + gate), precision))
        if routed[layer]:
            bits = precision.of(*_expert_names(family, layer))
            blocks[-1] = replace(
                blocks[-1],
                expert_bytes=bits_to_bytes(mats * expert_input * width, bits) + bits_to_bytes(biases, precision.plain),
            )
    embedding_bits, head_bits = precision.ends
    ends = hidden * (1 + family.norm_bias) + head_streams + vocab * keys.flag("lm_head_bias", default=False)
    n_shared = keys.count(*_SHARED_COUNT, default=0) or (max(shared_width // width, 1) if shared else 0)
    return Shape(
        name=name, hidden=hidden, vocab=vocab, blocks=tuple(blocks), n_experts=n_experts, top_k=top_k, mats=mats,
        expert_width=width, expert_input=expert_input, expert_params=mats * expert_input * width + biases,
        router_params=router + projections,
        shared_params=shared + gate, n_shared=n_shared, tied=keys.flag("tie_word_embeddings", default=family.tied),
        head_params=ends, zero_experts=zero, embedding_bytes=bits_to_bytes(vocab * hidden, embedding_bits),
        head_bytes=bits_to_bytes(vocab * hidden + ends, head_bits), kv_bits=precision.kv_bits,
        lookup_params=(lookup := _lookups(keys, vocab * hidden)), lookup_bytes=bits_to_bytes(lookup, embedding_bits),
        notes=(*_left_out(data, keys), *unnamed, *precision.doubts, *_notes(keys, known)), source=f"{place}",
    )  # fmt: skip


def _lookups(keys: Keys, embedding: int) -> int:
    """Return the parameters of tables of which a token reads rows: of pairs of words and more."""
    n = partial(keys.count, default=0, most=1e12)
    rows, layers = sum(keys.indices("engram_num_embeddings") or ()), len(keys.indices("ple_layer_ids") or ())
    grams = n("ngram_vocab_size_ratio") * embedding + n("ngram_vocab_size_base") * n("ple_embed_dim") * layers
    return grams + rows * n("engram_head_dim")


def _expert_names(family: Family, layer: int) -> list[str]:
    folders = [family.experts_at] if family.experts_at else [f"{part}.experts" for part in _FEED_FORWARD]
    return [f"layers.{layer}.{folder}.0.up_proj" for folder in folders]


_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn", "moe")
_MIXING = ("self_attn", "linear_attn", "mixer", "attention", "mamba", "attn")


def _block(
    layer: int, mixer: Mixer | None, routed: bool, dense: int, norms: int, of_experts: tuple[int, int, int], precision: Precision
) -> Block:  # fmt: skip
    """Return a layer with its bytes, those of one routed expert left out."""

    def n_bytes(count: int, folders: Sequence[str], *names: str) -> int:
        return bits_to_bytes(count, precision.of(*(f"layers.{layer}.{folder}.{name}" for folder in folders for name in names)))

    mixing = 0
    for name, count in mixer.weights if mixer else ():
        mixing += bits_to_bytes(count, precision.router) if name == "rest" else n_bytes(count, _MIXING, name)
    router, projections, shared = of_experts if routed else (0, 0, 0)
    return Block(
        mixer, routed, dense, norms, mixer_bytes=mixing, dense_bytes=n_bytes(dense, _FEED_FORWARD, "up_proj"),
        router_bytes=bits_to_bytes(router + projections + norms, precision.router),
        shared_bytes=n_bytes(shared, _FEED_FORWARD, "shared_experts.up_proj", "shared_expert.up_proj") if shared else 0,
    )  # fmt: skip


def _streams(keys: Keys, hidden: int) -> tuple[int, int]:
    """Return the parameters of a layer and head that mix residual streams (hyper-connections)."""
    n, rank = keys.count("hc_mult", "hc_count", default=0), keys.count("hc_lowrank", default=0)
    if rank:
        mixing = n * hidden * (2 * rank + 1)
        return 2 * (mixing + n * n * hidden), mixing
    square = keys.get("hc_sinkhorn_iters") is not None
    rows = 2 * n + square * n * n
    return (2 * (rows * (n * hidden + 1) + 2 + square), n * n * hidden + n + 1) if n else (0, 0)


def _left_out(data: Mapping[str, Any], keys: Keys) -> list[str]:
    parts = [part for part in ("vision", "audio", "talker", "code2wav") if data.get(f"{part}_config")]
    parts += ["experts of pictures"] if keys.get("vision_experts") else []
    if keys.get("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        parts.append("layers that predict further tokens")
    return [f"left out: {', '.join(parts)}"] if parts else []


def _notes(keys: Keys, known: str) -> tuple[str, ...]:
    """Return how sure the reading is: known by keys alone, or keys about sizes unread."""
    notes = []
    kinds = keys.get("layer_types")
    if strange := {str(kind) for kind in kinds if _word(kind) is None} if isinstance(kinds, list) else set():
        notes.append(f"layer_types: {', '.join(sorted(strange))} not known: taken for attention over all tokens")
    if known not in families():
        notes.append(f"architecture {known or 'without a name'}: read by its keys")
    heads, hidden = keys.get(*_HEADS), keys.get(*_HIDDEN)
    if keys.get(*_HEAD_DIM, "kv_lora_rank") is None and is_int(heads) and is_int(hidden) and hidden % heads:
        notes.append(f"head_dim is absent: {hidden // heads}, hidden_size over heads, rounded down")
    unread = sorted(set(keys.data) - {one.partition(".")[0] for one in keys.read} - _OTHER)
    odd = [key for key in unread if keys.data[key] and _SIZES.search(key)]
    if known not in families():
        plain = [key for key in unread if is_int(keys.data[key]) and keys.data[key] > 1 and not _HARMLESS.search(key)]
        odd = sorted({*odd, *plain})
    lists = [key for key in unread if isinstance(keys.data[key], list) and not _HARMLESS.search(key)]
    odd = sorted({*odd, *(key for key in lists if 2 < len(keys.data[key]) == keys.get(*_LAYERS))})
    if odd:
        notes.append(f"keys not understood: {', '.join(odd[:8])}{' ...' if len(odd) > 8 else ''}")
    return tuple(notes)


_SIZES = re.compile(
    r"latent|zero|copy|null|share|reuse|source|engram|ngram|ple_|chunk|experts|_width|_rank|lora|per_layer|state_size"
)
_HARMLESS = re.compile(
    r"token|position|rope|rotary|theta|window|max_|length|context|group|seed|top_?k|scal|floor|_id$|_layers$|layer_id|head_dim"
    r"|key_value_heads|vocab|expand|base$|version|pretraining|layer_freq|n_kv_heads|gating|limit|layer_types|moe_layers$"
)
"""Keys of numbers, or of a list of all layers, that change no size."""
_OTHER = {  # keys that look like sizes and are not
    "chunk_size", "mamba_chunk_size", "chunk_size_feed_forward", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "moe_shared_expert_overlap", "vocab_size_per_layer_input", "size_experts", "shared_moe_mode",
    "shared_expert_combination_strategy", "emb_neighbor_num", "emb_split_num", "engram_layer_ids", "engram_max_ngram_size",
    "engram_n_heads", "engram_vocab_size", "index_source_layer_ids", "heads_per_ngram", "ngram_size", "split_ngram_parts",
    "make_ngram_vocab_size_divisible_by", "ple_conv_kernel_size",
}  # fmt: skip


def _block_words(keys: Keys) -> list[str] | None:
    """Return what each block is, where a block is one thing: mamba, attention, moe or mlp."""
    letters = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    pattern = keys.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set(letters):
            raise keys.wrong("hybrid_override_pattern", "letters M, *, E and -", pattern)
        return [letters[one] for one in pattern]
    words = keys.get("layers_block_type")
    if isinstance(words, list) and "moe" in words:
        return [{"linear_attention": "mamba", "full_attention": "attention"}.get(str(word), str(word)) for word in words]
    return None


def _routed(keys: Keys, n: int) -> list[bool]:
    """Return whether each layer has routed experts: by the first rule whose keys are there."""
    layers = range(n)
    words = keys.each("mlp_layer_types", n)
    if words is not None:
        return [word != "dense" for word in words]
    frequency = keys.get("moe_layer_freq")
    if isinstance(frequency, list):
        return [bool(one) for one in keys.each("moe_layer_freq", n) or ()]
    if isinstance(keys.get("moe_layers"), list):  # in Llama 4 it wins over the step
        return [layer in (keys.indices("moe_layers") or ()) for layer in layers]
    step = keys.get("interleave_moe_layer_step")
    if step is not None:
        step = keys.count("interleave_moe_layer_step", least=1)
        return [(layer + 1) % step == 0 for layer in layers]
    if keys.get("expert_layer_period") is not None:
        period, offset = keys.count("expert_layer_period", least=1), keys.count("expert_layer_offset", default=0)
        return [layer % period == offset for layer in layers]
    if keys.get("moe_layer_start_index") is not None:
        first = keys.count("moe_layer_start_index")
        last, every = keys.get("moe_layer_end_index"), keys.count("moe_layer_interval", default=1, least=1)
        last = n - 1 if last in (None, -1) else keys.count("moe_layer_end_index")
        return [first <= layer <= last and (layer + 1) % every == 0 for layer in layers]
    if (listed := keys.indices("moe_layers_enum")) is not None:
        return [layer in listed for layer in layers]
    if keys.get("moe_layer_interval") is not None:
        every = keys.count("moe_layer_interval", least=1)
        return [(layer + 1) % every == 0 for layer in layers]
    if keys.get("first_k_dense_replace", "num_dense_layers") is not None:
        first = keys.count("first_k_dense_replace", "num_dense_layers")
        every = keys.count("moe_layer_freq", default=1, least=1)
        return [layer >= first and layer % every == 0 for layer in layers]
    only, step = keys.indices("mlp_only_layers") or frozenset(), keys.count("decoder_sparse_step", default=1, least=1)
    return [layer not in only and (layer + 1) % step == 0 for layer in layers]


def _shared_width(keys: Keys, width: int) -> int:
    """Return the width of all shared experts of a layer together."""
    n = keys.count(*_SHARED_COUNT, default=0)
    if keys.get("moe_shared_expert_intermediate_size") is not None:
        return max(n, 1) * keys.count("moe_shared_expert_intermediate_size")
    if keys.get(*_SHARED_WIDTH) is not None:
        return keys.count(*_SHARED_WIDTH)
    if keys.get("model_type") in ("llama4", "llama4_text"):
        return width
    return n * width


# ---- attention


def _kinds(keys: Keys, n: int) -> list[str]:
    """Return the kind of each layer's mixer: full, window, linear."""
    layers = range(n)
    words = keys.each("layer_types", n) or (keys.each("layers_block_type", n))
    if words is not None:
        return [_word(word) or "full" for word in words]
    if (listed := keys.get("linear_attn_config.full_attn_layers")) is not None:
        return ["full" if layer + 1 in listed else "linear" for layer in layers]
    if keys.get("full_attention_interval") is not None:
        every = keys.count("full_attention_interval", least=1)
        return ["full" if (layer + 1) % every == 0 else "linear" for layer in layers]
    if keys.get("layer_group_size") is not None:
        every = keys.count("layer_group_size", least=1)
        return ["full" if (layer + 1) % every == 0 or layer >= n // every * every else "linear" for layer in layers]
    if keys.get("attn_layer_period") is not None:
        period, offset = keys.count("attn_layer_period", least=1), keys.count("attn_layer_offset", default=0)
        return ["full" if layer % period == offset else "linear" for layer in layers]
    if (flags := keys.each("attn_type_list", n)) is not None:
        return ["full" if one else "linear" for one in flags]
    if (flags := keys.each("hybrid_layer_pattern", n) or keys.each("sliding_window_layout", n)) is not None:
        return ["window" if one else "full" for one in flags]
    every = keys.get("sliding_window_pattern", "global_attn_every_n_layers")
    if is_int(every) and every > 1:
        return ["full" if (layer + 1) % every == 0 else "window" for layer in layers]
    if isinstance(every, str) and every:
        return ["window" if every[layer % len(every)] in "LlS" else "full" for layer in layers]
    return ["full"] * n


def _mixers(keys: Keys, family: Family, n: int, hidden: int, words: list[str] | None) -> list[Mixer | None]:
    if words:
        one = {"mamba": _linear, "attention": _grouped}
        return [one[word](keys, family, hidden, None) if word in one else None for word in words]
    if (ratios := keys.each("compress_ratios", n) or _ratios(keys, n)) is not None:
        return [_compressed(keys, hidden, ratio) for ratio in ratios]
    kinds = _kinds(keys, n)
    if keys.get("attention_chunk_size") is not None and keys.get("layer_types") is None:  # every fourth layer sees all
        kinds = ["full" if (layer + 1) % 4 == 0 else "chunked" for layer in range(n)]
    per_layer = keys.mapping("per_layer_config")
    lists = {key: found for key, name in _BY_LAYER.items() if (found := keys.each(name, n)) is not None}
    other = keys.get("attention_other_setting")
    result: list[Mixer | None] = []
    for layer, kind in enumerate(kinds):
        own = Keys(per_layer, keys.place).mapping(f"{layer:02d}", str(layer))
        own |= {key: values[layer] for key, values in lists.items()}
        if isinstance(other, Mapping) and kind == _word(other.get("attention_type", "sliding")):
            own |= other
        here = Keys({**keys.data, **own}, keys.place) if own else keys
        window, sparse = None, here.get("sparse") != 0
        if isinstance(types := keys.get("layer_types"), list) and keys.get("index_block_size") is not None:
            sparse = "sparse" in str(types[layer])
        if kind == "chunked":
            window = keys.count("attention_chunk_size")
        elif kind == "window":
            window = keys.count(*_WINDOW, default=0) or None
        elif kind == "full" and "window" not in kinds and family.window_in_use and keys.get("use_sliding_window") is True:
            window = None if keys.get("max_window_layers") else keys.count(*_WINDOW, default=0) or None
        linear = kind == "linear"
        result.append(_linear(here, family, hidden, None) if linear else _attention(here, family, hidden, window, sparse=sparse))
        keys.read |= here.read
    return result


def _reuses(keys: Keys, n: int) -> list[bool]:
    """Return whether each layer reads the keys and values of an earlier one instead of its own."""
    if (sources := keys.each("kv_source_layers", n)) is not None:
        return [source != layer for layer, source in enumerate(sources)]
    if own := keys.indices("kv_source_layer_ids"):
        return [layer > min(own) and layer not in own for layer in range(n)]
    if keys.get("use_cla") is True:
        return [layer % keys.count("cla_share_factor", least=1) > 0 for layer in range(n)]
    return [layer >= n - keys.count("num_kv_shared_layers", default=0) for layer in range(n)]


_BY_LAYER = {
    "num_attention_heads": "num_attention_heads_per_layer", "indexer_type": "indexer_types",
    "sparse": "sparse_attention_config.sparse_attention_freq",
}  # fmt: skip
"""What a layer has of lists with a value for each."""


def _word(word: object) -> str | None:
    """Return full, window, linear or chunked; None if it is not known."""
    return next((kind for kind, form in _WORDS.items() if form.search(str(word).lower())), None)


def _ratios(keys: Keys, n: int) -> list[int] | None:
    """Return tokens of a compressed row by layer, as newer files of DeepSeek-V4 write them."""
    rates = keys.get("compress_rates")
    words = keys.get("layer_types")
    if not isinstance(rates, Mapping) or not isinstance(words, list):
        return None
    return [rates.get(word, 0) for word in words[:n]]


def _attention(keys: Keys, family: Family, hidden: int, window: int | None, *, sparse: bool = True) -> Mixer:
    if keys.get("kv_lora_rank"):
        nope, rope = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
        heads = keys.count(*_HEADS, least=1)
        index = {}
        if window is None and keys.get("index_topk") is not None:
            index = {
                "index_heads": keys.count("index_n_heads"), "index_width": keys.count("index_head_dim"),
                "read": keys.count("index_topk"), "owns_index": keys.get("indexer_type") != "shared",
                "pool": keys.count("index_kpool", default=0),
            }  # fmt: skip
        gate = {"head": heads, "wide": heads * keys.count("v_head_dim")}.get(
            "wide" if keys.flag("mla_use_output_gate", default=False) else family.gate, 0
        )
        found = latent(
            hidden, heads, keys.count("q_lora_rank", default=0), keys.count("kv_lora_rank"), nope, rope, keys.count("v_head_dim"),
            bias=keys.flag("attention_bias", default=False), gate=hidden * gate, window=window, **index,
        )  # fmt: skip
        return repeated(found, family.mixers) if family.mixers > 1 else found
    if keys.get("index_topk_blocks", "sparse_attention_config.sparse_topk_blocks") and sparse and window is None:
        h, k, a = _heads(keys, hidden)
        own = {name: keys.count(key, f"sparse_attention_config.{other}", default=0) for name, (key, other) in _SPARSE.items()}
        return block_sparse(
            hidden, h, k, a, rest=2 * a, index_heads=own["heads"], index_width=own["width"],
            read=(own["blocks"] + own["local"]) * max(own["size"], 1),
        )  # fmt: skip
    return _grouped(keys, family, hidden, window)


_SPARSE = {
    "heads": ("index_n_heads", "sparse_num_index_heads"), "width": ("index_head_dim", "sparse_index_dim"),
    "blocks": ("index_topk_blocks", "sparse_topk_blocks"), "local": ("index_local_blocks", "sparse_local_block"),
    "size": ("index_block_size", "sparse_block_size"),
}  # fmt: skip


def _heads(keys: Keys, hidden: int) -> tuple[int, int, int]:
    h = keys.count(*_HEADS, least=1)
    return h, keys.count(*_KV_HEADS, default=h, least=1), keys.count(*_HEAD_DIM, default=max(hidden // h, 1), least=1)


def _has_bias(keys: Keys, family: Family) -> bool:
    return keys.flag("attention_bias", default=keys.flag("qkv_bias", default=keys.flag("use_bias", default=family.qkv_bias)))


def _qk_norm(keys: Keys, family: Family) -> str:
    if family.qk_norm != "asked":
        return family.qk_norm
    return "head" if keys.get("use_qk_norm") is True else "none"


def _grouped(keys: Keys, family: Family, hidden: int, window: int | None) -> Mixer:
    h, k, a = _heads(keys, hidden)
    v_from_k = False
    if window is None and keys.get("global_head_dim") is not None:  # Gemma 4: wider heads where all tokens are seen
        a, k = keys.count("global_head_dim"), keys.count("num_global_key_value_heads", default=k)
        v_from_k = keys.flag("attention_k_eq_v", default=False)
    if window is not None:
        h = keys.count("swa_num_attention_heads", "num_sliding_attention_heads", default=h)
        k = keys.count("swa_num_key_value_heads", default=k)
        a = keys.count("swa_head_dim", default=a)
    v = keys.count(*(("swa_v_head_dim",) if window is not None else ()), "v_head_dim", default=a)
    bias = _has_bias(keys, family)
    out_bias = bias if family.out_bias is None else family.out_bias
    sinks = family.sinks or keys.flag(f"add_{'full' if window is None else 'swa'}_attention_sink_bias", default=False)
    biases = bias * (h * a + k * (a + v)) + out_bias * hidden + sinks * h
    norm = {"none": 0, "head": 2 * a, "full": h * a + k * a}[_qk_norm(keys, family)]
    wide = family.gate == "wide" or keys.flag("attn_output_gate", default=False)
    gate = hidden * h * a if wide else hidden * h if family.gate == "head" else 0
    rank = keys.count("share_q_dim", default=0)
    found = grouped(hidden, h, k, a, v, window=window, gate=gate, v_from_k=v_from_k, rest=biases + norm, q_rank=rank)
    return routed_heads(found, hidden, k * a, keys.count(*_EXPERTS)) if family.routed_heads else found


def _compressed(keys: Keys, hidden: int, per: int) -> Mixer:
    return compressed(
        hidden, keys.count(*_HEADS), keys.count("head_dim"), keys.count("q_lora_rank"), keys.count("o_lora_rank"),
        keys.count("o_groups"), window=keys.count("sliding_window"), per=per, index_heads=keys.count("index_n_heads"),
        index_width=keys.count("index_head_dim"), read=keys.count("index_topk"),
    )  # fmt: skip


def _linear(keys: Keys, family: Family, hidden: int, window: int | None) -> Mixer:
    if keys.get("linear_num_value_heads") is not None:
        return delta_net(
            hidden, keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads"), keys.count("linear_key_head_dim"),
            keys.count("linear_value_head_dim"), keys.count("linear_conv_kernel_dim"),
        )  # fmt: skip
    if keys.get("linear_attn_config") is not None or keys.get("linear_num_heads") is not None:
        heads = keys.count("linear_attn_config.num_heads", "linear_num_heads")
        width = keys.count("linear_attn_config.head_dim", "linear_head_dim")
        kernel = keys.count("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size")
        full = keys.get("linear_attn_config.use_full_rank_gate", "use_full_rank_gate") is True
        return kimi_delta(
            hidden, heads, width, kernel, full_gate=full or family.full_decay, full_decay=family.full_decay,
        )  # fmt: skip
    if keys.get("mamba_num_heads", "mamba_n_heads") is not None:
        heads, width = keys.count("mamba_num_heads", "mamba_n_heads"), keys.count("mamba_head_dim", "mamba_d_head")
        return mamba2(
            hidden, heads, width, keys.count("n_groups", "mamba_n_groups"), keys.count("ssm_state_size", "mamba_d_state"),
            keys.count("conv_kernel", "mamba_d_conv"),
        )  # fmt: skip
    if keys.get("mamba_d_state") is not None:
        rank = keys.get("mamba_dt_rank")
        rank = math.ceil(hidden / 16) if rank in (None, "auto") else keys.count("mamba_dt_rank")
        return mamba1(hidden, keys.count("mamba_expand"), keys.count("mamba_d_state"), rank, keys.count("mamba_d_conv"))
    if keys.get("conv_L_cache") is not None:
        return short_convolution(hidden, keys.count("conv_L_cache"))
    if keys.get("attn_type_list", "layer_group_size") is None and not known_of(keys).startswith("minimax"):
        wanted = "linear_num_value_heads, linear_attn_config, mamba_num_heads, mamba_d_state or conv_L_cache"
        raise ModelError(
            f"{keys.place}: expected keys of the linear layers that layer_types names ({wanted}), got none; add them"
        )
    h, _, a = _heads(keys, hidden)
    return lightning(hidden, h, a)
