"""Strata by hand: windows split between CPU and link, swaps between windows, prompts through lent slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.serving import composed
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec
from tests.engine.engine_kit import cpu, gpu, link, machine, play, tiny_model, workload
from tests.policies.caches_kit import FAST, copied, served

Unit = tuple[int, int]


def run(options: dict[str, Any], rows: Any, slots: int, *, prompt: int = 0, layers: int = 1, hardware: Any = FAST) -> Records:
    """Run one request on layers of eight experts, of which the lowest of the first layer are hottest."""
    heat = -np.arange(8.0 * layers).reshape(layers, 8)
    top_k = len(rows[0][0])
    model = tiny_model(n_layers=layers, n_experts=8, top_k=top_k)
    work = workload([rows], prompt=prompt, n_experts=8, weights=[1 / top_k] * top_k)
    policy = make_policy({"name": "strata", **options})
    return play(policy, work, hardware, model=model, slots={"gpu0": slots}, tables={"activation_frequency": heat})


def decode(options: dict[str, Any], steps: Any, slots: int = 2) -> Records:
    return run(options, [[step] for step in steps], slots)


# ---------------------------------------------------------------------------------------------------------------- windows
@pytest.mark.parametrize(
    ("frac", "on_gpu"), [(0.0, [0]), (0.33, [0]), (0.34, [0, 4]), (0.5, [0, 4]), (0.67, [0, 3, 4]), (1.0, [0, 2, 3, 4])]
)
def test_the_last_misses_in_routing_order_cross_the_link(frac: float, on_gpu: list[int]) -> None:
    """Of the misses 3, 2, 4 of a row with 0 so many as 256ths of the share say, rounded down; the others are the CPU's."""
    records = decode({"pcie_frac": frac}, [[3, 0, 2, 4]] if frac != 0.67 else [[2, 0, 3, 4]])
    assert sorted(served(records)[0]) == on_gpu
    assert [expert for _, expert in copied(records)] == [e for e in ([2, 3, 4] if frac == 0.67 else [3, 2, 4]) if e in on_gpu]
    assert len({t.expert for t in records.tasks if t.device == "cpu0" and t.expert >= 0}) == 4 - len(on_gpu)
    assert {gone.pool for gone in records.evictions} <= {"staging"}, "what crosses is dropped"


def test_cpu_and_link_work_at_once() -> None:
    records = run({"pcie_frac": 0.5}, [[[0, 2, 3]]], 2, hardware=machine())
    copy = next(t for t in records.transfers if t.expert == 3)
    slow = next(t for t in records.tasks if t.expert == 2)
    assert (slow.device, copy.start) == ("cpu0", slow.submitted) and slow.start < copy.end


# -------------------------------------------------------------------------------------------------------------- adaptation
USES = [[2, 3], [2, 4], [2, 3], [2, 4], *[[2, 3]] * 6]
"""After four windows 2 has 4 uses, 3 and 4 have 2; times 0.7 and after four more 2 has 6.8, 3 has 5.4, 4 has 1.4."""


@pytest.mark.parametrize(
    ("options", "copies", "hits"),
    [
        ({}, [(4, 2), (4, 4), (8, 3)], [[], [2], [2], [2], [2], [2, 3]]),
        ({"adapt_swaps": 1}, [(4, 2), (8, 3)], [[], [2], [2], [2], [2], [2, 3]]),
        ({"adapt_swaps": 0}, [], [[]] * 6),
        ({"adapt_margin": 2.1}, [(4, 2), (8, 3)], [[], [2], [2], [2], [2], [2, 3]]),
        ({"adapt_decay": 0.0, "adapt_margin": 4.5}, [], [[]] * 6),
        ({"adapt_every": 8}, [(8, 2), (8, 3)], [[], [], [], [], [], [2, 3]]),
    ],
    ids=str,
)
def test_swaps_by_hand(options: dict[str, Any], copies: list[Any], hits: list[list[int]]) -> None:
    """Of equals the higher id comes, the lower leaves; a newcomer is a hit from the window after its arrival on."""
    records = decode({"pcie_frac": 0.0, **options}, USES)
    assert copied(records) == copies
    assert [sorted(on) for on in served(records)] == [[], [], [], [], *hits]


@pytest.mark.parametrize(
    ("adapt", "copies"), [("layer", [(0, 5), (0, 4)]), ("any-layer", [(1, 3), (1, 2)])]
)  # fmt: skip
def test_victims_of_a_layer_or_of_any(adapt: str, copies: list[Unit]) -> None:
    """All slots are the first layer's; each of four experts has four uses after four windows."""
    records = run({"pcie_frac": 0.0, "adapt": adapt}, [[[4, 5], [2, 3]]] * 5, 2, layers=2)
    assert [(t.layer, t.expert) for t in records.transfers if t.expert >= 0] == copies


def test_what_crossed_stays_in_place_of_what_was_used_less() -> None:
    steps = [[2, 3], [2, 3], [4, 2], [4, 2]]
    records = decode({"pcie_frac": 1.0, "adapt": "fetch-admit"}, steps)
    # Of 2 and 3 none is dropped; 4, with one use, does not replace 3, which has two, nor does it with as many.
    assert copied(records) == [(0, 2), (0, 3), (2, 4), (3, 4)]
    assert copied(decode({"pcie_frac": 1.0, "adapt_swaps": 0}, steps)) == [(i, e) for i, step in enumerate(steps) for e in step]


