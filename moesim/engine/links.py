"""Transfers over directed, serial links, and activations that cross (rules 5, 6 and 8)."""

from __future__ import annotations

from bisect import insort
from operator import index

from moesim.engine.memory import Unit
from moesim.engine.state import (
    FULL,
    Call,
    Crossing,
    DeviceState,
    Group,
    LinkState,
    Medium,
    State,
    Task,
    Transfer,
    fail,
    short_repr,
    width_of,
)
from moesim.policy import Fetch
from moesim.records import TransferRecord


def path_between(state: State, src: str, dst: str) -> tuple[LinkState, ...]:
    """Return the links from one device to another."""
    return tuple(state.links[link.name] for link in state.costs.path(src, dst))


# ------------------------------------------------------------------------------------------------------------------ queue
def enqueue(state: State, transfer: Transfer) -> None:
    """Queue a transfer on its link."""
    medium = transfer.link.medium
    insort(medium.queue, transfer, key=lambda one: (one.urgency, one.fetch))
    if not medium.busy:
        state.instant.media.append(medium)


def hasten(state: State, transfer: Transfer, urgency: int) -> None:
    """Make a transfer more urgent, wherever it is."""
    if urgency < transfer.urgency:
        is_queued = transfer in transfer.link.medium.queue
        if is_queued:
            transfer.link.medium.queue.remove(transfer)
        transfer.urgency = urgency
        if is_queued:
            enqueue(state, transfer)


def send_message(
    state: State, path: tuple[LinkState, ...], n_bytes: int, urgency: int, then: Call, *, cause: str, layer: int = -1,
    rows: int = 0,
) -> Transfer:  # fmt: skip
    """Queue what is no expert; ``then()`` follows its arrival."""
    number, unit = next(state.fetch_numbers), Unit(layer, -1)
    message = Transfer(number, unit, n_bytes, n_bytes, path, urgency, state.now, cause, on_arrival=then, rows=rows)
    enqueue(state, message)
    return message


def start_next(state: State, medium: Medium) -> bool:
    """Start the first transfer that can; False if some are queued and none can."""
    if medium.busy:
        return True
    heads = set()  # link and urgency of those that have been tried: for the first of each alone victims are asked
    for transfer in medium.queue:
        head = (transfer.link.name, transfer.urgency)
        if _has_room(state, transfer, head not in heads):
            _start(state, transfer)
            return True
        heads.add(head)
    return not medium.queue


def _has_room(state: State, transfer: Transfer, is_head: bool) -> bool:
    """Whether a transfer could start now; its memory is not yet taken, but there."""
    if not transfer.first_chunk or transfer.dst is None:
        return True
    if not transfer.last_hop:  # an intermediate device
        room = transfer.n_bytes <= transfer.link.to.memory.spare
    elif transfer.pool is None or transfer.n_bytes <= transfer.pool.free(transfer.unit.layer):
        room = True  # of a write-back, the backing copy's place is always there
    else:
        room = is_head and _make_room(state, transfer)
    transfer.waited_memory = transfer.waited_memory or (is_head and not room)
    return room


def _make_room(state: State, transfer: Transfer) -> bool:
    """Ask the policy for victims until the transfer fits; False if it has to wait."""
    pool, dst, (layer, expert, bits) = transfer.pool, transfer.dst, transfer.unit
    assert pool is not None and dst is not None
    while pool.lacks(layer, transfer.n_bytes):
        question = Fetch(layer, (expert,), dst.name, transfer.urgency, pool.name, None, bits)
        victim = state.policy.evict(question, state.view)
        if victim is None:
            return False
        try:
            of_layer, which, width = victim if len(victim) == 3 else (*victim, None)
            of_layer, which = index(of_layer), index(which)
            unit = Unit(of_layer, which, width_of(state, width, f"evict named L{of_layer}/E{which}"))
        except (TypeError, ValueError):
            what = f"evict(L{layer}/E{expert}, {dst.name}): expected (layer, expert) or None, got {short_repr(victim)}"
            fail(state, what, "name a resident of the pool, or return None to wait")
        copy = dst.memory.copies.get(unit)
        if copy is None or copy.pool is not pool:
            wrong, remedy = f"not resident in pool '{pool.name}'", "name a resident of the pool that is full"
        elif copy.leaves == "evict":
            wrong, remedy = "it is leaving already", "name each victim once, or return None to wait"
        elif pool.per_layer and of_layer != layer:
            wrong, remedy = "another layer's pool", f"name an expert of layer {layer}"
        else:
            dst.memory.leave(unit, "evict", state.now)
            continue
        fail(state, f"evict(L{layer}/E{expert}, {dst.name}) named L{of_layer}/E{which}: {wrong}", remedy)
    return pool.lands(layer, transfer.n_bytes)


