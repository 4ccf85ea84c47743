"""Record the routing of requests with a model in memory, and count calibration tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moesim.recorder import RecordError
from moesim.recorder.generation import LENGTH, Sampling, generate, whole_cache
from moesim.recorder.hooks import Captured, RoutingHooks, Wanted
from moesim.recorder.routers import Router, find_routers
from moesim.recorder.signals import SignalFacts, SignalPlan
from moesim.trace import shards
from moesim.trace.stats.calibration import MATRICES, Counts


@dataclass(frozen=True)
class SignalRows:
    """Predictions of one request."""

    scores: NDArray[Any]  # as in `moesim.trace.Signal`
    ids: NDArray[Any] | None = None  # None: the scores are dense
    first_row: int = 0  # row of the request that the first of them is about; the others follow


@dataclass(frozen=True)
class Recording:
    """Routing of one request; row i is token i, the prompt first.

    Attributes
    ----------
    experts : (n_rows, n_layers, top_k) uint8 or uint16
        Ids in rank order.
    weights : (n_rows, n_layers, top_k) float32
        As the model uses them.
    tokens : (n_rows,) int64
        Token ids fed to the model.
    n_prompt : int
        Rows of the prompt.
    ended : str
        Why there are no more: ``length`` or ``end of text``.
    scores : (n_rows, n_layers, n_experts) float32 or None
        Of all experts, by the router's score function.
    embeddings : (n_rows, hidden) float16 or None
        What the model's input embedding gives for each token.
    inputs : (n_rows, n_layers, hidden) float16 or None
        What each router read.
    signals : dict of str to SignalRows
    """

    experts: NDArray[Any]
    weights: NDArray[np.float32]
    tokens: NDArray[np.int64]
    n_prompt: int
    ended: str = LENGTH
    scores: NDArray[np.float32] | None = None
    embeddings: NDArray[np.float16] | None = None
    inputs: NDArray[np.float16] | None = None
    signals: dict[str, SignalRows] = field(default_factory=dict)

    @property
    def n_decode(self) -> int:
        return len(self.tokens) - self.n_prompt


@dataclass(frozen=True)
class Finished:
    """A request that was recorded alone in its batch, for what else is to be run on it."""

    number: int  # of the request
    recording: Recording
    cache: Any  # keys and values of all its tokens, which may be changed


#: Gives further signals of a request, such as those of a quantised copy of the model.
Observer = Callable[[Finished], Mapping[str, SignalRows]]


@dataclass(frozen=True)
class Plan:
    """Contents of a recording, by request.

    Attributes
    ----------
    batch_size : int
        Requests at once.
    pad : bool
        Whether prompts of different lengths may share a batch.
    scores : bool
        Keep the scores of all experts.
    embeddings : bool
        Keep the input embedding of each token.
    n_inputs : int or None
        Keep the inputs of the routers for the first so many requests; None: for all.
    signals : SignalPlan or None
    n_signals : int or None
        Compute signals, and call the observer, for the first so many requests; None: for all.
    observer : Observer or None
        Its requests are recorded one at a time.
    observer_facts : dict of str to SignalFacts
        Of the observer's signals.
    """

    batch_size: int = 1
    pad: bool = True
    scores: bool = False
    embeddings: bool = False
    n_inputs: int | None = 0
    signals: SignalPlan | None = None
    n_signals: int | None = None
    observer: Observer | None = None
    observer_facts: dict[str, SignalFacts] = field(default_factory=dict)

    def batches(self, lengths: Sequence[tuple[int, int]]) -> list[range]:
        """Divide requests, (n_prompt, n_decode) each, into batches that keep the same."""
        n = len(lengths)
        with_signals = n if self.n_signals is None else self.n_signals
        kinds = [
            (r < with_signals, r < (n if self.n_inputs is None else self.n_inputs), None if self.pad else lengths[r])
            for r in range(n)
        ]
        found: list[range] = []
        for r in range(n):
            size = 1 if self.observer is not None and kinds[r][0] else self.batch_size
            if found and len(found[-1]) < size and kinds[found[-1].start] == kinds[r]:
                found[-1] = range(found[-1].start, r + 1)
            else:
                found.append(range(r, r + 1))
        return found

    def wanted(self, first: int, *, sums: bool = False) -> Wanted:
        with_signals = self.n_signals is None or first < self.n_signals
        with_inputs = self.n_inputs is None or first < self.n_inputs
        return Wanted(self.scores, with_inputs, self.signals if with_signals else None, sums)


class Recorder:
    """A model with its routers found, ready to record batches.

    Parameters
    ----------
    model : transformers causal language model
        In evaluation mode.

    Raises
    ------
    RecordError
        If it has no routers that can be read.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.routers: list[Router] = find_routers(model)

    @property
    def n_experts(self) -> int:
        return self.routers[0].n_experts

    @property
    def top_k(self) -> int:
        return self.routers[0].top_k

    @torch.no_grad()
    def embeddings(self, tokens: NDArray[np.int64]) -> NDArray[np.float16]:
        """Embed tokens, (n,), as the model does at its input: (n, hidden) float16."""
        layer = self.model.get_input_embeddings()
        device = layer.weight.device if layer.weight.device.type != "meta" else torch.device("cpu")
        found: NDArray[np.float16] = layer(torch.from_numpy(tokens).to(device)).to("cpu", torch.float16).numpy()
        return found

    def batch(
        self, prompts: Sequence[Sequence[int]], n_decode: Sequence[int], seeds: Sequence[int], sampling: Sampling,
        wanted: Wanted, *, cache: Any = None, on_tokens: Callable[[int], None] = lambda n: None,
    ) -> tuple[list[Recording], Captured, Any]:  # fmt: skip
        """Record requests together, with arguments of `moesim.recorder.generation.generate`.

        Returns the recordings, their rows in the order of the forward passes, and the KV cache.
        """
        with RoutingHooks(self.routers, wanted) as hooks:
            done = generate(self.model, prompts, n_decode, seeds, sampling, cache=cache, expect=hooks.expect, on_tokens=on_tokens)
            captured = hooks.take()
        owner = torch.cat(done.owners).numpy()
        recordings = []
        for request, tokens in enumerate(done.tokens):
            arrays = {name: array[owner == request] for name, array in captured.arrays.items()}
            recordings.append(to_recording(arrays, tokens, len(prompts[request]), done.ended[request], self.n_experts))
        return recordings, captured, done.cache


