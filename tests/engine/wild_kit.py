"""Random policies, machines and workloads, and what holds for the records of any of them, on both engines."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from moesim.engine.native import AVAILABLE
from moesim.policy import (
    DEMAND,
    PREFETCH,
    UPDATE,
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
)
from moesim.records import Records
from tests.engine.engine_kit import (
    EVENTS,
    EXPERT_BYTES,
    Oracle,
    assert_same,
    cpu,
    gpu,
    link,
    machine,
    pair,
    play,
    tiny_model,
    workload,
)

LAYERS, EXPERTS = 3, 5


class Wild:
    """Does anything that is allowed. What it decides depends on the event alone, so it is the same at any call.

    Parameters
    ----------
    seed : int
    exact : bool
        False: it also skips, substitutes, and runs ahead on stale states.
    hear : tuple of str
        Events it answers besides Routed.
    slots : int
        Of its cache, or of its cache for each layer.
    side : bool
        Whether gpu0 has a side lane.
    n_mbs : int
        Micro-batches of each step.
    delayed : bool
        Whether what it answers to Routed takes effect later: then it drops nothing there, since an idle copy that is
        there now may be evicted by then.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, seed: int, exact: bool, hear: tuple[str, ...], slots: int, side: bool, n_mbs: int, delayed: bool) -> None:
        self.seed, self.exact, self.slots, self.side, self.n_mbs = seed, exact, slots, side, n_mbs
        self.listens = frozenset({Routed} | {EVENTS[name] for name in hear})
        self.delayed = delayed
        self.times: list[int] = []
        self.early: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (step, layer) -> (expert, row)

    def place(self, view: Any) -> Placement:
        rng = Random(f"{self.seed} place")
        self.gpus = list(view.gpus)
        self.per_layer = {(g, "cache"): rng.random() < 0.3 for g in self.gpus}
        self.copies = [Copy(rng.randrange(LAYERS), rng.sample(range(EXPERTS), min(self.slots, 2)), g) for g in self.gpus]
        beside = {g: EXPERT_BYTES * rng.choice([0, 0, 1, 2]) for g in self.gpus}
        pools = [Pool(g, "cache", self.slots * EXPERT_BYTES, self.per_layer[g, "cache"], beside[g]) for g in self.gpus]
        self.leaving: set[tuple[int, int, str]] = set()
        return Placement(self.copies, pools + [Pool(g, "spare", EXPERT_BYTES * rng.randint(1, 3)) for g in self.gpus])

    def evict(self, fetch: Fetch, view: Any) -> tuple[int, int] | None:
        rng, device = Random(f"{self.seed} {fetch}"), fetch.device
        idle = [x for x in view.residents(device, fetch.pool) if not view.is_in_use(*x, device)]
        used = [x for x in view.residents(device, fetch.pool) if view.is_in_use(*x, device) and (*x, device) not in self.leaving]
        self.leaving -= {(*x, device) for x in idle}  # it was kept, or has come anew
        if self.per_layer.get((device, fetch.pool)):
            idle, used = ([x for x in some if x[0] == fetch.layer] for some in (idle, used))
        if used and (not idle or rng.random() < 0.3):
            found = rng.choice(used)
            self.leaving.add((*found, device))
            return found
        return rng.choice(idle) if idle else None

    def decide(self, event: Any, view: Any) -> list[Any]:
        self.times.append(view.now_ns)
        assert len(self.times) < 5000, "this policy keeps the engine busy for ever"
        key = tuple(x for x in event if isinstance(x, (int, str)))
        rng = Random(f"{self.seed} {type(event).__name__} {key}")
        actions = []
        if type(event) is Routed:
            self.step = event.step
            actions = self._exactly(event, rng) if self.exact else self._loosely(event, rng)
        elif type(event).__name__ == "StepBegin":
            self.step = event.step
        return actions + self._whims(event, view, rng)

    def _exactly(self, event: Routed, rng: Random) -> list[Any]:
        actions: list[Any] = []
        for expert in event.active:
            where = rng.choice(["cpu0", *self.gpus, *self.gpus])
            if where != "cpu0":
                pool = "cache" if rng.random() < 0.8 else "spare"
                actions.append(Fetch(event.layer, [expert], where, DEMAND, pool))
            actions.append(Run(event.layer, [expert], where))
        if rng.random() < 0.5 and len(actions) > 1:  # one Run for all that go to the same place
            together = [a.experts[0] for a in actions if type(a) is Run and a.device == "cpu0"]
            actions = [a for a in actions if type(a) is not Run or a.device != "cpu0"]
            actions += [Run(event.layer, together, "cpu0")] if together else []
        return actions

    def _loosely(self, event: Routed, rng: Random) -> list[Any]:
        actions: list[Any] = []
        ahead = self.early.get((event.step, event.layer), [])
        for i, routed in enumerate(event.experts.tolist()):
            row = event.first_row + i
            slots = list(routed)
            for expert, of in ahead:
                if of == row:
                    slots.remove(expert if expert in slots else slots[-1])
            for expert in slots:
                luck = rng.random()
                if luck < 0.1 and event.mb == self.n_mbs - 1:
                    actions.append(Skip(event.layer, [expert], [row]))
                elif luck < 0.3:
                    others = [e for e in range(EXPERTS) if e not in routed]
                    actions.append(Run(event.layer, [rng.choice(others)], "cpu0", [row]))
                else:
                    where = rng.choice(["cpu0", *self.gpus])
                    if where != "cpu0":
                        actions.append(Fetch(event.layer, [expert], where))
                    actions.append(Run(event.layer, [expert], where, [row], part=rng.randrange(3)))
        if event.layer + 1 < LAYERS and event.mb == 0 and (event.step, event.layer + 1) not in self.early and rng.random() < 0.5:
            expert, row = rng.randrange(EXPERTS), event.first_row
            self.early[event.step, event.layer + 1] = [(expert, row)]
            actions.append(Run(event.layer + 1, [expert], "cpu0", [row], inputs_from=rng.choice([event.layer, event.layer + 1])))
        return actions

    def _whims(self, event: Any, view: Any, rng: Random) -> list[Any]:
        actions: list[Any] = []
        g = rng.choice(self.gpus)
        if rng.random() < 0.5:
            layer = rng.randrange(LAYERS)
            wanted = rng.sample(range(EXPERTS), rng.randint(1, 2))
            actions.append(Fetch(layer, wanted, g, rng.choice([PREFETCH, UPDATE]), rng.choice(["cache", "cache", "spare"])))
        if rng.random() < 0.2:
            actions.append(Send(rng.randint(1, 300), "cpu0", g, f"m{rng.random()}"))
        if rng.random() < 0.3 and type(event).__name__ not in ("StepEnd", "Fetched", "Sent", "Predicted"):
            lane = "side" if self.side and rng.random() < 0.5 else "main"
            actions.append(Predict(event.step, rng.randrange(LAYERS), rng.choice(["told", "free"]), "gpu0", lane))
        here = [] if self.delayed and type(event) is Routed else view.residents(g, "cache")
        if here and rng.random() < 0.2:
            layer, expert = rng.choice(here)
            if rng.random() < 0.3:
                actions.append(Fetch(layer, [expert], "cpu0", UPDATE, source=g))
            actions.append(Drop(layer, [expert], g))
        elif here and rng.random() < 0.2 and view.free_bytes(g, "spare") >= EXPERT_BYTES:
            layer, expert = rng.choice(here)
            actions.append(Move(layer, [expert], g, "spare"))
        return actions


