"""Find what outputs of system tools and bandwidth tests say of a machine, in any order, with noise around.

Each program has a small parser, which finds facts and their lines; `SOURCES` lists them, with what each was tried on.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_MIB: Final = 2**20
_LINE: Final = 4000  # characters of a line that are read; llama-bench writes about 1500


class Fact(NamedTuple):
    """Something that a line says."""

    what: str  # gpu, vram, gen, width, cpu, sockets, module, ram, or a rate: down, up, local, read, node, triad
    value: Any
    line: int  # from 0
    which: int = 0  # index of a GPU or node
    by: str = ""  # the program


class Text:
    """A text with its lines."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"\r\r?\n|\r", "\n", re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\ufeff|[\x00-\x08\x0b-\x0c\x0e-\x1f]", "", text))
        self.lines = [line[:_LINE].replace("\t", " ").rstrip() for line in text.split("\n")]
        self.whole = "\n".join(self.lines)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def line_of(self, position: int) -> int:
        return bisect.bisect_right(self._starts, position) - 1

    def find(self, pattern: str) -> Iterator[re.Match[str]]:
        return re.finditer(pattern, self.whole, re.MULTILINE | re.IGNORECASE)


_GPU: Final = re.compile(
    r"GeForce|\b[RG]TX\b|Quadro|Tesla|NVIDIA|Radeon|Instinct|\bArc\b|Iris|UHD|HD Graphics|TITAN|Apple M\d", re.I
)
_CPU: Final = re.compile(
    r"Ryzen|EPYC|Threadripper|Athlon|Opteron|Xeon|\bCore\b|Pentium|Celeron|Apple M\d|Eng Sample|\bCPU\b", re.I
)


def _size(text: str) -> int | None:
    """Read the last size in a text; system tools mean powers of 1024, and some group digits."""
    found = re.findall(r"(\d[\d.,\u00a0\u202f]{0,15})\s?([KMGT])i?B?\b", text, re.I)
    if not found:
        return int(text) if re.fullmatch(r"\d{9,15}", text) else None
    digits, unit = found[-1]
    grouped = unit in "KkMm" and re.fullmatch(r"\d{1,3}(?:[.,\u00a0\u202f]\d{3})+", digits)
    plain = re.sub(r"\D", "", digits) if grouped else digits.replace(",", ".").rstrip(".")
    return int(float(plain) * 1024 ** ("KMGT".index(unit.upper()) + 1)) if re.fullmatch(r"\d+(\.\d+)?", plain) else None


def _cpu_name(text: str) -> str | None:
    name = re.split(r"\s*\(\d+\b|, \d+ M[Hh]z", text)[0].strip()
    return name if len(name) > 2 else None


def _gpu_name(text: str) -> str | None:
    inner = re.search(r"\[([^\[\]]+)\]$", text.strip())  # as of PCI: chip [card]
    return (inner[1] if inner else text.strip()) if _GPU.search(text) else None


def _mega(text: str) -> float:
    return float(text) * 1e6


_READ: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "gpu": ("gpu", _gpu_name), "cpu": ("cpu", _cpu_name),
    "name": ("gpu", lambda text: None if _CPU.search(text) else _gpu_name(text)),
    "processor": ("cpu", lambda text: _cpu_name(text) if _CPU.search(text) else None),
    "mib": ("vram", lambda text: int(text) * _MIB), "bytes": ("vram", int), "vram": ("vram", _size), "ram": ("ram", _size),
    "gen": ("gen", int), "width": ("width", int), "cores": ("cores", int), "sockets": ("sockets", int),
    "read": ("read", _mega), "triad": ("triad", _mega),
}  # fmt: skip
"""Each named group of a pattern with its fact and reader; ``i`` is a GPU's index."""


def _grep(*patterns: str) -> Callable[[Text], Iterator[Fact]]:
    """Make a parser of patterns whose named groups are facts; GPUs without an index are counted."""

    def read(text: Text) -> Iterator[Fact]:
        index = -1
        for match in sorted((match for pattern in patterns for match in text.find(pattern)), key=re.Match.start):
            groups = match.groupdict()
            if "i" in groups:
                index = int(groups.pop("i") or 0)
            elif {"gpu", "name"} & groups.keys() and any(_READ[key][1](groups[key]) for key in groups if key in ("gpu", "name")):
                index += 1
            for key, said in groups.items():
                what, reader = _READ[key]
                if said and (value := reader(said)):
                    yield Fact(what, value, text.line_of(match.start(key)), max(0, index))

    return read


