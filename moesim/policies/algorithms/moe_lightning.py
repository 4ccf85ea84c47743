"""MoE-Lightning's plan: the share of the experts' weights that stays on the GPU, and the batch; a linear program and a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moesim.core.units import slots_of
from moesim.errors import CapacityError

if TYPE_CHECKING:
    from moesim.model import ModelSpec

GPU_SHARE, CPU_SHARE = 0.86, 0.8
"""Shares of the two memories that a plan may fill, as in the released code."""
CARDS = {
    "l4": {"link_bytes_per_s": 16 * 2**30, "gpu_bytes_per_s": 285e9, "gpu_flops": 104e12, "cpu_flops": 1.6e12},
    "t4": {"link_bytes_per_s": 16 * 2**30, "gpu_bytes_per_s": 300e9, "gpu_flops": 65e12, "cpu_flops": 0.8e12},
}
"""Rates of two machines in the released code, fields of `PlanMachine`; its planner is told memories and the CPU's memory rate."""


@dataclass(frozen=True)
class PlanMachine:
    """What a plan knows of a machine.

    Attributes
    ----------
    gpu_bytes, cpu_bytes : float, bytes
        Memories.
    link_bytes_per_s : float
        Of the link, in each direction.
    gpu_bytes_per_s, cpu_bytes_per_s : float
        Rates of the memories.
    gpu_flops, cpu_flops : float, operations per second
        Peaks.

    Examples
    --------
    >>> PlanMachine(24 * 2**30, 192e9, cpu_bytes_per_s=76e9, **CARDS["l4"]).link_bytes_per_s
    17179869184
    """

    gpu_bytes: float
    cpu_bytes: float
    link_bytes_per_s: float
    gpu_bytes_per_s: float
    cpu_bytes_per_s: float
    gpu_flops: float
    cpu_flops: float


class OfflinePlan(NamedTuple):
    """A batch and what is where: fields are documented with `plan_batch`."""

    rows: int
    micro_batches: int
    expert_share: float
    kv_share: float
    step_s: float
    tokens_per_s: float


def lowest_residents(n_experts: int, expert_share: float) -> list[int]:
    """Return the experts of a layer that stay on the GPU: as many as the share makes whole, the lowest ids.

    Parameters
    ----------
    n_experts : int
        Experts of a layer.
    expert_share : float
        Share of the experts' weights that the plan keeps on the GPU.

    Returns
    -------
    list of int
        Ids.

    Examples
    --------
    The published plan for Mixtral counts with 5.6 % and keeps nothing.

    >>> lowest_residents(8, 0.055884688), lowest_residents(8, 0.3)
    ([], [0, 1])
    """
    return list(range(slots_of(expert_share, n_experts)))


def link_step_s(model: ModelSpec, expert_share: float, link_bytes_per_s: float) -> float:
    """Return the time of a step that waits for nothing but the experts' weights on the link.

    Parameters
    ----------
    model : ModelSpec
        Its experts.
    expert_share : float
        Share that stays on the GPU.
    link_bytes_per_s : float
        Of the link.

    Returns
    -------
    float, s

    Examples
    --------
    Mixtral on an L4, as the released code's documentation has it: 4.957 s.

    >>> from moesim.model import load_model
    >>> round(link_step_s(load_model("mixtral-8x7b"), 0.055884688, 16 * 2**30), 3)
    4.957
    """
    return (1 - expert_share) * model.experts_bytes_total / link_bytes_per_s


def tokens_per_s(sequences: int, n_output: int, step_s: float) -> float:
    """Return a plan's throughput: all generated tokens over the time of the decode steps, one fewer than tokens.

    Parameters
    ----------
    sequences : int
        Of the whole batch.
    n_output : int
        Tokens of each, at least 2. The first comes out of prefill, whose time is not counted.
    step_s : float, s
        Of a decode step.

    Returns
    -------
    float

    Examples
    --------
    >>> round(tokens_per_s(324 * 14, 32, 4.9566054), 2)
    944.66
    """
    return sequences * n_output / ((n_output - 1) * step_s)


