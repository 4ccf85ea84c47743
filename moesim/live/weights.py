"""Real weights on this machine: buffers that fit, the experts they hold, and kernels."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.core.units import format_memory
from moesim.errors import CapacityError, InputError
from moesim.live.kernels.dense import DenseKernel
from moesim.live.kernels.experts import ExpertKernel
from moesim.live.kernels.host import available_gpu_bytes
from moesim.live.kernels.memory import Buffers, FileExperts, copy
from moesim.live.kernels.plans import ExpertShape, buffer_bytes, dense_bytes

if TYPE_CHECKING:
    from moesim.engine.memory import Unit
    from moesim.engine.state import DeviceState
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec


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
        """Free the buffers of units that have left the device."""
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
        """Return the bytes that may be used somewhere, and the name of that."""
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
        """Describe where buffers stand for more experts than there are buffers."""
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
