"""Tables of constants that systems release as data: named by source, checked, never shipped.

::

    policies:
      - {name: adapmoe, released: {file: adapmoe.yaml}}

    # adapmoe.yaml
    source: PKU-SEC-Lab/AdapMoE src/dp.py at 297c349
    recall: [0, 0.57, 0.72]       # one number a layer; each policy names its tables

An experiment takes the content of the file in (`moesim.experiment.config`), so its result holds the numbers. The label of the
policy has the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, PlainValidator, WithJsonSchema

from moesim.errors import ConfigError, mistyped, unknown_name

_LETTERS: Final = 120  # of a source, which is part of labels
_LARGEST: Final = 1e15  # of a count: a double holds every whole number up to here


class Tables(NamedTuple):
    """Marks an option as released tables, in ``Annotated``, and names them."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        expected = f"{{file: PATH}} or a mapping with source and {', '.join(self.names)}, or null"
        read = PlainValidator(partial(released, names=self.names))
        return handler.generate_schema(Annotated[Any, read, WithJsonSchema({"expected": expected})])


@dataclass(frozen=True)
class Released:
    """Tables of numbers by name, and where they come from."""

    source: str
    tables: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.tables

    def __repr__(self) -> str:
        return self.source

    def table(self, name: str, shape: tuple[int, ...], place: str, most: float = _LARGEST) -> NDArray[Any]:
        """Return a table as an array; `ConfigError` for a wrong shape or a number above ``most``."""
        numbers = _numbers(self.tables[name], shape, most, f"{place}: released ({self.source}): {name}")
        return np.fromiter(numbers, np.float64).reshape(shape)


def _numbers(value: Any, shape: tuple[int, ...], most: float, place: str) -> Iterator[float]:
    """Yield the numbers of lists within lists, each checked."""
    if shape:
        if not isinstance(value, list | tuple) or len(value) != shape[0]:
            got = len(value) if isinstance(value, list | tuple) else repr(value)[:40]
            whole = " x ".join(map(str, shape))
            raise ConfigError(f"{place}: expected a list of {shape[0]}, of {whole} numbers in all, got {got}; give one for each")
        for i, inside in enumerate(value):
            yield from _numbers(inside, shape[1:], most, f"{place}[{i}]")
    else:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:  # nor a NaN
            raise ConfigError(f"{place}: {mistyped(f'a number from 0 to {most:g}', value)}")
        yield value


def released(value: Any, names: tuple[str, ...]) -> Released | None:
    """Check a user's released tables, with `ValueError` for wrong ones."""
    if value is None or isinstance(value, Released):
        return value
    known = ", ".join(names)
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {{file: PATH}}, or a mapping with source and {known}, got {value!r}; write a mapping")
    source = value.get("source")
    if not isinstance(source, str) or not 0 < len(source.strip()) <= _LETTERS or set(source) & set("()\n"):
        got = "nothing" if source is None else repr(source)[:60]
        raise ValueError(
            f"source: expected where the numbers come from, at most {_LETTERS} characters without round brackets, "
            f"got {got}; name the work, the file and its version"
        )
    tables = {key: one for key, one in value.items() if key != "source"}
    for key in tables:
        if key not in names:
            raise ValueError(unknown_name("table", str(key), names))
    if not tables:
        raise ValueError(f"expected at least one of {known}, got none; add it")
    return Released(source.strip(), tables)
