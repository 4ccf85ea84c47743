"""What is kept of one execution, simulated or live: enough for every figure of a validation, without its records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from moesim.metrics.hits import flatten_lookups
from moesim.metrics.machine import Machine
from moesim.metrics.summary import bytes_moved
from moesim.metrics.utilisation import busy, utilisation
from moesim.records import Records
from moesim.studies.validation.causes import time_by_cause


@dataclass(frozen=True)
class Facts:
    """One execution in numbers."""

    makespan_ns: int  # end of the last step
    phases: str  # one letter a step: `p` for prefill, `d` for decode
    step_ns: list[int]  # duration of each step
    layer_ns: list[float]  # median duration of a visit of each layer over the decode steps; over all steps if none decodes
    layer_total_ns: list[int]  # sum over all visits of each layer
    # lookups, hits, decode_lookups, decode_hits: distinct experts that routers asked for, and those that were on an accelerator
    # by then
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
    looked = flatten_lookups(records)
    decoding = [step in decode for step in looked.step.tolist()]
    counted, hit = looked.first, looked.first & looked.hit
    moved = bytes_moved(records)
    causes = sorted({t.cause for t in records.transfers})
    visits: dict[int, list[tuple[int, int]]] = {}
    for layer in records.layers:
        visits.setdefault(layer.layer, []).append((layer.step, layer.end - layer.begin))
    shares = utilisation(busy(records, machine.kinds, machine.links), machine.kinds)
    overlap = shares["overlap_share"]
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
        transfers={cause: sum(t.last for t in records.transfers if t.cause == cause) for cause in causes},
        waited_memory=sum(t.waited_memory for t in records.transfers),
        busy_ns=_occupied(records),
        overlap_share=overlap,
        cause_ns=time_by_cause(records, machine, decode),
        tasks=_task_times(records),
        decisions=[len(records.decisions), sum(d.end - d.start for d in records.decisions)],
    )


def _occupied(records: Records) -> dict[str, int]:
    """Add up what occupied each lane and link; both do one thing at a time."""
    return _added([(f"{t.device}.{t.lane}", t.end - t.start) for t in records.tasks]) | _added(
        [(t.link, t.end - t.start) for t in records.transfers]
    )


def _task_times(records: Records) -> dict[str, list[int]]:
    pairs = [(f"{t.kind}@{t.device}", t.end - t.start) for t in records.tasks]
    counts = _added([(name, 1) for name, _ in pairs])
    return {name: [counts[name], ns] for name, ns in _added(pairs).items()}


def _added(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in sorted(pairs):
        found[name] = found.get(name, 0) + value
    return found
