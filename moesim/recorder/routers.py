"""Find routers by their structure, and watch what they compute.

A router is the one module next to a block's experts that maps a state linearly to a number for each expert. How numbers become
scores, ranks and a choice is not repeated here: the module runs, and what its softmax, sigmoid and top-k compute is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moesim.errors import ModelError
from moesim.model.keys import read_model
from moesim.recorder import RecordError

EXPERTS = "experts"  # what a block calls its experts, in every architecture of transformers 5 but JetMoE
PROBE_ROWS = 64  # random states that a router is asked about before anything is recorded
TOLERANCE = 3e-2  # relative difference of ranked values that is put down to rounding
TIE = 5e-3  # values that differ by less than this share of the largest one are ties: what bfloat16 cannot tell apart
_PRODUCTS = ("linear", "matmul", "mm", "__matmul__")
_SCORES = ("softmax", "sigmoid")


class Watch(TorchFunctionMode):
    """Keep what a router computes between a state and a choice."""

    def __init__(self, n_experts: int) -> None:
        super().__init__()
        self._n_experts = n_experts
        self._logits: Tensor | None = None  # of the first linear map to all experts
        self._scores: Tensor | None = None  # of all experts, before a top-k
        self._read: Tensor | None = None  # by the last top-k among all experts
        self.chosen: Tensor | None = None  # by it
        self.score = ""  # name of the score function

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "topk":
            read = [*args, *(kwargs or {}).values()][0]
            if read.shape[-1] == self._n_experts:
                self._read, self.chosen = read.clone(), output[1]
        elif name in _SCORES:
            self.score = self.score or name
            if self._read is None and output.shape[-1] == self._n_experts:
                self._scores = output.clone()
        elif self._logits is None and name in _PRODUCTS and output.shape[-1] == self._n_experts:
            self._logits = output
        return output

    @property
    def is_known(self) -> bool:
        """Whether softmax or sigmoid of the logits are the scores."""
        if self._logits is None:
            return False
        return bool(self.score) or self._read is None or torch.equal(self._read.float(), self._logits.float())

    def answer(self) -> Answer:
        """Return scores and ranked values; logits stand for either where the router's code has none of all experts."""
        assert self._logits is not None
        scores = self._scores
        if scores is None or self._read is None:
            logits = self._logits.float()
            scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(dim=-1)
        values = self._logits if self._read is None else self._read
        return Answer(*(part.detach().float().reshape(-1, self._n_experts) for part in (scores, values)))


@dataclass(frozen=True)
class Answer:
    """Numbers of all experts, (rows, n_experts) float32."""

    scores: Tensor
    values: Tensor  # what experts are ranked by; -inf: not to be chosen

    def best(self, n: int) -> Tensor:
        """Return the n best experts of each row, (rows, n) int64; the lower id among equals first."""
        return self.values.sort(dim=-1, descending=True, stable=True).indices[:, :n]

    def in_rank_order(self, ids: Tensor) -> Tensor:
        """Return places that sort chosen ids by rank, (rows, top_k) int64; lower ids first."""
        by_id = ids.sort(dim=-1).indices
        values = self.values.gather(1, ids.gather(1, by_id))
        return by_id.gather(1, values.sort(dim=-1, descending=True, stable=True).indices)

    def check(self, ids: Tensor, place: str) -> None:
        """Check that ids are the best by the ranked values, up to ties."""
        worst = self.values.gather(1, ids).min(dim=-1).values
        others = self.values.scatter(1, ids, -torch.inf).max(dim=-1).values
        finite = self.values.masked_fill(self.values.isinf(), 0)
        wrong = ((others - worst) > TIE * finite.abs().max(dim=-1).values).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise RecordError(
                f"{place}: expected the experts {sorted(self.best(ids.shape[1])[row].tolist())} that it ranks first, got "
                f"{sorted(ids[row].tolist())}; the model's code chooses in a way that cannot be recorded"
            )


