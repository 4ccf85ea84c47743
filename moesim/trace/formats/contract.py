"""What a format of routing is: how it is recognised, what it may ask the user, and what it hands over."""

from __future__ import annotations

import io
import json
import math
import struct
import tempfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from moesim.core.gate import check_expansion
from moesim.errors import TraceError, unknown_name
from moesim.model import builtin_models

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.model import ModelSpec

#: What ``--phase`` may say: of all rows, or that the prompt comes first and decode after it.
PHASES = ("decode", "prefill", "both")


@dataclass(frozen=True)
class Options:
    """What the user said about a source.

    Attributes
    ----------
    model : str or None
        Name of the model; one that is built in (or a ``config.json``) also gives `spec`.
    spec : ModelSpec or None
        Its shape, if it is known.
    n_experts, n_layers, top_k : int or None
        What the source does not say; from `spec` where the user did not.
    first_layer : int or None
        Layers before this one are dense and hold no routing.
    phase : {"decode", "prefill", "both"} or None
        Phase of the rows, where it is not recorded.
    n_prompt : tuple of int or None
        Prompt tokens of each request, or of all if there is one number.
    columns : mapping of str to str
        Our name of a column or array -> its name in the source.
    incomplete : {"tokens", "layers"}
        What is left out where a source lacks a layer of some tokens.
    """

    model: str | None = None
    spec: ModelSpec | None = None
    n_experts: int | None = None
    n_layers: int | None = None
    top_k: int | None = None
    first_layer: int | None = None
    phase: str | None = None
    n_prompt: tuple[int, ...] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    incomplete: str = "tokens"


@dataclass(frozen=True)
class Part:
    """What a format found in one file, beside the routing that it put into the store."""

    lengths: NDArray[np.int64]  # rows of each request, in the order in which they were stored
    n_prompt: NDArray[np.int64] | None = None  # prompt tokens of each, if the source says
    phased: bool = False  # whether the source says that the first `n_prompt` rows are the prompt and all others decode
    offset: NDArray[np.int64] | None = None  # position of the first row of each; None: 0
    n_experts: int | None = None  # if the source says
    # model, label: if the source says
    model: str | None = None
    label: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # more for the header
    notes: tuple[str, ...] = ()  # what was left out and why, one line each, for the user and the header


def wrong(place: object, expected: object, got: object, remedy: str = "export it again") -> TraceError:
    """Build the one line for something that is wrong in a source."""
    text = " ".join(f"{place}: expected {expected}, got {got}; {remedy}".split())
    return TraceError(text if len(text) <= 1000 else f"{text[:997]}...")


MAX_ID = 2**16 - 1
"""A trace holds ids in at most 16 bits."""
PIECE_BYTES = 2**23
"""About so much is in memory at once."""


