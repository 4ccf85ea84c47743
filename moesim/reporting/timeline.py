"""Trace events as the page draws them: lanes of slices as flat lists of integers.

A lane is a device, a link, or the steps, layers and decisions of a run. Its slices never overlap, so that two sorted arrays
and a binary search find what is visible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from moesim.core.colours import FILL, GREY, LABEL, text_on
from moesim.core.units import NS_PER_US
from moesim.errors import ConfigError

MAX_SLICES: Final = 120_000
"""Slices in a page; about 5 MB. Of a longer timeline each policy shows the beginning."""

FIELDS: Final = ("wait", "duration", "name", "cause", "step", "layer", "expert", "amount", "waited")
"""Integers of a slice: ns since the end of the one before, ns, index of name and of cause, -1 for what it has not, rows or bytes,
and ns between its submission and its begin."""

_AMOUNTS: Final = ("bytes", "rows", "tokens")  # of which a slice may say how many; the first that it has

_FLOW: Final = "fetch"


class _Slice(NamedTuple):
    start: int
    end: int
    name: str
    cause: str
    step: int
    layer: int
    expert: int
    amount: int
    unit: str
    waited: int


@dataclass
class _Lane:
    name: str
    group: str
    slices: list[_Slice] = field(default_factory=list)


@dataclass
class _Run:
    """One policy: lanes by (pid, tid), and ends of each arrow as (lane, ns)."""

    name: str
    lanes: dict[tuple[int, int], _Lane] = field(default_factory=dict)
    arrows: dict[Any, dict[str, tuple[tuple[int, int], int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """A timeline for the page."""

    # `runs`: `{name, lanes: [{name, group, unit, slices}], steps: [[begin, end, number, label]], arrows}`; `names` of slices;
    # `causes`: `[key, words, fill, text]`; `fields`. Times in ns
    data: dict[str, Any]
    note: str  # what is not shown; empty if nothing is missing
    # n_slices, n_all: slices in the page and in the file
    n_slices: int
    n_all: int


def page_timeline(events: Sequence[Any], policy: str, place: str, most: int = MAX_SLICES) -> Timeline | None:
    """Turn trace events into what the page draws."""
    runs = _read(events, policy, place)
    n_all = sum(len(lane.slices) for run in runs for lane in run.lanes.values())
    if not n_all:
        return None
    shares = [_cut(run, most // len(runs)) for run in runs] if n_all > most else []
    names: dict[str, int] = {}
    causes: dict[str, int] = {}
    data = [_packed(run, names, causes) for run in runs]
    n_slices = sum(len(lane.slices) for run in runs for lane in run.lanes.values())
    cut = ", ".join(f"{run.name} up to {end / 1e6:.4g} ms" for run, end in zip(runs, shares, strict=False) if end is not None)
    note = f"Cut: the first {n_slices:,} of {n_all:,} slices are drawn ({cut}); timeline.json holds all." if cut else ""
    styles = [[key, _words(key), _fill(key), text_on(_fill(key))] for key in causes]
    return Timeline({"runs": data, "names": list(names), "causes": styles, "fields": list(FIELDS)}, note, n_slices, n_all)


def _words(cause: str) -> str:
    """Name a cause; on a link a prefetch is one whether it comes late or not."""
    return "prefetch" if cause == "exposed_prefetch" else LABEL.get(cause, cause)


def _fill(cause: str) -> str:
    return FILL.get(cause, GREY)


def _read(events: Sequence[Any], policy: str, place: str) -> list[_Run]:
    names: dict[int, str] = {}
    lane_names: dict[tuple[int, int], str] = {}
    for i, event in enumerate(events):
        try:
            if event["ph"] == "M" and event["name"] == "process_name":
                names[event["pid"]] = str(event["args"]["name"])
            elif event["ph"] == "M" and event["name"] == "thread_name":
                lane_names[event["pid"], event["tid"]] = str(event["args"]["name"])
        except (KeyError, TypeError) as error:
            raise _wrong(place, i, error) from None
    runs: dict[str, _Run] = {}
    groups: dict[int, tuple[_Run, str]] = {}
    for pid, name in names.items():
        of, _, group = name.rpartition(": ")
        groups[pid] = runs.setdefault(of, _Run(of or policy)), group
    for (pid, tid), name in lane_names.items():
        if pid in groups:
            run, group = groups[pid]
            run.lanes[pid, tid] = _Lane(name, group)
    for i, event in enumerate(events):
        try:
            if event["ph"] == "X":
                run, _ = groups[event["pid"]]
                run.lanes[event["pid"], event["tid"]].slices.append(_slice(event))
            elif event["ph"] in ("s", "f") and event["cat"] == _FLOW:
                run, _ = groups[event["pid"]]
                end = (event["pid"], event["tid"]), _ns(event["ts"])
                run.arrows.setdefault(event["id"], {})[event["ph"]] = end
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _wrong(place, i, error) from None
    for run in runs.values():
        for lane in run.lanes.values():
            lane.slices.sort()
    return [run for run in runs.values() if any(lane.slices for lane in run.lanes.values())]


def _wrong(place: str, i: int, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {error}"
    return ConfigError(f"{place}: event {i}: expected a trace event of a named lane, got {what}; run the experiment again")


def _ns(us: float) -> int:
    return round(us * NS_PER_US)


def _whole(args: dict[str, Any], key: str) -> int:
    value = args.get(key, -1)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _slice(event: dict[str, Any]) -> _Slice:
    args = event.get("args") or {}
    unit = next((key for key in _AMOUNTS if key in args), "")
    start = _ns(event["ts"])
    submitted = args.get("submitted_us")
    return _Slice(
        start=start,
        end=start + _ns(event["dur"]),
        name=str(event["name"]),
        cause=str(event.get("cat", "")),
        step=_whole(args, "step"),
        layer=_whole(args, "layer"),
        expert=_whole(args, "expert"),
        amount=_whole(args, unit),
        unit=unit,
        waited=-1 if submitted is None else max(0, start - _ns(submitted)),
    )


def _cut(run: _Run, most: int) -> int | None:
    """Keep at most `most` slices, first ones first; return the cut's time, if there is one."""
    starts = sorted(one.start for lane in run.lanes.values() for one in lane.slices)
    if len(starts) <= most:
        return None
    end = starts[most]
    for lane in run.lanes.values():
        lane.slices = [one for one in lane.slices if one.start < end]
    return end


