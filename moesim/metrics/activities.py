"""What took time in a run, as columns: the form in which `moesim.metrics.critical_path` walks over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.metrics.causes import INDEX, exposed
from moesim.metrics.columns import by_text
from moesim.metrics.twins import twin
from moesim.records import ActivationRecord, DecisionRecord, Records, TaskRecord, TransferRecord

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Columns = dict[str, Any]  # arrays; numbers that all have

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
    """The activities of a run that is taken in piece by piece, until they are taken out in the order of their ends."""

    def __init__(self, kinds: Mapping[str, str], media: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._places = _Places(media)
        self._parts: list[Columns] = []

    def add(self, records: Records) -> None:
        """Take the next records in. What took no time explains no time, and would make the walk stand still."""
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
        """Take out what ended until then: columns, the numbers of those that did in the order of their ends, and all places."""
        first, *more = self._parts
        columns = {name: np.concatenate([first[name], *(part[name] for part in more)]) for name in first} if more else first
        order = twin(by_end)(columns["end"], columns["rank"], columns["place"], self._places.order)
        n = int(np.searchsorted(columns["end"][order], until, side="right"))
        self._parts = [{name: values[order[n:]] for name, values in columns.items()}]
        return columns, order[:n], self._places.rows

    def _tasks(self, tasks: RecordTable[TaskRecord]) -> Columns:
        start, expert = tasks.column("start"), tasks.column("expert")
        (device, devices), (lane, lanes) = tasks.texts("device"), tasks.texts("lane")
        which = device.astype(np.int16) * np.int16(len(lanes)) + lane
        on_gpu = np.array([self._kinds.get(name) == "gpu" for name in devices for _ in lanes], bool)[which]
        predicts = by_text(tasks.texts("kind"), lambda kind: kind == "predict") != 0
        dense, ready, submitted = expert < 0, tasks.column("ready"), tasks.column("submitted")
        on_its_device = _either(on_gpu, INDEX["gpu_experts"], INDEX["cpu_experts"])
        cause = _either(dense, INDEX["dense"], on_its_device)
        # It started at once: it waited for what caused it. Else it waited for the device, the weights or the inputs.
        wants = _either(start == submitted, SAME_PLACE | DECISION | IF_DECIDED, SAME_PLACE | DENSE | BROUGHT)
        return {
            "start": start,
            "end": tasks.column("end"),
            "rank": _either(on_gpu, _GPU, _CPU),
            "cause": _either(predicts, INDEX["predict"], cause),
            "place": self._places.lanes(devices, lanes)[which],
            "wants": _either(start > ready, SAME_PLACE, wants),  # ready before: it waited for its device
            "traits": _either(predicts, 0, _either(dense, MODEL | DENSE, MODEL)),
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
            "cause": by_text(transfers.texts("cause"), lambda cause: INDEX[exposed(cause)]),
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


def by_end(end: Ints, rank: NDArray[np.int8], place: NDArray[np.int16], order: NDArray[np.int16]) -> Ints:
    """Sort by end, rank and order of the places; a lane is serial, so the places of a tie differ."""
    return np.lexsort((rank * np.int16(len(order)) + order[place], end))


def _either(flags: Flags, one: int | NDArray[np.int16], other: int | NDArray[np.int16]) -> NDArray[np.int16]:
    return np.where(flags, np.asarray(one, np.int16), np.asarray(other, np.int16))


class Ended:
    """Activities in the order of their ends, by whose numbers they are asked for."""

    def __init__(self, columns: Columns, order: Ints, places: Ints) -> None:
        self._columns, self._order = columns, order
        self._device, self._source, self._target, self._medium = places

    def sorted(self, name: str) -> NDArray[Any]:
        """Give a column of all."""
        values: NDArray[Any] = self._columns[name][self._order]
        return values

    def of(self, name: str, which: Ints) -> NDArray[Any]:
        """Give a column of some."""
        values: NDArray[Any] = self._columns[name][self._order[which]]
        return values

    def related(self, a: Ints, b: Ints) -> Flags:
        """Say whether b, which ended as a began, is something that a wants."""
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
    """Lanes and links by number, and what their names say; number 0 is where decisions are made.

    ``rows`` are device, source, target and medium of each: numbers of devices, negative where a place has none; links of one
    medium share its number. ``order`` is that of their names.
    """

    def __init__(self, media: Mapping[str, str]) -> None:
        self._media = media
        self._numbers: dict[tuple[str, str], int] = {}
        self._codes: dict[Any, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        self._number("", "")

    def lanes(self, devices: tuple[str, ...], lanes: tuple[str, ...]) -> Ints:
        """Give the numbers of all lanes of devices."""
        return np.array([self._number(device, lane) for device in devices for lane in lanes], np.int64)

    def links(self, links: tuple[str, ...]) -> Ints:
        """Give the numbers of links."""
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
