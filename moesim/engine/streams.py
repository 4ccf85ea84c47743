"""Weights or KV cache in the memory of another device, copied for each use (rule 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesim.engine.lanes import wake
from moesim.engine.links import hasten, path_between, send_message
from moesim.engine.state import State, Task, Transfer
from moesim.fits import StreamUse, stream_uses
from moesim.model import ModelSpec
from moesim.policy import DEMAND, KV, PREFETCH, UPDATE, Placement
from moesim.trace.workload import Step


@dataclass(slots=True, eq=False)
class Use:
    """One use of streamed parts in the present step, and its copies."""

    of: StreamUse
    stream: Stream
    number: int  # in the order of its device
    left: int  # tasks that have not read it yet
    missing: int = -1  # copies that have not arrived; -1: not asked for
    copies: list[Transfer] = field(default_factory=list)
    waiting: list[Task] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Stream:
    """The ordered copies of a step to one device, buffered for the present use and `depth` more."""

    uses: list[Use] = field(default_factory=list)
    asked: int = 0  # uses whose copies have been asked for
    reached: int = -1  # the last use that some task wants to read
    over: int = 0  # uses that all tasks have read


class Streams:
    """All streams of a run."""

    def __init__(self, state: State, placement: Placement, apart: Mapping[tuple[str, int], str]) -> None:
        self.source = {**placement.streamed, **apart}
        self.order = stream_uses(state.model, state.costs.hardware, placement)
        self.depth = placement.stream_depth
        self.near = {layer: placement.kv_resident for part, layer in placement.streamed if part == KV}
        self._by_part: dict[tuple[str, int], Use] = {}

    def begin_step(self, state: State) -> None:
        """List the uses of a step; the first may be copied while nothing of it is reached."""
        streams = {use.device: Stream() for use in self.order}
        self._by_part = {}
        for of in self.order:
            tasks = len(state.forward.micro) if of.layer >= 0 else 1
            if of.parts == ("head",) and not state.step.n_head_rows:  # a chunk that produces no token
                continue
            if state.step.phase == "decode" and of.layer in state.forward.layout.core_at:  # the cache is read where it lies
                of = of._replace(parts=tuple(part for part in of.parts if part != KV))
                tasks *= sum(part in ("attention", "dense", "shared") for part in of.parts)
                if not tasks:
                    continue
            stream = streams[of.device]
            use = Use(of, stream, len(stream.uses), tasks)
            stream.uses.append(use)
            self._by_part.update(((part, of.layer), use) for part in of.parts)
        for stream in streams.values():
            self._go_on(state, stream)

    def holds(self, part: str, layer: int) -> bool:
        """Whether the present step reads a part that is streamed."""
        return (part, layer) in self._by_part

    def begin_layer(self, state: State, layer: int) -> None:
        """Order the copies that attention reads, and later ones, ahead of the policy's fetches."""
        self._reach(state, self._find(layer, "attention", KV))

    def read(self, state: State, task: Task, *parts: str) -> None:
        """Let a task wait for what of these parts is streamed; it has not been submitted yet."""
        use = task.reads = self._find(task.unit.layer, *parts)
        self._reach(state, use)
        if use is not None and use.missing:
            task.waits += 1
            use.waiting.append(task)

    def read_by(self, state: State, task: Task) -> None:
        """Note that a task is done; after the last of a use its place in the buffer is free."""
        use: Use = task.reads
        use.left -= 1
        if use.left:
            return
        use.stream.over += 1
        layer = use.of.layer
        if KV in use.of.parts:  # what the step adds to it
            n_bytes = self.leaving_bytes(state.model, state.step, layer)
            path = path_between(state, use.of.device, self.source[KV, layer])
            send_message(state, path, n_bytes, UPDATE, lambda: None, cause="write-back", layer=layer)
        self._go_on(state, use.stream)

    def _find(self, layer: int, *parts: str) -> Use | None:
        return next((self._by_part[part, layer] for part in parts if (part, layer) in self._by_part), None)

    def _reach(self, state: State, use: Use | None) -> None:
        """Somebody wants it now: what is queued becomes urgent, and later uses may be copied."""
        if use is None or use.number <= use.stream.reached:
            return
        use.stream.reached = use.number
        for copy in use.copies:
            if use.missing and copy.left:
                hasten(state, copy, DEMAND)
        self._go_on(state, use.stream)

    def _go_on(self, state: State, stream: Stream) -> None:
        while stream.asked < len(stream.uses) and stream.asked <= min(stream.reached, stream.over) + self.depth:
            use = stream.uses[stream.asked]
            stream.asked += 1
            self._ask(state, use, DEMAND if use.number <= stream.reached else PREFETCH)

    def _ask(self, state: State, use: Use, urgency: int) -> None:
        """Queue the copies of a use, each from where it lies; an empty cache needs none."""
        device, layer, parts = use.of
        sizes = {part: n for part in parts if (n := self._bytes(state, part, layer))}
        use.missing = len(sizes)
        for part, n_bytes in sizes.items():
            path = path_between(state, self.source[part, layer], device)
            copy = send_message(state, path, n_bytes, urgency, lambda: self._arrived(state, use), cause="", layer=layer)
            state.records.used_fetches.add(copy.fetch)
            use.copies.append(copy)
        if not sizes:
            self._wake(state, use)

    def _arrived(self, state: State, use: Use) -> None:
        use.missing -= 1
        if not use.missing:
            self._wake(state, use)

    def _wake(self, state: State, use: Use) -> None:
        waiting, use.waiting = use.waiting, []
        for task in waiting:
            wake(state, task)

    def _bytes(self, state: State, part: str, layer: int) -> int:
        """Return the bytes of a part, or of the active requests' cache before this step."""
        if part == KV:
            return self.context_bytes(state.model, state.step, layer)
        return state.model.part_bytes(part, layer)

    def context_bytes(self, model: ModelSpec, step: Step, layer: int) -> int:
        """Return what a layer keeps elsewhere of the active requests before a step."""
        contexts, near = [context for _, context in step.sequences], self.near.get(layer, 0)
        if not any(context > near for context in contexts):
            return 0
        stays = sum(min(context, near) for context in contexts)
        whole = model.kv_bytes(layer, sum(contexts), len(contexts))
        return whole - (model.kv_bytes(layer, stays, len(contexts)) if near else 0)

    def leaving_bytes(self, model: ModelSpec, step: Step, layer: int) -> int:
        """Return what a step adds to the cache elsewhere: tokens that do not stay with attention, or no longer."""
        near = self.near.get(layer, 0)
        n_tokens = sum(min(n, max(0, context + n - near)) for n, context in step.sequences) if near else step.n_tokens
        return model.new_kv_bytes(layer, n_tokens)
