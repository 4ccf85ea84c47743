"""The short form of a profile as a mapping, as a file's text, and as a machine in Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.hardware.load import load_hardware
from moesim.hardware.short import FOR, TYPED
from moesim.hardware.types import HardwareProfile
from moesim.model import ModelSpec

_WORD: Final = {"assumed": "why", "derived": "how", "identified": "how"}
"""Where a label has its words; other labels have a ``ref``."""


def short_form(name: str, numbers: Mapping[str, str | None], model: Any, source: str, ref: str | None) -> dict[str, Any]:
    """Make the short form of a profile; numbers that are None are left out."""
    words = {_WORD.get(source, "ref"): ref} if ref is not None else {"why": TYPED["why"]} if source == "assumed" else {}
    return {
        "name": name,
        "source": {"source": source, **words},
        "for": dict(FOR) if model is None else model,
        "numbers": {key: value for key, value in numbers.items() if value is not None},
    }


def short_text(form: Mapping[str, Any]) -> str:
    """Write the short form as a file."""
    head = {key: value for key, value in form.items() if key != "numbers"}
    return (
        "# A machine from a few numbers. `moesim profile check` says what follows from them and what is assumed;\n"
        "# hardware_profiles/README.md has the format.\n"
        + yaml.safe_dump(head, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
        + yaml.safe_dump({"numbers": form["numbers"]}, sort_keys=False, width=120, allow_unicode=True)
    )


def from_numbers(
    *,
    cpu: str,
    gpu: str,
    vram: str,
    ram: str,
    pcie: str | None = None,
    transfer: str | None = None,
    gpu_memory: str | None = None,
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None,
    source: str = "assumed",
    ref: str | None = None,
    name: str = "from-numbers",
) -> HardwareProfile:
    """Make a machine from the numbers that a paper prints; all else is derived from them, or a default labelled ``assumed``.

    Parameters
    ----------
    cpu : str
        Time of an expert on the CPU: ``"1.5ms + 400us/token"`` or ``"2ms/token"``.
    gpu : str
        Time of an expert on the GPU: ``"200us"``, flat until its operations take longer, or ``"200us + 10us/token"``.
    vram, ram : str
        Memory of the GPU and of the host, such as ``"12GiB"``.
    pcie : str, optional
        Rate of a copy to the GPU, such as ``"25GB/s"``.
    transfer : str, optional
        Instead of a rate: time of an expert's copy to the GPU, such as ``"14.2ms"``.
    gpu_memory : str, optional
        Rate of the GPU's memory, such as ``"936GB/s"``, for attention and the other dense parts. Default: the rate at
        which an expert is read in the time that `gpu` says.
    model : str, Path, mapping or ModelSpec, optional
        Whose expert the times are of, as of `moesim.load_model`. Default: Mixtral-8x7B at 4 bits.
    source : str
        Label of what was typed, one of `moesim.hardware.LABELS` that a profile may have.
    ref : str, optional
        Where the numbers are printed, how they were derived, or why they are assumed.
    name : str
        Of the machine.

    Returns
    -------
    HardwareProfile
        The same as from the file that ``moesim profile new`` writes.

    Raises
    ------
    HardwareError
        If a number is missing or cannot be read, or the source lacks its words.

    Examples
    --------
    >>> machine = from_numbers(pcie="25GB/s", cpu="1.5ms + 400us/token", gpu="200us", vram="12GiB", ram="64GiB")
    >>> machine.devices["gpu0"].memory_bytes_per_s  # 88,080,384 bytes of an expert in 200 us
    440401920000
    """
    numbers = {"pcie": pcie, "transfer": transfer, "cpu": cpu, "gpu": gpu, "gpu_memory": gpu_memory, "vram": vram, "ram": ram}
    form = short_form(name, numbers, str(model) if isinstance(model, Path) else model, source, ref)
    return load_hardware(form, f"Hardware.from_numbers: {name}")


HardwareProfile.from_numbers = staticmethod(from_numbers)
