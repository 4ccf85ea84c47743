"""Derived hardware profiles against public end-to-end measurements: predicted next to measured, nothing fitted.

Every check is one run of the simulator. A run from which numbers of its own profile were taken is marked ``calibration`` and
counts in no statistic; what says too little to be predicted is listed with the reason.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.errors import CapacityError, ConfigError, unknown_name
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.store import SUMMARY
from moesim.hardware import weakest
from moesim.model import ModelSpec, load_model
from moesim.studies.validation.public_tables import FILE, SWEEPS, Check, Sweep, checks_file, read_checks, read_sweeps, sweeps_file

_DECODE: Final = 8
"""Tokens that a prediction decodes: where nothing moves, each takes the same time but for the growing context."""
_SEED: Final = 0
_UNINFORMED: Final = frozenset({"all-cpu", "all-gpu", "llama-cpp"})
"""Policies that read no calibration tables, which take most of the time to make for a short trace."""


def predict(check: Check, folder: Path) -> dict[str, Any]:
    """Simulate a check: ``predicted`` (tokens/s), ``label``, and shares of the run's time."""
    model = load_model(check.spec, f"check {check.check}: spec")
    raw = {
        "model": check.spec,
        "hardware": check.hardware,
        "trace": str(_trace(check, model, folder)),
        "workload": {"batch_size": 1, "prompt_tokens": check.prompt, "decode_tokens": check.decode, "prefill_chunk": 512},
        "cache": check.cache,
        "policies": [check.policy],
        "timeline": None,
    }
    place = f"check {check.check}"
    outcome = run_experiment(Experiment(parse_config(raw, place), place)).outcomes[0]
    if outcome.failure is not None:
        raise type(outcome.failure)(f"{place}: {outcome.failure}")
    row, costs = outcome.row, outcome.provenance or {}
    times = {key[5:-3]: float(value) for key, value in row.items() if key.startswith("time_") and isinstance(value, (int, float))}
    total = sum(times.values())
    return {
        "predicted": float(str(row[check.metric])),
        # Of the costs alone: routing is synthetic everywhere, and matters little where all experts are in one place.
        "label": weakest(cost["source"] for cost in costs.values()),
        **{f"share_{cause}": time / total for cause, time in times.items()},
    }


def _trace(check: Check, model: ModelSpec, folder: Path) -> Path:
    """Make routing of the model's shape, or find what another check has made."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.generate import N_CALIBRATION

    policy = check.policy["name"] if isinstance(check.policy, Mapping) else check.policy
    plain = policy in _UNINFORMED
    shape = f"{model.n_layers}x{model.n_experts}x{model.top_k}{'-plain' if plain else ''}"
    path = folder / f"{check.routing}-{shape}-{check.prompt}+{check.decode}.safetensors"
    if not path.is_file():
        try:
            found = read_parameters(check.routing)
        except ConfigError as error:
            raise ConfigError(f"check {check.check}: routing: {error}") from None
        found = found.replace(n_layers=model.n_layers, n_experts=model.n_experts, top_k=model.top_k)
        synthesize(
            found,
            n_requests=1,
            n_prompt=check.prompt,
            n_decode=check.decode,
            seed=_SEED,
            n_signal_requests=0,
            folder=folder,
            n_calibration=0 if plain else N_CALIBRATION,
        ).write(path)
    return path


def predict_sweep(sweep: Sweep, folder: Path) -> dict[str, Any]:
    """Simulate a setting, as `predict`; beyond the memory only ``refused``."""
    check = Check(
        check=sweep.check, row=sweep.machine, model=sweep.model, weights=sweep.weights, machine=sweep.machine,
        setting=sweep.setting, measured=(sweep.measured,), unit="tokens/s", mark="m" if sweep.thin == "yes" else "M",
        source=sweep.source, status=sweep.status, spec=sweep.spec, hardware=sweep.hardware, routing=sweep.routing,
        policy=sweep.policy, cache={"ratio": 1.0}, prompt=sweep.depth, decode=_DECODE, metric="decode_tokens_per_s",
        how=sweep.how,
    )  # fmt: skip
    if sweep.status == "not predicted":
        return {}
    try:
        found = predict(check, folder)
    except CapacityError:
        if sweep.status != "cliff":
            raise
        return {"refused": True}
    return {"refused": False} if sweep.status == "cliff" else found


NEAR: Final = 0.25
"""Error within which nine of ten predictions are wanted."""


def run_sweeps(sweeps: Sequence[Sweep], folder: Path, bar: Progress) -> pd.DataFrame:
    """Predict every well enough described setting; errors are ratios less 1, ``missing_ms`` a token."""
    records = []
    known: dict[str, dict[str, Any]] = {}  # of the same run: a setting may have been measured several times
    for sweep in sweeps:
        bar.describe(f"{sweep.machine}: {sweep.model}")
        run = json.dumps([sweep.status, sweep.kind, sweep.spec, sweep.hardware, sweep.routing, sweep.policy, sweep.depth])
        if run not in known:
            known[run] = predict_sweep(sweep, folder)
        records.append(_sweep_record(sweep, known[run]))
        bar.advance(1)
    return pd.DataFrame(records)


def _sweep_record(sweep: Sweep, found: dict[str, Any]) -> dict[str, Any]:
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
    """Sum up errors (median, p90, mean, within `NEAR`, worst) by memory rate and place, then machine."""
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
    """Summarise the errors of the sweeps' predictions in a few lines."""
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


