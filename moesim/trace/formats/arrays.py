"""``.npy`` and ``.npz``: read a piece at a time, never unpickled, never larger than they can honestly be."""

from __future__ import annotations

import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_expansion
from moesim.trace.formats.contract import wrong
from moesim.trace.formats.store import PIECE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BROKEN = (
    OSError,
    EOFError,
    ValueError,  # includes UnicodeDecodeError
    TypeError,
    KeyError,
    SyntaxError,  # of a header, which is a Python literal
    tokenize.TokenError,
    RecursionError,
    OverflowError,
    MemoryError,
    UserWarning,  # a header written by Python 2
    NotImplementedError,  # compression of an archive
    RuntimeError,  # an archive with a password
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, of which only type and shape have been read."""

    path: Path  # the file
    member: str | None  # its name in an archive
    # dtype, shape: as its header says; the bytes are there
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def place(self) -> str:
        """What to call it in a message."""
        return f"{self.path}" if self.member is None else f"{self.path}: {self.member}"

    def expect(self, shape: tuple[int | None, ...], meaning: str) -> StoredArray:
        """Check the shape; None stands for any positive length."""
        fits = len(shape) == len(self.shape) and all(
            have >= 1 if want is None else have == want for have, want in zip(self.shape, shape, strict=True)
        )
        if not fits:
            text = ", ".join("n" if want is None else str(want) for want in shape)
            remedy = "save it with these axes" if self.member is None else "name another array, or the format"
            raise wrong(self.place, f"shape ({text}), {meaning}", self.shape, remedy)
        return self

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Read some rows at a time."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        with _reading(self.place), _opened(self.path, self.member) as (stream, _):
            _read_header(stream, self.place)
            for first in range(0, self.shape[0], step):
                n = min(step, self.shape[0] - first)
                data = stream.read(n * row_bytes)
                if len(data) < n * row_bytes:
                    raise wrong(self.place, f"{n * row_bytes} more bytes from row {first}", f"{len(data)}", "it is truncated")
                yield first, np.frombuffer(data, self.dtype).reshape(n, *self.shape[1:])
            if self.member is not None:
                stream.read(1)  # at the end of a member its checksum is compared

    def read(self) -> NDArray[Any]:
        """Read the whole array; check its shape first, since it goes to memory."""
        if not self.shape:
            flat = StoredArray(self.path, self.member, self.dtype, (1,))
            return flat.read().reshape(())
        return np.concatenate([rows for _, rows in self.pieces()])


def open_array(path: Path) -> StoredArray:
    """Look into a ``.npy`` file."""
    return _look(path, None)


def open_archive(path: Path) -> dict[str, StoredArray]:
    """Look into a ``.npz`` file: its arrays by name, without ``.npy``."""
    place = str(path)
    with _reading(place), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if not members:
            raise wrong(place, "an archive of arrays", "an empty one", "write it again with numpy.savez")
        for info in members:
            if not info.filename.endswith(".npy"):
                got = f"a member '{info.filename}'"
                raise wrong(place, "an archive of .npy arrays", got, "pickles are never loaded; write it with numpy.savez")
        expanded = sum(info.file_size for info in members)
        check_expansion(place, expanded, path.stat().st_size)
        names = [info.filename.removesuffix(".npy") for info in members]
        if len(set(names)) < len(names):
            raise wrong(place, "each array once", f"{sorted(names)}", "write it again with numpy.savez")
    return {name: _look(path, name) for name in names}


def _look(path: Path, member: str | None) -> StoredArray:
    place = f"{path}" if member is None else f"{path}: {member}"
    with _reading(place), _opened(path, member) as (stream, size):
        shape, fortran, dtype = _read_header(stream, place)
        begin = stream.tell()
    if dtype.hasobject:
        raise wrong(place, "numbers", "Python objects, which need a pickle", "pickles are never loaded; save numbers")
    if fortran and len(shape) > 1:
        raise wrong(place, "rows one after the other (C order)", "Fortran order", "save numpy.ascontiguousarray of it")
    n_bytes = math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or size - begin != n_bytes:
        got = f"{size - begin}"
        raise wrong(place, f"{n_bytes} bytes for {dtype.name} {shape}", got, "it is truncated or altered; export it again")
    return StoredArray(path, member, dtype, shape)


def _read_header(stream: IO[bytes], place: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            found = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            found = np.lib.format.read_array_header_2_0(stream)
        else:
            raise wrong(place, "version 1.0 or 2.0 of the .npy format", version, "save it again with numpy.save")
    shape, fortran, dtype = found
    return tuple(int(n) for n in shape), bool(fortran), dtype


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file or a member; yields it with its full size."""
    if member is None:
        with path.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            yield file, size
        return
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{member}.npy")
        with archive.open(info) as stream:
            yield stream, info.file_size


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Turn what libraries raise on damaged files into one line."""
    try:
        yield
    except _BROKEN as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise wrong(place, "a readable array", text, "it is truncated, altered or of another format") from None
