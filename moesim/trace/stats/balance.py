"""How evenly a router spreads its tokens, next to a uniform one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from moesim.core.progress import Progress
    from moesim.trace import Trace

PHASES = {"prefill": 0, "decode": 1}


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of one phase of a trace, request after request in token order."""

    trace: Trace  # where they come from
    phase: str  # `"prefill"` or `"decode"`
    rows: NDArray[np.int64]  # their numbers in the trace, ascending
    request: NDArray[Any]  # request of each
    experts: NDArray[Any]  # expert ids in rank order
    sampled: bool  # whether the phase has more rows than these

    @cached_property
    def n_requests(self) -> int:
        return len(np.unique(self.request))


def phase_rows(trace: Trace, phase: str) -> NDArray[np.int64]:
    """Return the numbers of the rows of a phase."""
    return np.flatnonzero(np.asarray(trace.phase) == PHASES[phase]).astype(np.int64)


def main_phase(trace: Trace) -> str:
    """Choose decode, unless the trace has none."""
    return "decode" if len(phase_rows(trace, "decode")) else "prefill"


def select(trace: Trace, phase: str, max_rows: int | None = None) -> Sample:
    """Take the rows of a phase."""
    if phase not in PHASES:
        raise TraceError(f"trace statistics: expected phase 'prefill' or 'decode', got {phase!r}")
    rows = phase_rows(trace, phase)
    if not len(rows):
        raise TraceError(f"trace statistics: the trace holds no {phase} rows; choose the other phase")
    request = np.asarray(trace.request)[rows]
    sampled = False
    if max_rows is not None and max_rows < len(rows):
        last = int(np.searchsorted(request, request[max_rows - 1], side="right"))
        sampled = last < len(rows)
        rows, request = rows[:last], request[:last]
    return Sample(trace, phase, rows, request, np.asarray(trace.experts)[rows], sampled)


