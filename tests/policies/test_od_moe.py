"""OD-MoE: its rules on paper, its pipeline to the nanosecond on toy clusters, its memory and its messages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.errors import CapacityError, ConfigError, HardwareError, PolicyError
from moesim.fits import required_bytes
from moesim.hardware import HardwareProfile, load_hardware
from moesim.model import load_model
from moesim.policies.base import PolicyBase
from moesim.policies.registry import make_policy
from moesim.policies.systems import od_moe
from moesim.policies.systems.od_moe import OdMoE, assign_loads
from moesim.policy import DEMAND, PREFETCH, Fetch, Placement
from moesim.records import Records
from moesim.testing import FakeView, run_tiny, tiny_workload
from tests.engine.engine_kit import cpu, gpu, link, machine, play, tasks, tiny_model, transfers, workload

EXPERTS = list(range(8))


# ------------------------------------------------------------------------------------------------------- the algorithms


@given(st.permutations(EXPERTS), st.permutations(EXPERTS), st.integers(1, 4))
def test_a_group_reloads_only_what_was_wrong(predicted: list[int], true: list[int], size: int) -> None:
    """One expert a worker: those with a wrong one take the missing experts, lowest worker first."""
    told, wanted = predicted[:size], true[:size]
    queues = assign_loads([[]] * size, told, final=False).queues
    assert queues == [[e] for e in told]
    found = assign_loads(queues, wanted)
    wrong = [w for w, e in enumerate(told) if e not in wanted]
    missing = [e for e in wanted if e not in told]
    assert found.dropped == [(w, told[w]) for w in wrong]
    assert found.queues == [[missing[wrong.index(w)]] if w in wrong else [told[w]] for w in range(size)]


# ----------------------------------------------------------------------------------------------------------- toy clusters
class Told:
    """Says what is listed for each layer, at any time; None where nothing is."""

    name, label = "told", "oracle"

    def __init__(self, said: dict[int, list[list[int]] | None] | None = None) -> None:
        self.said = said or {}

    def needs_layer(self, layer: int) -> None:
        return None

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None] | None:
        said = self.said.get(layer, step.micro[mb].layers[layer].experts)
        return None if said is None else (np.array(said), None)


def cluster(n_workers: int, *, main: dict[str, Any] | None = None, worker: dict[str, Any] | None = None, predict: int = 30,
            n_shadows: int = 1, load: Any = None, direct: Any = None) -> HardwareProfile:  # fmt: skip
    """One host with a main GPU, shadow GPUs and workers, each on a link of its own; `direct` joins main node and workers."""
    shadows = [f"shadow{i}" for i in range(n_shadows)]
    workers = [f"worker{i}" for i in range(n_workers)]
    devices = {"main": gpu(**(main or {})), "cpu0": cpu()}
    devices |= {name: gpu(predict={"shadow": predict}) for name in shadows} | {name: gpu(**(worker or {})) for name in workers}
    links = {f"{name}->cpu0": link() for name in ("main", *shadows, *workers)}
    links |= {f"cpu0->{name}": link() for name in ("main", *shadows)} | {f"cpu0->{name}": load or link() for name in workers}
    if direct:
        links |= {f"main->{name}": direct for name in workers} | {f"{name}->main": direct for name in workers}
    return machine(devices, links, compute="main")


def cluster_run(
    tokens: Any, hardware: HardwareProfile, said: Any = None, prompt: int = 0, model: Any = None, **options: Any
) -> Records:
    policy = {"name": "od-moe", "prediction_source": "shadow-int8:told", **options}
    work = workload([tokens], prompt=prompt, n_experts=model.n_experts if model else 4)
    return play(make_policy(policy), work, hardware, model=model, predictors={"shadow-int8:told": Told(said)})


@pytest.mark.parametrize(
    ("load", "main", "worker", "n_groups"),
    [
        (18_000, 3000, 2000, 4),  # the paper's example: loads of up to 4 x 3 + 3 x 2 cost nothing
        (20_000, 3000, 2000, 4),  # with 20 a layer takes 5.5
        (18_001, 3000, 2000, 4),
        (9000, 500, 700, 3),
        (3000, 800, 900, 1),
        (900, 800, 900, 2),
    ],
)
def test_steady_period_is_exact(load: int, main: int, worker: int, n_groups: int) -> None:
    """Right predictions that cost nothing, one token: n_groups layers take the longer of computing and loading.

    The dense part's share of t^M is what the two hops of one nanosecond leave.
    """
    n_layers = 10 * n_groups
    model = tiny_model(n_layers=n_layers, n_experts=8)
    rng = np.random.default_rng(0)
    token = [[rng.permutation(8)[:2].tolist() for _ in range(n_layers)]]
    quick = link(act_latency_ns=0, act_bytes_per_ns=1e6)
    slow = link(latency_ns=load - 500, bytes_per_ns=2)
    dense = {"attention_ns": 100, "dense_ns": main - 102}
    hardware = cluster(2 * n_groups, main=dense, worker={"expert_ns": worker}, predict=0, load=slow, direct=quick)
    options = {"token_period": None, "kv_period": None}
    records = cluster_run(token, hardware, model=model, **options)
    begins = [layer.begin for layer in records.layers]
    warm = n_layers // 2
    turns = {begins[at + n_groups] - begins[at] for at in range(warm, n_layers - n_groups)}
    assert turns == {max(n_groups * (main + worker), load + worker)}
    late = [t for t in records.tasks if t.kind == "expert" and t.layer >= warm]
    assert all(t.device in (f"worker{t.layer % n_groups * 2}", f"worker{t.layer % n_groups * 2 + 1}") for t in late)


TOKENS = [[[0, 2], [1, 0]], [[2, 3], [0, 1]], [[0, 3], [2, 3]]]  # token, layer: experts


def loads(records: Records) -> list[tuple[int, int, str, str]]:
    """Transfers of weights, with the worker's number in place of the link."""
    found = [t for t in transfers(records) if "/" in t[3]]
    return [(start, end, name[-1], what) for start, end, name, what in sorted(found)]


