"""Give runs to an executor, a few ahead of its workers, and survive workers that die."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from typing import TYPE_CHECKING, Any

from moesim.errors import MoesimError, SimulationError
from moesim.experiment.runner import Outcome, settings
from moesim.experiment.work import Work, do
from moesim.metrics.machine import Machine

if TYPE_CHECKING:
    from moesim.experiment.pool import Pool
    from moesim.experiment.resolve import RunSpec

_AHEAD = 2  # runs a worker has waiting or running: it is never idle, and little is lost or sent in vain
_TRIES = 2  # of a run whose worker died: the second time alone, so that it is known whose fault it is


def outcomes_of(
    specs: Sequence[RunSpec], make: Callable[[RunSpec], Work], pool: Pool, known: Callable[[RunSpec], Outcome | None]
) -> Iterator[tuple[RunSpec, Outcome]]:
    """Carry out runs.

    Parameters
    ----------
    specs : sequence of RunSpec
        Which.
    make : callable
        Makes the piece of work of a run.
    pool : Pool
        Where.
    known : callable
        Asked before a run is begun: its outcome if somebody else has finished it, or None.

    Yields
    ------
    spec, outcome
        As they are done. A run whose worker died every time has failed.

    Raises
    ------
    MoesimError
        If the workers cannot be had at all.
    """
    waiting: deque[RunSpec] = deque(specs)
    suspects: deque[RunSpec] = deque()  # a suspect was running when a worker died
    running: dict[Future[Outcome], RunSpec] = {}
    died: Counter[int] = Counter()
    while waiting or suspects or running:
        todo, room = (suspects, 1) if suspects else (waiting, _AHEAD * pool.width())  # a suspect runs alone
        while todo and len(running) < room:
            spec = todo.popleft()
            if (outcome := known(spec)) is not None:
                yield spec, outcome
                continue
            try:
                running[pool.executor().submit(do, make(spec))] = spec
            except BrokenExecutor:  # since the last look
                todo.appendleft(spec)
                if not running:
                    pool.renew()
                break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            spec = running.pop(future)
            error = _error(future)
            if error is None:
                yield spec, future.result()
            elif isinstance(error, MoesimError):
                yield spec, _failed(spec, error)
            elif not _worker_died(error):
                raise error
            elif died[spec.index] + 1 < _TRIES and isinstance(error, BrokenExecutor | CancelledError):
                died[spec.index] += 1
                suspects.append(spec)
            else:
                yield spec, _failed(spec, SimulationError("its worker process died again and again: killed, or out of memory"))
            if not running and _worker_died(error):
                pool.renew()


def _error(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:  # a cluster gave it up
        return error


def _worker_died(error: BaseException | None) -> bool:
    """Whether it tells of a dead worker; Dask's own error comes after it has tried several workers."""
    return isinstance(error, BrokenExecutor | CancelledError) or type(error).__name__ == "KilledWorker"


def _failed(spec: RunSpec, error: MoesimError) -> Outcome:
    return Outcome({**settings(spec), "error": str(error)}, Machine.of(spec.hardware), failure=error)
