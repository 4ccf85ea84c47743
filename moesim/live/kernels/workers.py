"""Threads and CUDA streams that run calls one by one, the most urgent first, and time them."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from moesim.live.kernels.host import pin


@dataclass(frozen=True)
class Done:
    """The result of one call."""

    tag: Any  # as submitted
    # start_ns, end_ns: just before and just after the call, in the worker; for a CUDA stream, when the device began and ended
    start_ns: int
    end_ns: int
    error: BaseException | None  # what the call raised


class Call(NamedTuple):
    """A queued call, ordered by key, then by its unique number."""

    key: int
    number: int
    call: Callable[[], Any]
    tag: Any


class Urgent:
    """A queue from which the call with the smallest key comes first, the oldest of equals."""

    def __init__(self) -> None:
        self._heap: list[Call] = []
        self._lock = threading.Lock()
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one a call; its get() wakes faster than a Condition's wait()
        self._numbers = itertools.count()
        self._closed = False

    def put(self, key: int, call: Callable[[], Any], tag: Any) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker is closed")
            heapq.heappush(self._heap, Call(key, next(self._numbers), call, tag))
        self._tokens.put(None)

    def wait(self) -> None:
        """Return once `take` has a result; each call needs one `take`."""
        self._tokens.get()

    def take(self) -> Call | None:
        """Take the most urgent call; None means closed."""
        with self._lock:
            return None if self._closed else heapq.heappop(self._heap)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._heap.clear()
        self._tokens.put(None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the calling thread's operators on one thread: small ones would wait for workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Worker:
    """A thread, bound to cores, that runs calls in order of their keys, one at a time."""

    # A thread that computes in Python holds the interpreter's lock for up to sys.getswitchinterval(),
    # which counts as time of the call: wait for workers in done.get(), or set a short interval.

    def __init__(self, name: str, done: SimpleQueue[Done], cores: Sequence[int] | None = None, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"expected at least one thread, got {threads}")
        torch.get_num_threads()  # fixes this thread's number, which would follow the worker's if it had none yet
        self._done, self._queue = done, Urgent()
        ready: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(cores, threads, ready), name=name, daemon=True)
        self._thread.start()
        problem = ready.get()
        if problem is not None:
            raise problem

    def submit(self, key: int, call: Callable[[], Any], tag: Any) -> None:
        """Queue a call behind those with smaller keys, and older ones of the same key."""
        self._queue.put(key, call, tag)

    def close(self) -> None:
        """Wait for the running call, drop queued ones unreported, and end the thread."""
        self._queue.close()
        self._thread.join()

    def _work(self, cores: Sequence[int] | None, threads: int, ready: SimpleQueue[BaseException | None]) -> None:
        try:
            if cores is not None:
                pin(cores)
            torch.get_num_threads()  # a thread takes the last number set anywhere when it first asks: ask before setting
            torch.set_num_threads(threads)
        except BaseException as problem:
            ready.put(problem)
            return
        ready.put(None)
        queue, done, clock = self._queue, self._done, time.perf_counter_ns
        while True:
            queue.wait()
            item = queue.take()
            if item is None:
                return
            error: BaseException | None = None
            start = clock()
            try:
                item.call()
            except BaseException as raised:
                error = raised
            end = clock()
            done.put(Done(item.tag, start, end, error))
            del item, error  # no reference to tensors or tracebacks is kept while waiting


_cuda: Any = torch.cuda  # its classes carry no types

AHEAD = 2  # launches that may be under way: one runs, one waits behind it on the device, so that its launching is hidden

_RENEW_NS = 10_000_000_000  # elapsed times are float32 milliseconds: exact to a microsecond for some 16 s; clocks drift too


@dataclass(frozen=True)
class _Zero:
    event: torch.cuda.Event
    ns: int

    @classmethod
    def now(cls, stream: torch.cuda.Stream, tries: int = 5) -> _Zero:
        """Record an event on an idle stream; its time is the middle of the shortest round trip."""
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
    """As `Worker`, for calls that launch work on a CUDA stream of their own."""

    # One thread launches, at most `AHEAD` calls ahead of the device, another waits for their ends.
    # Times are of events on the device, on the host's clock by a comparison renewed every ten seconds.
    # Calls keep what they use alive until reported, and see another stream's results only if these were
    # reported before.

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
        """Queue a call, as `Worker.submit`, with this worker's stream as the current one."""
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
                pin(self._cores)
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
