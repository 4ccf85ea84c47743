"""Print what a command found, and write its files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.core.files import OutputFolder
from moesim.core.table import Format, wrapped
from moesim.core.text import complain, say

if TYPE_CHECKING:
    from moesim.api.studies import Study, WrittenReport
    from moesim.api.traces import ImportedTrace, WrittenTrace


def said(found: ImportedTrace | WrittenReport | WrittenTrace) -> None:
    """Print as remarks what a function has written."""
    for line in found.text().splitlines():
        say(line)


def write_own(folder: Path, files: Mapping[str, bytes], command: str) -> None:
    """Write the folder of a command in the place of an earlier one."""
    _tell(OutputFolder(folder, command).replace(files))


def show(text: str, form: Format = Format.TABLE) -> None:
    """Print a table with its lines, which a terminal would break in words."""
    sys.stdout.write(wrapped(text) if form is Format.TABLE else text)


def print_answer(found: Study, form: Format, out: Path | None, command: str) -> int:
    """Print a study's answer, write its folder and name what failed; return the exit code."""
    show(found.text(form), form)
    if out is not None:
        write_own(out, found.files(), command)
    for line in found.failures:
        complain(f"moesim: {line}")
    return 1 if found.failures else 0


def write_beside(folder: Path, files: Mapping[str, bytes], command: str) -> None:
    """Write files of a command next to others in a folder."""
    _tell(OutputFolder(folder, command, owned=False).put(files))


def _tell(paths: Iterable[Path]) -> None:
    for path in paths:
        say(f"wrote {path}")
