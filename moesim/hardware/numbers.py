"""Sourced numbers of a hardware profile, and the bounds of each kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moesim.core.limits import BYTES, COUNT, FLOPS, LAUNCHES, POWER_W, RATE, RATE_SHARE, TIME_US, TOKENS
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError

_EIGHT_OF_TEN, _CODED = Fraction(8, 10), Fraction(128, 130)  # bits on the wire that are data, up to generation 2 and from 3 on

LANE: Final = {
    gen: gigatransfers * coded * 10**9 / 8
    for gen, gigatransfers, coded in (
        (1, Fraction(5, 2), _EIGHT_OF_TEN), (2, 5, _EIGHT_OF_TEN), (3, 8, _CODED), (4, 16, _CODED), (5, 32, _CODED)
    )
}  # fmt: skip
"""Bytes a second of one lane and direction by generation (PCI-SIG: 2.5 to 32 GT/s, 8b/10b, then 128b/130b)."""


_PROOF = {
    "measured": ("date", "method", "repeats", "spread"), "published": ("ref",), "derived": ("how",),
    "identified": ("how", "interval"), "spec-sheet": ("ref",), "assumed": ("why",),
}  # fmt: skip
_UNPROVEN = {"source": "assumed", "why": "an end of an interval"}
_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")


class Strict(BaseModel):
    """Base of the format: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Sourced(Strict):
    """A number with its source; subclasses bound the number."""

    source: Literal["measured", "published", "derived", "identified", "spec-sheet", "assumed"]
    ref: str | None = None
    how: str | None = None
    why: str | None = None
    date: str | None = None
    method: str | None = None
    repeats: Annotated[int, Field(ge=1, le=COUNT.most)] | None = None
    spread: str | None = None
    interval: tuple[float, float] | None = None

    @field_validator("interval", mode="before")
    @classmethod
    def _ends(cls, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(end) in (int, float) for end in value):
            raise ValueError(f"expected [least, most], two numbers in the unit of the value, got {value!r}")
        return tuple(float(end) for end in value)

    @field_validator("date")
    @classmethod
    def _day(cls, value: str | None) -> str | None:
        if value is not None and not _DATE.fullmatch(value):
            raise ValueError(f"expected a date such as 2025-11-20, got '{value}'")
        return value

    @model_validator(mode="after")
    def _has_proof(self) -> Sourced:
        missing = [key for key in _PROOF[self.source] if not getattr(self, key)]
        if missing:
            raise ValueError(f"expected {' and '.join(missing)} next to source: {self.source}, got nothing; add it")
        return self

    @model_validator(mode="after")
    def _within(self) -> Sourced:
        value = getattr(self, "value", None)
        if self.interval is None:
            return self
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("interval: expected a number next to it, got points or a switch; remove it")
        least, most = self.interval
        if not 0 <= least <= value <= most:
            raise ValueError(f"interval: expected [least, most] with 0 <= least <= {value:g} <= most, got [{least:g}, {most:g}]")
        for end in self.interval:  # each end is a value that a run may have
            type(self)(**(self.__dict__ | {"value": type(value)(end), "interval": None, **_UNPROVEN}))
        return self

    def proof(self) -> str:
        """Return the words of the source in one string."""
        names = ("ref", "how", "why", "date", "method", "spread")
        said = [str(getattr(self, name)).replace("; ", ", ") for name in names if getattr(self, name)]
        if self.repeats is not None:
            said.append(f"{self.repeats} repeats")
        return "; ".join(said)


class Switch(Sourced):
    """Yes or no."""

    value: bool


class Time(Sourced):
    """Microseconds."""

    value: Annotated[float, Field(ge=TIME_US.least, le=TIME_US.most)]


class Power(Sourced):
    """Watts."""

    value: Annotated[float, Field(ge=POWER_W.least, le=POWER_W.most)]


class Rate(Sourced):
    """Bytes per second of a memory or a copy; a figure in GB/s looks like a modem's."""

    value: Annotated[float, Field(gt=0, le=RATE.most)]

    @field_validator("value")
    @classmethod
    def _in_bytes(cls, value: float) -> float:
        if value < RATE.least:
            raise ValueError(f"expected bytes per second such as 25e9, got {value:g}; if these are GB/s, write {value:g}e9")
        return value


