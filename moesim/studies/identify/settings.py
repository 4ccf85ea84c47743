"""What an engine was told, as a policy, a cache and a place for everything else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from moesim.core.units import as_share
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name
from moesim.model import ModelSpec
from moesim.policies.registry import make_policy, policy_names

ALL: Final = 99
"""From this number on, layers mean all of them, as people write for llama.cpp."""

_LONG: Final = {
    "ncmoe": "n_cpu_moe", "n_gpu_layers": "ngl", "gpu_layers": "ngl", "ub": "ubatch", "ubatch_size": "ubatch",
    "nopo": "no_op_offload", "cpu_moe": "cpu_moe",
}  # fmt: skip
_WORDS: Final = {"all_cpu": "all-cpu", "all_gpu": "all-gpu"}
_LAYERS: Final = ("n_cpu_moe", "ngl")
_KNOWN: Final = (
    "n_cpu_moe",
    "ngl",
    "cpu_moe",
    "op_offload",
    "no_op_offload",
    "gpu_experts",
    "all_cpu",
    "all_gpu",
    "policy",
    "cache",
)


@dataclass(frozen=True)
class EngineSetting:
    """A setting of an engine."""

    policy: Mapping[str, Any]  # as in an experiment
    cache: Mapping[str, Any]  # as in an experiment; everything if none was said
    family: str  # kind of setting, for blocks


def read_setting(text: str, model: ModelSpec, place: str, *, alias: bool = False) -> EngineSetting:
    """Read a setting."""
    given = _words(text, place)
    if "policy" in given:
        return _of_policy(given, place)
    for key in given:
        if key not in _KNOWN:
            raise ConfigError(f"{place}: setting: {unknown_name('word', key, _KNOWN)}")
    for word, name in _WORDS.items():
        if word in given:
            if len(given) > 1:
                raise ConfigError(f"{place}: setting: expected {word} alone, got '{text}'; remove the rest")
            policy = {"name": name} | ({"assume_fits": True} if word == "all_gpu" else {})
            return EngineSetting(policy, {"ratio": 1.0}, word)
    if "gpu_experts" in given:
        number = _number(given, "gpu_experts", model.n_experts, f"experts of a layer of {model.name}", place)
        if number == 0:
            return EngineSetting({"name": "all-cpu"}, {"ratio": 1.0}, "gpu_experts")
        return EngineSetting(dict(_FIRST_EXPERTS), {"ratio": number / model.n_experts}, "gpu_experts")
    return _llama_cpp(given, model, place, alias)


_FIRST_EXPERTS: Final = {"name": "composed", "placement": "lowest-ids", "assignment": "resident", "replacement": "static"}


def _llama_cpp(given: Mapping[str, Any], model: ModelSpec, place: str, alias: bool) -> EngineSetting:
    n_layers = model.n_dense_layers + model.n_layers
    of = f"layers of {model.name}"
    policy: dict[str, Any] = {"name": "llama-cpp"}
    ngl = _number(given, "ngl", n_layers + 1, f"{of} and its output", place, alias, n_layers + 1)
    n_cpu = _number(given, "n_cpu_moe", n_layers, of, place, alias, 0)
    if given.get("cpu_moe"):
        n_cpu = n_layers
    if ngl <= n_layers:
        policy["n_gpu_layers"] = ngl
    if n_cpu or ngl > n_layers:
        policy["n_cpu_moe"] = max(n_cpu, model.n_dense_layers)
    if given.get("no_op_offload") or given.get("op_offload") is False:
        policy["op_offload"] = False
    family = "n_cpu_moe" if ngl > n_layers else "ngl"
    return EngineSetting(policy, {"ratio": 1.0}, family)


def _number(given: Mapping[str, Any], key: str, most: int, of: str, place: str, alias: bool = False, default: int = 0) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{place}: setting: expected a whole number for {key}, got {value!r}; correct it")
    if key in _LAYERS and (value >= ALL or (alias and value > most)):
        return most
    if value > most:
        every = f", or write {ALL} for all" if key in _LAYERS else ""
        raise ConfigError(f"{place}: setting: expected {key} of at most {most}, the {of}, got {value}; correct it{every}")
    return value


def _of_policy(given: dict[str, Any], place: str) -> EngineSetting:
    name, cache = str(given.pop("policy")), as_share(given.pop("cache", 1.0))
    if name not in policy_names():
        raise ConfigError(f"{place}: setting: {unknown_name('policy', name, policy_names(), 'moesim list policies')}")
    policy = {"name": name, **given}
    make_policy(policy, f"{place}: setting")
    sized = {"ratio": float(cache)} if isinstance(cache, int | float) else {"budget": cache}
    return EngineSetting(policy, sized, f"policy {name}")


def _words(text: str, place: str) -> dict[str, Any]:
    """Split into words and values: ``a=1 b``, and ``-a 1 --b`` as on a command line."""
    flat = re.sub(r"(?:^|(?<=\s))-{1,2}([A-Za-z][\w-]*)[ =](?=[^\s-])", lambda found: f"{found[1]}=", text.strip())
    flat = re.sub(r"(?:^|(?<=\s))-{1,2}(?=[A-Za-z])", "", flat)
    given: dict[str, Any] = {}
    for word in re.split(r"[\s;]+", flat):
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        name = name if "policy" in given else _LONG.get(name, name)
        if not name or (equals and not value):
            raise ConfigError(f"{place}: setting: expected words such as n_cpu_moe=24, got '{text}'; correct it")
        if name in given:
            raise ConfigError(f"{place}: setting: expected each word once, got '{name}' twice; remove one")
        given[name] = read_yaml_value(value, f"{place}: setting: {name}") if equals else True
    for flag in ("no_op_offload", "cpu_moe"):
        if flag in given:
            given[flag] = bool(given[flag])
    given.pop("ubatch", None)
    return given
