"""Figures that need not be drawn again: what they are drawn from is the same, and they are there as moesim wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from moesim.core.manifest import Manifest, State, read_verified
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import InputError
from moesim.experiment.again import RESOLVED
from moesim.experiment.asked_figures import Asked
from moesim.experiment.keys import code_digest, source_digest
from moesim.metrics.naming import fingerprint

FIGURES: Final = "figures"
"""Key of the resolved configuration: of what its figures were drawn, and their files."""
_CODE: Final = ("core", "plots", "experiment/asked_figures.py", "experiment/figures.py", "experiment/records_file.py")
"""What draws, beside what a run goes through."""
_PACKAGES: Final = ("matplotlib", "pandas", "fonttools")


def figures_key(asked: Sequence[Asked], rows: Iterable[Mapping[str, Any]], *, frames: bool) -> str:
    """Hash all that figures follow from: what is asked for, rows (whose keys stand for their records), code and packages."""
    packages = {name: version(name) for name in _PACKAGES}
    entries = [one._asdict() for one in asked]
    code = [code_digest(), source_digest(_CODE)]
    return fingerprint({"asked": entries, "rows": list(rows), "frames": frames, "code": code, "packages": packages})


def drawn_before(folder: Path, key: str) -> dict[str, Path] | None:
    """Give the figures in a result folder if they are of this key, all there and unchanged; else None."""
    try:
        drawn = read_yaml_value(read_verified(folder / RESOLVED).decode(), RESOLVED)[FIGURES]
        same = drawn["key"] == key
        names = [f"plots/{name}" for name in drawn["files"]]
    except (OSError, InputError, UnicodeDecodeError, KeyError, TypeError):
        return None  # no result yet, an older or a damaged one: they are drawn
    manifest = Manifest(folder)
    if not same or not all(manifest.state(name) is State.OURS for name in names):
        return None
    return {name: folder / name for name in names}


def figures_entry(key: str, names: Iterable[str]) -> dict[str, Any]:
    """Write down what figures were drawn of, and the names of their files."""
    return {FIGURES: {"key": key, "files": sorted(names)}}
