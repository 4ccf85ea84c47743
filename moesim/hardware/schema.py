"""The file format of a hardware profile, as strict pydantic models.

Every number is ``{value: ..., source: ..., ref|how|why: ...}``; the unit is in its key (``latency_us``, ``bytes_per_s``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from moesim.core.limits import BITS, BYTES, CORES, COUNT, FLOPS, LAUNCHES, POWER_W, RATE, RATE_SHARE, TIME_US, TOKENS, WIDTH
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError, unknown_name
from moesim.hardware.types import OPERATIONS

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


def _from(least: float, expected: str, hint: str) -> AfterValidator:
    """Refuse what is too small to be in the unit of its key."""

    def check(value: float) -> float:
        if value < least:
            raise ValueError(f"expected {expected}, got {value:g}; {hint.format(value)}")
        return value

    return AfterValidator(check)


_IN_BYTES = _from(RATE.least, "bytes per second such as 25e9", "if these are GB/s, write {:g}e9")
_IN_OPERATIONS = _from(FLOPS.least, "operations per second such as 71e12", "if these are TFLOP/s, write {:g}e12")
_STILL = "an activity that stands still never ends"
_NOT_LOST = _from(RATE_SHARE.least, f"a share of at least {RATE_SHARE.least:g}", _STILL)


class Rate(Sourced):
    """Bytes per second of a memory or a copy; a figure in GB/s looks like a modem's."""

    value: Annotated[float, Field(gt=0, le=RATE.most), _IN_BYTES]


class Flops(Sourced):
    """Operations per second."""

    value: Annotated[float, Field(gt=0, le=FLOPS.most), _IN_OPERATIONS]


class Share(Sourced):
    """A number in (0, 1], of at least a millionth."""

    value: Annotated[float, Field(gt=0, le=RATE_SHARE.most), _NOT_LOST]


class Launches(Sourced):
    """Kernels of a part."""

    value: Annotated[int, Field(ge=0, le=LAUNCHES.most)]


class Tokens(Sourced):
    """Rows up to which something holds."""

    value: Annotated[int, Field(ge=0, le=TOKENS.most)]