class Flops(Sourced):
    """Operations per second."""

    value: Annotated[float, Field(gt=0, le=FLOPS.most)]

    @field_validator("value")
    @classmethod
    def _in_operations(cls, value: float) -> float:
        if value < FLOPS.least:
            hint = f"if these are TFLOP/s, write {value:g}e12"
            raise ValueError(f"expected operations per second such as 71e12, got {value:g}; {hint}")
        return value


class Share(Sourced):
    """A number in (0, 1], of at least a millionth."""

    value: Annotated[float, Field(gt=0, le=RATE_SHARE.most)]

    @field_validator("value")
    @classmethod
    def _not_lost(cls, value: float) -> float:
        if value < RATE_SHARE.least:
            least = RATE_SHARE.least
            raise ValueError(f"expected a share of at least {least:g}, got {value:g}; an activity that stands still never ends")
        return value


class Launches(Sourced):
    """Kernels of a part."""

    value: Annotated[int, Field(ge=0, le=LAUNCHES.most)]


class Tokens(Sourced):
    """Rows up to which something holds."""

    value: Annotated[int, Field(ge=0, le=TOKENS.most)]


class Size(Sourced):
    """A number of bytes, also written as ``"24 GiB"``."""

    value: int

    @field_validator("value", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return parse_bytes(value, "")
        except ConfigError as error:
            raise ValueError(str(error).removeprefix(": ")) from None


class Memory(Size):
    """A number of bytes above 0."""

    @field_validator("value")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("expected a size above 0 bytes, got 0; write for example '24 GiB'")
        return value


_FALL = 0.5  # a kernel may do more rows in less time, where a library changes its method; below this share nothing does


def _check_pairs(value: list[list[float]], of: str, most: float) -> None:
    if len(value) < 2 or any(len(pair) != 2 for pair in value):
        raise ValueError(f"expected at least two pairs [{of}, us], got {_few(value)}")
    sizes = [pair[0] for pair in value]
    if any(n < 1 or n != int(n) for n in sizes) or any(b <= a for a, b in pairwise(sizes)):
        raise ValueError(f"expected whole, ascending numbers of {of} from 1, got {_few(sizes)}; sort them, and give each once")
    if sizes[-1] > most:
        raise ValueError(f"expected at most {most:g} {of}, got {sizes[-1]:g}; measure less")
    for size, us in value:
        if us > TIME_US.most:
            raise ValueError(f"expected times of at most {TIME_US.most:g} us, got {us:g} at {size:g} {of}; check the unit")
        if us < 0:
            raise ValueError(f"expected times of at least 0 us, got a negative one, {us:g} at {size:g} {of}; measure it again")


def _few(values: Sequence[Any]) -> str:
    return str(values) if len(values) <= 8 else f"{str(values[:8])[:-1]}, ... and {len(values) - 8} more]"


class Points(Sourced):
    """Measured pairs of rows and microseconds."""

    value: list[list[float]]

    @field_validator("value")
    @classmethod
    def _ascending(cls, value: list[list[float]]) -> list[list[float]]:
        _check_pairs(value, "rows", TOKENS.most)
        highest = 0.0
        for rows, us in value:
            if us < _FALL * highest:
                raise ValueError(
                    f"expected no fall below half of an earlier time, got {us:g} us at {rows:g} rows after {highest:g}; "
                    "measure it again"
                )
            highest = max(highest, us)
        return value


class BytePoints(Sourced):
    """Measured pairs of bytes and microseconds of a copy; more bytes never take less time."""

    value: list[list[float]]

    @field_validator("value")
    @classmethod
    def _ascending(cls, value: list[list[float]]) -> list[list[float]]:
        _check_pairs(value, "bytes", BYTES.most)
        for (_, before), (size, us) in pairwise(value):
            if us < before:
                raise ValueError(
                    f"expected times that do not fall as bytes grow, got {us:g} us at {size:g} bytes after {before:g}; "
                    "measure it again"
                )
        return value
