"""Metrics of a run: pure functions over its records. `docs/reference/metrics.md` defines each of them in symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from moesim.hardware import HardwareProfile
from moesim.metrics.breakdown import Breakdown, breakdown
from moesim.metrics.causes import CAUSES
from moesim.metrics.hits import hit_rates
from moesim.metrics.latency import latency
from moesim.metrics.machine import Machine, machine_of
from moesim.metrics.utilisation import busy, energy_j, utilisation
from moesim.records import Records

Value = float | int | str | None

_INEXACT = ("stale", "substituted", "substituted-stale", "skipped", "late", "reduced")


class StepLike(Protocol):
    """What is read of a step of the workload."""

    @property
    def index(self) -> int: ...
    @property
    def last_chunk(self) -> bool: ...


def bytes_moved(records: Records) -> dict[str, float | int | None]:
    """Bytes over links by cause.

    Parameters
    ----------
    records : Records
        Records of one run.

    Returns
    -------
    dict of str to int, float or None, bytes
        ``bytes_<cause>``, ``bytes_total`` (weights and messages), ``bytes_activation``, and bytes per
        token. Every hop counts, since every hop occupies a link.
    """
    moved = dict.fromkeys(("demand", "prefetch_used", "prefetch_wasted", "update", "write_back", "message", "activation"), 0)
    used = records.used_fetches
    for t in records.transfers:
        cause = t.cause.replace("-", "_")
        if cause == "prefetch":
            cause = "prefetch_used" if t.fetch in used else "prefetch_wasted"
        moved[cause] += t.n_bytes
    moved["activation"] += sum(a.n_bytes for a in records.activations)
    total = sum(moved.values()) - moved["activation"]
    result: dict[str, float | int | None] = {f"bytes_{cause}": n for cause, n in moved.items()}
    result["bytes_total"] = total
    n_generated = sum(s.n_sequences for s in records.steps)
    result["bytes_per_token"] = total / n_generated if n_generated else None
    result["bytes_per_decode_token"] = _bytes_per_decode_token(records)
    return result


def _bytes_per_decode_token(records: Records) -> float | None:
    """Weights and messages whose transfer began during a decode step, per token of these steps."""
    steps = sorted(records.steps)
    n_tokens = sum(s.n_sequences for s in steps if s.phase == "decode")
    if not n_tokens:
        return None
    moved = [t for t in records.transfers if t.cause != "activation"]
    at = np.searchsorted([s.begin for s in steps], [t.start for t in moved], side="right") - 1
    during_decode = np.array([s.phase == "decode" for s in steps])[at] & (at >= 0)
    return int(np.array([t.n_bytes for t in moved], dtype=np.int64)[during_decode].sum()) / n_tokens


def fidelity(records: Records) -> dict[str, float | int | None]:
    """How much of the routing was carried out as the model asked for it.

    Parameters
    ----------
    records : Records
        Records of one run.

    Returns
    -------
    dict of str to float or None
        Shares of the gate mass, which add up to 1: ``fidelity_fresh``, ``_stale``, ``_substituted``,
        ``_substituted_stale``, ``_skipped``, ``_late`` and ``_reduced``; None if nothing was run, or if slots were
        inexact and the trace holds no weights to tell how much that was. ``n_inexact_slots`` counts slots.
    """
    whole = sum(s.gate_mass for s in records.steps)
    mass = dict.fromkeys(_INEXACT, 0.0)
    for r in records.inexact:
        mass[r.kind] += r.mass or 0.0  # without weights `whole` is 0 as well, and no share can be told
    if records.steps and not records.inexact:
        whole = 1.0  # all of it was fresh, so it does not matter how much; exact runs do not add it up
    shares = {kind: m / whole if whole else None for kind, m in mass.items()}
    fresh = max(0.0, 1 - sum(mass.values()) / whole) if whole else None
    result: dict[str, float | int | None] = {"fidelity_fresh": fresh}
    result.update({f"fidelity_{kind.replace('-', '_')}": share for kind, share in shares.items()})
    result["n_inexact_slots"] = sum(r.slots for r in records.inexact)
    return result


def fidelity_fresh_decode(records: Records) -> float | None:
    """Return the fresh share of the gate mass of decode steps, beside which a decode speed is read; None without any.

    Parameters
    ----------
    records : Records
        Records of one run.
    """
    decode = Records()
    decode.steps.extend(s for s in records.steps if s.phase == "decode")
    numbers = {s.step for s in decode.steps}
    decode.inexact.extend(r for r in records.inexact if r.step in numbers)
    return fidelity(decode)["fidelity_fresh"]


def counts(records: Records, kinds: Mapping[str, str]) -> dict[str, float | int | None]:
    """Numbers of runs, transfers and evictions, and what contention cost.

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
    rows = {"gpu": 0, "cpu": 0}
    runs = {"gpu": 0, "cpu": 0}
    slower = 0
    for task in records.tasks:
        slower += task.end - task.start - task.work
        if task.expert >= 0:
            rows[kinds[task.device]] += task.rows
            runs[kinds[task.device]] += 1
    done = [t.fetch for t in records.transfers if t.last and t.cause == "prefetch" and t.expert >= 0]
    n_rows = rows["gpu"] + rows["cpu"]
    n_useful = sum(fetch in records.used_fetches for fetch in done)
    return {
        "n_gpu_runs": runs["gpu"],
        "n_cpu_runs": runs["cpu"],
        "gpu_run_share": rows["gpu"] / n_rows if n_rows else None,
        "n_demand_fetches": sum(t.last and t.cause == "demand" and t.expert >= 0 for t in records.transfers),
        "n_prefetches": len(done),
        "prefetch_used_share": n_useful / len(done) if done else None,
        "n_evictions": len(records.evictions),
        "contention_ns": slower,
    }


