"""``moesim list``: what there is to choose from."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from moesim.cli.options import Printed
from moesim.core.table import Format, render, render_records, written
from moesim.core.text import shown_lines
from moesim.errors import ConfigError

_WIDEST = 48  # characters of a column that others follow, where the table goes to a file or a pipe

Kind = StrEnum("Kind", ["policies", "parts", "models", "hardware", "traces", "predictors", "parameters", "formats"])
_EXPLAINED = (Kind.policies, Kind.parts)


def listing(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Policies or parts of which each option is explained.", show_default=False),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Policies with paper, what is missing, and options.")] = False,
    form: Printed = Format.TABLE,
) -> None:
    """List policies, parts, models, hardware profiles, traces, predictors, parameters of synthetic routing, or import formats.

    Example: moesim list policies dali
    """
    if names and kind not in _EXPLAINED:
        raise ConfigError(f"list {kind.value}: expected no name, got {names[0]}; names are for policies and parts")
    if long and (names or kind is not Kind.policies or form is not Format.TABLE):
        raise ConfigError(
            f"list {kind.value}: --long: expected policies without a name, as a table; all else is long; leave it out"
        )
    if kind in _EXPLAINED:
        from moesim.cli import listing_policies as of_policies  # only what is listed is imported

        rows = of_policies.EXPLAIN[kind.value](names) if names else of_policies.LISTS[kind.value]()
        if form is Format.TABLE and (names or kind is Kind.policies):
            write = of_policies.explanations if names else of_policies.cards if long else of_policies.brief
            sys.stdout.write(shown_lines(write(rows)))
            return
    else:
        from moesim.cli.listing_inputs import LISTS

        rows = LISTS[kind.value]()
    if form in (Format.JSON, Format.JSONL):
        sys.stdout.write(render_records(rows, form))
        return
    columns = list(rows[0]) if rows else ["name"]
    sys.stdout.write(render(columns, [[written(row[c]) for c in columns] for row in rows], form, widest=_WIDEST))
