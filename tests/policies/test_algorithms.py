"""Decision algorithms as pure functions: worked examples, bounds, and agreement with exhaustive search."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from moesim.policies.parts import Plan
from moesim.policies.parts.assignment import (
    beam_assignment,
    brute_force_assignment,
    exact_assignment,
    fiddler_code_assignment,
    greedy_assignment,
    layer_costs,
    threshold_layer_plan,
)
from moesim.policies.parts.placement import per_layer_top_with_remainder
from moesim.policies.parts.replacement import workload_aware_swap
from moesim.policies.registry import make_policy
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.systems.mixtral_offloading import mixtral_offloading_plan
from tests.engine.engine_kit import play, tiny_model, workload

A, B, C, D, E = range(5)
SEED = 20260101
LOADS = (1, 1, 1, 2, 2, 3, 4, 6, 9, 14)


def _fiddler_enumeration(loads: list[int], resident: list[int]) -> tuple[set[int], int]:
    """All assignments upwards from 0, first strict minimum of the sum: the CPU's experts, and the cost."""
    n = len(loads)
    best, best_cost = 0, None
    for code in range(1 << n):
        cost = 0
        for e in range(n):
            cost += 7 * loads[e] if code >> e & 1 else (0 if resident[e] else 70)
        if best_cost is None or cost < best_cost:
            best, best_cost = code, cost
    assert best_cost is not None
    return {e for e in range(n) if best >> e & 1}, best_cost


def random_costs(rng: random.Random) -> tuple[list[float], list[float]]:
    """One layer: 3-9 active experts, any number cached, a unit of CPU time a row."""
    n = rng.randint(3, 9)
    loads = [rng.choice(LOADS) for _ in range(n)]
    g, x = rng.choice((0.5, 1, 2)), rng.choice((2, 3, 6))
    cached = set(rng.sample(range(n), rng.randint(0, n)))
    return layer_costs(loads, [0 if e in cached else x for e in range(n)], [g] * 15, range(15))


ASSIGNMENTS: list[Any] = [greedy_assignment, exact_assignment, partial(exact_assignment, enumerate_up_to=0),
                          brute_force_assignment, beam_assignment]  # fmt: skip


@pytest.mark.parametrize("assign", ASSIGNMENTS)
def test_an_expert_that_one_device_runs_for_nothing_is_assigned(assign: Any) -> None:
    """Expert 2 has no rows; 0 costs the GPU nothing, 3 the CPU."""
    plan = assign([0, 3, 0, 9], [8, 9, 0, 0])
    assert (set(plan.gpu), set(plan.cpu), plan.makespan) == ({0, 1}, {3}, 3)


# ------------------------------------------------------------------------------------------------------------- greedy
def test_greedy_follows_the_worked_example_of_dali() -> None:
    """Transfer 3, GPU 2, CPU one a row; A(1) B(1) C(5) uncached, D(4) E(1) cached."""
    gpu, cpu = layer_costs([1, 1, 5, 4, 1], [3, 3, 3, 0, 0], [0, 2, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5])
    assert [abs(g - c) for g, c in zip(gpu, cpu, strict=True)] == [2, 2, 2, 2, 1]
    plan = greedy_assignment(gpu, cpu)
    assert plan == Plan(gpu=(C, D), cpu=(A, B, E), gpu_total=5, cpu_total=3)
    assert plan.makespan == 5


def test_greedy_sends_ties_to_the_gpu_and_orders_equal_differences_by_id() -> None:
    assert greedy_assignment([2], [2]).gpu == (0,)
    assert greedy_assignment([3, 3], [3, 3]) == Plan((0,), (1,), 3, 3)


