"""Limits of what is read: sizes of files, counts that they claim, arrays made of them.

docs/reference/yaml.md states the limits.
"""

from __future__ import annotations

import csv
import errno
import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from moesim.core.units import format_memory
from moesim.errors import ConfigError, InputError, TraceError


class Form(NamedTuple):
    """A kind of file, and its largest size."""

    name: str
    most: int  # bytes


YAML: Final = Form("YAML", 2**22)
"""Reading takes a minute from there on; the largest that is shipped has 40 kB."""
JSON: Final = Form("JSON", 2**26)
"""The largest list of weights published (DeepSeek-V3's) has 9 MB."""
TABLE: Final = Form("a table written by hand", 2**26)
"""Observations, published figures: read as a whole."""
ANSWERS: Final = Form("a JSON document", 2**30)
"""An answer of a server with routing in it, of half a million tokens; of answers one a line, each."""
ROUTING: Final = Form("recorded routing", 2**32)
"""A file to import; it is read as a whole, and sorting it takes some times as much memory."""
RESULT: Final = Form("a file of a result", 2**32)
"""Files that moesim wrote: runs, records, timelines."""
HEADER: Final = Form("a table of arrays", 2**25)
"""The table at the beginning of a trace."""

EXPANSION: Final = 200
"""An archive or a table may hold so many times its size. Deflate reaches 1000 on zeros; routing does not compress to a tenth."""
HARMLESS: Final = 2**26
"""Below this many bytes nothing is a bomb."""
MADE: Final = 2**31
"""Bytes of one array that is made of what was read: 25 times the pairs of experts of the largest model published (Kimi K2)."""
TENSORS: Final = 10**5
"""Tensors of a GGUF file: twice those of a large model with one tensor an expert."""


_PIECE: Final = 2**20
SMALLER: Final = "give the file that is meant, or split it"


class TooLargeError(OSError):
    """A file that is larger than its form may be."""

    def __init__(self, path: Path, form: Form) -> None:
        super().__init__(errno.EOVERFLOW, f"more than the {format_memory(form.most)} that {form.name} may have", str(path))


def read_bytes(path: Path, form: Form) -> bytes:
    """Read a whole file; `TooLargeError` if it is larger than its form may be, or has no end."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > form.most:
            raise TooLargeError(path, form)
        pieces, n_bytes = [], 0
        while piece := file.read(_PIECE):  # a pipe has no size, and a read of the limit would take its memory
            pieces.append(piece)
            n_bytes += len(piece)
            if n_bytes > form.most:
                raise TooLargeError(path, form)
    return b"".join(pieces)


def read_text(
    path: Path, form: Form, what: str, *, error: type[InputError] = ConfigError, remedy: str = "check the path",
    encoding: str = "utf-8",
) -> str:  # fmt: skip
    """Read a whole text, or raise an error of one line: `what` was expected of the file."""
    try:
        return decoded(path, form, encoding)
    except (OSError, ValueError) as wrong:
        remedy = SMALLER if isinstance(wrong, TooLargeError) else remedy
        raise error(f"{path}: expected {what}, got: {why_not(wrong)}; {remedy}") from None


def decoded(path: Path, form: Form, encoding: str = "utf-8") -> str:
    """Read a whole text; `why_not` words the `OSError` or `ValueError` that this may raise."""
    return read_bytes(path, form).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def pasted(data: bytes) -> str:
    """Decode what people paste: UTF-8, or UTF-16 as Windows writes it; other bytes become a sign of their own."""
    evens, odds = data[:64:2].count(0), data[1:64:2].count(0)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    if max(evens, odds) > 16:  # of 32: text in UTF-16 without a mark
        return data.decode("utf-16-be" if evens > odds else "utf-16-le", errors="replace")
    return data.decode("utf-8", errors="replace")


def why_not(error: OSError | ValueError) -> str:
    """Word the reason why a text could not be read."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def lines(file: IO[bytes], form: Form) -> Iterator[bytes]:
    """Read lines, each at most as large as its form; `TooLargeError` otherwise."""
    while line := file.readline(form.most + 1):
        if len(line) > form.most:
            raise TooLargeError(Path(file.name), form)
        yield line


def check_text(text: str, form: Form) -> None:
    """Raise `ConfigError` if a text is longer than its form may be."""
    if len(text) > form.most:
        raise ConfigError(
            f"expected at most {format_memory(form.most)} of {form.name}, got {format_memory(len(text))}; {SMALLER}"
        )


def check_claim(place: object, what: str, n: int, most: int, *, error: type[InputError], remedy: str) -> None:
    """Check a count that a file claims against the most that its size or a limit allows."""
    if n > most:
        raise error(f"{place}: expected at most {most} {what}, got {n}; {remedy}")


def check_expansion(place: object, expanded: int, n_bytes: int) -> None:
    """Check the expanded size of an archive or table against its own."""
    limit = max(HARMLESS, EXPANSION * n_bytes)
    if expanded > limit:
        raise TraceError(
            f"{place}: expected at most {limit} bytes when expanded, got {expanded} in a file of {n_bytes} bytes; "
            "no table compresses so well; it was not opened"
        )


def check_made(place: object, what: str, shape: Sequence[int], itemsize: int, remedy: str) -> None:
    """Check the size of an array before it is made."""
    n_bytes = math.prod(shape) * itemsize
    if n_bytes > MADE:
        product = " x ".join(map(str, shape))
        raise TraceError(
            f"{place}: expected at most {format_memory(MADE)} of {what}, got {format_memory(n_bytes)} ({product}); {remedy}"
        )


def check_pairs(place: object, n_layers: int, n_experts: int) -> None:
    """Check the size of a table of pairs of experts before it is made."""
    remedy = "check the number of experts; tables of pairs are for some thousand experts a layer"
    check_made(place, "pairs of experts, layers x experts x experts", (n_layers, n_experts, n_experts), 8, remedy)


class Line(NamedTuple):
    """A row of a table written by hand."""

    texts: dict[str, str]  # by column
    place: str  # file and line, for messages


def read_lines(path: Path, columns: Sequence[str], what: str) -> list[Line]:
    """Read a CSV table with fixed columns; errors name the line."""
    found = []
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, TABLE, what)))
        if list(reader.fieldnames or ()) != list(columns):
            raise ConfigError(f"{path}: expected the columns {','.join(columns)}, got {','.join(reader.fieldnames or ())}")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                n = len(columns)
                raise ConfigError(f"{place}: expected {n} fields, got another number; quote fields that contain a comma")
            found.append(Line(dict(row), place))
    except csv.Error as error:
        raise ConfigError(f"{path}: expected {what}, got: {error}; check the path") from None
    return found
