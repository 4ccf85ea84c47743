"""Slots, each with the KV cache of one request, that keep it when the request has left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesim.serving.requests import Request


@dataclass(slots=True)
class Slot:
    """One slot."""

    request: Request | None = None  # that it serves
    kept: Request | None = None  # whose tokens it has
    used: int = -1  # when its last request left, counted in requests that left; -1: none had it


class Slots:
    """All slots of a server, by number."""

    def __init__(self, n: int) -> None:
        self._all = [Slot() for _ in range(n)]
        self._left = 0

    @property
    def requests(self) -> list[Request]:
        """Requests that are served, by slot."""
        return [slot.request for slot in self._all if slot.request is not None]

    @property
    def idle(self) -> bool:
        return any(slot.request is None for slot in self._all)

    def take(self, request: Request, similarity: float) -> None:
        """Give a request the idle slot with the longest common prefix, if it is more than this share of the prompt.

        Otherwise it takes the slot that was used least recently. It keeps what is common, and its last token is computed again.
        """
        idle = [slot for slot in self._all if slot.request is None]
        alike = [slot for slot in idle if slot.kept and request.prefix(slot.kept) > similarity * request.prompt]
        if alike:
            slot = max(alike, key=lambda slot: request.prefix(slot.kept) if slot.kept else 0)
        else:
            slot = min(reversed(idle), key=lambda slot: slot.used)
        if slot.kept is not None:
            request.find(min(request.prefix(slot.kept), request.prompt - 1))
        slot.request = slot.kept = request

    def leave(self, request: Request) -> None:
        slot = next(slot for slot in self._all if slot.request is request)
        slot.request, slot.used = None, self._left
        self._left += 1
