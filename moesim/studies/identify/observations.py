"""Observed speeds: rows of a CSV table."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moesim.core.limits import BITS, SPEED, TOKENS
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import first_problem
from moesim.model import ModelSpec
from moesim.model.mixtures import wider_bits

QUANTS: Final[Mapping[str, tuple[float, float]]] = {
    "F32": (32, 32), "F16": (16, 16), "BF16": (16, 16), "FP8": (8, 8), "Q8_0": (8.5, 8.5),
    "Q6_K": (6.5625, 6.5625), "Q5_K_M": (5.69, 5.9), "Q5_K_S": (5.5, 5.6), "Q4_K_M": (4.85, 5.35),
    "Q4_K_S": (4.5, 4.8), "Q4_0": (4.5, 4.7), "IQ4_XS": (4.25, 5.17), "IQ4_NL": (4.5, 4.98),
    "Q3_K_M": (3.9, 4.6), "Q2_K": (2.96, 4.0), "MXFP4": (4.25, 8.5),
}  # fmt: skip
"""By the block formats of ggml and the mixtures that llama.cpp's quantiser takes by name; files differ by some per cent."""

_TYPES: Final = re.compile(r"(IQ\d_\w+|Q\d_\w+|BF16|F16|F32|MXFP4|FP8)", re.IGNORECASE)


def read_bits(text: str, place: str, model: ModelSpec | None = None) -> list[dict[str, Any]]:
    """Read bits per weight, those of a name for a model's widths.

    >>> read_bits("4.5|Q8_0", "")
    [{'expert_bits': 4.5, 'other_bits': 4.5}, {'expert_bits': 8.5, 'other_bits': 8.5}]
    """
    if not text:
        return [{}]
    return [_one(choice.strip(), place, model) for choice in text.split("|")]


def _one(text: str, place: str, model: ModelSpec | None) -> dict[str, Any]:
    if text.upper() in QUANTS:
        return named_bits(text.upper(), model)
    parts = text.split("/")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(BITS.hold(number) for number in numbers):
        raise ConfigError(
            f"{place}: bits: expected bits such as 4.5, experts/rest such as 4.85/5.35, several joined by |, or one of "
            f"{', '.join(QUANTS)}, got '{text}'; correct it"
        )
    return {"expert_bits": numbers[0], "other_bits": numbers[-1]}


def named_bits(name: str, model: ModelSpec | None) -> dict[str, Any]:
    """Return the bits of a quantisation."""
    experts, rest = QUANTS[name]
    wider = 0.0 if model is None else wider_bits(name, model)
    return {"expert_bits": round(experts + wider, 4) if wider else experts, "other_bits": rest}


def bits_in(text: str) -> str:
    """Find a known quantisation in a type or file name, else an empty text.

    >>> bits_in("qwen3moe 30B.A3B Q4_K - Medium"), bits_in("gpt-oss 20B MXFP4 MoE")
    ('Q4_K_M', 'MXFP4')
    """
    words = re.sub(r"_K - (Small|Medium|Large)", lambda found: f"_K_{found[1][0]}", text, flags=re.IGNORECASE)
    for found in _TYPES.findall(words):
        name = found.upper()
        while name and name not in QUANTS:
            name = name.rpartition("_")[0]
        if name:
            return str(name)
    return ""


UNITS: Final = ("tokens/s", "tokens/s/sequence", "ms/token", "s", "ratio:ROW")
"""Units of a value: of the whole batch; of one sequence; between two tokens of a sequence; of a whole prefill or decode; or the
speed over that of another row."""

ALL: Final = 99
"""From this number on, layers mean all of them, as people write for llama.cpp."""

REQUIRED: Final = ("model", "setting", "value", "unit")
_RATIO: Final = "ratio:"


