"""The command line: one file a verb; each command is a thin layer over a function."""

from __future__ import annotations

import logging

from moesim.cli.main import app
from moesim.core.text import LOG, say

__all__ = ["app"]


class _OnStderr(logging.Handler):
    """Print what functions log, as a command prints its own remarks."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


LOG.addHandler(_OnStderr())
