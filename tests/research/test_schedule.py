"""One layer as it is executed: the evaluator against the engine, the best schedule against brute force, the bound below both."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from experiments.research.tables.schedule import Layer, Piece, best_order, executed_schedule, layer_lower_bound, optimal_schedule
from moesim.policy import Copy, Fetch, Routed, Run, View
from moesim.records import Records
from tests.engine.engine_kit import Script, cpu, device, machine, play, tiny_model, workload

FIVE = Layer([2, 2, 2, 2, 2], [1, 1, 5, 4, 1], [0, 0, 0, 1, 1], 3)  # HybriMoE's figure 5 describes such a layer


def random_layer(rng: random.Random, n: int, same_gpu_time: bool = False) -> Layer:
    gpu = [rng.randint(1, 6)] * n if same_gpu_time else [rng.randint(1, 6) for _ in range(n)]
    return Layer(gpu, [rng.randint(1, 12) for _ in range(n)], [rng.random() < 0.4 for _ in range(n)], rng.randint(0, 7))


# ------------------------------------------------------------------------------------------------------------ executing


def test_the_gpu_takes_what_is_there_or_waits_in_order():
    layer = Layer([2, 2, 2], [9, 9, 9], [0, 1, 1], 3)
    ready = executed_schedule(layer, gpu=[0, 1, 2], cpu=[], loads=[0])
    assert ready.gpu == (Piece(1, 0, 2), Piece(2, 2, 4), Piece(0, 4, 6))
    waiting = executed_schedule(layer, gpu=[0, 1, 2], cpu=[], loads=[0], in_order=True)
    assert waiting.gpu == (Piece(0, 3, 5), Piece(1, 5, 7), Piece(2, 7, 9))
    assert (ready.makespan, waiting.makespan) == (6, 9)


def test_what_arrives_at_the_instant_at_which_the_gpu_is_free_is_ready():
    layer = Layer([3, 1, 1], [9, 9, 9], [1, 0, 1], 3)
    assert [p.expert for p in executed_schedule(layer, [0, 1, 2], [], [1]).gpu] == [0, 1, 2]


def test_transfers_follow_what_is_on_its_way():
    layer = Layer([2, 2], [9, 9], [0, 0], 3)
    found = executed_schedule(layer, [0, 1], [], [1], arriving={0: 1})
    assert found.link == (Piece(1, 1, 4),)
    assert found.gpu == (Piece(0, 1, 3), Piece(1, 4, 6))


@pytest.mark.parametrize("seed", range(40))
def test_the_evaluator_says_what_the_engine_does(seed: int):
    """Random layers, splits and orders through the engine: the same nanoseconds for every expert and transfer."""
    rng = random.Random(seed)
    n, n_rows = rng.randint(2, 9), rng.randint(1, 6)
    top_k = rng.randint(1, min(4, n))
    rows = [rng.sample(range(n), top_k) for _ in range(n_rows)]
    loads = [sum(e in row for row in rows) for e in range(n)]
    active = [e for e in range(n) if loads[e]]
    resident = [e for e in range(n) if rng.random() < 0.4]
    gpu_base, gpu_each, cpu_each = rng.randint(50, 900), rng.randint(0, 200), rng.randint(50, 500)
    on_cpu = [e for e in active if rng.random() < 0.4]
    on_gpu = [e for e in active if e not in on_cpu]
    rng.shuffle(on_cpu)
    rng.shuffle(on_gpu)
    missing = [e for e in on_gpu if e not in resident]
    early = missing[:1] if rng.random() < 0.5 else []  # fetched at LayerBegin: on its way when the layer is routed
    moved = [e for e in missing if e not in early]
    rng.shuffle(moved)

    def routed(event: Routed, view: View) -> list[object]:
        answer: list[object] = [Run(0, on_cpu, "cpu0")] if on_cpu else []
        return [*answer, Fetch(0, moved, "gpu0"), Run(0, on_gpu, "gpu0")] if on_gpu else answer

    script = Script(
        {("LayerBegin", 0, 0): [Fetch(0, early, "gpu0")] if early else []},
        copies=[Copy(0, resident, "gpu0")] if resident else [],
        routed=routed,
        slots=n,
    )
    hardware = machine(
        {"gpu0": device("gpu", expert_ns=gpu_base, per_row_ns=gpu_each), "cpu0": cpu(expert_ns=300, per_row_ns=cpu_each)}
    )
    model = tiny_model(n_layers=1, n_experts=n, top_k=top_k)
    weights = [1 / top_k] * top_k
    records = play(
        script, workload([[[row] for row in rows]], n_experts=n, weights=weights, prompt=n_rows), hardware, model=model
    )
    at = records.lookups[0].time
    crossed = len([row for row in rows if set(row) & set(on_cpu)])
    layer = Layer(
        [gpu_base + gpu_each * w if w else 0 for w in loads],
        [300 + cpu_each * w if w else 0 for w in loads],
        [e in resident for e in range(n)],
        1000,
    )
    there = dict.fromkeys(early, 1000 - at)
    crossing = 10 + 10 * crossed  # of the activations, either way
    found = executed_schedule(
        layer, on_gpu, on_cpu, moved, arriving=there, cpu_begin=crossing, cpu_return=crossing if on_cpu else 0
    )
    assert found.makespan == records.layers[0].end - at
    assert found.gpu == _pieces(records, "gpu0", at)
    assert found.cpu == _pieces(records, "cpu0", at)
    assert found.link == tuple(Piece(t.expert, t.start - at, t.end - at) for t in records.transfers if t.expert not in early)


def _pieces(records: Records, name: str, at: int) -> tuple[Piece, ...]:
    return tuple(Piece(t.expert, t.start - at, t.end - at) for t in records.tasks if t.expert >= 0 and t.device == name)


# ------------------------------------------------------------------------------------------------------------- the best


def brute_force_schedule(layer: Layer) -> float:
    """Least makespan over all splits, all orders of transfers and all orders of the GPU, waiting for each expert."""
    active = layer.active
    best = float("inf")
    for code in range(1 << len(active)):
        chosen = [e for i, e in enumerate(active) if code >> i & 1]
        rest = [e for e in active if e not in chosen]
        for loads in permutations([e for e in chosen if not layer.resident[e]]):
            for gpu in permutations(chosen):
                best = min(best, executed_schedule(layer, gpu, rest, loads, in_order=True).makespan)
    return best


def test_the_best_schedule_of_the_worked_example():
    found = optimal_schedule(FIVE)
    assert found.makespan == 5
    assert brute_force_schedule(FIVE) == 5


def test_the_best_is_the_best_of_all_orders():
    rng = random.Random(1)
    for _ in range(120):
        layer = random_layer(rng, rng.randint(1, 5))
        assert optimal_schedule(layer).makespan == brute_force_schedule(layer), layer


def test_no_other_order_is_better_than_the_best_order():
    layer = Layer([1, 6, 4], [9, 9, 9], [0, 0, 0], 3)
    assert best_order(layer, [0, 1, 2]) == ([1, 2, 0], [1, 2, 0])
    best = executed_schedule(layer, *_with(best_order(layer, [0, 1, 2])))
    assert best.makespan == 14
    assert executed_schedule(layer, [0, 2, 1], [], [0, 2, 1]).makespan == 16  # the shortest first


def _with(order: tuple[list[int], list[int]]) -> tuple[list[int], list[int], list[int]]:
    return order[0], [], order[1]


@pytest.mark.parametrize("same", [True, False])
def test_enumeration_counting_and_program_find_the_same(same: bool):
    rng = random.Random(2)
    for _ in range(25):
        layer = random_layer(rng, rng.randint(2, 10), same)
        enumerated = optimal_schedule(layer)
        assert optimal_schedule(layer, enumerate_up_to=0).makespan == enumerated.makespan, layer


# ------------------------------------------------------------------------------------------------------------- the bound


def test_the_bound_is_never_above_the_best_and_pipelining_only_tightens_it():
    rng = random.Random(3)
    tighter = 0
    for _ in range(60):
        layer = random_layer(rng, rng.randint(1, 8))
        best, bound = optimal_schedule(layer).makespan, layer_lower_bound(layer)
        work = layer_lower_bound(layer, pipelined=False)
        assert work <= bound + 1e-6 <= best + 2e-6, layer
        tighter += work < bound - 1e-3
    assert tighter > 10
