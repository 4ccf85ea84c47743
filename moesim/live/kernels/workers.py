"""Threads that run calls one after the other, the most urgent first, and say when each began and ended."""

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

from moesim.live.kernels import affinity


@dataclass(frozen=True)
class Done:
    """What became of one call."""

    tag: Any  # as submitted
    # start_ns, end_ns: just before and just after the call, in the worker; for a CUDA stream, when the device began and ended
    start_ns: int
    end_ns: int
    error: BaseException | None  # what the call raised


class Call(NamedTuple):
    """A queued call; compares by key, then by age (the number is unique, so nothing behind it is ever compared)."""

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
        """Return once `take` has something to answer; each call wants one `take`."""
        self._tokens.get()

    def take(self) -> Call | None:
        """Take the most urgent call; None means closed."""
        with self._lock:
            return None if self._closed else heapq.heappop(self._heap)

    def close(self) -> None:
        """Drop what is queued and let `take` answer None."""
        with self._lock:
            self._closed = True
            self._heap.clear()
        self._tokens.put(None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let the calling thread's operators use no other thread for the length of a block.

    A thread that hands out work does only small operators itself; spread over several threads they would wait for cores
    that workers use.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Worker:
    """A thread, pinned to cores, that runs calls in order of their keys, one at a time.

    Operators of torch release the interpreter's lock and take it again when they end. A thread that computes in Python
    meanwhile holds it for up to ``sys.getswitchinterval()`` (5 ms unless changed), which then counts as time of the call:
    whoever waits for workers should wait in ``done.get()``, or set a short interval.
    """

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
        """Queue a call; it begins once no call with a smaller key, or of the same key and older, is queued."""
        self._queue.put(key, call, tag)

    def close(self) -> None:
        """Wait for the call that runs, drop those that are queued (they are not reported), and end the thread."""
        self._queue.close()
        self._thread.join()

    def _work(self, cores: Sequence[int] | None, threads: int, ready: SimpleQueue[BaseException | None]) -> None:
        try:
            if cores is not None:
                affinity.pin(cores)
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
