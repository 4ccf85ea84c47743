"""Compare assignment rules with the best execution of a layer, on random layers: ``assignments.csv`` of the page of bounds.

An instance is one layer: 3 to 64 active experts with random rows, any number of them cached. A rule splits it as it would in a
run; the split is executed, with transfers that overlap with work, and its makespan is divided by the least of any split. The
best is exact at any size where all experts of an instance take the GPU the same time (`optimal_schedule`). Where that time grows
with their rows, it is a solver's beyond 12 experts.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from scipy.stats import sem, t

from experiments.research.tables.command import parser, run, write
from experiments.research.tables.schedule import Layer, executed_schedule, layer_lower_bound, optimal_schedule
from moesim.core.colours import BLACK, SERIES
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.errors import ConfigError, unknown_name
from moesim.plots.style import add_corner, need, pictures, styled
from moesim.policies.algorithms.hybrimoe import Reading, Timings, queue_plan, two_ended_plan
from moesim.policies.parts import Plan
from moesim.policies.parts.assignment import beam_assignment, exact_assignment, greedy_assignment, make_plan, threshold_assignment

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
    "all-gpu": _planned(lambda gpu, cpu: make_plan(gpu, cpu, [e for e in range(len(gpu)) if gpu[e] or cpu[e]])),
    "all-cpu": _planned(lambda gpu, cpu: make_plan(gpu, cpu, [])),
}
"""Rules by name; a plan holds the order of the GPU and of the transfers.

``queues`` and ``two-ended`` are HybriMoE's, as printed and as released; ``free first`` is the other reading of what is printed.
``exact``, ``beam`` and ``greedy`` minimise DALI's planned cost, ``threshold`` is Fiddler's rule.
"""


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Result:
    """Results of one rule, or one bound, over the instances of one regime and size."""

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
    regime: str, sizes: tuple[int, int], instances: int, *, seed: int = 0, progress: Callable[[int], None] = lambda n: None
) -> list[Result]:
    """Run the rules on random instances of one regime and size.

    Each rule is executed twice: on a GPU that takes what is there first, as the engine does, and on one that waits for each
    expert in the plan's order. Then come the lower bounds, and the promise of the best plan by DALI's costs.
    """
    if regime not in REGIMES:
        raise ConfigError(f"assignments: {unknown_name('regime', regime, REGIMES)}")
    rng = random.Random(f"{seed} {regime} {sizes}")
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(instances):
        instance = draw(rng, REGIMES[regime], sizes)
        layer = instance.layer
        found: dict[tuple[str, str], float] = {}
        for name, rule in RULES.items():
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
    mean, error = fmean(values), float(sem(values))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    worst = min(values) if kind == "bound" else max(values)
    tolerance = 1e-5 if kind == "bound" else _EXACT  # a bound is lowered by the solver's tolerance
    optimal = sum(abs(value - 1) <= tolerance for value in values) / len(values)
    return Result(regime, active, kind, name, len(values), mean, mean - half, mean + half, worst, optimal)


def table(results: Sequence[Result], form: Format, *, in_order: bool = False) -> str:
    """Write the results of the study."""
    if form.for_programs:
        return render_records([asdict(one) for one in results], form)
    kind = "rule, in order" if in_order else "rule"
    sizes = list(dict.fromkeys(one.active for one in results))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for one in results:
        if one.kind in (kind, "bound", "plan"):
            name = f"bound: {one.name}" if one.kind == "bound" else one.name
            half = (one.high - one.low) / 2
            cell = f"{one.mean:.3f} ±{half:.3f}, {one.worst:.2f}, {100 * one.optimal:.0f} %"
            lines.setdefault((one.regime, name), {})[one.active] = cell
    columns = ["regime", "rule", *(f"{active} experts" for active in sizes)]
    rows = [[*key, *(cells.get(active, "-") for active in sizes)] for key, cells in lines.items()]
    counts = sorted({one.instances for one in results})
    note = (
        f"\nmakespan / best: mean and its 95 % interval, worst, share at the best; {', '.join(map(str, counts))} random layers "
        "each; a bound's worst is its smallest\n"
    )
    return render(columns, rows, form, columns[2:]) + note


_MARKERS: Final = "osD^vP"
_TICKS: Final = (1, 1.5, 2, 3, 5, 10, 20)


@styled
def assignment_ratios(frame: pd.DataFrame, kind: str = "rule") -> Figure:
    """Mean makespan over the best, by rule, regime and number of active experts."""
    columns = ("regime", "active", "kind", "name", "instances", "mean", "low", "high", "worst")
    need(frame, columns, "assignment_ratios")
    frame = frame[frame["kind"] == kind]
    need(frame, columns, "assignment_ratios")
    names, regimes, sizes = (list(dict.fromkeys(frame[column])) for column in ("name", "regime", "active"))
    figure = Figure(figsize=(2.2 + 2.6 * len(sizes), 1.9 + 0.42 * len(names)), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, active in zip(panels, sizes, strict=True):
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(1, color=BLACK, linewidth=0.8)
        for i, regime in enumerate(regimes):
            rows = frame[(frame["regime"] == regime) & (frame["active"] == active)]
            places = [names.index(name) + (i - (len(regimes) - 1) / 2) * 0.7 / len(regimes) for name in rows["name"]]
            colour, mean = SERIES[i % len(SERIES)], rows["mean"]
            spread = [mean - rows["low"], rows["high"] - mean]
            marker = _MARKERS[i % len(_MARKERS)]
            axes.errorbar(mean, places, xerr=spread, fmt=marker, color=colour, markersize=4, capsize=1.5, label=regime)
            axes.plot(rows["worst"], places, "|", color=colour, markersize=6)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= 1.1 * frame["worst"].max()]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(f"{active} active experts")
        axes.set_xlabel("makespan / best")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.5)
    executed = "in the plan's order" if kind != "rule" else "as they become ready"
    notes = f"random layers, {frame['instances'].min()} each, executed {executed}"
    add_corner(figure, f"{notes} · mean with 95 % interval, tick: worst")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute assignment rules on random layers of 3 to 64 active experts, and divide by the best execution.

    The costs are made up: three regimes, a mixture of them, and that mixture with a GPU that takes longer for more rows.
    The best is exact; with such a GPU and more than 12 experts it is a solver's.
    """
    options = parser("experiments.research.tables.assignments", main.__doc__)
    options.add_argument(
        "--instances", type=int, default=500, help="random layers of each regime and number of experts, at least 2"
    )
    options.add_argument("--regimes", nargs="+", default=list(REGIMES), help="default: all")
    options.add_argument("--seed", type=int, default=0, help="of the layers")
    options.add_argument("--in-order", action="store_true", help="show a GPU that waits for each expert in order")
    return run(_study_all, options, arguments)


def _study_all(given: Namespace) -> None:
    results: list[Result] = []
    with Progress(len(given.regimes) * len(SIZES) * given.instances) as bar:
        for regime in given.regimes:
            for sizes in SIZES:
                bar.describe(f"{regime}, {sizes[0]} to {sizes[1]} experts")
                results += study(regime, sizes, given.instances, seed=given.seed, progress=bar.advance)
    sys.stdout.write(table(results, given.form, in_order=given.in_order))
    if given.out is not None:
        records = [asdict(one) for one in results]
        figure = assignment_ratios(pd.DataFrame(records), "rule, in order" if given.in_order else "rule")
        files = {"assignments.csv": render_records(records, Format.CSV).encode(), **pictures(figure, "assignments")}
        write(given.out, files, "assignments")


if __name__ == "__main__":
    sys.exit(main())
