"""Observed speeds: one row of a CSV table each, strictly read, or what llama-bench prints."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moesim.core.limits import SPEED, TOKENS
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import first_problem

UNITS: Final = ("tokens/s", "tokens/s/sequence", "ms/token", "s", "ratio:ROW")
"""Units of a value: of the whole batch; of one sequence; between two tokens of a sequence; of a whole prefill or decode; or the
speed over that of another row."""

REQUIRED: Final = ("model", "setting", "value", "unit")
_RATIO: Final = "ratio:"


class Observation(BaseModel):
    """One observed speed.

    Attributes
    ----------
    row : str
        Its name; its number in the table if it has none.
    model : str
        Name, path of a config.json, or ``{base: NAME, field: value}``.
    bits : str
        Bits per weight, a name such as ``Q4_K_M``, ``EXPERTS/REST``, or several joined by ``|`` where it is not known; empty: the
        model's.
    setting : str
        What the engine was told: ``n_cpu_moe=24``, ``ngl=0``, ``all_cpu``, ``policy=lru cache=0.5`` and the like.
    batch : int
        Sequences at once.
    context : int
        Tokens before the first decoded one; tokens of the prompt for a prefill.
    decode : int
        Tokens decoded.
    ubatch : int
        Most tokens of a prefill step.
    value : float
        As printed.
    unit : str
        One of `UNITS`.
    spread : float or None
        One standard deviation, in the unit of the value.
    kind : {"decode", "prefill"}
    role : {"identification", "check"}
        Whether it may move constants.
    block : str
        What it belongs to for leave-one-out; empty: its model, bits and kind of setting.
    source : str
        Where it is from.
    alias : bool
        More layers than the model has mean all of them, as in engines' output.
    place : str
        File and line, for messages.
    told : tuple of (str, str)
        What else an engine's output says of the row: where two rows of one setting differ in it, a message names it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    row: str
    model: Annotated[str, Field(min_length=1)]
    bits: str = ""
    setting: Annotated[str, Field(min_length=1)]
    batch: Annotated[int, Field(ge=1, le=4096)] = 1
    context: Annotated[int, Field(ge=0, le=TOKENS.most)] = 0
    decode: Annotated[int, Field(ge=1, le=TOKENS.most)] = 128
    ubatch: Annotated[int, Field(ge=1, le=TOKENS.most)] = 512
    value: float
    unit: str
    spread: Annotated[float, Field(ge=0)] | None = None
    kind: Literal["decode", "prefill"] = "decode"
    role: Literal["identification", "check"] = "identification"
    block: str = ""
    source: str = ""
    alias: bool = False
    place: str = ""
    told: tuple[tuple[str, str], ...] = ()

    @field_validator("value")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(f"expected a value above 0, got {value:g}; a speed or time is positive: correct it")
        if not SPEED.hold(value):
            raise ValueError(f"expected a speed or time {SPEED}, got {value:g}; check the number and its unit")
        return value

    @field_validator("unit")
    @classmethod
    def _known(cls, unit: str) -> str:
        if not unit:
            raise ValueError(f"expected a unit, got nothing; write one of {', '.join(UNITS)}")
        if unit not in UNITS[:-1] and not (unit.startswith(_RATIO) and len(unit) > len(_RATIO)):
            raise ValueError(unknown_name("unit", unit, UNITS))
        return unit

    @model_validator(mode="after")
    def _whole(self) -> Observation:
        if self.kind == "prefill" and self.context < 1:
            raise ValueError("context: expected the tokens of the prompt for a prefill, got 0; give them")
        if self.kind == "prefill" and self.unit == "ms/token":
            raise ValueError("unit: expected tokens/s or s for a prefill, got ms/token; convert it")
        if self.spread is not None and self.spread > self.value:
            raise ValueError(
                f"spread: expected at most the value, {self.value:g}, got {self.spread:g}; it is one standard deviation, in the "
                "unit of the value"
            )
        return self

    @property
    def of(self) -> str:
        """Name of the row that a ratio refers to; empty for others."""
        return self.unit.removeprefix(_RATIO) if self.unit.startswith(_RATIO) else ""

    @property
    def log_time(self) -> float:
        """Logarithm of the time, ns, of a decode step or a whole prefill; of a ratio, minus that of the speeds' ratio."""
        if self.of:
            return -math.log(self.value)
        tokens = self.batch * (self.context if self.kind == "prefill" else 1)
        if self.unit == "tokens/s":
            seconds = tokens / self.value
        elif self.unit == "tokens/s/sequence":
            seconds = tokens / self.batch / self.value
        elif self.unit == "ms/token":
            seconds = self.value / 1e3
        else:
            seconds = self.value / (self.decode if self.kind == "decode" else 1)
        return math.log(seconds * 1e9)

    def in_unit(self, log_time: float) -> float:
        """Give a predicted logarithm of a time in the unit of the row."""
        return self.value * math.exp((self.log_time - log_time) * (-1 if self.unit in ("ms/token", "s") else 1))


NOT_COLUMNS: Final = ("alias", "place", "told")
COLUMNS: Final = tuple(name for name in Observation.model_fields if name not in NOT_COLUMNS)


def observation(values: dict[str, Any]) -> Observation:
    """Make an observation; what is wrong is told with its place. Raises `ConfigError`."""
    try:
        return Observation(**values)
    except ValidationError as error:
        told = first_problem(error, Observation)
        comma = re.search(r"got '(\d+),(\d+)'", told)
        remedy = f"; write {comma[1]}.{comma[2]}" if comma else "" if "; " in told else "; correct it"
        raise ConfigError(f"{values.get('place') or 'observation'}: {told}{remedy}") from None


def check_rows(rows: Sequence[Observation]) -> None:
    """Refuse names that occur twice, and ratios to nothing, by `ConfigError`."""
    names: dict[str, Observation] = {}
    for one in rows:
        if one.row in names:
            raise ConfigError(f"{one.place}: row: expected each name once, got '{one.row}' again; rename one")
        names[one.row] = one
    for one in rows:
        if one.of and (one.of not in names or names[one.of].of or one.of == one.row):
            raise ConfigError(
                f"{one.place}: unit: expected a ratio to another row with a speed or time, got '{one.of}'; name one"
            )
