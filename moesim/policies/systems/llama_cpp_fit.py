"""llama.cpp without options of placement: ``--fit`` puts on the GPU what fits, the experts of the first layers first.

ggml-org/llama.cpp, ``common/fit.cpp`` at 08033df02c; op-offload as in `moesim.policies.systems.llama_cpp`.

Idea: no routing, no speed: only projected memory counts. Setting the number of GPU layers, a split or any override of tensors (as
``--n-cpu-moe`` does) switches it off, and is the policy ``llama-cpp``.

| point | paper says | released code does | we do |
|---|---|---|---|
| memory | - | free memory of each device less a margin (``--fit-target``, 1 GiB), measured by loads that allocate nothing | what the granted cache slots and the dense part take |
| all fits | - | nothing is changed | the same |
| context left open | - | shrunk first | the workload says the context |
| dense parts | - | from the last layer on, as many as fit; if not all do, all experts stay on the CPU | all of them: slots are granted beside them |
| experts of whole layers | - | from the first layer on, as many as fit | the same |
| search | - | false position: interpolated between a count that fits and one that does not | the same (`fitted`) |
| next layer | - | its up matrices, or its gate and up matrices, if they fit strictly | their memory is taken; the CPU computes the layer |
| several GPUs | - | the first fills first, what is left of a layer goes to the next | one |
| token embedding | - | on the CPU | the same |
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from types import MappingProxyType

from moesim.policies.algorithms.llama_cpp import Fit, fitted
from moesim.policies.base import slot_bytes
from moesim.policies.systems.llama_cpp import LlamaCpp
from moesim.policy import Placement, View

MATRICES = MappingProxyType({"none": 0, "up": 1, "gate and up": 2})


class LlamaCppFit(LlamaCpp, fixed=("n_gpu_layers", "n_cpu_moe")):
    """Experts of the first layers on the GPU, as many as fit, the others on the CPU (llama.cpp's automatic placement)."""

    missing = (
        "--fit-target, a margin of memory, and --fit-ctx: set cache.budget to the memory less the margin; the workload says the "
        "context",
        "dense parts on the CPU where not all fit: cache slots are granted beside them",
        "computing the up, or gate and up, matrices of the next layer on the GPU: they take its memory only",
        "several GPUs",
        *(one for one in LlamaCpp.missing if "leading" not in one and "-ot" not in one),
    )

    def place(self, view: View) -> Placement:
        """Search what fits."""
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
        dense = [model.attention_bytes + model.dense_bytes(layer) + model.shared_bytes for layer in layers]
        experts = [model.n_experts * model.expert_bytes(layer) for layer in layers]
        rest = model.head_bytes + model.leading_bytes
        target = rest + sum(dense) + view.cache_slots(self._gpu) * slot_bytes(view)
        return fitted(dense, experts, rest, target, model.n_mats)
