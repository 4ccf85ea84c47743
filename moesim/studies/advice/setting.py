"""What an advice is asked for, looked up: model, machine with the memory that is there, and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core.files import write_bytes
from moesim.core.limits import BITS
from moesim.core.units import format_memory, parse_bytes
from moesim.errors import CapacityError, ConfigError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.model import ModelSpec, load_model
from moesim.model.gguf import read_gguf

PLACE: Final = "recommend"
DEFAULT_BITS: Final = 4.5
"""Bits per weight of a model whose weights are given with 16: those of llama.cpp's Q4_K blocks."""
PREFILL_CHUNK: Final = 512
"""Tokens of a prefill step: llama.cpp's default of ``--ubatch-size``."""


@dataclass(frozen=True)
class Asked:
    """What a person asks for; the options of ``moesim recommend``."""

    # model, hardware: as in an experiment; the model is None if `gguf` is given
    model: Any
    hardware: Any
    # vram, ram: memory of the GPU and of the host, such as `"12GiB"`; None: what the profile says
    vram: str | None = None
    ram: str | None = None
    bits: float | None = None  # of all weights; None: the model's own, or `DEFAULT_BITS` if it has 16
    # batch, prompt, decode: requests at once, and tokens of each
    batch: int = 1
    prompt: int = 512
    decode: int = 128
    context: int | None = None  # tokens of a request for which there must be room in the KV cache; None: prompt and decode
    trace: str | None = None  # routing; None: chosen
    gguf: Path | None = None  # A file that says shapes and bytes
    lossy: bool = False  # policies that change what the model computes as well


@dataclass(frozen=True)
class Setting:
    """What was asked for, looked up."""

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

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the KV cache must have room, over all requests."""
        return self.context * self.asked.batch

    @property
    def spare_kv_bytes(self) -> int:
        """Room in the KV cache beyond what the simulated requests fill."""
        asked = self.asked
        return (self.context - asked.prompt - asked.decode) * asked.batch * self.model.kv_bytes_per_token


def look_up(asked: Asked, folder: Path) -> Setting:
    """Look everything up but the routing."""
    context = asked.context if asked.context is not None else asked.prompt + asked.decode
    if context < asked.prompt + asked.decode:
        raise ConfigError(
            f"{PLACE}: --context: expected at least --prompt and --decode together, {asked.prompt + asked.decode}, got {context}"
        )
    model, model_ref = _model(asked, folder)
    plain = load_hardware(asked.hardware, f"{PLACE}: --hardware")
    gpu, host, computes = _devices(plain)
    vram = _memory(asked.vram, "--vram", plain.devices[gpu].memory_bytes)
    if not computes and asked.ram is not None:
        raise ConfigError(f"{PLACE}: --ram: {plain.name} keeps all experts on {host}, not in memory; leave --ram out")
    ram = _memory(asked.ram, "--ram", plain.devices[host].memory_bytes)
    if vram <= plain.devices[gpu].workspace_bytes:
        taken = format_memory(plain.devices[gpu].workspace_bytes)
        got = format_memory(vram)
        raise CapacityError(
            f"{PLACE}: --vram: expected more than the {taken} that software takes on {gpu} of {plain.name}, got {got}"
        )
    # Engines that keep experts on the GPU only need less host memory than the simulator holds ready: what a placement needs there
    # is checked against --ram by `candidates`, so the simulator gets enough for any.
    simulated = max(plain.devices[host].memory_bytes, _most(model, context * asked.batch, plain, host))
    base = dict(asked.hardware) if isinstance(asked.hardware, Mapping) else {"base": str(asked.hardware)}
    ref = base | {f"devices.{gpu}.memory_bytes": vram, f"devices.{host}.memory_bytes": simulated}
    hardware = load_hardware(ref, f"{PLACE}: --hardware")
    return Setting(
        asked, model, hardware, model_ref, ref, gpu, host, computes, vram, ram, context, plain.devices[gpu].memory_bytes
    )


def _most(model: ModelSpec, kv_tokens: int, hardware: HardwareProfile, host: str) -> int:
    kv = kv_tokens * model.kv_bytes_per_token
    return (
        model.experts_bytes_total + model.non_expert_bytes + model.embedding_bytes + kv + hardware.devices[host].workspace_bytes
    )


def _memory(given: str | None, option: str, own: int) -> int:
    n_bytes = own if given is None else parse_bytes(given, f"{PLACE}: {option}")
    if n_bytes < 1:
        raise ConfigError(f"{PLACE}: {option}: expected a size of at least 1 byte, got {given!r}")
    return n_bytes


def _model(asked: Asked, folder: Path) -> tuple[ModelSpec, Any]:
    if asked.bits is not None and not BITS.hold(asked.bits):
        raise ConfigError(f"{PLACE}: --bits: expected a number of bits {BITS}, got {asked.bits:g}")
    if asked.gguf is not None:
        if asked.model is not None:
            raise ConfigError(f"{PLACE}: expected --model or --gguf, got both; the file says what the model is")
        if asked.bits is not None:
            raise ConfigError(f"{PLACE}: expected --bits or --gguf, got both; the file says how many bits its weights have")
        model = read_gguf(asked.gguf)
        path = folder / "model.yaml"
        write_bytes(path, model_yaml(model).encode())
        return model, str(path)
    if asked.model is None:
        raise ConfigError(f"{PLACE}: expected --model or --gguf, got neither; see 'moesim list models'")
    plain = load_model(asked.model, f"{PLACE}: --model")
    bits = asked.bits
    if bits is None and plain.expert_bits == 16 and plain.other_bits == 16 and plain.expert_bytes_by_layer is None:
        bits = DEFAULT_BITS
    if bits is None:
        return plain, asked.model
    if plain.expert_bytes_by_layer is not None:
        raise ConfigError(f"{PLACE}: --bits: {plain.name} says how many bytes an expert has; leave --bits out")
    base = dict(asked.model) if isinstance(asked.model, Mapping) else {"base": str(asked.model)}
    ref = base | {"expert_bits": bits, "other_bits": bits}
    return load_model(ref, f"{PLACE}: --model"), ref


def model_yaml(model: ModelSpec) -> str:
    """Write a specification as a file that an experiment can name."""
    values = {key: value for key, value in asdict(model).items() if key not in ("labels", "low_bits") and value is not None}
    if model.low_bits:
        values["expert_bits"] = list(model.widths)
    if "expert_bytes_by_layer" in values:
        values["expert_bytes_by_layer"] = list(values["expert_bytes_by_layer"])
        values.pop("expert_bits")
    return yaml.safe_dump(values, sort_keys=False)


def _devices(hardware: HardwareProfile) -> tuple[str, str, bool]:
    """Name the accelerator and the host; there must be one of each."""
    gpus = [name for name, device in hardware.devices.items() if device.role == "accelerator"]
    if len(gpus) != 1 or len(hardware.backing) != 1:
        what = f"{len(gpus)} GPUs ({', '.join(gpus)})" if gpus else "none"
        if len(gpus) == 1:
            what = f"one GPU and {len(hardware.backing)} hosts"
        raise ConfigError(
            f"{PLACE}: --hardware {hardware.name}: expected a machine with one GPU and one host, got {what}; "
            "compare placements on such a machine with 'moesim compare'"
        )
    host = hardware.backing[0]
    return gpus[0], host, hardware.devices[host].role == "host"