def to_recording(arrays: dict[str, NDArray[Any]], tokens: Sequence[int], n_prompt: int, ended: str, n_experts: int) -> Recording:
    """Make a recording of the rows of one request in `Captured`."""
    id_type = np.uint8 if n_experts <= 256 else np.uint16
    signals = {}
    for name, scores in arrays.items():
        kind, _, signal = name.partition("/")
        if kind == "signals":
            ids = arrays.get(f"signal_ids/{signal}")
            signals[signal] = SignalRows(scores, None if ids is None else ids.astype(id_type))
    return Recording(
        arrays["experts"].astype(id_type), arrays["weights"], np.asarray(tokens, np.int64), n_prompt, ended,
        scores=arrays.get("scores"), inputs=arrays.get("inputs"), signals=signals,
    )  # fmt: skip


def record_requests(
    model: Any, prompts: Sequence[Sequence[int]], n_decode: Sequence[int], *, seeds: Sequence[int] | None = None,
    sampling: Sampling | None = None, plan: Plan | None = None, on_tokens: Callable[[int], None] = lambda n: None,
) -> Iterator[Recording]:  # fmt: skip
    """Record requests one batch after another.

    Parameters
    ----------
    model : transformers causal language model, or Recorder
        In evaluation mode.
    prompts : sequence of sequence of int
        Token ids.
    n_decode : sequence of int
        Tokens to generate and feed back.
    seeds : sequence of int or None
        Of each request's sampling; None: its number.
    sampling : Sampling or None
        None: greedy.
    plan : Plan or None
        None: ids and weights only, one request at a time.
    on_tokens : callable
        Called after each forward pass with the number of its rows.

    Yields
    ------
    Recording
        In the order of the prompts.
    """
    recorder = model if isinstance(model, Recorder) else Recorder(model)
    sampling, plan = sampling or Sampling(), plan or Plan()
    seeds = range(len(prompts)) if seeds is None else seeds
    lengths = [(len(prompt), n) for prompt, n in zip(prompts, n_decode, strict=True)]
    for batch in plan.batches(lengths):
        yield from record_batch(recorder, batch, prompts, n_decode, seeds, sampling, plan, on_tokens)


