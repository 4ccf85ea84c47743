"""Writes the reference of all commands while the site is built: a page a command, and their list in ``reference/cli.md``."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- commands -->"


@cache
def commands() -> dict[str, str]:
    """Return what Typer's own generator says of each command of the program, in the tree that this file is in."""
    call = [sys.executable, "-m", "typer", "--app", "_app", "moesim/cli/main.py", "utils", "docs", "--name", "moesim"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"typer: expected the reference of all commands, got: {done.stderr.strip().splitlines()[-1:]}")
    text = re.sub(r"^\* `--help`: .*\n?", "", done.stdout, flags=re.M)
    text = re.sub(r"^\*\*Options\*\*:\s*(?=^#|\Z)", "", text, flags=re.M)
    text = re.sub(r"^Example: (.*)$", r"```console\n$ \1\n```", text, flags=re.M)
    _, *parts = re.split(r"^## (?=`moesim)", text, flags=re.M)
    return {part.partition("`")[2].partition("`")[0].removeprefix("moesim "): f"# {part.strip()}\n" for part in parts}


def listed() -> str:
    """Return a table of all commands, each with the first sentence of its page."""
    lines = ["| command | does |", "|---|---|"]
    for name, page in commands().items():
        lines.append(f"| [`{name}`](cli/{name}.md) | {page.split(chr(10) * 2)[1].partition('. ')[0].rstrip('.')} |")
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """Add a page a command."""
    from mkdocs.structure.files import File  # the tests of this file run without the site's packages

    for name, page in commands().items():
        files.append(File.generated(config, f"reference/cli/{name}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the list in the place of the mark."""
    return markdown.replace(MARK, listed()) if MARK in markdown else markdown
