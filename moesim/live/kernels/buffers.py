"""Flat buffers for experts: many of one size in one allocation, each on a page of its own."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from moesim.live.kernels.errors import KernelError
from moesim.live.kernels.machine import check_room
from moesim.live.kernels.plans import PAGE, buffer_bytes, round_up

_cuda: Any = torch.cuda  # its runtime carries no types


class Buffers:
    """Flat buffers of equal size in one allocation, aligned to pages."""

    def __init__(self, n: int, n_bytes: int, device: str = "cpu", *, pinned: bool = False, lock_pages: bool = False) -> None:
        if n < 1 or n_bytes < 1:
            raise ValueError(f"expected at least one buffer of at least one byte, got {n} of {n_bytes}")
        self.n, self.n_bytes, self.total_bytes = n, n_bytes, self.required_bytes(n, n_bytes)
        where = torch.device(device)
        if (pinned or lock_pages) and where.type != "cpu":
            raise KernelError(f"buffers on {device}: expected host memory to page-lock, got {device}; leave pinned out")
        if pinned and not torch.cuda.is_available():
            raise KernelError("pinned buffers: expected a CUDA GPU that copies from them, got none; leave pinned out")
        check_room(f"{n} buffers of {n_bytes} bytes", self.total_bytes, where)
        self._stride = round_up(n_bytes)
        whole = torch.empty(self.total_bytes, dtype=torch.uint8, device=where)
        start = -whole.data_ptr() % PAGE
        self._data = whole[start : start + n * self._stride]
        if pinned:
            _pin(self._data)
            weakref.finalize(self, _unpin, self._data)
        if lock_pages:
            _lock(self._data)

    @staticmethod
    def required_bytes(n: int, n_bytes: int) -> int:
        """Tell what ``n`` buffers of ``n_bytes`` bytes will allocate."""
        return buffer_bytes(n, n_bytes)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        """Get buffer ``i``: a view, uint8, shape (n_bytes,), page-aligned, with room up to the next page behind it."""
        if not 0 <= i < self.n:
            raise IndexError(f"buffer {i} of {self.n}")
        start = i * self._stride
        return self._data[start : start + self.n_bytes]


def _pin(data: Tensor) -> None:
    # Registered rather than taken from torch's pinned allocator, which rounds up to a power of two.
    status = int(_cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if status != 0:
        raise KernelError(f"pinned buffers: expected to page-lock {data.numel()} bytes, got CUDA error {status}; take fewer")


def _unpin(data: Tensor) -> None:
    _cuda.cudart().cudaHostUnregister(data.data_ptr())


def _lock(data: Tensor) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlock"):
        raise KernelError("locked buffers: expected an operating system with mlock, got none; leave lock_pages out")
    address, size = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
    if libc.mlock(address, size) != 0:
        raise KernelError(
            f"locked buffers: expected to lock {data.numel()} bytes, got: {os.strerror(ctypes.get_errno())}; raise 'ulimit -l'"
        )
