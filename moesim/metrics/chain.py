"""Time by cause where nothing happens at the same nanosecond, as in a replay.

`moesim.metrics.breakdown` asks what ended exactly when something began. This walk asks what was needed (lane,
weights, inputs, decision) and follows what of it ended last; the time from there is waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Final

import numpy as np

from moesim.metrics.breakdown import CAUSES, Breakdown, Window, cut_windows, task_cause, transfer_cause
from moesim.records import ActivationRecord, DecisionRecord, Records, TaskRecord, TransferRecord

Record = TaskRecord | TransferRecord | ActivationRecord | DecisionRecord
Key = tuple[object, ...]

WAITING: Final = "waiting"
_end = attrgetter("end")
_ANY: Final[Key] = ("any",)
_DENSE: Final[Key] = ("dense",)  # parts that are no expert
_TASK: Final[Key] = ("task",)  # all but predictions, which nothing of the model waits for
_CROSSED: Final[Key] = ("crossed",)
_DECISION: Final[Key] = ("decision",)


class Chain:
    """An index of a run by what things can wait for, and the walk over it."""

    def __init__(self, records: Records, kinds: Mapping[str, str], media: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._media = media
        self._lists: dict[Key, list[Record]] = {}
        self.windows = cut_windows(records)
        everything: list[Record] = [*records.tasks, *records.transfers, *records.activations, *records.decisions]
        # What took no time explains none. The order decides ties: a task first, as in `moesim.metrics.breakdown`.
        # Nobody waited for the end of a transfer that the end of the run cut off.
        for record in sorted((r for r in everything if r.end > r.start and not getattr(r, "left", 0)), key=_end):
            for key in (_ANY, *self._keys(record)):
                self._lists.setdefault(key, []).append(record)
        self._ends = {key: [r.end for r in found] for key, found in self._lists.items()}

    def _keys(self, r: Record) -> Iterator[Key]:
        if isinstance(r, TaskRecord):
            yield "lane", r.device, r.lane
            yield "on", r.device
            if r.kind not in ("predict", "host"):
                yield _TASK
                yield "visit", r.step, r.layer
                if r.expert < 0:
                    yield _DENSE
        elif isinstance(r, TransferRecord):
            yield "link", self._media.get(r.link, r.link)
            yield "fetch", r.fetch
            if r.last and (r.expert >= 0 or r.cause in ("demand", "prefetch")):  # an expert, or a part that is streamed
                yield "copy", r.link.partition("->")[2], r.layer, r.expert
            if r.cause == "activation":
                yield from self._crossing(r.link)
        elif isinstance(r, ActivationRecord):
            yield "link", r.link, "control"
            yield "visit", r.step, r.layer
            yield from self._crossing(r.link)
        else:
            yield _DECISION

    def _crossing(self, link: str) -> Iterator[Key]:
        yield _CROSSED
        yield "into", link.partition("->")[2]

    def split(self, steps: Iterable[int]) -> dict[str, int]:
        """Charge every nanosecond of some steps to a cause, ``"waiting"`` instead of ``"idle"``."""
        chosen = set(steps)
        charged: dict[str, int] = {}
        for window in self.windows:
            if window.step in chosen:
                self._explain(window, charged)
        return charged

    def breakdown(self) -> Breakdown:
        """Charge every nanosecond of the run, window by window; waiting counts as ``"idle"``."""
        rows = []
        for window in self.windows:
            charged: dict[str, int] = {}
            self._explain(window, charged)
            rows.append([charged.get(WAITING if cause == "idle" else cause, 0) for cause in CAUSES])
        return Breakdown(self.windows, np.array(rows, dtype=np.int64).reshape(-1, len(CAUSES)))

    def _explain(self, window: Window, charged: dict[str, int]) -> None:
        now = window.end
        current = self._latest([("visit", window.step, window.layer)], now) or self._latest([_ANY], now)
        while now > window.begin:
            end = window.begin if current is None else max(current.end, window.begin)
            charged[WAITING] = charged.get(WAITING, 0) + now - end
            if current is None or end == window.begin:
                return
            start = max(current.start, window.begin)
            cause = self._cause(current)
            charged[cause] = charged.get(cause, 0) + end - start
            now = start
            if now > window.begin:
                current = self._waited_for(current)

    def _cause(self, r: Record) -> str:
        if isinstance(r, TaskRecord):
            return task_cause(r, self._kinds)
        if isinstance(r, TransferRecord):
            return transfer_cause(r.cause)
        return "activation" if isinstance(r, ActivationRecord) else "decision"

    def _latest(self, keys: Iterable[Key], until: int) -> Record | None:
        """Find what ended last, and not after a time, in some lists; the first list wins a tie."""
        best: Record | None = None
        for key in keys:
            ends = self._ends.get(key)
            at = bisect_right(ends, until) - 1 if ends else -1
            if at >= 0:
                found = self._lists[key][at]
                if best is None or found.end > best.end:
                    best = found
        return best

    def _waited_for(self, r: Record) -> Record | None:
        needed = self._latest(self._needs(r), r.start)
        # What it needed was there before it was even asked for: then it waited for what brought the question about. A
        # transfer that waited for memory waited for whatever gave the memory back.
        until = r.start if isinstance(r, TransferRecord) and r.waited_memory else min(getattr(r, "submitted", r.start), r.start)
        if needed is None or needed.end < until:
            needed = self._latest([_DECISION, _TASK, _ANY], until) or needed
        return needed

    def _needs(self, r: Record) -> list[Key]:
        if isinstance(r, TaskRecord):
            lane: Key = ("lane", r.device, r.lane)
            if r.expert < 0:
                return [("copy", r.device, r.layer, -1), lane, _TASK, _CROSSED]
            return [("copy", r.device, r.layer, r.expert), ("into", r.device), lane, _DECISION, _DENSE]
        if isinstance(r, TransferRecord):
            return [("link", self._media.get(r.link, r.link)), ("fetch", r.fetch), _DECISION]
        if isinstance(r, ActivationRecord):
            return [("on", r.link.partition("->")[0]), ("link", r.link, "control"), _DECISION]
        return [_DENSE, _DECISION]
