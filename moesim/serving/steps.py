"""A served workload: steps that a scheduler makes while the run goes on, and what became of each request."""

from __future__ import annotations

import copy
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from moesim.errors import MoesimError, SimulationError, WorkloadError, describe_exception
from moesim.serving.audit import check_count, check_end, check_plan
from moesim.serving.drafts import Drafts, draft_runs
from moesim.serving.requests import Request, RequestRecord, Routing
from moesim.serving.scheduler import Pooled
from moesim.trace.workload import MicroBatch, Step, Workload
from moesim.trace.workload.compose import Steps, look_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.hardware.costs import CostModel
    from moesim.serving.arrivals import Arrival, Asked, Source
    from moesim.serving.scheduler import Rows, Scheduler
    from moesim.trace import Trace
    from moesim.trace.workload import WorkloadSpec
    from moesim.trace.workload.compose import Admitted

MIXED = "mixed"
_GOLDEN = 40_503  # 2^16 over the golden ratio: copies of a recorded request begin as far from each other as can be


class ServedStep(Step):
    """One pass of the rows that a scheduler chose."""

    __slots__ = ("_begins", "_by", "_draft_runs", "_ends", "_micro", "_rows", "_sequences", "_trace")

    def __init__(
        self, index: int, rows: Sequence[Rows], gained: Mapping[int, int], drafts: Drafts | None, kv_tokens: int, n_active: int,
        trace: Trace, *, ends_prompts: bool,
    ) -> None:  # fmt: skip
        self.index, self.batch = index, 0
        self.kv_tokens, self.n_active = kv_tokens, n_active
        self.n_sequences = sum(gained.values())  # tokens that come of it
        sampled = [one.request for one in rows if one.request.number in gained]
        self.n_head_rows = len(gained) + sum(one.drafts for one in sampled)
        self._by, self._draft_runs = drafts, draft_runs(sampled) if drafts is not None else ()
        counts = [one.n for one in rows]
        self._sequences = tuple([(n, one.request.computed) for n, one in zip(counts, rows, strict=True)])
        decodes = [one.request.decodes for one in rows]
        self.phase = "decode" if all(decodes) else MIXED if any(decodes) else "prefill"
        self.last_chunk = self.phase != "prefill" or ends_prompts
        self.n_tokens = sum(counts)
        numbers = np.array([one.request.number for one in rows], np.int32)
        self.requests = numbers if self.n_tokens == len(rows) else np.repeat(numbers, counts)
        self._rows: NDArray[np.int64] = np.array([row for one in rows for row in one.request.rows(one.n)], np.int64)
        self._begins = tuple([one.request.number for one in rows if not one.request.rows_run])
        self._ends = tuple([
            one.request.number for one in rows
            if one.request.generated + gained.get(one.request.number, 0) == one.request.answer
        ])  # fmt: skip
        self._micro: tuple[MicroBatch, ...] | None = None
        self._trace = trace

    def draft_ns(self, costs: CostModel, device: str) -> int:
        """Return the time of the drafts that the step verifies."""
        return 0 if self._by is None else self._by.ns(self._draft_runs, costs, device)

    @property
    def rows(self) -> NDArray[np.int64]:
        return self._rows

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return self._sequences

    @property
    def begins(self) -> tuple[int, ...]:
        return self._begins

    @property
    def ends(self) -> tuple[int, ...]:
        return self._ends

    @property
    def work2(self) -> int:
        return sum([n * (2 * context + n) for n, context in self._sequences])

    @property
    def n_micro(self) -> int:
        return 1

    @property
    def micro(self) -> tuple[MicroBatch, ...]:
        if self._micro is None:
            (found,) = look_up(self._trace, self._rows[None], [self.n_tokens])
            self._micro = (MicroBatch(0, self.n_tokens, self.work2, self.n_sequences, *found),)
        return self._micro


