"""Record a trace from a file of prompts; a kill loses one batch at most."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from moesim.core.progress import Progress
from moesim.errors import InputError, MoesimError
from moesim.recorder import RecordError, loading
from moesim.recorder.checkpoint import LayeredModel
from moesim.recorder.generation import Sampling
from moesim.recorder.loading import LoadOptions
from moesim.recorder.prompts import Prompt, check_apart, file_sha256, read_prompts, tokenise
from moesim.recorder.recording import (
    CalibrationFile,
    Finished,
    Plan,
    Recorder,
    Recording,
    SignalRows,
    calibrate_batch,
    counts_of,
    record_batch,
)
from moesim.recorder.shadow import KINDS, Alignment, ShadowObserver
from moesim.recorder.signals import DENSE_EXPERTS, SignalFacts, SignalPlan
from moesim.recorder.streaming import Layerwise
from moesim.trace import GateInputs, Signal, Trace, shards
from moesim.trace.shards import MANIFEST
from moesim.trace.stats.calibration import RESIDUAL

_SHADOW = re.compile(r"(?P<kind>\w+?)(:T(?P<token>\d+):KV(?P<kv>\d+))?")


@dataclass(frozen=True)
class RecordOptions:
    """Options of a recording, as on the command line.

    Attributes
    ----------
    load : LoadOptions
        Which model, and how.
    prompts, out : Path
        File to read, file to write.
    name : str or None
        Of the model in the trace; None: the last part of the model's path or name.
    """

    load: LoadOptions
    prompts: Path
    out: Path
    name: str | None = None
    prompt_field: str = "prompt"
    whole_file: bool = False
    chat_template: bool = False
    limit: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 1
    scores: bool | None = None
    lookahead: int = 3
    signal_requests: int | None = None
    input_requests: int | None = 0
    embeddings: bool = False
    calibrate: Path | None = None
    calibration: Path | None = None
    shadows: tuple[str, ...] = ()
    overwrite: bool = False
    progress: bool = True
    warn: Callable[[str], None] = field(default=lambda text: None)

    def check(self) -> None:
        self.load.check()
        if len({read_shadow(text) for text in self.shadows}) != len(self.shadows):
            raise RecordError(f"--shadow: expected each once, got {', '.join(self.shadows)}")
        if self.calibrate is not None and self.calibration is not None:
            raise RecordError("--calibrate and --calibration: expected one of them, got both")
        if self.temperature < 0 or not np.isfinite(self.temperature):
            raise RecordError(f"--temperature: expected 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RecordError(f"--top-p: expected a share above 0, at most 1, got {self.top_p}")
        if self.top_p < 1 and self.temperature == 0:
            raise RecordError("--top-p: expected a --temperature above 0 with it, got greedy decoding")
        self._check_streaming()
        if self.out.suffix != ".safetensors":
            raise RecordError(f"{self.out}: expected a name that ends in .safetensors")
        if self.out.is_dir():
            raise RecordError(f"{self.out}: expected a file to write, got a folder")

    def _check_streaming(self) -> None:
        others = {
            "--load-in-4bit": self.load.bits == 4, "--load-in-8bit": self.load.bits == 8,
            "--temperature": self.temperature != 0, "--seed": self.seed != 0, "--ignore-eos": self.ignore_eos,
            "--batch-size": self.batch_size != 1, "--shadow": bool(self.shadows),
            "--calibrate": self.calibrate is not None,
        }  # fmt: skip
        given = next((option for option, is_given in others.items() if is_given), None)
        if self.load.stream_layers and given is not None:
            raise RecordError(f"{given}: expected none with --stream-layers, which generates nothing; leave one of them out")


def read_shadow(text: str) -> tuple[str, Alignment]:
    """Read a shadow's name, such as ``int8``, ``nf4:T1:KV4`` or ``int8:T0:KV0`` (never aligned)."""
    found = _SHADOW.fullmatch(text)
    if found is None or found["kind"] not in KINDS:
        raise RecordError(f"--shadow: expected one of {', '.join(KINDS)}, with or without :T1:KV1, got '{text}'")
    return found["kind"], Alignment(int(found["token"] or 1), int(found["kv"] or 1))


