"""``moesim diff``: where the time of two runs went."""

from __future__ import annotations

from typing import Annotated

import typer

from moesim.cli.options import Inputs, Printed, Trust
from moesim.cli.outputs import show
from moesim.core.table import Format


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="DIR if it holds one run, DIR:NUMBER, or DIR:POLICY.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The run to compare it with.")],
    form: Printed = Format.TABLE,
    trust: Trust = False,
    inputs: Inputs = None,
) -> int:
    """Compare two runs of result folders.

    Settings, time by cause, phase and layer, bytes, hit rates. Differences are B less A.

    A run whose records are not in its folder is simulated again; that needs its trace, and policies that are not moesim's own
    need --trust.

    Example: moesim diff results/quickstart:0 results/quickstart:3
    """
    from moesim.api.studies import diff as compare_runs

    show(compare_runs(run_a, run_b, trust=trust, inputs=inputs).text(form), form)
    return 0
