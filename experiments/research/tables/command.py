"""Options, exit codes and files of all commands of this folder."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.table import Format
from moesim.core.text import say
from moesim.errors import MoesimError

PAPERS = "papers"
"""The owner of a result folder of `moesim papers`, in which other answers to printed numbers may be kept."""


def parser(name: str, about: str | None, *, jobs: bool = False) -> ArgumentParser:
    """Return the options that every command has."""
    found = ArgumentParser(f"python -m {name}", description=about, formatter_class=RawDescriptionHelpFormatter)
    found.add_argument("-o", "--output-format", type=Format, choices=list(Format), default=Format.TABLE, dest="form")
    found.add_argument("--out", type=Path, metavar="DIR", help="folder to write to")
    if jobs:
        found.add_argument("-j", "--jobs", type=int, help="processes; default: all cores, if that is faster")
    return found


def run(work: Callable[[Namespace], None], options: ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run a command; what is wrong with its input is one line and exit code 2."""
    given = options.parse_args(arguments)
    try:
        work(given)
    except MoesimError as error:
        say(f"moesim: {error}")
        return 2
    return 0


def begin_papers(out: Path | None) -> None:
    """Refuse a folder that is not one of `moesim papers`, and mark a new one."""
    if out is not None:
        check_own_folder(out, PAPERS)
        OutputFolder(out, PAPERS).mark()


def write(out: Path, files: Mapping[str, bytes], owner: str, *, owned: bool = False) -> None:
    """Write files next to what else is in a folder, and print their paths."""
    for path in OutputFolder(out, owner, owned=owned).put(files):
        say(f"wrote {path}")
