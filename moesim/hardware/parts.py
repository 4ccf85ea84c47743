"""The catalogue of parts: GPUs and CPUs by the names that people and drivers give them.

The catalogue is data: ``parts/*.csv`` next to this file, and a file ``parts.csv`` with the same columns in a folder of profiles.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from moesim.core.data import data_dirs
from moesim.core.gate import TABLE, read_text
from moesim.errors import HardwareError


@dataclass(frozen=True)
class Part:
    """What any part of the catalogue has."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    platform: str  # row of parts/rules.csv
    kind: str  # of the facts: published, data sheet, from memory
    source: str


@dataclass(frozen=True)
class Gpu(Part):
    """A GPU of the catalogue; numbers that are not known, or that it has none of, are 0."""

    compute: str  # capability of CUDA
    vram_GiB: float
    memory_bandwidth_GBps: float
    fp16_dense_TFLOPs: float
    fp32_TFLOPs: float
    pcie_gen: int
    pcie_lanes: int
    unified: bool = False
    twin: str = ""  # the less common GPU of the same name
    matrix_rate_basis: str = ""


@dataclass(frozen=True)
class Cpu(Part):
    """A CPU of the catalogue; numbers that are not known, or that it has none of, are 0."""

    form: str  # desktop, laptop, server or one chip
    cores_performance: int
    cores_efficient: int
    base_GHz: float
    boost_GHz: float
    isa: str  # avx512, avx2, older or neon
    memory_types: tuple[str, ...]
    memory_channels: int
    max_MTps: int
    compute_dies: int
    sockets_max: int
    pcie_gen: int
    pcie_lanes: int

    @property
    def cores(self) -> int:
        return self.cores_performance + self.cores_efficient


P = TypeVar("P", bound=Part)

FOLDER: Final = resources.files("moesim.hardware").joinpath("parts")
OWN: Final = "parts.csv"  # in a folder of profiles
_LIST: Final = {"aliases": ";", "memory_types": "/"}
_NOISE: Final = re.compile(
    r"\((?:r|tm)\)|[®™]|@.*|\bw/.*|\bwith radeon.*|\b\d+(?:st|nd|rd|th) gen(?:eration)?\b|\b\d+-cores?\b|\(radv.*|"
    r"\b(?:cpu|gpu|nvidia|geforce|tesla|quadro|amd|radeon|intel|apple|arc|graphics|processor|edition|generation|core)\b|"
    r"\bmac ?(?:book|studio|mini)(?: pro| air)?\b"
)  # words that decide nothing
_SPELT: Final = ((r"\bmobile\b", "laptop"), (r"\bsupr\b", "super"), (r"(\d) ?gib?\b", r"\1gb"), (r"\br([3579])\b", r"ryzen \1"))
_LONGEST: Final = 120  # characters of a name


def find_gpu(text: str, vram_GiB: float | None = None) -> Gpu | None:
    """Look a GPU up by a name that people write or drivers print; None if there is none, `HardwareError` if several."""
    return _one(_found(Gpu, text), text, vram_GiB)


def find_cpu(text: str) -> Cpu | None:
    """Look a CPU up, as `find_gpu` does."""
    return _one(_found(Cpu, text), text, None)


def parts_of(kind: type[P]) -> list[P]:
    """List the parts of a kind: those of one's own files first."""
    return [*(part for path in _own_files() for part in _read_own(path) if isinstance(part, kind)), *_shipped(kind)]  # type: ignore[arg-type]


def _own_files() -> list[Path]:
    return [path for folder in data_dirs("hardware_profiles") if (path := folder / OWN).is_file()]


@lru_cache
def _shipped(kind: Any) -> list[Any]:
    text = FOLDER.joinpath("gpus.csv" if issubclass(kind, Gpu) else "cpus.csv").read_text(encoding="utf-8")
    return [_part(kind, row, "") for row in csv.DictReader(text.splitlines())]


def _read_own(path: Path) -> Iterator[Part]:
    rows = csv.DictReader(read_text(path, TABLE, "a catalogue", error=HardwareError).splitlines())
    for number, row in enumerate(rows, 2):
        kind = Gpu if row.get("memory_bandwidth_GBps") else Cpu
        yield _part(kind, row, f"{path}:{number}")


