"""The command line: one file a verb; each command is a thin layer over a function."""

from __future__ import annotations

import logging

from moesim.cli.main import app
from moesim.core.text import LOG, PROGRESS, complain

__all__ = ["app"]


class _OnStderr(logging.Handler):
    """Print what functions log, as a command prints its own remarks; the reason of a choice once."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.name != LOG.name or record.levelno >= logging.WARNING or line not in self.printed:
            complain(line)
        self.printed.add(line)


LOG.addHandler(_OnStderr())
PROGRESS.setLevel(logging.INFO)
