"""Rule 7: parts whose weights or KV cache lie in the memory of another device, and are copied for each use.

Timelines are exact: literal ns, drawn by hand next to the test. Of the tiny model, attention has 80 bytes, the rest of the
dense part 60, embedding and head 80 and 90, the KV of a token 8 in each layer.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moesim.engine.streams import Streams
from moesim.errors import CapacityError, PolicyError
from moesim.fits import by_rows, required_bytes
from moesim.metrics import bytes_moved, counts
from moesim.metrics.breakdown import CAUSES, breakdown
from moesim.metrics.chain import Chain
from moesim.policy import KV, Fetch, Placement, Run
from moesim.records import Records
from tests.engine.engine_kit import (
    ALL,
    ONE,
    Script,
    cpu,
    crossings,
    gpu,
    link,
    machine,
    on_gpu,
    play,
    sure,
    tasks,
    tiny_model,
    transfers,
    two_gpus,
    workload,
)

HOST = "cpu0"
KINDS = {"gpu0": "gpu", "cpu0": "cpu"}


class Streaming(Script):
    """A script whose placement streams parts."""

    def __init__(self, *parts: tuple[str, int], depth: int = 0, source: str = HOST, **more: Any) -> None:
        super().__init__(**{"copies": ALL, "routed": on_gpu} | more)
        self.streamed, self.depth = dict.fromkeys(parts, source), depth

    def place(self, view: Any) -> Placement:
        first = super().place(view)
        return Placement(
            first.copies, first.pools, first.parts, first.enforce_capacity, streamed=self.streamed, stream_depth=self.depth
        )


def sizes(records: Records) -> list[tuple[int, int, str, int, int]]:
    return [(t.start, t.end, t.cause, t.layer, t.n_bytes) for t in records.transfers]


def test_without_depth_a_part_is_copied_once_its_layer_begins() -> None:
    # gpu0       |        |DDDDD|00000|11111|        |DDDDD|22222|33333|
    # cpu0->gpu0 |attn 0  |                 |attn 1  |
    #            0        80    180   280   380      460   560   660   760
    records = play(Streaming(("attention", 0), ("attention", 1)), ONE)
    assert sizes(records) == [(0, 80, "demand", 0, 80), (380, 460, "demand", 1, 80)]
    assert tasks(records) == [
        (80, 180, "gpu0", "dense"), (180, 280, "gpu0", "E0x1"), (280, 380, "gpu0", "E1x1"),
        (460, 560, "gpu0", "dense"), (560, 660, "gpu0", "E2x1"), (660, 760, "gpu0", "E3x1"),
    ]  # fmt: skip
    assert [(t.submitted, t.ready) for t in records.tasks if t.kind == "dense"] == [(0, 80), (380, 460)]


def test_with_depth_the_next_use_is_copied_meanwhile_and_no_use_further_ahead() -> None:
    # gpu0       |        |DDDDD|00000|11111|DDDDD|22222|33333|DDDDD
    # cpu0->gpu0 |attn 0  |attn 1           attn 2 at 380, as layer 1 begins
    #            0        80    180   280   380   480   580   680
    model = tiny_model(n_layers=3)
    work = workload([[[[0, 1], [2, 3], [0, 1]]]])
    parts = [("attention", layer) for layer in range(3)]
    copies = [*ALL, ALL[0]._replace(layer=2)]
    records = play(Streaming(*parts, depth=1, copies=copies, slots=12), work, model=model)
    assert sizes(records) == [(0, 80, "demand", 0, 80), (80, 160, "prefetch", 1, 80), (380, 460, "prefetch", 2, 80)]
    assert [t.start for t in records.tasks if t.kind == "dense"] == [80, 380, 680]
    assert records.used_fetches == {t.fetch for t in records.transfers}


def test_what_one_task_reads_is_one_use() -> None:
    """Attention and the rest of the dense part run as one task, which waits for both copies; on two devices they are two."""
    together = play(Streaming(("dense", 0), ("attention", 0)), ONE)
    assert sizes(together) == [(0, 80, "demand", 0, 80), (80, 140, "demand", 0, 60)]
    assert tasks(together)[0] == (140, 240, "gpu0", "dense")
    # attention on cpu0 reads what is on gpu0 while the hidden state crosses; the router on gpu0 reads what is on cpu0
    parts = {("attention", 0): "cpu0"}
    script = Streaming(("dense", 0), parts=parts)
    script.streamed = {("attention", 0): "gpu0", ("dense", 0): "cpu0"}
    apart = play(script, ONE)
    assert sizes(apart) == [(0, 80, "demand", 0, 80), (220, 280, "demand", 0, 60)]
    assert tasks(apart)[:2] == [(80, 200, "cpu0", "attention"), (280, 320, "gpu0", "dense")]
    assert crossings(apart) == [(0, 20, "gpu0->cpu0", "hidden", 1), (200, 220, "cpu0->gpu0", "hidden", 1)]


def test_all_micro_batches_read_one_copy() -> None:
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    records = play(Streaming(("attention", 0)), work)
    assert sizes(records) == [(0, 80, "demand", 0, 80)]
    assert [t[:2] for t in tasks(records) if t[3] == "dense"][:2] == [(80, 180), (180, 280)]


def test_parts_of_a_step_are_copied_even_if_they_take_no_time() -> None:
    records = play(Streaming(("embedding", -1), ("head", -1)), ONE)
    assert sizes(records) == [(0, 80, "demand", -1, 80), (680, 770, "demand", -1, 90)]
    assert [(t.start, t.end, t.kind) for t in records.tasks if t.layer < 0] == [(80, 80, "embedding"), (770, 770, "head")]
    assert records.makespan_ns == 770


def test_a_step_without_tokens_reads_no_head() -> None:
    """Two chunks of a prompt: the first produces no token."""
    work = workload([[[[0, 1], [2, 3]], [[0, 1], [2, 3]]]], prompt=2, prefill_chunk=1)
    records = play(Streaming(("head", -1), depth=1), work)
    assert [s.n_sequences for s in records.steps] == [0, 1]
    assert [t.start >= records.steps[1].begin for t in records.transfers] == [True]


def test_routed_experts_pass_shared_ones_that_wait_for_their_copy() -> None:
    model = tiny_model(n_shared=1, shared_intermediate=10)
    records = play(Streaming(("shared", 0)), ONE, model=model)
    assert sizes(records) == [(100, 100 + model.shared_bytes, "demand", 0, model.shared_bytes)]
    assert tasks(records)[:4] == [
        (0, 100, "gpu0", "dense"), (100, 200, "gpu0", "E0x1"), (200, 300, "gpu0", "E1x1"), (300, 350, "gpu0", "shared"),
    ]  # fmt: skip


def test_the_cache_is_copied_and_what_is_new_goes_back() -> None:
    """A prompt of two rows, then two steps: the cache has 0, 2 and 3 tokens of 8 bytes before them."""
    rows = [[[0, 1], [2, 3]]] * 4
    records = play(Streaming((KV, 0)), workload([rows], prompt=2))
    begin = [x.begin for x in records.layers if x.layer == 0]
    down = [(t.start, t.n_bytes, t.cause) for t in records.transfers if t.link == "cpu0->gpu0"]
    up = [(t.start, t.n_bytes, t.cause) for t in records.transfers if t.link == "gpu0->cpu0"]
    assert down == [(begin[1], 16, "demand"), (begin[2], 24, "demand")]
    ends = [t.end for t in records.tasks if t.kind == "dense" and t.layer == 0]
    assert up == [(ends[0], 16, "write-back"), (ends[1], 8, "write-back"), (ends[2], 8, "write-back")]
    assert [t.start for t in records.tasks if t.kind == "dense" and t.layer == 0] == [0, begin[1] + 16, begin[2] + 24]


def test_copies_of_a_layer_are_asked_for_before_the_policy_hears_of_it() -> None:
    """Depth 1: the next layer's attention goes ahead of what the policy fetches as this layer begins."""
    fetch = {("LayerBegin", 0, 0): [Fetch(1, [2, 3], "gpu0", 1)]}
    routed = {("Routed", 0, 1, 0): [Run(1, [2, 3], "gpu0")]}
    script = Streaming(("attention", 0), ("attention", 1), on=fetch | routed, copies=ALL[:1], depth=1)
    records = play(script, ONE)
    assert transfers(records) == [
        (0, 80, "cpu0->gpu0", "demand"), (80, 160, "cpu0->gpu0", "prefetch"),
        (160, 1160, "cpu0->gpu0", "prefetch 1/2"), (1160, 2160, "cpu0->gpu0", "prefetch 1/3"),
    ]  # fmt: skip


