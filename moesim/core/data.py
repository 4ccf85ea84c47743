"""Where data files (traces, profiles, experiments) are found, and what was read of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_NOTED: ContextVar[tuple[Mapping[str, str], dict[str, str]]] = ContextVar("noted")


@contextmanager
def noting(known: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Note small files that are read by name or path; those that are known are not looked for."""
    read: dict[str, str] = {}
    token = _NOTED.set((known, read))
    try:
        yield read
    finally:
        _NOTED.reset(token)


def known_text(kind: str, name: object) -> str | None:
    """Return the content of a file that need not be looked for."""
    known, _ = _NOTED.get(({}, {}))
    return known.get(f"{kind} {name}")


def note(kind: str, name: object, text: str) -> str:
    """Note the content of a file that was read."""
    _, read = _NOTED.get(({}, {}))
    read[f"{kind} {name}"] = text
    return text


def data_dirs(kind: str) -> list[Path]:
    """List the folders to search: the current one's, the checkout's, the package's."""
    package = Path(__file__).resolve().parents[1]
    places = (Path.cwd() / kind, package.parent / kind, package / "data" / kind)
    return list(dict.fromkeys(place.resolve() for place in places if place.is_dir()))


def shipped(path: Path) -> Path:
    """Find the shipped file of a relative path that the current folder does not have."""
    if path.is_file() or len(path.parts) < 2 or path.is_absolute():
        return path
    kind, *below = path.parts
    return next((found for folder in data_dirs(kind) if (found := folder.joinpath(*below)).is_file()), path)
