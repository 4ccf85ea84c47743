"""From the parts of a format to a trace: model, phases, label, header."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from moesim.core import files
from moesim.core.files import scratch_beside
from moesim.core.gate import ROUTING, SMALLER
from moesim.core.units import format_memory
from moesim.errors import InputError, ModelError, TraceError, unknown_name
from moesim.model import ModelSpec, load_model
from moesim.model.load import model_names
from moesim.trace import SUFFIX, Trace
from moesim.trace.calibrating import Additions, check_size, extend
from moesim.trace.check import LABELS, check_ids
from moesim.trace.formats import arrays, bigmoe, llama_cpp, sglang, strata, tables
from moesim.trace.formats.contract import (
    ASKS,
    PHASES,
    ROUTED,
    TEXT_REMEDY,
    Format,
    Lacks,
    Options,
    Part,
    Probe,
    Store,
    archive_shapes,
    open_array,
    wrong,
)
from moesim.trace.formats.counts import refuse_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["IMPORTER", "LABELS", "Imported", "import_trace"]

IMPORTER = "moesim.trace.formats 1"
_SUFFIXES = (".npy", ".npz")
_PICKLE_REMEDY = "pickles are never loaded, since they can run code; save arrays with numpy.savez"
_MODEL_SUFFIX = ".model.yaml"


@dataclass(frozen=True)
class Imported:
    """Result of an import.

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
        Files of one format in the order of their requests, or folders of ``.npy`` and ``.npz`` files, in the
        order of names.
    out : Path
        The trace to write; complete or not there at all.
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
    if label is not None and label not in LABELS:
        raise InputError(f"--label {label}: expected {' or '.join(LABELS)}, got '{label}'; correct it")
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
    trace, notes = _read(files, chosen, options, label)
    trace.header["said_by_user"] = said
    with scratch_beside(out) as folder:
        if additions is not None and additions.any:
            trace = extend(trace, additions, ", ".join(file.name for file in files), folder)
        trace.write(out)
    return Imported(out, Trace.read(out, verify=False), chosen.name, notes, options.spec)


def formats() -> dict[str, Format]:
    """Return all formats by name; a new one is added here."""
    found = (
        arrays.VLLM, sglang.FORMAT, sglang.RECORDER, llama_cpp.FORMAT, bigmoe.FORMAT, strata.FORMAT, tables.JSON_LINES,
        arrays.NPZ, tables.CSV, tables.PARQUET,
    )  # fmt: skip
    return {form.name: form for form in found}


def find_format(path: Path, name: str | None) -> Format:
    """Find the format of a file."""
    probe = Probe(path)
    try:
        refuse(probe)
    except OSError as error:
        raise wrong(path, "a readable file", error.strerror, "check the path") from None
    known = formats()
    if name is not None:
        if name not in known:
            raise InputError(f"--format: {unknown_name('format', name, known)}")
        return known[name]
    refuse_counts(path, probe)
    return _only(path, probe, [form for form in known.values() if form.matches(probe)])


def _only(path: Path, probe: Probe, found: Sequence[Format]) -> Format:
    if len(found) > 1 and not probe.headless:
        engines = [form for form in found if form.name not in ("csv", "jsonl")]  # any of them is one of these, too
        found = engines or found
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(form.name for form in found)
        raise wrong(path, "content that one format explains", f"content that fits {names}", "say which with --format")
    if probe.head.startswith(b"\x93NUMPY"):
        arrays.expect(open_array(path), (None, None, None), str(path), ROUTED)  # or what else is wrong with it
    if probe.head.startswith(b"PK"):
        got = ", ".join(f"{name} {shape}" for name, shape in archive_shapes(path).items())
        raise wrong(path, f"an array of three axes, {ROUTED}", got[:300], "save it with these axes")
    got, remedy = f"a file that begins with {probe.head[:16]!r}", "name it with --format if it is one"
    if (line := probe.first_line) is not None:
        blanks = {"layer", "expert"} & {name.lower() for name in line.split()[1:]}
        remedy = "separate the columns by commas instead of blanks" if blanks else TEXT_REMEDY
        got = f"text that begins with {line[:80]!r}"
    raise wrong(path, f"a format among {', '.join(formats())}", got, remedy)


def refuse(probe: Probe) -> None:
    """Refuse a file that no format can be."""
    head, path = probe.head, probe.path
    if not head:
        raise wrong(path, "recorded routing", "an empty file", "record it again")
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        raise wrong(path, "arrays or text", "a pickle", _PICKLE_REMEDY)
    if head.startswith(b"PK") and b"data.pkl" in head and not sglang.RECORDER.matches(probe):
        raise wrong(path, "arrays or text", "a PyTorch file, which is a pickle", _PICKLE_REMEDY)
    if head[8:9] == b"{" and b"__metadata__" in head:
        raise wrong(path, "recorded routing of another program", "a safetensors file", "a trace of moesim needs no import")


