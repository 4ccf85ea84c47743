"""A validator of trace event files: shape of the events, lanes without overlap, arrows with both ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

_COMMON: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int, "ts": (int, float)}
_KNOWN = "X", "C", "M", "s", "f", "B", "E"
_MAX_SHOWN = 100


def _ns(us: float) -> int | None:
    """Microseconds as whole nanoseconds; None if there is a fraction of one."""
    ns = Decimal(repr(us)) * 1000
    return int(ns) if ns == ns.to_integral_value() else None


def _schema(i: int, e: Any) -> list[str]:
    """Check one event on its own."""
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
    """Check that what the end of the run cut off comes last in its lane, and ends when all else does that is cut off."""
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
        What `moesim.metrics.timeline.timeline_events` gives, or a JSON file read back.

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
