"""A tiny model, small grids, and a bench whose times are known, for tests of the profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from moesim.live.kernels.workers import Done, Worker
from moesim.live.profiler import bench, probes
from moesim.live.profiler.bench import Machine
from moesim.live.profiler.probes import FOLLOWING, Probe, Reading
from moesim.live.profiler.request import Prepared, Request, prepare
from moesim.model import ModelSpec, load_model

MODEL: dict[str, Any] = {
    "name": "tiny", "n_layers": 2, "n_experts": 4, "top_k": 2, "hidden": 128, "expert_intermediate": 256, "n_heads": 4,
    "n_kv_heads": 2, "head_dim": 32, "vocab": 256, "n_dense_layers": 1, "dense_intermediate": 128, "n_shared": 1,
    "shared_intermediate": 128,
}  # fmt: skip
EXPERT_BYTES = 3 * 128 * 256 * 2
BASE_US = {"core0": 100, "core1": 200, "cpu0": 50, "gpu0": 20}
KEPT = {"core0.experts": 0.8, "core1.experts": 0.5, "core0.dense": 1.25}  # of their speed next to anything; more than all: noise


def tiny() -> ModelSpec:
    return load_model(MODEL)


class NoReplay:
    """Stands for replays that measure the runtime: they take half a minute, and look for the GPU."""

    def __init__(self, *_: Any) -> None:
        pass

    def gaps_us(self, variant: str) -> dict[str, float]:
        return {variant: 10.0}

    def close(self) -> None:
        pass


def shrink(patch: Callable[[object, str, Any], None], rows: int = 8, copies: int = 2**20) -> None:
    """Make grids and caches small, and memory as large as tests ask for; ``patch`` is setattr, or that of a monkeypatch."""
    patch(probes, "QUICK_ROWS", rows)
    patch(probes, "QUICK_TOKENS", 128)
    patch(probes, "LARGEST_COPY", copies)
    patch(probes, "l3_bytes", lambda: 2**18)
    patch(probes, "_GPU_CACHE", 2**18)
    patch(probes, "SENTINEL_COPY", 2**20)
    patch(probes, "SIZES", ((64, 2**17), (128, 2**20), (128, 2**22)))
    patch(bench, "Runtime", NoReplay)
    patch(probes, "available_memory_bytes", lambda: 10**10)


def request(out: Path, **changes: Any) -> Request:
    base: dict[str, Any] = {"name": "mine", "models": (tiny(),), "mode": "quick", "memory_bytes": 10**9, "out": out}
    return Request(**base | changes)


def prepared(out: Path, **changes: Any) -> Prepared:
    return prepare(request(out, **changes))


def truth_us(probe: Probe) -> float:
    """Tell what anything takes on the machine that is made up."""
    n, base = probe.size, BASE_US.get(probe.device, 0)
    known: dict[str, float] = {
        "expert": base + 3 * n,
        "expert_first": base + 3 * n + 40,
        "attention": 80 + n,
        "context": 81 + 0.5 * (n - 1),
        "dense": 20 + 0.25 * n,
        "shared": 10 + n,
        "leading": 80 + n + 30 + 2 * n,
        "head": 500 + n,
        "embedding": 5 + 0.125 * n,
        "predict": 7 + 0.5 * n,
        "copy": 5 + n / 1024 / 8 + {"": 0, "pinned": 0, "pageable": 50, "chunked": 7}[probe.variant]
        if probe.kind == "copy"
        else 0,
        "disk_read": 50 + n / 1024,
        "disk_write": 90 + n / 512,
        "activation": 16 + n / 1024,
        "runtime": {"resident": 25, "host": 60, "fetched": 4, "between": 2, "between host": 3}.get(probe.variant, 0),
        "power": 40 if probe.variant == "idle" else 150,
        "sentinel": 100,
    }
    return known[probe.kind]


class FakeBench:
    """Takes no time, and tells the times that ``truth`` says; ``die_after`` readings it fails, as a killed one would."""

    disk_mode = "direct"

    def __init__(self, truth: Callable[[Probe], float] = truth_us, die_after: int | None = None) -> None:
        self.truth, self.die_after = truth, die_after
        self.timed: list[Probe] = []
        self.warmed: list[Probe] = []
        self.live: list[str] = []

    def prepare(self, probes: Sequence[Probe]) -> None:
        assert not self.live
        self.live = [probe.id for probe in probes]

    def warm(self, probe: Probe) -> float:
        assert probe.id in self.live
        self.warmed.append(probe)
        return 0.0 if probe.kind == "pair" else self.truth(probe)

    def time(self, probe: Probe, expected_us: float) -> list[Reading]:
        assert probe.id in self.live
        if self.die_after is not None and len(self.timed) >= self.die_after:
            raise KeyboardInterrupt
        self.timed.append(probe)
        if probe.kind == "expert_first":
            following = replace(probe, variant=FOLLOWING)
            return [(probe, self.truth(probe)), (following, self.truth(replace(probe, kind="expert")))]
        if probe.kind == "runtime" and probe.variant != "fetched":
            between = replace(probe, variant="between host" if probe.variant == "host" else "between")
            return [(one, self.truth(one)) for one in (probe, between)]
        if probe.kind != "pair":
            return [(probe, self.truth(probe))]
        readings = []
        for one, other in ((probe.device, probe.subject), (probe.subject, probe.device)):
            own = replace(probe, device=one, subject=other)
            readings += [(replace(own, variant="alone"), 100.0), (replace(own, variant="together"), 100.0 / KEPT.get(one, 0.625))]
        return readings

    def release(self) -> None:
        self.live = []

    def close(self) -> None:
        assert not self.live


class StandIn(Machine):
    """A machine whose GPU is a core: what is done on it and in which order is the same, what it takes is not."""

    def at(self, place: str) -> str:
        return "cpu"

    def worker(self, name: str, done: SimpleQueue[Done], place: str, cores: Any, threads: int) -> Any:
        return Worker(name, done, None, 1)

    def streams(self, place: str, n: int) -> list[Any]:
        return []

    def arena(self, n_bytes: int, place: str, seed: int, *, pinned: bool = False) -> Any:
        return super().arena(n_bytes, place, seed)

    def free_bytes(self, place: str, disk: Path | None = None) -> int | None:
        return 10**10

    def capacity_bytes(self, place: str, disk: Path | None = None) -> int:
        return 10**10

    def powered(self, devices: Any) -> list[str]:
        return ["gpu0"]

    def power_w(self, device: Any, during: Any) -> float:
        during(0.001)
        return 200.0