def request_seed(seed: int, stream: int, number: int) -> int:
    """Seed of one request's sampling, whatever else is in its batch."""
    return int(np.random.SeedSequence([seed, stream, number]).generate_state(1, np.uint64)[0] >> np.uint64(1))


RECORDER = "moesim.recorder 2"


def to_trace(recordings: Sequence[Recording], n_experts: int, facts: dict[str, SignalFacts], header: dict[str, Any]) -> Trace:
    """Put recordings together as a trace."""
    starts = np.cumsum([0, *(len(r.tokens) for r in recordings)])[:-1]
    signals = {}
    for name, fact in facts.items():
        having = [(r.signals[name], start) for r, start in zip(recordings, starts, strict=True) if name in r.signals]
        if having:
            rows = [start + part.first_row + np.arange(len(part.scores)) for part, start in having]
            ids = [part.ids for part, _ in having if part.ids is not None]
            scores = np.concatenate([part.scores for part, _ in having])
            signals[name] = Signal(
                name, np.concatenate(rows).astype(np.int32), scores, np.concatenate(ids) if ids else None, **asdict(fact)
            )
    kept = [(r.inputs, start) for r, start in zip(recordings, starts, strict=True) if r.inputs is not None]
    inputs = None
    if kept:
        rows = [start + np.arange(len(values)) for values, start in kept]
        inputs = GateInputs(np.concatenate(rows).astype(np.int32), np.concatenate([values for values, _ in kept]))

    def of_rows(arrays: list[NDArray[Any] | None]) -> NDArray[Any] | None:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present) if len(present) == len(arrays) else None

    return Trace.build(
        experts=np.concatenate([r.experts for r in recordings]), weights=np.concatenate([r.weights for r in recordings]),
        scores=of_rows([r.scores for r in recordings]), embeddings=of_rows([r.embeddings for r in recordings]),
        n_prompt=[r.n_prompt for r in recordings], n_decode=[r.n_decode for r in recordings], n_experts=n_experts,
        inputs=inputs, signals=signals, model=str(header["model"]), label="measured", header=header,
    )  # fmt: skip


def request_entry(prompt: Prompt, n_decode: int) -> dict[str, Any]:
    """Describe in a header which request was recorded."""
    hashes = {"text_sha256": prompt.text_sha256, "tokens_sha256": prompt.tokens_sha256}
    return {**hashes, "n_prompt": len(prompt.tokens), "n_decode": n_decode}


