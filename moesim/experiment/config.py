"""Read an experiment file and its includes, check its form, and describe it for editors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)

from moesim.core.data import data_dirs, shipped
from moesim.core.gate import SMALLER, YAML, TooLargeError, decoded, read_text, why_not
from moesim.core.limits import CACHE_RATIO, COUNT, TIME_US
from moesim.core.units import as_share, parse_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import IN_RANGE, ConfigError, mistyped, unknown_name
from moesim.hardware.read import keys_at
from moesim.model.spec import FIELDS as MODEL_FIELDS
from moesim.trace.made import MADE, made_schema
from moesim.trace.workload import WorkloadSpec
from moesim.trace.workload.spec import FORMS

_TAGS = ("one", "many")  # of a sweepable field: which of its two forms was meant

# pydantic's error types -> what was expected
_EXPECTED = {
    "int_type": "an integer", "int_from_float": "an integer", "int_parsing": "an integer",
    "float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number",
    "bool_type": "true or false", "string_type": "a text", "string_too_short": "a text that is not empty",
    "list_type": "a list", "dict_type": "a mapping", "model_type": "a mapping",
    "too_short": "at least one entry",
}  # fmt: skip


def key_path(steps: Sequence[str | int]) -> str:
    """Write a place in a YAML file.

    >>> key_path(["cache", "ratio", 1])
    'cache.ratio[1]'
    """
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def first_problem(failure: ValidationError, root: type[BaseModel]) -> str:
    """Describe the first thing that is wrong."""
    errors = sorted(failure.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    steps = [step for step in first["loc"] if step not in _TAGS]
    either = bool(steps) and steps[-1] == "str"  # a text or a mapping: pydantic has an error for each
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 + either else ""
    path = key_path(steps[:-1] if either else steps)
    words = _no_mapping(path, first.get("input")) if either else _message(first, steps, root)
    message = " ".join(words.split())
    return f"{path}: {message}{more}" if path else message + more


def _message(error: Mapping[str, Any], steps: Sequence[str | int], root: type[BaseModel]) -> str:
    kind, got, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "extra_forbidden":
        name, known = str(steps[-1]), keys_at(steps[:-1], root)
        meant = _MEANT.get(name) if steps[0] == "workload" else None
        return (
            f"unknown key '{name}'; did you mean '{meant}'?"
            if meant
            else unknown_name("key", name, known) + _elsewhere(name, steps[:-1])
        )
    if kind == "missing":
        return "expected this key, got nothing; add it"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        several = " or " in context["expected"]
        return f"expected {context['expected']}, got {got!r}{'; choose one of these' if several else ''}"
    if steps and _field_name(steps) == "ratio":
        return mistyped("a number in [0, 1]", got) + _remedy_of_a_share(got)
    if kind == "greater_than_equal":
        number = "an integer" if isinstance(context["ge"], int) else "a number"
        return f"expected {number} of at least {context['ge']}, got {got!r}; {IN_RANGE}"
    if kind == "less_than_equal":
        number = "an integer" if isinstance(context["le"], int) else "a number"
        return f"expected {number} of at most {context['le']}, got {got!r}; {IN_RANGE}"
    if kind == "model_type":
        return f"{mistyped('a mapping', got)}; its keys are {', '.join(keys_at(steps, root))}"
    if kind == "list_type" and steps and isinstance(steps[-1], int):  # of zip, whose entries go into one list together
        return f"expected a list, got {got!r}; write [[KEY, KEY]]"
    if kind in _EXPECTED:
        unit = _UNITS.get(_field_name(steps)) if isinstance(got, str) else None
        words = mistyped(_EXPECTED[kind], got)
        return words if unit is None or ";" in words else f"{words}; write it in {unit}, without a unit"
    return f"expected {str(error['msg']).removeprefix('Input should be ')}, got {got!r}"


_MEANT = {  # keys of a workload, as servers and benchmarks call them
    "users": "closed", "concurrency": "closed", "max_concurrency": "closed", "arrival_rate": "rate", "request_rate": "rate",
    "qps": "rate", "rps": "rate", "input_tokens": "prompt_tokens", "output_tokens": "answer_tokens", "num_prompts": "n_requests",
    "num_requests": "n_requests", "slo": "limits",
}  # fmt: skip
_UNITS = {"rate": "requests a second", "think_s": "seconds", "until_s": "seconds"}


def _no_mapping(path: str, got: object) -> str:
    """Word that a value is neither a text nor a mapping."""
    words, example = FORMS.get(path.partition("[")[0].removeprefix("workload."), ("a text or a mapping", ""))
    return f"expected {words}, got {got!r}; {f'write it as {example}' if example else 'correct it'}"


def _elsewhere(key: str, here: Sequence[str | int]) -> str:
    """Name the section of an experiment that has a key which another one has not."""
    sections: dict[str, type[BaseModel]] = {"workload": WorkloadConfig, "cache": CacheConfig, "transfer": TransferConfig}
    owners = [name for name, section in sections.items() if key in section.model_fields and [name] != list(here)]
    owners += ["model"] if key in MODEL_FIELDS else []
    return f"; it belongs to {owners[0]}" if owners else ""


def _remedy_of_a_share(got: object) -> str:
    """Return the remedy of a share out of range, which may be meant as bytes."""
    if isinstance(got, str):
        return "; for bytes use cache.budget" if got[:1].isdigit() and got[-1:].isalpha() else ""
    if isinstance(got, bool) or not isinstance(got, int | float):
        return ""
    sized = f"; a quarter is 0.25; for bytes use cache.budget, or --cache {got:g}GB" if got > 1 else ""
    return sized or f"; {IN_RANGE}"


def _field_name(steps: Sequence[str | int]) -> str:
    return next((step for step in reversed(steps) if isinstance(step, str)), "")


T = TypeVar("T")


def _how_many(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


Sweep = Annotated[Annotated[T, Tag("one")] | Annotated[list[T], Field(min_length=1), Tag("many")], Discriminator(_how_many)]
"""One value, or a list of values to sweep."""


def listed(value: Any) -> list[Any]:
    """Return the values of a field that may be one or several."""
    return value if isinstance(value, list) else [value]


def _named(what: str, *keys: str) -> AfterValidator:
    """Check for a name, a path, or a mapping that contains one of `keys`."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, dict) and all(isinstance(k, str) for k in value) and any(key in value for key in keys):
            return value
        raise ValueError(f"expected {what} or a mapping with the key {' or '.join(keys)}, got {value!r}")

    return AfterValidator(check)


