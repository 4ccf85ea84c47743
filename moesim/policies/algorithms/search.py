"""Assignments that search: the exact optimum, by program and by enumeration, and beam search.

They take the same costs as the rules of `moesim.policies.algorithms.assignment`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.policies.algorithms.assignment import Plan, make_plan

MAX_BRUTE_FORCE = 16  # experts; 2 ** 16 assignments
ENUMERATE_UP_TO = 10  # experts; trying 2 ** 10 assignments takes a small part of the time HiGHS takes to start


def exact_assignment(gpu_cost: Sequence[float], cpu_cost: Sequence[float], enumerate_up_to: int = ENUMERATE_UP_TO) -> Plan:
    """Minimise the larger of the two totals exactly: DALI's 0-1 program.

    Parameters
    ----------
    gpu_cost, cpu_cost : sequence of float, shape (n_experts,)
        Cost of each expert on either device; the same as the greedy rule takes.
    enumerate_up_to : int
        Experts up to which all assignments are tried, which is faster, and whose choice among several optima is the
        same on every machine. Beyond, HiGHS solves the program, and finds one of the optima.

    Returns
    -------
    Plan
        Ascending ids.

    Raises
    ------
    RuntimeError
        If the solver does not prove an optimum.

    Notes
    -----
    Minimise T subject to ``sum(gpu_cost * x) <= T`` and ``sum(cpu_cost * (1 - x)) <= T`` with x in {0, 1}. Costs are divided
    by the largest, and the gap is set to 0. It is the best of plans; what is executed overlaps transfers with work.

    Examples
    --------
    >>> exact_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1]).makespan
    5
    """
    # scipy.optimize takes long to import, and few runs need it.
    from scipy.optimize import Bounds, LinearConstraint, milp

    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    if not ids:
        return Plan((), (), 0, 0)
    if len(ids) <= enumerate_up_to:
        return brute_force_assignment(gpu_cost, cpu_cost)
    gpu = np.array([gpu_cost[e] for e in ids], dtype=np.float64)
    cpu = np.array([cpu_cost[e] for e in ids], dtype=np.float64)
    scale = max(gpu.max(), cpu.max())
    n = len(ids)
    rows = np.vstack([np.append(gpu, -scale), np.append(-cpu, -scale)]) / scale
    result = milp(
        c=np.append(np.zeros(n), 1.0),
        constraints=LinearConstraint(rows, ub=np.array([0.0, -cpu.sum() / scale])),
        integrality=np.append(np.ones(n), 0),
        bounds=Bounds(np.zeros(n + 1), np.append(np.ones(n), np.inf)),
        options={"mip_rel_gap": 0.0},
    )
    if not result.success:
        raise RuntimeError(f"exact assignment of {n} experts: HiGHS found no optimum: {result.message}")
    return make_plan(gpu_cost, cpu_cost, [e for e, x in zip(ids, result.x[:n], strict=True) if x > 0.5])


def brute_force_assignment(gpu_cost: Sequence[float], cpu_cost: Sequence[float]) -> Plan:
    """Minimise the larger total by trying every assignment of up to 16 experts.

    Parameters
    ----------
    gpu_cost, cpu_cost : sequence of float, shape (n_experts,)
        Cost of each expert on either device.

    Returns
    -------
    Plan
        Ascending ids; the first optimum, counting upwards with bit i set if the i-th expert is on the CPU.

    Raises
    ------
    ValueError
        If more than 16 experts have a cost.

    Examples
    --------
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
    best = on_cpu[int(np.argmin(np.maximum(gpu_totals, cpu_totals)))]
    return make_plan(gpu_cost, cpu_cost, [e for e, cpu in zip(ids, best, strict=True) if not cpu])


def beam_assignment(gpu_cost: Sequence[float], cpu_cost: Sequence[float], width: int = 2) -> Plan:
    """Assign by beam search in the greedy order, keeping the partial plans with the smallest makespan.

    Parameters
    ----------
    gpu_cost, cpu_cost : sequence of float, shape (n_experts,)
        Cost of each expert on either device.
    width : int
        Partial plans kept; DALI's comparison has 2.

    Returns
    -------
    Plan
        In the order of assignment.

    Notes
    -----
    Ties between partial plans go to the one that extends the better parent, and then to the GPU.

    Examples
    --------
    >>> beam_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1]).makespan
    5
    """
    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    ids.sort(key=lambda e: -abs(gpu_cost[e] - cpu_cost[e]))
    beam: list[tuple[float, float, tuple[bool, ...]]] = [(0, 0, ())]  # totals, and for each expert: on the GPU?
    for e in ids:
        grown = []
        for gpu_total, cpu_total, chosen in beam:
            grown.append((gpu_total + gpu_cost[e], cpu_total, (*chosen, True)))
            grown.append((gpu_total, cpu_total + cpu_cost[e], (*chosen, False)))
        beam = sorted(grown, key=lambda state: max(state[0], state[1]))[:width]
    gpu_total, cpu_total, chosen = beam[0]
    gpu = tuple(e for e, on_gpu in zip(ids, chosen, strict=True) if on_gpu)
    cpu = tuple(e for e, on_gpu in zip(ids, chosen, strict=True) if not on_gpu)
    return Plan(gpu, cpu, gpu_total, cpu_total)
