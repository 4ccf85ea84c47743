"""Walk over the header of a GGUF file and check every count in it against the file's size, before the library loops over them."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

from moesim.core.gate import ENTRIES, TENSORS, check_claim
from moesim.errors import ModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each type that has a fixed length."""
_LEAST_FIELD: Final = 8 + 4 + 1  # an empty name, a type, a byte
_LEAST_TENSOR: Final = 8 + 4 + 4 + 8  # an empty name, no axis, a type, an offset
_MAX_AXES: Final = 8
_MAX_DEPTH: Final = 4  # lists inside each other
_REMEDY: Final = "it is truncated or altered, fetch it anew"


def check_claims(path: Path) -> None:
    """Raise `ModelError` if a GGUF file claims what it cannot hold; nothing of it is kept. `OSError` if it cannot be read."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ModelError(f"{path}: expected a GGUF file, got an empty one; fetch it anew")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(path, data).whole()


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at = 0
        self._order = "<"
        self._n_entries = 0

    def whole(self) -> None:
        if self._data[:4] != _MAGIC:
            raise self._wrong("a whole GGUF file", f"one that begins with {self._data[:4]!r}")
        self._skip(4, "the version")
        if self._size >= 8 and not int.from_bytes(self._data[4:6], "little"):
            self._order = ">"
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            raise self._wrong("GGUF of version 2 or 3", version)
        n_tensors, n_fields = self._number("Q", "the number of tensors"), self._number("Q", "the number of fields")
        self._claim("tensors", n_tensors, TENSORS, _LEAST_TENSOR)
        self._claim("fields of metadata", n_fields, ENTRIES, _LEAST_FIELD)
        for _ in range(n_fields):
            name = self._text("a name in the metadata")
            self._value(self._number("I", name), name, 0)
        offsets = [self._tensor() for _ in range(n_tensors)]
        for name, offset in offsets:
            self._check(f"bytes to the data of {name}", offset, self._size - self._at)

    def _claim(self, what: str, n: int, most: int, least: int) -> None:
        """Check a count against a limit and against what is left of the file, of which each takes at least so many bytes."""
        self._check(what, n, min(most, (self._size - self._at) // least))

    def _check(self, what: str, n: int, most: int) -> None:
        check_claim(self._path, what, n, most, error=ModelError, remedy=_REMEDY)

    def _wrong(self, expected: str, got: object) -> ModelError:
        return ModelError(f"{self._path}: expected {expected}, got {got}; {_REMEDY}")

    def _skip(self, n: int, what: str) -> None:
        self._check(f"bytes of {what}", n, self._size - self._at)
        self._at += n

    def _number(self, kind: str, what: str) -> int:
        at, form = self._at, struct.Struct(self._order + kind)
        self._skip(form.size, what)
        return int(form.unpack_from(self._data, at)[0])

    def _text(self, what: str) -> str:
        length, at = self._number("Q", what), self._at
        self._skip(length, what)
        return self._data[at : at + min(length, 100)].decode("utf-8", "replace")

    def _value(self, kind: int, name: str, depth: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q", name), name)
        elif kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise self._wrong(f"at most {_MAX_DEPTH} lists inside each other in {name}", "more")
            inner, n = self._number("I", name), self._number("Q", name)
            width = _WIDTHS.get(inner, 8 if inner == _STRING else 12)
            self._claim(f"entries of {name}", n, ENTRIES - self._n_entries, width)
            self._n_entries += n
            if inner in _WIDTHS:
                self._skip(n * width, name)
            else:
                for _ in range(n):
                    self._value(inner, name, depth + 1)
        else:
            if kind not in _WIDTHS:
                raise self._wrong(f"a type of value from 0 to 12 of {name}", kind)
            self._skip(_WIDTHS[kind], name)

    def _tensor(self) -> tuple[str, int]:
        """Check a tensor's name and shape; give its name and the offset of its data."""
        name = self._text("a tensor's name")
        self._claim(f"axes of {name}", n_axes := self._number("I", name), _MAX_AXES, 8)
        n_weights = 1
        for _ in range(n_axes):
            n_weights *= self._number("Q", name)
        self._check(f"weights of {name}", n_weights, 8 * self._size)  # no type has less than a bit a weight
        self._skip(4, name)
        return name, self._number("Q", name)
