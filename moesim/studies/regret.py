"""Regret: the worth of each decision of a policy if an oracle made it.

Oracles take over predictions, replacement, assignment and links one by one, in two orders, since what one saves depends on
the others. One may save less than nothing: schedules have anomalies (`docs/background/bounds.md`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.report import cost_notes, split_notes
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.runner import initial_placement
from moesim.experiment.sweep import RunSpec
from moesim.hardware import HardwareProfile
from moesim.hardware.types import Transfer
from moesim.metrics.bounds import RunBounds, most_hits, run_bounds
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.policies.registry import make_policy
from moesim.policy import Placement, Predicted
from moesim.trace.predictors import FutureUse

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.model import ModelSpec


DECISIONS = ("prediction", "replacement", "assignment", "bandwidth")
"""In the order in which they are replaced; ``reversed`` takes them from the end."""

Decisions = frozenset[str]
NONE: Decisions = frozenset()
_INSTANT = 10**18  # bytes a second: an expert takes a nanosecond


def replaceable(spec: RunSpec) -> tuple[str, ...]:
    """List the decisions of a run that an oracle can make."""
    policy: Any = make_policy(spec.point.policy)
    oracles = getattr(policy, "oracles", {})
    has = {
        "prediction": Predicted in policy.listens,
        "replacement": "replacement" in oracles,
        "assignment": "assignment" in oracles,
        "bandwidth": True,
    }
    return tuple(decision for decision in DECISIONS if has[decision])


def derive(spec: RunSpec, decisions: Decisions) -> RunSpec:
    """Replace some decisions of a run by their oracles."""
    point, hardware = spec.point, spec.hardware
    options = dict(point.policy)
    oracles = make_policy(point.policy).oracles if decisions & {"replacement", "assignment"} else {}  # type: ignore[attr-defined]
    for decision in ("replacement", "assignment"):
        if decision in decisions:
            options |= oracles[decision]
            options = {key: value for key, value in options.items() if oracles[decision].get(key, value) is not None}
    if "prediction" in decisions:
        point = replace(point, predictors={"*": "oracle"})
    if "bandwidth" in decisions:
        hardware = instant_links(hardware)
    return replace(spec, point=replace(point, policy=options), hardware=hardware)


def instant_links(hardware: HardwareProfile) -> HardwareProfile:
    """Return a machine whose links move weights in 1 ns a transfer; activations cross as before."""
    links = []
    for link in hardware.links:
        curves = {kind: Transfer(curve.key, curve.latency_us * 0, _INSTANT) for kind, curve in link.curves.items()}
        activation = link.activation or next(iter(link.curves.values()))  # what the cost model falls back on
        links.append(replace(link, curves=curves, activation=activation))
    return replace(hardware, links=tuple(links))


def combinations(decisions: Sequence[str]) -> dict[tuple[str, str], tuple[Decisions, Decisions]]:
    """List for each order and decision what is replaced before it, and with it.

    >>> [sorted(pair[1]) for pair in combinations(["assignment", "bandwidth"]).values()]
    [['assignment'], ['assignment', 'bandwidth'], ['bandwidth'], ['assignment', 'bandwidth'], ['assignment'], ['bandwidth']]
    """
    found: dict[tuple[str, str], tuple[Decisions, Decisions]] = {}
    for order, names in (("forward", list(decisions)), ("reversed", list(reversed(decisions)))):
        for i, name in enumerate(names):
            found[order, name] = (frozenset(names[:i]), frozenset(names[: i + 1]))
    for name in decisions:
        found["alone", name] = (NONE, frozenset({name}))
    return found


ORDERS = ("forward", "reversed", "alone")
LINKS_AS_THEY_ARE, INSTANT_LINKS = "as they are", "without time"


@dataclass(frozen=True)
class Step:
    """One decision given to its oracle."""

    order: str  # one of `ORDERS`; `"alone"`: none has been replaced before
    decision: str  # one of `DECISIONS`
    replaced: bool  # False: the policy makes no such decision, or names no oracle for it
    # before_ns, after_ns: makespan without and with this oracle; None if a run failed, or nothing is replaced
    before_ns: int | None = None
    after_ns: int | None = None
    decode_tokens_per_s: float | None = None  # with it
    instant_links: bool = False  # whether the run with this oracle is on another machine, whose links take no time

    @property
    def saved_ns(self) -> int | None:
        """Time that the oracle saves; negative if the run takes longer with it."""
        return None if self.before_ns is None or self.after_ns is None else self.before_ns - self.after_ns


@dataclass(frozen=True)
class Regret:
    """Regret of one run."""

    row: Mapping[str, Value]  # its result as it is
    # what was asked for, by the names in `ASKED`; a policy may have its own way to transfer all the same
    setting: Mapping[str, Value]
    steps: tuple[Step, ...]  # of all orders
    all_replaced_ns: int | None  # makespan with every decision replaced that can be, links that take no time among them
    bounds: RunBounds | None  # none for a policy that is not exact, or that failed
    best_hit_rate: float | None  # of Belady's rule with as many slots, for caches that fetch on demand
    errors: tuple[str, ...]  # of runs that failed

    def alone(self, decision: str) -> Step:
        """Return what one oracle alone does."""
        return next(step for step in self.steps if step.order == "alone" and step.decision == decision)

    def records(self) -> list[dict[str, Any]]:
        """Return everything by name, one row a step; figures with an oracle are labelled so."""
        base = self.row.get("makespan_ns")
        whole = base - self.all_replaced_ns if isinstance(base, int) and self.all_replaced_ns is not None else None
        return [
            {
                "policy": self.row["policy"],
                **self.setting,
                "order": step.order,
                "decision": step.decision,
                "replaced": step.replaced,
                "links": (INSTANT_LINKS if step.instant_links else LINKS_AS_THEY_ARE) if step.replaced else None,
                "base_ns": base,
                "before_ns": step.before_ns,
                "after_ns": step.after_ns,
                "saved_ns": step.saved_ns,
                "share_of_base": step.saved_ns / base if step.saved_ns is not None and isinstance(base, int) else None,
                "share_of_regret": step.saved_ns / whole if step.saved_ns is not None and whole else None,
                "decode_tokens_per_s": step.decode_tokens_per_s,
                "all_replaced_ns": self.all_replaced_ns,
                "all_replaced_links": INSTANT_LINKS,
                "lower_bound_ns": None if self.bounds is None else self.bounds.makespan_ns,
                "lower_bound_instant_links_ns": None if self.bounds is None else self.bounds.without_link_time_ns,
                "hit_rate": self.row.get("hit_rate"),
                "belady_hit_rate": self.best_hit_rate,
                "source_label": "oracle",
                "base_label": self.row.get("source_label"),
                "routing": self.row.get("routing"),
                "notes": self.row.get("notes"),
                "errors": "; ".join(self.errors) or None,
            }
            for step in self.steps
        ]


ASKED = (*SETTINGS, *CACHE_SETTINGS)
"""Columns of a result row that say what was asked for."""


def regrets(
    experiment: Experiment, policies: Sequence[str] = (), *, jobs: int | None = 1, progress: bool = False
) -> list[Regret]:
    """Replace the decisions of each run of an experiment by their oracles.

    `policies` are names, with or without options, of those to study (all if empty); the requests are the whole experiment's all
    the same. Raises `ConfigError` if the experiment has no policy of such a name.
    """
    specs = _chosen(experiment, policies)
    wanted: dict[int, dict[tuple[str, str], tuple[Decisions, Decisions]]] = {}
    tasks: list[tuple[int, Decisions]] = []
    for spec in specs:
        wanted[spec.index] = combinations(replaceable(spec))
        sets = [NONE, *(after for _, after in wanted[spec.index].values())]
        tasks += [(spec.index, decisions) for decisions in dict.fromkeys(sets)]
    derived = experiment.of([derive(experiment.specs[index], decisions) for index, decisions in tasks])
    found = run_experiment(derived, jobs=jobs, progress=progress, may_fail=True)
    rows = {task: outcome.row | {"run": task[0]} for task, outcome in zip(tasks, found.outcomes, strict=True)}
    return [_regret(experiment, spec, wanted[spec.index], rows) for spec in specs]


def _chosen(experiment: Experiment, policies: Sequence[str]) -> list[RunSpec]:
    known = {name for spec in experiment.specs for name in (spec.policy_name, str(spec.point.policy["name"]))}
    for name in policies:
        if name not in known:
            raise ConfigError(f"{experiment.place}: --policies: {unknown_name('policy of this experiment', name, sorted(known))}")
    return [s for s in experiment.specs if not policies or {s.policy_name, s.point.policy["name"]} & set(policies)]


def _regret(
    experiment: Experiment,
    spec: RunSpec,
    wanted: Mapping[tuple[str, str], tuple[Decisions, Decisions]],
    rows: Mapping[tuple[int, Decisions], Mapping[str, Value]],
) -> Regret:
    def makespan(decisions: Decisions) -> int | None:
        value = rows[spec.index, decisions].get("makespan_ns")
        return value if isinstance(value, int) else None

    steps = []
    for order in ORDERS:
        for decision in reversed(DECISIONS) if order == "reversed" else DECISIONS:
            pair = wanted.get((order, decision))
            if pair is None:
                steps.append(Step(order, decision, False))
                continue
            speed = rows[spec.index, pair[1]].get("decode_tokens_per_s")
            tokens = float(speed) if isinstance(speed, int | float) else None
            instant = "bandwidth" in pair[1]
            steps.append(Step(order, decision, True, makespan(pair[0]), makespan(pair[1]), tokens, instant))
    everything = frozenset(decision for order, decision in wanted if order == "alone")
    mine = {decisions: row for (index, decisions), row in rows.items() if index == spec.index}
    errors = [
        f"with the oracle of {' and '.join(d for d in DECISIONS if d in chosen) or 'nothing'}: {row['error']}"
        for chosen, row in mine.items()
        if row.get("error")
    ]
    base = mine[NONE]
    asked = spec.row()
    setting = {key: asked[key] for key in ASKED}
    slots = base.get("cache_slots")
    if base.get("error") or not isinstance(slots, int):
        return Regret(base, setting, tuple(steps), None, None, None, tuple(errors))
    n_gpus = sum(device.kind == "gpu" for device in spec.hardware.devices.values())
    hits, lookups = most_hits(experiment.workload(spec), spec.model, slots * n_gpus)
    bounds, best = bounds_of(experiment, spec, slots), hits / lookups if lookups else None
    return Regret(base, setting, tuple(steps), makespan(everything), bounds, best, tuple(errors))


def bounds_of(experiment: Experiment, spec: RunSpec, cache_slots: int) -> RunBounds | None:
    """Bound the makespan of any exact policy with this run's memory from below."""
    policy: Any = make_policy(spec.point.policy, experiment.place)
    if not policy.exact:
        return None
    trace, workload, model = experiment.trace(spec), experiment.workload(spec), spec.model
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))
    tables = {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs}
    gpus = [name for name, device in spec.hardware.devices.items() if device.kind == "gpu"]
    placement = initial_placement(model, spec.costs(policy), workload, policy, dict.fromkeys(gpus, cache_slots), tables)
    return run_bounds(workload, spec.costs(policy), pool_slots(placement, gpus, model))


