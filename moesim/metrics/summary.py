"""Metrics of a run, from its records: `docs/reference/metrics.md` defines each in symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.hardware import HardwareProfile
from moesim.metrics.breakdown import CAUSES, Breakdown, TimeByCause
from moesim.metrics.columns import append, in_decode, joined, sums
from moesim.metrics.fidelity import GateMass
from moesim.metrics.hits import HitRates
from moesim.metrics.latency import latency
from moesim.metrics.machine import Machine, machine_of
from moesim.metrics.traffic import Traffic
from moesim.metrics.utilisation import BusyTime, energy_j, utilisation
from moesim.records import Records, StepRecord
from moesim.serving.steps import Served

Value = float | int | str | None


class StepLike(Protocol):
    """The part of a step of the workload that metrics read."""

    @property
    def index(self) -> int: ...
    @property
    def last_chunk(self) -> bool: ...


def counts(records: Records, kinds: Mapping[str, str]) -> dict[str, float | int | None]:
    """Count runs, transfers and evictions, and what contention cost.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.

    Returns
    -------
    dict of str to float, int or None
        ``gpu_run_share`` is the share of rows of expert runs that ran on GPUs; ``prefetch_used_share``
        that of the completed prefetches whose copy some Run read; ``contention_ns`` the time by which
        tasks took longer than alone, over all lanes.
    """
    tasks, traffic = Tasks(kinds), Traffic()
    tasks.add(records)
    traffic.add(records)
    return _counts(tasks, traffic)


class Tasks:
    """Runs of experts, evictions and the cost of contention, in a run that comes in pieces."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = kinds
        self.rows, self.runs = Counter[str](), Counter[str]()  # by kind of device
        self.slower = self.n_evictions = 0

    def add(self, records: Records) -> None:
        table = records.tasks
        self.slower += int((table.column("end") - table.column("start") - table.column("work")).sum())
        device, names = table.texts("device")
        of_expert = np.where(table.column("expert") >= 0, device, len(names))
        n_runs = np.bincount(of_expert, minlength=len(names))
        n_rows = sums(of_expert, table.column("rows"), len(names) + 1)
        for code, name in enumerate(names):
            self.runs[self._kinds.get(name, "")] += int(n_runs[code])
            self.rows[self._kinds.get(name, "")] += int(n_rows[code])
        self.n_evictions += len(records.evictions)


def _counts(tasks: Tasks, traffic: Traffic) -> dict[str, float | int | None]:
    n_rows = tasks.rows["gpu"] + tasks.rows["cpu"]
    return {
        "n_gpu_runs": tasks.runs["gpu"],
        "n_cpu_runs": tasks.runs["cpu"],
        "gpu_run_share": tasks.rows["gpu"] / n_rows if n_rows else None,
        **traffic.fetches(),
        "n_evictions": tasks.n_evictions,
        "contention_ns": tasks.slower,
    }


def summarise(
    records: Records,
    hardware: HardwareProfile | Machine,
    *,
    steps: Iterable[StepLike] | None = None,
    warm_up_steps: int | None = None,
    split: Breakdown | None = None,
) -> dict[str, Value]:
    """Return all metrics of a run as one flat row.

    Parameters
    ----------
    records : Records
        Records of one run.
    hardware : HardwareProfile or Machine
        What it ran on.
    steps : iterable of steps, optional
        The workload's steps of prefill at least, which say exactly when a group of requests has its first
        tokens.
    warm_up_steps : int, optional
        Steps that count as cold in the hit rates.
    split : Breakdown, optional
        The result of `breakdown` for these records, if it is at hand.

    Returns
    -------
    dict of str to float, int, str or None
        Keys as listed in `docs/reference/metrics.md`, always all of them for one machine; None where a metric
        has no meaning in this run.

    Raises
    ------
    SimulationError
        If steps or layers overlap.
    """
    summary = Summary(hardware, split)
    summary.add(records)
    return summary.row(steps=steps, warm_up_steps=warm_up_steps)


