"""Derived hardware profiles against public end-to-end measurements; nothing fitted.

Two tables, single figures and sweeps of llama.cpp's options, have a check a line, with its run or why there is none. A run from
which its profile took numbers is marked ``calibration`` and counts in no statistic. A setting beyond the GPU's memory checks
that the simulator refuses it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from types import MappingProxyType
from typing import Any, ClassVar, Final

import pandas as pd

from moesim.core.data import data_dirs
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.gate import read_lines
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_S
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import CapacityError, ConfigError, unknown_name
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.store import SUMMARY
from moesim.hardware import load_hardware, weakest
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec, load_model
from moesim.studies.identify.fit import two_devices
from moesim.studies.identify.model_error import ModelError, shipped, time_shares
from moesim.trace import Trace

FOLDER = "validation"  # below experiments
_Errors = Mapping[str, ModelError]  # by machine
_Words = Mapping[str, Sequence[str]]


def shipped_table(name: str, what: str) -> Path:
    """Return a shipped table. Raises `ConfigError` if there is none."""
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / name).is_file():
            return folder / FOLDER / name
    raise ConfigError(f"experiments/{FOLDER}/{name}: expected {what}, got no such file")


def _read(
    path: Path, row: type, what: str, *, words: _Words, run_words: _Words, needed: Sequence[str], run: Sequence[str],
    numbers: Sequence[str], least: int, yaml: Sequence[str], several: bool,
) -> Iterator[tuple[dict[str, Any], str]]:  # fmt: skip
    """Yield named rows; columns of a run are empty or 0 where nothing is predicted."""
    lines = list(read_lines(path, [field.name for field in fields(row)], what))
    for name, n in Counter(texts["check"] for texts, _ in lines).items():
        if n > 1:
            raise ConfigError(f"{path}: check: expected each name once, got '{name}' {n} times; rename one")
    for texts, place in lines:
        _check_words(texts, place, words)
        values: dict[str, Any] = {**texts, "measured": _measured(texts["measured"], place, several)}
        runs = texts["status"] != "not predicted"
        for key in (*needed, *(run if runs else ())):
            if not texts[key]:
                raise ConfigError(f"{place}: {key}: expected a value, got nothing; every row of this status needs one")
        for key in () if runs else run:
            if texts[key]:
                raise ConfigError(f"{place}: {key}: expected nothing where nothing is predicted, got {texts[key]!r}; remove it")
        if not runs:
            yield values | dict.fromkeys(numbers, 0), place
            continue
        _check_words(texts, place, run_words)
        for key in numbers:
            if not texts[key].isdecimal() or int(texts[key]) < least:
                bound = f" of at least {least}" if least else ""
                raise ConfigError(f"{place}: {key}: expected a whole number{bound}, got {texts[key]!r}; correct it")
            values[key] = int(texts[key])
        values |= {key: read_yaml_value(texts[key], f"{place}: {key}") for key in yaml}
        spec = values["spec"]
        if isinstance(spec, dict) and str(spec.get("base", "")).endswith(".json"):
            values["spec"] = spec | {"base": str(path.parent / spec["base"])}
        yield values, place


def _check_words(texts: Mapping[str, str], place: str, known: _Words) -> None:
    for key, words in known.items():
        if texts[key] not in words:
            raise ConfigError(f"{place}: {key}: {unknown_name(key, texts[key], words)}")


def _measured(text: str, place: str, several: bool) -> float | tuple[float, ...]:
    try:
        found = tuple(float(part) for part in (text.split("|") if several else [text]))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(value) and value > 0 for value in found):
        expected = "numbers above 0 with | between them" if several else "tokens/s above 0"
        raise ConfigError(f"{place}: measured: expected {expected}, got {text!r}; correct it")
    return found if several else found[0]


FILE: Final = "public.csv"
STATUSES = ("predicted", "calibration", "not predicted")
"""A prediction; a run from which numbers of its own profile come; a measurement that says too little."""

MARKS = ("M", "m", "W")
"""Measured with method and machine stated; either of them thin; a secondary page."""

METRICS = ("decode_tokens_per_s", "prefill_tokens_per_s")


@dataclass(frozen=True)
class Check:
    """A measurement, and the run that predicts it."""

    # check, row: unique name, and the number of the table row it belongs to
    check: str
    row: str
    # model, weights, machine, setting: what was measured, in words
    model: str
    weights: str
    machine: str
    setting: str
    measured: tuple[float, ...]  # tokens/s: more than one: two engines, or a range
    # unit, mark, source: unit, how well the measurement is described (`MARKS`), and where it was found
    unit: str
    mark: str
    source: str
    status: str  # one of `STATUSES`. Without a prediction all that follows is empty, but for `how`
    # spec, hardware, policy, cache: as in an experiment; a model's base that ends in `.json` lies next to the table
    spec: Any
    hardware: Any
    routing: str  # name of the parameters of the synthetic routing, whose shape becomes the model's
    policy: Any
    cache: Any
    # prompt, decode: tokens
    prompt: int
    decode: int
    metric: str  # one of `METRICS`
    how: str  # what the prediction rests on, or why there is none

    @property
    def value(self) -> float:
        """Measured value, tokens/s: the geometric mean if there are several."""
        return self.measured[0] if len(self.measured) == 1 else geometric_mean(self.measured)

    @property
    def profile(self) -> str:
        return str(self.hardware["base"] if isinstance(self.hardware, Mapping) else self.hardware or "")


def checks_file() -> Path:
    """Return the shipped table of public measurements. Raises `ConfigError` if there is none."""
    return shipped_table(FILE, "the table of public measurements")


def read_checks(path: Path) -> list[Check]:
    """Read public measurements."""
    rows = _read(
        path, Check, "a table of public measurements", words={"status": STATUSES, "mark": MARKS}, run_words={"metric": METRICS},
        needed=("source", "how"), run=("spec", "hardware", "routing", "policy", "cache", "prompt", "decode", "metric"),
        numbers=("prompt", "decode"), least=1, yaml=("spec", "hardware", "policy", "cache"), several=True,
    )  # fmt: skip
    return [Check(**values) for values, _ in rows]


SWEEPS: Final = "public_sweeps.csv"
SWEEP_STATUSES: Final = ("predicted", "cliff", "not predicted")
"""A prediction; a setting that exceeds the GPU's memory; one that says too little or needs what is not here."""
RATES: Final = ("measured", "other")
"""Whether the source gives a measured memory rate of the machine."""
PLACES: Final = ("gpu", "mixed", "cpu")
"""Where the layers' experts are: all on the GPU, some on the CPU, everything on the CPU."""
KINDS: Final = ("tg", "pp")
"""Decode and prefill, in the words of llama-bench."""