def check_columns(form: Format, options: Options) -> None:
    """Check that a format has the columns of ``--column``."""
    for ours, theirs in options.columns.items():
        place = f"--column {ours}={theirs}"
        if not form.columns:
            raise InputError(
                f"{place}: expected no column, since those of {form.name} have fixed names, got '{ours}'; leave it out"
            )
        if ours not in form.columns:
            raise InputError(f"{place}: expected one of OURS in OURS=THEIRS, got {unknown_name('column', ours, form.columns)}")
    if options.axes and form.name not in ("npz", "jsonl"):
        axes = ",".join(options.axes)
        raise InputError(f"--axes {axes}: expected none, since {form.name} has axes of its own, got them; leave it out")
    if {"phase", "step"} <= set(options.columns):
        raise InputError(f"--column step={options.columns['step']}: expected it or a phase, got both; leave one out")


def check_experts(ids: NDArray[np.uint16], n_experts: int, file: Path, form: Format, part: Part, options: Options) -> None:
    """Check the expert ids of one file."""
    place = f"{file}: expert"
    if form.first_layer and ids.shape[2] > 1:
        left_out = part.facts.get("dense_layers_left_out", 0) if options.first_layer is None else options.first_layer
        _check_dense(ids, place, left_out)
    remedy = "export it again" if part.n_experts is not None else "check --n-experts or --model"
    if len(bad := np.argwhere(ids >= n_experts)):
        row, layer, rank = bad[0].tolist()
        raise wrong(f"{place}[{row}, {layer}, {rank}]", f"0..{n_experts - 1}", ids[row, layer, rank], remedy)
    check_ids(ids, n_experts, place)


def _check_dense(ids: NDArray[Any], place: str, left_out: int) -> None:
    n_zero = int(np.argmax(np.append(ids.any(axis=(0, 2)), True)))
    if not n_zero:
        return
    if n_zero == ids.shape[1]:
        raise wrong(place, "distinct experts", "zeros only, in all layers", "no routing was recorded; record it again")
    where = f"layer {left_out}" if n_zero == 1 else f"layers {left_out}..{left_out + n_zero - 1}"
    remedy = f"if {'it is' if n_zero == 1 else 'they are'} dense, give --first-layer {left_out + n_zero}"
    raise wrong(place, "distinct experts in each layer", f"zeros only in {where}", remedy)


def _said(options: Options) -> dict[str, Any]:
    names = ("model", "n_experts", "n_layers", "top_k", "first_layer", "phase", "n_prompt", "axes")
    said = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return said | ({"columns": dict(options.columns)} if options.columns else {})


def _with_model(options: Options) -> Options:
    if options.model is None:
        return options
    try:
        spec = options.spec or load_model(options.model)
    except ModelError:
        if os.path.exists(options.model) or options.model.endswith((".json", ".yaml", ".yml", ".gguf")):
            raise
        return options  # just a name
    return replace(
        options, model=spec.name, spec=spec, n_experts=options.n_experts or spec.n_experts,
        n_layers=options.n_layers or spec.n_layers, top_k=options.top_k or spec.top_k,
    )  # fmt: skip


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


def _read(files: Sequence[Path], form: Format, options: Options, label: str | None) -> tuple[Trace, tuple[str, ...]]:
    store, parts, bounds = Store(), [], [0]
    for file in files:
        if (n_bytes := file.stat().st_size) > ROUTING.most:
            raise wrong(file, f"at most {format_memory(ROUTING.most)} of {ROUTING.name}", format_memory(n_bytes), SMALLER)
        try:
            parts.append(form.read(file, options, store))
        except Lacks as lacks:
            more = [ask for ask in _lacking(form, options, label) if ask not in (*lacks.asks, *lacks.says)]
            raise _ask(lacks.place, [*lacks.asks, *more], lacks.got, options) from None
        bounds.append(store.n_rows)
    n_experts = _agreed(files, parts, "n_experts", options.n_experts, "--n-experts")
    asks = [ask for ask in _lacking(form, options, label) if not _says(parts, ask)]
    if asks:
        prompts = asks[-1] == "phase" and all(part.n_prompt is not None for part in parts)
        raise _ask(files[0], asks, "none", options, prompts)
    assert n_experts is not None
    experts, weights = store.rows()
    for file, part, begin, end in zip(files, parts, bounds[:-1], bounds[1:], strict=True):
        check_experts(experts[begin:end], n_experts, file, form, part, options)
    model = options.model or _agreed(files, parts, "model", None, "--model")
    said = _agreed(files, parts, "label", label, "--label") or form.label
    if said not in LABELS:
        raise wrong(files[0], f"a label, {' or '.join(LABELS)}", repr(said))
    if (spec := options.spec) is not None and experts.shape[1] != spec.n_layers:
        remedy = "give --first-layer if dense layers are among them, or a model's name that is only a name"
        raise wrong(files[0], f"{spec.n_layers} layers with experts as {spec.name} has", experts.shape[1], remedy)
    prefill, offset = _phases(files[0], parts, options)
    lengths = np.concatenate([part.lengths for part in parts])
    notes = tuple(f"{file.name}: {note}" for file, part in zip(files, parts, strict=True) for note in part.notes)
    header = _header(files, form, parts, options, notes, weights is not None)
    trace = Trace.build(
        experts=experts, weights=weights, n_prompt=prefill, n_decode=lengths - prefill, prompt_offset=offset,
        n_experts=n_experts, model=model or "unknown", label=said, header=header,
    )  # fmt: skip
    return trace, notes


