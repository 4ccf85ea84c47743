"""llama.cpp's expert cache: one bank of slots over all layers; every miss is uploaded.

ggml-org/llama.cpp: src/llama-moe-cache.cpp at 4b060f27a8 (PR #29887, release b11480). ClassLRU: header comment at c4fb579695
(PR #31233, b12170).

| decision | code | ours |
|---|---|---|
| token embedding | on the CPU, as of llama.cpp | the same |
| prompts, as of llama.cpp | micro-batches of 512 rows | the same |
| which layers | those with all expert tensors on the host; a group for each device and tensor layout | all, one group |
| slots | of a group, by a budget in bytes; with fewer than a token has experts it is off | the granted slots; the same |
| key | (layer, expert), with all its projections | the same |
| planned calls | at most 32 tokens, and min(tokens k, N) at most the slots | the same, for a step |
| hits | in order of first appearance, to the recent end | the same |
| misses | ascending id; each takes the slot used longest ago, empty ones first | the same |
| ClassLRU | classes of uses that fade with a half-life of 128 tokens; of each class's oldest slot the largest age / 2^class leaves | ``eviction: class-lru``; ages in tokens of the expert's layer; of equals the lower class |
| who computes | the GPU, once all uploads are there, without overlap | the same |
| larger calls | op-offload from 32 tokens on: cached experts are copied on the device, others over the link; the cache stays as it is | the same; with fewer tokens the CPU computes |
| prediction, admission | none; every miss enters | the same |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from moesim.policies.cpu_cache import LLAMA_CPP_OFFLOAD_ROWS, LLAMA_CPP_PROMPT_ROWS, BackgroundCache, Bank, PastTheCache
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policy import Routed, View

if TYPE_CHECKING:
    from moesim.model import ModelSpec

PLANNED_TOKENS = 32
"""Of a call that the cache serves, at most."""
HALF_LIFE, CLASSES = 128, 8


class ClassBank(Bank):
    """Slots ordered by use in each class, so that a victim costs a look at each class."""

    def __init__(self, slots: int, n_layers: int, n_experts: int) -> None:
        super().__init__(slots)
        self._tokens = [0] * n_layers
        # of each layer and expert; kept when it leaves
        self._scores = [[0.0] * n_experts for _ in range(n_layers)]  # at the last use
        self._used_at = [[0] * n_experts for _ in range(n_layers)]  # the layer's tokens then
        self._class: dict[Unit, int] = {}
        self._members: list[dict[Unit, None]] = [{} for _ in range(CLASSES)]

    def used(self, layer: int, active: Sequence[int], rows: Sequence[int], n_tokens: int) -> None:
        """Note a call: its layer, tokens, active experts and their rows."""
        now = self._tokens[layer] = self._tokens[layer] + n_tokens
        scores, used_at = self._scores[layer], self._used_at[layer]
        for expert in active:
            scores[expert] = scores[expert] * 2 ** ((used_at[expert] - now) / HALF_LIFE) + rows[expert]
            used_at[expert] = now

    def enter(self, unit: Unit, slot: int) -> None:
        self.slot[unit] = slot
        at = self._class[unit] = self._class_now(unit)
        self._members[at][unit] = None

    def touch(self, unit: Unit) -> None:
        """Move it to the recent end of the class of its score now."""
        slots = self.slot
        slots[unit] = slots.pop(unit)
        was, at = self._class[unit], self._class_now(unit)
        del self._members[was][unit]
        self._members[at][unit] = None
        self._class[unit] = at

    def leave(self, unit: Unit) -> int:
        del self._members[self._class.pop(unit)][unit]
        return super().leave(unit)

    def _class_now(self, unit: Unit) -> int:
        layer, expert = unit
        return min(int(self._scores[layer][expert]).bit_length(), CLASSES) - 1  # by powers of two

    def victim(self, idle: Callable[[Iterable[Unit]], Iterator[Unit]]) -> Unit | None:
        """Return who leaves, of those that ``idle`` lets through."""
        oldest = {at: unit for at, units in enumerate(self._members) if (unit := next(idle(units), None)) is not None}
        ages = {at: (self._tokens[unit[0]] - self._used_at[unit[0]][unit[1]]) / 2**at for at, unit in oldest.items()}
        return oldest[max(ages, key=ages.__getitem__)] if ages else None


class LlamaCppCache(BackgroundCache, fixed=True):
    """One LRU over all layers; misses are uploaded to the GPU (llama.cpp's cache, PR #29887)."""

    paper = "llama.cpp (ggml-org/llama.cpp, PR #29887 and #31233)"
    engine = "llama.cpp"
    missing = (
        "groups of layers with other tensor layouts: one bank serves all, with slots of the largest expert",
        "layers that are partly on the GPU, which the cache leaves alone",
        "consecutive experts in consecutive slots: uploaded one by one, each with the link's latency",
        "copies of cached experts within the GPU for larger calls take no time",
        "ClassLRU was read from its header comment alone, not from its code",
    )
    copied_now = "all"
    miss_order = "id"
    scope = "global"
    overlap = False
    prefill = "read-only"
    _name = "llama-cpp-cache"
    _embedding_on_cpu = True
    each_layer = ("readback", "plan")
    prompt_rows = LLAMA_CPP_PROMPT_ROWS

    eviction: Literal["lru", "class-lru"] = option(
        "lru", "Who leaves: the one used longest ago, or, of each class of use, one that is old for its class (PR #31233)."
    )

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        fitting = PLANNED_TOKENS if view.model.n_experts <= slots else slots // view.model.top_k
        return PastTheCache("read-only", min(PLANNED_TOKENS, fitting), self._gpu, self._cpu, LLAMA_CPP_OFFLOAD_ROWS)

    def _new_bank(self, slots: int, model: ModelSpec) -> Bank:
        return Bank(slots) if self.eviction == "lru" else ClassBank(slots, model.n_layers, model.n_experts)

    def _used(self, event: Routed) -> None:
        bank = self._bank(event.layer)
        if isinstance(bank, ClassBank):
            bank.used(event.layer, event.active, event.rows, len(event.experts))

    def _victim(self, bank: Bank) -> Unit | None:
        return bank.victim(lambda units: self._idle(bank, units)) if isinstance(bank, ClassBank) else super()._victim(bank)
