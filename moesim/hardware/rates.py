"""From the parts of a machine to its rates: the whole form of a profile, each number with its rule and range.

The rules are data, ``parts/rules.csv``: a value with the least and most that it is multiplied by in nine of ten machines. In the
profile a rule's number is `derived`; where a part that it is of was not given, `assumed`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from moesim.core.units import parse_rate
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.engines import BACKENDS
from moesim.hardware.parts import FOLDER, RATE, Cpu, Gpu, counted, find_cpu, find_gpu, unknown_part
from moesim.hardware.schema import LANE

KEYS: Final = ("gpu", "cpu", "ram", "pcie", "disk", "os")
"""Parts that a machine may be made of."""
WORKSPACE_GIB: Final = 1  # of the GPU's memory that its software takes
RATIO: Final = 80  # operations a byte that a GPU reads, if it is known by rates alone
_USUAL: Final = "Ryzen 7 5700X"  # stands for a processor that is not named
_FIRST_REPACK: Final = 32  # rows from which an expert's products are of blocks
_GIB: Final = 2**30


@dataclass(frozen=True)
class Rule:
    """A row of ``parts/rules.csv``."""

    value: float
    least: float
    most: float
    cap_GBps: float
    cap_of: str
    cap_MTps: float
    kind: str
    source: str

    def number(self, value: float, how: str, *, assumed: str = "", wider: float = 1.0) -> dict[str, Any]:
        """Return a number that this rule gives, with its range; ``wider`` divides its lower end."""
        return made(
            value, f"{how} ({self.source})", self.least / wider, self.most, assumed or ("rule" if self.kind == "assumed" else "")
        )


@lru_cache
def _rules() -> dict[tuple[str, str], Rule]:
    rows = csv.DictReader(FOLDER.joinpath("rules.csv").read_text(encoding="utf-8").splitlines())
    numbers = ("value", "least", "most", "cap_GBps", "cap_MTps")
    usual = {"value": 1.0, "least": 1.0, "most": 1.0, "cap_GBps": 0.0, "cap_MTps": 0.0}
    return {
        (row["what"], row["of"]): Rule(
            **{key: float(row[key]) if row[key] else usual[key] for key in numbers},
            cap_of=row["cap_of"], kind=row["kind"], source=row["source"],
        )
        for row in rows
    }  # fmt: skip


def rule(what: str, of: str) -> Rule:
    """Return a rule by what it is of."""
    return _rules()[what, of]


def made(value: float, how: str, least: float, most: float, assumed: str = "") -> dict[str, Any]:
    """Return a number of a profile with its range, as factors."""
    words = {"source": "assumed", "why": how} if assumed else {"source": "derived", "how": how}
    ends = [_short(value * least), _short(value * most)]
    return {"value": _short(value), **words, "interval": ends}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _bytes(gib: float, how: str, least: float, most: float, assumed: bool) -> dict[str, Any]:
    words = {"source": "assumed", "why": how} if assumed else {"source": "derived", "how": how}
    value, low, high = (round(one * _GIB) for one in (gib, least, most))
    return {"value": value, **words, "interval": [float(low), float(high)]}


@dataclass
class Assembly:
    """The parts of a machine, read and checked against each other; ``assumed`` lists what was not given."""

    parts: Mapping[str, Any]
    place: str
    assumed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if unknown := [str(key) for key in self.parts if key not in KEYS]:
            raise HardwareError(f"{self.place}: parts: {unknown_name('part', unknown[0], KEYS)}")
        texts = {key: self._text(key) for key in KEYS if self.parts.get(key) is not None}
        if not {"gpu", "cpu"} & texts.keys():
            raise HardwareError(f"{self.place}: parts: expected a gpu or a cpu, got {dict(self.parts)!r}; add one")
        self.gpus, self.gpu_rate = self._gpus(texts.get("gpu", []))
        self.sockets, self.cpu, self.cpu_rate = self._cpu(*texts.get("cpu", [""]))
        self.one_memory = bool(self.gpus and self.gpus[0].unified)
        self.system, self.backend, self.wsl = self._os(" ".join(texts.get("os", [])).lower())
        self.ram = self._ram(" ".join(texts.get("ram", [])))
        self.pcie = " ".join(texts.get("pcie", [])).lower()
        self.disk = " ".join(texts.get("disk", [])).lower()

    def _text(self, key: str) -> list[str]:
        given = self.parts[key]
        texts = given if isinstance(given, list) and key == "gpu" else [given]
        if not all(isinstance(one, str) and one.strip() for one in texts) or not texts:
            raise HardwareError(f"{self.place}: parts.{key}: expected a text such as 'rtx 3060', got {given!r}; put it in quotes")
        return [one.strip() for one in texts]

    def _gpus(self, texts: Sequence[str]) -> tuple[list[Gpu], int]:
        found = list[Gpu]()
        for text in texts:
            n, name = counted(text)
            if (typed := RATE.search(name)) is not None:
                found += [_typed_gpu(typed[0], name, f"{self.place}: parts.gpu")] * n
                continue
            try:
                gpu = find_gpu(name)
            except HardwareError as error:
                raise HardwareError(f"{self.place}: parts.gpu: {error}") from None
            if gpu is None:
                raise HardwareError(f"{self.place}: parts.gpu: {unknown_part(name, Gpu)}")
            if gpu.twin and not re.search(r"\d ?gi?b", name.lower()):
                self.assumed.append(f"{name} is the {gpu.name}, the usual one; there is a {gpu.twin}")
            found += [gpu] * n
        return found, 0

    def _cpu(self, text: str) -> tuple[int, Cpu, int]:
        sockets, name = counted(text)
        rate = 0
        if (typed := RATE.search(name)) is not None:
            rate, name = parse_rate(typed[0].strip(), f"{self.place}: parts.cpu"), ""
        try:
            cpu = find_cpu(name or self._own_cpu())
        except HardwareError as error:
            raise HardwareError(f"{self.place}: parts.cpu: {error}") from None
        if cpu is None:
            raise HardwareError(f"{self.place}: parts.cpu: {unknown_part(name, Cpu)}")
        if not name and not (self.gpus and self.gpus[0].unified):
            self.assumed.append(f"cpu: as {cpu.name}")
        if sockets > cpu.sockets_max:
            got = f"got {sockets} of {cpu.name}, of which {cpu.sockets_max} works alone; correct it"
            raise HardwareError(f"{self.place}: parts.cpu: expected sockets that exist, {got}")
        return sockets, cpu, rate

    def _own_cpu(self) -> str:
        """Name the processor on the chip of the GPU; the usual one for another GPU."""
        if self.gpus and self.gpus[0].unified:
            for name in (self.gpus[0].name, *self.gpus[0].aliases):
                if find_cpu(name) is not None:
                    return name
        return _USUAL

    def _os(self, text: str) -> tuple[str, str, bool]:
        vendor = self.gpus[0].vendor if self.gpus else ""
        system = next((one for one in ("windows", "linux", "macos") if one in text), "")
        wsl = "wsl" in text
        if not system and re.search(r"\bwin\b|\bwin ?1[01]", text):
            system = "windows"
        elif not system and (vendor == "Apple" or self.cpu.vendor == "Apple"):
            system = "macos"
        elif not system:
            system = "linux"
            if not wsl and "ubuntu" not in text:
                self.assumed.append("os: linux")
        backend = next((one for one in BACKENDS if one in text.split()), "hip" if "rocm" in text.split() else "")
        if self.gpus and not backend:
            old = self.gpus[0].architecture.startswith(("GCN", "RDNA 1"))
            amd = "hip" if system == "linux" and not old else "vulkan"
            backend = {"NVIDIA": "cuda", "": "cuda", "Apple": "metal", "AMD": amd}.get(vendor, "vulkan")
        return system, backend if self.gpus else "cpu", wsl

    def _ram(self, text: str) -> Ram:
        return read_ram(text, self)


@dataclass(frozen=True)
class Ram:
    """The memory of the host."""

    kind: str
    MTps: int
    channels: int  # that are filled, of all sockets
    gib: float
    known: bool  # the type and the modules were given

    @property
    def words(self) -> str:
        return f"{self.channels} x {self.kind}-{self.MTps}"

    @property
    def GBps(self) -> float:
        return self.channels * self.MTps * 8 / 1000


def _typed_gpu(rate: str, text: str, place: str) -> Gpu:
    size = re.search(r"(\d+(?:\.\d+)?)\s*gi?b\b(?!/s)", text, re.IGNORECASE)
    if size is None:
        raise HardwareError(f"{place}: expected the memory next to the rate, such as '936GB/s 24GiB', got '{text}'; add it")
    GBps = parse_rate(rate.strip(), place) / 1e9
    return Gpu(
        name=f"a GPU of {text}", aliases=(), vendor="", architecture="", platform="", kind="typed in", source="typed in", note="",
        compute="", vram_GiB=float(size[1]), memory_bandwidth_GBps=GBps, fp16_dense_TFLOPs=RATIO * GBps / 1000, fp32_TFLOPs=0,
        pcie_gen=4, pcie_lanes=16, laptop=False, unified=False, board_W=0, twin="", matrix_rate_basis="",
    )  # fmt: skip


_TYPE: Final = re.compile(r"\b((?:lp)?ddr\d[a-z]?)\b(?:[ -]*(\d{3,5}))?|\bm(?:r|cr)dimm(?:[ -]*(\d{4,5}))?", re.IGNORECASE)
_MODULES: Final = re.compile(r"\b(\d{1,2}) ?x ?(\d{1,4})(?: ?gi?b)?\b", re.IGNORECASE)
_SIZE: Final = re.compile(r"\b(\d{1,5}(?:\.\d+)?) ?(g|t)i?b\b", re.IGNORECASE)
_FASTEST: Final = {"DDR3": 2400, "DDR4": 5333, "DDR5": 10_000}
_OFFICIAL: Final = {"DDR3": 1600, "DDR4": 3200}  # at most, where a processor also takes a later type


def read_ram(text: str, machine: Assembly) -> Ram:
    """Read memory as it is sold, ``2x32 ddr4-3200``, for the processor that it is in."""
    cpu, place = machine.cpu, f"{machine.place}: parts.ram"
    known = [re.sub(r"L$", "", one) for one in cpu.memory_types]
    typed, modules, size = _TYPE.search(text), _MODULES.search(text), _SIZE.search(text)
    speed = int(typed[2] or typed[3] or 0) if typed else 0
    if not speed and (alone := re.search(r"\b([1-9]\d{3,4}) ?(?:mt/s|mhz)?\b", re.sub(_MODULES, "", text), re.IGNORECASE)):
        speed = int(alone[1])
    kind = (typed[1] or "MRDIMM").upper() if typed else ""
    if not kind:
        kind = next((one for one in known if speed and speed <= _OFFICIAL.get(one, 20_000)), known[-1])
    wanted = "DDR5" if kind == "MRDIMM" else kind
    if machine.cpu_rate == 0 and wanted not in known and not (wanted.startswith("LP") and any(k.startswith("LP") for k in known)):
        raise HardwareError(f"{place}: expected {' or '.join(known)} with {cpu.name}, got {kind}; correct one of them")
    if speed > _FASTEST.get(kind, 20_000):
        raise HardwareError(f"{place}: expected {kind} of at most {_FASTEST[kind]} MT/s, got {speed}; correct it")
    if not speed:
        speed = min(cpu.max_MTps, _OFFICIAL.get(kind, cpu.max_MTps) if len(known) > 1 else cpu.max_MTps)
    channels = cpu.memory_channels * machine.sockets
    if modules:
        gib, filled = int(modules[1]) * float(modules[2]), min(int(modules[1]), channels)
    else:
        gib, filled = (float(size[1]) * (1024 if size[2].lower() == "t" else 1) if size else 0.0), channels
    soldered = machine.one_memory or wanted.startswith("LP")
    if not gib:
        gib = max((gpu.vram_GiB for gpu in machine.gpus), default=0) if machine.one_memory else 16.0 * channels
        gib = gib or 32.0
        machine.assumed.append(f"memory: {gib:g} GiB")
    said = [] if typed or soldered else [f"{kind}-{speed}"]
    said += [] if modules or soldered else [f"{filled} channel{'s' if filled > 1 else ''} filled"]
    if said and not machine.cpu_rate:
        machine.assumed.append(f"memory: {', '.join(said)}")
    return Ram(kind, speed, filled, gib, not said)


def cpu_read(machine: Assembly) -> dict[str, Any]:
    """Return the rate at which all cores read memory: filled channels, and what the dies or cores can take."""
    cpu, ram = machine.cpu, machine.ram
    if machine.cpu_rate:
        return made(machine.cpu_rate, "typed in, taken as what all cores read", 0.9, 1.1, "typed in")
    found = rule("cpu memory", cpu.platform)
    rate, how = ram.GBps * found.value, f"{ram.words} = {ram.GBps:.4g} GB/s x {found.value:g}"
    dies = cpu.compute_dies or 1
    units = {"die": dies, "core": cpu.cores, "two dies": 1, "chip": 1, "": 0}[found.cap_of] * machine.sockets
    slower = min(1.0, ram.MTps / found.cap_MTps) if found.cap_MTps else 1.0
    if units and (cap := units * found.cap_GBps * slower) < rate:
        of = f"{units} {found.cap_of}{'s' if units > 1 else ''}" if found.cap_of in ("die", "core") else found.cap_of
        rate, how = cap, f"{of} of {cpu.name} x {found.cap_GBps * slower:.4g} GB/s, less than {how}"
    wider = 1.0
    if machine.sockets > 1:
        two = rule("sockets", "two")
        rate, how, wider = rate * two.value / machine.sockets, f"{how}; two sockets read {two.value:g} times one", 1 / two.least
    return found.number(rate * 1e9, how, assumed="" if ram.known else "ram", wider=wider * (1 if ram.known else 1.3))


def clock_GHz(cpu: Cpu) -> tuple[float, str]:
    """Return the clock of all cores together, and how it follows from base and boost."""
    base, boost = cpu.base_GHz, cpu.boost_GHz
    if cpu.form == "one chip":
        return boost, "boost"
    if not base:
        return 0.7 * boost, "boost x 0.7"
    share = {"server": 0.6, "laptop": 0.4}.get(cpu.form)
    if share is not None:
        return base + share * (boost - base), f"base + {share:g} x (boost - base)"
    less = 0.4 if cpu.vendor == "AMD" else 0.5
    return max(base, boost - less), f"boost - {less:g}"


def cpu_flops(machine: Assembly, rows: str) -> dict[str, Any]:
    """Return the operations a second of all cores in products of quantised weights with ``few`` or ``many`` rows."""
    cpu, found = machine.cpu, rule("cpu rows", rows)
    clock, words = clock_GHz(cpu)
    cores = (cpu.cores_performance + cpu.cores_efficient / 2) * machine.sockets
    arm = cpu.architecture.startswith(("Apple", "Neoverse", "Cortex", "Ampere", "Oryon"))
    isa = "neon" if arm else "avx512" if cpu.avx512 else "avx2" if cpu.avx2 else "older"
    share = rule("cpu instructions", isa).value
    how = f"{cores:g} cores x {clock:.3g} GHz ({words}) x {found.value:g} operations a clock" + (
        f" x {share:g} ({isa})" if share != 1 else ""
    )
    return found.number(
        cores * clock * 1e9 * found.value * share, how, assumed="" if "cpu" in machine.parts and not machine.cpu_rate else "cpu"
    )


def gpu_numbers(machine: Assembly, gpu: Gpu) -> dict[str, Any]:
    """Return the memory, memory rate and matrix rate of a GPU."""
    found: dict[str, Any] = {"kind": "gpu"}
    sheet = f"{gpu.name}: {gpu.kind}, {gpu.source}"
    if gpu.unified:
        share = rule("one memory", machine.system)
        gib = machine.ram.gib * share.value
        ends = (gib * share.least, min(machine.ram.gib, gib * share.most))
        keep = _system_gib(machine)[0]
        found["memory_of"] = "cpu0"
        found["memory_bytes"] = _bytes(
            min(gib, keep), f"{machine.ram.gib:g} GiB x {share.value:g}: {share.source}", *(min(e, keep) for e in ends), True
        )
    else:
        desk = rule("desktop", machine.system)
        ends = (gpu.vram_GiB - desk.value * desk.most, gpu.vram_GiB - desk.value * desk.least)
        how = f"{gpu.vram_GiB:g} GiB ({sheet}) less {desk.value:g} GiB: {desk.source}"
        found["memory_bytes"] = _bytes(gpu.vram_GiB - desk.value, how, *ends, False)
    why = "the driver's context and libraries' workspaces"
    found["workspace_bytes"] = {
        "value": "1 GiB" if gpu.vram_GiB > 2 or gpu.unified else "512 MiB",
        "source": "assumed",
        "why": why,
    }
    if not gpu.platform:
        typed = "typed in, taken as what a stream reaches"
        found["memory_bytes_per_s"] = made(gpu.memory_bandwidth_GBps * 1e9, typed, 0.85, 1, "typed in")
        found["flops"] = made(
            gpu.fp16_dense_TFLOPs * 1e12, f"{RATIO} operations a byte read: the GPU is not named", 0.3, 2.5, "typed in"
        )
        return found
    memory, matrix = rule("gpu memory", gpu.platform), rule("gpu matrix", gpu.platform)
    if gpu.platform == "integrated GPU":
        nominal, of = machine.ram.GBps, machine.ram.words
    else:
        nominal, of = gpu.memory_bandwidth_GBps, sheet
    found["memory_bytes_per_s"] = memory.number(nominal * memory.value * 1e9, f"{nominal:.4g} GB/s ({of}) x {memory.value:g}")
    plain = not gpu.fp16_dense_TFLOPs or gpu.platform == "NVIDIA before Volta"
    teraflops = gpu.fp32_TFLOPs if plain else gpu.fp16_dense_TFLOPs
    words = "fp32" if plain else f"dense fp16, {gpu.matrix_rate_basis}"
    found["flops"] = matrix.number(
        teraflops * matrix.value * 1e12, f"{teraflops:g} TFLOP/s ({gpu.name}: {words}) x {matrix.value:g}"
    )
    return found


def _system_gib(machine: Assembly) -> tuple[float, float, float]:
    """Return the memory that the system leaves, with its range."""
    keeps = rule("system", machine.system)
    most = machine.ram.gib / 4  # of a small memory
    left = [machine.ram.gib - min(most, keeps.value * factor) for factor in (1, keeps.most, keeps.least)]
    return left[0], left[1], left[2]


def cpu_numbers(machine: Assembly) -> dict[str, Any]:
    """Return the memory and rates of the processor."""
    few, share = cpu_flops(machine, "few"), rule("cpu experts", "any")
    keeps = rule("system", machine.system)
    how = f"{machine.ram.gib:g} GiB less {keeps.value:g} GiB: {keeps.source}"
    return {
        "kind": "cpu",
        "memory_bytes": _bytes(*(lambda a: (a[0], how, a[1], a[2]))(_system_gib(machine)), "ram" not in machine.parts),
        "memory_bytes_per_s": cpu_read(machine),
        "flops": few,
        "expert_cost": {
            "read_share": share.number(share.value, "of the memory's rate"),
            "few_row_flops": few,
            "many_row_flops": cpu_flops(machine, "many"),
            "crossover_rows": {
                "value": _FIRST_REPACK, "source": "derived",
                "how": "512 rows of 8 experts over 128 experts, a prompt as rates with many rows are from",
            },
        },
    }  # fmt: skip


_SLOT: Final = re.compile(r"(?:pci-?e?|gen)?\s*([1-5])(?:\.0)?\s*x?\s*(16|8|4|2|1)\b|\bx\s*(16|8|4|2|1)\b")
_OLD_BOARDS: Final = re.compile(r"\b[ab]3[25]0\b|\b[bx]4[57]0\b|\bx370\b")


def link_of(machine: Assembly, gpu: Gpu) -> tuple[dict[str, Any], str]:
    """Return the rate of copies to a GPU, and the words of the link: the least of card, processor and board."""
    text = machine.pcie
    if gpu.unified:
        found = rule("link", "one memory")
        rate = gpu_numbers(machine, gpu)["memory_bytes_per_s"]["value"] * found.value
        return found.number(rate, f"a copy within the memory, {found.value:g} of what the GPU reads"), "one memory"
    if RATE.fullmatch(text.strip()):
        return made(
            parse_rate(text.strip().replace("gb", "GB").replace("b/s", "B/s"), machine.place), "typed in", 0.95, 1.05, "typed in"
        ), text
    for what, name in _rules():
        if (
            what == "link"
            and re.sub(r"\W", "", name) in re.sub(r"\W", "", text)
            and not name.startswith(("pcie", "one", "radeon"))
        ):
            found = rule(what, name)
            return found.number(found.value * 1e9, f"{name}"), name
    if not gpu.pcie_gen and gpu.platform == "NVIDIA HBM":
        found = rule("link", "nvlink-c2c")
        return found.number(found.value * 1e9, "NVLink-C2C"), "NVLink-C2C"
    slot, cpu = _SLOT.search(text), machine.cpu
    named = "cpu" in machine.parts and not machine.cpu_rate
    lanes_of_cpu = (16 if cpu.pcie_lanes >= 16 else 8 if cpu.pcie_lanes >= 8 else 4) if named else 16
    gens = [gpu.pcie_gen or 4, *([cpu.pcie_gen] if named else [])]
    lanes = [gpu.pcie_lanes or 16, lanes_of_cpu]
    if len(machine.gpus) > 1 and cpu.pcie_lanes < 16 * len(machine.gpus) and not slot:
        lanes.append(16 // (2 if len(machine.gpus) == 2 else 4))
        machine.assumed.append(f"the GPUs share the processor's lanes, x{lanes[-1]} each")
    if slot:
        gens += [int(slot[1])] if slot[1] else []
        lanes.append(int(slot[2] or slot[3]))
    elif _OLD_BOARDS.search(text):
        gens.append(3)
    elif text:
        raise HardwareError(
            f"{machine.place}: parts.pcie: expected a link such as 4x16, 'PCIe 3 x8', B450 or OCuLink, got '{text}'; correct it"
        )
    gen, n = min(gens), min(lanes)
    found, nominal = rule("link", f"pcie {gen}"), float(LANE[gen] * n) / 1e9
    card = rule("link", "radeon").value if gpu.vendor == "AMD" else 1.0
    words = f"PCIe {gen}.0 x{n}"
    how = f"{words} = {nominal:.4g} GB/s x {found.value:g}" + (f" x {card:g} (Radeon)" if card != 1 else "")
    if slot and (gen, n) != (int(slot[1] or gen), int(slot[2] or slot[3])):
        machine.assumed.append(f"link: {words}, what card and processor have in common with the slot")
    elif not text:
        machine.assumed.append(f"link: {words}, what card and processor allow")
    wider = 1.0 if slot else 1.0 if named and text else 1.7 if named else 2.0
    return found.number(nominal * found.value * card * 1e9, how, assumed="" if text or named else "pcie", wider=wider), words


def _links(machine: Assembly) -> tuple[dict[str, Any], list[str]]:
    system = "windows" if machine.wsl else machine.system
    start = rule("copy", system)
    latency = start.number(start.value, f"a copy that is waited for, {system}")
    links, words = dict[str, Any](), list[str]()
    for i, gpu in enumerate(machine.gpus):
        rate, name = link_of(machine, gpu)
        copy = {"latency_us": latency, "bytes_per_s": rate}
        links |= {f"cpu0->gpu{i}": {"pinned": copy}, f"gpu{i}->cpu0": {"pinned": dict(copy)}}
        words.append(name)
    if machine.disk:
        links |= _disk_links(machine)
    return links, words


def _disk_links(machine: Assembly) -> dict[str, Any]:
    text = re.sub(r"\W", "", machine.disk).replace("pcie", "").replace("ssd", "").replace("gen", "") or "sata"
    classes = [of for what, of in _rules() if what == "disk"]
    kind = next((of for of in sorted(classes, key=len, reverse=True) if text.startswith(of) or text.endswith(of)), None)
    if kind is None:
        raise HardwareError(f"{machine.place}: parts.disk: {unknown_name('kind of disk', machine.disk, classes)}")
    found = rule("disk", kind)
    rate = found.number(found.value * 1e9, f"{kind}, reads of an expert's size at depth 8")
    copy = {
        "any": {"latency_us": {"value": 100, "source": "assumed", "why": "one read of a drive"}, "bytes_per_s": rate},
        "medium": "disk0",
    }
    return {"disk0->cpu0": copy, "cpu0->disk0": copy}


def _contention(machine: Assembly, devices: Mapping[str, Any], links: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what CPU experts lose to a copy, or to the GPU of one memory: together they read what the memory gives."""
    read = devices["cpu0"]["memory_bytes_per_s"]["value"]
    if machine.one_memory:
        gpu = devices["gpu0"]["memory_bytes_per_s"]["value"]
        share = made(min(1, max(read, gpu) / (read + gpu)), "what the faster one reads alone, over what both do", 1, 1.08)
        return [{"a": "cpu0.experts", "b": f"gpu0.{what}", "a_rate": share, "b_rate": share} for what in ("experts", "dense")]
    found, pairs = rule("contention", "any"), []
    cost = devices["cpu0"].get("expert_cost") or {}
    experts = (
        cost["read_bytes_per_s"]["value"] if "read_bytes_per_s" in cost else read * cost.get("read_share", {"value": 1})["value"]
    )
    for i, _ in enumerate(machine.gpus):
        link = links[f"cpu0->gpu{i}"].get("pinned", {}).get("bytes_per_s", {}).get("value")
        if link is None:  # measured points
            continue
        share = found.value * read / (experts + link)
        how = (
            f"{found.value:g} of the {read / 1e9:.4g} GB/s that the cores read, over {experts / 1e9:.4g} + {link / 1e9:.4g} GB/s"
        )
        number = found.number(min(1.0, share), how)
        number["interval"] = [_short(min(share * found.least, 1)), _short(min(1, max(share * found.most, number["value"])))]
        pairs.append({"a": "cpu0.experts", "b": f"cpu0->gpu{i}", "a_rate": number, "b_rate": number})
    return pairs