def test_a_queued_copy_becomes_urgent_once_its_part_is_reached() -> None:
    """Three experts of layer 1 are fetched as the step begins; its attention is asked for before them, or passes two of them."""
    fetch = {("StepBegin", 0): [Fetch(1, [0, 2, 3], "gpu0", 1)]}
    routed = {("Routed", 0, 1, 0): [Run(1, [2, 3], "gpu0")]}
    script = Streaming(("attention", 1), on=fetch | routed, copies=ALL[:1], depth=1)
    records = play(script, ONE)
    assert [(t.start, t.cause, t.expert) for t in records.transfers][:2] == [(0, "prefetch", -1), (80, "prefetch", 0)]
    script = Streaming(("attention", 1), on=fetch | routed, copies=ALL[:1])
    records = play(script, ONE)  # depth 0: asked for at 300, while expert 0 is on its way
    assert [(t.start, t.cause, t.expert) for t in records.transfers][:3] == [
        (0, "prefetch", 0), (1000, "demand", -1), (1080, "prefetch", 2)
    ]  # fmt: skip


def test_memory_lies_where_the_weights_are_and_in_buffers() -> None:
    model, toy = tiny_model(), machine()
    streamed = {("attention", 0): HOST, ("dense", 0): HOST, ("attention", 1): HOST, (KV, 1): HOST, ("head", -1): HOST}
    plain, placement = Placement(), Placement(streamed=streamed, stream_depth=2)
    before, after = (required_bytes(model, toy, 100, one) for one in (plain, placement))
    moved = 2 * 80 + 60 + 90
    assert after["gpu0"]["weights"] == before["gpu0"]["weights"] - moved
    assert after["cpu0"]["weights"] == moved
    assert (before["gpu0"]["kv"], after["gpu0"]["kv"], after["cpu0"]["kv"]) == (1600, 800, 800)
    assert after["gpu0"]["streams"] == 3 * (80 + 800)  # the largest use: attention of layer 1 and its cache
    assert before.keys() == after.keys() and "streams" not in before["gpu0"]


