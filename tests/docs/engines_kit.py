"""The table of docs/guide/engines.md: what the software of each engine adds, from the engine profiles.

``python -m tests.docs.engines_kit`` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from moesim.hardware.engines import Block, When, engine_profiles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "engines.md"
HEAD = ["engine", "machine", "GPU operation", "step", "layer with CPU experts"]  # the last three in us
BACKENDS = {"cuda": "CUDA", "hip": "HIP", "vulkan": "Vulkan", "metal": "Metal", "sycl": "SYCL", None: ""}


def machine(when: When) -> str:
    """Name the machines of a block; the compute capability is CUDA's."""
    words = [BACKENDS[when.backend]]
    if when.compute is not None:
        least, below = when.compute.least, when.compute.below
        words.append(f"before {below:g}" if least == 0 else f"{least:g} or later" if below == float("inf") else f"{least:g} up to {below:g}")
    words += [when.system.capitalize() if when.system else "", f"build {when.build}" if when.build else ""]
    return " ".join(word for word in words if word) or "any other"


def cells(block: Block) -> list[str]:
    """Write the numbers of a block; assumed ones have a tilde."""
    gpu = block.gpu
    found = [[gpu.operation_us or gpu.launch_us], [gpu.token_us], [block.to_gpu_us, block.to_host_us]]
    return [
        "" if None in numbers else f"{'~' * any(n.source == 'assumed' for n in numbers)}{sum(float(n.value) for n in numbers):g}"  # type: ignore[union-attr]
        for numbers in found
    ]


def table() -> str:
    """Make the table without older builds; engines that build on llama.cpp have the lines in which they differ."""
    lines: dict[tuple[str, ...], list[str]] = {}
    known: list[Block] = []
    for engine in sorted(engine_profiles(), key=lambda one: (one.name != "llama.cpp", one.name)):
        for block in engine.costs:
            if any(cells(block)) and block not in known and not block.when.build and engine.name != "none":
                lines.setdefault((f"`{engine.name}`", *cells(block)), []).append(machine(block.when))
        known += engine.costs
    rows = [(name, ", ".join(machines), *numbers) for (name, *numbers), machines in lines.items()]
    return "\n".join([f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2), *(f"| {' | '.join(row)} |" for row in rows)])


def with_table(page: str, made: str) -> str:
    """Put the table into the page."""
    new, n = re.subn(r"(?m)^\| engine \| machine .*\n(\|.*\n)+", made + "\n", page)
    assert n == 1, "no table in the page"
    return new


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
