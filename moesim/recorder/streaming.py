"""Record with one decoder layer in memory: all texts go through it, then through the next.

Texts are known and attention is causal, so routing is that of decoding. States and routing lie in the recording's folder, a file
a chunk of texts: a kill loses one chunk's step through one layer at most.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesim.core.units import format_memory, parse_bytes
from moesim.recorder import RecordError
from moesim.recorder.checkpoint import LayeredModel
from moesim.recorder.generation import LENGTH
from moesim.recorder.hooks import LayerHooks, Wanted, side_by_side
from moesim.recorder.recording import Plan, Recorder, Recording, to_recording
from moesim.recorder.signals import DENSE_EXPERTS
from moesim.trace import shards

CHUNK_ROWS = 2048  # tokens of a chunk, unless a single text has more
#: Bytes for what libraries load when they are first used, and for freed blocks that the allocator keeps; an assumption.
MARGIN = 2**27
_STATES, _ROUTING = "states", "routing"


@dataclass(frozen=True)
class Layerwise:
    """A recording layer by layer."""

    layered: LayeredModel
    recorder: Recorder  # of its model
    texts: Sequence[Sequence[int]]  # token ids
    n_decode: Sequence[int]  # how many tokens at the end of each text count as generated
    plan: Plan  # without an observer; its batch size does not matter
    folder: Path  # of the recording, see `moesim.trace.shards`

    def chunks(self) -> list[range]:
        alike = replace(self.plan, batch_size=len(self.texts)).batches([(len(text), 0) for text in self.texts])
        found: list[range] = []
        for texts in alike:
            rows, first = 0, texts.start
            for r in texts:
                if r > first and rows + len(self.texts[r]) > CHUNK_ROWS:
                    found.append(range(first, r))
                    rows, first = 0, r
                rows += len(self.texts[r])
            found.append(range(first, texts.stop))
        return found

    def left(self) -> list[range]:
        done = shards.finished_shards(self.folder)
        first = done[-1].stop if done else 0
        return [chunk for chunk in self.chunks() if chunk.start >= first]

    def steps_done(self) -> int:
        left = {chunk.start: self._depth(chunk) for chunk in self.left()}
        n_layers = self.layered.n_layers
        return sum(left.get(chunk.start, n_layers) * self._rows(chunk) for chunk in self.chunks())

    def compute(self, on_layer: Callable[[int], None], on_tokens: Callable[[int], None]) -> None:
        self._embed()
        for number in range(self.layered.n_layers):
            todo = [chunk for chunk in self.left() if self._depth(chunk) == number]
            if todo:
                on_layer(number)
                with _loaded(self.layered, self.layered.layer_name(number)):
                    for chunk in todo:
                        self._step(number, chunk)
                        on_tokens(self._rows(chunk))

    def recordings(self) -> Iterator[tuple[range, list[Recording]]]:
        for chunk in self.left():
            parts = [shards.read_tables(self._path(chunk, _ROUTING, n))[0] for n in self._routed()]
            arrays = side_by_side(parts, self.plan.wanted(chunk.start).signals)
            ends = np.cumsum([len(self.texts[r]) for r in chunk])
            found = []
            for r, stop in zip(chunk, ends, strict=True):
                rows = slice(stop - len(self.texts[r]), stop)
                mine = {name: array[rows] for name, array in arrays.items()}
                n_prompt = len(self.texts[r]) - self.n_decode[r]
                found.append(to_recording(mine, self.texts[r], n_prompt, LENGTH, self.recorder.n_experts))
            if self.plan.embeddings:
                with _loaded(self.layered, self.layered.embedding_name):
                    found = [replace(one, embeddings=self.recorder.embeddings(one.tokens)) for one in found]
            yield chunk, found

    def clear(self, chunk: range) -> None:
        for number in range(self.layered.n_layers + 1):
            for kind in (_ROUTING, _STATES):
                self._path(chunk, kind, number).unlink(missing_ok=True)

    def check_memory(self, memory: str) -> None:
        bound, needed = parse_bytes(memory, "--memory"), self.memory_needed()
        if needed > bound:
            raise RecordError(
                f"--memory: expected at least {format_memory(needed, least=True)}, for the largest part of the model and a text "
                f"of {max(map(len, self.texts))} tokens, got {memory}; give more, or lower --max-prompt-tokens"
            )

    def memory_needed(self) -> int:
        """Return the peak memory: process, margin, states, a layer's work, and what is loaded."""
        layered, config = self.layered, self.layered.model.config.get_text_config()
        longest, rows = max(len(text) for text in self.texts), max(self._rows(chunk) for chunk in self.chunks())
        states = 3 * rows * config.hidden_size * layered.model.dtype.itemsize
        # Attention scores of all heads, twice, and a mask; what the experts of a token make; all in float32.
        inner = max(getattr(config, name, 0) or 0 for name in ("intermediate_size", "moe_intermediate_size"))
        attention = longest * (2 * config.num_attention_heads + 1)
        working = 4 * longest * (attention + self.recorder.top_k * (3 * inner + 2 * config.hidden_size))
        parts = [layered.embedding_name, *(layered.layer_name(number) for number in range(layered.n_layers))]
        loading = max(layered.bytes_to_load(part) for part in parts)
        kept = rows * self._kept_bytes()
        needed: int = _resident_bytes() + MARGIN + states + working + kept + max(loading, 3 * kept * len(self.recorder.routers))
        return needed

    def _kept_bytes(self) -> int:
        n, k, hidden = self.recorder.n_experts, self.recorder.top_k, self.recorder.routers[0].hidden
        n_signals = 0 if self.plan.signals is None else len(self.plan.signals.facts(len(self.recorder.routers)))
        signal = 2 * n if n <= DENSE_EXPERTS else 2 * k * 6
        return 8 * k + 4 * n * self.plan.scores + 2 * hidden * (self.plan.n_inputs != 0) + n_signals * signal

    def _rows(self, chunk: range) -> int:
        return sum(len(self.texts[r]) for r in chunk)

    def _path(self, chunk: range, kind: str, number: int) -> Path:
        return shards.layer_path(self.folder, kind, number, chunk.start, chunk.stop)

    def _depth(self, chunk: range) -> int:
        """Layers that a chunk went through; -1: it is not embedded."""
        return max((n for n in range(self.layered.n_layers + 1) if self._path(chunk, _STATES, n).exists()), default=-1)

    def _routed(self) -> dict[int, int]:
        names = {self.layered.layer_name(number): number for number in range(self.layered.n_layers)}
        return {
            next(number for name, number in names.items() if router.name.startswith(f"{name}.")): n
            for n, router in enumerate(self.recorder.routers)
        }

    def _embed(self) -> None:
        todo = [chunk for chunk in self.left() if self._depth(chunk) < 0]
        if todo:
            with _loaded(self.layered, self.layered.embedding_name):
                for chunk in todo:
                    states = [self.layered.embed(torch.tensor(self.texts[r])) for r in chunk]
                    self._write_states(chunk, 0, torch.cat(states))

    def _step(self, number: int, chunk: range) -> None:
        """Put a chunk through a loaded layer; its states, written last, stand for its routing."""
        states = self._read_states(chunk, number)
        router = self._routed().get(number)
        hooks = None if router is None else self._hooks(router, self.plan.wanted(chunk.start))
        start = 0
        with hooks or nullcontext():
            for r in chunk:
                rows = slice(start, start + len(self.texts[r]))
                states[rows] = self.layered.run_layer(number, states[rows]).cpu()
                start = rows.stop
        if hooks is not None:
            shards.write_tables(self._path(chunk, _ROUTING, number), hooks.take()[0], {})
        self._write_states(chunk, number + 1, states)
        self._path(chunk, _STATES, number).unlink()

    def _hooks(self, router: int, wanted: Wanted) -> LayerHooks:
        return LayerHooks(router, self.recorder.routers, wanted)

    def _write_states(self, chunk: range, depth: int, states: Tensor) -> None:
        data: NDArray[Any] = states.cpu().contiguous().view(torch.uint8).numpy()  # numpy has no bfloat16
        shards.write_tables(self._path(chunk, _STATES, depth), {_STATES: data}, {})

    def _read_states(self, chunk: range, depth: int) -> Tensor:
        data = shards.read_tables(self._path(chunk, _STATES, depth))[0][_STATES]
        return torch.from_numpy(np.array(data)).view(self.layered.model.dtype)


@contextmanager
def _loaded(layered: LayeredModel, part: str) -> Iterator[None]:
    layered.load(part)
    try:
        yield
    finally:
        layered.free(part)


def _resident_bytes() -> int:
    """Return the peak of this process's memory so far; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # in bytes there, else in KiB
