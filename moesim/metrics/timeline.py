"""A run as Chrome trace events, which Perfetto and chrome://tracing open.

A lane for each device lane, link and control lane, and for steps, layers and decisions. Counters show memory
and queues; an arrow leads from the last slice of a fetch to the run that first used the copy.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moesim.core.colours import CHROME
from moesim.core.files import write_bytes
from moesim.core.units import NS_PER_US
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile
from moesim.metrics.breakdown import task_cause, transfer_cause
from moesim.metrics.machine import Machine, machine_of
from moesim.records import Records, TaskRecord, TransferRecord

Event = dict[str, Any]

_PROCESSES = {1: "devices", 2: "links", 3: "run"}
_DEVICES, _LINKS, _RUN = _PROCESSES


class _Lane(NamedTuple):
    pid: int
    tid: int


class _Lanes:
    """Numbers lanes in the order in which they are first named."""

    def __init__(self) -> None:
        self.names: dict[tuple[int, str], _Lane] = {}

    def get(self, pid: int, name: str) -> _Lane:
        lane = self.names.get((pid, name))
        if lane is None:
            lane = self.names[pid, name] = _Lane(pid, len(self.names) + 1)
        return lane

    def metadata(self) -> Iterator[Event]:
        for pid, name in _PROCESSES.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
            sort = {"sort_index": pid}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": sort}
        for (pid, name), lane in self.names.items():
            place = {"pid": pid, "tid": lane.tid, "ts": 0}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": lane.tid}}


def _us(ns: int) -> int | float:
    """Return nanoseconds as microseconds whose decimal form is exact (up to 10^15 ns, 11 days)."""
    whole, rest = divmod(ns, NS_PER_US)
    return ns / NS_PER_US if rest else whole


class _Writer:
    """Collects events of one window of time, with their order."""

    def __init__(self, records: Records, machine: Machine, begin: int, end: int) -> None:
        self.records = records
        self.machine = machine
        self.begin = begin
        self.end = end
        self.lanes = _Lanes()
        self.found: list[tuple[int, int, int, Event]] = []  # (ns, pid, tid, event)

    def shows(self, start: int, end: int) -> bool:
        return start < self.end and (end > self.begin or start >= self.begin)

    def slice(self, lane: _Lane, start: int, end: int, name: str, cause: str, args: dict[str, Any]) -> None:
        event = {
            "ph": "X", "name": name, "cat": cause, "pid": lane.pid, "tid": lane.tid, "ts": _us(start),
            "dur": _us(end - start), "args": args,
        }  # fmt: skip
        if cause in CHROME:
            event["cname"] = CHROME[cause]
        self.found.append((start, lane.pid, lane.tid, event))

    def counter(self, pid: int, name: str, key: str, levels: Iterable[tuple[int, int]]) -> None:
        """Write the levels (ns, value) within the window; the last of a time counts."""
        last = {max(time, self.begin): value for time, value in levels if time < self.end}
        for time, value in last.items():
            event = {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(time), "args": {key: value}}
            self.found.append((time, pid, 0, event))

    def flow(self, number: int, source: _Lane, at: int, target: _Lane, to: int) -> None:
        common = {"name": "fetch", "cat": "fetch", "id": number}
        start = {"ph": "s", **common, "pid": source.pid, "tid": source.tid, "ts": _us(at)}
        end = {"ph": "f", "bp": "e", **common, "pid": target.pid, "tid": target.tid, "ts": _us(to)}
        self.found.append((at, source.pid, source.tid, start))
        self.found.append((to, target.pid, target.tid, end))

    def events(self) -> list[Event]:
        self.found.sort(key=lambda item: item[:3])  # stable: slices before their arrows
        return [*self.lanes.metadata(), *(event for *_, event in self.found)]


def _write_lanes(w: _Writer) -> None:
    """Name all lanes first, so that their order is the machine's and not that of the events."""
    side = {t.device for t in w.records.tasks if t.lane == "side"}
    for device in w.machine.kinds:
        w.lanes.get(_DEVICES, device)
        if device in side:
            w.lanes.get(_DEVICES, f"{device} side")
    control = {a.link for a in w.records.activations}
    for link in w.machine.links:
        w.lanes.get(_LINKS, link)
        if link in control:
            w.lanes.get(_LINKS, f"{link} activations")
    w.lanes.get(_RUN, "steps")
    w.lanes.get(_RUN, "layers")


