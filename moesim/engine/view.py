"""The read-only present that a policy sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from moesim.engine.checks import fail, first_of
from moesim.engine.links import remaining_ns
from moesim.engine.state import State
from moesim.engine.steps import dense_ns
from moesim.errors import unknown_name
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


class EngineView:
    """Answers of `moesim.policy.View` from the engine's state."""

    __slots__ = ("_by_name", "_n_experts", "_state", "costs", "model", "tables")

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_name = state.by_name
        self._n_experts = state.model.n_experts
        self.model: ModelSpec = state.model
        self.costs: CostModel = state.costs
        self.tables: Mapping[str, NDArray[Any]] = state.tables

    @property
    def now_ns(self) -> int:
        return self._state.now

    @property
    def devices(self) -> Sequence[str]:
        return list(self._by_name)

    @property
    def gpus(self) -> Sequence[str]:
        return [d.name for d in self._state.gpus]

    @property
    def cpus(self) -> Sequence[str]:
        return [d.name for d in self._state.devices if d.computes and not d.is_gpu]

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
        return self._state.layout.dense_at[layer].name

    def dense_ns(self, layer: int) -> int:
        return dense_ns(self._state, layer)

    def foresees(self, source: str, layer: int) -> bool:
        state = self._state
        predictor = state.predictors.get(source)
        if predictor is None:
            fail(state, f"foresees: {unknown_name('source', source, state.predictors)}", "name a prediction source")
        return all(predictor.predict(state.step, mb, layer) is not None for mb in range(state.n_mbs))

    def _unit(self, layer: int, expert: int, bits: float | None) -> int:
        return self._first(bits) + index(layer) * self._n_experts + index(expert)

    def _first(self, bits: float | None) -> int:
        return 0 if bits is None else first_of(self._state, bits, "the view was asked")

    def is_resident(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return bool(self._by_name[device].memory.resident[self._unit(layer, expert, bits)])

    def is_pending(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return self._unit(layer, expert, bits) in self._by_name[device].pending

    def is_in_use(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        copy = self._by_name[device].memory.copies.get(self._unit(layer, expert, bits))
        return copy is not None and copy.in_use > 0

    is_pinned = is_in_use  # the old name, for one version

    def residency(self, layer: int, device: str, bits: float | None = None) -> bytes:
        n = self._n_experts
        at = self._unit(layer, 0, bits)
        return bytes(self._by_name[device].memory.resident[at : at + n])

    def remaining_ns(self, layer: int, expert: int, device: str, bits: float | None = None) -> int:
        transfer = self._by_name[device].pending.get(self._unit(layer, expert, bits))
        return remaining_ns(self._state, transfer) if transfer is not None else 0

    def residents(
        self, device: str, pool: str, layer: int | None = None, bits: float | None = None
    ) -> list[int] | list[tuple[int, int]]:
        members = self._by_name[device].memory.pools[pool].members
        n = self._n_experts
        first = self._first(bits)
        if layer is not None:
            base = first + index(layer) * n
            return sorted([unit - base for unit in members.get(base // n, ())])
        shelves = [shelf for shelf in sorted(members) if 0 <= shelf - first // n < self.model.n_layers]
        return [divmod(unit - first, n) for shelf in shelves for unit in sorted(members[shelf])]

    def free_bytes(self, device: str, pool: str, layer: int = 0) -> int:
        return max(0, self._by_name[device].memory.pools[pool].free(layer))
