"""The experiment file: a flat, strict YAML in which any field may be a list to sweep.

`load_config` reads a file and ``--set`` overrides into a `Config`; `json_schema` describes the format for editors.
What the names mean is resolved later, in `moesim.experiment.resolve`; here only the form is checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from moesim.core.data import shipped
from moesim.core.limits import COUNT, TIME_US
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.experiment.config_errors import first_problem
from moesim.experiment.forms import (
    Flag,
    HardwareRef,
    ModelRef,
    Natural,
    PlotRef,
    PolicyRef,
    Positive,
    RequestsRef,
    Share,
    Size,
    Sweep,
    Text,
    TraceRef,
    listed,
)  # fmt: skip
from moesim.experiment.include import read_merged, with_tables
from moesim.trace.workload import WorkloadSpec

EXPERIMENTS = "experiments"  # the folder of those that are shipped


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _workload_form(name: str, default: Any, least: int | None) -> Any:
    """Give what a file may hold for a parameter of a workload: one value of its type, or several to sweep."""
    if name == "requests":
        return RequestsRef | None
    one: Any = get_type_hints(WorkloadSpec)[name]
    if least is not None:
        one = Annotated[int, Field(strict=True, ge=least, le=COUNT.most)]
        one = one | None if default is None else one
    sweep: Any = Sweep
    return sweep[Flag if one is bool else one]


_FORMS: dict[str, Any] = {
    one.name: (_workload_form(one.name, one.default, one.metadata["least"]), one.default) for one in fields(WorkloadSpec)
}
_Workload: Any = create_model("_Workload", __base__=_Strict, **_FORMS)


class WorkloadConfig(_Workload):
    """What to run; the meaning of each key is that of `moesim.trace.workload.WorkloadSpec`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class CacheConfig(_Strict):
    """How many experts each GPU may cache: shares of all experts, or what fits into memory budgets, or those and then these."""

    ratio: Sweep[Share] | None = None
    budget: Sweep[Size] | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> CacheConfig:
        if self.ratio is None and self.budget is None:
            raise ValueError("expected ratio or budget, got neither")
        return self

    def sizes(self) -> list[dict[str, Any]]:
        """Give every size that is asked for, as fields of a run: a share of all experts, or the memory that all must fit into."""
        shares = [{"ratio": one, "budget_bytes": None} for one in listed(self.ratio) if one is not None]
        return shares + [{"ratio": None, "budget_bytes": one} for one in listed(self.budget) if one is not None]


class TransferConfig(_Strict):
    """Which of a link's transfer curves is used, and into what chunks a transfer is cut."""

    curve: Sweep[Literal["pinned", "pageable", "chunked"]] = "pinned"
    chunk: Sweep[Size | None] = None


def _no_path(name: str) -> str:
    """It names a folder in ``results/``, and no other."""
    if set(name) & set("/\\:") or not name.isprintable() or name.startswith(".") or name != name.strip() or len(name) > 100:
        raise ValueError(
            "expected at most 100 characters that name a folder: no slash, backslash or colon, no dot in front, "
            f"got {name[:40]!r}; to choose a folder elsewhere, use output or --out"
        )
    return name


class TimelineConfig(_Strict):
    """Which policies, at the first setting, go into ``timeline.json`` (null: all), and how many of their steps."""

    policies: list[Text] | None = None
    steps: Positive = 3


class Config(_Strict):
    """One experiment: what to run, on what, with which policies."""

    name: Annotated[Text, AfterValidator(_no_path)] | None = None
    description: str | None = None
    zip: list[Annotated[list[Text], Field(min_length=2)]] = Field(default_factory=list)
    exclude: list[Annotated[dict[str, Any], Field(min_length=1)]] = Field(default_factory=list)
    repeat: Positive = 1
    model: Sweep[ModelRef]
    hardware: Sweep[HardwareRef]
    trace: Sweep[TraceRef]
    workload: WorkloadConfig = WorkloadConfig()
    cache: CacheConfig
    policies: Annotated[list[PolicyRef], Field(min_length=1)]
    predictors: dict[str, Sweep[Text]] = Field(default_factory=dict)
    transfer: TransferConfig = TransferConfig()
    decision_us: Sweep[Annotated[float, Field(strict=True, ge=0, le=TIME_US.most, allow_inf_nan=False)]] = 0.0
    extrapolate: Sweep[Flag] = False
    intervals: Flag = False
    plots: list[PlotRef] = Field(default_factory=list)
    timeline: TimelineConfig | None = TimelineConfig()
    frames: Flag = False
    warm_up_steps: Sweep[Natural | None] = None
    output: Text | None = None