def _part(kind: type[P], row: Mapping[str, Any], place: str) -> P:
    columns = _columns(kind)  # type: ignore[arg-type]
    return kind(**{name: _cell(name, of, (row.get(name) or "").strip(), place) for name, of in columns.items()})


@lru_cache
def _columns(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _cell(name: str, of: Any, text: str, place: str) -> Any:
    if name in _LIST:
        return tuple(one for one in text.split(_LIST[name]) if one)
    if of is str:
        return text
    if of is bool:
        return text == "y"
    try:
        return of(text or 0)
    except ValueError:
        raise HardwareError(f"{place}: {name}: expected a number, got '{text[:40]}'; correct it") from None


def _key(text: str) -> str:
    """Reduce a name to the words that distinguish parts."""
    text = _NOISE.sub(" ", text[:_LONGEST].lower())
    for pattern, better in _SPELT:
        text = re.sub(pattern, better, text)
    return re.sub(r"[^a-z0-9+]", "", text)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", text[:_LONGEST].lower())


def _words(text: str) -> str:
    """Reduce a name to its words in the order of the alphabet, as drivers write them in another order."""
    words = re.split(r"[\s,()/-]+", _NOISE.sub(" ", text[:_LONGEST].lower()))
    return " ".join(sorted(filter(None, map(_key, words))))


def _found(kind: type[P], text: str) -> Sequence[P]:
    names, keys = _index(kind, tuple((path, path.stat().st_mtime_ns) for path in _own_files()))  # type: ignore[arg-type]
    plain = _plain(text)
    if plain in names:
        return [names[plain]]
    for key in (_key(text), _words(text)):
        if key in keys:
            return keys[key]
    *others, last = re.split(r"[\s-]+", _NOISE.sub(" ", text[:_LONGEST].lower()).strip()) or [""]
    found = keys.get(_key(last), []) if re.search(r"\d{3}", last) else []  # "ryzen 5600", "r7 5800x3d", "13700k"
    return [part for part in found if all(_fits(word, part) for word in others)]


@lru_cache
def _index(kind: Any, stamps: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the parts by whole name, and by all that may stand for one; ``stamps`` of one's own files make it anew."""
    names, keys = dict[str, Any](), dict[str, list[Any]]()
    for part in parts_of(kind):
        if names.setdefault(_plain(part.name), part) is part:  # one's own row replaces a shipped one
            spelt = (part.name, *part.aliases)
            for key in {*map(_key, spelt), *map(_words, spelt)} - {""}:
                keys.setdefault(key, []).append(part)
    short = dict[str, list[Any]]()
    for part in names.values():
        inside = re.fullmatch(r".* i\d-(\w+)", part.name) or re.fullmatch(r"(.*?) *\(.*", part.name)  # 13700K; Titan X (Pascal)
        for key in {_key(inside[1]), _words(inside[1])} - {""} if inside else ():
            short.setdefault(key, []).append(part)
    return names, {**short, **keys}


def _fits(word: str, part: Part) -> bool:
    return re.fullmatch(r"[ri]?\d", word) is not None or word in part.name.lower()


def _one(found: Sequence[P], text: str, vram_GiB: float | None) -> P | None:
    if len(found) > 1 and vram_GiB is not None and isinstance(found[0], Gpu):
        found = sorted(found, key=lambda one: abs(one.vram_GiB - vram_GiB))[:1]  # type: ignore[attr-defined]
    if len(found) > 1:
        names = " or ".join(f"'{part.name}'" for part in found)
        raise HardwareError(f"'{text[:_LONGEST]}': expected one part, got a name of several; write {names}")
    return found[0] if found else None


def named_part(text: str, place: str) -> dict[str, str]:
    """Return what a name stands for: ``gpu``, ``cpu``, or both of one chip; `HardwareError` if it is in neither list."""
    count, name = counted(text)
    size = re.fullmatch(r"(.*\S)\s+(\d+ ?gi?b)", name, re.IGNORECASE)
    for one, more in ((name, {}), (size[1] if size else "", {"ram": size[2]} if size else {})):
        try:
            gpu, cpu = find_gpu(one), find_cpu(one)
        except HardwareError as error:
            raise HardwareError(f"{place}: {error}") from None
        if gpu is not None and (cpu is None or gpu.unified or not gpu.pcie_gen):
            return {"gpu": f"{count}x {one}" if count > 1 else one, **({"cpu": one} if cpu else {}), **more}
        if cpu is not None:
            return {"cpu": f"{count}x {one}" if count > 1 else one, **more}
    raise HardwareError(f"{place}: {unknown_part(name)}")


def unknown_part(text: str, *kinds: type[Part]) -> str:
    """Build the message for a part that is not in the catalogue."""
    names = {
        _key(name): part.name for kind in kinds or (Gpu, Cpu) for part in parts_of(kind) for name in (part.name, *part.aliases)
    }
    near = dict.fromkeys(names[one] for one in difflib.get_close_matches(_key(text), names, n=6, cutoff=0.6))
    close = f"did you mean {', '.join(map(repr, list(near)[:3]))}? " if near else ""
    if re.fullmatch(r"\s*\d+\s*", text):
        close = f"memory is written {text.strip()}GB; "
    return (
        f"expected a part of `moesim list parts`, got '{text[:_LONGEST]}'; {close}give rates, such as '936GB/s 24GiB' of a GPU "
        f"or '60GB/s' of a CPU's memory, or add it to hardware_profiles/{OWN}"
    )


def with_others(text: str) -> str | None:
    """Write a part alone as a machine with places for the other parts; None if it is none."""
    try:
        gpu, cpu = find_gpu(counted(text)[1]), find_cpu(text)
    except HardwareError:  # several have the name
        return f"{text} + CPU + RAM"
    if gpu is None and cpu is None:
        return None
    return f"{text} + CPU + RAM" if gpu is not None else f"GPU + {text} + RAM"


def counted(text: str) -> tuple[int, str]:
    """Split ``2x rtx 3090`` into number and name."""
    found = re.fullmatch(r"\s*(\d{1,2})\s*x\s+(.*\S)\s*|\s*(\d{1,2}) ?x ?([a-zA-Z].*\S)\s*", text)
    return (int(found[1] or found[3]), found[2] or found[4]) if found else (1, text.strip())


RATE: Final = re.compile(r"\d[\d.]*\s*[kKMGT]?i?B/s", re.IGNORECASE)
_LINKS: Final = r"\bpcie?\b|\bpci-?e|\bgen ?\d|thunderbolt|oculink|usb ?4|nvlink|\b[abx][34][2357]0\b"
_KINDS: Final = (
    ("ram", r"\b(?:lp)?ddr\d|\bm(?:r|cr)dimm\b|^\d+ ?gi?b\b|^\d+ ?x ?\d+ ?g|\bram\b"),
    ("disk", r"nvme|\bssd\b|\bsata\b|\bhdd\b|\bqlc\b|hard ?disk"), ("pcie", _LINKS),
    ("os", r"^(?:windows|win ?1[01]|linux|ubuntu|macos|wsl2?|cuda|hip|rocm|vulkan|metal|sycl)\b"),
)  # fmt: skip
"""Words by which parts other than GPU and CPU are known."""


def read_parts(text: str, place: str) -> dict[str, Any]:
    """Read a machine written as ``RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200``: the key ``parts`` of a profile."""
    found = dict[str, Any]()
    apart = re.split(r"\s\+\s", text)
    for piece in filter(None, map(str.strip, apart if len(apart) > 1 else text.split("+"))):
        if re.fullmatch(r"\d ?x ?\d{1,2}", piece):
            raise HardwareError(f"{place}: '{piece}': expected memory or a link, got either; write '{piece}GB' or 'PCIe {piece}'")
        kind = next((kind for kind, words in _KINDS if re.search(words, piece, re.IGNORECASE)), "")
        if kind == "pcie" and find_gpu(counted(piece)[1]) is not None:  # A100-PCIE-40GB
            kind = ""
        if RATE.search(piece):
            kind = "gpu" if re.search(r"\d\s*gi?b\b(?!/s)", piece, re.IGNORECASE) else "cpu"
        for key, value in ({kind: piece} if kind else named_part(piece, place)).items():
            if key in found and key != "gpu":
                raise HardwareError(f"{place}: {key}: expected it once, got '{found[key]}' and '{value}'; leave one out")
            found[key] = [*([found[key]] if isinstance(found[key], str) else found[key]), value] if key in found else value
    return found
