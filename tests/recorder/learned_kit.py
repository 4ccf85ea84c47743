"""Made-up gate inputs and routing that a small network can learn in seconds."""

from __future__ import annotations

import numpy as np

from moesim.recorder.learned import LearnedOptions

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 8
QUICK = LearnedOptions(width=64, epochs=10, warmup_epochs=2, batch_tokens=50, rate_outer=1e-2, rate_middle=1e-2)


def synthetic(n_rows: int, seed: int, n_experts: int = EXPERTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gate inputs, experts and weights; experts of layer l + 1 are a nonlinear function of the input of layer l only."""
    fixed = np.random.default_rng(7)
    first, last = fixed.normal(size=(LAYERS, HIDDEN, 24)), fixed.normal(size=(LAYERS, 24, n_experts))
    inputs = np.random.default_rng(seed).normal(size=(n_rows, LAYERS, HIDDEN))
    before = np.roll(inputs, 1, axis=1)  # layer 0 depends on the last: nothing can be known about it, nor is it asked
    logits = np.einsum("nlh,lhm,lme->nle", before, first, last) ** 2  # even: no linear map of the input predicts it
    experts = np.argsort(-logits, axis=-1)[..., :TOP_K]
    weights = np.take_along_axis(logits, experts, axis=-1)
    return inputs.astype(np.float16), experts, (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16)
