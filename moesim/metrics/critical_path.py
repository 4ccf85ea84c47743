"""The walk behind `moesim.metrics.breakdown`: from the end of a window back along what was waited for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from moesim.metrics.causes import CAUSES, INDEX, task_cause, transfer_cause
from moesim.records import ActivationRecord, DecisionRecord, Records, TaskRecord, TransferRecord


class Window(NamedTuple):
    """A stretch of the run that is explained on its own."""

    begin: int  # ns
    end: int  # ns
    step: int  # -1 between two steps
    layer: int  # -1 outside the MoE layers


# What wins when several things ended at the same instant: the order of these ranks.
_GPU, _CPU, _DECISION, _TRANSFER, _ACTIVATION = range(5)
_LINK: Final = _TRANSFER  # ranks from here on are on a link


class _Activity(NamedTuple):
    """Something that took time, in the form the walk needs."""

    start: int
    rank: int
    cause: int  # index into CAUSES
    place: str  # device and lane, or link
    record: TaskRecord | TransferRecord | ActivationRecord | DecisionRecord


_Test = Callable[[_Activity], bool]


class Walk:
    """The index by end time, and the rules of what waited for what."""

    def __init__(self, records: Records, kinds: Mapping[str, str], media: Mapping[str, str]) -> None:
        self._media = media
        self._ended: dict[int, list[_Activity]] = {}
        self._fill(records, kinds)
        for several in self._ended.values():
            if len(several) > 1:
                several.sort(key=lambda a: (a.rank, a.place))  # stable; a lane is serial, so places differ
        self._ends = sorted(self._ended)

    def _fill(self, records: Records, kinds: Mapping[str, str]) -> None:
        # What took no time explains no time, and would make the walk stand still.
        def add(end: int, activity: _Activity) -> None:
            if end > activity.start:
                self._ended.setdefault(end, []).append(activity)

        rank_of = {device: _GPU if kind == "gpu" else _CPU for device, kind in kinds.items()}
        for task in records.tasks:
            cause = INDEX[task_cause(task, kinds)]
            add(
                task.end,
                _Activity(task.start, rank_of[task.device], cause, f"{task.device}.{task.lane}", task),
            )
        for transfer in records.transfers:
            cause = INDEX[transfer_cause(transfer)]
            add(transfer.end, _Activity(transfer.start, _TRANSFER, cause, transfer.link, transfer))
        for activation in records.activations:
            cause = INDEX["activation"]
            add(activation.end, _Activity(activation.start, _ACTIVATION, cause, activation.link, activation))
        for decision in records.decisions:
            add(decision.end, _Activity(decision.start, _DECISION, INDEX["decision"], "", decision))

    def explain(self, window: Window) -> list[int]:
        """Charge every nanosecond of a window; returns ns by cause."""
        charged = [0] * len(CAUSES)
        idle = INDEX["idle"]
        now = window.end
        current = self._first(now, lambda a: _ends_window(a, window))
        while now > window.begin:
            if current is None:  # nothing ended now: idle back to the last thing that did
                at = bisect_left(self._ends, now) - 1
                start = max(self._ends[at], window.begin) if at >= 0 else window.begin
                charged[idle] += now - start
                now = start
                current = self._first(now, None)
                continue
            start = max(current.start, window.begin)
            charged[current.cause] += now - start
            now = start
            if now > window.begin:
                current = self._waited_for(current)
        return charged

    def _first(self, at: int, test: _Test | None) -> _Activity | None:
        """Find what ended at a time and passes a test, else anything that ended then, else None."""
        here = self._ended.get(at)
        if here is None:
            return None
        if test is not None and len(here) > 1:
            for activity in here:
                if test(activity):
                    return activity
        return here[0]

    def _waited_for(self, a: _Activity) -> _Activity | None:
        here = self._ended.get(a.start)
        if here is None:
            return None
        if len(here) == 1:
            return here[0]
        record = a.record
        decided = any(b.rank == _DECISION for b in here)
        if isinstance(record, TaskRecord):
            return self._first(a.start, _task_test(a, record, decided))
        if isinstance(record, TransferRecord):
            return self._first(a.start, self._transfer_test(a, record, decided))
        if isinstance(record, ActivationRecord):
            if record.start > record.submitted:
                return self._first(a.start, lambda b: b.rank >= _LINK and b.place == a.place)
            return self._first(a.start, _activation_test(record.link))
        return here[0]

    def _transfer_test(self, a: _Activity, transfer: TransferRecord, decided: bool) -> _Test | None:
        if transfer.start == transfer.submitted:
            if transfer.cause == "activation":
                return _activation_test(transfer.link)
            return _is_decision if decided else None
        if transfer.waited_memory:
            return None
        medium = self._media.get(transfer.link)

        def test(b: _Activity) -> bool:
            if b.rank < _LINK:
                return False
            if b.place == a.place or (medium is not None and self._media.get(b.place) == medium):
                return True
            return isinstance(b.record, TransferRecord) and b.record.fetch == transfer.fetch  # the hop before

        return test


def _is_decision(b: _Activity) -> bool:
    return b.rank == _DECISION


def _is_activation(record: object) -> bool:
    """Activations are on a control lane, or among the transfers where they share the link with weights."""
    if isinstance(record, TransferRecord):
        return record.cause == "activation"
    return isinstance(record, ActivationRecord)


def _ends_window(b: _Activity, window: Window) -> bool:
    """A layer ends with its own runs and outputs, whatever else happens to end then."""
    record = b.record
    if isinstance(record, TaskRecord):
        return record.kind != "predict" and (record.step, record.layer) == (window.step, window.layer)
    return _is_activation(record) and record.layer == window.layer


def _task_test(a: _Activity, task: TaskRecord, decided: bool) -> _Test | None:
    if task.start > task.ready:  # ready before: it waited for its device
        return lambda b: b.place == a.place
    if task.start == task.submitted:  # started at once: it waited for what caused it
        return (lambda b: b.place == a.place or b.rank == _DECISION) if decided else None
    here = f"->{task.device}"

    def arrived(b: _Activity) -> bool:
        """The device, the weights or the inputs; a tie goes by rank."""
        record = b.record
        if isinstance(record, TaskRecord):
            return b.place == a.place or (record.expert < 0 and record.kind != "predict")
        if isinstance(record, DecisionRecord) or not record.link.endswith(here):
            return False
        if isinstance(record, ActivationRecord) or record.cause == "activation":
            return True
        return record.last and (record.layer, record.expert) == (task.layer, task.expert)

    return arrived


def _activation_test(link: str) -> _Test:
    """Activations leave when a task of their source, or a decision about it, is done."""
    source = link.partition("->")[0]

    def test(b: _Activity) -> bool:
        return b.rank == _DECISION or (isinstance(b.record, TaskRecord) and b.record.device == source)

    return test
