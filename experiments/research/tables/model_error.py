"""Estimate the model error from public rows, and how often intervals hold the truth on machines that had no part in it.

``python -m experiments.research.tables.model_error`` prints ``moesim/studies/identify/model_error.csv`` anew. ``--coverage``
leaves out each machine, estimates from the others, predicts its rows, before and after the ends of a sweep, and prints how many
of their measured speeds lie in their intervals. Both are repeated when rows are added.
"""

from __future__ import annotations

import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import gammaln

from experiments.research.tables.command import parser, run
from experiments.research.tables.public_identified import identified_sweeps, observed_row, of_machines
from moesim.core.progress import Progress, telling
from moesim.core.table import Format, render, render_records
from moesim.hardware import read_profile
from moesim.studies.identify.cases import make_cases
from moesim.studies.identify.fit import Machine, Vector
from moesim.studies.identify.model_error import ModelError, shipped, shipped_rows
from moesim.studies.identify.predictor import Memo, Predictor
from moesim.studies.validation.public import Sweep, read_sweeps, run_sweeps, sweeps_file

ESTIMATED: Final = ("machine", "model", "row", "freedom")
START: Final = {"machine": 0.05, "model": 0.05, "row": 0.03, "freedom": 4.0}
"""Where the search begins; also the middle of a loose prior, a factor of `LOOSE` wide, which matters with few machines."""
LOOSE: Final = 3.0


@dataclass(frozen=True)
class Rows:
    """Rows of a machine, linearised around its profile."""

    off: Vector  # logarithms of measured over predicted time
    prior: Vector  # covariance by the profile's labels
    alike: Vector  # correlation of what rows of one model share


def linearised(sweeps: Sequence[Sweep], tell: Callable[[str], None] = lambda text: None) -> dict[str, Rows]:
    """Predict each machine's rows and their derivatives; profiles that differ in a number are one machine."""
    parts: dict[str, list[tuple[Predictor, Machine]]] = {}
    for rows in of_machines(sweeps):
        tell(rows[0].machine)
        raw, path, _ = read_profile(rows[0].hardware, "hardware")
        machine = Machine(raw, path or "hardware")
        cases = make_cases([observed_row(row, used=False) for row in rows])
        parts.setdefault(rows[0].machine, []).append((Predictor(machine, cases, Memo()), machine))
    return {name: _joined(each) for name, each in parts.items()}


def _joined(parts: Sequence[tuple[Predictor, Machine]]) -> Rows:
    names = list(dict.fromkeys(one.name for _, machine in parts for one in machine.constants))
    off, wide = [], []
    for predictor, machine in parts:
        zero = np.zeros(len(machine.constants))
        off.append(predictor.observed - predictor.values(zero))
        each = np.zeros((len(predictor.cases), len(names)))
        slopes = predictor.slopes(zero, both=True) * np.sqrt(np.mean(np.square(machine.sigmas), axis=1))
        each[:, [names.index(one.name) for one in machine.constants]] = slopes
        wide.append(each)
    all_of = np.concatenate(wide)
    cases = [case for predictor, _ in parts for case in predictor.cases]
    return Rows(np.concatenate(off), all_of @ all_of.T, ModelError(model=1.0).covariance(cases, cases))


def estimate(machines: Iterable[Rows]) -> ModelError:
    """Maximise the likelihood of Student's t over machines."""
    known = list(machines)
    base = replace(shipped(), deviations_80=0.0)

    def error(place: Vector) -> ModelError:
        return replace(base, deviations=0.0, **dict(zip(ESTIMATED, np.exp(place).tolist(), strict=True)))

    def loss(place: Vector) -> float:
        prior = np.sum(((place - start) / math.log(LOOSE)) ** 2) / 2
        return float(prior) - sum(_log_likelihood(rows, error(place)) for rows in known)

    start = np.log([START[name] for name in ESTIMATED])
    found = minimize(loss, start, method="L-BFGS-B", bounds=[(math.log(1e-3), math.log(100))] * len(start))
    return error(np.round(found.x, 4))


