"""Experts in a file on a disk, read and written past the operating system's cache where that can be done."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from moesim.errors import CapacityError
from moesim.live.kernels.buffers import Buffers
from moesim.live.kernels.errors import KernelError
from moesim.live.kernels.plans import PAGE

if TYPE_CHECKING:
    from moesim.live.kernels.expert import ExpertKernel

_SPARE = 1.05  # a disk is never filled to the brim


class FileExperts:
    """Experts of equal size in one file, each on pages of its own; several threads may each have another one in hand."""

    def __init__(self, path: Path, n: int, n_bytes: int) -> None:
        self.path, self.n, self.n_bytes = path, n, n_bytes
        self._stride = -(-n_bytes // PAGE) * PAGE
        # Mode direct: past the cache of the operating system (the host of a virtual machine may still cache). Mode buffered: the
        # file system refuses that, and what was read or written is dropped from the cache afterwards.
        self._fd, self.mode = _open(path)
        size = os.fstat(self._fd).st_size
        if size != n * self._stride:
            self.close()
            raise KernelError(
                f"{path}: expected {n} experts in {n * self._stride} bytes, got {size}; remove it and write it anew"
            )

    @classmethod
    def create(cls, path: Path, n: int, n_bytes: int, kernel: ExpertKernel, seed: int = 0) -> FileExperts:
        """Write experts with random weights; expert i is filled from ``seed + i``."""
        stride = -(-n_bytes // PAGE) * PAGE
        try:
            free = shutil.disk_usage(path.parent).free
            if n * stride * _SPARE > free:
                raise CapacityError(
                    f"{path}: expected {int(n * stride * _SPARE)} free bytes for {n} experts, got {free}; choose another folder"
                )
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise KernelError(f"{path}: expected a new file that can be written, got: {error.strerror}; choose another") from None
        try:
            try:
                _allocate(fd, n * stride)
                _write_all(fd, n, n_bytes, kernel, seed)
            finally:
                os.close(fd)
            return cls(path, n, n_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise KernelError(f"{path}: expected to write {n} experts, got: {error.strerror}; choose another folder") from None
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def read(self, i: int, flat: Tensor) -> None:
        """Read expert ``i``."""
        self._move(i, flat, write=False)

    def write(self, i: int, flat: Tensor) -> None:
        """Write expert ``i``, as a write-back does. In mode buffered it is synced too."""
        self._move(i, flat, write=True)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Close and delete the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _move(self, i: int, flat: Tensor, *, write: bool) -> None:
        if not 0 <= i < self.n:
            raise IndexError(f"expert {i} of {self.n} in {self.path}")
        if flat.numel() != self.n_bytes or flat.device.type != "cpu" or flat.data_ptr() % PAGE:
            raise ValueError(f"expected a page-aligned buffer of {self.n_bytes} bytes in host memory (see Buffers)")
        data, start = flat.numpy().data, i * self._stride
        whole = self.n_bytes // PAGE * PAGE
        _transfer(self._fd, data[:whole], start, write=write)
        if whole < self.n_bytes:  # O_DIRECT wants whole pages: the last one goes through a page of ours
            rest = self.n_bytes - whole
            with mmap.mmap(-1, PAGE) as page, memoryview(page) as view:
                if write:
                    view[:rest] = data[whole:]
                _transfer(self._fd, view, start + whole, write=write)
                if not write:
                    data[whole:] = view[:rest]
        if self.mode == "buffered":
            if write:
                os.fdatasync(self._fd)
            _forget(self._fd, start, self._stride)


def _open(path: Path) -> tuple[int, str]:
    try:
        direct = getattr(os, "O_DIRECT", 0)
        if direct:
            try:
                fd = os.open(path, os.O_RDWR | direct)
                try:
                    with mmap.mmap(-1, PAGE) as page:
                        os.preadv(fd, [page], 0)  # some file systems refuse only now
                    return fd, "direct"
                except OSError:
                    os.close(fd)
                    raise
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        return os.open(path, os.O_RDWR), "buffered"
    except OSError as error:
        raise KernelError(f"{path}: expected a file of experts, got: {error.strerror}; write it first") from None


def _transfer(fd: int, data: memoryview, offset: int, *, write: bool) -> None:
    move = os.pwritev if write else os.preadv
    while data:
        n = move(fd, [data], offset)
        if n <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset}")
        data, offset = data[n:], offset + n


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def _write_all(fd: int, n: int, n_bytes: int, kernel: ExpertKernel, seed: int) -> None:
    buffer = Buffers(1, n_bytes)[0]
    stride = -(-n_bytes // PAGE) * PAGE
    for i in range(n):
        kernel.fill(buffer, seed + i)
        _transfer(fd, buffer.numpy().data, i * stride, write=True)
    os.fsync(fd)
    _forget(fd, 0, n * stride)


def _forget(fd: int, offset: int, length: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
