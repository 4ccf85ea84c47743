"""What is measured: a probe is one thing of one size, and a reading is one time of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

PARTS: Final = ("attention", "context", "dense", "shared", "head", "embedding", "leading", "predict")
"""Kinds of probes of what is no routed expert; their subject is a model."""

LIMIT_US: Final = {"rows": 2e6, "tokens": 2e6, "bytes": 10e6}
"""Sizes whose one run would take longer are left out, us, by unit."""

FOLLOWING: Final = "following"
"""Variant of the expert right behind the first of a group, timed with it."""

QUICK_ROWS, FULL_ROWS = 64, 4096
QUICK_TOKENS, FULL_TOKENS = 2048, 16_384
SMALLEST_COPY, LARGEST_COPY = 2**16, 2**30


@dataclass(frozen=True)
class Probe:
    """One thing of one size whose time is measured."""

    # `expert`, `expert_first` (after something else), one of `PARTS`, `copy`, `disk_read`, `disk_write`, `activation`, `runtime`
    # (gaps between what is done), `pair`, `power` or `sentinel`
    kind: str
    device: str  # name of the device or link; of a pair, the activity that is timed
    subject: str = ""  # shape of an expert (`4096x14336`), name of a model; of a pair, the activity beside it
    bits: float | None = None  # of an expert's weights
    threads: int | None = None  # of an operator on a processor
    variant: str = ""  # kind of transfer and the like; of a pair `alone` or `together`
    size: int = 1  # how much of it
    unit: str = "calls"  # of `size`: `rows`, `tokens`, `bytes` or `calls`

    @property
    def id(self) -> str:
        """Text that no other probe has."""
        return "|".join(
            "" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in astuple(self)
        )

    @property
    def curve(self) -> tuple[Any, ...]:
        """What probes of other sizes share with it."""
        return (self.kind, self.device, self.subject, self.bits, self.threads, self.variant)


FIELDS: Final = tuple(field.name for field in fields(Probe))
"""Names of the fields of a probe, in order."""

Reading = tuple[Probe, float]
"""A probe and one time of it in us; of a power, watts."""


def rows_up_to(last: int) -> list[int]:
    """Rows of experts: each up to 8, then two a doubling.

    >>> rows_up_to(32)
    [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32]
    """
    found, power = list(range(1, 9)), 8
    while power < last:
        found += [power + power // 2, 2 * power]
        power *= 2
    return [n for n in found if n <= last]


def part_rows_up_to(last: int) -> list[int]:
    """Rows of the other parts: fewer, since each step has each part once.

    >>> part_rows_up_to(32)
    [1, 2, 3, 4, 6, 8, 16, 32]
    """
    return [n for n in rows_up_to(last) if n <= 4 or n == 6 or not n & (n - 1)]


def byte_sizes(last: int, step: int, also: Sequence[int] = ()) -> list[int]:
    """Sizes of copies: powers of two by a factor from 64 KiB to ``last``, and the sizes of experts among them.

    >>> byte_sizes(2**20, 4, also=[300_000, 2**30])
    [65536, 262144, 300000, 1048576]
    """
    found, size = set(), SMALLEST_COPY
    while size <= last:
        found.add(size)
        size *= step
    return sorted(found | {last} | {n for n in also if SMALLEST_COPY <= n <= last})


def tokens_up_to(last: int) -> list[int]:
    """Tokens whose keys and values are read: 1, which is what others are compared with, then powers of two from 64.

    >>> tokens_up_to(256)
    [1, 64, 128, 256]
    """
    return [1, *(2**power for power in range(6, last.bit_length()))]


def sequences_of(n_rows: int) -> list[tuple[int, int]]:
    """Split rows into sequences of (new rows, context before): up to 16 decode, one row each; more are prompts of 64.

    >>> sequences_of(2), sequences_of(100)
    ([(1, 0), (1, 0)], [(64, 0), (36, 0)])
    """
    if n_rows <= 16:
        return [(1, 0)] * n_rows
    return [(min(64, n_rows - start), 0) for start in range(0, n_rows, 64)]
