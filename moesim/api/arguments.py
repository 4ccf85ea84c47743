"""Check arguments from Python, and write them as an experiment file would."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from moesim.errors import ConfigError, ModelError, MoesimError, unknown_name
from moesim.experiment.config import CacheConfig, Config, TransferConfig, WorkloadConfig
from moesim.hardware import HardwareProfile, load_hardware
from moesim.model import ModelSpec, builtin_models, load_model
from moesim.policies.options import Declared, options_of
from moesim.policies.registry import PARTS, POLICIES

P = ParamSpec("P")
T = TypeVar("T")


KINDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "flag": (lambda value: isinstance(value, bool), "True or False"),
    "count": (lambda value: isinstance(value, Integral) and int(value) >= 1, "a whole number of at least 1"),
    "whole": (lambda value: isinstance(value, Integral) and int(value) >= 0, "a whole number of at least 0"),
    "number": (lambda value: isinstance(value, Real), "a number"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "size": (lambda value: isinstance(value, str), "a text with a unit, such as '12GiB'"),
    "width": (lambda value: isinstance(value, str | Real), "'column', 'page', 'slide', or a number of inches"),
    "path": (lambda value: isinstance(value, str | os.PathLike), "a path"),
    "experiment": (lambda value: isinstance(value, str | os.PathLike | Mapping), "a path or a mapping"),
    "names": (lambda value: _are_names(value), "a list of texts"),
    "mapping": (lambda value: isinstance(value, Mapping), "a mapping"),
    "overrides": (lambda value: isinstance(value, str | Mapping) or _are_names(value), "a mapping, or a list of 'key=value'"),
}
"""Kinds of arguments: a test, and words for it."""


_OF_TYPES: Final = {
    "bool": "flag", "float": "number", "str": "text", "str | float": "width", "str | Path": "path", "Sequence[str]": "names",
    "Mapping[str, Any]": "mapping", "Mapping[str, Any] | Sequence[str]": "overrides",
    "str | Path | Mapping[str, Any]": "experiment",
}  # fmt: skip
"""Annotations that say the kind of an argument."""


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def checked(place: str, **kinds: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check names of arguments, and values by their kind or annotation; None is allowed where it is the default.

    Errors of the function name its arguments where they name the options of its command.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = signature(function)
        typed = {name: _OF_TYPES.get(str(one.annotation).removesuffix(" | None"), "") for name, one in known.parameters.items()}
        asked = {name: kind for name, kind in {**typed, **kinds}.items() if kind}

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> T:
            try:
                given = known.bind(*arguments, **options).arguments
            except TypeError as wrong:
                raise ConfigError(f"{place}(): {_unbound(known, options) or wrong}") from None
            for name, value in given.items():
                if name not in asked or (value is None and known.parameters[name].default is None):
                    continue
                fits, words = KINDS[asked[name]]
                if not fits(value) or (isinstance(value, bool) and asked[name] != "flag"):
                    raise ConfigError(f"{place}: {name}: expected {words}, got {value!r}; give one")
            try:
                return function(*arguments, **options)
            except MoesimError as error:
                if error.of_command is None:
                    error.of_command = str(error)
                    error.args = (_without_options(error.of_command, place, known),)
                raise

        return call

    return decorate


_ARGUMENTS: Final = {"column": "columns", "set": "overrides", "option": "options"}
"""Options -> arguments, where these have another name."""


def _without_options(message: str, place: str, known: Signature) -> str:
    """Name arguments where a message names options of the command.

    "--out a: expected nothing there, got a file; add --overwrite" becomes "trace.split: out a: ...; pass overwrite=True".
    """

    def argument(found: re.Match[str]) -> str:
        name = found[2].replace("-", "_")
        name = next((one for one in (name, f"{name}_", _ARGUMENTS.get(name, name)) if one in known.parameters), "")
        if not name:
            return found[0]
        if str(known.parameters[name].annotation) != "bool":
            return f"{found[1] or ''}{name}{found[3] or ''}"
        return f"{'pass ' if found[1] else ''}{name}=True"

    def overrides(found: re.Match[str]) -> str:
        pairs = (one.split("=", 1) for one in found[0].removeprefix("--set ").split(" --set "))
        return "overrides={" + ", ".join(f"'{key}': {value}" for key, value in pairs) + "}"

    def whole(part: str) -> str:
        part = re.sub(r"--set [\w.]+=[^\s,;]+( --set [\w.]+=[^\s,;]+)*", overrides, part)
        return re.sub(r"(\badd )?--([a-z][a-z0-9-]*)( uniform)?", argument, part)

    named = "".join(part if part[:1] == "`" else whole(part) for part in re.split(r"(`[^`]*`)", message))
    if message.startswith("--") and named[:2] != "--":
        return f"{place}: {named}"
    return re.sub(rf"^{place.replace('.', ' ')}: ", f"{place}: ", named)


_KEYS: Final = {
    "batch": "batch_size", "prompt": "prompt_tokens", "decode": "decode_tokens", "answer": "answer_tokens", "cache": "ratio",
    "transfer": "curve",
}  # fmt: skip
"""Arguments -> keys of the sections of an experiment, where these are named otherwise."""


_SECTIONS: Final[Mapping[str, Any]] = {"workload": WorkloadConfig, "cache": CacheConfig, "transfer": TransferConfig}


def _unbound(known: Signature, options: Mapping[str, Any]) -> str:
    """Word which argument is unknown or missing, and what was probably meant; nothing if it is neither."""
    names = [name for name, one in known.parameters.items() if name != "self" and one.kind is not one.VAR_KEYWORD]
    for name in options:
        if name in names:
            continue
        if meant := next((one for one in names if _KEYS.get(one) == name), None):
            return f"unknown argument '{name}'; did you mean '{meant}'?"
        key = _KEYS.get(name, name)
        section = next((one for one, section in _SECTIONS.items() if key in section.model_fields), None)
        if "overrides" in names and (section or key in Config.model_fields):
            raw = f"{{'{section}': {{'{key}': ...}}}}" if section else f"{{'{key}': ...}}"
            return f"unknown argument '{name}'; pass overrides={raw}"
        return unknown_name("argument", name, names)
    required = [name for name in names if known.parameters[name].default is Parameter.empty]
    lacking = [name for name in required if known.parameters[name].kind is Parameter.KEYWORD_ONLY and name not in options]
    return f"expected {' and '.join(lacking)} by name, got nothing; add {'them' if len(lacking) > 1 else 'it'}" if lacking else ""


_PLAIN = (str, int, float, bool, type(None))


def written(value: Any, place: str) -> Any:
    """Write objects for models, machines, policies, parts and paths as a file would."""
    if isinstance(value, ModelSpec):
        return _model(value, place)
    if isinstance(value, HardwareProfile):
        return _machine(value, place)
    if isinstance(value, type | Declared) or all(hasattr(value, name) for name in ("place", "decide", "evict")):
        return _policy(value, place)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): written(one, f"{place}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [written(one, f"{place}[{i}]") for i, one in enumerate(value)]
    if hasattr(value, "tolist") and not isinstance(value, _PLAIN):  # NumPy's
        return value.tolist()
    if isinstance(value, _PLAIN):
        return value
    raise ConfigError(
        f"{place}: expected a name, a number, a mapping, or an object of moesim's, got {type(value).__name__}; "
        "write it as one of these"
    )


def _model(model: ModelSpec, place: str) -> Any:
    """Write a model by the built-in one of its name and what differs, or in full."""
    base = builtin_models().get(model.name)
    if base == model:
        return model.name
    mixed = model.expert_bytes_by_layer is not None  # then they say the bits
    left_out = {"labels", "low_bits", "source", "notes", "expert_bits" if mixed else "expert_bytes_by_layer"}
    changed = {one.name: getattr(model, one.name) for one in fields(model) if one.name not in left_out}
    if base is not None:
        changed = {key: value for key, value in changed.items() if value != getattr(base, key)}
    if model.units_per_expert > 1:  # a file gives experts
        changed |= {key: getattr(model, key) // model.units_per_expert for key in ("n_experts", "top_k")}
    if model.low_bits:
        changed["expert_bits"] = [[model.expert_bits, *model.low_bits]]  # one model: the outer list is a sweep
    head: dict[str, Any] = {"source": model.source} if base is None else {"base": model.name}
    if model.shape is not None and "shape" in changed:
        changed["shape"] = model.shape.to_dict()
    found = {**head, **{key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()}}
    with suppress(ModelError):
        once = {**found, **({"expert_bits": found["expert_bits"][0]} if model.low_bits else {})}
        if load_model(once, place).figures() | {"labels": ()} == model.figures() | {"labels": ()}:
            return {key: value for key, value in found.items() if value is not None}
    raise ConfigError(f"{place}: expected a model that a file can say, got another; give it as {{base: NAME, field: value}}")


def _machine(machine: HardwareProfile, place: str) -> Any:
    if machine.written is None or load_hardware(machine.written, place).figures() != machine.figures():
        raise ConfigError(
            f"{place}: expected a machine as load_hardware or Hardware.from_numbers gives it, got one that was changed since; "
            "give it as {base: NAME, key: value}"
        )
    return written(machine.written, place)  # the short form of a machine may hold a model


def _policy(policy: Any, place: str) -> Any:
    """Write a policy or part by its class and the options that are not defaults."""
    cls = policy if isinstance(policy, type) else type(policy)
    target = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in target:
        raise ConfigError(f"{place}: expected a class of a module or of a notebook's cell, got one made in a function: {target}")
    known = {target: name for names in (*PARTS.values(), POLICIES) for name, target in names.items()}
    name = known.get(target, target)
    if policy is cls:
        return name
    defaults = {key: one.default for key, one in options_of(cls).items()}
    if not isinstance(policy, Declared) and (lacking := [name for name in defaults if not hasattr(policy, name)]):
        raise ConfigError(
            f"{place}: expected an attribute for each argument of {cls.__name__}, got none for {lacking[0]}; "
            "add it, or give {name: package.module:Class, option: value}"
        )
    options = policy.options() if isinstance(policy, Declared) else {name: getattr(policy, name) for name in defaults}
    changed = {key: value for key, value in options.items() if type(value) is not type(defaults[key]) or value != defaults[key]}
    return {"name": name, **{key: written(value, f"{place}.{key}") for key, value in changed.items()}} if changed else name
