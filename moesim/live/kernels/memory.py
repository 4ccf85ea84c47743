"""Bytes on devices: random contents, flat buffers, copies, files of experts, small tensors."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moesim.errors import CapacityError
from moesim.live.kernels.host import check_room
from moesim.live.kernels.plans import PAGE, KernelError, buffer_bytes, round_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


BLOCK = 262_139  # numbers drawn at random before they repeat: a prime, so that no two rows of a matrix are alike


def generator(seed: int) -> torch.Generator:
    """Make a generator on the host, so that contents are the same on every device."""
    return torch.Generator().manual_seed(seed)


def normal_block(std: float, dtype: torch.dtype, source: torch.Generator) -> Tensor:
    """Draw `BLOCK` normal numbers of mean 0 on the host."""
    return (torch.randn(BLOCK, generator=source) * std).to(dtype)


def byte_block(source: torch.Generator) -> Tensor:
    """Draw `BLOCK` evenly distributed bytes on the host, uint8."""
    return torch.randint(0, 256, (BLOCK,), generator=source, dtype=torch.uint8)


def tile(flat: Tensor, block: Tensor, first: int = 0) -> None:
    """Fill with a block again and again."""
    n = flat.numel()
    done = min(n, block.numel())
    flat[:done].copy_(block.roll(-first)[:done])
    while done < n:  # doubling: a few large copies within the device
        more = min(done, n - done)
        flat[done : done + more].copy_(flat[:more])
        done += more


_cuda: Any = torch.cuda  # its runtime carries no types


class Buffers:
    """Flat buffers of equal size in one allocation, aligned to pages."""

    def __init__(self, n: int, n_bytes: int, device: str = "cpu", *, pinned: bool = False) -> None:
        if n < 1 or n_bytes < 1:
            raise ValueError(f"expected at least one buffer of at least one byte, got {n} of {n_bytes}")
        self.n, self.n_bytes, self.total_bytes = n, n_bytes, buffer_bytes(n, n_bytes)
        where = torch.device(device)
        if pinned and where.type != "cpu":
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

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        """Return a buffer: a view, uint8, (n_bytes,), page-aligned, with room up to the next page."""
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


def copy(dst: Tensor, src: Tensor, *, non_blocking: bool = False) -> None:
    """Copy a flat buffer, within a memory or over a link."""
    _check_lengths(dst, src)
    dst.copy_(src, non_blocking=non_blocking)


def copy_in_chunks(dst: Tensor, src: Tensor, n_chunks: int, streams: Sequence[torch.cuda.Stream] = ()) -> None:
    """Copy a flat buffer in chunks of whole pages, on several CUDA streams in turn."""
    _check_lengths(dst, src)
    if n_chunks < 1:
        raise ValueError(f"expected at least one chunk, got {n_chunks}")
    n = dst.numel()
    size = max(PAGE, -(-n // n_chunks // PAGE) * PAGE)
    pieces = [slice(start, min(n, start + size)) for start in range(0, n, size)]
    if not streams:
        for piece in pieces:
            dst[piece].copy_(src[piece])
        return
    current = torch.cuda.current_stream(streams[0].device)
    for stream in streams:
        stream.wait_stream(current)
    for i, piece in enumerate(pieces):
        with torch.cuda.stream(streams[i % len(streams)]):
            dst[piece].copy_(src[piece], non_blocking=True)
    for stream in streams:
        current.wait_stream(stream)


def _check_lengths(dst: Tensor, src: Tensor) -> None:
    if dst.shape != src.shape:
        raise ValueError(f"expected buffers of one length, got {tuple(dst.shape)} and {tuple(src.shape)}")


_SPARE = 1.05  # a disk is never filled to the brim
Fill = Callable[[Tensor, int], None]  # writes an expert into a flat buffer, by a seed


class FileExperts:
    """Experts of equal size in one file, each on its own pages; threads may move several."""

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
    def create(cls, path: Path, n: int, n_bytes: int, fill: Fill, seed: int = 0) -> FileExperts:
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
                _write_all(fd, n, n_bytes, fill, seed)
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
        self._move(i, flat, write=False)

    def write(self, i: int, flat: Tensor) -> None:
        """Write an expert as a write-back does; in mode buffered it is synced."""
        self._move(i, flat, write=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _move(self, i: int, flat: Tensor, *, write: bool) -> None:
        if not 0 <= i < self.n:
            raise IndexError(f"expert {i} of {self.n} in {self.path}")
        if flat.numel() != self.n_bytes or flat.device.type != "cpu" or flat.data_ptr() % PAGE:
            raise ValueError(f"expected a page-aligned buffer of {self.n_bytes} bytes in host memory (see Buffers)")
        data, start = flat.numpy().data, i * self._stride
        whole = self.n_bytes // PAGE * PAGE
        transfer(self._fd, data[:whole], start, write=write)
        if whole < self.n_bytes:  # O_DIRECT wants whole pages: the last one goes through a page of ours
            rest = self.n_bytes - whole
            with mmap.mmap(-1, PAGE) as page, memoryview(page) as view:
                if write:
                    view[:rest] = data[whole:]
                transfer(self._fd, view, start + whole, write=write)
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


def transfer(fd: int, data: memoryview, offset: int, *, write: bool) -> None:
    """Read or write all of a buffer at a place of a file."""
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


def _write_all(fd: int, n: int, n_bytes: int, fill: Fill, seed: int) -> None:
    buffer = Buffers(1, n_bytes)[0]
    stride = -(-n_bytes // PAGE) * PAGE
    for i in range(n):
        fill(buffer, seed + i)
        transfer(fd, buffer.numpy().data, i * stride, write=True)
    os.fsync(fd)
    _forget(fd, 0, n * stride)


def _forget(fd: int, offset: int, length: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def zeros(place: str, rows: int, width: int, dtype: Any) -> Tensor:
    """Make zeros, (rows, width)."""
    return _there(torch.zeros(rows, width, dtype=dtype, device=place))


def index(place: str, rows: NDArray[np.int64]) -> Tensor:
    """Make indices, (n,) int64."""
    return _there(torch.from_numpy(rows).to(place))


def values(place: str, numbers: list[float], dtype: Any) -> Tensor:
    """Make a vector, (n,)."""
    return _there(torch.tensor(numbers, dtype=dtype, device=place))


def meaningless(place: str, n_bytes: int) -> Tensor:
    """Make bytes of no meaning, (n_bytes,) uint8."""
    return torch.zeros(n_bytes, dtype=torch.uint8, device=place)


@cache
def streams(gpu: str, n: int) -> list[torch.cuda.Stream]:
    """Return streams of a GPU, always the same ones."""
    return [_cuda.Stream(device=gpu) for _ in range(n)]


def copy_rows(dst: Tensor, src: Tensor, rows: Iterable[int] | None = None) -> None:
    """Copy some rows, or all, between devices, and wait for them."""
    if rows is None:
        dst.copy_(src)
    else:
        chosen = torch.tensor(list(rows), dtype=torch.int64)
        dst[chosen.to(dst.device)] = src[chosen.to(src.device)].to(dst.device)
    _there(dst, src)


def bring(place: str, tensor: Tensor) -> Tensor:
    """Copy a tensor to another device, and wait until it is there."""
    return _there(tensor.clone() if tensor.device == torch.device(place) else tensor.to(place), tensor)


def _there(*tensors: Tensor) -> Tensor:
    """Wait for tensors made outside of the lanes' streams, whose next calls read them."""
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
    return tensors[0]
