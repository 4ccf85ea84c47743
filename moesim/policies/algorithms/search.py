"""Assignments that search: the exact optimum, by program and by enumeration, and beam search.

They take the same costs as the rules of `moesim.policies.algorithms.assignment`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.policies.algorithms.assignment import Plan, make_plan

MAX_BRUTE_FORCE = 16  # experts; 2 ** 16 assignments
ENUMERATE_UP_TO = 10  # experts; trying 2 ** 10 assignments takes a small part of the time HiGHS takes to start


def exact_assignment(
    gpu_cost: Sequence[float],
    cpu_cost: Sequence[float],
    enumerate_up_to: int = ENUMERATE_UP_TO,
    gpu_first: float = 0,
    cpu_first: float = 0,
) -> Plan:
    """Minimise the larger of the two totals exactly: DALI's 0-1 program; ascending ids.

    Minimise T subject to ``sum(gpu_cost * x) <= T`` and ``sum(cpu_cost * (1 - x)) <= T`` with x in {0, 1}. A device's extra time for
    its first expert is a further variable in {0, 1}, at least every x or 1 - x. It is the best of plans; what is executed overlaps
    transfers with work. Up to ``enumerate_up_to`` experts all assignments are tried, which is faster, and whose choice among
    several optima is the same on every machine; beyond, HiGHS solves the program, with costs divided by the largest and a gap of 0.

    >>> exact_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1]).makespan
    5
    """
    # scipy.optimize takes long to import, and few runs need it.
    from scipy.optimize import Bounds, LinearConstraint, milp

    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    if not ids:
        return Plan((), (), 0, 0)
    if len(ids) <= enumerate_up_to:
        return brute_force_assignment(gpu_cost, cpu_cost, gpu_first, cpu_first)
    gpu = np.array([gpu_cost[e] for e in ids], dtype=np.float64)
    cpu = np.array([cpu_cost[e] for e in ids], dtype=np.float64)
    scale = max(gpu.max(), cpu.max())
    n = len(ids)
    rows = np.vstack([np.append(gpu, -scale), np.append(-cpu, -scale)]) / scale
    most = np.array([0.0, -cpu.sum() / scale])
    n_first = 2 if gpu_first or cpu_first else 0
    if n_first:  # columns: x, T, whether the GPU has any, whether the CPU has any
        each, none = np.eye(n), np.zeros((n, 1))
        rows = np.vstack([
            np.hstack([rows, np.diag([gpu_first, cpu_first]) / scale]),
            np.hstack([each, none, none - 1, none]),
            np.hstack([-each, none, none, none - 1]),
        ])  # fmt: skip
        most = np.concatenate([most, np.zeros(n), -np.ones(n)])
    result = milp(
        c=np.concatenate([np.zeros(n), [1.0], np.zeros(n_first)]),
        constraints=LinearConstraint(rows, ub=most),
        integrality=np.concatenate([np.ones(n), [0], np.ones(n_first)]),
        bounds=Bounds(np.zeros(n + 1 + n_first), np.concatenate([np.ones(n), [np.inf], np.ones(n_first)])),
        options={"mip_rel_gap": 0.0},
    )
    if not result.success:
        raise RuntimeError(f"exact assignment of {n} experts: HiGHS found no optimum: {result.message}")
    on_gpu = [e for e, x in zip(ids, result.x[:n], strict=True) if x > 0.5]
    return make_plan(gpu_cost, cpu_cost, on_gpu, gpu_first=gpu_first, cpu_first=cpu_first)


def brute_force_assignment(
    gpu_cost: Sequence[float], cpu_cost: Sequence[float], gpu_first: float = 0, cpu_first: float = 0
) -> Plan:
    """Minimise the larger total by trying every assignment of up to 16 experts.

    Of several optima the first, counting upwards with bit i set if the i-th expert is on the CPU; at most 16 experts.

    >>> brute_force_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1]).makespan
    5
    """
    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    if len(ids) > MAX_BRUTE_FORCE:
        raise ValueError(f"brute force: expected at most {MAX_BRUTE_FORCE} experts, got {len(ids)}; use exact_assignment")
    codes = np.arange(1 << len(ids))
    on_cpu = (codes[:, None] >> np.arange(len(ids))) & 1
    gpu_totals = (1 - on_cpu) @ np.array([gpu_cost[e] for e in ids])
    cpu_totals = on_cpu @ np.array([cpu_cost[e] for e in ids])
    if gpu_first:
        gpu_totals = gpu_totals + gpu_first * (on_cpu.sum(axis=1) < len(ids))
    if cpu_first:
        cpu_totals = cpu_totals + cpu_first * (on_cpu.sum(axis=1) > 0)
    best = on_cpu[int(np.argmin(np.maximum(gpu_totals, cpu_totals)))]
    on_gpu = [e for e, cpu in zip(ids, best, strict=True) if not cpu]
    return make_plan(gpu_cost, cpu_cost, on_gpu, gpu_first=gpu_first, cpu_first=cpu_first)


def beam_assignment(
    gpu_cost: Sequence[float], cpu_cost: Sequence[float], width: int = 2, gpu_first: float = 0, cpu_first: float = 0
) -> Plan:
    """Assign by beam search in the greedy order, keeping the ``width`` partial plans with the smallest makespan (DALI's has 2).

    Ties between partial plans go to the one that extends the better parent, and then to the GPU.

    >>> beam_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1]).makespan
    5
    """
    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    ids.sort(key=lambda e: -abs(gpu_cost[e] - cpu_cost[e]))
    beam: list[tuple[float, float, tuple[bool, ...]]] = [(0, 0, ())]  # totals, and for each expert: on the GPU?
    for e in ids:
        grown = []
        for gpu_total, cpu_total, chosen in beam:
            gpu_extra, cpu_extra = 0 if True in chosen else gpu_first, 0 if False in chosen else cpu_first
            grown.append((gpu_total + gpu_cost[e] + gpu_extra, cpu_total, (*chosen, True)))
            grown.append((gpu_total, cpu_total + cpu_cost[e] + cpu_extra, (*chosen, False)))
        beam = sorted(grown, key=lambda state: max(state[0], state[1]))[:width]
    gpu_total, cpu_total, chosen = beam[0]
    gpu = tuple(e for e, on_gpu in zip(ids, chosen, strict=True) if on_gpu)
    cpu = tuple(e for e, on_gpu in zip(ids, chosen, strict=True) if not on_gpu)
    return Plan(gpu, cpu, gpu_total, cpu_total)