def test_buffers_count_in_what_is_in_use_and_must_fit() -> None:
    one = play(Streaming(("head", -1), depth=3, slots=8), ONE)
    none = play(Streaming(slots=8), ONE)
    assert one.peak_bytes["gpu0"] - none.peak_bytes["gpu0"] == 4 * 90 - 90
    small = machine({"gpu0": gpu(memory=8600), "cpu0": cpu()})
    play(Streaming(("head", -1), slots=8), ONE, small)
    with pytest.raises(CapacityError, match="streams"):
        play(Streaming(("head", -1), depth=3, slots=8), ONE, small)


@pytest.mark.parametrize(
    ("streamed", "depth", "words"),
    [
        ({("experts", 0): HOST}, 0, "streamed: no part"),
        ({(KV, -1): HOST}, 0, "streamed: no part"),
        ({("attention", 2): HOST}, 0, "streamed: no part"),
        ({("attention", 0): "cpu7"}, 0, "cpu7"),
        ({("attention", 0): "gpu0"}, 0, "another device than gpu0"),
        ({("attention", 0): HOST}, -1, "stream_depth: expected an integer of at least 0, got -1"),
    ],
)
def test_what_cannot_be_streamed_is_refused(streamed: Any, depth: int, words: str) -> None:
    script = Streaming(depth=depth)
    script.streamed = streamed
    with pytest.raises(PolicyError, match=words):
        play(script, ONE)


