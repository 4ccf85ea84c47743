"""The question of an advice, looked up; its requests are cut into groups, a trace each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml

from moesim.core.files import write_bytes
from moesim.core.processes import in_threads
from moesim.core.units import format_memory, parse_bytes
from moesim.errors import CapacityError, ConfigError, TraceError
from moesim.experiment.routing import fits, fitted_parameters, is_of, lacking, lift_to_assume, shape_of, traces_of_shape
from moesim.hardware import HardwareProfile, load_hardware
from moesim.model import ModelSpec, load_model
from moesim.model.spec import FIELDS
from moesim.studies.identify.cases import repeated
from moesim.studies.identify.fit import two_devices
from moesim.studies.identify.observations import QUANTS, read_bits
from moesim.trace import Trace, find_trace
from moesim.trace.derived import subset
from moesim.trace.workload import WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.trace.synthesis.parameter_set import ParameterSet

PLACE: Final = "recommend"
DEFAULT_BITS: Final = "Q4_K_M"
"""Quantisation of a model whose weights are given with 8 bits or more."""
CONTEXT: Final = 16384
"""Tokens for which there is room unless a question says otherwise."""
ENGINE: Final = "llama.cpp"
"""Engine of the answer unless a question names another."""
PREFILL_CHUNK: Final = 512
"""Tokens of a prefill step: llama.cpp's default of ``--ubatch-size``."""


