"""What is recorded of a miniature: which prompts, which signals, which calibration tables."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from miniature import corpus as corpora
from miniature.corpus import END_OF_TEXT, Prompt
from miniature.shapes import SHAPES, Shape
from miniature.slim import slim
from moesim.recorder.generation import Sampling
from moesim.recorder.learned import LearnedOptions, Predictors, learned_signal, train_predictors
from moesim.recorder.recording import Plan, Recorder, Recording, counts_of, record_batch
from moesim.recorder.session import request_seed, to_trace
from moesim.recorder.shadow import Alignment, ShadowObserver
from moesim.recorder.signals import DENSE_EXPERTS, SignalPlan
from moesim.trace import Trace

#: As in the shipped traces, so that a recording made again has the same header.
RECORDER = "moesim.recorder.miniature 3"

#: Greedy decoding of a model this small falls into loops, whose routing repeats; sampling at this temperature
#: does not.
TEMPERATURE = 0.8

#: Streams of seeds: what calibration samples must not depend on how many requests are recorded.
CALIBRATION, TRACE = 0, 1

NOTE = (
    "Routing is real and learned: these are the choices of trained routers on held-back text. Weights are "
    "small: the miniature has the routing shape of {of} and a small fraction of its width, so costs "
    "must come from the full model's spec. Its statistics differ from the full model's: see "
    "traces/README.md."
)


@dataclass(frozen=True)
class RecordingPlan:
    """Which requests to record.

    Attributes
    ----------
    requests : tuple of (n_prompt, n_decode)
        In this order, taking turns between the kinds of text.
    n_signal_requests : int
        The first so many carry signals.
    calibration : tuple of (n_prompt, n_decode)
        Requests of the calibration documents, which are not in the trace.
    batch_size : int
        Requests of equal length that are recorded together.
    shadow : str
        Weights of the shadow: ``fp16``, ``int8`` or ``nf4``.
    learned : LearnedOptions
        The hidden layers are as wide as the miniature, not as the paper's for states of 4096.
    """

    requests: tuple[tuple[int, int], ...]
    n_signal_requests: int
    calibration: tuple[tuple[int, int], ...]
    batch_size: int = 16
    shadow: str = "int8"
    learned: LearnedOptions = field(default_factory=lambda: LearnedOptions(width=128))


#: Short requests of one length (batches of equal prompts), ragged ones, two long decodes and two long prompts.
PLAN = RecordingPlan(
    requests=(
        *[(64, 128)] * 52,
        *[(length, 128) for length in (96, 128, 192, 256)] * 2,
        *[(256, 512)] * 2,
        *[(1024, 128)] * 2,
    ),
    n_signal_requests=8,
    calibration=(*[(64, 128)] * 32, *[(256, 64)] * 8),
)


def record_miniature(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    training: dict[str, Any],
    shape: Shape = SHAPES["mixtral"],
    *,
    seed: int = 0,
    plan: RecordingPlan = PLAN,
    corpus: corpora.Corpus | None = None,
) -> Trace:
    """Record the routing of held-back prompts.

    Parameters
    ----------
    model, tokenizer, training
        As `miniature.command.load_checkpoint` gives them.
    shape : Shape
        What the model is a miniature of.
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
    recorder = Recorder(model)
    sampling = Sampling(temperature=TEMPERATURE, banned=(int(tokenizer.token_to_id(END_OF_TEXT) or 0),))

    tables, predictors = _calibrate(recorder, passages, sampling, seed, plan)
    top_k = int(model.config.num_experts_per_tok)
    seeds = [request_seed(seed, TRACE, number) for number in range(len(prompts))]
    shadow = ShadowObserver(model, plan.shadow, Alignment(1, 1), sampling, seeds)
    signals = SignalPlan(top_k, residual=tables["residual"])
    whole = Plan(
        batch_size=plan.batch_size,
        pad=False,
        scores=recorder.n_experts <= DENSE_EXPERTS,
        n_inputs=plan.n_signal_requests,
        signals=signals,
        n_signals=plan.n_signal_requests,
        observer=shadow,
        observer_facts=shadow.facts,
    )
    recordings = list(_record(recorder, prompts, plan.requests, seeds, sampling, whole, "recording"))
    facts = signals.facts(len(recorder.routers), recorder.routers[0].score) | shadow.facts
    header = _header(shape, model, training, seed, prompts, passages, plan)
    trace = replace(to_trace(recordings, recorder.n_experts, facts, header), tables=tables)
    return slim(replace(trace, signals={**trace.signals, "learned": learned_signal(predictors, trace)}))


