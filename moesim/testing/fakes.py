"""A tiny model and machine with round costs, and a view whose answers are set by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec
from moesim.policy import Placement, Pool, Routed

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRANSFER_NS = 3000  # one expert of `tiny_model` over the link of `tiny_machine`
GPU_NS = 2000  # one expert on its GPU, however many rows
CPU_NS_PER_ROW = 1000  # one row of one expert on its CPU


def tiny_model(**changes: Any) -> ModelSpec:
    """Return a model of 4 layers, 8 experts and top-2, whose bytes make costs round.

    Parameters
    ----------
    **changes
        Other values of `moesim.model.ModelSpec`'s fields. Another width changes what an expert costs.
    """
    fields: dict[str, Any] = {
        "name": "tiny", "n_layers": 4, "n_experts": 8, "top_k": 2, "hidden": 256, "expert_intermediate": 256,
        "n_heads": 4, "n_kv_heads": 4, "head_dim": 64, "vocab": 1000,
    }  # fmt: skip
    return ModelSpec(**(fields | changes))


def tiny_machine(n_gpus: int = 1, **changes: Any) -> HardwareProfile:
    """Return a machine of one CPU and GPUs on links of their own, with round costs.

    An expert takes 2 us on the GPU (`GPU_NS`), 1 us a row on the CPU (`CPU_NS_PER_ROW`), and 3 us over the link
    (`TRANSFER_NS`).

    Parameters
    ----------
    n_gpus : int
        GPUs.
    **changes
        Other top-level entries of a hardware profile, for example ``contention``.
    """
    model = tiny_model()
    shape = {"hidden": model.hidden, "intermediate": model.expert_intermediate, "bits": 16.0}

    def assumed(value: float) -> dict[str, Any]:
        return {"value": value, "source": "assumed", "why": "a round number for tests"}

    def device(kind: str, gib: int, base_us: float, per_token_us: float) -> dict[str, Any]:
        curve = {"shape": shape, "form": "linear", "range": [1, 4096]}
        return {
            "kind": kind, "memory_bytes": assumed(gib * 2**30), "memory_bytes_per_s": assumed(1e12),
            "flops": assumed(1e14), "launch_us": assumed(0.5),
            "experts": [{**curve, "base_us": assumed(base_us), "per_token_us": assumed(per_token_us)}],
        }  # fmt: skip

    gpus = [f"gpu{i}" for i in range(n_gpus)]
    rate = model.expert_bytes(0) * 1e9 / TRANSFER_NS
    link = {
        "any": {"latency_us": assumed(0.0), "bytes_per_s": assumed(rate)},
        "activation": {"latency_us": assumed(0.1), "bytes_per_s": assumed(rate)},
    }
    profile = {
        "name": "tiny",
        "description": "Round numbers for tests; no machine.",
        "compute": "gpu0",
        "backing": ["cpu0"],
        "devices": {
            **{gpu: device("gpu", 1, GPU_NS / 1000, 0.0) for gpu in gpus},
            "cpu0": device("cpu", 4, 0.0, CPU_NS_PER_ROW / 1000),
        },
        "links": {name: link for gpu in gpus for name in (f"cpu0->{gpu}", f"{gpu}->cpu0")},
    }
    return load_hardware({**profile, **changes}, "tiny_machine")


_Key = tuple[str, int, int, float | None]  # device, layer, expert; bits unless it has the full width


class FakeView:
    """A `moesim.policy.View` with answers set by hand, for tests without the engine.

    Parameters
    ----------
    model : ModelSpec or None
        None: `tiny_model`.
    hardware : HardwareProfile or None
        None: `tiny_machine`.
    slots : int
        Cache slots of each GPU.
    tables : mapping of str to ndarray
        Calibration tables.
    max_tokens : int
        Rows of the largest step.

    Examples
    --------
    >>> view = FakeView()
    >>> view.put(0, [3], "gpu0")
    >>> view.is_resident(0, 3, "gpu0"), view.is_resident(0, 4, "gpu0")
    (True, False)
    """

    def __init__(
        self,
        model: ModelSpec | None = None,
        hardware: HardwareProfile | None = None,
        *,
        slots: int = 8,
        tables: Mapping[str, NDArray[Any]] | None = None,
        max_tokens: int = 64,
    ) -> None:
        self.model = model or tiny_model()
        self.costs = CostModel(self.model, hardware or tiny_machine())
        self.tables: Mapping[str, NDArray[Any]] = dict(tables or {})
        self.max_tokens = max_tokens
        self.now_ns = 0
        self.slots = slots
        self.dense_part_ns = 1000
        self.pools: dict[tuple[str, str], Pool] = {}
        self._resident: dict[_Key, str] = {}
        self._pending: dict[_Key, int] = {}
        self._in_use: set[_Key] = set()

    def use(self, placement: Placement) -> None:
        """Take over the copies and pools of a placement."""
        for pool in placement.pools:
            self.pools[pool.device, pool.name] = pool
        for copy in placement.copies:
            self.put(copy.layer, copy.experts, copy.device, copy.pool, copy.bits)

    def put(
        self, layer: int, experts: Sequence[int], device: str, pool: str = "cache", bits: float | None = None
    ) -> None:  # fmt: skip
        """Make experts resident; they are no longer pending."""
        for expert in experts:
            self._resident[device, layer, expert, self._width(bits)] = pool
            self._pending.pop((device, layer, expert, self._width(bits)), None)

    def remove(self, layer: int, experts: Sequence[int], device: str, bits: float | None = None) -> None:
        for expert in experts:
            del self._resident[device, layer, expert, self._width(bits)]

    def pend(
        self, layer: int, experts: Sequence[int], device: str, remaining_ns: int = TRANSFER_NS, bits: float | None = None
    ) -> None:  # fmt: skip
        """Make experts pending, with this time to their arrival."""
        for expert in experts:
            self._pending[device, layer, expert, self._width(bits)] = remaining_ns

    def hold(
        self, layer: int, experts: Sequence[int], device: str, in_use: bool = True, bits: float | None = None
    ) -> None:  # fmt: skip
        """Make experts in use, or no longer so."""
        keys = {(device, layer, expert, self._width(bits)) for expert in experts}
        self._in_use = self._in_use | keys if in_use else self._in_use - keys

    def _width(self, bits: float | None) -> float | None:
        return None if bits == self.model.expert_bits else bits

    @property
    def devices(self) -> list[str]:
        return list(self.costs.hardware.devices)

    @property
    def gpus(self) -> list[str]:
        return [name for name, device in self.costs.hardware.devices.items() if device.kind == "gpu"]

    @property
    def cpus(self) -> list[str]:
        return [name for name, device in self.costs.hardware.devices.items() if device.kind == "cpu"]

    @property
    def compute(self) -> str:
        return self.costs.hardware.compute

    @property
    def host(self) -> str:
        return self.costs.hardware.backing[0]

    def cache_slots(self, device: str) -> int:
        return self.slots if device in self.gpus else 0

    def dense_device(self, layer: int) -> str:
        return self.compute

    def dense_ns(self, layer: int) -> int:
        return self.dense_part_ns

    def foresees(self, source: str, layer: int) -> bool:
        """Whether a source knows a layer: every one but the first."""
        return layer > 0

    def is_resident(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return device in self.costs.hardware.backing or (device, layer, expert, self._width(bits)) in self._resident

    def is_pending(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return (device, layer, expert, self._width(bits)) in self._pending

    def is_in_use(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        return (device, layer, expert, self._width(bits)) in self._in_use

    def residency(self, layer: int, device: str, bits: float | None = None) -> bytes:
        return bytes(self.is_resident(layer, expert, device, bits) for expert in range(self.model.n_experts))

    def remaining_ns(self, layer: int, expert: int, device: str, bits: float | None = None) -> int:
        """Return the time given with `pend`, or 0."""
        return self._pending.get((device, layer, expert, self._width(bits)), 0)

    def residents(
        self, device: str, pool: str, layer: int | None = None, bits: float | None = None
    ) -> list[int] | list[tuple[int, int]]:
        """Return the residents of a pool at one width, sorted."""
        wanted = device, pool, self._width(bits)
        held = sorted((at, e) for (where, at, e, width), name in self._resident.items() if (where, name, width) == wanted)
        return held if layer is None else [expert for at, expert in held if at == layer]

    def free_bytes(self, device: str, pool: str, layer: int = 0) -> int:
        """Return what is left of a pool of a placement given to `use`."""
        held = [(at, bits) for (where, at, _, bits), name in self._resident.items() if (where, name) == (device, pool)]
        found = self.pools[device, pool]
        room = found.sizes(self.model.n_layers)[layer if found.per_layer else 0]
        return room - sum(self.model.expert_bytes(at, bits) for at, bits in held if at == layer or not found.per_layer)


def routed(
    experts: Sequence[Sequence[int]], *, layer: int = 0, step: int = 0, mb: int = 0, first_row: int = 0, n_experts: int = 8
) -> Routed:
    """Build a `Routed` event from the experts of each row, with equal gate weights.

    Parameters
    ----------
    experts : sequence of sequence of int, shape (n_rows, top_k)
        Ids in rank order.

    Examples
    --------
    >>> event = routed([[1, 3], [3, 0]])
    >>> event.rows, event.active
    ([1, 1, 0, 2, 0, 0, 0, 0], [0, 1, 3])
    """
    ids = np.array(experts, dtype=np.uint8)
    loads = np.bincount(ids.ravel(), minlength=n_experts).tolist()
    weights = np.full(ids.shape, 1 / ids.shape[1], dtype=np.float16)
    active = [expert for expert, rows in enumerate(loads) if rows]
    return Routed(step, layer, mb, ids, weights, None, loads, active, first_row)