SIDE = pair("gpu0.experts", "gpu0.side", 0.7, 0.6)


@st.composite
def machines(draw: Any) -> Any:
    n_gpus = draw(st.integers(1, 2))
    chained = n_gpus == 2 and draw(st.booleans())  # gpu1 is reached through gpu0
    medium = draw(st.sampled_from([None, "root"]))
    speed = draw(st.sampled_from([1, 3, 10, 40]))
    share = draw(st.booleans())
    latency = draw(st.sampled_from([0, 7]))

    def a_link() -> Any:
        return link(speed, latency, medium=medium, share_link=share)

    gpus = [f"gpu{i}" for i in range(n_gpus)]
    ends = [("cpu0", "gpu0")] + ([("gpu0" if chained else "cpu0", "gpu1")] if n_gpus == 2 else [])
    links = {f"{a}->{b}": a_link() for x, y in ends for a, b in ((x, y), (y, x))}
    spare = draw(st.sampled_from([2 * EXPERT_BYTES, 1_000_000])) + 22_000  # pools take up to 21,000; one copy in transit fits
    own = [{"expert_ns": draw(st.sampled_from([100, 37])), "per_row_ns": draw(st.sampled_from([0, 3]))} for _ in gpus]
    devices: dict[str, Any] = {
        name: gpu(memory=spare, predict={"told": 20}, **costs) for name, costs in zip(gpus, own, strict=True)
    }
    devices["cpu0"] = cpu(first_extra_ns=draw(st.sampled_from([0, 11])), more_rows=draw(st.sampled_from([(), (7, 9)])))
    contention = []
    if draw(st.booleans()):
        contention.append(
            pair("cpu0.experts", "cpu0->gpu0", draw(st.sampled_from([0.5, 1 / 3, 0.9])), draw(st.sampled_from([0.8, 1.0])))
        )
    if draw(st.booleans()):
        contention.append(pair("gpu0.dense", "cpu0->gpu0", 0.77, 0.6))
    side = draw(st.booleans())
    contention += [SIDE] if side else []
    return machine(devices, links, contention=contention), side


