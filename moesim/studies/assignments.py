"""How far each assignment rule is from the best execution of a layer, on random layers.

An instance is one layer: 3 to 64 active experts with random rows, any number of them cached. A rule splits it as it would in a
run; the split is executed, with transfers that overlap with work, and its makespan is divided by the least of any split. The
best is exact at any size where all experts of an instance take the GPU the same time (`optimal_schedule`). Where that time grows
with their rows, it is a solver's beyond 12 experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from moesim.errors import ConfigError, unknown_name
from moesim.policies.algorithms.assignment import (
    Plan,
    all_cpu,
    all_gpu,
    greedy_assignment,
    threshold_assignment,
)
from moesim.policies.algorithms.queues import Reading, Timings, queue_plan
from moesim.policies.algorithms.schedule import Layer, executed_schedule, layer_lower_bound, optimal_schedule
from moesim.policies.algorithms.search import beam_assignment, exact_assignment
from moesim.policies.algorithms.two_ended import two_ended_plan

LOADS = (1, 1, 1, 2, 2, 3, 4, 6, 9, 14)
"""Rows of an expert are drawn from these: most experts have few, a few have many."""

SIZES = ((3, 9), (10, 31), (32, 64))
"""Active experts of an instance, both included; one group of results each."""

KINDS = ("rule", "rule, in order", "bound", "plan")
"""Executed as experts become ready, or in the plan's order; proven to be too short; promised, and neither of these."""

_ROW_NS = 1000  # what a row takes on the CPU; every other time is in units of this
_EXACT = 1e-9  # of ratios


class Regime(NamedTuple):
    """Costs of an instance in units of one row on the CPU, drawn evenly from these."""

    gpu: tuple[float, ...]  # an expert on the GPU, whatever its rows
    transfer: tuple[float, ...]  # moving one
    gpu_row: tuple[float, ...] = ()  # what each of its rows adds on the GPU; empty: nothing


REGIMES: dict[str, Regime] = {
    "compute-bound": Regime((2.0,), (2.0,)),
    "balanced": Regime((1.0,), (3.0,)),
    "transfer-bound": Regime((0.5,), (6.0,)),
    "mixed": Regime((0.5, 1.0, 2.0), (2.0, 3.0, 6.0)),
    "growing": Regime((0.5, 1.0, 2.0), (2.0, 3.0, 6.0), (0.05, 0.1, 0.25)),
}
"""Moving an expert takes as long as computing it on the GPU; three times that; twelve times; any mixture; and that mixture where
a row takes the GPU a twentieth, a tenth or a quarter of what it takes the CPU."""


class Instance(NamedTuple):
    """A layer and the rows of its experts."""

    layer: Layer
    rows: tuple[int, ...]


def draw(rng: random.Random, regime: Regime, sizes: tuple[int, int]) -> Instance:
    """Draw an instance."""
    n = rng.randint(*sizes)
    rows = tuple(rng.choice(LOADS) for _ in range(n))
    cached = set(rng.sample(range(n), rng.randint(0, n)))
    gpu, transfer = rng.choice(regime.gpu), rng.choice(regime.transfer)
    resident = [e in cached for e in range(n)]
    each = rng.choice(regime.gpu_row) if regime.gpu_row else 0
    layer = Layer(
        [round((gpu + each * w) * _ROW_NS) for w in rows], [w * _ROW_NS for w in rows], resident, int(transfer * _ROW_NS)
    )
    return Instance(layer, rows)


# --------------------------------------------------------------------------------------------------------------- rules


def _planned(rule: Callable[[Sequence[float], Sequence[float]], Plan]) -> Callable[[Instance], Plan]:
    """A rule over DALI's costs; then residents first, and transfers by rows, most first, as DALI executes."""

    def split(instance: Instance) -> Plan:
        layer = instance.layer
        cost = [0 if here else layer.transfer for here in layer.resident]
        plan = rule([max(a, b) for a, b in zip(cost, layer.gpu_time, strict=True)], layer.cpu_time)
        moved = sorted((e for e in plan.gpu if not layer.resident[e]), key=lambda e: (-instance.rows[e], e))
        return plan._replace(gpu=(*(e for e in plan.gpu if layer.resident[e]), *moved), loads=tuple(moved))

    return split


def _threshold(instance: Instance) -> Plan:
    """Fiddler's rule; residents and others by id."""
    layer = instance.layer
    pairs = zip(layer.resident, layer.gpu_time, strict=True)
    plan = threshold_assignment([0 if here else layer.transfer + g for here, g in pairs], layer.cpu_time)
    return plan._replace(loads=tuple(e for e in plan.gpu if not layer.resident[e]))


def _timings(instance: Instance) -> Timings:
    layer, rows = instance
    gpu, cpu = (dict(zip(rows, times, strict=True)) for times in (layer.gpu_time, layer.cpu_time))
    return Timings(layer.transfer, gpu, cpu)


