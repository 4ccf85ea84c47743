"""The metrics of a run restated in plain loops over its records, one at a time; and a run cut into pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from moesim.metrics.breakdown import CAUSES, task_cause, transfer_cause
from moesim.metrics.machine import Machine
from moesim.records import (
    KINDS,
    ActivationRecord,
    DecisionRecord,
    EvictionRecord,
    InexactRecord,
    LayerRecord,
    LookupRecord,
    Records,
    StepRecord,
    TaskRecord,
    TransferRecord,
)  # fmt: skip

Span = tuple[int, int]

# ---------------------------------------------------------------------------------------------------------- time by cause


def windows_of(records: Records) -> Iterator[tuple[int, int, int, int]]:
    """Give begin, end, step and layer of layer visits and of the gaps around them."""
    edges: list[tuple[int, int, int]] = []
    for step in sorted(records.steps):
        edges.append((step.begin, -1, -1))
        for layer in sorted(r for r in records.layers if r.step == step.step):
            edges += [(layer.begin, step.step, -1), (layer.end, step.step, layer.layer)]
        edges.append((step.end, step.step, -1))
    edges.append((records.makespan_ns, -1, -1))
    now = 0
    for to, number, layer_number in edges:
        if to > now:
            yield now, to, number, layer_number
        now = to


class Walk:
    """Goes back from the end of a window along what was waited for, asking the records themselves."""

    def __init__(self, records: Records, machine: Machine) -> None:
        self.kinds, self.media = machine.kinds, machine.media
        self.ended: dict[int, list[Any]] = {}
        for r in (*records.tasks, *records.transfers, *records.activations, *records.decisions):
            if r.end > r.start and not getattr(r, "left", 0):  # what the end of the run cut off ended nothing
                self.ended.setdefault(r.end, []).append(r)
        for several in self.ended.values():
            several.sort(key=lambda r: (self.rank(r), self.place(r)))
        self.ends = sorted(self.ended)

    def rank(self, r: Any) -> int:
        if isinstance(r, TaskRecord):
            return 0 if self.kinds[r.device] == "gpu" else 1
        return {DecisionRecord: 2, TransferRecord: 3, ActivationRecord: 4}[type(r)]

    def place(self, r: Any) -> str:
        if isinstance(r, TaskRecord):
            return f"{r.device}.{r.lane}"
        return "" if isinstance(r, DecisionRecord) else str(r.link)

    def cause(self, r: Any) -> str:
        if isinstance(r, TaskRecord):
            return task_cause(r, self.kinds)
        if isinstance(r, TransferRecord):
            return transfer_cause(r.cause)
        return "activation" if isinstance(r, ActivationRecord) else "decision"

    def explain(self, begin: int, end: int, step: int, layer: int) -> list[int]:
        charged = dict.fromkeys(CAUSES, 0)
        now = end
        here = self.ended.get(now, [])
        current = next((r for r in here if _ends(r, step, layer)), here[0] if here else None)
        while now > begin:
            if current is None:
                at = bisect_left(self.ends, now) - 1
                start = max(self.ends[at], begin) if at >= 0 else begin
                charged["idle"] += now - start
                current = self.ended[start][0] if start in self.ended else None
            else:
                start = max(current.start, begin)
                charged[self.cause(current)] += now - start
                current = self.waited_for(current) if start > begin else None
            now = start
        return [charged[cause] for cause in CAUSES]

    def waited_for(self, a: Any) -> Any:
        here = self.ended.get(a.start)
        return None if here is None else next((b for b in here if self.wanted(a, b, here)), here[0])

    def wanted(self, a: Any, b: Any, here: list[Any]) -> bool:
        """Whether a waited for b in particular."""
        decision = isinstance(b, DecisionRecord)
        if isinstance(a, TaskRecord):
            if a.start > a.ready:
                return self.place(a) == self.place(b)
            if a.start == a.submitted:
                return any(isinstance(x, DecisionRecord) for x in here) and (self.place(a) == self.place(b) or decision)
            if isinstance(b, TaskRecord):
                return self.place(a) == self.place(b) or (b.expert < 0 and b.kind != "predict")
            if decision or not b.link.endswith(f"->{a.device}"):
                return False
            return _crosses(b) or (b.last and (b.layer, b.expert) == (a.layer, a.expert))
        if isinstance(a, DecisionRecord):
            return False
        from_source = decision or (isinstance(b, TaskRecord) and b.device == a.link.partition("->")[0])
        if isinstance(a, ActivationRecord):
            return from_source if a.start == a.submitted else self.place(a) == self.place(b)
        if a.start == a.submitted:
            return from_source if a.cause == "activation" else decision
        if a.waited_memory or decision or isinstance(b, TaskRecord):
            return False
        medium = self.media.get(a.link)
        of_medium = medium is not None and self.media.get(b.link) == medium
        return a.link == b.link or of_medium or (isinstance(b, TransferRecord) and b.fetch == a.fetch)


def _crosses(r: Any) -> bool:
    return isinstance(r, ActivationRecord) or (isinstance(r, TransferRecord) and r.cause == "activation")


def _ends(r: Any, step: int, layer: int) -> bool:
    if isinstance(r, TaskRecord):
        return r.kind != "predict" and (r.step, r.layer) == (step, layer)
    return _crosses(r) and r.layer == layer


def time_by_cause(records: Records, machine: Machine) -> list[tuple[tuple[int, int, int, int], list[int]]]:
    """Give each window with its time by cause."""
    walk = Walk(records, machine)
    return [(window, walk.explain(*window)) for window in windows_of(records)]


# ------------------------------------------------------------------------------------------------- everything else of a row


def row(records: Records, machine: Machine, split: list[tuple[tuple[int, int, int, int], list[int]]]) -> dict[str, Any]:
    """Give the metrics of a run but those of its steps alone."""
    decode = {s.step for s in records.steps if s.phase == "decode"}
    totals = {
        prefix: [sum(ns[i] for window, ns in split if which is None or window[2] in which) for i in range(len(CAUSES))]
        for prefix, which in (("", None), ("decode_", decode))
    }
    found: dict[str, Any] = {f"{p}time_{c}_ns": n for p, ns in totals.items() for c, n in zip(CAUSES, ns, strict=True)}
    found |= _hits(records, machine, decode) | _busy(records, machine) | _bytes(records)
    return found | _counts(records, machine) | _mass(records, decode)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _hits(records: Records, machine: Machine, decode: set[int]) -> dict[str, Any]:
    n_cold = min(16, len(records.steps) // 4)
    cold = set(sorted(s.step for s in records.steps)[:n_cold])
    seen, rows, rows_hit, flying, resident = set(), 0, 0, 0, Counter[str]()
    demanded = [t for t in records.transfers if t.last and t.expert >= 0 and t.cause == "demand"]
    on_gpus = [t for t in records.tasks if t.expert >= 0 and machine.kinds[t.device] == "gpu"]

    def served(r: LookupRecord, expert: int) -> bool:
        for device in {run.device for run in on_gpus}:
            place = device, r.step, r.layer, expert
            starts = [run.start for run in on_gpus if (run.device, run.step, run.layer, run.expert) == place]
            came = [t.end for t in demanded if t.link.endswith(f"->{device}") and (t.layer, t.expert) == (r.layer, expert)]
            if starts and not any(r.time < end <= min(starts) for end in came):
                return True
        return False

    counted: Counter[tuple[str, bool]] = Counter()
    looked: dict[tuple[int, int], list[tuple[int, bool, bool]]] = {}
    for r in records.lookups:
        for expert, load, there, in_flight in zip(r.active, r.loads, r.hits, r.in_flight, strict=True):
            hit = there and served(r, expert)
            rows, rows_hit = rows + load, rows_hit + load * hit
            first = (r.step, r.layer, expert) not in seen
            seen.add((r.step, r.layer, expert))
            looked.setdefault((r.layer, expert), []).append((r.time, bool(first and hit), r.step in decode))
            if first:
                warm, decodes = r.step not in cold, r.step in decode
                names = ["", "_decode" if decodes else "_prefill", "_warm" if warm else "_cold"]
                names += ["_decode_warm"] if warm and decodes else []
                counted.update((name, bool(hit)) for name in names)
                flying += in_flight and not there
                resident.update(names if there else [])
    n = counted["", True] + counted["", False]
    arrivals: dict[tuple[str, int, int], list[tuple[int, str]]] = {}
    for t in records.transfers:
        device = t.link.partition("->")[2]
        if t.last and t.expert >= 0 and machine.kinds[device] == "gpu":
            arrivals.setdefault((device, t.layer, t.expert), []).append((t.end, t.cause))
    credited: dict[tuple[int, int, int], bool] = {}  # and whether it is in a decode step
    for (_, layer, expert), arrived in arrivals.items():
        lookups = looked.get((layer, expert), [])
        for time, cause in arrived:
            at = next((i for i, (when, *_) in enumerate(lookups) if when >= time), len(lookups))
            if cause == "prefetch" and at < len(lookups) and lookups[at][1]:
                credited[layer, expert, at] = lookups[at][2]
    needed: dict[tuple[Any, ...], bool] = {}
    taken = set()
    for run in sorted(t for t in records.tasks if t.expert >= 0 and machine.kinds[t.device] == "gpu"):
        place = run.device, run.layer, run.expert
        history = arrivals.get(place, [])
        at = bisect_right(history, run.start, key=lambda one: one[0]) - 1
        demand = at >= 0 and (place, at) not in taken and history[at][1] == "demand"
        taken.add((place, at))
        needed[*place, run.step] = needed.get((*place, run.step), False) or demand
    rates = ("", "_prefill", "_decode", "_cold", "_warm", "_decode_warm")
    return {
        "n_lookups": n, "warm_up_steps": n_cold,
        **{f"hit_rate{name}": _share(counted[name, True], counted[name, True] + counted[name, False]) for name in rates},
        **{f"resident_rate{name}": _share(resident[name], counted[name, True] + counted[name, False]) for name in rates},
        "hit_rate_per_token": _share(rows_hit, rows), "in_flight_share": _share(flying, n),
        "prefetch_hit_share": _share(len(credited), n),
        "prefetch_hit_share_decode": _share(sum(credited.values()), counted["_decode", True] + counted["_decode", False]),
        "no_demand_share": 1 - sum(needed.values()) / len(needed) if needed else None,
    }  # fmt: skip


def _covered(spans: Iterable[Span], until: int) -> int:
    """Add up the time that spans cover."""
    total = reach = 0
    for start, end in sorted(spans):
        start, end = max(start, reach), min(end, until)
        total, reach = total + max(0, end - start), max(reach, end)
    return total


def _busy(records: Records, machine: Machine) -> dict[str, Any]:
    until = records.makespan_ns
    on_device = {name: [(t.start, t.end) for t in records.tasks if t.device == name] for name in machine.kinds}
    on_link = {name: [(t.start, t.end) for t in records.transfers if t.link == name] for name in machine.links}
    control = {name: [(a.start, a.end) for a in records.activations if a.link == name] for name in machine.links}
    to_gpu = [span for name, spans in on_link.items() for span in spans if "gpu" in {machine.kinds[x] for x in name.split("->")}]
    computing, moving = ([span for spans in of.values() for span in spans] for of in (on_device, on_link))
    moving_ns = _covered(moving, until)
    common = moving_ns + _covered(computing, until) - _covered(computing + moving, until)
    return {
        **{f"utilisation.{name}": _share(_covered(spans, until), until) for name, spans in (on_device | on_link).items()},
        **{f"control_utilisation.{name}": _share(_covered(spans, until), until) for name, spans in control.items()},
        "pcie_share": _share(_covered(to_gpu, until), until), "overlap_share": _share(common, moving_ns),
    }  # fmt: skip


def _bytes(records: Records) -> dict[str, Any]:
    moved = dict.fromkeys(("demand", "prefetch_used", "prefetch_wasted", "update", "write_back", "message", "activation"), 0)
    steps, in_decode = sorted(records.steps), 0
    for t in records.transfers:
        cause = t.cause.replace("-", "_")
        if cause == "prefetch":
            cause += "_used" if t.fetch in records.used_fetches else "_wasted"
        moved[cause] += t.n_bytes
        before = [s for s in steps if s.begin <= t.start]
        if cause != "activation" and before and before[-1].phase == "decode":
            in_decode += t.n_bytes
    total = sum(moved.values()) - moved["activation"]
    moved["activation"] += sum(a.n_bytes for a in records.activations)
    return {
        **{f"bytes_{cause}": n for cause, n in moved.items()}, "bytes_total": total,
        "bytes_per_token": _share(total, sum(s.n_sequences for s in steps)),
        "bytes_per_decode_token": _share(in_decode, sum(s.n_sequences for s in steps if s.phase == "decode")),
    }  # fmt: skip


def _counts(records: Records, machine: Machine) -> dict[str, Any]:
    runs = [(machine.kinds[t.device], t.rows) for t in records.tasks if t.expert >= 0]
    done = [t for t in records.transfers if t.last and t.expert >= 0]
    prefetched = [t.fetch in records.used_fetches for t in done if t.cause == "prefetch"]
    return {
        "n_gpu_runs": sum(kind == "gpu" for kind, _ in runs), "n_cpu_runs": sum(kind == "cpu" for kind, _ in runs),
        "gpu_run_share": _share(sum(rows for kind, rows in runs if kind == "gpu"), sum(rows for _, rows in runs)),
        "n_demand_fetches": sum(t.cause == "demand" for t in done), "n_prefetches": len(prefetched),
        "prefetch_used_share": _share(sum(prefetched), len(prefetched)), "n_evictions": len(records.evictions),
        "contention_ns": sum(t.end - t.start - t.work for t in records.tasks),
    }  # fmt: skip


def _mass(records: Records, decode: set[int]) -> dict[str, Any]:
    def shares(steps: set[int]) -> dict[str, float | None]:
        mass = dict.fromkeys(("stale", "substituted", "substituted-stale", "skipped", "late", "reduced"), 0.0)
        inexact = [r for r in records.inexact if r.step in steps]
        for r in inexact:
            mass[r.kind] += r.mass or 0.0
        whole = sum(s.gate_mass for s in records.steps if s.step in steps) if inexact else float(bool(steps))
        fresh = max(0.0, 1 - sum(mass.values()) / whole) if whole else None
        return {"fidelity_fresh": fresh} | {
            f"fidelity_{kind.replace('-', '_')}": m / whole if whole else None for kind, m in mass.items()
        }

    return {
        **shares({s.step for s in records.steps}), "n_inexact_slots": sum(r.slots for r in records.inexact),
        "fidelity_fresh_decode": shares(decode)["fidelity_fresh"],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ latency


def token_times(records: Records, last_chunks: set[int] | None) -> tuple[list[Span], list[Span]]:
    """Collect the times to the first token and between tokens, step by step."""
    ttft, between = [], []
    steps = sorted(records.steps)
    for i, step in enumerate(steps):
        if i == 0 or step.batch != steps[i - 1].batch:
            admitted, first_begin, fresh, last_token = 0, None, [], None
        following = steps[i + 1] if i + 1 < len(steps) else None
        if step.phase == "prefill":
            first_begin = step.begin if first_begin is None else first_begin
            admitted += step.n_sequences
            closes = following is None or (following.phase, following.batch) != ("prefill", step.batch)
            if closes if last_chunks is None else step.step in last_chunks:
                ttft.append((step.end - first_begin, admitted))
                fresh.append((step.end, admitted))
                admitted, first_begin = 0, None
            continue
        new = sum(n for _, n in fresh)
        between += [(step.end - since, n) for since, n in fresh] if new <= step.n_sequences else []
        between += [(step.end - fresh[-1][0], step.n_sequences)] if new > step.n_sequences else []
        if new < step.n_sequences:
            between.append((step.end - (step.begin if last_token is None else last_token), step.n_sequences - new))
        fresh, last_token = [], step.end
    return ttft, between


def percentile(samples: list[Span], percent: int) -> int | None:
    """Count every sequence's time for itself."""
    times = sorted(time for time, n in samples for _ in range(n))
    return times[-(-len(times) * percent // 100) - 1] if times else None


def drawn_steps(rng: Random) -> Records:
    """Draw the steps of a run: batches of any phases, some without sequences that produce a token."""
    records, now = Records(), 0
    for step in range(rng.randint(0, 30)):
        batch = records.steps[-1].batch if step else 0
        end = now + rng.randint(1, 5)
        phase = rng.choice(["prefill", "decode", "decode"])
        records.steps.append(StepRecord(now, end, step, phase, batch + (rng.random() < 0.1), 2, rng.randint(0, 4), 0.0))
        now = end + rng.randint(0, 2)
    return records


# ------------------------------------------------------------------------------------------------------- any run, in pieces

DEVICES = {"gpu0": "gpu", "gpu1": "gpu", "cpu0": "cpu"}
LINKS = ("cpu0->gpu0", "cpu0->gpu1", "gpu0->cpu0")


def drawn(rng: Random) -> Records:
    """Draw a run in which much happens at the same instants. What an engine guarantees holds; the rest is arbitrary.

    Lanes and links are serial, the Runs of GPUs lie within their steps, and a copy is read once it is there and before it leaves.
    """
    run, now = Records(makespan_ns=rng.choice([60, 64])), 0
    for step, end in enumerate((20, 40, 60)):
        run.steps.append(StepRecord(now, end, step, rng.choice(["prefill", "decode"]), 0, 2, rng.randint(1, 2), 4.0))
        edges = sorted(rng.sample(range(now, end + 1), 4))
        run.layers.extend(LayerRecord(begin, to, step, layer) for layer, (begin, to) in enumerate(zip(edges[::2], edges[1::2])))
        for layer, mb in ((0, 0), (0, 1), (1, 0), (1, 1)):
            time = rng.randint(run.lookups[-1].time if mb or layer else now, end)
            active = tuple(rng.sample(range(3), 2))
            hits, flying = ((rng.randint(0, 1), rng.randint(0, 1)) for _ in range(2))
            run.lookups.append(LookupRecord(time, step, layer, mb, active, (1, 2), hits, flying))
        kinds = [kind for kind in ("stale", "late", "reduced") if rng.random() < 0.5]
        run.inexact.extend(InexactRecord(step, 0, kind, 1, rng.choice([None, rng.random()])) for kind in kinds)
        now = end
    for device, kind in DEVICES.items():
        for lane in ("main", "side"):
            for start, end, before in _spans(rng):
                step = min(start, 59) // 20
                expert = rng.randint(-1, 2) if kind == "cpu" or end <= 20 * step + 20 else -1
                what = "expert" if expert >= 0 else rng.choice(["dense", "dense", "predict"])
                ready = rng.choice([before, start])
                times = end - start, before, max(before, ready)
                run.tasks.append(TaskRecord(start, end, device, lane, what, step, rng.randint(0, 1), 0, expert, 1, *times))
    asked = []
    for link in LINKS:
        for start, end, before in _spans(rng):
            cause = rng.choice(["demand", "prefetch", "prefetch", "update", "activation"])
            place = rng.randint(0, 1), rng.choice([-1, 0, 1, 2])
            asked.append((before, start, end, link, cause, *place, rng.random() < 0.8, rng.random() < 0.2))
        for start, end, before in _spans(rng):
            run.activations.append(ActivationRecord(start, end, link, start // 20, rng.randint(0, 1), 1, 8, "in", before))
    hops: list[list[Any]] = []  # of one fetch
    for one in sorted(asked):
        if hops and one[5:7] == hops[-1][0][5:7] and rng.random() < 0.5:
            hops[-1].append(one)
        else:
            hops.append([one])
    for fetch, several in enumerate(hops):
        final = max(reversed(several), key=lambda one: one[2])
        for one in several:
            before, start, end, link, cause, layer, expert, last, waited = one
            last &= one is final
            run.transfers.append(TransferRecord(start, end, link, cause, layer, expert, 7, 0, before, fetch, last, waited))
    for start, end, _ in _spans(rng):
        run.decisions.append(DecisionRecord(start, end, start // 20, 0))
    run.tasks.sort(key=lambda r: (r.end, r.start, r.device, r.lane))
    run.transfers.sort(key=lambda r: r.end)
    reads = _reads(run, {t.fetch for t in run.transfers})
    run.used_fetches.update(fetch for fetch, time in reads.items() if time < run.makespan_ns and rng.random() < 0.6)
    for t in run.transfers:
        if t.last and t.expert >= 0 and rng.random() < 0.5:
            time = max(t.end, reads[t.fetch] if t.fetch in run.used_fetches else 0) + rng.randint(0, 9)
            run.evictions.append(EvictionRecord(time, "gpu0", "cache", t.layer, t.expert, "evict", False, t.fetch))
    return run


def _spans(rng: Random) -> Iterator[tuple[int, int, int]]:
    """Draw what a lane does: begin and end of each span, and a time before, often the begin."""
    now = 0
    while now < 60:
        start = now + rng.choice([0, 0, 1, 3])
        now = start + rng.choice([0, 1, 2, 5, 12])
        yield start, now, start if rng.random() < 0.4 else rng.randint(0, start)
        now += now == start


def pieces(records: Records, rng: Random) -> Iterator[tuple[Records, int]]:
    """Cut a run at the ends of some of its steps; next to each piece the time before which nothing of a later one starts.

    What ends as a step does may come before the cut or after it, and what was submitted before the cut may come with an end
    after it.
    """
    cuts = sorted(s.end for s in records.steps if rng.random() < 0.5 and s.end < records.makespan_ns)
    found = [Records() for _ in range(len(cuts) + 1)]
    at_step = {s.step: bisect_left(cuts, s.end) for s in records.steps}
    read = _reads(records, records.used_fetches)
    least, last = [records.makespan_ns] * (len(cuts) + 1), 0
    for name in KINDS:
        for r in getattr(records, name):
            if name in ("layers", "inexact", "steps", "lookups"):
                at = at_step[r.step]
            elif name in ("activations", "decisions") and rng.random() < 0.7:
                at = bisect_left(cuts, getattr(r, "submitted", r.start))
            elif name == "tasks" and r.expert >= 0:  # a step ends with its Runs
                at = max(bisect_left(cuts, r.end), at_step[r.step])
            else:
                time = r.time if hasattr(r, "time") else r.end
                at = (bisect_left if name != "evictions" and rng.random() < 0.5 else bisect_right)(cuts, time)
            if name == "transfers":  # in the order in which they were completed
                at = last = max(at, last)
            getattr(found[at], name).append(r)
            begins = getattr(r, "start", getattr(r, "time", None))
            if begins is not None:
                least[at] = min(least[at], begins)
    for fetch in records.used_fetches:
        found[bisect_right(cuts, read[fetch])].used_fetches.add(fetch)
    found[-1].peak_bytes, found[-1].pool_peak_bytes = records.peak_bytes, records.pool_peak_bytes
    for i, piece in enumerate(found):
        piece.makespan_ns = cuts[i] if i < len(cuts) else records.makespan_ns
        yield piece, min([piece.makespan_ns, *least[i + 1 :]])


def _reads(records: Records, fetches: Iterable[int]) -> dict[int, int]:
    """Say from when on each fetch counts as read: a part that is streamed as it is asked for, a copy as a Run begins."""
    runs: dict[tuple[str, int, int], list[int]] = {}
    for t in records.tasks:
        if t.expert >= 0:
            runs.setdefault((t.device, t.layer, t.expert), []).append(t.start)
    found = dict.fromkeys(fetches, records.makespan_ns)
    for t in records.transfers:
        if t.expert < 0:
            found[t.fetch] = min(found.get(t.fetch, t.submitted), t.submitted)
        elif t.last:
            starts = runs.get((t.link.partition("->")[2], t.layer, t.expert), [])
            found[t.fetch] = min((start for start in starts if start >= t.end), default=records.makespan_ns)
    return found
