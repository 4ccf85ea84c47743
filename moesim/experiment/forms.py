"""Values that an experiment file may hold: the forms of which `moesim.experiment.config` makes its keys."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from moesim.core.limits import CACHE_RATIO, COUNT
from moesim.core.units import as_share, parse_bytes
from moesim.errors import ConfigError
from moesim.trace.made import MADE, made_schema

T = TypeVar("T")


def _how_many(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


Sweep = Annotated[Annotated[T, Tag("one")] | Annotated[list[T], Field(min_length=1), Tag("many")], Discriminator(_how_many)]
"""One value, or a list of values to sweep."""


def listed(value: Any) -> list[Any]:
    """Give the values of a field that may be one or several."""
    return value if isinstance(value, list) else [value]


def _named(what: str, *keys: str) -> AfterValidator:
    """Check for a name, a path, or a mapping that contains one of `keys`."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, dict) and all(isinstance(k, str) for k in value) and any(key in value for key in keys):
            return value
        raise ValueError(f"expected {what} or a mapping with the key {' or '.join(keys)}, got {value!r}")

    return AfterValidator(check)


def _named_schema(*keys: str) -> WithJsonSchema:
    mappings = [{"type": "object", "required": [key], "properties": {key: {"type": "string"}}} for key in keys]
    return WithJsonSchema({"anyOf": [{"type": "string"}, *mappings]})


def _size(value: Any) -> int:
    try:
        n_bytes = parse_bytes(value, "")
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(": ")) from None
    if n_bytes < 1:
        raise ValueError(f"expected a size of at least 1 byte, got {value!r}")
    return n_bytes


def _share(value: float) -> float:
    if 0 < value < CACHE_RATIO.least:
        raise ValueError(f"expected a share of all experts of at least {CACHE_RATIO.least:g}, got {value:g}; less is no expert")
    return value


Positive = Annotated[int, Field(strict=True, ge=1, le=COUNT.most)]
Natural = Annotated[int, Field(strict=True, ge=0, le=COUNT.most)]
Size = Annotated[
    Any,
    AfterValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
Share = Annotated[
    float,
    Field(strict=True, ge=0, le=CACHE_RATIO.most),
    BeforeValidator(as_share),
    AfterValidator(_share),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": CACHE_RATIO.most},
                {"type": "string", "pattern": r"^\s*([0-9]+\s*/\s*[0-9]+|[0-9.]+\s*%)\s*$"},
            ]
        }
    ),
]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]


ModelRef = Annotated[Any, _named("a model's name, the path of a config.json,", "base", "name"), _named_schema("base", "name")]
HardwareRef = Annotated[
    Any, _named("a hardware profile's name, the path of a YAML file,", "base", "name"), _named_schema("base", "name")
]
TraceRef = Annotated[
    Any,
    _named("a trace's name, the path of a file,", MADE),
    WithJsonSchema({"anyOf": [{"type": "string"}, made_schema()]}),
]
PolicyRef = Annotated[Any, _named("a policy's name", "name"), _named_schema("name")]
PlotRef = Annotated[Any, _named("a kind of figure", "kind"), _named_schema("kind")]


def _requests(value: Any) -> Any:
    """Check for requests by number, or several such lists to sweep: the one list of an experiment that is no sweep by itself."""
    for one in value if isinstance(value, list) and not all(map(_is_request, value)) else [value]:
        if one != "all" and not (isinstance(one, list) and one and all(map(_is_request, one))):
            raise ValueError(f"expected all, or a list of request numbers (or several such lists to sweep), got {value!r}")
    return value


def _is_request(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT.most


_NUMBERS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_ONE_OF_REQUESTS: list[Any] = [{"const": "all"}, _NUMBERS]
RequestsRef = Annotated[
    Any,
    AfterValidator(_requests),
    WithJsonSchema({"anyOf": [*_ONE_OF_REQUESTS, {"type": "array", "items": {"anyOf": _ONE_OF_REQUESTS}}]}),
]