def of(records: Records, device: str) -> list[tuple[int, int, str]]:
    return [(start, end, what) for start, end, name, what in tasks(records) if name == device]


def test_late_departure() -> None:
    """The token (10 bytes, two hops) comes first, then with 16 bytes of KV; the shadow's layers take 30 each.

    A dense part takes 100, a hidden state 20 a hop, a load 1000, an expert 100; both layers are served by one group, whose two
    outputs queue for the main node's link.
    """
    records = cluster_run(TOKENS[:2], cluster(2))
    assert [t for t in transfers(records) if t[3] == "message"] == [
        (0, 10, "main->cpu0", "message"),
        (10, 20, "cpu0->shadow0", "message"),
        (2310, 2336, "main->cpu0", "message"),
        (2336, 2362, "cpu0->shadow0", "message"),
    ]
    assert of(records, "shadow0") == [(20, 50, "predict"), (50, 80, "predict"), (2362, 2392, "predict"), (2392, 2422, "predict")]
    assert loads(records) == [
        (50, 1050, "0", "prefetch 0/0"),
        (50, 1050, "1", "prefetch 0/2"),
        (1150, 2150, "0", "prefetch 1/1"),
        (1150, 2150, "1", "prefetch 1/0"),
        (2392, 3392, "0", "prefetch 0/2"),
        (2392, 3392, "1", "prefetch 0/3"),
        (3492, 4492, "0", "prefetch 1/0"),
        (3492, 4492, "1", "prefetch 1/1"),
    ]
    assert of(records, "main") == [(0, 100, "dense"), (1210, 1310, "dense"), (2310, 2410, "dense"), (3552, 3652, "dense")]
    assert [layer.end for layer in records.layers] == [1210, 2310, 3552, 4652]


@pytest.mark.parametrize(("prompt_kv", "n_bytes"), [("sent", 10 + 2 * 16), ("own", 10)])
def test_the_first_alignment_brings_the_prompt(prompt_kv: str, n_bytes: int) -> None:
    records = cluster_run(TOKENS, cluster(2), prompt=2, prompt_kv=prompt_kv)
    assert [t.n_bytes for t in records.transfers if t.cause == "message"] == [n_bytes, n_bytes]


def test_a_shadow_on_two_gpus_hands_its_state_on() -> None:
    """Layer 1 is predicted by the second GPU, once 10 bytes have come over two hops."""
    records = cluster_run(TOKENS[:1], cluster(2, n_shadows=2))
    assert of(records, "shadow0") == [(20, 50, "predict")]
    assert of(records, "shadow1") == [(70, 100, "predict")]


