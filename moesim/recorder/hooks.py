"""See what the routers of a model read and choose, one forward pass after another.

The hooks return nothing, so the model computes what it computes without them. Rows wait on their device until there are
`CHUNK_ROWS` of a layer; then scores and signals are computed and all is moved to the host, so that device memory does not grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesim.recorder import RecordError
from moesim.recorder.routers import Answer, Router, Watch, read_choice, read_dense
from moesim.recorder.signals import SignalPlan

CHUNK_ROWS = 256  # rows of a layer that wait on the device before they are worked on


@dataclass(frozen=True)
class Wanted:
    """Arrays to keep next to ids and weights."""

    scores: bool = False  # the scores of all experts
    inputs: bool = False  # what each router read
    signals: SignalPlan | None = None
    sums: bool = False  # the sum of what each router read, for residual vectors


@dataclass(frozen=True)
class Captured:
    """Rows in the order of the forward passes."""

    # `experts` int32 in rank order; `weights` float32; as asked for `scores` float32, `inputs` float16, `signals/NAME` float16
    # and `signal_ids/NAME` int32
    arrays: dict[str, NDArray[Any]]
    sums: NDArray[np.float64] | None  # sum over rows of the routers' inputs


class RoutingHooks:
    """Context manager that keeps the routing of every forward pass inside it."""

    def __init__(self, routers: Sequence[Router], wanted: Wanted) -> None:
        self._layers = [LayerHooks(number, routers, wanted) for number in range(len(routers))]
        self._signals = wanted.signals

    def __enter__(self) -> RoutingHooks:
        for layer in self._layers:
            layer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            layer.__exit__(*error)

    def expect(self, rows: Tensor) -> None:
        """Set the rows of the next forward pass to keep, as places among (sequence, token)."""
        for layer in self._layers:
            layer.rows = rows

    def take(self) -> Captured:
        parts = [layer.take() for layer in self._layers]
        sums = [layer_sum for _, layer_sum in parts if layer_sum is not None]
        return Captured(side_by_side([arrays for arrays, _ in parts], self._signals), np.stack(sums) if sums else None)


def side_by_side(layers: Sequence[Mapping[str, NDArray[Any]]], signals: SignalPlan | None) -> dict[str, NDArray[Any]]:
    """Put what was kept of each layer together as `Captured`."""
    facts = {} if signals is None else signals.facts(len(layers))

    def ahead(name: str) -> int:
        kind, _, signal = name.partition("/")
        return facts[signal].lookahead if kind in ("signals", "signal_ids") else 0

    names = sorted(set().union(*layers))
    return {name: _stack([arrays.get(name) for arrays in layers], ahead(name)) for name in names}


def _stack(layers: Sequence[NDArray[Any] | None], ahead: int) -> NDArray[Any]:
    """Stack layers, each `ahead` places later; those without a source are zero."""
    some = next(layer for layer in layers if layer is not None)
    out = np.zeros((len(some), len(layers), *some.shape[1:]), some.dtype)
    for number, layer in enumerate(layers):
        if layer is not None:
            out[:, number + ahead] = layer
    return out


class LayerHooks:
    """Context manager that keeps the routing of one layer."""

    def __init__(self, number: int, routers: Sequence[Router], wanted: Wanted) -> None:
        self.router = routers[number]
        self.rows: Tensor | None = None
        self._number, self._routers, self._wanted = number, routers, wanted
        self._checked = False
        self._watch = Watch(self.router.n_experts)
        self._seen: list[tuple[Tensor, ...]] = []  # states, scores and ranked values of the passes that wait
        self._latest: tuple[Tensor, Tensor] | None = None  # ids and weights of the last pass
        self._chosen: list[tuple[Tensor, Tensor]] = []  # and those of the passes that wait
        self._done: list[dict[str, NDArray[Any]]] = []
        self._sum: Tensor | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> LayerHooks:
        self._handles = [
            self.router.module.register_forward_pre_hook(self.before_router),
            self.router.module.register_forward_hook(self.after_router, with_kwargs=True, always_call=True),
            self.router.experts.register_forward_pre_hook(self.before_experts, with_kwargs=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_router(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._watch = Watch(self.router.n_experts)
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def after_router(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is None:  # it failed
            return
        self._commit()
        answer = self._watch.answer()
        self._seen.append(tuple(map(self._kept, ([*args, *kwargs.values()][0], answer.scores, answer.values))))
        weights, ids = read_choice(output)
        if ids is None and (ids := self._watch.chosen) is not None:
            weights = read_dense(output, ids, self.router.n_experts)
        self._choose(ids, weights)

    def before_experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what the experts are given, which the model uses, not what the router returned."""
        weights, ids = read_choice([*args, *kwargs.values()][1:])
        self._choose(ids, weights)
        self._commit()

    def _kept(self, values: Tensor) -> Tensor:
        flat = values.detach().reshape(-1, values.shape[-1])
        rows = self.rows
        # A copy in either case: the model may go on writing into what it passed.
        return flat.clone() if rows is None else flat[rows.to(flat.device)]

    def _choose(self, ids: Tensor | None, weights: Tensor | None) -> None:
        if ids is not None and weights is not None:
            self._latest = (self._kept(ids).long(), self._kept(weights).float())

    def _commit(self) -> None:
        if self._latest is None:
            return
        self._chosen.append(self._latest)
        self._latest = None
        if sum(len(kept) for kept, _ in self._chosen) >= CHUNK_ROWS:
            self._work()

    def _work(self) -> None:
        if not self._chosen:
            return
        states, scores, values = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        ids, weights = (torch.cat(parts) for parts in zip(*self._chosen, strict=True))
        self._seen, self._chosen = [], []
        answer = Answer(scores, values)
        answer.check(ids, str(self.router))
        if not self._checked and len(ids):
            self.router.check(states, answer)
            self._checked = True
        order = answer.in_rank_order(ids)
        kept = {"experts": ids.gather(1, order).int(), "weights": weights.gather(1, order)}
        if self._wanted.scores:
            kept["scores"] = scores
        if self._wanted.inputs:
            kept["inputs"] = states.half()
        if self._wanted.signals is not None:
            kept |= self._wanted.signals.from_layer(self._number, states, self._routers)
        if self._wanted.sums:
            total = states.double().sum(dim=0)
            self._sum = total if self._sum is None else self._sum + total
        self._done.append({name: tensor.cpu().numpy() for name, tensor in kept.items()})

    def take(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64] | None]:
        """Hand over the rows since the last call, and the sum of the router's inputs if wanted."""
        self._commit()
        self._work()
        done, self._done = self._done, []
        if not done:
            raise RecordError(f"{self.router.name}: expected a choice of experts in every forward pass, got none")
        total, self._sum = self._sum, None
        arrays = {name: np.concatenate([part[name] for part in done]) for name in done[0]}
        return arrays, None if total is None else np.asarray(total.cpu().numpy(), np.float64)
