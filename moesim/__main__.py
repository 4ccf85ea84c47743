"""Run the command line with ``python -m moesim``."""

from moesim.cli import app

if __name__ == "__main__":
    app()
