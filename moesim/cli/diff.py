"""``moesim diff``: where the time of two runs went."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.options import Inputs, Printed, Trust
from moesim.core.table import Format, render, render_records
from moesim.core.text import shown
from moesim.core.units import NS_PER_MS, NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    from moesim.studies.diff import Diff, Entry

_MOST = 8  # layers that are told
_WIDTH = 60  # characters of a setting in words


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="DIR if it holds one run, DIR:NUMBER, or DIR:POLICY.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run to compare it with.")],
    form: Printed = Format.TABLE,
    trust: Trust = False,
    inputs: Inputs = None,
) -> int:
    """Compare two runs of result folders: settings, time by cause, phase and layer, bytes, hit rates. Differences are B less A.

    A run whose records are not in its folder is simulated again; that needs its trace, and policies that are not moesim's own
    need --trust.

    Example: moesim diff results/quickstart:0 results/quickstart:3
    """
    from moesim.experiment.folder import outcome_of
    from moesim.studies.diff import Diff, find_run

    read = partial(outcome_of, trust=trust, inputs=inputs)
    sys.stdout.write(text_of(Diff.of(find_run(run_a, read), find_run(run_b, read)), run_a, run_b, form))
    return 0


def text_of(found: Diff, name_a: str, name_b: str, form: Format) -> str:
    """Write a comparison."""
    named = (("A", name_a, found.a), ("B", name_b, found.b))
    if form.for_programs:
        labels = {"run_a": name_a, "run_b": name_b, "label_a": _label(found.a.row), "label_b": _label(found.b.row)}
        return render_records([{**entry.record(), **labels} for entry in found.entries()], form)
    sides = [f"{x}: {name}: {side.row['policy']} ({_label(side.row)})" for x, name, side in named]
    parts = [("\n\n" if form is Format.MD else "\n").join(map(shown, sides)) + "\n"]
    parts.append(_section("settings that differ", ["setting", "A", "B"], _words(found.settings(), form), form))
    head = ["", "A", "B", "B - A", "change"]
    parts.append(_section("speed", head, map(_cells, found.speeds()), form))
    parts.append(_section("time by cause", head, map(_cells, found.times()), form))
    for phase, what in (("prefill", "prompt token"), ("decode", "decoded token")):
        per_token = found.times(phase, per_token=True)
        if per_token:
            parts.append(_section(f"{phase}, for each {what}", head, map(_cells, per_token), form))
    parts.append(_layers(found, form))
    parts.append(_section("bytes over links", head, map(_cells, found.bytes()), form))
    parts.append(_section("rates and counts", head, map(_cells, found.rates()), form))
    return "\n".join(part for part in parts if part)


def _label(row: Any) -> str:
    return f"{row.get('source_label')}, {row.get('routing')} routing"


def _section(title: str, head: Sequence[str], rows: Iterable[list[str]], form: Format) -> str:
    cells = list(rows)
    title = f"### {title}\n\n" if form is Format.MD else f"{title}\n"
    return title + (render(head, cells, form, right=head[1:] if len(head) > 3 else ()) if cells else "none\n")


def _words(entries: Sequence[Entry], form: Format) -> list[list[str]]:
    """Write settings in words; long ones, such as notes, go on in further rows."""
    rows = []
    for entry in entries:
        sides = ["-" if v is None else str(v) for v in (entry.a, entry.b)]
        if form is Format.TABLE:
            wrapped = [textwrap.wrap(side, _WIDTH, break_on_hyphens=False) for side in sides]
            rows += [[key, *parts] for key, *parts in zip_longest([entry.key], *wrapped, fillvalue="")]
        else:
            rows.append([entry.key, *sides])
    return rows


def _cells(entry: Entry) -> list[str]:
    change = "-"
    if entry.difference is not None and entry.a:
        change = f"{100 * entry.difference / entry.a:+z.1f} %"
    sides = [_value(v, entry.unit) for v in (entry.a, entry.b)]
    return [entry.key, *sides, _value(entry.difference, entry.unit, sign=True), change]


def _value(value: Any, unit: str, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if unit == "ns":
        scale, word = next(
            (s, w) for s, w in ((NS_PER_S, "s"), (NS_PER_MS, "ms"), (NS_PER_US, "us"), (1, "ns")) if abs(value) >= s or s == 1
        )
        return f"{value / scale:{plus}z.4g} {word}"
    if unit == "bytes":
        return f"{value / 1e9:{plus}z.4g} GB" if abs(value) >= 1e9 else f"{value / 1e6:{plus}z.4g} MB"
    return f"{value:{plus},}" if isinstance(value, int) else f"{value:{plus}z.4g}"


def _layers(found: Diff, form: Format) -> str:
    from moesim.studies.diff import OUTSIDE, most_different

    if not found.by_layer:
        numbers = f"{found.a.n_layers} and {found.b.n_layers}"
        return f"by layer: not compared, for the models have {numbers} layers with experts; the causes above are of whole runs\n"
    entries = found.layers()
    most = most_different(entries, _MOST)
    rows = []
    for layer, difference, causes in most:
        name = "outside the layers" if layer == OUTSIDE else str(layer)
        told = ", ".join(f"{e.key} {_value(e.difference, 'ns', sign=True)}" for e in causes[:3])
        rows.append([name, _value(difference, "ns", sign=True), told])
    whole = sum(abs(difference) for _, difference, _ in most_different(entries, len(entries)))
    share = sum(abs(difference) for _, difference, _ in most) / whole if whole else 0.0
    title = (
        f"layers with the largest difference ({len(most)} of {found.a.n_layers}, {100 * share:.0f} % of the differences of all)"
    )
    return _section(title, ["layer", "B - A", "of which"], rows, form)
