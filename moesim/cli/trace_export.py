"""``moesim trace export``: a trace becomes a file that others read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Overwrite, name_or_mapping
from moesim.cli.outputs import said
from moesim.core.limits import BYTES, LAYERS

ExportFormat = StrEnum("ExportFormat", {"oracleGeneral": "oracleGeneral", "csv": "csv", "parquet": "parquet"})
Phase = StrEnum("Phase", ["all", "prefill", "decode"])


def trace_export(
    trace: Annotated[str, typer.Argument(help="Name or path of a trace.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    form: Annotated[ExportFormat, typer.Option("--format", help="oracleGeneral is libCacheSim's.")],
    layer: Annotated[int | None, typer.Option(min=0, max=LAYERS.most, help="Only this layer (oracleGeneral).")] = None,
    phase: Annotated[Phase, typer.Option(help="Only this phase (oracleGeneral).")] = Phase.all,
    model: Annotated[
        str | None,
        typer.Option(help="Whose bytes the objects have (oracleGeneral); or {base: NAME, expert_bits: 4}."),
    ] = None,
    object_size: Annotated[
        int | None, typer.Option(min=1, max=BYTES.most, help="Bytes of every object instead (oracleGeneral).")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the routing of a trace for other programs.

    Example: moesim trace export mini-mixtral --format csv --out mini-mixtral.csv
    """
    from moesim.api.traces import export  # what knows every policy takes a while to import

    said(
        export(
            trace, out, format=form.value, layer=layer, phase=phase.value, object_size=object_size, overwrite=overwrite,
            model=None if model is None else name_or_mapping(model, "--model"),
        )
    )  # fmt: skip
