"""Learned prediction: a network a layer predicts the next layer's experts.

PreScope's layer-aware predictor (LLaPor). What the paper does not print is a named option.

====================  =======================================  ====================================================
point                 paper                                    here
====================  =======================================  ====================================================
features              state by PCA (4096 to 256; in the        the same, components scaled to unit variance; ids as
                      middle to 512), ids and weights of the   0 or 1 an expert, weights next to them
                      experts activated
groups of layers      input, middle, output; where they begin  of the predicted layer: first and last eighth, or
                      is not printed                           fitted to the accuracy of gate reuse [choice]
networks              blocks of Linear, GELU, Dropout; input   one block and a Linear; in the middle a residual of
                      and output shallow, middle with a        two more blocks, times the sigmoid of a Linear
                      residual block and a gating unit;        [choice]; width 384 [choice]: 0.7 and 2.9 MB a layer
                      0.5 to 2.8 MB a layer                    with 64 experts in float32
loss                  input and output: BCE, each expert's     the same, in the middle too [choice]; weights are 1
                      divided by its activation frequency,     at the uniform frequency, at most 10; lambda 1,
                      + lambda times focal BCE                 gamma 2 [choice]
optimiser             AdamW; 5 epochs of warm-up, then cosine  the same schedule in all groups; rates 1e-3 and 2e-3,
                      in input and output; higher rate and     decay 0.01 and 0.05, dropout 0.1 [choice]
                      weight decay in the middle
while training        Gaussian noise, random masking           deviation 0.05, share 0.1 [choice]
data                  30 epochs of 128 batches of 512 tokens   the same, or as many as there are, prefill and decode
online learning       possible                                 not done: a recorded signal is fixed
====================  =======================================  ====================================================
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from scipy.linalg import eigh
from torch import Tensor, nn
from torch.nn import functional

from moesim.core import files
from moesim.recorder import RecordError
from moesim.recorder.signals import DENSE_EXPERTS, pack
from moesim.trace import GateInputs, Signal, Trace
from moesim.trace.stats.balance import used, workloads
from moesim.trace.stats.prediction import recall, top_ids

GROUPS = ("input", "middle", "output")  # groups of layers, from the input to the output of the model

_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class LearnedOptions:
    """Sizes and rates; the defaults are the paper's where it prints them."""

    # pca_outer, pca_middle: components of the state that are kept; no more than its width
    pca_outer: int = 256
    pca_middle: int = 512
    width: int = 384  # of the hidden layers
    # dropout, noise, masking: share of hidden units dropped; standard deviation of the noise on the features, each of which has
    # about unit variance; share of the features masked
    dropout: float = 0.1
    noise: float = 0.05
    masking: float = 0.1
    # focal_weight, focal_power: lambda and gamma of the loss
    focal_weight: float = 1.0
    focal_power: float = 2.0
    # experts activated more rarely than this share of the uniform frequency are weighted as if they had it
    least_frequency: float = 0.1
    # rate_outer, rate_middle, decay_outer, decay_middle: peak learning rates and weight decays of AdamW
    rate_outer: float = 1e-3
    rate_middle: float = 2e-3
    decay_outer: float = 1e-2
    decay_middle: float = 5e-2
    epochs: int = 30
    warmup_epochs: int = 5
    batch_tokens: int = 512
    max_batches: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            lowest = 1 if one.name in ("pca_outer", "pca_middle", "width", "epochs", "batch_tokens", "max_batches") else 0
            highest = {"dropout": 0.99, "masking": 0.99}.get(one.name, float("inf"))
            if not lowest <= value <= highest:
                wanted = f"{lowest} to {highest}" if highest < float("inf") else f"at least {lowest}"
                raise RecordError(f"learned predictor: {one.name}: expected {wanted}, got {value}")


