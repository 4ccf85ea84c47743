"""The host thread that submits Runs one after another, where a profile says what that takes."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from moesim.records import DecisionRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.engine.devices import Task


class HostThread:
    """Submits Runs in the order in which they were issued, each for the same time.

    Parameters
    ----------
    engine : Engine
        Whose Runs.
    submit_ns : int, ns
        Time of the thread for each Run.
    shared : bool
        Whether the thread also computes the host's experts: it submits nothing until such a Run is done.
    """

    def __init__(self, engine: Engine, submit_ns: int, shared: bool) -> None:
        self.engine = engine
        self.submit_ns = submit_ns
        self.shared = shared
        self._queue: list[tuple[int, Task]] = []
        self._busy = False
        self._computing: Task | None = None

    def take(self, task: Task) -> None:
        """Let a Run wait for its submission; `advance` begins it once all Runs of a decision are there."""
        task.waits += 1
        heappush(self._queue, (task.key, task))

    def advance(self) -> None:
        """Submit the next Run, unless the thread is busy."""
        while self._queue and not self._busy:
            task = heappop(self._queue)[1]
            if not self.submit_ns:
                self._submit(task)
                continue
            self._busy = True
            now = self.engine.now
            self.engine.records.decisions.append(DecisionRecord(now, now + self.submit_ns, task.step, task.layer))
            self.engine.after(self.submit_ns, lambda task=task: self._submitted(task))  # type: ignore[misc]

    def _submitted(self, task: Task) -> None:
        self._busy = False
        self._submit(task)
        self.advance()

    def _submit(self, task: Task) -> None:
        if self.shared and not task.lane.device.is_gpu:
            self._busy = True
            self._computing = task
        task.lane.wake(task)

    def done(self, task: Task) -> None:
        """Take note that a Run is done: a shared thread goes on once it has computed it."""
        if task is self._computing:
            self._computing = None
            self._busy = False
            self.advance()
