"""Rule 10: say who waits for what."""

from __future__ import annotations

from moesim.core.units import format_bytes, format_ns
from moesim.engine.state import State


def explain(state: State) -> str:
    """Build the message of a deadlock from the state."""
    visit = state.visit
    layer = visit.layer if visit is not None else -1
    waits = []
    for link in state.links.values():
        for urgency, _, transfer in link.queue[:4]:
            if transfer.pool is not None and transfer.hop < len(transfer.path) - 1:
                waits.append(
                    f"Fetch(L{transfer.layer}/E{transfer.expert}, {transfer.dst.name}, urgency={urgency}) waits for memory on "
                    f"{link.to.name} on its way ({format_bytes(max(0, link.to.memory.spare))} claimed by nobody)"
                )
            elif transfer.pool is not None:
                pool = transfer.pool
                at = transfer.layer if pool.per_layer else 0
                used, capacity = pool.used[at], pool.capacity[at]
                # Only the head of each urgency class of a link asks; that it was asked for, and waits, is noted.
                asked = "evict returned None" if transfer.waited_memory else "evict is asked for those before it first"
                waits.append(
                    f"Fetch(L{transfer.layer}/E{transfer.expert}, {transfer.dst.name}, urgency={urgency}) waits for memory "
                    f"in pool '{pool.name}' ({format_bytes(used)} of {format_bytes(capacity)} used, {asked})"
                )
            else:
                waits.append(f"a transfer of {format_bytes(transfer.n_bytes)} waits on {link.name}")
    for device in state.devices:
        for transfer in device.pending.values():
            for task in transfer.waiting[:2]:
                waits.append(f"Run(L{task.layer}/E{task.expert}, {device.name}) waits for its fetch")
        if device.main.n_waiting and not device.pending:
            waits.append(f"{device.main.n_waiting} tasks on {device.name} wait for inputs")
    if visit is not None and any(visit.unserved):
        left = [e for e, rows in enumerate(visit.unserved) if rows]
        n_slots = sum(rows.bit_count() for rows in visit.unserved)
        waits.append(f"layer {layer} has {n_slots} unserved slots of experts {left[:8]}: no Run or Skip names them")
    where = f"t={format_ns(state.now)}, step {state.step.index}, layer {layer}"
    who = "; ".join(waits) or "no work is queued"
    return f"{where}: nothing can happen and work remains: {who} [policy={state.policy_name}]"
