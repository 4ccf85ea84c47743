"""Nominal rates of PCI Express and of memory modules, and what a profile says it has of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from moesim.errors import ConfigError, HardwareError
from moesim.hardware import HardwareProfile
from moesim.hardware.numbers import LANE
from moesim.studies.whatif.settings import Setting

PCIE: Final = {gen: LANE[gen] for gen in (3, 4, 5)}
"""Bytes a second of one lane and direction by generation."""

_LANES = (1, 2, 4, 8, 16)
_PCIE = re.compile(r"PCIe (\d)(?:\.0)? x(\d+)")
_WANTED = re.compile(r"(?:gen\s*(\d)|(\d)\.0)?\s*(?:x\s*(\d+))?")
_MEMORY = re.compile(r"(\d+)\s*x\s*(DDR\d)(?:-(\d+))?")


def pcie_of(profile: HardwareProfile) -> tuple[int, int]:
    """Find out which PCI Express a profile is about."""
    refs = [n.ref for key, n in profile.numbers.items() if key.startswith("links.") and "gpu" in key]
    for text in (_said(profile), " ".join(refs)):
        found = {(int(gen), int(lanes)) for gen, lanes in _PCIE.findall(text)}
        if len(found) == 1 and (one := found.pop())[0] in PCIE:
            return one
    raise HardwareError(
        f"--vary pcie: expected {profile.name} to say which PCIe it has, such as 'PCIe 4.0 x16', in its description, got nothing "
        "clear; vary link.bytes_per_s instead"
    )


def parse_pcie(setting: Setting, was: tuple[int, int]) -> tuple[int, int]:
    """Read ``gen5``, ``x8`` or ``gen5x8``; what is left out is as it was. Raises `ConfigError`."""
    match = _WANTED.fullmatch(setting.text.lower())
    gen, lanes = (int(match[1] or match[2] or was[0]), int(match[3] or was[1])) if match and setting.text else (0, 0)
    if gen not in PCIE or lanes not in _LANES:
        known = ", ".join(f"gen{one}" for one in PCIE)
        raise ConfigError(f"--vary {setting}: expected {known}, x1 to x16, or both as gen5x16, got '{setting.text}'")
    return gen, lanes


@dataclass(frozen=True)
class Memory:
    """Modules of main memory: channels, kind, and megatransfers a second where that is known."""

    channels: int
    kind: str
    speed: int | None

    def __str__(self) -> str:
        return f"{self.channels} x {self.kind}" + (f"-{self.speed}" if self.speed else "")

    def peak(self, beside: Memory) -> Fraction:
        """Return a number in proportion to the nominal rate; the speed counts only where both say theirs."""
        return Fraction(self.channels * (self.speed if self.speed and beside.speed else 1))


def memory_of(profile: HardwareProfile) -> Memory:
    """Find out which memory modules a profile is about. Raises `HardwareError` if it does not say so."""
    found = {Memory(int(n), kind, int(s) if s else None) for n, kind, s in _MEMORY.findall(_said(profile))}
    if len(found) != 1:
        raise HardwareError(
            f"--vary cpu.memory: expected {profile.name} to say which memory it has, such as '8 x DDR4-3200', in its "
            f"description, got {'nothing' if not found else 'several'}; vary cpu.memory_bandwidth instead"
        )
    return found.pop()


def _said(profile: HardwareProfile) -> str:
    return " ".join((profile.description, *profile.machine.values()))


def parse_memory(setting: Setting, was: Memory) -> Memory:
    """Read ``8xDDR5-4800``, a number of channels, or ``4->8``, whose first number must be what the profile has."""
    text = setting.text.replace(" ", "")
    if match := re.fullmatch(r"(?:(\d+)->)?(\d+)", text):
        if match[1] and int(match[1]) != was.channels:
            raise ConfigError(
                f"--vary {setting}: expected {was.channels} channels before the arrow, as the profile says, got {match[1]}"
            )
        new = Memory(int(match[2]), was.kind, was.speed)
    elif match := re.fullmatch(r"(\d+)x(DDR\d)-(\d+)", text, re.IGNORECASE):
        new = Memory(int(match[1]), match[2].upper(), int(match[3]))
        if was.speed is None:
            raise ConfigError(
                f"--vary {setting}: expected a number of channels, since the profile says no speed ({was}), got '{setting.text}'"
            )
    else:
        raise ConfigError(
            f"--vary {setting}: expected modules such as 8xDDR5-4800, or channels such as 4->8, got '{setting.text}'"
        )
    if new.channels < 1 or new.speed == 0:
        raise ConfigError(f"--vary {setting}: expected at least one channel and a speed above 0, got '{setting.text}'")
    return new
