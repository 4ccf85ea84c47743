"""``moesim schema``: the format of experiment files, for editors."""

from __future__ import annotations

from moesim.experiment.config import json_schema


def schema() -> None:
    """Print the JSON Schema of experiment files.

    Example: moesim schema
    """
    print(json_schema())