def search_batch(throughput: Callable[[int, int], float | None]) -> tuple[int, int, float] | None:
    """Search for the best batch: sizes 1, 2, 3, 4 and then 32 more each time, with ever more micro-batches while it pays.

    Parameters
    ----------
    throughput : callable
        Tokens per second for the rows of a micro-batch and the number of micro-batches; None if they do not fit.

    Returns
    -------
    tuple of int, int, float, or None
        Rows, micro-batches and throughput; of equals the later. None if nothing fits.

    Notes
    -----
    For each size the number rises from 1 while throughput does not fall. The search ends with the first size that does not fit
    with one micro-batch. Throughputs are compared as they are: where more micro-batches make none faster, the last bit of a
    float says which is the last.

    Examples
    --------
    >>> search_batch(lambda rows, n: min(rows * n, 40.0) if rows * n <= 72 else None)
    (68, 1, 40.0)
    """
    best: tuple[int, int, float] | None = None
    rows = 1
    while throughput(rows, 1) is not None:
        before, n = 0.0, 1
        while (found := throughput(rows, n)) is not None and found >= before:
            if best is None or found >= best[2]:
                best = rows, n, found
            before, n = found, n + 1
        rows += 1 if rows < 4 else 32
    return best


def plan_batch(
    model: ModelSpec, machine: PlanMachine, n_prompt: int, n_output: int, rows: int, micro_batches: int, *,
    other_bytes: float | None = None, token_bytes: float | None = None,
) -> OfflinePlan | None:  # fmt: skip
    """Choose what stays on the GPU for one batch, by a linear program over moesim's own count of bytes and operations.

    Parameters
    ----------
    model : ModelSpec
        Shapes and bytes.
    machine : PlanMachine
        Rates and memories.
    n_prompt, n_output : int
        Tokens of each sequence.
    rows, micro_batches : int
        Sequences of a micro-batch, and micro-batches.
    other_bytes : float, bytes, optional
        Weights on the GPU that are no routed experts; None: all of them.
    token_bytes : float, bytes, optional
        What the GPU needs in prefill for each prompt token of a micro-batch; None: moesim's own count of activations.

    Returns
    -------
    OfflinePlan or None
        ``rows`` and ``micro_batches`` as given; ``expert_share`` and ``kv_share`` of the experts' weights and of the KV cache
        on the GPU; ``step_s``, the time of a decode step; ``tokens_per_s``. None if the batch does not fit.

    Raises
    ------
    RuntimeError
        If HiGHS fails.

    Notes
    -----
    It minimises the step's time T, which is at least that of the streamed experts on the link, of attention on the CPU, of all
    else on the GPU, and of what is on the GPU of the KV cache on its way to the CPU. The GPU holds, in `GPU_SHARE` of its
    memory, the other weights, the shares, two buffers for the streamed part of a layer and what a micro-batch needs in prefill;
    the CPU the rest in `CPU_SHARE`. Where CPU or GPU is the slowest, several shares have the least T: ours is the largest.

    The released code counts the GPU's needs otherwise: for its documented batch it keeps 0.055884688, by our count it is 0.114.
    All nine digits follow if ``other_bytes`` are the four attention matrices of each layer, without embeddings and norms, and
    ``token_bytes`` are 44.6 hidden states. That number is inferred from the one line. Which tensors make it is not known, so it
    says nothing of other models, and it is no default. The released counts of CPU memory and of the time of CPU and GPU are not
    known either: in that batch only the link and GPU memory bind.

    References
    ----------
    S. Cao et al., "MoE-Lightning: High-Throughput MoE Inference on Memory-constrained GPUs", ASPLOS 2025 (arXiv:2411.11217).

    Examples
    --------
    The released code's documented batch: Mixtral, an L4, a prompt of 77 tokens and 32 generated tokens.

    >>> from moesim.model import load_model
    >>> machine = PlanMachine(24 * 2**30, 192e9, cpu_bytes_per_s=76e9, **CARDS["l4"])
    >>> count = {"other_bytes": 32 * 83_886_080, "token_bytes": 44.6 * 4096 * 2}
    >>> plan = plan_batch(load_model("mixtral-8x7b"), machine, 77, 32, 324, 14, **count)
    >>> round(plan.expert_share, 9), round(plan.step_s, 3), round(plan.tokens_per_s, 2)
    (0.055884688, 4.957, 944.66)
    """
    from scipy.optimize import linprog  # takes long to import, and few need it

    sequences = rows * micro_batches
    experts, layers = float(model.experts_bytes_total), model.n_layers
    layer = float(max(model.expert_bytes(i) for i in range(layers)) * model.n_experts)
    kv = float(model.kv_bytes_per_token * sequences * (n_prompt + n_output))
    seen = sequences * (n_prompt + n_output / 2)  # tokens of the cache that a step reads, on average
    least = max(_gpu_s(model, machine, rows) * micro_batches, _attention_s(model, machine, seen))
    gpu, cpu = GPU_SHARE * machine.gpu_bytes, CPU_SHARE * machine.cpu_bytes
    other = model.non_expert_bytes if other_bytes is None else other_bytes
    prefill = _prefill_bytes(model, rows * n_prompt) if token_bytes is None else token_bytes * rows * n_prompt
    fixed = other + 2 * layer + prefill
    scale = experts / machine.link_bytes_per_s
    reading = model.kv_bytes_per_token * seen / machine.link_bytes_per_s
    found = linprog(  # variables: share of the experts, share of the cache, T in units of `scale`
        [-1, 1, 1],  # more experts and less of the cache never make T longer: of plans with the least T, the most experts
        A_ub=[
            [-1, 0, -1],
            [0, reading / scale, -1],
            [(experts - 2 * layer) / gpu, kv / gpu, 0],
            [-experts / cpu, -kv / cpu, 0],
        ],
        b_ub=[-1, 0, 1 - fixed / gpu, 1 - (experts + kv) / cpu],
        bounds=[(0, 1), (0, 1), (least / scale, None)],
        method="highs",
    )
    if found.status == 2:  # infeasible
        return None
    if not found.success or found.x is None:
        raise RuntimeError(f"plan of {rows} x {micro_batches} rows: HiGHS found no optimum: {found.message}")
    expert_share, kv_share, step = (float(value) for value in found.x)
    step_s = step * scale
    return OfflinePlan(rows, micro_batches, expert_share, kv_share, step_s, tokens_per_s(sequences, n_output, step_s))


