"""Read cores, memory and power of this machine as the system reports them."""

from __future__ import annotations

import gc
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.core.units import format_memory
from moesim.errors import CapacityError

if TYPE_CHECKING:
    import torch


def usable_cores() -> list[int]:
    """List the cores that the calling thread may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(cores: Sequence[int]) -> bool:
    """Keep the calling thread, and threads that it starts, on some cores from now on."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process, on Linux
    return True


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[bool]:
    """Keep the calling thread on some cores for the length of a block."""
    before = usable_cores()
    done = pin(cores)
    try:
        yield done
    finally:
        if done:
            pin(before)


_SYS = Path("/sys")
_PROC = Path("/proc")


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return _torch() is not None


def n_gpus() -> int:
    """Count the GPUs that PyTorch finds; none without it."""
    torch = _torch()
    return torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0


def describe() -> dict[str, str]:
    """Describe this machine in words."""
    words = {
        "processor": _cpu_name(),
        "cores": f"{len(usable_cores())} usable of {os.cpu_count() or '?'}",
        "memory": _size(_meminfo("MemTotal")),
        "caches": ", ".join(f"L{level}{letter} {_size(size)}" for level, letter, size in _caches()) or "unknown",
        "kernel": " ".join([platform.system(), *re.findall(r"^\d+\.\d+", platform.release()), platform.machine()]),
        "python": platform.python_version(),
    }
    torch = _torch()
    if torch is not None:
        words["torch"] = str(torch.__version__)
    if n_gpus():
        words["gpus"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        words["cuda"] = str(torch.version.cuda)
        driver = _nvidia_smi("driver_version", 0)
        if driver:
            words["driver"] = driver
    return words


def l3_bytes() -> int | None:
    """Return the size of the first core's last-level cache; None if unreported."""
    sizes = [(level, size) for level, _, size in _caches() if size]
    return max(sizes)[1] if sizes and max(sizes)[0] >= 3 else None


def available_memory_bytes(proc: Path = _PROC, cgroup: Path = _SYS / "fs/cgroup") -> int | None:
    """Return how much host memory is available now."""
    known = [_meminfo("MemAvailable", proc), _cgroup_room(cgroup)]
    return min((n for n in known if n is not None), default=None)


def available_gpu_bytes(device: str = "cuda") -> int | None:
    """Return how much memory of a GPU is free now; None without one."""
    if not n_gpus():
        return None
    torch = _torch()
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free)


def check_room(what: str, n_bytes: int, device: torch.device) -> None:
    """Refuse what does not fit into a device's memory, rather than be killed for it."""
    available = available_memory_bytes() if device.type == "cpu" else available_gpu_bytes(str(device))
    if available is not None and n_bytes > available:
        raise CapacityError(f"{what} on {device}: expected {n_bytes} bytes of free memory, got {available}; take less")


def gpu_power_w(index: int = 0) -> float | None:
    """Read the power of a GPU in watts; None where it cannot be read."""
    text = _nvidia_smi("power.draw", index)
    try:
        return float(text) if text is not None else None
    except ValueError:  # "[N/A]"
        return None


def package_energy_uj(root: Path = _SYS / "class/powercap") -> dict[str, tuple[int, int]] | None:
    """Read the energy counters of the processor packages (RAPL)."""
    counters = {}
    for zone in sorted(root.glob("intel-rapl:*")):  # the same name on AMD; "intel-rapl:0:1" is a part of a package
        if zone.name.count(":") != 1:
            continue
        try:
            counters[zone.name] = (_number(zone / "energy_uj"), _number(zone / "max_energy_range_uj"))
        except (OSError, ValueError):
            return None
    return counters or None


def joules_between(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> float:
    """Return the energy between two readings of `package_energy_uj` less than one turn apart."""
    return sum((after[zone][0] - n) % (turn + 1) for zone, (n, turn) in before.items()) / 1e6


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", (_PROC / "cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _caches() -> list[tuple[int, str, int | None]]:
    found = []
    for folder in sorted((_SYS / "devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind = _number(folder / "level"), (folder / "type").read_text(encoding="ascii").strip()
            size = (folder / "size").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        scale = {"K": 2**10, "M": 2**20}.get(size[-1:], 1)
        number = int(size.rstrip("KM")) * scale if size.rstrip("KM").isdigit() else None
        found.append((level, {"Data": "d", "Instruction": "i"}.get(kind, ""), number))
    return found


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else format_memory(n_bytes)


def _meminfo(key: str, proc: Path = _PROC) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB$", (proc / "meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _cgroup_room(root: Path) -> int | None:
    for folder, limit, usage, cached in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            room = _number(folder / limit) - _number(folder / usage)
            stat = re.search(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
        return max(0, room + (int(stat[1]) if stat else 0))  # cached files give way
    return None


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def empty_gpu_caches() -> None:
    """Return the freed GPU memory that PyTorch keeps to the driver, which reports what is free."""
    gc.collect()
    if n_gpus():
        _torch().cuda.empty_cache()


def gpu_total_bytes(device: str = "cuda") -> int | None:
    """Return the whole memory of a GPU; None without one."""
    torch = _torch()
    return int(torch.cuda.mem_get_info(torch.device(device))[1]) if n_gpus() else None


def gpu_cache_bytes(device: str = "cuda") -> int | None:
    """Return the size of a GPU's last cache; None without one."""
    if not n_gpus():
        return None
    torch = _torch()
    return int(torch.cuda.get_device_properties(torch.device(device)).L2_cache_size)


def _identity(index: int) -> str:
    """Name a GPU for the driver's tool, which counts in an order of its own."""
    if index < n_gpus():
        uuid = getattr(_torch().cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return f"GPU-{uuid}"
    return str(index)


def _nvidia_smi(field: str, index: int) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--id={_identity(index)}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
