"""Operations of one decode step of llama.cpp, counted from the fields of a model.

An engine's graph is a chain: each operation waits for the one before, so that their extra times add up and hide behind nothing.

Counted in llama.cpp's sources (``src/models/*.cpp``, ``build_moe_ffn`` and ``build_attn`` of ``src/llama-graph.cpp``,
``ggml_cuda_try_fuse`` of ``ggml-cuda.cu``) for one row and flash attention, views left out. On a GPU (``llama.cpp``) one kernel
are:

* a norm and its scale; with them the rotation of queries or keys, and the write of keys to the cache;
* a product and its bias or the residual that is added to it; gate, up, their biases and the activation;
* softmax, choice and weights of the router, if the number of experts is a power of two;
* up to eight sums in a row: of the experts' outputs, and of the residual.

Each product of quantised weights quantises its input in a kernel of its own; the router's has no quantised weights. Attention
takes two: one on parts of the context, one that joins them. On GPUs before Volta (``llama.cpp-unfused``) products are alone.

Attention is counted by layer: grouped, with an output gate or without, latent, or a gated delta net (whose step is one operation;
its state is copied before and after it, which caches hide). Counts of other linear attention, state spaces, convolutions and
indexers are not known: such layers count as grouped or latent attention, and `uncounted` names them.

On a CPU the unit is a wait of all threads for each other: two for a product (its input, then the rows) and for attention, one
for anything else; only a norm and its scale are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moesim.core.units import ceil_div
from moesim.model import ModelSpec
from moesim.model.parts import Mixer

_SUMS: Final = 8  # sums in a row that are one kernel
_ROUTERS: Final = frozenset({288, 576} | {2**n for n in range(10)})
"""Numbers of experts for which a GPU has one kernel that chooses."""
_CHOICE: Final = 6  # softmax, sort, look-up of the weights, their sum, its limit, division


DELTA_NET: Final = "linear, gated delta net"


def attention_of(model: ModelSpec, mixer: Mixer | None = None) -> str:
    """Return the kind of attention that operations are counted for, of a layer or of all."""
    if mixer is None or model.shape is None:
        return "latent, compressed" if model.q_lora_rank else "latent" if model.kv_lora_rank else "grouped"
    weights = dict(mixer.weights)
    if mixer.kind == DELTA_NET:
        return DELTA_NET
    if mixer.kind.startswith("latent"):
        return "latent, compressed" if "q_a_proj" in weights or "attn_q_a.weight" in weights else "latent"
    query, out = (
        sum(weights.get(name, 0) for name in names) for names in (("q_proj", "attn_q.weight"), ("o_proj", "attn_output.weight"))
    )
    return "grouped, gated" if query >= 2 * out > 0 else "grouped"


def uncounted(model: ModelSpec) -> list[str]:
    """Name the kinds of layers whose operations are not known."""
    kinds = dict.fromkeys(block.mixer.kind for block in model.blocks if block.mixer)
    return [kind for kind in kinds if kind != DELTA_NET and (not kind.startswith(("grouped", "latent")) or "chosen" in kind)]


def operations(engine: str, kind: str, model: ModelSpec, mixer: Mixer | None = None) -> Mapping[str, int]:
    """Count the operations of each part at one row; ``experts``: a layer's, ``leading``: one's; attention is that of a mixer.

    >>> from moesim.model import load_model
    >>> operations("llama.cpp", "gpu", load_model("qwen3-30b-a3b"))["attention"]
    14
    """
    if kind == "cpu":
        return _on_cpu(model, attention_of(model, mixer))
    return _on_gpu(model, attention_of(model, mixer), fused=engine == "llama.cpp")


def _on_gpu(model: ModelSpec, kind: str, *, fused: bool) -> dict[str, int]:
    product, alone = 2, 0 if fused else 1  # with the kernel that quantises its input; what is added to it if nothing is fused
    added = product + alone
    if kind == DELTA_NET:
        # norm; values with keys and queries, gate, beta, alpha; sigmoid, and bias, softplus and scale; rows of both states, the
        # new input joined, convolution, two norms, the step, both states back; norm and gate
        attention = 1 + 4 * product + 1 + 3 + 2 + 1 + (1 + alone) + 2 + 1 + 2 + (2 + alone)
    elif kind.startswith("latent"):
        # norm; the latent, its norm, two rotations, absorbed product, two puttings together, write, attention, values, copy
        attention = 1 + product + 1 + 2 + product + 2 + 1 + 2 + product + 1
        attention += (product + 1 + product) if "compressed" in kind else product
    else:
        norms = 2 * (model.qk_norm == "full")  # those of whole rows are not one kernel with the rotation
        attention = (
            1 + 3 * (product + alone * model.qkv_bias) + norms + 2 + 1 + 2
        )  # norm, queries keys values, rotations, write, attention
        attention += (2 + alone) * ("gated" in kind)  # a copy of the gate; its sigmoid times the output
    attention += added + model.out_bias  # beside a bias, the residual is a kernel of its own
    gated = model.n_mats == 3
    feed = product + (0 if fused else product * gated + 1)  # gate, up and activation
    feed += 0 if gated or not fused else 1
    apart = (product + 1) * (fused and gated and model.units_per_expert > 1)  # gate and up are products of their own
    biases = model.n_mats * model.expert_bias * alone
    sums = max(0, _top_k(model) - 1) + (0 if model.shared_params else 1)
    return {
        "attention": attention,
        "dense": 2 + alone * model.router_bias + (1 if model.n_experts // model.units_per_expert in _ROUTERS else _CHOICE),
        "experts": feed + apart + product + biases + 1 + ceil_div(sums, _SUMS),
        # the gate is a product without quantised weights, and its sigmoid times the output a kernel; then the sum is one as well
        "shared": feed + added + 1 + 3 * model.shared_gate if model.shared_params else 0,
        "leading": 1 + feed + added,
        "embedding": 1,
        "head": 2 + 1 + product,  # rows that are asked for, of two; norm; product
    }  # fmt: skip


def _on_cpu(model: ModelSpec, kind: str) -> dict[str, int]:
    product = 2
    if kind == DELTA_NET:
        attention = 1 + 4 * product + 1 + 3 + 2 + 1 + 2 + 2 + 1 + 2 + 3
    elif kind.startswith("latent"):
        attention = 1 + product + 1 + 2 + product + 2 + 1 + 2 + product + 1
        attention += (product + 1 + product) if "compressed" in kind else product
    else:
        attention = 1 + 3 * (product + model.qkv_bias) + 2 * (model.qk_norm != "none") + 2 + 2 + 2 + 3 * ("gated" in kind)
    attention += product + model.out_bias + 1
    feed = (model.n_mats - 1) * product + 1
    return {
        "attention": attention, "dense": 1 + product + model.router_bias + _CHOICE + 1,
        "experts": feed + product + model.n_mats * model.expert_bias + 1 + max(0, _top_k(model) - 1),
        "shared": feed + product + 1 + (product + 2) * model.shared_gate if model.shared_params else 0,
        "leading": 1 + feed + product + 1, "embedding": 1, "head": 1 + product,
    }  # fmt: skip


def _top_k(model: ModelSpec) -> int:
    return model.top_k // model.units_per_expert