@dataclass(frozen=True)
class Sweep:
    """A setting of a machine, what was measured, and the run that predicts it."""

    # check, machine: unique name, and the machine it belongs to
    check: str
    machine: str
    # rate, thin: one of `RATES`; `yes` where machine or method is thinly described
    rate: str
    thin: str
    # model, weights, engine, setting, context, kind, source: what was measured, in words; `kind` is one of `KINDS`
    model: str
    weights: str
    engine: str
    setting: str
    context: str
    kind: str
    measured: float  # tokens/s: speed
    # status, place: one of `SWEEP_STATUSES`, and of `PLACES`. Without a run, `place` and all that follows but `how` is empty or 0
    status: str
    place: str
    # layers_on_cpu, layers: layers whose experts are on the CPU, of how many
    layers_on_cpu: int
    layers: int
    # spec, hardware, policy: as in an experiment; a model's base that ends in `.json` lies next to the table
    spec: Any
    hardware: Any
    routing: str  # parameters of the synthetic routing
    policy: Any
    depth: int  # tokens before the decoded ones; of a prompt its own
    ubatch: int  # rows of a step of the prompt whose speed is predicted; 0: decoding is
    source: str
    how: str  # what the prediction rests on, or why there is none

    cache: ClassVar = {"ratio": 1.0}

    @property
    def decode(self) -> int:
        """Tokens; where nothing moves, each takes the same time but for the growing context."""
        return 1 if self.ubatch else 8

    @property
    def metric(self) -> str:
        return METRICS[1] if self.ubatch else METRICS[0]

    @property
    def prompt(self) -> int:
        return self.depth

    @property
    def curve(self) -> str:
        """Name of the line that the row is a point of: model and weights."""
        return f"{self.model} {self.weights}"


def sweeps_file() -> Path:
    """Return the shipped table of sweeps. Raises `ConfigError` if there is none."""
    return shipped_table(SWEEPS, "the table of public sweeps")


