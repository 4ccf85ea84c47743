"""Routing that an experiment makes up: each key of ``trace: {synthesize: ...}``.

By a set of parameters; ``assumed``, for a model that nobody recorded, by its LRU lift or one hit rate; or ``even``, where
routing makes no difference. `moesim.trace.synthesis` makes it, which needs SciPy; this file does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from moesim.errors import ConfigError, unknown_name
from moesim.trace.workload.spec import Size

MADE: Final = "synthesize"  # the key that distinguishes synthetic routing from a file
ASSUMED, EVEN = "assumed", "even"
ROUTING: Final = {ASSUMED: "assumed routing", EVEN: "even routing"}
"""How the models of such traces are called."""
MAX_TOKENS = 100_000
"""Of routing that is made up for an experiment: it is made anew each time, in memory, at 0.2 ms (DeepSeek-V2-Lite) to 0.7 ms
(Qwen3-30B-A3B) a token on one Zen 5 core."""
_TYPES: Final = {"str": "string", "int": "integer", "bool": "boolean", "float | None": "number", "str | None": "string"}
_SHAPE: Final = re.compile(r"(\d{1,9})x(\d{1,9})x(\d{1,9})")


def _count(default: int, least: int, meaning: str) -> Any:
    return field(default=default, metadata={"least": least, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Made:
    """Request for synthetic routing of at most `MAX_TOKENS` tokens."""

    synthesize: str = field(
        metadata={"meaning": "Parameters: a name of moesim list parameters, or the path of a file; assumed; or even"}
    )
    requests: int = _count(1, 1, "Requests to make")
    prompt: int = _count(0, 0, "Prompt tokens of each request")
    decode: int = _count(0, 0, "Decoded tokens of each request")
    seed: int = _count(0, 0, "Seed of routers, topics and requests; each repeat adds 1")
    scores: bool = field(default=False, metadata={"meaning": "Keep the softmax over all experts"})
    lift: float | None = field(default=None, metadata={"meaning": "Of assumed routing: its LRU lift; default: that of a law"})
    hit_rate: float | None = field(default=None, metadata={"meaning": "Of assumed routing: an LRU hit rate, instead of a lift"})
    slots: int = _count(0, 0, "Slots of each layer at which an engine counted hit_rate")
    shape: str | None = field(
        default=None, metadata={"meaning": "Of assumed and even routing: layers x experts x top_k; default: the model's"}
    )

    @property
    def n_tokens(self) -> int:
        return self.requests * (self.prompt + self.decode)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Layers, experts and top_k of a shape."""
        assert self.shape is not None
        layers, experts, top_k = map(int, self.shape.split("x"))
        return layers, experts, top_k


_COUNTS: Final = {one.name: one for one in fields(Made) if "least" in one.metadata}


def read_made(written: Mapping[str, Any], place: str) -> Made:
    """Check what an experiment asks for."""
    known = [one.name for one in fields(Made)]
    for key in written:
        if key not in known:
            raise ConfigError(f"{place}: trace: {unknown_name('key', str(key), known)}")
    if not isinstance(written[MADE], str):
        raise ConfigError(f"{place}: trace.{MADE}: expected the name of a parameter file, got {written[MADE]!r}")
    found = Made(**written)
    if not isinstance(found.scores, bool):
        raise ConfigError(f"{place}: trace.scores: expected true or false, got {found.scores!r}")
    for key, one in _COUNTS.items():
        value, least = getattr(found, key), one.metadata["least"]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{place}: trace.{key}: expected an integer of at least {least}, got {value!r}")
    if found.n_tokens > MAX_TOKENS:
        raise ConfigError(
            f"{place}: trace: expected at most {MAX_TOKENS} tokens, got {found.n_tokens} (requests x (prompt + decode)); make "
            "that trace once, with moesim trace synthesize, and name its file"
        )
    _check_assumed(found, place)
    return found


def _check_assumed(made: Made, place: str) -> None:
    where = f"{place}: trace"
    given = [key for key in ("lift", "hit_rate", "slots") if getattr(made, key) not in (None, 0)]
    if given and made.synthesize != ASSUMED:
        raise ConfigError(f"{where}.{given[0]}: expected it with {MADE}: {ASSUMED}, got {MADE}: {made.synthesize}; leave it out")
    if made.shape is not None and not (isinstance(made.shape, str) and _SHAPE.fullmatch(made.shape)):
        raise ConfigError(f"{where}.shape: expected layers x experts x top_k such as 48x128x8, got {made.shape!r}")
    if made.shape is not None and made.synthesize not in (ASSUMED, EVEN):
        raise ConfigError(f"{where}.shape: expected it with {ASSUMED} or {EVEN}, got {MADE}: {made.synthesize}; leave it out")
    for key in ("lift", "hit_rate"):
        value = getattr(made, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{where}.{key}: expected a number, got {value!r}")
    if (made.hit_rate is None) != (made.slots == 0):
        raise ConfigError(f"{where}: expected hit_rate and slots together, got one of them; add the other")
    if made.hit_rate is not None and not 0 < made.hit_rate < 1:
        raise ConfigError(f"{where}.hit_rate: expected a share above 0 and below 1, got {made.hit_rate:g}; 61 % is 0.61")


def trace_label(written: str | Mapping[str, Any]) -> str:
    """Name a trace in one word."""
    if isinstance(written, str):
        return written
    made = Made(**written)
    of = "".join(f"-{key}{value:g}" for key in ("lift", "hit_rate") if (value := getattr(made, key)) is not None)
    of += f"at{made.slots}" * (made.slots > 0) + f"-{made.shape}" * (made.shape is not None)
    return f"synthetic-{made.synthesize}{of}-{made.requests}x{made.prompt}+{made.decode}-seed{made.seed}"


def no_more_than(written: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """Ask for no more requests and decoded tokens than a workload takes."""

    def least(key: str, limit: int | None) -> Any:
        value = written.get(key, _COUNTS[key].default)
        return min(value, limit) if isinstance(value, int) and limit is not None else value  # other values are refused later

    return {**written, "requests": least("requests", size.requests), "decode": least("decode", size.decode)}


def made_schema() -> dict[str, Any]:
    """Return the JSON Schema of the mapping; any value may be a list to sweep."""
    properties: dict[str, Any] = {}
    for one in fields(Made):
        kind: dict[str, Any] = {"type": _TYPES[str(one.type)]}
        if one.name in _COUNTS:
            kind["minimum"] = one.metadata["least"]
        properties[one.name] = {"anyOf": [kind, {"type": "array", "items": kind}], "description": one.metadata["meaning"]}
        if one.name != MADE and one.default is not None:
            properties[one.name]["default"] = one.default
    about = f"Synthetic routing: requests x (prompt + decode) tokens, at most {MAX_TOKENS}"
    return {
        "type": "object", "description": about, "required": [MADE], "properties": properties, "additionalProperties": False,
    }  # fmt: skip