def test_more_rows_than_its_batch_has_are_refused() -> None:
    work = workload([[[[0, 1]]]] * 9, n_experts=8)
    tables = {"activation_frequency": np.zeros((1, 8))}
    model = tiny_model(n_layers=1, n_experts=8)
    with pytest.raises(ConfigError, match="at most 8 rows in a window, got 9 decode rows"):
        play(make_policy("strata"), work, FAST, model=model, slots={"gpu0": 4}, tables=tables)


# ----------------------------------------------------------------------------------------------------------------- prompts
PROMPT = [[[0, 5], [0, 7]], [[0, 7], [0, 7]], [[0, 5], [0, 7]], [[0, 1], [0, 7]]]
"""Three rows of a prompt and one of decoding; of 16 experts 12 are cached, the first layer and half of the second."""


def copies(records: Records, step: int) -> list[Unit]:
    ends = records.steps[step].end
    begins = records.steps[step].begin
    return [(t.layer, t.expert) for t in records.transfers if t.expert >= 0 and begins <= t.submitted < ends]


def test_a_small_prompt_copies_what_is_routed_through_the_last_eight_slots() -> None:
    """Slots 4 to 11 are lent: the experts 4 to 7 of the first layer and 0 to 3 of the second, which come back afterwards."""
    lent = [(0, 4), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1), (1, 2), (1, 3)]
    records = run({"pcie_frac": 0.0}, PROMPT, 12, prompt=3, layers=2)
    assert copies(records, 0) == [(0, 5), (0, 7), (1, 0), (1, 7)]
    assert copies(records, 1) == lent
    assert {t.device for t in records.tasks if t.expert >= 0 and t.step == 0} == {"gpu0"}


def test_a_large_prompt_streams_all_absent_experts_ahead_of_their_use() -> None:
    """With a ring of nine, slots 3 to 11: of the first layer the experts from 3 on are absent, of the second all."""
    slow = machine({"gpu0": gpu(), "cpu0": cpu()}, {"cpu0->gpu0": link(1), "gpu0->cpu0": link()})
    options = {"pcie_frac": 0.0, "prefill_stream_min": 3, "prefill_ring": 9}
    records = run(options, PROMPT, 12, prompt=3, layers=2, hardware=slow)
    absent = [(0, e) for e in range(3, 8)] + [(1, e) for e in range(8)]
    assert copies(records, 0) == absent
    first = next(t for t in records.transfers if t.layer == 1)
    assert first.start < next(t for t in records.layers if t.layer == 1).begin, "while the first layer goes on"
    assert copies(records, 1)[:2] == [(0, 3), (0, 4)], "they come back in the order of their slots"
    ring_of_eight = run(options | {"prefill_ring": 8}, PROMPT, 12, prompt=3, layers=2)
    assert copies(ring_of_eight, 0) == [(0, 5), (0, 7), (1, 0), (1, 7)], "a ring must have more than eight slots"


# --------------------------------------------------------------------------------------------------------- served requests
def slots(engine: str, **more: Any) -> Records:
    """Serve two users whose prompts of four tokens are read in chunks of two, with slots that decode in between."""
    routing = np.array(PROMPT + [[[0, 1], [0, 7]]] * 8, dtype=np.uint8)
    trace = Trace.build(experts=routing, n_prompt=[4], n_decode=[8], n_experts=8, model="tiny", label="synthetic")
    asked = {"closed": 2, "n_requests": 2, "prompt_tokens": 4, "answer_tokens": 6, **more}
    scheduler = {"name": "strata", "parallel": 2, "prefill": 2, "decode_share": 0.01, "batch_mtp": True}
    work = composed(trace, WorkloadSpec(**asked, scheduler=scheduler))
    heat = -np.arange(16.0).reshape(2, 8)
    return play(
        make_policy({"name": "strata", "pcie_frac": 0.0}), work, FAST, model=tiny_model(n_layers=2, n_experts=8), engine=engine,
        slots={"gpu0": 12}, tables={"activation_frequency": heat},
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_windows_between_the_chunks_of_a_prompt_have_no_lent_slots(engine: str) -> None:
    found = slots(engine)
    phases = [(step.phase, step.n_tokens) for step in found.steps[:6]]
    assert phases == [*[("prefill", 2)] * 3, ("decode", 1), ("prefill", 2), ("decode", 2)]
    assert copies(found, 3) == [], "nothing comes back"
    assert copies(found, 4) == [(0, 5), (0, 7), (1, 0), (1, 7)], "what the first chunk copied has left"
    assert served(found)[3] == [0, 1], "of the first layer; of the second all slots are lent"
    assert copies(found, 5) == [(0, e) for e in range(4, 8)] + [(1, e) for e in range(4)]


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_a_window_with_drafts_is_split_as_one(engine: str) -> None:
    """Two slots with a proposal each are four rows; each expert on the CPU runs once for all of them."""
    found = slots(engine, drafts={"n": 3, "accept": 1, "by": "ngram"})
    window = next(step for step in found.steps if step.phase == "decode" and step.n_tokens == 4)
    tasks = [t for t in found.tasks if t.step == window.step and t.expert >= 0 and t.layer == 1]
    assert [(t.expert, t.rows, t.device) for t in tasks] == [(0, 4, "cpu0"), (7, 4, "cpu0")]
