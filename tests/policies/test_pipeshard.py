"""Pipelined Sharding: predicted times, plans against trying every prefix, and exact timelines.

On the toy machine a layer of four experts is copied in 4000 ns. The GPU takes 100 for the dense part and for an expert, the CPU
300 for an expert and 100 a row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from moesim.policies.registry import make_policy
from moesim.policies.systems.pipeshard import PipeShard, Shard, ShardPlan, State, predicted_time, shard_plan
from moesim.records import Records
from moesim.testing import FakeView
from tests.engine.engine_kit import play, tiny_model, workload

MB = 1_000_000


# --------------------------------------------------------------------------------------------------------- predicted times
def test_two_streamed_splits_behind_the_cpu() -> None:
    streamed = Shard("ffn", 300 * MB, 1, 9)
    shards = [Shard("ffn", 0, 1, 6), streamed, streamed]  # ms; 25 GB/s are 25 MB a ms
    assert predicted_time(shards, ["cpu", "streamed", "streamed"], 25 * MB) == max(6, 12) + max(1, 12) + 1 == 25
    assert predicted_time(shards, ["cpu", "streamed", "streamed"], 25 * MB, cpu_rate=0.4) == 15 + 12 + 1
    assert predicted_time(shards, ["cpu"] * 3, 25 * MB, cpu_rate=0.4) == 24, "nothing is streamed"
    assert predicted_time(shards, ["streamed", "pinned", "pinned"], 25 * MB) == 0 + 1 + 2
    assert predicted_time(shards, ["pinned", "streamed", "cpu"], 25 * MB) == 12 + 1 + 9


def restated_time(shards: Sequence[Shard], states: Sequence[State], rate: float, cpu_rate: float) -> float:
    """Walk over shards instead of splits: each copy hides behind what runs from the copy before to the first change of state."""
    where = [i for i, state in enumerate(states) if state == "streamed"]
    size = {i: shards[i].n_bytes + shards[i].kv_bytes for i in where}
    time = sum(shards[i].new_kv_bytes for i in where) / rate
    if where and where[0] == 0:
        time += size[0] / rate
    i = 0
    while i < len(shards):
        j = i + 1
        while states[i] != "streamed" and j < len(shards) and states[j] == states[i]:
            j += 1
        run = sum(s.cpu if states[i] == "cpu" else s.gpu for s in shards[i:j])
        following = [size[w] for w in where if w > i]
        copy = following[0] / rate if following and (i == 0 or states[i] == "streamed") else 0
        time += max(run / cpu_rate if copy and states[i] == "cpu" else run, copy)
        i = j
    return time


def restated_plan(shards: Sequence[Shard], budget: float, rate: float, scratch: int, cpu_rate: float) -> ShardPlan:
    """Try every prefix of every strategy."""
    n = len(shards)
    order = [*range(0, n - 1, 2), n - 1, *range(1, n - 1, 2)]  # attention, output, FFNs
    size = [s.n_bytes + s.kv_bytes for s in shards]

    def used(states: Sequence[State], buffers: float) -> bool:
        return 1.5 * scratch + sum(b for b, state in zip(size, states, strict=True) if state == "pinned") + buffers <= budget

    def filled(first: Sequence[int], rest: dict[str, State]) -> list[State]:
        return ["pinned" if i in first or not size[i] else rest[shards[i].kind] for i in range(n)]

    cpu: dict[str, State] = dict.fromkeys(("attention", "ffn", "output"), "cpu")
    all_cpu = filled((), cpu)
    found: list[tuple[str, list[State], int]] = []
    if used(["pinned"] * n, 0):
        found.append(("all", ["pinned"] * n, 0))
    without: list[State] = [*["pinned"] * (n - 1), "cpu"]  # type: ignore[list-item]
    if used(without, 0):
        found.append(("all but output", without, 0))
    static = [states for k in range(n + 1) if used(states := filled(order[:k], cpu), 0)]
    if static:
        found.append(("static attention", static[-1], 0))
    half = n // 2
    ffn_buffer, attention_buffer = max(size[1:-1:2]), max(size[0:-1:2])
    ffns = [s for k in range(half, n + 1) if used(s := filled(order[:k], {**cpu, "ffn": "streamed"}), ffn_buffer)]
    attentions = [s for k in range(half) if used(s := filled(order[:k], {**cpu, "attention": "streamed"}), attention_buffer)]
    if ffns or attentions:
        found.append(("streamed attention", (ffns or attentions)[-1], 1))
    every = [s for k in range(n + 1) if used(s := filled(range(k), dict.fromkeys(cpu, "streamed")), 2 * max(size))]
    if every:
        found.append(("all streamed", every[-1], 2))
    plans = [
        ShardPlan(name, tuple(states), slots, restated_time(shards, states, rate, cpu_rate)) for name, states, slots in found
    ]
    fallback = ShardPlan("static attention", tuple(all_cpu), 0, restated_time(shards, all_cpu, rate, cpu_rate))
    best = min([plan.time for plan in plans], default=0)
    return next((plan for plan in plans if plan.time == best), fallback)


def test_plans_are_the_best_of_all_prefixes() -> None:
    draw = random.Random(20260101)
    chosen: dict[str, int] = {}
    for _ in range(400):
        shards: list[Shard] = []
        for _ in range(draw.randint(1, 4)):
            kv = draw.choice([0, 2])
            shards += [Shard("attention", draw.choice([0, 3, 4]), 1, draw.randint(1, 9), kv, kv and 1),
                       Shard("ffn", draw.randint(4, 12), draw.randint(1, 3), draw.randint(4, 60))]  # fmt: skip
        shards.append(Shard("output", draw.randint(0, 6), 1, draw.randint(1, 9)))
        total = sum(s.n_bytes + s.kv_bytes for s in shards)
        budget, scratch = draw.randint(0, total + 6), draw.randint(0, 3)
        rate, cpu_rate = draw.choice([0.5, 2.0, 8.0]), draw.choice([1.0, 0.5])
        plan = shard_plan(shards, budget, rate, scratch=scratch, cpu_rate=cpu_rate)
        assert plan == restated_plan(shards, budget, rate, scratch, cpu_rate)
        chosen[plan.strategy] = chosen.get(plan.strategy, 0) + 1
    assert len(chosen) == 5 and min(chosen.values()) > 5, chosen


# --------------------------------------------------------------------------------------------------------------- timelines
TOKEN = [[0, 1]] * 3


def run(requests: Any, slots: int, *, prompt: int = 0, n_layers: int = 3) -> Records:
    work = workload([[row[:n_layers] for row in request] for request in requests], prompt=prompt)
    return play(make_policy("pipeshard"), work, model=tiny_model(n_layers=n_layers), slots={"gpu0": slots})


def devices(records: Records, step: int) -> list[str]:
    """Say for each layer who computed it."""
    found = {t.layer: t.device for t in records.tasks if t.step == step and t.expert >= 0}
    return [found[layer] for layer in sorted(found)]


def test_a_single_row_leaves_to_the_cpu_what_is_not_pinned() -> None:
    # 4000 ns to stream a layer against 800 on the CPU. Two layers of four fit nine slots.
    records = run([[TOKEN] * 2], 9)
    assert [devices(records, step) for step in (0, 1)] == [["gpu0", "gpu0", "cpu0"]] * 2
    assert not records.transfers
    assert run([[TOKEN]], 12).transfers == [] and devices(run([[TOKEN]], 12), 0) == ["gpu0"] * 3


def test_a_prompt_streams_whole_layers_through_one_buffer() -> None:
    # 40 rows: 9200 ns for a layer on the CPU. One layer is pinned; with one buffer a copy begins with the attention before it.
    records = run([[TOKEN] * 40], 8, prompt=40)
    assert devices(records, 0) == ["gpu0"] * 3
    copies = [(t.start, t.layer, t.expert) for t in records.transfers]
    assert [(layer, expert) for _, layer, expert in copies] == [(layer, e) for layer in (1, 2) for e in range(4)]
    end = {layer: max(t.end for t in records.tasks if t.layer == layer and t.expert >= 0) for layer in range(3)}
    assert copies[0][0] == 0, "with the first split"
    assert end[1] == 4000 + 200 and copies[4][0] == end[1], "the buffer is free, and the next layer begins"
    assert end[2] == end[1] + 4000 + 200
    assert [(e.layer, e.reason) for e in records.evictions] == [(1, "drop")] * 4 + [(2, "drop")] * 4


def test_another_batch_size_changes_what_is_pinned() -> None:
    # The prompt pins one layer and streams two; a row alone has two layers pinned, so that layer 1 is copied to stay.
    records = run([[TOKEN] * 42], 8, prompt=40)
    assert devices(records, 1) == ["gpu0", "gpu0", "cpu0"] == devices(records, 2)
    again = [t for t in records.transfers if t.start >= records.steps[1].begin]
    assert [(t.layer, t.expert) for t in again] == [(1, e) for e in range(4)]
    assert min(t.start for t in records.tasks if (t.step, t.layer) == (1, 1) and t.expert >= 0) == again[-1].end
    # A second prompt keeps the prefix, and gives the second layer up.
    both = run([[TOKEN] * 42] * 2, 8, prompt=40)
    assert {t.layer for t in both.transfers} == {1, 2}


def test_a_row_alone_costs_its_experts_and_many_rows_cost_all() -> None:
    view, policy = FakeView(tiny_model(n_layers=1)), PipeShard()
    policy.place(view)
    for rows, active, each in ((1, 2, 1), (2, 4, 1), (3, 4, 2), (40, 4, 20)):
        ffn = policy._shards(rows, view)[1]
        costs = view.costs
        assert ffn.gpu == costs.first_extra_ns("gpu0") + active * costs.expert_ns("gpu0", each)
        assert ffn.cpu == costs.first_extra_ns("cpu0") + active * costs.expert_ns("cpu0", each)
