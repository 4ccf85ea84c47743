"""Read the header of a GGUF file: metadata, and the shape, type and bytes of each tensor.

The first megabytes of a file are enough. Lists are skipped unless they have a value a layer: the library ``gguf`` makes an object
of each word of a vocabulary (7 s and 450 MB for 152,000), and refuses a file that ends behind its header.
"""

from __future__ import annotations

import csv
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from moesim.core.gate import TENSORS, check_claim
from moesim.core.limits import BYTES, LAYERS
from moesim.errors import ModelError

_FORMS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Numbers by type."""
_STRING, _LIST = 8, 9
_LEAST: Final = {_STRING: 8, _LIST: 12}  # bytes of an empty one
_FIELDS: Final = 10**5  # of metadata; models have some fifty
_AXES: Final = 8
_DEPTH: Final = 4  # lists inside each other
_KEPT: Final = int(LAYERS.most)  # entries of a list with a value for each layer
_REMEDY: Final = "it is cut within its header or altered; fetch it anew"


class Type(NamedTuple):
    """Type of weights: a block's weights and bytes, and bytes of each row next to its blocks."""

    name: str
    block_weights: int
    block_bytes: int
    row_bytes: int


@cache
def types() -> Mapping[int, Type]:
    """Read the types of weights: of gguf 0.19.0's constants, and those that ik_llama.cpp adds."""
    with Path(__file__).with_name("ggml_types.csv").open(encoding="utf-8", newline="") as file:
        return {
            int(row["type"]): Type(row["name"], int(row["block_weights"]), int(row["block_bytes"]), int(row["row_bytes"]))
            for row in csv.DictReader(file)
        }


@dataclass(frozen=True)
class Tensor:
    """A tensor: its shape, a row's width first as in the file, its type's name, its bytes."""

    shape: tuple[int, ...]
    type: str
    n_bytes: int

    @property
    def params(self) -> int:
        """Weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """Contents of a GGUF file before its weights."""

    fields: Mapping[str, Any]  # numbers, texts, and lists with at most a value a layer
    tensors: Mapping[str, Tensor]  # in the order of the file
    unknown: tuple[str, ...]  # types without a row in the table: bytes of their tensors are what lies before the next
    whole: bool  # the weights are in the file


def read_header(path: Path) -> Header:
    """Read the header of one file; `ModelError` if it is none or claims what it cannot hold."""
    try:
        with path.open("rb") as file:
            if not file.read(1):  # which cannot be mapped
                raise ModelError(f"{path}: expected a GGUF file, got an empty one; fetch it anew")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"{path}: expected a GGUF file, got: {error.strerror or error}; check the path") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 0
        self._order = "<"

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._wrong("a GGUF file", f"one that begins with {self._data[:4]!r}")
        self._at = 4
        if self._size >= 8 and not int.from_bytes(self._data[4:6], "little"):
            self._order = ">"
        version = self._number("I", "the version")
        if version not in (2, 3):
            raise self._wrong("GGUF of version 2 or 3", version)
        n_tensors, n_fields = self._number("Q", "the number of tensors"), self._number("Q", "the number of fields")
        self._claim("tensors", n_tensors, TENSORS, 24)
        self._claim("fields of metadata", n_fields, _FIELDS, 13)
        fields = {}
        for _ in range(n_fields):
            name = self._text("a name in the metadata")
            fields[name] = self._value(self._number("I", name), name)
        found = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise self._wrong("general.alignment: a number of bytes", alignment)
        begin = -(-self._at // alignment) * alignment
        tensors, unknown = self._with_bytes(found, begin)
        last = max((offset + tensors[name].n_bytes for name, _, _, offset in found), default=0)
        return Header(fields, tensors, unknown, begin + last <= self._size)

    def _with_bytes(
        self, found: list[tuple[str, tuple[int, ...], int, int]], begin: int
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        known = types()
        offsets = sorted({offset for *_, offset in found} | {max(self._size - begin, 0)})
        following = dict(pairwise(offsets))
        tensors: dict[str, Tensor] = {}
        unknown: dict[str, None] = {}
        for name, shape, number, offset in found:
            rows = math.prod(shape[1:])
            if (kind := known.get(number)) is None:
                unknown[f"type {number}"] = None
                tensors[name] = Tensor(shape, f"type {number}", following.get(offset, offset) - offset)
            else:
                blocks = -(-shape[0] // kind.block_weights) if shape else 1
                tensors[name] = Tensor(shape, kind.name, rows * (blocks * kind.block_bytes + kind.row_bytes))
        return tensors, tuple(unknown)

    def _wrong(self, expected: str, got: object) -> ModelError:
        return ModelError(f"{self._path}: expected {expected}, got {got}; {_REMEDY}")

    def _claim(self, what: str, n: int, most: int, least: int) -> None:
        """Check a count against a limit, and against the rest of the file at so many bytes each."""
        self._check(what, n, min(most, (self._size - self._at) // least))

    def _check(self, what: str, n: int, most: int) -> None:
        check_claim(self._path, what, n, most, error=ModelError, remedy=_REMEDY)

    def _skip(self, n: int, what: str) -> int:
        at = self._at
        self._check(f"bytes of {what}", n, self._size - at)
        self._at += n
        return at

    def _number(self, form: str, what: str) -> Any:
        at = self._skip(struct.calcsize("=" + form), what)
        return struct.unpack_from(self._order + form, self._data, at)[0]

    def _text(self, what: str) -> str:
        length = self._number("Q", what)
        at = self._skip(length, what)
        return self._data[at : at + min(length, 1000)].decode("utf-8", "replace")

    def _value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text(name)
        if kind in _FORMS:
            return self._number(_FORMS[kind], name)
        if kind != _LIST:
            raise self._wrong(f"a type of value from 0 to 12 of {name}", kind)
        if depth == _DEPTH:
            raise self._wrong(f"at most {_DEPTH} lists inside each other in {name}", "more")
        inner, n = self._number("I", name), self._number("Q", name)
        least = _LEAST.get(inner) or struct.calcsize("=" + _FORMS.get(inner, "B"))
        self._claim(f"entries of {name}", n, self._size, least)
        if inner in _FORMS:
            at = self._skip(n * least, name)
            return list(struct.unpack_from(f"{self._order}{n}{_FORMS[inner]}", self._data, at)) if n <= _KEPT else None
        if inner == _STRING:
            return self._over_texts(n, name)
        for _ in range(n):
            self._value(inner, name, depth + 1)
        return None

    def _over_texts(self, n: int, name: str) -> None:
        """Go over a list of texts: a vocabulary has 150,000, so that each costs little."""
        data, at, length = self._data, self._at, struct.Struct(self._order + "Q").unpack_from
        try:
            for _ in range(n):
                at += 8 + length(data, at)[0]
        except (struct.error, OverflowError, ValueError):
            at = self._size + 1
        if at > self._size:
            raise self._wrong(f"{n} entries of {name}", "fewer")
        self._at = at

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name")
        n_axes = self._number("I", name)
        self._claim(f"axes of {name}", n_axes, _AXES, 8)
        at = self._skip(8 * n_axes, name)
        shape = struct.unpack_from(f"{self._order}{n_axes}Q", self._data, at)
        self._check(f"weights of {name}", math.prod(shape), int(BYTES.most))
        kind, offset = self._number("I", name), self._number("Q", name)
        self._check(f"bytes to the data of {name}", offset, int(BYTES.most))
        return name, shape, kind, offset
