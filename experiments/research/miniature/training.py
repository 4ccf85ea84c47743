"""Train a miniature in minutes on a CPU, with the load balanced in every layer.

The model classes are transformers' own; only the order in which the experts' products are
computed is replaced while training, because the library's loop spends most of a small model's time in
indexing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from miniature.balance import RouterLogits, layer_balance_loss
from miniature.muon import MatrixMomentum
from miniature.shapes import new_model
from miniature.workers import Backward, Helpers

#: Name under which `sorted_experts` is known to transformers.
SORTED = "moesim_sorted"


@dataclass(frozen=True)
class TrainingPlan:
    """How to train.

    Attributes
    ----------
    steps : int
        Optimiser steps.
    seed : int
        Seed of the weights and of the batches.
    minutes : float or None
        Wall time after which the schedule is over even if steps are left. A run that ends so is not
        repeatable to the bit; the result says which it was.
    batch_tokens, sequence : int
        Tokens a step and tokens a sequence, until `long_from`.
    long_sequence : int
        From `long_from` of the way on, every `long_every`-th step has sequences of this many tokens, so that
        no position that is recorded later is unknown to the model.
    matrix_rate, other_rate, weight_decay : float
        Of the optimiser (see `miniature.muon`), at the peak.
    warmup : float
        Share of the schedule spent warming up; then a cosine to a fiftieth of the rate.
    balance : float
        Weight of the load-balancing loss.
    workers : int
        Processes that share a batch, see `miniature.workers`; with several, each uses one thread.
    device : str
        Where to train; helpers are for the CPU only.
    """

    steps: int = 1200
    seed: int = 0
    minutes: float | None = None
    batch_tokens: int = 2048
    sequence: int = 256
    long_sequence: int = 1152
    long_from: float = 0.6
    long_every: int = 3
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.04
    balance: float = 0.03
    workers: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows after a step."""

    step: int
    fraction: float
    loss: float
    imbalance: float
    tokens_per_s: float