def _named_schema(*keys: str) -> WithJsonSchema:
    mappings = [{"type": "object", "required": [key], "properties": {key: {"type": "string"}}} for key in keys]
    return WithJsonSchema({"anyOf": [{"type": "string"}, *mappings]})


def _size(value: Any) -> int:
    try:
        n_bytes = parse_bytes(value, "")
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(": ")) from None
    if n_bytes < 1:
        raise ValueError(f"expected a size of at least 1 byte, got {value!r}")
    return n_bytes


def _share(value: float) -> float:
    if 0 < value < CACHE_RATIO.least:
        raise ValueError(f"expected a share of all experts of at least {CACHE_RATIO.least:g}, got {value:g}; less is no expert")
    return value


Positive = Annotated[int, Field(strict=True, ge=1, le=COUNT.most)]
Natural = Annotated[int, Field(strict=True, ge=0, le=COUNT.most)]
Size = Annotated[
    Any,
    AfterValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
Share = Annotated[
    float,
    Field(strict=True, ge=0, le=CACHE_RATIO.most),
    BeforeValidator(as_share),
    AfterValidator(_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": CACHE_RATIO.most},
                {"type": "string", "pattern": r"^\s*([0-9]+\s*/\s*[0-9]+|[0-9.]+\s*%)\s*$"},
            ]
        }
    ),
]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]


