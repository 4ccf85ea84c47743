"""Run a scheduler without a machine: each step takes a time that is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from moesim.serving import make_scheduler
from moesim.serving.arrivals import Arrival
from moesim.serving.drafts import Drafts
from moesim.serving.requests import Request, RequestRecord, Routing
from moesim.serving.scheduler import Pooled, Scheduler
from moesim.serving.steps import Served, ServedStep, Serving

NAMES = "ABCDEFGH"


class Asked(NamedTuple):
    """A request: when it arrives, its tokens, and hashes of its prompt's blocks of `size` tokens."""

    ns: int
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


class Step(NamedTuple):
    """One step: rows by request, requests with a token at its end, begin, phase."""

    rows: str
    emits: str
    ns: int
    phase: str


class Run(NamedTuple):
    steps: list[Step]
    served: Served
    scheduler: Scheduler
    records: list[RequestRecord]
    free: list[int]  # blocks that can be allocated after each step, of a scheduler with blocks


class Listed:
    """Requests that arrive at given times."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._left = arrivals

    def next_ns(self) -> int | None:
        return self._left[0].ns if self._left else None

    def take(self) -> Arrival:
        return self._left.pop(0)

    def ended(self, request: Request, now_ns: int) -> None:
        """It changes nothing."""


def run(
    options: dict[str, Any], asked: Sequence[Asked], lasts: Callable[[ServedStep], int] = lambda step: 1, block_tokens: int = 4,
    drafts: Drafts | None = None,
) -> Run:  # fmt: skip
    """Run a scheduler over requests; a step lasts 1 ns by default, so that an arrival of n - 1 is before step n."""
    made = make_scheduler(options)
    made.longest = max(one.prompt + one.answer for one in asked)
    made.at_once = len(asked)
    made.window = 1 if drafts is None else 1 + drafts.n
    workload: Any = SimpleNamespace(
        trace=None,
        scheduler=made,
        make_source=lambda: Listed([Arrival(one.ns, one.prompt, one.answer, -1, one.blocks, block_tokens) for one in asked]),
        route=lambda number: Routing(0, 1, 0, 1, 1, 0),
        end_ns=None,
        drafts=drafts,
        spec=SimpleNamespace(seed=0),
    )
    serving = Serving(workload)
    free: list[int] = []
    plan = serving._scheduler.plan

    def with_free(now_ns: int) -> Any:
        if isinstance(serving._scheduler, Pooled):
            free.append(serving._scheduler.blocks.available)
        return plan(now_ns)

    serving._scheduler.plan = with_free  # type: ignore[method-assign]
    steps, now = [], 0
    while (step := serving.after(now)) is not None:
        if isinstance(step, int):
            assert step > now
            now = step
            continue
        rows = serving._present
        emits = [f"{_name(r.number)}{r.generated + 1}" for r, n in rows if r.computed + n == r.known]
        steps.append(Step(" ".join(f"{_name(r.number)}{n}" for r, n in rows), " ".join(emits), now, step.phase))
        now += lasts(step)
    served = serving.served()
    return Run(steps, served, serving._scheduler, served.requests, free[1:])


def _name(number: int) -> str:
    return NAMES[number] if number < len(NAMES) else f"R{number}."


def table(found: Run, n: int | None = None) -> list[tuple[str, str]]:
    """Return rows and tokens of the first n steps."""
    return [(step.rows, step.emits) for step in found.steps[:n]]
