"""Workers: order, times, errors, closing, pinning; and the same for streams, on a device that is played."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

torch = pytest.importorskip("torch")

from moesim.live.kernels import host, workers  # noqa: E402
from moesim.live.kernels.workers import AHEAD, CudaStreamWorker, Done, Worker  # noqa: E402
from tests.waiting import HANG_S, Clock, wait_until  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no threads")


class Raised(Exception):
    pass


def fail() -> None:
    raise Raised("on purpose")


@pytest.fixture
def done() -> SimpleQueue[Done]:
    return SimpleQueue()


def get(done: SimpleQueue[Done]) -> Done:
    return done.get(timeout=HANG_S)


def test_the_smallest_key_goes_first_and_equals_by_age(done: SimpleQueue[Done]):
    worker, started, gate = Worker("w", done), threading.Event(), threading.Event()
    worker.submit(9, lambda: (started.set(), gate.wait(HANG_S)), "first: nothing else was there")
    assert started.wait(HANG_S)
    for key, tag in ((2, "c"), (1, "a"), (2, "d"), (1, "b"), (0, object)):
        worker.submit(key, lambda: None, tag)
    gate.set()
    assert [get(done).tag for _ in range(6)] == ["first: nothing else was there", object, "a", "b", "c", "d"]
    worker.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that workers see."""
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    return clock


def test_times_are_of_the_call_alone_one_after_the_other(done: SimpleQueue[Done], clock: Clock):
    worker = Worker("w", done)
    before = clock.perf_counter_ns()
    for tag, ns in (("a", 20_000), ("b", 30_000)):
        worker.submit(0, lambda ns=ns: clock.advance(ns), tag)
    a, b = get(done), get(done)
    assert before <= a.start_ns < a.end_ns <= b.start_ns < b.end_ns <= clock.perf_counter_ns()
    assert (a.end_ns - a.start_ns, b.end_ns - b.start_ns) == (20_001, 30_001)  # and the look at the end
    worker.close()


def test_times_are_of_the_host_s_clock(done: SimpleQueue[Done]):
    worker = Worker("w", done)
    before = time.perf_counter_ns()
    worker.submit(0, lambda: None, "")
    one = get(done)
    assert before <= one.start_ns <= one.end_ns <= time.perf_counter_ns()
    worker.close()


def test_an_error_is_reported_and_the_next_call_runs(done: SimpleQueue[Done]):
    worker = Worker("w", done)
    worker.submit(0, fail, "bad")
    worker.submit(0, lambda: None, "good")
    bad, good = get(done), get(done)
    assert isinstance(bad.error, Raised)
    assert (bad.tag, good.tag, good.error) == ("bad", "good", None)
    worker.close()


@contextmanager
def closing(worker: Worker | CudaStreamWorker) -> Iterator[None]:
    """Close a worker; the block is what happens while that waits for what runs."""
    thread = threading.Thread(target=worker.close)
    thread.start()
    wait_until(lambda: worker._queue._closed, "a worker that takes no more calls")
    assert thread.is_alive()
    yield
    thread.join()


def test_closing_waits_for_what_runs_and_drops_the_rest(done: SimpleQueue[Done]):
    worker, started, gate = Worker("closing", done), threading.Event(), threading.Event()
    worker.submit(0, lambda: (started.set(), gate.wait(HANG_S)), "runs")
    worker.submit(0, fail, "dropped")
    assert started.wait(HANG_S)
    with closing(worker):
        gate.set()
    assert get(done).tag == "runs"
    assert done.empty()
    assert "closing" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="the worker is closed"):
        worker.submit(0, fail, "late")


@needs_affinity
def test_a_worker_is_pinned_and_nobody_else(done: SimpleQueue[Done]):
    mine = host.usable_cores()
    worker, seen = Worker("w", done, cores=mine[-1:]), []
    worker.submit(0, lambda: seen.append(host.usable_cores()), "")
    get(done)
    assert seen == [mine[-1:]]
    assert host.usable_cores() == mine
    worker.close()
    with pytest.raises(OSError, match="Invalid argument"):
        Worker("w", done, cores=[10_000])


@needs_affinity
def test_a_block_is_pinned_and_then_no_longer():
    mine = host.usable_cores()
    with pytest.raises(Raised), host.pinned(mine[:1]) as pinned:
        assert pinned
        assert host.usable_cores() == mine[:1]
        fail()
    assert host.usable_cores() == mine


