"""MoE-Lightning: the published line, the plan against closed forms, and the double buffer to the nanosecond."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError
from moesim.model import load_model
from moesim.policies.algorithms.moe_lightning import (
    CARDS,
    PlanMachine,
    link_step_s,
    lowest_residents,
    offline_plan,
    plan_batch,
    search_batch,
    tokens_per_s,
)
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.testing import check_policy
from tests.engine.engine_kit import cpu, crossings, gpu, link, machine, play, tasks, tiny_model, transfers, workload

GIB = 2**30
L4 = PlanMachine(24 * GIB, 192e9, cpu_bytes_per_s=76e9, **CARDS["l4"])
SHARE = 0.055884688
MIXTRAL = load_model("mixtral-8x7b")
ATTENTION = 2 * 4096 * (2 * 4096 + 2 * 1024)
RELEASED = {"other_bytes": 32.0 * ATTENTION, "token_bytes": 44.6 * 4096 * 2}


# ------------------------------------------------------------------------------------------------------------------ plan
def test_the_published_line() -> None:
    """Prompt 77, 32 tokens, 14 micro-batches of 324, an L4 with a link of 16 GiB/s: from its share follow time and speed."""
    step = link_step_s(MIXTRAL, SHARE, 16 * GIB)
    assert round(step, 3) == 4.957
    assert round(tokens_per_s(324 * 14, 32, step), 2) == 944.66
    assert lowest_residents(8, SHARE) == []


def test_the_published_share_follows_from_a_count_without_embeddings() -> None:
    plan = plan_batch(MIXTRAL, L4, 77, 32, 324, 14, **RELEASED)
    assert plan is not None
    assert round(plan.expert_share, 9) == SHARE
    assert (plan.kv_share, round(plan.step_s, 3), round(plan.tokens_per_s, 2)) == (0, 4.957, 944.66)


def test_only_that_count_makes_a_round_number_of_what_is_left() -> None:
    """The 44.6 is inferred: what the published share leaves to each prompt token, for each count one may think of."""
    layer, embedding = 8 * MIXTRAL.expert_bytes(0), 32000 * 4096 * 2
    round_numbers, n_counts = [], 0
    for memory, attention, embeddings, buffers, partial in product(
        (24 * GIB, 24e9, 23 * GIB, 22.5 * GIB), (0, 32), (0, 1, 2), (0, 1, 2, 3), (True, False)
    ):
        # ``partial``: a buffer holds what is streamed of a layer, else all of it.
        kept = SHARE * layer * (32 - buffers * partial)
        left = 0.86 * memory - kept - attention * ATTENTION - embeddings * embedding - buffers * layer
        states = left / (324 * 77 * 4096 * 2)
        n_counts += 1
        if abs(states - round(states, 1)) < 3e-7:  # half of the share's last digit is 2e-7
            round_numbers.append((memory, attention, embeddings, buffers, partial, round(states, 1)))
    assert round_numbers == [(24 * GIB, 32, 0, 2, True, 44.6)]
    assert n_counts * 2 * 3e-7 / 0.1 < 2e-3  # that many would be round by chance


def test_the_published_step_has_room_for_nothing_else() -> None:
    """Counts that miss the line: a decimal link, attention outputs on the link, prefill in the time, all tokens' steps."""
    step = link_step_s(MIXTRAL, SHARE, 16 * GIB)
    assert round(link_step_s(MIXTRAL, SHARE, 16e9), 3) == 5.322
    assert round(step + 32 * 324 * 14 * 4096 * 2 / (16 * GIB), 3) == 5.026
    assert round(324 * 14 / step, 2) == 915.14
    assert round(324 * 14 * 32 / (31 * step + MIXTRAL.experts_bytes_total * (1 - SHARE) / (16 * GIB)), 2) == 915.14
    # A GPU whose operations and bytes do not overlap would be slower than the published step.
    dense = ATTENTION / 2
    apart = (8 * MIXTRAL.expert_bytes(0) + ATTENTION) / 285e9 + 2 * 324 * (dense + 2 * MIXTRAL.expert_params) / 104e12
    assert 32 * 14 * apart > step


