"""Derived hardware profiles against public end-to-end measurements: predicted beside measured, nothing fitted.

Every check is one run of the simulator. A run from which numbers of its own profile were taken is marked ``calibration`` and
counts in no statistic; what says too little to be predicted is listed with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.progress import Progress, telling
from moesim.core.table import Format, render, render_records
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.store import SUMMARY
from moesim.studies.validation.public_checks import FILE, Check, checks_file, read_checks
from moesim.studies.validation.public_predict import predict
from moesim.studies.validation.public_sweeps import SWEEPS, read_sweeps, sweeps_file
from moesim.studies.validation.sweep_report import group_table, run_sweeps, summarise_sweeps

OWNER: Final = "validate --public"
LOOSE: Final = frozenset({"8", "13", "14", "17", "19", "20"})
"""Rows whose measurements hold to a factor of 1.3 only, as the description of the machine or the method is thin."""

FACTOR: Final = 1.3


@dataclass(frozen=True)
class PublicResult:
    """What came of all checks.

    Attributes
    ----------
    frame : DataFrame
        A row a check: the words of the table, ``measured`` (tokens/s), ``measured_low``, ``measured_high``, ``predicted``
        (tokens/s; none without a prediction), ``ratio`` (predicted over measured), ``error`` (ratio less 1), ``label`` (weakest
        source of the costs used), ``profile``, ``loose`` and ``share_<cause>`` (of the run's time).
    summary : str
        Median and worst error, and how many are near; a few lines.
    sweeps : DataFrame
        A row a setting of a sweep, as of `moesim.studies.validation.sweep_report.run_sweeps`.
    identified : DataFrame
        If it was asked for, a row a setting, as of `moesim.studies.validation.sweep_identified.identified_sweeps`.
    """

    frame: pd.DataFrame
    summary: str
    sweeps: pd.DataFrame
    identified: pd.DataFrame = field(default_factory=pd.DataFrame)


def run_public(
    out: Path | None = None,
    *,
    rows: Sequence[str] = (),
    path: Path | None = None,
    sweeps: Path | None = None,
    progress: bool = True,
    plot: bool = True,
    identified: bool = False,
) -> PublicResult:
    """Predict every public measurement that says enough.

    Parameters
    ----------
    out : Path, optional
        Folder for ``public.csv``, ``summary.json`` and the figure; an earlier result there is replaced at the end.
    rows : sequence of str
        Numbers of the rows, and names of machines of sweeps, to predict; all if empty.
    path, sweeps : Path, optional
        Other tables than the shipped ones; with ``path`` alone there are no sweeps.
    progress : bool
        Show a bar on a terminal.
    plot : bool
        Draw the figure, if there is a folder.
    identified : bool
        Also identify each machine from two rows of a sweep, and predict its others.

    Returns
    -------
    PublicResult

    Raises
    ------
    InputError
        If the table, a row or the folder is wrong, or a check cannot be run; nothing is written then.
    """
    from moesim.studies.validation.sweep_identified import identified_sweeps  # SciPy takes most of a second to import

    checks = read_checks(path or checks_file())
    settings = read_sweeps(sweeps or sweeps_file()) if sweeps or not path else []
    known = list(dict.fromkeys([*(check.row for check in checks), *(one.machine for one in settings)]))
    for row in rows:
        if row not in known:
            raise ConfigError(f"validate --public: {unknown_name('row', row, known)}")
    checks = [check for check in checks if not rows or check.row in rows]
    settings = [one for one in settings if not rows or one.machine in rows]
    if out is not None:
        check_own_folder(out, OWNER)
    records = []
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder, Progress(len(checks) + len(settings), enabled=progress) as bar:
        for check in checks:
            bar.describe(f"{check.row}: {check.model}")
            found = {} if check.status == "not predicted" else predict(check, Path(folder))
            records.append(_record(check, found))
            bar.advance(1)
        swept = run_sweeps(settings, Path(folder), bar)
    with telling() as tell:
        after = identified_sweeps(settings, tell) if identified else pd.DataFrame()
    frame = pd.DataFrame(records, columns=None if records else _COLUMNS)
    result = PublicResult(frame, summarise(frame) + summarise_sweeps(swept), swept, after)
    if out is not None:
        _write(result, out, plot)
    return result


def _record(check: Check, found: Mapping[str, Any]) -> dict[str, Any]:
    predicted = found.get("predicted")
    ratio = None if predicted is None else predicted / check.value
    return {
        "check": check.check, "row": check.row, "model": check.model, "weights": check.weights, "machine": check.machine,
        "setting": check.setting, "metric": check.metric, "measured": check.value, "measured_low": min(check.measured),
        "measured_high": max(check.measured), "unit": check.unit, "predicted": predicted, "ratio": ratio,
        "error": None if ratio is None else ratio - 1, "status": check.status, "loose": check.row in LOOSE,
        "label": found.get("label", ""), "profile": check.profile, "mark": check.mark, "source": check.source, "how": check.how,
        **{key: value for key, value in found.items() if key.startswith("share_")},
    }  # fmt: skip


def summarise(frame: pd.DataFrame) -> str:
    """Tell median and worst error of the predictions."""
    predicted = frame[frame["status"] == "predicted"]
    lines = [
        _line("all predictions", predicted),
        _line("without rows that hold to a factor of 1.3 only", predicted[~predicted["loose"]]),
    ]
    n_calibration = int((frame["status"] == "calibration").sum())
    n_none = int((frame["status"] == "not predicted").sum())
    lines.append(f"not counted: {n_calibration} for calibration, {n_none} that say too little to be predicted")
    return "\n".join(lines) + "\n"


def _line(what: str, frame: pd.DataFrame) -> str:
    if frame.empty:
        return f"{what}: none"
    errors = frame["error"].astype(float)
    worst = frame.iloc[int(errors.abs().to_numpy().argmax())]
    near = [max(ratio, 1 / ratio) for ratio in frame["ratio"].astype(float)]
    return (
        f"{what}: {len(frame)}, median absolute error {100 * errors.abs().median():.0f} %, worst {100 * worst['error']:+z.0f} % "
        f"({worst['check']}: {worst['model']}, {worst['machine']}, {worst['setting']}); mean {100 * errors.mean():+z.0f} %; "
        f"within 10 %: {sum(n <= 1.1 for n in near)}, within a factor of {FACTOR:g}: {sum(n <= FACTOR for n in near)}"
    )


_COLUMNS: Final = ("check", "row", "measured", "predicted", "ratio", "error", "status", "loose", "label")
"""Of a result without a check."""

HEADINGS: Final = (
    "check",
    "model",
    "weights",
    "machine",
    "setting",
    "measured",
    "predicted",
    "ratio",
    "label",
    "how, or why not",
)


def table(frame: pd.DataFrame, form: Format) -> str:
    """Write predicted beside measured."""
    records = _plain(frame)
    if form.for_programs:
        return render_records(records, form)
    return render(HEADINGS, [_cells(record) for record in records], form, HEADINGS[5:8])


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(key): None if not isinstance(value, str) and pd.isna(value) else value for key, value in record.items()}
        for record in frame.astype(object).to_dict("records")
    ]


def _cells(record: Mapping[str, Any]) -> list[str]:
    low, high = record["measured_low"], record["measured_high"]
    measured = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    predicted = record["predicted"]
    if predicted is None:
        return [*(record[key] for key in HEADINGS[:5]), measured, "-", "-", "", record["how"]]
    ratio = f"{record['ratio']:.2f}" + (" (calibration)" if record["status"] == "calibration" else "")
    return [*(record[key] for key in HEADINGS[:5]), measured, f"{predicted:.3g}", ratio, record["label"], record["how"]]


def _write(result: PublicResult, out: Path, plot: bool) -> None:
    from moesim.plots.style import pictures
    from moesim.plots.validation import (
        public,  # Matplotlib takes a second to import
        sweeps,
    )
    from moesim.studies.validation.sweep_identified import identified_table

    text = table(result.frame, Format.MD) + "\n" + result.summary
    files = {FILE: table(result.frame, Format.CSV).encode(), SUMMARY: table(result.frame, Format.JSON).encode()}
    drawn = pictures(public(result.frame), "public") if plot and result.frame["predicted"].notna().any() else {}
    if len(result.sweeps):
        files[SWEEPS] = render_records(_plain(result.sweeps), Format.CSV).encode()
        text += "\n" + group_table(result.sweeps, Format.MD)
        drawn |= pictures(sweeps(result.sweeps), "public_sweeps") if plot else {}
    if len(result.identified):
        files["public_identified.csv"] = render_records(_plain(result.identified), Format.CSV).encode()
        text += "\n" + identified_table(result.identified, Format.MD)
    files |= {"public.md": text.encode(), **drawn}
    OutputFolder(out, OWNER).replace(files, last=SUMMARY)