def spans(request: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first row and the length of each request."""
    _, first, length = np.unique(request, return_index=True, return_counts=True)
    return first.astype(np.int64), length.astype(np.int64)


@dataclass
class Context:
    """Handed to the maker of each group of figures."""

    sample: Sample  # the rows to describe
    frequency: NDArray[np.float64]  # their activation frequency
    progress: Progress  # where the steps are counted
    absent: dict[str, str] = field(default_factory=dict)  # figure of this group -> why it is None

    def begin(self, text: str, steps: int) -> None:
        """Show the next work; its steps count at once."""
        self.progress.describe(text)
        self.progress.advance(steps)


def used(experts: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count the rows that used each expert, (n_layers, n_experts)."""
    n_layers = experts.shape[1]
    places = experts + np.arange(n_layers, dtype=np.int64)[:, None] * n_experts
    return np.bincount(places.ravel(), minlength=n_layers * n_experts).reshape(n_layers, -1)


def activation_frequency(experts: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """Compute each expert's share of the activations of its layer."""
    n_rows, _, top_k = experts.shape
    return np.asarray(used(experts, n_experts) / max(1, n_rows * top_k), np.float64)


def entropy_by_layer(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the entropy of the activations over log(n_experts)."""
    logs = np.log(np.where(frequency > 0, frequency, 1.0))
    return np.asarray(-(frequency * logs).sum(axis=-1) / np.log(frequency.shape[-1]))


def normalised_entropy(frequency: NDArray[np.float64]) -> float:
    """Average `entropy_by_layer` over layers."""
    return float(entropy_by_layer(frequency).mean())


def top_over_uniform(frequency: NDArray[np.float64]) -> float:
    """Average `top_by_layer` over layers."""
    return float(top_by_layer(frequency).mean())


def top_by_layer(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the use of the most used expert over the mean."""
    return np.asarray(frequency.max(axis=-1) * frequency.shape[-1])


def gini(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the Gini coefficient of the activations."""
    n = frequency.shape[-1]
    rank = 2 * np.arange(1, n + 1) - n - 1
    return np.asarray((np.sort(frequency, axis=-1) * rank).sum(axis=-1) / n)


def uniform_counts(
    rng: np.random.Generator, n_rows: ArrayLike, n_experts: int, top_k: int, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    """Draw how often each expert is used if tokens take top_k at random."""
    needing = np.zeros((*shape, top_k + 1), np.int64)  # [..., j]: tokens which still need j experts
    needing[..., top_k] = n_rows
    counts = np.empty((*shape, n_experts), np.int64)
    for expert in range(n_experts):
        take = np.minimum(1.0, np.arange(top_k + 1) / (n_experts - expert))
        taken = rng.binomial(needing, take)
        counts[..., expert] = taken.sum(axis=-1)
        needing -= taken
        needing[..., :-1] += taken[..., 1:]
    return counts


def loads(experts: NDArray[Any], group: NDArray[Any], n_experts: int) -> NDArray[np.int64]:
    """Count the rows that each expert serves in each group of rows."""
    n_layers = experts.shape[1]
    n_groups = int(group.max()) + 1 if len(group) else 0
    counts = np.empty((n_groups, n_layers, n_experts), np.int64)
    base = group.astype(np.int64)[:, None] * n_experts
    for layer in range(n_layers):
        cells = (base + experts[:, layer]).ravel()
        counts[:, layer] = np.bincount(cells, minlength=n_groups * n_experts).reshape(n_groups, n_experts)
    return counts


N_DRAWS = 100
SEED = 0
INTERVAL = (2.5, 97.5)
"""Percentiles of a null's draws that are printed with it."""

_MEASURES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "entropy": entropy_by_layer,
    "top_over_uniform": top_by_layer,
    "gini": gini,
}


def balance(context: Context) -> dict[str, Any]:
    """Compute the figures of balance."""
    context.begin("balance", 1)
    sample = context.sample
    trace = sample.trace
    rng = np.random.default_rng(SEED)
    drawn = uniform_counts(rng, len(sample.rows), trace.n_experts, trace.top_k, (N_DRAWS, trace.n_layers))
    null = drawn / (len(sample.rows) * trace.top_k)
    result: dict[str, Any] = {name: _measured(measure, context.frequency, null) for name, measure in _MEASURES.items()}
    result["popularity"] = {
        "by_rank": _sorted_share(context.frequency).mean(axis=0),
        "null_by_rank": _interval(_sorted_share(null).mean(axis=1)),
    }
    result["prefill_load"] = prefill_load(trace, rng)
    if result["prefill_load"] is None:
        context.absent["prefill_load"] = "the trace has no prefill rows"
    return result


def prefill_load(trace: Trace, rng: np.random.Generator) -> dict[str, Any] | None:
    """Describe how a prompt's tokens spread over the experts."""
    rows = phase_rows(trace, "prefill")
    if not len(rows):
        return None
    _, number, length = np.unique(trace.request[rows], return_inverse=True, return_counts=True)
    shape = (len(length), trace.n_layers)
    counts = loads(np.asarray(trace.experts)[rows], number, trace.n_experts)
    null = uniform_counts(rng, length[:, None], trace.n_experts, trace.top_k, shape)
    total = (length * trace.top_k)[:, None, None]
    ours, uniform = (_load_figures(c / total) for c in (counts, null))
    return {
        "n_prompts": len(length),
        "mean_tokens": float(length.mean()),
        **ours,
        **{f"null_{name}": value for name, value in uniform.items()},
    }


def _load_figures(share: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "max_over_mean": float(top_by_layer(share).mean()),
        "idle_share": float((share == 0).mean()),
        "by_rank": _sorted_share(share).mean(axis=(0, 1)),
    }


def _measured(
    measure: Callable[[NDArray[np.float64]], NDArray[np.float64]], frequency: NDArray[np.float64], null: NDArray[np.float64]
) -> dict[str, Any]:
    by_layer = measure(frequency)
    return {"value": by_layer.mean(), "null": _interval(measure(null).mean(axis=1)), "by_layer": by_layer}


def _interval(draws: NDArray[np.float64]) -> dict[str, Any]:
    low, high = np.percentile(draws, INTERVAL, axis=0)
    return {"mean": draws.mean(axis=0), "low": low, "high": high}


def _sorted_share(frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-np.sort(-frequency, axis=-1))


# ------------------------------------------------------------ batches of decode rows

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
HEAT_MAP_STEPS = 32
FAR = 16
"""Steps from which two count as far apart, where the workloads of neighbours are compared with those of others."""


def compose(request: NDArray[Any], size: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Batch rows of different requests: a step takes the next of each."""
    first, length = spans(request)
    order = np.random.default_rng(seed).permutation(len(first))
    groups = order[: len(order) // size * size].reshape(-1, size)
    return [first[g] + np.arange(length[g].min(), dtype=np.int64)[:, None] for g in groups]


def workloads(ids: NDArray[Any], n_experts: int) -> NDArray[np.int32]:
    """Count the rows of each step that go to each expert of one layer."""
    n_steps = len(ids)
    cells = ids.reshape(n_steps, -1).astype(np.int64) + np.arange(n_steps)[:, None] * n_experts
    return np.bincount(cells.ravel(), minlength=n_steps * n_experts).reshape(n_steps, n_experts).astype(np.int32)


def distinct_experts(experts: NDArray[Any], batches: Sequence[NDArray[np.int64]], n_experts: int) -> NDArray[np.float64]:
    """Count the experts that a step of a batch needs in each layer."""
    steps = np.concatenate(batches)
    found = [(workloads(experts[:, layer][steps], n_experts) > 0).sum(axis=1).mean() for layer in range(experts.shape[1])]
    return np.array(found)


def uniform_distinct(n_experts: int, top_k: int, batch_size: int) -> float:
    """Compute the experts that a batch of random rows needs on average."""
    return float(n_experts * (1 - (1 - top_k / n_experts) ** batch_size))


def independent_distinct(experts: NDArray[Any], n_experts: int, batch_size: int) -> float:
    """Compute the experts that a batch of any rows of the trace would need."""
    share = activation_frequency(experts, n_experts) * experts.shape[2]
    return float((1 - (1 - share) ** batch_size).sum(axis=1).mean())


def workload_correlation(
    experts: NDArray[Any], batches: Sequence[NDArray[np.int64]], n_experts: int, n_steps: int = HEAT_MAP_STEPS
) -> dict[str, Any] | None:
    """Correlate the rows of experts in the steps of a batch."""
    long = [b for b in batches if len(b) > 1]
    if not long:
        return None
    n_layers, top_k = experts.shape[1:]
    n = min(n_steps, *(len(b) for b in long))
    total = np.zeros((n, n))
    kept = []
    for batch in long:
        for layer in range(n_layers):
            load = workloads(experts[:, layer][batch], n_experts)
            total += _correlation(load[:n].astype(np.int64))
            busiest = np.argsort(-load, axis=-1, kind="stable")[:, :top_k]
            kept.append((busiest[1:, :, None] == busiest[:-1, None, :]).any(axis=2).mean())
    matrix = total / (len(long) * n_layers)
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    distant = matrix[apart >= FAR]
    return {
        "matrix": matrix,  # (T, T): correlation of the rows of experts in steps i and j, mean over batches and layers
        "adjacent": float(matrix[apart == 1].mean()),
        "distant": float(distant.mean()) if distant.size else float("nan"),
        "kept": float(np.mean(kept)),  # share of the top_k experts by rows that are among those of the next step
    }


def _correlation(load: NDArray[np.int64]) -> NDArray[np.float64]:
    """Correlate rows; one that is the same for all experts correlates with none."""
    total = load.sum(axis=1)
    products = load.shape[1] * (load @ load.T) - np.outer(total, total)  # integers: exact, in whatever order they are added
    norm = np.sqrt(products.diagonal())
    norms = np.outer(norm, norm)
    return np.asarray(np.divide(products, norms, out=np.zeros_like(norms), where=norms > 0))


def batching(context: Context) -> dict[str, Any]:
    """Compute the distinct experts of a layer by batch size."""
    context.begin("batching", 1)
    sample = context.sample
    n_experts, top_k = sample.trace.n_experts, sample.trace.top_k
    sizes = [b for b in BATCH_SIZES if b <= sample.n_requests]
    found = [distinct_experts(sample.experts, compose(sample.request, b), n_experts) for b in sizes]
    if len(sizes) == 1:
        context.absent["distinct.larger"] = "batches are composed of different requests, and the trace has one"
    return {
        "batch_sizes": sizes,
        "distinct": [of_layers.mean() for of_layers in found],
        "uniform": [uniform_distinct(n_experts, top_k, b) for b in sizes],
        "independent": [independent_distinct(sample.experts, n_experts, b) for b in sizes],
        "by_layer": found,
    }