def read_sweeps(path: Path) -> list[Sweep]:
    """Read sweeps."""
    rows = _read(
        path, Sweep, "a table of public sweeps", run_words={"place": PLACES}, needed=("machine", "model", "source", "how"),
        words={"rate": RATES, "thin": ("yes", "no"), "kind": KINDS, "status": SWEEP_STATUSES}, least=0, several=False,
        run=("place", "layers_on_cpu", "layers", "spec", "hardware", "routing", "policy", "depth"),
        numbers=("layers_on_cpu", "layers", "depth", "ubatch"), yaml=("spec", "hardware", "policy"),
    )  # fmt: skip
    found = []
    for values, place in rows:
        if values["layers_on_cpu"] > values["layers"]:
            got = f"{values['layers_on_cpu']} of {values['layers']}"
            raise ConfigError(f"{place}: layers_on_cpu: expected at most the model's layers, got {got}; correct one")
        found.append(Sweep(**values))
    return found


_SEED: Final = 0
_UNINFORMED: Final = frozenset({"all-cpu", "all-gpu", "llama-cpp"})
"""Policies that read no calibration tables, which take most of the time to make for a short trace."""
_LAST_ROWS: Final = 512
"""Most rows of a prompt that are made where its length matters to decoding alone: a context of 65,536 takes a minute to make."""


def predict(check: Check | Sweep, folder: Path, error: ModelError | None = None) -> dict[str, Any]:
    """Simulate a check: ``predicted`` (tokens/s) with its interval, ``label``, and shares of the run's time."""
    model = load_model(check.spec, f"check {check.check}: spec")
    raw = {
        "model": check.spec, "hardware": check.hardware, "trace": str(_trace(check, model, folder)),
        "workload": {
            "batch_size": 1, "prompt_tokens": check.prompt, "decode_tokens": check.decode,
            "prefill_chunk": getattr(check, "ubatch", 0) or 512,
        },
        "cache": check.cache, "policies": [check.policy], "timeline": None,
    }  # fmt: skip
    place = f"check {check.check}"
    experiment = Experiment(parse_config(raw, place), place)
    outcome = run_experiment(experiment).outcomes[0]
    if outcome.failure is not None:
        raise type(outcome.failure)(f"{place}: {outcome.failure}")
    row, costs = outcome.row, outcome.provenance or {}
    times = {key[5:-3]: float(value) for key, value in row.items() if key.startswith("time_") and isinstance(value, (int, float))}
    total = sum(times.values())
    predicted, hardware = float(str(row[check.metric])), experiment.specs[0].hardware
    low, high = (error or shipped()).factors(hardware, time_shares(row, hardware), prompt=check.metric == METRICS[1])
    return {
        "predicted": predicted,
        "low": predicted * low,
        "high": predicted * high,
        # Of the costs alone: routing is synthetic everywhere, and matters little where all experts are in one place.
        "label": weakest(cost["source"] for cost in costs.values()),
        **{f"share_{cause}": time / total for cause, time in times.items()},
    }


def _is_plain(check: Check | Sweep) -> bool:
    return (check.policy["name"] if isinstance(check.policy, Mapping) else check.policy) in _UNINFORMED


def _rows(check: Check | Sweep) -> int:
    """Return the prompt's rows that are simulated: the last, where nothing moves and prompts are not asked for."""
    return min(check.prompt, _LAST_ROWS) if _is_plain(check) and check.metric == METRICS[0] else check.prompt


