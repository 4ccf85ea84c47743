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
    """Makes and moves tensors on the devices of a profile.

    Parameters
    ----------
    places : mapping of str to str
        Where each device of the profile is for PyTorch: ``"cpu"`` or ``"cuda:0"``.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = dict(places)

    @staticmethod
    def n_gpus() -> int:
        """GPUs that PyTorch finds."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def zeros(self, place: str, rows: int, width: int, dtype: Any) -> Tensor:
        """Zeros, (rows, width)."""
        return torch.zeros(rows, width, dtype=dtype, device=place)

    def index(self, place: str, rows: NDArray[np.int64]) -> Tensor:
        """Indices, (n,) int64."""
        return torch.from_numpy(rows).to(place)

    def values(self, place: str, values: list[float], dtype: Any) -> Tensor:
        """Numbers, (n,)."""
        return torch.tensor(values, dtype=dtype, device=place)

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
        """The coordinator copies outside of the lanes' streams, so the next call must find the rows there."""
        for tensor in tensors:
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