class Served(NamedTuple):
    """What became of the requests of a run."""

    requests: list[RequestRecord]
    gaps: array[int]  # ns between the tokens of one request, of all requests one after another
    queue_ns: int  # requests that wait for their first step, times ns: their mean number is this over the run's length
    inside_ns: int  # requests that have arrived and have not ended, likewise
    slots_ns: int  # requests that the scheduler has admitted, likewise
    unfinished: int
    end_ns: int


class KvUse(NamedTuple):
    """KV cache of a server as it becomes idle, in tokens."""

    tokens: int  # that it has
    used: int  # that requests had at once, at most, since it was idle before
    least: int  # of the longest request of the workload


class Serving:
    """One run of a served workload; the engine asks it for each step."""

    def __init__(self, workload: ServedWorkload) -> None:
        self._trace, self._source = workload.trace, workload.make_source()
        self._scheduler: Scheduler = copy.deepcopy(workload.scheduler)
        self._route = workload.route
        # Apart from arrivals (seed) and lengths (seed, 1).
        self._drafts, self._rng = workload.drafts, np.random.default_rng([workload.spec.seed, 2])
        self._gained: dict[int, int] = {}  # tokens that come of the present step, by request
        self._end_ns = workload.end_ns
        self._passes: list[list[Rows]] = []  # of the present step that have not begun
        self._present: list[Rows] = []
        self._rows: list[Rows] = []
        self._index = 0
        self._open: dict[int, Request] = {}
        self._done: list[RequestRecord] = []
        self._gaps = array("q")
        self._queue_ns = self._inside_ns = self._slots_ns = 0
        self._now = 0
        self._arrived = 0
        self._at_idle: Callable[[KvUse], tuple[int, int] | None] | None = None
        self._used = 0  # tokens of KV cache, at most since it was idle

    def let_move(self, at_idle: Callable[[KvUse], tuple[int, int] | None], who: str) -> None:
        """Ask `at_idle` when no request is there for the tokens of KV cache from now on, and the ns that it takes."""
        if not isinstance(self._scheduler, Pooled):
            raise WorkloadError(
                f"workload.scheduler: expected one with KV cache in blocks next to {who}, which moves its memory, got "
                f"{self._scheduler.name}; take vllm or sglang"
            )
        self._at_idle = at_idle

    def after(self, now_ns: int) -> ServedStep | int | None:
        """Return the step that begins now, or when to ask again; None: all is done."""
        try:
            return self._after(now_ns)
        except MoesimError:
            raise
        except Exception as error:  # a scheduler may be anybody's code
            raise SimulationError(f"scheduler {self._scheduler.name} raised {describe_exception(error)}") from None

    def _after(self, now_ns: int) -> ServedStep | int | None:
        if self._present:
            for one in self._present:
                one.request.computed += one.n
                one.request.rows_run += one.n
            self._present = []
            if not self._passes:
                self._sample(now_ns)
        if self._passes:
            return self._begin(self._passes.pop(0), now_ns)
        self._count(now_ns)
        self._arrive(now_ns)
        if self._end_ns is not None and now_ns >= self._end_ns:
            self._check_any()
            return None
        scheduler = self._scheduler
        rows = list(scheduler.plan(now_ns))
        check_plan(scheduler, rows, self._open)
        if not rows:
            following = self._source.next_ns()
            if following is None and self._open:
                raise WorkloadError(
                    f"workload.scheduler: {scheduler.name} runs none of its {len(self._open)} requests; give it more KV cache"
                )
            if following is not None and self._end_ns is not None:
                following = min(following, self._end_ns)
            if following is None:
                self._check_any()
                return None
            return max(following, now_ns + self._idle())
        if isinstance(scheduler, Pooled):
            self._used = max(self._used, scheduler.in_use)
        self._rows = rows
        self._passes = list(_passes(rows, scheduler.pass_rows))
        return self._begin(self._passes.pop(0), now_ns)

    def _idle(self) -> int:
        """Let the policy move memory between experts and KV cache; return the time it takes, in ns."""
        scheduler = self._scheduler
        if self._at_idle is None or self._open or not self._used or not isinstance(scheduler, Pooled):
            return 0
        moved = self._at_idle(KvUse(scheduler.capacity, self._used, scheduler.longest))
        self._used = 0
        if moved is None:
            return 0
        scheduler.resize(moved[0])
        return moved[1]

    def _check_any(self) -> None:
        """Refuse a run in which no request was served."""
        if not self._index:
            refused = sum(record.refused for record in self._done)
            raise WorkloadError(
                f"workload: expected a request that can be served, got none: {refused} are longer than the "
                f"{self._scheduler.longest_possible:,} tokens that {self._scheduler.name} has room for, others had not arrived "
                f"at the end; give it more KV cache or time"
            )

    def _begin(self, rows: list[Rows], now_ns: int) -> ServedStep:
        gained: dict[int, int] = {}
        for request, n in rows:
            if request.start_ns < 0:
                request.start_ns = now_ns
                self._queue_ns += now_ns - request.arrival_ns
            if request.computed + n == request.known:
                accepted = self._drafts.accepted(request.drafts, self._rng) if self._drafts is not None else 0
                gained[request.number] = 1 + accepted
        scheduler = self._scheduler
        self._gained |= gained
        capacity, most = scheduler.capacity, scheduler.most_requests
        step = ServedStep(
            self._index, rows, gained, self._drafts, capacity, most, self._trace, ends_prompts=scheduler.ends_prompts(rows)
        )
        self._index += 1
        self._present = rows
        return step

    def _sample(self, now_ns: int) -> None:
        """Count the tokens that come at the end of a step; requests that have all of theirs leave."""
        self._count(now_ns)
        for request, _ in self._rows:
            if request.computed != request.known:
                continue
            gained = self._gained[request.number]
            request.take(gained)
            if request.first_ns < 0:
                request.first_ns = now_ns
            else:
                self._gaps.append(now_ns - request.last_ns)
            self._gaps.extend([0] * (gained - 1))
            request.last_ns = now_ns
            if request.over:
                check_end(self._scheduler, request)
                self._scheduler.leave(request)
                self._source.ended(request, now_ns)
                del self._open[request.number]
                self._done.append(request.record())
            elif self._drafts is not None:
                self._drafts.propose(request, self._rng)
        self._rows, self._gained = [], {}

    def _arrive(self, now_ns: int) -> None:
        while (ns := self._source.next_ns()) is not None and ns <= now_ns:
            arrival = self._source.take()
            request = self._request(arrival)
            if request.prompt + request.answer > self._scheduler.longest_possible:
                request.refused = 1
                self._done.append(request.record())
                self._source.ended(request, arrival.ns)
                continue
            self._open[request.number] = request
            self._inside_ns += now_ns - arrival.ns
            self._scheduler.add(request)

    def _request(self, arrival: Arrival) -> Request:
        number, self._arrived = self._arrived, self._arrived + 1
        ns, prompt, answer, user, blocks, size, follows = arrival
        return Request(number, ns, prompt, answer, self._route(number), user, blocks, size, follows)

    def _count(self, now_ns: int) -> None:
        """Add up who was there since the last change."""
        self._inside_ns += len(self._open) * (now_ns - self._now)
        self._slots_ns += self._scheduler.n_running * (now_ns - self._now)
        self._now = now_ns

    def served(self) -> Served:
        """Return what became of all requests so far."""
        left = list(self._open.values())
        check_count(self._scheduler, self._arrived, self._done, left)
        waited = sum(self._now - request.arrival_ns for request in left if request.start_ns < 0)
        records = sorted(self._done + [request.record() for request in left])
        return Served(records, self._gaps, self._queue_ns + waited, self._inside_ns, self._slots_ns, len(left), self._now)


