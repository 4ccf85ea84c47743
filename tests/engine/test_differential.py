"""Replays against other people's caches, other people's recordings, and brute force."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.trace import Trace
from moesim.trace.stats.trace_stats import stats
from tests.cache_replay import replay_belady, replay_lfu, replay_lru
from tests.helpers_bigmoe import Lookup, RouteTrace, read_route_trace
from tests.helpers_shared import gpt_oss, shared_file

CAPACITY = 8  # a quarter of the experts of a layer of gpt-oss-20b


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return gpt_oss()


@pytest.fixture(scope="module")
def engine() -> RouteTrace:
    return read_route_trace(shared_file("traces", "bigmoe-on-edge", "qwen.route.csv"))


# ------------------------------------------------------------------------------ against other implementations


def test_sequential_lru_equals_cachetools(recorded: Trace) -> None:
    cachetools = pytest.importorskip("cachetools")
    for layer in range(0, 24, 6):  # every sixth layer: the package takes 2 us a lookup
        visits = recorded.experts[:, layer].tolist()
        theirs, hits = cachetools.LRUCache(maxsize=CAPACITY), []
        for key in (key for visit in visits for key in visit):
            hits.append(theirs.get(key) is not None)
            theirs[key] = True
        assert replay_lru(visits, CAPACITY, set_wise=False) == hits


def test_sequential_lru_of_bytes_equals_libcachesim(engine: RouteTrace) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    theirs, request = libcachesim.LRU(cache_size=BUDGET, hashpower=14), libcachesim.Request()
    hits = []
    for x in engine.lookups:
        request.obj_id, request.obj_size = x.layer * 128 + x.expert, engine.expert_bytes[x.layer]
        hits.append(theirs.get(request))
    assert replayed(engine, set_wise=False) == hits


# ---------------------------------------------------------------------------------- against published figures


@pytest.fixture(scope="module")
def figures(recorded: Trace) -> dict[str, Any]:
    return stats(recorded)


# Left: what the 96 sequences at hand give, to the digit. Right: the reference, computed on the full data set,
# of which they are a part: hence the differences in the third digit, and larger ones in the most used expert.
REFERENCE = {
    "reuse@1": (0.442, 0.437),
    "reuse@8": (0.354, 0.351),
    "reuse_baseline": (0.189, 0.191),
    "entropy": (0.917, 0.919),
    "top_over_uniform": (2.447, 2.6),
    "lru 25": (0.653, 0.651),
    "lru 50": (0.896, 0.897),
    "lru 75": (0.980, 0.981),
    "belady 25": (0.810, 0.812),
    "belady 50": (0.954, 0.954),
    "belady 75": (0.992, 0.992),
    # How the published figure divides requests into those counted and those tried is not known, and it matters: from 0.52
    # by halves in order, which parts the subjects, to 0.59 by every other.
    "coactivation": (0.584, 0.54),
}
LOOSE = {"top_over_uniform": 0.2, "coactivation": 0.06}


@pytest.mark.long
@pytest.mark.parametrize("name", REFERENCE)
def test_figures_of_gpt_oss(figures: dict[str, Any], name: str) -> None:
    policy, _, share = name.partition(" ")
    if share:
        found = figures["hit_rate"][policy][figures["cache_shares"].index(int(share) / 100)]
    else:
        found = figures["next_layer_recall"][name] if name == "coactivation" else figures[name]
    here, reference = REFERENCE[name]
    assert round(found, 3) == here
    assert found == pytest.approx(reference, abs=LOOSE.get(name, 0.006))


# ---------------------------------------------------------------- against what an engine's cache really held

BUDGET = 4000 * 2**20  # of that engine's cache: experts only, nothing else counts in it


def replayed(engine: RouteTrace, *, budget: int = BUDGET, set_wise: bool = True, skip_repeats: bool = False) -> list[bool]:
    visits = [[(x.layer, x.expert) for x in v] for v in (*engine.visits(0), *engine.visits(1))]
    if skip_repeats:
        visits = [list(dict.fromkeys(v)) for v in visits]
    sizes = {(layer, e): n for layer, n in engine.expert_bytes.items() for e in range(128)}
    return replay_lru(visits, budget, sizes=sizes, set_wise=set_wise)


def disagreements(engine: RouteTrace, hits: list[bool]) -> list[Lookup]:
    decode = [x for x in engine.lookups if x.phase == 1]
    return [x for x, hit in zip(decode, hits[-len(decode) :], strict=True) if x.resident != hit]


def test_set_wise_lru_is_what_the_engine_held(engine: RouteTrace) -> None:
    """All 44,766 lookups agree, prefill and decode.

    The convention: one cache of 4000 MiB for all layers, which dense weights do not count in. A layer is
    looked up as a whole, for all prompt tokens in prefill and one token in decode; then its experts become the most
    recent in the order of tokens and ranks, the last use of an expert counting; then the least recent go
    until the rest fits.
    """
    hits = replayed(engine)
    assert [x.resident for x in engine.lookups] == hits
    assert len(hits) == 7_902 + 36_864
    assert sum(hits) == 29_597


@pytest.mark.parametrize(
    ("changes", "n_differ"),
    [
        ({"skip_repeats": True}, 7),  # in prefill an expert's recency is its last use, not its first
        ({"budget": BUDGET - 2**20}, 4),  # the budget is exact to less than one expert:
        ({"budget": BUDGET + 2**20}, 4),  # a mebibyte less or more already shows
        ({"budget": 4000 * 10**6}, 495),  # it is MiB, not MB
    ],
)
def test_any_other_convention_disagrees(engine: RouteTrace, changes: dict[str, Any], n_differ: int) -> None:
    assert len(disagreements(engine, replayed(engine, **changes))) == n_differ


# ---------------------------------------------------------------------------------------- against brute force


def most_hits(visits: list[list[int]], capacity: int, keep_visit: bool = False) -> int:
    """Try everything that a cache could keep after each visit, or all that holds what the visit used."""

    @cache
    def best(i: int, held: frozenset[int]) -> int:
        if i == len(visits):
            return 0
        there = held | set(visits[i])
        n = min(capacity, len(there))
        kept = [frozenset(keep) for keep in combinations(sorted(there), n)]
        if keep_visit:  # what a cache too small for the visit keeps is of the visit
            kept = [keep for keep in kept if keep >= set(visits[i]) or keep <= set(visits[i])]
        after = max(best(i + 1, keep) for keep in kept)
        return after + sum(key in held for key in visits[i])

    return best(0, frozenset())


@settings(max_examples=150)
@given(
    visits=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=7),
    capacity=st.integers(0, 4),
)
def test_belady_is_the_best_there_is(visits: list[list[int]], capacity: int) -> None:
    assert sum(replay_belady(visits, capacity)) == most_hits(visits, capacity)
    singles = [[key] for visit in visits for key in visit]
    assert sum(replay_belady(visits, capacity, set_wise=False)) == most_hits(singles, capacity)
    assert sum(replay_lru(visits, capacity)) <= sum(replay_belady(visits, capacity))
    held = sum(replay_belady(visits, capacity, keep_visit=True))
    assert held == most_hits(visits, capacity, keep_visit=True) <= most_hits(visits, capacity)
    if capacity >= 3:  # large enough for each visit
        assert max(sum(replay_lru(visits, capacity)), sum(replay_lfu(visits, capacity))) <= held


def test_a_worked_example_of_visits() -> None:
    """Two places for visits of two: a cache that holds a whole visit has nothing to choose, one that need not saves fetches."""
    visits = [[0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [0, 1], [3, 0], [0, 1]]
    assert replay_lru(visits, 2).count(False) == 9
    assert replay_lfu(visits, 2).count(False) == 9
    assert replay_belady(visits, 2, keep_visit=True).count(False) == 9
    assert replay_belady(visits, 2).count(False) == 6
