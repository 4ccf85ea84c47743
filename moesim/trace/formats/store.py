"""Routing on its way into a trace: kept on disk, so that it may be larger than memory, and checked as it comes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from moesim.trace.formats.contract import wrong

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