def _bytes(value: Any) -> int:
    """Read a number of bytes, also written as ``"24 GiB"`` or ``2.9e6``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return parse_bytes(value, "")
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(": ")) from None


class Size(Sourced):
    """A number of bytes, also written as ``"24 GiB"``."""

    value: int

    @field_validator("value", mode="before")
    @classmethod
    def _size(cls, value: Any) -> int:
        return _bytes(value)


class Memory(Size):
    """A number of bytes above 0."""

    @field_validator("value")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("expected a size above 0 bytes, got 0; write for example '24 GiB'")
        return value


_FALL = 0.5  # a kernel may do more rows in less time, where a library changes its method; below this share nothing does
_ROWS_FALL = "no fall below half of an earlier time"
_BYTES_FALL = "times that do not fall as bytes grow"


def _ascending(of: str, most: float, fall: float, expected: str) -> AfterValidator:
    """Refuse measured pairs of a size and microseconds that no machine has."""

    def check(value: list[list[float]]) -> list[list[float]]:
        if len(value) < 2 or any(len(pair) != 2 for pair in value):
            raise ValueError(f"expected at least two pairs [{of}, us], got {_few(value)}")
        sizes = [pair[0] for pair in value]
        if any(n < 1 or n != int(n) for n in sizes) or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(
                f"expected whole, ascending numbers of {of} from 1, got {_few(sizes)}; sort them, and give each once"
            )
        if sizes[-1] > most:
            raise ValueError(f"expected at most {most:g} {of}, got {sizes[-1]:g}; measure less")
        highest = 0.0
        for size, us in value:
            if us > TIME_US.most:
                raise ValueError(f"expected times of at most {TIME_US.most:g} us, got {us:g} at {size:g} {of}; check the unit")
            if us < 0:
                raise ValueError(
                    f"expected times of at least 0 us, got a negative one, {us:g} at {size:g} {of}; measure it again"
                )
            if us < fall * highest:
                raise ValueError(f"expected {expected}, got {us:g} us at {size:g} {of} after {highest:g}; measure it again")
            highest = max(highest, us)
        return value

    return AfterValidator(check)


def _few(values: Sequence[Any]) -> str:
    return str(values) if len(values) <= 8 else f"{str(values[:8])[:-1]}, ... and {len(values) - 8} more]"


class Points(Sourced):
    """Measured pairs of rows and microseconds."""

    value: Annotated[list[list[float]], _ascending("rows", TOKENS.most, _FALL, _ROWS_FALL)]


class BytePoints(Sourced):
    """Measured pairs of bytes and microseconds of a copy; more bytes never take less time."""

    value: Annotated[list[list[float]], _ascending("bytes", BYTES.most, 1, _BYTES_FALL)]


class Shape(Strict):
    """Shape of an expert that was measured."""

    hidden: Annotated[int, Field(gt=0, le=WIDTH.most)]
    intermediate: Annotated[int, Field(gt=0, le=WIDTH.most)]
    bits: Annotated[float, Field(ge=BITS.least, le=BITS.most)]


_FORMS: dict[str, tuple[str, ...]] = {
    "linear": ("base_us", "per_token_us"),
    "flat_linear": ("flat_us", "knee_tokens", "per_token_us"),
    "points": ("points",),
}


def _check_range(sizes: list[float], first: int, last: int) -> None:
    """Refuse a range that the points do not cover, and points that it does not use."""
    if not sizes[0] <= first <= last <= sizes[-1]:
        ends = [sizes[0], sizes[-1]]
        raise ValueError(f"expected a range within the points {ends}, got {[first, last]}; narrow it or measure more")
    unused = sizes[:1] if sizes[1] <= first else sizes[-1:] if sizes[-2] >= last else []
    if unused and not first <= unused[0] <= last:
        raise ValueError(
            f"expected points for the range {[first, last]} only, got one at {unused[0]:g}, which nothing uses; widen the range "
            "or remove it"
        )


_Rows = Annotated[int, Field(le=TOKENS.most)]


class Curve(Strict):
    """A time as a function of rows, in one of three forms, within the range it holds for."""

    form: Literal["linear", "flat_linear", "points"]
    range: tuple[_Rows, _Rows]
    base_us: Time | None = None
    per_token_us: Time | None = None
    flat_us: Time | None = None
    knee_tokens: Tokens | None = None
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
                remedy = f"add {key}" if key in needed else "remove it"
                raise ValueError(f"expected the keys {', '.join(needed)} with form: {self.form}, got {got}; {remedy}")
        first, last = self.range
        if not 1 <= first <= last:
            raise ValueError(
                f"expected range: [first, last] with 1 <= first <= last, got {[first, last]}; exchange or correct them"
            )
        if self.points is not None:
            _check_range([pair[0] for pair in self.points.value], first, last)
        return self


class ExpertCurve(Curve):
    """Time of one expert of a shape on a device."""

    shape: Shape
    first_extra_us: Time | None = None


class PartCurve(Curve):
    """Time of a part of a layer of one model on a device (instead of the roofline)."""

    model: str
    part: Literal["attention", "context", "dense", "shared", "head", "embedding", "leading"]


def _check_together(part: Strict, *keys: str) -> None:
    missing = [key for key in keys if getattr(part, key) is None]
    if len(missing) == 1:
        raise ValueError(f"{missing[0]}: expected {' and '.join(keys)} together, got one; add {missing[0]}")


class ReadRate(Strict):
    """Rate at which experts of one size are read."""

    bytes: Annotated[int, Field(ge=1, le=BYTES.most)]
    bytes_per_s: Rate

    @field_validator("bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> int:
        return _bytes(value)


_SIZES_MOST = 64  # points of one curve


class ExpertCostFile(Strict):
    """Time of an expert of any shape, linear in its rows; see `moesim.hardware.costs.curves`."""

    per_expert_us: Time | None = None
    per_row_us: Time | None = None
    read_bytes_per_s: Rate | None = None
    read_share: Share | None = None  # instead: of the device's memory rate
    read_rates: list[ReadRate] = Field(default_factory=list)
    few_row_flops: Flops
    many_row_flops: Flops | None = None
    crossover_rows: Tokens | None = None

    @model_validator(mode="after")
    def _one_curve(self) -> ExpertCostFile:
        points = [(point.bytes, point.bytes_per_s.value) for point in self.read_rates]
        if points and self.read_bytes_per_s is not None:
            raise ValueError("read_rates: expected either read_bytes_per_s or read_rates, got both; remove one")
        if self.read_share is not None and (points or self.read_bytes_per_s is not None):
            raise ValueError("read_share: expected no rate next to it, of the memory's rate, got one; remove one")
        if len(points) > _SIZES_MOST:
            raise ValueError(f"read_rates: expected at most {_SIZES_MOST} sizes, got {len(points)}; keep fewer")
        if len(points) == 1:
            raise ValueError("read_rates: expected at least two sizes, got one; write it as read_bytes_per_s, or add a size")
        for (n0, rate0), (n1, rate1) in pairwise(points):
            if n1 <= n0:
                raise ValueError(f"read_rates: expected ascending bytes, got {n1} after {n0}; sort them, and give each once")
            if n1 / rate1 < _FALL * n0 / rate0:  # an end of an interval may fall a little
                raise ValueError(
                    f"read_rates: expected no fall below half of an earlier time, got {1e6 * n1 / rate1:g} us for {n1} bytes "
                    f"after {1e6 * n0 / rate0:g} us for {n0}; measure it again"
                )
        return self

    @model_validator(mode="after")
    def _both_or_neither(self) -> ExpertCostFile:
        _check_together(self, "many_row_flops", "crossover_rows")
        if self.crossover_rows is not None and self.crossover_rows.value < 1:
            raise ValueError("crossover_rows: expected at least 1 row, got 0; the first row is in reading")
        return self


PARTS = ("embedding", "leading", "attention", "dense", "shared", "expert", "predict", "head")
"""Parts of the work of a step whose kernel launches a device may state."""


def _each_once(value: list[Any]) -> list[Any]:
    twice = [one for place, one in enumerate(value) if one in value[:place]]
    if twice:
        raise ValueError(f"expected each once, got {twice[0]!r} twice; remove one")
    return value


Cores = Annotated[list[Annotated[int, Field(ge=0, le=CORES.most)]], Field(min_length=1), AfterValidator(_each_once)]


_OF_ANY = ("kind", "role", "host", "memory_bytes", "idle_w", "busy_w")
"""Keys of a device that a disk may have, too."""


class DeviceFile(Strict):
    """One device. A disk has no rates of its own: its links do."""

    kind: Literal["gpu", "cpu", "disk"]
    role: Literal["accelerator", "host", "storage"] | None = None
    host: str = "host0"
    cores: Cores | None = None
    memory_of: str | None = None  # the host whose memory it shares
    memory_bytes: Memory
    workspace_bytes: Size | None = None
    memory_bytes_per_s: Rate | None = None
    flops: Flops | None = None
    launch_us: Time | None = None
    launches: dict[str, Launches] = Field(default_factory=dict)
    operations: Literal["llama.cpp", "llama.cpp-unfused"] | None = None
    operation_us: Time | None = None
    token_us: Time | None = None
    latent_attention_us: Time | None = None
    router_us: Time | None = None
    first_extra_us: Time | None = None
    wake_us: Time | None = None
    more_rows: Points | None = None
    expert_cost: ExpertCostFile | None = None
    experts: list[ExpertCurve] = Field(default_factory=list)
    parts: list[PartCurve] = Field(default_factory=list)
    predict: dict[str, Curve] = Field(default_factory=dict)
    idle_w: Power | None = None
    busy_w: Power | None = None

    @model_validator(mode="after")
    def _fits_its_kind(self) -> DeviceFile:
        given = [key for key in type(self).model_fields if key not in _OF_ANY and getattr(self, key)]
        if self.kind == "disk" and given:
            raise ValueError(f"{given[0]}: a disk stores and does not compute: expected no {given[0]}, got one; remove it")
        for key in ("memory_bytes_per_s", "flops"):
            if getattr(self, key) is None and self.kind != "disk":
                raise ValueError(f"{key}: expected this key, got nothing; add it")
        if self.role is not None and (self.role == "storage") != (self.kind == "disk"):
            kind = "a disk" if self.kind == "disk" else f"a {self.kind.upper()}"
            known = "storage" if self.kind == "disk" else "accelerator or host"
            raise ValueError(f"role: expected {known} for {kind}, got '{self.role}'; correct kind or role")
        if self.kind == "gpu" and self.cores:
            raise ValueError(f"cores: expected none for a GPU, got {self.cores}; a GPU has no processor cores: remove it")
        if self.kind == "gpu" and self.expert_cost and self.expert_cost.read_rates:
            raise ValueError("expert_cost.read_rates: expected none for a GPU, got some; write one read_bytes_per_s")
        return self

    @model_validator(mode="after")
    def _is_possible(self) -> DeviceFile:
        taken, memory = self.workspace_bytes, self.memory_bytes.value
        if taken and taken.value >= memory:
            raise ValueError(f"workspace_bytes: expected less than memory_bytes, {memory}, got {taken.value}; correct one")
        if self.idle_w and self.busy_w and self.idle_w.value > self.busy_w.value:
            raise ValueError(f"idle_w: expected at most busy_w, {self.busy_w.value:g}, got {self.idle_w.value:g}; exchange them")
        return self

    @model_validator(mode="after")
    def _counted(self) -> DeviceFile:
        _check_together(self, "operations", "operation_us")
        stated = "launches" if self.launches else "launch_us" if self.launch_us else ""
        if self.operations is not None and stated:
            raise ValueError(f"{stated}: expected none next to operations, counted from the model, got some; remove one")
        return self

    @model_validator(mode="after")
    def _one_start(self) -> DeviceFile:
        launches = self.launches.get("expert")
        if self.expert_cost is not None and launches is not None and launches.value:
            raise ValueError(
                f"launches.expert: expected none next to expert_cost, which has per_expert_us, got {launches.value}; remove it"
            )
        return self

    @field_validator("launches")
    @classmethod
    def _parts(cls, value: dict[str, Launches]) -> dict[str, Launches]:
        for key in value:
            if key not in PARTS:
                raise ValueError(unknown_name("part", key, PARTS))
        return value


class TransferFile(Strict):
    """Time of a copy: latency + bytes / rate, or measured points."""

    latency_us: Time | None = None
    bytes_per_s: Rate | None = None
    points: BytePoints | None = None

    @model_validator(mode="after")
    def _one_form(self) -> TransferFile:
        if self.points is not None:
            if self.latency_us or self.bytes_per_s:
                raise ValueError("expected either points, or latency_us and bytes_per_s, got both; remove one")
        elif not (self.latency_us and self.bytes_per_s):
            missing = " and ".join(key for key in ("latency_us", "bytes_per_s") if getattr(self, key) is None)
            raise ValueError(f"expected latency_us and bytes_per_s, or points, got no {missing}; add it")
        return self


class ActivationFile(TransferFile):
    """Time of activations crossing; with ``share_link`` they queue behind weights."""

    share_link: bool = False


class LinkFile(Strict):
    """One directed link; ``any`` stands for every kind of transfer."""

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
            raise ValueError("expected at least one of pinned, pageable, chunked, any, got none; add it")
        return self


class PairFile(Strict):
    """Rates of two activities while they overlap, as shares of their rates alone."""

    a: str
    b: str
    a_rate: Share
    b_rate: Share


class ProfileFile(Strict):
    """A whole profile. ``anchors`` holds YAML anchors only; nothing reads it."""

    name: str
    description: str
    corrections: list[str] = Field(default_factory=list)
    machine: dict[str, str] = Field(default_factory=dict)
    engine: str | None = None
    anchors: Any = None
    compute: str
    backing: Annotated[list[str], Field(min_length=1), AfterValidator(_each_once)]
    devices: dict[str, DeviceFile] = Field(min_length=1)
    links: dict[str, LinkFile] = Field(default_factory=dict)
    contention: list[PairFile] = Field(default_factory=list)
    host_expert_us: Time | None = None
    host_shared: Switch | None = None
    host_us: dict[Literal[tuple(OPERATIONS)], Time] = Field(default_factory=dict)  # type: ignore[valid-type]
    platform_w: Power | None = None
