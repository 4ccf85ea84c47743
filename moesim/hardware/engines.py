"""Engine profiles: what a software adds to any machine, apart from what the machine does.

One YAML file an engine in ``engine_profiles/``: numbers of GPU, CPU and the switches between them, each with its source. Blocks
with ``when`` replace earlier ones on machines that fit: by ``backend``, ``system``, ``compute`` (of CUDA), ``threads`` and the
``build`` of ``NAME@BUILD``. The machine's words ``machine:`` state them; CUDA under Linux are assumed. A profile names its
engine with ``engine:``; an experiment, a command or a mapping ``{base: NAME, engine: NAME}`` another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from moesim.core.copies import Copies
from moesim.core.gate import YAML, read_text
from moesim.core.limits import COMPUTE, CORES
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.read import described, failures, read_yaml, refusal, with_sources
from moesim.hardware.schema import PARTS, Launches, Points, Share, Strict, Time
from moesim.hardware.types import OPERATIONS, HardwareProfile
from moesim.model import ModelSpec

MACHINE: Final = "machine"
"""Instead of an engine: what the machine's profile says, be it numbers or an engine."""
OWN: Final = "own"
"""Each policy with its engine's costs; the machine's where it has none."""

ASSUMED: Final[Mapping[str, str]] = {"backend": "cuda", "system": "linux"}
"""Facts of a machine that does not state them."""
BACKENDS: Final = ("cuda", "hip", "vulkan", "metal", "sycl", "cpu")
SYSTEMS: Final = ("linux", "windows", "macos")
_LAW: Final = "_a_thread"  # end of the key of a number for each thread
_LAW_THREADS: Final = 16  # of a processor that does not state its threads

_SOFTWARE: Final = (
    "operations", "operation_us", "launch_us", "launches", "token_us", "latent_attention_us", "router_us", "first_extra_us",
    "wake_us", "more_rows", "parts",
)  # fmt: skip
"""Keys of a device that are its software's."""


class Range(Strict):
    """Numbers from one up to another, which is not in it."""

    least: float = Field(0, alias="from")
    below: float = float("inf")


class DeviceCosts(Strict):
    """Numbers of a device; those of `moesim.hardware.schema.DeviceFile` by the same names."""

    operations: Literal["llama.cpp", "llama.cpp-unfused"] | None = None
    operation_us: Time | None = None
    operation_us_a_thread: Time | None = None  # an operation of a CPU, for each thread that waits for the others
    flops_share: Share | None = None  # of the device's operations per second, that its kernels reach with many rows
    read_share: Share | None = None  # of the rate of a stream, that kernels for one row read weights at
    launch_us: Time | None = None
    launches: dict[Literal[PARTS], Launches] = Field(default_factory=dict)  # type: ignore[valid-type]
    token_us: Time | None = None
    latent_attention_us: Time | None = None
    router_us: Time | None = None
    first_extra_us: Time | None = None
    wake_us: Time | None = None
    wake_us_a_thread: Time | None = None
    more_rows: Points | None = None


class When(Strict):
    """Machines that a block is for: all conditions together."""

    backend: Literal[BACKENDS] | None = None  # type: ignore[valid-type]
    system: Literal[SYSTEMS] | None = None  # type: ignore[valid-type]
    compute: Range | None = None
    build: str | None = None


class Block(Strict):
    """Numbers for some machines."""

    when: When = Field(default_factory=When)
    gpu: DeviceCosts = Field(default_factory=DeviceCosts)
    cpu: DeviceCosts = Field(default_factory=DeviceCosts)
    to_gpu_us: Time | None = None  # activations from host to GPU, without their bytes
    to_host_us: Time | None = None  # and back
    host_us: dict[Literal[tuple(OPERATIONS)], Time] = Field(default_factory=dict)  # type: ignore[valid-type]
    pageable_share: Share | None = None  # of a link's rate, that copies of a mapped file reach


class EngineFile(Strict):
    """An engine profile."""

    name: str
    aliases: list[str] = Field(default_factory=list)
    description: str
    checked: str  # version and date of what was read
    backends: Annotated[list[Literal[BACKENDS]], Field(min_length=1)]  # type: ignore[valid-type]
    builds: list[str] = Field(default_factory=list)
    base: str | None = None  # an engine whose costs it has, unless its own blocks say otherwise
    experts: Literal["rates", "curves"]  # experts by the machine's rates, or by its curves where it has some
    copies: Literal["pinned", "pageable"] = "pinned"  # host memory that weights are copied from
    costs: Annotated[list[Block], Field(min_length=1)]


@dataclass(frozen=True)
class EngineProfile:
    """An engine, with the build that was asked for."""

    file: EngineFile
    build: str

    @property
    def name(self) -> str:
        return self.file.name + (f"@{self.build}" if self.build else "")


