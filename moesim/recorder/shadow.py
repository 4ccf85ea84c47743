"""Shadow prediction: the routers of a quantised copy, run alongside, predict the model's.

OD-MoE's scaled emulative prediction (SEP). Without alignment the shadow has its own prompt pass, tokens and KV cache. Alignment
replaces its token by the model's, and its KV cache by the model's, every so many tokens.

=================  ======================================  =====================================================
point              paper                                   here
=================  ======================================  =====================================================
periods            token every T_i, KV every KV_j tokens;  step i is aligned if ``i % period == 0``; step 0, the
                   best T1:KV1 (on some GPUs KV4)          first decoded token, follows the prompt; period 0: never
what is replaced   the KV cache                            all earlier positions, the prompt's too [choice]
unaligned token    the shadow's own                        chosen as the model's is; a sampler is asked once a step,
                                                           in order, so that one seeded alike draws the same noise
prompt             the shadow does its own prompt pass     the same, if anything of it is read later
=================  ======================================  =====================================================

A KV cache only grows, so what the model's held at any step is a prefix of its last state: the shadow of a request runs after
the model is done with it. Weights are quantised and dequantised at once: the copy has quantised values in the original's type
and memory, and routes as the quantised model would. Activations are not rounded.

=============  ==================================================  ==================================================
point          what is published                                   what is done here
=============  ==================================================  ==================================================
``int8``       LLM.int8() (Dettmers et al. 2022): weights per      weights as published; activations stay as they are
               output channel by their largest absolute value,
               activations per token, outlier features in 16 bits
``nf4``        QLoRA (Dettmers et al. 2023): blocks of 64, scaled  as published, without double quantisation
               by their largest absolute value; the scales
               quantised again on request
``fp16``       the model in half precision                         every parameter rounded to half precision;
                                                                   arithmetic in the type of the original
what is kept   bitsandbytes quantises linear layers; embeddings,   the same, with stacked experts quantised (each
               norms and the output head stay                      expert a matrix of its own) and routers kept [choice]
=============  ==================================================  ==================================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor, nn

from moesim.errors import unknown_name
from moesim.recorder import RecordError
from moesim.recorder.generation import KeyValues, Sampling, cache_name, whole_cache
from moesim.recorder.hooks import RoutingHooks, Wanted
from moesim.recorder.recording import Finished, SignalRows
from moesim.recorder.routers import Router, find_routers
from moesim.recorder.signals import DENSE_EXPERTS, SignalFacts, pack

KINDS = ("fp16", "int8", "nf4")  # what `quantised_copy` knows

BLOCK = 64  # weights that share a scale in NF4 (QLoRA, section 3)

_INT8_MAX = 127


def normal_float_levels() -> NDArray[np.float32]:
    """Compute the 16 levels of NormalFloat4 (QLoRA, section 3 and appendix E) in [-1, 1]."""
    # Quantiles of a normal distribution: 8 of its positive half, 7 of the negative one and 0; the
    # outermost is the mean of those that 15 and 16 intervals would leave half an interval beyond.
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    positive = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(outermost, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([negative, [0.0], positive]))
    return np.asarray(levels / levels.max(), np.float32)


_LEVELS = torch.from_numpy(normal_float_levels())


def quantise(weight: Tensor, kind: str) -> Tensor:
    """Round a matrix to what ``int8`` (by output channel) or ``nf4`` (by blocks of 64) can hold."""
    _check_kind(kind)
    if kind == "fp16":
        return weight.half().to(weight.dtype)
    return _int8(weight) if kind == "int8" else _nf4(weight)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise RecordError(unknown_name("quantisation", kind, KINDS))


def _int8(weight: Tensor) -> Tensor:
    values = weight.double()  # in which 127 a / 127 is a again, so that quantising twice changes nothing
    largest = values.abs().amax(dim=1, keepdim=True)
    steps = torch.round(values * _INT8_MAX / torch.where(largest > 0, largest, 1.0))
    return (steps * largest / _INT8_MAX).to(weight.dtype)


def _nf4(weight: Tensor) -> Tensor:
    levels = _LEVELS.to(weight.device)
    flat = weight.float().reshape(-1)
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scaled = blocks / torch.where(largest > 0, largest, 1.0)
    nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)
    return (levels[nearest] * largest).reshape(-1)[: len(flat)].view(weight.shape).to(weight.dtype)


def quantised_copy(model: Any, kind: str, routers: Sequence[Router]) -> Any:
    """Copy a model with quantised weights."""
    _check_kind(kind)
    chosen = _chosen(model, kind, routers)
    twin = copy.deepcopy(model).requires_grad_(False)
    twin.train(False)
    _quantise_inside(twin, kind, chosen)
    return twin


def _quantise_inside(model: Any, kind: str, names: set[str]) -> None:
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        if parameter.is_meta:
            raise RecordError(
                f"shadow {kind}: expected all weights in memory, got '{name}' elsewhere; "
                "load the model without offloading, or leave the shadow out"
            )
        for part in _parts(model, name, parameter.data):
            part.copy_(quantise(part, kind))


def _chosen(model: Any, kind: str, routers: Sequence[Router]) -> set[str]:
    if kind == "fp16":
        return {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    kept_modules = [m for m in model.modules() if isinstance(m, nn.Embedding)] + [
        model.get_output_embeddings(),
        *(r.module for r in routers),
    ]
    kept = {id(parameter) for module in kept_modules if module is not None for parameter in module.parameters()}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and parameter.is_floating_point() and id(parameter) not in kept and not name.endswith("bias")
    }


def _parts(model: Any, name: str, values: Tensor) -> Iterator[Tensor]:
    """Return views of a parameter's matrices as (n_outputs, n_inputs); of a vector, itself."""
    owner = model.get_submodule(name.rpartition(".")[0])
    for matrix in values.view(-1, *values.shape[-2:]) if values.ndim > 2 else [values]:
        yield matrix.T if values.ndim > 2 and getattr(owner, "is_transposed", False) else matrix


