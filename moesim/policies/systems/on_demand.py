"""On-demand loading: every expert is copied for its use and forgotten as its layer ends.

The lower baseline of most papers (OD-MoE's and Pre-gated MoE's "on-demand"). DAOP's "MoE-OnDemand", which keeps frequent experts on
the GPU, is ``static`` here. The CPU computes no expert; a layer with more active experts than staging slots goes in waves.

| point | paper says | released code does | we do |
|---|---|---|---|
| what is loaded | every activated expert, when the router is done | the same (Hugging Face Accelerate hooks) | the same |
| order | - | ascending id | ascending id |
| buffers | - | a whole layer | ``staging_slots``, by default top_k (at least 2): one computes while the next loads |
| reuse between layers | none | none | none |
"""

from __future__ import annotations

from collections.abc import Iterable

from moesim.policies.base import STAGING, ForOneUse, gpu_of, staging_pool
from moesim.policies.options import option
from moesim.policy import DEMAND, Action, Fetch, Placement, Routed, Run, View


class OnDemand(ForOneUse):
    """No cache: copy every active expert to the GPU, and drop it at the end of the layer."""

    staging_slots: int | None = option(
        None, "Experts that the staging pool holds; None: the model's top_k, but at least 2.", ge=1
    )

    def place(self, view: View) -> Placement:
        self._gpu = gpu_of(view, "on-demand")
        return Placement(pools=[staging_pool(view, self._gpu, self.staging_slots)])

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        return Fetch(event.layer, event.active, self._gpu, DEMAND, STAGING), Run(event.layer, event.active, self._gpu)