_FOLDER = resources.files("moesim.hardware").joinpath("engine_profiles")


@lru_cache
def _shipped() -> dict[str, EngineFile]:
    """Read all shipped engine profiles, by name."""
    files = sorted((one for one in _FOLDER.iterdir() if one.name.endswith(".yaml")), key=lambda one: one.name)
    read = [_read(one.read_text(encoding="utf-8"), f"engine_profiles/{one.name}") for one in files]
    found = {one.name: one for one in read}
    return {name: _on_its_base(one, found) for name, one in found.items()}


def _on_its_base(file: EngineFile, known: Mapping[str, EngineFile]) -> EngineFile:
    if file.base is None:
        return file
    if file.base not in known:
        raise HardwareError(f"{file.name}: base: {unknown_name('engine', file.base, known)}")
    return file.model_copy(update={"costs": [*known[file.base].costs, *file.costs]})


def engine_profiles() -> list[EngineFile]:
    """List all shipped engine profiles."""
    return list(_shipped().values())


def _read(text: str, place: str) -> EngineFile:
    try:
        return EngineFile.model_validate(_spread(read_yaml(text, place, "name, backends and costs")))
    except ValidationError as failure:
        raise refusal(place, [": ".join(described(one, EngineFile)) for one in failures(failure)]) from None


