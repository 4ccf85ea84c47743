"""Observed speeds: rows of a CSV table, or what ``llama-bench -o json|jsonl|csv`` writes."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moesim.core.data import shipped
from moesim.core.gate import TABLE, read_text
from moesim.core.limits import BITS, SPEED, TOKENS
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import first_problem
from moesim.model import builtin_models

QUANTS: Final[Mapping[str, tuple[float, float]]] = {
    "F32": (32, 32), "F16": (16, 16), "BF16": (16, 16), "FP8": (8, 8), "Q8_0": (8.5, 8.5),
    "Q6_K": (6.5625, 6.5625), "Q5_K_M": (5.69, 5.9), "Q5_K_S": (5.5, 5.6), "Q4_K_M": (4.85, 5.35),
    "Q4_K_S": (4.5, 4.8), "Q4_0": (4.5, 4.7), "IQ4_XS": (4.25, 5.17), "IQ4_NL": (4.5, 4.98),
    "Q3_K_M": (3.9, 4.6), "Q2_K": (2.96, 4.0), "MXFP4": (4.25, 8.5),
}  # fmt: skip
"""By the block formats of ggml and the mixtures that llama.cpp's quantiser takes by name; files differ by some per cent."""

_TYPES: Final = re.compile(r"(IQ\d_\w+|Q\d_\w+|BF16|F16|F32|MXFP4|FP8)", re.IGNORECASE)


def read_bits(text: str, place: str) -> list[dict[str, Any]]:
    """Read bits per weight.

    >>> read_bits("4.5|Q8_0", "")
    [{'expert_bits': 4.5, 'other_bits': 4.5}, {'expert_bits': 8.5, 'other_bits': 8.5}]
    """
    if not text:
        return [{}]
    return [_one(choice.strip(), place) for choice in text.split("|")]


def _one(text: str, place: str) -> dict[str, Any]:
    if text.upper() in QUANTS:
        experts, rest = QUANTS[text.upper()]
        return {"expert_bits": experts, "other_bits": rest}
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
    # what else an engine's output says of the row: where two rows of one setting differ in it, a message names it
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


NOT_COLUMNS: Final = ("alias", "place", "told")
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


_KEYS: Final = ("model_type", "n_prompt", "n_gen", "avg_ts")
_ALL: Final = 99
_TOLD: Final = {
    "n_threads": "-t", "flash_attn": "-fa", "n_batch": "-b", "use_mmap": "-mmp", "cpu_mask": "-C", "poll": "--poll",
    "split_mode": "-sm", "tensor_split": "-ts", "main_gpu": "-mg", "cpu_info": "CPU", "gpu_info": "GPU",
    "build_commit": "build",
}  # fmt: skip
"""Fields that the model does not know, with llama-bench's options: named where rows that differ in them contradict."""


def is_bench(text: str) -> bool:
    """Return whether a text is llama-bench's: JSON, or CSV with its columns."""
    stripped = text.lstrip()
    return stripped.startswith(("{", "[")) or all(key in stripped.partition("\n")[0] for key in _KEYS)


def bench_rows(text: str, path: Path, models: Sequence[str]) -> list[Observation]:
    """Read rows of llama-bench."""
    found = []
    for number, record in enumerate(_records(text, path), 1):
        place = f"{path}: row {number}"
        missing = [key for key in _KEYS if key not in record]
        if missing:
            raise ConfigError(f"{place}: expected the field {missing[0]} of llama-bench, got none; give its output as it is")
        found.append(_row(record, number, place, models))
    return found


def _records(text: str, path: Path) -> list[Mapping[str, Any]]:
    stripped = text.strip()
    try:
        if stripped.startswith("["):
            found: list[Any] = json.loads(stripped)
        elif stripped.startswith("{"):
            found = [json.loads(line) for line in stripped.splitlines() if line.strip()]
        else:
            found = list(csv.DictReader(io.StringIO(stripped)))
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: expected the output of llama-bench, got: {error}; run it again with -o json") from None
    if not all(isinstance(record, dict) for record in found):
        raise ConfigError(f"{path}: expected objects, one a row of llama-bench, got something else; give its output as it is")
    return found


def _row(record: Mapping[str, Any], number: int, place: str, models: Sequence[str]) -> Observation:
    n_prompt, n_gen = _whole(record, "n_prompt", place), _whole(record, "n_gen", place)
    if (n_prompt > 0) == (n_gen > 0):
        raise ConfigError(
            f"{place}: expected a prompt or generated tokens, got {n_prompt} and {n_gen}; run llama-bench -p or -n alone"
        )
    depth, prefill = _whole(record, "n_depth", place, 0), n_prompt > 0
    if prefill and depth:
        raise ConfigError(f"{place}: expected a prompt at depth 0, got {depth}; leave the row out")
    values: dict[str, Any] = {
        "row": f"{number}:{'pp' if prefill else 'tg'}{n_prompt or n_gen}" + (f"@d{depth}" if depth else ""),
        "model": _model(record, place, models),
        "bits": bits_in(f"{record.get('model_type', '')} {Path(str(record.get('model_filename', ''))).name}"),
        "setting": _setting(record, place), "context": n_prompt if prefill else depth,
        "value": record["avg_ts"], "unit": "tokens/s", "kind": "prefill" if prefill else "decode",
        "source": f"llama-bench {record.get('build_commit', '')}".strip(), "alias": True, "place": place,
        "told": tuple((f"{key} {option}", str(record[key])) for key, option in _TOLD.items() if key in record),
    }  # fmt: skip
    if not prefill:
        values["decode"] = n_gen
    if record.get("n_ubatch"):
        values["ubatch"] = record["n_ubatch"]
    if record.get("stddev_ts"):
        values["spread"] = record["stddev_ts"]
    return observation(values)


