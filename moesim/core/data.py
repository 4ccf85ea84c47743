"""Where data files (traces, hardware profiles, experiments) are looked for."""

from __future__ import annotations

from pathlib import Path


def data_dirs(kind: str) -> list[Path]:
    """Folders to search, in this order: under the current folder, beside the checkout, inside the package."""
    package = Path(__file__).resolve().parents[1]
    places = (Path.cwd() / kind, package.parent / kind, package / "data" / kind)
    return list(dict.fromkeys(place.resolve() for place in places if place.is_dir()))


def shipped(path: Path) -> Path:
    """Find what a path below ``experiments/``, say, means where this folder does not have it: a file that is shipped."""
    if path.is_file() or len(path.parts) < 2 or path.is_absolute():
        return path
    kind, *below = path.parts
    return next((found for folder in data_dirs(kind) if (found := folder.joinpath(*below)).is_file()), path)