def _spread(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Write a block's source next to each of its numbers, as in a machine's profile."""
    blocks = raw.get("costs")
    if not isinstance(blocks, list):
        return dict(raw)
    return {**raw, "costs": [_block(one) if isinstance(one, Mapping) else one for one in blocks]}


def _block(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(raw)
    for key in ("gpu", "cpu"):
        if isinstance(raw.get(key), Mapping):
            found[key] = with_sources({"devices": {key: raw[key]}})["devices"][key]
    if isinstance(raw.get("host_us"), Mapping):
        found |= with_sources({"host_us": raw["host_us"]})
    return found


def load_engine(written: str, place: str) -> EngineProfile:
    """Load an engine profile: ``NAME``, ``NAME@BUILD``, or the path of a file.

    Raises `HardwareError` if there is none, or anything in it is wrong.
    """
    text, _, build = written.partition("@")
    if "/" in text or text.endswith((".yaml", ".yml")):
        file = _on_its_base(_read(read_text(Path(text), YAML, "an engine profile", error=HardwareError), text), _shipped())
    else:
        known = {alias: one for one in _shipped().values() for alias in (one.name, *one.aliases)}
        if text not in known:
            raise HardwareError(f"{place}: {unknown_name('engine', text, [*_shipped(), MACHINE, OWN])}")
        file = known[text]
    if build and build not in file.builds:
        raise HardwareError(f"{place}: {unknown_name(f'build of {file.name}', build, file.builds)}")
    return EngineProfile(file, build)


def same_engine(written: str, named: str) -> bool:
    """Whether a name without a build means the engine that is written, by whatever name."""
    known = {alias: one.name for one in _shipped().values() for alias in (one.name, *one.aliases)}
    first = written.partition("@")[0]
    return known.get(first, first) == known.get(named, named)


def facts_of(words: Mapping[str, Any], kinds: Collection[str], place: str) -> dict[str, str]:
    """Return what a machine with these kinds of devices states of itself for engines, and what is assumed."""
    found = {**ASSUMED, **{key: str(words[key]) for key in ("backend", "system", "compute", "threads") if key in words}}
    if "gpu" not in kinds:
        found["backend"] = "cpu"
    for key, known in (("backend", BACKENDS), ("system", SYSTEMS)):
        if found[key] not in known:
            raise HardwareError(f"{place}: machine.{key}: {unknown_name(key, found[key], known)}")
    for key, form, bounds in (("compute", r"\d+(\.\d+)?", COMPUTE), ("threads", r"[1-9]\d*", CORES)):
        if key in found and not (re.fullmatch(form, found[key]) and bounds.hold(float(found[key]))):
            raise HardwareError(f"{place}: machine.{key}: expected a number in quotes, {bounds}, got '{found[key]}'; correct it")
    return found


def _misfit(engine: EngineProfile, facts: Mapping[str, str]) -> str | None:
    runs = engine.file.backends
    if facts["backend"] in runs:
        return None
    return (
        f"expected one that runs on {facts['backend']}, as the machine does, got {engine.name}, which runs on {', '.join(runs)}"
    )


def transfer_of(policy: Any, model: ModelSpec, machine: HardwareProfile, curve: str = OWN, chunk: int | None = None) -> Copies:
    """Return how a policy copies weights: its own way, else what is asked for.

    ``own``: pageable copies where the policy maps the file at its engine's costs, else pinned ones.
    """
    own = policy.transfer(model) if hasattr(policy, "transfer") else None
    mapped = machine.machine.get("copies", "pinned") if getattr(policy, "mmap", False) else "pinned"
    if own is None:
        return Copies(mapped if curve == OWN else curve, chunk)
    return Copies(*own)._replace(kind=mapped) if hasattr(policy, "mmap") else Copies(*own)


def why_not(written: str, machine: HardwareProfile) -> str | None:
    """Return why an engine does not run on a machine; None if it does, or none is named."""
    if written in ("", MACHINE, OWN):
        return None
    facts = facts_of(machine.machine, [device.kind for device in machine.devices.values()], machine.path)
    return _misfit(load_engine(written, machine.path), facts)


def check_engine(words: Any, named: Any, place: str) -> None:
    """Refuse to name another engine for a machine whose numbers were identified with one."""
    had = words.get("engine") if isinstance(words, Mapping) else None
    if had is None or not isinstance(named, str) or named in (MACHINE, OWN):
        return
    if re.split("[@ ]", had)[0] != load_engine(named, f"{place}: engine").file.name:
        raise HardwareError(
            f"{place}: engine: expected {had}, with which this machine was identified, got {named}; identify it with speeds of "
            f"{named}, or begin with the profile before"
        )


def _fits(when: When, facts: Mapping[str, str], build: str) -> bool:
    words = ((when.backend, facts.get("backend")), (when.system, facts.get("system")), (when.build, build))
    if any(wanted is not None and wanted != got for wanted, got in words):
        return False
    return when.compute is None or ("compute" in facts and when.compute.least <= float(facts["compute"]) < when.compute.below)


def of_the_machine(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile's contents without what devices have of a software."""
    devices = raw.get("devices")
    if not isinstance(devices, Mapping):
        return dict(raw)
    kept = {
        name: {key: one for key, one in device.items() if key not in _SOFTWARE} if isinstance(device, Mapping) else device
        for name, device in devices.items()
    }
    return {**raw, "devices": kept}


def with_engine(raw: Mapping[str, Any], written: str, place: str) -> dict[str, Any]:
    """Put an engine's numbers in the place of a machine's own, in a copy of its profile's contents.

    Numbers of the profile stay where it names this engine itself: they are of this very machine. Raises `HardwareError` for an
    engine that does not run on the machine.
    """
    engine = load_engine(written, f"{place}: engine")
    facts = facts_of(raw.get("machine") or {}, [device.get("kind") for device in raw["devices"].values()], place)
    if (why := _misfit(engine, facts)) is not None:
        raise HardwareError(f"{place}: engine: {why}; choose another engine or machine")
    blocks = [block for block in engine.file.costs if _fits(block.when, facts, engine.build)]
    given = [_given(block) for block in blocks]
    numbers = {key: value for one in given for key, value in one.items() if key not in ("when", "gpu", "cpu", "host_us")}
    host = _switches(numbers) | {key: value for one in given for key, value in one.get("host_us", {}).items()}
    own = raw.get("engine") == written
    devices = {name: _device(device, blocks, engine, facts, own) for name, device in raw["devices"].items()}
    found = {key: value for key, value in raw.items() if own or key not in ("host_expert_us", "host_shared")}
    found |= {"engine": written, "devices": devices, "host_us": host | (found.get("host_us") or {} if own else {})}
    found["links"] = {
        name: link if own and "latency_us" in (link.get("activation") or {}) else _link(name, link, devices, numbers, own)
        for name, link in raw.get("links", {}).items()
    }
    words = ", ".join(facts[key] for key in ("backend", "system"))
    there = all(any(link.get(kind) for kind in (engine.file.copies, "any")) for link in found["links"].values())
    found["machine"] = {
        **(raw.get("machine") or {}), "engine": f"{engine.name} ({words})", "copies": engine.file.copies if there else "pinned"
    }  # fmt: skip
    return found


def _switches(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the host's operations that are switches between CPU and GPU."""
    back, there = numbers.get("to_host_us"), numbers.get("to_gpu_us")
    if back is None or there is None:
        return {}
    label = "assumed" if "assumed" in (back["source"], there["source"]) else "derived"
    ends = [sum(pair) for pair in zip(*(one.get("interval") or [one["value"]] * 2 for one in (there, back)), strict=True)]
    both = {"value": there["value"] + back["value"], "source": label, "interval": ends}
    return {"readback": back, "split": both | {"why" if label == "assumed" else "how": "both switches of a layer with the CPU"}}


def _given(part: Strict) -> dict[str, Any]:
    """Return what is set, as a profile's contents."""
    return part.model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def _device(
    device: Mapping[str, Any], blocks: list[Block], engine: EngineProfile, facts: Mapping[str, str], keep: bool
) -> dict[str, Any]:  # fmt: skip
    kind = device.get("kind")
    if kind not in ("gpu", "cpu"):
        return dict(device)
    gone = () if keep else (*_SOFTWARE, *(("experts",) if engine.file.experts == "rates" else ()))
    found = {key: value for key, value in device.items() if key not in gone}
    own: dict[str, Any] = {}
    for block in blocks:  # a law by threads replaces a number, and a number a law
        given = _given(getattr(block, kind))
        own = {
            key: value for key, value in own.items() if key.removesuffix(_LAW) not in {one.removesuffix(_LAW) for one in given}
        }
        own |= given
    for key in ("operation_us", "wake_us"):
        if (law := own.pop(key + _LAW, None)) is not None:
            own[key] = _for_threads(law, int(facts.get("threads", _LAW_THREADS)), "threads" in facts)
    for key, name in _SHARES:
        if (share := own.pop(name, None)) is not None and key in found:
            found[key] = _shared(found[key], share)
    if gone and engine.file.experts == "rates" and isinstance(cost := found.get("expert_cost"), Mapping):
        found["expert_cost"] = {key: value for key, value in cost.items() if key not in ("per_expert_us", "per_row_us")}
    return own | found


def _for_threads(law: Mapping[str, Any], threads: int, stated: bool) -> dict[str, Any]:
    """Return a number of so many threads, which is one for each."""
    words = f"{threads} threads" if stated else f"{threads} threads, as none are stated"
    found = {**law, "value": float(f"{threads * law['value']:.6g}")}
    if law.get("interval"):
        found["interval"] = [float(f"{threads * end:.6g}") for end in law["interval"]]
    return found | {key: f"{words}: {law[key]}" for key in ("ref", "how", "why") if law.get(key)}


_SHARES: Final = (("flops", "flops_share"), ("memory_bytes_per_s", "read_share"))
"""Rates of a device, and the engine's share of each."""


def _shared(rate: Mapping[str, Any], share: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rate that kernels reach, of a device's or link's."""
    own, words = ("; ".join(str(one[key]) for key in ("ref", "how", "why") if one.get(key)) for one in (rate, share))
    label = "assumed" if "assumed" in (rate.get("source"), share["source"]) else "derived"
    found = {"value": rate["value"] * share["value"], "source": label}
    found["why" if label == "assumed" else "how"] = f"{share['value']:g} ({words}) of {rate['value']:.4g} ({own})"
    if interval := share.get("interval"):
        found["interval"] = _both(rate, interval, share["value"])
    return found


def _both(rate: Mapping[str, Any], share: Sequence[float], middle: float) -> list[float]:
    """Return the range of a rate's share: in logarithms, deviations of independent numbers add up as squares."""
    value, ends = float(rate["value"]), rate.get("interval") or [rate["value"]] * 2
    found = [math.hypot(math.log(own / value), math.log(one / middle)) for own, one in zip(ends, share, strict=True)]
    return [float(f"{value * middle * math.exp(sign * by):.6g}") for sign, by in zip((-1, 1), found, strict=True)]


def _link(
    name: str, link: Mapping[str, Any], devices: Mapping[str, Any], numbers: Mapping[str, Any], own: bool
) -> dict[str, Any]:  # fmt: skip
    """Return a link between host and GPU with the engine's time for activations to cross it."""
    kinds = [devices.get(end, {}).get("kind") for end in name.split("->")]
    latency = {("cpu", "gpu"): numbers.get("to_gpu_us"), ("gpu", "cpu"): numbers.get("to_host_us")}.get(tuple(kinds))
    if latency is None:
        return dict(link)
    share, pinned = numbers.get("pageable_share"), link.get("pinned") or {}
    there = link.get("pageable") or {}  # what was measured of copies stays; what another software reached does not
    stays = own or "points" in there or (there.get("bytes_per_s") or {}).get("source") == "measured"
    if share and "bytes_per_s" in pinned and not link.get("any") and not (there and stays):
        link = {**link, "pageable": {**pinned, "bytes_per_s": _shared(pinned["bytes_per_s"], share)}}
    before = link.get("activation") or {}
    sources = (before, *(link.get(kind) or {} for kind in ("pinned", "any", "chunked", "pageable")))
    rate = next((one["bytes_per_s"] for one in sources if "bytes_per_s" in one), None)
    if rate is None:  # measured points, which have the time before the first byte in them
        return dict(link)
    shared = {"share_link": before["share_link"]} if "share_link" in before else {}
    return {**link, "activation": {"latency_us": latency, "bytes_per_s": rate, **shared}}