def test_our_plan_of_the_published_batch_keeps_more() -> None:
    """The released code's count of GPU memory is not known: ours leaves room for twice the share. Both are bound by the link."""
    plan = plan_batch(MIXTRAL, L4, 77, 32, 324, 14)
    assert plan is not None
    layer = MIXTRAL.experts_bytes_total / 32
    prefill = 324 * 77 * 2 * (2 * 4096 + 2 * (4096 + 2 * 14336))
    room = 0.86 * 24 * GIB - MIXTRAL.non_expert_bytes - 2 * layer - prefill
    assert plan.expert_share == pytest.approx(room / (30 * layer))
    assert plan.expert_share == pytest.approx(0.114, abs=1e-3)
    assert plan.kv_share == 0
    assert plan.step_s == pytest.approx(link_step_s(MIXTRAL, plan.expert_share, 16 * GIB))
    assert plan.tokens_per_s == pytest.approx(tokens_per_s(324 * 14, 32, plan.step_s))


def test_of_equal_steps_the_plan_keeps_the_most_experts() -> None:
    """The slow GPU is the bound, so that many shares have the same step; the link's and the CPU's times are shorter."""
    layer = MIXTRAL.experts_bytes_total / 32
    for rows in (4, 36, 100):
        plan = plan_batch(MIXTRAL, replace(L4, gpu_bytes_per_s=20e9), 77, 32, rows, 14, **RELEASED)
        assert plan is not None
        assert plan.step_s > 2 * link_step_s(MIXTRAL, plan.expert_share, 16 * GIB)
        room = 0.86 * 24 * GIB - 32 * ATTENTION - 2 * layer - rows * 77 * 44.6 * 8192
        assert (plan.expert_share, plan.kv_share) == (pytest.approx(room / (30 * layer)), 0)


@pytest.mark.parametrize(
    ("name", "slow", "each_token"),
    [
        # of the cache of all layers in FP16; products of a query with keys, then with values, two operations each
        ("mixtral-8x7b", {"cpu_bytes_per_s": 1e6}, 32 * 2 * 8 * 128 * 2 / 1e6),
        ("mixtral-8x7b", {"cpu_flops": 1e6}, 32 * 2 * 2 * 32 * 128 / 1e6),
        ("deepseek-v2-lite", {"cpu_flops": 1e6}, 27 * 2 * 16 * (128 + 64 + 128) / 1e6),  # the dense layer attends as well
    ],
)
def test_attention_on_the_cpu_takes_what_its_reading_or_its_operations_take(
    name: str, slow: dict[str, float], each_token: float
) -> None:
    """Nothing is streamed on a GPU this large; six sequences see 77 tokens of the prompt and half of the 32."""
    machine = PlanMachine(10_000 * GIB, 1e13, 1e12, 1e15, 1e12, 1e18, 1e18)
    plan = plan_batch(load_model(name), replace(machine, **slow), 77, 32, 2, 3)
    assert plan is not None
    assert (plan.expert_share, plan.step_s) == (1, pytest.approx(6 * (77 + 16) * each_token))


def test_a_program_that_is_not_solved_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for failed in ({"status": 4, "success": False, "x": None}, {"status": 0, "success": True, "x": None}):
        outcome = SimpleNamespace(message="numerical trouble", **failed)
        monkeypatch.setattr("scipy.optimize.linprog", lambda *_, outcome=outcome, **__: outcome)
        with pytest.raises(RuntimeError, match="plan of 2 x 3 rows: HiGHS found no optimum: numerical trouble"):
            plan_batch(MIXTRAL, L4, 77, 32, 2, 3)


CHOICES = np.array(list(combinations(range(9), 3)))


def least_step(prompt: int, output: int, rows: int, n: int, machine: PlanMachine) -> float | None:
    """Restate the program: of all points where three of its bounds meet, the allowed one with the least step."""
    model, sequences = MIXTRAL, rows * n
    experts, layer = model.experts_bytes_total, 8 * model.expert_bytes(0)
    kv = 131072 * sequences * (prompt + output)
    seen = sequences * (prompt + output / 2)
    prefill = rows * prompt * 2 * (2 * 4096 + 2 * (4096 + 2 * 14336))
    dense = 4096 * (2 * 4096 + 2 * 1024) + 8 * 4096 + 2 * 4096
    each = max(2 * dense / machine.gpu_bytes_per_s, 2 * rows * dense / machine.gpu_flops)
    each += max(
        min(8, rows * 2) * model.expert_bytes(0) / machine.gpu_bytes_per_s, 4 * rows * model.expert_params / machine.gpu_flops
    )
    fixed = max(32 * n * each, 131072 * seen / machine.cpu_bytes_per_s, 32 * 4 * 4096 * seen / machine.cpu_flops)
    room = 0.86 * machine.gpu_bytes - model.non_expert_bytes - 2 * layer - prefill
    streaming, reading = experts / machine.link_bytes_per_s, 131072 * seen / machine.link_bytes_per_s
    # Of the share of the experts, that of the cache, and the step: weights, and what their sum is at most.
    bounds = np.array([
        [-streaming, 0, -1, -streaming], [0, reading, -1, 0], [0, 0, -1, -fixed],  # link, link, GPU and CPU
        [(experts - 2 * layer) / GIB, kv / GIB, 0, room / GIB],
        [-experts / GIB, -kv / GIB, 0, (0.8 * machine.cpu_bytes - experts - kv) / GIB],
        [1, 0, 0, 1], [-1, 0, 0, 0], [0, 1, 0, 1], [0, -1, 0, 0],
    ])  # fmt: skip
    corners = bounds[CHOICES]
    corners = corners[np.abs(np.linalg.det(corners[:, :, :3])) > 1e-12]
    points = np.linalg.solve(corners[:, :, :3], corners[:, :, 3:])[:, :, 0]
    allowed = (points @ bounds[:, :3].T <= bounds[:, 3] + 1e-9 * (1 + np.abs(bounds[:, 3]))).all(axis=1)
    return float(points[allowed, 2].min()) if allowed.any() else None