@pytest.mark.parametrize(("release", "next_load", "end"), [("group", 2150, 3310), ("worker", 1150, 3290)])
def test_a_wrong_expert_alone_is_loaded_again(release: str, next_load: int, end: int) -> None:
    """0 and 2 are predicted, 2 and 3 are routed: worker 0 loads 3 once the wrong load ends, worker 1 computes meanwhile."""
    records = cluster_run([[[2, 3], [0, 1]]], cluster(2), {0: [[0, 2]]}, release=release)
    assert loads(records) == sorted(
        [
            (50, 1050, "0", "prefetch 0/0"),
            (50, 1050, "1", "prefetch 0/2"),
            (1050, 2050, "0", "demand 0/3"),
            (2150, 3150, "0", "prefetch 1/0"),
            (next_load, next_load + 1000, "1", "prefetch 1/1"),
        ]
    )
    assert of(records, "worker0")[0] == (2050, 2150, "E3x1")
    assert of(records, "worker1")[0] == (1050, 1150, "E2x1")
    assert records.layers[0].end == 2190
    assert [(e.time, e.device, e.expert) for e in records.evictions[:2]] == [
        (1050, "worker0", 0),
        (2150 if release == "group" else 1150, *(("worker0", 3) if release == "group" else ("worker1", 2))),
    ]
    # Both ways layer 1 waits for worker 0; the output of worker 1 is back before, or queues with the other's.
    assert records.layers[1].end == end


def test_a_demand_takes_the_place_of_a_later_layer() -> None:
    """Nothing is said of layer 0, so layer 1 is loaded first; its experts give way and are loaded again."""
    records = cluster_run(TOKENS[:1], cluster(2), {0: None})
    assert loads(records) == [
        (80, 1080, "0", "prefetch 1/1"),
        (80, 1080, "1", "prefetch 1/0"),
        (1080, 2080, "0", "demand 0/0"),
        (1080, 2080, "1", "demand 0/2"),
        (2340, 3340, "0", "demand 1/1"),
        (2340, 3340, "1", "demand 1/0"),
    ]
    assert [(e.layer, e.reason) for e in records.evictions] == [(1, "evict")] * 2 + [(0, "drop")] * 2 + [(1, "drop")] * 2


def test_a_demand_takes_the_latest_idle_expert_of_a_later_layer() -> None:
    view, policy = FakeView(hardware=cluster(1)), OdMoE()
    units = [(0, 7), (1, 6), (2, 4), (2, 5), (3, 1), (3, 2)]
    for layer, expert in units:
        view.put(layer, [expert], "worker0", "staging")
    view.put(3, [6], "worker0")  # in another pool
    found = []
    while (unit := policy.evict(Fetch(1, [0], "worker0", DEMAND, "staging"), view)) is not None:
        found.append(unit)
        view.hold(*unit[:1], unit[1:], "worker0")
    assert found == [(3, 2), (3, 1), (2, 5), (2, 4)]
    view.hold(3, [1], "worker0", in_use=False)
    assert policy.evict(Fetch(2, [0], "worker0", DEMAND, "staging"), view) == (3, 1)
    assert policy.evict(Fetch(3, [0], "worker0", DEMAND, "staging"), view) is None
    assert policy.evict(Fetch(1, [0], "worker0", PREFETCH, "staging"), view) is None


def test_without_predictions_experts_are_loaded_once_routed() -> None:
    records = cluster_run(TOKENS[:1], cluster(2), prediction_source="none")
    assert loads(records)[0] == (100, 1100, "0", "demand 0/0")
    assert not [t for t in transfers(records) if t[3] == "message"]
    assert not of(records, "shadow0")


