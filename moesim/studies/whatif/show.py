"""The output of ``moesim whatif``: tables of varied settings and of knobs, and files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_MS, NS_PER_S, format_size
from moesim.experiment.report import cost_notes, split_notes
from moesim.metrics.fidelity import fresh_cell
from moesim.metrics.frames import frame_bytes
from moesim.studies.whatif.drafts import KNOB as DRAFTS
from moesim.studies.whatif.drafts import VALUES
from moesim.studies.whatif.knobs import KNOBS, knob_of
from moesim.studies.whatif.settings import quantity
from moesim.studies.whatif.study import Line, records


def files_of(lines: Sequence[Line], small: bool = False) -> dict[str, bytes]:
    """Return ``whatif.parquet`` and ``.csv``: a row a varied setting; `small` as of `table`."""
    rows = records_of(lines, small)
    return {"whatif.parquet": frame_bytes(rows), "whatif.csv": render_records(rows, Format.CSV).encode()}


def knob_table(form: Format) -> str:
    """Write the table of knobs."""
    rows = [(knob.name, knob.values, knob.changes) for knob in KNOBS.values()]
    rows.append((DRAFTS, VALUES, "tokens drafted, from 1 on; alone: the ratio, and from which acceptance on they pay"))
    rows.append(("any key", "a value; xF, ±P% of a number", "of the experiment or the hardware profile, as --set spells it"))
    if form.for_programs:
        return render_records([dict(zip(("knob", "values", "changes"), row, strict=True)) for row in rows], form)
    return render(["knob", "values", "what it changes"], rows, form)


def records_of(lines: Sequence[Line], small: bool) -> list[dict[str, Any]]:
    """Return one row a varied setting."""
    return [{**record, "quick": small} for record in records(lines)]


def table(lines: Sequence[Line], form: Format, small: bool = False) -> str:
    """Write varied settings."""
    if form.for_programs:
        return render_records(records_of(lines, small), form)
    batches = {line.shot.row.get("batch_size") for line in lines}
    speed = f"tok/s, batch {batches.pop()}" if len(batches) == 1 else "tok/s"
    head = ["policy", "what if", speed, "change", "TTFT", "change", "limited by", "next limit on this way", "label"]
    cells = [_cells(line) for line in lines]
    inexact = any(_fresh(line).endswith("*") for line in lines)
    if inexact:
        head.insert(6, FRESH)
        for line, row in zip(lines, cells, strict=True):
            row.insert(6, _fresh(line))
    text = render(head, cells, form, right=[*head[2:6], FRESH])
    between = "\n\n" if form is Format.MD else "\n"
    return text + "\n" + between.join(_notes(lines, small, inexact)) + "\n"


FRESH = "fresh %"


def _fresh(line: Line) -> str:
    return "-" if line.fresh is None else fresh_cell(line.fresh)


def _cells(line: Line) -> list[str]:
    row, limits = line.shot.row, line.shot.limits
    policy = f"{line.policy} (oracle)" if line.is_oracle else line.policy
    if limits is None:
        return [policy, line.name, "failed", "-", "-", "-", "-", "-", "-"]
    before = line.base.limits
    assert before is not None
    limit = limits.text() or "nothing"
    if limits.limit != before.limit:
        limit += f" (before: {before.limit})"
    speed, first = row.get("decode_tokens_per_s"), row.get("ttft_mean_ns")
    return [
        policy, line.name, _figures(speed) if isinstance(speed, int | float) else "-",
        _change(line, "decode_tokens_per_s"), _time(first), _change(line, "ttft_mean_ns"), limit, _next(line),
        str(row.get("source_label")),
    ]  # fmt: skip


_NO_EFFECT = {"not limiting": "none: not limiting", "not used": "none: not used", "same": "-"}


def _change(line: Line, key: str) -> str:
    if line.effect in _NO_EFFECT:
        return _NO_EFFECT[line.effect] if key == "decode_tokens_per_s" else "-"
    change = line.change(key)
    if change is None:
        return "-"
    text = f"{100 * change:+z.1f}"
    told = "0.0" if text == "+0.0" else text  # no sign where it rounds to nothing
    return f"{told} %{'*' if line.uneven else ''}{' !' if key in line.anomalies else ''}"


def _figures(value: float) -> str:
    """Write three figures, zeros at the end as well, so that 15.0 stands below 14.9."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(rounded)))}f}" if rounded > 0 else "0"