@dataclass(frozen=True)
class Asked:
    """A question: the options of ``moesim recommend``."""

    # model, hardware: as in an experiment
    model: Any
    hardware: Any
    # vram, ram: memory of the GPU and of the host, such as `"12GiB"`; None: what the profile says
    vram: str | None = None
    ram: str | None = None
    bits: str = ""  # as of `read_bits`; empty: the model's own, or `DEFAULT_BITS` if it has 16
    # batch, prompt, decode: requests at once, and tokens of each
    batch: int = 1
    prompt: int = 512
    decode: int = 128
    context: int | None = None  # tokens of a request for which there must be room in the KV cache; None: `CONTEXT`
    trace: str | None = None  # routing; None: chosen
    hit_rate: str | None = None  # LRU hit rate with slots, "61%@16", that fixes the lift of assumed routing
    engine: str = ENGINE  # whose command is wanted; NAME@BUILD has the costs of a build

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that is the model, if one is."""
        return Path(self.model) if isinstance(self.model, str) and self.model.endswith(".gguf") else None

    @property
    def room(self) -> int:
        """Tokens of a request for which there must be room."""
        return max(CONTEXT, self.prompt + self.decode) if self.context is None else self.context


@dataclass(frozen=True)
class Setting:
    """A question, looked up."""

    asked: Asked  # as asked
    model: ModelSpec  # with the bits that are used
    hardware: HardwareProfile  # with the memory that is used
    # model_ref, hardware_ref: for an experiment
    model_ref: Any
    hardware_ref: Any
    # gpu, host: the device whose memory bounds the cache, and the one that backs all experts
    gpu: str
    host: str
    host_computes: bool  # the host is a processor and not a disk
    # vram_bytes, ram_bytes: their memory
    vram_bytes: int
    ram_bytes: int
    context: int  # tokens of a request in the KV cache
    profile_vram_bytes: int  # memory of the GPU in the profile as it is
    quant: str = ""  # name of the quantisation that was chosen; empty: the model's own bits

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU at all."""
        return self.hardware.devices[self.gpu].role == "accelerator"

    @property
    def gpus(self) -> list[str]:
        """All GPUs."""
        return [name for name, device in self.hardware.devices.items() if device.role == "accelerator"]

    @property
    def one_memory(self) -> bool:
        """Whether GPU and host share one memory."""
        return self.hardware.devices[self.gpu].memory_of == self.host

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the KV cache must have room, over all requests."""
        return self.context * self.asked.batch

    @property
    def spare_kv_bytes(self) -> int:
        """Room in the KV cache beyond what the simulated requests fill."""
        asked = self.asked
        batch, whole = asked.batch, self.model.all_kv_bytes(self.context * asked.batch, asked.batch)
        return whole - self.model.all_kv_bytes((asked.prompt + asked.decode) * batch, batch)


def look_up(asked: Asked, folder: Path) -> Setting:
    """Look everything up but the routing."""
    context = asked.room
    if context < asked.prompt + asked.decode:
        raise ConfigError(
            f"{PLACE}: --context: expected at least --prompt and --decode together, {asked.prompt + asked.decode}, got {context}"
        )
    model, model_ref, quant = _model(asked, folder)
    plain = load_hardware(asked.hardware, f"{PLACE}: --hardware")
    if plain.machine.get("engine", "").startswith("none "):
        got = "expected an engine that people run, got none, which is a yardstick; use run or compare"
        raise ConfigError(f"{PLACE}: engine: {got}")
    gpu, host, computes = _devices(plain)
    own = plain.devices[gpu].memory_bytes
    if plain.devices[gpu].memory_of:
        own = min(own, _memory(asked.ram, "--ram", own))
    if gpu == host and asked.vram is not None:
        raise ConfigError(f"{PLACE}: --vram: {plain.name} has no GPU; leave --vram out")
    vram = _memory(asked.vram, "--vram", own)
    if not computes and asked.ram is not None:
        raise ConfigError(f"{PLACE}: --ram: {plain.name} keeps all experts on {host}, not in memory; leave --ram out")
    ram = _memory(asked.ram, "--ram", plain.devices[host].memory_bytes)
    vram = ram if gpu == host else vram
    if gpu != host and vram <= plain.devices[gpu].workspace_bytes:
        taken = format_memory(plain.devices[gpu].workspace_bytes)
        got = format_memory(vram)
        raise CapacityError(
            f"{PLACE}: --vram: expected more than the {taken} that software takes on {gpu} of {plain.name}, got {got}"
        )
    base = dict(asked.hardware) if isinstance(asked.hardware, Mapping) else {"base": str(asked.hardware)}
    ref = base | {f"devices.{gpu}.memory_bytes": vram, f"devices.{host}.memory_bytes": ram}
    hardware = load_hardware(ref, f"{PLACE}: --hardware")
    return Setting(
        asked, model, hardware, model_ref, ref, gpu, host, computes, vram, ram, context, plain.devices[gpu].memory_bytes, quant
    )


def _memory(given: str | None, option: str, own: int) -> int:
    n_bytes = own if given is None else parse_bytes(given, f"{PLACE}: {option}")
    if n_bytes < 1:
        raise ConfigError(f"{PLACE}: {option}: expected a size of at least 1 byte, got {given!r}")
    return n_bytes


def _model(asked: Asked, folder: Path) -> tuple[ModelSpec, Any, str]:
    chosen = read_bits(asked.bits, f"{PLACE}: --bits")
    if len(chosen) > 1:
        raise ConfigError(f"{PLACE}: --bits: expected one choice, got '{asked.bits}'; give one")
    plain = load_model(asked.model, f"{PLACE}: --model")
    if asked.gguf is not None:
        if asked.bits:
            raise ConfigError(f"{PLACE}: --bits: the tensors of {asked.gguf} have their own bits; leave --bits out")
        path = folder / "model.yaml"  # each run reads it, and one of 200 GB may lie on a slow disk
        write_bytes(path, model_yaml(plain).encode())
        return plain, str(path), ""
    if asked.bits and plain.expert_bytes_by_layer is not None:
        raise ConfigError(f"{PLACE}: --bits: {plain.name} says how many bytes an expert has; leave --bits out")
    if not asked.bits and not is_open(plain):
        return plain, asked.model, ""
    quant = asked.bits or DEFAULT_BITS
    base = dict(asked.model) if isinstance(asked.model, Mapping) else {"base": str(asked.model)}
    ref = base | read_bits(quant, f"{PLACE}: --bits")[0]
    return load_model(ref, f"{PLACE}: --model"), ref, quant if quant.upper() in QUANTS else ""


def is_open(model: ModelSpec) -> bool:
    """Whether a model's weights are given with 8 bits or more, so that people choose a quantisation."""
    return model.expert_bits >= 8 and model.expert_bytes_by_layer is None and not model.low_bits


