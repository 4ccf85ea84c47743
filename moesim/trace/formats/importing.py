"""From what a format hands over to a trace: whose model, which phases, what label, and a header that says where it is from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.output_folder import scratch_beside
from moesim.errors import InputError, ModelError, TraceError
from moesim.model import ModelSpec, load_model
from moesim.trace import SUFFIX, Trace
from moesim.trace.check import LABELS
from moesim.trace.formats.answers import check_columns, check_experts, check_label, shape_remedy
from moesim.trace.formats.calibrating import Additions, check_size, extend
from moesim.trace.formats.contract import PHASES, Options, Part, wrong
from moesim.trace.formats.detect import find_format
from moesim.trace.formats.format import Format
from moesim.trace.formats.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["IMPORTER", "LABELS", "Imported", "import_trace"]

IMPORTER = "moesim.trace.formats 1"
_SUFFIXES = (".npy", ".npz")


@dataclass(frozen=True)
class Imported:
    """What became of an import.

    Attributes
    ----------
    path : Path
        The trace.
    trace : Trace
        As written, mapped into memory.
    format : str
        The format found.
    notes : tuple of str
        What was left out of the sources.
    spec : ModelSpec or None
        The model, if its name is known.
    """

    path: Path
    trace: Trace
    format: str
    notes: tuple[str, ...]
    spec: ModelSpec | None


def import_trace(
    sources: Sequence[Path],
    out: Path,
    options: Options | None = None,
    *,
    form: str | None = None,
    label: str | None = None,
    additions: Additions | None = None,
) -> Imported:
    """Make a trace from what another program recorded.

    Parameters
    ----------
    sources : sequence of Path
        Files of one format in the order of their requests, or folders of ``.npy`` and ``.npz`` files, read in the
        order of their names.
    out : Path
        The trace to write; complete or not there at all. Scratch files lie in its folder meanwhile.
    options : Options, optional
        What the sources do not say.
    form : str, optional
        Name of the format; None: by content.
    label : {"measured", "synthetic"}, optional
        What the routing is, where neither the format nor the file says.
    additions : Additions, optional
        What to add that the source does not record.

    Returns
    -------
    Imported

    Raises
    ------
    TraceError
        If a source is damaged or inconsistent, with file and place.
    InputError
        If something is missing that only the user can say.
    """
    if out.suffix != SUFFIX:
        raise InputError(f"--out {out}: expected a name that ends in {SUFFIX}, got '{out.name}'; rename it")
    options = options or Options()
    check_label(label)
    said = _said(options) | ({"label": label} if label else {})
    options = _with_model(options)
    if additions is not None and options.n_experts is not None:  # what is said can be refused before anything is read
        check_size(additions, options.n_layers or 1, options.n_experts, "--n-experts")
    files = _files(sources)
    found = {file: find_format(file, form) for file in files}
    chosen = found[files[0]]
    for file in files:
        if found[file] is not chosen:
            raise wrong(file, f"the format {chosen.name} as {files[0].name}", found[file].name, "import formats apart")
    check_columns(chosen, options)
    with scratch_beside(out) as folder, Store(folder) as store:
        trace, notes = _read(files, chosen, options, label, store)
        trace.header["said_by_user"] = said
        if additions is not None and additions.any:
            trace = extend(trace, additions, ", ".join(file.name for file in files), folder)
        trace.write(out)
    return Imported(out, Trace.read(out, verify=False), chosen.name, notes, options.spec)


def _said(options: Options) -> dict[str, Any]:
    """What the header repeats of what the user said."""
    names = ("model", "n_experts", "n_layers", "top_k", "first_layer", "phase", "n_prompt")
    said = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return said | ({"columns": dict(options.columns)} if options.columns else {})


def _with_model(options: Options) -> Options:
    """Add the shape of a model whose name is known."""
    if options.model is None:
        return options
    try:
        spec = options.spec or load_model(options.model)
    except ModelError:
        if Path(options.model).suffix in (".json", ".yaml", ".yml"):
            raise
        return options  # just a name
    return replace(
        options,
        model=spec.name,
        spec=spec,
        n_experts=options.n_experts or spec.n_experts,
        n_layers=options.n_layers or spec.n_layers,
        top_k=options.top_k or spec.top_k,
    )


def _files(sources: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES)
            if not inside:
                raise wrong(source, "a folder with .npy or .npz files", "none in it", "name the files")
            files += inside
        elif source.is_file():
            files.append(source)
        else:
            raise TraceError(f"{source}: expected a file or a folder, got nothing there; check the path")
    if not files:
        raise InputError("import: expected at least one file, got none; name one")
    return files


def _read(
    files: Sequence[Path], form: Format, options: Options, label: str | None, store: Store
) -> tuple[Trace, tuple[str, ...]]:
    parts, bounds = [], [0]
    for file in files:
        parts.append(form.read(file, options, store))
        bounds.append(store.n_rows)
    n_experts = _agreed(files, parts, "n_experts", options.n_experts, "--n-experts")
    if n_experts is None:
        remedy = shape_remedy(options, "give --n-experts, or the --model's name")
        raise wrong(files[0], "the number of experts of a layer", "no word of it", remedy)
    for file, part, begin, end in zip(files, parts, bounds[:-1], bounds[1:], strict=True):
        check_experts(store.columns()[begin:end], n_experts, file, form, part, options)
    model = options.model or _agreed(files, parts, "model", None, "--model")
    experts, weights = store.finish(n_experts)
    _check_shape(files[0], experts.shape, options.spec)
    prefill, offset = _phases(files[0], parts, options)
    lengths = np.concatenate([part.lengths for part in parts])
    notes = tuple(f"{file.name}: {note}" for file, part in zip(files, parts, strict=True) for note in part.notes)
    header = _header(files, form, parts, options, notes, weights is not None)
    trace = Trace.build(
        experts=experts,
        weights=weights,
        n_prompt=prefill,
        n_decode=lengths - prefill,
        prompt_offset=offset,
        n_experts=n_experts,
        model=model or "unknown",
        label=_label(files, form, parts, label),
        header=header,
    )
    return trace, notes


def _agreed(files: Sequence[Path], parts: Sequence[Part], name: str, given: Any, option: str) -> Any:
    """What all sources say, or the user; they must not contradict each other."""
    known, whose = given, option
    for file, part in zip(files, parts, strict=True):
        value = getattr(part, name)
        if value is None:
            continue
        if known is not None and value != known:
            raise wrong(f"{file}: {name}", f"{known} as {whose} says", value, f"correct {option}, or import it by itself")
        known, whose = value, file.name
    return known


def _check_shape(place: Path, shape: tuple[int, ...], spec: ModelSpec | None) -> None:
    if spec is not None and shape[1] != spec.n_layers:
        remedy = "give --first-layer if dense layers are among them, or a model's name that is only a name"
        raise wrong(place, f"{spec.n_layers} layers with experts as {spec.name} has", shape[1], remedy)


def _label(files: Sequence[Path], form: Format, parts: Sequence[Part], label: str | None) -> str:
    said = _agreed(files, parts, "label", label, "--label") or form.label
    if said not in LABELS:
        got = "no word of it" if said is None else repr(said)
        remedy = "nothing in this format says whether an engine recorded it; give --label"
        raise wrong(files[0], f"a label, {' or '.join(LABELS)}", got, remedy)
    return str(said)


def _phases(place: Path, parts: Sequence[Part], options: Options) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decide how many of the rows of each request are prefill, and at which position the first lies."""
    lengths = np.concatenate([part.lengths for part in parts])
    offset = np.concatenate([np.zeros_like(p.lengths) if p.offset is None else np.asarray(p.offset) for p in parts])
    recorded = [part.n_prompt for part in parts if part.n_prompt is not None]
    if 0 < len(recorded) < len(parts):
        raise wrong(place, "prompt lengths in all files or in none", "a mixture", "import them apart")
    said = np.concatenate(recorded) if recorded else None
    if all(part.phased for part in parts) and said is not None:
        if options.phase is not None or options.n_prompt is not None:
            raise wrong(place, "no --phase and no --n-prompt, since the file says both", "one of them", "leave it out")
        return said, offset
    n_prompt = _stated_prompts(place, said, options.n_prompt, len(lengths))
    phase = options.phase or ("both" if options.n_prompt is not None else None)
    if phase not in PHASES:
        remedy = "give --phase decode or prefill for all rows, or --n-prompt with the rows of the prompt that come first"
        if said is not None:
            remedy = "the lengths of the prompts are there: give --phase both if their rows are too, --phase decode if not"
        raise wrong(place, "the phase of the rows", "no word of it" if phase is None else repr(phase), remedy)
    if phase == "prefill":
        return lengths, offset
    if phase == "decode":
        return np.zeros_like(lengths), offset if n_prompt is None else np.where(offset > 0, offset, n_prompt)
    if n_prompt is None:
        raise wrong(place, "prompt lengths for --phase both", "none", "give --n-prompt")
    left = np.maximum(n_prompt - offset, 0)  # of the prompt's tokens, some may have been left out
    short = np.flatnonzero(left > lengths)
    if len(short):
        request = int(short[0])
        raise wrong(
            f"{place}: request {request}",
            f"at least the {left[request]} rows of the prompt",
            lengths[request],
            "check --n-prompt",
        )
    return left, offset


