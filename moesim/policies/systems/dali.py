"""DALI: a greedy split of each layer, residual-corrected prefetch, and a cache by workload.

The paper DALI, arXiv, 2026. No code is released.

Idea: busy experts pay for their transfer, idle ones are cheap on the CPU; so split, prefetch and cache go by rows per expert.

| point | paper says | released code does | we do |
|---|---|---|---|
| assignment | Alg. 1: by cost difference, largest first, to the GPU while its total is not larger | none | the same; ties by id; ``assignment`` (exact and beam are its comparison) |
| GPU cost | max(transfer, compute), transfer 0 if resident | none | the same; of a transfer under way the rest; ``cache_only``: only the cached are resident |
| a device's first expert takes longer (``first_extra_us``) | costs by rows alone | none | counted once a device |
| prefetch | next gate on h + res, top-k each row, most rows first | none | ``signal:residual``, top ``prefetch_size`` of all, residents skipped; ``prefetch_over`` |
| where it is predicted | at once, on a separate stream | none | ``lane``: ``main``, ahead of the layer's GPU runs, or ``side`` |
| not begun when its layer is routed | not stated | none | a demand if the GPU runs it, else queued until the layer ends |
| its memory | not stated | none | a transient pool of ``prefetch_size`` slots, emptied at the layer's end |
| cache | Alg. 2: every w_size tokens, u_size residents out and u_size others in | none | every w_size visits of a layer; a prefill chunk is one; fewer than u_size where a side has not so many |
| its line 9 | i mod w_size = 0, true at i = 0 | none | ``firing``: ``default`` after w_size visits, ``printed`` after the first |
| its line 11 | TopK for the victims | none | the lowest, as in its text |
| swap if worse | yes | none | yes; ``only_if_better`` |
| swap traffic | not stated | none | lowest urgency, the victim leaves at issue; ``blocking``: as demand; ``relabel`` keeps a copy that is there |
| a newcomer whose unused prefetch is under way | not stated | none | left for a later window, with its victim |
| demand loads | only Alg. 2 changes what is on the GPU | none | staged, dropped at the layer's end; most rows first |
| the GPU's order | - | none | what is there first, then by arrival |
| the memory constraint (9) | dropped by Alg. 1 | none | not in the plan; loads go in waves, ``peak_pool_bytes`` has the peaks |
| a step | a token | none | a decode step of the batch, or a prefill chunk with the prompt's counts |
| a prompt: loads | measured apart; no rule of its own | none | Alg. 1 by its rows, whole prompts; loads are dropped at each layer's end, prefetches wait behind them |
| a prompt: what stays | Alg. 2 goes by tokens, later "newly generated" ones | none | one visit: with ``w_size`` 4 nothing is swapped before three decode steps |
| a prompt: its speed | Fig. 13: 2.00 times HybriMoE's, 2.45 times MoE-Lightning's | none | about theirs: copying what is not cached takes all as long |
| start | random experts in each layer | none | the same, seeded |
| slots that do not divide by the layers | the same number in each layer | none | some layers have one more; ``slots_split: equal`` as the paper |
| shared experts | not in Alg. 1 | none | on the GPU, not in the plan; ``assignment: {name: greedy, shared_in_plan: true}`` |
| prefetch size | 1 (Mixtral), 4; 8 for Qwen with a quarter cached | none | 1 with up to 8 experts, else 4; ``prefetch_size`` |
| scheduling time | 4.5 % of the total, an exact solver 55 % | none | ``decision_us`` of the experiment, at each routed layer; 0 unless set |
| one CPU and two GPUs | its section 6.5 | none | ``dali-multi-gpu`` |

Ablations: ``assignment: all-cpu`` (the paper's "naive"), ``prefetch: none``, ``replacement: static``, or any other part.
"""

from __future__ import annotations