def test_a_copy_waits_until_its_place_in_the_buffer_is_free() -> None:
    # Two micro-batches, depth 0. The shared experts are reached at 180, while the second micro-batch reads the dense part.
    # gpu0       |        |DDDDD|DDDDD|00000|11111|00000|11111|  shared, twice
    # cpu0->gpu0 |attn 0  |           |shared 0
    #            0        80    180   280         480
    model = tiny_model(n_shared=1, shared_intermediate=10)
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    records = play(Streaming(("attention", 0), ("shared", 0)), work, model=model)
    assert [(t.start, t.submitted) for t in records.transfers] == [(0, 0), (280, 280)]


def test_chunks_and_hops_are_those_of_any_transfer() -> None:
    records = play(Streaming(("attention", 0)), ONE, chunk_bytes=50)
    assert sizes(records) == [(0, 50, "demand", 0, 50), (50, 80, "demand", 0, 30)]
    assert [t.last for t in records.transfers] == [False, True]
    links = {name: link() for name in ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0")}
    records = play(Streaming(("attention", 0), source="gpu1"), ONE, two_gpus(**links))
    assert [(t.start, t.end, t.link, t.last) for t in records.transfers] == [
        (0, 80, "gpu1->cpu0", False), (80, 160, "cpu0->gpu0", True)
    ]  # fmt: skip
    assert tasks(records)[0] == (160, 260, "gpu0", "dense")


@pytest.mark.parametrize("depth", [0, 1])
def test_waiting_for_a_copy_is_charged_to_it(depth: int) -> None:
    """Without depth both copies of 80 are waited for; with it only the first."""
    records = play(Streaming(("attention", 0), ("attention", 1), depth=depth), ONE)
    exposed = {"exposed_demand": 160 if depth == 0 else 80}
    expected = {"dense": 200, "gpu_experts": 400} | exposed
    walked = breakdown(records, KINDS).ns.sum(axis=0).tolist()
    assert {cause: ns for cause, ns in zip(CAUSES, walked, strict=True) if ns} == expected
    assert Chain(records, KINDS, {}).split([0]) == expected | {"waiting": 0}
    assert bytes_moved(records)["bytes_total"] == 160
    assert counts(records, KINDS)["n_demand_fetches"] == 0


# --------------------------------------------------------------------------------- a cache that is read where it lies
APART = {(KV, 0): HOST}


def test_a_cache_elsewhere_is_read_there_while_decoding() -> None:
    # A row of 6 numbers (query 2, key and value 2 each) is as long as 2 hidden states of 5, its output as long as 1.
    # gpu0       |AAAAA|                 |DDDD|00000|11111|DDDDD      A: projections alone, 59
    # gpu0->cpu0 |     |qkv
    # cpu0       |         |a                                         1 ns: nothing of the rates counts
    # cpu0->gpu0 |           |o
    #            0     59  89 90        110  150   250   350
    records = play(Script(copies=ALL, parts=APART, routed=on_gpu), ONE)
    assert tasks(records)[:4] == [
        (0, 59, "gpu0", "attention"), (89, 90, "cpu0", "attention"), (110, 150, "gpu0", "dense"), (150, 250, "gpu0", "E0x1"),
    ]  # fmt: skip
    assert crossings(records) == [(59, 89, "gpu0->cpu0", "hidden", 2), (90, 110, "cpu0->gpu0", "hidden", 1)]
    assert records.transfers == []


def test_reading_takes_the_memory_rate_of_its_device() -> None:
    """A decode step after a prompt of two rows sees two tokens and half of its own: 20 bytes, at 8 a ns."""
    slow = cpu() | {"memory_bytes_per_s": sure(8e9)}
    work = workload([[[[0, 1], [2, 3]]] * 3], prompt=2)
    records = play(Script(copies=ALL, parts=APART, routed=on_gpu), work, machine({"gpu0": gpu(), "cpu0": slow}))
    assert [t.end - t.start for t in records.tasks if t.device == "cpu0"] == [3]


def test_in_prefill_attention_stays_and_new_entries_go_to_the_cache() -> None:
    """Two chunks: the second copies what the first has left; decoding copies nothing."""
    work = workload([[[[0, 1], [2, 3]]] * 4], prompt=2, prefill_chunk=1)
    records = play(Script(copies=ALL, parts=APART, routed=on_gpu), work)
    assert [s.phase for s in records.steps] == ["prefill", "prefill", "decode", "decode"]
    moved = [(t.link, t.n_bytes, t.cause) for t in records.transfers]
    back = ("gpu0->cpu0", 8, "write-back")
    assert moved == [back, ("cpu0->gpu0", 8, "demand"), back]
    assert [t.device for t in records.tasks if t.kind == "attention"] == ["gpu0", "cpu0"] * 2


def test_its_memory_is_where_it_lies() -> None:
    model, toy = tiny_model(), machine()
    need = required_bytes(model, toy, 100, Placement(parts=APART))
    assert (need["gpu0"]["kv"], need["cpu0"]["kv"], need["gpu0"]["streams"]) == (800, 800, 800)
    records = play(Script(copies=ALL, parts=APART, routed=on_gpu), ONE)
    before = play(Script(copies=ALL, routed=on_gpu), ONE)
    assert records.peak_bytes["cpu0"] == before.peak_bytes["cpu0"] + 8 * 2  # one token at its final length of two
    with pytest.raises(PolicyError, match="in both"):
        script = Streaming(parts=APART)
        script.streamed = {(KV, 0): HOST}
        play(script, ONE)


def test_projections_and_router_read_their_streamed_weights_one_after_the_other() -> None:
    """Both are one use, over once all micro-batches have passed both; then the next layer's may be copied."""
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    parts = [(part, layer) for layer in (0, 1) for part in ("attention", "dense")]
    records = play(Streaming(*parts, depth=1, parts={(KV, 0): HOST, (KV, 1): HOST}), work)
    assert sorted(t.n_bytes for t in records.transfers) == [60, 60, 80, 80]
    assert [t.rows for t in records.tasks if t.kind == "dense"] == [1] * 4
    assert min(t.start for t in records.tasks if t.layer == 0) == 140


def test_projections_of_a_cache_elsewhere_count_in_what_a_policy_is_told() -> None:
    told: list[int] = []

    def routed(event: Any, view: Any) -> Any:
        told.append(view.dense_ns(event.layer))
        return on_gpu(event, view)

    play(Script(copies=ALL, parts=APART, routed=routed), ONE)
    assert told == [59 + 1 + 40, 100]


# ---------------------------------------------------------------------------------- parts that run elsewhere in large steps
ON_CPU = {("attention", 0): HOST, ("dense", 0): HOST}
TO_GPU = {("attention", 0): "gpu0", ("dense", 0): "gpu0"}


class Offloading(Script):
    """A script whose placement offloads parts in large steps."""

    def __init__(self, offload_from: int, offloaded: Any = TO_GPU, **more: Any) -> None:
        super().__init__(**{"copies": ALL, "routed": on_gpu, "parts": ON_CPU} | more)
        self.more = {"offloaded": offloaded, "offload_from": offload_from}

    def place(self, view: Any) -> Placement:
        return replace(super().place(view), **self.more)


def test_offloaded_parts_are_copied_and_run_there_in_large_steps_alone() -> None:
    """A prompt of two rows is large, two decode steps of one row are not. Attention and the rest of the dense part are a use."""
    work = workload([[[[0, 1], [2, 3]]] * 4], prompt=2)
    records = play(Offloading(2), work)
    dense = [(t.step, t.device, t.kind) for t in records.tasks if t.layer == 0 and t.kind in ("dense", "attention")]
    assert dense == [(0, "gpu0", "dense"), (1, "cpu0", "dense"), (2, "cpu0", "dense")]
    # their weights cross one after the other; what the prompt adds to the cache goes back to where it lies
    assert sizes(records) == [(0, 80, "demand", 0, 80), (80, 140, "demand", 0, 60), (240, 256, "write-back", 0, 16)]
    first = next(t for t in records.tasks if t.kind == "dense")
    assert (first.start, first.end) == (140, 240)
    small = play(Offloading(3), work)
    assert small.transfers == [], "no step is large"
    assert [t.device for t in small.tasks if t.kind == "dense" and t.layer == 0] == ["cpu0"] * 3


def test_the_largest_micro_batch_makes_a_step_large() -> None:
    rows = [[[0, 1], [2, 3]]]
    three = [rows * 2, rows * 2, rows * 2]
    for micro_batches, large in ((1, True), (2, True), (3, False)):  # of 3, 2 and 1 rows
        work = workload(three, prompt=1, micro_batches=micro_batches)
        assert bool(play(Offloading(2), work).transfers) is large


def test_a_large_decode_step_reads_the_cache_where_it_lies() -> None:
    records = play(Offloading(1), ONE)
    assert [(t.device, t.kind) for t in records.tasks if t.layer == 0][:3] == [
        ("gpu0", "attention"), ("cpu0", "attention"), ("gpu0", "dense")
    ]  # fmt: skip
    assert sorted(t.n_bytes for t in records.transfers) == [60, 80]


def test_the_next_chunk_finds_what_the_large_one_has_left() -> None:
    """Two chunks of two rows: the cache stays on the CPU, whichever device computes attention."""
    work = workload([[[[0, 1], [2, 3]]] * 5], prompt=4, prefill_chunk=2)
    records = play(Offloading(2), work)
    moved = [(t.link, t.n_bytes, t.cause) for t in records.transfers if t.n_bytes == 16]
    back = ("gpu0->cpu0", 16, "write-back")
    assert moved == [back, ("cpu0->gpu0", 16, "demand"), back]


def test_where_every_step_is_large_the_run_is_that_of_the_placement_it_stands_for() -> None:
    work = workload([[[[0, 1], [2, 3]]] * 4], prompt=2, prefill_chunk=1)
    parts = {("attention", 0): "gpu0", ("dense", 0): "gpu0", (KV, 0): HOST}
    plain = Streaming(("attention", 0), ("dense", 0), parts=parts)
    offloading, other = play(Offloading(1), work), play(plain, work)
    assert (offloading.tasks, offloading.transfers) == (other.tasks, other.transfers)


def test_offloaded_weights_lie_where_they_do_in_small_steps_and_have_a_buffer() -> None:
    model, toy = tiny_model(), machine()
    plain = Placement(parts=ON_CPU)
    before, after = (required_bytes(model, toy, 100, one) for one in (plain, replace(plain, offloaded=TO_GPU)))
    assert after.pop("gpu0") == before.pop("gpu0") | {"streams": 80 + 60 + 800}  # with the cache that is copied in prefill
    assert after == before
    small, large = by_rows(toy, Placement(streamed={("attention", 1): HOST, (KV, 1): HOST}, offloaded={("attention", 1): HOST}))
    assert large.streamed == {} and small.streamed == {("attention", 1): HOST, (KV, 1): HOST}, "it runs where its weights lie"


@pytest.mark.parametrize(
    ("offloaded", "offload_from", "words"),
    [
        ({("experts", 0): "gpu0"}, 1, "offloaded: no part"),
        ({(KV, 0): "gpu0"}, 1, "offloaded: no part"),
        ({("attention", 0): "gpu7"}, 1, "gpu7"),
        ({("attention", 0): HOST}, 1, "another device than cpu0"),
        (TO_GPU, 0, "offload_from: expected a number of rows, at least 1, got 0"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(offloaded: Any, offload_from: int, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        play(Offloading(offload_from, offloaded), ONE)


@pytest.mark.parametrize(("contexts", "kept"), [([0, 5, 3], 8), ([0, 0], 0), ([4], 4), ([], 0)])
def test_a_cache_of_requests_some_of_which_begin_is_that_of_the_others(contexts: list[int], kept: int) -> None:
    model, step = tiny_model(), SimpleNamespace(sequences=[(1, context) for context in contexts])
    streams: Any = SimpleNamespace(near={})
    assert Streams.context_bytes(streams, model, step, 0) == (model.kv_bytes(0, kept, len(contexts)) if kept else 0)  # type: ignore[arg-type]
