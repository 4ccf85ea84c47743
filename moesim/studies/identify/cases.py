"""Observations as runs: model, policy, cache and routing of each, looked up once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.core.units import as_share, parse_bytes, slots_of
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, InputError, unknown_name
from moesim.experiment.runner import initial_placement, slots_within
from moesim.fits import required_bytes
from moesim.hardware import HardwareProfile
from moesim.hardware.costs import CostModel
from moesim.hardware.engines import transfer_of
from moesim.model import ModelSpec, load_model
from moesim.policies.registry import make_policy, policy_names
from moesim.studies.identify.observations import ALL, Observation, read_bits
from moesim.trace import Trace
from moesim.trace.workload import Workload, WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.policy import Placement


_LONG: Final = {
    "ncmoe": "n_cpu_moe", "n_gpu_layers": "ngl", "gpu_layers": "ngl", "ub": "ubatch", "ubatch_size": "ubatch",
    "nopo": "no_op_offload", "cpu_moe": "cpu_moe",
}  # fmt: skip
_WORDS: Final = {"all_cpu": "all-cpu", "all_gpu": "all-gpu"}
_LAYERS: Final = ("n_cpu_moe", "ngl")
_KNOWN: Final = (
    "n_cpu_moe", "ngl", "cpu_moe", "op_offload", "no_op_offload", "gpu_experts", "all_cpu", "all_gpu",
    "policy", "cache", "mmap", "prefetch_experts_slots",
)  # fmt: skip


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
    n_layers = len(model.blocks)
    of = f"layers of {model.name}"
    policy: dict[str, Any] = {"name": "llama-cpp"}
    ngl = _number(given, "ngl", n_layers + 1, f"{of} and its output", place, alias, n_layers + 1)
    n_cpu = _number(given, "n_cpu_moe", n_layers, of, place, alias, 0)
    if given.get("cpu_moe"):
        n_cpu = n_layers
    if ngl <= n_layers:
        policy["n_gpu_layers"] = ngl
    if n_cpu or ngl > n_layers:
        policy["n_cpu_moe"] = max(n_cpu, model.positions[0])
    if given.get("no_op_offload") or given.get("op_offload") is False:
        policy["op_offload"] = False
    policy |= {key: given[key] for key in ("mmap", "prefetch_experts_slots") if given.get(key, True) is not True}
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


STEPS: Final = 8
"""Decode steps that are simulated; a steady step is their mean."""

STATIC: Final = frozenset({"all-cpu", "all-gpu", "llama-cpp", "composed"})
_SEED: Final = 0


@dataclass(frozen=True, eq=False)
class Case:
    """An observation with all that predicts it."""

    observation: Observation
    model: ModelSpec  # with its bits
    spec: Any  # the model, as in an experiment
    bits: str  # words for the bits that were chosen
    setting: EngineSetting
    static: bool  # nothing moves in a decode step, so that a closed form predicts it
    block: str  # what is left out together

    @property
    def name(self) -> str:
        return self.observation.row

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of an expert, the mean over layers."""
        return sum(self.model.expert_bytes(layer) for layer in range(self.model.n_layers)) / self.model.n_layers

    @property
    def mean_context(self) -> int:
        """Tokens in the KV cache of a sequence in the middle of decoding."""
        return self.observation.context + self.observation.decode // 2


def make_cases(rows: Sequence[Observation], bits: Mapping[tuple[str, str], Mapping[str, Any]] | None = None) -> list[Case]:
    """Look up models and settings."""
    return [_case(one, bits or {}) for one in rows]


