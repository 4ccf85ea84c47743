"""What is recorded of a miniature: which prompts, which signals, which calibration tables."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from moesim.recorder import corpus as corpora
from moesim.recorder import gates
from moesim.recorder.corpus import END_OF_TEXT, Prompt
from moesim.recorder.gates import Recording
from moesim.stats.prediction import coactivation
from moesim.stats.trace_stats import activation_frequency
from moesim.trace import Signal, Trace

RECORDER = "moesim.recorder.miniature 1"
NAME = "mini-mixtral"

#: Greedy decoding of a model this small falls into loops, whose routing repeats; sampling at this temperature
#: does not.
TEMPERATURE = 0.8

NOTE = (
    "Routing is real and learned: these are the choices of trained routers on held-back text. Weights are "
    "small: the miniature has the routing shape of Mixtral-8x7B and a thirty-second of its width, so costs "
    "must come from the full model's spec. Its statistics differ from the full model's: see "
    "traces/mini-mixtral.md."
)


@dataclass(frozen=True)
class RecordingPlan:
    """Which requests to record.

    Attributes
    ----------
    requests : tuple of (n_prompt, n_decode)
        In this order; those with a prompt of `signal_prompt` tokens come first.
    n_signal_requests : int
        The first so many carry signals.
    calibration : tuple of (n_prompt, n_decode)
        Requests of the calibration files, which are not in the trace.
    """

    requests: tuple[tuple[int, int], ...]
    n_signal_requests: int
    calibration: tuple[tuple[int, int], ...]


#: 28 short requests of one length (batches of equal prompts), 16 ragged ones, 16 long decodes and 4 long
#: prompts.
PLAN = RecordingPlan(
    requests=(
        *[(64, 128)] * 28,
        *[(length, 128) for length in (80, 96, 112, 128, 144, 160, 192, 256)] * 2,
        *[(256, 512)] * 16,
        *[(1024, 128)] * 4,
    ),
    n_signal_requests=16,
    calibration=(*[(64, 128)] * 12, *[(256, 64)] * 8),
)


def record_miniature(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    training: dict[str, Any],
    *,
    seed: int = 0,
    plan: RecordingPlan = PLAN,
    corpus: corpora.Corpus | None = None,
) -> Trace:
    """Record the routing of held-back prompts.

    Parameters
    ----------
    model, tokenizer, training
        As `moesim.recorder.miniature.load_checkpoint` gives them.
    seed : int
        Of the choice of prompts and of the sampling.
    plan : RecordingPlan
    corpus : Corpus or None
        None: the standard library, divided as for the training.

    Returns
    -------
    Trace

    Raises
    ------
    ValueError
        If the corpus is not the one that the model was trained on, since its sets would then not be disjoint.
    """
    if corpus is None:
        corpus = corpora.read_corpus(corpora.standard_library(), int(training["seed"]))
    check_corpus(corpus, training)
    rng = random.Random(seed)
    prompts = corpora.draw_prompts(tokenizer, corpus.documents["prompts"], _wanted(plan.requests), rng)
    passages = corpora.draw_prompts(tokenizer, corpus.documents["calibration"], _wanted(plan.calibration), rng)
    banned = [int(tokenizer.token_to_id(END_OF_TEXT) or 0)]

    # Two streams of seeds: what calibration samples must not depend on how many requests are recorded.
    calibrating = list(_record(model, passages, plan.calibration, banned, 1_000_000 * (seed + 1), "calibration"))
    n_experts = model.config.num_local_experts
    tables = calibration_tables(calibrating, n_experts)
    recordings = list(_record(model, prompts, plan.requests, banned, 2_000_000_000 + 1_000_000 * seed, "recording"))
    return Trace.build(
        experts=np.concatenate([r.experts for r in recordings]),
        weights=np.concatenate([r.weights for r in recordings]),
        scores=np.concatenate([r.scores for r in recordings]),
        n_prompt=[n for n, _ in plan.requests],
        n_decode=[n for _, n in plan.requests],
        n_experts=n_experts,
        model=NAME,
        label="measured",
        signals=signals(recordings[: plan.n_signal_requests], gates.gate_weights(model), tables["residual"]),
        tables=tables,
        header=_header(model, training, seed, prompts, passages, plan),
    )


def _wanted(lengths: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    """Kind of text and tokens of each prompt; the kinds take turns."""
    return [(corpora.KINDS[number % len(corpora.KINDS)], n_prompt) for number, (n_prompt, _) in enumerate(lengths)]


def check_corpus(corpus: corpora.Corpus, training: dict[str, Any]) -> None:
    """Check that a corpus is the one that a model was trained on.

    Raises
    ------
    ValueError
        If not.
    """
    if corpus.sha256 != training["corpus_sha256"]:
        raise ValueError(
            f"corpus: expected sha256 {training['corpus_sha256'][:12]}... as trained on "
            f"(Python {training['python']}), got {corpus.sha256[:12]}...; run that version of Python, "
            "or train again"
        )


def _record(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    lengths: Sequence[tuple[int, int]],
    banned: Sequence[int],
    first_seed: int,
    what: str,
) -> Iterator[Recording]:
    jobs = list(zip(prompts, lengths, strict=True))
    for number, (prompt, (_, n_decode)) in enumerate(track(jobs, description=what)):
        yield gates.record(model, prompt.tokens, n_decode, temperature=TEMPERATURE, seed=first_seed + number, banned=banned)


def calibration_tables(recordings: Sequence[Recording], n_experts: int) -> dict[str, NDArray[Any]]:
    """Tables that predictors may use, from requests that are not in the trace.

    Parameters
    ----------
    recordings : sequence of Recording
    n_experts : int

    Returns
    -------
    dict of str to ndarray
        ``activation_frequency`` (prefill and decode) and ``activation_frequency_decode``, (n_layers,
        n_experts) float32 shares; ``coactivation`` (n_layers, n_experts, n_experts) float32 counts;
        ``residual`` (n_layers, hidden) float16.
    """
    experts = np.concatenate([r.experts for r in recordings])
    decode = np.concatenate([r.experts[r.n_prompt :] for r in recordings])
    return {
        "activation_frequency": activation_frequency(experts, n_experts).astype(np.float32),
        "activation_frequency_decode": activation_frequency(decode, n_experts).astype(np.float32),
        "coactivation": coactivation(experts, n_experts).astype(np.float32),
        "residual": gates.residual_vectors(recordings),
    }


def signals(recordings: Sequence[Recording], weights: NDArray[np.float32], residual: NDArray[np.float16]) -> dict[str, Signal]:
    """Compute what gate reuse and its residual form say about every row of the first requests of a trace.

    Parameters
    ----------
    recordings : sequence of Recording
        The first requests of the trace, in order.
    weights : (n_layers, n_experts, hidden) float32
        Router weights.
    residual : (n_layers, hidden) float16

    Returns
    -------
    dict of str to Signal
        ``gate_next1``, ``gate_next2``, ``gate_next3`` and ``residual``, dense.
    """
    inputs = np.concatenate([r.inputs for r in recordings])
    rows = np.arange(len(inputs), dtype=np.int32)
    found = {}
    for ahead in (1, 2, 3):
        about = f"softmax of router l applied to the input of router l - {ahead}"
        scores = gates.gate_reuse(inputs, weights, ahead).astype(np.float16)
        found[f"gate_next{ahead}"] = Signal(f"gate_next{ahead}", rows, scores, None, ahead, ahead, ahead, about)
    about = "softmax of router l applied to the input of router l - 1 plus calibration/residual[l - 1]"
    scores = gates.residual_reuse(inputs, weights, residual).astype(np.float16)
    found["residual"] = Signal("residual", rows, scores, None, 1, 1, 1, about)
    return found


def _header(
    model: PreTrainedModel,
    training: dict[str, Any],
    seed: int,
    prompts: Sequence[Prompt],
    passages: Sequence[Prompt],
    plan: RecordingPlan,
) -> dict[str, Any]:
    def listed(drawn: Sequence[Prompt], lengths: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {"kind": p.kind, "file": p.file, "start": p.start, "n_prompt": n_prompt, "n_decode": n_decode}
            for p, (n_prompt, n_decode) in zip(drawn, lengths, strict=True)
        ]

    return {
        "miniature": True,
        "miniature_of": "mixtral-8x7b",
        "note": NOTE,
        "revision": "trained by this recorder; see training",
        "dtype": "float32",
        "hidden": model.config.hidden_size,
        "recorder": RECORDER,
        "seed": seed,
        "sampling": f"temperature {TEMPERATURE}, seeded per request; end of text is never sampled",
        "prompts": f"standard library of Python {training['python']}, files held back from training; PSF",
        "batching": "one request at a time",
        "training": training,
        "trace_requests": listed(prompts, plan.requests),
        "calibration_requests": listed(passages, plan.calibration),
        "trace_files": sorted({p.file for p in prompts}),
        "calibration_files": sorted({p.file for p in passages}),
    }
