"""Options of ``moesim trace import`` and ``calibrate``: what to add to recorded routing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from moesim.core.limits import COUNT
from moesim.errors import InputError
from moesim.trace import Trace
from moesim.trace.calibrating import Additions

HoldBack = StrEnum("HoldBack", ["requests", "ends"])
Uniform = StrEnum("Uniform", ["uniform"])

Seed = Annotated[
    int | None, typer.Option(min=0, max=COUNT.most, help="Of the choice of requests that are held back; default: 0.")
]
HeldBack = Annotated[
    HoldBack | None,
    typer.Option("--hold-back", help="Whole requests, or the last tokens of each request; default: requests."),
]
Weights = Annotated[
    Uniform | None, typer.Option(help="Where neither weights nor scores were recorded: the same weight for each chosen expert.")
]
Scores = Annotated[Uniform | None, typer.Option(help="Likewise: the same score for each chosen expert, 0 for the others.")]


def additions(
    share: float | None,
    option: str,
    seed: int | None,
    hold_back: HoldBack | None,
    weights: Uniform | None,
    scores: Uniform | None,
) -> Additions:
    """Put the options together; `option` is the one that gives the share."""
    if share is None:
        _refuse([("--seed", seed), ("--hold-back", hold_back)], f"{option} beside it, got none; say how much is held back")
    if hold_back is HoldBack.ends:
        _refuse([("--seed", seed)], "no seed beside --hold-back ends, got one; leave it out, nothing is drawn")
    held_back = (hold_back or HoldBack.requests).value
    return Additions(share, seed or 0, held_back, weights is not None, scores is not None)


def describe(trace: Trace) -> str:
    """Say what a trace holds and what was added to it."""
    size = f"{trace.n_rows} token{'s' * (trace.n_rows != 1)} of {trace.n_requests} request{'s' * (trace.n_requests != 1)}"
    tables = [f"tables {', '.join(sorted(trace.tables))}"] if trace.tables else []
    signals = [f"signals {', '.join(sorted(trace.signals))}"] if trace.signals else []
    return "; ".join([size, *trace.remarks, *tables, *signals])


def _refuse(given: Sequence[tuple[str, object]], expected: str) -> None:
    for name, value in given:
        if value is not None:
            raise InputError(f"{name} {value}: expected {expected}")