def test_greedy_is_never_better_than_exact_and_close_to_it_on_average(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(SEED)
    ratios = []
    for _ in range(1000):
        gpu, cpu = random_costs(rng)
        greedy, exact = greedy_assignment(gpu, cpu).makespan, exact_assignment(gpu, cpu).makespan
        assert exact <= greedy
        ratios.append(greedy / exact)
    mean = sum(ratios) / len(ratios)
    with capsys.disabled():
        print(f"\nplanned makespan, greedy / exact: mean {mean:.4f}, worst {max(ratios):.3f}, {len(ratios)} layers")
    assert 1.0 < mean < 1.2


# ------------------------------------------------------------------------------------------------ exact, beam, extremes
@pytest.mark.parametrize("n", range(1, 11))
def test_exact_agrees_with_enumeration(n: int) -> None:
    rng = random.Random(SEED + n)
    for _ in range(12):
        gpu = [rng.randint(0, 9) for _ in range(n)]
        cpu = [rng.randint(0, 20) for _ in range(n)]
        exact, brute = exact_assignment(gpu, cpu, enumerate_up_to=0), brute_force_assignment(gpu, cpu)
        assert exact.makespan == brute.makespan
        assert sorted(exact.gpu + exact.cpu) == sorted(brute.gpu + brute.cpu)


def test_exact_keeps_nanoseconds_apart() -> None:
    """Costs of a real layer: six digits of a nanosecond count must not be lost to the solver's tolerance."""
    rng = random.Random(SEED)
    for _ in range(20):
        gpu = [rng.randint(400_000, 14_000_000) for _ in range(8)]
        cpu = [rng.randint(2_000_000, 90_000_000) for _ in range(8)]
        exact = exact_assignment(gpu, cpu, enumerate_up_to=0).makespan
        brute = brute_force_assignment(gpu, cpu).makespan
        assert exact <= brute * (1 + 1e-6)


def test_exact_of_many_experts_is_never_worse_than_greedy() -> None:
    rng = random.Random(SEED)
    for n in (24, 40, 64):
        gpu = [rng.choice((0, 2000, 3000)) for _ in range(n)]
        cpu = [1000 * rng.choice(LOADS) for _ in range(n)]
        assert exact_assignment(gpu, cpu).makespan <= greedy_assignment(gpu, cpu).makespan


def test_exact_of_nothing_is_empty() -> None:
    assert exact_assignment([0, 0], [0, 0]) == Plan((), (), 0, 0)


def test_brute_force_refuses_too_many_experts() -> None:
    with pytest.raises(ValueError, match="at most 16 experts, got 17"):
        brute_force_assignment([1] * 17, [1] * 17)


def test_a_wide_beam_is_exact_and_width_one_never_beats_it() -> None:
    rng = random.Random(SEED)
    for _ in range(50):
        gpu, cpu = random_costs(rng)
        best = brute_force_assignment(gpu, cpu).makespan
        assert beam_assignment(gpu, cpu, width=1 << len(gpu)).makespan == best
        assert beam_assignment(gpu, cpu, width=1).makespan >= best


def test_what_the_first_expert_of_a_device_takes_is_counted_once() -> None:
    """Every plan's totals are the sums of its costs, and the extra of a device that has any; the searches find the least."""
    rng = random.Random(SEED)
    extras: set[tuple[bool, bool]] = set()
    for _ in range(150):
        gpu, cpu = random_costs(rng)
        first = {"gpu_first": rng.choice((0, 1, 5)), "cpu_first": rng.choice((0, 2, 7))}
        n = len(gpu)

        def total(cost: list[float], ids: Sequence[int], extra: float) -> float:
            return sum(cost[e] for e in ids) + (extra if ids else 0)

        least = min(
            max(
                total(gpu, [e for e in range(n) if code >> e & 1], first["gpu_first"]),
                total(cpu, [e for e in range(n) if not code >> e & 1], first["cpu_first"]),
            )
            for code in range(1 << n)
        )
        greedy = greedy_assignment(gpu, cpu, **first)
        exact = [exact_assignment(gpu, cpu, most, **first) for most in (0, 10)]
        beam = beam_assignment(gpu, cpu, 1 << n, **first)
        for plan in (greedy, *exact, beam):
            assert sorted(plan.gpu + plan.cpu) == list(range(n))
            assert plan.gpu_total == pytest.approx(total(gpu, plan.gpu, first["gpu_first"]))
            assert plan.cpu_total == pytest.approx(total(cpu, plan.cpu, first["cpu_first"]))
        assert [plan.makespan for plan in (*exact, beam)] == pytest.approx([least] * 3)
        assert greedy.makespan >= least - 1e-9
        extras.add((bool(exact[0].gpu), bool(exact[0].cpu)))
    assert extras == {(True, True), (True, False), (False, True)}


# ------------------------------------------------------------------------------------------------------------ fiddler
@pytest.mark.parametrize("assign", [partial(exact_assignment, enumerate_up_to=0), brute_force_assignment])
def test_a_device_without_an_expert_takes_no_time(assign: Any) -> None:
    assert assign([1, 1], [9, 9], cpu_first=100).makespan == assign([9, 9], [1, 1], gpu_first=100).makespan == 2
    assert assign([50, 50], [60, 60], gpu_first=1, cpu_first=20).makespan == 80  # one each: 51 and 80


def test_fiddler_rule_equals_the_enumeration_of_its_code() -> None:
    rng = random.Random(SEED)
    for _ in range(1000):
        n = rng.randint(0, 6)  # of 8 there are 256 assignments, of which those of the others are a part
        loads = [rng.choice((0, 1, 5, 9, 10, 11, 30)) for _ in range(n)]
        resident = [rng.randint(0, 1) for _ in range(n)]
        plan = fiddler_code_assignment(loads, resident)
        on_cpu, cost = _fiddler_enumeration(loads, resident)
        assert tuple(e for e in sorted(on_cpu) if loads[e]) == plan.cpu
        assert tuple(e for e in range(n) if loads[e] and e not in on_cpu) == plan.gpu
        assert plan.gpu_total + plan.cpu_total == cost


def test_fiddlers_rule_compares_the_cpu_with_copy_and_compute_expert_by_expert() -> None:
    """A plan of the policy for random residents, rows and costs, against the rule as its page has it."""
    rng = random.Random(SEED)
    for _ in range(1000):
        n = rng.randint(1, 8)
        loads = [rng.choice((0, *LOADS)) for _ in range(n)]
        resident = [rng.randint(0, 1) for _ in range(n)]
        c, x, g = rng.choice((1, 2)), rng.choice((2, 3, 6)), rng.choice((0, 1, 2))
        policy = Fiddler()
        policy._resident, policy._waiting = [bytes(resident)], [[0 if here else x for here in resident]]
        policy._threshold_plan = threshold_layer_plan
        policy._cpu_ns = {w: c * w for w in loads}  # type: ignore[assignment]
        policy._gpu_ns = dict.fromkeys(loads, g)  # type: ignore[assignment]
        plan = policy.plan(0, loads)
        on_cpu = [e for e in range(n) if loads[e] and not resident[e] and c * loads[e] < x + g]
        assert list(plan.cpu) == on_cpu
        assert list(plan.gpu) == [e for e in range(n) if loads[e] and e not in on_cpu]


# ------------------------------------------------------------------------------------------------------------- caching
def test_mixtral_offloading_follows_its_worked_example() -> None:
    plan = mixtral_offloading_plan([4, 5, 6, 7], [0, 1, 4, 5, 6, 7], buffer_size=4)
    assert plan.compute == (4, 5, 6, 7, 0, 1)
    assert plan.order == (6, 7, 0, 1)
    assert plan.swaps == ((4, 0), (5, 1))
    assert plan.window == 2


def test_mixtral_offloading_moves_hits_to_the_recent_end() -> None:
    plan = mixtral_offloading_plan([4, 5, 6, 7], [4, 6], buffer_size=4)
    assert (plan.compute, plan.order, plan.swaps) == ((4, 6), (5, 7, 4, 6), ())


def test_mixtral_offloading_may_evict_what_it_has_just_loaded() -> None:
    plan = mixtral_offloading_plan([6, 7], [0, 1, 2, 3], buffer_size=4)
    assert plan.swaps == ((6, 0), (7, 1), (0, 2), (1, 3))
    assert plan.window == 2  # never more than there are residents


class ExpertCache:
    """Mixtral-Offloading's cache of a layer, load by load: each starts as the expert loaded before it is taken."""

    def __init__(self, residents: Sequence[int], buffer_size: int) -> None:
        self.experts = OrderedDict.fromkeys(residents)
        self._most = buffer_size - 1
        self._swaps: list[tuple[int, int]] = []
        self._waiting: deque[int] = deque()
        self._under_way: deque[int] = deque()

    def _start(self) -> None:
        victim, _ = self.experts.popitem(last=False)
        newcomer = self._waiting.popleft()
        self.experts[newcomer] = None
        self._swaps.append((victim, newcomer))
        self._under_way.append(newcomer)

    def visit(self, active: Sequence[int]) -> tuple[Any, ...]:
        """Serve a layer visit; what is computed, who is resident then, the swaps, and the most that were under way."""
        order = sorted(sorted(active), key=lambda e: e not in self.experts)
        self._waiting = deque(e for e in order if e not in self.experts)
        self._swaps = []
        for e in order:
            if e in self.experts:
                self.experts.move_to_end(e)
        while self._waiting and len(self._under_way) < min(self._most, len(self.experts)):
            self._start()
        most = len(self._under_way)
        for e in order:
            if self._under_way and e == self._under_way[0]:
                self._under_way.popleft()
                if self._waiting:
                    self._start()
        return tuple(order), tuple(self.experts), tuple(self._swaps), most


def test_mixtral_offloading_against_a_restatement_of_its_cache() -> None:
    rng = random.Random(SEED)
    seen = set()
    for _ in range(300):
        n, size, buffer_size = 8, rng.randint(1, 7), rng.randint(2, 5)
        cache = ExpertCache(range(n - size, n), buffer_size)
        for _ in range(5):
            active = sorted(rng.sample(range(n), rng.randint(0, n)))
            plan = mixtral_offloading_plan(list(cache.experts), active, buffer_size)
            hits = not cache.experts.keys().isdisjoint(active)
            assert plan == cache.visit(active)
            seen.add((hits, len(plan.swaps) > size))
    assert seen == {(a, b) for a in (True, False) for b in (True, False)}


@pytest.mark.parametrize("slots", [4, 6, 10])
@pytest.mark.parametrize("buffer_size", [2, 4])
def test_mixtral_offloading_swaps_over_a_whole_run_as_its_cache_does(slots: int, buffer_size: int) -> None:
    rng = random.Random(SEED + slots)
    rows = [[rng.sample(range(6), 2) for _ in range(2)] for _ in range(25)]
    policy = make_policy({"name": "mixtral-offloading", "buffer_size": buffer_size})
    work = workload([rows[:12], rows[12:]], n_experts=6, batch_size=1)
    records = play(policy, work, model=tiny_model(n_experts=6), slots={"gpu0": slots})
    caches = [ExpertCache(range(6 - slots // 2, 6), buffer_size) for _ in range(2)]
    swaps = [(layer, *swap) for row in rows for layer, of in enumerate(row) for swap in caches[layer].visit(sorted(of))[2]]
    for link, moved in (("cpu0->gpu0", 2), ("gpu0->cpu0", 1)):
        found = [(t.layer, t.expert) for t in records.transfers if t.link == link]
        left = len(swaps) - len(found)  # copies out that the end of the run cuts off
        assert found == [(swap[0], swap[moved]) for swap in swaps][: len(found)]
        assert left == 0 if moved == 2 else left <= buffer_size
    assert len(swaps) > 10


def test_mixtral_offloading_without_a_cache_cannot_load() -> None:
    assert mixtral_offloading_plan([], [], 4) == ((), (), (), 0)
    with pytest.raises(ValueError, match="a resident that can be swapped for expert 2, got an empty cache"):
        mixtral_offloading_plan([], [2, 3], 4)


def test_workload_aware_swap_is_unconditional_unless_asked() -> None:
    assert workload_aware_swap([3, 3, 1, 0], [0, 1], u_size=1) == ([0], [2])
    assert workload_aware_swap([3, 3, 1, 0], [0, 1], u_size=1, only_if_better=True) == ([], [])


def test_workload_aware_swap_takes_the_smaller_of_residents_and_others() -> None:
    assert workload_aware_swap([1, 2, 3, 4], [0], u_size=8) == ([0], [3])
    assert workload_aware_swap([1, 2, 3, 4], [0, 1, 2], u_size=8) == ([0], [3])


def test_daop_start_gives_the_remainder_to_the_globally_most_frequent() -> None:
    frequency = [[0.1, 0.5, 0.45, 0.8], [0.2, 0.4, 0.9, 0.1]]
    assert per_layer_top_with_remainder(frequency, 5) == [[1, 2, 3], [1, 2]]
    assert per_layer_top_with_remainder(frequency, 1) == [[], [2]]
