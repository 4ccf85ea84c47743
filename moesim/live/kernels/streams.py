"""A worker whose calls launch work on a CUDA stream; when it began and ended is read from the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from moesim.live.kernels import affinity
from moesim.live.kernels.workers import Done, Urgent

_cuda: Any = torch.cuda  # its classes carry no types

AHEAD = 2
"""Launches that may be under way: one runs, one waits behind it on the device, so that its launching is hidden."""

_RENEW_NS = 10_000_000_000  # elapsed times are float32 milliseconds: exact to a microsecond for some 16 s; clocks drift too


@dataclass(frozen=True)
class _Zero:
    """An event on the device, and when it was on the host's clock."""

    event: torch.cuda.Event
    ns: int

    @classmethod
    def now(cls, stream: torch.cuda.Stream, tries: int = 5) -> _Zero:
        """Record an event on an idle stream; the host's time is the middle of the shortest round trip."""
        best: tuple[int, _Zero] | None = None
        for _ in range(tries):
            event = _cuda.Event(enable_timing=True)
            before = time.perf_counter_ns()
            event.record(stream)
            event.synchronize()
            after = time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, cls(event, (before + after) // 2)
        assert best is not None
        return best[1]

    def ns_of(self, event: torch.cuda.Event) -> int:
        elapsed_ms: float = self.event.elapsed_time(event)
        return self.ns + round(elapsed_ms * 1e6)


@dataclass(frozen=True)
class _Launch:
    tag: Any
    call: Callable[[], Any]  # keeps alive what the device reads: the allocator would give it to somebody else
    zero: _Zero
    begin: torch.cuda.Event
    end: torch.cuda.Event


class CudaStreamWorker:
    """As `Worker`, for calls that launch work on a CUDA stream of their own.

    One thread launches, at most `AHEAD` calls ahead of the device, and the other waits for their ends. Which call is next
    is decided when it is launched. A call that finds the device idle begins when its launching begins, as the device waits
    for it. Times are elapsed times between events on the device, put on the host's clock by a
    calibration at the start, renewed every ten seconds. Calls should only launch, and keep what they use alive until they
    are reported done: torch's allocator knows nothing of other streams. What another stream computed is there only if
    the call was submitted after that was reported done.
    """

    def __init__(self, name: str, done: SimpleQueue[Done], device: str = "cuda", cores: Sequence[int] | None = None) -> None:
        self.stream: torch.cuda.Stream = _cuda.Stream(device=device)
        self._idle: torch.cuda.Stream = _cuda.Stream(device=device)  # where the clocks are compared
        self._done, self._queue, self._cores = done, Urgent(), cores
        self._slots = threading.Semaphore(AHEAD)
        self._launched: SimpleQueue[_Launch | None] = SimpleQueue()
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(body, ready), name=f"{name}-{what}", daemon=True)
            for what, body in (("launch", self._launch_all), ("wait", self._wait_all))
        ]
        for thread in self._threads:
            thread.start()
        problems = [problem for problem in (ready.get() for _ in self._threads) if problem is not None]
        if problems:
            self.close()
            raise problems[0]

    def submit(self, key: int, call: Callable[[], Any], tag: Any) -> None:
        """Queue a call, as `Worker.submit`; it is made with this worker's stream as the current one."""
        self._queue.put(key, call, tag)

    def close(self) -> None:
        """Wait for what was launched, drop what is queued, and end the threads."""
        self._queue.close()
        for thread in self._threads:
            thread.join()

    def _run(self, body: Callable[[], None], ready: SimpleQueue[BaseException | None]) -> None:
        problem: BaseException | None = None
        try:
            if self._cores is not None:
                affinity.pin(self._cores)
        except BaseException as raised:
            problem = raised
        ready.put(problem)
        body()

    def _launch_all(self) -> None:
        zero: _Zero | None = None
        while True:
            self._queue.wait()
            self._slots.acquire()
            item = self._queue.take()  # only now: what was submitted while waiting for the slot may be more urgent
            if item is None:
                self._launched.put(None)
                return
            start = time.perf_counter_ns()
            try:
                if zero is None or start - zero.ns > _RENEW_NS:
                    zero = _Zero.now(self._idle)
                begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True, blocking=True)
                with _cuda.stream(self.stream):
                    begin.record(self.stream)
                    item.call()
                    end.record(self.stream)
            except BaseException as raised:
                self._slots.release()
                self._done.put(Done(item.tag, start, time.perf_counter_ns(), raised))
            else:
                self._launched.put(_Launch(item.tag, item.call, zero, begin, end))
            del item

    def _wait_all(self) -> None:
        while (launch := self._launched.get()) is not None:
            start = time.perf_counter_ns()
            try:
                launch.end.synchronize()  # sleeps (a blocking event): a spinning thread would take a core from experts
                done = Done(launch.tag, launch.zero.ns_of(launch.begin), launch.zero.ns_of(launch.end), None)
            except BaseException as raised:
                done = Done(launch.tag, start, time.perf_counter_ns(), raised)
            self._slots.release()
            self._done.put(done)
