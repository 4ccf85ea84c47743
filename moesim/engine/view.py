"""The read-only present that a policy sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from moesim.engine.links import remaining_ns
from moesim.engine.memory import Unit
from moesim.engine.state import State, fail, width_of
from moesim.engine.steps import dense_ns
from moesim.errors import unknown_name
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


class EngineView:
    """Answers of `moesim.policy.View` from the engine's state."""

    def __init__(self, state: State) -> None:
        self._state, self._devices = state, state.devices
        self.model: ModelSpec = state.model
        self.costs: CostModel = state.costs
        self.tables: Mapping[str, NDArray[Any]] = state.tables

    @property
    def now_ns(self) -> int:
        return self._state.now

    @property
    def devices(self) -> Sequence[str]:
        return list(self._devices)

    @property
    def gpus(self) -> Sequence[str]:
        return [device.name for device in self._state.gpus]

    @property
    def cpus(self) -> Sequence[str]:
        return [name for name, device in self._devices.items() if device.computes and not device.is_gpu]

    @property
    def compute(self) -> str:
        return self.costs.hardware.compute

    @property
    def host(self) -> str:
        return self.costs.hardware.backing[0]

    @property
    def max_tokens(self) -> int:
        return self._state.workload.max_tokens

    def cache_slots(self, device: str) -> int:
        return self._state.cache_slots.get(device, 0)

    def dense_device(self, layer: int) -> str:
        return self._state.forward.layout.dense_at[layer].name

    def dense_ns(self, layer: int) -> int:
        return dense_ns(self._state, layer)

    def foresees(self, source: str, layer: int) -> bool:
        state = self._state
        predictor = state.predictors.get(source)
        if predictor is None:
            fail(state, f"foresees: {unknown_name('source', source, state.predictors)}", "name a prediction source")
        step, n_mbs = (state.step, len(state.forward.micro)) if state.forward is not None else (None, 1)
        return all(predictor.predict(step, mb, layer) is not None for mb in range(n_mbs))

    def is_resident(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return self._unit(layer, expert, bits) in self._devices[device].memory.copies

    def is_pending(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return self._unit(layer, expert, bits) in self._devices[device].pending

    def is_in_use(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        copy = self._devices[device].memory.copies.get(self._unit(layer, expert, bits))
        return copy is not None and copy.in_use > 0

    def residency(self, layer: int, device: str, bits: float | None = None) -> bytes:
        layer, _, bits = self._unit(layer, 0, bits)
        memory = self._devices[device].memory
        here = bytearray([memory.backing and 0 <= layer < self.model.n_layers] * self.model.n_experts)
        for pool in memory.pools.values():
            for expert in pool.members.get((layer, bits), ()):
                here[expert] = 1
        return bytes(here)

    def remaining_ns(self, layer: int, expert: int, device: str, bits: float | None = None) -> int:
        transfer = self._devices[device].pending.get(self._unit(layer, expert, bits))
        return remaining_ns(self._state, transfer) if transfer is not None else 0

    def residents(
        self, device: str, pool: str, layer: int | None = None, bits: float | None = None
    ) -> list[int] | list[tuple[int, int]]:
        members = self._devices[device].memory.pools[pool].members
        width = width_of(self._state, bits, "the view was asked")
        if layer is not None:
            return sorted(members.get((index(layer), width), ()))
        return [(at, e) for at in range(self.model.n_layers) for e in sorted(members.get((at, width), ()))]

    def free_bytes(self, device: str, pool: str, layer: int = 0) -> int:
        return max(0, self._devices[device].memory.pools[pool].free(layer))

    def _unit(self, layer: int, expert: int, bits: float | None) -> Unit:
        return Unit(index(layer), index(expert), width_of(self._state, bits, "the view was asked"))
