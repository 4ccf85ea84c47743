"""Hardware profiles: what a machine is and what things cost on it, every number with its source.

A profile is one YAML file (format: `moesim.hardware.schema`, guide: ``hardware_profiles/README.md``). `load_hardware`
reads it, checks that it makes sense as a machine, and gives plain frozen dataclasses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesim.core import data
from moesim.core.gate import YAML, read_text
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.build import build_profile
from moesim.hardware.implied import TYPED, retyped, whole_form
from moesim.hardware.overrides import flatten, override, override_one, sourced
from moesim.hardware.read import read_yaml, validate
from moesim.hardware.sections import with_sources
from moesim.hardware.types import HardwareProfile


def load_hardware(source: str | Path | Mapping[str, Any], place: str = "hardware") -> HardwareProfile:
    """Load a profile.

    Parameters
    ----------
    source : str, Path or mapping
        A name among the shipped and local profiles; the path of a YAML file; or a mapping ``{base: NAME, ...}`` with
        overrides under dotted keys such as ``"devices.gpu0.memory_bytes"`` (or nested mappings). A mapping without
        ``base`` is a whole profile, or the short form of one, with ``numbers``.
    place : str
        File and key of the source, for messages.

    Returns
    -------
    HardwareProfile

    Raises
    ------
    HardwareError
        If there is no such profile, or anything in it is wrong: one line with file, key, expected, got, remedy.

    Notes
    -----
    A number changed by an override carries the label ``assumed``, unless the override gives a whole
    ``{value: ..., source: ..., ...}``.
    """
    raw, path, overrides = read_profile(source, place)
    profile = build_profile(raw, place if overrides or path is None else path, path=path, overrides=tuple(overrides))
    return replace(profile, written=str(source) if isinstance(source, Path) else source)


def read_profile(source: str | Path | Mapping[str, Any], place: str = "hardware") -> tuple[dict[str, Any], str | None, list[str]]:
    """Read what a profile's file holds, with overrides applied, for whoever changes numbers and writes it again.

    Parameters
    ----------
    source, place
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
            more = {key: source[key] for key in dotted if not key.startswith(TYPED)}
            raw = whole_form({key: value for key, value in source.items() if key not in more}, place)
            return (override(raw, more, place) if more else raw), None, dotted
        if not isinstance(source["base"], (str, Path)):
            raise HardwareError(f"{place}.base: expected the name or path of a profile, got {source['base']!r}")
        overrides = dict(flatten({key: value for key, value in source.items() if key != "base"}))
        source = source["base"]
    path, text = _find(source, place)
    typed = {key: value for key, value in overrides.items() if key.startswith(TYPED)}
    raw = _read(path, text, {key.removeprefix(TYPED): sourced(value) for key, value in typed.items()}, place)
    if len(overrides) > len(typed):
        validate(raw, str(path))
        for key, value in overrides.items():
            if key not in typed:
                override_one(raw, key, value, place)
    return raw, str(path), list(overrides)


def _read(path: Path, text: str, typed: Mapping[str, Any], place: str, kin: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a profile; one with ``base`` is that profile with other numbers, which keep the labels that they have here.

    Numbers that were typed for a short form, at ``place``, replace those of the file.
    """
    raw = with_sources(read_yaml(text, str(path)))
    raw.setdefault("name", path.stem)
    if "base" not in raw:
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
    validate(found, str(base))
    for key in _TOLD:  # said of the other machine, and not of this one
        found.pop(key, None)
    for key, value in raw.items():
        if key in _TOLD:
            found[key] = value
        elif key not in ("base", "anchors"):
            for dotted, number in flatten({key: value}):
                override_one(found, dotted, number, str(path))
    return found


_FOLDER = "hardware_profiles"
_TOLD = ("name", "description", "corrections", "machine")
"""Keys of a profile in words, which a profile with a base does not take over."""


def _find(source: str | Path, place: str) -> tuple[Path, str]:
    """Give the path of a profile and its content."""
    text = str(source)
    by_path = isinstance(source, Path) or text.endswith((".yaml", ".yml")) or "/" in text
    if (content := data.known_text(_FOLDER, text)) is not None:
        return Path(text) if by_path else Path(_FOLDER, f"{text}.yaml"), content
    path = _named(text, by_path, place)
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
        raise HardwareError(f"{place}: {unknown_name('hardware profile', text, known)}")
    return known[text]


def hardware_names() -> list[str]:
    """List the names of all profiles that can be found, sorted."""
    return sorted({p.stem for d in data.data_dirs(_FOLDER) for p in Path(d).glob("*.yaml")})
