"""``moesim papers --audit``: printed speed-ups beside the largest that machines around the papers' own give."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format, render, render_records
from moesim.errors import ConfigError
from moesim.experiment.config import Config
from moesim.experiment.workers import Workers
from moesim.studies.league.meetings import Meetings
from moesim.studies.papers.audit import FACTOR, Audited, audit, machines
from moesim.studies.papers.published import Published

_OWNER = "papers"
_KEPT = "audit"  # folder of the runs


def audited(rows: Sequence[Published], configs: Mapping[str, Config], jobs: int | None, out: Path | None, form: Format) -> int:
    """Carry out an audit, print it, and write ``audit.csv``."""
    if out is not None:
        check_own_folder(out, _OWNER)
        OutputFolder(out, _OWNER).mark()
    with Workers(jobs) as workers:
        meetings = Meetings("papers --audit", workers, None if out is None else out / _KEPT, progress=True)
        found = audit(rows, configs, meetings)
    if not found:
        raise ConfigError("papers --audit: expected a printed speed-up that runs answer, got none; name another figure")
    sys.stdout.write(table(found, form))
    if out is not None:
        OutputFolder(out, _OWNER).put({"audit.csv": table(found, Format.CSV).encode()})
    return 0


def table(found: Sequence[Audited], form: Format) -> str:
    """Write claims, as printed, on the paper's own machine, and at most."""
    if form.for_programs:
        return render_records([one.record() for one in found], form)
    head = ["figure", "claim", "printed", "own machine", "at most", "on", "within"]
    rows = [
        [
            one.published.name,
            one.published.what,
            *(_figure(value, one) for value in (one.published.published, one.own, one.largest)),
            one.machine,
            "yes" if one.within else "no",
        ]
        for one in found
    ]
    within = sum(one.within for one in found)
    notes = [
        f"at most: the largest ratio, or for a loss the smallest, of {len(machines())} machines: the paper's own, and those "
        f"whose link, CPU memory, CPU operations and GPU memory have {FACTOR} times or 1/{FACTOR} of its rates",
        f"{within} of {len(found)} printed ratios are within reach of one of these machines",
    ]
    return render(head, rows, form, head[2:5]) + "\n" + ("\n\n" if form is Format.MD else "\n").join(notes) + "\n"


def _figure(value: float, one: Audited) -> str:
    return f"{value:.3g} %" if one.published.kind == "gain" else f"x{value:.3g}"