def _log_likelihood(rows: Rows, error: ModelError) -> float:
    n, freedom = len(rows.off), error.freedom
    covariance = rows.prior + error.machine**2 + error.model**2 * rows.alike + error.row**2 * np.eye(n)
    lower = np.linalg.cholesky(covariance)
    off = np.linalg.solve(lower, rows.off)
    size = gammaln((freedom + n) / 2) - gammaln(freedom / 2) - n / 2 * math.log(freedom * math.pi)
    return float(size - np.log(np.diag(lower)).sum() - (freedom + n) / 2 * np.log1p(off @ off / freedom))


def prompt_row(prompts: pd.DataFrame, error: ModelError, date: str) -> dict[str, str]:
    """Return what prompts of a machine share beyond what all its rows do, from the frame of `run_sweeps`."""
    means = prompts["ratio"].astype(float).map(math.log).groupby(prompts["machine"]).mean()
    rms = float(np.sqrt(np.mean(means**2)))
    own = math.sqrt(max(0.0, rms**2 - error.machine**2 - error.model**2))
    counted = f"{len(prompts)} prompts of {len(means)} machines, root mean square of the means by machine ({rms:.2g})"
    return {"name": "prompt", "value": f"{own:.2g}", "source": f"estimated: {counted} less what all rows share, {date}"}


def records(
    error: ModelError, machines: Mapping[str, Rows], reached: Vector, prompts: pd.DataFrame
) -> list[dict[str, str]]:  # fmt: skip
    """Write the deviations with their sources; others stay as they are. ``reached``: of each row, with its machine left out."""
    n_rows = sum(len(rows.off) for rows in machines.values())
    date = datetime.now(UTC).date().isoformat()
    source = f"estimated: maximum likelihood over {n_rows} public rows of {len(machines)} machines, {date}"
    found = [{"name": name, "value": f"{getattr(error, name):.3g}", "source": source} for name in ESTIMATED]
    inside = f"of {len(reached)} rows, each predicted with its machine left out, {date}"
    for name, level in (("deviations", LEVELS[1]), ("deviations_80", LEVELS[0])):
        value = f"{np.quantile(reached, level):.4g}"
        found.append({"name": name, "value": value, "source": f"estimated: holds {100 * level:.0f} % {inside}"})
    found.append(prompt_row(prompts, error, date))
    return [*found, *(row for row in shipped_rows() if row["name"] not in {one["name"] for one in found})]


LEVELS: Final = (0.8, 0.9)
BOOTSTRAP: Final = 2000


