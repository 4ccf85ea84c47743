"""A tiny model, tiny machines with round costs, hand-written routing and a scripted policy, for tests of the engine.

The round numbers, in ns and bytes (each can be changed by an argument of `machine` or `tiny_model`):

==============================  =====================================================================
expert                          1000 bytes
attention, rest of dense part   60 and 40 on a GPU (one task of 100 if on the same device), 120 and 80 on a CPU
expert on a GPU                 100, whatever the rows
expert on a CPU                 300 + 100 a row
shared experts                  50 on a GPU, 500 on a CPU
weights over a link             1 byte/ns, no latency: 1000 an expert
activations over a link         10 + 10 a row (10 bytes a row at 1 byte/ns)
embedding, leading, head        0
==============================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moesim.core.record_table import RecordTable
from moesim.engine import EngineOptions, simulate
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec, load_model
from moesim.policy import (
    Copy,
    Fetch,
    Fetched,
    LayerBegin,
    LayerEnd,
    Placement,
    Pool,
    Predicted,
    Ran,
    Routed,
    Run,
    Sent,
    SharedRan,
    StepBegin,
    StepEnd,
)
from moesim.records import Records
from moesim.trace import Trace
from moesim.trace.workload import Workload, WorkloadSpec, compose

EXPERT_BYTES = 1000
WEIGHTS = (0.75, 0.25)  # of the two slots of a row; exact in float16


def tiny_model(**changes: Any) -> ModelSpec:
    """Two layers of four experts, two per token, 1000 bytes an expert, 10 bytes a hidden state."""
    fields = {
        "name": "tiny", "n_layers": 2, "n_experts": 4, "top_k": 2, "hidden": 5, "expert_intermediate": 50, "n_mats": 2,
        "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "vocab": 8,
    }  # fmt: skip
    return load_model(fields | changes)


def sure(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "assumed", "why": "a test"}


def flat(ns: float, per_row_ns: float = 0, **more: Any) -> dict[str, Any]:
    """Return a curve of a constant time, plus some for each row."""
    return {
        "form": "linear", "range": [1, 100_000], "base_us": sure(ns / 1000), "per_token_us": sure(per_row_ns / 1000), **more
    }  # fmt: skip


def device(kind: str, *, host: str = "host0", expert_ns: float = 100, per_row_ns: float = 0, attention_ns: int = 60,
           dense_ns: int = 40, shared_ns: int = 50, embedding_ns: int = 0, leading_ns: int = 0, head_ns: int = 0,
           first_extra_ns: int = 0, more_rows: Sequence[int] = (), predict: Mapping[str, int] | None = None,
           memory: int = 1_000_000, workspace: int = 0,
           ) -> dict[str, Any]:  # fmt: skip
    """Describe a device. Attention is its curve plus 1 ns for its context, at rates that make nothing else count."""
    parts = {"attention": attention_ns - 1, "dense": dense_ns, "shared": shared_ns, "embedding": embedding_ns,
             "leading": leading_ns, "head": head_ns}  # fmt: skip
    shape = {"hidden": 5, "intermediate": 50, "bits": 16.0}
    return {
        "kind": kind, "host": host, "memory_bytes": sure(memory), "workspace_bytes": sure(workspace),
        "memory_bytes_per_s": sure(1e18), "flops": sure(1e18), "first_extra_us": sure(first_extra_ns / 1000),
        **({"more_rows": sure([[n, ns / 1000] for n, ns in enumerate(more_rows, 2)])} if more_rows else {}),
        "experts": [flat(expert_ns, per_row_ns, shape=shape)],
        "parts": [flat(ns, model="tiny", part=part) for part, ns in parts.items()],
        "predict": {name: flat(ns) for name, ns in (predict or {}).items()},
    }  # fmt: skip


def gpu(**changes: Any) -> dict[str, Any]:
    return device("gpu", **changes)


def cpu(**changes: Any) -> dict[str, Any]:
    slow: dict[str, Any] = {
        "expert_ns": 300,
        "per_row_ns": 100,
        "attention_ns": 120,
        "dense_ns": 80,
        "shared_ns": 500,
    }
    return device("cpu", **slow | changes)


def link(bytes_per_ns: float = 1, latency_ns: int = 0, *, medium: str | None = None, share_link: bool = False,
         act_latency_ns: int = 10, act_bytes_per_ns: float = 1) -> dict[str, Any]:  # fmt: skip
    return {
        "medium": medium,
        "any": {"latency_us": sure(latency_ns / 1000), "bytes_per_s": sure(bytes_per_ns * 1e9)},
        "activation": {
            "latency_us": sure(act_latency_ns / 1000), "bytes_per_s": sure(act_bytes_per_ns * 1e9), "share_link": share_link
        },
    }  # fmt: skip


def pair(a: str, b: str, a_rate: float, b_rate: float) -> dict[str, Any]:
    return {"a": a, "b": b, "a_rate": sure(a_rate), "b_rate": sure(b_rate)}


def machine(devices: Mapping[str, Any] | None = None, links: Mapping[str, Any] | None = None, *, compute: str = "gpu0",
            backing: Sequence[str] = ("cpu0",), contention: Sequence[Any] = ()) -> HardwareProfile:  # fmt: skip
    """Build a machine; by default one GPU and one CPU with a link each way."""
    return load_hardware(
        {
            "name": "toy", "description": "round numbers", "compute": compute, "backing": list(backing),
            "devices": dict(devices or {"gpu0": gpu(), "cpu0": cpu()}),
            "links": dict(links or {"cpu0->gpu0": link(), "gpu0->cpu0": link()}),
            "contention": list(contention),
        }
    )  # fmt: skip


def workload(requests: Sequence[Any], *, prompt: int = 0, n_experts: int = 4, weights: Sequence[float] = WEIGHTS,
             **spec: Any) -> Workload:  # fmt: skip
    """Compose hand-written routing: for every request its rows, for every row its layers, for every layer its ids.

    The first `prompt` rows of each request are its prompt; all requests run together unless `spec` says otherwise.
    """
    rows = np.array([row for request in requests for row in request], dtype=np.uint8)
    table = np.broadcast_to(np.array(weights), rows.shape)
    lengths = [len(request) for request in requests]
    trace = Trace.build(
        experts=rows, weights=table, n_prompt=[prompt] * len(lengths), n_decode=[n - prompt for n in lengths],
        n_experts=n_experts, model="tiny", label="synthetic", prompt_offset=0 if prompt else 1,
    )  # fmt: skip
    fields: dict[str, Any] = {"batch_size": len(lengths), "requests": "all"} | spec
    return compose(trace, WorkloadSpec(**fields))


_KEYS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    StepBegin: lambda e: ("StepBegin", e.step),
    LayerBegin: lambda e: ("LayerBegin", e.step, e.layer),
    Routed: lambda e: ("Routed", e.step, e.layer, e.mb),
    Predicted: lambda e: ("Predicted", e.step, e.layer, e.mb),
    Fetched: lambda e: ("Fetched", e.layer, e.expert, e.device),
    Ran: lambda e: ("Ran", e.step, e.layer, e.experts[0], e.device),
    SharedRan: lambda e: ("SharedRan", e.step, e.layer, e.mb, e.device),
    Sent: lambda e: ("Sent", e.tag),
    LayerEnd: lambda e: ("LayerEnd", e.step, e.layer),
    StepEnd: lambda e: ("StepEnd", e.step),
}
EVENTS: dict[str, type] = {kind.__name__: kind for kind in _KEYS}


class Script:
    """A policy that answers listed events with literal actions.

    Parameters
    ----------
    on : mapping
        Key of an event, such as ``("Routed", step, layer, mb)`` or ``("Fetched", layer, expert, device)``, to a list
        of actions or a function ``(event, view)`` returning one.
    copies, pools, parts, enforce_capacity
        Of the placement; without `pools`, each device named in `copies` or 'gpu0' gets a "cache" of `slots` experts.
    routed : callable, optional
        Answers every Routed that `on` does not list.
    evict : callable ``(fetch, view)``, or list of answers in turn, optional
        Without it None is answered.
    hear : tuple of str
        Further events to listen to, for `log`.
    """

    def __init__(
        self, on: Mapping[tuple[Any, ...], Any] | None = None, *, copies: Sequence[Copy] = (),
        pools: Sequence[Pool] | None = None, slots: int = 8, parts: Mapping[tuple[str, int], str] | None = None,
        enforce_capacity: bool = True, routed: Callable[[Any, Any], Any] | None = None, evict: Any = None,
        exact: bool = True, hear: Iterable[str] = (), needs: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.on = dict(on or {})
        self.routed = routed
        names = {key[0] for key in self.on} | set(hear) | ({"Routed"} if routed else set())
        self.listens = frozenset(EVENTS[name] for name in names)
        self.needs = frozenset(needs)
        self.exact = exact
        if pools is None:
            pools = [Pool(d, "cache", slots * EXPERT_BYTES) for d in sorted({"gpu0"} | {c.device for c in copies})]
        self._placement = Placement(copies, pools, dict(parts or {}), enforce_capacity)
        self._evict = evict
        self.log: list[tuple[Any, ...]] = []  # (time, key of the event)
        self.asked: list[tuple[int, int, int, int]] = []  # (time, layer, expert, urgency) of the calls of evict

    def place(self, view: Any) -> Placement:
        return self._placement

    def decide(self, event: Any, view: Any) -> Any:
        key = _KEYS[type(event)](event)
        self.log.append((view.now_ns, key))
        answer = self.on.get(key)
        if answer is None and self.routed is not None and type(event) is Routed:
            answer = self.routed
        return answer(event, view) if callable(answer) else answer or ()

    def evict(self, fetch: Any, view: Any) -> tuple[int, int] | None:
        self.asked.append((view.now_ns, fetch.layer, fetch.experts[0], fetch.urgency))
        if isinstance(self._evict, list):
            return self._evict.pop(0) if self._evict else None
        return self._evict(fetch, view) if self._evict else None


class Oracle:
    """A predictor that says the routing, needing the state of the layer `lookahead` before."""

    name, label = "told", "oracle"

    def __init__(self, lookahead: int | None = 1) -> None:
        self.lookahead = lookahead

    def needs_layer(self, layer: int) -> int | None:
        return None if self.lookahead is None else max(0, layer - self.lookahead)

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None]:
        return step.micro[mb].layers[layer].experts, None


def play(policy: Any, work: Workload, hardware: HardwareProfile | None = None, *, model: ModelSpec | None = None,
         decision_ns: int = 0, chunk_bytes: int | None = None, each_layer: Sequence[str] = (),
         slots: Mapping[str, int] | None = None,
         predictors: Mapping[str, Any] | None = None, tables: Mapping[str, Any] | None = None, name: str = "script",
         engine: str | None = None,
         ) -> Records:  # fmt: skip
    """Run a policy on the toy machine."""
    model = model or tiny_model()
    costs = CostModel(model, hardware or machine(), chunk_bytes=chunk_bytes, each_layer=each_layer)
    return simulate(
        model=model, costs=costs, workload=work, policy=policy, cache_slots=slots or {}, predictors=predictors, tables=tables,
        options=EngineOptions(decision_ns), policy_name=name, engine=engine,
    )  # fmt: skip


def assert_same(a: Records, b: Records) -> None:
    """Compare two runs, list by list so that a failure is short."""
    for field in a.__dataclass_fields__:
        left, right = getattr(a, field), getattr(b, field)
        if isinstance(left, RecordTable):
            for i, (x, y) in enumerate(zip(left, right, strict=False)):
                assert x == y, f"{field}[{i}]: {x} != {y}"
            assert len(left) == len(right), field
        else:
            assert left == right, field


def tasks(records: Records) -> list[tuple[Any, ...]]:
    """Return (start, end, device, what) of each task; experts are written 'E<id>x<rows>', the side lane has a star."""
    return [
        (
            t.start,
            t.end,
            t.device + ("*" if t.lane == "side" else ""),
            f"E{t.expert}x{t.rows}" if t.kind == "expert" else t.kind,
        )
        for t in records.tasks
    ]


def transfers(records: Records) -> list[tuple[int, int, str, str]]:
    """Return (start, end, link, 'cause L/E') of each transfer."""
    return [(t.start, t.end, t.link, t.cause + (f" {t.layer}/{t.expert}" if t.expert >= 0 else "")) for t in records.transfers]


def crossings(records: Records) -> list[tuple[int, int, str, str, int]]:
    """Return (start, end, link, direction, rows) of each activation crossing."""
    return [(a.start, a.end, a.link, a.direction, a.rows) for a in records.activations]


# ----------------------------------------------------- copies, workloads and policies that tests of the rules share
ALL = [Copy(layer, range(4), "gpu0") for layer in (0, 1)]
ONE = workload([[[[0, 1], [2, 3]]]])  # one request, one decode step: layer 0 -> 0, 1; layer 1 -> 2, 3
TWO = workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]])  # row 1: layer 0 -> 1, 2


def on_gpu(event: Routed, view: Any) -> list[Any]:
    return [Run(event.layer, event.active, "gpu0")]


def on_demand(event: Routed, view: Any) -> list[Any]:
    return [Fetch(event.layer, event.active, "gpu0"), Run(event.layer, event.active, "gpu0")]


def idle(fetch: Fetch, view: Any) -> tuple[int, int] | None:
    """Name the first idle resident of the pool."""
    for layer, expert in view.residents(fetch.device, fetch.pool):
        if not view.is_in_use(layer, expert, fetch.device):
            return layer, expert
    return None


def two_gpus(**links: Any) -> Any:
    names = ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0", "gpu0->gpu1", "gpu1->gpu0")
    return machine({"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}, {n: links[n] for n in names if n in links})


POOLS = [Pool("gpu0", "cache", 8000), Pool("gpu1", "cache", 8000)]