def _lacking(form: Format, options: Options, label: str | None) -> list[str]:
    """Name what neither the options nor the format itself say."""
    known = {
        "n_experts": options.n_experts is not None, "label": bool(label or form.label),
        "phase": options.phase is not None or options.n_prompt is not None,
    }  # fmt: skip
    return [ask for ask, said in known.items() if not said]


def _says(parts: Sequence[Part], ask: str) -> bool:
    if ask == "phase":
        n = sum(part.n_prompt is not None for part in parts)
        return 0 < n < len(parts) or all(part.phased for part in parts)
    return any(getattr(part, ask) is not None for part in parts)


def _ask(place: object, asks: Sequence[str], got: object, options: Options, prompts: bool = False) -> TraceError:
    """Build the message about all that a source lacks, and the options that give it."""
    shapes = [ask for ask in asks if ask in ("n_layers", "top_k", "n_experts")]
    ways = [ASKS[ask][1] for ask in asks]
    if shapes and options.spec is None:
        ways[asks.index(shapes[-1])] += " (the --model's name gives it too)"
    if prompts:
        ways[-1] = "--phase both if the prompts have rows too, --phase decode if not: their lengths are there"
    known = ""
    if shapes and options.model is not None and options.spec is None:
        known = unknown_name("model", options.model, model_names(), "moesim list models") + "; correct --model, or "
    what, give = (" and ".join(some) if len(some) < 3 else f"{', '.join(some[:-1])} and {some[-1]}" for some in (
        [ASKS[ask][0] for ask in asks], ways))  # fmt: skip
    return wrong(place, what, got, f"{known}give {give}")


def _agreed(files: Sequence[Path], parts: Sequence[Part], name: str, given: Any, option: str) -> Any:
    known, whose = given, option
    for file, part in zip(files, parts, strict=True):
        value = getattr(part, name)
        if value is None:
            continue
        if known is not None and value != known:
            raise wrong(f"{file}: {name}", f"{known} as {whose} says", value, f"correct {option}, or import it by itself")
        known, whose = value, file.name
    return known


def _phases(place: Path, parts: Sequence[Part], options: Options) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
        raise wrong(place, f"a phase, {' or '.join(PHASES)}", repr(phase), "correct --phase")
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
        expected = f"at least the {left[request]} rows of the prompt"
        raise wrong(f"{place}: request {request}", expected, lengths[request], "check --n-prompt")
    return left, offset


def _stated_prompts(
    place: Path, said: NDArray[np.int64] | None, given: tuple[int, ...] | None, n_requests: int
) -> NDArray[np.int64] | None:
    if given is None:
        return said
    if said is not None:
        raise wrong(place, "no --n-prompt, since the file says it", "one", "leave it out")
    if len(given) not in (1, n_requests):
        expected = f"one number, or one for each of {n_requests} requests"
        raise wrong(f"{place}: --n-prompt", expected, len(given), "separate them by commas")
    return np.broadcast_to(np.asarray(given, np.int64), (n_requests,))


def _header(
    files: Sequence[Path], form: Format, parts: Sequence[Part], options: Options, notes: Sequence[str], weighted: bool
) -> dict[str, Any]:
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


def model_file(trace: Path) -> Path:
    """Return the file next to a trace that holds its model."""
    return trace.with_name(trace.stem + _MODEL_SUFFIX)


def write_model_file(imported: Imported) -> Path | None:
    """Write a model next to an imported trace."""
    trace, spec = imported.trace, imported.spec
    n_bytes = trace.header.get("expert_bytes_by_layer")
    if n_bytes is None or spec is None or len(n_bytes) != trace.n_layers:
        return None
    content = {
        "base": trace.header["said_by_user"]["model"],
        "top_k": trace.top_k,
        "expert_bytes_by_layer": n_bytes,
        "source": f"{spec.source}; bytes of experts as {trace.header['source_files'][0]['name']} records them",
    }
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    return files.write_bytes(model_file(imported.path), text.encode())
