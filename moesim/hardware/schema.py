"""The file format of a hardware profile, as strict pydantic models.

Every number is written ``{value: ..., source: ..., ref|how|why: ...}``; the unit is in its key (``latency_us``,
``bytes_per_s``). Only `moesim.hardware.build` uses these models; the rest of moesim sees its plain dataclasses.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from moesim.errors import ConfigError, unknown_name
from moesim.units import parse_bytes

PARTS = ("embedding", "leading", "attention", "dense", "shared", "expert", "predict", "head")
"""Parts of the work of a step whose kernel launches a device may state."""

_PROOF = {
    "measured": ("date", "method", "repeats", "spread"),
    "published": ("ref",),
    "derived": ("how",),
    "spec-sheet": ("ref",),
    "assumed": ("why",),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Sourced(_Strict):
    """A number with where it comes from; the subclasses say what the number may be."""

    source: Literal["measured", "published", "derived", "spec-sheet", "assumed"]
    ref: str | None = None
    how: str | None = None
    why: str | None = None
    date: str | None = None
    method: str | None = None
    repeats: Annotated[int, Field(ge=1)] | None = None
    spread: str | None = None

    @model_validator(mode="after")
    def _has_proof(self) -> Sourced:
        missing = [key for key in _PROOF[self.source] if not getattr(self, key)]
        if missing:
            raise ValueError(f"expected {' and '.join(missing)} beside source: {self.source}, got nothing; add it")
        return self

    def proof(self) -> str:
        """Say in one string where the number comes from."""
        names = ("ref", "how", "why", "date", "method", "spread")
        said = [str(getattr(self, name)) for name in names if getattr(self, name)]
        if self.repeats is not None:
            said.append(f"{self.repeats} repeats")
        return "; ".join(said)


class Amount(Sourced):
    """A number of at least 0, for times and powers."""

    value: Annotated[float, Field(ge=0)]


class Rate(Sourced):
    """A number above 0, for rates."""

    value: Annotated[float, Field(gt=0)]


class Share(Sourced):
    """A number in (0, 1]."""

    value: Annotated[float, Field(gt=0, le=1)]


class Count(Sourced):
    """A whole number of at least 0."""

    value: Annotated[int, Field(ge=0)]


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


_FALL = 0.5
"""A kernel may do more rows in less time, where a library changes its method; below this share nothing does."""


def _check_pairs(value: list[list[float]], of: str) -> list[list[float]]:
    if len(value) < 2 or any(len(pair) != 2 for pair in value):
        raise ValueError(f"expected at least two pairs [{of}, us], got {value}")
    sizes = [pair[0] for pair in value]
    if any(n < 1 or n != int(n) for n in sizes) or any(b <= a for a, b in pairwise(sizes)):
        raise ValueError(f"expected whole, ascending numbers of {of} from 1, got {sizes}")
    if any(pair[1] < 0 for pair in value):
        raise ValueError("expected times of at least 0 us, got a negative one")
    return value


class Points(Sourced):
    """Measured pairs of rows and microseconds."""

    value: list[list[float]]

    @field_validator("value")
    @classmethod
    def _ascending(cls, value: list[list[float]]) -> list[list[float]]:
        _check_pairs(value, "rows")
        highest = 0.0
        for rows, us in value:
            if us < _FALL * highest:
                raise ValueError(f"expected no fall below half of an earlier time, got {us:g} us at {rows:g} rows after {highest:g}")
            highest = max(highest, us)
        return value


class BytePoints(Sourced):
    """Measured pairs of bytes and microseconds of a copy; more bytes never take less time."""

    value: list[list[float]]

    @field_validator("value")
    @classmethod
    def _ascending(cls, value: list[list[float]]) -> list[list[float]]:
        _check_pairs(value, "bytes")
        for (_, before), (size, us) in pairwise(value):
            if us < before:
                raise ValueError(f"expected times that do not fall as bytes grow, got {us:g} us at {size:g} bytes after {before:g}")
        return value


class Shape(_Strict):
    """What an expert curve was measured for."""

    hidden: Annotated[int, Field(gt=0)]
    intermediate: Annotated[int, Field(gt=0)]
    bits: Annotated[float, Field(gt=0)]


_FORMS: dict[str, tuple[str, ...]] = {
    "linear": ("base_us", "per_token_us"),
    "flat_linear": ("flat_us", "knee_tokens", "per_token_us"),
    "points": ("points",),
}


class Curve(_Strict):
    """A time as a function of rows, in one of three forms, within the range it holds for."""

    form: Literal["linear", "flat_linear", "points"]
    range: tuple[int, int]
    base_us: Amount | None = None
    per_token_us: Amount | None = None
    flat_us: Amount | None = None
    knee_tokens: Count | None = None
    points: Points | None = None

    @field_validator("range", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _complete(self) -> Curve:
        needed = _FORMS[self.form]
        for key in ("base_us", "per_token_us", "flat_us", "knee_tokens", "points"):
            if (key in needed) != (getattr(self, key) is not None):
                got = "nothing" if key in needed else f"{key} as well"
                raise ValueError(f"expected the keys {', '.join(needed)} with form: {self.form}, got {got}")
        if not 1 <= self.range[0] <= self.range[1]:
            raise ValueError(f"expected range: [first, last] with 1 <= first <= last, got {list(self.range)}")
        if self.points is not None:
            ends = self.points.value[0][0], self.points.value[-1][0]
            if not ends[0] <= self.range[0] <= self.range[1] <= ends[1]:
                raise ValueError(f"expected a range within the points {list(ends)}, got {list(self.range)}")
        return self


Cores = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class ExpertCurve(Curve):
    """Time of one expert of a shape on a device."""

    shape: Shape
    first_extra_us: Amount | None = None


class PartCurve(Curve):
    """Time of a part of a layer of one model on a device (instead of the roofline)."""

    model: str
    part: Literal["attention", "context", "dense", "shared", "head", "embedding", "leading"]


class DeviceFile(_Strict):
    """One device. A disk has no rates of its own: its links do."""

    kind: Literal["gpu", "cpu", "disk"]
    role: Literal["accelerator", "host", "storage"] | None = None
    host: str = "host0"
    cores: Cores | None = None
    memory_bytes: Size
    workspace_bytes: Size | None = None
    memory_bytes_per_s: Rate | None = None
    flops: Rate | None = None
    launch_us: Amount | None = None
    launches: dict[str, Count] = Field(default_factory=dict)
    router_us: Amount | None = None
    first_extra_us: Amount | None = None
    experts: list[ExpertCurve] = Field(default_factory=list)
    parts: list[PartCurve] = Field(default_factory=list)
    predict: dict[str, Curve] = Field(default_factory=dict)
    idle_w: Amount | None = None
    busy_w: Amount | None = None

    @model_validator(mode="after")
    def _rates(self) -> DeviceFile:
        for key in ("memory_bytes_per_s", "flops"):
            if (getattr(self, key) is None) != (self.kind == "disk"):
                raise ValueError(
                    f"a disk stores and does not compute: expected no {key}, got one"
                    if self.kind == "disk"
                    else f"{key}: expected this key, got nothing; add it"
                )
        if self.role is not None and (self.role == "storage") != (self.kind == "disk"):
            raise ValueError(f"role: expected storage for a disk, accelerator or host for others, got {self.role}")
        return self

    @field_validator("launches")
    @classmethod
    def _parts(cls, value: dict[str, Count]) -> dict[str, Count]:
        for key in value:
            if key not in PARTS:
                raise ValueError(unknown_name("part", key, PARTS))
        return value


class TransferFile(_Strict):
    """Time of a copy: latency + bytes / rate, or measured points."""

    latency_us: Amount | None = None
    bytes_per_s: Rate | None = None
    points: BytePoints | None = None

    @model_validator(mode="after")
    def _one_form(self) -> TransferFile:
        if self.points is not None:
            if self.latency_us or self.bytes_per_s:
                raise ValueError("expected either points, or latency_us and bytes_per_s, got both")
        elif not (self.latency_us and self.bytes_per_s):
            missing = " and ".join(key for key in ("latency_us", "bytes_per_s") if getattr(self, key) is None)
            raise ValueError(f"expected latency_us and bytes_per_s, or points, got no {missing}; add it")
        return self


class ActivationFile(TransferFile):
    """Time of activations crossing; with ``share_link`` they queue behind weights."""

    share_link: bool = False


class LinkFile(_Strict):
    """One directed link. ``any`` stands for every kind of transfer, where there is no difference (a network)."""

    medium: str | None = None
    cores: Cores | None = None
    pinned: TransferFile | None = None
    pageable: TransferFile | None = None
    chunked: TransferFile | None = None
    any: TransferFile | None = None
    activation: ActivationFile | None = None

    @model_validator(mode="after")
    def _some_curve(self) -> LinkFile:
        if not (self.pinned or self.pageable or self.chunked or self.any):
            raise ValueError("expected at least one of pinned, pageable, chunked, any, got none")
        return self


class PairFile(_Strict):
    """Rates of two activities while they overlap, as shares of their rates alone."""

    a: str
    b: str
    a_rate: Share
    b_rate: Share


class ProfileFile(_Strict):
    """A whole profile. ``anchors`` holds YAML anchors only; nothing reads it."""

    name: str
    description: str
    corrections: list[str] = Field(default_factory=list)
    machine: dict[str, str] = Field(default_factory=dict)
    anchors: Any = None
    compute: str
    backing: list[str] = Field(min_length=1)
    devices: dict[str, DeviceFile] = Field(min_length=1)
    links: dict[str, LinkFile] = Field(default_factory=dict)
    contention: list[PairFile] = Field(default_factory=list)
    platform_w: Amount | None = None


# ------------------------------------------------------------------------------------------------------------- places


def _models_in(annotation: Any) -> list[Any]:
    """Look through Optional, Annotated and friends for the type that holds something."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models_in(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [inner for arg in get_args(annotation) for inner in _models_in(arg)]
    return [] if annotation is type(None) else [annotation]


def type_at(loc: Sequence[str | int], root: Any = ProfileFile) -> Any:
    """Find the annotation of a place in a profile, or None if the format has no such place."""
    here = root
    for step in loc:
        candidates = _models_in(here)
        here = None
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found = candidate.model_fields.get(str(step))
                here = found.annotation if found else None
            elif get_origin(candidate) is dict:
                here = get_args(candidate)[1]
            elif get_origin(candidate) is list:
                here = get_args(candidate)[0]
            if here is not None:
                break
        if here is None:
            return None
    return here


def keys_at(loc: Sequence[str | int]) -> list[str]:
    """Name the keys a place in a profile may have."""
    for candidate in _models_in(type_at(loc)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return list(candidate.model_fields)
    return []


def is_number(loc: Sequence[str | int]) -> bool:
    """Tell whether the format has a sourced number at this place."""
    found = _models_in(type_at(loc))
    return any(isinstance(kind, type) and issubclass(kind, Sourced) for kind in found)
