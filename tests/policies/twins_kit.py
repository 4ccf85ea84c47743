"""Random instances for functions with a native twin, and the comparison of both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from types import FrameType
from typing import Any

import numpy as np

from moesim.engine import native
from moesim.policies.algorithms.assignment import Plan, greedy_layer_plan, threshold_layer_plan
from moesim.policies.algorithms.caching import workload_aware_swap
from moesim.policies.algorithms.counting import add_rows, top_counted
from moesim.policies.algorithms.impact import Ahead, QueueMakespans, impact_driven
from moesim.policies.algorithms.presched import Timing, certain_for_cpu, cross_layer_plan
from moesim.policies.algorithms.queues import Reading, Timings, queue_layer_plan, replay
from moesim.policies.algorithms.scores import recent_scores, recent_weights
from moesim.policies.algorithms.search import beam_assignment
from moesim.policies.algorithms.two_ended import CODE_COSTS, two_ended_plan
from moesim.policies.cross_layer import absent, where
from moesim.policies.impact_part import ahead_of
from moesim.policies.visit import first_resident

Rng = np.random.Generator
LARGE = (2**50, 2**53, 2**62, 2**63 - 1, 2**64, 10**30)
ODD = (None, "1", True, 0.5, -1, np.int64(3), float("nan"), float("inf"), *LARGE, *(-n for n in LARGE), *(n + 1 for n in LARGE))


class Costs(dict[int, Any]):
    """A table that asks for what it lacks, and knows nothing of more than 40 rows."""

    def __missing__(self, rows: int) -> Any:
        if rows > 40:
            raise KeyError(f"{rows} rows")
        found = self[rows] = self[1] + (rows - 1) * self[2]
        return found


def n_experts(rng: Rng) -> int:
    return int(rng.choice([0, 1, 2, 3, 5, 8, 16, 64]))


def scale(rng: Rng) -> int:
    """Up to which number costs are drawn: small ones for ties, nanoseconds, or so large that sums leave 64 bits."""
    return int(rng.choice([3, 10, 10**6, 10**9, 2**49, 2**62], p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05]))


def numbers(rng: Rng, n: int, most: int, none: float = 0.3) -> list[Any]:
    """Draw n numbers up to most, a share of them 0; now and then floats."""
    found = rng.integers(0, most, n, endpoint=True) * (rng.random(n) >= none)
    return (found / 3 if rng.random() < 0.05 else found).tolist()


def table(rng: Rng, most: int) -> Any:
    each = numbers(rng, 41, most, 0.1)
    kind = rng.integers(4)
    return each if kind == 0 else tuple(each[:9]) if kind == 1 else Costs({0: 0, 1: each[1], 2: each[2]})


def layer(rng: Rng) -> tuple[Any, ...]:
    n, most = n_experts(rng), scale(rng)
    loads = numbers(rng, n, int(rng.choice([1, 3, 8])), rng.random())
    return loads, numbers(rng, n, most, 0.5), table(rng, most), table(rng, most)


def greedy(rng: Rng) -> tuple[Any, ...]:
    costs = layer(rng)
    return *costs, *numbers(rng, 3, scale(rng), 0.5)


def swap(rng: Rng) -> tuple[Any, ...]:
    n = n_experts(rng)
    resident = rng.permutation(n)[: rng.integers(0, n, endpoint=True)].tolist()
    as_one = (list, set, tuple, dict.fromkeys)[rng.integers(4)]
    return numbers(rng, n, scale(rng)), as_one(resident), int(rng.integers(0, 9)), bool(rng.integers(2))


def timings(rng: Rng, costs: tuple[Any, ...], most: int) -> Timings:
    transfer, *first = numbers(rng, 3, most, 0.2)
    return Timings(transfer, costs[2], None if rng.random() < 0.2 else costs[3], *first)


def queues(rng: Rng) -> tuple[Any, ...]:
    loads, waiting, *tables = layer(rng)
    most = max([*waiting, 3])
    costs = timings(rng, (loads, waiting, *tables), int(most))
    waiting = [costs.transfer if rng.random() < 0.4 else wait for wait in waiting]
    ties, timeline = ["gpu", "cpu", "link"][rng.integers(3)], ["completion", "free"][rng.integers(2)]
    reading = Reading(timeline, ties, bool(rng.integers(2)), bool(rng.integers(2)))  # type: ignore[arg-type]
    return loads, waiting, costs, numbers(rng, 1, int(most), 0.5)[0], reading


def searched(rng: Rng) -> tuple[Any, ...]:
    n, most = int(rng.integers(0, 11)), scale(rng)  # few: a width may be spoiled to keep every partial plan
    return numbers(rng, n, most), numbers(rng, n, most), int(rng.choice([0, 1, 2, 3, 8])), *numbers(rng, 2, most, 0.5)


def two_ended(rng: Rng) -> tuple[Any, ...]:
    loads, waiting, costs, _, _ = queues(rng)
    order = rng.permutation(len(loads)).tolist()
    as_one = (list, set, frozenset, dict.fromkeys)[rng.integers(4)]
    cached = as_one([e for e, wait in enumerate(waiting) if wait < costs.transfer])
    return order, cached, loads, CODE_COSTS if rng.random() < 0.05 else costs


def carried_out(rng: Rng) -> tuple[Any, ...]:
    loads, waiting, costs, free, _ = queues(rng)
    order = rng.permutation(len(loads)).tolist()
    on_gpu, on_cpu, loaded = sorted(rng.integers(0, len(loads), 3, endpoint=True).tolist())
    plan = Plan(tuple(order[:on_cpu]), tuple(order[on_cpu:]), 0, 0, tuple(order[on_gpu:loaded]))
    ready = {e: waiting[e] for e in order if rng.random() < 0.5}
    return plan, loads, costs, ready, free


def tokens(rng: Rng) -> list[Any]:
    return sorted(numbers(rng, n_experts(rng), int(rng.choice([2, 8, 40])), 0))


def presched(rng: Rng) -> Timing:
    most = scale(rng)
    dense, gpu, load, load_next, in_flight = numbers(rng, 5, most, 0.1)
    return Timing(table(rng, most), load, load if rng.random() < 0.7 else load_next, gpu, dense, in_flight)


def none_better(rng: Rng) -> str:
    return ("eq2", "printed", "sentinel")[rng.integers(3)]


class Hits:
    """What a rank's predictions have been worth."""

    def __init__(self, rates: list[float]) -> None:
        self._rates = rates

    def __call__(self, rank: int) -> float:
        return self._rates[rank]


