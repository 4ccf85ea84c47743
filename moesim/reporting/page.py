"""The page: text, tables, figures and timeline of a result folder, put into the template."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moesim.core.table import Format, render_records
from moesim.experiment.report import Row, is_lossy, repeated
from moesim.hardware.types import LABELS
from moesim.metrics.naming import LIVE
from moesim.reporting.answer import answer_of
from moesim.reporting.figures import csv_uri, data_uri, page_figures
from moesim.reporting.folder import TIMELINE, ResultFolder
from moesim.reporting.tables import NAMES, notes_of, result_table, settings_of
from moesim.reporting.timeline import Timeline, page_timeline

_HERE: Final = Path(__file__).parent
_SCRIPTS: Final = ("table.js", "timeline_draw.js", "timeline.js")
_MEANING: Final = {
    "measured": "timed on a machine of the kind, or recorded from the model",
    "published": "printed in a paper or a benchmark",
    "derived": "computed from measured or published numbers",
    "spec-sheet": "from a data sheet",
    "extrapolated": "read off a curve beyond its last point",
    "synthetic": "made up for the experiment",
    "assumed": "assumed, with nothing behind it",
    "oracle": "of a policy that sees the future; nobody need be able to reach it",
}
"""Source labels in words; a run carries the weakest among the numbers that it used."""


def report_page(folder: ResultFolder, *, progress: bool = False) -> str:
    """Write a result folder as one HTML page that loads nothing from anywhere.

    Parameters
    ----------
    folder : ResultFolder
        From `read_folder`.
    progress : bool
        Whether to show a progress bar while figures are drawn.

    Returns
    -------
    str
        The page; the same folder gives the same text.

    Raises
    ------
    ConfigError
        If the timeline or a figure of it cannot be read.
    """
    rows = folder.rows
    timeline = None if folder.events is None else page_timeline(folder.events, _only_policy(folder), str(folder.path / TIMELINE))
    done = [row for row in rows if not row.get("error")]
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    answer = answer_of(rows)
    figures, figure_notes = page_figures(folder, answer.figure, progress=progress)
    experiment = _mapping(folder.resolved.get("experiment"))
    runs_name, runs_uri = csv_uri("runs", render_records(rows, Format.CSV).encode())
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=str(experiment.get("name") or folder.path.resolve().name),
        description=experiment.get("description"),
        version=folder.version,
        versions=[(str(name), str(one)) for name, one in _mapping(folder.resolved.get("versions")).items()],
        key=folder.key,
        inputs=_inputs(folder.resolved),
        settings=settings_of(rows),
        resolved_uri=data_uri(folder.resolved_text.encode(), "text/plain"),
        n_runs=len(rows),
        n_failed=len(rows) - len(done),
        n_lossy=sum(is_lossy(row) for row in done),
        how=_how(done),
        labels=_labels(done),
        runs_name=runs_name,
        runs_uri=runs_uri,
        n_values=len({key for row in rows for key in row}),
        answer=answer,
        table=result_table(rows, answer.best),
        names=" ".join(sorted(NAMES)),
        repeated=repeated(rows),
        figures=figures,
        figure_notes=figure_notes,
        notes=notes_of(rows),
        timeline=timeline,
        timeline_caption=_caption(rows, timeline),
        no_timeline="There is none: the experiment was run without a timeline, or every run of it failed.",
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8").strip()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _inputs(resolved: Mapping[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    listed = []
    for kind, named in _mapping(resolved.get("inputs")).items():
        entries = []
        for name, about in _mapping(named).items():
            rest = [f"{key}: {_words(value)}" for key, value in _mapping(about).items() if key != "sha256"]
            entries.append({"name": str(name), "about": "; ".join(rest), "sha256": str(_mapping(about).get("sha256", ""))})
        if entries:
            listed.append((str(kind), entries))
    return listed


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items())
    return ", ".join(_words(one) for one in value) if isinstance(value, list) else str(value)


def _how(done: Iterable[Row]) -> str:
    live = [str(row.get("notes") or "").startswith(LIVE) or f", {LIVE}" in str(row.get("notes")) for row in done]
    if not live:
        return "no results"
    return "live replay: carried out on a machine" if all(live) else "simulated and live replay" if any(live) else "simulated"


def _labels(done: Iterable[Row]) -> list[tuple[str, str]]:
    found = {str(row["source_label"]) for row in done if row.get("source_label")}
    strongest_first = [*(label for label in LABELS if label in found), *sorted(found.difference(LABELS))]
    return [(label, _MEANING.get(label, "unknown label")) for label in strongest_first]


def _only_policy(folder: ResultFolder) -> str:
    chosen = _mapping(_mapping(folder.resolved.get("experiment")).get("timeline")).get("policies")
    names = list(dict.fromkeys(str(row["policy"]) for row in folder.rows if not row.get("error")))
    if isinstance(chosen, list) and len(chosen) == 1:
        return str(chosen[0])
    return names[0] if len(names) == 1 else ""


def _caption(rows: Sequence[Row], timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    n_steps = max(len(run["steps"]) for run in timeline.data["runs"])
    n_runs = len(timeline.data["runs"])
    names = ("model", "hardware", "trace", "cache_ratio", "cache_budget_bytes", "batch_size")
    setting = ", ".join(f"{key.replace('_', ' ')} {rows[0][key]}" for key in names if rows[0].get(key) is not None)
    what = f"The first {n_steps} steps" if n_steps > 1 else "The first step"
    whose = f" of {n_runs} policies" if n_runs > 1 else ""
    return f"{what}{whose} at the first setting of the experiment: {setting}. {timeline.n_slices:,} slices."
