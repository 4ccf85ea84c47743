"""Give runs to workers, a few ahead, and survive workers that die."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import TYPE_CHECKING, Any

from moesim.errors import SimulationError
from moesim.experiment.pool import Pool
from moesim.experiment.work import RefusedError, Work, do
from moesim.metrics.machine import Machine
from moesim.metrics.outcome import Outcome

if TYPE_CHECKING:
    from moesim.experiment.spec import RunSpec

_LOOK_S = 1.0  # time after which workers that have joined are given runs, even if none has finished one


def outcomes_of(
    specs: Sequence[RunSpec], make: Callable[[RunSpec], Work], pool: Pool, known: Callable[[RunSpec], Outcome | None]
) -> Iterator[tuple[RunSpec, Outcome]]:
    """Carry out runs."""
    waiting: deque[RunSpec] = deque(specs)
    suspects: deque[RunSpec] = deque()
    tried: set[int] = set()
    running: dict[Future[Outcome], RunSpec] = {}
    done: list[tuple[RunSpec, Outcome]] = []
    while waiting or suspects or running:
        if not waiting and not running:
            waiting.append(suspects.popleft())
        room = pool.room()
        while waiting and len(running) < room:
            spec = waiting.popleft()
            if (outcome := known(spec)) is not None:
                yield spec, outcome
            else:
                running[pool.submit(do, make(spec))] = spec
        yield from done  # only now: workers are busy while these are stored
        done.clear()
        for future in wait(running, _LOOK_S, FIRST_COMPLETED).done:
            spec = running.pop(future)
            error = _error(future)
            if error is None:
                done.append((spec, future.result()))
            elif isinstance(error, RefusedError) or not pool.died(error):
                raise error
            elif spec.index in tried:
                failure = SimulationError("its worker process died, and again when it ran alone: killed, or out of memory")
                done.append((spec, Outcome({**spec.row(), "error": str(failure)}, Machine.of(spec.hardware), failure=failure)))
            else:
                tried.add(spec.index)
                suspects.append(spec)
    yield from done


def _error(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:  # a cluster gave it up
        return error