def cross_layer(rng: Rng) -> tuple[Any, ...]:
    upcoming = tokens(rng)
    hits = Hits(rng.random(len(upcoming)).tolist())
    return tokens(rng), upcoming, presched(rng), hits, none_better(rng)


def certain(rng: Rng) -> tuple[Any, ...]:
    return tokens(rng), presched(rng), none_better(rng)


def scores(rng: Rng) -> tuple[Any, ...]:
    n_rows, n = int(rng.choice([1, 2, 8, 9, 70])), n_experts(rng)
    # Views of all layers' scores, as a trace gives them; ties are frequent.
    shape = n_rows, 3, n
    drawn = rng.integers(0, 9, shape) / 8 if rng.random() < 0.4 else rng.random(shape) ** int(rng.choice([1, 30]))
    kind = (np.float16, np.float32, np.float64)[rng.choice(3, p=[0.6, 0.3, 0.1])]
    rows = drawn.astype(kind)[:, 1]
    if rows.size and rng.random() < 0.05:
        rows[0, 0] = rng.choice([-1, -0.0, np.nan, np.inf])
    p = int(rng.integers(1, n + 3))
    return rng.random(n).tolist(), rows, p, float(rng.choice([0.5, 0.3, 1, 0])), bool(rng.random() < 0.3)


def chosen(rng: Rng) -> tuple[Any, ...]:
    before, all_scores, p, alpha, by_id = scores(rng)
    width = int(rng.integers(1, all_scores.shape[1], endpoint=True)) if all_scores.size else 0
    ids = rng.permuted(np.tile(np.arange(all_scores.shape[1]), (len(all_scores), 1)), axis=1)[:, :width]
    if ids.size and rng.random() < 0.05:
        ids[-1, -1] = rng.choice([ids[-1, 0], -1, all_scores.shape[1]])
    kind = (np.uint8, np.uint16, np.int64)[rng.integers(3)]
    return before, ids.astype(kind), all_scores[:, :width], min(p, width + 2), alpha, by_id


