"""What a folder holds, and commands that write one."""

from __future__ import annotations

import os
from pathlib import Path

COMMANDS: dict[str, list[str]] = {
    "run": ["run", "small.yaml", "--out", "OUT", "--jobs", "1"],
    "compare": ["compare", "--policies", "lru", "--trace", "small.safetensors", "--prompt", "6", "--decode", "2", "--out", "OUT"],
    "whatif": ["whatif", "small.yaml", "--quick", "--no-next", "--vary", "link.bytes_per_s x2", "--out", "OUT"],
    "regret": ["regret", "small.yaml", "--quick", "--policies", "lru", "--jobs", "1", "--out", "OUT"],
    "validate": ["validate", "--public", "--out", "OUT"],
    "papers": ["papers", "hybrimoe/fig9", "--quick", "--jobs", "1", "--out", "OUT"],
    "plot": ["plot", "decode_speed", "result", "--out", "OUT"],
    "report": ["report", "result", "--out", "OUT/page.html"],
    "stats": ["trace", "stats", "small.safetensors", "--plot", "OUT", "-q"],
    "synthesize": ["trace", "synthesize", "--parameters", "mixtral-8x7b", "--requests", "1", "--prompt", "2", "--decode", "2",
                   "--out", "OUT/s.safetensors", "--overwrite"],
    "export": ["trace", "export", "./small.safetensors", "--format", "csv", "--out", "OUT/e.csv", "--overwrite"],
}  # fmt: skip


def everything(folder: Path) -> dict[str, bytes | None]:
    """Read all that is in a folder: the content of files, the target of links, and None for folders."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found