@pytest.mark.long
def test_the_program_against_a_search_of_corners() -> None:
    rng = np.random.default_rng(3)
    n_none = n_cached = 0
    for _ in range(1000):
        rows, n, prompt, output = (int(x) for x in (rng.integers(1, 400), rng.integers(1, 20), rng.integers(16, 600), 32))
        gpu, host, link, cpu, flops = (float(x) for x in rng.uniform((12, 100, 4, 20, 20), (200, 260, 60, 200, 300)))
        small = PlanMachine(gpu * GIB, host * 1e9, link * 1e9, 285e9, cpu * 1e9, flops * 1e12, 1.6e12)
        plan, least = plan_batch(MIXTRAL, small, prompt, output, rows, n), least_step(prompt, output, rows, n, small)
        assert (plan is None) == (least is None)
        n_none += plan is None
        n_cached += plan is not None and plan.kv_share > 0
        assert plan is None or plan.step_s == pytest.approx(least, rel=1e-7)
    assert 100 < n_none < 900
    assert n_cached > 10


def test_the_search_takes_the_later_of_equals_and_stops_when_it_falls() -> None:
    asked: list[tuple[int, int]] = []

    def throughput(rows: int, n: int) -> float | None:
        asked.append((rows, n))
        return None if rows > 40 else {(2, 3): 9.0, (3, 2): 9.0, (36, 1): 8.0}.get((rows, n), float(min(n, 2)) if n < 4 else 1.0)

    assert search_batch(throughput) == (3, 2, 9.0)
    assert [pair for pair in asked if pair[0] == 2] == [(2, 1), (2, 1), (2, 2), (2, 3), (2, 4)]
    assert [pair for pair in asked if pair[0] == 36] == [(36, 1), (36, 1), (36, 2)]
    assert asked[-1] == (68, 1)
    assert search_batch(lambda rows, n: None) is None


def restated(throughput: Any) -> Any:
    best = None
    for rows in [1, 2, 3, 4, *range(36, 420, 32)]:
        if throughput(rows, 1) is None:
            return best
        values = [throughput(rows, 1)]
        while (value := throughput(rows, len(values) + 1)) is not None and value >= values[-1]:
            values.append(value)
        for n, value in enumerate(values, 1):
            best = (rows, n, value) if best is None or value >= best[2] else best
    return best


def test_the_search_against_a_restatement() -> None:
    rng = np.random.default_rng(8)
    for _ in range(1000):
        table, most = rng.integers(1, 6, (420, 8)), int(rng.integers(0, 400))

        def throughput(rows: int, n: int, table: Any = table, most: int = most) -> float | None:
            return float(table[rows, n - 1]) if n <= 8 and rows * n <= most else None

        assert search_batch(throughput) == restated(throughput)


def test_a_whole_plan_is_the_best_of_its_search() -> None:
    plan = offline_plan(MIXTRAL, PlanMachine(24 * GIB, 110e9, 16 * GIB, 285e9, 76e9, 104e12, 1.6e12), 512, 128)
    assert plan is not None
    assert plan.rows * plan.micro_batches * 640 * 131072 <= 0.8 * 110e9
    assert plan.tokens_per_s == tokens_per_s(plan.rows * plan.micro_batches, 128, plan.step_s)