def _queues(reading: Reading) -> Callable[[Instance], Plan]:
    """HybriMoE's three timelines; an expert that the CPU takes after its transfer was planned is not moved."""

    def split(instance: Instance) -> Plan:
        layer, rows = instance
        here = [e for e in range(len(rows)) if layer.resident[e]]
        plan = queue_plan(here, [e for e in range(len(rows)) if not layer.resident[e]], rows, _timings(instance), reading=reading)
        return plan._replace(loads=tuple(e for e in plan.loads if e in plan.gpu))

    return split


def _two_ended(instance: Instance) -> Plan:
    layer, rows = instance
    return two_ended_plan(range(len(rows)), [e for e in range(len(rows)) if layer.resident[e]], rows, _timings(instance))


RULES: dict[str, Callable[[Instance], Plan]] = {
    "queues": _queues(Reading()),
    "queues, free first": _queues(Reading(timeline="free")),
    "queues, free first, CPU on ties": _queues(Reading(timeline="free", ties="cpu")),
    "two-ended": _two_ended,
    "exact": _planned(exact_assignment),
    "beam": _planned(beam_assignment),
    "greedy": _planned(greedy_assignment),
    "threshold": _threshold,
    "all-gpu": _planned(all_gpu),
    "all-cpu": _planned(all_cpu),
}
"""Rules by name; a plan holds the order of the GPU and of the transfers.

``queues`` and ``two-ended`` are HybriMoE's, as printed and as released; ``free first`` is the other reading of what is printed.
``exact``, ``beam`` and ``greedy`` minimise DALI's planned cost, ``threshold`` is Fiddler's rule.
"""


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Result:
    """What one rule, or one bound, came to over the instances of one regime and size."""

    # regime, active, kind, name: name of the regime; `"3-9"`; one of `KINDS`; name of the rule
    regime: str
    active: str
    kind: str
    name: str
    instances: int  # how many
    # mean, low, high: mean of makespan / best makespan, and its 95 % interval (Student's t)
    mean: float
    low: float
    high: float
    worst: float  # largest of them; of a bound, the smallest
    optimal: float  # share of instances in which the ratio is 1


def study(
    regime: str,
    sizes: tuple[int, int],
    instances: int,
    *,
    seed: int = 0,
    rules: Mapping[str, Callable[[Instance], Plan]] = RULES,
    progress: Callable[[int], None] = lambda n: None,
) -> list[Result]:
    """Run the rules on random instances of one regime and size.

    Parameters
    ----------
    regime : str
        Name in `REGIMES`.
    sizes : tuple of int
        Fewest and most active experts.
    instances : int
        How many, at least 2.
    seed : int
        Of the instances: the same for all rules.
    rules : mapping of str to callable
        Which rules.
    progress : callable
        Called with 1 after each instance.

    Returns
    -------
    list of Result
        For each rule twice: with a GPU that takes what is there first, as the simulator's engine does, and with one that waits
        for each expert in the plan's order. Then the lower bounds, and what the best plan of DALI's costs promises.

    Raises
    ------
    ConfigError
        If there is no such regime.
    """
    if regime not in REGIMES:
        raise ConfigError(f"assignments: {unknown_name('regime', regime, REGIMES)}")
    rng = random.Random(f"{seed} {regime} {sizes}")
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(instances):
        instance = draw(rng, REGIMES[regime], sizes)
        layer = instance.layer
        found: dict[tuple[str, str], float] = {}
        for name, rule in rules.items():
            plan = rule(instance)
            for kind, in_order in (("rule", False), ("rule, in order", True)):
                found[kind, name] = executed_schedule(layer, plan.gpu, plan.cpu, plan.loads, in_order=in_order).makespan
        best = min(optimal_schedule(layer).makespan, *found.values())  # a solver's best is so within its tolerance
        for key, makespan in found.items():
            ratios.setdefault(key, []).append(makespan / best)
        for name, pipelined in (("work and pipeline", True), ("work per resource", False)):
            ratios.setdefault(("bound", name), []).append(layer_lower_bound(layer, pipelined=pipelined) / best)
        ratios.setdefault(("plan", "planned optimum"), []).append(_planned(exact_assignment)(instance).makespan / best)
        progress(1)
    ordered = sorted(ratios.items(), key=lambda item: KINDS.index(item[0][0]))
    return [_result(regime, f"{sizes[0]}-{sizes[1]}", kind, name, values) for (kind, name), values in ordered]


def _result(regime: str, active: str, kind: str, name: str, values: Sequence[float]) -> Result:
    from scipy.stats import sem, t  # takes long to import

    mean, error = fmean(values), float(sem(values))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    worst = min(values) if kind == "bound" else max(values)
    tolerance = 1e-5 if kind == "bound" else _EXACT  # a bound is lowered by the solver's tolerance
    optimal = sum(abs(value - 1) <= tolerance for value in values) / len(values)
    return Result(regime, active, kind, name, len(values), mean, mean - half, mean + half, worst, optimal)
