"""What a folder holds."""

from __future__ import annotations

import os
from pathlib import Path


def everything(folder: Path) -> dict[str, bytes | None]:
    """Read all that is in a folder: the content of files, the target of links, and None for folders."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found
