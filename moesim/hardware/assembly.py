"""The parts of a machine, read from their texts and checked against each other; what is not given is assumed and noted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moesim.core.units import parse_rate
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.engines import BACKENDS
from moesim.hardware.parts import RATE, Cpu, Gpu, counted, find_cpu, find_gpu, unknown_part

KEYS: Final = ("gpu", "cpu", "ram", "pcie", "disk", "os")
"""Parts that a machine may be made of."""
RATIO: Final = 80  # operations a byte that a GPU reads, if it is known by rates alone
_USUAL: Final = "Ryzen 7 5700X"  # stands for a processor that is not named
_SIZE: Final = re.compile(r"\b(\d{1,5}(?:\.\d+)?) ?([gt])i?b\b(?!/)", re.IGNORECASE)
_TYPE: Final = re.compile(r"\b(?:((?:lp)?ddr\d)(x?)l?|m[rc]r?dimm)\b[ -]*(\d{3,5})?", re.IGNORECASE)
_MODULES: Final = re.compile(r"\b(\d{1,2}) ?x ?(\d{1,4})(?: ?gi?b)?\b", re.IGNORECASE)
_SPEED: Final = re.compile(r"\b([1-9]\d{3,4})\b")
_FASTEST: Final = {"DDR3": 2400, "DDR4": 5333, "DDR5": 10_000}  # MT/s of modules that are sold
_OFFICIAL: Final = {"DDR3": 1600, "DDR4": 3200}  # at most, where a processor also takes a later type


def names_memory(text: str) -> bool:
    """Whether a text has a size, modules, a type or a speed of memory."""
    return any(one.search(text) for one in (_SIZE, _MODULES, _TYPE, _SPEED))


@dataclass(frozen=True)
class Ram:
    """The memory of the host."""

    kind: str
    MTps: int
    channels: int  # that are filled, of all sockets
    gib: float
    known: bool  # type and modules were given

    @property
    def words(self) -> str:
        return f"{self.channels} x {self.kind}-{self.MTps}"

    @property
    def GBps(self) -> float:
        return self.channels * self.MTps * 8 / 1000


@dataclass
class Assembly:
    """A machine's parts."""

    parts: Mapping[str, Any]
    place: str
    assumed: list[str] = field(default_factory=list)  # what was not given

    def __post_init__(self) -> None:
        if unknown := [str(key) for key in self.parts if key not in KEYS]:
            raise self._wrong("", unknown_name("part", unknown[0], KEYS))
        for key, given in self.parts.items():
            several = given if key == "gpu" and isinstance(given, list) else [given]
            if not all(isinstance(one, str) and one.strip() for one in several):
                raise self._wrong(key, f"expected a text such as 'rtx 3060', got {given!r}; put it in quotes")
        texts = {key: self.parts.get(key, "") for key in KEYS}
        if not (texts["gpu"] or texts["cpu"]):
            raise self._wrong("", f"expected a gpu or a cpu, got {dict(self.parts)!r}; add one")
        named = texts["gpu"] if isinstance(texts["gpu"], list) else [texts["gpu"]]
        self.gpus = [gpu for text in named if text for gpu in self._gpus(text)]
        self.one_memory = bool(self.gpus) and self.gpus[0].unified
        self.cpu_rate = 0  # bytes a second, if it was given instead of a name
        self.sockets, self.cpu = self._cpu(texts["cpu"])
        if self.gpus and "Apple" in (vendors := {self.cpu.vendor, self.gpus[0].vendor}) and len(vendors) > 1:
            raise self._wrong(
                "gpu", f"expected the GPU of the same chip as Apple's, got {self.gpus[0].name} with {self.cpu.name}"
            )
        self.cpu_known = bool(texts["cpu"] or self.one_memory) and not self.cpu_rate
        self.slow_copies = "wsl" in texts["os"].lower()
        self.system, self.backend = self._os(texts["os"].lower())
        self.ram = self._ram(texts["ram"])
        self.pcie, self.disk = texts["pcie"].lower().strip(), texts["disk"].lower()

    def _wrong(self, key: str, said: object) -> HardwareError:
        return HardwareError(f"{self.place}: parts{'.' if key else ''}{key}: {said}")

    def _found(self, key: str, text: str, find: Any, kind: Any) -> Any:
        try:
            part = find(text)
        except HardwareError as error:
            raise self._wrong(key, error) from None
        if part is None:
            raise self._wrong(key, unknown_part(text, kind))
        return part

    def _gpus(self, text: str) -> list[Gpu]:
        n, name = counted(text)
        if (typed := RATE.search(name)) is not None:
            if (size := _SIZE.search(name)) is None:
                raise self._wrong("gpu", f"expected its memory next to the rate, such as '936GB/s 24GiB', got '{text}'; add it")
            GBps = parse_rate(typed[0], f"{self.place}: parts.gpu") / 1e9
            return [Gpu(name, (), "", "", "", "typed in", "", "", float(size[1]), GBps, RATIO * GBps / 1000, 0, 4, 16)] * n
        gpu: Gpu = self._found("gpu", name, find_gpu, Gpu)
        if gpu.twin and not re.search(r"\d ?gi?b", name.lower()):
            self.assumed.append(f"{name} is the {gpu.name}, the usual one; there is a {gpu.twin}")
        return [gpu] * n

    def _cpu(self, text: str) -> tuple[int, Cpu]:
        sockets, name = counted(text)
        if (typed := RATE.search(name)) is not None:
            self.cpu_rate, name = parse_rate(typed[0], f"{self.place}: parts.cpu"), ""
        if not name:
            chip = (self.gpus[0].name, *self.gpus[0].aliases) if self.one_memory else ()
            name = next((one for one in (re.sub(r" ?\(.*| \d\d$", "", one) for one in chip) if find_cpu(one)), _USUAL)
        cpu: Cpu = self._found("cpu", name, find_cpu, Cpu)
        if (name == _USUAL and not text) or self.cpu_rate:
            self.assumed.append(f"cpu: cores as of {cpu.name}")
        if sockets > cpu.sockets_max:
            raise self._wrong("cpu", f"expected at most {cpu.sockets_max} of {cpu.name} in a machine, got {sockets}; correct it")
        return sockets, cpu

    def _os(self, text: str) -> tuple[str, str]:
        words, vendor = re.findall(r"[a-z]+", text), self.gpus[0].vendor if self.gpus else ""
        system = next((one for one in ("windows", "linux", "macos") if one in words), "windows" if "win" in words else "")
        if not system:
            system = "macos" if "Apple" in (vendor, self.cpu.vendor) else "linux"
            self.assumed += ["os: linux"] if system == "linux" and not text else []
        old = self.gpus and self.gpus[0].architecture.startswith(("GCN", "RDNA 1"))
        usual = {"AMD": "hip" if system == "linux" and not old else "vulkan", "NVIDIA": "cuda", "": "cuda", "Apple": "metal"}
        backend = next((one for one in BACKENDS if one in words), "hip" if "rocm" in words else usual.get(vendor, "vulkan"))
        return system, backend if self.gpus else "cpu"

    def _ram(self, text: str) -> Ram:
        """Read memory as it is sold, ``2x32 ddr4-3200``, for the processor that it is in."""
        cpu, channels = self.cpu, self.cpu.memory_channels * self.sockets
        takes = [one.removesuffix("L") for one in cpu.memory_types]
        typed, modules, size = _TYPE.search(text), _MODULES.search(text), _SIZE.search(text)
        rest = _SPEED.search(_SIZE.sub("", _MODULES.sub("", text)))
        if text and not names_memory(text):
            number = re.fullmatch(r"\s*(\d+)\s*", text)
            remedy = f"write {number[1]}GB" if number else "correct it"
            raise self._wrong("ram", f"expected a size or a type such as 64GB or 2x32 ddr4-3200, got '{text}'; {remedy}")
        speed = int(typed[3] if typed and typed[3] else rest[1] if rest else 0)
        kind = (f"{typed[1]}{typed[2]}" if typed[1] else "DDR5").upper() if typed else ""
        if not kind:
            kind = next((one for one in takes if speed and speed <= _OFFICIAL.get(one, 20_000)), takes[-1])
        if not self.cpu_rate and not any(kind.rstrip("X") == one.rstrip("X") for one in takes):
            raise self._wrong("ram", f"expected {' or '.join(takes)} with {cpu.name}, got {kind}; correct one of them")
        if speed > _FASTEST.get(kind, 20_000):
            raise self._wrong("ram", f"expected {kind} of at most {_FASTEST[kind]} MT/s, got {speed}; correct it")
        speed = speed or min(cpu.max_MTps, _OFFICIAL.get(kind, 20_000) if len(takes) > 1 else 20_000)
        gib = (
            int(modules[1]) * float(modules[2]) if modules else float(size[1]) * (1024 if size[2] in "tT" else 1) if size else 0.0
        )
        if not gib:
            gib = (self.gpus[0].vram_GiB if self.one_memory else 0) or (32.0 if channels <= 2 else 16.0 * channels)
            self.assumed.append(f"memory: {gib:g} GiB")
        filled = min(int(modules[1]), channels) if modules else channels
        soldered = self.one_memory or kind.startswith("LP")
        guessed = [*([] if typed else [f"{kind}-{speed}"]), *([] if modules else [f"{filled} channels filled"])]
        if guessed and not soldered and not self.cpu_rate:
            self.assumed.append(f"memory: {', '.join(guessed)}")
        return Ram(kind, speed, filled, gib, soldered or not guessed)