def _smi_csv(text: Text) -> Iterator[Fact]:
    """Read the answer to ``nvidia-smi --query-gpu`` by its header."""
    what = {"memory.total": "mib", "pcie.link.gen.max": "gen", "pcie.link.width.max": "width", "pcie.link.width.current": "width"}
    columns, index = list[str](), 0
    for n, line in enumerate(text.lines):
        cells = [cell.strip() for cell in line.split(",")]
        names = [cell.partition(" [")[0].replace("gpu_name", "name") for cell in cells]
        if "name" in names and all(re.fullmatch(r"[a-z_.]+", name) for name in names):
            columns, index = names, 0
        elif len(cells) == len(columns) and _GPU.search((row := dict(zip(columns, cells)))["name"]):
            yield Fact("gpu", row["name"], n, index)
            for column, key in what.items():
                if number := re.match(r"\d+", row.get(column, "")):
                    yield Fact(_READ[key][0], _READ[key][1](number[0]), n, index)
            index += 1


def _llama(text: Text) -> Iterator[Fact]:
    yield from _grep(
        r"ggml_vulkan: ?(?:(?P<i>\d+) = |Using )(?P<gpu>.+?)(?: \(| \||$)",
        r"ggml_metal\w*: GPU name: *(?P<i>)(?:MTL\d+ \()?(?P<gpu>[^()\n]+)",
        r'"cpu_info": *"(?P<cpu>[^"\n]+)"',
    )(text)
    for match in text.find(r'"gpu_info": *"([^"\n]+)"'):
        for index, name in enumerate(match[1].split(", ")):
            yield Fact("gpu", name, text.line_of(match.start(1)), index)


def _free(text: Text) -> Iterator[Fact]:
    for match in text.find(r"^Mem: +(\d[\d.,]*)([KMGT]?)i?B? "):
        number = float(match[1].replace(",", ".").rstrip("."))
        asked = 0 if number > 8e9 else 1 if number > 4e6 else 2 if number > 2000 else 3  # with -b, nothing, -m or -g
        power = "KMGT".index(match[2].upper()) + 1 if match[2] else asked
        yield Fact("ram", int(number * 1024**power), text.line_of(match.start()))


class Module(NamedTuple):
    """A memory module: bytes, kind such as ``DDR4``, MT/s (0: not said), bits wide."""

    n_bytes: int
    kind: str
    speed: int
    bits: int


_SMBIOS: Final = {"24": "DDR3", "26": "DDR4", "29": "LPDDR3", "30": "LPDDR4", "34": "DDR5", "35": "LPDDR5"}  # memory types


def _module(values: Mapping[str, str]) -> Module | None:
    """Make a module of the keys of dmidecode or Win32_PhysicalMemory; None for an empty slot."""
    size = _size(values.get("size") or values.get("capacity", ""))
    keys = ("configured memory speed", "configured clock speed", "configuredclockspeed", "speed")
    speeds = [int(match[0]) for key in keys if (match := re.match(r"[1-9]\d{2,4}", values.get(key, "")))]
    kind = values.get("type", "") if "size" in values else _SMBIOS.get(values.get("smbiosmemorytype", ""), "")
    bits = re.match(r"\d+", values.get("data width", values.get("datawidth", "")))
    return Module(size, kind if "DDR" in kind else "", (*speeds, 0)[0], int(bits[0]) if bits else 64) if size else None


def _modules(text: Text) -> Iterator[Fact]:
    """Read blocks of dmidecode, and lists and tables of Win32_PhysicalMemory."""
    block, at, columns = dict[str, str](), 0, list[str]()
    for n, line in enumerate([*text.lines, ""]):
        cells, pair = line.split(), re.match(r" *([A-Z][\w ]*?) *[:=] *(.*)", line)
        key = pair[1].lower() if pair else ""
        if not cells or key in block or line.strip() == "Memory Device":
            if block and (module := _module(block)):
                yield Fact("module", module, at)
            block, columns = {}, columns if cells else []
        if pair:
            block[key] = pair[2]
            at = n if key in ("size", "capacity") else at
        elif "Capacity" in cells and all(re.fullmatch(r"[A-Z]\w+", cell) for cell in cells):
            columns = [cell.lower() for cell in cells]
        elif columns:  # names have blanks, and columns two between them, or no names
            apart = re.split(r" {2,}", line.strip())
            row = apart if len(apart) == len(columns) else cells
            if len(row) == len(columns) and (module := _module(dict(zip(columns, row)))):
                yield Fact("module", module, n)