def _stated_prompts(
    place: Path, said: NDArray[np.int64] | None, given: tuple[int, ...] | None, n_requests: int
) -> NDArray[np.int64] | None:
    if given is None:
        return said
    if said is not None:
        raise wrong(place, "no --n-prompt, since the file says it", "one", "leave it out")
    if len(given) not in (1, n_requests):
        raise wrong(
            f"{place}: --n-prompt", f"one number, or one for each of {n_requests} requests", len(given), "separate them by commas"
        )
    return np.broadcast_to(np.asarray(given, np.int64), (n_requests,))


def _header(
    files: Sequence[Path], form: Format, parts: Sequence[Part], options: Options, notes: Sequence[str], weighted: bool
) -> dict[str, Any]:
    """Say where the trace is from and what its source lacks."""
    absent = ["scores", "signals", "calibration tables", "gate inputs"]
    absent += [] if weighted else ["weights"]
    absent += [] if options.model or any(part.model for part in parts) else ["model"]
    facts: dict[str, Any] = {}
    for file, part in zip(files, parts, strict=True):
        for key, value in part.facts.items():
            if key == "requests":
                facts.setdefault(key, []).extend(value)
            elif facts.setdefault(key, value) != value:
                raise wrong(f"{file}: {key}", "what the files before say", "something else", "import it by itself")
    return {
        "source": f"imported:{form.name}",
        "importer": IMPORTER,
        "source_files": [{"name": file.name, "bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files],
        "absent": sorted(absent),
        "left_out": list(notes),
        **facts,
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
