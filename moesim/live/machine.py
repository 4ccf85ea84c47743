"""The machine of a replay: workers, weights in memory or on disk, and copies between them."""

from __future__ import annotations

import os
import shutil
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
from moesim.live.kernels.dense import DenseKernel
from moesim.live.kernels.experts import ExpertKernel
from moesim.live.kernels.host import available_gpu_bytes, available_memory_bytes, empty_gpu_caches, n_gpus, usable_cores
from moesim.live.kernels.memory import Buffers, FileExperts, copy, copy_in_chunks
from moesim.live.kernels.plans import ExpertShape, buffer_bytes, dense_bytes
from moesim.live.kernels.workers import CudaStreamWorker, Done, Worker

if TYPE_CHECKING:
    from moesim.engine.memory import Unit
    from moesim.engine.state import DeviceState
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec
    from moesim.trace.workload import Workload


FEWEST = 4
"""Buffers that a device must have at the least: fewer would stay in a processor's cache, or be overwritten while read."""


class Slots:
    """Which buffer of a device holds which unit; where they are few, units share."""

    def __init__(self, device: DeviceState, n_buffers: int) -> None:
        self._device = device
        self._n = n_buffers
        self._free = list(range(n_buffers))[::-1]
        self._slot: dict[Unit, int] = {}
        self._shared: dict[int, int] = {}  # buffer -> units beyond the first that use it
        self._turn = 0
        self.coming: set[int] = set()  # fetches that have a slot and are not there yet

    def of(self, unit: Unit) -> int:
        return self._slot[unit]

    def take(self, unit: Unit) -> int:
        if unit in self._slot:
            self._give(unit)
        if not self._free:
            self._sweep()
        if self._free:
            buffer = self._free.pop()
        else:
            self._turn = (self._turn + 1) % self._n
            buffer = self._turn
            self._shared[buffer] = self._shared.get(buffer, 0) + 1
        self._slot[unit] = buffer
        return buffer

    def _sweep(self) -> None:
        memory, pending = self._device.memory, self._device.pending
        for unit in [u for u in self._slot if u not in memory.copies and u not in pending]:
            self._give(unit)

    def _give(self, unit: Unit) -> None:
        buffer = self._slot.pop(unit)
        if self._shared.get(buffer):
            self._shared[buffer] -= 1
        else:
            self._free.append(buffer)


