"""The machine of a replay: workers, weights in memory or on disk, and copies between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.units import format_memory
from moesim.errors import CapacityError, HardwareError, InputError
from moesim.live.kernels import memory
from moesim.live.kernels.host import available_memory_bytes, empty_gpu_caches, n_gpus, usable_cores
from moesim.live.kernels.memory import Buffers, FileExperts, copy, copy_in_chunks
from moesim.live.kernels.workers import CudaStreamWorker, Done, Worker
from moesim.live.weights import WeightStore

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec
    from moesim.trace.workload import Workload

BACKENDS = ("cpu", "cuda")
_CHUNKS = 3  # streams of a chunked copy, as it is measured


class LiveMachine:
    """A machine in the roles of a profile's devices and links; a context manager.

    Parameters
    ----------
    hardware : HardwareProfile
        Devices, links, cores. Its costs are what policies see.
    backend : {"cpu", "cuda"}
        ``"cpu"``: every device is memory and cores, or a disk. ``"cuda"``: devices of kind ``gpu`` are GPUs, in order.
    memory_bytes : int or None, bytes
        Host memory that may be used; by default half of what is available.
    disk : Path or None
        Folder for the file that holds the experts, if the profile has a disk.
    seed : int
        Of the random weights.
    first_gpu : int
        Which GPU of the machine is the first of the profile.
    keep_outputs : bool
        Keep the hidden state at the end of each step in `outputs`, (n_tokens, hidden) float32 by step.

    Raises
    ------
    InputError
        If this backend does not run the profile's kind of machine, or cores or GPUs are missing.
    """

    def __init__(
        self, hardware: HardwareProfile, *, backend: str = "cpu", memory_bytes: int | None = None, disk: Path | None = None,
        seed: int = 0, keep_outputs: bool = False, first_gpu: int = 0,
    ) -> None:  # fmt: skip
        self.hardware = hardware
        self.backend = backend
        self.seed = seed
        self.disk = disk
        self.keep_outputs = keep_outputs
        self.outputs: dict[int, Any] = {}
        self.places = _torch_devices(hardware, backend, first_gpu)
        _check_parts(hardware, disk)
        available = available_memory_bytes()
        if available is None and memory_bytes is None:
            raise CapacityError("--memory: expected a size such as '8 GB', since this system does not tell, got nothing")
        self.memory_bytes = (available or 0) // 2 if memory_bytes is None else memory_bytes
        if available is not None and self.memory_bytes > available:
            raise CapacityError(
                f"--memory: expected at most {format_memory(available)}, which this machine has available, got "
                f"{format_memory(self.memory_bytes)}; give less, or close other programs"
            )
        self.done: SimpleQueue[Done] = SimpleQueue()
        self._workers: dict[tuple[str, str], Any] = {}
        self._store: WeightStore | None = None
        self._chunks = 1  # pieces of a copy, on streams of their own

    @property
    def spare_cores(self) -> tuple[int, ...]:
        """Cores on which decisions are taken: those of no accelerator, if there are some."""
        taken = {core for device in self.hardware.devices.values() if device.role == "accelerator" for core in device.cores}
        return tuple(core for core in usable_cores() if core not in taken) or tuple(usable_cores())

    def worker(self, device: str, lane: str) -> Any:
        found = self.hardware.devices[device]
        if found.role == "storage":
            return None
        return self._worker((device, lane), self.places[device], found.cores)

    def carrier(self, link: str) -> Any:
        """Worker that copies over a link; links of one medium share it."""
        found = self.hardware.link(link)
        places = [self.places[end] for end in (found.src, found.dst)]
        gpu = next((place for place in places if place != "cpu"), "cpu")
        return self._worker(("link", found.medium or link), gpu, found.cores)

    def _worker(self, key: tuple[str, str], place: str, cores: tuple[int, ...]) -> Any:
        if key not in self._workers:
            name = ".".join(key)
            if place != "cpu":
                self._workers[key] = CudaStreamWorker(name, self.done, place, cores or None)
            else:
                threads = 1 if key[0] == "link" else len(cores) or (os.cpu_count() or 1)
                self._workers[key] = Worker(name, self.done, cores or None, threads)
        return self._workers[key]

    def prepare(
        self, model: ModelSpec, workload: Workload, transfer: str, *, slots: Mapping[str, int], dense: Mapping[str, int]
    ) -> None:
        """Allocate memory for a model, placement and workload, unless the present one serves.

        ``slots`` are the experts that fit into each accelerator's pools, ``dense`` the devices of other parts with their
        numbers of layers. Raises `CapacityError` before anything is allocated.
        """
        kv_tokens = max(sum(n + context for n, context in step.sequences) for step in workload.steps)
        rows, pinned = workload.max_tokens, self.backend == "cuda" and transfer != "pageable"
        self._chunks = _CHUNKS if self.backend == "cuda" and transfer == "chunked" else 1
        if self._store is not None:
            store = self._store
            if store.serves(model, max_rows=rows, max_kv_tokens=kv_tokens, slots=slots, dense=dense, pinned=pinned):
                return
            if store.model == model:  # the next runs will be like those before
                rows, kv_tokens = max(rows, store.max_rows), max(kv_tokens, store.max_kv_tokens)
                slots, dense = store.for_all(slots, dense)
            del store
            self._release()
        self._store = WeightStore(
            model, self.hardware, self.places, max_rows=rows, max_kv_tokens=kv_tokens, slots=slots, dense=dense,
            memory_bytes=self.memory_bytes, disk=self.disk, pinned=pinned, seed=self.seed,
        )  # fmt: skip

    def _release(self) -> None:
        if self._store is not None:
            self._store.remove()
        self._store = None
        empty_gpu_caches()  # engines of earlier runs hold each other, and with them the memory that is wanted now

    @property
    def store(self) -> WeightStore:
        assert self._store is not None, "prepare() comes first"
        return self._store

    def n_buffers(self, device: str) -> int:
        return self.store.held[device].n

    def buffer(self, device: str, index: int) -> Any:
        return self.store.held[device][index]  # type: ignore[index]  # an accelerator has buffers

    def backing(self, device: str, unit: int) -> Any:
        """Buffer of a backing host that holds a unit; of a disk, the unit's place in its file."""
        held = self.store.held[device]
        return unit % held.n if isinstance(held, FileExperts) else held[unit % held.n]

    def backing_weights(self, device: str, unit: int) -> Any:
        return self.store.weights(device, unit % self.n_buffers(device))

    def zeros(self, device: str, rows: int) -> Any:
        store = self.store
        return memory.zeros(self.places[device], rows, store.model.hidden, store.kernel(device).act_dtype)

    def index(self, device: str, rows: Iterable[int]) -> Any:
        return memory.index(self.places[device], np.fromiter(rows, np.int64))

    def gates(self, device: str, values: list[float]) -> Any:
        return memory.values(self.places[device], values, self.store.kernel(device).act_dtype)

    def copy(self, link: str, target: Any, origin: Any, offset: int, n_bytes: int) -> Callable[[], None]:
        found = self.hardware.link(link)
        ends = slice(offset, offset + n_bytes)
        for end, place in ((found.src, origin), (found.dst, target)):
            file = self.store.held.get(end)
            if isinstance(file, FileExperts):
                if offset or n_bytes != file.n_bytes:
                    raise InputError(
                        f"{self.hardware.path}: links.{link}: expected experts of {file.n_bytes} bytes in one piece from and "
                        f"to a disk, got {n_bytes} bytes from {offset} on; leave transfer.chunk out"
                    )
                move, other = (file.read, target) if place is origin else (file.write, origin)
                return partial(move, place, other)
        if self._chunks > 1 and {self.places[end] for end in (found.src, found.dst)} != {"cpu"}:
            gpu = next(place for place in (self.places[found.src], self.places[found.dst]) if place != "cpu")
            return partial(copy_in_chunks, target[ends], origin[ends], self._chunks, memory.streams(gpu, self._chunks))
        return partial(copy, target[ends], origin[ends], non_blocking=True)

    def bring(self, device: str, values: Any) -> Any:
        return memory.bring(self.places[device], values)

    def transit(self, link: str) -> Any:
        """Make a buffer at the far end of a link for what goes on from there."""
        return Buffers(1, self.store.shape.n_bytes, self.places[self.hardware.link(link).dst])[0]

    def copy_message(self, link: str, n_bytes: int) -> Callable[[], None]:
        """Make the call that moves meaningless bytes over a link."""
        found = self.hardware.link(link)
        pair = [memory.meaningless(self.places[end], n_bytes) for end in (found.dst, found.src)]
        return partial(copy, *pair, non_blocking=True)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers = {}
        self._release()

    def __enter__(self) -> LiveMachine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check_parts(hardware: HardwareProfile, disk: Path | None) -> None:
    disks = [name for name, device in hardware.devices.items() if device.role == "storage"]
    if disk is not None and not disks:
        raise InputError(f"--disk: expected none, since {hardware.name} keeps no experts on a disk, got {disk}; leave it out")
    for name, device in hardware.devices.items():
        if device.role == "host" and name not in hardware.backing:
            raise HardwareError(
                f"{hardware.path}: devices.{name}: expected every host among backing to replay, got one that holds no experts; "
                "leave it out of the profile"
            )
    for link in hardware.links:
        if link.share_link:
            raise HardwareError(
                f"{hardware.path}: links.{link.name}: expected activations next to weights to replay, got "
                "share_link: true; leave it out"
            )
        kinds = {hardware.devices[end].kind for end in (link.src, link.dst)}
        if kinds == {"gpu", "disk"}:
            raise HardwareError(
                f"{hardware.path}: links.{link.name}: expected a disk to be read into host memory to replay, got a "
                "link to a GPU; "
                "add the host between them"
            )


