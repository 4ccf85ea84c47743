"""Run the command line with ``python -m moesim``."""

from moesim.cli import app

app()
