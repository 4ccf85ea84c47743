"""A fixed set of experts on the GPU, all others computed on the CPU: what kt-kernel does beside SGLang.

| point | code does | we do |
|---|---|---|
| ``--kt-num-gpu-experts`` | so many experts for each MoE layer | the same |
| strategy ``uniform`` (default) | the first so many of each layer | ``choice: uniform`` |
| strategy ``frequency`` | as many in all, the most frequent by recorded counts | ``choice: frequency``: by calibration |
| other experts | the CPU, in prefill as well, unless a threshold for whole layers on the GPU is set | the CPU |
| deferred experts | optional; they change what the model computes | none |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from moesim.errors import CapacityError
from moesim.policies.algorithms.caching import global_top
from moesim.policies.base import CACHE, PolicyBase, Range, cpu_of, gpu_of
from moesim.policy import Action, Copy, Placement, Pool, Routed, Run, View


class StaticSet(PolicyBase):
    """A fixed set of experts on the GPU; the CPU computes the others (KTransformers with kt-kernel)."""

    paper = "KTransformers (kvcache-ai/ktransformers), kt-kernel"
    missing = ("deferred experts, which change what the model computes", "whole layers on the GPU for long prompts")
    listens = frozenset({Routed})

    gpu_experts: Annotated[int, Range(0)] = 0
    """Experts on the GPU for each layer, on average."""
    choice: Literal["uniform", "frequency"] = "uniform"
    """The first of each layer, or the most frequent of all layers together."""

    @property
    def needs(self) -> frozenset[str]:
        """Calibration frequencies, if they decide."""
        return frozenset({"table:activation_frequency"} if self.choice == "frequency" else ())

    def place(self, view: View) -> Placement:
        """Fill as many slots as asked for."""
        self._gpu, self._cpu = gpu_of(view, "static set"), cpu_of(view, "static set")
        model = view.model
        each = min(self.gpu_experts, model.n_experts)
        granted = view.cache_slots(self._gpu)
        if each * model.n_layers > granted:
            raise CapacityError(
                f"static set on {self._gpu}: expected at most {granted // model.n_layers} experts a layer, as the cache slots "
                f"allow, got {each}; lower gpu_experts or raise the cache"
            )
        if self.choice == "frequency":
            chosen = global_top(view.tables["activation_frequency"].tolist(), each * model.n_layers)
        else:
            chosen = [list(range(each)) for _ in range(model.n_layers)]
        self._here = [bytes(expert in experts for expert in range(model.n_experts)) for experts in chosen]
        n_bytes = sum(len(experts) * model.expert_bytes(layer) for layer, experts in enumerate(chosen))
        copies = [Copy(layer, experts, self._gpu) for layer, experts in enumerate(chosen) if experts]
        return Placement(copies=copies, pools=[Pool(self._gpu, CACHE, n_bytes)])

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Run every active expert where it is."""
        here = self._here[event.layer]
        sides = ([e for e in event.active if here[e]], self._gpu), ([e for e in event.active if not here[e]], self._cpu)
        return [Run(event.layer, experts, device) for experts, device in sides if experts]
