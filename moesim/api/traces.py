"""Traces from Python: import what another program logged, describe, extend, split and export routing."""

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
from moesim.core.files import OutputFolder, scratch_beside
from moesim.core.table import Format
from moesim.errors import ConfigError, InputError, unknown_name
from moesim.experiment.routing import served
from moesim.model import ModelSpec, load_model
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.calibrating import Additions, extend, with_popularity
from moesim.trace.derived import split_experts
from moesim.trace.formats.contract import Options
from moesim.trace.formats.counts import read_counts
from moesim.trace.formats.importing import Imported, import_trace, model_file, write_model_file
from moesim.trace.formats.oracle_general import export_oracle_general
from moesim.trace.formats.tables import facts_path
from moesim.trace.formats.tabular_export import export_csv, export_parquet
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
    _one_of("phase", phase, ("decode", "prefill", "both"))
    _one_of("incomplete", incomplete, ("tokens", "layers"))
    _one_of("hold-back", hold_back, HELD_BACK)
    path, files = Path(out), [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    for one in [path] if model is None else [path, model_file(path)]:  # the model's may be written, too
        check_out(one, suffix=SUFFIX if one is path else None, overwrite=overwrite)
    spec = model if isinstance(model, ModelSpec) else None  # a name may be of no model that is known
    if isinstance(model, Mapping):
        spec = load_model(model, "--model")
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


def _one_of(name: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"--{name}: {unknown_name('word', value, known)}")


@dataclass(frozen=True)
class WrittenTrace:
    """A trace, or a file made of one, that a function of `moesim.trace` has written.

    Attributes
    ----------
    paths : list of Path
        The files written; the trace, or the file that was asked for, first.
    """

    paths: list[Path]
    _words: str = ""

    @property
    def trace(self) -> Trace:
        """The trace, read anew."""
        return Trace.read(self.paths[0])

    def text(self) -> str:
        """Describe what was written, as the command does."""
        return f"wrote {' and '.join(map(str, self.paths))}{self._words}\n"


def read_named(trace: str | Path | Trace) -> tuple[Trace, str]:
    """Read a trace unless it is read, with the name by which messages call it."""
    if isinstance(trace, Trace):
        return trace, NAMES.get(trace, trace.model)
    return Trace.read(find_trace(trace)), str(trace)


def _check_other(trace: str | Path | Trace, out: Path) -> None:
    if not isinstance(trace, Trace) and find_trace(trace).resolve() == out.resolve():
        raise InputError(f"--out {out}: expected another file than the trace that is read, got the same; choose another name")


@checked("trace.calibrate", counts="path", seed="whole")
def calibrate(
    trace: str | Path | Trace, out: str | Path, *, share: float | None = None, counts: str | Path | None = None,
    hold_back: str = "requests", seed: int = 0, weights: bool = False, scores: bool = False, overwrite: bool = False,
) -> WrittenTrace:  # fmt: skip
    """Add calibration tables, or uniform weights or scores, to a trace.

    Parameters
    ----------
    trace : str, Path or Trace
        As of `moesim.load_trace`.
    out : str or Path
        The trace to write, ``NAME.safetensors``.
    share : float, optional
        Part of the requests to count tables from; they are left out of the trace.
    counts : str or Path, optional
        Counts of each layer and expert, of another recording of the model, as a table of popularity.
    hold_back, seed, weights, scores, overwrite
        As of `moesim.trace.import_`.

    Returns
    -------
    WrittenTrace
        ``trace``, ``paths`` and ``text()``.

    Raises
    ------
    InputError
        If there is nothing to add, the trace has it, or a file is at `out`.
    """
    path = Path(out)
    _one_of("hold-back", hold_back, HELD_BACK)
    wanted = Additions(share, seed, hold_back, weights, scores)
    check_out(path, suffix=SUFFIX, overwrite=overwrite)
    _check_other(trace, path)
    if counts is not None and share is not None:
        raise InputError(f"--counts {counts}: expected no --share next to it, got {share:g}; tables have one source")
    made, name = read_named(trace)
    with scratch_beside(path) as folder:
        if counts is not None:
            made = with_popularity(made, read_counts(Path(counts), made.n_layers, made.n_experts), str(counts))
        if counts is None or wanted.any:
            made = extend(made, wanted, name, folder)
        made.write(path)
        return WrittenTrace([path], f": {describe(made)}")


@checked("trace.split")
def split(trace: str | Path | Trace, out: str | Path, *, units: int = 3, overwrite: bool = False) -> WrittenTrace:
    """Make a trace of experts' matrices, which caches copy one by one.

    Parameters
    ----------
    trace, out, overwrite
        As of `moesim.trace.calibrate`.
    units : {3, 2}
        Matrices of an expert: gate, up and down, or up and down.

    Returns
    -------
    WrittenTrace
        ``trace``, ``paths`` and ``text()``; it fits a model such as ``{"base": "mixtral-8x7b", "units_per_expert": 3}``.

    Raises
    ------
    InputError
        If the trace is split already, or a file is at `out`.
    """
    path = Path(out)
    if units not in (2, 3) or isinstance(units, bool):
        raise ConfigError(f"--units: expected 2 or 3, got {units!r}; choose one")
    check_out(path, suffix=SUFFIX, overwrite=overwrite)
    _check_other(trace, path)
    read, name = read_named(trace)
    made = split_experts(read, units, name)
    made.write(path)
    return WrittenTrace([path], f": {made.n_experts} units in each of {made.n_layers} layers, {made.top_k} of them for a token")


EXPORTS = ("oracleGeneral", "csv", "parquet")


@checked("trace.export", layer="whole", object_size="count")
def export(
    trace: str | Path | Trace, out: str | Path, *, format: str, layer: int | None = None, phase: str = "all",
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None, object_size: int | None = None, overwrite: bool = False,
) -> WrittenTrace:  # fmt: skip
    """Write the routing of a trace for other programs.

    Parameters
    ----------
    trace : str, Path or Trace
        As of `moesim.load_trace`.
    out : str or Path
        The file to write.
    format : {"oracleGeneral", "csv", "parquet"}
        ``"oracleGeneral"`` is libCacheSim's; what follows is for it alone.
    layer : int, optional
        Only this one.
    phase : {"all", "decode", "prefill"}
        Only tokens of this one.
    model : str, Path, mapping or ModelSpec, optional
        Whose experts' bytes the objects have; default: those that the source recorded.
    object_size : int, optional, bytes
        Of every object instead.
    overwrite : bool
        Replace a file that is there.

    Returns
    -------
    WrittenTrace
        ``paths`` and ``text()``.

    Raises
    ------
    InputError
        If sizes are unknown, an argument is not for the format, or a file is at `out`.
    """
    path = Path(out)
    _one_of("format", format, EXPORTS)
    _one_of("phase", phase, ("all", "decode", "prefill"))
    for one in [path, facts_path(path)] if format == "csv" else [path]:
        check_out(one, overwrite=overwrite)
    found, _ = read_named(trace)
    sizes = _object_sizes(found, model, object_size) if format == "oracleGeneral" else []
    if not sizes and (layer is not None or phase != "all" or model is not None or object_size is not None):
        raise InputError(f"--format {format}: expected no --layer, --phase, --model or --object-size, got one; leave it out")
    with all_or_none(path, facts_path(path)):
        if format == "oracleGeneral":
            written = export_oracle_general(found, path, sizes, layer=layer, phase=phase)
        else:
            written = (export_csv if format == "csv" else export_parquet)(found, path)
        note_written(written, "trace export")
    return WrittenTrace(written)


def _object_sizes(trace: Trace, model: str | Path | Mapping[str, Any] | ModelSpec | None, object_size: int | None) -> list[int]:
    """Bytes of an expert by layer: as given, of the model, or as the source recorded them."""
    if object_size is not None and model is not None:
        raise InputError("--object-size: expected it or --model, got both; leave one out")
    if object_size is not None:
        return [object_size] * trace.n_layers
    if model is not None:
        spec = model if isinstance(model, ModelSpec) else load_model(model, "--model")
        if (spec.n_layers, spec.n_experts) != (trace.n_layers, trace.n_experts):
            expected = f"{trace.n_layers} layers of {trace.n_experts} experts as the trace"
            raise InputError(f"--model {spec.name}: expected {expected}, got {spec.n_layers} of {spec.n_experts}; name another")
        return [spec.expert_bytes(layer) for layer in range(spec.n_layers)]
    recorded = trace.header.get("expert_bytes_by_layer")
    if not isinstance(recorded, list) or len(recorded) != trace.n_layers or not all(type(n) is int for n in recorded):
        raise InputError(
            "--format oracleGeneral: expected bytes of an expert, got none of the trace; give --model or --object-size"
        )
    return recorded


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

    read, name = read_named(trace)
    notes = []
    if "incomplete" in read.header:
        so_far = read.header["incomplete"]
        notes.append(f"{name}: partial, {so_far['recorded']} of {so_far['planned']} requests so far")
    return Statistics({"trace": name, **report(read, phase, max_rows=max_rows, show_progress=progress)}, notes)