def offline_plan(
    model: ModelSpec, machine: PlanMachine, n_prompt: int, n_output: int, *,
    other_bytes: float | None = None, token_bytes: float | None = None,
) -> OfflinePlan:  # fmt: skip
    """Search for the batch with the most tokens per second, planning each by `plan_batch`; parameters as there.

    Parameters
    ----------
    model, machine, n_prompt, n_output, other_bytes, token_bytes
        As for `plan_batch`.

    Returns
    -------
    OfflinePlan

    Raises
    ------
    CapacityError
        If not even one row fits.
    """

    def plan(rows: int, micro_batches: int) -> OfflinePlan | None:
        return plan_batch(
            model, machine, n_prompt, n_output, rows, micro_batches, other_bytes=other_bytes, token_bytes=token_bytes
        )

    def throughput(rows: int, micro_batches: int) -> float | None:
        found = plan(rows, micro_batches)
        return None if found is None else found.tokens_per_s

    best = search_batch(throughput)
    found = None if best is None else plan(best[0], best[1])
    if found is None:
        raise CapacityError(
            f"offline plan of {model.name}: expected room for one sequence of {n_prompt} + {n_output} tokens, got none in "
            f"{GPU_SHARE:g} of {machine.gpu_bytes:g} bytes on the GPU and {CPU_SHARE:g} of {machine.cpu_bytes:g} bytes on the CPU; "
            "give more memory or choose a smaller model"
        )
    return found


def _gpu_s(model: ModelSpec, machine: PlanMachine, rows: int) -> float:
    """Time of all layers of one micro-batch on the GPU, without what reads the cache."""
    total = 0.0
    dense = model.attention_params + model.dense_params + model.shared_params
    for layer in range(model.n_layers):
        n_bytes = model.attention_bytes + model.dense_bytes(layer) + model.shared_bytes
        total += max(n_bytes / machine.gpu_bytes_per_s, 2 * rows * dense / machine.gpu_flops)
        n_bytes = min(model.n_experts, rows * model.top_k) * model.expert_bytes(layer)
        total += max(n_bytes / machine.gpu_bytes_per_s, 2 * rows * model.top_k * model.expert_params / machine.gpu_flops)
    return total


def _attention_s(model: ModelSpec, machine: PlanMachine, seen: float) -> float:
    """Time in which the CPU reads the cache of all layers."""
    if model.kv_lora_rank:
        operations = 2 * model.n_heads * (model.nope_head_dim + model.rope_head_dim + model.v_head_dim)
    else:
        operations = 4 * model.n_heads * model.head_dim
    n_layers = model.n_layers + model.n_dense_layers
    return max(
        model.kv_bytes_per_token * seen / machine.cpu_bytes_per_s, n_layers * operations * seen / machine.cpu_flops
    )  # fmt: skip


def _prefill_bytes(model: ModelSpec, rows: int) -> int:
    """Bytes of a micro-batch's activations in prefill: two hidden states, and of each routed copy one and two products."""
    width = 2 * model.hidden + model.top_k * (model.hidden + 2 * model.expert_intermediate)
    return -(-model.activation_bytes(rows) * width // model.hidden)
