"""Random contents for weights and caches, made as fast as memory can be written."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 262_139
"""Numbers drawn at random before they repeat: a prime, so that no two rows of a matrix are alike."""


def generator(seed: int) -> torch.Generator:
    """Make a generator on the host; contents are drawn there, so that they are the same on every device."""
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
