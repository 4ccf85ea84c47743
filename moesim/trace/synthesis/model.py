"""The generative model: gates are directions in a space of states, and states have causes.

A gate input is the layer's mean, a part that no router reads, and the state proper, x, of energy 1 spread by the spectrum:

* what the topic of the token determines: one vector per topic and layer;
* context, an autoregressive process along the request;
* what is new with this token.

From layer to layer a share of each is renewed, so statistics along the request are those of every layer:
x[l + 1] = sqrt(1 - innovation) x[l] + sqrt(innovation) fresh.

The logits are temperature * (gate . input + bias + offset): random directions of the same spread of logits, biases that make the
loads those of the popularity, as a load-balancing loss does, and offsets of the workload, whose requests prefer the same experts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.core.processes import in_threads
from moesim.trace.format import read_container
from moesim.trace.synthesis.exact import Draws, exp, log, normal_quantiles, on_grid, total
from moesim.trace.synthesis.parameter_set import OPTIONAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.synthesis.parameter_set import ParameterSet

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]

SEED: Final = 0
"""Of the models whose biases are kept."""
FILE: Final = Path(str(resources.files("moesim.trace.synthesis"))) / "parameters" / "biases.safetensors"


def key_of(p: ParameterSet) -> str:
    """Name all that biases follow from but the seed."""
    numbers: dict[str, float] = {"n_layers": p.n_layers, "n_experts": p.n_experts, "top_k": p.top_k}
    numbers |= {name: value for name, value in p.values().items() if value or name not in OPTIONAL}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def kept_biases(p: ParameterSet, seed: int) -> NDArray[np.float32] | None:
    """Return biases that make loads as wanted; None if they are not kept."""
    if seed != SEED:
        return None
    arrays, _ = read_container(FILE)
    kept = arrays.get(key_of(p))
    return None if kept is None else np.array(kept)  # not a view of the file: it is changed in place


#: Streams of random numbers: requests of the trace and of the calibration never share any.
MODEL, REQUEST, CALIBRATION = range(3)

_OF_WORKLOADS = 7  # part of the model's random numbers, after those of `draw_model`
_BLOCK = 1024  # tokens made at once
_BALANCE_STATES = 2048
_BALANCE_STEPS = 40
_BALANCE_GAIN = 0.6  # of an error of the logarithm of a load
_LAYERS_ALIKE = 0.8  # correlation of neighbouring layers before they are ranked
_OPENING_LENGTHS = 6  # of what requests begin with, a factor e each, until nothing of it is left
_SHORT = 0.01  # layers: of the second layer nothing is left
_LARGEST_LOAD = 0.95  # of all tokens: an expert that is always used is a shared one
_SMALLEST_LOAD = 2.0**-30  # of the largest: what is above the most must have somewhere to go


@dataclass(frozen=True, eq=False)
class SyntheticModel:
    """Routers and what their inputs are made of; the same for all requests."""

    parameters: ParameterSet
    seed: int
    gates: F64  # router weights in the dimensions that they read, on a grid; they are zero in the others
    bias: F64
    mean: F32  # part of the gate input that all tokens have in common. The first half are the dimensions that routers read
    topics: F32
    innovation: F64  # share of the state that is renewed after each layer
    spread: F32  # standard deviation of the state along each dimension
    shares: F64  # `topic_share` and `context_share` of each layer
    prompt_shares: F64  # the same, of prompt tokens
    opening: F32  # state that all requests share at the first decoded tokens, before it is weighted


def draw_model(parameters: ParameterSet, seed: int) -> SyntheticModel:
    """Draw the routers, means and topics of one synthetic model."""
    p = parameters
    steps = np.arange(p.n_layers - 1)
    innovation = _settling(p.innovation, p.first_innovation, p.settling, steps)
    variance = exp(-p.spectrum * log(np.arange(1, p.width + 1)))
    variance /= total(variance)
    spread = np.sqrt(variance).astype(np.float32)
    # A generator for each part: changing one parameter leaves the random numbers of the other parts as they are.
    of_gates, of_topics, of_mean, of_loads, of_states, of_layers, of_opening = (Draws(seed, MODEL, part) for part in range(7))

    drawn = of_gates.normals(p.n_layers, p.n_experts, p.width)
    gates = on_grid(drawn / np.sqrt(np.square(on_grid(drawn * spread)).sum(axis=2, keepdims=True)))
    topics = _topics(p, of_topics, innovation) * spread
    mean = _means(p, of_mean, spread, steps)
    ladder = layer_ladder(p.n_layers, of_layers)
    fade = _fade(p)
    ladder = ladder * (1 - fade) + ladder.min() * fade  # whatever is drawn, the first layers are at the bottom
    shares = layer_shares(p, ladder)
    loads = expert_loads(p, of_loads, ladder)
    balanced = kept_biases(p, seed)
    if balanced is None:
        balanced = balanced_bias(p, gates, topics, spread, loads, shares[:, 0], of_states)
    # Routers are balanced on what they see, mean included.
    bias = on_grid(balanced) - (gates @ on_grid(mean[:, : p.width, None]))[:, :, 0]
    n_opening = math.ceil(_OPENING_LENGTHS * p.opening)
    opening = carry(of_opening.normals(p.n_layers, n_opening, p.width), innovation) * spread
    prompt_shares = layer_shares(p, ladder, p.prompt_loss)
    return SyntheticModel(p, seed, gates, bias, mean, topics, innovation, spread, shares, prompt_shares, opening)


def layer_ladder(n_layers: int, draws: Draws) -> F64:
    """Return the place of each layer among normal quantiles."""
    walk = _remembering(draws.normals(n_layers).astype(np.float64), _LAYERS_ALIKE)
    return normal_quantiles(n_layers)[np.argsort(np.argsort(walk, kind="stable"))]


def _remembering(values: NDArray[Any], keep: float | np.float32) -> NDArray[Any]:
    for i in range(1, len(values)):
        values[i] += keep * values[i - 1]
    return values


def layer_shares(p: ParameterSet, ladder: F64, loss: float = 0.0) -> F64:
    """Compute the topic's and the context's share of each layer, (n_layers, 2)."""
    shares = np.asarray([p.topic_share, p.context_share])
    steps = p.locality_spread * ladder - p.shallow * _fade(p) - loss
    if not steps.any():
        return np.tile(shares, (p.n_layers, 1))
    moved = shares * exp(steps[:, None])  # a step of the logit multiplies the odds
    return np.asarray(moved / (moved + (1 - shares)), np.float64)


def _fade(p: ParameterSet) -> F64:
    """Compute how much each layer is one of the first, from 1 on."""
    return exp(-np.arange(p.n_layers) / max(p.shallow_layers, _SHORT)) if p.shallow else np.zeros(p.n_layers)


def _settling(later: float, first: float, layers: float, steps: NDArray[np.int64]) -> F64:
    return later + (first - later) * exp(-steps / layers)


def carry(fresh: F32, innovation: F64) -> F32:
    """Keep from layer to layer what is not renewed."""
    for layer, share in enumerate(innovation, 1):
        fresh[layer] *= np.float32(np.sqrt(share))
        fresh[layer] += np.float32(np.sqrt(1 - share)) * fresh[layer - 1]
    return fresh


def _topics(p: ParameterSet, draws: Draws, innovation: F64) -> F32:
    topics = carry(draws.normals(p.n_layers, p.n_topics, p.width), innovation)
    if p.n_topics > 1:
        for layer in topics:  # by layer, for large ones
            values = on_grid(layer)
            mean = values.sum(axis=0) / p.n_topics
            spread = np.sqrt(np.square(values).sum(axis=0) / p.n_topics - np.square(mean))
            layer[:] = (values - mean) / np.where(spread > 0, spread, 1)  # two topics may be equal on the grid
    return topics


def _means(p: ParameterSet, draws: Draws, spread: F32, steps: NDArray[np.int64]) -> F32:
    """Draw the mean gate input of each layer, in units of the state's energy."""
    turns = _settling(p.mean_turn, p.first_turn, p.settling, steps)
    means = _unit(np.multiply(draws.normals(p.n_layers, 2, p.width), spread, dtype=np.float64))
    for layer, turn in enumerate(turns, 1):  # by that angle exactly, in a random direction
        aside = _unit(means[layer] - _dot(means[layer], means[layer - 1]) * means[layer - 1])
        means[layer] = np.sqrt(1 - turn) * means[layer - 1] + np.sqrt(turn) * aside
    energy = p.mean_share / (1 - p.mean_share - p.unread_share)
    parts = np.sqrt(np.asarray([p.mean_read, 1 - p.mean_read]) * energy)
    return np.asarray(means * parts[:, None], np.float32).reshape(p.n_layers, 2 * p.width)


