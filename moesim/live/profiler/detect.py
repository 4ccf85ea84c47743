"""Ask the machine that this runs on: outputs of its system tools, read as if they had been pasted."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moesim.errors import HardwareError
from moesim.hardware.pasted import Pasted, read_pasted

_TIMEOUT_S: Final = 20
_PROC: Final = Path("/proc")
_SMI: Final = "name,memory.total,pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current"
_CLASSES: Final = "'Win32_Processor', 'Win32_VideoController', 'Win32_PhysicalMemory'"
_KEYS: Final = "Name, Capacity, ConfiguredClockSpeed, SMBIOSMemoryType"

COMMANDS: Final = (
    ("nvidia-smi", f"--query-gpu={_SMI}", "--format=csv"),
    ("rocm-smi", "--showproductname", "--showmeminfo", "vram"),
    ("lscpu",),
    ("dmidecode", "-t", "memory"),  # answers root alone
    ("system_profiler", "SPHardwareDataType", "SPDisplaysDataType"),
    ("powershell", "-NoProfile", "-Command", f"{_CLASSES} | % {{ Get-CimInstance $_ }} | Format-List {_KEYS}"),
)
"""Programs to ask, those that exist."""


@dataclass
class Detected:
    """Answers of a machine, and what they were read as."""

    text: str
    pasted: Pasted
    remarks: list[str] = field(default_factory=list)  # what could not be asked, and why


def detect(proc: Path = _PROC) -> Detected:
    """Ask the system and the drivers; what does not answer is a remark."""
    answers, remarks = [f"{platform.platform()}\n"], list[str]()
    for command in COMMANDS:
        if (program := shutil.which(command[0])) is None:
            continue
        try:
            done = subprocess.run(
                [program, *command[1:]], capture_output=True, timeout=_TIMEOUT_S, check=True, env={**os.environ, "LC_ALL": "C"}
            )
            answers.append(f"$ {' '.join(command)}\n{done.stdout.decode(errors='replace')}")
        except (OSError, subprocess.SubprocessError) as error:
            remarks.append(f"{command[0]} did not answer: {' '.join(str(error).split())}")
    if not {"nvidia-smi", "rocm-smi", "system_profiler", "powershell"} & {one[0] for one in COMMANDS if shutil.which(one[0])}:
        remarks.insert(0, "there is no nvidia-smi or rocm-smi, so that no GPU was asked")
    with contextlib.suppress(OSError):
        answers.append((proc / "meminfo").read_text(encoding="utf-8", errors="replace"))
    text = "\n".join(answers)
    try:
        pasted = read_pasted(text, "the answers of this machine")
    except HardwareError as error:
        remarks.append(str(error))
        pasted = Pasted({"parts": {}}, missing=["gpu, cpu, ram: nothing answered; --gpu, --cpu and --ram give them"])
    return Detected(text, pasted, remarks)