def parse_config(raw: Any, place: str) -> Config:
    """Check the form of an experiment.

    Parameters
    ----------
    raw : object
        What the YAML holds.
    place : str
        The file, for messages.

    Returns
    -------
    Config

    Raises
    ------
    ConfigError
        With the first thing that is wrong: file, key, expected, got.

    Examples
    --------
    >>> parse_config({"model": "m", "hardware": "h", "trace": "t", "cache": {"ratio": -1}, "policies": ["p"]}, "a.yaml")
    Traceback (most recent call last):
    moesim.errors.ConfigError: a.yaml: cache.ratio: expected a number in [0, 1], got -1; choose a value in this range
    """
    if not isinstance(raw, dict):
        got = "nothing" if raw is None else type(raw).__name__
        raise ConfigError(f"{place}: expected a mapping with model, hardware, trace, cache and policies, got {got}")
    if "policies" in raw:
        raw = {**raw, "policies": with_tables(raw["policies"], place)}
    try:
        return Config.model_validate(raw)
    except ValidationError as failure:
        raise ConfigError(f"{place}: {first_problem(failure, Config)}") from None


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read an experiment file.

    Parameters
    ----------
    path : Path
        The YAML file; what its ``include`` names lies below it. A name such as ``quickstart``, or a path in ``experiments/``
        that is not in this folder, means an experiment that is shipped.
    overrides : sequence of str
        ``"a.b=value"``; the value is YAML.

    Returns
    -------
    Config

    Raises
    ------
    ConfigError
        If the file cannot be read, is not valid YAML, or does not have the right form.
    """
    path = _found(path)
    raw = read_merged(path)
    if isinstance(raw, dict):
        for override in overrides:
            apply_override(raw, override)
    return parse_config(raw, f"{path} with --set {' --set '.join(overrides)}" if overrides else str(path))


def _found(path: Path) -> Path:
    """Find an experiment: a file, or else one that is shipped."""
    if path.is_file() or path.suffix:
        return shipped(path)
    named = path.with_suffix(".yaml") if path.name else path
    found = shipped(named if len(path.parts) > 1 else Path(EXPERIMENTS) / named)
    return found if found.is_file() else path


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one key of an experiment, as ``--set`` does.

    Parameters
    ----------
    raw : dict
        The experiment; changed in place.
    override : str
        ``"a.b=value"``; the value is YAML. Below a model or a hardware profile given by name, the name becomes the base.

    Raises
    ------
    ConfigError
        If there is no ``=``, or the path leads through something that is neither a mapping nor a list.

    Examples
    --------
    >>> raw = {"model": "mixtral-8x7b", "policies": ["lru"]}
    >>> apply_override(raw, "model.top_k=1")
    >>> apply_override(raw, "policies.0={name: lru, per_layer: true}")
    >>> raw
    {'model': {'base': 'mixtral-8x7b', 'top_k': 1}, 'policies': [{'name': 'lru', 'per_layer': True}]}
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected key.path=value, got {override!r}")
    value = read_yaml_value(text, f"--set {key}")
    steps = key.split(".")
    here: Any = raw
    for position, step in enumerate(steps[:-1]):
        where = ".".join(steps[: position + 1])
        if isinstance(here, list):
            here = here[_index(here, step, override)]
        else:
            inside = here.get(step)
            if position == 0 and step in ("model", "hardware") and isinstance(inside, str):
                inside = here[step] = {"base": inside}
            here = here.setdefault(step, {}) if inside is None else inside
        if not isinstance(here, dict | list):
            raise ConfigError(f"--set {override}: expected {where} to be a mapping or a list, got {here!r}")
    if isinstance(here, list):
        here[_index(here, steps[-1], override)] = value
    else:
        here[steps[-1]] = value


def _index(values: list[Any], step: str, override: str) -> int:
    if not step.isdecimal() or int(step) >= len(values):
        raise ConfigError(f"--set {override}: expected an index below {len(values)}, got '{step}'")
    return int(step)


def json_schema() -> str:
    """Describe the format of experiment files as JSON Schema.

    Returns
    -------
    str
        JSON text, for an editor that completes and checks YAML.
    """
    schema = Config.model_json_schema() | {"title": "moesim experiment"}
    text = {"type": "string"}
    schema["properties"]["include"] = {"anyOf": [text, {"type": "array", "items": text}]}
    del schema["required"]  # what a file lacks may stand in one that it includes
    return json.dumps(schema, indent=2, sort_keys=True)
