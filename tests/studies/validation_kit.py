"""Stand-ins for a validation."""

from __future__ import annotations

from typing import Any

from moesim.engine import simulate
from moesim.experiment.runner import Execution
from moesim.hardware.costs import CostModel
from moesim.records import Records


class Believing:
    """A policy that is shown the profile's costs while the engine goes by others, as in a replay."""

    def __init__(self, policy: Any, costs: CostModel) -> None:
        self.policy, self.told = policy, costs
        self.exact, self.listens, self.needs = policy.exact, policy.listens, policy.needs

    def _seen(self, view: Any) -> Any:
        told = self.told

        class View:
            def __getattr__(self, name: str) -> Any:
                return told if name == "costs" else getattr(view, name)

        return View()

    def place(self, view: Any) -> Any:
        return self.policy.place(self._seen(view))

    def decide(self, event: Any, view: Any) -> Any:
        return self.policy.decide(event, self._seen(view))

    def evict(self, fetch: Any, view: Any) -> Any:
        return self.policy.evict(fetch, self._seen(view))


def stand_in(slots: float = 1.0, **factors: float) -> Execution:
    """Replay by simulating a machine on which some things take longer than the profile says."""

    class Other(CostModel):
        def expert_ns(self, device: str, n_rows: int) -> int:
            return round(super().expert_ns(device, n_rows) * factors.get(device, 1))

        def transfer_ns(self, link: Any, n_bytes: int) -> int:
            return round(super().transfer_ns(link, n_bytes) * factors.get("link", 1))

        def dense_ns(self, device: str, n_rows: int, layer: int = 0) -> int:
            return round(super().dense_ns(device, n_rows, layer) * factors.get("dense", 1))

    def call(**given: Any) -> Records:
        told = given["costs"]
        costs = Other(given["model"], told.hardware, transfer=told.transfer, chunk_bytes=told.chunk_bytes)
        cache = {name: int(n * slots) for name, n in given["cache_slots"].items()}
        return simulate(**{**given, "costs": costs, "policy": Believing(given["policy"], told), "cache_slots": cache})

    return Execution(call, True)