def _trace(check: Check | Sweep, model: ModelSpec, folder: Path) -> Path:
    """Make routing of the model's shape, or find what another check has made."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.generate import N_CALIBRATION

    plain, rows = _is_plain(check), _rows(check)
    shape = f"{model.n_layers}x{model.n_experts}x{model.top_k}{'-plain' if plain else ''}"
    path = folder / f"{check.routing}-{shape}-{check.prompt}+{check.decode}.safetensors"
    if not path.is_file():
        try:
            found = read_parameters(check.routing)
        except ConfigError as error:
            raise ConfigError(f"check {check.check}: routing: {error}") from None
        found = found.replace(n_layers=model.n_layers, n_experts=model.n_experts, top_k=model.top_k)
        made = synthesize(
            found,
            n_requests=1,
            n_prompt=rows,
            n_decode=check.decode,
            seed=_SEED,
            n_signal_requests=0,
            folder=folder,
            n_calibration=0 if plain else N_CALIBRATION,
        )
        if rows < check.prompt:
            made = Trace.build(
                experts=made.experts, n_prompt=[rows], n_decode=[check.decode], n_experts=made.n_experts, model=made.model,
                label=made.label, prompt_offset=check.prompt - rows,
            )  # fmt: skip
        made.write(path)
    return path


def predict_sweep(sweep: Sweep, folder: Path, error: ModelError | None = None) -> dict[str, Any]:
    """Simulate a setting, as `predict`; beyond the memory only ``refused``."""
    if sweep.status == "not predicted":
        return {}
    try:
        found = predict(sweep, folder, error)
    except CapacityError:
        if sweep.status != "cliff":
            raise
        return {"refused": True}
    return {"refused": False} if sweep.status == "cliff" else found


def bytes_alone(sweep: Sweep) -> float:
    """Return the tokens/s of one request at the machine's rates alone, whatever the software costs."""
    model, written = load_model(sweep.spec), sweep.hardware if isinstance(sweep.hardware, Mapping) else {"base": sweep.hardware}
    machine = {key: value for key, value in written.items() if not key.endswith(("_us", ".operations"))}  # of software
    hardware = load_hardware({**machine, "engine": "none"})
    costs = CostModel(model, hardware, extrapolate=True)
    gpu, cpu = two_devices(hardware)
    policy = sweep.policy if isinstance(sweep.policy, Mapping) else {}
    whole = sweep.place == "cpu" or (policy.get("n_gpu_layers") is not None and not policy.get("n_cpu_moe"))
    on_cpu = len(model.blocks) if sweep.place == "cpu" else sweep.layers_on_cpu
    work2, ns = 2 * sweep.depth + 1, costs.head_ns(cpu if sweep.place == "cpu" else gpu, 1)
    for layer, position in enumerate(model.positions):
        dense = cpu if whole and position < on_cpu else gpu
        ns += costs.attention_ns(dense, 1, work2, 1, layer) + costs.dense_ns(dense, 1, layer) + costs.shared_ns(dense, 1, layer)
        ns += model.top_k * costs.expert_ns(cpu if position < on_cpu else gpu, 1)
    leading = cpu if whole and on_cpu == len(model.blocks) else gpu
    return NS_PER_S / (ns + costs.leading_ns(leading, 1, work2, 1))


NEAR: Final = 0.25
"""Error within which nine of ten predictions are wanted."""


def run_sweeps(sweeps: Sequence[Sweep], folder: Path, bar: Progress, errors: _Errors = MappingProxyType({})) -> pd.DataFrame:
    """Predict every setting with enough detail; errors: ratios less 1, ``missing_ms`` a token."""
    records = []
    known: dict[str, dict[str, Any]] = {}  # of the same run: a setting may have been measured several times
    for sweep in sweeps:
        bar.describe(f"{sweep.machine}: {sweep.model}")
        run = json.dumps(
            [
                sweep.machine,
                sweep.status,
                sweep.kind,
                sweep.spec,
                sweep.hardware,
                sweep.routing,
                sweep.policy,
                sweep.depth,
                sweep.ubatch,
            ]
        )
        if run not in known:
            known[run] = predict_sweep(sweep, folder, errors.get(sweep.machine))
        records.append(_sweep_record(sweep, known[run]))
        bar.advance(1)
    return pd.DataFrame(records)


def _sweep_record(sweep: Sweep, found: dict[str, Any]) -> dict[str, Any]:
    predicted = found.get("predicted")
    return {
        "check": sweep.check, "machine": sweep.machine, "rate": sweep.rate, "thin": sweep.thin == "yes", "model": sweep.model,
        "weights": sweep.weights, "curve": sweep.curve, "engine": sweep.engine, "setting": sweep.setting,
        "context": sweep.context, "kind": sweep.kind, "ubatch": sweep.ubatch,
        "place": sweep.place, "layers_on_cpu": sweep.layers_on_cpu,
        "layers": sweep.layers,
        "measured": sweep.measured, "predicted": predicted, "low": found.get("low"), "high": found.get("high"),
        "ratio": None if predicted is None else predicted / sweep.measured,
        "error": None if predicted is None else predicted / sweep.measured - 1,
        "bytes_alone": None if predicted is None or sweep.ubatch else bytes_alone(sweep),
        "missing_ms": None if predicted is None else 1e3 / sweep.measured - 1e3 / predicted, "status": sweep.status,
        "refused": found.get("refused"), "label": found.get("label", ""), "source": sweep.source, "how": sweep.how,
        **{key: value for key, value in found.items() if key.startswith("share_")},
    }  # fmt: skip


