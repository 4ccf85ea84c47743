"""Times that no exact policy can beat: `docs/background/bounds.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from moesim.core.units import ceil_div
from moesim.errors import HardwareError
from moesim.hardware.costs.curves import copy_ns

if TYPE_CHECKING:
    from moesim.hardware.costs import CostModel
    from moesim.model import ModelSpec
    from moesim.trace.workload import MicroBatch, Step, Workload

_Work = tuple[int, int]  # ns of one piece of work on a GPU, and on a CPU
_NEVER = 10**18  # ns on a GPU, of what no GPU does


class RunBounds(NamedTuple):
    """Lower bounds of one run."""

    compute_ns: int  # every expert is everywhere at all times
    transfer_ns: int  # the links move what does not fit, unless a CPU computes it
    fewest_fetches: int  # experts moved to GPUs if no CPU computes any

    @property
    def makespan_ns(self) -> int:
        """The larger of the two: the bound of the machine as it is."""
        return max(self.compute_ns, self.transfer_ns)

    @property
    def without_link_time_ns(self) -> int:
        """The bound of the same machine with links that take no time."""
        return self.compute_ns


def run_bounds(workload: Workload, costs: CostModel, gpu_slots: int) -> RunBounds:
    """Bound the makespan of every exact policy.

    Parameters
    ----------
    workload : Workload
        Its routing is read completely.
    costs : CostModel
        Model and machine.
    gpu_slots : int
        Experts that the pools of all GPUs hold together: cache, staging and prefetch buffers.

    Returns
    -------
    RunBounds

    Notes
    -----
    Exact: every routed row is computed by its expert on its own layer's state, so no expert of a layer visit begins before a
    router of that visit has chosen, and the visit ends after the last; visits and steps follow each other. An expert's rows may
    be split between devices and Runs in any way.
    """
    cheapest = _Cheapest(costs)
    compute = before = 0  # the second: time in which no expert of any layer can run
    computed: list[int] = []  # ns on a CPU, of each use of an expert
    known: dict[tuple[object, ...], int] = {}
    visits: list[list[tuple[int, int]]] = []
    for step in workload.steps:
        around = cheapest.around(step)
        before += around
        in_step, asked = around, []
        dense_of = {layer: [cheapest.dense(step, micro, layer) for micro in step.micro] for layer in set(costs.model.alike)}
        shared_of = {layer: cheapest.shared(step, layer) for layer in dense_of}
        for layer, rows_of in enumerate(_rows_by_expert(step)):
            dense, shared = dense_of[costs.model.alike[layer]], shared_of[costs.model.alike[layer]]
            first = min(sum(min(part) for part in parts) for parts in dense)  # each may be on a device of its own
            visits.append([(layer, expert) for expert in rows_of])
            experts = [cheapest.expert(rows) for rows in rows_of.values()]
            computed += [on_cpu for _, on_cpu in experts] if cheapest.n_cpus else []
            asked += experts
            before += first
            key = (tuple(sorted(rows_of.values())), tuple(dense), tuple(shared))
            if key not in known:
                known[key] = first + cheapest.split(experts + shared)
                if len(step.micro) > 1:  # experts of one run during the dense part of another: what the lanes do in all
                    known[key] = max(known[key], cheapest.split(experts + shared + [work for parts in dense for work in parts]))
            in_step += known[key]
        compute += max(in_step, cheapest.submission(asked))
    hits, lookups = _belady(visits, costs.model, gpu_slots)
    fewest = lookups - hits
    transfer = _transfer_bound(fewest, _fetch_ns(costs), before, sorted(computed), cheapest.n_cpus)
    return RunBounds(compute, transfer, fewest)


def _rows_by_expert(step: Step) -> Iterator[dict[int, int]]:
    """Yield the rows of each active expert, layer by layer, over the micro-batches of a step."""
    for layers in zip(*(micro.layers for micro in step.micro), strict=True):
        rows_of: dict[int, int] = {}
        for routing in layers:
            for expert in routing.active:
                rows_of[expert] = rows_of.get(expert, 0) + routing.rows[expert]
        yield rows_of


class _Cheapest:
    """The least time of each piece of work on the best GPU and on the best CPU of a machine."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._submit_ns, self._one_thread = costs.host_expert_ns(), costs.host_shared()
        kinds = {name: device.role for name, device in costs.hardware.devices.items()}
        self._of_kind = [[name for name, kind in kinds.items() if kind == wanted] for wanted in ("accelerator", "host")]
        self.n_gpus, self.n_cpus = (len(names) for names in self._of_kind)
        self._rates = [[Fraction(0)], [Fraction(0)]]  # of either kind, by rows: ns a row of the cheapest Run of up to so many
        self._ratios: dict[_Work, Fraction] = {}

    def expert(self, rows: int) -> _Work:
        """Return the least time of these rows of one expert, in however many Runs."""
        for kind, rates in enumerate(self._rates):
            for n in range(len(rates), rows + 1):
                ns = self._least(self._of_kind[kind], self._costs.expert_ns, n)
                rates.append(min(Fraction(ns, n), rates[-1] or Fraction(ns, n)) if ns is not None else rates[-1])
        gpu, cpu = (int(rates[rows] * rows) for rates in self._rates)
        return gpu, cpu

    def _least(self, names: Sequence[str], cost: Callable[..., int], *args: int) -> int | None:
        found = []
        for name in names:
            try:
                found.append(cost(name, *args))
            except HardwareError:
                continue
        return min(found, default=None)

    def _pair(self, cost: Callable[..., int], *args: int) -> _Work:
        """Return the least time on either kind; of a kind that cannot do it, the other's."""
        gpu, cpu = (self._least(names, cost, *args) for names in self._of_kind)
        if gpu is None and cpu is None:
            return 0, 0
        return (gpu if gpu is not None else cpu) or 0, (cpu if cpu is not None else gpu) or 0

    def around(self, step: Step) -> int:
        costs, more = self._costs, (step.work2, len(set(step.requests.tolist())))
        parts = [
            self._pair(costs.embedding_ns, step.n_tokens),
            self._pair(costs.leading_ns, step.n_tokens, *more),
            self._pair(costs.head_ns, step.n_sequences),
        ]
        return sum(min(pair) for pair in parts)

    def dense(self, step: Step, micro: MicroBatch, layer: int) -> tuple[_Work, ...]:
        """Return the work of a layer's attention (in decode projections and cache apart) and rest."""
        ns, rows = self._costs.attention_ns, micro.n_rows
        requests = len(set(step.requests[micro.first_row : micro.first_row + rows].tolist()))
        attention, rest = self._pair(ns, rows, micro.work2, requests, layer), self._pair(self._costs.dense_ns, rows, layer)
        if step.phase != "decode":
            return attention, rest
        core = self._pair(self._costs.core_ns, rows, micro.work2, requests, layer)
        apart = zip(attention, self._pair(ns, rows, 0, requests, layer), core, strict=True)
        gpu, cpu = ((min(first, whole), max(0, min(second, whole - first))) for whole, first, second in apart)
        return (gpu[0], cpu[0]), (gpu[1], cpu[1]), rest

    def shared(self, step: Step, layer: int) -> list[_Work]:
        if not self._costs.model.shared_params:
            return []
        return [self._pair(self._costs.shared_ns, micro.n_rows, layer) for micro in step.micro]

    def split(self, work: Sequence[_Work]) -> int:
        """Return the least T in which divisible work is done on all GPUs and on all CPUs."""
        # Work that a GPU does best in proportion goes there first; the one at which both sides meet is divided.
        gpus, cpus = self.n_gpus, self.n_cpus
        if not cpus or not gpus:
            return ceil_div(sum(pair[0 if gpus else 1] for pair in work), gpus or cpus)
        gpu, cpu = 0, gpus * sum(c for _, c in work)  # times the devices of the other kind, so that both compare
        for g, c in sorted(work, key=self._ratio):
            g, c = g * cpus, c * gpus
            if g + c and gpu + g >= cpu - c:
                return ceil_div(gpu * c + cpu * g, (g + c) * gpus * cpus)
            gpu, cpu = gpu + g, cpu - c
        return 0  # no work

    def submission(self, work: Sequence[_Work]) -> int:
        """Return the least time of the thread that submits the experts of a step, one Run each."""
        # Where it computes the hosts' experts as well, its own time is more work for their side.
        submitted = len(work) * self._submit_ns
        return self.split([*work, (_NEVER, submitted)]) if self._one_thread and self.n_cpus else submitted

    def _ratio(self, pair: _Work) -> Fraction:
        if pair not in self._ratios:
            self._ratios[pair] = Fraction(pair[0], sum(pair)) if sum(pair) else Fraction(0)
        return self._ratios[pair]


