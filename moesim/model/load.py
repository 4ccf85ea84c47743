"""Models by name, from a ``config.json`` or a YAML file, or changed in an experiment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from moesim.core.gate import JSON, YAML, read_text
from moesim.core.limits import BITS
from moesim.core.text import note
from moesim.core.units import parse_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, ModelError, unknown_name
from moesim.model.check import find_problem, is_int
from moesim.model.gguf import parts_of, read_gguf
from moesim.model.keys import packaged_table, read_model
from moesim.model.parts import Shape, bits_to_bytes
from moesim.model.spec import DEFAULTS, FIELDS, MXFP4_BITS, ModelSpec

__all__ = ["MXFP4_BITS", "ModelSpec", "bits_to_bytes", "builtin_models", "load_model"]

_REQUIRED = tuple(key for key in FIELDS if key not in DEFAULTS)
_SETTABLE = tuple(key for key in FIELDS if key != "labels")
_YAML = (".yaml", ".yml")
_FILES = (".json", ".gguf", *_YAML)
KV_TYPES: Final[Mapping[str, float]] = {
    "f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5
}  # fmt: skip
"""Bits of a number of KV cache by the names that servers use; ggml's blocks of 32 numbers count with their scales."""
_OF_LAYERS = ("name", "source", "top_k", "expert_bits", "low_bits", "other_bits", "kv_bits", "act_bits", "expert_bytes_by_layer")
_BUILT_IN = (
    "mixtral-8x7b", "phi-3.5-moe", "deepseek-v2-lite", "moonlight-16b-a3b", "qwen1.5-moe", "qwen2-57b-a14b", "qwen3-30b-a3b",
    "olmoe", "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip
_UNITS = ("n_experts", "top_k")  # written as experts, counted as units
_NOT_LABELLED = ("name", "source")  # they change no figure


def builtin_models() -> dict[str, ModelSpec]:
    """Return all built-in specs by name, in listing order.

    >>> builtin_models()["qwen3-30b-a3b"].expert_bytes(0)
    9437184
    """
    return {name: _listed_model(name) for name in _BUILT_IN}


def load_model(source: str | Path | Mapping[str, Any], place: str = "model") -> ModelSpec:
    """Load a model's specification.

    Parameters
    ----------
    source : str, Path or mapping
        A name or an alias; the path of a Hugging Face ``config.json``, of a checkpoint's folder, of a GGUF file (the first of
        a split one, or its header alone), or of a ``.yaml`` file that holds such a mapping; or a mapping with
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
    if source.endswith(_FILES) or os.path.isdir(source):
        return _load_file(Path(source))
    if (found := _by_name(source)) is not None:
        return found
    if "/" in source or "\\" in source:
        return _load_file(Path(source))
    if len(meant := _meant(source)) == 1:
        _say_meant(source, meant[0])
        return _listed_model(meant[0])
    message = unknown_name("model", source, model_names(), "moesim list models")
    if meant:
        message = f"unknown model '{source}'; it could be {', '.join(meant[:6])}; `moesim list models` has all"
    raise ModelError(f"{place}: {message}; or give the path of a config.json or of a GGUF file")


def model_names() -> list[str]:
    """List the names that `load_model` knows."""
    return list(_listed())


_SHORTEST = 4  # letters and digits of a spelling by which a name is found


@cache
def _listed() -> dict[str, Any]:
    return packaged_table("models.yaml")


@cache
def _aliases() -> dict[str, str]:
    listed = {alias.lower(): name for name, entry in _listed().items() for alias in entry["aliases"]}
    return listed | {name: name for name in model_names()}


def _by_name(source: str) -> ModelSpec | None:
    """Find a model by name, alias, repository's name, or a GGUF file's name without its end."""
    short = source.lower()
    name = _aliases().get(short) or _aliases().get(short.rpartition("/")[2])
    if name is None:
        return None
    return _listed_model(name)


def _meant(source: str) -> list[str]:
    """Find the names whose letters and digits a spelling has, else those that begin with it."""
    typed = _letters(source)
    if len(typed) < _SHORTEST:
        return []
    known = {name: (name, *entry["aliases"]) for name, entry in _listed().items()}
    same = [name for name, spelt in known.items() if typed in map(_letters, spelt)]
    return same or [name for name, spelt in known.items() if any(typed in _beginnings(one) for one in spelt)]


@cache
def _say_meant(source: str, name: str) -> None:
    """Say once which name a spelling was taken for."""
    note(f"model '{source}' taken as {name}")


def _beginnings(name: str) -> set[str]:
    """Return the letters of a name's first words, of each number of them."""
    return {_letters(name[: found.start()]) for found in re.finditer(r"[-_/. ]", name)}


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def _listed_model(name: str) -> ModelSpec:
    entry = _listed()[name]
    where = entry["source"] + {"derived": ", derived", "assumed": ", assumed"}.get(entry["kind"], "")
    return replace(read_model(entry["keys"], None, name, where), source=where)


def _load_file(path: Path) -> ModelSpec:
    if path.is_dir():
        return _load_folder(path)
    if path.suffix == ".gguf":
        return read_gguf(path)
    if path.suffix not in _YAML:
        return _load_config(path)
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


def _load_folder(path: Path) -> ModelSpec:
    """Read the checkpoint in a folder: its config, or the first of its GGUF files."""
    if (path / "config.json").exists():
        return _load_config(path / "config.json")
    files = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))  # those are of pictures
    if not files:
        raise ModelError(f"{path}: expected a folder with config.json or a GGUF file, got one without; check the path")
    if len(parts_of(files[0])) != len(files):
        raise ModelError(f"{path}: expected one model, got {len(files)} GGUF files; name the one that is meant")
    return read_gguf(files[0])


