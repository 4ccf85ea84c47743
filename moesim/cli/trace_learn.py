"""``moesim trace learn``: train a predictor on one trace, predict for another."""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moesim.core.limits import COUNT, REPEATS, TOKENS
from moesim.core.table import Format
from moesim.core.text import say

Groups = StrEnum("Groups", ["eighths", "fitted"])


def trace_learn(
    calibration: Annotated[str, typer.Argument(help="Name or path of the trace to train on; it has gate inputs.")],
    trace: Annotated[str, typer.Option("--for", metavar="TRACE", help="Trace with gate inputs to make predictions for.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write that trace with the signal 'learned'.")],
    predictor: Annotated[Path | None, typer.Option("--predictor", metavar="FILE", help="Keep the trained networks, too.")] = None,
    epochs: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Passes over the calibration tokens.")] = 30,
    seed: Annotated[int, typer.Option(min=0, max=COUNT.most, help="Of initial weights, noise and order.")] = 0,
    groups: Annotated[
        Groups, typer.Option(help="First and last eighth of the layers, or fitted to gate reuse.")
    ] = Groups.eighths,
    setting: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Any other size or rate, such as width=256.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, max=TOKENS.most, help="Tokens of a batch, for the accuracy of the busiest experts.")
    ] = 64,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the accuracy.")] = Format.TABLE,
) -> None:
    """Train the learned predictor (PreScope's LLaPor). Print its accuracy on requests it has not seen.

    Example: moesim trace learn calibration.safetensors --for mine.safetensors --out more.safetensors
    """
    from moesim.api.recording import learn  # what knows every policy takes a while to import

    found = learn(
        calibration, trace, out, predictor=predictor, epochs=epochs, seed=seed, groups=groups.value, batch=batch,
        options=dict(_parsed(one) for one in setting or ()), overwrite=overwrite,
    )  # fmt: skip
    sys.stdout.write(found.text(form))
    for line in found.notes:
        say(line)


def _parsed(text: str) -> tuple[str, float | str]:
    """Read NAME=VALUE."""
    name, _, value = text.partition("=")
    for kind in (int, float):
        with suppress(ValueError):
            return name, kind(value)
    return name, value