@dataclass(frozen=True, eq=False)
class Router:
    """The router of one layer."""

    name: str  # of the module in the model
    # module, block: the router, and what has it and the experts as parts
    module: nn.Module
    block: nn.Module
    linear: Any  # module that holds its weight: the router itself, or a part of it
    n_experts: int
    extras: tuple[str, ...] = ()  # tensors of the block that the router takes after the state
    is_flat: bool = True  # whether it takes (rows, hidden), not (requests, rows, hidden)
    top_k: int = 0  # 0: its module does not choose
    score: str = "softmax"
    ranks_by_scores: bool = False

    @property
    def experts(self) -> nn.Module:
        found: nn.Module = getattr(self.block, EXPERTS)
        return found

    @property
    def hidden(self) -> int:
        return int(self.linear.weight.shape[1])

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    def weight(self) -> Tensor:
        """Copy the weight, (n_experts, hidden) float32 on the CPU."""
        with _at_hand(self.linear):
            copied: Tensor = self.linear.weight.detach().to("cpu", torch.float32, copy=True)
            return copied

    def watch(self, states: Tensor) -> tuple[Watch, Any]:
        """Run the module on states, (rows, hidden), without the model around it; also its output."""
        device = self.linear.weight.device
        if device.type != "meta":  # else accelerate moves weights and states where it computes
            states = states.to(device)
        with torch.no_grad(), _at_hand(self.block), Watch(self.n_experts) as watch:
            extras = {name: getattr(self.block, name) for name in self.extras}
            # Not through hooks of the module, which keep what it does inside the model.
            output = self.module.forward(states if self.is_flat else states[None], **extras)
        return watch, output

    def ask(self, states: Tensor) -> Answer:
        return self.watch(states)[0].answer()

    def check(self, states: Tensor, answer: Answer) -> None:
        """Check that the module by itself answers as it did inside the model."""
        alone = self.ask(states).values.to(answer.values.device)
        both = alone.isfinite() & answer.values.isfinite()  # rounding may change a choice of groups
        differs = (alone - answer.values)[both].abs().max() > TOLERANCE * answer.values[both].abs().max()
        if bool(differs):
            raise RecordError(f"{self}: expected a choice that depends on the state alone, got another for the same state")