def most_hits(workload: Workload, model: ModelSpec, slots: int) -> tuple[int, int]:
    """Return the hits of the best cache that fetches on demand, and the lookups.

    Parameters
    ----------
    workload : Workload
        Its routing is read completely.
    model : ModelSpec
        Layers and experts.
    slots : int
        Experts that the cache holds, of any layers.

    Returns
    -------
    hits, lookups : int
        Of Belady's rule, with the best content at the start; a lookup is a layer visit and an expert.
        A cache that fetches ahead can have more hits; fetches it can only save as many.
    """
    visits = [[(layer, e) for e in rows_of] for step in workload.steps for layer, rows_of in enumerate(_rows_by_expert(step))]
    return _belady(visits, model, slots)


def _belady(visits: Sequence[Sequence[tuple[int, int]]], model: ModelSpec, slots: int) -> tuple[int, int]:
    """Count hits and lookups of Belady's cache, which starts full for free."""
    everything = [(layer, expert) for layer in range(model.n_layers) for expert in range(model.n_experts)]
    groups = [everything, *visits]  # as if all had been used once before
    upcoming: dict[tuple[int, int], int] = {}
    next_uses = []  # of each lookup: the visit, from the last one on
    for number in range(len(groups) - 1, -1, -1):
        next_uses.append([upcoming.get(unit, len(groups)) for unit in groups[number]])
        upcoming |= dict.fromkeys(groups[number], number)
    cached: dict[tuple[int, int], int] = {}
    latest: list[tuple[int, tuple[int, int]]] = []  # next use, negative; entries of the past are skipped
    hits = 0
    for group, uses in zip(groups, reversed(next_uses), strict=True):
        hits += sum(unit in cached for unit in group)
        for unit, use in zip(group, uses, strict=True):
            cached[unit] = use
            heappush(latest, (-use, unit))
        while len(cached) > slots:
            use, unit = heappop(latest)
            if cached.get(unit) == -use:
                del cached[unit]
    return hits, sum(map(len, visits))


def _fetch_ns(costs: CostModel) -> Fraction:
    """Return the least time for one expert to reach a GPU, with all links to GPUs busy at once."""
    n_bytes = min(costs.model.expert_bytes(layer) for layer in range(costs.model.n_layers))
    devices = costs.hardware.devices
    links = [link for link in costs.hardware.links if devices[link.dst].role == "accelerator"]
    if not links:
        return Fraction(0)
    media = {link.medium or link.name for link in links}
    each = min(copy_ns(curve, n_bytes) for link in links for curve in link.curves.values())
    return Fraction(each, len(media))


def _transfer_bound(fetches: int, fetch_ns: Fraction, before: int, computed: Sequence[int], n_cpus: int) -> int:
    """Return the least T in which links move what CPUs do not compute."""
    # `computed`: CPU time of each use, ascending; CPUs lose `before`, until routers have chosen.
    best = _up(fetches * fetch_ns)
    taken = 0
    for done, ns in enumerate(computed, 1):
        taken += ns
        busy = before + ceil_div(taken, n_cpus)
        if busy >= best:
            break
        best = max(busy, _up(max(0, fetches - done) * fetch_ns))
    return best


def _up(value: Fraction) -> int:
    return ceil_div(value.numerator, value.denominator)
