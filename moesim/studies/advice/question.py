"""The question of an advice, looked up; its requests are cut into groups, a trace each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core.files import write_bytes
from moesim.core.units import format_memory, parse_bytes
from moesim.errors import CapacityError, ConfigError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.model import ModelSpec, load_model
from moesim.model.spec import FIELDS, MXFP4_BITS
from moesim.studies.identify.fit import two_devices
from moesim.studies.identify.observations import QUANTS, read_bits
from moesim.trace import Trace

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
    if asked.model is None:
        raise ConfigError(f"{PLACE}: --model: expected a model, got none; name it, or give --calibrate a file that does")
    if asked.hardware is None:
        raise ConfigError(f"{PLACE}: --hardware: expected a machine, got none; name it, or give --calibrate a file that does")
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
    quant = asked.bits or usual_bits(plain)
    if not quant:
        return plain, asked.model, ""
    base = dict(asked.model) if isinstance(asked.model, Mapping) else {"base": str(asked.model)}
    ref = base | read_bits(quant, f"{PLACE}: --bits", plain)[0]
    return load_model(ref, f"{PLACE}: --model"), ref, quant if quant.upper() in QUANTS else ""


def usual_bits(model: ModelSpec) -> str:
    """Name the quantisation that people use; empty: the model's own bits."""
    if model.expert_bits == MXFP4_BITS and model.other_bits == 16:
        return "MXFP4"  # the common files have 8 bits for the rest
    return DEFAULT_BITS if is_open(model) else ""


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


@dataclass(frozen=True)
class Routing:
    """Routing that other engines are compared on."""

    label: str  # name in results
    origin: str  # `recorded`, `miniature` or `synthetic`
    trace: Trace  # requests of one batch
    why: str = ""  # why this one, if it is assumed