ModelRef = Annotated[Any, _named("a model's name, the path of a config.json,", "base", "name"), _named_schema("base", "name")]
HardwareRef = Annotated[
    Any, _named("a hardware profile's name, the path of a YAML file,", "base", "name", "parts"), _named_schema("base", "name")
]
TraceRef = Annotated[
    Any,
    _named("a trace's name, the path of a file,", MADE),
    WithJsonSchema({"anyOf": [{"type": "string"}, made_schema()]}),
]
PolicyRef = Annotated[Any, _named("a policy's name", "name"), _named_schema("name")]
PlotRef = Annotated[Any, _named("a kind of figure", "kind"), _named_schema("kind")]


def _requests(value: Any) -> Any:
    """Check for requests by number, or several such lists: the one list of a file of one run."""
    for one in value if isinstance(value, list) and not all(map(_is_request, value)) else [value]:
        if one != "all" and not (isinstance(one, list) and one and all(map(_is_request, one))):
            raise ValueError(f"expected all, or a list of request numbers (or several such lists to sweep), got {value!r}")
    return value


def _is_request(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT.most


_NUMBERS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_ONE_OF_REQUESTS: list[Any] = [{"const": "all"}, _NUMBERS]
RequestsRef = Annotated[
    Any,
    AfterValidator(_requests),
    WithJsonSchema({"anyOf": [*_ONE_OF_REQUESTS, {"type": "array", "items": {"anyOf": _ONE_OF_REQUESTS}}]}),
]


def served_by(workload: WorkloadConfig) -> str | None:
    """Return the key with which a workload asks for requests that arrive, if it does."""
    return next((key for key in ("arrivals", "closed") if any(one is not None for one in listed(getattr(workload, key)))), None)


def refuse_served(config: Config, place: str, verb: str) -> None:
    """Raise `ConfigError` if an experiment has requests that arrive, for a command that needs all steps beforehand."""
    if (key := served_by(config.workload)) is not None:
        raise ConfigError(
            f"{place}: workload.{key}: expected batches for moesim {verb}, which needs all steps beforehand, got "
            f"{getattr(config.workload, key)!r}; set batch_size and decode_tokens instead, or take moesim run"
        )


INCLUDE = "include"
FILE = "file"
MAX_INCLUDED = 20
"""Most files that include each other in a row."""


def read_merged(path: Path) -> Any:
    """Read an experiment file and what it includes."""
    return _unshared(_read_file(path, (), {}))


def _read_file(path: Path, above: Sequence[Path], known: dict[Path, Any]) -> Any:
    """Read a file and what it includes; `known` are those that have been read."""
    here = _resolved(path, above)
    if here in known:
        return known[here]
    raw = known[here] = read_yaml_value(_file_text(path, above), str(path))
    if not isinstance(raw, dict) or INCLUDE not in raw:
        return raw
    if len(above) >= MAX_INCLUDED:
        raise ConfigError(f"{path}: {INCLUDE}: expected at most {MAX_INCLUDED} files that include each other, got more")
    own = {key: value for key, value in raw.items() if key != INCLUDE}
    merged: dict[str, Any] = {}
    for name in _included(raw[INCLUDE], path):
        part = path.parent / name
        if _resolved(part, (*above, here)) in (*above, here):
            raise ConfigError(f"{path}: {INCLUDE}: expected files that do not include this one, got '{name}'; remove it")
        found = _read_file(part, (*above, here), known)
        if not isinstance(found, dict):
            got = "nothing" if found is None else type(found).__name__
            raise ConfigError(f"{path}: {INCLUDE}: expected a mapping in '{name}', got {got}")
        merged = merge(merged, found)
    known[here] = merge(merged, own)
    return known[here]


def _resolved(path: Path, above: Sequence[Path]) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a null character
        raise _unreadable(path, above, str(error)) from None


def with_tables(policies: Any, place: str) -> Any:
    """Read the files that options of policies name: ``released: {file: adapmoe.yaml}``."""

    def content(value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [content(one, where) for one in value]
        if not isinstance(value, Mapping) or set(value) != {FILE}:
            return value
        path = value[FILE]
        if not isinstance(path, str) or not path.strip():
            raise ConfigError(f"{where}: {FILE}: {mistyped('a text, the path of a YAML file', path)}")
        found = read_yaml_value(read_text(Path(path), YAML, "released tables"), path)
        if not isinstance(found, dict) or "source" not in found:
            got = f"the keys {', '.join(map(str, found))[:60]}" if isinstance(found, dict) else type(found).__name__
            raise ConfigError(
                f"{path}: expected a mapping with tables and source, which says where the numbers come from, got {got}; add it"
            )
        return found

    if not isinstance(policies, list):
        return policies
    return [
        {key: content(value, f"{place}: policies[{i}]: {key}") for key, value in spec.items()} if isinstance(spec, dict) else spec
        for i, spec in enumerate(policies)
    ]


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inside) for key, inside in value.items()}
    return [_unshared(inside) for inside in value] if isinstance(value, list) else value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another, key by key.

    >>> merge({"workload": {"seed": 1, "batch_size": [1, 2]}}, {"workload": {"batch_size": [8]}})
    {'workload': {'seed': 1, 'batch_size': [8]}}
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _included(value: Any, path: Path) -> list[str]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{path}: {INCLUDE}: expected the path of a file or a list of paths, got {value!r}")
    return names