class Observation(BaseModel):
    """One observed speed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    row: str  # its name; its number in the table if it has none
    model: Annotated[str, Field(min_length=1)]  # name, path of a config.json, or ``{base: NAME, field: value}``
    # bits per weight, a name such as ``Q4_K_M``, ``EXPERTS/REST``, or several joined by ``|`` where it is not known; empty: the
    # model's
    bits: str = ""
    # the engine's options: ``n_cpu_moe=24``, ``ngl=0``, ``all_cpu``, ``policy=lru cache=0.5`` and the like
    setting: Annotated[str, Field(min_length=1)]
    batch: Annotated[int, Field(ge=1, le=4096)] = 1  # sequences at once
    # tokens before the first decoded one; tokens of the prompt for a prefill
    context: Annotated[int, Field(ge=0, le=TOKENS.most)] = 0
    decode: Annotated[int, Field(ge=1, le=TOKENS.most)] = 128  # tokens decoded
    ubatch: Annotated[int, Field(ge=1, le=TOKENS.most)] = 512  # most tokens of a prefill step
    value: float  # as printed
    unit: str  # one of `UNITS`
    spread: Annotated[float, Field(ge=0)] | None = None  # one standard deviation, in the unit of the value
    kind: Literal["decode", "prefill"] = "decode"
    role: Literal["identification", "check"] = "identification"  # whether it may move constants
    block: str = ""  # what it belongs to for leave-one-out; empty: its model, bits and kind of setting
    source: str = ""  # where it is from
    alias: bool = False  # more layers than the model has mean all of them, as in engines' output
    place: str = ""  # file and line, for messages

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
        """Logarithm of a decode step's or prefill's time, ns; of a ratio, minus the speeds' ratio."""
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
        """Convert a predicted logarithm of a time to the unit of the row."""
        return self.value * math.exp((self.log_time - log_time) * (-1 if self.unit in ("ms/token", "s") else 1))


AGREE: Final = 0.02
"""Two rows of one setting may differ by this share, or by three of their spreads, before they contradict each other."""


def contradict(before: Observation, one: Observation) -> bool:
    """Return whether two rows of one setting differ by more than rows may."""
    spread = sum((each.spread or 0) / each.value for each in (one, before))
    return abs(one.log_time - before.log_time) > max(AGREE, 3 * spread)


NOT_COLUMNS: Final = ("alias", "place")
COLUMNS: Final = tuple(name for name in Observation.model_fields if name not in NOT_COLUMNS)


def observation(values: dict[str, Any]) -> Observation:
    """Make an observation; `ConfigError` names the place of a wrong value."""
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


def is_table(text: str) -> bool:
    """Return whether a text is a table of observed speeds: most of the required columns are in its first line."""
    head = [name.strip() for name in text.lstrip().partition("\n")[0].split(",")]
    return sum(name in head for name in REQUIRED) > 1 or head[0] == "row"


def read_table(text: str, path: Path) -> list[Observation]:
    """Read a table whose columns are fields of `Observation`."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"{path}: expected a table of observed speeds, got: {error}; check its quotes") from None
    head = [name.strip() for name in rows[0]] if rows else []
    for name in head:
        if name not in COLUMNS:
            raise ConfigError(f"{path}:1: {unknown_name('column', name, COLUMNS)}")
    missing = [name for name in REQUIRED if name not in head]
    if missing:
        raise ConfigError(f"{path}:1: expected the column {missing[0]}, got {','.join(head) or 'nothing'}; add it")
    if len(set(head)) != len(head):
        raise ConfigError(f"{path}:1: expected each column once, got {','.join(head)}; remove one")
    found = []
    for number, cells in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        place = f"{path}:{number}"
        if len(cells) != len(head):
            raise ConfigError(f"{place}: expected {len(head)} fields, got {len(cells)}; quote fields that contain a comma")
        texts = {name: cell.strip() for name, cell in zip(head, cells, strict=True)}
        kept = {name: cell for name, cell in texts.items() if cell or name in REQUIRED}
        found.append(observation({"row": str(number - 1), **kept, "place": place}))
    return found
