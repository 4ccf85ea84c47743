"""How many cache slots a placement uses, and how many fit into a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from moesim.capacity import required_bytes
from moesim.core.units import format_memory
from moesim.engine import empty_view
from moesim.errors import CapacityError
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec
from moesim.policy import CACHE, Placement, Policy
from moesim.trace.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.experiment.spec import RunSpec


def initial_placement(
    model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy, cache_slots: Mapping[str, int],
    tables: Mapping[str, NDArray[Any]],
) -> Placement:  # fmt: skip
    """Ask a policy for its placement, not yet checked, without running it; CapacityError if it needs more slots."""
    return policy.place(empty_view(model, costs, workload, policy, cache_slots, tables))


def slots_used(placement: Placement, model: ModelSpec) -> int:
    """Count the cache slots over all layers that a placement can use, on the device that has most of them.

    They are fewer than are granted where a policy keeps no cache, whole layers, or the same number in every layer. They are more
    where it holds experts whatever is granted. The size of the largest expert is that of a slot.
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


def granted_slots(spec: RunSpec, workload: Workload, policy: Policy, tables: Mapping[str, NDArray[Any]]) -> int:
    """Count the cache slots of each GPU over all layers: of a share as written, of a budget as many as fit."""
    if spec.cache_slots is not None:
        return spec.cache_slots
    budget = spec.point.budget_bytes
    assert budget is not None
    return slots_within(budget, spec.model, spec.costs(policy), workload, policy, tables, spec.policy_name)


def slots_within(
    budget_bytes: int, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy,
    tables: Mapping[str, NDArray[Any]], policy_name: str,
) -> int:  # fmt: skip
    """Find the largest number of cache slots over all layers with which no GPU needs more than a budget, the same on each.

    Weights, KV cache, workspace and all pools count. What a policy needs grows with its slots, so a binary search finds it.
    CapacityError if not even the smallest cache with which the policy works fits.
    """
    gpus = [name for name, device in costs.hardware.devices.items() if device.role == "accelerator"]
    granted: dict[str, int] = {}
    view = empty_view(model, costs, workload, policy, granted, tables)

    @cache  # the three searches ask in part the same
    def needed(slots: int) -> tuple[int, str]:
        """Most bytes that a GPU needs, and which; 0 if these are too few slots for the policy."""
        granted.update(dict.fromkeys(gpus, slots))
        try:
            placement = policy.place(view)
        except CapacityError:
            return 0, ""
        need = required_bytes(model, costs.hardware, workload.peak_kv_tokens, placement)
        return max((sum(need[gpu].values()), gpu) for gpu in gpus)

    def first(low: int, high: int, found: Callable[[int], bool], guesses: Sequence[int]) -> int:
        """First number of slots in low..high for which a question, once answered yes, stays answered yes; guesses come first."""
        for at in guesses:
            if low <= at < high:
                low, high = (low, at) if found(at) else (at + 1, high)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if found(middle) else (middle + 1, high)
        return low

    n_units = model.n_layers * model.n_experts
    fewest = first(0, n_units, lambda slots: needed(slots)[0] > 0, [0])
    least, where = needed(fewest)
    if least > budget_bytes:
        raise CapacityError(
            f"cache.budget: expected at least {format_memory(least, least=True)}, which {where} of {costs.hardware.name} "
            f"needs with {fewest} cache slots, got {format_memory(budget_bytes)}; raise the budget, or lower the batch or the "
            f"context [policy={policy_name}]"
        )
    # Where every slot is one expert, exactly; where layers have equal shares, within a layer's rounding.
    fit = fewest + (budget_bytes - least) // max(model.expert_bytes(layer) for layer in range(model.n_layers))
    guesses = [fit + 1, fit, fit + 1 + model.n_layers, fit - model.n_layers]
    too_many = first(fewest, n_units + 1, lambda slots: slots > n_units or needed(slots)[0] > budget_bytes, guesses)
    most = needed(too_many - 1)[0]
    # Slots that change nothing (a remainder that does not reach every layer) are not told as cache.
    return first(fewest, too_many - 1, lambda slots: needed(slots)[0] >= most, [too_many - 2])
