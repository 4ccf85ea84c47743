"""Writes the reference of all commands into ``reference/cli.md`` while the site is built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- commands -->"


def commands() -> str:
    """Return what Typer's own generator says of the program, in the tree that this file is in."""
    call = [sys.executable, "-m", "typer", "--app", "_app", "moesim/cli/main.py", "utils", "docs", "--name", "moesim"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"typer: expected the reference of all commands, got: {done.stderr.strip().splitlines()[-1:]}")
    text = re.sub(r"^# .*$", "", done.stdout, count=1, flags=re.M)
    return re.sub(r"^\* `--help`: .*\n?", "", text, flags=re.M).strip()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the reference in the place of the mark."""
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown
