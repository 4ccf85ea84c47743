"""Names of policies, models and machines with what was changed in them; hashes of inputs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.core.units import format_size
from moesim.core.yaml_reader import read_yaml_value
from moesim.hardware.read import flatten
from moesim.trace.workload import WorkloadSpec
from moesim.trace.workload.spec import IN_WORDS

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec


class Column(NamedTuple):
    """A setting as a column of result rows."""

    word: str  # for it, in figures
    head: str = ""  # in the terminal's table, if it is another
    usual: str = ""  # the value that goes without saying
    missing: type | None = None  # what its values are, if some runs have none


def _of_workload(one: Field[Any]) -> Column:
    missing = None if one.default is not None else int if one.metadata["least"] is not None else str
    return Column(**one.metadata["column"], missing=missing)


_WORKLOAD = {one.name: _of_workload(one) for one in fields(WorkloadSpec)}
COLUMNS = {
    "model": Column("model"), "hardware": Column("hardware"), "trace": Column("trace"),
    "transfer_curve": Column("transfer", usual="own"), "chunk_bytes": Column("chunk", missing=int),
    "decision_ns": Column("decision ns", usual="0"), "predictors": Column("predictors", missing=str),
    **_WORKLOAD, "extrapolate": Column("extrapolate", usual="False"), "engine_profile": Column("engine", usual="own"),
    "warm_up": Column("warm_up", "warm-up", missing=int), "cache_ratio": Column("cache ratio", missing=float),
    "cache_budget_bytes": Column("GPU memory budget", missing=int),
}  # fmt: skip
"""Columns of a result row with the settings asked for, without the policy."""
SETTINGS = tuple(COLUMNS)[:-2]
CACHE_SETTINGS = tuple(COLUMNS)[-2:]
WORKLOAD = tuple(_WORKLOAD)
"""Those of the workload, in the order of `moesim.trace.workload.WorkloadSpec`."""
HOW = ("transfer_curve", "chunk_bytes", "predictors", "decision_ns", "extrapolate", "engine_profile", "warm_up")
"""Those of how a run was carried out, in the order of rows."""
LIVE = "live replay"
"""Beginning of the note of results of a replay."""


def cache_asked(row: Mapping[str, Any]) -> str:
    """Write the cache that a row asks for: a share of all experts, or memory."""
    ratio, budget = row.get("cache_ratio"), row.get("cache_budget_bytes")
    return f"{ratio:g}" if isinstance(ratio, int | float) else format_size(budget or 0)


def value_in_words(value: Any, name: str = "") -> Any:
    """Write a mapping as words, such as where the KV cache lies; other values of a setting stay as they are.

    >>> value_in_words('{"n": 3, "accept": 0.7}', "drafts"), value_in_words(8, "batch_size")
    ('n 3, accept 0.7', 8)
    """
    if name in IN_WORDS:
        return IN_WORDS[name](value)
    return re.sub(r'[{}"]|:(?= )', "", value) if isinstance(value, str) and value.startswith("{") else value


def setting_in_words(value: Any, name: str) -> str:
    """Write a setting with its value.

    >>> setting_in_words(8, "batch_size"), setting_in_words(0.5, "cache_ratio"), setting_in_words("mixtral-8x7b", "model")
    ('batch 8', 'cache 0.5', 'mixtral-8x7b')
    """
    if name.endswith("_bytes") and isinstance(value, int):
        value = format_size(value)
    shown = "-" if value is None and name not in IN_WORDS else value_in_words(value, name)
    word = COLUMNS[name].word.removesuffix(" ratio")
    return str(shown) if name in ("model", "hardware", "trace", *IN_WORDS) else f"{word} {shown}"


LABEL: Final = "label"
"""Key of a policy in an experiment: its name in tables and figures."""


def policy_label(policy: Mapping[str, Any]) -> str:
    """Write a policy's label, or its name with its options in one word or so."""
    if LABEL in policy:
        return str(policy[LABEL])
    options = ",".join(f"{key}={_written(value)}" for key, value in policy.items() if key != "name")
    return str(policy["name"]) + (f"({options})" if options else "")


def read_policy_label(label: str, place: str) -> dict[str, Any]:
    """Read what `policy_label` writes; a name alone is that of a policy."""
    found = re.fullmatch(r"([^()\s]+)\(([^()]+)\)", label)
    if found is None:
        return {"name": label}
    options = re.sub(r"(^|,)\s*(\w+)=", r"\1 \2: ", found[2])
    return {"name": found[1], **read_yaml_value(f"{{{options}}}", place)}


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        short = policy_label(value) if "name" in value else value.get("source")  # of tables, whose numbers would fill pages
        return short if isinstance(short, str) else json.dumps(value, sort_keys=True)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def model_label(model: ModelSpec) -> str:
    """Name a model with what was changed in it."""
    return model.name + (f" ({', '.join(model.labels)})" if model.labels else "")


def hardware_label(hardware: HardwareProfile) -> str:
    """Name a machine with what was changed in it."""
    values = {key: number.value for key, number in hardware.numbers.items()}
    if isinstance(hardware.written, Mapping):  # it may have typed numbers of a short form, from which others follow
        typed = {key: one for key, one in flatten(hardware.written) if key.startswith("numbers.")}
        values |= {key: one["value"] if isinstance(one, Mapping) else one for key, one in typed.items()}
    changed = ", ".join(f"{key}={values.get(key, 'changed')}" for key in hardware.overrides)
    return hardware.name + (f" ({changed})" if changed else "")


def fingerprint(value: Any) -> str:
    """Return the sha256 of canonical JSON, with ``repr`` of what JSON cannot hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain, separators=(",", ":")).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "figures"):
        return value.figures()
    return vars(value) if hasattr(value, "__dict__") else str(value)


NOT_VARIED: Final = "interval not varied (set intervals: true): "
"""Beginning of the note that names the intervals over which a run was not repeated."""


def notes_of(texts: Iterable[str]) -> list[str]:
    """List the notes of runs once each, those of intervals as one."""
    notes = list(dict.fromkeys(note for text in texts for note in text.split(", ") if note))
    not_varied = [note for note in notes if note.startswith(NOT_VARIED)]
    if not not_varied:
        return notes
    ranges = dict.fromkeys(one for note in not_varied for one in note.removeprefix(NOT_VARIED).split("; "))
    return [NOT_VARIED + "; ".join(ranges) if note == not_varied[0] else note for note in notes if note not in not_varied[1:]]