def left_out(sweeps: Sequence[Sweep], tell: Callable[[str], None] = lambda text: None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predict each machine's rows by the model error of the others: as they are, and after two of its rows.

    The frames of `run_sweeps` and `identified_sweeps`, with the column ``narrower``: half the width of the interval of 80 % over
    that of 90 %.
    """
    before, errors = before_rows(sweeps, tell)
    after = identified_sweeps(sweeps, tell, errors)
    after = after[after["part"] != "used"].copy()
    after["narrower"] = [errors[name].quantile(2, LEVELS[0]) / errors[name].quantile(2) for name in after["machine"]]
    found = before.copy()
    for name in before["machine"].unique():
        own = before["machine"] == name
        some, most = (float(np.quantile(before.loc[~own, "reached"], level)) for level in LEVELS)
        found.loc[own, "narrower"] = some / most
        for end in ("low", "high"):
            found.loc[own, end] = before["predicted"] * (before[end] / before["predicted"]) ** (most / errors[name].quantile())
    return found, after


def before_rows(sweeps: Sequence[Sweep], tell: Callable[[str], None]) -> tuple[pd.DataFrame, dict[str, ModelError]]:
    """Predict each row with its machine left out; ``reached``: how many of its standard deviations the measured speed is off."""
    errors = {name: one for name, _, one in _without(sweeps, tell)}
    frame = _predicted([row for rows in of_machines(sweeps) for row in rows], errors)
    low, high, off = (np.log(frame[end] / frame["predicted"].astype(float)) for end in ("low", "high", "measured"))
    frame["reached"] = np.where(off < 0, off / low, off / high) * [errors[name].quantile() for name in frame["machine"]]
    return frame, errors


def _predicted(sweeps: Sequence[Sweep], errors: Mapping[str, ModelError] = MappingProxyType({})) -> pd.DataFrame:
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder, Progress(len(sweeps), enabled=False) as bar:
        return run_sweeps(sweeps, Path(folder), bar, errors)


def _without(sweeps: Sequence[Sweep], tell: Callable[[str], None]) -> Iterator[tuple[str, int, ModelError]]:
    """Estimate from all machines but each in turn; its name and rows."""
    machines = linearised(sweeps, tell)
    for name, rows in machines.items():
        tell(f"without {name}")
        yield name, len(rows.off), estimate(one for other, one in machines.items() if other != name)


def coverage(frame: pd.DataFrame, level: float, seed: int = 0) -> dict[str, Any]:
    """Return the share of rows in their intervals, its interval of 90 % over machines, and half the median width as a factor."""
    narrower = frame["narrower"].to_numpy(float) ** (level == LEVELS[0])
    predicted = frame["predicted"].to_numpy(float)
    low, high, off = (np.log(frame[end].to_numpy(float) / predicted) for end in ("low", "high", "measured"))
    low, high = low * narrower, high * narrower
    inside = (low <= off) & (off <= high)
    each = [inside[(frame["machine"] == name).to_numpy()] for name in frame["machine"].unique()]
    drawn = np.random.default_rng(seed).integers(0, len(each), (BOOTSTRAP, len(each)))
    sums, sizes = np.array([part.sum() for part in each]), np.array([len(part) for part in each])
    low_end, high_end = np.quantile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), [0.05, 0.95])
    return {
        "level": level, "inside": float(inside.mean()), "low": float(low_end), "high": float(high_end),
        "width": float(np.exp(np.median(high - low) / 2)), "rows": len(frame), "machines": len(each),
    }  # fmt: skip


def advised(before: pd.DataFrame) -> pd.DataFrame:
    """Keep of each sweep the setting with the highest predicted speed: what would be recommended among those measured."""
    sweep = ["machine", "curve", "engine", "context", "place_of"]
    grouped = before.assign(place_of=before["setting"].str.contains("ngl")).groupby(sweep, sort=False)
    return before.loc[[rows["predicted"].idxmax() for _, rows in grouped if rows["layers_on_cpu"].nunique() > 1]]


_HEADINGS: Final = ("intervals", "rows", "machines", "nominal", "inside", "90 % over machines", "half the width")


def coverage_table(before: pd.DataFrame, after: pd.DataFrame, form: Format) -> str:
    """Write how often intervals hold the measured speed."""
    known = before["rate"] == "measured"
    some = {"run": before, "run, measured memory rate": before[known], "run, others": before[~known]}
    some |= {"recommend": advised(before), "calibrate": after}
    found: list[dict[str, Any]] = [
        {"intervals": name} | coverage(frame, level) for name, frame in some.items() for level in LEVELS
    ]
    if form.for_programs:
        return render_records(found, form)
    cells = [
        [one["intervals"], str(one["rows"]), str(one["machines"]), f"{100 * one['level']:.0f} %", f"{100 * one['inside']:.0f} %",
         f"{100 * one['low']:.0f} to {100 * one['high']:.0f} %", f"x{one['width']:.2f}"]
        for one in found
    ]  # fmt: skip
    return render(_HEADINGS, cells, form, _HEADINGS[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of the model error; with --coverage, how often its intervals hold."""
    options = parser("experiments.research.tables.model_error", __doc__)
    options.add_argument("--coverage", action="store_true", help="leave out each machine in turn; takes some minutes")
    return run(_estimated, options, arguments)


def _estimated(given: Namespace) -> None:
    sweeps = read_sweeps(sweeps_file())
    with telling() as tell:
        if given.coverage:
            written = coverage_table(*left_out(sweeps, tell), given.form)
        else:
            known = linearised(sweeps, tell)
            reached = before_rows(sweeps, tell)[0]["reached"].to_numpy(float)
            prompts = _predicted([one for one in sweeps if one.status == "predicted" and one.ubatch])
            written = render_records(records(estimate(known.values()), known, reached, prompts), Format.CSV)
    sys.stdout.write(written)


if __name__ == "__main__":
    sys.exit(main())
