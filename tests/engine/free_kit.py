"""A policy that draws its actions freely: widths, late runs, streams, host threads, disks; both engines play it.

Some runs end in an error or a deadlock; then both engines say the same.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np

from moesim.errors import MoesimError
from moesim.policy import (
    DEMAND,
    KV,
    LAYER_PARTS,
    STEP_PARTS,
    Copy,
    Drop,
    Fetch,
    Move,
    Placement,
    Pool,
    Predict,
    Routed,
    Run,
    Send,
    Skip,
    Work,
)
from moesim.records import Records
from tests.engine.engine_kit import EVENTS, Oracle, assert_same, cpu, gpu, link, machine, pair, play, sure, tiny_model, workload

LAYERS, EXPERTS, LOW = 3, 4, 4.0
MODEL = tiny_model(n_layers=LAYERS, low_bits=(LOW,), n_shared=1, shared_intermediate=10, n_dense_layers=1, dense_intermediate=20)


def drawn(rng: np.random.Generator) -> Placement:
    """Draw where parts are, and which are streamed; all experts are on gpu0."""
    layers = range(LAYERS)
    parts = {(part, layer): "cpu0" for part in ("attention", "dense", "shared") for layer in layers if rng.random() < 0.2}
    parts |= {(part, -1): "cpu0" for part in STEP_PARTS if rng.random() < 0.2}
    every = [(part, layer) for part in (*LAYER_PARTS, KV) for layer in layers] + [(part, -1) for part in STEP_PARTS]
    streamed = {}
    for part, layer in every:
        on = parts.get(("attention" if part == KV else part, layer), "gpu0")
        if rng.random() < 0.6:
            streamed[part, layer] = "cpu0" if on == "gpu0" else "gpu0"
        elif part == KV and rng.random() < 0.6:
            parts[part, layer] = "cpu0" if rng.random() < 0.8 else "gpu0"
    copies = [Copy(layer, range(4), "gpu0") for layer in layers]
    depth, near = int(rng.integers(0, 4)), int(rng.integers(0, 3))
    return Placement(copies, [Pool("gpu0", "cache", 12_000)], parts, streamed=streamed, stream_depth=depth, kv_resident=near)


def offloaded(rng: Random, placement: Placement) -> dict[tuple[str, int], str]:
    """Draw which parts run on the other device in large steps; for half of the draws none."""
    every = [(part, layer) for part in LAYER_PARTS for layer in range(LAYERS)] + [(part, -1) for part in STEP_PARTS]
    share = rng.choice([0.0, 0.0, 0.3, 0.7])
    other = {"cpu0": "gpu0", "gpu0": "cpu0"}
    return {at: other[placement.parts.get(at, "gpu0")] for at in every if rng.random() < share}


class Free:
    """Draws its actions from the seed and the event; `slips` is how often an action is drawn that may be refused."""

    needs: frozenset[str] = frozenset()
    exact = False

    def __init__(self, seed: int, slips: float) -> None:
        self.seed, self.slips = seed, slips
        rng = Random(f"{seed} hear")
        self.listens = frozenset({Routed} | {EVENTS[name] for name in EVENTS if rng.random() < 0.5})
        self.step = 0
        self.told: list[tuple[int, Any]] = []

    def place(self, view: Any) -> Placement:
        rng = Random(f"{self.seed} place")
        self.places = [d for d in view.devices if d != "disk0"]
        tiers = "disk0" in view.devices and view.host == "cpu0" and rng.random() < 0.6
        self.host = "disk0" if tiers else view.host
        self.pooled = [d for d in self.places if d != self.host]
        pools = [Pool(d, "cache", rng.randint(3, 9) * 1000, rng.random() < 0.3) for d in self.pooled]
        pools += [Pool(d, "spare", rng.randint(1, 2) * 1000) for d in self.pooled]
        copies = [Copy(layer, [rng.randrange(EXPERTS)], d, bits=rng.choice([None, LOW])) for layer in (0, 1) for d in self.pooled]
        found = Placement(copies, pools, enforce_capacity=False, backing=["disk0"] if tiers else [])
        if view.host == "cpu0" and rng.random() < 0.6:
            streams = drawn(np.random.default_rng(self.seed))
            found = dataclasses.replace(found, parts=streams.parts, streamed=streams.streamed, stream_depth=streams.stream_depth)
            found = dataclasses.replace(found, offloaded=offloaded(rng, found), offload_from=rng.randint(1, 3))
        return found

    def evict(self, fetch: Fetch, view: Any) -> Any:
        rng = Random(f"{self.seed} {fetch}")
        free = [
            (layer, expert, bits)
            for bits in (None, LOW)
            for layer, expert in view.residents(fetch.device, fetch.pool, bits=bits)
            if not view.is_in_use(layer, expert, fetch.device, bits)
        ]
        same = [x for x in free if x[0] == fetch.layer]
        return rng.choice(same or free) if free and rng.random() > self.slips / 2 else None

    def decide(self, event: Any, view: Any) -> list[Any]:
        key = tuple(x for x in event if isinstance(x, (int, str)))
        rng = Random(f"{self.seed} {type(event).__name__} {key}")
        layer = rng.randrange(LAYERS)
        asked = [(view.remaining_ns(layer, e, d, LOW), view.is_in_use(layer, e, d)) for e in range(EXPERTS) for d in self.places]
        self.told.append((view.now_ns, (type(event).__name__, *key, asked)))
        self.step = getattr(event, "step", self.step)
        actions = [x for e in event.active for x in self._serve(event, e, rng)] if type(event) is Routed else []
        often = 0.0 if len(self.told) > 1000 else 0.2 if hasattr(event, "step") else 0.05  # else it is busy for ever
        return actions + [x for _ in range(2) if rng.random() < often for x in self._whim(layer, rng, view)]

    def _serve(self, event: Routed, expert: int, rng: Random) -> list[Any]:
        where, bits = rng.choice(self.places), rng.choice([None, None, LOW])
        late = event.layer + 1 < LAYERS and rng.random() < 0.3
        rows = (
            [event.first_row + i for i, ids in enumerate(event.experts.tolist()) if expert in ids] if rng.random() < 0.3 else None
        )
        if rng.random() < self.slips:
            return [Skip(event.layer, [expert], rows)]
        named = rows if rng.random() < 0.3 else None
        fetch = [Fetch(event.layer, [expert], where, DEMAND, bits=bits)] if where in self.pooled else []
        return [*fetch, Run(event.layer, [expert], where, named, bits=bits, late=late, part=rng.randrange(2))]

    def _whim(self, layer: int, rng: Random, view: Any) -> list[Any]:
        d, bits, expert = rng.choice(self.pooled), rng.choice([None, LOW]), rng.randrange(EXPERTS)
        kind = rng.randrange(5 if rng.random() < self.slips else 3)
        here = view.residents(d, "cache", layer, bits)
        if kind == 0:
            return [Fetch(layer, [expert], d, rng.randrange(4), rng.choice(["cache", "cache", "spare"]), bits=bits)]
        if kind == 1:
            lane = "side" if rng.random() < self.slips else "main"
            other = rng.choice([Predict(self.step, layer, "told", "gpu0", lane), Work("plan", d, rng.randrange(3))])
            return [Send(rng.randint(1, 300), "cpu0", "gpu0", "m") if rng.random() < 0.5 else other]
        if kind == 2 and here:
            back = [Fetch(layer, here[:1], self.host, 2, source=d, bits=bits)] if rng.random() < 0.3 else []
            return [*back, Drop(layer, here[:1], d, bits)]
        if kind == 3 and here:
            return [Move(layer, here[:1], d, "spare", bits)]
        return [Run(min(layer + 1, LAYERS - 1), [expert], d, [0], inputs_from=layer)] if kind == 4 else []


def toy(rng: Random) -> Any:
    disk, two, medium = rng.random() < 0.4, rng.random() < 0.5, rng.choice([None, "root"])
    share, latency = rng.random() < 0.4, rng.choice([0, 7])
    devices: dict[str, Any] = {
        "gpu0": gpu(predict={"told": 20}),
        "cpu0": cpu(first_extra_ns=rng.choice([0, 11]), more_rows=rng.choice([(), (7, 9)])),
    }
    ends = [("cpu0", "gpu0")]
    if two:
        devices["gpu1"] = gpu(expert_ns=37, per_row_ns=3, predict={"told": 20})
        ends.append((rng.choice(["cpu0", "gpu0"]), "gpu1"))
    if disk:
        devices["disk0"] = {"kind": "disk", "memory_bytes": sure(10**6)}
        ends.append(("disk0", "cpu0"))
    ways = [way for x, y in ends for way in (f"{x}->{y}", f"{y}->{x}")]
    links = {way: link(rng.choice([1, 3, 10]), latency, medium=medium, share_link=share) for way in ways}
    contention = [pair("gpu0.experts", "gpu0.side", 0.7, 0.6)] if rng.random() < 0.5 else []
    contention += [pair("cpu0.experts", "cpu0->gpu0", 1 / 3, 0.8)] if rng.random() < 0.5 else []
    backing = "disk0" if disk and rng.random() < 0.5 else "cpu0"
    found = machine(devices, links, backing=[backing], contention=contention)
    thread = rng.choice([{}, {"host_expert_us": Fraction(13, 1000)}, {"host_shared": True}])
    return dataclasses.replace(found, host_us={"plan": Fraction(17, 1000)}, **thread)


def outcome(seed: int, engine: str) -> tuple[Any, list[Any]]:
    rng = Random(seed)
    n_requests, n_rows = rng.randint(1, 3), rng.choice([1, 2, 2, 3, 3, 70])
    requests = [
        [[rng.sample(range(EXPERTS), 2) for _ in range(LAYERS)] for _ in range(n_rows)] for _ in range(n_requests)
    ]  # fmt: skip
    work = workload(requests, prompt=69 if n_rows == 70 else rng.randint(0, n_rows - 1), micro_batches=rng.randint(1, n_requests))
    policy = Free(seed, rng.choice([0, 0, 0.05, 0.2]))
    found: Any
    try:
        found = play(
            policy,
            work,
            toy(rng),
            model=MODEL,
            predictors={"told": Oracle()},
            chunk_bytes=rng.choice([None, 300]),
            decision_ns=rng.choice([0, 0, 13]),
            engine=engine,
        )
    except MoesimError as error:
        found = type(error), str(error)
    return found, policy.told


def assert_alike(seed: int) -> Records | None:
    """Play on both engines; return the records if the run came to its end."""
    (a, heard), (b, told) = outcome(seed, "simpy"), outcome(seed, "native")
    assert heard == told
    if isinstance(a, Records) and isinstance(b, Records):
        assert_same(a, b)
        return a
    assert a == b
    return None
