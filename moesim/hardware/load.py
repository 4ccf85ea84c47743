"""Load hardware profiles: one YAML file each (guide: ``hardware_profiles/README.md``)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core import data
from moesim.core.gate import YAML, read_text
from moesim.core.text import explain
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.build import build_profile
from moesim.hardware.engines import MACHINE, OWN, check_engine, of_the_machine, same_engine, with_engine
from moesim.hardware.parts import named_part, read_parts, with_others
from moesim.hardware.read import flatten, override, override_one, read_yaml, sourced, validate, with_sources
from moesim.hardware.short import DOTTED, FOR, PARTS, TYPED, retyped, whole_form
from moesim.hardware.types import HardwareProfile
from moesim.model import ModelSpec


def load_hardware(source: str | Path | Mapping[str, Any], place: str = "hardware", engine: str | None = None) -> HardwareProfile:
    """Load a profile.

    Parameters
    ----------
    source : str, Path or mapping
        A name among the shipped and local profiles; the path of a YAML file; or a mapping ``{base: NAME, ...}`` with
        overrides under dotted keys such as ``"devices.gpu0.memory_bytes"`` (or nested mappings). A mapping without
        ``base`` is a whole profile, or the short form of one, with ``numbers`` or ``parts``. A name with ``+`` is a machine
        from its parts, such as ``"RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"``.
    place : str
        File and key of the source, for messages.
    engine : str, optional
        Engine whose costs replace those of the profile: a name of ``moesim list engines``, ``NAME@BUILD``, or the path of an
        engine profile; as the key ``engine`` of a mapping with ``base``. Default: the profile's own.

    Returns
    -------
    HardwareProfile
        A number changed by an override is ``assumed``, unless the override is a whole ``{value: ..., source: ..., ...}``.

    Raises
    ------
    HardwareError
        If there is no such profile, or anything in it is wrong: one line with file, key, expected, got, remedy.
    """
    raw, path, overrides = read_profile(source, place, engine)
    profile = build_profile(raw, place if overrides or path is None else path, path=path, overrides=tuple(overrides))
    return replace(profile, written=str(source) if isinstance(source, Path) else source)


def read_profile(
    source: str | Path | Mapping[str, Any], place: str = "hardware", engine: str | None = None
) -> tuple[dict[str, Any], str | None, list[str]]:
    """Read a profile's contents with overrides applied, to change and write them again.

    Parameters
    ----------
    source, place, engine
        As of `load_hardware`.

    Returns
    -------
    raw : dict
        For `build_profile`.
    path : str or None
        The file; None for a mapping that is a whole profile.
    overrides : list of str
        Dotted keys that were overridden.

    Raises
    ------
    HardwareError
        As `load_hardware`; numbers are checked only where there are overrides.
    """
    overrides: dict[str, Any] = {}
    if isinstance(source, Mapping):
        source = with_sources(source)
        if "base" not in source:
            source = {str(key): value for key, value in source.items()}
            dotted = [key for key in source if "." in key]
            more = {key: source[key] for key in dotted if not key.startswith((DOTTED, PARTS))}
            raw = whole_form({key: value for key, value in source.items() if key not in more}, place)
            if "parts" in source and more:  # the rules go by what replaces their numbers; copies of an engine come after them
                more = {key: value for key, value in more.items() if _of_an_engine(key, raw)}
                raw = whole_form({key: value for key, value in source.items() if key not in more}, place)
            raw = _costed(raw, engine, place)
            return (override(raw, more, place) if more else raw), None, dotted
        if not isinstance(source["base"], (str, Path)):
            raise HardwareError(f"{place}.base: expected the name or path of a profile, got {source['base']!r}")
        overrides = dict(flatten({key: value for key, value in source.items() if key != "base"}))
        source = source["base"]
    typed = {key: value for key, value in overrides.items() if key.startswith((DOTTED, PARTS))}
    path: Path | None = None
    if isinstance(source, str) and (parts := _parts(source, place)) is not None:
        raw = whole_form({"parts": parts, **typed}, place)
    else:
        path, text = _find(source, place)
        numbers = {key: value if key.startswith(PARTS) else sourced(value) for key, value in typed.items()}
        raw = _read(path, text, {key.removeprefix(DOTTED): value for key, value in numbers.items()}, place)
    words = {key.removeprefix(_WORDS): str(value) for key, value in overrides.items() if key.startswith(_WORDS)}
    if words:  # what engines go by
        raw["machine"] = {**(raw.get("machine") or {}), **words}
    check_engine(raw.get("machine"), overrides.get("engine"), place)
    raw = _costed(raw, overrides.get("engine") if engine in (None, MACHINE, OWN) else engine, place)
    if len(overrides) > len(typed):
        validate(raw, str(path or place))
        for key, value in overrides.items():
            if key not in typed and key != "engine" and not key.startswith(_WORDS):
                _check_has(raw, key, place)
                override_one(raw, key, value, place)
    return raw, None if path is None else str(path), list(overrides)


def _of_an_engine(key: str, raw: Mapping[str, Any]) -> bool:
    """Whether a dotted key is of copies that a machine from its parts has with an engine only."""
    first, link, copies, *_ = [*key.split("."), "", ""]
    return first == "links" and copies not in (raw["links"].get(link) or {})


def _parts(text: str, place: str) -> dict[str, Any] | None:
    """Return the parts that a text names: with ``+`` between them, or of one chip; None for a profile."""
    if text.endswith((".yaml", ".yml")) or ("+" not in text and ("/" in text or text in hardware_names())):
        return None
    if "+" in text:
        return read_parts(text, place)
    with suppress(HardwareError):
        chip = named_part(text, place)
        return dict(chip) if {"gpu", "cpu"} <= chip.keys() else None
    return None


def _costed(raw: dict[str, Any], named: Any, place: str) -> dict[str, Any]:
    """Return a profile's contents with the numbers of its engine, or of the one that is named instead."""
    own = raw.get("engine")  # its build is the machine's to name
    for one in (own, named):
        if one is not None and not isinstance(one, str):
            raise HardwareError(f"{place}: engine: expected the name of an engine such as llama.cpp, got {one!r}; correct it")
    engine = own if named in (None, MACHINE, OWN) or (own is not None and same_engine(own, named)) else named
    if engine is None or (isinstance(words := raw.get("machine"), Mapping) and "engine" in words):
        return raw  # without an engine, or its numbers are in there, and perhaps identified since
    validate(of_the_machine(raw), place)
    return with_engine(raw, engine, place)


