"""`workload.kv`: the KV cache of GPUs in host memory, whatever the policy."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import ModelError, WorkloadError
from moesim.experiment.runner import granted_slots, initial_placement
from moesim.fits import kv_bytes_at, required_bytes, with_kv
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.policy import KV, Placement
from moesim.trace.workload import KvPlace, WorkloadSpec
from tests.engine.engine_kit import assert_same
from tests.serving.serving_kit import experiment, run

MIXTRAL, MACHINE = load_model("mixtral-8x7b"), load_hardware("rtx3090-epyc7532")
MODEL: dict[str, Any] = {"model": {"base": "mixtral-8x7b", "expert_bits": 4}}
TOKEN = 4096  # bytes of keys and values of a token in a layer: 8 heads of 128, 16 bits
ASKED = {"closed": 2, "n_requests": 2, "prompt_tokens": 6, "answer_tokens": 5}


def test_a_share_of_the_layers_moves_the_last_ones_first():
    placed = with_kv(MIXTRAL, MACHINE, Placement(), KvPlace(0.25, "attended"))
    assert placed.parts == {(KV, layer): "cpu0" for layer in range(24, 32)}
    need = required_bytes(MIXTRAL, MACHINE, 100, placed)
    assert (need["gpu0"]["kv"], need["cpu0"]["kv"]) == (24 * 100 * TOKEN, 8 * 100 * TOKEN)
    assert with_kv(MIXTRAL, MACHINE, Placement(), None) == Placement()


def test_the_newest_tokens_stay_and_the_rest_is_streamed():
    placed = with_kv(MIXTRAL, MACHINE, Placement(), KvPlace(resident=30))
    assert kv_bytes_at(MIXTRAL, MACHINE, placed, 0, 100, 2) == {"gpu0": 60 * TOKEN, "cpu0": 40 * TOKEN}
    need = required_bytes(MIXTRAL, MACHINE, 100, placed, 2)["gpu0"]
    assert (need["kv"], need["streams"]) == (32 * 60 * TOKEN, 2 * 40 * TOKEN), "a buffer for a layer, and one for the next"


def test_layers_whose_cache_does_not_grow_keep_it():
    model = load_model("gpt-oss-120b")  # every other layer sees a window of 128 tokens
    moved = with_kv(model, MACHINE, Placement(), KvPlace()).streamed
    assert len(moved) == 18
    assert not {(KV, layer) for layer in range(36) if model.kv_bytes(layer, 10_000) == model.kv_bytes(layer, 1_000)} & set(moved)


@pytest.mark.parametrize("resident", [0, 4])
def test_each_step_copies_what_lies_in_the_host_memory(resident: int):
    """Steps of both requests read 0 or 6..10 tokens of each; but for those that stay."""
    kv = {"host": 1, "resident": resident}
    records = run({**ASKED, "kv": kv}, engine="simpy")
    assert_same(records, run({**ASKED, "kv": kv}, engine="native"))
    read = [context for step in range(4) for context in (6 + step,) * 2]
    copied = sum(
        t.n_bytes for t in records.transfers if t.expert < 0 and t.link == "cpu0->gpu0" and t.cause in ("demand", "prefetch")
    )
    assert copied == 32 * TOKEN * sum(max(0, context - resident) for context in read)


def test_attended_there_nothing_of_it_crosses_while_decoding():
    records = run({**ASKED, "kv": {"read": "attended"}})
    first = min(step.end for step in records.steps)
    crossed = [t for t in records.transfers if t.expert < 0 and t.start >= first and t.cause in ("demand", "prefetch")]
    assert not crossed
    assert {t.device for t in records.tasks if t.kind == "attention" and t.start >= first} == {"gpu0", "cpu0"}


def test_what_it_leaves_of_a_budget_has_experts():
    asked: dict[str, Any] = {"closed": 1, "n_requests": 1, "scheduler": {"name": "vllm", "kv_tokens": 16_384}}
    slots = []
    for kv in (None, {"host": 1}):
        found = experiment({**asked, "kv": kv}, "lru", cache={"budget": "20 GiB"}, model=MODEL["model"])
        (spec,) = found.specs
        slots.append(granted_slots(spec, found.workload(spec), make_policy("lru"), {}))
    freed = 16_384 * 32 * TOKEN - 2 * 16_384 * TOKEN  # but for two buffers
    assert slots[1] - slots[0] == pytest.approx(freed * 4 / MIXTRAL.expert_bytes(0), abs=1)


def test_a_placement_asked_for_without_a_run_has_it_too():
    found = experiment({**ASKED, "kv": {"host": 1}}, "lru")
    (spec,) = found.specs
    policy: Any = make_policy("lru")
    placed = initial_placement(spec.model, spec.costs(policy), found.workload(spec), policy, {"gpu0": 64}, {})
    assert len(placed.streamed) == 32


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        ({"hots": 1}, r"workload.kv: unknown key 'hots'; did you mean 'host'"),
        ({"host": 2}, r"workload.kv.host: expected a share of the layers in \[0, 1\], got 2"),
        ({"host": "all"}, r"workload.kv.host: expected a share of the layers in \[0, 1\], got 'all'"),
        ({"read": "stream"}, "workload.kv.read: unknown word 'stream'; did you mean 'streamed'"),
        ({"resident": -1}, "workload.kv.resident: expected tokens of each request, at least 0, got -1"),
        ({"read": "attended", "resident": 5}, "workload.kv.resident: expected it next to read: streamed, got attended"),
        ("host", "workload.kv: expected a mapping, got 'host'"),
    ],
)
def test_what_is_wrong_is_named(kv: Any, words: str):
    with pytest.raises(WorkloadError, match=words):
        WorkloadSpec(kv=kv)


def test_a_share_may_be_a_fraction():
    assert WorkloadSpec(kv={"host": "1/4"}).kv_place == KvPlace(0.25)


def test_types_of_a_server_are_known_by_name():
    assert load_model({"base": "mixtral-8x7b", "kv_bits": "Q8_0"}).kv_bits == 8.5
    with pytest.raises(ModelError, match=r"kv_bits: unknown type 'q8'; did you mean 'q8_0'"):
        load_model({"base": "mixtral-8x7b", "kv_bits": "q8"})


def test_the_slots_that_a_smaller_type_frees_are_those_of_a_published_server():
    """FreeToken issue 103, gemma-4-26B: a cache of 9.2 GiB becomes one of 4.9 GiB as q8_0, and 694 slots 2,074."""
    plain, small = (load_model({"base": "gemma-4-26b-a4b", "expert_bits": 4.5, "kv_bits": kind}) for kind in ("bf16", "q8_0"))
    tokens = next(n for n in range(460_000, 500_000, 1000) if plain.all_kv_bytes(n) >= 9.175 * 2**30)
    assert round(small.all_kv_bytes(tokens) / 2**30, 1) == 4.9
    freed = plain.all_kv_bytes(tokens) - small.all_kv_bytes(tokens)
    assert freed // plain.expert_bytes(0) == pytest.approx(2074 - 694, rel=0.02)