def counted(rng: Rng) -> tuple[Any, ...]:
    n = max(1, n_experts(rng))
    kind = (np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float32)[rng.integers(6)]
    ids = rng.integers(0, n, (int(rng.integers(0, 9)), 3, int(rng.integers(1, 9)))).astype(kind)[:, 1]
    before = dict.fromkeys(rng.permutation(n)[: n // 2].tolist(), int(rng.integers(5)))
    return before, ids, int(rng.integers(1, 9))


def impact(rng: Rng) -> tuple[Any, ...]:
    layers, most = int(rng.integers(1, 4)), scale(rng)
    tables = (None, None, table(rng, most), table(rng, most))
    _, _, _, _, reading = queues(rng)
    of_layers = [timings(rng, tables, most) for _ in range(layers)]
    ahead = []
    for at in range(layers):
        n_cached, n_missing = rng.integers(0, 9, 2)
        experts = rng.permutation(n_missing).tolist()
        rows = numbers(rng, n_missing, 8, 0.02)
        ahead.append(Ahead(at, numbers(rng, n_cached, 8, 0.02), list(zip(experts, rows, strict=True))))
    idle = int(rng.integers(-3, 4 * most, endpoint=True)) if most < 2**60 else 9
    budget = ("ends", "begins", "none")[rng.integers(3)]
    return ahead, QueueMakespans(of_layers, reading), of_layers[0].transfer, idle, budget, int(rng.integers(0, 10))


def ranked(rng: Rng) -> tuple[Any, ...]:
    n = n_experts(rng)
    return dict(zip(rng.permutation(n).tolist(), numbers(rng, n, scale(rng), 0), strict=True)), int(rng.integers(0, 20))


MAKERS: dict[Callable[..., Any], Callable[[Rng], tuple[Any, ...]]] = {
    greedy_layer_plan: greedy,
    threshold_layer_plan: layer,
    workload_aware_swap: swap,
    queue_layer_plan: queues,
    beam_assignment: searched,
    two_ended_plan: two_ended,
    replay: carried_out,
    impact_driven: impact,
    certain_for_cpu: certain,
    cross_layer_plan: cross_layer,
    recent_scores: scores,
    recent_weights: chosen,
    add_rows: counted,
    top_counted: ranked,
}


def _like(given: Any, items: list[Any]) -> Any:
    return given._make(items) if hasattr(given, "_make") else type(given)(items)


def spoiled(rng: Rng, given: Any) -> Any:
    """Change something: a number, the length or the type of a list, or one thing in it."""
    if isinstance(given, (list, tuple)) and len(given) and rng.random() < 0.8:
        at = int(rng.integers(len(given)))
        change = rng.integers(4)
        if change == 0:
            return given[:-1]
        if change == 1:
            flat = not any(isinstance(one, (list, tuple, dict)) for one in given)
            return [np.array, tuple][rng.integers(2) if flat else 1](given)
        return _like(given, [*given[:at], spoiled(rng, given[at]), *given[at + 1 :]])
    return ODD[rng.integers(len(ODD))]


def answer(function: Callable[..., Any], given: tuple[Any, ...]) -> str:
    try:
        return repr(function(*given))
    except Exception as error:
        return repr(error)


@contextmanager
def calls_of(function: Callable[..., Any]) -> Iterator[list[int]]:
    """Count the calls of a Python function, whoever makes them."""
    n_calls = [0]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        n_calls[0] += event == "call" and frame.f_code is function.__code__  # type: ignore[attr-defined]

    sys.setprofile(watch)
    try:
        yield n_calls
    finally:
        sys.setprofile(None)


def compare(reference: Callable[..., Any], n: int, seed: int) -> dict[str, int]:
    """Ask a function and its twin about n instances; return how many had an answer, an error, and an answer of the twin's own."""
    compiled = getattr(import_module("moesim.engine.native._native").algorithms, reference.__name__)
    rng = np.random.default_rng([seed, *reference.__name__.encode()])
    n_errors = n_own = 0
    for at in range(n):
        given: tuple[Any, ...] = MAKERS[reference](rng)
        if rng.random() < 0.1:
            place = int(rng.integers(len(given)))
            given = (*given[:place], spoiled(rng, given[place]), *given[place + 1 :])
        again = deepcopy(given)
        with np.errstate(all="ignore"):
            wanted = answer(reference, given)
            with calls_of(reference) as n_calls:
                found = answer(compiled, again)
        assert found == wanted, f"{reference.__name__}, seed {seed}, instance {at}: {given!r}"
        n_errors += "Error(" in wanted
        n_own += "Error(" not in wanted and not n_calls[0]
    return {"answers": n - n_errors, "errors": n_errors, "own": n_own}


OF_A_VIEW = (first_resident, absent, ahead_of, where)


def compare_on(view: Any, rng: Rng) -> tuple[bool, bool]:
    """Ask the twins that look at a view, and their references; return whether an idle and an absent expert was found."""
    layers, experts = view.model.n_layers, view.model.n_experts
    units = list(dict.fromkeys(zip(rng.integers(0, layers, 20).tolist(), rng.integers(0, experts, 20).tolist(), strict=True)))
    if rng.random() < 0.1:
        units[0] = [(-1, 0), (layers, experts), (0, np.int64(1)), (0,), (0, 1, 2)][rng.integers(5)]
    of = [units, dict.fromkeys(units), tuple(units)][rng.integers(3)]
    spared = [(), set(units[::2]), units[5:]][rng.integers(3)]
    gpu = view.gpus[0] if rng.random() < 0.95 else "gpu9"
    counts = dict(zip(rng.permutation(experts).tolist(), numbers(rng, experts, 3, 0), strict=True))
    if rng.random() < 0.1:
        counts[int(rng.choice([-1, experts, 10**6]))] = 1
    compiled, found = import_module("moesim.engine.native._native").algorithms, []
    layer = int(rng.integers(layers))
    asked = (of, spared, gpu, view), (counts, layer, gpu, view), (layer, counts, gpu, view), (layer, tuple(counts), gpu, view)
    for reference, given in zip(OF_A_VIEW, asked, strict=True):
        wanted = answer(reference, given)
        assert answer(getattr(compiled, reference.__name__), given) == wanted, f"{reference.__name__}{given[:-1]}"
        found.append(wanted not in ("None", "[]") and "Error(" not in wanted)
    return found[0], found[1]


BUILT = native.AVAILABLE
