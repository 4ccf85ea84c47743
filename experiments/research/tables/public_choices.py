"""Predict public measurements again with each choice behind the profiles the other way.

``python -m experiments.research.tables.public_choices`` prints the table, with ``csv`` behind it the numbers unrounded, as in
``docs/background/public_choices.csv``. Its choices are those of ``experiments/validation/_choices.yaml``.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from experiments.research.tables.command import parser, run
from moesim.core.gate import YAML, read_text
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.experiment.config import first_problem
from moesim.studies.validation.public import (
    Check,
    Sweep,
    checks_file,
    predict,
    read_checks,
    read_sweeps,
    run_sweeps,
    shipped_table,
    sweeps_file,
)

CHOICES: Final = "_choices.yaml"
WITHOUT: Final = "gtx1060-i5-7600k"
"""The machine without which errors are summed up as well: its own rows disagree."""
NOW: Final = "all as they are"
TOGETHER: Final = "first alternatives of the choices with errors known, together"


class Choice(BaseModel):
    """A choice, and what could stand in its place."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # choice, value, other: what is chosen, how, and the alternative, in words
    choice: str
    value: str
    other: str
    known: bool  # whether it was chosen, or changed, with the errors known
    # for each machine that it touches, by the name of its profile: dotted keys and values, as in an experiment's `hardware`
    numbers: Mapping[str, Mapping[str, float | str]]


def read_choices(path: Path) -> list[Choice]:
    """Read choices."""
    raw = read_yaml_value(read_text(path, YAML, "a list of choices"), str(path))
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{path}: expected a list of choices, got {type(raw).__name__}; begin each with '- choice:'")
    found = []
    for number, one in enumerate(raw, 1):
        try:
            found.append(Choice.model_validate(one))
        except ValidationError as error:
            raise ConfigError(f"{path}: choice {number}: {first_problem(error, Choice)}") from None
    return found


def together(choices: Sequence[Choice]) -> Choice:
    """Take the first alternative of each choice that was made with the errors known."""
    numbers: dict[str, dict[str, float | str]] = {}
    for one in {one.choice: one for one in reversed(choices) if one.known}.values():
        for machine, values in one.numbers.items():
            numbers[machine] = numbers.get(machine, {}) | dict(values)
    return Choice(choice=TOGETHER, value="", other="", known=True, numbers=numbers)


def other_hardware(hardware: Any, choice: Choice) -> Any:
    """Write a choice's numbers into the hardware of a row."""
    own = dict(hardware) if isinstance(hardware, Mapping) else {"base": hardware}
    numbers = choice.numbers.get(str(own["base"]))
    return None if numbers is None else own | dict(numbers)


def run_choices(
    choices: Sequence[Choice], sweeps: Sequence[Sweep], checks: Sequence[Check], *, progress: bool = True
) -> pd.DataFrame:
    """Predict every row as it is, and again with each choice the other way.

    First as they are, then a row a choice: ``choice``, ``value``, ``other``, ``known``, ``rows`` (settings it touches), the
    errors' ``median`` and ``p90``, ``median_without`` and ``p90_without`` (without `WITHOUT`), ``checks`` (single figures that
    it touches), ``checks_median`` and ``checks_worst``.
    """
    sweeps = [one for one in sweeps if one.status == "predicted" and one.rate == "measured" and not one.ubatch]
    checks = [one for one in checks if one.status == "predicted"]
    now = Choice(choice=NOW, value="", other="", known=False, numbers={})
    records = []
    with (
        tempfile.TemporaryDirectory(prefix="moesim.") as folder,
        Progress((1 + len(choices)) * len(sweeps) + len(checks), enabled=progress) as bar,
    ):
        swept = run_sweeps(sweeps, Path(folder), bar).set_index("check")
        single = pd.Series({one.check: _error(one, Path(folder), bar) for one in checks}, dtype=float)
        for choice in (now, *choices):
            others = [(one, other_hardware(one.hardware, choice)) for one in sweeps]
            touched = [replace(one, hardware=hardware) for one, hardware in others if hardware is not None]
            errors, figures = swept["error"].astype(float).copy(), single.copy()
            if touched:
                errors.update(run_sweeps(touched, Path(folder), bar).set_index("check")["error"].astype(float))
            again = [(one, other_hardware(one.hardware, choice)) for one in checks]
            moved = {one.check: _error(replace(one, hardware=to), Path(folder), bar) for one, to in again if to is not None}
            figures.update(pd.Series(moved, dtype=float))
            records.append(
                {
                    "choice": choice.choice,
                    "value": choice.value,
                    "other": choice.other,
                    "known": choice.known,
                    "rows": len(touched),
                }
                | _quantiles(errors, "")
                | _quantiles(errors[swept["machine"] != WITHOUT], "_without")
                | {"checks": len(moved), "checks_median": figures.abs().median(), "checks_worst": figures.abs().max()}
            )
    return pd.DataFrame(records)


def _error(check: Check, folder: Path, bar: Progress) -> float:
    bar.describe(f"{check.row}: {check.model}")
    found: float = predict(check, folder)["predicted"] / check.value - 1
    bar.advance(1)
    return found


def _quantiles(errors: pd.Series[float], suffix: str) -> dict[str, float]:
    return {f"median{suffix}": float(errors.abs().median()), f"p90{suffix}": float(errors.abs().quantile(0.9))}


_HEADINGS: Final = (
    "choice", "value", "alternative", "errors known", "rows", "median", "nine of ten", "without the GTX 1060",
    "figures", "median, worst",
)  # fmt: skip


def choice_table(frame: pd.DataFrame, form: Format = Format.MD) -> str:
    """Write what each choice is worth."""
    if form.for_programs:
        return render_records([{str(key): value for key, value in row.items()} for row in frame.to_dict("records")], form)
    cells = []
    for record in frame.to_dict("records"):
        percent = {key: f"{100 * record[key]:.1f} %" for key in ("median", "p90", "median_without", "p90_without")}
        known = "" if record["choice"] == NOW else "yes" if record["known"] else "no"
        single = f"{100 * record['checks_median']:.1f} %, {100 * record['checks_worst']:.0f} %"
        cells.append(
            [
                *(record[key] for key in ("choice", "value", "other")), known, str(record["rows"]), percent["median"],
                percent["p90"], f"{percent['median_without']}, {percent['p90_without']}", str(record["checks"]), single,
            ]
        )  # fmt: skip
    return render(_HEADINGS, cells, form, _HEADINGS[4:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of the shipped choices; takes some minutes."""
    return run(_choices, parser("experiments.research.tables.public_choices", main.__doc__), arguments)


def _choices(given: Namespace) -> None:
    choices = read_choices(shipped_table(CHOICES, "choices behind profiles of public machines"))
    found = run_choices([*choices, together(choices)], read_sweeps(sweeps_file()), read_checks(checks_file()))
    sys.stdout.write(choice_table(found, given.form))


if __name__ == "__main__":
    sys.exit(main())