def test_random_predictions_have_no_shadow_no_alignment_and_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 and 2 are drawn for both layers: loads begin with the step, the wrong one is loaded again, and 0 and 2 come once more."""
    monkeypatch.setattr(od_moe, "sample", lambda population, n, seed, place: [0, 2])
    policy = OdMoE(prediction_source="random")
    assert not policy.needs
    assert policy.place(FakeView(hardware=cluster(2))).reserved == {}
    records = cluster_run([[[2, 3], [0, 1]]], cluster(2), prediction_source="random")
    assert loads(records) == [
        (0, 1000, "0", "prefetch 0/0"),
        (0, 1000, "1", "prefetch 0/2"),
        (1000, 2000, "0", "demand 0/3"),
        (2100, 3100, "0", "prefetch 1/0"),
        (2100, 3100, "1", "prefetch 1/2"),
        (3100, 4100, "1", "demand 1/1"),
    ]
    assert not of(records, "shadow0")
    assert [t for t in transfers(records) if t[3] == "message"] == []
    assert of(records, "main") == [(0, 100, "dense"), (2140, 2240, "dense")]


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="prediction_source 'random:x': expected a seed from 0 on"):
        _ = OdMoE(prediction_source="random:x").needs


def test_a_prompt_in_mini_batches() -> None:
    """Two rows, in one mini-batch each, need 0, 2 and 3 of layer 0, and 0 and 1 of layer 1.

    Worker 0 loads 0 and 2, worker 1 loads 1 and 3. Nothing is sent before all that the workers hold together is loaded. A row
    takes 20 a hop, two hops each way.
    """
    records = cluster_run(TOKENS[:2], cluster(2), prompt=2)
    assert loads(records) == [
        (0, 1000, "0", "prefetch 0/0"),
        (0, 1000, "1", "prefetch 0/1"),  # for nothing
        (1000, 2000, "1", "prefetch 0/3"),
        (2160, 3160, "0", "prefetch 0/2"),  # once 0 and 3 are computed
        (3440, 4440, "0", "prefetch 1/0"),  # as the layer begins
        (3440, 4440, "1", "prefetch 1/1"),
    ]
    assert of(records, "worker0") == [
        (2040, 2140, "E0x1"),
        (3200, 3300, "E2x1"),
        (3300, 3400, "E2x1"),
        (4480, 4580, "E0x1"),
        (4580, 4680, "E0x1"),
    ]
    # The row of worker 1 follows that of worker 0, in each mini-batch.
    assert of(records, "worker1") == [(2060, 2160, "E3x1"), (4500, 4600, "E1x1"), (4600, 4700, "E1x1")]
    assert [layer.end for layer in records.layers] == [3400 + 40, 4700 + 40]


def test_micro_batches_are_one_prompt() -> None:
    """The mini-batches are parts of all rows of the step; an expert of two is loaded once, and evicted after the second."""
    policy = {"name": "od-moe", "prediction_source": "none", "mini_batches": 2}
    work = workload([TOKENS[:2]] * 2, prompt=2, micro_batches=2)
    records = play(make_policy(policy), work, cluster(4))
    loaded = [t for t in records.transfers if t.layer == 1 and t.expert >= 0]
    assert sorted((t.expert, t.end - t.start) for t in loaded if t.expert < 2) == [(0, 1000), (1, 1000)]
    ran = [t for t in records.tasks if t.kind == "expert" and t.layer == 1]
    assert [(t.expert, t.rows) for t in ran] == [(0, 2), (1, 2)] * 2


# ------------------------------------------------------------------------------------------------------------------ roles
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"main": "head"}, "option main: expected GPUs whose names begin with 'head', got main, shadow0, worker0, worker1"),
        ({"shadow": "main"}, "option shadow: expected GPUs whose names begin with 'main'"),
        ({"workers": "node"}, "option workers: expected GPUs whose names begin with 'node'"),
        ({"group_size": 3}, "expected at least 3 GPUs 'worker*', a group of workers, got 2"),
    ],
)
def test_missing_roles_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=r"^policy od-moe: ") as error:
        cluster_run(TOKENS, cluster(2), **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_main_node_need_not_be_the_profiles_compute_device() -> None:
    """Everything but the experts is on the GPU that is named."""
    records = cluster_run(TOKENS, cluster(3), main="worker0")
    assert {t.device for t in records.tasks if t.kind == "dense"} == {"worker0"}
    assert {t.device for t in records.tasks if t.kind == "expert"} == {"worker1", "worker2"}


def test_names_of_the_predictions() -> None:
    """The recorded signal by default; what is made up answers in the shadow's name, and so at its cost."""
    assert OdMoE().needs == {"signal:shadow-int8:T1:KV1"}
    assert OdMoE(token_period=4, kv_period=None, precision="nf4").needs == {"signal:shadow-nf4:T4:KV0"}
    assert OdMoE(prediction_source="synthetic:0.9").source == "shadow-int8:synthetic:0.9"
    assert OdMoE(prediction_source="oracle").source == "shadow-int8:oracle"
    assert OdMoE(prediction_source="signal:gate_next1").needs == {"signal:gate_next1"}


