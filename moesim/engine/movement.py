"""Carrying out the actions that move things: Fetch, Drop, Move, Send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.engine.devices import DeviceState
from moesim.engine.links import Transfer
from moesim.engine.memory import PoolState
from moesim.policy import Drop, Fetch, Move, Send

if TYPE_CHECKING:
    from moesim.engine.actions import Actions
    from moesim.engine.core import Engine


class Movement:
    """Moves weights and messages; names and units are checked by `Actions`."""

    def __init__(self, engine: Engine, actions: Actions) -> None:
        self.engine = engine
        self.actions = actions

    def fetch(self, action: Fetch) -> None:
        """Queue copies of experts, or hasten those that are queued."""
        layer, experts, name, urgency, pool_name, source = action
        device = self.actions.device(name, "Fetch")
        pool = None if device.backing else self.actions.pool(device, pool_name, f"Fetch(L{layer}, {name})")
        if urgency < 0:
            self.actions.fail(f"Fetch(L{layer}, {name}): urgency {urgency}", "classes start at 0 (demand)")
        pending = device.pending
        for expert in experts:
            unit = self.actions.unit(layer, expert, "Fetch")
            transfer = pending.get(unit)
            if transfer is not None:
                self._hasten(transfer, urgency)
                continue
            copy = device.memory.copies.get(unit)
            if copy is not None and not device.backing:
                copy.doomed = False
                continue
            self._new_transfer(layer, expert, unit, device, urgency, pool, source)

    def _hasten(self, transfer: Transfer, urgency: int) -> None:
        transfer.drop_on_arrival = False
        if urgency < transfer.urgency:
            link = transfer.link
            if link.current is not transfer:
                link.remove(transfer)
                transfer.urgency = urgency
                link.enqueue(transfer)
            else:
                transfer.urgency = urgency

    def _new_transfer(self, layer: int, expert: int, unit: int, device: DeviceState, urgency: int, pool: PoolState | None,
                      source: str | None) -> None:  # fmt: skip
        engine = self.engine
        n_bytes = engine.expert_bytes[layer]
        if pool is not None and n_bytes > (capacity := pool.capacity[layer if pool.per_layer else 0]):
            self.actions.fail(
                f"Fetch(L{layer}/E{expert}, {device.name}): pool '{pool.name}' holds {capacity} bytes, the expert has {n_bytes}",
                "make the pool at least one expert large",
            )
        for src in engine.sources(device, source):
            copy = src.memory.copies.get(unit)
            if copy is not None and src is not device:
                break
        else:
            known = f"no copy on {source}" if source else "no copy anywhere that can be reached"
            self.actions.fail(
                f"Fetch(L{layer}/E{expert}, {device.name}): {known}",
                "leave source out, or fetch it to there first",
            )
        copy.pins += 1
        path = engine.path(src.name, device.name)
        number = engine.fetch_number = engine.fetch_number + 1
        transfer = Transfer(
            number, unit, layer, expert, n_bytes, n_bytes, path, urgency, engine.now, path[0], [], src.name, device, pool
        )
        device.pending[unit] = transfer
        path[0].enqueue(transfer)

    def drop(self, action: Drop) -> None:
        """Forget copies once idle; cancel what is queued."""
        layer, experts, name = action
        device = self.actions.device(name, "Drop")
        if device.backing:
            self.actions.fail(
                f"Drop(L{layer}, {name}): copies on a backing device stay",
                "drop copies on other devices only",
            )
        now = self.engine.now
        for expert in experts:
            unit = self.actions.unit(layer, expert, "Drop")
            if unit in device.memory.copies:
                device.memory.drop(unit, now)
                continue
            transfer = device.pending.get(unit)
            if transfer is None:
                self.actions.fail(
                    f"Drop(L{layer}/E{expert}, {name}): neither resident nor being fetched",
                    "drop only what is there",
                )
            if transfer.started or transfer.waiting:
                transfer.drop_on_arrival = True
            else:
                transfer.link.remove(transfer)
                del device.pending[unit]
                self.engine.by_name[transfer.src].memory.unpin(unit, now)

    def move(self, action: Move) -> None:
        """Relabel resident copies."""
        layer, experts, name, pool_name = action
        device = self.actions.device(name, "Move")
        pool = self.actions.pool(device, pool_name, f"Move(L{layer}, {name})")
        for expert in experts:
            unit = self.actions.unit(layer, expert, "Move")
            copy = device.memory.copies.get(unit)
            if copy is None:
                self.actions.fail(f"Move(L{layer}/E{expert}, {name}): not resident", "move only resident copies")
            if copy.pool is not pool and not pool.has_room(layer, self.engine.expert_bytes[layer]):
                self.actions.fail(
                    f"Move(L{layer}/E{expert}, {name}): pool '{pool_name}' is full",
                    "Drop or Move something out of it first",
                )
            device.memory.relabel(unit, pool, layer)

    def send(self, action: Send) -> None:
        """Queue a message."""
        n_bytes, src, dst, tag = action
        engine = self.engine
        if src == dst or n_bytes < 1:
            self.actions.fail(f"Send({n_bytes}, {src}, {dst})", "send at least one byte between two devices")
        self.actions.device(src, "Send")
        self.actions.device(dst, "Send")
        path = engine.path(src, dst)
        message = Transfer(engine.next_fetch(), -1, -1, -1, n_bytes, n_bytes, path, 0, engine.now, path[0], [])
        message.on_arrival = lambda: engine.sent.append(tag)
        path[0].enqueue(message)