@dataclass(frozen=True)
class Features:
    """Projection of a state onto its principal components, each scaled to unit variance."""

    mean: Tensor
    components: Tensor

    @classmethod
    def fit(cls, states: NDArray[Any], n: int) -> Features:
        mean = states.mean(axis=0, dtype=np.float64)
        hidden = states.shape[1]
        covariance = np.zeros((hidden, hidden))
        for start in range(0, len(states), _CHUNK_ROWS):
            centred = states[start : start + _CHUNK_ROWS].astype(np.float64) - mean
            covariance += centred.T @ centred / len(states)
        n = min(n, hidden, max(1, len(states) - 1))
        variances, vectors = eigh(covariance, subset_by_index=[hidden - n, hidden - 1])
        # Directions in which nothing varies must not be blown up.
        scale = np.sqrt(np.maximum(variances[::-1], 1e-6 * variances[-1] + 1e-12))
        # One layout in memory, whether fitted or read from a file: products may differ in the last bit otherwise.
        return cls(*(torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in (mean, vectors[:, ::-1] / scale)))

    def of(self, states: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any], n_experts: int) -> Tensor:
        projected = (torch.from_numpy(states.astype(np.float32)) - self.mean) @ self.components
        ids = torch.from_numpy(experts.astype(np.int64))
        blank = torch.zeros(len(ids), n_experts)
        given = torch.from_numpy(weights.astype(np.float32))
        return torch.cat([projected, blank.scatter(1, ids, 1.0), blank.scatter(1, ids, given)], dim=1)


def _block(n_in: int, n_out: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, n_out), nn.GELU(), nn.Dropout(dropout))


class Shallow(nn.Module):
    """One block and an output: the layers near the model's input and output."""

    def __init__(self, n_features: int, n_experts: int, options: LearnedOptions) -> None:
        super().__init__()
        self.first = _block(n_features, options.width, options.dropout)
        self.last = nn.Linear(options.width, n_experts)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(features))
        return logits


class Gated(nn.Module):
    """A block, two more as a residual with a gating unit, and an output: the middle layers."""

    def __init__(self, n_features: int, n_experts: int, options: LearnedOptions) -> None:
        super().__init__()
        width = options.width
        self.first = _block(n_features, width, options.dropout)
        self.residual = nn.Sequential(_block(width, width, options.dropout), _block(width, width, options.dropout))
        self.gate = nn.Linear(width, width)
        self.last = nn.Linear(width, n_experts)

    def forward(self, features: Tensor) -> Tensor:
        state = self.first(features)
        logits: Tensor = self.last(state + self.gate(state).sigmoid() * self.residual(state))
        return logits


def network(group: str, n_features: int, n_experts: int, options: LearnedOptions) -> nn.Module:
    """Build the network of a layer of a group, with random weights."""
    return (Gated if group == "middle" else Shallow)(n_features, n_experts, options)


def eighths(n_layers: int) -> tuple[str, ...]:
    """Return the group of each layer: the first and the last eighth are input and output."""
    ends = max(1, round(n_layers / 8))
    return group_names(n_layers, ends, n_layers - ends)


def fitted_groups(accuracy: NDArray[Any]) -> tuple[str, ...]:
    """Group the layers by how well gate reuse predicts them."""
    values = np.asarray(accuracy, np.float64)
    n_layers = len(values)
    if n_layers < 4:
        return eighths(n_layers)

    def spread(first: int, last: int) -> float:
        return float(np.square(values[first:last] - values[first:last].mean()).sum())

    cuts = [(a, b) for a in range(2, n_layers - 1) for b in range(a + 1, n_layers)]
    a, b = min(cuts, key=lambda cut: spread(1, cut[0]) + spread(*cut) + spread(cut[1], n_layers))
    return group_names(n_layers, a, b)


def group_names(n_layers: int, first_middle: int, first_output: int) -> tuple[str, ...]:
    """Name the group of each layer from where the middle and the output group begin."""
    return tuple(GROUPS[(layer >= first_middle) + (layer >= first_output)] for layer in range(n_layers))


_METADATA = "moesim_learned_predictor"
_REMEDY = "train it again with moesim trace learn"


