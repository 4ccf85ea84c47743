"""Public recordings of routing, from Python."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.result import Answer
from moesim.core.files import OutputFolder
from moesim.core.table import Format, render, render_records, written
from moesim.core.units import format_bytes
from moesim.trace.recordings import Entry, find_entry, recordings

_WIDTH = 80
_WIDEST = 21  # characters of a column that others follow
_UNKNOWN = "not stated"


class Catalogue(Answer):
    """Public recordings of real models' routing.

    Attributes
    ----------
    entries : list of Entry
        One each, with source, licence, size, what it lacks, and the command that makes a trace of it.
    """

    _shown = ("name", "kind", "models", "lacks", "licence")

    def __init__(self, entries: list[Entry], in_full: bool) -> None:
        self.entries, self._in_full = entries, in_full

    def _rows(self) -> list[dict[str, Any]]:
        return [entry.model_dump() for entry in self.entries]

    def _text(self, form: Format) -> str:
        if form in (Format.JSON, Format.JSONL):
            return render_records(self._rows(), form)
        if form is not Format.TABLE:
            records = self._rows()
            return render(list(records[0]), [[_said(value) for value in one.values()] for one in records], form)
        if self._in_full:
            return _in_full(self.entries[0])
        rows = [[entry.name, entry.kind, _models(entry), ", ".join(entry.lacks), _said(entry.licence)] for entry in self.entries]
        return (
            render(list(self._shown), rows, form, widest=_WIDEST)
            + "`moesim trace catalogue NAME` has source, size and command of one.\n"
        )

    def _save(self, folder: Path) -> None:
        OutputFolder(folder, "trace catalogue").replace({"catalogue.csv": self._text(Format.CSV).encode()})

    def __repr__(self) -> str:
        return f"<Catalogue: {', '.join(entry.name for entry in self.entries)}>"


@checked("trace.catalogue")
def catalogue(name: str | None = None) -> Catalogue:
    """List public recordings of real models' routing; nothing is fetched.

    Parameters
    ----------
    name : str, optional
        Only this one, which ``text()`` then describes in full.

    Returns
    -------
    Catalogue
        ``entries``, ``table`` and ``text()``.

    Raises
    ------
    ConfigError
        If there is none of this name.
    """
    return Catalogue(list(recordings().values()) if name is None else [find_entry(name)], name is not None)


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