def _dot(one: F64, other: F64) -> F64:
    products = (one * other).reshape(-1, one.shape[-1])
    return np.asarray([total(row) for row in products]).reshape(*one.shape[:-1], 1)


def _unit(vectors: F64) -> F64:
    return vectors / np.sqrt(_dot(vectors, vectors))


def expert_loads(p: ParameterSet, draws: Draws, ladder: F64 | None = None) -> F64:
    """Draw each expert's share of the activations of its layer."""
    ladder = np.zeros(p.n_layers) if ladder is None else ladder
    popularity = p.popularity * exp(p.popularity_spread * ladder)
    return np.stack([_loads(p, float(one))[draws.order(p.n_experts)] for one in popularity])


def _loads(p: ParameterSet, popularity: float) -> F64:
    normal = normal_quantiles(p.n_experts)
    tail = p.popularity_tail
    shaped = (exp(tail * normal) - 1) / tail if abs(tail) > 1e-6 else normal
    load = np.maximum(exp(popularity * (shaped - shaped.max())), _SMALLEST_LOAD)
    load /= total(load)
    most = _LARGEST_LOAD / p.top_k
    while load.max() > most * (1 + 1e-9):  # what is above the most goes to the others
        over = load >= most
        load = np.where(over, most, load * (1 - most * over.sum()) / total(load[~over]))
    return np.asarray(load, np.float64)