def share_out(wanted: Mapping[str, int], expert_bytes: int, fixed_bytes: int, budget_bytes: int, where: str) -> dict[str, int]:
    """Share buffers out among devices, none more than it wants, else equally.

    A `CapacityError` says that not even `FEWEST` fit on each device, or all that are wanted.

    >>> share_out({"a": 10, "b": 100}, 10, 50, 1000, "host memory")
    {'a': 10, 'b': 85}
    """
    room = max(0, budget_bytes - fixed_bytes) // expert_bytes
    found: dict[str, int] = {}
    for left, (name, n) in zip(range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda item: item[1]), strict=True):
        found[name] = min(n, room // left)
        room -= found[name]
    fewest = {name: min(n, FEWEST) for name, n in wanted.items()}
    if any(found[name] < fewest[name] for name in wanted):
        needed = fixed_bytes + sum(fewest.values()) * expert_bytes
        raise CapacityError(
            f"replay: expected at least {format_memory(needed, least=True)} of {where} ({format_memory(fixed_bytes)} for the "
            f"dense part and activations, {sum(fewest.values())} experts of {format_memory(expert_bytes)}), got a budget of "
            f"{format_memory(budget_bytes)}; give more, or choose a smaller model or batch"
        )
    return {name: found[name] for name in wanted}


GPU_SHARE = 0.9  # share of the free memory of a GPU that may be used: libraries take workspaces of their own
_SPARE = 1.05  # a disk is never filled to the brim
_ROW_COPIES = 6  # tensors of all rows of a step that a device may hold at once


class WeightStore:
    """Memory for one model within a budget that is checked first."""

    def __init__(
        self, model: ModelSpec, hardware: HardwareProfile, places: Mapping[str, str], *, max_rows: int, max_kv_tokens: int,
        slots: Mapping[str, int], dense: Mapping[str, int], memory_bytes: int, disk: Path | None, pinned: bool, seed: int,
    ) -> None:  # fmt: skip
        self.model, self.max_rows, self.max_kv_tokens = model, max_rows, max_kv_tokens
        self.pinned = pinned
        self._hardware, self._places, self._disk, self._memory_bytes, self._seed = hardware, places, disk, memory_bytes, seed
        self.shape = ExpertShape.of(model)
        if (self.shape.bits == 32) != (model.other_bits == 32):
            raise InputError(
                f"model '{model.name}': expected expert_bits and other_bits both of 32 or both below to replay, got "
                f"{model.expert_bits:g} and {model.other_bits:g}; change one of them"
            )
        self.slots, self._wanted_dense = dict(slots), dict(dense)
        self._sizes: dict[str, Any] = {"max_rows": max_rows, "max_kv_tokens": max_kv_tokens, "with_head": True}
        self._layers = {name: self._distinct_layers(places[name], n) for name, n in dense.items()}
        fixed: dict[str, int] = {}
        for name, n in self._layers.items():
            fixed[places[name]] = fixed.get(places[name], 0) + dense_bytes(model, distinct_layers=n, **self._sizes)
        for place in {places[name] for name, device in hardware.devices.items() if device.role != "storage"}:
            fixed[place] = (
                fixed.get(place, 0) + _ROW_COPIES * max_rows * model.hidden * 4 + self.shape.n_bytes
            )  # and one on its way
        counts = self._share_out(fixed)
        self._kernels: dict[str, ExpertKernel] = {}
        self._dense: dict[str, DenseKernel] = {}
        self._bound: dict[tuple[str, int], Any] = {}
        self.held: dict[str, Buffers | FileExperts] = {}
        try:
            for name, n in counts.items():
                self.held[name] = self._make(name, n)
        except BaseException:
            self.remove()
            raise

    def serves(
        self,
        model: ModelSpec,
        *,
        max_rows: int,
        max_kv_tokens: int,
        slots: Mapping[str, int],
        dense: Mapping[str, int],
        pinned: bool,
    ) -> bool:
        """Whether this will do for another run; parameters as for the class."""
        large_enough = max_rows <= self.max_rows and max_kv_tokens <= self.max_kv_tokens
        known = all(layers <= self._wanted_dense.get(name, 0) for name, layers in dense.items())
        roomy = all(n <= max(self.slots.get(name, 0), self.held[name].n) for name, n in slots.items())
        return model == self.model and large_enough and known and roomy and pinned == self.pinned

    def for_all(self, slots: Mapping[str, int], dense: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        return _most(self.slots, slots), _most(self._wanted_dense, dense)

    def _make(self, name: str, n: int) -> Buffers | FileExperts:
        device, place = self._hardware.devices[name], self._places[name]
        kernel = self._kernel_at(place)
        if device.role == "storage":
            assert self._disk is not None
            file = FileExperts.create(
                self._disk / f".moesim-{os.getpid()}-{name}.experts", n, self.shape.n_bytes, kernel.fill, self._seed
            )
            if os.name == "posix":
                file.path.unlink()  # it stays as long as it is open, and nothing of a killed run is left
            return file
        buffers = Buffers(n, self.shape.n_bytes, place, pinned=self.pinned and place == "cpu")
        for i in range(n):
            kernel.fill(buffers[i], self._seed + (i if device.role == "host" else 0))
        return buffers

    def _distinct_layers(self, place: str, wanted: int) -> int:
        """Return the layers with dense weights of their own that a third of the budget holds."""
        room = self._room(place)[0]
        for layers in range(wanted, 1, -1):
            if dense_bytes(self.model, distinct_layers=layers, **self._sizes) <= room // 3:
                return layers
        return 1

    def _room(self, where: str) -> tuple[int, str]:
        if where == "cpu":
            return self._memory_bytes, "host memory (--memory)"
        if where != "disk":
            return int((available_gpu_bytes(where) or 0) * GPU_SHARE), f"memory of {where}"
        if self._disk is None:
            raise InputError("replay: expected --disk FOLDER, since the profile keeps the experts on a disk, got nothing")
        # As much as host memory may be used is no part of any cache, and quick to write.
        return min(self._memory_bytes, int(shutil.disk_usage(self._disk).free / _SPARE)), f"disk space in {self._disk}"

    def _share_out(self, fixed: Mapping[str, int]) -> dict[str, int]:
        wanted: dict[str, dict[str, int]] = {}
        for name, device in self._hardware.devices.items():
            if device.role == "accelerator" or name in self._hardware.backing:
                where = "disk" if device.role == "storage" else self._places[name]
                wanted.setdefault(where, {})[name] = self._needed(name)
        found: dict[str, int] = {}
        for where, devices in wanted.items():
            room, what = self._room(where)
            found |= share_out(devices, buffer_bytes(1, self.shape.n_bytes), fixed.get(where, 0), room, what)
        return found

    def _needed(self, device: str) -> int:
        """Return the buffers with which every expert that a device may hold has its own."""
        n_units = self.model.n_layers * self.model.n_experts
        return n_units if device in self._hardware.backing else max(1, min(n_units, self.slots[device]))

    @property
    def aliased(self) -> str:
        told = [f"{self._needed(name)} on {name} in {held.n}" for name, held in self.held.items() if held.n < self._needed(name)]
        return f"experts share buffers ({', '.join(told)})" if told else ""

    def place(self, device: str, index: int, unit: int) -> None:
        """Copy a unit's weights to where a placement starts, unless experts share theirs."""
        backing, buffers = self.held[self._hardware.backing[0]], self.held[device]
        if backing.n < self.model.n_layers * self.model.n_experts:
            return
        assert isinstance(buffers, Buffers)
        if isinstance(backing, Buffers):
            copy(buffers[index], backing[unit])
        else:
            backing.read(unit, buffers[index])

    def weights(self, device: str, index: int) -> Any:
        found = self._bound.get((device, index))
        if found is None:
            buffers = self.held[device]
            assert isinstance(buffers, Buffers)
            found = self._bound[device, index] = self.kernel(device).bind(buffers[index])
        return found

    def kernel(self, device: str) -> ExpertKernel:
        return self._kernel_at(self._places[device])

    def _kernel_at(self, place: str) -> ExpertKernel:
        if place not in self._kernels:
            self._kernels[place] = ExpertKernel(self.shape, place)
        return self._kernels[place]

    def dense(self, device: str) -> DenseKernel:
        if device not in self._dense:
            layers = self._layers[device]
            self._dense[device] = DenseKernel(
                self.model, self._places[device], distinct_layers=layers, seed=self._seed, **self._sizes
            )
        return self._dense[device]

    def remove(self) -> None:
        for held in self.held.values():
            if isinstance(held, FileExperts):
                held.remove()


def _most(some: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {name: max(some.get(name, 0), others.get(name, 0)) for name in {**some, **others}}


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
