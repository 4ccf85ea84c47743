"""Transfers over directed, serial links (rules 5 and 6), and activations on their control lanes (rule 8)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simpy.events import Timeout

from moesim.engine.contention import Lane
from moesim.engine.memory import PoolState
from moesim.hardware import Link
from moesim.policy import DEMAND, PREFETCH, Fetch
from moesim.records import ActivationRecord, TransferRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine

_new = tuple.__new__
_CAUSE = {DEMAND: "demand", PREFETCH: "prefetch"}


@dataclass(slots=True, eq=False)
class Transfer:
    """One fetch of one expert on its way, or a message."""

    fetch: int  # number, also the submission order
    unit: int  # -1: a message
    layer: int
    expert: int
    n_bytes: int
    left: int  # bytes that this hop has still to move
    path: tuple[LinkState, ...]
    urgency: int
    submitted: int
    link: LinkState  # where it is queued or under way
    waiting: list[Any]  # tasks that need it
    src: str = "message"  # name of the source device; of a message, its cause
    dst: Any = None  # DeviceState of the destination; None for messages
    pool: PoolState | None = None
    hop: int = 0
    started: bool = False
    first_chunk: bool = True  # the next chunk is the first of its hop: memory is not reserved yet
    transit: Any = None  # intermediate device that holds it after a hop
    pins: int = 0  # decisions under way that need the copy once it is there
    drop_on_arrival: bool = False
    waited_memory: bool = False
    on_arrival: Any = None  # for messages
    rows: int = 0  # of activations that share the link

    @property
    def cause(self) -> str:
        if self.unit < 0:
            return self.src
        if self.dst.backing:
            return "write-back"
        return _CAUSE.get(self.urgency, "update")


class Medium:
    """Links that are serial together. A link without a named medium has one of its own."""

    def __init__(self) -> None:
        self.busy = False
        self.links: list[LinkState] = []

    def start_next(self) -> bool:
        """Start the first transfer that can; False if some are queued and none can."""
        if self.busy:
            return True
        if len(self.links) == 1:
            queue = self.links[0].queue
        else:  # one order over all, so that a victim is asked for only if the transfer then starts
            queue = sorted(entry for link in self.links for entry in link.queue)
        entry = next_candidate(queue)
        if entry is None:
            return not queue
        entry[2].link.start_transfer(entry)
        return True


class LinkState:
    """A directed link: its queue, what is in flight, and its control lane."""

    def __init__(self, engine: Engine, link: Link, to: Any, medium: Medium) -> None:
        self.engine = engine
        self.link = link
        self.name = link.name
        self.to = to  # DeviceState at the far end
        self.medium = medium
        medium.links.append(self)
        self.costs = engine.costs
        self.chunk = engine.costs.chunk_bytes or 0
        self.queue: list[tuple[int, int, Transfer]] = []  # (urgency, fetch number, transfer), ascending
        self.lane = Lane(engine.env, engine.contention)
        self.lane.on_done = self._contended_done
        self.records = engine.records.transfers
        self.current: Transfer | None = None
        self.current_bytes = 0
        self.start = 0
        self.memo: dict[int, int] = {}
        self.activation_memo: dict[int, tuple[int, int]] = {}  # rows -> bytes, ns alone
        self.control_free = 0
        self.plain = link.name not in engine.contention.partners
        self.end = 0  # of what is in flight, if plain

    # ------------------------------------------------------------------------------------------------- weights, messages
    def enqueue(self, transfer: Transfer) -> None:
        transfer.link = self
        queue = self.queue
        entry = (transfer.urgency, transfer.fetch, transfer)
        if not queue or queue[-1] < entry:
            queue.append(entry)
        else:
            insort(queue, entry)
        if not self.medium.busy:
            self.engine.media_to_start.append(self.medium)

    def remove(self, transfer: Transfer) -> None:
        self.queue.remove((transfer.urgency, transfer.fetch, transfer))

    def start_transfer(self, entry: tuple[int, int, Transfer]) -> None:
        transfer = entry[2]
        if self.queue[0] is entry:
            del self.queue[0]
        else:
            self.queue.remove(entry)
        engine = self.engine
        now = engine.now
        if transfer.first_chunk:
            transfer.first_chunk = False
            transfer.started = True
            if transfer.dst is not None:
                if transfer.hop < len(transfer.path) - 1:
                    self.to.memory.hold(transfer.n_bytes, now)
                elif transfer.pool is not None:
                    transfer.dst.memory.reserve(transfer.pool, transfer.layer, now)
        n_bytes = transfer.left
        if transfer.rows:  # activations: their own curve, and in one piece
            work: int | None = self.costs.activation_ns(self.link, transfer.rows)
        else:
            if self.chunk and n_bytes > self.chunk:
                n_bytes = self.chunk
            work = self.memo.get(n_bytes)
        if work is None:
            work = self.memo[n_bytes] = self.costs.transfer_ns(self.link, n_bytes)
        self.current = transfer
        self.current_bytes = n_bytes
        self.start = now
        self.medium.busy = True
        self.set_off(transfer, n_bytes, work)

    def set_off(self, transfer: Transfer, n_bytes: int, work: int) -> None:
        """Be busy with some bytes of a transfer for as long as they take."""
        if self.plain:
            self.end = self.engine.now + work
            Timeout(self.engine.env, work).callbacks.append(self._done)
        else:
            self.lane.begin(self.name, work)

    def _contended_done(self, event: Any) -> None:
        self.lane.finish()
        self._done(event)

    def _done(self, _: Any) -> None:
        self.complete(self.engine.now)

    def complete(self, now: int) -> None:
        """Take in the end of what was in flight."""
        engine = self.engine
        medium = self.medium
        medium.busy = False
        engine.media_to_start.append(medium)
        transfer = self.current
        assert transfer is not None
        self.current = None
        n_bytes = self.current_bytes
        transfer.left -= n_bytes
        last = not transfer.left and transfer.hop == len(transfer.path) - 1
        self.records.append(
            _new(
                TransferRecord,
                (self.start, now, self.name, transfer.cause, transfer.layer, transfer.expert, n_bytes, transfer.urgency,
                 transfer.submitted, transfer.fetch, last, transfer.waited_memory),
            )
        )  # fmt: skip
        if last:
            engine.arrived.append(transfer)
        elif transfer.left:
            self.enqueue(transfer)
        else:
            self._next_hop(transfer)

    def _next_hop(self, transfer: Transfer) -> None:
        """Store and forward: the weights are now at an intermediate device; queue them on the next link."""
        now = self.engine.now
        if transfer.transit is not None:
            transfer.transit.memory.hold(-transfer.n_bytes, now)
        transfer.transit = self.to if transfer.dst is not None else None
        transfer.hop += 1
        transfer.left = transfer.n_bytes
        transfer.first_chunk = True
        transfer.waited_memory = False
        transfer.path[transfer.hop].enqueue(transfer)

    def remaining_ns(self, transfer: Transfer) -> int:
        """Time to the arrival of a transfer as things stand: what is in flight, then its chunks and hops alone."""
        left = transfer.left
        total = 0
        if self.current is transfer:
            total = (self.end if self.plain else self.lane.end) - self.engine.now
            left -= self.current_bytes
        for link in transfer.path[transfer.hop :]:
            total += link.alone_ns(left)
            left = transfer.n_bytes
        return total

    def alone_ns(self, n_bytes: int) -> int:
        """Time of some bytes over this link, in chunks, when nothing else moves."""
        full, rest = divmod(n_bytes, self.chunk) if self.chunk else (0, n_bytes)
        total = full * self.costs.transfer_ns(self.link, self.chunk) if full else 0
        return total + (self.costs.transfer_ns(self.link, rest) if rest else 0)

    # ---------------------------------------------------------------------------------------------------- control lane
    def send_activation(self, layer: int, rows: int, direction: str, submitted: int, then: Any, of: Any = None) -> None:
        """Move the activations of `rows` rows over this link, then call ``then()``; ``of`` as in `Engine.cross`."""
        engine = self.engine
        known = self.activation_memo.get(rows)
        if known is None:
            known = engine.model.activation_bytes(rows), self.costs.activation_ns(self.link, rows)
            self.activation_memo[rows] = known
        n_bytes, work = known
        if self.link.share_link:
            message = Transfer(engine.next_fetch(), -1, layer, -1, n_bytes, n_bytes, (self,), DEMAND, submitted, self, [])
            message.src = "activation"
            message.rows = rows
            message.on_arrival = then
            self.enqueue(message)
            return
        now = engine.now
        start = self.control_free if self.control_free > now else now
        end = start + work
        self.control_free = end
        engine.records.activations.append(
            _new(ActivationRecord, (start, end, self.name, engine.step.index, layer, rows, n_bytes, direction, submitted))
        )

        engine.after(end - now, then)


def next_candidate(queue: Iterable[tuple[int, int, Transfer]]) -> tuple[int, int, Transfer] | None:
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
        elif transfer.pool is None:  # write-back: the backing copy's place is always there
            return entry
        else:
            pool = transfer.pool
            if transfer.n_bytes <= pool.free(transfer.layer):
                return entry
            if head and link.engine.ask_victims(transfer):
                return entry
        if head:
            transfer.waited_memory = True
    return None


def victim_question(transfer: Transfer) -> Fetch:
    """The fetch of one expert that could start now, as the policy sees it in `evict`."""
    pool = transfer.pool
    assert pool is not None
    return _new(Fetch, (transfer.layer, (transfer.expert,), transfer.dst.name, transfer.urgency, pool.name, None))
