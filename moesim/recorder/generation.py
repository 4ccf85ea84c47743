"""Generate for a batch of prompts with a KV cache, each request as if it were alone.

Prompts are padded on the left; padding is masked and has no positions. Each request has its own random numbers and end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from moesim.recorder import RecordError


def cache_name(model: Any) -> str:
    """Return what calls and outputs name the KV cache, which Transformers has renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def whole_cache(model: Any) -> Any:
    """Make a cache that keeps all positions, also in layers with a sliding window."""
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
                    "generate with moesim.recorder.generation.whole_cache"
                )
            found.append((keys, values))
        return cls(tuple(found))

    def first(self, n_tokens: int, model: Any) -> Any:
        cache: Any = DynamicCache(config=model.config)
        for number, (layer, states) in enumerate(zip(model.get_decoder().layers, self.layers, strict=True)):
            device = next(layer.parameters()).device
            keys, values = (part[:, :, :n_tokens].to(device=device, dtype=model.dtype) for part in states)
            cache.update(keys, values, number)
        return cache


LENGTH, END = "length", "end of text"


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Attributes
    ----------
    temperature : float
        0: greedy.
    top_p : float
        Sample among the likeliest tokens that together have this probability (nucleus sampling).
    banned : tuple of int
        Tokens that are never chosen.
    stop : tuple of int
        Tokens that end a request; they are not fed back.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    banned: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose the next token of one request.

        Parameters
        ----------
        logits : (vocabulary,) float32
        generator : torch.Generator
            On the CPU; not used when greedy.

        Returns
        -------
        int
        """
        if self.banned:
            logits = logits.clone()
            logits[list(self.banned)] = -torch.inf
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits.cpu() / self.temperature).softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            ordered[ordered.cumsum(dim=-1) - ordered >= self.top_p] = 0.0
            return int(order[torch.multinomial(ordered, 1, generator=generator)])
        return int(torch.multinomial(probabilities, 1, generator=generator))


@dataclass(frozen=True)
class Generated:
    """A finished batch."""

    tokens: list[list[int]]  # of each request, prompt and generated tokens, all of which went through the model
    ended: list[str]  # `LENGTH` or `END`
    owners: list[Tensor]  # for each forward pass, the request of every row that was expected
    cache: Any  # keys and values of the batch


def generate(
    model: Any, prompts: Sequence[Sequence[int]], n_decode: Sequence[int], seeds: Sequence[int], sampling: Sampling, *,
    cache: Any = None, expect: Callable[[Tensor], None] = lambda rows: None, on_tokens: Callable[[int], None] = lambda n: None,
) -> Generated:  # fmt: skip
    """Generate for all requests of a batch."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    tokens = [list(prompt) for prompt in prompts]
    ended = [LENGTH] * len(prompts)
    batch = _Batch(model, prompts, cache)
    going = list(range(len(prompts)))
    owners: list[Tensor] = []

    def forward(inputs: Tensor, places: Tensor, owner: Tensor) -> Tensor:
        expect(places)
        owners.append(owner)
        logits = batch.forward(inputs)
        on_tokens(len(places))
        return logits

    with torch.no_grad():
        real = batch.mask.reshape(-1).nonzero().reshape(-1)
        logits = forward(batch.padded, real, real // batch.padded.shape[1])
        while True:
            chosen = torch.zeros(len(prompts), 1, dtype=torch.long)
            for request in list(going):
                token = None
                if len(tokens[request]) < len(prompts[request]) + n_decode[request]:
                    token = sampling.choose(logits[request], generators[request])
                    if token in sampling.stop:
                        ended[request], token = END, None
                if token is None:
                    going.remove(request)
                else:
                    chosen[request] = token
                    tokens[request].append(token)
            if not going:
                return Generated(tokens, ended, owners, batch.cache)
            alive = torch.tensor(going)
            logits = forward(chosen, alive, alive)


class _Batch:
    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], cache: Any) -> None:
        width = max(len(prompt) for prompt in prompts)
        self.padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        self.mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.cache = cache
        self._began = False
        self._model = model
        self._cache_name = cache_name(model)
        self._device = model.device if model.device.type != "meta" else torch.device("cpu")
        self._is_padded = not bool(self.mask.all())
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the model; logits after each request's last token, (n_requests, vocabulary) float32."""
        if self._began:
            self.mask = torch.cat([self.mask, torch.ones_like(inputs)], dim=1)
        where: dict[str, Tensor] = {}
        if self._is_padded:
            positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
            where = {"attention_mask": self.mask.to(self._device), "position_ids": positions.to(self._device)}
        known = {self._cache_name: self.cache, "use_cache": True}
        output = self._model(input_ids=inputs.to(self._device), **known, **where, **self._last_only)
        self.cache, self._began = getattr(output, self._cache_name), True
        logits: Tensor = output.logits[:, -1].float()
        return logits
