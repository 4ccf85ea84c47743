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
from moesim.policies.algorithms.presched import Timing, certain_for_cpu, cross_layer_plan
from moesim.policies.parts.prefetch import absent, add_rows, where

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


def counted(rng: Rng) -> tuple[Any, ...]:
    n = max(1, n_experts(rng))
    kind = (np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float32)[rng.integers(6)]
    ids = rng.integers(0, n, (int(rng.integers(0, 9)), 3, int(rng.integers(1, 9)))).astype(kind)[:, 1]
    before = dict.fromkeys(rng.permutation(n)[: n // 2].tolist(), int(rng.integers(5)))
    return before, ids, int(rng.integers(1, 9))


MAKERS: dict[Callable[..., Any], Callable[[Rng], tuple[Any, ...]]] = {
    certain_for_cpu: certain,
    cross_layer_plan: cross_layer,
    add_rows: counted,
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


OF_A_VIEW = (absent, where)


def compare_on(view: Any, rng: Rng) -> bool:
    """Ask the twins that look at a view, and their references; return whether an absent expert was found."""
    layers, experts = view.model.n_layers, view.model.n_experts
    gpu = view.gpus[0] if rng.random() < 0.95 else "gpu9"
    counts = dict(zip(rng.permutation(experts).tolist(), numbers(rng, experts, 3, 0), strict=True))
    if rng.random() < 0.1:
        counts[int(rng.choice([-1, experts, 10**6]))] = 1
    compiled, found = import_module("moesim.engine.native._native").algorithms, []
    layer = int(rng.integers(layers))
    for reference, given in zip(OF_A_VIEW, ((counts, layer, gpu, view), (layer, tuple(counts), gpu, view)), strict=True):
        wanted = answer(reference, given)
        assert answer(getattr(compiled, reference.__name__), given) == wanted, f"{reference.__name__}{given[:-1]}"
        found.append(wanted not in ("None", "[]") and "Error(" not in wanted)
    return found[0]


BUILT = native.AVAILABLE