def groups(frame: pd.DataFrame) -> pd.DataFrame:
    """Sum up errors (median, p90, mean, in `NEAR`, worst) by memory rate and place, machine."""
    if frame.empty:
        return pd.DataFrame()
    done = frame[frame["status"] == "predicted"]
    prompts, done = done[done["ubatch"] > 0], done[done["ubatch"] == 0]
    measured = done[done["rate"] == "measured"]
    some = [("machines with a measured memory rate", measured), ("of these, well described", measured[~measured["thin"]])]
    places = (("gpu", "all experts on the GPU"), ("mixed", "mixed"), ("cpu", "all on the CPU"))
    some += [(f"of these, {words}", measured[measured["place"] == place]) for place, words in places]
    some.append(("machines without", done[done["rate"] != "measured"]))
    some.append(("prompts", prompts))
    some += [(f"prompts, {name}", rows) for name, rows in prompts.groupby("machine", sort=False)]
    some += [(str(name), rows) for name, rows in done.groupby("machine", sort=False)]
    some += [(f"{machine}: {curve}", rows) for (machine, curve), rows in done.groupby(["machine", "curve"], sort=False)]
    return pd.DataFrame([error_group(name, rows) for name, rows in some if not rows.empty])


def error_group(name: str, rows: pd.DataFrame, key: str = "error") -> dict[str, Any]:
    """Sum up the errors of some rows; `groups` names what comes out."""
    errors = rows[key].astype(float)
    worst = int(errors.abs().to_numpy().argmax())
    bare = (rows["bytes_alone"].astype(float) / rows["measured"] - 1).abs() if "bytes_alone" in rows else errors.abs() * math.nan
    return {
        "group": name, "rows": len(rows),
        "bytes_median": float(bare.median()), "bytes_p90": float(bare.quantile(0.9)),
        "median": float(errors.abs().median()), "p90": float(errors.abs().quantile(0.9)),
        "mean": float(errors.mean()), "within": float((errors.abs() <= NEAR).mean()), "worst": float(errors.iloc[worst]),
        "worst_row": str(rows["check"].iloc[worst]),
    }  # fmt: skip


_HEADINGS: Final = (
    "sweeps", "rows", "median |error|", "nine of ten within", "bytes alone: median", "nine of ten", "mean", "within 25 %",
    "worst", "which",
)  # fmt: skip


_BARE: Final = ("bytes_median", "bytes_p90")


def group_table(frame: pd.DataFrame, form: Format) -> str:
    """Write the errors by group."""
    records = groups(frame).to_dict("records")
    if form.for_programs:
        return render_records([{str(key): value for key, value in record.items()} for record in records], form)
    cells = [
        [
            record["group"],
            str(record["rows"]),
            *("" if math.isnan(record[key]) else f"{100 * record[key]:.1f} %" for key in ("median", "p90", *_BARE)),
            f"{100 * record['mean']:+z.1f} %",
            f"{100 * record['within']:.0f} %",
            f"{100 * record['worst']:+z.1f} %",
            record["worst_row"],
        ]
        for record in records
    ]
    return render(_HEADINGS, cells, form, _HEADINGS[1:9])


def summarise_sweeps(frame: pd.DataFrame) -> str:
    """Summarise the errors of the sweeps' predictions in a few lines."""
    if frame.empty:
        return ""
    lines = [
        f"sweeps, {one['group']}: {one['rows']}, median absolute error {100 * one['median']:.1f} %, nine of ten within "
        f"{100 * one['p90']:.0f} %, {100 * one['within']:.0f} % within {100 * NEAR:.0f} %"
        for one in groups(frame).to_dict("records")
        if one["group"].startswith("machines with") or one["group"] == "prompts"
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
    "check", "model", "weights", "machine", "setting", "measured", "predicted", "ratio", "label",
    "how, or why not",
)  # fmt: skip


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
        decoding = result.sweeps[result.sweeps["ubatch"] == 0]
        drawn |= pictures(sweeps(decoding), "public_sweeps") if plot and len(decoding) else {}
    files |= {"public.md": text.encode(), **drawn}
    OutputFolder(out, OWNER).replace(files, last=SUMMARY)