@dataclass(frozen=True, eq=False)
class Predictors:
    """Trained predictors of all layers but the first."""

    options: LearnedOptions
    groups: tuple[str, ...]  # of each layer: `input`, `middle` or `output`
    n_experts: int
    layers: tuple[tuple[Features, nn.Module], ...]  # of layers 1 and up; each reads the layer before
    facts: dict[str, Any] = field(default_factory=dict)  # what they were trained on


def train_predictors(
    inputs: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any], n_experts: int, options: LearnedOptions | None = None, *,
    groups: tuple[str, ...] | None = None, facts: Mapping[str, Any] | None = None,
    on_layer: Callable[[int, float], None] = lambda layer, loss: None,
) -> Predictors:  # fmt: skip
    """Train a predictor for every layer but the first."""
    options = options or LearnedOptions()
    n_rows, n_layers = _check(inputs, experts, weights, n_experts)
    if n_layers < 2 or n_rows < 2:
        raise RecordError(f"learned predictor: expected at least 2 layers and 2 tokens, got {n_layers} and {n_rows}; record more")
    groups = groups or eighths(n_layers)
    rows = _sample(n_rows, options)
    trained = []
    for layer in range(1, n_layers):
        here = np.asarray(inputs[rows, layer - 1])
        features = Features.fit(here, options.pca_middle if groups[layer] == "middle" else options.pca_outer)
        read = features.of(here, experts[rows, layer - 1], weights[rows, layer - 1], n_experts)
        wanted = torch.zeros(len(rows), n_experts).scatter(1, torch.from_numpy(experts[rows, layer].astype(np.int64)), 1.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed * n_layers + layer)
            model, loss = _train(read, wanted, groups[layer], options)
        trained.append((features, model))
        on_layer(layer, loss)
    return Predictors(options, groups, n_experts, tuple(trained), dict(facts or {}))


def _check(inputs: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any], n_experts: int) -> tuple[int, int]:
    if inputs.ndim != 3 or experts.shape[:2] != inputs.shape[:2] or weights.shape != experts.shape:
        raise RecordError(
            "learned predictor: expected inputs (n_rows, n_layers, hidden), experts and weights (n_rows, n_layers, top_k), "
            f"got {inputs.shape}, {experts.shape} and {weights.shape}"
        )
    if experts.size and int(experts.max()) >= n_experts:
        raise RecordError(f"learned predictor: expected ids below {n_experts}, got {int(experts.max())}")
    return inputs.shape[0], inputs.shape[1]


def _sample(n_rows: int, options: LearnedOptions) -> NDArray[np.int64]:
    wanted = min(n_rows, options.max_batches * options.batch_tokens)
    return np.sort(np.random.default_rng(options.seed).choice(n_rows, wanted, replace=False))


