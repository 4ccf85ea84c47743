"""``moesim trace learn``: train a predictor on one trace, predict for another."""

from __future__ import annotations

import sys
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.api.outputs import all_or_none, check_out, note_written
from moesim.core.limits import COUNT, REPEATS, TOKENS
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.text import say
from moesim.errors import ConfigError, install
from moesim.trace import SUFFIX, Trace, find_trace

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
    check_out(out, suffix=SUFFIX, overwrite=overwrite)
    if predictor is not None:
        check_out(predictor, overwrite=overwrite, option="--predictor")
        if predictor.resolve() == out.resolve():
            raise ConfigError(f"--predictor {predictor}: expected another file than --out, got the same; choose another name")
    try:
        from moesim.recorder import learned  # PyTorch takes seconds to import
    except ModuleNotFoundError as error:
        raise ConfigError(f"moesim trace learn: expected the package {error.name}, got none; {install('record')}") from None

    kinds = {field.name: field.type for field in fields(learned.LearnedOptions)}
    options = learned.LearnedOptions(**{**_parse(setting or [], kinds), "epochs": epochs, "seed": seed})
    paths = find_trace(calibration), find_trace(trace)
    ours, theirs = (Trace.read(path) for path in paths)
    places = str(paths[0]), str(paths[1])
    learned.check_same_model(ours, theirs, places)
    learned.check_no_shared_requests(ours.header, theirs.header, places)
    with Progress(ours.n_layers - 1) as progress:
        progress.describe("training, layer by layer")
        predictors = learned.train_on(
            ours, options, fit_groups=groups is Groups.fitted, place=places[0], on_layer=lambda layer, loss: progress.advance(1)
        )
    result = learned.with_signal(theirs, learned.learned_signal(predictors, theirs, places[1]), predictors)
    table = learned.accuracy(result, ours, predictors.groups, batch)
    with all_or_none(out, *([] if predictor is None else [predictor])):
        result.write(out)
        if predictor is not None:
            learned.save_predictors(predictors, predictor)
            note_written([predictor], "trace learn")
    sys.stdout.write(render_records(table, form) if form.for_programs else _table(table, form))
    say(f"wrote {out}")


def _parse(settings: list[str], kinds: dict[str, Any]) -> dict[str, Any]:
    """Read NAME=VALUE as options; epochs and seed have options of their own."""
    known = sorted(set(kinds) - {"epochs", "seed"})
    found: dict[str, Any] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in known:
            raise ConfigError(f"--option {text}: expected NAME=VALUE with one of {', '.join(known)}")
        try:
            found[name] = int(value) if kinds[name] == "int" else float(value)
        except ValueError:
            raise ConfigError(f"--option {text}: expected {kinds[name]} after '{name}=', got {value!r}") from None
    return found


def _table(rows: list[dict[str, Any]], form: Format) -> str:
    columns = list(rows[0])
    cells = [
        ["-" if row[c] != row[c] else f"{row[c]:z.4f}" if isinstance(row[c], float) else str(row[c]) for c in columns]
        for row in rows
    ]
    return render(columns, cells, form, columns[2:])
