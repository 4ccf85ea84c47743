"""Time by cause: why a run took as long as it did, in ns that add up to the makespan.

In each window (a visit of a layer, or a gap) a walk goes backwards from the end, to what ended exactly as something started,
and charges the time between to its cause. `docs/reference/metrics.md` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.core.units import format_ns
from moesim.errors import SimulationError
from moesim.metrics.columns import by_text, sums
from moesim.records import ActivationRecord, DecisionRecord, Records, TaskRecord, TransferRecord

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Columns = dict[str, Any]  # arrays; numbers that all have

CAUSES: Final = (
    "dense", "gpu_experts", "cpu_experts", "exposed_demand", "exposed_prefetch", "exposed_other_transfer",
    "decision", "activation", "predict", "host", "idle",
)  # fmt: skip
"""The causes to which time is charged, in the order of every table and of the stacked bars."""
INDEX: Final = {name: i for i, name in enumerate(CAUSES)}
"""Column of each cause."""
_APART: Final = ("predict", "host")  # tasks with a cause of their own, which are no part of the model
_TRANSFER_CAUSE: Final = {"demand": "exposed_demand", "prefetch": "exposed_prefetch", "activation": "activation"}


def task_cause(task: TaskRecord, kinds: Mapping[str, str]) -> str:
    """Name the cause to which the time of a task is charged."""
    if task.kind in _APART:
        return task.kind
    if task.expert >= 0:
        return "gpu_experts" if kinds[task.device] == "gpu" else "cpu_experts"
    return "dense"


def transfer_cause(cause: str) -> str:
    """Name the cause to which waiting for transfers of a cause is charged."""
    return _TRANSFER_CAUSE.get(cause, "exposed_other_transfer")


# What wins when several things ended at the same instant: the order of these ranks.
_GPU, _CPU, _DECISION, _TRANSFER, _ACTIVATION = range(5)

# What an activity may be to another that begins as it ends; an activity waited for the first that is any of what it `wants`.
SAME_PLACE, SAME_MEDIUM, SAME_FETCH, BROUGHT, AT_SOURCE, DECISION, DENSE = (1 << i for i in range(7))
IF_DECIDED: Final = 1 << 7  # it wants something particular only if a decision ended then
# More of what an activity is.
MODEL, CROSSING, COMPLETE = (1 << i for i in range(8, 11))  # a task, no prediction; activations; a copy that is there now

_COLUMNS: Final = {
    "start": np.int64, "end": np.int64, "rank": np.int8, "cause": np.int8, "place": np.int16, "wants": np.int16,
    "traits": np.int16, "step": np.int32, "layer": np.int32, "expert": np.int32, "fetch": np.int64,
}  # fmt: skip
_NOWHERE: Final = {"layer": -1, "expert": -1, "step": -1, "fetch": np.iinfo(np.int64).min}


class Activities:
    """The activities of a run that comes in pieces, until they are taken out by their ends."""

    def __init__(self, kinds: Mapping[str, str], media: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._places = _Places(media)
        self._parts: list[Columns] = []

    def add(self, records: Records) -> None:
        """Add the next records but those that took no time, which would make the walk stand still."""
        parts = (
            self._tasks(records.tasks), self._transfers(records.transfers), self._activations(records.activations),
            self._decisions(records.decisions),
        )  # fmt: skip
        edges = np.cumsum([0, *(len(part["start"]) for part in parts)]).tolist()
        whole = {name: np.empty(edges[-1], kind) for name, kind in _COLUMNS.items()}
        for part, begin, end in zip(parts, edges, edges[1:], strict=False):
            for name, values in whole.items():
                values[begin:end] = part.get(name, _NOWHERE.get(name, 0))
        long = whole["end"] > whole["start"]
        self._parts.append(whole if long.all() else {name: values[long] for name, values in whole.items()})

    def take(self, until: int) -> tuple[Columns, Ints, Ints]:
        """Take out what ended until then: columns, numbers in the order of the ends, and all places."""
        first, *more = self._parts
        columns = {name: np.concatenate([first[name], *(part[name] for part in more)]) for name in first} if more else first
        place = self._places.order[columns["place"]]  # a lane is serial, so the places of a tie differ
        order = np.lexsort((columns["rank"] * np.int16(len(self._places.order)) + place, columns["end"]))
        n = int(np.searchsorted(columns["end"][order], until, side="right"))
        self._parts = [{name: values[order[n:]] for name, values in columns.items()}]
        return columns, order[:n], self._places.rows

    def _tasks(self, tasks: RecordTable[TaskRecord]) -> Columns:
        start, expert = tasks.column("start"), tasks.column("expert")
        (device, devices), (lane, lanes) = tasks.texts("device"), tasks.texts("lane")
        which = device.astype(np.int16) * np.int16(len(lanes)) + lane
        on_gpu = np.array([self._kinds.get(name) == "gpu" for name in devices for _ in lanes], bool)[which]
        apart = by_text(tasks.texts("kind"), lambda kind: INDEX[kind] if kind in _APART else 0)
        dense, ready, submitted = expert < 0, tasks.column("ready"), tasks.column("submitted")
        on_its_device = _either(on_gpu, INDEX["gpu_experts"], INDEX["cpu_experts"])
        cause = _either(dense, INDEX["dense"], on_its_device)
        # It started at once: it waited for what caused it. Else it waited for the device, the weights or the inputs.
        wants = _either(start == submitted, SAME_PLACE | DECISION | IF_DECIDED, SAME_PLACE | DENSE | BROUGHT)
        return {
            "start": start,
            "end": tasks.column("end"),
            "rank": _either(on_gpu, _GPU, _CPU),
            "cause": _either(apart != 0, apart, cause),
            "place": self._places.lanes(devices, lanes)[which],
            "wants": _either(start > ready, SAME_PLACE, wants),  # ready before: it waited for its device
            "traits": _either(apart != 0, 0, _either(dense, MODEL | DENSE, MODEL)),
            "step": tasks.column("step"),
            "layer": tasks.column("layer"),
            "expert": expert,
        }

    def _transfers(self, transfers: RecordTable[TransferRecord]) -> Columns:
        start = transfers.column("start")
        link, links = transfers.texts("link")
        crossing = by_text(transfers.texts("cause"), lambda cause: cause == "activation") != 0
        in_line = _either(transfers.column("waited_memory"), 0, SAME_PLACE | SAME_MEDIUM | SAME_FETCH)
        asked = _either(crossing, DECISION | AT_SOURCE, DECISION)
        return {
            "start": start,
            # Nobody waited for the end of a transfer that the end of the run cut off: it is left out, like what took no time.
            "end": np.where(transfers.column("left") > 0, start, transfers.column("end")),
            "rank": _TRANSFER,
            "cause": by_text(transfers.texts("cause"), lambda cause: INDEX[transfer_cause(cause)]),
            "place": self._places.links(links)[link],
            "wants": _either(start == transfers.column("submitted"), asked, in_line),
            "traits": _either(crossing, CROSSING, 0) | _either(transfers.column("last"), COMPLETE, 0),
            "layer": transfers.column("layer"),
            "expert": transfers.column("expert"),
            "fetch": transfers.column("fetch"),
        }

    def _activations(self, activations: RecordTable[ActivationRecord]) -> Columns:
        start = activations.column("start")
        link, links = activations.texts("link")
        return {
            "start": start,
            "end": activations.column("end"),
            "rank": _ACTIVATION,
            "cause": INDEX["activation"],
            "place": self._places.links(links)[link],
            # They leave when a task of their source, or a decision about it, is done; or after those before them.
            "wants": _either(start > activations.column("submitted"), SAME_PLACE, DECISION | AT_SOURCE),
            "traits": CROSSING,
            "step": activations.column("step"),
            "layer": activations.column("layer"),
        }

    def _decisions(self, decisions: RecordTable[DecisionRecord]) -> Columns:
        return {
            "start": decisions.column("start"),
            "end": decisions.column("end"),
            "rank": _DECISION,
            "cause": INDEX["decision"],
            "traits": DECISION,
        }


def _either(flags: Flags, one: int | NDArray[np.int16], other: int | NDArray[np.int16]) -> NDArray[np.int16]:
    return np.where(flags, np.asarray(one, np.int16), np.asarray(other, np.int16))


class Ended:
    """Activities in the order of their ends, by whose numbers they are asked for."""

    def __init__(self, columns: Columns, order: Ints, places: Ints) -> None:
        self._columns, self._order = columns, order
        self._device, self._source, self._target, self._medium = places

    def sorted(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._columns[name][self._order]
        return values

    def of(self, name: str, which: Ints) -> NDArray[Any]:
        values: NDArray[Any] = self._columns[name][self._order[which]]
        return values

    def related(self, a: Ints, b: Ints) -> Flags:
        """Return whether b, which ended as a began, is something that a wants."""
        of, a, b = self._columns, self._order[a], self._order[b]
        at, there = of["place"][a], of["place"][b]
        traits = of["traits"][b]
        own = (of["layer"][a] == of["layer"][b]) & (of["expert"][a] == of["expert"][b]) & (traits & COMPLETE != 0)
        brought = (self._target[there] == self._device[at]) & (own | (traits & CROSSING != 0))
        found = (
            (at == there) * SAME_PLACE
            | (self._medium[at] == self._medium[there]) * SAME_MEDIUM
            | (of["fetch"][a] == of["fetch"][b]) * SAME_FETCH
            | brought * BROUGHT
            | (self._device[there] == self._source[at]) * AT_SOURCE
            | traits
        )
        wanted: Flags = found & of["wants"][a] & (IF_DECIDED - 1) != 0
        return wanted


class _Places:
    """Lanes and links by number, and their ends; number 0 is where decisions are made."""

    # `rows`: device, source, target and medium of each, negative where a place has none.

    def __init__(self, media: Mapping[str, str]) -> None:
        self._media = media
        self._numbers: dict[tuple[str, str], int] = {}
        self._codes: dict[Any, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        self._number("", "")

    def lanes(self, devices: tuple[str, ...], lanes: tuple[str, ...]) -> Ints:
        return np.array([self._number(device, lane) for device in devices for lane in lanes], np.int64)

    def links(self, links: tuple[str, ...]) -> Ints:
        return np.array([self._number("", link) for link in links], np.int64)

    def _number(self, device: str, name: str) -> int:
        key = device, name
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            medium = self._code(("medium", self._media[name]) if not device and name in self._media else key)
            if device or not name:
                row = self._code(device), -2, -3, medium
            else:
                source, _, target = name.partition("->")
                row = -1, self._code(source), self._code(target), medium
            self._rows.append(row)
            self.rows = np.ascontiguousarray(np.array(self._rows, np.int64).T)
            names = [f"{device}.{name}" if device else name for device, name in self._numbers]
            ranks = {name: rank for rank, name in enumerate(sorted(set(names)))}
            self.order = np.array([ranks[name] for name in names], np.int16)
        return self._numbers[key]

    def _code(self, what: Any) -> int:
        return self._codes.setdefault(what, len(self._codes))


_IDLE: Final = INDEX["idle"]
_BEFORE: Final = -1  # index of what ended before everything, and when
_Test = Callable[[Ints, Ints], Flags]


class Window(NamedTuple):
    """A stretch of the run that is explained on its own."""

    begin: int  # ns
    end: int  # ns
    step: int  # -1 between two steps
    layer: int  # -1 outside the MoE layers


def _charged(columns: Columns, order: Ints, places: Ints, windows: Ints) -> Ints:
    """Charge every nanosecond of windows to the causes, from what ended in them and before."""
    begin, end, step, layer = windows
    found = Ended(columns, order, places)
    index = _Ends(found.sorted("end"))

    def ends_window(i: Ints, b: Ints) -> Flags:
        """A layer ends with its own runs and outputs, whatever else happens to end then."""
        traits = found.of("traits", b)
        own = (traits & CROSSING != 0) | ((traits & MODEL != 0) & (found.of("step", b) == step[i]))
        flags: Flags = own & (found.of("layer", b) == layer[i])
        return flags

    def wants(a: Ints, instant: Ints) -> Flags:
        """Return whether something particular was waited for."""
        wanted = found.of("wants", a)
        flags: Flags = wanted != 0
        if (wanted & IF_DECIDED).any():
            flags &= (wanted & IF_DECIDED == 0) | index.any_of(found.sorted("traits") & DECISION != 0)[instant]
        return flags

    starts = found.sorted("start")
    last = index.before(end, ends_window)
    before = index.before(starts, found.related, wants)
    ends = np.append(index.ends, _BEFORE)
    path, window = _follow(last, before, ends, begin)
    stop = np.maximum(starts[path], begin[window])
    shape = len(end), len(CAUSES)
    ns = sums(window * len(CAUSES) + found.of("cause", path), ends[path] - stop, len(end) * len(CAUSES)).reshape(shape)
    ns[:, _IDLE] += sums(window, stop - np.maximum(ends[before[path]], begin[window]), len(end))
    ns[:, _IDLE] += end - np.maximum(ends[last], begin)
    return ns


def _follow(last: Ints, before: Ints, ended: Ints, begin: Ints) -> tuple[Ints, Ints]:
    """List what lies on the ways back through all windows, and in which, a step at a time."""
    at, window = last, np.arange(len(begin))
    path, windows = [at[:0]], [at[:0]]
    while len(at):
        inside = ended[at] > begin[window]
        at, window = at[inside], window[inside]
        path.append(at)
        windows.append(window)
        at = before[at]
    return np.concatenate(path), np.concatenate(windows)


class _Ends:
    """An index of activities by the time at which they ended."""

    def __init__(self, ends: Ints) -> None:
        self.ends = ends
        new = np.ones(len(ends), bool)
        np.not_equal(ends[1:], ends[:-1], out=new[1:])
        first = np.flatnonzero(new)  # of each instant at which any ended
        self._instants = ends[first]
        self._first = np.append(first, _BEFORE)  # what is before the first instant has index -1, too
        self._until = np.append(first[1:], [len(ends), 0])
        self._several = self._until > self._first + 1

    def any_of(self, flags: Flags) -> Flags:
        found: Flags = np.logical_or.reduceat(flags, self._first[:-1])
        return found

    def before(self, times: Ints, test: _Test, asks: _Test | None = None) -> Ints:
        """Find what ended last and not after some times."""
        # Of several that ended exactly then: the first that passes a test, or, where nothing `asks`, the first of all.
        instant = np.searchsorted(self._instants, times, side="right") - 1
        found = self._first[instant]
        left = np.flatnonzero(self._several[instant])
        left = left[self._instants[instant[left]] == times[left]]
        if asks is not None:
            left = left[asks(left, instant[left])]
        candidate, until = found[left], self._until[instant[left]]
        while len(left):
            passed = test(left, candidate)
            found[left[passed]] = candidate[passed]
            goes_on = ~passed & (candidate + 1 < until)
            left, candidate, until = left[goes_on], candidate[goes_on] + 1, until[goes_on]
        return found


@dataclass(frozen=True)
class Breakdown:
    """Time by cause of a run.

    Attributes
    ----------
    windows : sequence of Window
        Contiguous windows from 0 to the makespan.
    ns : ndarray of int64, shape (n_windows, n_causes), ns
        Time of each window by cause, columns as in `CAUSES`; each row adds up to the length of its window.
    """

    windows: RecordTable[Window]
    ns: NDArray[np.int64]

    def total(self) -> dict[str, int]:
        """Add up all windows, by cause: in all, the makespan."""
        return dict(zip(CAUSES, self.ns.sum(axis=0).tolist(), strict=True))

    def select(self, steps: Iterable[int]) -> dict[str, int]:
        """Add up the windows of steps, given by their numbers, by cause."""
        numbers = steps if isinstance(steps, np.ndarray) else np.array(list(steps), np.int64)
        chosen = np.isin(self.windows.column("step"), numbers)
        return dict(zip(CAUSES, self.ns[chosen].sum(axis=0).tolist(), strict=True))


class Cuts:
    """Cuts a run that comes in pieces into layer visits and the gaps around them."""

    def __init__(self) -> None:
        self._now = 0

    def add(self, records: Records) -> Ints:
        steps = _columns(records.steps, "begin", "end", "step")
        steps = steps[:, np.lexsort(steps[::-1])]
        layers = _columns(records.layers, "begin", "end", "layer", "step")
        by_number = np.argsort(steps[2], kind="stable")
        place = np.append(by_number, -1)[np.searchsorted(steps[2, by_number], layers[3])]
        over = np.append(steps[2], -1)[place] == layers[3]
        if not over.all():  # a visit of no step
            layers, place = layers[:, over], place[over]
        if ((place[1:] < place[:-1]) | ((place[1:] == place[:-1]) & (layers[0, 1:] <= layers[0, :-1]))).any():
            order = np.lexsort((layers[2], layers[1], layers[0], place))
            layers, place = layers[:, order], place[order]
        # Each step has its begin, the begin and the end of each layer, and its end: instants up to which windows go.
        number, n_before = np.arange(len(steps[0])), np.searchsorted(place, np.arange(len(steps[0]) + 1))
        instants = np.full((3, 2 * (len(number) + len(place))), -1)
        instants[0, 2 * (number + n_before[:-1])] = steps[0]
        instants[:2, 2 * (number + n_before[1:]) + 1] = steps[1:]
        at = 2 * (np.arange(len(place)) + place) + 1
        instants[:2, at] = layers[0], layers[3]
        instants[:, at + 1] = layers[1], layers[3], layers[2]
        return self._until(instants)

    def rest(self, makespan_ns: int) -> Ints:
        return self._until(np.array([[makespan_ns], [-1], [-1]]))

    def _until(self, instants: Ints) -> Ints:
        to = instants[0]
        since = np.append(self._now, to)
        self._now = int(since[-1])
        since = since[:-1]
        if (to < since).any():
            now, (then, step, layer) = int(since[to < since][0]), instants[:, to < since][:, 0].tolist()
            raise SimulationError(
                f"step {step}, layer {layer}: expected windows in time order, got one that reaches back from "
                f"{format_ns(now)} to {format_ns(then)}; the records do not come from one run"
            )
        windows: Ints = np.concatenate((since[None], instants))[:, to > since]
        return windows


def _columns(table: RecordTable[Any], *names: str) -> Ints:
    return np.stack([table.column(name) for name in names])


def cut_windows(records: Records) -> RecordTable[Window]:
    """Cut the run into layer visits and the gaps around them."""
    cuts = Cuts()
    return _table(np.concatenate((cuts.add(records), cuts.rest(records.makespan_ns)), axis=1))


def _table(windows: Ints) -> RecordTable[Window]:
    found = RecordTable(Window)
    found.fill(dict(zip(Window._fields, windows, strict=True)))
    return found


class TimeByCause:
    """The breakdown of a run that comes in pieces."""

    def __init__(self, kinds: Mapping[str, str], media: Mapping[str, str] | None = None) -> None:
        self._activities = Activities(kinds, media or {})
        self._cuts = Cuts()
        self._windows: list[Ints] = []
        self._makespan_ns = 0

    def add(self, records: Records, settled_ns: int = 0) -> Breakdown:
        """Add the next records, and explain the windows that no later record can change."""
        # No record of a later piece starts before `settled_ns`; 0 explains none yet.
        self._activities.add(records)
        self._windows.append(self._cuts.add(records))
        self._makespan_ns = records.makespan_ns
        return self._explain(settled_ns)

    def rest(self) -> Breakdown:
        """Explain the windows that are left, after the last records."""
        self._windows.append(self._cuts.rest(self._makespan_ns))
        return self._explain(None)

    def _explain(self, settled_ns: int | None) -> Breakdown:
        windows = np.concatenate(self._windows, axis=1)
        n = len(windows[1]) if settled_ns is None else int(np.searchsorted(windows[1], settled_ns))
        self._windows, windows = [windows[:, n:].copy()], windows[:, :n]
        ns = np.zeros((0, len(CAUSES)), np.int64)
        if n:
            ns = _charged(*self._activities.take(int(windows[1, -1])), windows)
        charged, asked = int(ns.sum()), int((windows[1] - windows[0]).sum())
        assert charged == asked, f"charged {charged} ns of {asked} ns"
        return Breakdown(_table(windows), ns)


def breakdown(records: Records, kinds: Mapping[str, str], media: Mapping[str, str] | None = None) -> Breakdown:
    """Split the makespan of a run by what was waited for.

    Parameters
    ----------
    records : Records
        Records of one run.
    kinds : mapping of str to str
        Kind of each device, ``"gpu"`` or ``"cpu"``.
    media : mapping of str to str, optional
        Medium of each link that shares one with others.

    Returns
    -------
    Breakdown
        Windows with their time by cause; all times together are exactly the makespan.

    Raises
    ------
    SimulationError
        If steps or layers overlap.

    Examples
    --------
    A layer whose dense part takes 10 ns, after which an expert of 5 ns waits 20 ns for its demand fetch:

    >>> from moesim.records import LayerRecord, StepRecord, TaskRecord, TransferRecord
    >>> run = Records(makespan_ns=35)
    >>> run.steps.append(StepRecord(0, 35, 0, "decode", 0, 1, 1, 1.0))
    >>> run.layers.append(LayerRecord(0, 35, 0, 0))
    >>> run.tasks.append(TaskRecord(0, 10, "gpu0", "main", "dense", 0, 0, 0, -1, 1, 10, 0, 0))
    >>> run.tasks.append(TaskRecord(30, 35, "gpu0", "main", "expert", 0, 0, 0, 7, 1, 5, 10, 30))
    >>> run.transfers.append(
    ...     TransferRecord(10, 30, "cpu0->gpu0", "demand", 0, 7, 100, 0, 10, 0, True, False))
    >>> {cause: ns for cause, ns in breakdown(run, {"gpu0": "gpu", "cpu0": "cpu"}).total().items() if ns}
    {'dense': 10, 'gpu_experts': 5, 'exposed_demand': 20}
    """
    time = TimeByCause(kinds, media)
    time.add(records)
    return time.rest()