def _task_lane(w: _Writer, task: TaskRecord) -> _Lane:
    return w.lanes.get(_DEVICES, task.device if task.lane == "main" else f"{task.device} {task.lane}")


def _unit(layer: int, expert: int) -> str:
    if expert >= 0:
        return f"L{layer}/E{expert}"
    return f"L{layer}" if layer >= 0 else ""


def _write_tasks(w: _Writer) -> None:
    for t in w.records.tasks:
        if not w.shows(t.start, t.end):
            continue
        cause = task_cause(t, w.machine.kinds)
        name = _unit(t.layer, t.expert) if t.expert >= 0 else f"{t.kind} {_unit(t.layer, -1)}".strip()
        args = {
            "step": t.step, "layer": t.layer, "mb": t.mb, "expert": t.expert, "rows": t.rows, "cause": cause,
            "kind": t.kind, "alone_ns": t.work, "submitted_us": _us(t.submitted), "ready_us": _us(t.ready),
        }  # fmt: skip
        w.slice(_task_lane(w, t), t.start, t.end, name, cause, args)


def _write_links(w: _Writer) -> None:
    steps = sorted(w.records.steps)
    begins = [s.begin for s in steps]
    for t in w.records.transfers:
        if not w.shows(t.start, t.end):
            continue
        at = bisect_right(begins, t.start) - 1  # the step during which it began
        args = {
            "step": steps[at].step if at >= 0 else -1, "layer": t.layer, "expert": t.expert, "cause":
            t.cause, "bytes": t.n_bytes, "urgency": t.urgency, "fetch": t.fetch, "submitted_us":
            _us(t.submitted), "last": t.last, "waited_memory": t.waited_memory,
        }  # fmt: skip
        name = f"{t.cause} {_unit(t.layer, t.expert)}".strip()
        if t.left:  # the run ended before it did
            name, args["left_bytes"] = f"{name} (unfinished)", t.left
        w.slice(w.lanes.get(_LINKS, t.link), t.start, t.end, name, transfer_cause(t.cause), args)
    for a in w.records.activations:
        if w.shows(a.start, a.end):
            args = {
                "step": a.step, "layer": a.layer, "rows": a.rows, "bytes": a.n_bytes, "direction":
                a.direction, "cause": "activation", "submitted_us": _us(a.submitted),
            }  # fmt: skip
            lane = w.lanes.get(_LINKS, f"{a.link} activations")
            w.slice(lane, a.start, a.end, f"{a.direction} {_unit(a.layer, -1)}".strip(), "activation", args)


def _write_run(w: _Writer) -> None:
    steps, layers = w.lanes.get(_RUN, "steps"), w.lanes.get(_RUN, "layers")
    for s in w.records.steps:
        if w.shows(s.begin, s.end):
            args = {
                "step": s.step, "phase": s.phase, "batch": s.batch,
                "tokens": s.n_tokens, "sequences": s.n_sequences,
            }  # fmt: skip
            w.slice(steps, s.begin, s.end, f"{s.phase} {s.step}", "step", args)
    for r in w.records.layers:
        if w.shows(r.begin, r.end):
            w.slice(layers, r.begin, r.end, f"L{r.layer}", "layer", {"step": r.step, "layer": r.layer})
    free: list[int] = []  # end of the last decision on each lane: they may overlap
    for d in sorted(w.records.decisions):
        if w.shows(d.start, d.end):
            at = next((i for i, end in enumerate(free) if end <= d.start), len(free))
            free[at : at + 1] = [d.end]
            lane = w.lanes.get(_RUN, "decisions" if at == 0 else f"decisions {at + 1}")
            args = {"step": d.step, "layer": d.layer, "cause": "decision"}
            w.slice(lane, d.start, d.end, f"decision {_unit(d.layer, -1)}".strip(), "decision", args)


