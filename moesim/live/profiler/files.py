"""A file on a disk that is read and written in pieces of any power of two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moesim.live.kernels.expert import ExpertKernel
from moesim.live.kernels.files import FileExperts
from moesim.live.kernels.plans import ExpertShape
from moesim.live.profiler.needs import FILE_BLOCK

_SHAPE = ExpertShape(4096, 4096, 16, 2, FILE_BLOCK)  # two matrices that are exactly one block


class TiledFile:
    """Random bytes in a file, in pieces."""

    def __init__(self, path: Path, n_bytes: int, seed: int) -> None:
        path.unlink(missing_ok=True)  # of a measurement that was killed
        self._n_bytes = n_bytes
        self._first = FileExperts.create(path, n_bytes // FILE_BLOCK, FILE_BLOCK, ExpertKernel(_SHAPE), seed)
        self._tiled: dict[int, FileExperts] = {}
        self._buffered = -1

    @property
    def mode(self) -> str:
        """``direct`` or ``buffered``, as of `FileExperts`."""
        return self._first.mode

    def _of(self, size: int) -> FileExperts:
        if size not in self._tiled:
            self._tiled[size] = FileExperts(self._first.path, self._n_bytes // size, size)
        return self._tiled[size]

    def _piece(self, turn: int, size: int) -> int:
        """Scatter the pieces over the file: an odd factor reaches each of a power of two once."""
        return turn * 0x9E3779B1 % (self._n_bytes // size)

    def read(self, turn: int, part: Any) -> None:
        """Read a piece past the operating system's cache."""
        self._of(len(part)).read(self._piece(turn, len(part)), part)

    def write(self, turn: int, part: Any) -> None:
        """Write a piece."""
        self._of(len(part)).write(self._piece(turn, len(part)), part)

    def read_cached(self, turn: int, part: Any) -> None:
        """Read a piece through the operating system's cache."""
        if self._buffered < 0:
            self._buffered = os.open(self._first.path, os.O_RDONLY)
        data, offset = part.numpy().data, self._piece(turn, len(part)) * len(part)
        while data:
            n = os.preadv(self._buffered, [data], offset)
            if n <= 0:
                raise OSError(f"{self._first.path} ends at byte {offset}")
            data, offset = data[n:], offset + n

    def remove(self) -> None:
        """Close and delete the file."""
        if self._buffered >= 0:
            os.close(self._buffered)
            self._buffered = -1
        for file in self._tiled.values():
            file.close()
        self._first.remove()
