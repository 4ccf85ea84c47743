"""moe-speed-of-light's patch: decayed frequency, the table of its split, and copies ahead, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.metrics.hits import hit_rates
from moesim.policies.cpu_cache import both_rates, copies_by_time
from moesim.policies.registry import make_policy
from moesim.policies.systems.dfa_cache import DfaCache
from moesim.policies.systems.freetoken import FreeToken
from moesim.records import Records
from moesim.testing import FakeView, tiny_machine
from moesim.testing import tiny_model as round_model
from tests.engine.engine_kit import Oracle, cpu, gpu, link, machine, pair, play, tiny_model, workload
from tests.policies.caches_kit import FAST, copied, happened, run, served

"""A copy takes 1429 ns, a step of one layer with a miss about 500: some copies end more than two steps later."""


def test_a_copy_counts_two_steps_later_and_a_slot_is_dead_until_then() -> None:
    # Half-life 16: in step 3 expert 3 has 1 against 2.75, in step 4 1.96 against 2.72, in step 5 2.88 against 2.60.
    steps = [[0, 1], [0, 2], [0, 1], [1, 3], [0, 3], [0, 3], [0, 3], [0, 3]]
    records = run("dfa-cache", steps, 2)
    assert served(records) == [[], [], [0, 1], [1], [0], [0], [0], [0, 3]]
    assert copied(records) == [(0, 0), (0, 1), (5, 3)]
    # 0 is there in step 1 and 3 in step 6, where they do not count yet.
    rates = hit_rates(records, {"gpu0": "gpu", "cpu0": "cpu"})
    assert (rates["hit_rate"], rates["resident_rate"]) == (8 / 16, 10 / 16)
    assert [(e.expert, e.reason) for e in records.evictions] == [(1, "drop")]
    assert copied(run({"name": "dfa-cache", "kappa": 0.5}, steps[:6], 2)) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(("kappa", "copies"), [(0.74, [0, 2]), (0.75, [0])])
def test_the_newcomer_s_score_must_be_above(kappa: float, copies: list[int]) -> None:
    # With a half-life of 1 the score of 0 is 1/4 after two steps, and the newcomer's 1.
    records = run({"name": "dfa-cache", "half_life": 1.0, "kappa": kappa}, [[0], [1], [2]], 1)
    assert [expert for _, expert in copied(records)] == copies


@pytest.mark.parametrize(
    ("table", "now"), [("0,0,1", [[0], [0], [0]]), ("0,1", [[0], [0, 2], [0, 3]]), ("0,0,2", [[0, 1], [0], [0]])]
)
def test_a_table_says_how_many_misses_the_link_takes(table: str, now: list[list[int]]) -> None:
    # Two misses, then one, then one. The first by selection are copied and computed by the GPU, in the same visit.
    records = run({"name": "dfa-cache", "fetch": table}, [[0, 1], [0, 2], [0, 3]], 4)
    assert [sorted(step) for step in served(records)] == now


@pytest.mark.parametrize(
    ("mb", "rates", "gpu_us", "k", "table"),
    [
        (13.25, (60, 25, 75), 37, 4, [0, 0, 0, 1, 1]),
        (13.25, (50, 52, 80), 37, 4, [0, 0, 1, 2, 2]),
        (2.86, (60, 25, 75), 48, 8, [0, 0, 0, 1, 1, 1, 1, 2, 2]),
    ],
)
def test_the_table_by_rates_is_the_published_one(mb: float, rates: Any, gpu_us: float, k: int, table: list[int]) -> None:
    on_cpu, on_link, both = (round(mb * 1e6 / rate) for rate in rates)  # ns an expert
    share = (1 / both) / (1 / on_cpu + 1 / on_link)  # that each keeps of its rate while the other is busy
    devices = {"gpu0": gpu(expert_ns=gpu_us * 1000), "cpu0": cpu(expert_ns=on_cpu, per_row_ns=0, first_extra_ns=20_000)}
    links = {"cpu0->gpu0": link(1000 / on_link), "gpu0->cpu0": link()}
    hardware = machine(devices, links, contention=[pair("cpu0.experts", "cpu0->gpu0", share, share)])
    policy = DfaCache(fetch="rates")
    play(policy, workload([[[[*range(k)]]]], n_experts=8, weights=[1 / k] * k), hardware,
         model=tiny_model(n_layers=1, n_experts=8, top_k=k), slots={"gpu0": 8})  # fmt: skip
    assert policy._table == table


def test_a_cpu_that_takes_no_time_gets_all_misses() -> None:
    devices = {"gpu0": gpu(), "cpu0": cpu(expert_ns=0, per_row_ns=0)}
    policy = DfaCache(fetch="rates")
    play(policy, workload([[[[0, 1]]]]), machine(devices), model=tiny_model(n_layers=1, n_experts=4), slots={"gpu0": 4})
    assert policy._cpu_ns[1] == 0 and policy._table == [0, 0, 0]


def test_where_layers_differ_the_largest_expert_is_what_a_copy_takes() -> None:
    whole = round_model().expert_bytes(0)
    view = FakeView(round_model(top_k=6, expert_bytes_by_layer=(whole // 4, whole, whole // 4, whole // 4)), slots=32)
    policy, other = DfaCache(fetch="rates"), FreeToken()
    for one in (policy, other):
        one.place(view)
    copy, gpu, cpu = view.costs.fetch_ns("cpu0", "gpu0", None, 1), policy._gpu_ns[1], policy._cpu_ns[1]
    assert copy == 4 * view.costs.fetch_ns("cpu0", "gpu0", None, 0) > 2 * cpu
    both = 1 / (1 / cpu + 1 / copy)  # they do not slow each other down
    table = [copies_by_time(n, copy, gpu, cpu, policy._first_ns, both) for n in range(7)]
    assert policy._table == table != [copies_by_time(n, copy / 4, gpu, cpu, policy._first_ns, 0) for n in range(7)]
    assert other._hybrid and other._p == pytest.approx(cpu / (cpu + copy))


def test_rates_of_the_cpu_and_the_link_together() -> None:
    assert both_rates(FakeView(), "cpu0", "gpu0") == (1, 1)
    rates = {key: {"value": 0.1, "source": "assumed", "why": "another pair"} for key in ("a_rate", "b_rate")}
    others = [{"a": "cpu0->gpu0", "b": "gpu0.experts", **rates}, {"a": "gpu0->cpu0", "b": "cpu0.experts", **rates}]
    contention = [
        *others, {"a": "cpu0->gpu0", "b": "cpu0.experts", **{key: {"value": rate, "source": "assumed", "why": "a test"}
                                                    for key, rate in (("a_rate", 0.5), ("b_rate", 0.75))}},
    ]  # fmt: skip
    assert both_rates(FakeView(hardware=tiny_machine(contention=contention)), "cpu0", "gpu0") == (0.75, 0.5)


@pytest.mark.parametrize("table", ["1", "0,2", "0,x", "", "0,-1", "0,0.5", "rate"])
def test_a_wrong_table_is_one_line(table: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policies: policy dfa-cache: option fetch: expected 'rates', or .*, got '{table}'$"):
        make_policy({"name": "dfa-cache", "fetch": table})


# ----------------------------------------------------------------------------------------------------------- copies ahead
def ahead(q: int, steps: list[Any], slots: int, **more: Any) -> Records:
    rows = [[[9, 8], step] for step in steps]  # the first layer's routing does not matter
    spec = {"name": "dfa-cache", "prefetch_size": q, "source": "oracle", **more}
    model = tiny_model(n_layers=2, n_experts=10)
    predictors = {"oracle": Oracle()}
    work = workload([rows], n_experts=10)
    return play(make_policy(spec), work, FAST, model=model, slots={"gpu0": 2 * slots}, predictors=predictors)


def test_the_next_layer_s_experts_are_copied_ahead_and_count_once_they_are_there() -> None:
    assert [happened(ahead(q, [[0, 1]], 4), 2)[0].on_gpu for q in (1, 2)] == [[[], [0]], [[], [0, 1]]]
    records = ahead(1, [[0, 1]], 4)
    assert [(t.layer, t.expert, t.cause) for t in records.transfers if t.expert >= 0] == [
        (0, 9, "update"), (1, 0, "prefetch"), (0, 8, "update"), (1, 1, "update"),
    ]  # fmt: skip


def test_copies_ahead_spare_what_is_predicted() -> None:
    # Two slots: 0 was copied ahead, 1 counts from the third step on. That predicts 1 and 2: 0 leaves, whose score is higher.
    records = ahead(1, [[0, 1], [0, 5], [1, 2]], 2)
    assert [(e.layer, e.expert) for e in records.evictions if e.layer == 1] == [(1, 0)]
    assert happened(records, 2)[2].on_gpu[1] == [1, 2]


# --------------------------------------------------------------------------------------------------------------- restated