def _calibrate(
    recorder: Recorder, passages: Sequence[Prompt], sampling: Sampling, seed: int, plan: RecordingPlan
) -> tuple[dict[str, NDArray[Any]], Predictors]:
    """Tables and learned predictors, from requests that are not in the trace."""
    seeds = [request_seed(seed, CALIBRATION, number) for number in range(len(passages))]
    with_inputs = Plan(batch_size=plan.batch_size, pad=False, n_inputs=None)
    counts = counts_of(recorder)
    recordings = []
    for recording in _record(recorder, passages, plan.calibration, seeds, sampling, with_inputs, "calibration"):
        assert recording.inputs is not None
        counts.add(recording.experts, recording.n_prompt)
        counts.add_inputs(recording.inputs.sum(axis=0, dtype=np.float64))
        recordings.append(recording)
    predictors = train_predictors(
        np.concatenate([r.inputs for r in recordings if r.inputs is not None]),
        np.concatenate([r.experts for r in recordings]),
        np.concatenate([r.weights for r in recordings]),
        recorder.n_experts,
        plan.learned,
        on_layer=lambda layer, loss: print(f"learned predictor, layer {layer}: loss {loss:.4f}", flush=True),
    )
    return counts.tables(), predictors


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
    recorder: Recorder,
    prompts: Sequence[Prompt],
    lengths: Sequence[tuple[int, int]],
    seeds: Sequence[int],
    sampling: Sampling,
    plan: Plan,
    what: str,
) -> Iterator[Recording]:
    tokens = [prompt.tokens for prompt in prompts]
    n_decode = [n for _, n in lengths]
    for batch in track(plan.batches(lengths), description=what):
        yield from record_batch(recorder, batch, tokens, n_decode, seeds, sampling, plan)


def _header(
    shape: Shape,
    model: PreTrainedModel,
    training: dict[str, Any],
    seed: int,
    prompts: Sequence[Prompt],
    passages: Sequence[Prompt],
    plan: RecordingPlan,
) -> dict[str, Any]:
    def listed(drawn: Sequence[Prompt], lengths: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {
                "kind": p.kind,
                "file": p.file,
                "start": p.start,
                "n_prompt": n_prompt,
                "n_decode": n_decode,
                "tokens_sha256": hashlib.sha256(np.asarray(p.tokens, "<i8").tobytes()).hexdigest(),
            }
            for p, (n_prompt, n_decode) in zip(drawn, lengths, strict=True)
        ]

    return {
        "model": shape.name,
        "miniature": True,
        "miniature_of": shape.miniature_of,
        "note": NOTE.format(of=shape.miniature_of),
        "revision": "trained by this recorder; see training",
        "dtype": "float32",
        "hidden": model.config.hidden_size,
        "recorder": RECORDER,
        "seed": seed,
        "sampling": f"temperature {TEMPERATURE}, seeded per request; end of text is never sampled",
        "prompts": f"standard library of Python {training['python']}, documents held back from training; PSF",
        "batching": f"{plan.batch_size} requests of equal length at a time, without padding",
        "training": training,
        "trace_requests": listed(prompts, plan.requests),
        "calibration_requests": listed(passages, plan.calibration),
        "trace_files": sorted({p.file for p in prompts}),
        "calibration_files": sorted({p.file for p in passages}),
    }
