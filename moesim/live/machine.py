"""The machine that a replay runs on: workers, weights in memory or on disk, and copies between them."""

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

from moesim.errors import CapacityError, HardwareError, InputError
from moesim.kernels.affinity import usable_cores
from moesim.kernels.buffers import Buffers
from moesim.kernels.copies import copy
from moesim.kernels.dense import DenseKernel
from moesim.kernels.expert import ExpertKernel, ExpertShape
from moesim.kernels.files import FileExperts
from moesim.kernels.machine import available_gpu_bytes, available_memory_bytes
from moesim.kernels.streams import CudaStreamWorker
from moesim.kernels.tensors import Tensors
from moesim.kernels.workers import Done, Worker
from moesim.live.memory import share_out
from moesim.units import format_bytes

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec
    from moesim.workload import Workload

BACKENDS = ("cpu", "cuda")
GPU_SHARE = 0.9
"""Share of the free memory of a GPU that may be used: libraries take workspaces of their own."""


class LiveMachine:
    """Workers and memory of this machine, in the roles of a profile's devices and links; a context manager.

    Parameters
    ----------
    hardware : HardwareProfile
        Devices, links, cores. Its costs are what policies are told.
    backend : {"cpu", "cuda"}
        ``"cpu"``: every device is memory and cores, or a disk. ``"cuda"``: devices of kind ``gpu`` are GPUs, in order.
    memory_bytes : int or None, bytes
        Host memory that may be used; by default half of what is available.
    disk : Path or None
        Folder for the file that holds the experts, if the profile has a disk.
    seed : int
        Of the random weights.
    keep_outputs : bool
        Keep the hidden state at the end of each step in `outputs`, (n_tokens, hidden) float32 by step.

    Raises
    ------
    InputError
        If the profile is of another kind of machine than this backend runs, or cores or GPUs are missing.
    """

    def __init__(
        self, hardware: HardwareProfile, *, backend: str = "cpu", memory_bytes: int | None = None, disk: Path | None = None,
        seed: int = 0, keep_outputs: bool = False,
    ) -> None:  # fmt: skip
        self.hardware = hardware
        self.backend = backend
        self.seed = seed
        self.disk = disk
        self.keep_outputs = keep_outputs
        self.outputs: dict[int, Any] = {}
        self.tensors = Tensors(_torch_devices(hardware, backend))
        available = available_memory_bytes()
        if available is None and memory_bytes is None:
            raise CapacityError("--memory: expected a size such as '8 GB', since this system does not tell, got nothing")
        self.memory_bytes = (available or 0) // 2 if memory_bytes is None else memory_bytes
        if available is not None and self.memory_bytes > available:
            raise CapacityError(
                f"--memory: expected at most {format_bytes(available)}, which this machine has available, got "
                f"{format_bytes(self.memory_bytes)}; give less, or close other programs"
            )
        self.done: SimpleQueue[Done] = SimpleQueue()
        self._workers: dict[tuple[str, str], Any] = {}
        self._key: Any = None  # what memory has been prepared for
        self._model: Any = None
        self._buffers: dict[str, Any] = {}
        self._kernels: dict[str, ExpertKernel] = {}
        self._dense: dict[str, DenseKernel] = {}
        self._dense_options: dict[str, Any] = {}
        self._transit: dict[str, Any] = {}
        self._bound: dict[tuple[str, int], Any] = {}
        self._whole = False

    @property
    def spare_cores(self) -> tuple[int, ...]:
        """Cores on which decisions are taken: those that no accelerator is made of, if there are some."""
        taken = {core for device in self.hardware.devices.values() if device.role == "accelerator" for core in device.cores}
        return tuple(core for core in usable_cores() if core not in taken) or tuple(usable_cores())

    # ----------------------------------------------------------------------------------------------------------- workers
    def worker(self, device: str, lane: str) -> Any:
        """Worker of a lane of a device; a disk has none."""
        found = self.hardware.devices[device]
        if found.role == "storage":
            return None
        return self._worker((device, lane), self.tensors.places[device], found.cores)

    def carrier(self, link: str) -> Any:
        """Worker that copies over a link; links of one medium share it."""
        found = self.hardware.link(link)
        places = [self.tensors.places[end] for end in (found.src, found.dst)]
        gpu = next((place for place in places if place != "cpu"), "cpu")
        return self._worker(("link", found.medium or link), gpu, found.cores)

    def _worker(self, key: tuple[str, str], place: str, cores: tuple[int, ...]) -> Any:
        if key not in self._workers:
            name = ".".join(key)
            if place != "cpu":
                self._workers[key] = CudaStreamWorker(name, self.done, place)
            else:
                threads = 1 if key[0] == "link" else len(cores) or (os.cpu_count() or 1)
                self._workers[key] = Worker(name, self.done, cores or None, threads)
        return self._workers[key]

    # ------------------------------------------------------------------------------------------------------------ memory
    def prepare(self, model: ModelSpec, workload: Workload) -> None:
        """Have memory for a model and the largest step of a workload; what was prepared for the same is kept.

        Parameters
        ----------
        model : ModelSpec
            Shapes and precisions.
        workload : Workload
            Its largest step and longest contexts.

        Raises
        ------
        CapacityError
            If it does not fit into the budget, before anything is allocated.
        """
        kv_tokens = max(sum(n + context for n, context in step.sequences) for step in workload.steps)
        rows = workload.max_tokens
        if self._key is not None:
            same, most_rows, most_kv = self._key
            if same == model and rows <= most_rows and kv_tokens <= most_kv:
                return
        self._release()
        shape = ExpertShape.of(model)
        options = {"distinct_layers": self._distinct_layers(model, rows, kv_tokens), "max_rows": rows, "max_kv_tokens": kv_tokens}
        dense_bytes = DenseKernel.required_bytes(model, with_head=True, **options)
        buffers = self._share_out(model, dense_bytes + 6 * rows * model.hidden * 4)
        self._model, self._dense_options = model, options
        for name, n in buffers.items():
            device = self.hardware.devices[name]
            place = self.tensors.places[name]
            kernel = self._kernels.setdefault(place, ExpertKernel(shape, place))
            if device.role == "storage":
                assert self.disk is not None
                self._buffers[name] = FileExperts.create(
                    self.disk / f".moesim-{name}.experts", n, shape.n_bytes, kernel, self.seed
                )
                continue
            pinned = self.backend == "cuda" and place == "cpu"
            self._buffers[name] = Buffers(n, shape.n_bytes, place, pinned=pinned)
            for i in range(n):
                kernel.fill(self._buffers[name][i], self.seed + i if device.role == "host" else self.seed)
        n_units = model.n_layers * model.n_experts
        self._whole = all(n >= n_units for n in buffers.values())
        self._key = (model, rows, kv_tokens)

    def _distinct_layers(self, model: ModelSpec, rows: int, kv_tokens: int) -> int:
        """Layers with dense weights of their own: all, or as many as a third of the budget holds."""
        for layers in range(model.n_layers, 1, -1):
            needed = DenseKernel.required_bytes(
                model, distinct_layers=layers, max_rows=rows, max_kv_tokens=kv_tokens, with_head=True
            )
            if needed <= self.memory_bytes // 3:
                return layers
        return 1

    def _share_out(self, model: ModelSpec, fixed: int) -> dict[str, int]:
        n_units, size = model.n_layers * model.n_experts, ExpertShape.of(model).n_bytes
        found: dict[str, int] = {}
        groups: dict[str, dict[str, int]] = {}
        for name, device in self.hardware.devices.items():
            if device.role == "accelerator" or name in self.hardware.backing:
                where = "disk" if device.role == "storage" else self.tensors.places[name]
                groups.setdefault(where, {})[name] = n_units
        compute = self.tensors.places[self.hardware.compute]
        for where, wanted in groups.items():
            if where == "disk":
                if self.disk is None:
                    raise InputError("replay: expected --disk FOLDER, since the profile keeps the experts on a disk, got nothing")
                room, what = shutil.disk_usage(self.disk).free, f"disk space in {self.disk}"
            elif where == "cpu":
                room, what = self.memory_bytes, "host memory (--memory)"
            else:
                room, what = int((available_gpu_bytes(where) or 0) * GPU_SHARE), f"memory of {where}"
            if where == "disk":
                room = min(room, self.memory_bytes)  # enough to be no part of any cache, and quick to make
            found |= share_out(wanted, size, fixed if where == compute else 0, room, what)
        return found

    def _release(self) -> None:
        for buffers in self._buffers.values():
            if isinstance(buffers, FileExperts):
                buffers.remove()
        self._buffers, self._bound, self._dense, self._kernels, self._transit, self._key = {}, {}, {}, {}, {}, None

    @property
    def aliased(self) -> str:
        """Say how many buffers stand for how many experts, where not every expert has its own; empty otherwise."""
        if self._whole or self._model is None:
            return ""
        told = ", ".join(f"{name} {buffers.n}" for name, buffers in self._buffers.items())
        return f"{self._model.n_layers * self._model.n_experts} experts share buffers ({told})"

    def n_buffers(self, device: str) -> int:
        """Real buffers of a device."""
        return int(self._buffers[device].n)

    def buffer(self, device: str, index: int) -> Any:
        """One buffer of an accelerator, flat uint8."""
        return self._buffers[device][index]

    def backing(self, device: str, unit: int) -> Any:
        """Buffer of a backing host that holds a unit; of a disk, the unit's place in its file."""
        buffers = self._buffers[device]
        return unit % buffers.n if isinstance(buffers, FileExperts) else buffers[unit % buffers.n]

    def weights(self, device: str, index: int) -> Any:
        """Matrices in a buffer of a device."""
        found = self._bound.get((device, index))
        if found is None:
            found = self._bound[device, index] = self.kernel(device).bind(self._buffers[device][index])
        return found

    def backing_weights(self, device: str, unit: int) -> Any:
        """Matrices of a unit on a backing host."""
        return self.weights(device, unit % self._buffers[device].n)

    def kernel(self, device: str) -> ExpertKernel:
        """Kernel of the model's experts on a device."""
        return self._kernels[self.tensors.places[device]]

    def dense(self, device: str) -> DenseKernel:
        """Kernels of the rest of the model on a device."""
        if device not in self._dense:
            assert self._model is not None
            self._dense[device] = DenseKernel(
                self._model, self.tensors.places[device], with_head=True, seed=self.seed, **self._dense_options
            )
        return self._dense[device]

    def zeros(self, device: str, rows: int) -> Any:
        """Zeros of the activations' type on a device, (rows, hidden)."""
        assert self._model is not None
        place = self.tensors.places[device]
        dtype = next(iter(self._kernels.values())).act_dtype
        return self.tensors.zeros(place, rows, self._model.hidden, dtype)

    def index(self, device: str, rows: Iterable[int]) -> Any:
        """Row numbers as a tensor on a device."""
        return self.tensors.index(self.tensors.places[device], np.fromiter(rows, np.int64))

    def gates(self, device: str, values: list[float]) -> Any:
        """Gate weights as a tensor on a device, (n,) of the activations' type."""
        dtype = next(iter(self._kernels.values())).act_dtype
        return self.tensors.values(self.tensors.places[device], values, dtype)

    # ------------------------------------------------------------------------------------------------------------ copies
    def place(self, device: str, index: int, unit: int) -> None:
        """Put a unit's weights where a placement has them at the start; needless where buffers are shared."""
        backing = self._buffers[self.hardware.backing[0]]
        if self._whole and isinstance(backing, Buffers):
            copy(self._buffers[device][index], backing[unit % backing.n])
        elif self._whole:
            backing.read(unit, self._buffers[device][index])

    def copy(self, link: str, target: Any, origin: Any, unit: int, offset: int, n_bytes: int) -> Callable[[], None]:
        """Make the call that copies a part of a unit's weights."""
        found = self.hardware.link(link)
        ends = slice(offset, offset + n_bytes)
        for end, place in ((found.src, origin), (found.dst, target)):
            file = self._buffers.get(end)
            if isinstance(file, FileExperts):
                if offset or n_bytes != file.n_bytes:
                    raise InputError(
                        f"{self.hardware.path}: links.{link}: expected experts of {file.n_bytes} bytes in one piece from and "
                        f"to a disk, got {n_bytes} bytes from {offset} on; leave chunk_bytes out"
                    )
                move, other = (file.read, target) if place is origin else (file.write, origin)
                return partial(move, place, other)
        return partial(copy, target[ends], origin[ends], non_blocking=True)

    def copy_rows(self, dst: Any, src: Any, rows: Iterable[int] | None = None) -> None:
        """Copy some rows, or all, between devices, and wait until they are there."""
        self.tensors.copy_rows(dst, src, rows)

    def bring(self, device: str, values: Any) -> Any:
        """Copy a tensor to another device, and wait until it is there."""
        return self.tensors.bring(self.tensors.places[device], values)

    def transit(self, link: str) -> Any:
        """Buffer at the far end of a link for what goes on from there."""
        if link not in self._transit:
            assert self._model is not None
            place = self.tensors.places[self.hardware.link(link).dst]
            self._transit[link] = Buffers(1, ExpertShape.of(self._model).n_bytes, place)
        return self._transit[link][0]

    def copy_message(self, link: str, n_bytes: int) -> Callable[[], None]:
        """Make the call that moves some bytes of no meaning over a link."""
        found = self.hardware.link(link)
        pair = [self.tensors.bytes(self.tensors.places[end], n_bytes) for end in (found.dst, found.src)]
        return partial(copy, *pair, non_blocking=True)

    # ------------------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """End the workers, and remove what lies on the disk."""
        for worker in self._workers.values():
            worker.close()
        self._workers = {}
        self._release()

    def __enter__(self) -> LiveMachine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _torch_devices(hardware: HardwareProfile, backend: str) -> Mapping[str, str]:
    """Say where each device of the profile is: ``"cpu"``, or ``"cuda:0"`` and so on in the order of the profile."""
    if backend not in BACKENDS:
        raise InputError(f"--backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    gpus = [name for name, device in hardware.devices.items() if device.kind == "gpu"]
    if backend == "cpu" and gpus:
        raise HardwareError(
            f"{hardware.path}: devices.{gpus[0]}: expected devices of kind cpu or disk for --backend cpu, got a gpu; choose the "
            "profile of a machine without one, or --backend cuda"
        )
    n_cores = os.cpu_count() or 1
    for name, device in hardware.devices.items():
        if device.cores and max(device.cores) >= n_cores:
            raise HardwareError(
                f"{hardware.path}: devices.{name}.cores: expected cores 0..{n_cores - 1} of this machine, got "
                f"{list(device.cores)}; choose the profile that was measured on it"
            )
    if backend == "cuda":
        n_gpus = Tensors.n_gpus()
        if not gpus or len(gpus) > n_gpus:
            raise HardwareError(
                f"{hardware.path}: expected at most the {n_gpus} GPUs that PyTorch finds on this machine, and at least one, got "
                f"{len(gpus)} devices of kind gpu; choose the profile that was measured on it"
            )
    return {name: f"cuda:{gpus.index(name)}" if name in gpus else "cpu" for name in hardware.devices}
