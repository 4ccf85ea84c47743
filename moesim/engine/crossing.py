"""Activations between devices, on the control lanes of links (rule 8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesim.engine.links import enqueue, path_between
from moesim.engine.machine import DeviceState, Group, LinkState, Task, Transfer
from moesim.engine.state import State
from moesim.policy import DEMAND
from moesim.records import ActivationRecord

_new: Any = tuple.__new__


def cross(
    state: State, src: DeviceState, dst: DeviceState, layer: int, rows: int, direction: str, then: Callable[[], None],
    of: Group | Task | None = None,
) -> None:  # fmt: skip
    """Move the activations of `rows` rows from one device to another, hop by hop, then call ``then()``.

    ``of`` is the group of Runs, or the task, whose rows they are: time does not depend on it.
    """
    path = path_between(state, src.name, dst.name)

    def hop(i: int) -> None:
        if i == len(path):
            then()
        else:
            state.carrier.send_rows(path[i], layer, rows, direction, state.now, lambda: hop(i + 1), of)

    hop(0)


def send_rows(
    state: State, link: LinkState, layer: int, rows: int, direction: str, submitted: int, then: Callable[[], None]
) -> None:
    """Move the activations of `rows` rows over a link, then call ``then()``."""
    known = link.activation_memo.get(rows)
    if known is None:
        known = link.activation_memo[rows] = state.model.activation_bytes(rows), state.costs.activation_ns(link.link, rows)
    n_bytes, work = known
    if link.link.share_link:
        state.fetch_number += 1
        message = Transfer(state.fetch_number, -1, layer, -1, n_bytes, n_bytes, (link,), DEMAND, submitted, link, "activation")
        message.rows = rows
        message.on_arrival = then
        enqueue(state, link, message)
        return
    start = link.control_free if link.control_free > state.now else state.now
    end = link.control_free = start + work
    state.records.activations.append(
        _new(ActivationRecord, (start, end, link.name, state.step.index, layer, rows, n_bytes, direction, submitted))
    )
    state.carrier.after(end - state.now, then)