def _torch_devices(hardware: HardwareProfile, backend: str, first_gpu: int) -> Mapping[str, str]:
    """Return the place of each device: ``"cpu"``, or ``"cuda:0"`` and so on."""
    if backend not in BACKENDS:
        raise InputError(f"--backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    gpus = [name for name, device in hardware.devices.items() if device.kind == "gpu"]
    if backend == "cpu" and gpus:
        raise HardwareError(
            f"{hardware.path}: devices.{gpus[0]}: expected devices of kind cpu or disk for --backend cpu, got a gpu; choose the "
            "profile of a machine without one, or --backend cuda"
        )
    cores = usable_cores()
    for kind, parts in (("devices", hardware.devices.values()), ("links", hardware.links)):
        for part in parts:
            if not set(part.cores).issubset(cores):
                raise HardwareError(
                    f"{hardware.path}: {kind}.{part.name}.cores: expected some of the cores {cores}, which this process may use, "
                    f"got {list(part.cores)}; choose the profile that was measured on this machine"
                )
    if backend == "cuda":
        found = n_gpus()
        if not found:
            raise InputError(
                "--backend cuda: expected a GPU that PyTorch finds, got none; use --backend cpu and a profile without one"
            )
        if not gpus or first_gpu + len(gpus) > found:
            raise HardwareError(
                f"{hardware.path}: expected at most the {found} GPUs that PyTorch finds on this machine, and at least one, got "
                f"{len(gpus)} devices of kind gpu; choose the profile that was measured on it"
            )
    return {name: f"cuda:{first_gpu + gpus.index(name)}" if name in gpus else "cpu" for name in hardware.devices}
