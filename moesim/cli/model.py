"""``moesim model``: the card of a model."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from moesim.cli.options import name_or_mapping

Form = StrEnum("Form", ["text", "json"])


def model(
    source: Annotated[str, typer.Argument(metavar="X", help="A name, a checkpoint's folder, config.json, GGUF file or YAML.")],
    output: Annotated[Form, typer.Option("--output", "-o", help="As text, or all figures as JSON.")] = Form.text,
) -> None:
    """Print a model's card: layers by kind, parameters, bytes by tensor class, what it keeps and reads of a context.

    Example: moesim model qwen3.5-35b-a3b
    """
    from moesim.model import Card, load_model

    card = Card(load_model(name_or_mapping(source, "model"), "model"))
    sys.stdout.write(card.text() if output is Form.text else json.dumps(card.to_dict(), indent=2) + "\n")