def test_a_shadow_costs_a_layer_under_any_name() -> None:
    """With or without the word signal, recorded or made up; a profile's curve goes before."""
    costs = FakeView(tiny_model()).costs
    whole = costs.predict_ns("gpu0", 1, "shadow-int8")
    assert whole > costs.predict_ns("gpu0", 1, "synthetic:0.9") > 0
    for source in ("signal:shadow-int8:T1:KV1", "shadow-int8:T0:KV4", "shadow-int8:synthetic:0.9", "shadow-int8:oracle"):
        assert costs.predict_ns("gpu0", 1, source) == whole


@pytest.mark.parametrize(
    ("reserved", "message"),
    [({"gpu7": 1}, "unknown device 'gpu7'"), ({"gpu0": -1}, "reserved on gpu0: expected at least 0 bytes, got -1")],
)
def test_reserved_memory_is_checked(reserved: dict[str, int], message: str) -> None:
    class Holding(PolicyBase):
        def place(self, view: Any) -> Placement:
            return Placement(reserved=reserved)

    with pytest.raises(PolicyError, match=message):
        play(Holding(), workload([TOKENS[:1]]))


# ----------------------------------------------------------------------------------------------------------- its baseline


# ------------------------------------------------------------------------------------------------------ the paper's cluster
FP32 = {"base": "mixtral-8x7b", "expert_bits": 32, "other_bits": 32, "kv_bits": 32, "act_bits": 32}


def test_sizes_as_the_paper_prints_them() -> None:
    model = load_model(FP32)
    assert model.expert_bytes() == 704_643_072
    assert model.activation_bytes(1) == 16 * 1024
    assert model.kv_bytes(0, 1) == 8 * 1024
    assert model.kv_bytes_per_token == 256 * 1024


def test_memory_of_the_cluster() -> None:
    """The main node has all but the experts, each worker room for one, two GPUs share the shadow's weights."""
    model, hardware = load_model(FP32), load_hardware("odmoe-10x3090")
    need = required_bytes(model, hardware, 384, OdMoE().place(FakeView(model, hardware)))
    assert need["main-gpu"]["weights"] == model.non_expert_bytes
    assert need["main-gpu"]["kv"] == 384 * model.kv_bytes_per_token
    assert {need[f"worker{i}-gpu"]["pool:staging"] for i in range(8)} == {model.expert_bytes()}
    shadow = need["shadow0-gpu"]["reserved"] + need["shadow1-gpu"]["reserved"]
    parameters = model.n_layers * (model.attention_params + 8 * model.expert_params)
    assert shadow == parameters + model.non_expert_bytes - model.n_layers * model.attention_bytes  # routers and the rest in FP32
    assert all(sum(need[gpu].values()) <= hardware.devices[gpu].memory_bytes for gpu in need)


def test_precision_of_the_shadow() -> None:
    """Fewer bits, fewer bytes and less time for a layer, of which two experts are read."""
    model, hardware = load_model(FP32), load_hardware("odmoe-10x3090")
    view = FakeView(model, hardware)
    reserved = {p: OdMoE(precision=p).place(view).reserved["shadow0-gpu"] for p in ("int8", "nf4")}
    layer = model.attention_params + 8 * model.expert_params
    assert reserved["int8"] - reserved["nf4"] == 16 * layer // 2
    rate = hardware.devices["shadow0-gpu"].memory_bytes_per_s
    weights = model.attention_params + model.dense_params + 2 * model.expert_params
    costs = {p: view.costs.predict_ns("shadow0-gpu", 1, OdMoE(precision=p).source) for p in ("int8", "fp16")}
    assert costs["fp16"] - costs["int8"] > 0
    assert costs["fp16"] >= weights * 2 / rate * 1e9


def test_a_shadow_that_does_not_fit_is_told() -> None:
    model = load_model(FP32)
    policy = make_policy({"name": "od-moe", "precision": "fp16", "prediction_source": "synthetic:1"})
    work = workload([[[[0, 1]] * 32]], n_experts=8)
    with pytest.raises(CapacityError, match=r"shadow0-gpu of odmoe-10x3090: needs .*reserved"):
        play(policy, work, load_hardware("odmoe-10x3090"), model=model)


def test_hidden_states_are_serial_in_the_main_nodes_port() -> None:
    policy = OdMoE()
    records = run_tiny(policy, tiny_workload(policy, 4))
    hardware = load_hardware(policy.profile)
    for port in ("main-out", "main-in"):
        links = {link.name for link in hardware.links if link.medium == port}
        spans = sorted((t.start, t.end) for t in records.transfers if t.link in links)
        assert len(spans) > 100
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