def sorted_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of one layer with rows sorted by expert, all in two grouped products.

    Same sums as the library's loop, other order. Shapes: hidden_states (n_tokens, hidden), top_k_index and
    top_k_weights (n_tokens, top_k); returns (n_tokens, hidden).
    """
    n_tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=self.num_experts).cumsum(0).int()
    rows = hidden_states.index_select(0, order // top_k)
    gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    outputs = F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    slots = outputs.index_select(0, back).view(n_tokens, top_k, -1)
    return (slots * top_k_weights.unsqueeze(-1).to(slots.dtype)).sum(dim=1)


def train(
    start: PreTrainedConfig | PreTrainedModel,
    tokens: NDArray[np.int64],
    plan: TrainingPlan,
    report: Callable[[Progress], None],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train a model on a row of tokens.

    Parameters
    ----------
    start : PreTrainedConfig or PreTrainedModel
        What to train from random weights, or a model to train further, with a schedule of its own.
    tokens : ndarray of int64, (n_tokens,)
    plan : TrainingPlan
    report : callable
        Called after every step.

    Returns
    -------
    model : PreTrainedModel
        In evaluation mode.
    facts : dict
        The plan, steps done, tokens seen, seconds, the mean training loss of the last 50 steps and why it
        stopped.
    """
    ALL_EXPERTS_FUNCTIONS.register(SORTED, sorted_experts)
    torch.manual_seed(plan.seed)
    model = new_model(start) if isinstance(start, PreTrainedConfig) else start
    experts_implementation = model.config._experts_implementation
    model.config._experts_implementation = SORTED
    module: nn.Module = model
    module.to(plan.device).train()
    optimiser = MatrixMomentum(model, plan.matrix_rate, plan.other_rate, plan.weight_decay)
    rng = np.random.default_rng(plan.seed)
    stream = torch.from_numpy(tokens)
    starts = _starts(len(tokens), plan, rng)
    losses: list[float] = []
    seen = 0
    began = time.monotonic()
    stopped_by = "steps"
    if plan.workers > 1:
        torch.set_num_threads(1)
    helpers = Helpers(model, plan.workers - 1, _make_backward, model.config, plan.balance)
    with RouterLogits(model) as router, helpers:
        for step in range(plan.steps):
            fraction = _fraction(step, plan, began)
            if fraction >= 1.0:
                stopped_by = "minutes"
                break
            sequence = _sequence(step, fraction, plan)
            n_rows = max(1, plan.batch_tokens // sequence // plan.workers) * plan.workers
            rows = [next(starts) for _ in range(n_rows)]
            batch = torch.stack([stream[start : start + sequence] for start in rows]).to(plan.device)
            loss, imbalance = helpers.gradients(batch, lambda part: _backward(model, router, part, plan.balance))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step(schedule(fraction, plan.warmup))
            losses.append(loss)
            seen += batch.numel()
            report(Progress(step + 1, fraction, loss, imbalance, seen / (time.monotonic() - began)))
    module.to("cpu").train(False)
    model.config._experts_implementation = experts_implementation
    facts = {
        "plan": asdict(plan),
        "steps": len(losses),
        "tokens_seen": seen,
        "seconds": round(time.monotonic() - began, 1),
        "train_loss_last_50": round(float(np.mean(losses[-50:])), 4),
        "stopped_by": stopped_by,
    }
    return model, facts


def mean_loss(model: PreTrainedModel, tokens: NDArray[np.int64], sequence: int, max_tokens: int) -> float:
    """Cross-entropy in nats a token over consecutive windows of `tokens`, at most `max_tokens` of them."""
    with torch.no_grad():
        n_windows = min(len(tokens), max_tokens) // sequence
        windows = torch.from_numpy(tokens[: n_windows * sequence]).view(n_windows, sequence)
        total = 0.0
        for window in torch.split(windows, max(1, 2048 // sequence)):
            logits = model(input_ids=window, use_cache=False).logits
            total += float(
                F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), window[:, 1:].reshape(-1), reduction="sum")
            )
        return total / (n_windows * (sequence - 1))


def schedule(fraction: float, warmup: float) -> float:
    """Learning rate over its peak: linear warm-up, then a cosine to a fiftieth."""
    if fraction < warmup:
        return (fraction + 1e-3) / (warmup + 1e-3)
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))


def _fraction(step: int, plan: TrainingPlan, began: float) -> float:
    by_steps = step / plan.steps
    return by_steps if plan.minutes is None else max(by_steps, (time.monotonic() - began) / (60 * plan.minutes))


def _sequence(step: int, fraction: float, plan: TrainingPlan) -> int:
    is_long = fraction >= plan.long_from and step % plan.long_every == 0
    return plan.long_sequence if is_long else plan.sequence


def _starts(n_tokens: int, plan: TrainingPlan, rng: np.random.Generator) -> Iterator[int]:
    """Where sequences start: each block of the text once, in random order, before any comes again."""
    last = n_tokens - max(plan.long_sequence, plan.sequence)
    while True:
        shift = int(rng.integers(plan.sequence))
        for block in rng.permutation(max(1, (last - shift) // plan.sequence)).tolist():
            yield min(shift + block * plan.sequence, last)


def _make_backward(data: list[Tensor], config: PreTrainedConfig, weight: float) -> tuple[PreTrainedModel, Backward]:
    """Build a model on given parameters, in a process that helps with gradients."""
    ALL_EXPERTS_FUNCTIONS.register(SORTED, sorted_experts)
    model = new_model(config)
    model.config._experts_implementation = SORTED
    model.train()
    for parameter, tensor in zip(model.parameters(), data, strict=True):
        parameter.data = tensor
    router = RouterLogits(model).__enter__()
    return model, lambda part: _backward(model, router, part, weight)


def _backward(model: PreTrainedModel, router: RouterLogits, batch: Tensor, weight: float) -> tuple[float, float]:
    """Gradients of one batch; returns (cross-entropy, imbalance)."""
    logits = model(input_ids=batch, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
    balance, imbalance = layer_balance_loss(router.take(), model.config.num_experts_per_tok)
    torch.autograd.backward(loss + weight * balance)
    return float(loss.detach()), imbalance
