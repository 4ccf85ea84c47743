"""Look-ahead caches: they know the next uses, all or some steps', and may refuse a miss.

Oracles, not systems: ``belady`` must take every miss into its cache; these leave one that is not worth a slot to the CPU.

| decision | code | ours |
|---|---|---|
| event | the set of experts of one layer and step | the experts of a micro-batch; time counts steps |
| order | hits first, then misses by ascending id | the same |
| MIN with bypass: admission | never used again: refused, even with a free slot; a free slot: admitted; else if used strictly sooner than the victim | the same |
| MIN with bypass: victim | the resident used again last, of the visit, too; ties: lowest id | the same |
| windowed: what is known | uses of the next W steps | the same (``window``); a later use is "beyond" |
| windowed: victim | the lowest decayed score of those beyond, else the one used last | the same (``half_life`` 16) |
| windowed: admission | used in the window: unless nobody is beyond and the victim is used no later. Else: only in place of one beyond with a score lower by kappa. Free slots are filled | the same (``kappa`` 0) |
| a miss that is admitted | read | copied, and computed on the GPU in the same visit |
| a miss that is refused | read | computed by the CPU |
| admitted, and put out by a later miss of the visit | read | computed by the CPU |
| cache at the start | empty | empty |

Source: moe-speed-of-light, ``mosl/cachesim.py`` at 009be858. `moesim.trace.stats.lookahead` counts the same misses from a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from moesim.policies.base import CACHE, Future, PolicyBase, cpu_of, gpu_of, slot_bytes, slots_per_layer
from moesim.policies.cpu_cache import DecayedScores
from moesim.policies.options import option
from moesim.policy import DEMAND, Action, Drop, Fetch, Placement, Pool, Routed, Run, View

Worth = tuple[bool, float]
"""Whether the next use is known, and then the negative of its time, else a score: compared in this order."""


def kept_with_bypass(
    cached: Iterable[int], misses: Iterable[int], slots: int, worth: Callable[[int], Worth], kappa: float = 0.0
) -> set[int]:
    """Return what a cache holds after a visit, if a miss enters only where it is worth more.

    Misses by ascending id; free slots are always filled. Of equals the lowest id leaves, and what is cached stays. A newcomer of
    unknown next use must be worth more by ``kappa`` (moe-speed-of-light, ``mosl/cachesim.py`` at 009be858).

    >>> next_use = {0: 9, 1: 3, 2: 5}
    >>> sorted(kept_with_bypass([0, 1], [2], 2, lambda e: (True, -next_use[e])))
    [1, 2]
    """
    kept = set(cached)
    for expert in sorted(misses):
        if len(kept) < slots:
            kept.add(expert)
        elif kept:
            victim = min(sorted(kept), key=worth)
            known, value = worth(expert)
            if (known, value if known else value - kappa) > worth(victim):
                kept.remove(victim)
                kept.add(expert)
    return kept


NEVER = 2**62  # the next use of what is not used again, as an oracle's future has it


class MinBypass(PolicyBase):
    """Cache with the fewest misses if the CPU may compute one: an oracle of the future."""

    needs = frozenset({"oracle:routing"})
    _future: Future | None = None

    def bind_oracle(self, future: Future) -> None:
        self._future = future

    def place(self, view: View) -> Placement:
        name = type(self).__name__
        self._gpu, self._cpu = gpu_of(view, name), cpu_of(view, name)
        self._slots = slots_per_layer(view, self._gpu, name, 0)
        self._cached: list[set[int]] = [set() for _ in self._slots]
        self._counts = {"cache_hits": 0, "cache_misses": 0, "cache_admissions": 0}
        n_bytes = slot_bytes(view)
        return Placement(pools=[Pool(self._gpu, CACHE, [n * n_bytes for n in self._slots], per_layer=True)])

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counts

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        """Admit what is worth it; the CPU computes the other misses."""
        layer, cached = event.layer, self._cached[event.layer]
        hits = [e for e in event.active if e in cached]
        misses = [e for e in event.active if e not in cached]
        # An expert that an earlier micro-batch gave up, and that is still there or on its way, does not return in this layer
        # visit: it would keep the slot for which another copy waits.
        missing = [e for e in misses if not (view.is_resident(layer, e, self._gpu) or view.is_pending(layer, e, self._gpu))]
        kept = self._kept(event, cached, missing)
        taken = [e for e in missing if e in kept]
        self._cached[layer] = kept
        found = len(hits), len(misses), len(taken)
        self._counts = {name: n + more for (name, n), more in zip(self._counts.items(), found, strict=True)}
        return [
            Run(layer, [e for e in misses if e not in kept], self._cpu),
            Run(layer, hits, self._gpu),
            Drop(layer, sorted(cached - kept), self._gpu),
            Fetch(layer, taken, self._gpu, DEMAND, CACHE),
            Run(layer, taken, self._gpu),
        ]

    def _kept(self, event: Routed, cached: set[int], misses: list[int]) -> set[int]:
        again = [e for e in misses if self._next_use(event, e) < NEVER]
        return kept_with_bypass(cached, again, self._slots[event.layer], lambda e: (True, -self._next_use(event, e)))

    def _next_use(self, event: Routed, expert: int) -> int:
        if self._future is None:
            raise RuntimeError(f"{type(self).__name__}: bind_oracle was not called before the run")
        return self._future.next_use(event.layer, expert, event.step)


class WindowedBelady(MinBypass):
    """Cache that knows the uses of the next steps, then decayed frequency: an oracle in part."""

    window: int = option(4, "Steps after the present one whose routing is known.", ge=0)
    half_life: float = option(
        16.0, "A score counts visits in which the expert was used, each half as much after so many visits of its layer.", ge=0.001
    )
    kappa: float = option(0.0, "By how much the score of a newcomer must be higher whose next use is not known.", ge=0)

    def place(self, view: View) -> Placement:
        self._scores = DecayedScores(view.model.n_layers, self.half_life)
        return super().place(view)

    def _kept(self, event: Routed, cached: set[int], misses: list[int]) -> set[int]:
        self._scores.used(event.layer, event.active, begins=event.mb == 0)

        def worth(expert: int) -> Worth:
            use = self._next_use(event, expert)
            known = use <= event.step + self.window
            return known, -use if known else self._scores.of((event.layer, expert))

        return kept_with_bypass(cached, misses, self._slots[event.layer], worth, self.kappa)
