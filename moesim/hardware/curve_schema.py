"""The file format of times in a hardware profile, as strict pydantic models: curves, and experts of any shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from moesim.core.limits import BITS, TOKENS, WIDTH
from moesim.hardware.numbers import Flops, Points, Rate, Strict, Time, Tokens


class Shape(Strict):
    """What an expert curve was measured for."""

    hidden: Annotated[int, Field(gt=0, le=WIDTH.most)]
    intermediate: Annotated[int, Field(gt=0, le=WIDTH.most)]
    bits: Annotated[float, Field(ge=BITS.least, le=BITS.most)]


_FORMS: dict[str, tuple[str, ...]] = {
    "linear": ("base_us", "per_token_us"),
    "flat_linear": ("flat_us", "knee_tokens", "per_token_us"),
    "points": ("points",),
}


def _check_range(sizes: list[float], first: int, last: int) -> None:
    """Refuse a range that the points do not cover, and points that nothing in the range uses."""
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


class ExpertCostFile(Strict):
    """Time of an expert of any shape, linear in its rows; see `moesim.hardware.costs.experts`."""

    per_expert_us: Time | None = None
    per_row_us: Time | None = None
    read_bytes_per_s: Rate | None = None
    few_row_flops: Flops
    many_row_flops: Flops | None = None
    crossover_rows: Tokens | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> ExpertCostFile:
        if (self.many_row_flops is None) != (self.crossover_rows is None):
            missing = "crossover_rows" if self.crossover_rows is None else "many_row_flops"
            raise ValueError(f"{missing}: expected many_row_flops and crossover_rows together, got one; add {missing}")
        if self.crossover_rows is not None and self.crossover_rows.value < 1:
            raise ValueError("crossover_rows: expected at least 1 row, got 0; the first row is in reading")
        return self
