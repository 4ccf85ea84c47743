"""exllamav3: who changes places, from how many rows on an expert is streamed, and exact timelines."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import CapacityError
from moesim.policies.registry import make_policy
from moesim.policies.systems.exllamav3 import swaps
from moesim.records import Records
from moesim.testing import FakeView, tiny_model
from tests.engine.engine_kit import cpu, gpu, link, machine, play, transfers, workload
from tests.engine.engine_kit import tiny_model as toy_model

OFTEN = {"swap_interval": 2, "swap_floor": 1.0, "swap_hysteresis": 2.0}


def run(options: dict[str, Any], requests: Any, slots: int, *, prompt: int = 0, hardware: Any = None, **more: Any) -> Records:
    """Run requests on one layer of four experts, two a row."""
    model = toy_model(n_layers=1)
    policy = make_policy({"name": "exllamav3", **options})
    work = workload([[[row] for row in request] for request in requests], prompt=prompt, **more)
    return play(policy, work, hardware, model=model, slots={"gpu0": slots})


def where(records: Records) -> list[tuple[list[int], list[int]]]:
    """Return who ran on the GPU, and who on the CPU, in each step."""
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in records.steps]
    for task in records.tasks:
        if task.expert >= 0:
            found[task.step][task.device == "cpu0"].append(task.expert)
    return [(sorted(on_gpu), sorted(on_cpu)) for on_gpu, on_cpu in found]


# -------------------------------------------------------------------------------------------------------------- algorithms
def test_swaps_by_hand() -> None:
    counts = [2.0] * 64
    for expert, count in {5: 90, 20: 60, 50: 400, 60: 120, 63: 30}.items():
        counts[expert] = count
    assert sum(counts) == 818
    assert swaps(counts, range(48), 64) == [(0, 50), (1, 60)], "floor 102.25: 63 stays"
    assert swaps(counts, range(48), 384, floor=2.0, hysteresis=1.25) == [(0, 50), (1, 60), (2, 63)], "floor 25.56"
    assert swaps(counts, range(48), 1) == [(0, 50)] and swaps(counts, range(48), 0) == []
    counts[61] = 120
    assert swaps(counts, range(48), 2)[1] == (1, 61), "of equals the higher id comes first"


# --------------------------------------------------------------------------------------------------------------- placement
def test_the_last_experts_of_each_layer_are_on_the_cpu() -> None:
    for options, slots, on_gpu in (
        ({}, 23, [[0, 1, 2, 3, 4]] * 4),
        ({"cpu_split": 6}, 23, [[0, 1]] * 4),
        ({"cpu_split": 9}, 4, [[0]] * 4),  # more than there are: one stays
        ({"cpu_layers": 2}, 16, [[], [], [*range(8)], [*range(8)]]),
        ({}, 40, [[*range(8)]] * 4),
    ):
        policy: Any = make_policy({"name": "exllamav3", **options})
        placement = policy.place(FakeView(slots=slots))
        found: list[Any] = [[]] * 4
        for copy in placement.copies:
            found[copy.layer] = list(copy.experts)
        assert found == on_gpu, options
    with pytest.raises(
        CapacityError, match=r"at most 2 experts of each layer.*got 6; raise cache.ratio to 6/8, or raise cpu_split to 6"
    ):
        make_policy({"name": "exllamav3", "cpu_split": 2}).place(FakeView(slots=8))
    with pytest.raises(CapacityError, match=r"at most 1 layers.*got 2; raise cpu_layers to 3"):
        make_policy({"name": "exllamav3", "cpu_layers": 2}).place(FakeView(slots=8))


def test_the_ring_holds_up_to_24_experts_a_slot_and_no_larger_ones() -> None:
    policy: Any = make_policy("exllamav3")
    small, large = tiny_model(), tiny_model(hidden=4096, expert_intermediate=2048)
    pools = {pool.name: pool.sizes(4)[0] for pool in policy.place(FakeView(small, slots=8)).pools}
    assert pools["staging"] == 2 * 24 * small.expert_bytes(0)
    assert large.expert_bytes(0) > 32 << 20
    assert [pool.name for pool in policy.place(FakeView(large, slots=8)).pools] == ["cache"]


# --------------------------------------------------------------------------------------------------------------- timelines


def test_a_prompt_streams_what_has_enough_rows() -> None:
    # Two experts are on the GPU. Of 8 rows expert 2 gets 6 and expert 3 two. The tokens cross in 90.
    rows = [[0, 2]] * 6 + [[1, 3]] * 2
    options = {"swap_budget": 0, "stream_min_rows": 8, "stream_threshold": 6}
    records = run(options, [rows], 2, prompt=8)
    assert where(records) == [([0, 1, 2], [3])]
    assert transfers(records) == [(190, 1190, "cpu0->gpu0", "demand 0/2")]
    assert [(e.expert, e.reason) for e in records.evictions] == [(2, "drop")]
    assert where(run({**options, "stream_threshold": 7}, [rows], 2, prompt=8)) == [([0, 1], [2, 3])]
    assert where(run({**options, "stream_min_rows": 9}, [rows], 2, prompt=8)) == [([0, 1], [2, 3])]
    whole = {"cpu_layers": 1, "stream_min_rows": 8, "stream_threshold": 3}
    assert where(run(whole, [rows], 2, prompt=8)) == [([0, 2], [1, 3])]


def test_the_rate_of_the_link_says_how_many_rows_are_enough() -> None:
    rows = [[0, 2]] * 20 + [[1, 3]] * 12
    fast, slow = (machine({"gpu0": gpu(), "cpu0": cpu()}, {"cpu0->gpu0": link(rate), "gpu0->cpu0": link()}) for rate in (25, 12))
    for rule, hardware, on_gpu in (("root", fast, [0, 1, 2, 3]), ("root", slow, [0, 1, 2, 3]), ("linear", fast, [0, 1, 2]),
                                   ("linear", slow, [0, 1])):  # fmt: skip
        records = run({"swap_budget": 0, "stream_rule": rule}, [rows], 2, prompt=32, hardware=hardware)
        assert where(records)[0][0] == on_gpu, (rule, hardware)


def test_places_change_between_generations_only() -> None:
    # The prompt's row and three decode steps use 2 and 3 of the CPU. Two passes make an exchange due, a new prompt begins it.
    row = [2, 3]
    records = run(OFTEN, [[row] * 4, [row] * 3], 2, prompt=1, batch_size=1)
    on_cpu, on_gpu = ([], [2, 3]), ([2, 3], [])
    assert where(records) == [on_cpu] * 4 + [on_gpu] * 3
    assert [(t.cause, t.expert) for t in records.transfers] == [("demand", 3), ("demand", 2)]
    assert [(e.expert, e.reason) for e in records.evictions] == [(0, "drop"), (1, "drop")]
    begin = records.steps[4].begin
    first = min(t.start for t in records.tasks if t.step == 4 and t.expert >= 0)
    assert first == max(t.end for t in records.transfers) == begin + 2000, "no expert runs before all are there"


def test_counts_fade_and_the_budget_goes_to_the_first_layers() -> None:
    policy: Any = make_policy({"name": "exllamav3", **OFTEN, "swap_budget": 3})
    view = FakeView(slots=8)
    view.use(policy.place(view))
    policy._counts = [[0.0] * 4 + [5.0, 8.0, 0.0, 0.0] for _ in range(4)]
    actions = policy._exchange()
    assert [tuple(action.experts) for action in actions] == [(0, 1), (5, 4), (0,), (5,)]
    assert [sum(counts) for counts in policy._counts] == [6.5, 6.5, 13.0, 13.0], "layers beyond the budget are not looked at"


@pytest.mark.parametrize(("on_cpu", "served"), [(0, ([1, 3], [])), (1, ([3], [1])), (9, ([3], [1]))])
def test_a_single_row_is_streamed_but_for_its_last_choices(on_cpu: int, served: tuple[list[int], list[int]]) -> None:
    """Whole layers on the CPU; at least one expert is streamed, and all are there before one is computed."""
    records = run({"cpu_layers": 1, "stream_decode": True, "stream_decode_cpu": on_cpu}, [[[3, 1]]], 0)
    assert where(records) == [served]
    copies = [t for t in records.transfers if t.expert >= 0]
    assert [t.expert for t in copies] == [3, 1][: len(served[0])]
    assert min(t.start for t in records.tasks if t.expert >= 0 and t.device == "gpu0") >= copies[-1].end
    assert where(run({"cpu_layers": 1, "stream_decode": True}, [[[3, 1]], [[3, 1]]], 0)) == [([], [1, 3])], "two rows are not"
