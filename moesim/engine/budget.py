"""How many cache slots a placement uses, and how many fit into a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from moesim.engine.build import required_bytes
from moesim.engine.core import Engine
from moesim.engine.entry import EngineOptions
from moesim.errors import CapacityError
from moesim.policy import CACHE, Placement
from moesim.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.costs import CostModel
    from moesim.model import ModelSpec
    from moesim.policy import Policy, View
    from moesim.workload import Workload


class _Placed(Exception):
    """Carries a placement out of the engine's set-up."""


class _Probe:
    """Stands for a policy until it has said where everything is at the start."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.exact = policy.exact
        self.listens: frozenset[type] = frozenset()
        self.needs: frozenset[str] = frozenset()

    def place(self, view: View) -> Placement:
        raise _Placed(self._policy.place(view))

    def decide(self, event: Any, view: View) -> Iterable[Any]:
        raise AssertionError("a probe decides nothing")

    def evict(self, fetch: Any, view: View) -> tuple[int, int] | None:
        raise AssertionError("a probe evicts nothing")


def initial_placement(
    model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy, cache_slots: Mapping[str, int],
    tables: Mapping[str, NDArray[Any]],
) -> Placement:  # fmt: skip
    """Ask a policy for its placement without running it.

    Parameters
    ----------
    model, costs, workload, policy, cache_slots, tables
        As for `moesim.engine.simulate`.

    Returns
    -------
    Placement
        Not yet checked against the devices' capacity.

    Raises
    ------
    CapacityError
        If the policy cannot work with so few slots.
    """
    try:
        Engine(model, costs, workload, _Probe(policy), cache_slots, {}, tables, EngineOptions(), "probe", None)
    except _Placed as placed:
        placement: Placement = placed.args[0]
        return placement
    raise AssertionError("unreachable: the engine asks for a placement while it is set up")


def slots_used(placement: Placement, model: ModelSpec) -> int:
    """Count the cache slots that a placement can use, on the device that has most of them.

    Parameters
    ----------
    placement : Placement
        Its cache pools count: those of that name.
    model : ModelSpec
        The size of its largest expert is that of a slot.

    Returns
    -------
    int
        Slots over all layers. Fewer than are granted where a policy keeps no cache, whole layers, or the same number in every
        layer; more where it holds experts whatever is granted.
    """
    slot = max(model.expert_bytes(layer) for layer in range(model.n_layers))
    count: dict[str, int] = {}
    for pool in placement.pools:
        if pool.name == CACHE:
            most = model.n_experts * (1 if pool.per_layer else model.n_layers)
            fit = sum(min(n_bytes // slot, most) for n_bytes in pool.sizes(model.n_layers))
            held = sum(len(copy.experts) for copy in placement.copies if (copy.device, copy.pool) == (pool.device, CACHE))
            count[pool.device] = max(fit, held)  # experts smaller than the largest may be there beyond what fits
    return max(count.values(), default=0)


def slots_within(
    budget_bytes: int, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy,
    tables: Mapping[str, NDArray[Any]], policy_name: str,
) -> int:  # fmt: skip
    """Find the largest number of cache slots, the same on each GPU, with which no GPU needs more than a budget.

    Parameters
    ----------
    budget_bytes : int, bytes
        Of each GPU; weights, KV cache, workspace and all pools count.
    model, costs, workload, policy, tables
        As for `moesim.engine.simulate`.
    policy_name : str
        For the message.

    Returns
    -------
    int
        Slots over all layers, at most all experts. What a policy needs grows with its slots, so a binary search finds it.

    Raises
    ------
    CapacityError
        If not even the smallest cache with which the policy works fits.
    """
    gpus = [name for name, device in costs.hardware.devices.items() if device.role == "accelerator"]

    @cache  # the three searches ask in part the same
    def needed(slots: int) -> tuple[int, str]:
        """Most bytes that a GPU needs, and which; 0 if these are too few slots for the policy."""
        try:
            placement = initial_placement(model, costs, workload, policy, dict.fromkeys(gpus, slots), tables)
        except CapacityError:
            return 0, ""
        need = required_bytes(model, costs.hardware, workload.peak_kv_tokens, placement)
        return max((sum(need[gpu].values()), gpu) for gpu in gpus)

    def first(low: int, high: int, found: Callable[[int], bool]) -> int:
        """First number of slots in low..high for which a question, once answered yes, stays answered yes."""
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if found(middle) else (middle + 1, high)
        return low

    n_units = model.n_layers * model.n_experts
    fewest = first(0, n_units, lambda slots: needed(slots)[0] > 0)
    least, where = needed(fewest)
    if least > budget_bytes:
        raise CapacityError(
            f"cache.budget: expected at least {format_bytes(least)}, which {where} of {costs.hardware.name} needs with "
            f"{fewest} cache slots, got {format_bytes(budget_bytes)}; raise the budget, or lower the batch or the context "
            f"[policy={policy_name}]"
        )
    too_many = first(fewest, n_units + 1, lambda slots: slots > n_units or needed(slots)[0] > budget_bytes)
    most = needed(too_many - 1)[0]
    # Slots that change nothing (a remainder that does not reach every layer) are not told as cache.
    return first(fewest, too_many - 1, lambda slots: needed(slots)[0] >= most)