OWNER: Final = "validate --public"
LOOSE: Final = frozenset({"8", "13", "14", "17", "19", "20"})
"""Rows whose measurements hold to a factor of 1.3 only, as the description of the machine or the method is thin."""

FACTOR: Final = 1.3


@dataclass(frozen=True)
class PublicResult:
    """Results of all checks."""

    # a row a check: the words of the table, ``measured`` (tokens/s), ``measured_low``, ``measured_high``, ``predicted``
    # (tokens/s; none without a prediction), ``ratio`` (predicted over measured), ``error`` (ratio less 1), ``label`` (weakest
    # source of the costs used), ``profile``, ``loose`` and ``share_<cause>`` (of the run's time)
    frame: pd.DataFrame
    summary: str  # median and worst error, and how many are near; a few lines
    sweeps: pd.DataFrame  # a row a setting of a sweep, as of `moesim.studies.validation.public.run_sweeps`


def run_public(
    out: Path | None = None,
    *,
    rows: Sequence[str] = (),
    path: Path | None = None,
    sweeps: Path | None = None,
    progress: bool = True,
    plot: bool = True,
) -> PublicResult:
    """Predict every public measurement that is described well enough.

    `rows` are numbers of rows and machines of sweeps (all if empty), `path` and `sweeps` other tables than the shipped ones; with
    `path` alone there are no sweeps. An earlier result in `out` is replaced at the end. Raises `InputError` before it writes.
    """
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
    frame = pd.DataFrame(records, columns=None if records else _COLUMNS)
    result = PublicResult(frame, summarise(frame) + summarise_sweeps(swept), swept)
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
    """Summarise median and worst error of the predictions."""
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
    """Write predicted and measured values."""
    records = plain(frame)
    if form.for_programs:
        return render_records(records, form)
    return render(HEADINGS, [_cells(record) for record in records], form, HEADINGS[5:8])


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table, what is missing as None."""
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

    text = table(result.frame, Format.MD) + "\n" + result.summary
    files = {FILE: table(result.frame, Format.CSV).encode(), SUMMARY: table(result.frame, Format.JSON).encode()}
    drawn = pictures(public(result.frame), "public") if plot and result.frame["predicted"].notna().any() else {}
    if len(result.sweeps):
        files[SWEEPS] = render_records(plain(result.sweeps), Format.CSV).encode()
        text += "\n" + group_table(result.sweeps, Format.MD)
        drawn |= pictures(sweeps(result.sweeps), "public_sweeps") if plot else {}
    files |= {"public.md": text.encode(), **drawn}
    OutputFolder(out, OWNER).replace(files, last=SUMMARY)
