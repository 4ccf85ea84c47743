"""Inputs are the same to the byte as they were when their digests were recorded: composed steps, and synthetic routing.

A digest that changes changes results that were published with it: what changes it must say why.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from moesim.trace import Trace
from moesim.trace.synthesis import read_parameters, synthesize
from moesim.trace.workload import Step, Workload, WorkloadSpec, compose


def made(n_layers: int, n_experts: int, top_k: int, prompt: list[int], decode: list[int], scores: bool = False) -> Trace:
    """Draw integers only, which are the same on every machine."""
    rng = np.random.default_rng(5)
    n_rows = sum(prompt) + sum(decode)
    experts = rng.permuted(np.tile(np.arange(n_experts), (n_rows, n_layers, 1)), axis=2)[:, :, :top_k]
    return Trace.build(
        experts=experts,
        weights=rng.integers(1, 256, experts.shape) / 256,
        scores=rng.integers(1, 256, (n_rows, n_layers, n_experts)) / 256 if scores else None,
        n_prompt=prompt,
        n_decode=decode,
        n_experts=n_experts,
        model="drawn",
        label="synthetic",
    )


TRACES = {
    "small": made(3, 8, 2, [5, 5, 7, 3, 0, 9, 5], [4, 6, 4, 5, 3, 0, 8], scores=True),
    "long": made(2, 4, 2, [700, 20], [5, 40]),  # more rows of an expert than a byte counts
    "longest": made(1, 2, 1, [140_000], [2]),  # more than two bytes count
    "wide": made(2, 256, 8, [6, 6, 6], [30, 30, 30]),  # as many experts as have ids of a byte, and more
    "wider": made(2, 300, 4, [6, 6], [9, 9]),
}

WORKLOADS: dict[str, tuple[str, dict[str, Any], str]] = {
    "one by one": ("small", {"requests": "all"}, "224e5d4e2af49f8f"),
    "batches": ("small", {"batch_size": 3, "requests": "all"}, "02fd8d29153a0206"),
    "micro-batches": ("small", {"batch_size": 3, "micro_batches": 2, "requests": "all"}, "253351d248d8837a"),
    "refill": ("small", {"batch_size": 3, "refill": True, "requests": "all"}, "529caae949c4d7fb"),
    "refill, micro-batches, chunks": (
        "small",
        {"batch_size": 3, "refill": True, "micro_batches": 3, "prefill_chunk": 4, "requests": "all"},
        "0421a377a1577f22",
    ),
    "chunks": ("small", {"batch_size": 4, "prefill_chunk": 3, "requests": "all"}, "b11a0e2bfd944a47"),
    "prefill only": ("small", {"batch_size": 2, "decode_tokens": 0, "n_batches": 2, "seed": 3}, "fc7dd337157ad1fa"),
    "no prompt": ("small", {"batch_size": 2, "prompt_tokens": 0, "decode_tokens": 3, "n_batches": 2}, "9d4e43ecdf40d646"),
    "cut prompts": ("small", {"batch_size": 2, "prompt_tokens": 4, "decode_tokens": 3}, "87b1de5a1ff44411"),
    "shifted copies": (
        "small",
        {"batch_size": 6, "prompt_tokens": 5, "decode_tokens": 4, "reuse": "shifted", "n_batches": 2, "micro_batches": 2},
        "46ac6e939daae8ea",
    ),
    "rows repeat": (
        "small",
        {"prompt_tokens": 9, "decode_tokens": 20, "reuse": "shifted", "requests": (0, 1)},
        "40c2f269b07fee2b",
    ),
    "many rows": ("long", {"batch_size": 2, "requests": "all"}, "2b1f75517a277444"),
    "many rows, chunks": ("long", {"batch_size": 2, "requests": "all", "prefill_chunk": 256, "refill": True}, "e7247c3d3326c62e"),
    "most rows": ("longest", {"requests": "all"}, "32e543aa238921b6"),
    "256 experts": ("wide", {"batch_size": 3, "requests": "all"}, "fc2ac6caa62f3e9b"),
    "300 experts": ("wider", {"batch_size": 2, "requests": "all", "micro_batches": 2}, "5c57044c1edbd1e7"),
}  # fmt: skip
"""Name -> trace, specification, digest of all that its steps say."""


def add(found: Any, value: Any) -> None:
    """Digest a value with its type, so that 1, True and an array of 1 differ."""
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype.str}{value.shape}{value.flags.writeable}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (tuple, list)):
        found.update(f"{type(value).__name__}{len(value)}".encode())
        for one in value:
            add(found, one)
    else:
        found.update(f"{type(value).__name__}{value!r}".encode())


def step_values(step: Step) -> list[Any]:
    said = [step.index, step.phase, step.batch, step.kv_tokens, step.last_chunk, step.begins, step.ends]
    said += [step.n_tokens, step.n_micro, step.n_sequences, step.work2, step.sequences]
    arrays = [np.array(step.requests), np.array(step.rows)]  # writable or not
    return [*said, *arrays, *([*micro[:4], list(micro.layers)] for micro in step.micro)]  # its last field is all layers once more


def digest(workload: Workload) -> str:
    found = hashlib.sha256()
    for step in workload.steps:
        add(found, step_values(step))
    sums = [workload.max_tokens, workload.peak_kv_tokens, workload.labels, workload.requests]
    add(found, sums)
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", WORKLOADS)
def test_steps_are_as_recorded(name: str) -> None:
    trace, spec, recorded = WORKLOADS[name]
    assert digest(compose(TRACES[trace], WorkloadSpec(**spec))) == recorded


SYNTHETIC: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek-v2-lite": ({'n_requests': 2, 'n_prompt': 6, 'n_decode': 24, 'seed': 1}, "1aa5109d39f29974"),
    "gpt-oss-20b": ({'n_requests': 2, 'n_prompt': 6, 'n_decode': 24, 'seed': 1}, "8b5b25178a926143"),
    "mixtral-8x7b": ({'n_requests': 2, 'n_prompt': 6, 'n_decode': 24, 'seed': 1}, "bb2be8b4ffc386dc"),
    "qwen2-57b-a14b": ({'n_requests': 2, 'n_prompt': 6, 'n_decode': 24, 'seed': 1}, "d2f03d5eecb96502"),
    "qwen3-30b-a3b": ({'n_requests': 2, 'n_prompt': 6, 'n_decode': 24, 'seed': 1}, "d74ee38d32180fbf"),
}  # fmt: skip
"""Parameters -> what is made of them, digest of the experts."""


def experts_digest(trace: Trace) -> str:
    return hashlib.sha256(np.ascontiguousarray(trace.experts).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_routing_is_as_recorded(name: str) -> None:
    asked, recorded = SYNTHETIC[name]
    assert experts_digest(synthesize(read_parameters(name), **asked)) == recorded
