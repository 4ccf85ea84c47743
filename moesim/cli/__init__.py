"""The command line: one file a verb; each command is a thin layer over a function."""

from moesim.cli.main import app

__all__ = ["app"]