def choices(rows: Sequence[Observation]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """List the choices of bits, for models with more than one."""
    found = {}
    for one in rows:
        several = read_bits(one.bits, one.place)
        if len(several) > 1:
            found[one.model, one.bits] = several
    return found


def _case(one: Observation, bits: Mapping[tuple[str, str], Mapping[str, Any]]) -> Case:
    named: Any = read_yaml_value(one.model, f"{one.place}: model") if one.model.startswith("{") else one.model
    plain = load_model(named, f"{one.place}: model")
    chosen = dict(bits.get((one.model, one.bits)) or read_bits(one.bits, one.place, plain)[0])
    if plain.expert_bytes_by_layer is not None:
        chosen.pop("expert_bits", None)
    elif plain.expert_bits < 8:  # experts that are quantised by their maker stay as they are
        chosen.pop("expert_bits", None) if "/" not in one.bits and not _is_number(one.bits) else None
    base = named if isinstance(named, dict) else {"base": named}
    spec: Any = {**base, **chosen} if chosen else named
    model = load_model(spec, f"{one.place}: bits")
    setting = read_setting(one.setting, model, one.place, alias=one.alias)
    if one.unit == "s" and one.kind == "decode" and one.decode < 1:
        raise ConfigError(f"{one.place}: decode: expected the decoded tokens next to a time in s, got none; give them")
    words = f"{model.expert_bits:g}/{model.other_bits:g}"
    block = one.block or f"{one.model} {one.bits or words} {setting.family}" + (" prefill" if one.kind == "prefill" else "")
    return Case(one, model, spec, words, setting, _is_static(one, setting, model), block)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_static(one: Observation, setting: EngineSetting, model: ModelSpec) -> bool:
    if one.kind != "decode" or setting.policy["name"] not in STATIC:
        return False
    name = setting.policy["name"]
    if name == "composed":
        return setting.family == "gpu_experts"
    few = int(setting.policy.get("op_offload_min_rows", 32)) if "op_offload_per_byte" not in setting.policy else 0
    if name == "llama-cpp" and one.batch >= few:
        return setting.policy.get("op_offload") is False
    return True


@lru_cache(maxsize=64)
def routing(shape: tuple[int, int, int], batch: int, prompt: int, decode: int, signals: bool = True) -> Trace:
    """Make routing of a shape (layers, experts, chosen) up; without `signals` some layers are repeated, which is quicker."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import

    n_layers, n_experts, top_k = shape
    n_made = n_layers if signals else min(n_layers, _MADE)
    parameters = read_parameters(_parameters(n_experts, top_k)).replace(n_layers=n_made, n_experts=n_experts, top_k=top_k)
    more: dict[str, Any] = {} if signals else {"n_signal_requests": 0, "n_calibration": 0}
    made = synthesize(parameters, n_requests=batch, n_prompt=prompt, n_decode=decode, seed=_SEED, **more)
    return made if n_made == n_layers else repeated(made, n_layers)


_MADE: Final = 8
"""Layers that are made up where nothing but the rows of experts matters, which are alike in all layers."""


def repeated(made: Trace, n_layers: int) -> Trace:
    """Return routing with so many layers, those of a smaller one in turn."""
    requests, layers = made.requests, np.arange(n_layers) % made.n_layers
    tables = {name: table[layers] for name, table in made.tables.items() if name == "activation_frequency"}
    return Trace.build(
        experts=made.experts[:, layers], tables=tables, n_prompt=requests.n_prompt, n_decode=requests.n_decode,
        n_experts=made.n_experts, model=made.model, label="synthetic",
    )  # fmt: skip


@lru_cache(maxsize=64)
def steps_after(shape: tuple[int, int, int], batch: int, decode: int, offset: int) -> Trace:
    """Return decode steps whose contexts begin at `offset` tokens."""
    n_layers, n_experts, top_k = shape
    if batch == 1:  # one row an expert, whichever they are
        experts = np.broadcast_to(np.arange(top_k), (decode, n_layers, top_k))
    else:
        experts = routing(shape, batch, 0, decode, signals=False).experts
    return Trace.build(
        experts=experts, n_prompt=[0] * batch, n_decode=[decode] * batch, n_experts=n_experts, model="any", label="synthetic",
        prompt_offset=offset,
    )  # fmt: skip


def _parameters(n_experts: int, top_k: int) -> str:
    known = {"mixtral-8x7b": (8, 2), "gpt-oss-20b": (32, 4), "deepseek-v2-lite": (64, 6), "qwen3-30b-a3b": (128, 8)}
    return min(known, key=lambda name: (abs(np.log(known[name][0] / n_experts)) + abs(np.log(known[name][1] / top_k)), name))


def shape_of(model: ModelSpec) -> tuple[int, int, int]:
    """Return layers, experts and chosen of a model."""
    return model.n_layers, model.n_experts, model.top_k


def decode_workload(case: Case) -> Workload:
    """Compose the decode steps of a case; contexts are those of the middle of its decoding."""
    one = case.observation
    steps = min(STEPS, one.decode)
    first = max(1, case.mean_context - steps // 2)
    trace = steps_after(shape_of(case.model), one.batch, steps, first)
    return compose(trace, WorkloadSpec(batch_size=one.batch, decode_tokens=steps))


def placement_of(case: Case, hardware: HardwareProfile, workload: Workload) -> Placement:
    """Ask a case's policy where everything is; `hardware` has room for it."""
    policy: Any = make_policy(case.setting.policy, case.observation.place)
    slots = slots_of(case.setting.cache.get("ratio", 1.0), case.model.n_layers * case.model.n_experts)
    gpus = {name: slots for name, device in hardware.devices.items() if device.role == "accelerator"}
    return initial_placement(case.model, CostModel(case.model, hardware, extrapolate=True), workload, policy, gpus, {})


def needed_bytes(case: Case, hardware: HardwareProfile, gpu: str) -> int | None:
    """Count the GPU bytes of a case with buffers and cache; None where not known."""
    name, one = case.setting.policy["name"], case.observation
    tokens = (one.context + (one.decode if one.kind == "decode" else 0)) * one.batch
    plain = name in STATIC and (name != "composed" or case.setting.family == "gpu_experts")
    try:
        placement = placement_of(case, hardware, decode_workload(case)) if plain else _with_cache(case, hardware)
    except InputError:
        return None  # what is wrong is reported where the row is predicted
    need = required_bytes(case.model, hardware, tokens, placement, one.batch)
    return sum(need[gpu].values())


def _with_cache(case: Case, hardware: HardwareProfile) -> Placement:
    """Ask a policy with a cache for its placement and pools."""
    model, policy = case.model, make_policy(case.setting.policy, case.observation.place)
    trace = routing(shape_of(model), case.observation.batch, 1, 1)
    workload = compose(trace, WorkloadSpec(batch_size=case.observation.batch, prompt_tokens=1, decode_tokens=1))
    tables = {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs}
    costs = CostModel.of(policy, model, hardware, transfer_of(policy, model, hardware), extrapolate=True)
    if (budget := case.setting.cache.get("budget")) is not None:
        n_bytes = parse_bytes(budget, f"{case.observation.place}: setting: cache")
        slots = slots_within(n_bytes, model, costs, workload, policy, tables, str(case.setting.policy["name"]))
    else:
        slots = slots_of(case.setting.cache.get("ratio", 1.0), model.n_layers * model.n_experts)
    gpus = {name: slots for name, device in hardware.devices.items() if device.role == "accelerator"}
    return initial_placement(model, costs, workload, policy, gpus, tables)