def record_batch(
    recorder: Recorder, batch: range, prompts: Sequence[Sequence[int]], n_decode: Sequence[int], seeds: Sequence[int],
    sampling: Sampling, plan: Plan, on_tokens: Callable[[int], None] = lambda n: None,
) -> list[Recording]:  # fmt: skip
    """Record one batch of a plan; parameters as of `record_requests`."""
    observed = plan.observer is not None and (plan.n_signals is None or batch.start < plan.n_signals)
    requests = [prompts[r] for r in batch], [n_decode[r] for r in batch], [seeds[r] for r in batch]
    cache = whole_cache(recorder.model) if observed else None
    recordings, _, cache = recorder.batch(*requests, sampling, plan.wanted(batch.start), cache=cache, on_tokens=on_tokens)
    if plan.embeddings:
        recordings = [replace(recording, embeddings=recorder.embeddings(recording.tokens)) for recording in recordings]
    if plan.observer is not None and observed:
        recordings[0].signals.update(plan.observer(Finished(batch.start, recordings[0], cache)))
    return recordings


@dataclass(frozen=True)
class CalibrationFile:
    """Calibration tables that were made before."""

    path: Path
    tables: dict[str, NDArray[Any]]  # see `Counts.tables`
    requests: list[dict[str, Any]]  # what they were counted over, with the hashes of the prompts
    # model, routers_sha256: whose they are
    model: str
    routers_sha256: str

    @classmethod
    def read(cls, path: Path) -> CalibrationFile:
        arrays, header = shards.read_tables(path)
        tables = shards.calibration_tables(arrays)
        if not tables:
            raise RecordError(f"{path}: expected calibration tables, got {sorted(arrays)}; record with --calibrate first")
        requests = header.get("calibration_requests")
        if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
            raise RecordError(f"{path}: header.calibration_requests: expected a list of requests, got none; calibrate again")
        return cls(path, tables, requests, str(header.get("model")), str(header.get("routers_sha256")))

    def check_model(self, recorder: Recorder, routers_sha256: str) -> None:
        if self.routers_sha256 != routers_sha256:
            raise RecordError(
                f"{self.path}: expected calibration of this model's routers ({routers_sha256[:12]}...), got that of "
                f"'{self.model}' ({self.routers_sha256[:12]}...); calibrate this model"
            )
        for name, table in counts_of(recorder).tables().items():
            found = self.tables.get(name)
            if found is None or found.shape == table.shape:
                continue
            if name != MATRICES or found.ndim != 3 or found.shape[::2] != table.shape[::2]:
                raise RecordError(
                    f"{self.path}: calibration/{name}: expected shape {table.shape}, got {found.shape}; calibrate again"
                )


def counts_of(recorder: Recorder) -> Counts:
    """Counts of the size of a model, empty."""
    return Counts(len(recorder.routers), recorder.n_experts, recorder.routers[0].hidden)


def calibrate_batch(
    recorder: Recorder, counts: Counts, prompts: Sequence[Sequence[int]], n_decode: Sequence[int], seeds: Sequence[int],
    sampling: Sampling, on_tokens: Callable[[int], None] = lambda n: None,
) -> list[int]:  # fmt: skip
    """Count the requests of one batch."""
    recordings, captured, _ = recorder.batch(prompts, n_decode, seeds, sampling, Wanted(sums=True), on_tokens=on_tokens)
    for recording in recordings:
        counts.add(recording.experts, recording.n_prompt)
    assert captured.sums is not None
    counts.add_inputs(captured.sums)
    return [recording.n_decode for recording in recordings]
