"""The table of docs/guide/engines.md: what the software of each engine adds, from the engine profiles.

``python -m tests.docs.engines_kit`` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moesim.hardware.engines import Block, When, engine_profiles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "engines.md"
HEAD = ["engine", "machine", "GPU operation", "step", "layer with CPU experts"]  # the last three in us
BACKENDS = {"cuda": "CUDA", "hip": "HIP", "vulkan": "Vulkan", "metal": "Metal", "sycl": "SYCL", None: ""}


def machine(when: When) -> str:
    """Name the machines of a block."""
    return f"{BACKENDS[when.backend]} {(when.system or '').capitalize()}".strip() or "any other"


def cells(block: Block) -> list[str]:
    """Write the numbers of a block; assumed ones have a tilde."""
    gpu = block.gpu
    found = [[gpu.operation_us or gpu.launch_us], [gpu.token_us], [block.to_gpu_us, block.to_host_us]]
    return [_sum([number for number in numbers if number]) for numbers in found]


def _sum(numbers: list[Any]) -> str:
    assumed = any(number.source == "assumed" for number in numbers)
    return f"{'~' * assumed}{sum(float(number.value) for number in numbers):g}" if numbers else ""


def table() -> str:
    """Make the table, without older builds and generations of CUDA; what builds on llama.cpp has the lines that differ."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    known: list[Block] = []
    for engine in sorted(engine_profiles(), key=lambda one: (one.name != "llama.cpp", one.name)):
        for block in engine.costs if engine.name != "none" else ():
            if block not in known and any(cells(block)) and not block.when.build and not block.when.compute:
                lines.append(f"| `{engine.name}` | {machine(block.when)} | {' | '.join(cells(block))} |")
        known += engine.costs
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """Put the table into the page."""
    new, n = re.subn(r"(?m)^\| engine \| machine .*\n(\|.*\n)+", made + "\n", page)
    assert n == 1, "no table in the page"
    return new


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