class Spool:
    """Columns that grow at the end, each in a file of its own.

    >>> import tempfile, pathlib
    >>> spool = Spool(pathlib.Path(tempfile.mkdtemp()))
    >>> spool.append("layer", np.array([3, 4], np.int32)); spool.append("layer", np.array([5], np.int32))
    >>> spool.column("layer").tolist()
    [3, 4, 5]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._types: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}

    def append(self, name: str, rows: NDArray[Any]) -> None:
        """Add rows to a column; all of a column have one type and one shape."""
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
            self._types[name] = (rows.dtype, rows.shape[1:])
        assert self._types[name] == (rows.dtype, rows.shape[1:])
        self._files[name].write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def column(self, name: str) -> NDArray[Any]:
        """Map a column into memory; nothing can be added to it afterwards."""
        self._files[name].close()
        dtype, shape = self._types[name]
        path = self.folder / name
        if not path.stat().st_size:  # cannot be mapped
            return np.zeros((0, *shape), dtype)
        return np.memmap(path, dtype, "r").reshape(-1, *shape)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store:
    """Expert ids and weights of tokens, in the order in which they are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # as given
        self.shape: tuple[int, int] | None = None  # of what has been added
        self.n_rows = 0  # tokens added
        self._spool = Spool(folder)

    def add(self, ids: NDArray[Any], weights: NDArray[Any] | None, place: str, first: int = 0) -> None:
        """Add tokens."""
        shape = ids.shape[1:]
        if self.shape is None:
            self.shape = (int(shape[0]), int(shape[1]))
        if shape != self.shape:
            expected = f"{self.shape[0]} layers and {self.shape[1]} experts a token as before"
            raise wrong(place, expected, f"{shape[0]} and {shape[1]}", "import what has another shape by itself")
        if self.n_rows and (weights is not None) != ("weights" in self._spool):
            raise wrong(place, "weights in all files or in none", "a mixture", "import them apart, or leave the weights out")
        self._spool.append("experts", checked_ids(ids, place, first))
        if weights is not None:
            self._spool.append("weights", checked_weights(weights, place, first))
        self.n_rows += len(ids)

    def finish(self, n_experts: int) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
        """Give what was added, mapped into memory."""
        experts = self._spool.column("experts")
        weights = self._spool.column("weights") if "weights" in self._spool else None
        if n_experts <= 256:
            for piece in pieces(experts):
                self._spool.append("narrow", piece.astype(np.uint8))
            experts = self._spool.column("narrow")
        return experts, weights

    def columns(self) -> NDArray[np.uint16]:
        """Ids as added, (n_rows, n_layers, top_k), for checks once the number of experts is known."""
        return self._spool.column("experts")

    def scratch(self) -> Path:
        """Make a folder for a format's own scratch files."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()


def pieces(rows: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut an array into views of some rows, small enough to compute with."""
    step = max(1, PIECE_BYTES // max(1, rows[:1].nbytes))
    return [rows[start : start + step] for start in range(0, len(rows), step)]


def checked_ids(ids: NDArray[Any], place: str, first: int = 0) -> NDArray[np.uint16]:
    """Give ids in 16 bits, or say which of them is none; `first` is the number of the first row at that place."""
    if ids.dtype.kind not in "iu":
        raise wrong(place, "integer ids of experts", ids.dtype.name)
    good = (ids >= 0) & (ids <= MAX_ID)
    _check(ids, good, place, first, f"an id in 0..{MAX_ID}", "leave out tokens whose routing was not recorded")
    return ids.astype(np.uint16)


def checked_weights(weights: NDArray[Any], place: str, first: int = 0) -> NDArray[np.float16]:
    """Give weights as float16, or say which of them is none; `first` is the number of the first row at that place."""
    if weights.dtype.kind not in "fiu":
        raise wrong(place, "weights as numbers", weights.dtype.name)
    limit = np.finfo(np.float16).max
    good = (weights >= 0) & (weights <= limit)  # not of NaN
    _check(weights, good, place, first, f"a weight in 0..{limit:g}", "record it again")
    return weights.astype(np.float16)


def _check(values: NDArray[Any], good: NDArray[np.bool_], place: str, first: int, expected: str, remedy: str) -> None:
    if not good.all():
        where = np.argwhere(~good)[0]
        got = values[tuple(where)]
        where[0] += first
        raise wrong(f"{place}{where.tolist()}", expected, got, remedy)


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


_HEAD_BYTES = 65_536
ROUTED = "that is (tokens, layers, top_k)"
"""Axes of an array of expert ids."""
TEXT_REMEDY = (
    "the log of an engine holds no routing: vLLM and SGLang return it with an answer, llama.cpp writes it as CSV; or write lines "
    "of layer,position,expert (docs/guide/importing.md)"
)
"""What to do with text that is no table."""


class Probe:
    """The beginning of a file, in the forms in which formats ask for it. Nothing here raises for content."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB."""
        with self.path.open("rb") as file:
            return file.read(_HEAD_BYTES)

    @cached_property
    def array(self) -> StoredArray | None:
        """The array of a ``.npy`` file."""
        try:
            return open_array(self.path) if self.head.startswith(b"\x93NUMPY") else None
        except TraceError:
            return None

    @cached_property
    def arrays(self) -> dict[str, StoredArray]:
        """The arrays of a ``.npz`` file, by name."""
        try:
            return open_archive(self.path) if self.head.startswith(b"PK") else {}
        except TraceError:
            return {}

    @cached_property
    def is_json(self) -> bool:
        """Whether it begins as a JSON object or list does."""
        return self.head.lstrip()[:1] in (b"{", b"[")

    @cached_property
    def json_names(self) -> list[str]:
        """Fields of the object on the first line."""
        try:
            value = json.loads(self.head.split(b"\n", 1)[0])
        except (ValueError, RecursionError):
            return []
        return list(value) if isinstance(value, dict) else []

    @cached_property
    def first_line(self) -> str | None:
        """The first line, if it is text."""
        line = self.head.split(b"\n", 1)[0]
        try:
            text = line.decode("utf-8-sig").rstrip("\r")
        except UnicodeDecodeError:
            return None
        return text if text.replace("\t", " ").isprintable() else None

    @cached_property
    def _columns(self) -> list[str]:
        line = self.first_line
        if line is None or self.is_json or line.startswith(("#", "PAR1")) or not line.isprintable():
            return []
        return [name.strip().strip('"') for name in line.split(",")]

    @property
    def csv_names(self) -> list[str]:
        """The values of the first line of a text with commas: names of columns, or numbers if `headless`."""
        return self._columns

    @property
    def headless(self) -> bool:
        """Whether that line holds whole numbers only."""
        return bool(self._columns) and all(name.lstrip("-").isdecimal() for name in self._columns)

    @cached_property
    def parquet(self) -> tuple[list[str], dict[bytes, bytes]]:
        """Columns and metadata of a Parquet file; unlike the others this raises `TraceError`."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            schema = parquet.read_schema(self.path)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise wrong(self.path, "a Parquet file", error, "it is truncated, altered or of another format") from None
        return schema.names, dict(schema.metadata or {})


@dataclass(frozen=True)
class Format:
    """One format of routing."""

    name: str  # for `--format`
    about: str  # one line for lists
    matches: Callable[[Probe], bool]  # whether a file looks like it, from its first bytes. Must not raise
    # puts the routing of a file into a store and says what else it found. Raises `TraceError` with the file and the place in it
    read: Callable[[Path, Options, Store], Part]
    # `measured` if only an engine writes this format; None if nothing in it says where the figures come from, so that the user
    # must
    label: str | None = "measured"
    columns: tuple[str, ...] = ()  # our names of the columns or arrays that `--column` may map; empty if theirs are fixed
    first_layer: bool = False  # whether it has layers without experts, which `--first-layer` leaves out


_OR_MODEL = ", or the --model's name"


def shape_remedy(options: Options, remedy: str) -> str:
    """Say why a model's name did not give the shape that is missing, if one was given; else `remedy`."""
    if options.model is None or options.spec is not None:
        return remedy
    no_model = unknown_name("built-in model", options.model, builtin_models())
    return f"{no_model}; correct --model, or {remedy.removesuffix(_OR_MODEL)}"
