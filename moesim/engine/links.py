"""Transfers over directed, serial links (rules 5 and 6)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from operator import index
from typing import Any

from moesim.engine.checks import fail, first_of, short_repr
from moesim.engine.contention import FULL
from moesim.engine.machine import Crossing, DeviceState, Group, LinkState, Medium, Task, Transfer
from moesim.engine.paths import path_between
from moesim.engine.state import State
from moesim.policy import Fetch
from moesim.records import TransferRecord

_new: Any = tuple.__new__
Entry = tuple[int, int, Transfer]
"""Urgency, number and the transfer: the order of a queue."""


# ------------------------------------------------------------------------------------------------------------------ queue
def enqueue(state: State, link: LinkState, transfer: Transfer) -> None:
    """Queue a transfer on a link."""
    transfer.link = link
    queue = link.queue
    entry = (transfer.urgency, transfer.fetch, transfer)
    if not queue or queue[-1] < entry:
        queue.append(entry)
    else:
        insort(queue, entry)
    if not link.medium.busy:
        state.media_to_start.append(link.medium)


def dequeue(transfer: Transfer) -> None:
    """Take a transfer that has not started out of its queue."""
    transfer.link.queue.remove((transfer.urgency, transfer.fetch, transfer))


def hasten(state: State, transfer: Transfer, urgency: int) -> None:
    """Make a transfer more urgent, wherever it is."""
    if urgency >= transfer.urgency:
        return
    if transfer.link.current is transfer:
        transfer.urgency = urgency
    else:
        dequeue(transfer)
        transfer.urgency = urgency
        enqueue(state, transfer.link, transfer)


def send_message(
    state: State, path: tuple[LinkState, ...], n_bytes: int, urgency: int, then: Callable[[], None],
    crossing: Crossing | None = None, *, cause: str = "message", layer: int = -1,
) -> Transfer:  # fmt: skip
    """Queue what is no expert; ``then()`` follows its arrival. Of activations, the crossing says layer and cause."""
    rows = 0
    if crossing is not None:
        layer, rows, cause = crossing.layer, crossing.rows, "activation"
    message = Transfer(next(state.fetch_numbers), -1, layer, -1, n_bytes, n_bytes, path, urgency, state.now, path[0], cause)
    message.rows, message.on_arrival = rows, then
    enqueue(state, path[0], message)
    return message


def start_next(state: State, medium: Medium) -> bool:
    """Start the first transfer that can; False if some are queued and none can."""
    if medium.busy:
        return True
    if len(medium.links) == 1:
        queue = medium.links[0].queue
    else:  # one order over all, so that a victim is asked for only if the transfer then starts
        queue = sorted(entry for link in medium.links for entry in link.queue)
    entry = _next_candidate(state, queue)
    if entry is None:
        return not queue
    _start(state, entry)
    return True


def _next_candidate(state: State, queue: Iterable[Entry]) -> Entry | None:
    """Return the first in (urgency, submission) that can start now; its memory is not yet taken, but there.

    Victims are asked for on behalf of the head of each urgency class of each link.
    """
    seen_class = -1
    seen: list[LinkState] = []  # links whose head of this class has been tried
    for entry in queue:
        transfer = entry[2]
        link = transfer.link
        if not transfer.first_chunk or transfer.dst is None:
            return entry
        if entry[0] != seen_class:
            seen_class = entry[0]
            seen.clear()
        head = link not in seen
        if head:
            seen.append(link)
        if transfer.hop < len(transfer.path) - 1:  # an intermediate device
            if transfer.n_bytes <= link.to.memory.spare:
                return entry
        elif transfer.pool is None or transfer.n_bytes <= transfer.pool.free(transfer.layer):
            return entry  # of a write-back, the backing copy's place is always there
        elif head and _make_room(state, transfer):
            return entry
        if head:
            transfer.waited_memory = True
    return None


def _make_room(state: State, transfer: Transfer) -> bool:
    """Ask the policy for victims until the transfer fits; False: it waits for one to be named, or for those named to be idle."""
    pool = transfer.pool
    assert pool is not None
    memory = transfer.dst.memory
    n_experts = memory.n_experts
    asked = (transfer.layer, (transfer.expert,), transfer.dst.name, transfer.urgency, pool.name, None, transfer.bits)
    question = _new(Fetch, asked)
    while pool.lacks(transfer.layer, transfer.n_bytes):
        victim = state.policy.evict(question, state.view)
        if victim is None:
            return False
        try:
            layer, expert, bits = victim if len(victim) == 3 else (*victim, None)
            layer, expert = index(layer), index(expert)
            unit = first_of(state, bits, f"evict named L{layer}/E{expert}") + layer * n_experts + expert
        except (TypeError, ValueError):
            got = short_repr(victim)
            what = f"evict(L{transfer.layer}/E{transfer.expert}, {memory.name}): expected (layer, expert) or None, got {got}"
            fail(state, what, "name a resident of the pool, or return None to wait")
        there = 0 <= layer < state.model.n_layers and 0 <= expert < n_experts
        copy = memory.copies.get(unit) if there else None
        if copy is None or copy.pool is not pool:
            wrong = f"not resident in pool '{pool.name}'", "name a resident of the pool that is full"
        elif copy.leaves == "evict":
            wrong = "it is leaving already", "name each victim once, or return None to wait"
        elif pool.per_layer and layer != transfer.layer:
            wrong = "another layer's pool", f"name an expert of layer {transfer.layer}"
        else:
            memory.evict(unit, state.now)
            continue
        named = f"evict(L{transfer.layer}/E{transfer.expert}, {memory.name}) named L{layer}/E{expert}"
        fail(state, f"{named}: {wrong[0]}", wrong[1])
    return pool.lands(transfer.layer, transfer.n_bytes)


# ---------------------------------------------------------------------------------------------------------- start and end
def _start(state: State, entry: Entry) -> None:
    transfer = entry[2]
    link = transfer.link
    link.queue.remove(entry)
    if transfer.first_chunk:
        transfer.first_chunk = False
        transfer.started = True
        if transfer.dst is not None:
            if transfer.hop < len(transfer.path) - 1:
                link.to.memory.hold(transfer.n_bytes, state.now)
            elif transfer.pool is not None:
                transfer.dst.memory.reserve(transfer.pool, transfer.layer, transfer.n_bytes, state.now)
    n_bytes = transfer.left
    if transfer.rows:  # activations: their own curve, and in one piece
        work = state.costs.activation_ns(link.link, transfer.rows)
    else:
        n_bytes = state.costs.next_bytes(n_bytes)
        work = link.transfer_ns(n_bytes)
    link.current = transfer
    link.current_bytes = n_bytes
    link.start = state.now
    link.medium.busy = True
    state.carrier.set_off(link, transfer, n_bytes, work)


def complete(state: State, link: LinkState, now: int) -> None:
    """Take in the end of what was in flight."""
    link.medium.busy = False
    state.media_to_start.append(link.medium)
    transfer = link.current
    assert transfer is not None
    link.current = None
    n_bytes = link.current_bytes
    transfer.left -= n_bytes
    last = not transfer.left and transfer.hop == len(transfer.path) - 1
    state.records.transfers.append(
        _new(
            TransferRecord,
            (link.start, now, link.name, transfer.cause, transfer.layer, transfer.expert, n_bytes, transfer.urgency,
             transfer.submitted, transfer.fetch, last, transfer.waited_memory, transfer.bits, 0),
        )
    )  # fmt: skip
    if last:
        state.arrived.append(transfer)
    elif transfer.left:
        enqueue(state, link, transfer)
    else:
        _next_hop(state, link, transfer)


def _next_hop(state: State, link: LinkState, transfer: Transfer) -> None:
    """Store and forward: the weights are now at an intermediate device; queue them on the next link."""
    if transfer.transit is not None:
        transfer.transit.memory.hold(-transfer.n_bytes, state.now)
    transfer.transit = link.to if transfer.dst is not None else None
    transfer.hop += 1
    transfer.left = transfer.n_bytes
    transfer.first_chunk = True
    transfer.waited_memory = False
    enqueue(state, transfer.path[transfer.hop], transfer)


def cut_off(state: State) -> None:
    """Record what is under way as the run ends: the time until then, and how many of its bytes have moved."""
    for link in state.links.values():
        transfer, n_bytes = link.current, link.current_bytes
        if transfer is not None:
            moved = _moved(state, link, transfer, n_bytes)
            state.records.transfers.append(
                TransferRecord(
                    link.start, state.now, link.name, transfer.cause, transfer.layer, transfer.expert, moved, transfer.urgency,
                    transfer.submitted, transfer.fetch, False, transfer.waited_memory, transfer.bits, n_bytes - moved,
                )
            )  # fmt: skip


def _moved(state: State, link: LinkState, transfer: Transfer, n_bytes: int) -> int:
    """Count the bytes of what is in flight that have moved: none during the latency, then evenly, rounded down."""
    rows = transfer.rows
    work = state.costs.activation_ns(link.link, rows) if rows else link.transfer_ns(n_bytes)
    latency = state.costs.latency_ns(link.link, rows > 0)
    done, whole = link.done(work, link.start, state.now) - latency * FULL, (work - latency) * FULL
    return min(max(0, n_bytes * done // max(1, whole)), n_bytes - 1)  # a replay may take longer than predicted


def remaining_ns(state: State, transfer: Transfer) -> int:
    """Time to the arrival of a transfer as things stand: what is in flight, then its chunks and hops alone."""
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
    state: State, src: DeviceState, dst: DeviceState, layer: int, rows: int, direction: str, then: Callable[[], None],
    of: Group | Task | None = None,
) -> None:  # fmt: skip
    """Move the activations of `rows` rows from one device to another, hop by hop, then call ``then()``: at once if it is one."""
    if src is dst:
        then()
        return
    path = path_between(state, src.name, dst.name)
    crossing = Crossing(layer, rows, direction, of)

    def hop(i: int) -> None:
        if i == len(path):
            then()
        else:
            state.carrier.send_rows(path[i], crossing, lambda: hop(i + 1))

    hop(0)
