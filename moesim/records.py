"""Records of the engine: flat facts, one tuple a record, no statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moesim.core.record_table import RecordTable
from moesim.serving.steps import Served


class TaskRecord(NamedTuple):
    """One occupation of a device lane."""

    start: int  # ns
    end: int  # ns
    device: str
    lane: str  # "main" | "side"
    kind: str  # "expert" | "attention" | "dense" | "shared" | "embedding" | "leading" | "head" | "predict" | "host" | "draft"
    step: int
    layer: int  # -1 outside the MoE layers
    mb: int  # of a Run: the micro-batch whose event it answers, even if it serves rows of earlier ones too
    expert: int  # -1 if not an expert
    rows: int
    work: int  # ns it takes alone; end - start is longer under contention
    submitted: int  # ns at which the Run (or dense task) was submitted
    ready: int  # ns at which its weights and inputs were there
    bits: float | None = None  # width of the expert's weights; None: the full one


class TransferRecord(NamedTuple):
    """One occupation of a link by a transfer: a chunk, a hop, or the whole."""

    start: int
    end: int
    link: str
    cause: str  # "demand" | "prefetch" | "update" | "write-back" | "message" | "activation" (only with share_link)
    layer: int  # -1 outside the MoE layers
    expert: int  # -1 if not an expert: a message, or weights or a KV cache that are streamed
    n_bytes: int  # that moved
    urgency: int
    submitted: int  # ns at which the Fetch was submitted
    fetch: int  # number of the fetch; the chunks and hops of one fetch share it
    last: bool  # the copy is complete at its destination when this ends
    waited_memory: bool  # it was first in line on an idle link, and had to wait for memory
    bits: float | None = None  # width of the copy; None: the full one
    left: int = 0  # bytes that had not moved when the run ended, at `end`; 0: it was done


class ActivationRecord(NamedTuple):
    """Activations crossing between two devices on the control lane (without share_link)."""

    start: int
    end: int
    link: str
    step: int
    layer: int
    rows: int
    n_bytes: int
    direction: str  # "in" to the device that runs, "out" back, "hidden" between dense parts
    submitted: int


class LookupRecord(NamedTuple):
    """The state of the caches when a router's result is known."""

    time: int
    step: int
    layer: int
    mb: int
    active: tuple[int, ...]  # distinct routed experts
    loads: tuple[int, ...]  # rows of each
    hits: tuple[int, ...]  # 1: resident on a GPU, at any width
    in_flight: tuple[int, ...]  # 1: on its way to a GPU, at any width


class EvictionRecord(NamedTuple):
    """A copy left a device."""

    time: int
    device: str
    pool: str
    layer: int
    expert: int
    reason: str  # "evict" | "drop"
    used: bool  # it was read by a Run after it arrived (or was placed at the start)
    fetch: int  # the fetch that had brought it, -1 if placed at the start
    bits: float | None = None  # width of the copy; None: the full one


class DecisionRecord(NamedTuple):
    """Decision time charged between an event and its actions."""

    start: int
    end: int
    step: int
    layer: int


class InexactRecord(NamedTuple):
    """Top-k slots served otherwise than fresh and at full width, in rank order, or skipped."""

    step: int
    layer: int
    kind: str  # "stale" | "substituted" | "substituted-stale" | "skipped" | "late" | "reduced": the first that is so
    slots: int
    mass: float | None  # sum of the gate weights of those slots; None if the trace has none


class LayerRecord(NamedTuple):
    """One visit of a layer."""

    begin: int
    end: int
    step: int
    layer: int


class StepRecord(NamedTuple):
    """One step."""

    begin: int
    end: int
    step: int
    phase: str
    batch: int
    n_tokens: int
    n_sequences: int
    gate_mass: float  # sum of the gate weights of all rows and layers; 0 for exact policies, where all of it is fresh


class MemoryRecord(NamedTuple):
    """Bytes in use on a device after a change."""

    time: int
    device: str
    n_bytes: int


@dataclass
class Records:
    """All records of one run, in the order in which they were completed.

    ``used_fetches`` holds the numbers of the fetches whose copy some Run read; ``makespan_ns`` is the end of the last step.
    ``peak_bytes`` maps each device to its peak memory in bytes, ``pool_peak_bytes`` each (device, pool). ``served`` is what
    became of requests that arrived. Of a long run only the records of the first steps may be kept: ``first_steps`` says of how
    many; None: of all.
    """

    tasks: RecordTable[TaskRecord] = field(default_factory=lambda: RecordTable(TaskRecord))
    transfers: RecordTable[TransferRecord] = field(default_factory=lambda: RecordTable(TransferRecord))
    activations: RecordTable[ActivationRecord] = field(default_factory=lambda: RecordTable(ActivationRecord))
    lookups: RecordTable[LookupRecord] = field(default_factory=lambda: RecordTable(LookupRecord))
    evictions: RecordTable[EvictionRecord] = field(default_factory=lambda: RecordTable(EvictionRecord))
    decisions: RecordTable[DecisionRecord] = field(default_factory=lambda: RecordTable(DecisionRecord))
    inexact: RecordTable[InexactRecord] = field(default_factory=lambda: RecordTable(InexactRecord))
    layers: RecordTable[LayerRecord] = field(default_factory=lambda: RecordTable(LayerRecord))
    steps: RecordTable[StepRecord] = field(default_factory=lambda: RecordTable(StepRecord))
    memory: RecordTable[MemoryRecord] = field(default_factory=lambda: RecordTable(MemoryRecord))
    used_fetches: set[int] = field(default_factory=set)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    pool_peak_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    makespan_ns: int = 0
    served: Served | None = None
    first_steps: int | None = None

    def clear(self) -> None:
        """Forget the records; sizes and times of the whole run stay."""
        for name in KINDS:
            getattr(self, name).clear()
        self.used_fetches.clear()


KINDS: dict[str, type[Any]] = {
    "tasks": TaskRecord, "transfers": TransferRecord, "activations": ActivationRecord, "lookups": LookupRecord,
    "evictions": EvictionRecord, "decisions": DecisionRecord, "inexact": InexactRecord, "layers": LayerRecord,
    "steps": StepRecord, "memory": MemoryRecord,
}  # fmt: skip
"""Tables of `Records` and the kind of record that each holds."""


def activities(records: Records) -> frozenset[str]:
    """Return the activities of a run, by the names in pairs of contention."""
    tasks, found = records.tasks, set()
    (device, devices), (lane, lanes) = tasks.texts("device"), tasks.texts("lane")
    which = (device.astype(np.int16) * np.int16(len(lanes)) + lane) * np.int16(2) + (tasks.column("expert") >= 0)
    for code in np.flatnonzero(np.bincount(which)).tolist():
        place, expert = divmod(code, 2)
        side = lanes[place % len(lanes)] == "side"
        found.add(f"{devices[place // len(lanes)]}.{'side' if side else 'experts' if expert else 'dense'}")
    link, links = records.transfers.texts("link")
    return frozenset(found | {links[code] for code in np.flatnonzero(np.bincount(link)).tolist()})
