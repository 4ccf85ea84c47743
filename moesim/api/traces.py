"""Traces from Python: import what another program logged, and describe routing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.outputs import all_or_none, check_out, note_written
from moesim.api.result import Answer
from moesim.api.run import NAMES
from moesim.core.files import OutputFolder
from moesim.core.table import Format
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.routing import served
from moesim.model import ModelSpec, load_model
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.calibrating import Additions
from moesim.trace.formats.contract import Options
from moesim.trace.formats.importing import Imported, import_trace, model_file, write_model_file
from moesim.trace.parts import HELD_BACK


@dataclass(frozen=True)
class ImportedTrace(Imported):
    """A trace that `moesim.trace.import_` has written.

    Attributes
    ----------
    model_file : Path or None
        The model with the bytes of experts that the source records, for ``model:`` of an experiment.
    """

    model_file: Path | None

    def text(self) -> str:
        """Describe what was imported, what is absent, and which policies it serves, as the command does."""
        trace = self.trace
        shape = (
            f"{trace.n_layers} layer{'s' * (trace.n_layers != 1)} x {trace.n_experts} experts, top-{trace.top_k}, {trace.label}"
        )
        lines = [
            f"wrote {self.path} from {self.format}: {shape}, {describe(trace)}", f"absent: {', '.join(trace.header['absent'])}",
            *self.notes, *served(trace, str(self.path)),
        ]  # fmt: skip
        if self.model_file is not None:
            lines.append(f"wrote {self.model_file}, for `model: {self.model_file}` of an experiment")
        elif "expert_bytes_by_layer" in trace.header:
            lines.append("the bytes of experts are in the header only: give --model a built-in name or a config.json")
        return "\n".join(lines) + "\n"


def describe(trace: Trace) -> str:
    """Describe what a trace holds and what was added to it."""
    size = f"{trace.n_rows} token{'s' * (trace.n_rows != 1)} of {trace.n_requests} request{'s' * (trace.n_requests != 1)}"
    tables = [f"tables {', '.join(sorted(trace.tables))}"] if trace.tables else []
    signals = [f"signals {', '.join(sorted(trace.signals))}"] if trace.signals else []
    return "; ".join([size, *trace.remarks, *tables, *signals])


@checked("import_", n_experts="count", n_layers="count", top_k="count", columns="mapping")
def import_(
    sources: str | Path | Sequence[str | Path], out: str | Path, *, format: str | None = None,
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None, label: str | None = None, n_experts: int | None = None,
    n_layers: int | None = None, top_k: int | None = None, first_layer: int | None = None, phase: str | None = None,
    n_prompt: int | Sequence[int] | None = None, axes: Sequence[str] | None = None, columns: Mapping[str, str] | None = None,
    incomplete: str = "tokens", calibrate: float | None = None, hold_back: str = "requests", seed: int = 0,
    weights: bool = False, scores: bool = False, overwrite: bool = False,
) -> ImportedTrace:  # fmt: skip
    """Make a trace from routing that an engine or a script logged.

    Parameters
    ----------
    sources : str, Path, or sequence of them
        Files of one format, or folders of npy and npz files.
    out : str or Path
        The trace to write, ``NAME.safetensors``.
    format : str, optional
        Of ``moesim list formats``; default: by content.
    model : str, Path, mapping or ModelSpec, optional
        Whose routing it is; one that `moesim.load_model` knows gives its shape.
    label : {"measured", "synthetic"}, optional
        Where neither the format nor the file says what the routing is.
    n_experts, n_layers, top_k, first_layer : int, optional
        Sizes that the source lacks; layers before `first_layer` are dense and left out.
    phase : {"decode", "prefill", "both"}, optional
        Of all rows, where the source does not say.
    n_prompt : int or sequence of int, optional
        Prompt tokens of all requests, or of each.
    axes : sequence of str, optional
        Axes of an array in their order: ``tokens``, ``layers`` and ``ids``.
    columns : mapping, optional
        Our name of a column or array -> its name in the source.
    incomplete : {"tokens", "layers"}
        Leave out tokens, or layers, where the first tokens of a request lack a layer.
    calibrate : float, optional
        Part of the requests to count calibration tables from; they are left out of the trace.
    hold_back : {"requests", "ends"}
        With it: whole requests, or the last tokens of each.
    seed : int
        Of the choice of requests.
    weights, scores : bool
        Give each chosen expert the same weight, or score, where none was recorded.
    overwrite : bool
        Replace files that are there.

    Returns
    -------
    ImportedTrace
        ``trace``, ``path``, ``format``, ``notes``, ``model_file`` and ``text()``.

    Raises
    ------
    InputError
        If a source is damaged, something is missing that only you can say, or a file is at `out`.
    """
    for name, value, known in (
        ("phase", phase, ("decode", "prefill", "both")), ("incomplete", incomplete, ("tokens", "layers")),
        ("hold_back", hold_back, HELD_BACK),
    ):  # fmt: skip
        if value is not None and value not in known:
            raise ConfigError(f"import_: {unknown_name(name, str(value), known)}")
    path, files = Path(out), [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    for one in [path] if model is None else [path, model_file(path)]:  # the model's may be written, too
        check_out(one, suffix=SUFFIX if one is path else None, overwrite=overwrite, option="import_: out:")
    spec = model if isinstance(model, ModelSpec) else None  # a name may be of no model that is known
    if isinstance(model, Mapping):
        spec = load_model(model, "import_: model")
    options = Options(
        model=None if model is None else str(model) if spec is None else spec.name, spec=spec, n_experts=n_experts,
        n_layers=n_layers, top_k=top_k, first_layer=first_layer, phase=phase,
        n_prompt=(n_prompt,) if isinstance(n_prompt, int) else None if n_prompt is None else tuple(n_prompt),
        columns=columns or {}, incomplete=incomplete, axes=None if axes is None else tuple(axes),
    )  # fmt: skip
    with all_or_none(path, model_file(path)):
        imported = import_trace(
            [Path(one) for one in files], path, options, form=format, label=label,
            additions=Additions(calibrate, seed, hold_back, weights, scores),
        )  # fmt: skip
        written = write_model_file(imported)
        if written is not None:
            note_written([written], "trace import")
    return ImportedTrace(**vars(imported), model_file=written)


class Statistics(Answer):
    """Statistics of a trace, as `moesim.stats` returns them.

    Attributes
    ----------
    found : dict
        All that was counted, with every layer, as ``moesim trace stats -o json`` prints it.
    notes : list of str
        What limits it, such as a recording that has not ended.
    """

    def __init__(self, found: dict[str, Any], notes: list[str]) -> None:
        self.found, self.notes = found, notes

    def figures(self) -> dict[str, bytes]:
        """Draw the figures, as PNG and PDF by name of file."""
        from moesim.plots.trace_report import draw  # Matplotlib takes most of a second to import

        return draw(self.found)

    def left_out(self) -> dict[str, str]:
        """Figures that cannot be drawn, and why."""
        from moesim.plots.trace_report import left_out

        return left_out(self.found)

    def _rows(self) -> list[dict[str, Any]]:
        from moesim.trace.stats.report import summary

        return [row._asdict() for row in summary(self.found, full=True)]

    def _text(self, form: Format) -> str:
        from moesim.trace.stats.report import table

        return table(self.found, form)

    def _save(self, folder: Path) -> None:
        OutputFolder(folder, "trace stats", owned=False).put(self.figures())

    def __repr__(self) -> str:
        return f"<Statistics: {self.found['trace']}, {self.found['n_rows']} {self.found['phase']} tokens>"


@checked("stats", max_rows="count")
def stats(
    trace: str | Path | Trace, *, phase: str | None = None, max_rows: int | None = None, progress: bool = True
) -> Statistics:
    """Describe the routing of a trace: balance, locality, prediction, caches, batching.

    Parameters
    ----------
    trace : str, Path or Trace
        As of `moesim.load_trace`.
    phase : {"decode", "prefill"}, optional
        Default: decode, unless it has none.
    max_rows : int, optional
        Stop after about so many tokens.
    progress : bool
        Show a bar.

    Returns
    -------
    Statistics
        ``table``, ``text()``; ``save(folder)`` draws the figures, as ``moesim trace stats --plot`` does.

    Raises
    ------
    TraceError
        If there is no such trace, it is damaged, or has no tokens of the phase.
    """
    from moesim.trace.stats.report import report

    read = trace if isinstance(trace, Trace) else Trace.read(find_trace(trace))
    name = NAMES.get(trace, trace.model) if isinstance(trace, Trace) else str(trace)
    notes = []
    if "incomplete" in read.header:
        so_far = read.header["incomplete"]
        notes.append(f"{name}: partial, {so_far['recorded']} of {so_far['planned']} requests so far")
    return Statistics({"trace": name, **report(read, phase, max_rows=max_rows, show_progress=progress)}, notes)
