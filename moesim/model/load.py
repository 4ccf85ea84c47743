"""Models by name, from a ``config.json`` or a YAML file, or changed in an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moesim.core.gate import YAML, read_text
from moesim.core.limits import BITS
from moesim.core.units import parse_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, ModelError, unknown_name
from moesim.model.check import find_problem, is_int
from moesim.model.config import read_config
from moesim.model.spec import DEFAULTS, FIELDS, MXFP4_BITS, ModelSpec, bits_to_bytes
from moesim.model.zoo import BUILTIN

__all__ = ["MXFP4_BITS", "ModelSpec", "bits_to_bytes", "builtin_models", "load_model"]

_REQUIRED = tuple(key for key in FIELDS if key not in DEFAULTS)
_SETTABLE = tuple(key for key in FIELDS if key != "labels")
_YAML = (".yaml", ".yml")
_UNITS = ("n_experts", "top_k")  # written as experts, counted as units
_NOT_LABELLED = ("name", "source")  # they change no figure


def builtin_models() -> dict[str, ModelSpec]:
    """Return all built-in specs by name, in listing order.

    >>> builtin_models()["qwen3-30b-a3b"].expert_bytes(0)
    9437184
    """
    return {spec.name: spec for spec in BUILTIN}


def load_model(source: str | Path | Mapping[str, Any], place: str = "model") -> ModelSpec:
    """Load a model's specification.

    Parameters
    ----------
    source : str, Path or mapping
        A built-in name; the path of a Hugging Face ``config.json`` or of a folder with one (a text is a path
        if it ends in ``.json`` or contains a slash), or of a ``.yaml`` file that holds such a mapping; or a mapping with
        ``base`` (any of these) and changed fields. A mapping without ``base`` gives a whole model and needs every
        field that has no default.
    place : str
        File and key, for messages.

    Returns
    -------
    ModelSpec
        Changed fields are recorded in ``labels``.

    Raises
    ------
    ModelError
        If a name or field is unknown, a file cannot be read, or the figures are impossible.

    Examples
    --------
    >>> load_model({"base": "qwen3-30b-a3b", "top_k": 6}).labels
    ('top_k=6',)
    """
    if isinstance(source, Mapping):
        return _load_mapping(source, place)
    if isinstance(source, Path):
        return _load_file(source)
    if not isinstance(source, str):
        expected = "a model's name, the path of a config.json, or a mapping with 'base'"
        raise ModelError(f"{place}: expected {expected}, got {source!r}")
    if source.endswith((".json", *_YAML)) or "/" in source or "\\" in source:
        return _load_file(Path(source))
    models = builtin_models()
    if source not in models:
        message = unknown_name("model", source, models)
        raise ModelError(f"{place}: {message}; or give the path of a config.json")
    return models[source]


def _load_file(path: Path) -> ModelSpec:
    if path.suffix not in _YAML:
        return read_config(path)
    try:
        content = read_yaml_value(read_text(path, YAML, "a model as YAML"), str(path))
    except ConfigError as error:
        raise ModelError(str(error)) from None
    if not isinstance(content, Mapping):
        raise ModelError(f"{path}: expected a mapping with 'base', got {type(content).__name__}; write base: NAME")
    if str(content.get("base", "")).endswith(_YAML):  # a chain of files could be a ring
        raise ModelError(
            f"{path}: base: expected a built-in name or a config.json, got {content['base']!r}; write changes in one file"
        )
    return _load_mapping(content, f"{path}: model")


def _load_mapping(source: Mapping[str, Any], place: str) -> ModelSpec:
    changes = {key: value for key, value in source.items() if key != "base"}
    for key in changes:
        if key not in _SETTABLE:
            raise ModelError(f"{place}: {unknown_name('model field', str(key), ('base', *_SETTABLE))}")
    if "expert_bits" in changes and changes.get("expert_bytes_by_layer") is not None:
        raise ModelError(f"{place}: expected expert_bits or expert_bytes_by_layer, got both; leave one out")
    if changes.get("expert_bytes_by_layer") is not None:
        changes["expert_bytes_by_layer"] = _parse_layer_bytes(changes["expert_bytes_by_layer"], place)
    if isinstance(changes.get("expert_bits"), (list, tuple)):
        if not changes["expert_bits"]:
            raise ModelError(f"{place}.expert_bits: expected a number of bits or several, the largest first, got none")
        changes["expert_bits"], *low_bits = changes["expert_bits"]
        changes["low_bits"] = tuple(low_bits)
    elif "expert_bits" in changes:
        changes.setdefault("low_bits", ())
    low = changes.get("low_bits")
    if isinstance(low, (int, float, list)):  # beside the bytes of each layer, which have no number of bits
        changes["low_bits"] = tuple(low) if isinstance(low, list) else (low,)
    if "base" in source:
        values, labels = _apply_changes(source["base"], changes, place)
    else:
        missing = [key for key in _REQUIRED if key not in changes]
        if missing:
            keys = ", ".join(missing)
            raise ModelError(f"{place}: expected 'base' or a whole model, got neither; add base, or {keys}")
        values, labels = DEFAULTS | {"source": place} | changes, ()
    if is_int(units := changes.get("units_per_expert")) and all(is_int(values[key]) for key in _UNITS):
        values |= {key: values[key] * units for key in _UNITS}
    problem = find_problem(values)
    if problem is not None:
        raise ModelError(f"{place}.{problem}")
    return ModelSpec(**values | {"labels": labels})


def _apply_changes(base: Any, changes: dict[str, Any], place: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    if isinstance(base, Mapping):
        raise ModelError(f"{place}.base: expected a model's name or the path of a config.json, got {base!r}")
    spec = load_model(base, f"{place}.base")
    values = asdict(spec)
    changed = [key for key, value in changes.items() if value != values[key] and key not in _NOT_LABELLED]
    labels = spec.labels + tuple(f"{key}={_show(changes[key])}" for key in sorted(changed, key=FIELDS.index))
    return values | changes, labels


def _parse_layer_bytes(value: Any, place: str) -> tuple[int, ...]:
    key = f"{place}.expert_bytes_by_layer"
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"{key}: expected a list of sizes, one for each layer, got {value!r}")
    try:
        return tuple(parse_bytes(size, f"{key}[{layer}]") for layer, size in enumerate(value))
    except ConfigError as error:
        raise ModelError(str(error)) from None


def _show(value: Any) -> str:
    if isinstance(value, tuple) and all(isinstance(one, (int, float)) and one <= BITS.most for one in value):
        return "+".join(f"{one:g}" for one in value)
    if isinstance(value, tuple):  # bytes for each layer: the range is enough to tell results apart by eye
        return f"{min(value)}..{max(value)}" if value else "()"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