@pytest.mark.parametrize("memory", [{"gpu_bytes": 8.0 * GIB}, {"cpu_bytes": 80e9}])
def test_no_room_for_one_sequence_is_one_line(memory: dict[str, float]) -> None:
    with pytest.raises(
        CapacityError, match=r"^offline plan of mixtral-8x7b: expected room for one sequence .*\.*; give more"
    ) as error:
        offline_plan(MIXTRAL, replace(L4, **memory), 512, 128)
    assert "\n" not in str(error.value)
    assert f"of {next(iter(memory.values())):g} bytes" in str(error.value)
    assert plan_batch(MIXTRAL, replace(L4, **memory), 512, 128, 1, 1) is None


def test_the_search_plans_by_the_count_it_is_given() -> None:
    machine = replace(L4, cpu_bytes=110e9)
    plan = offline_plan(MIXTRAL, machine, 512, 128, **RELEASED)
    assert plan == plan_batch(MIXTRAL, machine, 512, 128, plan.rows, plan.micro_batches, **RELEASED)
    own = plan_batch(MIXTRAL, machine, 512, 128, plan.rows, plan.micro_batches)
    assert own is not None
    assert own.expert_share < plan.expert_share  # a small batch: without embeddings there is more room


ROOMIER = ["gpu_bytes", "cpu_bytes", "link_bytes_per_s", "gpu_bytes_per_s", "cpu_bytes_per_s", "gpu_flops", "cpu_flops"]


@pytest.mark.parametrize("field", ROOMIER)
def test_more_of_anything_makes_no_plan_slower(field: str) -> None:
    rng = np.random.default_rng(ROOMIER.index(field))
    n_faster = n_fitting = 0
    for _ in range(25):
        rows, n, prompt = (int(x) for x in (rng.integers(1, 300), rng.integers(1, 24), rng.integers(16, 400)))
        less = PlanMachine(*(float(x) for x in rng.uniform(0.3, 1.5, 7) * list(vars(L4).values())))
        more = replace(less, **{field: getattr(less, field) * 1.5})
        before, after = (plan_batch(MIXTRAL, one, prompt, 32, rows, n) for one in (less, more))
        if before is not None:
            assert after is not None
            assert after.step_s <= before.step_s * (1 + 1e-9)
            n_faster += after.step_s < before.step_s * (1 - 1e-6)
            n_fitting += 1
    assert n_fitting > 2
    # Of what is never the longest in these draws, more makes no difference.
    assert n_faster > 0 or field in ("cpu_bytes", "cpu_bytes_per_s", "gpu_flops", "cpu_flops")


def test_larger_micro_batches_and_longer_prompts_leave_less_for_experts() -> None:
    def share(rows: int, prompt: int) -> float:
        plan = plan_batch(MIXTRAL, L4, prompt, 32, rows, 1)
        assert plan is not None
        return plan.expert_share

    shares = [share(rows, 77) for rows in (1, 100, 200, 324)]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 4
    assert share(100, 77) == pytest.approx(share(77, 100))  # prompt tokens of a micro-batch count, not sequences


def test_residents_are_whole_experts() -> None:
    assert [len(lowest_residents(8, share)) for share in (0, 0.124, 0.125, 0.99, 1)] == [0, 0, 1, 7, 8]
    rng = np.random.default_rng(2)
    for n, share in zip(rng.integers(1, 300, 1000).tolist(), rng.random(1000).tolist(), strict=True):
        assert lowest_residents(n, share) == [e for e in range(n) if e + 1 <= n * share]


# -------------------------------------------------------------------------------------------------------------- run time
TOKEN = [[0, 2], [1, 0]]  # layer: experts


def run(requests: Any = ((TOKEN,),), *, slots: int = 2, links: Any = None, prompt: int = 0, micro_batches: int = 1,
        n_layers: int = 2, expert_ns: int = 100, **options: Any) -> Records:  # fmt: skip
    policy = make_policy({"name": "moe-lightning", "attention": "gpu", **options})
    toy = machine({"gpu0": gpu(expert_ns=expert_ns), "cpu0": cpu()}, links)
    work = workload(requests, prompt=prompt, micro_batches=micro_batches)
    return play(policy, work, toy, model=tiny_model(n_layers=n_layers), slots={"gpu0": slots})