def _at_hand(module: nn.Module) -> AbstractContextManager[Any]:
    """Bring parameters that accelerate has offloaded back for a moment."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    context: AbstractContextManager[Any] = align_module_device(module)
    return context


def candidates(model: Any) -> dict[str, list[Router | str]]:
    """List by block what may be its router, and why its other parts are not."""
    config = model.config.get_text_config()
    found: dict[str, list[Router | str]] = {}
    for name, block in model.named_modules():
        experts = getattr(block, EXPERTS, None)
        if isinstance(experts, nn.Module):
            n_experts = _expert_count(experts, config)
            parts = [(f"{name}.{part}", module) for part, module in block.named_children() if module is not experts]
            label = f"{name} ({type(block).__name__})"
            found[label] = [_candidate(*part, block, n_experts, config.hidden_size) for part in parts]
            if none := getattr(config, "zero_expert_num", 0):
                found[label] = [f"{part}, {none} of them experts without weights" for part in found[label]]
    if not found:
        layer = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if ".layers.0." in name})
        raise RecordError(
            f"model of type '{model.config.model_type}': expected a router next to a module '{EXPERTS}', got no such module; "
            f"layer 0 has {layer}"
        )
    return found


def _candidate(name: str, module: nn.Module, block: nn.Module, n_experts: int, hidden: int) -> Router | str:
    label = f"{name} ({type(module).__name__})"
    weights = [(part, weight) for part in module.modules() if isinstance(weight := getattr(part, "weight", None), Tensor)]
    maps = [part for part, weight in weights if weight.shape == (n_experts, hidden)]
    if len(maps) != 1:
        shapes = [f"{weight.shape[0]} x {hidden}" for _, weight in weights if weight.ndim == 2 and weight.shape[1] == hidden]
        return f"{label} maps a state by {', '.join(shapes) or 'nothing'}"
    _state, *others = inspect.signature(type(module).forward.__get__(module)).parameters.values()
    extras = tuple(one.name for one in others if hasattr(block, one.name))
    needed = [one.name for one in others if one.name not in extras and one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    return f"{label} also reads {', '.join(needed)}" if needed else Router(name, module, block, maps[0], n_experts, extras)


def _expert_count(experts: nn.Module, config: Any) -> int:
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    for holder in (experts, config):
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if isinstance(count := getattr(holder, name, None), int):
                return count
    return max((p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3), default=0)


def find_routers(model: Any) -> list[Router]:
    """Find the routers of a model, in layer order, and compare them with what its configuration says."""
    kind = model.config.model_type
    states = torch.randn(PROBE_ROWS, model.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(0))
    routers = []
    for block, parts in candidates(model).items():
        tried = [_probed(part, states.to(model.dtype)) if isinstance(part, Router) else part for part in parts]
        found = [part for part in tried if isinstance(part, Router)]
        found = [part for part in found if part.top_k] or found
        if len(found) != 1:
            got = "; ".join(map(str, tried)) or "no module"
            raise RecordError(
                f"model of type '{kind}': {block}: expected one router next to its {EXPERTS}, got {len(found)}: {got}"
            )
        routers += found
    top_k = _compare(model, routers)
    ranked = all(router.ranks_by_scores for router in routers)
    return [replace(router, top_k=top_k, ranks_by_scores=ranked) for router in routers]


def _probed(router: Router, states: Tensor) -> Router | str:
    """Ask a candidate about random states, and keep how it answers."""
    error = ""
    for is_flat in (True, False):
        tried = replace(router, is_flat=is_flat)
        try:
            watch, output = tried.watch(states)
        except (TypeError, ValueError, IndexError, RuntimeError) as wrong:
            error = " ".join(str(wrong).split())[:100]
            continue
        if not watch.is_known:
            return f"{router} scores experts by neither {' nor '.join(_SCORES)}"
        answer = watch.answer()
        ids = watch.chosen if watch.chosen is not None else read_choice(output)[1]
        in_order = answer.values.gather(1, answer.scores.sort(dim=-1, descending=True, stable=True).indices)
        ranked = bool((in_order[:, 1:] <= in_order[:, :-1]).all())
        top_k = 0 if ids is None else int(ids.shape[-1])
        return replace(tried, top_k=top_k, score=watch.score or "softmax", ranks_by_scores=ranked)
    return f"{router} cannot be run by itself: {error}"


def _compare(model: Any, routers: list[Router]) -> int:
    """Check that routers are those of the configuration; return the top-k."""
    kind = model.config.model_type
    try:
        spec = read_model(model.config.to_dict(), None, kind, kind)
        n_layers, n_experts, top_k = spec.n_layers, spec.n_experts, spec.top_k
    except ModelError:  # a model that cannot be simulated yet may still be recorded, if its layers are alike
        n_layers, n_experts, top_k = len(routers), routers[0].n_experts, routers[0].top_k
    found = [(router.n_experts, router.top_k or top_k) for router in routers]
    if not top_k or found != [(n_experts, top_k)] * n_layers:
        kinds = ", ".join(f"{n} experts, top {k or 'unknown'}" for n, k in sorted(set(found)))
        raise RecordError(
            f"model of type '{kind}': expected {n_layers} layers of {n_experts} experts, top {top_k or 'k'}, by its "
            f"configuration, got {len(routers)} routers ({kinds}), from {routers[0]} to {routers[-1]}"
        )
    return top_k


def read_choice(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Identify weights and ids among tensors, by type and shape."""
    tensors = [t for t in (output if isinstance(output, tuple | list) else (output,)) if isinstance(t, Tensor) and t.ndim]
    ids = next((t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool), None)
    weights = None if ids is None else next((t for t in tensors[::-1] if t.is_floating_point() and t.shape == ids.shape), None)
    return weights, ids


def read_dense(output: Any, ids: Tensor, n_experts: int) -> Tensor | None:
    """Identify weights of chosen ids where a router returns them for all experts, zero for the others."""
    ids = ids.reshape(-1, ids.shape[-1])
    for tensor in output if isinstance(output, tuple | list) else (output,):
        if isinstance(tensor, Tensor) and tensor.shape[-1:] == (n_experts,):
            dense = tensor.reshape(-1, n_experts)
            weights = dense.gather(1, ids)
            if torch.equal(torch.zeros_like(dense).scatter(1, ids, weights), dense):
                return weights
    return None