def _nvbandwidth(text: Text) -> Iterator[Fact]:
    for test, what, times in (("host_to_device_memcpy_ce", "down", 1e9), ("device_to_host_memcpy_ce", "up", 1e9),
                              ("device_local_copy", "local", 2e9)):  # a local copy reads and writes what it counts  # fmt: skip
        for match in text.find(rf"Running (?:benchmark )?{test}\.(?:.*\n){{1,3}}?[ \d]+\n *0 +(\d+\.\d+[ \d.]*)$"):
            for index, rate in enumerate(re.findall(r"\d+\.\d+", match[1])):
                yield Fact(what, float(rate) * times, text.line_of(match.start(1)), index)


def _bandwidth_test(text: Text) -> Iterator[Fact]:
    whats = {"host to device": "down", "device to host": "up", "device to device": "local"}
    for match in text.find(
        r"(Host to Device|Device to Host|Device to Device) Bandwidth.*\n *(PINNED|PAGEABLE) .*\n.*Bandwidth\((GB|MB)/s\)\n"
        r"(?: *\d+ +\d+\.\d+\n)* *\d+ +(\d+\.\d+)$"  # the last row has the most bytes
    ):
        what = whats[match[1].lower()]
        rate = float(match[4]) * (1e9 if match[3] == "GB" else _MIB)  # old versions divide by 1 << 20
        yield Fact(what if what == "local" or match[2] == "PINNED" else f"{what} pageable", rate, text.line_of(match.start(4)))


def _mlc(text: Text) -> Iterator[Fact]:
    yield from _grep(r"^ALL Reads *: *(?P<read>\d+(?:\.\d+)?)")(text)
    for table in text.find(r"Bandwidths between nodes(?:.*\n){1,6}Numa node[ \d]+\n((?: *\d+(?: +\d+\.\d+)+\n?)+)"):
        for n, row in enumerate(table[1].splitlines()):
            index, *cells = row.split()
            if int(index) < len(cells):
                yield Fact("node", float(cells[int(index)]) * 1e6, text.line_of(table.start(1)) + n, int(index))


@dataclass(frozen=True)
class Source:
    """A program whose output is read."""

    name: str
    seen: str  # a pattern that its output has
    read: Callable[[Text], Iterator[Fact]]
    tried: str  # outputs that the parser was written after


_LSCPU: Final = (
    r"^ *(?:Model name|Modellname|型号名称) *[:：] *(?P<cpu>[^\n-].*)$", r"^MemTotal: +(?P<ram>\d+ kB)$",
    r"^ *(?:Socket\(s\)|Sockel|座) *[:：] *(?P<sockets>\d+)$",
)  # fmt: skip