def test_without_affinity_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host.usable_cores() == list(range(os.cpu_count() or 1))
    with host.pinned([0]) as pinned:
        assert not pinned


def test_each_worker_has_its_own_number_of_threads(done: SimpleQueue[Done]):
    mine = torch.get_num_threads()
    workers, seen = [Worker("w", done, threads=threads) for threads in (1, 3, 2)], []
    for worker in workers:
        worker.submit(0, lambda: seen.append((torch.ones(300_000).sum(), torch.get_num_threads())[1]), "")
        get(done)
    assert seen == [1, 3, 2]
    assert torch.get_num_threads() == mine
    for worker in workers:
        worker.close()
    with pytest.raises(ValueError, match="at least one thread"):
        Worker("w", done, threads=0)


def test_a_worker_keeps_no_reference_to_what_it_ran(done: SimpleQueue[Done]):
    worker, tensor = Worker("w", done), torch.ones(3)
    gone = weakref.ref(tensor)
    worker.submit(0, tensor.sum, "")
    del tensor
    get(done)
    worker.submit(0, lambda: None, "")  # by its end, what came before has been let go
    get(done)
    assert gone() is None
    worker.close()


class Device:
    """A GPU whose streams are times until which they are busy; its clock is 5 s ahead of the host's.

    Time goes on when somebody waits for the end of a launch, unless the device is held.
    """

    OFFSET = 5_000_000_000

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self
        self.clock = clock
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.log: list[str] = []
        self.current: Device.Stream | None = None
        self.under_way: list[int] = []
        self.broken = False

        class Event:
            def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
                self.timing, self.blocking, self.at = enable_timing, blocking, None

            def record(self, stream: Device.Stream) -> None:
                stream.free = max(stream.free, device.now())
                self.at = stream.free
                device.log.append("event")

            def synchronize(self) -> None:
                if self.blocking:
                    if device.broken:
                        raise Raised("illegal memory access")
                    assert device.goes_on.wait(HANG_S)
                device.clock.reach(self.at - device.OFFSET)

            def elapsed_time(self, later: Event) -> float:
                assert self.timing and later.timing
                return (later.at - self.at) / 1e6

        class On:
            def __init__(self, stream: Device.Stream) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                device.current = self.stream

            def __exit__(self, *_: object) -> None:
                device.current = None

        monkeypatch.setattr(torch.cuda, "Stream", Device.Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", On)

    class Stream:
        def __init__(self, device: str) -> None:
            self.device, self.free = device, 0

    def now(self) -> int:
        return self.clock.perf_counter_ns() + self.OFFSET

    def launch(self, seconds: float, name: str = "call") -> None:
        assert self.current is not None
        now = self.now()
        self.under_way = [end for end in self.under_way if end > now]
        self.current.free = max(self.current.free, now) + round(seconds * 1e9)
        self.under_way.append(self.current.free)
        self.log.append(f"{name} {len(self.under_way)}")


@pytest.fixture
def device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(clock, monkeypatch)


def test_a_launch_lies_between_two_events_on_its_stream(device: Device, done: SimpleQueue[Done]):
    worker = CudaStreamWorker("gpu", done, "cuda:0")
    assert worker.stream.device == "cuda:0"
    before = device.clock.perf_counter_ns()
    streams_seen = []
    worker.submit(0, lambda: (streams_seen.append(device.current), device.launch(0.03)), "tag")
    result = get(done)
    worker.close()
    assert device.log == ["event"] * 5 + ["event", "call 1", "event"]  # five to compare the clocks
    assert streams_seen == [worker.stream]
    assert (result.tag, result.error) == ("tag", None)
    assert 0 <= result.end_ns - result.start_ns - 30_000_000 < 10  # looks at the clock
    assert before < result.start_ns  # on the host's clock, though the device's is 5 s ahead
    assert result.end_ns <= device.clock.perf_counter_ns()


def test_launches_go_by_key_and_no_more_than_two_are_under_way(device: Device, done: SimpleQueue[Done]):
    worker, started, gate = CudaStreamWorker("gpu", done), threading.Event(), threading.Event()
    device.goes_on.clear()
    worker.submit(9, lambda: (started.set(), gate.wait(HANG_S), device.launch(0.02, "first")), "first")
    assert started.wait(HANG_S)
    for key, tag in ((3, "d"), (1, "b"), (2, "c"), (0, "a")):
        worker.submit(key, lambda tag=tag: device.launch(0.02, tag), tag)
    gate.set()
    wait_until(lambda: sum(entry != "event" for entry in device.log) == AHEAD, "launches ahead of the device")
    device.goes_on.set()
    results = [get(done) for _ in range(5)]
    worker.close()
    assert [result.tag for result in results] == ["first", "a", "b", "c", "d"]
    launches = [entry for entry in device.log if entry != "event"]
    assert [entry.split()[0] for entry in launches] == ["first", "a", "b", "c", "d"]
    assert max(int(entry.split()[1]) for entry in launches) == AHEAD  # while one runs the next is there already
    for one, two in itertools.pairwise(results):
        assert two.start_ns >= one.end_ns - 10


def test_what_is_urgent_overtakes_what_is_not_yet_launched(device: Device, done: SimpleQueue[Done]):
    worker, second = CudaStreamWorker("gpu", done), threading.Event()
    device.goes_on.clear()
    for tag in "abcd":
        worker.submit(5, lambda tag=tag: (device.launch(0.1), tag == "b" and second.set()), tag)
    assert second.wait(HANG_S)
    worker.submit(1, lambda: device.launch(0.01), "urgent")
    device.goes_on.set()
    assert [get(done).tag for _ in range(5)] == ["a", "b", "urgent", "c", "d"]
    worker.close()


def test_errors_of_launches_and_of_the_device_are_reported(device: Device, done: SimpleQueue[Done]):
    worker = CudaStreamWorker("gpu", done)
    for _ in range(2 * AHEAD):  # slots are given back
        worker.submit(0, fail, "launch")
        assert isinstance(get(done).error, Raised)
    worker.submit(0, lambda: device.launch(0.001), "fine")
    assert get(done).error is None
    device.broken = True
    for _ in range(2 * AHEAD):
        worker.submit(0, lambda: device.launch(0.001), "device")
        assert str(get(done).error) == "illegal memory access"
    worker.close()


def test_closing_a_stream_waits_for_what_was_launched(device: Device, done: SimpleQueue[Done]):
    worker, second = CudaStreamWorker("closing", done), threading.Event()
    device.goes_on.clear()
    for tag in "abc":
        worker.submit(0, lambda tag=tag: (device.launch(0.1), tag == "b" and second.set()), tag)
    assert second.wait(HANG_S)
    with closing(worker):
        device.goes_on.set()
    assert [done.get_nowait().tag for _ in range(2)] == ["a", "b"]
    assert done.empty()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("closing")]
    with pytest.raises(RuntimeError, match="the worker is closed"):
        worker.submit(0, fail, "late")


