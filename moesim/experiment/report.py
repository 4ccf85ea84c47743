"""What the terminal shows of an experiment: one line a run, with the label that says what the numbers rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.experiment.intervals import NOT_VARIED
from moesim.experiment.repeats import CI, aggregate, count_repeats
from moesim.hardware.costs import NO_CURVE
from moesim.metrics import Value
from moesim.metrics.fresh import fresh_cell, is_exact
from moesim.metrics.naming import COLUMNS, HOW, LIVE, WORKLOAD, cache_asked

Row = Mapping[str, Value]

_ORDER = ("model", "hardware", "trace", *WORKLOAD[1:], *sorted(HOW, key=lambda name: COLUMNS[name].missing is str))  # texts last
_SETTINGS = {name: COLUMNS[name].head or COLUMNS[name].word for name in _ORDER}
"""Settings that get a column where they differ between runs."""

_BYTES = ("demand", "prefetch_used", "prefetch_wasted", "update", "write_back", "message")


_OF_COSTS = (NO_CURVE, NOT_VARIED)
"""How notes begin that are long, and stand once below a table."""


def split_notes(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Divide the notes of a result."""
    notes = [note for note in str(row.get("notes") or "").split(", ") if note]
    return [n for n in notes if not n.startswith(_OF_COSTS)], [n for n in notes if n.startswith(_OF_COSTS)]


