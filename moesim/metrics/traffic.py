"""Bytes over links by cause, fetches by cause, and which prefetches were of use."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from moesim.core.record_table import RecordTable
from moesim.metrics.columns import by_text, in_decode, sums
from moesim.records import Records, StepRecord

Ints = NDArray[np.int64]
_CAUSES: Final = ("demand", "prefetch", "update", "write-back", "message", "activation")
_NO_INTS: Final = np.zeros(0, np.int64)


def bytes_moved(records: Records) -> dict[str, float | int | None]:
    """Return the bytes over links by cause; every hop counts, since every hop occupies a link.

    Parameters
    ----------
    records : Records
        Records of one run.

    Returns
    -------
    dict of str to int, float or None, bytes
        ``bytes_<cause>``, ``bytes_total`` (weights and messages), ``bytes_activation``, and bytes per token.
    """
    traffic = Traffic()
    traffic.add(records)
    return traffic.bytes_moved(records.steps)


class Traffic:
    """Traffic over links in a run that comes in pieces."""

    def __init__(self) -> None:
        self._n_bytes = np.zeros(len(_CAUSES), np.int64)
        self._crossed = 0  # bytes on control lanes
        self._prefetches = _Prefetches()
        self._in_decode = _DuringDecode()
        self.n_demand_fetches = 0

    def add(self, records: Records, settled_ns: int = 0) -> None:
        table = records.transfers
        n_bytes = table.column("n_bytes")
        cause = by_text(table.texts("cause"), _CAUSES.index)
        fetched = table.column("last") & (table.column("expert") >= 0)
        self._n_bytes += sums(cause, n_bytes, len(_CAUSES))
        self._crossed += int(records.activations.column("n_bytes").sum())
        self.n_demand_fetches += int((fetched & (cause == _CAUSES.index("demand"))).sum())
        self._prefetches.add(records, cause == _CAUSES.index("prefetch"), fetched)
        weights = cause != _CAUSES.index("activation")
        self._in_decode.add(records.steps, table.column("start")[weights], n_bytes[weights], settled_ns)

    def bytes_moved(self, steps: RecordTable[StepRecord]) -> dict[str, float | int | None]:
        moved = dict(zip(_CAUSES, self._n_bytes.tolist(), strict=True))
        used = self._prefetches.used_bytes
        total = sum(moved.values()) - moved["activation"]
        n_sequences, decode = steps.column("n_sequences"), in_decode(steps)
        n_generated, n_decoded = int(n_sequences.sum()), int(n_sequences[decode].sum())
        return {
            "bytes_demand": moved["demand"], "bytes_prefetch_used": used,
            "bytes_prefetch_wasted": moved["prefetch"] - used, "bytes_update": moved["update"],
            "bytes_write_back": moved["write-back"], "bytes_message": moved["message"],
            "bytes_activation": moved["activation"] + self._crossed, "bytes_total": total,
            "bytes_per_token": total / n_generated if n_generated else None,
            "bytes_per_decode_token": self._in_decode.total() / n_decoded if n_decoded else None,
        }  # fmt: skip

    def fetches(self) -> dict[str, float | int | None]:
        done, useful = self._prefetches.n_done, self._prefetches.n_useful
        return {
            "n_demand_fetches": self.n_demand_fetches,
            "n_prefetches": done,
            "prefetch_used_share": useful / done if done else None,
        }


class _Prefetches:
    """Prefetches whose copy some Run read before it left; kept until it is read or leaves."""

    def __init__(self) -> None:
        self.used_bytes = self.n_useful = self.n_done = 0
        self._unread = np.zeros((3, 0), np.int64)  # number of the fetch, bytes, whether the copy is complete with them
        self._ahead = _NO_INTS  # parts that are streamed and still to come: they count as read when they are asked for
        self._read = self._over = _NO_INTS  # fetches that were read, and those that were over, as of the last records
        self._newest = -1  # number of a fetch before these

    def add(self, records: Records, prefetched: NDArray[np.bool_], fetched: NDArray[np.bool_]) -> None:
        table = records.transfers
        fetch, at = table.column("fetch"), np.flatnonzero(prefetched)
        self.n_done += int(fetched[at].sum())
        read = np.fromiter(records.used_fetches, np.int64, len(records.used_fetches))
        self._look_ahead()
        found = np.concatenate((self._unread, np.stack((fetch[at], table.column("n_bytes")[at], fetched[at]))), axis=1)
        if found.shape[1]:
            was_read = np.isin(found[0], np.append(self._ahead, read))
            _, n_bytes, n = found[:, was_read].sum(axis=1).tolist()
            self.used_bytes += n_bytes
            self.n_useful += n
            found = found[:, ~was_read]
            self._unread = found[:, ~np.isin(found[0], records.evictions.column("fetch"))]
        self._read, self._over = read, fetch[table.column("last")]

    def _look_ahead(self) -> None:
        """Keep, of what was read, what is newer than all before: it may be still to come."""
        ahead = np.append(self._ahead, self._read[self._read > self._newest])
        self._ahead = ahead[~np.isin(ahead, self._over)]
        self._newest = max(int(numbers.max(initial=self._newest)) for numbers in (self._read, self._over))


class _DuringDecode:
    """Bytes whose transfer began during a decode step."""

    def __init__(self) -> None:
        # Of the steps during which transfers may still begin; the first is over, or stands for the time before all steps.
        self._begin, self._decodes = np.zeros(1, np.int64), np.zeros(1, bool)
        self._waiting: list[tuple[Ints, Ints]] = []  # begin and bytes of transfers
        self._n_bytes = 0

    def add(self, steps: RecordTable[StepRecord], start: Ints, n_bytes: Ints, settled_ns: int) -> None:
        begin, decodes = steps.column("begin"), in_decode(steps)
        order = np.lexsort((steps.column("end"), begin))
        self._begin, self._decodes = np.append(self._begin, begin[order]), np.append(self._decodes, decodes[order])
        self._waiting.append((start, n_bytes))
        if settled_ns:
            self._settle(settled_ns)

    def total(self) -> int:
        self._settle(None)
        return self._n_bytes

    def _settle(self, until: int | None) -> None:
        start, n_bytes = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        if until is not None:
            known = start < until
            self._waiting = [(start[~known], n_bytes[~known])]
            start, n_bytes = start[known], n_bytes[known]
        at = np.searchsorted(self._begin, start, side="right") - 1
        self._n_bytes += int(n_bytes[self._decodes[at]].sum())
        if until is not None:
            first = int(np.searchsorted(self._begin, until)) - 1
            self._begin, self._decodes = self._begin[first:], self._decodes[first:]