@st.composite
def works(draw: Any) -> Any:
    n_requests = draw(st.integers(1, 3))
    n_rows = draw(st.integers(1, 3))
    rows = st.lists(st.permutations(range(EXPERTS)).map(lambda p: list(p[:2])), min_size=LAYERS, max_size=LAYERS)
    requests = [draw(st.lists(rows, min_size=n_rows, max_size=n_rows)) for _ in range(n_requests)]
    prompt = draw(st.integers(0, n_rows - 1))
    return workload(requests, prompt=prompt, n_experts=EXPERTS, micro_batches=draw(st.integers(1, n_requests)))


HEARD = st.sampled_from([
    (), ("Fetched",), ("Predicted", "LayerBegin"), ("Sent", "Fetched", "Predicted"), ("Ran", "LayerEnd", "StepBegin", "StepEnd"),
    ("LayerEnd", "Sent", "StepBegin"),
])  # fmt: skip


ANYTHING: dict[str, Any] = {
    "seed": st.integers(0, 10**6), "exact": st.booleans(), "hear": HEARD, "slots": st.integers(1, 6), "toy": machines(),
    "work": works(), "chunk": st.sampled_from([None, 300, 1000]), "decision_ns": st.sampled_from([0, 0, 13]),
    "shared": st.booleans(),
}  # fmt: skip


def play_anything(
    seed: int,
    exact: bool,
    hear: tuple[str, ...],
    slots: int,
    toy: Any,
    work: Any,
    chunk: int | None,
    decision_ns: int,
    shared: bool,
) -> None:
    """Play one random run twice on the reference and once on the native engine, and check its records."""
    hardware, side = toy
    changes = {"n_shared": 1, "shared_intermediate": 10} if shared else {}
    model = tiny_model(n_layers=LAYERS, n_experts=EXPERTS, **changes)

    def run(engine: str) -> tuple[Records, Wild]:
        wild = Wild(seed, exact, hear, slots, side, work.steps[0].n_micro, decision_ns > 0)
        predictors = {"told": Oracle(1), "free": Oracle(None)}
        records = play(
            wild,
            work,
            hardware,
            model=model,
            chunk_bytes=chunk,
            decision_ns=decision_ns,
            predictors=predictors,
            engine=engine,
        )
        return records, wild

    records, wild = run("simpy")
    for engine in ["simpy", *(["native"] if AVAILABLE else [])]:
        again, other = run(engine)
        assert_same(records, again)
        assert wild.times == other.times
    check(records, wild, work, hardware, model)