def _write_counters(w: _Writer) -> None:
    memory: dict[str, list[tuple[int, int]]] = {name: [] for name in w.machine.kinds}
    for m in w.records.memory:
        memory[m.device].append((m.time, m.n_bytes))
    for device, levels in memory.items():
        w.counter(_DEVICES, f"memory {device}", "bytes", sorted(levels, key=lambda level: level[0]))
    queued: dict[str, list[tuple[int, int]]] = {name: [] for name in w.machine.links}
    seen: set[tuple[str, int]] = set()
    reached: dict[int, int] = {}  # end of what was carried of each fetch so far: a later hop queues from there
    for t in sorted(w.records.transfers):
        if (t.link, t.fetch) not in seen:
            seen.add((t.link, t.fetch))
            since = max(t.submitted, reached.get(t.fetch, 0))
            if since < t.start:
                queued[t.link] += [(since, 1), (t.start, -1)]
        reached[t.fetch] = t.end
    for link, changes in queued.items():
        levels, level = [], 0
        for time, change in sorted(changes):
            level += change
            levels.append((time, level))
        w.counter(_LINKS, f"queue {link}", "fetches", levels)


def _write_flows(w: _Writer) -> None:
    runs: dict[tuple[str, int, int], list[TaskRecord]] = {}
    for task in sorted(t for t in w.records.tasks if t.expert >= 0 and t.end > t.start):
        runs.setdefault((task.device, task.layer, task.expert), []).append(task)
    arrived: dict[tuple[str, int, int], list[TransferRecord]] = {}
    for t in sorted(t for t in w.records.transfers if t.last and t.expert >= 0 and t.end > t.start):
        arrived.setdefault((t.link.partition("->")[2], t.layer, t.expert), []).append(t)
    for place, transfers in arrived.items():
        users = runs.get(place, [])
        starts = [task.start for task in users]
        for i, t in enumerate(transfers):
            at = bisect_right(starts, t.end - 1)  # the first run from its arrival on, before the next copy's
            if at == len(users) or (i + 1 < len(transfers) and users[at].start >= transfers[i + 1].end):
                continue
            run = users[at]
            if w.shows(t.start, t.end) and w.shows(run.start, run.end):
                w.flow(t.fetch, w.lanes.get(_LINKS, t.link), t.end - 1, _task_lane(w, run), run.start)


def timeline_events(records: Records, hardware: HardwareProfile | Machine, steps: tuple[int, int] | None = None) -> list[Event]:
    """Turn records into trace events.

    Parameters
    ----------
    records : Records
        Records of one run.
    hardware : HardwareProfile or Machine
        What it ran on.
    steps : (int, int), optional
        First and last step to show; slices that reach beyond are shown whole. Default: all.

    Returns
    -------
    list of dict
        Metadata first, then events in order of time. ``ts`` and ``dur`` are microseconds, exact to the
        nanosecond.

    Raises
    ------
    ConfigError
        If no step lies in the window.
    """
    begin, end = 0, max(records.makespan_ns, 1 + max((t.end for t in records.transfers), default=0))
    if steps is not None:
        shown = [s for s in records.steps if steps[0] <= s.step <= steps[1]]
        if not shown:
            raise ConfigError(
                f"timeline steps {steps[0]}..{steps[1]}: expected steps of the run, got none of its "
                f"{len(records.steps)} steps from 0"
            )
        begin, end = min(s.begin for s in shown), max(s.end for s in shown)
    w = _Writer(records, machine_of(hardware), begin, end)
    for part in (_write_lanes, _write_tasks, _write_links, _write_run, _write_counters, _write_flows):
        part(w)
    return w.events()


