"""Questions one after another in a thread; a newer one ends what an older one has left to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, "moesim explore")  # the simulator is one thread's work, whoever asks
_END: Any = object()


class Overtaken(BaseException):
    """A newer question was asked; not an `Exception`, which would count as a failure of the policy."""


class Asking:
    """Whether an answer is still wanted."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def cancel(self) -> None:
        self._over.set()

    def check(self, *_: object) -> None:
        """Raise `Overtaken` if it is not; called at each step of a run."""
        if self._over.is_set():
            raise Overtaken


class Line:
    """Questions of one part of the page, of which only the newest counts."""

    def __init__(self) -> None:
        self._asking = Asking()

    def cancel(self) -> None:
        self._asking.cancel()

    async def ask(self, make: Callable[[Asking], Iterator[T]], show: Callable[[T], None]) -> bool:
        """Show each piece of an answer; False if a newer question came before the last."""
        self._asking.cancel()
        asking = self._asking = Asking()
        pieces = make(asking)
        while (piece := await asyncio.get_running_loop().run_in_executor(_THREAD, _next, pieces, asking)) is not _END:
            if piece is None:
                return False
            show(piece)
        return True


def _next(pieces: Iterator[T], asking: Asking) -> T | Any:
    try:
        asking.check()
        piece = next(pieces, _END)
        asking.check()
    except Overtaken:
        return None
    return piece
