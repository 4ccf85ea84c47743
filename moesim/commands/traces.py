"""``moesim trace``: look into traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.stats.trace_stats import stats
from moesim.table import Format, render, render_records
from moesim.trace import Trace, find_trace

app = typer.Typer(no_args_is_help=True, help="Look into traces.", pretty_exceptions_enable=False)


@app.callback()
def _group() -> None:
    """Keep ``moesim trace`` a group of commands though it has one."""


@app.command("stats")
def trace_stats(
    trace: Annotated[str, typer.Argument(help="Name or path of a trace.")],
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    max_rows: Annotated[int | None, typer.Option(min=1, help="Stop after about so many tokens.")] = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print it.")] = Format.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="Draw the hit rates to PATH.png and PATH.pdf."),
    ] = None,
) -> None:
    """Describe the routing of a trace: reuse, balance, what caches hold, how well it can be predicted."""
    found = Trace.read(find_trace(trace))
    result = stats(found, phase, max_rows=max_rows)
    if form is Format.JSON:
        sys.stdout.write(json.dumps({"trace": trace, "model": found.model, "label": found.label, **result}, indent=2) + "\n")
    else:
        rows = [{"figure": name, "value": value} for name, value in _flat(trace, found, result)]
        if form is Format.CSV:
            sys.stdout.write(render_records(rows, form))
        else:
            sys.stdout.write(
                render(
                    ["figure", "value"],
                    [[row["figure"], _text(row["value"])] for row in rows],
                    form,
                    ["value"],
                )
            )
    if plot is not None:
        _draw(trace, found, result, plot)


def _flat(name: str, trace: Trace, result: dict[str, Any]) -> list[tuple[str, Any]]:
    shape = result["shape"]
    flat: list[tuple[str, Any]] = [
        ("trace", name),
        ("routing of", trace.model),
        ("label", trace.label),
        ("layers x experts, top_k", f"{shape['n_layers']} x {shape['n_experts']}, {shape['top_k']}"),
        ("phase", result["phase"]),
        ("tokens", f"{result['n_rows']}" + (" (a sample)" if result["sampled"] else "")),
    ]
    flat += [
        (key, result[key]) for key in result if key.startswith("reuse") or key in ("n_requests", "entropy", "top_over_uniform")
    ]
    for policy, rates in result["hit_rate"].items():
        flat += [(f"{policy} hit rate at {100 * s:g} %", rate) for s, rate in zip(result["cache_shares"], rates, strict=True)]
    flat += [(f"recall of {source}", value) for source, value in result["next_layer_recall"].items()]
    flat.append(("prefill-decode cosine", result["prefill_decode_cosine"]))
    return flat


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _draw(name: str, trace: Trace, result: dict[str, Any], path: Path) -> None:
    import pandas as pd

    from moesim import plots  # Matplotlib takes most of a second to import

    rows = [
        {
            "policy": policy,
            "cache_ratio": share,
            "hit_rate": rate,
            "trace": name,
            "model": trace.model,
            "source_label": trace.label,
        }
        for policy, rates in result["hit_rate"].items()
        for share, rate in zip(result["cache_shares"], rates, strict=True)
    ]
    for written in plots.save(plots.hit_rate(pd.DataFrame(rows), "hit_rate"), path.with_suffix("")):
        print(f"wrote {written}", file=sys.stderr)
