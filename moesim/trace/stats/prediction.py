"""How predictable routing is: recall of recorded signals and of a co-occurrence table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.core.gate import check_pairs
from moesim.trace.stats.balance import BATCH_SIZES, compose, workloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from moesim.trace import Signal, Trace
    from moesim.trace.stats.balance import Context, Sample


def recall(predicted: NDArray[Any], experts: NDArray[Any]) -> NDArray[np.float64]:
    """Compute the share of the routed experts that were predicted, layer by layer."""
    found = (experts[..., :, None] == predicted[..., None, :]).any(axis=3)
    return np.asarray(found.mean(axis=(0, 2)), np.float64)


def signal_recall(trace: Trace, signal: Signal, rows: NDArray[Any] | None = None) -> float:
    """Compute the recall of a signal's top_k, over its layers and rows."""
    by_layer = signal_recall_by_layer(trace, signal, rows)
    return float("nan") if np.isnan(by_layer).all() else float(np.nanmean(by_layer))


def signal_recall_by_layer(trace: Trace, signal: Signal, rows: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Compute the recall of a signal's top_k, layer by layer."""
    covered = np.asarray(signal.rows)
    wanted = np.ones(len(covered), bool) if rows is None else np.isin(covered, rows)
    result = np.full(trace.n_layers, np.nan)
    if wanted.any():
        layers = slice(signal.first_layer, None)
        predicted = top_ids(signal, wanted, trace.top_k)[:, layers]
        result[layers] = recall(predicted, np.asarray(trace.experts)[covered[wanted]][:, layers])
    return result


def top_ids(signal: Signal, which: Any, top_k: int) -> NDArray[Any]:
    """Read the best ids of a signal."""
    if signal.ids is not None:
        return np.asarray(signal.ids[which][..., :top_k])
    return np.argsort(-np.asarray(signal.scores[which], np.float32), axis=-1, kind="stable")[..., :top_k]


def coactivation(experts: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count which experts of the next layer follow those of each layer."""
    n_layers = experts.shape[1]
    check_pairs("co-activation", n_layers, n_experts)
    table = np.zeros((n_layers, n_experts, n_experts), np.int64)
    for layer in range(n_layers - 1):
        table[layer] = pair_counts(experts[:, layer], experts[:, layer + 1], n_experts)
    return table


def pair_counts(here: NDArray[Any], there: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count pairs of experts of the same rows in two layers."""
    check_pairs("co-activation", 1, n_experts)
    pairs = here.astype(np.int64)[:, :, None] * n_experts + there.astype(np.int64)[:, None, :]
    return np.bincount(pairs.ravel(), minlength=n_experts**2).reshape(n_experts, n_experts)


def conditional(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Turn pair counts into P(there | here)."""
    total = np.asarray(counts, np.float64).sum(axis=1, keepdims=True)
    shares = np.zeros(counts.shape, np.float64)
    np.divide(counts, total, out=shares, where=total > 0)
    return shares


def coactivation_scores(shares: NDArray[np.float64], experts: NDArray[Any]) -> NDArray[np.float64]:
    """Score the experts of the next layer by those of this one."""
    return np.asarray(shares[experts.astype(np.int64)].sum(axis=1))


def coactivation_recall(experts: NDArray[Any], request: NDArray[Any], n_experts: int) -> float:
    """Compute the recall of a co-occurrence table of half of the requests on the rest."""
    by_layer = coactivation_recall_by_layer(experts, request, n_experts)
    return float("nan") if np.isnan(by_layer).all() else float(np.nanmean(by_layer))


def coactivation_recall_by_layer(experts: NDArray[Any], request: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute `coactivation_recall` layer by layer."""
    numbers, number = np.unique(request, return_inverse=True)
    is_seen = np.random.default_rng(0).permutation(len(numbers)) < (len(numbers) + 1) // 2
    seen, unseen = experts[is_seen[number]], experts[~is_seen[number]]
    n_layers, top_k = experts.shape[1:]
    result = np.full(n_layers, np.nan)
    if not len(unseen):
        return result
    chosen = np.zeros((len(unseen), n_experts), np.float64)
    for layer in range(n_layers - 1):
        shares = conditional(pair_counts(seen[:, layer], seen[:, layer + 1], n_experts))
        chosen[:] = 0
        np.put_along_axis(chosen, unseen[:, layer].astype(np.int64), 1.0, axis=1)
        result[layer + 1] = among_best(chosen @ shares, unseen[:, layer + 1], top_k).mean()
    return result


def among_best(scores: NDArray[Any], ids: NDArray[Any], n: int) -> NDArray[np.bool_]:
    """Return which experts are among the n best of their row."""
    which = ids.astype(np.int64)
    mine = np.take_along_axis(scores, which, axis=-1)
    found = np.empty(ids.shape, bool)
    number = np.arange(scores.shape[1])
    for j in range(ids.shape[1]):
        own = mine[:, j, None]
        better = (scores > own) | ((scores == own) & (number < which[:, j, None]))
        found[:, j] = better.sum(axis=1) < n
    return found


class WorkloadRecall(NamedTuple):
    """Recall of the busiest experts at one batch size."""

    batch_size: int
    n_steps: int
    n: tuple[int, ...]
    by_layer: NDArray[np.float64]
    """(len(n), n_layers): nan in layers that the signal says nothing about."""
    chance: NDArray[np.float64]
    """(len(n),): what experts named at random would score, mean over the layers that are covered."""


def busiest_found(predicted: NDArray[Any], true: NDArray[Any], n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compare the n busiest experts, predicted and true."""
    n_experts = true.shape[1]
    possible = np.minimum(n, (true > 0).sum(axis=1))
    least = np.partition(true, n_experts - n, axis=-1)[:, n_experts - n]
    right = true >= np.maximum(least, 1)[:, None]
    # One key for workload and id, so that the n first are determined.
    key = -predicted.astype(np.int64) * n_experts + np.arange(n_experts)
    named = np.argpartition(key, n - 1, axis=-1)[:, :n]
    found = np.take_along_axis(right & (predicted > 0), named, axis=-1).sum(axis=1) / possible
    return found, right.mean(axis=1) * n / possible


def workload_recall(
    trace: Trace, signal: Signal, rows: NDArray[Any], batch_sizes: Sequence[int], counts: Sequence[int], seed: int = 0
) -> list[WorkloadRecall]:
    """Compute how well a signal names the busiest experts of batches."""
    wanted = np.flatnonzero(np.isin(signal.rows, rows))
    covered = np.asarray(signal.rows)[wanted]
    n_layers, n_experts = trace.n_layers, trace.n_experts
    sizes = tuple(n for n in counts if n < n_experts)
    layers = range(signal.first_layer, n_layers)
    if not len(covered) or not sizes or not layers:
        return []
    true_ids = np.asarray(trace.experts)[covered]
    said_ids = top_ids(signal, wanted, trace.top_k)
    request = np.asarray(trace.request)[covered]
    result = []
    for size in batch_sizes:
        batches = compose(request, size, seed)
        if not batches:
            continue
        steps = np.concatenate(batches)
        found, chance = np.full((len(sizes), n_layers), np.nan), np.zeros((len(sizes), len(layers)))
        for layer in layers:
            true, said = (workloads(ids[:, layer][steps], n_experts) for ids in (true_ids, said_ids))
            for i, n in enumerate(sizes):
                right, by_chance = busiest_found(said, true, n)
                found[i, layer], chance[i, layer - signal.first_layer] = right.mean(), by_chance.mean()
        result.append(WorkloadRecall(size, len(steps), sizes, found, chance.mean(axis=1)))
    return result


def state_cosine(inputs: NDArray[Any], residual: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Compare what one router reads with what the next one reads (DALI, Table 8)."""
    n_layers = inputs.shape[1]
    result = np.empty(n_layers - 1)
    for layer in range(n_layers - 1):
        here, there = (np.asarray(inputs[:, at], np.float32) for at in (layer, layer + 1))
        if residual is not None:
            here = here + np.asarray(residual[layer], np.float32)
        length = np.linalg.norm(here, axis=1) * np.linalg.norm(there, axis=1)
        product = np.einsum("nh,nh->n", here, there)
        result[layer] = np.divide(product, length, out=np.zeros_like(product), where=length > 0).mean(dtype=np.float64)
    return result


TOP_COUNTS = (1, 2, 4)


def prediction(context: Context) -> dict[str, Any]:
    """Compute the figures of prediction."""
    context.begin("signals", 2)
    sample = context.sample
    trace = sample.trace
    result: dict[str, Any] = {"uniform": trace.top_k / trace.n_experts, "activated": {}, "workload": {}}
    for name, signal in sorted(trace.signals.items()):
        by_layer = signal_recall_by_layer(trace, signal, sample.rows)
        if np.isnan(by_layer).all():
            context.absent[f"activated.{name}"] = f"the signal covers none of these {sample.phase} rows"
        n_rows = int(np.isin(signal.rows, sample.rows).sum())
        result["activated"][name] = _recall(by_layer, signal.lookahead, n_rows)
        found = workload_recall(trace, signal, sample.rows, BATCH_SIZES, TOP_COUNTS)
        result["workload"][name] = [
            {
                "batch_size": at.batch_size,
                "n_steps": at.n_steps,
                "n": n,
                "value": np.nanmean(at.by_layer[i]),
                "chance": at.chance[i],
                "by_layer": at.by_layer[i],
            }
            for at in found
            for i, n in enumerate(at.n)
        ]
    if not trace.signals:
        context.absent["workload"] = "the trace has no signals"
    context.begin("co-activation", 1)
    by_layer = coactivation_recall_by_layer(sample.experts, sample.request, trace.n_experts)
    if np.isnan(by_layer).all():
        context.absent["activated.coactivation"] = "counting on one half of the requests needs two requests, and two layers"
    result["activated"]["coactivation"] = _recall(by_layer, 1, len(sample.rows))
    result["states"] = _states(sample, context.absent)
    return result


def _recall(by_layer: NDArray[np.float64], lookahead: int, n_rows: int) -> dict[str, Any] | None:
    if np.isnan(by_layer).all():
        return None
    return {"value": np.nanmean(by_layer), "lookahead": lookahead, "n_rows": n_rows, "by_layer": by_layer}


def _states(sample: Sample, absent: dict[str, str]) -> dict[str, Any] | None:
    trace = sample.trace
    if trace.inputs is None:
        absent["states"] = "the trace has no gate inputs"
        return None
    wanted = np.isin(trace.inputs.rows, sample.rows)
    if not wanted.any() or trace.n_layers < 2:
        absent["states"] = f"gate inputs cover none of these {sample.phase} rows, or there is one layer only"
        return None
    values = np.asarray(trace.inputs.values)[wanted]
    plain = state_cosine(values)
    result: dict[str, Any] = {"n_rows": len(values), "gate_reuse": {"value": plain.mean(), "by_layer": plain}, "residual": None}
    if "residual" in trace.tables:
        corrected = state_cosine(values, np.asarray(trace.tables["residual"]))
        result["residual"] = {"value": corrected.mean(), "by_layer": corrected}
    else:
        absent["states.residual"] = "the trace has no residual vectors"
    return result