def _whole(record: Mapping[str, Any], key: str, place: str, default: int | None = None) -> int:
    value = record.get(key, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {key}: expected a whole number, got {value!r}; give llama-bench's output as it is") from None


def _setting(record: Mapping[str, Any], place: str) -> str:
    ngl = _whole(record, "n_gpu_layers", place, _ALL)
    words = [f"ngl={ngl}"]
    for key in ("type_k", "type_v"):
        kind = str(record.get(key) or "f16").lower()
        if kind not in ("f16", "bf16"):
            raise ConfigError(
                f"{place}: {key}: expected a KV cache of f16, got {kind}; leave the row out, or measure it with f16"
            )
    if _is_true(record, "no_kv_offload") and ngl > 1:
        raise ConfigError(f"{place}: no_kv_offload: expected the KV cache next to its layers, got true; leave the row out")
    n_cpu_moe = _whole(record, "n_cpu_moe", place, 0)
    overrides = str(record.get("tensor_buft_overrides") or "none")
    if overrides not in ("none", ""):
        n_cpu_moe = _overridden(overrides, place)
    if n_cpu_moe and ngl > 1:  # with at most the output layer on the GPU, all experts are on the CPU
        words.append(f"n_cpu_moe={n_cpu_moe}")
    if _is_true(record, "no_op_offload"):
        words.append("op_offload=false")
    return " ".join(words)


def _is_true(record: Mapping[str, Any], key: str) -> bool:
    return str(record.get(key, "0")).lower() in ("1", "true")


def _overridden(text: str, place: str) -> int:
    """Count the layers that a pattern keeps on the CPU: the first ones, or all."""
    layers: set[int] = set()
    for pattern in re.split(r"[,;]", text):
        name, _, where = pattern.partition("=")
        if "exps" not in name or where != "CPU":
            raise ConfigError(f"{place}: tensor_buft_overrides: expected experts on the CPU, got '{pattern}'; leave the row out")
        found = re.match(r"\^?blk\\?\.\(?([\d|]+)\)?\\?\.", name)
        if found is None:
            return _ALL
        layers |= {int(layer) for layer in found[1].split("|") if layer}
    if layers != set(range(len(layers))):
        raise ConfigError(f"{place}: tensor_buft_overrides: expected the first layers, got {text}; leave the row out")
    return len(layers)


def _model(record: Mapping[str, Any], place: str, models: Sequence[str]) -> str:
    """Find the model of a row: named for its type, the only one, or the one in its name."""
    told = f"{record.get('model_type', '')} {Path(str(record.get('model_filename', ''))).name}"
    plain = [one for one in models if "=" not in one or one.lstrip().startswith("{")]
    for one in models:
        kind, _, name = one.partition("=")
        if one not in plain and kind.lower() in told.lower():
            return name
    if len(plain) == 1:
        _check_named(plain[0], told, place)
        return plain[0]
    words = _letters(told)
    fits = [name for name in (plain or list(builtin_models())) if _letters(name) in words]
    if not fits:
        fits = [name for name in (plain or list(builtin_models())) if _family(name) in words]
    if len(fits) != 1:
        got = f"'{told.strip()}'" + (f", which may be {' or '.join(fits)}" if fits else "")
        raise ConfigError(f"{place}: expected a model that is known, got {got}; say which with --model 'PART OF ITS NAME=MODEL'")
    return fits[0]


def _check_named(name: str, told: str, place: str) -> None:
    """Refuse a model of this project for a row whose type or file name is another's."""
    others = builtin_models()
    words = _letters(told)
    fits = [one for one in others if _letters(one) in words or _family(one) in words]
    kind = told.split()[0] if told.split() else ""
    kinds = _KINDS.get(kind, ())
    if name in others and ((fits and name not in fits) or (kinds and not name.startswith(kinds))):
        raise ConfigError(
            f"{place}: expected a row of {name}, as --model says, got '{told.strip()}'; leave the row out, or, if they are the "
            f"same, give --model '{kind}={name}'"
        )


_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("mixtral",), "phimoe": ("phi",), "deepseek2": ("deepseek", "moonlight"), "qwen2moe": ("qwen1.5", "qwen2"),
    "qwen3moe": ("qwen3",), "olmoe": ("olmoe",), "gpt-oss": ("gpt-oss",),
}  # fmt: skip
"""llama.cpp's names of architectures: how the models of this project that have one begin."""


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _family(name: str) -> str:
    """Write a name as llama.cpp does its types: ``qwen3-30b-a3b`` as ``qwen3moe 30B.A3B``."""
    head, _, rest = name.partition("-")
    return _letters(f"{head}moe{rest}")


def read_observations(path: Path, models: Sequence[str] = ()) -> list[Observation]:
    """Read observed speeds: a CSV table as of `Observation`, or what ``llama-bench -o`` wrote.

    `models` are what rows of llama-bench may be of: names, or ``TYPE=NAME``.
    """
    path = shipped(path)
    text = read_text(path, TABLE, "a table of observed speeds", encoding="utf-8-sig")
    found = bench_rows(text, path, models) if is_bench(text) else list(_table(text, path))
    if not found:
        raise ConfigError(f"{path}: expected at least one observation, got none; add a row")
    check_rows(found)
    return found


def _table(text: str, path: Path) -> list[Observation]:
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