def _train(read: Tensor, wanted: Tensor, group: str, options: LearnedOptions) -> tuple[nn.Module, float]:
    """Train one network; also the mean loss of its last epoch."""
    model = network(group, read.shape[1], wanted.shape[1], options)
    is_middle = group == "middle"
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=options.rate_middle if is_middle else options.rate_outer,
        weight_decay=options.decay_middle if is_middle else options.decay_outer,
    )
    steps = -(-len(read) // options.batch_tokens)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_share((step + 1) / steps, options))
    frequency = wanted.mean(dim=0) / wanted.sum(dim=1).mean()
    losses = [0.0]
    for _epoch in range(options.epochs):
        losses = []
        for rows in torch.split(torch.randperm(len(read)), options.batch_tokens):
            features = read[rows]
            features = features + options.noise * torch.randn_like(features)
            features = features * (torch.rand_like(features) >= options.masking)
            loss = balanced_focal_loss(model(features), wanted[rows], frequency, options)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            schedule.step()
            losses.append(float(loss.detach()))
    return model.requires_grad_(False).train(False), float(np.mean(losses))


def rate_share(epoch: float, options: LearnedOptions) -> float:
    """Return the learning rate over its peak: linear warm-up, then a cosine to 0."""
    if epoch < options.warmup_epochs:
        return epoch / options.warmup_epochs
    left = (options.epochs - epoch) / max(1e-9, options.epochs - options.warmup_epochs)
    return 0.5 - 0.5 * math.cos(math.pi * min(1.0, max(0.0, left)))


def balanced_focal_loss(logits: Tensor, wanted: Tensor, frequency: Tensor, options: LearnedOptions) -> Tensor:
    """Expert-balanced BCE plus lambda times focal BCE."""
    bce = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    relative = (frequency * len(frequency)).clamp(min=options.least_frequency)
    focal = (1 - torch.exp(-bce)) ** options.focal_power * bce
    return (bce / relative + options.focal_weight * focal).mean()


def predict(predictors: Predictors, inputs: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float32]:
    """Predict the experts of every layer from the layer before."""
    n_rows, n_layers = _check(inputs, experts, weights, predictors.n_experts)
    hidden = len(predictors.layers[0][0].mean)
    if (n_layers, inputs.shape[2]) != (len(predictors.groups), hidden):
        raise RecordError(
            f"learned predictor: expected {len(predictors.groups)} layers of width {hidden}, "
            f"got {n_layers} of {inputs.shape[2]}; train it on a trace of this model"
        )
    scores = np.zeros((n_rows, n_layers, predictors.n_experts), np.float32)
    with torch.no_grad():
        for layer, (features, model) in enumerate(predictors.layers, start=1):
            before = [np.asarray(array[:, layer - 1]) for array in (inputs, experts, weights)]
            read = features.of(before[0], before[1], before[2], predictors.n_experts)
            scores[:, layer] = model(read).sigmoid().numpy()
    return scores


def save_predictors(predictors: Predictors, path: str | Path) -> Path:
    """Write predictors to a safetensors file; the same ones give the same bytes."""
    tensors: dict[str, Tensor] = {}
    for layer, (features, model) in enumerate(predictors.layers, start=1):
        parts = {"mean": features.mean, "components": features.components, **model.state_dict(prefix="network.")}
        tensors |= {f"{layer}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    about = {
        "options": asdict(predictors.options), "groups": predictors.groups, "n_experts": predictors.n_experts,
        "facts": predictors.facts,
    }  # fmt: skip
    about["sha256"] = _digest(tensors, about)
    return files.write_bytes(path, save(tensors, metadata={_METADATA: json.dumps(about, sort_keys=True)}))


def load_predictors(path: str | Path) -> Predictors:
    """Read what `save_predictors` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})[_METADATA])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        if about.pop("sha256") != _digest(tensors, about):
            raise ValueError("another content than was written (its sha256 differs)")
        options, n_experts, groups = LearnedOptions(**about["options"]), int(about["n_experts"]), tuple(about["groups"])
        layers = []
        for layer in range(1, len(groups)):
            features = Features(tensors[f"{layer}.mean"], tensors[f"{layer}.components"])
            model = network(groups[layer], features.components.shape[1] + 2 * n_experts, n_experts, options)
            prefix = f"{layer}.network."
            model.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
            layers.append((features, model.requires_grad_(False).train(False)))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        got = " ".join(str(error).split())[:200]
        raise RecordError(f"{path}: expected a learned predictor, got {type(error).__name__}: {got}; {_REMEDY}") from None
    return Predictors(options, groups, n_experts, tuple(layers), about["facts"])


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


NAME = "learned"
RIVALS = ("gate_next1", "residual")  # predictors that it is compared with, where the trace has them
#: PreScope's accuracy: so many experts are named as the busiest, each is right within so many of the true ones.
HOT_NAMED, HOT_RIGHT = 4, 6

_ROWS_AT_ONCE = 1024
_HASHES = ("text_sha256", "tokens_sha256")
_SAME = ("model", "n_layers", "n_experts", "top_k", "routers_sha256")


def check_no_shared_requests(calibration: Mapping[str, Any], trace: Mapping[str, Any], places: tuple[str, str]) -> None:
    """Check that no request of one trace is in another."""
    ours = _requests(calibration, places[0])
    for number, marks in enumerate(_requests(trace, places[1])):
        for other, those in enumerate(ours):
            if marks & those:
                raise RecordError(
                    f"{places[1]}: trace_requests[{number}]: expected a request that the predictor was not trained on, got "
                    f"request {other} of {places[0]}; record other prompts for calibration"
                )


def _requests(header: Mapping[str, Any], place: str) -> list[set[tuple[str, str]]]:
    listed = header.get("trace_requests")
    if not isinstance(listed, list) or not listed:
        raise RecordError(
            f"{place}: header.trace_requests: expected a list of requests, got {listed!r}; without it nothing shows that "
            "calibration and trace are apart: record it with moesim trace record"
        )
    found = []
    for number, request in enumerate(listed):
        facts = request if isinstance(request, dict) else {}
        hashes = {(key, str(value)) for key, value in facts.items() if key in _HASHES}
        if not hashes and "file" in facts and "start" in facts:
            hashes = {("file", f"{facts['file']}:{facts['start']}")}
        if not hashes:
            raise RecordError(f"{place}: header.trace_requests[{number}]: expected a hash, or file and start, got {request!r}")
        found.append(hashes)
    return found


def check_same_model(calibration: Trace, trace: Trace, places: tuple[str, str]) -> None:
    """Check that two traces with gate inputs are of the same model."""
    for found, place in zip((calibration, trace), places, strict=True):
        _learnable(found, place)
    pairs = [(key, calibration.header.get(key), trace.header.get(key)) for key in _SAME]
    pairs.append(
        ("hidden", _learnable(calibration, places[0])[0].values.shape[2], _learnable(trace, places[1])[0].values.shape[2])
    )
    for key, ours, theirs in pairs:
        if ours is not None and theirs is not None and ours != theirs:
            raise RecordError(
                f"{places[0]}: {key}: expected {theirs!r} as in {places[1]}, got {ours!r}; record both with one model"
            )


def _learnable(trace: Trace, place: str) -> tuple[GateInputs, NDArray[Any]]:
    if trace.inputs is None or not len(trace.inputs.rows):
        raise RecordError(
            f"{place}: inputs: expected the inputs of the routers, got none; record it with moesim trace record --keep-inputs all"
        )
    if trace.weights is None:
        raise RecordError(f"{place}: weights: expected gate weights, got none; record it with moesim trace record")
    return trace.inputs, trace.weights


def train_on(
    trace: Trace, options: LearnedOptions, *, fit_groups: bool = False, place: str = "calibration",
    on_layer: Callable[[int, float], None] = lambda layer, loss: None,
) -> Predictors:  # fmt: skip
    """Train predictors on all rows of a trace that have gate inputs."""
    inputs, weights = _learnable(trace, place)
    groups = eighths(trace.n_layers)
    if fit_groups:
        if RIVALS[0] not in trace.signals:
            raise RecordError(f"{place}: signals: expected '{RIVALS[0]}' to fit groups of layers to, got {sorted(trace.signals)}")
        groups = fitted_groups(_recall(trace, trace.signals[RIVALS[0]], trace.signals[RIVALS[0]].rows))
    facts = {"trained_on": trace.header.get("trace_requests", []), "n_tokens": len(inputs.rows), "model": trace.model}
    experts = np.asarray(trace.experts)[inputs.rows]
    given = inputs.values, experts, np.asarray(weights)[inputs.rows], trace.n_experts
    return train_predictors(*given, options, groups=groups, facts=facts, on_layer=on_layer)


def learned_signal(predictors: Predictors, trace: Trace, place: str = "trace") -> Signal:
    """Predict every row of a trace that has gate inputs."""
    inputs, weights = _learnable(trace, place)
    scores, ids = [], []
    for part in _chunks(len(inputs.rows)):
        rows = inputs.rows[part]
        dense = predict(predictors, inputs.values[part], np.asarray(trace.experts[rows]), np.asarray(weights[rows]))
        best = np.argsort(-dense, axis=-1, kind="stable")[..., : trace.top_k]
        kept, which = pack(dense, best, dense=trace.n_experts <= DENSE_EXPERTS)
        kept[:, 0] = 0  # nothing comes before the first layer
        scores.append(kept)
        if which is not None:
            which[:, 0] = 0
            ids.append(which)
    about = "networks trained on other requests, from the input, the experts and the gate weights of router l - 1"
    return Signal(NAME, np.asarray(inputs.rows), np.concatenate(scores), np.concatenate(ids) if ids else None, 1, 1, 1, about)


def _chunks(n_rows: int) -> Iterator[slice]:
    for start in range(0, n_rows, _ROWS_AT_ONCE):
        yield slice(start, start + _ROWS_AT_ONCE)


def with_signal(trace: Trace, signal: Signal, predictors: Predictors) -> Trace:
    """Add the signal to a trace, whose header names the requests it was trained on."""
    facts = {**predictors.facts, "options": asdict(predictors.options), "groups": list(predictors.groups)}
    return replace(trace, signals={**trace.signals, NAME: signal}, header={**trace.header, NAME: facts})


def accuracy(
    trace: Trace, calibration: Trace, groups: tuple[str, ...], batch_tokens: int = 64, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare predictors by group: recall, and 4 named experts among the 6 busiest."""
    signals = [trace.signals[name] for name in (NAME, *RIVALS) if name in trace.signals]
    rows = signals[0].rows
    for signal in signals[1:]:
        rows = np.intersect1d(rows, signal.rows)
    if not len(rows):
        raise RecordError(
            f"signals: expected rows that all of {[s.name for s in signals]} cover, got none; record them for the same"
        )
    said = {signal.name: top_ids(signal, np.isin(signal.rows, rows), trace.top_k) for signal in signals}
    said["frequency"] = np.broadcast_to(_most_frequent(calibration), (len(rows), trace.n_layers, trace.top_k))
    true = np.asarray(trace.experts)[rows]
    by_layer = {
        name: (recall(ids, true), hot_accuracy(ids, true, trace.n_experts, batch_tokens, seed)) for name, ids in said.items()
    }
    table = []
    for group in (*GROUPS, "all"):
        layers = [n for n in range(1, trace.n_layers) if group in (groups[n], "all")]
        if layers:
            row: dict[str, Any] = {"group": group, "layers": f"{layers[0]}-{layers[-1]}", "n_tokens": len(rows)}
            for name, (found, hot) in by_layer.items():
                row |= {f"{name} recall": float(found[layers].mean()), f"{name} hot": float(hot[layers].mean())}
            table.append(row)
    return table


def _recall(trace: Trace, signal: Signal, rows: NDArray[Any]) -> NDArray[np.float64]:
    return recall(top_ids(signal, np.isin(signal.rows, rows), trace.top_k), np.asarray(trace.experts)[rows])


def _most_frequent(trace: Trace) -> NDArray[np.int64]:
    return np.argsort(-used(np.asarray(trace.experts), trace.n_experts), axis=1, kind="stable")[:, : trace.top_k]


def hot_accuracy(said: NDArray[Any], true: NDArray[Any], n_experts: int, batch_tokens: int, seed: int) -> NDArray[np.float64]:
    """Return PreScope's "hot Top-4" by layer: named experts among the busiest."""
    n_rows, n_layers = true.shape[:2]
    if n_experts <= HOT_RIGHT:
        return np.full(n_layers, np.nan)
    size = min(batch_tokens, n_rows)
    batches = np.random.default_rng(seed).permutation(n_rows)[: n_rows // size * size].reshape(-1, size)
    found = np.empty(n_layers)
    for layer in range(n_layers):
        expected, actual = (workloads(ids[:, layer][batches], n_experts) for ids in (said, true))
        named = np.argsort(-expected, axis=1, kind="stable")[:, :HOT_NAMED]
        least = np.maximum(1, np.sort(actual, axis=1)[:, -HOT_RIGHT])
        found[layer] = (np.take_along_axis(actual, named, axis=1) >= least[:, None]).mean()
    return found
