"""Record a trace from a file of prompts to a file, a batch at a time, so that a kill loses one batch at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moesim.core.progress import Progress
from moesim.errors import InputError, MoesimError
from moesim.recorder import loading
from moesim.recorder.assemble import model_facts, request_entry, resolved_options, to_trace, trace_header
from moesim.recorder.calibration import CalibrationFile, calibrate_batch, counts_of
from moesim.recorder.checkpoint import LayeredModel
from moesim.recorder.errors import RecordError
from moesim.recorder.generation import Sampling
from moesim.recorder.options import RecordOptions, read_shadow, request_seed
from moesim.recorder.predictors.shadow import ShadowObserver
from moesim.recorder.prompts import Prompt, check_apart, read_prompts, tokenise
from moesim.recorder.recording import Finished, Plan, Recorder, Recording, SignalRows, record_batch
from moesim.recorder.signals import DENSE_EXPERTS, SignalFacts, SignalPlan
from moesim.recorder.streaming import Layerwise
from moesim.trace import shards
from moesim.trace.shards import MANIFEST
from moesim.trace.stats.calibration import RESIDUAL

#: Streams of random numbers: what calibration samples does not depend on the trace, nor the other way round.
_CALIBRATION, _TRACE = 0, 1


def record_trace(options: RecordOptions) -> Path:
    """Record a trace, or go on with one that was stopped.

    Parameters
    ----------
    options : RecordOptions

    Returns
    -------
    Path
        The trace.

    Raises
    ------
    InputError
        If options, prompts or model are wrong, or are others than those the recording was begun with.
    MoesimError
        If the device's memory does not suffice.
    """
    options.check()
    folder = shards.parts_folder(options.out)
    shards.clear_removed(folder)
    if options.out.exists() and not folder.exists() and not options.overwrite:
        raise RecordError(f"{options.out}: expected nothing there, got a file; add --overwrite or choose another name")
    session = _Session.prepare(options)
    _begin(folder, session)
    try:
        session.calibrate(folder)
        session.record(folder)
    except torch.OutOfMemoryError:
        go_on, anew = "with less --gpu-memory", "with a smaller --batch-size"
        if options.load.stream_layers:
            go_on, anew = "when more is free", "with --device-map cpu"
        raise MoesimError(
            f"{options.load.model}: out of device memory; what was finished is in {folder}: to go on, run the same command "
            f"{go_on}, or delete the folder and start {anew}"
        ) from None
    except InputError:
        if not shards.is_begun(folder):
            shards.remove(folder)
        raise
    return shards.join(folder, options.out)


def _begin(folder: Path, session: _Session) -> None:
    """Start a folder, or check that the one that is there was started with the same options."""
    if not (folder / MANIFEST).exists() and not shards.finished_shards(folder):
        manifest = {"options": session.resolved, "header": session.header, "n_requests": len(session.prompts)}
        shards.write_manifest(folder, manifest)
        return
    shards.clear_leftovers(folder)
    begun = shards.read_manifest(folder)["options"]
    for key in sorted(begun.keys() | session.resolved.keys()):
        before, now = begun.get(key), session.resolved.get(key)
        if before != now:
            raise RecordError(
                f"{folder}: expected {key} as the recording was begun with ({_short(before)}), got {_short(now)}; "
                "give the same options to go on, or delete the folder to start anew"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


@dataclass(frozen=True)
class _Session:
    """Everything that is needed to record, and what the manifest says about it."""

    options: RecordOptions
    recorder: Recorder
    layered: LayeredModel | None  # whose layers are loaded one at a time
    prompts: list[Prompt]
    calibration: list[Prompt]
    given: CalibrationFile | None
    sampling: Sampling
    plan: Plan
    header: dict[str, Any]
    resolved: dict[str, Any]

    @classmethod
    def prepare(cls, options: RecordOptions) -> _Session:
        """Read the prompts and load the model."""
        how: dict[str, Any] = {"name": options.prompt_field, "whole_file": options.whole_file}
        texts = read_prompts(options.prompts, limit=options.limit, **how)
        others = [] if options.calibrate is None else read_prompts(options.calibrate, **how)
        given = None if options.calibration is None else CalibrationFile.read(options.calibration)
        tokenizer = loading.load_tokenizer(options.load)
        prompts, calibration = (
            tokenise(tokenizer, some, chat_template=options.chat_template, max_tokens=options.max_prompt_tokens)
            for some in (texts, others)
        )
        check_apart(prompts, calibration, given.requests if given else [], str(options.calibration))
        layered = LayeredModel.open(options.load) if options.load.stream_layers else None
        model = loading.load_model(options.load) if layered is None else layered.model
        _check_lengths([*prompts, *calibration], options.max_new_tokens if layered is None else 0, model.config)
        recorder = Recorder(model)
        quantised = loading.quantisation(model, options.load.bits)
        if quantised is not None:
            options.warn(loading.describe_quantisation(quantised))
        stop = () if options.ignore_eos else loading.end_tokens(model)
        sampling = Sampling(options.temperature, options.top_p, stop=stop)
        facts = model_facts(recorder, quantised)
        if given is not None:
            given.check_model(recorder, facts["routers_sha256"])
        return cls(
            options=options,
            recorder=recorder,
            layered=layered,
            prompts=prompts,
            calibration=calibration,
            given=given,
            sampling=sampling,
            plan=_plan(options, recorder, sampling, len(prompts)),
            header=trace_header(options, facts, recorder),
            resolved=resolved_options(options, facts, prompts, calibration),
        )

    def calibrate(self, folder: Path) -> None:
        """Make the calibration tables, unless there are none to make; counts are saved after each batch."""
        path = folder / shards.CALIBRATION
        if self.given is not None:
            shards.write_calibration(path, self.given.tables, self.given.requests)
        if not self.calibration:
            return
        counts, listed = counts_of(self.recorder), []
        if path.exists():
            arrays, header = shards.read_tables(path)
            if shards.calibration_tables(arrays):
                return
            counts.restore(arrays)
            listed = header["calibration_requests"]
        tokens, n_decode, seeds = self._requests(self.calibration, _CALIBRATION)
        with self._progress("calibrating", tokens, len(listed)) as progress:
            for batch in Plan(self.options.batch_size).batches(_lengths(tokens, n_decode)):
                if batch.start < len(listed):
                    continue
                done = calibrate_batch(
                    self.recorder,
                    counts,
                    [tokens[r] for r in batch],
                    [n_decode[r] for r in batch],
                    [seeds[r] for r in batch],
                    self.sampling,
                    progress.advance,
                )
                progress.leave_out(sum(n_decode[r] for r in batch) - sum(done))
                listed += [request_entry(self.calibration[r], n) for r, n in zip(batch, done, strict=True)]
                shards.write_tables(path, counts.arrays, {"calibration_requests": listed})
        shards.write_calibration(path, counts.tables(), listed)

    def record(self, folder: Path) -> None:
        """Record the batches that are not there yet."""
        residual = None
        if (folder / shards.CALIBRATION).exists():
            residual = shards.calibration_tables(shards.read_tables(folder / shards.CALIBRATION)[0]).get(RESIDUAL)
        signals = SignalPlan(self.recorder.top_k, self.options.lookahead, residual)
        plan = replace(self.plan, signals=signals)
        facts = signals.facts(len(self.recorder.gates), self.recorder.gates[0].rule.score) | plan.observer_facts
        if self.layered is not None:
            self._record_by_layers(self.layered, folder, plan, facts)
            return
        done = shards.finished_shards(folder)
        first = done[-1].stop if done else 0
        tokens, n_decode, seeds = self._requests(self.prompts, _TRACE)
        with self._progress("recording", tokens, first) as progress:
            for batch in plan.batches(_lengths(tokens, n_decode)):
                if batch.start < first:
                    continue
                recordings = record_batch(self.recorder, batch, tokens, n_decode, seeds, self.sampling, plan, progress.advance)
                progress.leave_out(sum(n_decode[r] for r in batch) - sum(r.n_decode for r in recordings))
                self._write(folder, batch, recordings, facts)

    def _record_by_layers(self, layered: LayeredModel, folder: Path, plan: Plan, facts: dict[str, SignalFacts]) -> None:
        """Record with one layer in memory at a time what is not there yet."""
        texts = [prompt.tokens for prompt in self.prompts]
        n_decode = [min(self.options.max_new_tokens, len(text) - 1) for text in texts]
        layerwise = Layerwise(layered, self.recorder, texts, n_decode, plan, folder)
        if self.options.load.memory is not None:
            layerwise.check_memory(self.options.load.memory)
        n = layered.n_layers
        total = n * sum(map(len, texts))
        with Progress(total, done=layerwise.steps_done(), unit="tokens", enabled=self.options.progress) as progress:
            layerwise.compute(lambda layer: progress.describe(f"layer {layer + 1} of {n}"), progress.advance)
        for chunk, recordings in layerwise.recordings():
            self._write(folder, chunk, recordings, facts)
            layerwise.clear(chunk)

    def _write(self, folder: Path, batch: range, recordings: Sequence[Recording], facts: dict[str, SignalFacts]) -> None:
        entries = [
            {**request_entry(self.prompts[r], recording.n_decode), "ended": recording.ended}
            for r, recording in zip(batch, recordings, strict=True)
        ]
        trace = to_trace(recordings, self.recorder.n_experts, facts, {**self.header, "trace_requests": entries})
        trace.write(shards.shard_path(folder, batch.start, batch.stop))

    def _requests(self, prompts: Sequence[Prompt], stream: int) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        seeds = [request_seed(self.options.seed, stream, number) for number in range(len(prompts))]
        return [prompt.tokens for prompt in prompts], [self.options.max_new_tokens] * len(prompts), seeds

    def _progress(self, what: str, tokens: Sequence[Sequence[int]], first: int) -> Progress:
        sizes = [len(prompt) + self.options.max_new_tokens for prompt in tokens]
        return Progress(sum(sizes), done=sum(sizes[:first]), text=what, unit="tokens", enabled=self.options.progress)


def _lengths(tokens: Sequence[Sequence[int]], n_decode: Sequence[int]) -> list[tuple[int, int]]:
    return [(len(prompt), n) for prompt, n in zip(tokens, n_decode, strict=True)]


def _plan(options: RecordOptions, recorder: Recorder, sampling: Sampling, n_requests: int) -> Plan:
    plan = Plan(
        batch_size=options.batch_size,
        scores=recorder.n_experts <= DENSE_EXPERTS if options.scores is None else options.scores,
        embeddings=options.embeddings,
        n_inputs=options.input_requests,
        n_signals=options.signal_requests,
    )
    if not options.shadows:
        return plan
    seeds = [request_seed(options.seed, _TRACE, number) for number in range(n_requests)]
    observers = [
        ShadowObserver(recorder.model, kind, alignment, sampling, seeds) for kind, alignment in map(read_shadow, options.shadows)
    ]

    def observe(finished: Finished) -> dict[str, SignalRows]:
        return {name: rows for observer in observers for name, rows in observer(finished).items()}

    facts = {name: fact for observer in observers for name, fact in observer.facts.items()}
    return replace(plan, observer=observe, observer_facts=facts)


def _check_lengths(prompts: Sequence[Prompt], max_new_tokens: int, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None)
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    if most is not None and len(longest.tokens) + max_new_tokens > most:
        raise RecordError(
            f"{longest.place}: expected at most {most} tokens, the model's positions, got {len(longest.tokens)} and "
            f"{max_new_tokens} to generate; lower --max-prompt-tokens or --max-new-tokens"
        )
