"""Integer nanoseconds and bytes, and the only place where strings become numbers."""

from __future__ import annotations

import re
from decimal import Decimal, DecimalException

from moesim.core.limits import BYTES
from moesim.errors import ConfigError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000

_BYTES = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, place: str = "size") -> int:
    """Read a number of bytes.

    >>> parse_bytes("4 GiB"), parse_bytes("1.5 MB"), parse_bytes(7)
    (4294967296, 1500000, 7)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{place}: expected bytes as an integer or a string such as '8 GiB', got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{place}: expected a size of at least 0 bytes, got {value}")
        return _checked(Decimal(value), value, place)
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ConfigError(f"{place}: expected a size such as '8 GiB', got {value!r}")
    unit = match[2].lower()
    if unit not in _BYTES:
        known = ", ".join(_BYTES)
        raise ConfigError(f"{place}: expected a size with a unit ({known}), got {value!r}; write for example '8 GiB'")
    try:
        size = Decimal(match[1].replace("_", "")) * _BYTES[unit]
    except DecimalException:  # an exponent beyond its range
        size = Decimal("inf")
    return _checked(size, value, place)


def _checked(size: Decimal, written: int | str, place: str) -> int:
    if size > BYTES.most:
        raise ConfigError(f"{place}: expected a size of at most {BYTES.most} bytes (8 PiB), got {written!r}")
    return int(size.to_integral_value())


def ceil_div(a: int, b: int) -> int:
    """Divide integers, rounding up.

    >>> ceil_div(7, 2), ceil_div(8, 2)
    (4, 4)
    """
    return -(-a // b)


def us_to_ns(us: float) -> int:
    """Convert microseconds from a profile to whole nanoseconds (nearest).

    >>> us_to_ns(0.4)
    400
    """
    return round(us * NS_PER_US)


def format_bytes(n: float) -> str:
    """Write bytes for people, from a GB on in both units that people mean by it.

    >>> format_bytes(352_321_536), format_bytes(12 * 2**30)
    ('352 MB', '12.9 GB (12 GiB)')
    """
    return f"{_decimal(n)} ({n / _GIB:.3g} GiB)" if abs(n) >= _GB else _decimal(n)


def format_size(n: float) -> str:
    """Write bytes in one unit, for labels: eighths of a GiB as such.

    >>> format_size(12.5 * 2**30), format_size(12e9), format_size(352_321_536)
    ('12.5 GiB', '12 GB', '352 MB')
    """
    return f"{n / _GIB:g} GiB" if abs(n) >= _GIB and n % (_GIB // 8) == 0 else _decimal(n)


_GB, _GIB = 10**9, 2**30


def _decimal(n: float) -> str:
    size = float(n)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def format_s(seconds: float) -> str:
    """Write a time that somebody waits for.

    >>> format_s(0.4), format_s(75), format_s(8000)
    ('less than 1 s', '75 s', '2.2 h')
    """
    if seconds < 1:
        return "less than 1 s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_ns(ns: float) -> str:
    """Write a time for people.

    >>> format_ns(12_403_000)
    '12.403 ms'
    """
    if abs(ns) < NS_PER_US:
        return f"{ns:z.0f} ns"
    if abs(ns) < NS_PER_MS:
        return f"{ns / NS_PER_US:.3f} us"
    if abs(ns) < NS_PER_S:
        return f"{ns / NS_PER_MS:.3f} ms"
    return f"{ns / NS_PER_S:.3f} s"