def _passes(rows: Sequence[Rows], most: int | None) -> Iterator[list[Rows]]:
    """Cut the rows of a step into passes of so many rows at most."""
    if most is None:
        yield list(rows)
        return
    present: list[Rows] = []
    room = most
    for one in rows:
        left = one.n
        while left:
            n = min(left, room)
            present.append(one._replace(n=n))
            left, room = left - n, room - n
            if not room:
                yield present
                present, room = [], most
    if present:
        yield present


class ServedSteps(Steps):
    """Steps that are known only as a run goes on; what can be said of them before is said."""

    def __init__(self, workload: ServedWorkload) -> None:
        trace = workload.trace
        self.shape = trace.n_layers, trace.n_experts, trace.top_k
        self.stretches = []
        self._workload = workload

    def begin(self) -> Serving:
        """Begin a run, which makes them."""
        return Serving(self._workload)

    def __len__(self) -> int:
        """Return the steps of a run in which all slots are always in use: no run has fewer."""
        asked, by = self._workload.asked, self._workload.scheduler
        return max(1, asked.n_rows // max(1, by.most_rows), int(asked.answer.sum()) // by.most_requests)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        raise WorkloadError(
            "workload: expected batches, whose steps are known beforehand, got requests that arrive; this policy or study needs "
            "the former: set batch_size and decode_tokens instead of arrivals or closed, or choose another"
        )

    def __iter__(self) -> Iterator[Step]:
        self[0]
        yield from ()

    @property
    def n_tokens(self) -> NDArray[np.int64]:
        """Rows of each step, roughly."""
        return np.full(len(self), max(1, self._workload.asked.n_rows // len(self)), np.int64)

    def of_prefill(self) -> Iterator[Step]:
        """Return none: a step with a prompt may have answers too."""
        return iter(())


@dataclass(frozen=True, eq=False)
class ServedWorkload(Workload):
    """Requests that arrive, a scheduler, and the routing that they read."""

    steps: Steps = field(init=False)
    admitted: tuple[Admitted, ...] = field(init=False, default=())
    digest: str = field(init=False)
    trace: Trace = field(kw_only=True)
    scheduler: Scheduler = field(kw_only=True)
    make_source: Callable[[], Source] = field(kw_only=True)
    asked: Asked = field(kw_only=True)
    end_ns: int | None = field(kw_only=True)
    drafts: Drafts | None = field(kw_only=True, default=None)
    order: tuple[int, ...] = field(kw_only=True)  # requests of the trace, in the order in which they are read

    def __post_init__(self) -> None:
        file = self.asked.file.sha256 if self.asked.file is not None else None
        asked = {**asdict(self.spec), "trace": self.trace.digest, "order": self.order, "file": file}
        object.__setattr__(self, "digest", hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest())
        object.__setattr__(self, "steps", ServedSteps(self))

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests of the trace that are read, at most."""
        return self.order[: len(self.asked)]

    @property
    def max_tokens(self) -> int:
        """Rows of the largest pass."""
        return min(self.scheduler.most_rows, self.scheduler.most_requests * self.scheduler.longest)

    @property
    def draft_head(self) -> bool:
        """Whether one more layer of the model is there, which proposes tokens."""
        return self.drafts is not None and self.drafts.by == "mtp"

    @property
    def peak_requests(self) -> int:
        """Requests that have a cache at once."""
        return self.scheduler.most_requests

    @property
    def takes_memory(self) -> str:
        return "kv_tokens of the scheduler or its requests at once"

    @property
    def peak_kv_tokens(self) -> int:
        """Tokens of KV cache that the server reserves."""
        return self.scheduler.capacity

    def within(self, prompt_rows: int | None) -> WorkloadSpec:
        """Return what was asked for: schedulers cut prompts themselves."""
        return self.spec

    def route(self, number: int) -> Routing:
        """Return the rows of the trace that a request reads."""
        table, n = self.trace.requests, len(self.order)
        one, turn = self.order[number % n], number // n * _GOLDEN % 65_536
        first, n_prompt, n_decode = int(table.first_row[one]), int(table.n_prompt[one]), int(table.n_decode[one])
        prompt, decode = (first, n_prompt), (first + n_prompt, n_decode)
        prompt, decode = (prompt if n_prompt else decode), (decode if n_decode else prompt)
        return Routing(*prompt, turn * prompt[1] // 65_536, *decode, turn * decode[1] // 65_536)
