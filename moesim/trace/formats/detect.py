"""Which format a file has: all formats, asked one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesim.errors import InputError, unknown_name
from moesim.trace.formats import bigmoe, json_lines, llama_cpp, npz, sglang, table, vllm
from moesim.trace.formats.arrays import open_archive, open_array
from moesim.trace.formats.contract import wrong
from moesim.trace.formats.format import Format
from moesim.trace.formats.probe import ROUTED, TEXT_REMEDY, Probe

_PICKLE_REMEDY = "pickles are never loaded, since they can run code; save arrays with numpy.savez"


def formats() -> dict[str, Format]:
    """Give all formats by name. A new one is added here, and nowhere else."""
    found = (
        vllm.FORMAT,
        sglang.FORMAT,
        llama_cpp.FORMAT,
        bigmoe.FORMAT,
        json_lines.FORMAT,
        npz.FORMAT,
        table.CSV,
        table.PARQUET,
    )
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
    return _only(path, probe, [form for form in known.values() if form.matches(probe)])


def _only(path: Path, probe: Probe, found: Sequence[Format]) -> Format:
    if len(found) > 1 and not probe.headless:
        engines = [form for form in found if form.name != "csv"]  # any of them is also a CSV
        found = engines or found
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(form.name for form in found)
        raise wrong(path, "content that one format explains", f"content that fits {names}", "say which with --format")
    if probe.head.startswith(b"\x93NUMPY"):
        open_array(path).expect((None, None, None), ROUTED)  # or says what else is wrong with it
    if probe.head.startswith(b"PK"):
        got = ", ".join(f"{name} {array.shape}" for name, array in open_archive(path).items())
        raise wrong(path, f"an array of three axes, {ROUTED}", got[:300], "save it with these axes")
    known = ", ".join(formats())
    raise wrong(path, f"a format among {known}", *_unknown(probe))


def _unknown(probe: Probe) -> tuple[str, str]:
    """Say what a file of no format is, and what can be done."""
    if probe.json_names:
        remedy = "if a line is a token in a layer, give --format jsonl, and --column layer=NAME, position=NAME and expert=NAME"
        return f"JSON with the fields {', '.join(probe.json_names)[:200]}", remedy
    if probe.is_json and probe.head.lstrip().startswith(b"{"):
        return "JSON that is not an object a line", "write one object a line, a token in a layer each"
    line = probe.first_line
    if line is None:
        return f"a file that begins with {probe.head[:16]!r}", "name it with --format if it is one"
    got = f"text that begins with {line[:80]!r}"
    for separator, called in (("\t", "tabs"), (";", "semicolons"), (None, "blanks")):
        if {"layer", "expert"} & {name.strip().lower() for name in line.split(separator)[1:]}:
            return got, f"separate the columns by commas instead of {called}"
    return got, TEXT_REMEDY


def refuse(probe: Probe) -> None:
    """Refuse what no format can be: nothing, a pickle, or a trace of ours."""
    head, path = probe.head, probe.path
    if not head:
        raise wrong(path, "recorded routing", "an empty file", "record it again")
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        raise wrong(path, "arrays or text", "a pickle", _PICKLE_REMEDY)
    if head.startswith(b"PK") and b"data.pkl" in head:
        raise wrong(path, "arrays or text", "a PyTorch file, which is a pickle", _PICKLE_REMEDY)
    if head[8:9] == b"{" and b"__metadata__" in head[:4096]:
        raise wrong(path, "recorded routing of another program", "a safetensors file", "a trace of moesim needs no import")