def pool_slots(placement: Placement, gpus: Sequence[str], model: ModelSpec) -> int:
    """Count the experts that all pools of all GPUs hold."""
    smallest = min(model.expert_bytes(layer) for layer in range(model.n_layers))
    pools = [pool for pool in placement.pools if pool.device in gpus]
    return sum(n_bytes // smallest for pool in pools for n_bytes in pool.sizes(model.n_layers))


def table(found: Sequence[Regret], form: Format) -> str:
    """Write the regret of some runs."""
    if form.for_programs:
        return render_records([record for one in found for record in one.records()], form)
    varying = [key for key in ASKED if len({str(one.setting[key]) for one in found}) > 1]
    head = ["policy", *varying]
    orders = [*head, "order", "as it is", *DECISIONS, "all oracles", "bound*", "tok/s"]
    rows = [[*_named(one, varying), *cells] for one in found for cells in _orders(one)]
    alone = [
        *head, "hits %", "Belady %", "as it is", *(f"{name} alone" for name in DECISIONS), "bound*", "lower bound", "time / bound"
    ]  # fmt: skip
    beside = [[*_named(one, varying), *_alone(one)] for one in found]
    between = "\n\n" if form is Format.MD else "\n"
    notes = [
        "makespan with the oracle, and how far it lies from the makespan as it is; -: the policy makes no such decision, or not "
        "by a part that can be exchanged",
        "forward: predictions first; reversed: links first",
        "* on another machine, whose links take no time; bound*: the lower bound there; lower bound: of the machine as it is",
        "Belady %: of a cache that may replace any expert; one that works layer by layer cannot reach it with few slots a layer "
        "(belady-visit of moesim trace stats is the most that it can)",
        "every figure but hits and 'as it is' is an oracle's: nobody need be able to reach it",
    ]
    first, second = render(orders, rows, form, orders[len(head) + 1 :]), render(alone, beside, form, alone[len(head) :])
    return first + "\n" + second + "\n" + between.join([*notes, *_labels(found)]) + "\n"


def _labels(found: Sequence[Regret]) -> list[str]:
    rows = [one.row for one in found if not one.errors]
    said = {f"as it is: weakest source {row.get('source_label')}; {', '.join(split_notes(row)[0])}" for row in rows}
    return [*sorted(said), *cost_notes(rows)]


def _named(one: Regret, varying: Sequence[str]) -> list[str]:
    return [str(one.row["policy"]), *("-" if one.setting[key] is None else str(one.setting[key]) for key in varying)]


def _orders(one: Regret) -> list[list[str]]:
    lines = []
    for order in ("forward", "reversed"):
        steps = {step.decision: step for step in one.steps if step.order == order}
        speed = _speed(one, order)
        cells = [_saved(steps[name], one) for name in DECISIONS]
        everything = _time(one.all_replaced_ns) + ("" if one.all_replaced_ns is None else "*")
        lines.append([order, _time(one.row.get("makespan_ns")), *cells, everything, _instant_bound(one), speed])
    return lines


def _instant_bound(one: Regret) -> str:
    return _time(None if one.bounds is None else one.bounds.without_link_time_ns)


def _speed(one: Regret, order: str) -> str:
    last = [step.decode_tokens_per_s for step in one.steps if step.order == order and step.replaced][-1]
    speeds = (one.row.get("decode_tokens_per_s"), last)
    return " to ".join("-" if not isinstance(value, int | float) else f"{value:.3g}" for value in speeds)


def _alone(one: Regret) -> list[str]:
    makespan, bound = one.row.get("makespan_ns"), None if one.bounds is None else one.bounds.makespan_ns
    over = f"{makespan / bound:.2f}" if isinstance(makespan, int) and bound else "-"
    steps = [_saved(one.alone(name), one) for name in DECISIONS]
    hits = [_percent(one.row.get("hit_rate")), _percent(one.best_hit_rate)]
    return [*hits, _time(makespan), *steps, _instant_bound(one), _time(bound), over]


def _saved(step: Step, one: Regret) -> str:
    base = one.row.get("makespan_ns")
    if not step.replaced:
        return "-"
    if step.saved_ns is None or not isinstance(base, int):
        return "failed"
    return f"{_time(step.after_ns)}{'*' if step.instant_links else ''} ({-100 * step.saved_ns / base:+z.1f} %)"


def _time(ns: Any) -> str:
    if not isinstance(ns, int):
        return "-"
    return f"{ns / NS_PER_S:.3g} s" if ns >= NS_PER_S else f"{ns / NS_PER_MS:.3g} ms"


def _percent(share: Any) -> str:
    return f"{100 * share:.1f}" if isinstance(share, int | float) else "-"


def files_of(found: Sequence[Regret]) -> dict[str, bytes]:
    """Return ``regret.csv`` and a figure for each setting."""
    import pandas as pd

    from moesim.plots.studies import regret as waterfall  # Matplotlib takes most of a second to import
    from moesim.plots.style import pictures

    records = [record for one in found for record in one.records()]
    files = {"regret.csv": render_records(records, Format.CSV).encode()}
    by_setting: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        if record["base_ns"] is not None:
            by_setting.setdefault(tuple(str(record[key]) for key in ASKED), []).append(record)
    for number, rows in enumerate(by_setting.values()):
        files |= pictures(waterfall(pd.DataFrame(rows)), "regret" if len(by_setting) == 1 else f"regret-{number}")
    return files
