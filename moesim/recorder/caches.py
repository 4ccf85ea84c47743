"""KV caches of transformers: all of a request's, and the first tokens of one as another model's."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from moesim.recorder.errors import RecordError


def cache_name(model: Any) -> str:
    """Return what calls and outputs of the model name its KV cache; Transformers has renamed it, remote code may not have."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def whole_cache(model: Any) -> Any:
    """Make a cache that keeps all positions, also in layers that look at a sliding window only."""
    cache: Any = DynamicCache(config=model.config)
    for layer in cache.layers:
        if layer.is_sliding:
            layer.activate_past_recording()
    return cache


@dataclass(frozen=True)
class KeyValues:
    """The KV cache of one request as the model left it."""

    # what each layer caches, two of (1, n_heads, n_tokens, size): keys and values, or the latents and rotary keys of multi-head
    # latent attention
    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, cache: Any) -> KeyValues:
        """Read the cache of a request that was generated alone."""
        found = []
        for number, layer in enumerate(cache.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                raise RecordError(
                    f"KV cache of layer {number}: expected keys and values, got a {type(layer).__name__}; record without a shadow"
                )
            wanted, kept = layer.get_seq_length(), keys.shape[-2]
            if kept != wanted:
                raise RecordError(
                    f"KV cache of layer {number}: expected all {wanted} positions, got the last {kept}; "
                    "generate with moesim.recorder.caches.whole_cache"
                )
            found.append((keys, values))
        return cls(tuple(found))

    def first(self, n_tokens: int, model: Any) -> Any:
        """Make a cache of the first tokens for another model."""
        cache: Any = DynamicCache(config=model.config)
        for number, (layer, states) in enumerate(zip(model.get_decoder().layers, self.layers, strict=True)):
            device = next(layer.parameters()).device
            keys, values = (part[:, :, :n_tokens].to(device=device, dtype=model.dtype) for part in states)
            cache.update(keys, values, number)
        return cache