def cost_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the notes about costs of all rows, each once."""
    return list(dict.fromkeys(note for row in rows for note in split_notes(row)[1]))


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(row: Row, key: str) -> str:
    ns = _number(row, key)
    if ns is None:
        return "-"
    unit, size = ("s", NS_PER_S) if ns >= NS_PER_S else ("ms", NS_PER_MS)
    return f"{ns / size:.3g}{_interval(row, key, 1 / size)} {unit}"


def _interval(row: Row, key: str, scale: float = 1.0) -> str:
    """Write half the width of the interval of a mean over repeats, if there is one."""
    half = _number(row, CI + key)
    return "" if half is None else f" ±{half * scale:.2g}"


def _percent(row: Row, key: str) -> str:
    share = _number(row, key)
    return "-" if share is None else f"{100 * share:.1f}{_interval(row, key, 100)}"


def _fresh(row: Row) -> str:
    share = _number(row, "fidelity_fresh_decode")
    if share is None:  # nothing was decoded
        share = _number(row, "fidelity_fresh")
    if share is None:
        return "-"
    return fresh_cell(share)


def _speed(row: Row) -> str:
    value = _number(row, "decode_tokens_per_s")
    if value is None:
        return "-"
    return (f"{value:.2f}" if value < 100 else f"{value:.0f}") + _interval(row, "decode_tokens_per_s")


def _cache(row: Row) -> str:
    """Write the size asked for, and its slots where they do not follow from it: of a budget, and where not all are used."""
    asked = cache_asked(row)
    granted, used = _number(row, "cache_slots"), _number(row, "cache_slots_used")
    if granted is None:
        return asked
    if used is not None and used != granted:
        return f"{asked} ({used:g} of {granted:g} slots)"
    return asked if row.get("cache_ratio") is not None else f"{asked} ({granted:g} slots)"


def bytes_per_token(row: Row) -> str:
    """Write MB per generated token by cause: demand / used prefetch / wasted prefetch / update and everything else."""
    tokens = _number(row, "n_generated_tokens")
    moved = {cause: _number(row, f"bytes_{cause}") for cause in _BYTES}
    if not tokens or any(n is None for n in moved.values()):
        return "-"
    mb = {cause: (n or 0) / tokens / 1e6 for cause, n in moved.items()}
    rest = mb["update"] + mb["write_back"] + mb["message"]
    return "/".join(f"{n:.0f}" for n in (mb["demand"], mb["prefetch_used"], mb["prefetch_wasted"], rest))


def busy_shares(row: Row) -> str:
    """Write the busy shares in percent: GPUs / CPUs (means over devices) / links to and from GPUs."""
    shares = {key.removeprefix("utilisation."): _number(row, key) for key in row if key.startswith("utilisation.")}
    devices = {name: share for name, share in shares.items() if "->" not in name and share is not None}
    found = [[s for n, s in devices.items() if n.startswith(kind)] for kind in ("gpu", "cpu")]
    means = [f"{100 * sum(values) / len(values):.0f}" if values else "-" for values in found]
    link = _number(row, "pcie_share")
    return "/".join([*means, "-" if link is None else f"{100 * link:.0f}"])


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "policy": lambda row: str(row["policy"]),
    "cache": _cache,
    "batch": lambda row: str(row["batch_size"]),
    "TTFT": lambda row: _time(row, "ttft_mean_ns"),
    "TPOT": lambda row: _time(row, "tpot_mean_ns"),
    "tok/s": _speed,
    "hit %": lambda row: _percent(row, "hit_rate"),
    "MB/token dem/pre/waste/other": bytes_per_token,
    "busy % GPU/CPU/link": busy_shares,
    "fresh %": _fresh,
}


class _Shown(NamedTuple):
    """A table of results in texts."""

    names: list[str]
    cells: list[list[str]]
    right: list[str]  # columns of numbers
    below: list[str]  # lines that hold for all rows


def result_table(rows: Sequence[Row], form: Format) -> str:
    """Write the results of an experiment."""
    if form.for_programs:
        return render_records(rows, form)
    shown = _shown(rows)
    separator = "\n\n" if form is Format.MD else "\n"
    return render(shown.names, shown.cells, form, shown.right) + "\n" + separator.join(shown.below) + "\n"


def result_html(rows: Sequence[Row]) -> str:
    """Write the results of an experiment as a piece of HTML, for notebooks."""
    shown = _shown(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in shown.names)
    right = [' style="text-align: right"' if name in shown.right else ' style="text-align: left"' for name in shown.names]
    lines = ("".join(f"<td{how}>{escape(one)}</td>" for how, one in zip(right, cells, strict=True)) for cells in shown.cells)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    below = "<br>".join(escape(line) for line in shown.below)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{below}</p>"


def _shown(rows: Sequence[Row]) -> _Shown:
    n_repeats = count_repeats(rows)
    if n_repeats > 1:
        rows = aggregate(rows)
    varying = {key: name for key, name in _SETTINGS.items() if len({str(row.get(key)) for row in rows}) > 1}
    done = [row for row in rows if not row.get("error")]
    columns = dict(_COLUMNS)
    if len({row.get("source_label") for row in done}) > 1:
        columns["label"] = lambda row: str(row.get("source_label") or "-")
    below = _common_notes(done)
    if any(_own_notes(row, below) for row in done) or len(done) < len(rows):  # they also say why runs failed
        columns["notes"] = lambda row: ", ".join(_own_notes(row, below)) or "-"
    cells = [
        [*(_setting(row.get(key)) for key in varying), *(make(row) for make in columns.values())]
        if not row.get("error")
        else _failed(row, varying, columns)
        for row in rows
    ]
    right = [name for name in columns if name not in ("policy", "label", "notes")]
    seeds = f"mean of {n_repeats} seeds ± half the 95 % interval (Student's t)" if n_repeats > 1 else ""
    return _Shown([*varying.values(), *columns], cells, right, _footer(rows, done, seeds))


def _failed(row: Row, varying: Mapping[str, str], columns: Mapping[str, Callable[[Row], str]]) -> list[str]:
    known = [columns[name](row) for name in ("policy", "cache", "batch")]
    why = str(row.get("error")).split("; ")[0]  # the rest is the remedy, which stands in the line on standard error
    return [*(_setting(row.get(key)) for key in varying), *known, "failed", *[""] * (len(columns) - len(known) - 2), why]


def _common_notes(done: Sequence[Row]) -> list[str]:
    """List the notes of all runs, which stand once below the table."""
    notes = [split_notes(row)[0] for row in done]
    return [note for note in notes[0] if all(note in one for one in notes)] if notes else []


def _own_notes(row: Row, common: Sequence[str]) -> list[str]:
    return [note for note in split_notes(row)[0] if note not in common]


def _setting(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _footer(rows: Sequence[Row], done: Sequence[Row], seeds: str) -> list[str]:
    said = {"model": "model", "hardware": "on", "trace": "routing", "prompt_tokens": "prompt", "decode_tokens": "decode"}
    values = {key: {row.get(key) for row in rows} for key in said}
    shared = [f"{word} {next(iter(values[key]))}" for key, word in said.items() if len(values[key]) == 1]
    sources = {row.get("source_label") for row in done}
    labels = [f"weakest source of its numbers: {next(iter(sources))}"] if len(sources) == 1 and any(sources) else []
    if common := _common_notes(done):
        labels.append(f"notes: {', '.join(common)}")
    live = bool(done) and all(LIVE in str(row["notes"]) for row in done)
    lines = [", ".join(shared), "; ".join(["replayed on this machine" if live else "simulated", *labels])]
    lines += [seeds] if seeds else []
    lines += cost_notes(done)
    if any((share := _number(row, "fidelity_fresh")) is not None and not is_exact(share) for row in rows):
        lines.append("* not exact: routing is replayed as recorded, whatever the policy computed")
    return lines
