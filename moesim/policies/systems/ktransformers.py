"""KTransformers: some experts on the GPU, others on the CPU; long prompts layer by layer.

kvcache-ai/ktransformers: the operators of 2024 and 2025 (``kt-layer``), and kt-kernel at 95009ea with kvcache-ai/sglang
``kt_ep_wrapper.py`` (``kt-expert``). Nothing is cached or predicted.

| point | paper says | released code does | we do |
|---|---|---|---|
| kt-layer: on the GPU | - | routed experts of layers by a name pattern; by default none | whole layers, as many as fit the slots, from the ``first`` or the ``last`` |
| kt-layer: long prompts | - | optional: beyond a threshold each layer's experts are copied to the GPU and given up; shipped as 0, off | ``prefill_threshold``, for chunks of prefill; None is off |
| kt-expert: on the GPU | - | ``uniform``, ``front-loading``, ``random`` (seed 42) or ``frequency`` | the same (``strategy``); ``random`` draws other numbers |
| how many | - | a number a layer, or a share of all | the granted slots, or ``gpu_experts`` a layer |
| layer | - | the input is copied to a staging buffer; CPU and GPU at the same time; the later ends it | the same; rows cross to the CPU, and outputs back |
| kt-expert: long chunks | - | from ``--kt-gpu-prefill-token-threshold`` tokens on all experts of a layer go to one buffer; the CPU idles | ``prefill_threshold``; residents are copied as well, nothing runs before all is there |
| dynamic update | - | after such a layer the chunk's most frequent experts become its residents, as many as before | ``dynamic_update``; ties to the lower id |
| deferral | - | the d smallest weights of a token may be late, unless another token of the call protects the expert | ``kt-expert-deferral``, ``max_deferred``; none in the last layer |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from moesim.errors import CapacityError
from moesim.policies.base import CACHE, PolicyBase, cpu_of, gpu_of, layer_residents, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts.placement import global_top
from moesim.policies.released import Released, Tables
from moesim.policy import (
    DEMAND,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Move,
    Placement,
    Pool,
    Routed,
    Run,
    Send,
    Sent,
    StepBegin,
    View,
)  # fmt: skip

if TYPE_CHECKING:
    from numpy.typing import NDArray


Strategy = Literal["uniform", "front-loading", "random", "frequency"]


def gpu_experts(
    strategy: Strategy, total: int, n_layers: int, n_experts: int, *, seed: int = 42,
    counts: Sequence[Sequence[float]] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Choose the experts of each layer on the GPU, ``total`` over all layers, by a strategy.

    ``random`` draws from another generator than the released code.

    >>> [len(layer) for layer in gpu_experts("uniform", 10, 4, 8)]
    [3, 3, 2, 2]
    >>> [len(layer) for layer in gpu_experts("front-loading", 10, 4, 8)]
    [8, 2, 0, 0]
    >>> gpu_experts("frequency", 3, 2, 4, counts=[[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    [[1, 3], [2]]
    """
    total = min(total, n_layers * n_experts)
    if strategy == "frequency":
        assert counts is not None
        return global_top(counts, total)
    if strategy == "random":
        drawn = np.random.default_rng(seed).permutation(n_layers * n_experts)[:total].tolist()
        return [sorted(unit % n_experts for unit in drawn if unit // n_experts == layer) for layer in range(n_layers)]
    if strategy == "uniform":
        each, more = divmod(total, n_layers)
        return [list(range(each + (layer < more))) for layer in range(n_layers)]
    return [list(range(max(0, min(n_experts, total - layer * n_experts)))) for layer in range(n_layers)]


def most_used(experts: NDArray[Any], n_experts: int, n: int) -> list[int]:
    """Return the n experts with the most rows of a chunk, ascending; of equals the lower ids.

    >>> most_used(np.array([[3, 1], [3, 2], [0, 1]]), 4, 3)
    [0, 1, 3]
    """
    counts = np.bincount(np.ravel(experts), minlength=n_experts).tolist()
    return sorted(sorted(range(n_experts), key=lambda expert: -counts[expert])[:n])


def split_late(
    experts: NDArray[Any], late: int, on_cpu: Collection[int], weights: NDArray[Any] | None = None
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Divide the CPU's experts into those that a layer waits for, and those that the next adds.

    The ``top_k - late`` heaviest of each row are protected, of equals the first rank (without weights these fall with it); what any
    row protects is awaited by all.

    >>> split_late(np.array([[9, 3, 7, 1]]), 2, {9, 3, 7})
    ([3, 9], [7])
    >>> split_late(np.array([[9, 3, 7, 1], [7, 5, 9, 1]]), 2, {9, 3, 7, 5})
    ([3, 5, 7, 9], [])
    >>> split_late(np.array([[9, 3, 7, 1]]), 2, {9, 3, 7}, np.array([[0.2, 0.3, 0.4, 0.1]]))
    ([3, 7], [9])
    """
    n_protected = max(0, experts.shape[1] - late)
    if weights is not None:
        experts = np.take_along_axis(experts, np.argsort(-weights, axis=-1, kind="stable"), axis=-1)
    protected = set(experts[:, :n_protected].ravel().tolist())
    return sorted(e for e in on_cpu if e in protected), sorted(e for e in on_cpu if e not in protected)


LAYER = "layer"
"""The pool that holds all experts of one layer during a long prompt."""
RESIDENTS = "residents"


class WholeLayer:
    """A layer whose experts are all copied to a GPU buffer before what is routed runs."""

    def __init__(self, gpu: str, host: str) -> None:
        self._gpu, self._host = gpu, host
        self.layer = -1
        self._awaited: set[int | str] = set()
        self._routed: set[int] = set()

    def load(self, event: Routed, view: View) -> list[Action]:
        """Begin with the first micro-batch; the experts of all wait together."""
        self._routed.update(event.active)
        if self.layer == event.layer:
            return self._run()
        layer = self.layer = event.layer
        ids = range(view.model.n_experts)
        absent = [e for e in ids if not view.is_resident(layer, e, self._gpu)]
        self._awaited.update(absent)
        actions: list[Action] = [Fetch(layer, absent, self._gpu, DEMAND, LAYER)]
        n_again = len(ids) - len(absent)
        if n_again:  # the buffer gets a copy of the residents too; the engine knows one copy a device, so their bytes are sent
            self._awaited.add(RESIDENTS)
            actions.append(Send(n_again * view.model.expert_bytes(layer), self._host, self._gpu, RESIDENTS))
        return actions

    def arrived(self, what: int | str) -> list[Action]:
        self._awaited.discard(what)
        return self._run()

    def _run(self) -> list[Action]:
        if self._awaited or not self._routed:
            return []
        routed, self._routed = sorted(self._routed), set()
        return [Run(self.layer, routed, self._gpu)]

    def give_up(self, view: View, keep: Collection[int] = ()) -> list[Action]:
        layer, self.layer = self.layer, -1
        held = [e for e in layer_residents(view, self._gpu, LAYER, layer) if e not in keep]
        return [Drop(layer, held, self._gpu)]


class _KTransformers(PolicyBase):
    """Experts on the GPU or CPU from the start, and whole layers on the GPU for long prompts."""

    engine = "ktransformers"

    prefill_threshold: int | None = option(
        None, "Rows from which on all experts of a layer are copied to the GPU and computed there; None: never.", ge=1
    )
    _beyond = 0  # how many rows more than the threshold make a chunk long

    @property
    def listens(self) -> frozenset[type]:
        long = {StepBegin, Fetched, Sent, LayerEnd} if self.prefill_threshold else set()
        return frozenset({Routed} | long)

    def place(self, view: View) -> Placement:
        gpu, self._cpu = gpu_of(view, "ktransformers"), cpu_of(view, "ktransformers")
        self._gpu = gpu
        model = view.model
        self._on_gpu = [set(experts) for experts in self.choose(view)]
        self._whole = WholeLayer(gpu, view.host)
        self._prefill = False
        self._long: list[Any] = []  # routing of the micro-batches of the layer that is in the buffer
        n_bytes = sum(len(on) * model.expert_bytes(layer) for layer, on in enumerate(self._on_gpu))
        pools = [Pool(gpu, CACHE, n_bytes)]
        if self.prefill_threshold:
            pools.append(Pool(gpu, LAYER, model.n_experts * slot_bytes(view)))
        return Placement([Copy(layer, [*on], gpu) for layer, on in enumerate(self._on_gpu) if on], pools)

    def choose(self, view: View) -> list[list[int]]:
        raise NotImplementedError

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._prefill = event.phase == "prefill"
        return ()

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        """Run experts where they are, or load the whole layer first."""
        if self.is_long(event):
            self._long.append(event.experts)
            return self._whole.load(event, view)
        return self.divided(event, view)

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        return self._whole.arrived(event.expert)

    def on_sent(self, event: Sent, view: View) -> Iterable[Action]:
        return self._whole.arrived(event.tag)

    def on_layer_end(self, event: LayerEnd, view: View) -> Iterable[Action]:
        return self.layer_ended(view) if self._whole.layer == event.layer else ()

    def is_long(self, event: Routed) -> bool:
        """Whether all experts of the layer go to the GPU."""
        enough = self.prefill_threshold is not None and len(event.experts) >= self.prefill_threshold + self._beyond
        return enough or self._whole.layer == event.layer

    def divided(self, event: Routed, view: View) -> list[Action]:
        layer = event.layer
        on_gpu = [e for e in event.active if e in self._on_gpu[layer]]
        on_cpu = [e for e in event.active if e not in self._on_gpu[layer]]
        return [Run(layer, on_gpu, self._gpu), Run(layer, on_cpu, self._cpu)]

    def layer_ended(self, view: View) -> list[Action]:
        self._long = []
        return self._whole.give_up(view)


class KtLayer(_KTransformers):
    """Whole layers' experts on the GPU, all others on the CPU (KTransformers' operators, 2024)."""

    paper = "KTransformers (kvcache-ai/ktransformers, 2024)"
    routing_free = True
    missing = ("operators chosen one by one: the attention and the dense part of a layer are on the GPU",)

    side: Literal["first", "last"] = option("first", "Which layers are on the GPU.")
    prefill_threshold: int | None = option(
        None, "Rows of prefill above which all experts of a layer are copied to the GPU and computed there; None: never.", ge=1
    )
    _beyond = 1

    def choose(self, view: View) -> list[list[int]]:
        model = view.model
        n = view.cache_slots(self._gpu) // model.n_experts
        whole = range(n) if self.side == "first" else range(model.n_layers - n, model.n_layers)
        return [list(range(model.n_experts)) if layer in whole else [] for layer in range(model.n_layers)]

    def is_long(self, event: Routed) -> bool:
        """Only in prompts, and in layers that are not on the GPU anyway."""
        return self._prefill and not self._on_gpu[event.layer] and super().is_long(event)


class KtExpert(_KTransformers):
    """Chosen experts of each layer on the GPU, the others on the CPU (KTransformers' kt-kernel)."""

    paper = "KTransformers (kvcache-ai/ktransformers, kt-kernel)"
    missing = (
        "the copies within the GPU that make experts of the buffer residents (dynamic_update) take no time",
        "the CPU's copies of experts into pinned memory, two at a time, ahead of the link",
        "residents that a layer of BF16 weights takes from the GPU itself: the link brings the layer's all",
        "one copy of a row to the CPU for both immediate and deferred experts: it crosses twice",
    )

    strategy: Strategy = option(
        "uniform",
        "Which experts are on the GPU: as many of each layer, whole layers from the first, pairs drawn at "
        "random, or the most frequent pairs of the calibration table.",
    )
    released: Annotated[Released | None, Tables(("activation_frequency",))] = option(
        None,
        "How often each expert is used, layers x experts, as statistics that kt-kernel is started with, in "
        "place of the calibration table.",
    )
    gpu_experts: int | None = option(
        None, "Experts on the GPU for each layer, on average; None: as many as the cache slots hold.", ge=0
    )
    seed: int = option(42, "Of the draw.", ge=0)
    dynamic_update: bool = option(
        False, "After a layer of a long chunk of a prompt, the chunk's most frequent experts become the layer's residents."
    )
    max_deferred = 0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"table:activation_frequency"} if self.strategy == "frequency" and self.released is None else ())

    def choose(self, view: View) -> list[list[int]]:
        model = view.model
        counts = None
        if self.strategy == "frequency":
            shape, place = (model.n_layers, model.n_experts), f"policy kt-expert: {model.name}"
            given = None if self.released is None else self.released.table("activation_frequency", shape, place)
            counts = (view.tables["activation_frequency"] if given is None else given).tolist()
        total = view.cache_slots(self._gpu)
        if self.gpu_experts is not None:
            asked = min(self.gpu_experts, model.n_experts) * model.n_layers
            if asked > total:
                raise CapacityError(
                    f"ktransformers on {self._gpu}: expected at most {total // model.n_layers} gpu_experts, as the cache slots "
                    f"allow, got {self.gpu_experts}; lower it or raise the cache"
                )
            total = asked
        return gpu_experts(self.strategy, total, model.n_layers, model.n_experts, seed=self.seed, counts=counts)

    def divided(self, event: Routed, view: View) -> list[Action]:
        """Run each expert where it is; the CPU's least weighted may be late."""
        layer = event.layer
        if not self.max_deferred or layer + 1 == view.model.n_layers:
            return super().divided(event, view)
        on_gpu = [e for e in event.active if e in self._on_gpu[layer]]
        on_cpu = [e for e in event.active if e not in self._on_gpu[layer]]
        now, late = split_late(event.experts, self.max_deferred, on_cpu, event.weights)
        return [Run(layer, on_gpu, self._gpu), Run(layer, now, self._cpu), Run(layer, late, self._cpu, late=True)]

    def layer_ended(self, view: View) -> list[Action]:
        """Empty the buffer; if asked to, keep its most frequent experts as residents."""
        if not (self.dynamic_update and self._prefill):
            return super().layer_ended(view)
        layer, routed = self._whole.layer, np.concatenate(self._long)
        self._long = []
        before = self._on_gpu[layer]
        after = self._on_gpu[layer] = set(most_used(routed, view.model.n_experts, len(before)))
        changes: list[Action] = [
            Drop(layer, sorted(before - after), self._gpu),
            Move(layer, sorted(after - before), self._gpu, CACHE),
        ]
        return [*changes, *self._whole.give_up(view, keep=after)]


class KtExpertDeferral(KtExpert):
    """As kt-expert, with low-weight CPU experts a layer late (KTransformers' expert deferral).

    Not exact: what is late is added to the next layer's output.
    """

    exact = False

    max_deferred: int = option(2, "Experts of a row whose outputs may be late.", ge=1)
