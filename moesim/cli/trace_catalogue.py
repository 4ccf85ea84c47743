"""``moesim trace catalogue``: public recordings of routing."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Annotated, Any

import typer

from moesim.cli.options import Printed
from moesim.core.table import Format, render, render_records, written
from moesim.core.text import shown_lines
from moesim.core.units import format_bytes
from moesim.trace.catalogue import Entry, catalogue, find_entry

_WIDTH = 80
_WIDEST = 21  # characters of a column that others follow
_UNKNOWN = "not stated"


def trace_catalogue(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="An entry to show in full.", show_default=False)] = None,
    form: Printed = Format.TABLE,
) -> None:
    """List public recordings of real models' routing.

    What each lacks, its licence, and the command that makes a trace of it.

    `routing` can be imported. Of `counts` and `figures` the command makes a synthetic trace instead. Nothing is fetched.

    Example: moesim trace catalogue gpt-oss-20b
    """
    entries = [find_entry(name)] if name is not None else list(catalogue().values())
    if form in (Format.JSON, Format.JSONL):
        sys.stdout.write(render_records([entry.model_dump() for entry in entries], form))
    elif form is Format.TABLE and name is not None:
        sys.stdout.write(shown_lines(_in_full(entries[0])))
    elif form is Format.TABLE:
        rows = [[entry.name, entry.kind, _models(entry), ", ".join(entry.lacks), _said(entry.licence)] for entry in entries]
        sys.stdout.write(render(["name", "kind", "models", "lacks", "licence"], rows, form, widest=_WIDEST))
        sys.stdout.write("`moesim trace catalogue NAME` has source, size and command of one.\n")
    else:
        records = [entry.model_dump() for entry in entries]
        sys.stdout.write(render(list(records[0]), [[_said(value) for value in one.values()] for one in records], form))


def _said(value: Any) -> str:
    return _UNKNOWN if value is None else written(value)


def _models(entry: Entry) -> str:
    return ", ".join(entry.models) or _UNKNOWN


def _in_full(entry: Entry) -> str:
    """Write an entry as lines of ``key: value``, the command ready to be copied."""
    facts = {
        entry.name: f"{entry.kind} of {_models(entry)}",
        "repository": entry.repository,
        "revision": entry.revision,
        "licence": entry.licence,
        "files": entry.files,
        "bytes": entry.bytes and format_bytes(entry.bytes),
        "shape": entry.shape and "{layers} layers x {experts} experts, top-{top_k}".format(**dict(entry.shape)),
        "size": entry.size and written({key.replace("_", " "): f"{value:,}" for key, value in entry.size}),
        "lacks": ", ".join(entry.lacks),
        "format": entry.format or "none that can be imported",
    }
    lines = [_filled(f"{key}: {_said(value)}") for key, value in facts.items()]
    lines += ["", textwrap.fill(entry.note, _WIDTH, break_on_hyphens=False)]
    if entry.command is not None:
        lines += ["", _to_be_copied(entry.command)]
    return "\n".join(lines) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False, subsequent_indent="    ")


def _to_be_copied(command: str) -> str:
    """Divide a command into lines for a shell; an option stays with its value."""
    joined = re.sub(r"(--\S+) (?!--)", "\\1\0", command)
    lines = textwrap.wrap(joined, _WIDTH - 2, break_on_hyphens=False, break_long_words=False, subsequent_indent="    ")
    return " \\\n".join(lines).replace("\0", " ")