class Summary:
    """All metrics of a run that comes in whole steps; memory grows with the number of steps.

    Parameters
    ----------
    hardware : HardwareProfile or Machine
        What it runs on.
    split : Breakdown, optional
        The run's time by cause, if it is at hand.
    """

    def __init__(self, hardware: HardwareProfile | Machine, split: Breakdown | None = None) -> None:
        machine = self._machine = machine_of(hardware)
        self._split = split
        self._times = TimeByCause(machine.kinds, machine.media)
        self._total, self._decode = Counter[str](), Counter[str]()
        self._hits = HitRates(machine.kinds)
        self._busy = BusyTime(machine.kinds, machine.links)
        self._traffic, self._tasks, self._gate_mass = Traffic(), Tasks(machine.kinds), GateMass()
        self._steps: list[RecordTable[StepRecord]] = []  # of the pieces so far
        self._decodes = np.zeros((2, 0), np.int64)  # number and end of decode steps whose time is not all explained
        self.served: Served | None = None
        self._ends = Records()  # has sizes and times of the whole run, and no records

    def add(self, records: Records, settled_ns: int = 0) -> None:
        """Add all records between the ends of two steps, in the order in which they were completed.

        Parameters
        ----------
        records : Records
        settled_ns : int, ns
            No record of a later piece starts before this time; 0 if unknown, which keeps all records.
        """
        append(self._steps, records.steps)
        self._hits.add(records, settled_ns)
        if self._split is None:
            steps, decodes = records.steps, in_decode(records.steps)
            new = np.stack((steps.column("step")[decodes], steps.column("end")[decodes]))
            self._decodes = np.concatenate((self._decodes, new), axis=1)
            split = self._times.add(records, settled_ns)
            self._add_times(split, self._decodes[0])
            if len(split.windows):
                self._decodes = self._decodes[:, self._decodes[1] > split.windows.column("end")[-1]]
        self._busy.add(records, settled_ns)
        self._traffic.add(records, settled_ns)
        self._tasks.add(records)
        self._gate_mass.add(records)
        self.served = records.served or self.served
        self._ends.makespan_ns = max(self._ends.makespan_ns, records.makespan_ns)
        self._ends.peak_bytes.update(records.peak_bytes)
        self._ends.pool_peak_bytes.update(records.pool_peak_bytes)

    def _add_times(self, split: Breakdown, decodes: NDArray[np.int64]) -> None:
        self._total.update(split.total())
        self._decode.update(split.select(decodes))

    def row(self, *, steps: Iterable[StepLike] | None = None, warm_up_steps: int | None = None) -> dict[str, Value]:
        """Return all metrics of the whole run as one flat row: see `summarise`."""
        machine, makespan_ns, ends = self._machine, self._ends.makespan_ns, self._ends
        all_steps = joined(StepRecord, self._steps)
        last_chunks = None if steps is None else {s.index for s in steps if s.last_chunk}
        row: dict[str, Value] = {}
        row.update(latency(Records(steps=all_steps, makespan_ns=makespan_ns), last_chunks))
        row.update(self._hits.rates(all_steps, warm_up_steps))
        self._add_times(self._split or self._times.rest(), all_steps.column("step")[in_decode(all_steps)])
        row.update({f"time_{cause}_ns": self._total[cause] for cause in CAUSES})
        row.update({f"decode_time_{cause}_ns": self._decode[cause] for cause in CAUSES})
        times = self._busy.busy(makespan_ns)
        row.update(utilisation(times))
        row.update(self._traffic.bytes_moved(all_steps))
        row.update({f"peak_memory_bytes.{name}": ends.peak_bytes.get(name, 0) for name in machine.kinds})
        row.update({f"peak_pool_bytes.{name}.{pool}": n for (name, pool), n in sorted(ends.pool_peak_bytes.items())})
        row.update(_counts(self._tasks, self._traffic))
        row.update(self._gate_mass.fidelity(all_steps))
        row["fidelity_fresh_decode"] = self._gate_mass.fresh_decode(all_steps)
        energy = energy_j(times, machine.power_w, machine.platform_w) if machine.power_w else None
        n_generated = int(all_steps.column("n_sequences").sum())
        row["energy_j"] = energy
        row["energy_j_per_token"] = energy / n_generated if energy is not None and n_generated else None
        row["energy_label"] = machine.energy_label if energy is not None else None
        return row
