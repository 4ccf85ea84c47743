"""``moesim trace export``: a trace becomes a file that others read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moesim.api.outputs import all_or_none, check_out, note_written
from moesim.cli.options import Overwrite, name_or_mapping
from moesim.core.limits import BYTES, LAYERS
from moesim.core.text import say
from moesim.errors import InputError
from moesim.model import load_model
from moesim.trace import Trace, find_trace
from moesim.trace.formats.oracle_general import export_oracle_general
from moesim.trace.formats.tables import facts_path
from moesim.trace.formats.tabular_export import export_csv, export_parquet

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
    check_out(out, overwrite=overwrite)
    if form is ExportFormat.csv:
        check_out(facts_path(out), overwrite=overwrite)
    found = Trace.read(find_trace(trace))
    sizes: list[int] = []
    if form is ExportFormat.oracleGeneral:
        sizes = _sizes(found, model, object_size)
    else:
        if layer is not None or phase is not Phase.all or model is not None or object_size is not None:
            raise InputError(
                f"--format {form.value}: expected no --layer, --phase, --model or --object-size, got one; leave it out"
            )
    with all_or_none(out, facts_path(out)):
        if form is ExportFormat.oracleGeneral:
            written = export_oracle_general(found, out, sizes, layer=layer, phase=phase.value)
        else:
            written = (export_csv if form is ExportFormat.csv else export_parquet)(found, out)
        note_written(written, "trace export")
    say(f"wrote {' and '.join(str(path) for path in written)}")


def _sizes(trace: Trace, model: str | None, object_size: int | None) -> list[int]:
    """Bytes of an expert by layer: as given, of the model, or as the source recorded them."""
    if object_size is not None and model is not None:
        raise InputError("--object-size: expected it or --model, got both; leave one out")
    if object_size is not None:
        return [object_size] * trace.n_layers
    if model is not None:
        spec = load_model(name_or_mapping(model, "--model"), "--model")
        if (spec.n_layers, spec.n_experts) != (trace.n_layers, trace.n_experts):
            expected = f"{trace.n_layers} layers of {trace.n_experts} experts as the trace"
            raise InputError(f"--model {model}: expected {expected}, got {spec.n_layers} of {spec.n_experts}; name another")
        return [spec.expert_bytes(layer) for layer in range(spec.n_layers)]
    recorded = trace.header.get("expert_bytes_by_layer")
    if not isinstance(recorded, list) or len(recorded) != trace.n_layers or not all(type(n) is int for n in recorded):
        raise InputError("oracleGeneral: expected the bytes of an expert, got none from the trace; give --model or --object-size")
    return recorded
