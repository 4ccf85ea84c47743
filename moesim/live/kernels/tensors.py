"""Small tensors of a step: made where a device is, and moved between devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class Tensors:
    """Makes and moves tensors on the devices of a profile."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = dict(places)
        self._streams: dict[str, list[torch.cuda.Stream]] = {}

    def zeros(self, place: str, rows: int, width: int, dtype: Any) -> Tensor:
        """Zeros, (rows, width)."""
        made = torch.zeros(rows, width, dtype=dtype, device=place)
        self._wait(made)
        return made

    def index(self, place: str, rows: NDArray[np.int64]) -> Tensor:
        """Indices, (n,) int64."""
        made = torch.from_numpy(rows).to(place)
        self._wait(made)
        return made

    def values(self, place: str, values: list[float], dtype: Any) -> Tensor:
        """Numbers, (n,)."""
        made = torch.tensor(values, dtype=dtype, device=place)
        self._wait(made)
        return made

    def streams(self, n: int, places: list[str]) -> list[torch.cuda.Stream]:
        """Streams of the GPU among some places; always the same ones."""
        gpu = next(place for place in places if place != "cpu")
        if gpu not in self._streams:
            made: list[torch.cuda.Stream] = [torch.cuda.Stream(device=gpu) for _ in range(n)]  # type: ignore[no-untyped-call]
            self._streams[gpu] = made
        return self._streams[gpu]

    def bytes(self, place: str, n_bytes: int) -> Tensor:
        """Bytes without meaning, (n_bytes,) uint8."""
        return torch.zeros(n_bytes, dtype=torch.uint8, device=place)

    def copy_rows(self, dst: Tensor, src: Tensor, rows: Iterable[int] | None = None) -> None:
        """Copy some rows, or all, between devices, and wait until they are there."""
        if rows is None:
            dst.copy_(src)
        else:
            index = torch.tensor(list(rows), dtype=torch.int64)
            dst[index.to(dst.device)] = src[index.to(src.device)].to(dst.device)
        self._wait(dst, src)

    def bring(self, place: str, values: Tensor) -> Tensor:
        """Copy a tensor to another device, and wait until it is there."""
        brought = values.clone() if values.device == torch.device(place) else values.to(place)
        self._wait(brought, values)
        return brought

    @staticmethod
    def _wait(*tensors: Tensor) -> None:
        """What is made here is made outside of the lanes' streams, and the next call on one of them must find it there."""
        for tensor in tensors:
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