def timeline_json(events: list[Event]) -> bytes:
    """Encode events of `timeline_events` as JSON, one a line, in reproducible bytes."""
    lines = ",\n".join(json.dumps(event, sort_keys=True, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ns","traceEvents":[\n{lines}\n]}}\n'.encode()


def write_timeline(
    path: str | Path, records: Records, hardware: HardwareProfile | Machine, steps: tuple[int, int] | None = None
) -> Path:
    """Write the timeline of a run, atomically; arguments as of `timeline_events`."""
    return write_bytes(path, timeline_json(timeline_events(records, hardware, steps)))


_PIDS = 10  # process numbers of one run in a timeline of several
_FLOWS = 10**9  # numbers of arrows likewise


@dataclass(frozen=True)
class Timeline:
    """Chrome trace events of one run, or of several, one above another.

    Attributes
    ----------
    events : list of dict
        As Perfetto and chrome://tracing read them; times in us.
    """

    events: list[Event]

    @classmethod
    def of(cls, runs: Mapping[str, tuple[Records, Machine]], steps: int) -> Timeline:
        """Show the first steps of runs, records and machine by policy."""
        events: list[Event] = []
        for i, (policy, (records, machine)) in enumerate(runs.items()):
            found = timeline_events(records, machine, (0, min(steps, len(records.steps)) - 1))
            events += _numbered(found, i, policy) if len(runs) > 1 else found
        return cls(events)

    def json(self) -> bytes:
        """Return the content of a file for https://ui.perfetto.dev."""
        return timeline_json(self.events)

    def save(self, path: str | Path) -> Path:
        """Write a file for https://ui.perfetto.dev; it appears complete or not at all."""
        return write_bytes(Path(path), self.json())

    def __repr__(self) -> str:
        return f"<Timeline: {len(self.events):,} events; save(path) writes a file for https://ui.perfetto.dev>"


def _numbered(events: list[Event], run: int, policy: str) -> list[Event]:
    numbered = []
    for event in events:
        event = {**event, "pid": event["pid"] + _PIDS * run}
        if event["ph"] in ("s", "f"):
            event["id"] += _FLOWS * run
        if event["name"] == "process_name":
            event["args"] = {"name": f"{policy}: {event['args']['name']}"}
        if event["name"] == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        numbered.append(event)
    return numbered


# ----------------------------------------------------------------------------------------------------------------- checking
_COMMON: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int, "ts": (int, float)}
_KNOWN = "X", "C", "M", "s", "f", "B", "E"
_MAX_SHOWN = 100


def _ns(us: float) -> int | None:
    """Return microseconds as whole nanoseconds; None if there is a fraction of one."""
    ns = Decimal(repr(us)) * 1000
    return int(ns) if ns == ns.to_integral_value() else None


def _schema(i: int, e: Any) -> list[str]:
    if not isinstance(e, dict):
        return [f"event {i}: expected an object, got {type(e).__name__}"]
    wrong = [k for k, kind in _COMMON.items() if not isinstance(e.get(k), kind) or isinstance(e.get(k), bool)]
    if wrong:
        got = {k: e.get(k) for k in wrong}
        return [f"event {i}: expected {', '.join(wrong)} of the right type, got {got}"]
    if e["ph"] not in _KNOWN:
        return [f"event {i}: expected ph among {', '.join(_KNOWN)}, got {e['ph']!r}"]
    found = []
    times = ["ts", "dur"] if e["ph"] == "X" else ["ts"]
    for key in times:
        value = e.get(key)
        if not isinstance(value, (int, float)) or value < 0 or _ns(value) is None:
            found.append(f"event {i} ({e['name']}): expected {key} in us, whole ns and at least 0, got {value!r}")
    if e["ph"] in "sf" and "id" not in e:
        found.append(f"event {i} ({e['name']}): expected an id on an arrow, got none")
    if e["ph"] == "C":
        args = e.get("args")
        if not isinstance(args, dict) or not args or not all(isinstance(v, (int, float)) for v in args.values()):
            found.append(f"event {i} ({e['name']}): expected numbers in the args of a counter, got {args!r}")
    return found


Span = tuple[int, int, str]
Lane = tuple[int, int]


def _slices(events: Sequence[Mapping[str, Any]]) -> tuple[dict[Lane, list[Span]], list[str]]:
    """Collect the slices of each lane, those of begin and end events included."""
    lanes: dict[Lane, list[Span]] = {}
    found: list[str] = []
    opened: dict[Lane, list[tuple[int, str]]] = {}
    for e in events:
        lane = (e["pid"], e["tid"])
        ts = _ns(e["ts"]) or 0
        if e["ph"] == "X":
            lanes.setdefault(lane, []).append((ts, ts + (_ns(e["dur"]) or 0), e["name"]))
        elif e["ph"] == "B":
            opened.setdefault(lane, []).append((ts, e["name"]))
        elif e["ph"] == "E":
            if not opened.get(lane):
                found.append(f"lane {lane}: {e['name']} ends at {ts} ns and has not begun")
                continue
            begin, name = opened[lane].pop()
            lanes.setdefault(lane, []).append((begin, ts, name))
    for lane, still in opened.items():
        found += [f"lane {lane}: {name} begins at {ts} ns and never ends" for ts, name in still]
    return lanes, found


def _overlaps(lanes: Mapping[Lane, list[Span]]) -> list[str]:
    found = []
    for lane, spans in lanes.items():
        spans.sort()
        for (_, end, name), (start, _, following) in pairwise(spans):
            if start < end:
                found.append(f"lane {lane}: {following} begins at {start} ns, before {name} ends at {end} ns")
    return found


def _unfinished(events: Sequence[Mapping[str, Any]], lanes: Mapping[Lane, list[Span]]) -> list[str]:
    """Check that what the end of the run cut off comes last in its lane, and ends together."""
    cut = [e for e in events if e["ph"] == "X" and e.get("args", {}).get("left_bytes")]
    ends = {(_ns(e["ts"]) or 0) + (_ns(e["dur"]) or 0) for e in cut}
    found = [f"expected all that is unfinished to end with the run, got ends at {sorted(ends)} ns"] if len(ends) > 1 else []
    for e in cut:
        lane, start = (e["pid"], e["tid"]), _ns(e["ts"]) or 0
        found += [f"lane {lane}: {other} comes after {e['name']}" for begin, _, other in lanes[lane] if begin > start]
    return found


def _flows(events: Sequence[Mapping[str, Any]], lanes: Mapping[Lane, list[Span]]) -> list[str]:
    found = []
    ends: dict[Any, dict[str, list[tuple[int, Lane]]]] = {}
    for e in events:
        if e["ph"] in "sf":
            key = (e.get("cat"), e["name"], e["id"])
            both = ends.setdefault(key, {"s": [], "f": []})
            both[e["ph"]].append((_ns(e["ts"]) or 0, (e["pid"], e["tid"])))
    spans = {lane: {(s, t) for s, t, _ in several} for lane, several in lanes.items()}
    for key, both in ends.items():
        if len(both["s"]) != 1 or len(both["f"]) != 1:
            n_starts, n_ends = len(both["s"]), len(both["f"])
            found.append(f"arrow {key}: expected one start and one end, got {n_starts} and {n_ends}")
            continue
        (start, source), (end, target) = both["s"][0], both["f"][0]
        if end < start:
            found.append(f"arrow {key}: ends at {end} ns, before its start at {start} ns")
        for ts, lane in ((start, source), (end, target)):
            if not any(s <= ts < t for s, t in spans.get(lane, ())):
                found.append(f"arrow {key}: no slice of lane {lane} at {ts} ns")
    return found


def check_timeline(events: Any) -> list[str]:
    """Check trace events.

    Parameters
    ----------
    events : list of dict, or dict with ``traceEvents``
        From `timeline_events`, or a JSON file read back.

    Returns
    -------
    list of str
        What is wrong, one line each, at most 100; empty if all is well: every event has the fields of its
        kind, times are whole nanoseconds, slices of a lane never overlap (nor nest), begin and end events
        pair up, every lane with slices has a name, every arrow leads forward in time from a slice to
        a slice, and what is unfinished comes last in its lane, and ends with the run.
    """
    if isinstance(events, dict):
        events = events.get("traceEvents")
    if not isinstance(events, list):
        return [f"expected a list of events, got {type(events).__name__}"]
    found = [line for i, e in enumerate(events) for line in _schema(i, e)]
    if found:
        return found[:_MAX_SHOWN]
    lanes, found = _slices(events)
    found += _overlaps(lanes)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found += [f"lane {lane}: expected a thread_name, got none" for lane in lanes if lane not in named]
    found += _flows(events, lanes)
    found += _unfinished(events, lanes)
    return found[:_MAX_SHOWN]
