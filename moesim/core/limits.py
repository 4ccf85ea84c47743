"""Bounds of numbers that all file formats and commands share, each with its reason.

They keep slips of a unit out, and nanoseconds within 64 bits. What lies beyond is refused by its key.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Bounds(NamedTuple):
    """The least and the most that a number may be, both included."""

    least: float
    most: float

    def hold(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"from {self.least:g} to {self.most:g}"


# ---- machines

RATE: Final = Bounds(1e3, 1e18)
"""Bytes a second of a memory or a link: from below a modem's to 50 times what the SRAM of a whole wafer reads (2e16)."""
FLOPS: Final = Bounds(1e3, 1e21)
"""Operations a second of a device: from below the first computers' to 1000 times an exascale machine's (1e18)."""
TIME_US: Final = Bounds(0, 1e9)
"""Microseconds of one call, copy, kernel or decision: up to 1000 s, more than a tape robot takes."""
POWER_W: Final = Bounds(0, 1e9)
"""Watts of a device: up to a gigawatt, a power station's."""
RATE_SHARE: Final = Bounds(1e-6, 1)
"""Share of its rate that an activity keeps next to another: one that stands still never ends."""
BYTES: Final = Bounds(0, 2**53)
"""Bytes of a memory, a cache or a chunk: up to 8 PiB, what every column of a table and every reader of JSON holds exactly."""
CORES: Final = Bounds(0, 10**6)
"""Numbers of processor cores."""
COMPUTE: Final = Bounds(1, 30)
"""CUDA's compute capability of a GPU, such as 8.6: up to twice the newest; 86 is a slip."""
LAUNCHES: Final = Bounds(0, 10**6)
"""Kernels of one part of a layer."""

# ---- models

BITS: Final = Bounds(0.1, 64)
"""Bits per weight or number: the least published for experts is 0.8 (QMoE, arXiv:2310.16795)."""
LAYERS: Final = Bounds(0, 10_000)
"""Layers of a model: the deepest transformer published has 1000 (DeepNet, arXiv:2203.00555)."""
EXPERTS: Final = Bounds(1, 2**16)
"""Experts of a layer: their ids are stored in at most 16 bits in a trace."""
WIDTH: Final = Bounds(0, 10**7)
"""Widths, heads, ranks and rows of the vocabulary: 40 times the largest vocabulary published (262,144)."""

UNITS: Final = Bounds(1, 10**6)
"""Experts of all layers together: 40 times the most published (23,040 of Kimi K2)."""
SYNTHETIC: Final = Bounds(1, 2**27)
"""Numbers that the routers and topics of a synthetic model consist of: up to half a gigabyte."""

# ---- workloads

COUNT: Final = Bounds(0, 2**53)
"""Seeds, steps and whatever else only counts: what every column of a table, and every reader of JSON, holds exactly."""
TOKENS: Final = Bounds(0, 10**9)
"""Tokens or rows of one request, curve or step: 100 times the longest context on offer."""
SPEED: Final = Bounds(1e-9, 1e12)
"""A speed or a time as it was observed, in its unit: from a token in 30 years to a million times what a data centre decodes."""
CACHE_RATIO: Final = Bounds(1e-6, 1)
"""Share of all experts that is cached: less is none, as no model has more than a million (`UNITS`)."""

# ---- what is done

REPEATS: Final = Bounds(1, 10**6)
"""Times that something is measured, drawn or trained: more than anybody waits for."""
PROCESSES: Final = Bounds(1, 1024)
"""Processes of one machine: more than the largest has cores."""

# ---- what comes of them

COST_NS: Final = 24 * 3600 * 10**9
"""Longest single task or copy, ns: a day. Its numbers may each be thinkable, and together are a slip of a unit."""
RUN_NS: Final = 365 * COST_NS
"""Longest run, ns: a year of simulated time, a 292nd of what 64 bits hold, so that sums over a run's records fit as well."""
CHUNKS: Final = 1024
"""Most chunks of one transfer, each of which is an event of the simulation. A copy's latency, some 10 us, outweighs the bytes
of a chunk before that: of 88 MB in 1024 chunks each is 86 kB, 3.4 us at 25 GB/s."""