def _packed(run: _Run, names: dict[str, int], causes: dict[str, int]) -> dict[str, Any]:
    """Write lanes as integers: steps and layers first, then devices, then links."""
    order = ["run", "devices", "links"]
    lanes = sorted(
        (key for key, lane in run.lanes.items() if lane.slices or lane.group == "devices"),
        key=lambda key: (order.index(run.lanes[key].group) if run.lanes[key].group in order else len(order), key),
    )
    packed, steps = [], []
    for key in lanes:
        lane = run.lanes[key]
        flat: list[int] = []
        before = 0
        for one in lane.slices:
            name = names.setdefault(one.name, len(names))
            cause = causes.setdefault(one.cause, len(causes))
            flat += [one.start - before, one.end - one.start, name, cause]
            flat += [one.step, one.layer, one.expert, one.amount, one.waited]
            before = one.end
            if one.cause == "step":
                steps.append([one.start, one.end, one.step, one.name])
        unit = lane.slices[0].unit if lane.slices else ""
        packed.append({"name": lane.name, "group": lane.group, "unit": unit, "slices": flat})
    return {"name": run.name, "lanes": packed, "steps": steps, "arrows": _arrows(run, lanes)}


def _arrows(run: _Run, lanes: list[tuple[int, int]]) -> list[int]:
    """Write each arrow as four integers: lane and slice of tail and head."""
    place = {key: i for i, key in enumerate(lanes)}
    starts = {key: [one.start for one in run.lanes[key].slices] for key in lanes}
    flat: list[int] = []
    for ends in run.arrows.values():
        if "s" not in ends or "f" not in ends:
            continue
        found = []
        for key, at in (ends["s"], ends["f"]):
            i = bisect_right(starts[key], at) - 1 if key in starts else -1
            if i < 0 or at > run.lanes[key].slices[i].end:  # its slice was cut away
                break
            found += [place[key], i]
        else:
            flat += found
    return flat