def model_yaml(model: ModelSpec) -> str:
    """Write a specification as a file that an experiment can name."""
    values = {key: getattr(model, key) for key in FIELDS if key not in ("labels", "low_bits")}
    values = {key: value for key, value in values.items() if value is not None}
    if model.shape is not None:
        values["shape"] = model.shape.to_dict()
    if model.low_bits:
        values["expert_bits"] = list(model.widths)
    if "expert_bytes_by_layer" in values:
        values["expert_bytes_by_layer"] = list(values["expert_bytes_by_layer"])
        values.pop("expert_bits")
    return yaml.safe_dump(values, sort_keys=False)


def _devices(hardware: HardwareProfile) -> tuple[str, str, bool]:
    if len(hardware.backing) != 1:
        raise ConfigError(
            f"{PLACE}: --hardware {hardware.name}: expected a machine with one host, got {len(hardware.backing)}; "
            "compare placements on such a machine with 'moesim compare'"
        )
    gpu, host = two_devices(hardware)
    return gpu, host, hardware.devices[host].role == "host"


GROUPS: Final = 5
"""Groups of requests that are simulated one by one, for the spread between them."""


@dataclass(frozen=True)
class Routing:
    """Routing for an advice."""

    label: str  # name in results
    origin: str  # `recorded`, `miniature` or `synthetic`
    groups: Sequence[Trace]  # one for each group of requests, of one batch each
    written: str | Mapping[str, Any]  # what to write into an experiment file for routing like this
    why: str = ""  # why this one, if it is not the first choice; else empty

    def has(self, needs: frozenset[str]) -> str | None:
        """Name what a policy needs first that not every request has; None if nothing."""
        for need in sorted(needs):
            name = need.removeprefix("signal:")
            for trace in self.groups[:1] if self.origin == "synthetic" else self.groups:  # made-up requests are alike in this
                if lacking(trace, [need]) or (name != need and not all(name in names for names in trace.requests.signals)):
                    return need
        return None

    def write(self, folder: Path, groups: slice = slice(None)) -> list[Path]:
        chosen = zip(range(len(self.groups))[groups], self.groups[groups], strict=True)
        return in_threads(lambda one: one[1].write(folder / f"group{one[0]}.safetensors"), chosen)


def find_routing(model: ModelSpec, asked: Asked, place: str) -> tuple[Routing, list[Routing]]:
    """Choose routing for a model, and other routing to compare with: recorded, with its statistics, or assumed."""
    size = asked.batch, asked.prompt, asked.decode
    if asked.trace is not None:
        if asked.hit_rate is not None:
            raise ConfigError(f"{place}: expected --trace or --hit-rate, got both; a hit rate is for routing nobody recorded")
        given = _given(model, asked.trace, *size, place)
        return given, [] if given.origin == "recorded" else _made_up(model, asked)[:1]
    short: list[str] = []
    for name, found in traces_of_shape(model) if asked.hit_rate is None else ():
        if found.origin != "recorded" or not is_of(found, model):
            continue
        chosen = _long_enough(found, asked.prompt, asked.decode)
        if len(chosen) >= GROUPS * asked.batch:
            return Routing(name, found.origin, _split(found, chosen, asked.batch), name), []
        needed = f"{GROUPS * asked.batch} requests of {asked.prompt} + {asked.decode} tokens that are simulated"
        short.append(f"{name} has {len(chosen)} of the {needed}")
    first, *others = _made_up(model, asked)
    return replace(first, why="; ".join([*short, first.why]) if first.why else "; ".join(short)), others


