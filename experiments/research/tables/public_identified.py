"""Identify public machines from the ends of one sweep each, and predict all their other rows.

Inside a sweep a straight line through its ends, in time per token over layers, is the yardstick. What is worth knowing is how
near rows of other models, weights and kinds of setting are: no straight line says anything of them.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import pandas as pd

from experiments.research.tables.command import parser, run, write
from moesim.core.progress import telling
from moesim.core.table import Format, render, render_records
from moesim.studies.identify.identify import identify
from moesim.studies.identify.model_error import ModelError
from moesim.studies.identify.observations import Observation, observation
from moesim.studies.validation.public import Sweep, error_group, plain, read_sweeps, sweeps_file

_HEADINGS: Final = ("rows never used", "rows", "median |error|", "nine of ten within", "worst", "which")


def ends(rows: Sequence[Sweep]) -> tuple[Sweep, Sweep] | None:
    """Choose the two rows that identify a machine: the ends of the sweep over most layers, and of most settings."""
    sweeps: dict[tuple[str, ...], list[Sweep]] = {}
    for row in rows:
        if row.place != "cpu" or row.layers_on_cpu:
            sweeps.setdefault((row.curve, str(row.depth), *_options(row)), []).append(row)
    spans = {key: {row.layers_on_cpu for row in one} for key, one in sweeps.items()}
    longest = sweeps[max(spans, key=lambda key: (max(spans[key]) - min(spans[key]), len(spans[key])))] if sweeps else []
    ordered = sorted(longest, key=lambda row: row.layers_on_cpu)
    if len({row.layers_on_cpu for row in longest}) < 2:
        return None
    return ordered[0], ordered[-1]


def _options(row: Sweep) -> tuple[str, ...]:
    policy = row.policy if isinstance(row.policy, dict) else {"name": row.policy}
    return tuple(sorted(policy))


def of_machines(sweeps: Sequence[Sweep]) -> list[list[Sweep]]:
    """Group the predicted decode speeds by machine and profile."""
    machines: dict[str, list[Sweep]] = {}
    for sweep in sweeps:
        if sweep.status == "predicted" and sweep.kind == "tg":
            machines.setdefault(json.dumps([sweep.machine, sweep.hardware]), []).append(sweep)
    return list(machines.values())


def identified_sweeps(
    sweeps: Sequence[Sweep],
    tell: Callable[[str], None] = lambda text: None,
    errors: Mapping[str, ModelError] = MappingProxyType({}),
) -> pd.DataFrame:
    """Identify each machine from the ends of one sweep, and predict its other rows.

    A row a setting of machines with a sweep and a row besides: ``check``, ``machine``, ``rate``, ``curve``, ``setting``,
    ``measured``, ``predicted``, ``error``, ``low`` and ``high`` (interval of 90 %), ``part`` (``used``, ``inside`` that sweep,
    ``other``) and ``straight``, the error of the straight line inside. `errors`: model errors by machine, if not the shipped.
    """
    records: list[dict[str, Any]] = []
    for rows in of_machines(sweeps):
        chosen = ends(rows)
        if chosen is not None and len(rows) > len(chosen):
            tell(rows[0].machine)
            records += _machine(rows, chosen, errors.get(rows[0].machine))
    return pd.DataFrame(records)


def _machine(rows: Sequence[Sweep], chosen: tuple[Sweep, Sweep], error: ModelError | None) -> list[dict[str, Any]]:
    observed = [observed_row(row, used=row in chosen) for row in rows]
    # What a source measured twice, with options that are not simulated, is predicted twice.
    found = identify(rows[0].hardware, observed, intervals=False, leave_out=False, agree=False, error=error)
    first, last = chosen
    records = []
    for row, one in zip(rows, found.predictions, strict=True):
        same = row.curve == first.curve and _options(row) == _options(first) and row.depth == first.depth
        part = "used" if row in chosen else "inside" if same else "other"
        records.append(
            {"check": row.check, "machine": row.machine, "rate": row.rate, "curve": row.curve, "setting": row.setting,
             "measured": row.measured, "predicted": one.predicted, "error": one.predicted / row.measured - 1, "low": one.low,
             "high": one.high, "part": part, "straight": _straight(row, first, last) if part == "inside" else None}
        )  # fmt: skip
    return records


def _straight(row: Sweep, first: Sweep, last: Sweep) -> float:
    """Error of a straight line through two rows, in time per token over layers on the CPU."""
    share = (row.layers_on_cpu - first.layers_on_cpu) / (last.layers_on_cpu - first.layers_on_cpu)
    time = (1 - share) / first.measured + share / last.measured
    return 1 / time / row.measured - 1


def observed_row(row: Sweep, *, used: bool) -> Observation:
    """Return a row as an observation."""
    policy = row.policy if isinstance(row.policy, dict) else {"name": row.policy}
    words = {"n_gpu_layers": "ngl", "n_cpu_moe": "n_cpu_moe"}
    told = [f"{words[key]}={value}" for key, value in policy.items() if key in words]
    told += ["op_offload=false"] if policy.get("op_offload") is False else []
    setting = " ".join(told) if policy["name"] == "llama-cpp" else str(policy["name"]).replace("-", "_")
    return observation(
        {"row": row.check, "model": row.spec if isinstance(row.spec, str) else json.dumps(row.spec), "setting": setting,
         "context": row.depth, "decode": 8, "value": row.measured, "unit": "tokens/s", "alias": True,
         "role": "identification" if used else "check", "place": row.check}
    )  # fmt: skip


def identified_groups(frame: pd.DataFrame) -> pd.DataFrame:
    """Sum up the errors of rows that were never used: by memory rate, inside the sweep and outside, by machine.

    A row a group, as of `moesim.studies.validation.public.groups`.
    """
    if frame.empty:
        return pd.DataFrame()
    rest = frame[frame["part"] != "used"]
    measured = rest[rest["rate"] == "measured"]
    inside, other = measured[measured["part"] == "inside"], measured[measured["part"] == "other"]
    some = [
        ("machines with a measured memory rate", measured, "error"),
        ("of these, inside the sweep", inside, "error"),
        ("the same, by a straight line through its ends", inside, "straight"),
        ("of these, other models, weights and settings", other, "error"),
        ("machines without", rest[rest["rate"] != "measured"], "error"),
    ]
    some += [(str(name), rows, "error") for name, rows in rest.groupby("machine", sort=False)]
    return pd.DataFrame([error_group(name, rows, key) for name, rows, key in some if not rows.empty])


def identified_table(frame: pd.DataFrame, form: Format) -> str:
    """Write the errors by group; ends with a newline."""
    cells = [
        [one["group"], str(one["rows"]), *(f"{100 * one[key]:.1f} %" for key in ("median", "p90")),
         f"{100 * one['worst']:+z.1f} %", one["worst_row"]]
        for one in identified_groups(frame).to_dict("records")
    ]  # fmt: skip
    return render(_HEADINGS, cells, form, _HEADINGS[1:5])


def main(arguments: Sequence[str] | None = None) -> int:
    """Identify machines of public sweeps from two rows each, and predict their other rows; takes some minutes."""
    return run(_identified, parser("experiments.research.tables.public_identified", main.__doc__), arguments)


def _identified(given: Namespace) -> None:
    with telling() as tell:
        found = identified_sweeps(read_sweeps(sweeps_file()), tell)
    records = plain(found)
    sys.stdout.write(render_records(records, given.form) if given.form.for_programs else identified_table(found, given.form))
    if given.out is not None:
        write(given.out, {"public_identified.csv": render_records(records, Format.CSV).encode()}, "public_identified")


if __name__ == "__main__":
    sys.exit(main())