@dataclass(frozen=True)
class Alignment:
    """How often the shadow is put right."""

    # token_period, kv_period: tokens from one alignment to the next, the first at the first decoded token; 0: never
    token_period: int = 1
    kv_period: int = 1

    def __post_init__(self) -> None:
        for what, period in (("token", self.token_period), ("KV", self.kv_period)):
            if period < 0:
                raise RecordError(f"shadow: {what} alignment period: expected at least 0 (never), got {period}")

    def token_at(self, step: int) -> bool:
        return _is_due(step, self.token_period)

    def kv_at(self, step: int) -> bool:
        return _is_due(step, self.kv_period)

    def __str__(self) -> str:
        return f"T{self.token_period}:KV{self.kv_period}"


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


@dataclass(frozen=True)
class ShadowRouting:
    """Choices of the shadow's routers at the decode steps of one request."""

    experts: NDArray[np.int32]  # ids in rank order
    scores: NDArray[np.float32]  # of all experts, by the router's score function
    tokens: NDArray[np.int64]  # what the shadow read


def greedy(logits: Tensor) -> int:
    """Choose the likeliest token; logits (vocabulary,)."""
    return int(logits.argmax())


class Shadow:
    """A quantised copy of a model, with its routers found."""

    def __init__(self, model: Any, alignment: Alignment) -> None:
        self.alignment = alignment
        self._model = model
        self._routers = find_routers(model)
        self.keeps_dense = self._routers[0].n_experts <= DENSE_EXPERTS and self._routers[0].ranks_by_scores

    def decode(
        self, tokens: Sequence[int], n_prompt: int, states: KeyValues, choose: Callable[[Tensor], int] = greedy
    ) -> ShadowRouting:
        if len(tokens) == n_prompt:
            raise RecordError("shadow: expected at least one decoded token, got none; decode at least 1")
        with torch.no_grad(), RoutingHooks(self._routers, Wanted(scores=True)) as hooks:
            fed = self._steps(tokens, n_prompt, states, choose)
            captured = hooks.take().arrays
        decoded = slice(-len(fed), None)  # a prompt pass comes before
        return ShadowRouting(captured["experts"][decoded], captured["scores"][decoded], np.asarray(fed, np.int64))

    def _steps(self, tokens: Sequence[int], n_prompt: int, states: KeyValues, choose: Callable[[Tensor], int]) -> list[int]:
        reads_own_tokens = self.alignment.token_period != 1
        cache: Any = None
        logits: Any = None
        fed: list[int] = []
        if reads_own_tokens or not self.alignment.kv_at(0):
            cache, logits = self._forward(tokens[:n_prompt], whole_cache(self._model))
        for step, token in enumerate(tokens[n_prompt:]):
            if reads_own_tokens:
                own = choose(logits[0, -1].float())
                token = token if self.alignment.token_at(step) else own
            if self.alignment.kv_at(step):
                cache = states.first(n_prompt + step, self._model)
            cache, logits = self._forward([token], cache)
            fed.append(token)
        return fed

    def _forward(self, tokens: Sequence[int], cache: Any) -> tuple[Any, Tensor]:
        ids = torch.tensor([list(tokens)], device=self._model.device)
        name = cache_name(self._model)
        output = self._model(input_ids=ids, use_cache=True, **{name: cache})
        return getattr(output, name), output.logits


class ShadowObserver:
    """Records the signal of a shadow (an observer of `moesim.recorder.recording.Plan`)."""

    def __init__(self, model: Any, kind: str, alignment: Alignment, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.name = f"shadow-{kind}:{alignment}"
        #: For the header; a shadow reads no state of the model, but runs ahead of it.
        self.facts = {self.name: SignalFacts(0, None, 0, _about(kind, alignment))}
        self._shadow = Shadow(quantised_copy(model, kind, find_routers(model)), alignment)
        self._sampling = sampling
        self._seeds = seeds

    def __call__(self, finished: Finished) -> dict[str, SignalRows]:
        recording = finished.recording
        if not recording.n_decode:
            return {}
        generator = torch.Generator().manual_seed(self._seeds[finished.number])
        choose = partial(self._sampling.choose, generator=generator)
        states = KeyValues.of(finished.cache)
        routing = self._shadow.decode(recording.tokens.tolist(), recording.n_prompt, states, choose)
        scores, ids = pack(routing.scores, routing.experts, dense=self._shadow.keeps_dense)
        return {self.name: SignalRows(scores, ids, first_row=recording.n_prompt)}


def _about(kind: str, alignment: Alignment) -> str:
    periods = (("token", alignment.token_period), ("KV cache", alignment.kv_period))
    aligned = ", ".join(f"{what} aligned every {n} tokens" if n else f"{what} never aligned" for what, n in periods)
    return f"routers of a copy with weights quantised to {kind}, decode only; {aligned}"