def _time(ns: object) -> str:
    if not isinstance(ns, int | float):
        return "-"
    return f"{_figures(ns / NS_PER_S)} s" if ns >= NS_PER_S else f"{_figures(ns / NS_PER_MS)} ms"


def _next(line: Line) -> str:
    crossing = line.crossing
    if crossing is None:
        return "-"
    if crossing.limit is not None:
        return f"{crossing.limit} from {_factor(float(crossing.factor))}{_value(line)}"
    far = (
        f"no change up to {_factor(float(crossing.factor))}"
        if crossing.factor >= 1
        else f"no change down to {_factor(float(crossing.factor))}"
    )
    return far + (", beyond which it does not run" if crossing.error else "")


def _factor(factor: float) -> str:
    if factor < 1 and abs(1 / factor - round(1 / factor)) < 1e-9:
        return f"x1/{round(1 / factor)}"
    return f"x{factor:.3g}"


def _value(line: Line) -> str:
    return "" if line.at is None else f" ({quantity(line.at, knob_of(line.settings[0].knob).unit)})"


def _as_it_is(row: Mapping[str, Any]) -> str:
    ratio, budget = row.get("cache_ratio"), row.get("cache_budget_bytes")
    memory = f"{ratio:g}" if ratio is not None else format_size(budget or 0)
    told = {
        "batch": row.get("batch_size"),
        "cache": memory,
        "prompt": row.get("prompt_tokens"),
        "decode": row.get("decode_tokens"),
    }
    return "as it is: " + ", ".join(f"{name} {'as recorded' if value is None else value}" for name, value in told.items())


def _notes(lines: Sequence[Line], small: bool, inexact: bool) -> list[str]:
    first = lines[0].base.row
    labels = dict.fromkeys(", ".join(split_notes(line.base.row)[0]) for line in lines)
    notes = [
        f"{first['model']} on {first['hardware']}, routing {first['trace']} ({'; '.join(labels)}); simulated",
        *cost_notes([line.shot.row for line in lines]),
        _as_it_is(first),
        "limited by: where decoding spends its time, largest shares first; the part (link, CPU, GPU ...) with most is the limit",
        "next limit on this way: change the knob this far, to 5 %, and the run has another limit; searched up to x8 or x1/8",
        "label: the weakest source among the numbers used; a scaled number is at best derived, a given one is assumed",
    ]
    if any(line.shot.limits and line.shot.limits.shares["GPU launches"] > 0 for line in lines):
        notes.append("GPU launches: starting kernels and telling the host what the router chose; no faster on a faster GPU")
    if any(line.effect == "not used" for line in lines):
        notes.append("none: not used: the run uses none of the changed numbers; not limiting: it uses them, and takes as long")
    if inexact:
        notes.append(f"* in {FRESH}: not exact: routing is replayed as recorded, whatever the policy computed")
    odd = [f"{line.policy}, {line.name}" for line in lines if line.anomalies]
    if odd:
        notes.append(f"! faster with less, or slower with more: a schedule's anomaly, or memory that two share: {'; '.join(odd)}")
    uneven = {line.name: ", ".join(line.uneven) for line in lines if line.uneven}
    notes += [
        f"* {name}: {costs}: measured curve on one side, ceilings of the device on the other" for name, costs in uneven.items()
    ]
    done = {line.name: line.changed.note for line in lines if line.changed.note}
    notes += [f"{name}: {note}" for name, note in done.items()]
    return [*notes, "made small by --quick: these numbers say nothing about the experiment"] if small else notes
