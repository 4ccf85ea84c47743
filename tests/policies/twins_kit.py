"""Random instances for functions with a native twin, and the comparison of both."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from moesim.engine import native
from moesim.policies.algorithms.assignment import Plan, greedy_layer_plan, threshold_layer_plan
from moesim.policies.algorithms.caching import workload_aware_swap
from moesim.policies.algorithms.queues import Reading, Timings, queue_layer_plan, replay

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


def carried_out(rng: Rng) -> tuple[Any, ...]:
    loads, waiting, costs, free, _ = queues(rng)
    order = rng.permutation(len(loads)).tolist()
    on_gpu, on_cpu, loaded = sorted(rng.integers(0, len(loads), 3, endpoint=True).tolist())
    plan = Plan(tuple(order[:on_cpu]), tuple(order[on_cpu:]), 0, 0, tuple(order[on_gpu:loaded]))
    ready = {e: waiting[e] for e in order if rng.random() < 0.5}
    return plan, loads, costs, ready, free


MAKERS: dict[Callable[..., Any], Callable[[Rng], tuple[Any, ...]]] = {
    greedy_layer_plan: greedy,
    threshold_layer_plan: layer,
    workload_aware_swap: swap,
    queue_layer_plan: queues,
    replay: carried_out,
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
            return [np.array, set, tuple][rng.integers(3) if flat else 2](given)
        return _like(given, [*given[:at], spoiled(rng, given[at]), *given[at + 1 :]])
    return ODD[rng.integers(len(ODD))]


def answer(function: Callable[..., Any], given: tuple[Any, ...]) -> str:
    try:
        return repr(function(*given))
    except Exception as error:
        return repr(error)


def compare(reference: Callable[..., Any], n: int, seed: int) -> dict[str, int]:
    """Ask a function and its twin about n instances; return how many were answered, and how many with an error."""
    compiled = getattr(import_module("moesim.engine.native._native").algorithms, reference.__name__)
    rng = np.random.default_rng([seed, *reference.__name__.encode()])
    n_errors = 0
    for at in range(n):
        given = MAKERS[reference](rng)
        if rng.random() < 0.1:
            place = int(rng.integers(len(given)))
            given = (*given[:place], spoiled(rng, given[place]), *given[place + 1 :])
        wanted = answer(reference, given)
        found = answer(compiled, given)
        assert found == wanted, f"{reference.__name__}, seed {seed}, instance {at}: {given!r}"
        n_errors += "Error(" in wanted
    return {"answers": n - n_errors, "errors": n_errors}


BUILT = native.AVAILABLE
