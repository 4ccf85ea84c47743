"""Card of a model, to be held against its publisher's: layers, parameters, bytes."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from moesim.core.table import Facts
from moesim.core.units import digits, format_memory
from moesim.model.spec import ModelSpec

CONTEXTS = (4096, 16_384, 32_768, 131_072, 262_144, 1_048_576)
BATCHES = (1, 8)
_AT = 4096  # tokens before the one that is decoded
_WIDTH, _HEAD = 80, 15


class Card(Facts):
    """A model's figures, as text, as a mapping, and as a table in a notebook.

    Parameters
    ----------
    model : ModelSpec
        Of any source.
    """

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def to_dict(self) -> dict[str, Any]:
        """Return all figures: parameters as counts, sizes in bytes."""
        model, shape = self.model, self.model.shape
        return {
            "name": model.name, "source": model.source, "layers": len(model.blocks), "routed_layers": model.n_layers,
            "attention": dict(_mixers(model)), "experts": model.n_experts, "top_k": model.top_k,
            "experts_without_weights": shape.zero_experts if shape else 0, "shared_experts": model.n_shared,
            "expert_matrices": model.n_mats, "expert_input": shape.expert_input if shape else model.hidden,
            "expert_width": model.expert_intermediate, "hidden": model.hidden, "vocab": model.vocab,
            "tied": model.tie_embeddings, "total_params": model.total_params, "active_params": _active(model),
            "active_params_with_embedding": model.active_params, "total_bytes": model.n_bytes,
            "classes": {name: {"params": params, "bytes": n_bytes} for name, params, n_bytes in _classes(model)},
            "kv_bits": model.kv_bits, "kept_bytes": {n: model.all_kv_bytes(n) for n in CONTEXTS},
            "token_bytes": {n: model.token_bytes(n, _AT) for n in BATCHES},
            "notes": list(model.notes),
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        return {name: "; ".join(lines) for name, lines in self._lines().items()}

    def text(self) -> str:
        """Write the card, at most 80 columns wide."""
        lines = [self.model.name, ""]
        for name, found in self._lines().items():
            for number, one in enumerate(found):
                lines += _folded(f"{'' if number else name:<{_HEAD}}", one)
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        return f"<Card: {self.model.name}, {_billions(self.model.total_params)} parameters>"

    def _lines(self) -> dict[str, list[str]]:
        model, shape = self.model, self.model.shape
        zero = f" and {shape.zero_experts} without weights" if shape and shape.zero_experts else ""
        shared = f"; {model.n_shared} shared" if model.n_shared else ""
        whole = f", {_billions(model.active_params)} with the embedding"
        whole = " (the embedding is the head)" if model.tie_embeddings else whole
        width = shape.expert_input if shape else model.hidden
        lines = {
            "layers": [_pattern(model)],
            "attention": [f"{n} x {kind}" for kind, n in _mixers(model)],
            "experts": [
                f"{model.n_experts}{zero} a layer, {model.top_k} a token{shared}",
                f"each {model.n_mats} matrices of {width} x {model.expert_intermediate}, {_expert_sizes(model)}",
            ],
            "parameters": [f"{_billions(model.total_params)}; a token uses {_billions(_active(model))}{whole}"],
            "bytes": [f"{'all':<14}{format_memory(model.n_bytes):>10}"]
            + [f"{name:<14}{format_memory(n):>10}{_bits(n, params):>11}" for name, params, n in _classes(model)],
            "kept": [
                f"of a sequence, {model.kv_bits:g} bits a number: "
                + ", ".join(f"{format_memory(model.all_kv_bytes(n))} at {_tokens(n)}" for n in CONTEXTS)
            ],
            "a step reads": [f"{format_memory(model.token_bytes(n, _AT))} at batch {n} after {_AT} tokens" for n in BATCHES],
        }
        return lines | {"source": [model.source]} | ({"notes": list(model.notes)} if model.notes else {})


def _active(model: ModelSpec) -> int:
    """Return the parameters that serve a token; of the embedding it reads a row."""
    return model.active_params - (0 if model.tie_embeddings else model.embedding_params)


def _billions(n: int) -> str:
    return f"{digits(n / 1e9, 4)} B"


def _bits(n_bytes: int, params: int) -> str:
    return f"{n_bytes * 8 / params:.4g} bits" if params else ""


def _tokens(n: int) -> str:
    return f"{n // 1024}k" if n < 2**20 else "1M"


def _mixers(model: ModelSpec) -> list[tuple[str, int]]:
    return Counter(block.mixer.kind for block in model.blocks if block.mixer).most_common()


def _expert_sizes(model: ModelSpec) -> str:
    sizes = sorted({model.expert_bytes(layer) for layer in range(model.n_layers)})
    return f"{format_memory(sizes[0])}{f' to {format_memory(sizes[-1])}' if len(sizes) > 1 else ''}"


def _pattern(model: ModelSpec) -> str:
    """Describe the order of layers with and without experts."""
    words = [
        ("experts and dense" if block.dense else "experts") if block.routed else "dense" if block.dense else "attention alone"
        for block in model.blocks
    ]
    runs = [(word, len(list(group))) for word, group in groupby(words)]
    if len(runs) > 4:
        return f"{len(words)}: " + ", ".join(f"{n} with {word}" for word, n in Counter(words).most_common()) + ", interleaved"
    return f"{len(words)}: " + ", then ".join(f"{n} with {word}" for word, n in runs)


def _classes(model: ModelSpec) -> list[tuple[str, int, int]]:
    """Return name, parameters and bytes of each class of tensors."""
    blocks, n = model.blocks, model.n_layers
    head = 0 if model.tie_embeddings else model.head_bytes
    found = [
        ("experts", model.experts_params_total, model.experts_bytes_total),
        ("shared", n * model.shared_params, sum(block.shared_bytes for block in blocks)),
        ("attention", sum(b.mixer.params for b in blocks if b.mixer), sum(block.mixer_bytes for block in blocks)),
        ("dense", sum(block.dense for block in blocks), sum(block.dense_bytes for block in blocks)),
        ("router, norms", n * model.router_params + sum(b.norms for b in blocks), sum(b.router_bytes for b in blocks)),
        ("embedding", model.embedding_params, model.embedding_bytes),
        ("head", model.head_params, head),
    ]
    return [one for one in found if one[2]]


def _folded(head: str, text: str) -> list[str]:
    lines, line = [], head
    for word in text.split(" "):
        if line.strip() and line != head and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line.rstrip())
            line = " " * len(head)
        line += f"{'' if len(line) == len(head) else ' '}{word}"
    return [*lines, line.rstrip()]
