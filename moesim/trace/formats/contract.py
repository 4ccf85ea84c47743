"""Formats of routing: how one is recognised, and what it hands over."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_expansion, check_made
from moesim.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.model import ModelSpec

#: What ``--phase`` may say: of all rows, or that the prompt comes first and decode after it.
PHASES = ("decode", "prefill", "both")
MAX_ID = 2**16 - 1
"""A trace holds ids in at most 16 bits."""
AXES = ("tokens", "layers", "ids")
"""Axes of an array of expert ids, in the order in which a trace has them."""
ROUTED = "that is (tokens, layers, top_k)"
"""The same for messages."""
#: What a source may lack: how a message calls it, and the option that gives it.
ASKS = {
    "axes": ("what its axes count", f"--axes {','.join(AXES)} or another order"),
    "n_layers": ("the number of layers", "--n-layers (dense ones included)"),
    "top_k": ("the number of experts of a token", "--top-k"),
    "n_experts": ("the number of experts of a layer", "--n-experts"),
    "phase": ("the phase of the rows", "--phase decode or prefill for all rows or --n-prompt with the rows that are the prompt"),
    "label": ("a label (measured or synthetic)", "--label (nothing in this format says whether an engine recorded it)"),
}  # fmt: skip
TEXT_REMEDY = (
    "the log of an engine holds no routing: vLLM and SGLang return it with an answer, llama.cpp writes it as CSV; or write lines "
    "of layer,position,expert (docs/guide/importing.md)"
)
"""Remedy for text that is no table."""
NO_PHASE = (
    "if it numbers forward passes, the first of a request being its prompt, map it with --column step=NAME; else leave it "
    "out and give --n-prompt"
)
"""Remedy for phases that are none."""
COUNTS = (
    "counts have no tokens in order, so nothing can be replayed; they serve as popularity of another trace: "
    "moesim trace calibrate TRACE --counts {} --out NAME.safetensors"
)
"""Remedy for counts in a file."""
ARRAY = "a readable array"
_HEAD_BYTES = 65_536
_APART = "import fewer requests at a time"


@dataclass(frozen=True)
class Options:
    """Statements of the user about a source.

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
    axes : tuple of str or None
        Axes of an array in their order: ``tokens``, ``layers`` and ``ids``.
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
    axes: tuple[str, ...] | None = None

    def leading_dense(self, n_layers: int) -> int:
        """Count leading dense layers of an array."""
        if self.first_layer is not None:
            if self.first_layer >= n_layers:
                expected = f"less than the {n_layers} layers of the array"
                raise wrong("--first-layer", expected, self.first_layer, "layers count from 0")
            return self.first_layer
        spec = self.spec
        return spec.n_dense_layers if spec is not None and n_layers == spec.n_layers + spec.n_dense_layers else 0


class Lacks(TraceError):
    """A source that only more options explain: names of `ASKS`, and what is known instead."""

    def __init__(self, place: object, asks: Sequence[str], got: object = "none", says: Sequence[str] = ()) -> None:
        super().__init__(f"{place}: expected {ASKS[asks[0]][0]}, got {got}; give {ASKS[asks[0]][1]}")
        self.place, self.asks, self.got, self.says = place, list(asks), got, says


@dataclass(frozen=True)
class Part:
    """Findings of a format in one file."""

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


class Store:
    """Expert ids and weights of tokens, in the order in which they are added."""

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None  # layers and experts a token of what has been added
        self.n_rows = 0  # tokens added
        self._ids: list[NDArray[np.uint16]] = []
        self._weights: list[NDArray[np.float16]] = []

    def add(self, ids: NDArray[Any], weights: NDArray[Any] | None, place: str) -> None:
        shape = (int(ids.shape[1]), int(ids.shape[2]))
        if self.shape is None:
            self.shape = shape
        if shape != self.shape:
            expected = f"{self.shape[0]} layers and {self.shape[1]} experts a token as before"
            raise wrong(place, expected, f"{shape[0]} and {shape[1]}", "import what has another shape by itself")
        if self._ids and (weights is not None) != bool(self._weights):
            raise wrong(place, "weights in all files or in none", "a mixture", "import them apart, or leave the weights out")
        self.n_rows += len(ids)
        check_made(place, "expert ids of all sources", (self.n_rows, *shape), 2, _APART)
        self._ids.append(checked_ids(ids, place))
        if weights is not None:
            self._weights.append(checked_weights(weights, place))

    def rows(self) -> tuple[NDArray[np.uint16], NDArray[np.float16] | None]:
        return np.concatenate(self._ids), np.concatenate(self._weights) if self._weights else None