def _check_has(raw: Mapping[str, Any], key: str, place: str) -> None:
    """Refuse an override of software that an engine has replaced."""
    words = raw.get("machine") or {}
    first, _, rest = key.partition(".")
    device, _, name = rest.partition(".")
    name = name.partition(".")[0]
    has = raw["devices"].get(device, {}) if first == "devices" and "engine" in words else {}
    counted, launched = ("operations", "operation_us"), ("launch_us", "launches")
    if (name in launched and "operations" in has) or (name in counted and "launch_us" in has):
        raise HardwareError(
            f"{place}: {key}: expected a number that {words['engine'].partition(' ')[0]} has, got one of other software; choose "
            "engine: machine, or leave it out"
        )


def _read(path: Path, text: str, typed: dict[str, Any], place: str, kin: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a profile, with ``base`` from there; numbers typed at ``place`` replace the file's."""
    raw = with_sources(read_yaml(text, str(path)))
    raw.setdefault("name", path.stem)
    if "base" not in raw:
        if "parts" in raw:
            return whole_form(raw | typed, place if typed else str(path))
        return whole_form(retyped(raw, typed, place), place) if typed else whole_form(raw, str(path))
    if not isinstance(raw["base"], str):
        raise HardwareError(f"{path}: base: expected the name of a profile, got {raw['base']!r}")
    base, content = _find(raw["base"], f"{path}: base")
    if base in (*kin, path):
        raise HardwareError(f"{path}: base: expected another profile, got '{raw['base']}', which rests on this one; name another")
    own = raw.pop("numbers", {})
    if not isinstance(own, Mapping):
        raise HardwareError(f"{path}: numbers: expected a mapping with numbers to replace, got {own!r}")
    found = copy.deepcopy(_read(base, content, {**own, **typed}, place if typed else str(path), (*kin, path)))
    validate(_costed(found, None, str(base)), str(base))
    costed = {key: one for key, one in (found.get("machine") or {}).items() if key == "engine"}
    for key in _TOLD:  # said of the other machine, and not of this one
        found.pop(key, None)
    for key, value in {**({"machine": {}} if costed else {}), **raw}.items():
        if key in _TOLD:
            found[key] = {**costed, **value} if key == "machine" and isinstance(value, Mapping) else value
        elif key not in ("base", "anchors"):
            for dotted, number in flatten({key: value}):
                override_one(found, dotted, number, str(path))
    return found


_FOLDER = "hardware_profiles"
_WORDS = "machine."  # of overrides
_TOLD = ("name", "description", "corrections", "machine")
"""Keys of a profile in words, which a profile with a base does not take over."""


def _find(source: str | Path, place: str) -> tuple[Path, str]:
    text = str(source)
    by_path = isinstance(source, Path) or text.endswith((".yaml", ".yml")) or "/" in text
    if (content := data.known_text(_FOLDER, text)) is not None:
        return Path(text) if by_path else Path(_FOLDER, f"{text}.yaml"), content
    path = _named(text, by_path, place)
    explain("hardware profile %s: %s", text, path)
    return path, data.note(_FOLDER, text, read_text(path, YAML, "a hardware profile", error=HardwareError))


def _named(text: str, by_path: bool, place: str) -> Path:
    if by_path:
        path = Path(text)
        if not path.is_file():
            raise HardwareError(
                f"{place}: expected a hardware profile, got no file at {path}; correct the path, or give a name of "
                "`moesim list hardware`"
            )
        return path
    known: dict[str, Path] = {}
    for folder in data.data_dirs(_FOLDER):
        for path in sorted(Path(folder).glob("*.yaml")):
            known.setdefault(path.stem, path)
    if text not in known:
        file = next((f"{text}{end}" for end in (".yaml", ".yml") if Path(f"{text}{end}").is_file()), None)
        if file is not None:
            raise HardwareError(f"{place}: unknown hardware profile '{text}'; for the file write '{file}'")
        parts = 'or name parts: "GPU + CPU + RAM" (`moesim list parts`)'
        if "," in text and "+" not in text:
            together = " + ".join(part.strip() for part in text.split(","))
            raise HardwareError(f"{place}: unknown hardware profile '{text}'; parts are joined by +: write '{together}'")
        if (written := with_others(text)) is not None:
            raise HardwareError(f"{place}: expected a machine, got a part of one; write '{written}' (`moesim list parts`)")
        raise HardwareError(f"{place}: {unknown_name('hardware profile', text, known, 'moesim list hardware')}, {parts}")
    return known[text]


def hardware_names() -> list[str]:
    """List the names of all profiles that can be found."""
    return sorted({p.stem for d in data.data_dirs(_FOLDER) for p in Path(d).glob("*.yaml")})


_WORD: Final = {"assumed": "why", "derived": "how", "identified": "how"}
"""Where a label has its words; other labels have a ``ref``."""


def short_form(name: str, numbers: Mapping[str, str | None], model: Any, source: str, ref: str | None) -> dict[str, Any]:
    """Make the short form of a profile; numbers that are None are left out."""
    words = {_WORD.get(source, "ref"): ref} if ref is not None else {"why": TYPED["why"]} if source == "assumed" else {}
    return {
        "name": name,
        "source": {"source": source, **words},
        "for": dict(FOR) if model is None else model,
        "numbers": {key: value for key, value in numbers.items() if value is not None},
    }


def short_text(form: Mapping[str, Any]) -> str:
    """Write the short form as a file."""
    head = {key: value for key, value in form.items() if key != "numbers"}
    return (
        "# A machine from a few numbers. `moesim profile check` says what follows from them and what is assumed;\n"
        "# hardware_profiles/README.md has the format.\n"
        + yaml.safe_dump(head, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
        + yaml.safe_dump({"numbers": form["numbers"]}, sort_keys=False, width=120, allow_unicode=True)
    )


def parts_text(form: Mapping[str, Any]) -> str:
    """Write a profile of parts as a file."""
    return (
        "# A machine from its parts. `moesim profile show` has the numbers that follow. Any key of a whole profile may stand\n"
        "# here, too, and replaces them: docs/guide/machines.md.\n"
        + yaml.safe_dump(dict(form), sort_keys=False, width=120, allow_unicode=True)
    )


def from_numbers(
    *,
    cpu: str,
    gpu: str,
    vram: str,
    ram: str,
    pcie: str | None = None,
    transfer: str | None = None,
    gpu_memory: str | None = None,
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None,
    source: str = "assumed",
    ref: str | None = None,
    name: str = "from-numbers",
) -> HardwareProfile:
    """Make a machine from a paper's numbers; the rest is derived or an ``assumed`` default.

    Parameters
    ----------
    cpu : str
        Time of an expert on the CPU: ``"1.5ms + 400us/token"`` or ``"2ms/token"``.
    gpu : str
        Time of an expert on the GPU: ``"200us"``, flat until its operations take longer, or ``"200us + 10us/token"``.
    vram, ram : str
        Memory of the GPU and of the host, such as ``"12GiB"``.
    pcie : str, optional
        Rate of a copy to the GPU, such as ``"25GB/s"``.
    transfer : str, optional
        Instead of a rate: time of an expert's copy to the GPU, such as ``"14.2ms"``.
    gpu_memory : str, optional
        Rate of the GPU's memory, such as ``"936GB/s"``, for the dense parts. Default: the rate at which an expert is read
        in the time `gpu`.
    model : str, Path, mapping or ModelSpec, optional
        Whose expert the times are of, as of `moesim.load_model`. Default: Mixtral-8x7B at 4 bits.
    source : str
        Label of what was typed, one of `moesim.hardware.LABELS` that a profile may have.
    ref : str, optional
        Where the numbers are printed, how they were derived, or why they are assumed.
    name : str
        Of the machine.

    Returns
    -------
    HardwareProfile
        The same as from the file that ``moesim profile new`` writes.

    Raises
    ------
    HardwareError
        If a number is missing or cannot be read, or the source lacks its words.

    Examples
    --------
    >>> machine = from_numbers(pcie="25GB/s", cpu="1.5ms + 400us/token", gpu="200us", vram="12GiB", ram="64GiB")
    >>> machine.devices["gpu0"].memory_bytes_per_s  # 88,080,384 bytes of an expert in 200 us
    440401920000
    """
    numbers = {"pcie": pcie, "transfer": transfer, "cpu": cpu, "gpu": gpu, "gpu_memory": gpu_memory, "vram": vram, "ram": ram}
    form = short_form(name, numbers, str(model) if isinstance(model, Path) else model, source, ref)
    return load_hardware(form, f"Hardware.from_numbers: {name}")


def from_parts(
    *,
    gpu: str | Sequence[str] | None = None,
    cpu: str | None = None,
    ram: str | None = None,
    pcie: str | None = None,
    disk: str | None = None,
    os: str | None = None,
    name: str | None = None,
) -> HardwareProfile:
    """Make a machine from its parts, by catalogue and rules; what is not given is assumed.

    Parameters
    ----------
    gpu : str or list of str, optional
        Such as ``"rtx 3060"``, ``"2x rtx 3090"``, or its rate and memory, ``"936GB/s 24GiB"``. None: no GPU.
    cpu : str, optional
        Such as ``"ryzen 5 5600"``, ``"2x epyc 9355"``, or the rate that its cores read memory at, ``"60GB/s"``.
    ram : str, optional
        Such as ``"2x32 ddr4-3200"`` or ``"64GB"``.
    pcie : str, optional
        Link of each GPU: ``"4x16"`` (generation and lanes), a board (``"B450"``), ``"OCuLink"``, ``"Thunderbolt 4"``.
    disk : str, optional
        Class of the drive: nvme5, nvme4, nvme3, qlc, sata, hdd, usb, thunderbolt.
    os : str, optional
        ``windows``, ``linux``, ``macos`` or ``wsl2``, with a backend of GPUs, if it is not the usual one: ``"linux vulkan"``.
    name : str, optional
        Of the machine. Default: of its parts.

    Returns
    -------
    HardwareProfile
        The same as from a file with these ``parts``. ``machine["assumed"]`` has what was not given.

    Raises
    ------
    HardwareError
        If a part is not in the catalogue, is a name of several, or does not fit the others.

    Examples
    --------
    >>> machine = from_parts(gpu="rtx 3060", cpu="ryzen 5 5600", ram="2x32 ddr4-3200")
    >>> machine.numbers["devices.cpu0.memory_bytes_per_s"].interval
    (33260000000.0, 48300000000.0)
    """
    several = gpu if gpu is None or isinstance(gpu, str) else list(gpu)
    given = {"gpu": several, "cpu": cpu, "ram": ram, "pcie": pcie, "disk": disk, "os": os}
    form = {"parts": {key: value for key, value in given.items() if value is not None}}
    return load_hardware(form if name is None else {"name": name, **form}, "Hardware.from_parts")


HardwareProfile.from_numbers = staticmethod(from_numbers)
HardwareProfile.from_parts = staticmethod(from_parts)