def _made_up(model: ModelSpec, asked: Asked) -> list[Routing]:
    """Make routing with the statistics of a model at two seeds, or assumed routing at three lifts, the middle first."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.lift import assumed

    batch, prompt, decode = asked.batch, asked.prompt, asked.decode

    def made(parameters: ParameterSet, label: str, written: Mapping[str, Any], seed: int = 0, why: str = "") -> Routing:
        found = synthesize(parameters, n_requests=GROUPS * batch, n_prompt=prompt, n_decode=decode, seed=seed, scores=True)
        groups = _split(found, list(range(GROUPS * batch)), batch)
        whole = {**written, "requests": GROUPS * batch, "prompt": prompt, "decode": decode}
        return Routing(label, "synthetic", groups, whole, why)

    name = fitted_parameters(model) if asked.hit_rate is None else None
    if name is not None:
        parameters = read_parameters(name)
        return [
            made(parameters, f"synthetic {name}" + f", seed {seed}" * (seed > 0), {"synthesize": name, "seed": seed}, seed)
            for seed in (0, 1)
        ]
    lift = lift_to_assume(model, asked.hit_rate)
    sizes = model.n_layers, model.n_experts, model.top_k
    why = f"LRU lift {lift.why}" + ("; --hit-rate narrows it" if asked.hit_rate is None else "")
    return [
        made(assumed(*sizes, one), f"assumed, lift {one:g}", {"synthesize": "assumed", "lift": one}, why=why)
        for one in dict.fromkeys((lift.middle, lift.low, lift.high))
    ]


def quick_routing(model: ModelSpec, asked: Asked) -> Routing:
    """Choose routing of one group of requests: recorded, or made up for some layers that are repeated."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.lift import assumed

    if asked.trace is not None:
        return _given(model, asked.trace, asked.batch, asked.prompt, asked.decode, PLACE)
    for label, found in traces_of_shape(model):
        if found.origin == "recorded" and is_of(found, model):
            chosen = _long_enough(found, asked.prompt, asked.decode)[: asked.batch]
            if len(chosen) == asked.batch:
                return Routing(label, found.origin, _split(found, chosen, asked.batch), label)
    name = fitted_parameters(model)
    sizes = model.n_layers, model.n_experts, model.top_k
    parameters = read_parameters(name) if name else assumed(*sizes, lift_to_assume(model, asked.hit_rate).middle)
    made = synthesize(
        parameters.replace(n_layers=min(model.n_layers, QUICK_LAYERS)), n_requests=asked.batch, n_prompt=asked.prompt,
        n_decode=asked.decode, seed=0, n_signal_requests=0, n_calibration=0,
    )  # fmt: skip
    label = f"synthetic {name}" if name else "assumed"
    return Routing(label, "synthetic", [repeated(made, model.n_layers)], "")


QUICK_LAYERS: Final = 8
"""Layers that are made up for a glance at other engines."""


def shortest_prompt(trace: Trace) -> int:
    """Return the tokens of the shortest prompt of a trace."""
    return int((trace.requests.n_prompt + trace.requests.prompt_offset).min())


def _given(model: ModelSpec, name: str, batch: int, prompt: int, decode: int, place: str) -> Routing:
    found = Trace.read(find_trace(name))
    if not fits(found, model):
        raise TraceError(
            f"{place}: --trace {name}: expected {shape_of(model)}, as {model.name} has, got {shape_of(found)}; leave --trace "
            "out or give another"
        )
    chosen = _long_enough(found, prompt, decode)[: GROUPS * batch]
    if len(chosen) < batch:
        compose(found, WorkloadSpec(batch_size=batch, prompt_tokens=prompt, decode_tokens=decode))  # says what is lacking
        raise TraceError(f"{place}: --trace {name}: expected {batch} requests of {prompt} + {decode} tokens, got {len(chosen)}")
    return Routing(name, found.origin, _split(found, chosen, batch), name)


def _long_enough(trace: Trace, prompt: int, decode: int) -> list[int]:
    """List requests that do: more signals first, then uncut prompts, then by number."""
    requests = trace.requests
    length = requests.n_prompt + requests.prompt_offset
    will_do = np.flatnonzero((length >= prompt) & (requests.n_decode >= decode)).tolist()
    return sorted(will_do, key=lambda r: (-len(requests.signals[r]), int(length[r]) != prompt, r))


def _split(trace: Trace, chosen: list[int], batch: int) -> tuple[Trace, ...]:
    n_groups = min(GROUPS, len(chosen) // batch)
    return tuple(in_threads(lambda n: subset(trace, sorted(chosen[n * batch : (n + 1) * batch])), range(n_groups)))