def checked_ids(ids: NDArray[Any], place: str, first: int = 0) -> NDArray[np.uint16]:
    """Return ids in 16 bits; `first` numbers the first row in a message."""
    if ids.dtype.kind not in "iu":
        raise wrong(place, "integer ids of experts", ids.dtype.name)
    good = (ids >= 0) & (ids <= MAX_ID)
    _check(ids, good, place, first, f"an id in 0..{MAX_ID}", "leave out tokens whose routing was not recorded")
    return ids.astype(np.uint16)


def checked_weights(weights: NDArray[Any], place: str, first: int = 0) -> NDArray[np.float16]:
    """Return weights as float16."""
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


class Probe:
    """The beginning of a file, as formats ask for it; only `parquet` raises for content."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def head(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(_HEAD_BYTES)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of an archive, or of that of a ``.npy`` under the empty name."""
        try:
            if self.head.startswith(b"\x93NUMPY"):
                return {"": open_array(self.path).shape}
            return archive_shapes(self.path) if self.head.startswith(b"PK") else {}
        except TraceError:
            return {}

    @cached_property
    def is_json(self) -> bool:
        return re.match(rb"\s*(\{\s*[\"}]|\[\s*[][{\"\d-])", self.head) is not None

    @cached_property
    def preamble(self) -> list[str]:
        """Lines with ``#`` before all others."""
        found = []
        for line in self.head.split(b"\n"):
            if not line.startswith(b"#"):
                break
            found.append(line.decode("utf-8", "replace").strip())
        return found

    @cached_property
    def first_line(self) -> str | None:
        try:
            text = self.head.split(b"\n")[len(self.preamble)].decode("utf-8-sig").rstrip("\r")
        except (IndexError, UnicodeDecodeError):
            return None
        return text if text.replace("\t", " ").isprintable() else None

    @cached_property
    def delimiter(self) -> str:
        return max(",\t;", key=(self.first_line or "").count)

    @cached_property
    def csv_names(self) -> list[str]:
        """Values of the first line of a table as text."""
        line = self.first_line
        if line is None or self.is_json or line.startswith("PAR1"):
            return []
        return [name.strip().strip('"') for name in line.split(self.delimiter)]

    @property
    def headless(self) -> bool:
        return bool(self.csv_names) and all(name.lstrip("-").isdecimal() for name in self.csv_names)

    @cached_property
    def parquet(self) -> tuple[list[str], dict[bytes, bytes]]:
        from pyarrow import parquet

        with reading(self.path, "a Parquet file"):
            schema = parquet.read_schema(self.path)
        return schema.names, dict(schema.metadata or {})


def open_array(path: Path) -> NDArray[Any]:
    """Map the array of a ``.npy`` file."""
    with reading(path, ARRAY):
        array = np.lib.format.open_memmap(path, mode="r")
        end = array.offset + array.nbytes
    if path.stat().st_size != end:
        remedy = "it is truncated or altered; export it again"
        raise wrong(path, f"{array.nbytes} bytes for {array.dtype.name} {array.shape}", "more", remedy)
    return array


def archive_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the arrays of a ``.npz`` file, which is no bomb."""
    found: dict[str, tuple[int, ...]] = {}
    with reading(path, ARRAY), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if not members:
            raise wrong(path, "an archive of arrays", "an empty one", "write it again with numpy.savez")
        check_expansion(path, sum(info.file_size for info in members), path.stat().st_size)
        for info in members:
            name = info.filename.removesuffix(".npy")
            if name == info.filename or name in found:
                remedy = "pickles are never loaded; write it with numpy.savez"
                raise wrong(path, "an archive of .npy arrays, each once", f"a member '{info.filename}'", remedy)
            with archive.open(info) as stream:
                first = np.lib.format.read_magic(stream) == (1, 0)
                read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                found[name] = tuple(read(stream)[0])
    return found


@dataclass(frozen=True)
class Format:
    """One format of routing."""

    name: str  # for `--format`
    about: str  # one line for lists
    matches: Callable[[Probe], bool]  # whether a file looks like it, from its first bytes. Must not raise
    # puts the routing of a file into a store and says what else it found. Raises `TraceError` with file and place
    read: Callable[[Path, Options, Store], Part]
    # `measured` if only an engine writes this format; None if nothing in it says where the figures come from
    label: str | None = "measured"
    columns: tuple[str, ...] = ()  # our names of the columns or arrays that `--column` may map; empty if theirs are fixed
    first_layer: bool = False  # whether it has layers without experts, which `--first-layer` leaves out


@contextmanager
def reading(place: object, what: str) -> Iterator[None]:
    """Turn what libraries raise on damaged files into one line."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise wrong(place, what, text, "it is truncated, altered or of another format") from None


def wrong(place: object, expected: object, got: object, remedy: str = "export it again") -> TraceError:
    """Build the message about a source."""
    text = " ".join(f"{place}: expected {expected}, got {got}; {remedy}".split())
    return TraceError(text if len(text) <= 1000 else f"{text[:997]}...")
