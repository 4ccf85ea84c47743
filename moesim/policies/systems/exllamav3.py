"""exllamav3: the last experts on the CPU, exchanged with hot ones between generations.

turboderp-org/exllamav3, ``block_sparse_mlp_cpu.py`` at 0cec381390 and ``model_init.py`` at 0148de2993; where the wheel 1.6.5 (with
``model/moe_cpu_host.py``) differs, the table follows it.

| point | paper says | released code does | we do |
|---|---|---|---|
| token embedding | - | on the CPU unless quantised (``modules/embedding.py``, ``model/model_ls.py``) | on the CPU |
| ``--moe_cpu_split`` n | - | the last n experts of every layer on the CPU, at least one on the GPU | the same (``cpu_split``); by default as the cache slots ask |
| ``--moe_cpu_offload`` n | - | all experts of the first n layers on the CPU, and no split | the same (``cpu_layers``) |
| order from counts | - | hottest experts first, by a file or an earlier run | ``placement: frequency``: by calibration |
| decode, up to 31 rows | - | the CPU's job goes out after routing, the GPU computes meanwhile, both are added; none without an expert of the CPU | the same |
| prompts, from 32 rows on | - | the CPU's experts with enough rows are copied through a pinned ring and forgotten; the CPU computes the others meanwhile | the same (``stream_min_rows``), in whole-layer offload, too |
| enough rows | - | by the rate of a copy of 16 MiB: 8 times the root of 25 GB/s over it (1.6.5), before 16 times 25 GB/s over it | the same (``stream_rule``, ``stream_threshold``) |
| ring | - | two slots of 32 MiB, up to 24 experts each; larger experts never | the same |
| decode of one row, whole-layer offload | - | with ``EXL3_MOE_STREAM_DECODE`` (PR #392, open; ``model/moe_stream_decode.py``) one kernel reads the chosen experts from pinned memory into a buffer of k, then they are computed; the last ``EXL3_MOE_STREAM_DECODE_CPU`` of a token's choices are the CPU's, all but one at most | ``stream_decode``, ``stream_decode_cpu``: a copy each, computed once all are there |
| counts | - | selections in each split layer, prompts included | the same |
| when places change | - | due after 128 passes; done once the queue of requests is empty, or after 4 x 128 | the same (``swap_interval``); a prompt after decoding begins a generation |
| who changes places | - | layer by layer, at most 64 pairs in all; least selected of the GPU with most selected of the CPU | the same (``swap_budget``, ``swap_floor`` 8, ``swap_hysteresis`` 2), see `swaps` |
| after it | - | counts of layers that were looked at are halved; without budget none is | the same |
| cost | - | all devices are awaited; newcomers are read from the checkpoint | one copy from the host each, awaited before any expert runs |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from moesim.errors import CapacityError
from moesim.policies.base import CACHE, STAGING, ForOneUse, cpu_of, gpu_of, slot_bytes, slots_per_layer
from moesim.policies.options import option
from moesim.policies.parts.placement import per_layer_top
from moesim.policy import (
    DEMAND,
    Action,
    Copy,
    Drop,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Pool,
    Routed,
    Run,
    StepBegin,
    View,
)  # fmt: skip


def swaps(
    counts: Sequence[float], on_gpu: Collection[int], budget: int, *, floor: float = 8.0, hysteresis: float = 2.0
) -> list[tuple[int, int]]:
    """Choose the experts of a layer that change places at a sweep (``block_sparse_mlp_cpu.py``).

    Up to ``budget`` pairs (leaver, newcomer), the least and the most selected first by ``counts``; of equals the lower id leaves, the
    higher comes. It ends where the newcomer has not ``floor`` times the mean count, or not ``hysteresis`` times its partner's (at
    least 1).

    >>> counts = [2.0] * 64
    >>> for expert, count in {5: 90, 20: 60, 50: 400, 60: 120, 63: 30}.items():
    ...     counts[expert] = count
    >>> swaps(counts, range(48), 64), swaps(counts, range(48), 384, floor=2.0, hysteresis=1.25)
    ([(0, 50), (1, 60)], [(0, 50), (1, 60), (2, 63)])
    """
    least = floor * sum(counts) / len(counts)
    there = sorted((counts[e], e) for e in on_gpu)
    others = sorted(((count, e) for e, count in enumerate(counts) if e not in on_gpu), reverse=True)
    found: list[tuple[int, int]] = []
    for (cold, out), (hot, new) in zip(there, others, strict=False):
        if len(found) >= budget or hot < max(hysteresis * max(cold, 1.0), least):
            break
        found.append((out, new))
    return found


def rows_to_stream(gb_per_s: float, rule: str = "root") -> int:
    """Return from how many rows on an expert is streamed, by the rate of pinned memory.

    ``root``: 8 times the root of 25 over the rate, rounded, at least 8 (wheel 1.6.5); ``linear``: 16 times 25 over it, rounded down,
    at least 16 (commit 0cec381390).

    >>> [rows_to_stream(rate, "linear") for rate in (25, 12, 55)], [rows_to_stream(rate) for rate in (57, 29, 6.7)]
    ([16, 33, 16], [8, 8, 15])
    """
    deficit = 25.0 / max(gb_per_s, 0.5)
    return max(8, round(8 * deficit**0.5)) if rule == "root" else max(16, int(16 * deficit))


RING_SLOTS, RING_SLOT_BYTES, RING_EXPERTS = 2, 32 << 20, 24
PROBE_BYTES = 16 << 20  # of the copy that measures the link
OVERDUE = 4  # times the interval, after which places change within a generation


class Exllamav3(ForOneUse):
    """The last experts on the CPU, exchanged with hot ones between generations (exllamav3)."""

    paper = "exllamav3 (turboderp-org/exllamav3)"
    engine = "exllamav3"
    missing = (
        "EXL3_MOE_STREAM_DECODE: the GPU is busy while its kernel reads experts",
        "--moe_cpu_pinned_arena: experts that the CPU computed take spare slots of the GPU at once (promote-on-miss)",
        "reading of exchanged experts from the checkpoint: host memory holds all of them",
        "which layers and formats are eligible: all are",
        "a number of layers for the split (EXL3_MOE_CPU_SPLIT_LAYERS)",
        "with refill, requests in the queue: each prompt after decoding counts as a new generation",
    )

    cpu_layers: int = option(0, "First layers whose experts are all on the CPU; the others have none there.", ge=0)
    cpu_split: int | None = option(
        None, "Last experts of each layer that are on the CPU; None: as few as the cache slots ask.", ge=1
    )
    placement: Literal["last-ids", "frequency"] = option(
        "last-ids", "Which experts are last: those with the highest ids, or the least frequent of the calibration table."
    )
    stream_min_rows: int = option(32, "Rows of a micro-batch from which on experts may be streamed.", ge=1)
    stream_rule: Literal["root", "linear"] = option("root", "How the link's rate says which: as in 1.6.5, or as in 0cec381390.")
    stream_threshold: int | None = option(None, "Rows of an expert from which on it is streamed; None: by the link's rate.", ge=1)
    stream_decode: bool = option(
        False, "In steps of one row the GPU computes the experts of CPU layers, after a copy (``EXL3_MOE_STREAM_DECODE``)."
    )
    stream_decode_cpu: int = option(
        0, "Of a token's experts the CPU computes so many, the lowest ranked (``EXL3_MOE_STREAM_DECODE_CPU``).", ge=0
    )
    swap_budget: int = option(
        64, "Most pairs of experts that change places between generations, over all layers; 0: none ever.", ge=0
    )
    swap_interval: int = option(128, "Steps after which that is due.", ge=1)
    swap_floor: float = option(8.0, "Times the layer's mean count that a newcomer must have.", ge=0)
    swap_hysteresis: float = option(2.0, "Times the count of the expert that it replaces that a newcomer must have.", ge=0)

    @property
    def routing_free(self) -> bool:
        return self.cpu_layers > 0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"table:activation_frequency"} if self.placement == "frequency" else ())

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({Routed, LayerEnd} | ({StepBegin, Fetched} if self._swaps() or self.stream_decode else set()))

    def _swaps(self) -> bool:
        return not self.cpu_layers and self.swap_budget > 0

    def place(self, view: View) -> Placement:
        """Put the first experts of each layer, or all of the last layers, on the GPU."""
        gpu, self._cpu = gpu_of(view, "exllamav3"), cpu_of(view, "exllamav3")
        self._gpu, model = gpu, view.model
        chosen = self._on_whole_layers(view) if self.cpu_layers else self._on_parts(view)
        self._on_gpu = [set(experts) for experts in chosen]
        self._counts = [[0.0] * model.n_experts for _ in chosen]
        self._one_row = False  # in this step, whose experts are streamed
        self._steps = 0  # since the latest exchange
        self._decoded = False
        self._awaited: set[tuple[int, int]] = set()  # on their way to their new place
        self._held: list[Action] = []
        self._held_experts: set[int] = set()  # what the Runs among these take all rows of
        rate = PROBE_BYTES / view.costs.fetch_ns(view.host, gpu, PROBE_BYTES)  # bytes/ns
        self._enough = self.stream_threshold or rows_to_stream(rate, self.stream_rule)
        largest = slot_bytes(view)
        ring = min(RING_SLOT_BYTES // largest, RING_EXPERTS)
        self._streams = ring > 0 and any(len(on) < model.n_experts for on in chosen)
        n_bytes = [len(on) * model.expert_bytes(layer) for layer, on in enumerate(chosen)]
        pools = [Pool(gpu, CACHE, n_bytes, per_layer=True)]
        decoding = model.top_k if self.stream_decode and self.cpu_layers else 0
        self._stages = self._streams or decoding > 0
        if self._stages:
            pools.append(Pool(gpu, STAGING, max(RING_SLOTS * ring, decoding) * largest))
        copies = [Copy(layer, on, gpu) for layer, on in enumerate(chosen) if on]
        kept: Literal["all", "others"] = "others" if self.cpu_layers else "all"
        return Placement(copies, pools, {("embedding", -1): self._cpu}, host_experts=kept)

    def _on_whole_layers(self, view: View) -> list[list[int]]:
        model, slots = view.model, view.cache_slots(self._gpu)
        whole = range(min(self.cpu_layers, model.n_layers), model.n_layers)
        if len(whole) * model.n_experts > slots:
            raise CapacityError(
                f"policy exllamav3 on {self._gpu}: expected experts of at most {slots // model.n_experts} layers on the GPU, as the "
                f"cache slots allow, got {len(whole)}; raise cpu_layers to {model.n_layers - slots // model.n_experts}"
            )
        return [list(range(model.n_experts)) if layer in whole else [] for layer in range(model.n_layers)]

    def _on_parts(self, view: View) -> list[list[int]]:
        model = view.model
        most = slots_per_layer(view, self._gpu, "exllamav3", split="equal")[0]
        n = most if self.cpu_split is None else max(1, model.n_experts - self.cpu_split)
        if n > most:
            raise CapacityError(
                f"policy exllamav3 on {self._gpu}: expected at most {most} experts of each layer on the GPU, as the cache slots "
                f"allow, got {n}; raise cache.ratio to {n}/{model.n_experts}, or raise cpu_split to {model.n_experts - most}"
            )
        if self.placement == "frequency":
            return per_layer_top(view.tables["activation_frequency"].tolist(), [n] * model.n_layers)
        return [list(range(n)) for _ in range(model.n_layers)]

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Run experts where they are, stream those with many rows."""
        layer, rows = event.layer, event.rows
        there, counts = self._on_gpu[layer], self._counts[layer]
        for expert in event.active:
            counts[expert] += rows[expert]
        if self._one_row and layer < self.cpu_layers:
            return self._stream_one(event)
        active = [e for e in event.active if e not in self._held_experts]
        own = [e for e in active if e in there]
        others = [e for e in active if e not in there]
        many = self._streams and len(event.experts) >= self.stream_min_rows
        streamed = [e for e in others if many and rows[e] >= self._enough]
        actions: list[Action] = [
            Run(layer, [e for e in others if e not in streamed], self._cpu),
            Run(layer, own, self._gpu),
            Fetch(layer, streamed, self._gpu, DEMAND, STAGING),
            Run(layer, streamed, self._gpu),
        ]
        if self._awaited:
            self._held += actions
            self._held_experts.update(active)
            return []
        return actions

    def _stream_one(self, event: Routed) -> list[Action]:
        """Copy a row's first choices and run them when all are there; leave the last to the CPU."""
        layer, ranked = event.layer, event.experts[0].tolist()
        streamed = ranked[: max(1, len(ranked) - self.stream_decode_cpu)]
        self._awaited.update((layer, expert) for expert in streamed)
        self._held.append(Run(layer, sorted(streamed), self._gpu))
        rest = sorted(ranked[len(streamed) :])
        return [Run(layer, rest, self._cpu), Fetch(layer, streamed, self._gpu, DEMAND, STAGING)]

    def on_step_begin(self, event: StepBegin, view: View) -> list[Action]:
        """Exchange experts between generations, if it is time."""
        self._one_row = self.stream_decode and len(event.requests) == 1
        if not self._swaps():
            return []
        begins = event.phase == "prefill" and self._decoded
        self._decoded = event.phase == "decode"
        due = self._steps >= self.swap_interval
        self._steps += 1
        if not (begins and due) and self._steps < OVERDUE * self.swap_interval:
            return []
        self._steps = 0
        return self._exchange()

    def _exchange(self) -> list[Action]:
        actions: list[Action] = []
        left = self.swap_budget
        for layer, counts in enumerate(self._counts):
            if left <= 0:
                break
            there = self._on_gpu[layer]
            pairs = swaps(counts, there, left, floor=self.swap_floor, hysteresis=self.swap_hysteresis)
            left -= len(pairs)
            self._counts[layer] = [count / 2 for count in counts]
            out, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            there.difference_update(out)
            there.update(new)
            self._awaited.update((layer, expert) for expert in new)
            actions += [Drop(layer, out, self._gpu), Fetch(layer, new, self._gpu, DEMAND, CACHE)]
        return actions

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        """Go on once the exchange is over."""
        if (event.layer, event.expert) not in self._awaited:
            return []
        self._awaited.discard((event.layer, event.expert))
        if self._awaited:
            return []
        held, self._held = self._held, []
        self._held_experts.clear()
        return held

    def on_layer_end(self, event: LayerEnd, view: View) -> Iterable[Action]:
        return super().on_layer_end(event, view) if self._stages else ()
