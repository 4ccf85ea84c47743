"""The facts of one execution, simulated or live: enough for every figure of a validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from moesim.metrics.breakdown import CAUSES
from moesim.metrics.chain import WAITING, Chain, Record
from moesim.metrics.hits import flatten_lookups
from moesim.metrics.machine import Machine
from moesim.metrics.traffic import bytes_moved
from moesim.metrics.utilisation import busy, common_ns, length, union, utilisation
from moesim.records import Records

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile


GAP: Final = "gap"
RESIDUALS: Final = (*(cause for cause in CAUSES if cause != "idle"), WAITING, GAP)
"""Causes of a residual: those of `moesim.metrics.breakdown`, with idle time cut in two.

``gap``: no lane and no link was busy, and nobody decided: the cost of passing work on. ``waiting``: nothing that was needed was
under way, but something else was.
"""


@dataclass(frozen=True)
class Facts:
    """One execution in numbers."""

    makespan_ns: int  # end of the last step
    phases: str  # one letter a step: `p` for prefill, `d` for decode
    step_ns: list[int]  # duration of each step
    layer_ns: list[float]  # median duration of a visit of each layer over the decode steps; over all steps if none decodes
    layer_total_ns: list[int]  # sum over all visits of each layer
    # lookups, hits, decode_lookups, decode_hits: distinct experts that routers asked for, and those that were on an accelerator
    # by then, whoever ran them
    lookups: int
    hits: int
    decode_lookups: int
    decode_hits: int
    n_bytes: dict[str, int]  # over links, by cause
    transfers: dict[str, int]  # arrived copies by cause
    waited_memory: int  # occupations of a link that had to wait for memory first
    busy_ns: dict[str, int]  # time that each lane (`gpu0.main`) and link was occupied
    overlap_share: float | None  # share of the time of transfers that lay under computation; None without transfers
    cause_ns: dict[str, int]  # time of all decode steps by cause, which adds up to it; of all steps if none decodes
    tasks: dict[str, list[int]]  # for each `kind@device`: how many, and their durations added up (ns)
    decisions: list[int]  # how many times the policy decided about a routed layer, and what that took in all (ns)

    def durations(self, phase: str) -> list[int]:
        """Durations of the steps of a phase (``"p"`` or ``"d"``), ns."""
        return [ns for ns, letter in zip(self.step_ns, self.phases, strict=True) if letter == phase]

    @property
    def compared_steps(self) -> list[int]:
        """Durations of the steps that `cause_ns` and `layer_ns` speak of, ns."""
        return self.durations("d") or self.step_ns


def facts_of(records: Records, machine: Machine) -> Facts:
    """Reduce the records of a run."""
    steps = sorted(records.steps)
    decode = {s.step for s in steps if s.phase == "decode"} or {s.step for s in steps}
    looked = flatten_lookups(records, machine.kinds)
    decoding = [step in decode for step in looked.step.tolist()]
    counted, hit = looked.first, looked.first & looked.resident
    moved = bytes_moved(records)
    tasks, transfers = records.tasks, records.transfers
    counts = _added((f"{t.kind}@{t.device}", 1) for t in tasks)
    spent = _added((f"{t.kind}@{t.device}", t.end - t.start) for t in tasks)
    visits: dict[int, list[tuple[int, int]]] = {}
    for layer in records.layers:
        visits.setdefault(layer.layer, []).append((layer.step, layer.end - layer.begin))
    return Facts(
        makespan_ns=records.makespan_ns,
        phases="".join(s.phase[0] for s in steps),
        step_ns=[s.end - s.begin for s in steps],
        layer_ns=[float(median(ns for step, ns in visits[layer] if step in decode)) for layer in sorted(visits)],
        layer_total_ns=[sum(ns for _, ns in visits[layer]) for layer in sorted(visits)],
        lookups=int(counted.sum()),
        hits=int(hit.sum()),
        decode_lookups=int(counted[decoding].sum()),
        decode_hits=int(hit[decoding].sum()),
        n_bytes={key.removeprefix("bytes_"): n for key, n in moved.items() if isinstance(n, int) and "_per_" not in key},
        transfers=_added((t.cause, int(t.last)) for t in transfers),
        waited_memory=sum(t.waited_memory for t in transfers),
        busy_ns=_added((f"{t.device}.{t.lane}", t.end - t.start) for t in tasks)
        | _added((t.link, t.end - t.start) for t in transfers),
        overlap_share=utilisation(busy(records, machine.kinds, machine.links))["overlap_share"],
        cause_ns=time_by_cause(records, machine, decode),
        tasks={name: [counts[name], ns] for name, ns in spent.items()},
        decisions=[len(records.decisions), sum(d.end - d.start for d in records.decisions)],
    )


def _added(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, value in pairs:
        found[name] += value
    return dict(sorted(found.items()))


def time_by_cause(records: Records, machine: Machine, steps: Collection[int]) -> dict[str, int]:
    """Split the time of some steps by cause."""
    charged = Chain(records, machine.kinds, machine.media).split(steps)
    found = {cause: charged.get(cause, 0) for cause in RESIDUALS}
    everything: list[Record] = [*records.tasks, *records.transfers, *records.activations, *records.decisions]
    until = max([records.makespan_ns, *(r.end for r in everything)])
    occupied = union(((r.start, r.end) for r in everything), until)
    asked = union(((s.begin, s.end) for s in records.steps if s.step in steps), until)
    # Where nothing was busy, the walk can have charged nothing but waiting: so this never exceeds it.
    found[GAP] = length(asked) - common_ns(asked, occupied)
    found[WAITING] -= found[GAP]
    assert sum(found.values()) == length(asked)
    return found


def apart(facts: Facts, hardware: HardwareProfile) -> Facts:
    """Take the runtime's time, a profile's ``router_us``, out of a simulation's dense part."""
    n_steps = len(facts.step_ns)
    router_ns = sum(
        round(device.router_us * 1000) * facts.tasks.get(f"dense@{name}", [0])[0] * len(facts.compared_steps) // n_steps
        for name, device in hardware.devices.items()
    )
    found = dict(facts.cause_ns)
    moved = min(router_ns, found["dense"])
    return replace(facts, cause_ns={**found, "dense": found["dense"] - moved, GAP: found[GAP] + moved})


def residual(predicted: Facts, measured: Facts) -> dict[str, float]:
    """Split the difference of the mean decode step, measured less predicted."""
    return {cause: _mean(measured, cause) - _mean(predicted, cause) for cause in RESIDUALS}


def _mean(facts: Facts, cause: str) -> float:
    return facts.cause_ns.get(cause, 0) / len(facts.compared_steps)


def largest(parts: Mapping[str, float]) -> str:
    """Name the cause with the largest share of a difference."""
    return max(parts, key=lambda cause: abs(parts[cause]))
