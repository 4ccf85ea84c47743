"""Printed costs beside what a hardware profile says: some are inputs of the profile, and then agree by construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model

_CONTEXT = 256  # tokens that the attention of a block looks back on; it is a small part of the block
_NS_PER_MS = 1e6
_DEFAULTS = {"model": "", "rows": "1", "device": "", "transfer": "pinned"}


@dataclass(frozen=True)
class _Question:
    """What is asked of which machine."""

    costs: CostModel
    rows: int
    device: str

    @property
    def host(self) -> str:
        return self.costs.hardware.backing[0]

    @property
    def gpu(self) -> str:
        return self.costs.hardware.compute

    def copy_ns(self) -> int:
        return self.costs.fetch_ns(self.host, self.gpu)

    def expert_ns(self, device: str) -> int:
        return self.costs.expert_ns(device, self.rows)


def machine_cost(hardware: str, name: str, arguments: Mapping[str, str], place: str) -> tuple[float, str]:
    """Look up a cost."""
    check_cost(name, arguments, place)
    given = _DEFAULTS | dict(arguments)
    profile = load_hardware(hardware, place)
    device = given["device"] or profile.compute
    if device not in profile.devices:
        raise ConfigError(f"{place}: {name}: {unknown_name('device', device, profile.devices)}")
    model = load_model(read_yaml_value(given["model"], place), place)
    costs = CostModel(model, profile, transfer=given["transfer"], extrapolate=True)
    value = COSTS[name](_Question(costs, int(given["rows"]), device))
    return value, costs.label(()) if costs.provenance() else "published"


def check_cost(name: str, arguments: Mapping[str, str], place: str) -> None:
    """Check that a cost of this name takes these arguments."""
    if name not in COSTS:
        raise ConfigError(f"{place}: {unknown_name('cost', name, COSTS)}")
    for key in arguments:
        if key not in _DEFAULTS:
            raise ConfigError(f"{place}: {name}: {unknown_name('argument', key, _DEFAULTS)}")
    if "model" not in arguments:
        raise ConfigError(f"{place}: {name}: expected the argument model, got none")
    rows = arguments.get("rows", "1")
    if not rows.isdecimal() or int(rows) < 1:
        raise ConfigError(f"{place}: {name}: rows: expected an integer of at least 1, got '{rows}'")


def _block_ns(q: _Question) -> int:
    costs, n = q.costs, q.rows
    work = n * (2 * _CONTEXT + n)
    return costs.attention_ns(q.device, n, work, 1) + costs.dense_ns(q.device, n) + costs.model.top_k * q.expert_ns(q.device)


COSTS: dict[str, Callable[[_Question], float]] = {
    "expert_ms": lambda q: q.expert_ns(q.device) / _NS_PER_MS,
    "block_ms": lambda q: _block_ns(q) / _NS_PER_MS,
    "copy_ms": lambda q: q.copy_ns() / _NS_PER_MS,
    "activation_ms": lambda q: sum(q.costs.activation_ns(link, q.rows) for link in q.costs.path(q.gpu, q.host)) / _NS_PER_MS,
    "copied_over_cpu": lambda q: (q.copy_ns() + q.expert_ns(q.gpu)) / q.expert_ns(q.host),
    "expert_mib": lambda q: q.costs.model.expert_bytes(0) / 2**20,
}
"""Name -> how it is looked up: one expert with some rows on a device; attention, router and the top_k experts of a row; a copy
of an expert to the GPU, and of its activations from there; an expert copied and computed there over the same on the CPU; its
size."""