# ---------------------------------------------------------------------------------------------------------- start and end
def _start(state: State, transfer: Transfer) -> None:
    """Take the memory for a transfer, and send what goes in one piece."""
    link = transfer.link
    link.medium.queue.remove(transfer)
    if transfer.first_chunk and transfer.dst is not None:
        if not transfer.last_hop:
            link.to.memory.hold(transfer.n_bytes, state.now)
        elif transfer.pool is not None:
            transfer.dst.memory.reserve(transfer.pool, transfer.unit.layer, transfer.n_bytes, state.now)
    transfer.first_chunk = False
    # Activations go in one piece.
    link.current_bytes = transfer.left if transfer.rows else state.costs.next_bytes(transfer.left)
    link.current, link.start, link.medium.busy = transfer, state.now, True
    state.carrier.set_off(link, transfer, link.current_bytes, _work(state, link, transfer))


def _work(state: State, link: LinkState, transfer: Transfer) -> int:
    """Return what the present piece takes alone: activations have a curve of their own."""
    if transfer.rows:
        return state.costs.activation_ns(link.link, transfer.rows)
    return state.costs.transfer_ns(link.link, link.current_bytes)


def complete(state: State, link: LinkState, now: int) -> None:
    """Complete what was in flight; at an intermediate device, queue it on the next link."""
    transfer = link.current
    assert transfer is not None
    link.medium.busy = False
    state.instant.media.append(link.medium)
    transfer.left -= link.current_bytes
    link.current = None
    last = not transfer.left and transfer.last_hop
    _record(state, link, transfer, now, link.current_bytes, last)
    if last:
        state.instant.arrived.append(transfer)
        return
    if not transfer.left:
        if transfer.transit is not None:
            transfer.transit.memory.hold(-transfer.n_bytes, state.now)
        transfer.transit = link.to if transfer.dst is not None else None
        transfer.hop += 1
        transfer.left = transfer.n_bytes
        transfer.first_chunk = True
        transfer.waited_memory = False
    enqueue(state, transfer)


def _record(state: State, link: LinkState, transfer: Transfer, end: int, moved: int, last: bool) -> None:
    layer, expert, bits = transfer.unit
    state.records.transfers.append(
        TransferRecord(
            link.start, end, link.name, transfer.why(), layer, expert, moved, transfer.urgency, transfer.submitted,
            transfer.fetch, last, transfer.waited_memory, bits, link.current_bytes - moved,
        )
    )  # fmt: skip


def cut_off(state: State) -> None:
    """Record what is under way as the run ends: the time until then, and the bytes moved."""
    # None move during the latency, then they do so evenly, rounded down. A replay may take longer than predicted.
    for link in state.links.values():
        transfer, n_bytes = link.current, link.current_bytes
        if transfer is None:
            continue
        work, latency = _work(state, link, transfer), state.costs.latency_ns(link.link, transfer.rows > 0)
        done = work * FULL - link.left + (state.now - link.last) * link.rate - latency * FULL
        moved = min(max(0, n_bytes * done // max(1, (work - latency) * FULL)), n_bytes - 1)
        _record(state, link, transfer, state.now, moved, False)


def remaining_ns(state: State, transfer: Transfer) -> int:
    """Return the time to an arrival: what is in flight, then its chunks and hops alone."""
    link, left, total = transfer.link, transfer.left, 0
    if link.current is transfer:
        total = link.end - state.now
        left -= link.current_bytes
    for hop in transfer.path[transfer.hop :]:
        total += state.costs.hop_ns(hop.link, left) if left else 0
        left = transfer.n_bytes
    return total


# ------------------------------------------------------------------------------------------------------------ activations
def cross(
    state: State, src: DeviceState, dst: DeviceState, layer: int, rows: int, direction: str, then: Call,
    of: Group | Task | None = None,
) -> None:  # fmt: skip
    """Move activations between devices, hop by hop, then call ``then()``; at once if no hop."""
    if src is dst:
        then()
        return
    path, crossing = path_between(state, src.name, dst.name), Crossing(layer, rows, direction, of)

    def hop(i: int) -> None:
        if i == len(path):
            then()
        else:
            state.carrier.send_rows(path[i], crossing, lambda: hop(i + 1))

    hop(0)
