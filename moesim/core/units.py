"""Integer nanoseconds and bytes, and the only place where strings become numbers."""

from __future__ import annotations

import math
import re
from decimal import Decimal, DecimalException
from fractions import Fraction
from typing import Any, Final

from moesim.core.limits import BYTES, RATE, TIME_US
from moesim.errors import ConfigError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000

_BYTES = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NUMBER: Final = r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*"
_QUANTITY = re.compile(rf"{_NUMBER}([A-Za-z]*)\s*")
_RATE = re.compile(rf"{_NUMBER}([kKMGT]?i?[Bb])/s(?:ec)?\s*")
_TIME = re.compile(rf"{_NUMBER}(ns|us|µs|μs|ms|s)(/tok(?:en)?)?\s*")
_SHARE = re.compile(r"\s*(?:([0-9]{1,9})\s*/\s*([0-9]{1,9})|([0-9]{1,9}(?:\.[0-9]{1,15})?)\s*%)\s*")
_ROUNDINGS: Final = 1e-12  # of a share: some thousand roundings of a double, and less than a slot of any cache
_IN_US: Final = {
    "ns": Decimal("0.001"), "us": Decimal(1), "µs": Decimal(1), "μs": Decimal(1), "ms": Decimal(1000),
    "s": Decimal(10**6),
}  # fmt: skip
_SHORTEST_US: Final = Decimal("1e-6")


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
    return _checked(_times(match[1], _BYTES[unit]), value, place)


def _times(number: str, unit: Decimal | int) -> Decimal:
    try:
        return Decimal(number.replace("_", "")) * unit
    except DecimalException:  # an exponent beyond its range
        return Decimal("inf")


def parse_rate(value: object, place: str = "rate") -> int:
    """Read a rate in bytes a second.

    >>> parse_rate("25GB/s"), parse_rate("1.5 GiB/s")
    (25000000000, 1610612736)
    """
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{place}: expected a rate such as 25GB/s, got {value!r}; write a number and GB/s, GiB/s or MB/s")
    if match[2].endswith("b"):
        raise ConfigError(f"{place}: expected bytes a second, such as 25GB/s, got bits, {value!r}; divide by 8, and write B")
    rate = _times(match[1], _BYTES[match[2].lower()])
    if not RATE.least <= rate <= RATE.most:
        raise ConfigError(f"{place}: expected a rate {RATE} bytes a second, got {value!r}; correct it")
    return int(rate.to_integral_value())


def parse_time(value: object, place: str = "time") -> Fraction:
    """Read a time above 0 in microseconds, exactly.

    >>> parse_time("14.2ms"), parse_time("60 us")
    (Fraction(14200, 1), Fraction(60, 1))
    """
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[3]:
        got = "a time a token, " if match else ""
        raise ConfigError(f"{place}: expected a time such as 60us or 1.2ms, got {got}{value!r}; write a number and us, ms or s")
    return _us(match, place)


def parse_line(value: object, place: str = "time") -> tuple[Fraction, Fraction]:
    """Read a time that may grow with tokens: microseconds and microseconds a token, exactly.

    >>> parse_line("0.15 ms + 40us/token"), parse_line("60us")
    ((Fraction(150, 1), Fraction(40, 1)), (Fraction(60, 1), Fraction(0, 1)))
    """
    parts = [_TIME.fullmatch(part) for part in value.split("+")] if isinstance(value, str) else [None]
    kinds = [bool(part[3]) for part in parts if part is not None]
    if None in parts or len(set(kinds)) != len(parts):
        raise ConfigError(
            f"{place}: expected a time such as 1.5ms + 400us/token, or one of the two alone, got {value!r}; write numbers and "
            "us, ms or s"
        )
    found = {kind: _us(part, place) for kind, part in zip(kinds, parts, strict=True) if part is not None}
    return found.get(False, Fraction(0)), found.get(True, Fraction(0))


def _us(match: re.Match[str], place: str) -> Fraction:
    us = _times(match[1], _IN_US[match[2]])
    if not _SHORTEST_US <= us <= Decimal(TIME_US.most):
        got = match[0].strip()
        raise ConfigError(f"{place}: expected a time above 0 and of at most {TIME_US.most / 1e6:g} s, got {got!r}; correct it")
    return Fraction(us)


def as_share(value: Any) -> Any:
    """Read a share that is written as a fraction or in percent; leave anything else.

    >>> as_share("1/3"), as_share("12.5 %"), as_share(0.25), as_share("8 GiB")
    (0.3333333333333333, 0.125, 0.25, '8 GiB')
    """
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[2] and not int(match[2])):
        return value
    return float(match[3]) / 100 if match[3] else int(match[1]) / int(match[2])


def slots_of(share: float, n: int) -> int:
    """Count the whole slots of a share of n; k/n is k although no double is exactly k/n.

    >>> slots_of(4 / 12, 12), slots_of(1 - 0.9, 10), slots_of(0.29, 100), slots_of(0.3, 8)
    (4, 1, 29, 2)
    """
    return math.floor(share * n * (1 + _ROUNDINGS))


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
    """Convert microseconds to whole nanoseconds.

    >>> us_to_ns(0.4)
    400
    """
    return round(us * NS_PER_US)


def format_bytes(n: float) -> str:
    """Write bytes for people, from a GB on in both units.

    >>> format_bytes(352_321_536), format_bytes(12 * 2**30)
    ('352 MB', '12.9 GB (12 GiB)')
    """
    return f"{_decimal(n)} ({n / _GIB:.3g} GiB)" if abs(n) >= _GB else _decimal(n)


def format_memory(n: float, *, least: bool = False) -> str:
    """Write the size of memory in binary units; with `least`, rounded up.

    >>> format_memory(12 * 2**30), format_memory(25e9), format_memory(25e9, least=True), format_memory(352_321_536)
    ('12 GiB', '23.28 GiB', '23.29 GiB', '336 MiB')
    """
    size, unit = next(((size, unit) for unit, size in _BINARY.items() if abs(n) >= size), (1, "B"))
    exact = Decimal(n) / size
    written = Decimal(f"{exact:.4g}")
    if least and written < exact:
        written += Decimal(1).scaleb(exact.adjusted() - 3)
    return f"{written.normalize():f} {unit}"


def digits(value: float, n: int = 3) -> str:
    """Write a number in `n` significant digits, never with an exponent.

    >>> digits(1243.2), digits(999.7), digits(0.084), digits(131, 2)
    ('1240', '1000', '0.084', '130')
    """
    return f"{Decimal(f'{value:.{n}g}'):f}"


def format_size(n: float) -> str:
    """Write bytes in one unit, for labels: eighths of a GiB as such.

    >>> format_size(12.5 * 2**30), format_size(12e9), format_size(352_321_536)
    ('12.5 GiB', '12 GB', '352 MB')
    """
    return f"{n / _GIB:g} GiB" if abs(n) >= _GIB and n % (_GIB // 8) == 0 else _decimal(n)


_GB, _GIB = 10**9, 2**30
_BINARY: Final = {"TiB": 2**40, "GiB": _GIB, "MiB": 2**20, "KiB": 2**10}


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