def test_the_clocks_are_compared_again_after_a_while(device: Device, done: SimpleQueue[Done], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_RENEW_NS", 0)
    worker = CudaStreamWorker("gpu", done)
    for _ in range(2):
        worker.submit(0, lambda: device.launch(0.001), "")
        assert get(done).end_ns <= device.clock.perf_counter_ns()
        device.OFFSET += 100_000_000  # the device's clock has run ahead
    worker.close()
    assert device.log.count("event") == 2 * (5 + 2)


@needs_affinity
def test_the_threads_of_a_stream_are_pinned(device: Device, done: SimpleQueue[Done]):
    mine, seen = host.usable_cores(), []
    worker = CudaStreamWorker("gpu", done, cores=mine[-1:])
    worker.submit(0, lambda: seen.append(host.usable_cores()), "")
    get(done)
    worker.close()
    assert seen == [mine[-1:]]
    with pytest.raises(OSError, match="Invalid argument"):
        CudaStreamWorker("refused", done, cores=[10_000])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("refused")]


@needs_gpu
def test_a_stream_worker_measures_a_real_product(done: SimpleQueue[Done]):
    worker, a = CudaStreamWorker("gpu", done, "cuda:0"), torch.randn(4096, 4096, device="cuda")
    first = time.perf_counter_ns()
    allowed = None
    for _ in range(3):
        before = time.perf_counter_ns()
        worker.submit(0, lambda: a @ a, "product")
        result = get(done)
        after = time.perf_counter_ns()
        allowed = allowed or after - first  # the clocks were compared within this time, and no better than that
        assert result.error is None
        assert before - allowed <= result.start_ns < result.end_ns <= after + allowed
    worker.close()