def _file_text(path: Path, above: Sequence[Path]) -> str:
    try:
        return decoded(path, YAML)
    except TooLargeError as error:
        raise _unreadable(path, above, why_not(error), SMALLER) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, above, why_not(error)) from None


def _unreadable(path: Path, above: Sequence[Path], reason: str, remedy: str = "") -> ConfigError:
    whose = f"{above[-1]}: {INCLUDE}: " if above else ""
    return ConfigError(f"{whose}{path}: expected an experiment file, got: {reason}; {remedy or _remedy(path)}")


def _remedy(path: Path) -> str:
    known = [other.name for other in path.parent.glob("*.y*ml")]
    if len(path.parts) == 1 and not path.suffix:  # a shipped one by its name
        known += [other.stem for folder in data_dirs("experiments") for other in folder.glob("*.yaml")]
    near = get_close_matches(path.name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "correct the path"


EXPERIMENTS = "experiments"  # the folder of those that are shipped


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _workload_form(name: str, default: Any, least: int | None) -> Any:
    """Return the form of a parameter of a workload: one value of its type, or several."""
    if name == "requests":
        return RequestsRef | None
    one: Any = get_type_hints(WorkloadSpec)[name]
    if one == float | None:
        one = Annotated[float, Field(strict=True)] | None
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
    """The workload; the meaning of each key is that of `moesim.trace.workload.WorkloadSpec`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class CacheConfig(_Strict):
    """How many experts each GPU may cache: shares of all experts, memory budgets, or both in turn."""

    ratio: Sweep[Share] | None = None
    budget: Sweep[Size] | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> CacheConfig:
        if self.ratio is None and self.budget is None:
            raise ValueError("expected ratio or budget, got neither")
        return self

    def sizes(self) -> list[dict[str, Any]]:
        shares = [{"ratio": one, "budget_bytes": None} for one in listed(self.ratio) if one is not None]
        return shares + [{"ratio": None, "budget_bytes": one} for one in listed(self.budget) if one is not None]


class TransferConfig(_Strict):
    """Which of a link's transfer curves is used, and into what chunks a transfer is cut."""

    curve: Sweep[Literal["own", "pinned", "pageable", "chunked"]] = "own"  # the policy's, else pinned
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
    """Policies of ``timeline.json`` (null: all of the first setting), and how many of their steps."""

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
    trace: Sweep[TraceRef] | None = None
    workload: WorkloadConfig = WorkloadConfig()
    cache: CacheConfig
    policies: Annotated[list[PolicyRef], Field(min_length=1)]
    predictors: dict[str, Sweep[Text]] = Field(default_factory=dict)
    transfer: TransferConfig = TransferConfig()
    decision_us: Sweep[Annotated[float, Field(strict=True, ge=0, le=TIME_US.most, allow_inf_nan=False)]] = 0.0
    extrapolate: Sweep[Flag] = False
    engine: Sweep[Text] = "own"
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
