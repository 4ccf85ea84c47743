"""Regret: what each decision of a policy would be worth if it were made by an oracle.

The decisions of a run are given to their oracles one after the other, first to last and last to first: its predictions to the
true routing, its replacement and its assignment to whatever the policy names in ``oracles``, and the links to ones that take no
time. Nothing else changes; the requests are those of the experiment. What an oracle saves depends on what others have saved
before, hence the two orders; and it may save less than nothing, because a run is a schedule, and schedules have anomalies
(`docs/background/bounds.md`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.runner import initial_placement
from moesim.experiment.spec import RunSpec
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
        """Return everything by name, one row a step; every figure with an oracle in it is labelled so."""
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


# -------------------------------------------------------------------------------------------------------------------- runs


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