from moesim.policies.composed import Composed, Parts
from moesim.policies.options import option
from moesim.policies.parts import AssignmentOption, PlacementOption, PrefetchOption, PrefetchPart, ReplacementOption
from moesim.policies.parts.prefetch import Lane, NoPrefetch, Over, Source, TopPredicted
from moesim.policies.parts.replacement import (
    Blocking,
    Firing,
    OnlyIfBetter,
    Relabel,
    WindowSize,
    WindowSwaps,
    WorkloadAware,
)
from moesim.policy import View

FEW_EXPERTS = 8  # Mixtral; the paper's other models have 64 and more
PUBLISHED_U_SIZE = (1, 8)  # with few experts, with many
PUBLISHED_PREFETCH_SIZE = (1, 4)  # of its Fig. 12; its Fig. 19 has 8 for Qwen
ANOTHER_PART = "Another part than the paper's, without the options that describe the paper's."


class Dali(Composed):
    """Greedy split by rows per expert, residual prefetch, and a windowed cache (DALI, 2026)."""

    paper = "DALI (arXiv, 2026)"
    missing = (
        "the memory constraint (9), which Algorithm 1 drops too: more demand loads than staging slots go in waves",
        "the switch between streams before a prediction",
        "the time that a solver takes for ``exact``, layer by layer: ``decision_us`` is the same for all",
    )

    placement: PlacementOption = option("random")
    assignment: AssignmentOption = option("greedy")  # Algorithm 1; its totals are not the executed time, which pipelines
    prefetch: PrefetchOption | None = option(None, ANOTHER_PART)  # type: ignore[assignment]
    replacement: ReplacementOption | None = option(None, ANOTHER_PART)  # type: ignore[assignment]
    scope = "per-layer"
    staging_slots = None
    load_order = "rows"
    w_size: WindowSize = option(4)
    u_size: WindowSwaps | None = option(
        None,
        "Experts replaced at its end; null: the paper's, 1 for models with up to 8 experts and 8 for others; 0: never.",
    )
    firing: Firing = option("default")
    only_if_better: OnlyIfBetter = option(False)
    blocking: Blocking = option(False)
    relabel: Relabel = option(False)
    prefetch_size: int | None = option(
        None,
        "Experts of a layer visit to prefetch; null: the paper's, 1 for models with up to 8 experts and 4 for others; 0: none.",
        ge=0,
    )
    prefetch_source: Source = option("signal:residual")
    prefetch_over: Over = option("all")
    lane: Lane = option(
        "main",
        "Where predictions are computed; the paper uses a second stream, which needs its measured rate in the profile.",
    )

    def compose(self) -> Parts:
        return Parts(
            placement=self.named("placement"),
            assignment=self.named("assignment"),
            prefetch=self.named("prefetch", self._residual_prefetch()),
            replacement=self.named("replacement", self._window_cache()),
        )

    def _residual_prefetch(self) -> PrefetchPart:
        """Fetch the busiest experts by the next gate on the corrected state (section 4.2)."""
        if self.prefetch_size == 0:
            return NoPrefetch()
        return TopPredicted(
            source=self.prefetch_source,
            size=self.prefetch_size or 1,
            over=self.prefetch_over,
            lane=self.lane,
        )

    def _window_cache(self) -> WorkloadAware:
        """Replace the residents with the fewest rows of a window (Algorithm 2)."""
        return WorkloadAware(
            w_size=self.w_size,
            u_size=1 if self.u_size is None else self.u_size,
            firing=self.firing,
            only_if_better=self.only_if_better,
            blocking=self.blocking,
            relabel=self.relabel,
        )

    def adjust(self, view: View) -> None:
        """Set the sizes printed for a model of this size, where none is given."""
        many = view.model.n_experts > FEW_EXPERTS
        _, _, prefetch, replacement = self.parts
        if self.prefetch is None and self.prefetch_size is None and isinstance(prefetch, TopPredicted):
            prefetch.size = PUBLISHED_PREFETCH_SIZE[many]
        if self.replacement is None and self.u_size is None and isinstance(replacement, WorkloadAware):
            replacement.u_size = PUBLISHED_U_SIZE[many]