def check(records: Records, wild: Wild, work: Any, hardware: Any, model: Any) -> None:
    """Check a finished run from its records alone."""
    _check_lanes(records, hardware)
    _check_rows(records, wild, work)
    _check_residency(records, wild, hardware)
    _check_bytes(records, hardware)
    assert wild.times == sorted(wild.times)
    for device in hardware.devices.values():
        levels = [(m.time, m.n_bytes) for m in records.memory if m.device == device.name]
        assert all(a[0] <= b[0] for a, b in pairwise(levels))
        assert all(0 <= n <= device.memory_bytes for _, n in levels)
        if levels:
            assert records.peak_bytes[device.name] >= max(n for _, n in levels)
    ends = [s.end for s in records.steps]
    assert ends == sorted(ends) and records.makespan_ns == ends[-1]
    assert [(s.step, s.phase) for s in records.steps] == [(s.index, s.phase) for s in work.steps]
    layers = [(x.begin, x.end) for x in records.layers]
    assert all(a[1] <= b[0] for a, b in pairwise(layers)) and len(layers) == len(work.steps) * LAYERS


def _check_lanes(records: Records, hardware: Any) -> None:
    busy: dict[Any, list[tuple[int, int]]] = {}
    media = {x.name: x.medium or x.name for x in hardware.links}
    for t in records.tasks:
        assert t.submitted <= t.ready <= t.start <= t.end
        assert t.end - t.start >= t.work
        busy.setdefault((t.device, t.lane), []).append((t.start, t.end))
    for x in records.transfers:
        assert x.submitted <= x.start <= x.end
        busy.setdefault(media[x.link], []).append((x.start, x.end))
    for a in records.activations:
        assert a.submitted <= a.start <= a.end
        busy.setdefault(("control", a.link), []).append((a.start, a.end))
    for name, slices in busy.items():
        slices.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(slices)), name


def _check_rows(records: Records, wild: Wild, work: Any) -> None:
    ran: Counter[Any] = Counter()
    for t in records.tasks:
        if t.kind == "expert":
            ran[t.step, t.layer, t.expert if wild.exact else -1] += t.rows
    for x in records.inexact:
        assert not wild.exact and x.slots > 0
        if x.kind == "skipped":
            ran[x.step, x.layer, -1] += x.slots
    routed: Counter[Any] = Counter()
    for step in work.steps:
        for mb in step.micro:
            for layer, routing in enumerate(mb.layers):
                for expert, n in enumerate(routing.rows):
                    routed[step.index, layer, expert if wild.exact else -1] += n
    assert +ran == +routed
    if not wild.exact:
        assert all(s.gate_mass == pytest.approx(LAYERS * s.n_tokens) for s in records.steps)


def _check_residency(records: Records, wild: Wild, hardware: Any) -> None:
    """Every Run on a GPU lies within the life of a copy there, and lives of a copy do not overlap."""
    kinds = {x.name: x.dst for x in hardware.links}
    born: dict[Any, list[int]] = {}
    for copy in wild.copies:
        for expert in copy.experts:
            born.setdefault((copy.device, copy.layer, expert), []).append(0)
    for t in records.transfers:
        if t.last and t.expert >= 0 and t.cause != "write-back":
            born.setdefault((kinds[t.link], t.layer, t.expert), []).append(t.end)
    died: dict[Any, list[int]] = {}
    for e in records.evictions:
        died.setdefault((e.device, e.layer, e.expert), []).append(e.time)
    lives = {}
    for unit, times in born.items():
        ends = died.get(unit, [])
        assert len(times) - 1 <= len(ends) <= len(times)
        lives[unit] = list(zip(sorted(times), [*sorted(ends), 1 << 62], strict=False))
        assert all(a[1] <= b[0] for a, b in pairwise(lives[unit]))
    for t in records.tasks:
        if t.kind == "expert" and t.device != "cpu0":
            assert any(a <= t.start and t.end <= b for a, b in lives[t.device, t.layer, t.expert])


def _check_bytes(records: Records, hardware: Any) -> None:
    """The pieces of a completed hop are whole experts; each hop of a completed fetch was passed once."""
    hops: Counter[Any] = Counter()
    done = set()
    for t in records.transfers:
        if t.expert >= 0:
            hops[t.fetch, t.link] += t.n_bytes
            assert hops[t.fetch, t.link] <= EXPERT_BYTES
            if t.last:
                done.add(t.fetch)
    assert all(n == EXPERT_BYTES for (fetch, _), n in hops.items() if fetch in done)