SOURCES: Final = (
    Source(
        "nvidia-smi", r"NVIDIA-SMI|^\|.*\d+MiB */ *\d+MiB",
        _grep(r"^\| +(?P<i>\d+) +(?!N/A)(?P<gpu>\S.*?) +(?:On|Off|WDDM|TCC|MCDM|N/A) +\| +[0-9A-F]{4,8}:"
              r".*(?:\n\|.*?/ *(?P<mib>\d+)MiB)?"),
        "public tables of drivers 430 to 595 on Linux and WSL2",
    ),
    Source("nvidia-smi -L", r"^GPU \d+: .* \(UUID: ", _grep(r"^GPU (?P<i>\d+): (?P<gpu>.+?) \(UUID: "), "public lists"),
    Source(
        "nvidia-smi -q", r"NVSMI LOG|<nvidia_smi_log>",
        _grep(r"^ *(?:Product Name *: |<product_name>)(?P<gpu>[^<\n]+)", r"PCIe Generation\n *Max *: (?P<gen>\d)$",
              r"Link Width\n *Max *: (?P<width>\d+)x$", r"Link Width\n.*\n *Current *: (?P<width>\d+)x$",
              r"FB Memory Usage\n *Total *: (?P<mib>\d+) MiB"),
        "public logs of drivers 442 to 555; XML: its documentation, names alone",
    ),
    Source(
        "nvidia-smi --query-gpu", r"^(?:.*, )?(?:gpu_)?name, |, name(?:,|$)|^.*, \d+ MiB",
        lambda text: iter([*_smi_csv(text)] or [*_grep(
            r"^(?:\d+, )?(?P<gpu>[A-Z][^,\n|]+), (?P<mib>\d+) MiB(?:, (?P<gen>[1-6]), (?P<width>1|2|4|8|16)$)?")(text)]),
        "its documentation",
    ),
    Source(
        "llama.cpp", r"ggml_(?:vulkan|metal|cuda)|_init: found \d+ |\"(?:cpu|gpu)_info\"", _llama,
        "public logs of CUDA, ROCm, Vulkan and Metal, JSON of llama-bench",
    ),
    Source(
        "device lines", r"\bDevice \d+: ",  # of llama.cpp, nvbandwidth and bandwidthTest
        _grep(r"\bDevice (?P<i>\d+): \"?(?P<gpu>[^\",\n]+?)\"?(?: \([0-9a-f]{8}:.*|,.*?(?:VRAM: (?P<mib>\d+) MiB.*)?)?$"),
        "public logs",
    ),
    Source(
        "rocm-smi", r"GPU\[\d+\] *:|\"card\d+\": *\{|^card\d+,|MARKET_NAME",
        _grep(r"^card(?P<i>\d+),(?:[^,\n]*,)*?(?P<gpu>[^,\n]*(?:Radeon|Instinct)[^,\n]*)",
              r"GPU\[(?P<i>\d+)\] *: (?:Card series|Device Name): *(?P<gpu>.+)", r"\bMARKET_NAME: (?P<gpu>.+)",
              r"GPU\[(?P<i>\d+)\] *: VRAM Total Memory \(B\): *(?P<bytes>\d+)", r'"Card Series": *"(?P<gpu>[^"\n]+)"',
              r'"VRAM Total Memory \(B\)": *"(?P<bytes>\d+)"'),
        "public outputs of ROCm 4 to 6; amd-smi: its documentation",
    ),
    Source("lscpu, /proc", r"^ *(?:Model name|Modellname|型号名称)|^MemTotal:", _grep(*_LSCPU), "machines of this project"),
    Source("free", r"^Mem: +\d", _free, "machines of this project"),
    Source("memory modules", r"^ *Memory Device$|Capacity", _modules, "public outputs of dmidecode, wmic, Win32_PhysicalMemory"),
    Source(
        "system_profiler", r"^ *(?:Chip: Apple|Chipset Model:|Processor Name:)",
        _grep(r"^ *Chip: (?P<cpu>Apple .+)", r"^ *Processor Name: (?P<cpu>.+)", r"^ *Memory: (?P<ram>\d+ GB)$",
              r"^ *Chipset Model: (?P<gpu>.+)", r"^ *Total Number of Cores: (?P<cores>\d+)$",
              r"^ *VRAM \(.*\): (?P<vram>\d+ [GM]B)$"),
        "public outputs of M1 to M4",
    ),
    Source(
        "Windows", r"^ *(?:Name *(?:[:=]|$|  )|Processor(?:\(s\))?:|Card name:)|Physical ?Memory",
        _grep(r"^ *Name *[:=] *(?P<processor>.*)$", r"^ *Name *[:=] *(?P<name>.*)$", r"^ *Processor: (?P<processor>.+)$",
              r"^ *Card name: (?P<i>)(?P<gpu>.+)$", r"^ *Dedicated Memory: (?P<vram>\d+ MB)$",
              r"^ *Memory: (?P<ram>\d+MB) RAM$", r"^(?P<processor>(?:AMD|Intel|1\dth Gen)\b.*?)(?:  .*| \d{6,})?$",
              r"^(?P<name>(?:NVIDIA|AMD|Intel|Radeon)\b.*?)(?:  .*| \d{6,})?$",
              r"^ *(?:Cs)?(?:Total|Installed) ?Physical ?Memory(?: \(RAM\))? *[:=] *(?P<ram>.+)$"),
        "public outputs of systeminfo, dxdiag, wmic and Get-CimInstance",
    ),
    Source("nvbandwidth", r"Running (?:benchmark )?\w+_(?:ce|copy)\b", _nvbandwidth, "public outputs of versions 0.2 to 0.8"),
    Source("CUDA's bandwidthTest", r"Transfer Size \(Bytes\)", _bandwidth_test, "public outputs, in MB/s and in GB/s"),
    Source("Intel MLC", r"^ALL Reads|Bandwidths between nodes", _mlc, "public outputs of versions 3.5 to 3.11"),
    Source(
        "STREAM", r"\(?MB/s\)?.*\n(?:.*\n){0,4}?Triad:? ", _grep(r"^Triad:? +(?P<triad>\d+(?:\.\d+)?) +\d"),
        "public outputs of version 5.10",
    ),
)  # fmt: skip
"""The programs that are read, those that know most about GPUs first."""