def test_whole_layers_are_streamed_while_the_one_before_computes() -> None:
    # One of four experts of each layer stays: expert 0.
    # gpu0       |DDDDD|                   |00|22|DDDDD|                |00|11|
    # cpu0->gpu0 |0/1      |0/2  |0/3      |1/1      |1/2      |1/3      |0/1 ...    the next pass, which does not come
    #            0    100                  3000  3200 3300              6000
    records = run()
    down = [*((layer, e) for layer in (0, 1) for e in (1, 2, 3)), (0, 1)]
    assert [(t.start, t.layer, t.expert) for t in records.transfers] == [(1000 * i, *unit) for i, unit in enumerate(down)]
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (3000, 3100, "gpu0", "E0x1"), (3100, 3200, "gpu0", "E2x1"),
        (3200, 3300, "gpu0", "dense"), (6000, 6100, "gpu0", "E0x1"), (6100, 6200, "gpu0", "E1x1"),
    ]  # fmt: skip
    assert records.pool_peak_bytes["gpu0", "pages"] <= 6000


@pytest.mark.parametrize(("expert_ns", "layer_ns"), [(100, 3000), (2000, 100 + 2 * 2000)])
def test_a_layer_takes_the_longer_of_copying_and_computing(expert_ns: int, layer_ns: int) -> None:
    records = run([[[[0, 1]] * 10] * 3], slots=10, n_layers=10, expert_ns=expert_ns)
    ends = [visit.end for visit in records.layers]
    assert set(np.diff(ends)[3:].tolist()) == {layer_ns}  # over the steps' borders as well


def test_with_less_than_a_whole_expert_nothing_stays() -> None:
    records = run(slots=1)  # an eighth of all, half an expert of each layer
    assert [t.expert for t in records.transfers][:4] == [0, 1, 2, 3]
    assert records.peak_bytes["gpu0"] < run().peak_bytes["gpu0"] + 2000


@pytest.mark.parametrize("each", [29, 57, 58])
def test_cache_slots_are_counted_exactly(each: int) -> None:
    """As a share, 0.29 of 100 experts would make 28."""
    policy = make_policy({"name": "moe-lightning", "attention": "gpu"})
    work = workload([[TOKEN]], n_experts=100)
    records = play(policy, work, model=tiny_model(n_experts=100), slots={"gpu0": 2 * each + 1})
    assert min(t.expert for t in records.transfers) == each


def test_micro_batches_run_one_after_another() -> None:
    """Both are routed before the layer is there; each expert has a kernel for each of them."""
    records = run([[TOKEN], [[[2, 3], [1, 0]]]], micro_batches=2)
    assert tasks(records)[2:6] == [
        (3000, 3100, "gpu0", "E0x1"), (3100, 3200, "gpu0", "E2x1"), (3200, 3300, "gpu0", "E2x1"), (3300, 3400, "gpu0", "E3x1"),
    ]  # fmt: skip


def test_a_layer_that_is_there_computes_at_once() -> None:
    fast = {"cpu0->gpu0": link(100), "gpu0->cpu0": link()}
    records = run([[TOKEN], [[[2, 3], [1, 0]]]], micro_batches=2, links=fast)
    assert [t.start for t in records.tasks if t.kind == "expert"][:2] == [200, 300]


def test_the_planned_share_decides_and_must_be_granted() -> None:
    assert len({t.expert for t in run(slots=8, expert_share=0.5).transfers}) == 2
    assert run(slots=8, expert_share=1.0).transfers == []
    with pytest.raises(CapacityError, match="expected at most 2 experts on the GPU, as the cache slots allow, got 4"):
        run(expert_share=0.5)


def test_the_cpu_reads_the_cache_while_decoding() -> None:
    records = run([[TOKEN] * 4], prompt=2, attention="cpu")
    by_step = [{(t.device, t.kind) for t in records.tasks if t.step == step and t.expert < 0} for step in range(3)]
    assert by_step[0] == {("gpu0", "dense")}
    assert by_step[1] == by_step[2] == {("gpu0", "attention"), ("cpu0", "attention"), ("gpu0", "dense")}
    assert len(crossings(records)) == 2 * 2 * 2  # steps, layers, there and back
    assert [t for t in transfers(records) if t[2] == "gpu0->cpu0"] == [
        (100, 116, "gpu0->cpu0", "write-back"), (3300, 3316, "gpu0->cpu0", "write-back")
    ]  # fmt: skip


def test_a_model_of_one_layer_is_copied_anew_in_each_pass() -> None:
    records = run([[[[0, 1]]] * 2], n_layers=1, slots=0)
    assert [t.expert for t in records.transfers] == [0, 1, 2, 3] * 2


def test_it_keeps_the_contract() -> None:
    check_policy(lambda: make_policy({"name": "moe-lightning", "attention": "gpu"}))
