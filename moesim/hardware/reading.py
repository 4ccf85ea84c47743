"""The rate at which a host reads weights, if its experts take the time that the profile says."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from moesim.hardware.implied import READ_IN
from moesim.hardware.types import CostCurve, HardwareProfile
from moesim.model.spec import bits_to_bytes

MOST: Final = 10**12
"""Bytes a second that the memory of no processor reaches: twelve channels of 8.8 GT/s are 845 GB/s."""


def reading_remarks(profile: HardwareProfile) -> Iterator[str]:
    """Say for each host with linear costs of experts how fast it reads weights, and warn where that is hard to believe."""
    for device in profile.devices.values():
        rates = {_rate(one): one for one in device.experts if one.form == "linear" and one.shape and one.first <= 1}
        if device.role != "host" or not rates:
            continue
        rate = max(rates)
        hidden, intermediate, bits = rates[rate].shape or (0, 0, 0.0)
        said = f"an expert of {hidden}x{intermediate} at {bits:g} bits takes {float(rates[rate].us(1)):g} us with one row"
        yield f"{device.name} reads weights at {_gb(rate)}: {said}"
        known = _known_rate(profile)
        most = f"the memory of {profile.compute} ({_gb(known)})" if known else f"{_gb(MOST)}, which no processor's memory reaches"
        if rate > (known or MOST):
            yield f"warning: {device.name} reads weights faster than {most}; check the time of an expert on {device.name}"


def _rate(one: CostCurve) -> Fraction:
    hidden, intermediate, bits = one.shape or (0, 0, 0.0)
    return bits_to_bytes(3 * hidden * intermediate, bits) * 10**6 / one.us(1)


def _known_rate(profile: HardwareProfile) -> int:
    """Give the memory rate of the device that computes; 0 if it is not known, but only follows from an expert's time."""
    number = profile.numbers.get(f"devices.{profile.compute}.memory_bytes_per_s")
    known = number is not None and READ_IN not in number.ref
    return profile.devices[profile.compute].memory_bytes_per_s if known else 0


def _gb(rate: Fraction | int) -> str:
    return f"{float(rate) / 1e9:.4g} GB/s"