def _load_config(path: Path) -> ModelSpec:
    data = _read_json(path, "the model's config.json")
    other = path.with_name("hf_quant_config.json")
    extra = _read_json(other, "how a checkpoint is quantised") if other.exists() else None
    given = data.get("_name_or_path")
    if isinstance(given, str) and given.strip("/ \n"):
        name = given.strip("/ \n").rsplit("/", 1)[-1]
    else:
        name = path.resolve().parent.name if path.stem == "config" else path.stem
    found = read_model(data, extra, name, path)
    return replace(found, source=f"{path.name} ({_architecture(data)})")


def _architecture(data: Mapping[str, Any]) -> str:
    names = data.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(data.get("model_type") or "no architecture named")


def _read_json(path: Path, what: str) -> dict[str, Any]:
    text = read_text(path, JSON, what, error=ModelError)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON, got something else: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _load_mapping(source: Mapping[str, Any], place: str) -> ModelSpec:
    changes = {key: value for key, value in source.items() if key != "base"}
    for key in changes:
        if key not in _SETTABLE:
            raise ModelError(f"{place}: {unknown_name('model field', str(key), ('base', *_SETTABLE))}")
    if "expert_bits" in changes and changes.get("expert_bytes_by_layer") is not None:
        raise ModelError(f"{place}: expected expert_bits or expert_bytes_by_layer, got both; leave one out")
    if changes.get("shape") is not None:
        changes["shape"] = Shape.from_dict(changes["shape"], f"{place}.shape")
    if changes.get("expert_bytes_by_layer") is not None:
        changes["expert_bytes_by_layer"] = _parse_layer_bytes(changes["expert_bytes_by_layer"], place)
    if isinstance(changes.get("expert_bits"), (list, tuple)):
        if not changes["expert_bits"]:
            raise ModelError(f"{place}.expert_bits: expected a number of bits or several, the largest first, got none")
        changes["expert_bits"], *low_bits = changes["expert_bits"]
        changes["low_bits"] = tuple(low_bits)
    elif "expert_bits" in changes:
        changes.setdefault("low_bits", ())
    if isinstance(kind := changes.get("kv_bits"), str):
        if kind.lower() not in KV_TYPES:
            raise ModelError(f"{place}.kv_bits: {unknown_name('type', kind, KV_TYPES)}; or give a number of bits")
        changes["kv_bits"] = KV_TYPES[kind.lower()]
    low = changes.get("low_bits")
    if isinstance(low, (int, float, list)):  # next to the bytes of each layer, which have no number of bits
        changes["low_bits"] = tuple(low) if isinstance(low, list) else (low,)
    if "base" in source:
        values, labels = _apply_changes(source["base"], changes, place)
    else:
        missing = [key for key in _REQUIRED if key not in changes]
        if missing:
            keys = ", ".join(missing)
            raise ModelError(f"{place}: expected 'base' or a whole model, got neither; add base, or {keys}")
        values, labels = DEFAULTS | {"source": place} | changes, ()
        if (shape := values["shape"]) is not None:
            sizes = values["expert_bytes_by_layer"]
            if sizes and "expert_bits" not in changes:
                values["expert_bits"] = round(sum(sizes) * 8 / (len(sizes) * shape.expert_params), 4)
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
    values = {key: getattr(spec, key) for key in FIELDS}
    changed = [key for key, value in changes.items() if value != values[key] and key not in _NOT_LABELLED]
    labels = spec.labels + tuple(f"{key}={_show(changes[key])}" for key in sorted(changed, key=FIELDS.index))
    if spec.shape is not None:
        if wrong := next((key for key in changes if key not in _OF_LAYERS), None):
            known = ", ".join(_OF_LAYERS)
            raise ModelError(f"{place}.{wrong}: expected one of {known}, as {spec.name} is read layer by layer; leave it out")
        if "other_bits" in changes:
            values["shape"] = spec.shape.at_bits(changes["other_bits"])
    if "expert_bits" in changes:
        values["expert_bytes_by_layer"] = None
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
