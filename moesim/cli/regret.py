"""``moesim regret``: what each decision of a policy would be worth if an oracle made it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Jobs, Printed, Quick, Set
from moesim.cli.outputs import print_answer
from moesim.core.files import check_own_folder
from moesim.core.table import Format


def regret(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment.")],
    policies: Annotated[str | None, typer.Option(help="Names, separated by commas; default: all of the experiment.")] = None,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for a CSV and the figures.")] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Measure what perfect decisions would gain.

    Predictions, replacement, assignment and bandwidth of each policy are replaced by their oracles, one after the other, in that
    order and reversed; then the best hit rate, the oracles one by one, and a lower bound on the makespan. The oracle of
    bandwidth is a machine whose links take no time. Results on it are marked *, and have a lower bound of their own. A negative
    share means that the run takes longer with the oracle.

    Example: moesim regret experiments/quickstart.yaml --policies dali --quick
    """
    if out is not None:
        check_own_folder(out, "regret")
    from moesim.api.studies import regret as find_regrets

    names = [name.strip() for name in policies.split(",")] if policies else []
    return print_answer(find_regrets(file, names, overrides=overrides, quick=small, jobs=jobs), form, out, "regret")
