"""Report processor, memory, GPU and link of a machine, unmeasured, as a short profile."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.hardware.schema import LANE
from moesim.hardware.short import FOR, TYPED, WANTED

_FIELDS: Final = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
_TIMEOUT_S: Final = 20
_PROC: Final = Path("/proc")


@dataclass
class Detected:
    """Findings about a machine."""

    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the short form, each with its source
    machine: dict[str, str] = field(default_factory=dict)  # in words
    remarks: list[str] = field(default_factory=list)  # what could not be asked, and why

    @property
    def missing(self) -> dict[str, str]:
        """Numbers that a profile still needs, and what they are in words."""
        return {key: words for key, words in WANTED.items() if key not in self.numbers}


def detect(proc: Path = _PROC) -> Detected:
    """Ask the kernel and the GPU's driver; what does not answer is a remark."""
    found = Detected()
    _ask_processor(found, proc)
    _ask_memory(found, proc)
    _ask_gpu(found)
    return found


def _ask_processor(found: Detected, proc: Path) -> None:
    text = _read(proc / "cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    found.machine["processor"] = names[0].strip() if names else platform.processor() or platform.machine() or "unknown"
    threads = len(re.findall(r"^processor\s*:", text, re.MULTILINE))
    sockets = dict(re.findall(r"^physical id\s*:\s*(\d+)$(?:.|\n)*?^cpu cores\s*:\s*(\d+)$", text, re.MULTILINE))
    if threads:
        cores = f"{sum(map(int, sockets.values()))} cores, " if sockets else ""
        found.machine["cores"] = f"{cores}{threads} threads"


def _ask_memory(found: Detected, proc: Path) -> None:
    match = re.search(r"^MemTotal:\s*(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE)
    if match is None:
        found.remarks.append(f"{proc}/meminfo does not say how much memory there is")
        return
    found.numbers["ram"] = _asked(f"{int(match[1])} KiB", "MemTotal of /proc/meminfo")


def _ask_gpu(found: Detected) -> None:
    program = shutil.which("nvidia-smi")
    if program is None:
        found.remarks.append("there is no nvidia-smi, so that no GPU was asked")
        return
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        found.remarks.append(f"nvidia-smi did not answer: {' '.join(str(error).split())}")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if not rows or len(rows[0]) != len(_FIELDS):
        found.remarks.append("nvidia-smi named no GPU")
        return
    name, memory, gen, width = rows[0]
    found.machine["gpu"] = name
    if len(rows) > 1:
        found.remarks.append(f"of {len(rows)} GPUs the first was taken; a profile of several is written whole")
    if re.fullmatch(r"\d+ MiB", memory):
        found.numbers["vram"] = _asked(memory, "memory.total of nvidia-smi")
    if gen.isdecimal() and width.isdecimal() and int(gen) in LANE and int(width):
        link = f"PCIe {gen}.0 x{width}"
        found.machine["link"] = link
        rate = round(LANE[int(gen)] * int(width) / 10**6)
        ref = f"nominal rate of {link}, which nvidia-smi tells as the most; copies reach less"
        found.numbers["pcie"] = {"value": f"{rate / 1000:g} GB/s", "source": "spec-sheet", "ref": ref}
    else:
        found.remarks.append(f"nvidia-smi does not tell a known link (generation {gen}, width {width})")


def _asked(value: str, of: str) -> dict[str, Any]:
    proof = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "method": f"{of}, as the system told",
        "repeats": 1,
        "spread": "none",
    }
    return {"value": value, "source": "measured", **proof}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def detected_text(found: Detected, name: str) -> str:
    """Write what was found as a short profile, with a comment for each missing number."""
    head: dict[str, Any] = {"name": name, "machine": found.machine, "source": TYPED, "for": FOR}
    lines = ["# Asked of this machine; nothing was timed. `moesim profile check` lists what is missing."]
    lines += [f"# {remark}." for remark in found.remarks]
    lines += [_dump(head).rstrip(), "numbers:"]
    lines += [f"  {line}" for line in _dump(found.numbers).splitlines()] if found.numbers else []
    lines += [f"  {key}:  # {words}" for key, words in found.missing.items()]
    return "\n".join(lines) + "\n"


def _dump(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=400, allow_unicode=True)
    return text
