"""What comes of the public sweeps: a row a setting, and errors by machine, place of the experts and kind of memory rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.studies.validation.public_sweeps import Sweep, predict_sweep

NEAR: Final = 0.25
"""Error within which nine of ten predictions are wanted."""


def run_sweeps(sweeps: Sequence[Sweep], folder: Path, bar: Progress) -> pd.DataFrame:
    """Predict every setting that says enough.

    A row a setting: its words, ``measured`` and ``predicted`` (tokens/s), ``ratio``, ``error`` (ratio less 1), ``missing_ms``
    (measured less predicted time of a token), ``refused`` (for settings that exceed the memory), ``label`` and the shares.
    """
    records = []
    known: dict[str, dict[str, Any]] = {}  # of the same run: a setting may have been measured several times
    for sweep in sweeps:
        bar.describe(f"{sweep.machine}: {sweep.model}")
        run = json.dumps([sweep.status, sweep.kind, sweep.spec, sweep.hardware, sweep.routing, sweep.policy, sweep.depth])
        if run not in known:
            known[run] = predict_sweep(sweep, folder)
        records.append(_record(sweep, known[run]))
        bar.advance(1)
    return pd.DataFrame(records)


def _record(sweep: Sweep, found: dict[str, Any]) -> dict[str, Any]:
    predicted = found.get("predicted")
    return {
        "check": sweep.check, "machine": sweep.machine, "rate": sweep.rate, "thin": sweep.thin == "yes", "model": sweep.model,
        "weights": sweep.weights, "curve": sweep.curve, "engine": sweep.engine, "setting": sweep.setting,
        "context": sweep.context, "kind": sweep.kind, "place": sweep.place, "layers_on_cpu": sweep.layers_on_cpu,
        "layers": sweep.layers,
        "measured": sweep.measured, "predicted": predicted, "ratio": None if predicted is None else predicted / sweep.measured,
        "error": None if predicted is None else predicted / sweep.measured - 1,
        "missing_ms": None if predicted is None else 1e3 / sweep.measured - 1e3 / predicted, "status": sweep.status,
        "refused": found.get("refused"), "label": found.get("label", ""), "source": sweep.source, "how": sweep.how,
        **{key: value for key, value in found.items() if key.startswith("share_")},
    }  # fmt: skip


def groups(frame: pd.DataFrame) -> pd.DataFrame:
    """Sum up the errors of the predictions.

    A row a group: ``group``, ``rows``, ``median``, ``p90`` (of the absolute error), ``mean`` (of the error), ``within`` (share
    of rows within `NEAR`), ``worst`` (error) and ``worst_row``. First by memory rate and place, then by machine and model.
    """
    if frame.empty:
        return pd.DataFrame()
    done = frame[frame["status"] == "predicted"]
    measured = done[done["rate"] == "measured"]
    some = [("machines with a measured memory rate", measured), ("of these, well described", measured[~measured["thin"]])]
    places = (("gpu", "all experts on the GPU"), ("mixed", "mixed"), ("cpu", "all on the CPU"))
    some += [(f"of these, {words}", measured[measured["place"] == place]) for place, words in places]
    some.append(("machines without", done[done["rate"] != "measured"]))
    some += [(str(name), rows) for name, rows in done.groupby("machine", sort=False)]
    some += [(f"{machine}: {curve}", rows) for (machine, curve), rows in done.groupby(["machine", "curve"], sort=False)]
    return pd.DataFrame([error_group(name, rows) for name, rows in some if not rows.empty])


def error_group(name: str, rows: pd.DataFrame, key: str = "error") -> dict[str, Any]:
    """Sum up the errors of some rows; `groups` names what comes out."""
    errors = rows[key].astype(float)
    worst = int(errors.abs().to_numpy().argmax())
    return {
        "group": name, "rows": len(rows), "median": float(errors.abs().median()), "p90": float(errors.abs().quantile(0.9)),
        "mean": float(errors.mean()), "within": float((errors.abs() <= NEAR).mean()), "worst": float(errors.iloc[worst]),
        "worst_row": str(rows["check"].iloc[worst]),
    }  # fmt: skip


_HEADINGS: Final = ("sweeps", "rows", "median |error|", "nine of ten within", "mean", "within 25 %", "worst", "which")


def group_table(frame: pd.DataFrame, form: Format) -> str:
    """Write the errors by group."""
    records = groups(frame).to_dict("records")
    if form.for_programs:
        return render_records([{str(key): value for key, value in record.items()} for record in records], form)
    cells = [
        [
            record["group"],
            str(record["rows"]),
            *(f"{100 * record[key]:.1f} %" for key in ("median", "p90")),
            f"{100 * record['mean']:+z.1f} %",
            f"{100 * record['within']:.0f} %",
            f"{100 * record['worst']:+z.1f} %",
            record["worst_row"],
        ]
        for record in records
    ]
    return render(_HEADINGS, cells, form, _HEADINGS[1:7])


def summarise_sweeps(frame: pd.DataFrame) -> str:
    """Tell in a few lines how near the predictions of the sweeps are."""
    if frame.empty:
        return ""
    lines = [
        f"sweeps, {one['group']}: {one['rows']}, median absolute error {100 * one['median']:.1f} %, nine of ten within "
        f"{100 * one['p90']:.0f} %, {100 * one['within']:.0f} % within {100 * NEAR:.0f} %"
        for one in groups(frame).to_dict("records")
        if one["group"].startswith("machines with")
    ]
    cliff = frame[frame["status"] == "cliff"]
    if len(cliff):
        refused = int(cliff["refused"].fillna(value=False).astype(bool).sum())
        lines.append(f"sweeps, settings that exceed the GPU's memory: {len(cliff)}, of which the simulator refuses {refused}")
    lines.append(f"sweeps, not predicted: {int((frame['status'] == 'not predicted').sum())}; the table says why")
    return "\n".join(lines) + "\n"
