"""Copies of flat buffers between memories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesim.live.kernels.plans import PAGE


def copy(dst: Tensor, src: Tensor, *, non_blocking: bool = False) -> None:
    """Copy a flat buffer, within a memory or over a link."""
    _check(dst, src)
    dst.copy_(src, non_blocking=non_blocking)


def copy_in_chunks(dst: Tensor, src: Tensor, n_chunks: int, streams: Sequence[torch.cuda.Stream] = ()) -> None:
    """Copy a flat buffer in chunks of whole pages, on several CUDA streams in turn."""
    _check(dst, src)
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


def _check(dst: Tensor, src: Tensor) -> None:
    if dst.shape != src.shape:
        raise ValueError(f"expected buffers of one length, got {tuple(dst.shape)} and {tuple(src.shape)}")
