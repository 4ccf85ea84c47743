"""Checks that every run of a served workload passes through: what schedulers promise, and what must add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.errors import SimulationError, WorkloadError, describe_exception
from moesim.serving.scheduler import Rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from moesim.serving.requests import Request
    from moesim.serving.scheduler import Scheduler


def check_promises(scheduler: Scheduler) -> None:
    """Raise if what a scheduler says of itself are no numbers; WorkloadError."""
    for name, least in (("most_requests", 1), ("most_rows", 1), ("capacity", 0), ("longest_possible", 0)):
        try:
            value = getattr(scheduler, name)
        except Exception as error:
            raise WorkloadError(f"workload.scheduler: {scheduler.name}: {name} raised {describe_exception(error)}") from None
        if type(value) is not int or value < least:
            raise WorkloadError(
                f"workload.scheduler: {scheduler.name}: expected {name}, an integer of at least {least}, got {value!r}"
            )


def check_plan(scheduler: Scheduler, rows: Sequence[Rows], present: Mapping[int, Request]) -> None:
    """Raise if a scheduler's rows are more than it promises, or not the next ones of requests that are there; SimulationError."""
    for one in rows:
        if not isinstance(one, Rows) or type(one.n) is not int:
            got = f"n of {type(one.n).__name__}" if isinstance(one, Rows) else f"{type(one).__name__}"
            raise _wrong(scheduler, "a list of Rows(request, n), n an int", got)
    total, most = sum(n for _, n in rows), scheduler.most_rows
    if scheduler.pass_rows is None and total > most:
        raise _wrong(scheduler, f"at most {most} rows in a step", f"{total}")
    if scheduler.pass_rows is not None and scheduler.pass_rows > most:
        raise _wrong(scheduler, f"at most {most} rows in a pass", f"{scheduler.pass_rows}")
    numbers = {request.number for request, _ in rows}
    if len(numbers) != len(rows):
        raise _wrong(scheduler, "each request once in a step", "one twice")
    if max(len(numbers), scheduler.n_running) > scheduler.most_requests:
        raise _wrong(scheduler, f"at most {scheduler.most_requests} requests", f"{max(len(numbers), scheduler.n_running)}")
    for request, n in rows:
        if present.get(request.number) is not request:
            raise _wrong(scheduler, "requests that have arrived and have not left", f"request {request.number}")
        if not 0 < n <= request.known - request.computed:
            left = request.known - request.computed
            raise _wrong(scheduler, f"1 to {left} rows of request {request.number}", f"{n}")
        room = scheduler.room(request)
        if room is not None and request.computed + n > room:
            raise _wrong(scheduler, f"KV cache for {request.computed + n} tokens of request {request.number}", f"it for {room}")
    if len(present) != scheduler.n_running + len(scheduler.waiting):
        raise _wrong(
            scheduler,
            f"{len(present)} requests that run or wait",
            f"{scheduler.n_running} and {len(scheduler.waiting)}",
        )
    scheduler.check()


def check_end(scheduler: Scheduler, request: Request) -> None:
    """Raise if the rows that steps had of a request are not what it took; SimulationError."""
    expected = request.prompt + request.answer - 1 - request.cached + request.given_up
    if request.rows_run != expected:
        raise _wrong(scheduler, f"{expected} rows of request {request.number} in all", f"{request.rows_run}")


def check_count(scheduler: Scheduler, arrived: int, done: Collection[object], left: Collection[object]) -> None:
    """Raise if a request was lost; SimulationError."""
    if arrived != len(done) + len(left):
        raise _wrong(scheduler, f"{arrived} requests that arrived", f"{len(done)} that ended and {len(left)} that have not")


def _wrong(scheduler: Scheduler, expected: str, got: str) -> SimulationError:
    return SimulationError(f"scheduler {scheduler.name}: expected {expected}, got {got}; correct its plan")
