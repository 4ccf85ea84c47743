"""Carry out interventions in a real model.

Hooks on the routers change which experts a layer runs and with which weights, hooks on the experts add what
reads an earlier state or arrives late. The products are the model's own, so an intervention that changes
nothing leaves the logits as they are, to the bit. Since decisions are of one token each, a whole window can go
through the model at once: every token is treated as a decoded one, with the keys and values of tokens that were
treated so before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fidelity.interventions import Intervention, Plan, Routing
from fidelity.settlement import Ledger


def moe_layers(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Return (router, experts) of each MoE layer, in order; dense layers have none."""
    return [(layer.mlp.gate, layer.mlp.experts) for layer in model.model.layers if hasattr(layer.mlp, "gate")]


class Intervened:
    """Context manager in which a model executes an intervention.

    Parameters
    ----------
    model : transformers causal language model
    intervention : Intervention
    ledger : Ledger
        Gets the gate mass of the model's own routing under the intervention.
    """

    def __init__(self, model: Any, intervention: Intervention, ledger: Ledger) -> None:
        self._model = model
        self._intervention = intervention
        self._ledger = ledger
        self._handles: list[Any] = []
        self._previous: Tensor | None = None  # input of the router before
        self._routing: Routing | None = None
        self._plan: Plan | None = None  # of the layer whose experts come next; None: as routed
        self._late: Tensor | None = None  # outputs of the layer before that arrive now

    def __enter__(self) -> Intervened:
        for layer, (gate, experts) in enumerate(moe_layers(self._model)):
            self._handles.append(gate.register_forward_hook(partial(self._route, layer)))
            self._handles.append(experts.register_forward_hook(self._finish))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _route(self, layer: int, gate: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> Any:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        if layer == 0:
            self._previous = self._late = None
        self._routing = routing = Routing.read(layer, gate, rows, self._previous, outputs)
        plan = self._intervention.plan(routing)
        plan.record(routing, self._ledger)
        self._previous = rows
        if plan.is_exact(routing):
            self._plan = None
            return None
        self._plan = plan
        now = ~(plan.stale | plan.late)
        return outputs[0], (plan.weights * now).to(outputs[1].dtype), plan.ids

    def _finish(self, experts: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        plan, routing, arrived = self._plan, self._routing, self._late
        self._late = None
        if plan is not None and routing is not None:
            if plan.stale.any() and routing.previous is not None:
                output = output + run_slots(experts, routing.previous, plan, plan.stale)
            if plan.late.any():
                self._late = run_slots(experts, routing.inputs, plan, plan.late)
        return output if arrived is None else output + arrived


def run_slots(experts: Any, states: Tensor, plan: Plan, which: Tensor) -> Tensor:
    """Run some slots of a plan on given states, (n_rows, hidden); returns their weighted sums by row, (n_rows, hidden)."""
    rows, places = which.nonzero(as_tuple=True)
    ids, weights = plan.ids[rows, places], plan.weights[rows, places]
    # The undecorated call: these are the experts of the same layer again, not another layer for the hooks.
    outputs = experts.forward(states[rows], ids.unsqueeze(1), weights.unsqueeze(1).to(states.dtype))
    return torch.zeros_like(states).index_add_(0, rows, outputs)


class RoutingHooks:
    """Context manager that keeps the `Routing` of every MoE layer of each pass of an unmodified model."""

    def __init__(self, model: Any) -> None:
        self._layers = moe_layers(model)
        self._handles: list[Any] = []
        self._seen: list[Routing] = []

    def __enter__(self) -> RoutingHooks:
        self._handles = [g.register_forward_hook(partial(self._keep, i)) for i, (g, _) in enumerate(self._layers)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _keep(self, layer: int, gate: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        previous = self._seen[-1].inputs if layer else None
        self._seen.append(Routing.read(layer, gate, rows, previous, outputs))

    def take(self) -> list[Routing]:
        """Hand over the layers seen since the last call, in order."""
        seen, self._seen = self._seen, []
        return seen