def name_of(parts: Mapping[str, Any]) -> str:
    """Return a name for a machine that has none."""
    texts = [text for key in KEYS for text in ([parts[key]] if isinstance(parts.get(key), str) else parts.get(key) or [])]
    return "+".join(dict.fromkeys(re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") for text in texts))


def assembled(
    parts: Mapping[str, Any], place: str, change: Callable[[dict[str, Any]], dict[str, Any]] = dict, contends: bool = True
) -> dict[str, Any]:
    """Return the whole form of a machine with these parts; ``change`` replaces numbers before their contention follows."""
    if not isinstance(parts, Mapping):
        raise HardwareError(f"{place}: parts: expected a mapping with {', '.join(KEYS)}, got {parts!r}")
    machine = Assembly(parts, place)
    devices = {f"gpu{i}": gpu_numbers(machine, gpu) for i, gpu in enumerate(machine.gpus)}
    devices["cpu0"] = cpu_numbers(machine)
    links, words = _links(machine)
    if machine.disk:
        devices["disk0"] = {"kind": "disk", "memory_bytes": {"value": "1 TB", "source": "assumed", "why": "enough"}}
    found = change(_words(machine, words) | {"devices": devices, "links": links, "contention": []})
    return found | ({"contention": _contention(machine, found["devices"], found["links"])} if contends else {})


def _words(machine: Assembly, links: Sequence[str]) -> dict[str, Any]:
    names = [gpu.name for gpu in machine.gpus]
    cpu = f"{machine.sockets} x {machine.cpu.name}" if machine.sockets > 1 else machine.cpu.name
    cpu = f"{machine.cpu_rate / 1e9:g} GB/s" if machine.cpu_rate else cpu
    threads = (machine.cpu.cores_performance or machine.cpu.cores_efficient) * machine.sockets
    compute = min((gpu.compute for gpu in machine.gpus if gpu.compute), key=float, default="")
    said = {
        "gpu": " + ".join(names), "cpu": cpu, "memory": "" if machine.cpu_rate else machine.ram.words,
        "link": ", ".join(dict.fromkeys(links)),
        "threads": str(threads), "backend": machine.backend, "system": machine.system, "compute": compute,
        "assumed": "; ".join(dict.fromkeys(machine.assumed)),
    }  # fmt: skip
    return {
        "description": f"{' and '.join([*names, cpu])}, from catalogue and rules; nothing was measured.",
        "engine": "llama.cpp",
        "machine": {key: value for key, value in said.items() if value},
        "compute": "gpu0" if machine.gpus else "cpu0",
        "backing": ["cpu0"],
    }
