"""The device of each active expert: rules as pure functions over lists, and their parts.

A rule takes every expert's costs (0 on both sides: no rows, in no plan), as integers (ns) or floats, and returns a `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.policies.base import Costs, CostTable
from moesim.policies.options import option
from moesim.policies.parts import Part, Plan, Setup
from moesim.policy import StepBegin


def layer_costs(
    loads: Sequence[int],
    waiting: Sequence[float],
    gpu_table: Costs,
    cpu_table: Costs,
) -> tuple[list[float], list[float]]:
    """Return each expert's cost on the GPU and on the CPU, as DALI's equations count it.

    ``waiting``: time until an expert's weights could be on the GPU; the tables hold compute time by rows.

    >>> layer_costs([2, 0, 1], [3, 3, 0], [0, 2, 2], [0, 1, 2])
    ([3, 0, 2], [2, 0, 1])
    """
    gpu = [max(waiting[e], gpu_table[w]) if w else 0 for e, w in enumerate(loads)]
    return gpu, [cpu_table[w] if w else 0 for w in loads]


def greedy_assignment(
    gpu_cost: Sequence[float], cpu_cost: Sequence[float], gpu_start: float = 0, gpu_first: float = 0, cpu_first: float = 0
) -> Plan:
    """Assign as DALI's Algorithm 1 does, in the order of assignment.

    Experts are taken by the difference of their two costs, largest first (ties: lower id). Each goes to the GPU if the GPU's
    total with it is at most the CPU's total with it. ``gpu_start`` is what the GPU has to do before, ``gpu_first`` and
    ``cpu_first`` what the first expert on a device takes beyond its cost: 0 in the paper.

    >>> greedy_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1])
    Plan(gpu=(2, 3), cpu=(0, 1, 4), gpu_total=5, cpu_total=3, loads=())
    >>> greedy_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1], cpu_first=3)  # 0 would take the CPU 4, and the GPU 3
    Plan(gpu=(0, 2, 3), cpu=(1, 4), gpu_total=8, cpu_total=5, loads=())
    """
    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    ids.sort(key=lambda e: -abs(gpu_cost[e] - cpu_cost[e]))
    gpu: list[int] = []
    cpu: list[int] = []
    gpu_total = gpu_start
    cpu_total: float = 0
    for e in ids:
        on_gpu = gpu_total + gpu_cost[e] + (0 if gpu else gpu_first)
        on_cpu = cpu_total + cpu_cost[e] + (0 if cpu else cpu_first)
        if on_gpu <= on_cpu:
            gpu.append(e)
            gpu_total = on_gpu
        else:
            cpu.append(e)
            cpu_total = on_cpu
    return Plan(tuple(gpu), tuple(cpu), gpu_total, cpu_total)


def threshold_assignment(gpu_cost: Sequence[float], cpu_cost: Sequence[float]) -> Plan:
    """Send each expert to the cheaper device, ties to the GPU (Fiddler's rule); ascending ids.

    >>> threshold_assignment([5, 5, 2], [4, 5, 9])
    Plan(gpu=(1, 2), cpu=(0,), gpu_total=7, cpu_total=4, loads=())
    """
    ids = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    return make_plan(gpu_cost, cpu_cost, [e for e in ids if gpu_cost[e] <= cpu_cost[e]])


def threshold_layer_plan(loads: Sequence[int], waiting: Sequence[float], gpu_table: Costs, cpu_table: Costs) -> Plan:
    """Assign a layer by `threshold_assignment`, at no cost on the GPU for what is there.

    >>> threshold_layer_plan([1, 6, 9], [3, 3, 0], [0, *[2] * 9], range(10))
    Plan(gpu=(1, 2), cpu=(0,), gpu_total=5, cpu_total=1, loads=())
    """
    gpu_cost = [waiting[e] + gpu_table[w] if w and waiting[e] else 0 for e, w in enumerate(loads)]
    return threshold_assignment(gpu_cost, [cpu_table[w] if w else 0 for w in loads])


FIDDLER_CPU_PER_ROW = 7  # latency_cpu of Fiddler's released code
FIDDLER_GPU_LOAD = 70  # latency_gpu of the same


def fiddler_code_assignment(loads: Sequence[int], resident: Sequence[int]) -> Plan:
    """Assign as Fiddler's released code does, with its built-in constants; ascending ids.

    The code enumerates all assignments and keeps the first with the smallest *sum* of costs. A sum separates: an uncached expert
    goes to the CPU if ``7 w < 70``, that is, with 9 rows or fewer. Experts without rows are left out, though the code counts the
    uncached ones as assigned to the CPU.

    >>> fiddler_code_assignment([0, 1, 9, 10, 11, 0, 10, 5], [0, 0, 0, 0, 0, 1, 1, 1])
    Plan(gpu=(3, 4, 6, 7), cpu=(1, 2), gpu_total=140, cpu_total=70, loads=())
    """
    gpu_cost = [0 if resident[e] else FIDDLER_GPU_LOAD for e in range(len(loads))]
    cpu_cost = [FIDDLER_CPU_PER_ROW * w for w in loads]
    gpu = [e for e, w in enumerate(loads) if w and gpu_cost[e] <= cpu_cost[e]]
    return make_plan(gpu_cost, cpu_cost, gpu, active=[e for e, w in enumerate(loads) if w])


def make_plan(
    gpu_cost: Sequence[float],
    cpu_cost: Sequence[float],
    gpu: Sequence[int],
    active: Sequence[int] | None = None,
    gpu_first: float = 0,
    cpu_first: float = 0,
) -> Plan:
    """Build a plan from the GPU's ids; other active ones (default: with a cost) go to the CPU."""
    if active is None:
        active = [e for e in range(len(gpu_cost)) if gpu_cost[e] or cpu_cost[e]]
    on_gpu = set(gpu)
    cpu = tuple(e for e in active if e not in on_gpu)
    gpu_total = sum([gpu_cost[e] for e in gpu]) + (gpu_first if gpu else 0)
    return Plan(tuple(gpu), cpu, gpu_total, sum([cpu_cost[e] for e in cpu]) + (cpu_first if cpu else 0))


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
    """Minimise the larger total by trying all assignments of at most 16 experts.

    >>> brute_force_assignment([3, 3, 3, 2, 2], [1, 1, 5, 4, 1]).makespan
    5
    """
    # Of several optima the first, counting upwards with bit i set if the i-th expert is on the CPU.
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
    """Assign by beam search in the greedy order with ``width`` partial plans (DALI's has 2).

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


class AllGpu(Part):
    """Everything on the GPU."""

    uses_cpu = False

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        return Plan(tuple(e for e, w in enumerate(loads) if w), (), 0, 0)


class AllCpu(Part):
    """Everything on the CPU, resident or not."""

    uses_cpu = True

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        return Plan((), tuple(e for e, w in enumerate(loads) if w), 0, 0)


class Resident(Part):
    """A static split without transfers: every expert is computed where its weights are."""

    uses_cpu = True

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        active = [e for e, w in enumerate(loads) if w]
        return Plan(tuple(e for e in active if not waiting[e]), tuple(e for e in active if waiting[e]), 0, 0)


class ResidentInDecode(Resident):
    """The resident split in decode; in prefill everything runs on the GPU, after copies."""

    def start(self, setup: Setup) -> None:
        self._prefill = False

    def step_begin(self, event: StepBegin) -> None:
        self._prefill = event.phase == "prefill"

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        if self._prefill:
            return Plan(tuple(e for e, w in enumerate(loads) if w), (), 0, 0)
        return super().assign(layer, loads, waiting)


class _Costed(Part):
    """Assignment by DALI's cost: max(transfer, compute) on the GPU, compute on the CPU."""

    # Plans include what a layer's first expert takes beyond that on a device, except by Fiddler's rule, which looks
    # at one expert at a time.

    uses_cpu = True

    def start(self, setup: Setup) -> None:
        self._gpu_ns = CostTable(setup.view, setup.gpu)
        self._cpu_ns = CostTable(setup.view, setup.cpu)
        costs = setup.view.costs
        self._first = costs.first_extra_ns(setup.gpu), costs.first_extra_ns(setup.cpu)


class Greedy(_Costed):
    """DALI's Algorithm 1."""

    shared_in_plan: bool = option(
        False, "The GPU's total begins with the layer's shared experts, which the paper's algorithm does not know of."
    )

    def start(self, setup: Setup) -> None:
        super().start(setup)
        self._costs, self._gpu, self._top_k = setup.view.costs, setup.gpu, setup.view.model.top_k

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        shared = self._costs.shared_ns(self._gpu, sum(loads) // self._top_k) if self.shared_in_plan else 0
        return greedy_assignment(*layer_costs(loads, waiting, self._gpu_ns, self._cpu_ns), shared, *self._first)


class Exact(_Costed):
    """The 0-1 program that the greedy rule approximates, solved exactly."""

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        costs = layer_costs(loads, waiting, self._gpu_ns, self._cpu_ns)
        return exact_assignment(*costs, gpu_first=self._first[0], cpu_first=self._first[1])


class Beam(_Costed):
    """Beam search in the greedy order."""

    width: int = option(2, "Partial plans that are kept.", ge=1)

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        return beam_assignment(*layer_costs(loads, waiting, self._gpu_ns, self._cpu_ns), self.width, *self._first)


class Threshold(_Costed):
    """Fiddler's rule: a missing expert goes to the CPU if sooner than transfer plus compute."""

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        return threshold_layer_plan(loads, waiting, self._gpu_ns, self._cpu_ns)


class FixedThreshold(Part):
    """Fiddler's rule with constants: a missing expert goes to the CPU if sooner than a load."""

    uses_cpu = True

    cpu_ms: float = option(FIDDLER_CPU_PER_ROW, "One row of one expert on the CPU; Fiddler's by default.", ge=0)
    load_ms: float = option(FIDDLER_GPU_LOAD, "Copying one expert to the GPU, where computing it counts nothing.", ge=0)

    def assign(self, layer: int, loads: Sequence[int], waiting: Sequence[int]) -> Plan:
        active = [e for e, w in enumerate(loads) if w]
        gpu_cost = [self.load_ms if w and waiting[e] else 0 for e, w in enumerate(loads)]
        cpu_cost = [self.cpu_ms * w for w in loads]
        return make_plan(gpu_cost, cpu_cost, [e for e in active if gpu_cost[e] <= cpu_cost[e]], active)
