"""Random runs: any valid policy on any machine, any actions, and streamed parts in any placement; both engines agree."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from moesim.engine.native import AVAILABLE
from moesim.fits import stream_uses
from moesim.policy import KV, Fetch, Placement, Run
from moesim.records import Records
from tests.engine.engine_kit import Script, assert_same, cpu, gpu, machine, play, tiny_model, workload
from tests.engine.free_kit import assert_alike, drawn
from tests.engine.wild_kit import ANYTHING, play_anything


@settings(max_examples=40, derandomize=True)
@given(**ANYTHING)
def test_any_policy(**anything: Any) -> None:
    play_anything(**anything)


def test_both_engines_on_any_actions(engine: str) -> None:
    if engine == "simpy" or not AVAILABLE:
        pytest.skip("compares the engines, once, where both are")
    found = [assert_alike(seed) for seed in range(120)]
    ended = [records for records in found if records is not None]
    assert 60 < len(ended) < 120
    assert {x.kind for r in ended for x in r.inexact} >= {"late", "reduced", "skipped"}
    moved = [x for r in ended for x in r.transfers]
    assert {x.cause for x in moved} == {"demand", "prefetch", "update", "write-back", "message", "activation"}
    assert {x.link for x in moved} >= {"disk0->cpu0", "gpu0->cpu0", "gpu0->gpu1"}
    assert {x.kind for r in ended for x in r.tasks} >= {"expert", "attention", "dense", "shared", "predict", "leading"}
    assert sum(x.end - x.start == 13 for r in ended for x in r.decisions) > 100


# ------------------ streamed parts: each use is copied once, before it is read, and no buffer holds more than it may
N_LAYERS = 3
MODEL = tiny_model(
    n_layers=N_LAYERS, n_shared=1, shared_intermediate=10, n_dense_layers=1, dense_intermediate=20
)  # fmt: skip
TASK = {"attention": ("attention", "dense"), "dense": ("dense",), "shared": ("shared",)}


class Fetching(Script):
    """Runs everything on the GPU, where it is; fetches some experts of the next layer as a layer begins."""

    def __init__(self, placement: Placement) -> None:
        run = lambda event, view: [Run(event.layer, event.active, "gpu0")]  # noqa: E731
        super().__init__(routed=run, hear=("LayerBegin",))
        self.placement = placement

    def place(self, view: Any) -> Placement:
        return self.placement

    def decide(self, event: Any, view: Any) -> Any:
        layer = getattr(event, "layer", 0) + 1
        if hasattr(event, "mb") or layer == N_LAYERS:
            return super().decide(event, view)
        return [Fetch(layer, range(4), "gpu0", 1)]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_placement(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement, prompt = drawn(rng), int(rng.integers(0, 3))
    n_rows = prompt + int(rng.integers(1, 3))
    n_requests = int(rng.integers(1, 4))
    draw = lambda: rng.permutation(4)[:2].tolist()  # noqa: E731
    requests = [[[draw() for _ in range(N_LAYERS)] for _ in range(n_rows)] for _ in range(n_requests)]
    spec = {"micro_batches": int(rng.integers(1, n_requests + 1)), "prefill_chunk": 1 if prompt and rng.random() < 0.5 else None}
    toy = machine({"gpu0": gpu(), "cpu0": cpu()})
    work = workload(requests, prompt=prompt, **spec)
    records = play(Fetching(placement), work, toy, model=MODEL, engine="simpy")
    if AVAILABLE:
        assert_same(records, play(Fetching(placement), work, toy, model=MODEL, engine="native"))
    uses = stream_uses(MODEL, toy, placement)
    check_bytes(records, work, placement, uses)
    check_order(records, placement, uses)


def check_bytes(records: Records, work: Any, placement: Placement, uses: Any) -> None:
    """Every step copies all of its parts, and of each cache what the step finds there; what it adds goes back."""
    kv = MODEL.kv_bytes(0, 1)
    down = up = 0
    for step in work.steps:
        for use in uses:
            for part in use.parts:
                if part == KV:
                    if step.phase == "decode" and (KV, use.layer) in placement.parts:
                        continue
                    near = placement.kv_resident if (KV, use.layer) in placement.streamed else 0
                    down += kv * sum(max(0, context - near) for _, context in step.sequences)
                    up += kv * sum(max(0, context + n - near) - max(0, context - near) for n, context in step.sequences)
                elif part != "head" or step.n_sequences:
                    down += MODEL.part_bytes(part, use.layer)
    found = {"write-back": 0}
    for t in records.transfers:
        if t.expert < 0:
            found[t.cause] = found.get(t.cause, 0) + t.n_bytes
    assert found.get("demand", 0) + found.get("prefetch", 0) == down
    left = up - found["write-back"]  # what still goes back as the run ends
    assert 0 <= left <= kv * work.max_tokens * N_LAYERS


def check_order(records: Records, placement: Placement, uses: Any) -> None:
    """Read the copies of each layer's parts: they end before the first task that reads them, and are few at a time."""
    held = defaultdict(list)
    for step in records.steps:
        for use in uses:
            inside = [t for t in records.transfers if t.expert < 0 and t.layer == use.layer and step.begin <= t.start < step.end]
            mine = [t for t in inside if t.link.endswith(f"->{use.device}") and t.cause in ("demand", "prefetch")]
            kinds = {kind for part in use.parts for kind in TASK.get(part, (part,) if part != KV else ("attention", "dense"))}
            readers = [
                t for t in records.tasks
                if (t.step, t.layer, t.device) == (step.step, use.layer, use.device) and t.kind in kinds
            ]  # fmt: skip
            same = sum((other.device, other.layer) == (use.device, use.layer) for other in uses)
            if mine and readers and same == 1:
                assert max(t.end for t in mine) <= max(t.start for t in readers)
                held[use.device].append((min(t.start for t in mine), max(t.end for t in readers)))
    for spans in held.values():
        for at, _ in spans:
            assert sum(begin <= at < end for begin, end in spans) <= placement.stream_depth + 1