def balanced_bias(
    p: ParameterSet,
    gates: F64,
    topics: F32,
    spread: F32,
    loads: F64,
    topic_share: F64,
    draws: Draws,
) -> F32:
    """Find the biases with which experts' loads are as wanted."""
    spreads = workload_spreads(p)

    def logits() -> Iterator[F32]:
        for layer in range(p.n_layers):
            topic = topics[layer, np.arange(_BALANCE_STATES) % p.n_topics]
            own = draws.normals(_BALANCE_STATES, p.width) * spread
            state = np.float32(np.sqrt(topic_share[layer])) * topic + np.float32(np.sqrt(1 - topic_share[layer])) * own
            found = (on_grid(state) @ gates[layer].T).astype(np.float32)
            if p.workload_spread:  # each of another workload
                found += np.float32(spreads[layer]) * draws.normals(*found.shape)
            yield found

    found = in_threads(lambda one: _balanced(*one, p.top_k), zip(logits(), loads, strict=True))
    return np.asarray(found, np.float32)


def _balanced(logits: F32, loads: F64, top_k: int) -> F64:
    n_states, n_experts = logits.shape
    wanted = log(loads)
    log_of_count = log((np.arange(n_states + 1) / top_k + 0.2) / n_states)
    current, error = 0.5 * (wanted - total(wanted) / n_experts), np.zeros(n_experts)
    gain = np.full(n_experts, _BALANCE_GAIN)
    shifted, parted, chosen = np.empty_like(logits), np.empty_like(logits), np.empty(logits.shape, bool)
    for _ in range(_BALANCE_STEPS):
        np.add(logits, current.astype(np.float32), out=shifted)
        np.copyto(parted, shifted)
        parted.partition(n_experts - top_k, axis=-1)
        np.greater_equal(shifted, parted[:, n_experts - top_k, None], out=chosen)
        count = np.add.reduce(chosen, axis=0, dtype=np.int16)  # no more than the states
        before, error = error, wanted - log_of_count[count]
        # Gates that point the same way take tokens from each other: an expert whose error changes sign steps less.
        gain = np.where(error * before < 0, 0.5 * gain, np.minimum(1.1 * gain, _BALANCE_GAIN))
        current += gain * error
    return np.asarray(current, np.float64)


