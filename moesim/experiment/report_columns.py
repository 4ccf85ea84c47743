"""The columns of the table that the terminal shows, and the text of each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moesim.core.colours import LABEL
from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.experiment.intervals import LEAST, MOST
from moesim.experiment.repeats import CI
from moesim.experiment.row_values import Row, busy_percent, fresh_share, is_lossy, moved_mb, number
from moesim.metrics import Value
from moesim.metrics.causes import CAUSES
from moesim.metrics.fresh import fresh_cell
from moesim.metrics.naming import cache_asked


def _time(row: Row, key: str) -> str:
    ns = number(row, key)
    if ns is None:
        return "-"
    unit, size = ("s", NS_PER_S) if ns >= NS_PER_S else ("ms", NS_PER_MS)
    return f"{ns / size:.3g}{_interval(row, key, 1 / size)} {unit}"


def _interval(row: Row, key: str, scale: float = 1.0) -> str:
    """Write half the width of the interval of a mean over repeats, if there is one."""
    half = number(row, CI + key)
    return "" if half is None else f" ±{half * scale:.2g}"


def _percent(row: Row, key: str) -> str:
    share = number(row, key)
    return "-" if share is None else f"{100 * share:.1f}{_interval(row, key, 100)}"


def fresh(row: Row) -> str:
    """Write the share of gate weight that was computed as routed, in percent."""
    share = fresh_share(row)
    return "-" if share is None else fresh_cell(share)


def _speed(row: Row) -> str:
    value = number(row, "decode_tokens_per_s")
    if value is None:
        return "-*" if is_lossy(row) else "-"
    mark = "*" if is_lossy(row) else ""
    return (f"{value:.2f}" if value < 100 else f"{value:.0f}") + _interval(row, "decode_tokens_per_s") + mark


def _over_intervals(row: Row) -> str:
    """Write the least and the most speed at the ends of the profile's intervals, of an experiment with ``intervals: true``."""
    ends = [number(row, name) for name in (LEAST, MOST)]
    return "-" if None in ends else " to ".join(f"{end:.3g}" for end in ends)


def _slots(row: Row) -> str:
    """Write the slots of the cache, and how many of them are used where not all are."""
    granted, used = number(row, "cache_slots"), number(row, "cache_slots_used")
    if granted is None:
        return "-"
    return f"{used:g} of {granted:g}" if used is not None and used != granted else f"{granted:g}"


def batch(row: Row) -> Value:
    """Give the requests at once."""
    return row.get("batch_size")


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    name: str
    text: Callable[[Row], str]
    right: bool = True  # numbers
    wide: bool = False  # only in the wide table
    spare: int = 0  # which columns are left out first where the lines would be too long; 0: none is


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def waited(row: Row, phase: str | None = None) -> str:
    """Name what took most of the time of a phase, ``"decode"`` or ``"prompt"``; by default of decoding, if there was any."""
    decode = phase == "decode" or (phase is None and bool(number(row, "n_decode_tokens")))
    found = {cause: number(row, f"{'decode_' * decode}time_{cause}_ns") or 0 for cause in CAUSES}
    if phase == "prompt":
        found = {cause: ns - (number(row, f"decode_time_{cause}_ns") or 0) for cause, ns in found.items()}
    most = max(found, key=lambda cause: found[cause])
    return f"{LABEL[most]} {100 * found[most] / total:.0f}%" if (total := sum(found.values())) else "-"


SHOWN = (
    Column("policy", lambda row: str(row["policy"]), right=False),
    Column("cache", cache_asked),
    Column("slots", _slots, wide=True),
    Column("batch", lambda row: str(batch(row))),
    Column("tok/s", _speed),
    Column("over intervals", _over_intervals, wide=True),
    Column("TTFT", lambda row: _time(row, "ttft_mean_ns"), spare=2),
    Column("TPOT", lambda row: _time(row, "tpot_mean_ns"), spare=3),
    Column("hit %", lambda row: _percent(row, "hit_rate"), spare=4),
    Column("resident %", lambda row: _percent(row, "resident_rate"), wide=True),
    Column("waited for", waited, right=False),
    Column("MB/token demand", lambda row: _whole(moved_mb(row, "demand")), wide=True),
    Column("prefetched", lambda row: _whole(moved_mb(row, "prefetch_used")), wide=True),
    Column("wasted", lambda row: _whole(moved_mb(row, "prefetch_wasted")), wide=True),
    Column("other", lambda row: _whole(moved_mb(row, "update", "write_back", "message")), wide=True),
    Column("busy % GPU", lambda row: _whole(busy_percent(row, "gpu")), wide=True),
    Column("CPU", lambda row: _whole(busy_percent(row, "cpu")), wide=True),
    Column("link", lambda row: _whole(number(row, "pcie_share", 100)), wide=True),
    Column("fresh %", fresh, wide=True),
    Column("label", lambda row: str(row.get("source_label") or "-"), right=False),
)
