"""llama.cpp: whole layers, or their experts, on the CPU or the GPU; nothing is cached.

ggml-org/llama.cpp; options ``--n-gpu-layers``, ``--n-cpu-moe`` and ``--no-op-offload``; without any, recent versions search what
fits (``llama-cpp-fit``).

| point | paper says | released code does | we do |
|---|---|---|---|
| n_gpu_layers | - | the last n layers, the output layer counts as one; the others keep all they own on the CPU | the same |
| n_cpu_moe | - | experts of the first m layers on the CPU, attention and shared experts on the GPU; ``--cpu-moe``: of all | the same |
| neither given | - | everything on the GPU, or ``llama-cpp-fit`` | n_cpu_moe such that the rest fits the slots |
| layer numbers | - | all layers count, dense ones and those between layers with experts too | the same; leading dense layers form one part: on the GPU if all are; a later one follows the next layer with experts |
| several GPUs | - | layers, the output one more, in contiguous parts proportional to ``--tensor-split``, else to free memory | the same; with neither number given, by bytes in proportion to memory [choice] |
| experts on the CPU, several GPUs | - | attention stays on the layer's GPU; for large batches all are copied to the first GPU | the same |
| from GPU to GPU | - | the hidden state is copied, by peer access or through the host | as the links go: through the host without one between GPUs |
| large batches | - | from 32 rows on used experts of CPU layers are copied, computed on the GPU and forgotten | ``op_offload``, ``op_offload_min_rows`` |
| large batches in ik_llama.cpp | - | only if rows x top-k >= 32 x experts (PR #520); by bytes of a weight instead of 32 (#1813) | ``op_offload_rule: rows-per-expert``; ``op_offload_per_byte`` |
| large batches: order | - | all inputs of a split are copied before it is computed, into a buffer for all of a layer's experts | the same |
| large batches: ahead of need | - | with ``--prefetch-experts-slots N`` (PR #28414, open, e502dd002 in #146 of Anbeeld/beellama.cpp), if rows x top-k >= 2 x experts: whole expert tensors of the next splits go to N rotating buffers on a second stream; a buffer is free after its product | ``prefetch_experts_slots``: a tensor is a third of a layer's experts with all their matrices [choice]; it is computed once it is there, and then free |
| large batches: other weights | - | copied to the GPU for each use; attention follows them | the same, but not the output layer; attention reads a copy of the KV cache in prefill, and runs where the cache is while decoding [choice] |
| prompts | - | micro-batches of 512 rows (``--ubatch-size``) | the same, or ``prefill_chunk`` |
| host memory | - | the mapped file, which is pageable; pinned with ``--no-mmap`` | ``mmap``, at the costs of the engine; elsewhere as ``transfer`` says |
| overlap of CPU and GPU | - | none within a token | none between dense part and experts; shared experts may overlap |
| host memory | - | experts on the CPU, mapped from the file; pages of those on the GPU can go | the same; a host that lacks up to a tenth gets a warning [choice] |
| memory of a GPU | - | besides weights and KV cache: the runtime's context, a compute buffer for ``--ubatch-size`` rows | the same, where it is more than the profile's workspace |
| token embedding | - | on the CPU | the same |
| cache | HybriMoE's table says LFU | none | none |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, inf
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from moesim.errors import CapacityError, ConfigError
from moesim.model import ModelSpec
from moesim.policies.base import CACHE, STAGING, ForOneUse, cpu_of, gpu_of, slot_bytes, staging_pool
from moesim.policies.cpu_cache import LLAMA_CPP_PROMPT_ROWS
from moesim.policies.options import option
from moesim.policies.streamed import StreamedInGroups
from moesim.policy import (
    DEMAND,
    LAYER_PARTS,
    Action,
    Copy,
    Fetch,
    Fetched,
    LayerEnd,
    Placement,
    Pool,
    Ran,
    Routed,
    Run,
    StepBegin,
    Victim,
    View,
)

AHEAD = "ahead"  # buffers of experts that are copied before their layer is reached
PREFETCHED_USES = 2  # of each expert on average, from which on experts are copied ahead


def first_layers_on_gpu(n_layers: int, n_gpu_layers: int | None, n_cpu_moe: int = 0) -> tuple[int, int]:
    """Return the first layer on the GPU, and the first with experts there; ``n_layers``: none.

    Layers count from the end, the output layer first; experts of the first ``n_cpu_moe`` stay on the CPU.

    >>> [first_layers_on_gpu(4, n) for n in (0, 1, 2, 5, 9)]
    [(4, 4), (4, 4), (3, 3), (0, 0), (0, 0)]
    >>> first_layers_on_gpu(4, None, 3), first_layers_on_gpu(4, 3, 1), first_layers_on_gpu(4, 3, 9)
    ((0, 3), (2, 2), (2, 4))
    """
    first = 0 if n_gpu_layers is None else min(max(n_layers + 1 - n_gpu_layers, 0), n_layers)
    return first, max(first, min(n_cpu_moe, n_layers))


def compute_bytes(model: ModelSpec, rows: int, *, output: bool = True) -> int:
    """Count the compute buffer of a micro-batch in 32 bits: the states of a layer, or the output's words if they are more.

    Measured for Qwen3-30B-A3B at ``-ub`` 512 to 2048 are 301, 602, 902 and 1203 MiB (FedericoTs/quantprobe). Not counted: the mask of long contexts.

    >>> from moesim.model import load_model
    >>> [round(compute_bytes(load_model("qwen3-30b-a3b"), rows) / 2**20) for rows in (512, 1024, 1536, 2048)]
    [301, 602, 902, 1203]
    """
    layer = 2 * model.hidden + model.top_k * (model.expert_intermediate + max(model.expert_intermediate, model.hidden))
    return 4 * rows * max(layer, model.vocab + model.hidden if output else 0)


CONTEXT_BYTES = MappingProxyType({"cuda": 330 * 2**20, "hip": 400 * 2**20})
"""Bytes that the runtime takes on a GPU: measured on a 24 GB card (unslothai/unsloth#6718) and a 7900 XTX (Quartermaster#24)."""


def own_bytes(model: ModelSpec, rows: int, backend: str, *, output: bool = True) -> int:
    """Count what llama.cpp needs on a GPU to compute: its runtime's context and the compute buffer."""
    return CONTEXT_BYTES.get(backend, 0) + compute_bytes(model, rows, output=output)


def divided(places: Iterable[float], shares: Sequence[float]) -> list[int]:
    """Return which of some parts, contiguous and as large as their shares, has each place from 0 to 1.

    Four layers and the output on two GPUs with equal parts, and with three layers for one:

    >>> layers = [layer / 5 for layer in range(5)]
    >>> divided(layers, [1, 1]), divided(layers, [3, 1])
    ([0, 0, 0, 1, 1], [0, 0, 0, 0, 1])
    """
    *ends, total = accumulate(shares)
    return [bisect_right(ends, total * place) for place in places]


class Fit(NamedTuple):
    """Layers that `--fit` puts on one GPU."""

    dense: int  # layers whose dense part is there, counted from the last
    full: int  # layers whose experts are there, too, counted from the first
    fraction: Literal["none", "up", "gate and up"]  # matrices of the next layer's experts that are there


def fitted(dense: Sequence[int], experts: Sequence[int], rest: int, target: int, n_mats: int = 3) -> Fit:
    """Search what fits on one GPU as llama.cpp's ``--fit`` does (common/fit.cpp at 08033df02c).

    Sizes are bytes. ``dense``: of each layer what is no routed expert, its KV cache included; ``experts``: its routed experts; ``rest``: what is
    there in any case; ``target``: what is free less the margin. If all fits, nothing is searched. Else all experts begin on the
    host; dense parts come to the GPU from the last layer on, and then, if all of them fit, experts from the first layer on. Both
    counts use at most the target. Of the next layer's experts a part comes too, if what is used stays strictly below it: up, and
    if that fits, gate and up.

    >>> fitted([10] * 4, [90] * 4, rest=5, target=250), fitted([10] * 4, [90] * 4, rest=5, target=34)
    (Fit(dense=4, full=2, fraction='none'), Fit(dense=2, full=0, fraction='none'))
    >>> fitted([10] * 4, [90] * 4, rest=5, target=256), fitted([10] * 4, [90] * 4, rest=5, target=286)
    (Fit(dense=4, full=2, fraction='up'), Fit(dense=4, full=2, fraction='gate and up'))
    """
    n_layers = len(dense)
    by_dense = list(accumulate(reversed(dense), initial=rest))
    by_full = list(accumulate(experts, initial=by_dense[-1]))
    if by_full[-1] <= target:
        return Fit(n_layers, n_layers, "none")
    n_dense = false_position(by_dense.__getitem__, target, n_layers)
    if n_dense < n_layers:
        return Fit(n_dense, 0, "none")
    full = false_position(by_full.__getitem__, target, n_layers)

    def joins(mats: int) -> bool:
        return by_full[full] + ceil(experts[full] * mats / n_mats) < target

    return Fit(n_dense, full, "gate and up" if joins(max(1, n_mats - 1)) else "up" if joins(1) else "none")


def false_position(memory: Callable[[int], int], target: int, high: int) -> int:
    """Find the largest count up to ``high`` within a target, evaluating few counts.

    Each next count is interpolated between one that fits and one that does not, at least one from either. 0 is returned whether it
    fits or not. ``memory`` must not fall with the count.

    >>> asked = []
    >>> false_position(lambda n: asked.append(n) or 100 * n, 730, 48), asked
    (7, [48, 0, 7, 8])
    """
    over = memory(high)
    if over <= target:
        return high
    low, used = 0, memory(0)
    while high - low > 1 and used <= target:
        gap = high - low
        step = min(max(gap * (target - used) // (over - used), 1), gap - 1)
        found = memory(low + step)
        if found <= target:
            low, used = low + step, found
        else:
            high, over = low + step, found
    return low


def rows_to_offload(n_experts: int, top_k: int, per_expert: int) -> int:
    """Return from how many rows ik_llama.cpp copies experts (ikawrakow/ik_llama.cpp, PR #520).

    DeepSeek-V3, Qwen3-30B-A3B, gpt-oss-120b and Mixtral:

    >>> [rows_to_offload(*model, 32) for model in ((256, 8), (128, 8), (128, 4), (8, 2))]
    [1024, 512, 1024, 128]
    """
    return -(-per_expert * n_experts // top_k)


class LlamaCpp(ForOneUse):
    """Whole layers, or their experts, on the CPU or the GPU, fixed at the start (llama.cpp)."""

    paper = "llama.cpp (ggml-org/llama.cpp)"
    engine = "llama.cpp"
    routing_free = True
    prompt_rows = LLAMA_CPP_PROMPT_ROWS
    missing: ClassVar[tuple[str, ...]] = (
        "op_offload of the output layer, which large numbers of sequences would make",
        "copying the KV cache of dense leading layers: large steps read it at the GPU's rate",
        "copying dense leading layers one tensor at a time: the buffer holds all of them",
        "waiting of shared experts on the GPU for the CPU's experts (sequential graph splits)",
        "a part of the dense leading layers on the GPU",
        "overrides of other tensors by a pattern (-ot): the experts of whole layers only",
        "tensor parallel (--split-mode row or tensor; graph in ik_llama.cpp)",
        "several GPUs that compute parts of a prompt at the same time (pipeline parallel)",
        "GPUs of other hosts (RPC)",
        "op_offload: the routed ids are read back before the copies, which waits for the GPU",
        "--prefetch-experts-slots: tensors of gate, up and down apart; copies of pageable memory that hold up the host",
        "ik_llama.cpp's --prefetch-experts (#2101) and --defer-experts (#1634): reading of pages of the file ahead of a prompt",
    )

    n_gpu_layers: int | None = option(
        None, "Layers on the GPU, counted from the end with the output layer as one; None: all.", ge=0
    )
    n_cpu_moe: int | None = option(
        None,
        "The first so many layers have their experts on the CPU, dense layers counted. None: no layer if ``n_gpu_layers`` is given, "
        "else as few layers as leave experts that fit the cache slots.",
        ge=0,
    )
    split_mode: Literal["layer", "none"] = option(
        "layer",
        "Several GPUs of a host: layers divided among all, or the compute device alone. Tensor parallel is not simulated.",
    )
    tensor_split: list[float] | None = option(
        None, "Parts of the layers for each GPU; those left out get none. None: in proportion to memory, see above."
    )
    op_offload: bool = option(True, "Copy the experts of CPU layers to the GPU for larger batches.")
    op_offload_rule: Literal["rows", "rows-per-expert"] = option(
        "rows", "Larger by rows of a micro-batch, or by rows that an expert gets on average (ik_llama.cpp)."
    )
    op_offload_min_rows: int = option(32, "So many rows, of either kind, from which on it does.", ge=1)
    op_offload_per_byte: float | None = option(
        None, "So many rows an expert for each byte of a weight instead, rounded down (ik_llama.cpp #1813).", ge=0
    )

    prefetch_experts_slots: int | None = option(
        None,
        "Buffers of one expert tensor each, through which the experts of larger prompts are copied ahead (PR #28414); needs "
        "``op_offload``. None: none.",
        ge=2,
    )
    mmap: bool = option(
        True, "Copy experts from the mapped file, at the rate of pageable copies; ``--no-mmap``: from pinned memory."
    )

    @property
    def listens(self) -> frozenset[type]:
        offloaded = {Routed, Fetched, LayerEnd, *([StepBegin, Ran] if self.prefetch_experts_slots else [])}
        return frozenset(offloaded if self.op_offload else {Routed})

    def place(self, view: View) -> Placement:
        self._begin(view, "llama-cpp")
        cpu, model = self._cpu, view.model
        first_dense, first_expert, whole = self._split(view)
        parts = {(part, layer): cpu for layer in range(first_dense) for part in LAYER_PARTS}
        if model.leading and not whole:
            parts["leading", -1] = cpu
        offloaded = dict.fromkeys(parts, self._gpu) if self.op_offload else {}
        if self.n_gpu_layers == 0:
            parts["head", -1] = cpu
        there = {(part, layer): gpu for layer, gpu in self._at.items() for part in LAYER_PARTS} | self._ends
        parts = {part: gpu for part, gpu in there.items() if gpu != view.compute} | parts
        placement = self._placed(view, range(first_expert, model.n_layers))
        return replace(placement, parts={**placement.parts, **parts}, offloaded=offloaded, offload_from=self._dense_from)

    def _begin(self, view: View, name: str) -> None:
        self._gpu, self._cpu = gpu_of(view, name), cpu_of(view, name)
        devices = view.costs.hardware.devices
        host = devices[self._gpu].host
        others = [gpu for gpu in view.gpus if gpu != self._gpu and devices[gpu].host == host]
        self._gpus = [self._gpu, *(others if self.split_mode == "layer" else ())]
        self._at: dict[int, str] = {}  # GPU of each layer with experts, if it is on one other than the first
        self._ends: dict[tuple[str, int], str] = {}  # and of what comes before and after them
        self._stream: StreamedInGroups | None = None
        self._ahead = False
        self._offload_from = self._dense_from = self.op_offload_min_rows
        if self.op_offload_rule == "rows-per-expert":
            model, by_byte = view.model, self.op_offload_per_byte
            each, rows = (
                self.op_offload_min_rows if by_byte is None else int(by_byte * bits / 8)
                for bits in (model.expert_bits, model.other_bits)
            )
            self._offload_from, self._dense_from = rows_to_offload(model.n_experts, model.top_k, each), max(1, rows)

    def _placed(self, view: View, on_gpu: range) -> Placement:
        """Put the experts of some layers on the GPU, the token embedding on the CPU."""
        gpu, model = self._gpu, view.model
        self._on_gpu = on_gpu
        n_bytes = dict.fromkeys(self._gpus, 0)
        for layer in on_gpu:
            n_bytes[self._at.get(layer, gpu)] += model.n_experts * model.expert_bytes(layer)
        pools = [Pool(name, CACHE, size) for name, size in n_bytes.items()]
        self._awaited: set[int] = set()  # experts of the layer that are on their way to the GPU
        self._waiting: set[int] = set()  # those that run when all of them are there
        self._staged: set[int] = set()  # layers whose experts were copied for one use
        if self.op_offload and len(on_gpu) < model.n_layers:
            pools.append(staging_pool(view, gpu, model.n_experts))
            if self.prefetch_experts_slots:
                size = ceil(model.n_experts / model.n_mats)
                pools.append(Pool(gpu, AHEAD, self.prefetch_experts_slots * size * slot_bytes(view)))
                self._stream = StreamedInGroups(gpu, AHEAD, ceil(self.prefetch_experts_slots / model.n_mats), size)
        everyone = tuple(range(model.n_experts))
        self._from_host = [() if layer in on_gpu else everyone for layer in range(model.n_layers)]
        copies = [Copy(layer, everyone, self._at.get(layer, gpu)) for layer in on_gpu]
        machine, own = view.costs.hardware.machine, {}
        if "engine" in machine:  # not a paper's numbers
            ends_on = self._ends.get(("head", -1), gpu) if self.n_gpu_layers != 0 else ""
            rows = max(LLAMA_CPP_PROMPT_ROWS, view.max_tokens)
            own = {name: own_bytes(model, rows, machine.get("backend", "cuda"), output=name == ends_on) for name in self._gpus}
        return Placement(
            copies, pools, {("embedding", -1): self._cpu}, workspace=own, host_experts="mapped" if self.mmap else "others"
        )

    def _split(self, view: View) -> tuple[int, int, bool]:
        """Return the first MoE layer with its dense part, and experts, on a GPU, and whether all are; divide layers among GPUs."""
        model, slots = view.model, view.cache_slots(self._gpu) // view.model.n_experts  # in whole layers
        firsts = first_layers_on_gpu(len(model.blocks), self.n_gpu_layers, self.n_cpu_moe or 0)
        first_dense, first_expert = (bisect_left(model.positions, first) for first in firsts)
        filled = self.n_gpu_layers is None and self.n_cpu_moe is None
        if filled:
            first_expert = max(0, model.n_layers - slots * len(self._gpus))
        self._divide(view, firsts[0], first_expert if filled else None)
        while filled and self._fullest(view, first_expert)[1] > slots:
            first_expert += 1
            self._divide(view, firsts[0], first_expert)
        gpu, asked = self._fullest(view, first_expert)
        if asked > slots:
            raise CapacityError(
                f"policy llama-cpp on {gpu}: expected experts of at most {slots} layers, as the cache slots allow, "
                f"got {asked}; raise cache.ratio to {asked}/{model.n_layers}, lower n_gpu_layers or raise n_cpu_moe"
            )
        return first_dense, first_expert, not firsts[0]

    def _fullest(self, view: View, first_expert: int) -> tuple[str, int]:
        """Return the GPU with the experts of most layers, and of how many."""
        layers = Counter(self._at.get(layer, self._gpu) for layer in range(first_expert, view.model.n_layers))
        return (layers.most_common(1) or [(self._gpu, 0)])[0]

    def _divide(self, view: View, first: int, first_expert: int | None) -> None:
        """Divide the layers from ``first`` on among the GPUs: by number, or with a first layer with experts there by bytes."""
        if len(self._gpus) == 1:
            return
        model, shares = view.model, self._shares(view)
        if self.tensor_split is not None or first_expert is None:
            n = len(model.blocks) + 1 - first
            at = [self._gpus[i] for i in divided((layer / n for layer in range(n)), shares)]
            self._at = {layer: at[block - first] for layer, block in enumerate(model.positions) if block >= first}
        else:
            sizes = [sum(model.part_bytes(part, layer) for part in LAYER_PARTS) for layer in range(model.n_layers)]
            for layer in range(first_expert, model.n_layers):
                sizes[layer] += model.n_experts * model.expert_bytes(layer)
            middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
            at = [self._gpus[i] for i in divided((middle / sum(sizes) for middle in middles), shares)]
            self._at = dict(enumerate(at))
        self._ends = {("leading", -1): at[0], ("head", -1): at[-1]}

    def _shares(self, view: View) -> Sequence[float]:
        """Return the share of each GPU: those asked for, or its memory without the software's."""
        split, n = self.tensor_split, len(self._gpus)
        if split is None:
            devices = [view.costs.hardware.devices[gpu] for gpu in self._gpus]
            return [max(1, device.memory_bytes - device.workspace_bytes) for device in devices]
        if len(split) > n or not all(share >= 0 for share in split) or not 0 < sum(split) < inf:
            raise ConfigError(
                f"policy llama-cpp: tensor_split: expected at most {n} numbers of at least 0 with a sum above 0, as this host has {n} "
                f"GPUs ({', '.join(self._gpus)}), got {split}"
            )
        return [*split, *[0.0] * (n - len(split))]

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        """Begin to copy ahead of a large prompt."""
        model, rows = view.model, len(event.requests)
        self._ahead = (
            self._stream is not None and event.phase == "prefill" and rows >= self._offload_from
            and rows * model.top_k >= PREFETCHED_USES * model.n_experts
        )  # fmt: skip
        return self._stream.begin(self._from_host) if self._stream is not None and self._ahead else ()

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        """Run experts where they are, or copy them first if there are many rows."""
        layer = event.layer
        if layer in self._on_gpu:
            return (Run(layer, event.active, self._at.get(layer, self._gpu)),)
        if self._stream is not None and self._ahead:
            return self._stream.serve(event)
        if self.op_offload and len(event.experts) >= self._offload_from:
            absent = [expert for expert in event.active if not view.is_resident(layer, expert, self._gpu)]
            self._awaited.update(absent)
            self._staged.add(layer)
            self._waiting.update(event.active)
            return Fetch(layer, absent, self._gpu, DEMAND, STAGING), *self._copied(layer)
        return (Run(layer, event.active, self._cpu),)

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        if self._stream is not None and (found := self._stream.arrived(event)):
            return found
        self._awaited.discard(event.expert)
        return self._copied(event.layer)

    def on_ran(self, event: Ran, view: View) -> Iterable[Action]:
        return self._stream.ran(event) if self._stream is not None else ()

    def _copied(self, layer: int) -> list[Action]:
        """Run a layer's experts once all of them are copied."""
        if self._awaited or not self._waiting:
            return []
        experts, self._waiting = sorted(self._waiting), set()
        return [Run(layer, experts, self._gpu)]

    def on_layer_end(self, event: LayerEnd, view: View) -> Iterable[Action]:
        if event.layer not in self._staged:
            return ()
        self._staged.discard(event.layer)
        return super().on_layer_end(event, view)

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        return self._stream.evict(fetch) if fetch.pool == AHEAD and self._stream is not None else super().evict(fetch, view)


MATRICES = MappingProxyType({"none": 0, "up": 1, "gate and up": 2})


class LlamaCppFit(LlamaCpp):
    """Experts of as many first layers on the GPU as fit (llama.cpp's automatic placement)."""

    missing = (
        "--fit-target, a margin of memory, and --fit-ctx: set cache.budget to the memory less the margin; the workload says the "
        "context",
        "dense parts on the CPU where not all fit: cache slots are granted next to them",
        "computing the up, or gate and up, matrices of the next layer on the GPU: they take its memory only",
        "several GPUs",
        *(one for one in LlamaCpp.missing if "leading" not in one and "-ot" not in one),
    )

    n_gpu_layers = None
    n_cpu_moe = None
    split_mode = "none"
    tensor_split = None

    def place(self, view: View) -> Placement:
        self._begin(view, "llama-cpp-fit")
        fit = self._fit(view)
        placement = self._placed(view, range(fit.full))
        taken = MATRICES[fit.fraction]
        if not taken:
            return placement
        model = view.model
        n_bytes = ceil(model.n_experts * model.expert_bytes(fit.full) * min(taken, model.n_mats - 1) / model.n_mats)
        return replace(placement, reserved={self._gpu: n_bytes})

    def _fit(self, view: View) -> Fit:
        model = view.model
        layers = range(model.n_layers)
        dense = [sum(model.part_bytes(part, layer) for part in LAYER_PARTS) for layer in layers]
        experts = [model.n_experts * model.expert_bytes(layer) for layer in layers]
        rest = model.head_bytes + model.leading_bytes
        target = rest + sum(dense) + view.cache_slots(self._gpu) * slot_bytes(view)
        return fitted(dense, experts, rest, target, model.n_mats)
