"""What each module of moesim imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "moesim"


class Import(NamedTuple):
    importer: str
    imported: str  # moesim.x.y without "moesim.", or another top-level package
    ours: bool
    for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str, path: Path, known: set[str]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and (getattr(node.test, "id", "") or getattr(node.test, "attr", "")) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write absolute imports"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            top, _, rest = target.partition(".")
            if top != "moesim":
                yield Import(name, top, False, id(node) in guarded)
                continue
            while rest and rest not in known:
                rest = rest.rpartition(".")[0]
            yield Import(name, rest or "__init__", True, id(node) in guarded)


ALL = modules()


@cache
def all_imports() -> list[Import]:
    known = set(ALL)
    return [found for name, path in ALL.items() for found in imports_of(name, path, known)]