def request_states(model: SyntheticModel, stream: int, number: int, n_tokens: int, n_prompt: int = 0) -> Iterator[F32]:
    """Make the states of one request, a block of tokens at a time."""
    p = model.parameters
    topic = _topic_path(p, Draws(model.seed, stream, number, 0), n_tokens)
    draws = Draws(model.seed, stream, number, 1)
    of_prompt, of_decode = (_weights(shares) for shares in (model.prompt_shares, model.shares))
    keep, new = np.float32(p.context_persistence), np.float32(np.sqrt(1 - p.context_persistence * p.context_persistence))
    last: F32 | None = None
    for begin in range(0, n_tokens, _BLOCK):
        shape = (p.n_layers, min(_BLOCK, n_tokens - begin), p.width)
        of_topic, of_context, of_token = of_decode
        if p.prompt_loss and begin < n_prompt:
            is_prompt = np.arange(begin, begin + shape[1])[:, None] < n_prompt
            of_topic, of_context, of_token = (np.where(is_prompt, *both) for both in zip(of_prompt, of_decode, strict=True))
        context = draws.normals(*shape)
        context[:, 0 if last is not None else 1 :] *= new
        if last is not None:
            context[:, 0] += keep * last
        _remembering(context.swapaxes(0, 1), keep)
        last = context[:, -1].copy()
        token = draws.normals(*shape)
        if p.locality_spread or p.shallow:  # what is carried on must not depend on the layer, so it is weighted afterwards
            states = of_context * carry(context, model.innovation) + of_token * carry(token, model.innovation)
        else:
            context *= of_context
            context += of_token * token
            states = carry(context, model.innovation)
        states *= model.spread
        states += of_topic * model.topics[:, topic[begin : begin + shape[1]]]
        _begin_alike(model, states, begin - n_prompt)
        yield states


def _weights(shares: F64) -> tuple[F32, F32, F32]:
    """Compute what multiplies topic, context and new part, (n_layers, 1, 1) each."""
    topic, context = shares.T[:, :, None, None]
    parts = (topic, (1 - topic) * context, (1 - topic) * (1 - context))
    of_topic, of_context, of_token = (np.sqrt(part).astype(np.float32) for part in parts)
    return of_topic, of_context, of_token


def workload_offsets(model: SyntheticModel, number: int) -> F64:
    """Draw what a request's workload adds to the logits, (n_layers, n_experts); nothing if workloads are alike."""
    p = model.parameters
    if not p.workload_spread:
        return np.zeros((p.n_layers, 1))
    workload = number // p.workload_requests if p.workload_requests else 0
    drawn = Draws(model.seed, MODEL, _OF_WORKLOADS, workload).normals(p.n_layers, p.n_experts)
    return on_grid(workload_spreads(p)[:, None] * drawn)


def workload_spreads(p: ParameterSet) -> F64:
    """Compute the spread of workloads' offsets in each layer: the first layers tell workloads apart least."""
    return p.workload_spread * (1 - _fade(p))


def _begin_alike(model: SyntheticModel, states: F32, position: int) -> None:
    """Put the shared opening into states that begin at a position of the decode."""
    first, last = max(position, 0), min(position + states.shape[1], model.opening.shape[1])
    if first < last:
        share = exp(-np.arange(first, last) / model.parameters.opening)[:, None]
        here = slice(first - position, last - position)
        states[:, here] *= np.sqrt(1 - share).astype(np.float32)
        states[:, here] += np.sqrt(share).astype(np.float32) * model.opening[:, first:last]


def _topic_path(p: ParameterSet, draws: Draws, n_tokens: int) -> NDArray[np.int64]:
    """Draw the topic of each token: that of the one before, or one of the request's."""
    changes = draws.uniforms(n_tokens) >= p.topic_persistence
    changes[0] = True
    n = int(changes.sum())
    new, which = draws.uniforms(n), draws.uniforms(n)
    weight = p.topic_concentration * p.n_topics
    earlier = np.arange(n)
    is_new = new * (weight + earlier) < weight
    drawn = np.where(is_new, which * p.n_topics, which * earlier).astype(np.int64)
    for i in np.flatnonzero(~is_new):
        drawn[i] = drawn[drawn[i]]
    return np.asarray(drawn[np.cumsum(changes) - 1], np.int64)


def unread_parts(model: SyntheticModel, stream: int, number: int, n_tokens: int) -> F32:
    """Make the part of a request's gate inputs that no router reads."""
    p = model.parameters
    energy = p.unread_share / (1 - p.mean_share - p.unread_share)
    return Draws(model.seed, stream, number, 2).normals(p.n_layers, n_tokens, p.width) * np.float32(np.sqrt(energy / p.width))