def summarise(
    records: Records,
    hardware: HardwareProfile | Machine,
    *,
    steps: Iterable[StepLike] | None = None,
    warm_up_steps: int | None = None,
    split: Breakdown | None = None,
) -> dict[str, Value]:
    """All metrics of a run as one flat row.

    Parameters
    ----------
    records : Records
        Records of one run.
    hardware : HardwareProfile or Machine
        What it ran on.
    steps : iterable of steps, optional
        The workload's steps, which say exactly when a group of requests has its first tokens (see `latency`).
    warm_up_steps : int, optional
        Steps that count as cold in the hit rates.
    split : Breakdown, optional
        The result of `breakdown` for these records, if it is at hand.

    Returns
    -------
    dict of str to float, int, str or None
        Keys as listed in `docs/reference/metrics.md`, always all of them for one machine; None where a metric has
        no meaning in this run.

    Raises
    ------
    SimulationError
        If steps or layers overlap.
    """
    machine = machine_of(hardware)
    last_chunks = None if steps is None else {s.index for s in steps if s.last_chunk}
    row: dict[str, Value] = {}
    row.update(latency(records, last_chunks))
    row.update(hit_rates(records, machine.kinds, warm_up_steps))
    split = split or breakdown(records, machine.kinds, machine.media)
    decode = split.select({s.step for s in records.steps if s.phase == "decode"})
    total = split.total()
    row.update({f"time_{cause}_ns": total[cause] for cause in CAUSES})
    row.update({f"decode_time_{cause}_ns": decode[cause] for cause in CAUSES})
    times = busy(records, machine.kinds, machine.links)
    row.update(utilisation(times, machine.kinds))
    row.update(bytes_moved(records))
    row.update({f"peak_memory_bytes.{name}": records.peak_bytes.get(name, 0) for name in machine.kinds})
    row.update({f"peak_pool_bytes.{name}.{pool}": n for (name, pool), n in sorted(records.pool_peak_bytes.items())})
    row.update(counts(records, machine.kinds))
    row.update(fidelity(records))
    row["fidelity_fresh_decode"] = fidelity_fresh_decode(records)
    energy = energy_j(times, machine.power_w, machine.platform_w) if machine.power_w else None
    n_generated = sum(s.n_sequences for s in records.steps)
    row["energy_j"] = energy
    row["energy_j_per_token"] = energy / n_generated if energy is not None and n_generated else None
    row["energy_label"] = machine.energy_label if energy is not None else None
    return row
