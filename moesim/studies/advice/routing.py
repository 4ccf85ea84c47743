"""Which routing an advice rests on: a trace that is given, a shipped one of the model's shape, or synthetic by its parameters.

The requests are cut into groups, one trace each, so that every candidate sees the same requests, group by group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, overload

import numpy as np

from moesim.core.threads import in_threads
from moesim.errors import TraceError
from moesim.experiment.routing import fits, flatters, how_to_get, lacking, parameters_of_shape, shape_of, traces_of_shape
from moesim.model import ModelSpec
from moesim.trace import Trace, find_trace
from moesim.trace.derived import subset
from moesim.trace.workload import WorkloadSpec, compose

GROUPS: Final = 5
"""Groups of requests that are simulated one by one, for the spread between them."""


@dataclass(frozen=True)
class Routing:
    """Routing for an advice."""

    label: str  # name in results
    origin: str  # `recorded`, `miniature` or `synthetic`
    groups: Sequence[Trace]  # one for each group of requests, of one batch each; all but the first may still be in the making
    written: str | Mapping[str, Any]  # what to write into an experiment file for routing like this
    why: str = ""  # why this one, if it is not the first choice; else empty

    def has(self, needs: frozenset[str]) -> str | None:
        """Name the first thing that a policy needs and this routing has not for every request; None if it has all."""
        for need in sorted(needs):
            name = need.removeprefix("signal:")
            for trace in self.groups[:1] if self.origin == "synthetic" else self.groups:  # made-up requests are alike in this
                if lacking(trace, [need]) or (name != need and not all(name in names for names in trace.requests.signals)):
                    return need
        return None

    def write(self, folder: Path, groups: slice = slice(None)) -> list[Path]:
        """Write one trace a group into a folder, of some groups."""
        chosen = zip(range(len(self.groups))[groups], self.groups[groups], strict=True)
        return in_threads(lambda one: one[1].write(folder / f"group{one[0]}.safetensors"), chosen)


class _Growing(Sequence[Trace]):
    """Traces of which the first is there; a thread makes the others, and who asks for one of these waits."""

    def __init__(self, first: Trace, others: Callable[[], Sequence[Trace]], n: int) -> None:
        self._first, self._n = first, n
        threads = ThreadPoolExecutor(1)
        self._others = threads.submit(others)
        threads.shutdown(wait=False)

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trace]: ...
    def __getitem__(self, index: int | slice) -> Trace | Sequence[Trace]:
        if index in (0, slice(0, 1), slice(1)):
            return self._first if index == 0 else (self._first,)
        return (self._first, *self._others.result())[index]


Shipped = Iterable[tuple[str, Trace]]
"""Traces of a model's shape by name: those of `traces_of_shape`, which takes a second to unpack a recorded one."""


def find_routing(
    model: ModelSpec, trace: str | None, batch: int, prompt: int, decode: int, place: str, shipped: Shipped | None = None
) -> Routing:
    """Choose routing for a model."""
    if trace is not None:
        return _given(model, trace, batch, prompt, decode, place)
    short: list[str] = []
    for name, found in traces_of_shape(model) if shipped is None else shipped:
        if flatters(found, model):
            short.append(f"{name} flatters caches")
            break  # what comes after it is no better
        chosen = _long_enough(found, prompt, decode)
        if len(chosen) >= GROUPS * batch:
            return Routing(name, found.origin, _split(found, chosen, batch), name)
        short.append(
            f"{name} has {len(chosen)} of the {GROUPS * batch} requests of {prompt} + {decode} tokens that are simulated"
        )
    made = synthetic(model, batch, prompt, decode)
    if made is not None:
        return replace(made, why="; ".join(short))
    got = f"none that is long enough: {'; '.join(short)}" if short else "none"
    raise TraceError(f"{place}: expected routing of {model.name} ({shape_of(model)}), got {got}, and {how_to_get(model)}")


def synthetic(model: ModelSpec, batch: int, prompt: int, decode: int) -> Routing | None:
    """Make routing up by the parameters of a model of this shape, its own first; None if there are none."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import

    name = parameters_of_shape(model)
    if name is None:
        return None
    parameters = read_parameters(name)

    def made(first: int, n: int) -> tuple[Trace, ...]:
        found = synthesize(parameters, first=first, n_requests=n, n_prompt=prompt, n_decode=decode, scores=True)
        return _split(found, list(range(n)), batch)

    (begun,) = made(0, batch)
    groups = _Growing(begun, lambda: made(batch, (GROUPS - 1) * batch), GROUPS)
    written = {"synthesize": name, "requests": GROUPS * batch, "prompt": prompt, "decode": decode}
    return Routing(f"synthetic {name}", "synthetic", groups, written)


def other_routing(model: ModelSpec, routing: Routing, batch: int, prompt: int, decode: int, shipped: Shipped) -> Routing | None:
    """Find other routing of the same shape, to see how much hangs on it; prompts may be shorter."""
    if routing.origin == "recorded":
        return None
    if routing.origin == "miniature":
        return synthetic(model, batch, prompt, decode)
    for name, found in shipped:
        if found.origin != "synthetic":
            chosen = _long_enough(found, 1, decode)
            if len(chosen) >= GROUPS * batch:
                return Routing(name, found.origin, _split(found, chosen, batch), name)
    return None


def shortest_prompt(trace: Trace) -> int:
    """Give the tokens of the shortest prompt of a trace."""
    return int((trace.requests.n_prompt + trace.requests.prompt_offset).min())


def _given(model: ModelSpec, name: str, batch: int, prompt: int, decode: int, place: str) -> Routing:
    found = Trace.read(find_trace(name))
    if not fits(found, model):
        raise TraceError(
            f"{place}: --trace {name}: expected {shape_of(model)}, as {model.name} has, got {shape_of(found)}; leave --trace "
            "out or give another"
        )
    chosen = _long_enough(found, prompt, decode)[: GROUPS * batch]
    if len(chosen) < batch:
        compose(found, WorkloadSpec(batch_size=batch, prompt_tokens=prompt, decode_tokens=decode))  # says what is lacking
        raise TraceError(f"{place}: --trace {name}: expected {batch} requests of {prompt} + {decode} tokens, got {len(chosen)}")
    return Routing(name, found.origin, _split(found, chosen, batch), name)


def _long_enough(trace: Trace, prompt: int, decode: int) -> list[int]:
    """List requests that will do: those with more signals first, then those whose prompt is not cut, then by number."""
    requests = trace.requests
    length = requests.n_prompt + requests.prompt_offset
    will_do = np.flatnonzero((length >= prompt) & (requests.n_decode >= decode)).tolist()
    return sorted(will_do, key=lambda r: (-len(requests.signals[r]), int(length[r]) != prompt, r))


def _split(trace: Trace, chosen: list[int], batch: int) -> tuple[Trace, ...]:
    n_groups = min(GROUPS, len(chosen) // batch)
    return tuple(in_threads(lambda n: subset(trace, sorted(chosen[n * batch : (n + 1) * batch])), range(n_groups)))
