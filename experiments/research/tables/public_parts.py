"""Predict public machines from the names of their parts alone, and answer ten questions about them.

``experiments/validation/machines_by_parts.csv`` names the parts of machines whose decode speeds are public. Nothing measured on
a machine is used: what its parts give is compared with all its rows, and ten rows are asked as a reader would ask them.
"""

from __future__ import annotations

import csv
import math
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from experiments.research.tables.command import parser, run
from experiments.research.tables.public_identified import observed_row
from moesim.core.table import Format, render, render_records
from moesim.core.units import digits
from moesim.hardware import read_profile
from moesim.studies.advice.llama_cpp import LlamaCpp
from moesim.studies.advice.question import Asked, look_up
from moesim.studies.identify.cases import make_cases
from moesim.studies.identify.fit import Machine
from moesim.studies.identify.model_error import shipped
from moesim.studies.identify.predictor import Memo, Predictor
from moesim.studies.validation.public import Sweep, read_sweeps, sweeps_file

ROOT: Final = Path(__file__).resolve().parents[3]
PARTS: Final = ROOT / "experiments" / "validation" / "machines_by_parts.csv"
ASKED: Final = (
    "rtx2070s-i5-12400f-3", "rx6700xt-ryzen5800x-25", "gtx1060-i5-7600k-30", "rtx4070-i5-12600k-1", "rtx5070ti-ryzen9800x3d-4",
    "ryzen-ai-max-395-1", "a10-xeon8358-29", "rtx3090-i9-11900kf-4", "epyc9175f-2", "m4-max-8",
)  # fmt: skip
"""Rows of public_sweeps.csv that are asked: one a machine, of ten kinds of machine."""


def machines() -> dict[str, dict[str, str]]:
    """Read the parts of each machine."""
    with PARTS.open(encoding="utf-8", newline="") as file:
        return {row["machine"]: row for row in csv.DictReader(file)}


def predicted() -> Iterator[dict[str, Any]]:
    """Predict all decode speeds of machines whose parts are known."""
    known, rows = machines(), dict[str, list[Sweep]]()
    for sweep in read_sweeps(sweeps_file()):
        if sweep.status == "predicted" and sweep.kind == "tg" and sweep.machine in known:
            rows.setdefault(sweep.machine, []).append(sweep)
    for name, some in rows.items():
        raw, _, _ = read_profile(known[name]["parts"], "hardware")
        machine, cases = Machine(raw, "hardware"), make_cases([observed_row(row, used=False) for row in some])
        predictor, zero = Predictor(machine, cases, Memo()), np.zeros(len(machine.constants))
        times, slopes = predictor.values(zero), np.abs(predictor.slopes(zero))
        for row, time, observed, slope in zip(some, times, predictor.observed, slopes, strict=True):
            shares = dict(zip((one.name for one in machine.constants), (slope / slope.sum()).tolist(), strict=True))
            low, high = shipped().factors(machine.base, LlamaCpp.shares(shares))
            speed = 1e9 / math.exp(time)
            yield {
                "machine": name, "parts": known[name]["parts"], "check": row.check, "model": row.model, "setting": row.setting,
                "measured": 1e9 / math.exp(observed), "predicted": speed, "low": speed * low, "high": speed * high,
            }  # fmt: skip


def summary(frame: pd.DataFrame) -> list[list[str]]:
    """Summarise errors by machine, and of all."""
    found = []
    for name, rows in [*frame.groupby("machine", sort=False), ("all", frame)]:
        error = (rows["predicted"] / rows["measured"] - 1).abs()
        inside = ((rows["low"] <= rows["measured"]) & (rows["measured"] <= rows["high"])).mean()
        width = math.exp(float(np.median(np.log(rows["high"] / rows["low"]))) / 2)
        found.append(
            [str(name), str(len(rows)), f"{100 * error.median():.0f} %", f"{100 * error.quantile(0.9):.0f} %",
             f"{100 * inside:.0f} %", f"x{width:.2f}"]
        )  # fmt: skip
    return found


_HEADINGS: Final = ("machine", "rows", "median error", "nine of ten within", "inside the interval of 90 %", "half its width")


def questions() -> Iterator[list[str]]:
    """Answer the rows of `ASKED` as `moesim recommend` does: at the measured setting, and the best one."""
    known, rows = machines(), {sweep.check: sweep for sweep in read_sweeps(sweeps_file())}
    for name in ASKED:
        row = rows[name]
        with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
            llama = LlamaCpp(look_up(Asked(row.spec, known[row.machine]["parts"], bits=""), Path(folder)))
        case = make_cases([observed_row(row, used=False)])[0]
        speed, best = llama.decode([case])[0], llama.best
        chosen = "does not fit" if best is None else f"{best.place.title}: {digits(best.decode.value)}"
        pasted = re.sub(r"\s+", " ", f"{row.model} {row.weights}, {row.setting}, {row.context}")
        answer = f"{digits(speed.value)} ({digits(speed.low)} to {digits(speed.high)})"
        yield [known[row.machine]["parts"], pasted, answer, digits(float(row.measured)), chosen]


_ASKED_HEADINGS: Final = ("--hardware", "measured row", "answer, tokens/s", "measured", "best at 16,384 tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print errors by machine; with --questions, ten answers."""
    options = parser("experiments.research.tables.public_parts", __doc__)
    options.add_argument("--questions", action="store_true", help="answer ten rows instead")
    return run(_printed, options, arguments)


def _printed(given: Namespace) -> None:
    if given.questions:
        sys.stdout.write(render(_ASKED_HEADINGS, list(questions()), given.form, _ASKED_HEADINGS[2:4]))
        return
    frame = pd.DataFrame(predicted())
    if given.form.for_programs:
        sys.stdout.write(render_records(list(predicted()), given.form))
        return
    sys.stdout.write(render(_HEADINGS, summary(frame), Format(given.form), _HEADINGS[1:]))


if __name__ == "__main__":
    sys.exit(main())
