"""Where data files (traces, hardware profiles, experiments) are looked for."""

from __future__ import annotations

from pathlib import Path


def data_dirs(kind: str) -> list[Path]:
    """Folders to search, in this order: under the current folder, beside the checkout, inside the package."""
    package = Path(__file__).resolve().parents[1]
    places = (Path.cwd() / kind, package.parent / kind, package / "data" / kind)
    return list(dict.fromkeys(place.resolve() for place in places if place.is_dir()))
