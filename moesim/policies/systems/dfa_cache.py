"""moe-speed-of-light's patch: hot misses by decayed frequency are copied, or split.

harshithkantamneni/moe-speed-of-light: runtime/llama.cpp-expert-cache-4da6337.patch (13b48f82), mosl/ecsim.py (5f5fef73),
jobs/ec2/fetch_table.py (2f1ac924).

| decision | code | ours |
|---|---|---|
| token embedding | on the CPU, as of llama.cpp | the same |
| prompts, as of llama.cpp | micro-batches of 512 rows | the same |
| slots | as many of each layer, or a file with the number of each | the granted slots, dealt to layers |
| scores | 1 a decode step that uses the expert, half as much after H = 16 steps | the same (``half_life``) |
| hits, misses | the GPU computes what is there, the CPU all others at the same time | the same |
| who is copied | misses in selection order, not on their way: into the lowest free slot, else if their score beats the victim's by kappa; MAX_ADMIT a visit | the same (``kappa``, ``inserts``); ``rule: lru`` copies all |
| who leaves | the lowest score of those not selected, of equals the lowest slot; ``lru``: the oldest use | the same, as the copy is issued |
| a copy counts | from two steps later on | the same, or from the step after its arrival |
| FETCH table | T[n] of n misses are copied in selection order over the lowest scores, and computed by the GPU, the others by the CPU | the same (``fetch``); nothing else is copied then |
| rule for the table | the f with the least time, by rates alone and together; of equals the larger | ``fetch: rates``, from the profile's times of one row |
| copies ahead | of the next router's choice on this layer's state, q that are not there, over nobody it chose | the same (``prefetch_size``, ``source``); no admission; counts from its arrival |
| prompts | not cached | the same; from 32 tokens on the GPU computes them, as in llama.cpp, else the CPU |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from typing import Literal

from moesim.errors import ConfigError
from moesim.policies.cpu_cache import (
    LLAMA_CPP_OFFLOAD_ROWS,
    LLAMA_CPP_PROMPT_ROWS,
    BackgroundCache,
    Bank,
    PastTheCache,
    both_rates,
    copies_by_time,
)
from moesim.policies.options import option
from moesim.policies.parts import Unit, source_needs
from moesim.policy import PREFETCH, Action, Fetched, LayerEnd, Placement, Predict, Predicted, Routed, StepBegin, View


class DfaCache(BackgroundCache, fixed=True):
    """Slots of each layer next to the CPU, by decayed frequency (moe-speed-of-light's patch)."""

    paper = "moe-speed-of-light (harshithkantamneni/moe-speed-of-light)"
    engine = "moe-speed-of-light"
    missing = (
        "LLAMA_EC_POLICY=static: which experts it keeps was not in the files read",
        "slots of each layer from a file",
        "what becomes of decode steps of many tokens, which the files read do not say: they are cached like others",
        "from 32 tokens on experts of a prompt that are cached are copied again: here they are read from the cache",
        "the cores that wake up at a miss and those that spin: what the profile's CPU times say",
    )
    admission = "score"
    victim = "score"
    publish = "two-steps"
    prefill = "read-only"
    _name = "dfa-cache"
    _embedding_on_cpu = True
    each_layer = ("lookup",)
    _for_cpu = "handover"
    prompt_rows = LLAMA_CPP_PROMPT_ROWS

    rule: Literal["dfa", "lru"] = option(
        "dfa", "Who is copied and who leaves: by decayed frequency, or every miss over the oldest use (``LLAMA_EC_POLICY``)."
    )
    half_life: float = option(16.0, "Decode steps after which a use counts half (``LLAMA_EC_HALF_LIFE``).", ge=0.001)
    kappa: float = option(0.0, "By how much the newcomer's score must be higher (``LLAMA_EC_KAPPA``).", ge=0)
    inserts: int | None = option(None, "At most so many copies for later a layer visit (``MAX_ADMIT``); None: any number.", ge=1)
    fetch: str | None = option(
        None,
        "Misses that the link takes in their own visit: ``rates``, or how many of none, one, two, as in "
        "``0,0,1,1``; more misses are treated as the last (``LLAMA_EC_FETCH``). None: none, but copies for "
        "later.",
    )
    prefetch_size: int = option(0, "Experts of the next layer that are copied ahead (``LLAMA_EC_PREFETCH``).", ge=0)
    source: str = option("signal:gate_next1", "Where the prediction of the next layer comes from.")

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({StepBegin, Routed, Fetched, LayerEnd, *([Predicted] if self.prefetch_size else [])})

    @property
    def needs(self) -> frozenset[str]:
        _ = self._given  # a wrong table is an error before any run
        return source_needs(self.source) if self.prefetch_size else frozenset()

    @cached_property
    def _given(self) -> list[int] | None:
        if self.fetch in (None, "rates"):
            return None
        words = str(self.fetch).split(",")
        table = [int(word) if word.strip().isdecimal() else -1 for word in words]
        if any(not 0 <= f <= n for n, f in enumerate(table)):
            raise ConfigError(
                f"option fetch: expected 'rates', or for 0, 1, 2, ... misses how many are copied, at most all, as in '0,0,1', got "
                f"{self.fetch!r}"
            )
        return table

    def place(self, view: View) -> Placement:
        placement = super().place(view)
        self._now_at = (-1, -1)  # step and layer routed last
        self._ahead: set[Unit] = set()  # on their way before their layer asked
        self._cached_step = False
        self._table = self._by_rates(view) if self.fetch == "rates" else self._given
        return placement

    def _by_rates(self, view: View) -> list[int]:
        copy, gpu, cpu = max(self._copy_ns), self._gpu_ns[1], self._cpu_ns[1]
        rates = both_rates(view, self._cpu, self._gpu)
        both = 1 / (rates.cpu / cpu + rates.link / copy) if cpu and copy else 0
        return [copies_by_time(n, copy, gpu, cpu, self._first_ns, both) for n in range(view.model.top_k + 1)]

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        return PastTheCache("read-only", None, self._gpu, self._cpu, LLAMA_CPP_OFFLOAD_ROWS)

    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        self._cached_step = event.phase == "decode"
        return super().on_step_begin(event, view)

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        """Serve the layer, and ask about the next one if experts are copied ahead."""
        actions = super().on_routed(event, view)
        if not self._cached_step:
            return actions
        self._now_at = event.step, event.layer
        if not self.prefetch_size or event.layer + 1 == view.model.n_layers:
            return actions
        return [Predict(event.step, event.layer + 1, self.source, view.dense_device(event.layer)), *actions]

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        if (unit := (event.layer, event.expert)) in self._ahead:
            self._ahead.discard(unit)
            self._publish([unit])
        return super().on_fetched(event, view)

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        """Copy the first without a slot, over experts not predicted, unless the layer is routed."""
        if self._now_at >= (event.step, event.layer):
            return []
        chosen = [(event.layer, e) for e in dict.fromkeys(event.ids.T.ravel().tolist())]
        bank = self._bank(event.layer)
        self._spared = set(chosen)
        actions: list[Action] = []
        for unit in islice((unit for unit in chosen if unit not in bank.slot), self.prefetch_size):
            taken = self._take(unit, PREFETCH)
            if taken:
                self._ahead.add(unit)
                actions += taken
        self._spared = set()
        return actions

    def _n_now(self, layer: int, misses: Sequence[int], rows: Sequence[int]) -> int:
        return self._table[min(len(misses), len(self._table) - 1)] if self._table is not None else 0

    @property
    def _copies_later(self) -> bool:
        return self._table is None

    def _admitted(self, unit: Unit, bank: Bank) -> bool:
        return self.rule == "lru" or super()._admitted(unit, bank)

    def _victim(self, bank: Bank) -> Unit | None:
        return next(self._idle(bank), None) if self.rule == "lru" else super()._victim(bank)
