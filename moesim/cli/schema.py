"""``moesim schema``: the format of experiment files and of parameters of synthetic routing, for editors."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from moesim.experiment.config import json_schema
from moesim.policies.registry import policy_schema

File = StrEnum("File", ["experiment", "parameters"])


def schema(
    file: Annotated[File, typer.Argument(help="Experiments, or parameters of synthetic routing.")] = File.experiment,
) -> None:
    """Print the JSON Schema of experiment files, or of parameters of synthetic routing.

    Example: moesim schema
    """
    print(json.dumps(_experiment() if file is File.experiment else _parameters(), indent=2, sort_keys=True))


def _experiment() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json_schema())
    found["properties"]["policies"]["items"], parts = policy_schema()
    found["$defs"] |= parts
    return found


def _parameters() -> dict[str, Any]:
    from moesim.trace.synthesis.parameter_set import parameter_schema  # SciPy takes most of a second to import

    return parameter_schema()