def model_facts(recorder: Recorder, quantised: dict[str, Any] | None) -> dict[str, Any]:
    """Describe in a header which model was recorded, and by what."""
    model = recorder.model
    return {
        "architecture": model.config.model_type,
        "revision": getattr(model.config, "_commit_hash", None) or "local",
        "dtype": str(model.dtype).removeprefix("torch."), "quantisation": quantised,
        "config_sha256": loading.config_sha256(model),
        "routers_sha256": loading.routers_sha256(recorder.routers), "recorder": RECORDER,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip


def trace_header(options: RecordOptions, facts: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Make the header of a trace, but for its requests."""
    greedy = options.temperature == 0
    nucleus = f", top-p {options.top_p:g}" if options.top_p < 1 else ""
    files = {"prompts": options.prompts, "calibration_prompts": options.calibrate, "calibration_file": options.calibration}
    alone = ", requests with a shadow one at a time" if options.shadows and options.batch_size > 1 else ""
    router = recorder.routers[0]
    how = {
        "sampling": "greedy" if greedy else f"temperature {options.temperature:g}{nucleus}, seeded per request",
        "batching": f"{options.batch_size} at a time{alone}, padded on the left; no row of padding is recorded",
        "ends": f"after {options.max_new_tokens} tokens" + ("" if options.ignore_eos else " or at the end of text"),
    }
    if options.load.stream_layers:
        how = {
            "sampling": f"none: the texts are given; the last {options.max_new_tokens} tokens of each count as generated",
            "batching": "one text at a time through one layer after another, all its tokens at once",
            "ends": "with the text",
        }
    return {
        **facts, "model": options.name or Path(options.load.model).name,
        "hidden": router.hidden, "score_function": router.score,
        "ranked_by": "score" if router.ranks_by_scores else f"what the top-k of {type(router.module).__name__} reads",
        "weight_formula": "as the model gives them to its experts", "seed": options.seed, **how,
        **{name: {"file": path.name, "sha256": file_sha256(path)} for name, path in files.items() if path is not None},
    }  # fmt: skip


def resolved_options(
    options: RecordOptions, facts: dict[str, Any], prompts: Sequence[Prompt], calibration: Sequence[Prompt]
) -> dict[str, Any]:
    """List everything that the bytes of the trace depend on, by option."""
    newer = {"--keep-embeddings": options.embeddings, "--stream-layers": options.load.stream_layers}
    newer = {name: value for name, value in newer.items() if value}  # older recordings, begun without a word of it, go on
    return {
        "model": options.name or Path(options.load.model).name,
        **{f"model's {name}": value for name, value in facts.items()},
        "--prompts": file_sha256(options.prompts),
        "prompts' tokens": [prompt.tokens_sha256 for prompt in prompts],
        "--calibrate": None if options.calibrate is None else file_sha256(options.calibrate),
        "calibration's tokens": [prompt.tokens_sha256 for prompt in calibration],
        "--calibration": None if options.calibration is None else file_sha256(options.calibration),
        "--device-map": options.load.device_map, "--max-new-tokens": options.max_new_tokens,
        "--ignore-eos": options.ignore_eos, "--temperature": options.temperature, "--top-p": options.top_p,
        "--seed": options.seed, "--batch-size": options.batch_size, "--scores": options.scores,
        "--lookahead": options.lookahead, "--signal-requests": options.signal_requests,
        "--keep-inputs": options.input_requests, "--shadow": list(options.shadows), **newer,
    }  # fmt: skip


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
        _check_lengths([*prompts, *calibration], options.max_new_tokens if layered is None else 0, model.config.get_text_config())
        recorder = Recorder(model)
        quantised = loading.quantisation(model, options.load.bits)
        if quantised is not None:
            options.warn(loading.describe_quantisation(quantised))
        stop = () if options.ignore_eos else loading.end_tokens(model)
        sampling = Sampling(options.temperature, options.top_p, stop=stop)
        facts = model_facts(recorder, quantised)
        if given is not None:
            given.check_model(recorder, facts["routers_sha256"])
        plan, header = _plan(options, recorder, sampling, len(prompts)), trace_header(options, facts, recorder)
        resolved = resolved_options(options, facts, prompts, calibration)
        return cls(options, recorder, layered, prompts, calibration, given, sampling, plan, header, resolved)

    def calibrate(self, folder: Path) -> None:
        """Make the calibration tables, if any; counts are saved after each batch."""
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
                requests = [tokens[r] for r in batch], [n_decode[r] for r in batch], [seeds[r] for r in batch]
                done = calibrate_batch(self.recorder, counts, *requests, self.sampling, progress.advance)
                progress.leave_out(sum(n_decode[r] for r in batch) - sum(done))
                listed += [request_entry(self.calibration[r], n) for r, n in zip(batch, done, strict=True)]
                shards.write_tables(path, counts.arrays, {"calibration_requests": listed})
        shards.write_calibration(path, counts.tables(), listed)

    def record(self, folder: Path) -> None:
        residual = None
        if (folder / shards.CALIBRATION).exists():
            residual = shards.calibration_tables(shards.read_tables(folder / shards.CALIBRATION)[0]).get(RESIDUAL)
        signals = SignalPlan(self.recorder.top_k, self.options.lookahead, residual)
        plan = replace(self.plan, signals=signals)
        facts = signals.facts(len(self.recorder.routers), self.recorder.routers[0].score) | plan.observer_facts
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
