"""Fiddler: popular experts stay on the GPU; others run where they finish sooner.

K. Kamahori et al., "Fiddler: CPU-GPU Orchestration for Fast Inference of Mixture-of-Experts Models", ICLR 2025
(arXiv:2402.07033); code: efeslab/fiddler.

| point | paper says | released code does | we do |
|---|---|---|---|
| resident set | most popular experts, by calibration | the same over all layers together; never changes | the same, from the calibration table, or the code's list (``released``) |
| rule | CPU if cpu(w) < transfer + gpu(w), measured | minimises a sum of costs 7 w (CPU) and 70 (load): CPU if w <= 9 | ``rule: profile`` (engine's costs) or ``code``; ties to the GPU |
| resident experts | GPU | GPU | GPU |
| uncached on the GPU | copied | one placeholder buffer; loads and computes alternate | the same |
| overlap | CPU and GPU in parallel | all GPU, then all CPU experts in one thread; kernels of residents overlap | parallel; ``serial=True``: the CPU after the last copy |
| prefill and decode | same rule | same rule (since April 2024) | same rule |
| experts without rows | - | assigned to the CPU, at no cost | in no plan |
| shared experts | - | none (Mixtral only) | on the GPU, in no plan |
| memory for residents | - | 95 % of what is free | the granted cache slots |
| copies | - | synchronous, from pageable memory | the experiment's transfers; ``pageable=True`` as the code |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from moesim.errors import ConfigError
from moesim.model import ModelSpec
from moesim.policies.base import CACHE, CostTable, ForOneUse, cpu_of, gpu_of, slot_bytes
from moesim.policies.options import option
from moesim.policies.parts import Plan
from moesim.policies.parts.assignment import fiddler_code_assignment, threshold_layer_plan
from moesim.policies.parts.placement import global_top
from moesim.policies.released import Released, Tables
from moesim.policy import DEMAND, Action, Copies, Copy, Fetch, Fetched, LayerEnd, Placement, Pool, Routed, Run, View

PLACEHOLDER = "placeholder"


class Fiddler(ForOneUse):
    """Static popular experts; others on the CPU unless a copy is quicker (Fiddler, 2025)."""

    paper = "Fiddler (ICLR 2025, arXiv:2402.07033)"
    missing: ClassVar[tuple[str, ...]] = (
        "serial: in the released code a copy also waits for the kernels queued before it",
        "the thread-based variant of February 2024 (decode without a cost test)",
    )

    _pool = PLACEHOLDER

    rule: Literal["profile", "code"] = option(
        "profile", "Costs of the rule: the engine's own, or the constants built into the released code."
    )
    serial: bool = option(
        False, "As the released code's head: CPU experts start only when the last copy of the layer has arrived."
    )
    released: Annotated[Released | None, Tables(("popularity",))] = option(
        None,
        "All pairs [layer, expert], the most popular first, as the released code lists them, in place of the calibration table.",
    )
    pageable: bool = option(False, "Copies at the rate of pageable memory, whatever the experiment says.")

    def transfer(self, model: ModelSpec) -> Copies | None:
        return Copies("pageable") if self.pageable else None

    @property
    def listens(self) -> frozenset[type]:
        return frozenset({Routed, LayerEnd, Fetched} if self.serial else {Routed, LayerEnd})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"table:activation_frequency"} if self.released is None else ())

    def place(self, view: View) -> Placement:
        """Fill the granted slots with the globally most frequent experts."""
        self._gpu, self._cpu = gpu_of(view, "fiddler"), cpu_of(view, "fiddler")
        model, costs = view.model, view.costs
        chosen = global_top(self._frequency(view), view.cache_slots(self._gpu))
        self._resident = [bytes(e in experts for e in range(model.n_experts)) for experts in chosen]
        self._cpu_ns, self._gpu_ns = CostTable(view, self._cpu), CostTable(view, self._gpu)
        load_ns = [costs.fetch_ns(view.host, self._gpu, None, layer) for layer in range(model.n_layers)]
        # A resident expert always runs where it is, as if it cost the GPU nothing.
        self._waiting = [[0 if here else ns for here in of_layer] for of_layer, ns in zip(self._resident, load_ns, strict=True)]
        self._awaited: set[int] = set()  # serial: copies of this layer still under way
        self._held: set[int] = set()  # serial: CPU experts that wait for them
        n_bytes = sum(len(experts) * model.expert_bytes(layer) for layer, experts in enumerate(chosen))
        return Placement(
            copies=[Copy(layer, experts, self._gpu) for layer, experts in enumerate(chosen) if experts],
            pools=[
                Pool(self._gpu, CACHE, n_bytes),
                Pool(self._gpu, PLACEHOLDER, slot_bytes(view)),
            ],
        )

    def _frequency(self, view: View) -> list[list[float]]:
        """Return each expert's popularity, by the calibration table or its place in the list."""
        model = view.model
        if self.released is None:
            frequency: list[list[float]] = view.tables["activation_frequency"].tolist()
            return frequency
        n, place = model.n_layers * model.n_experts, f"policy fiddler: {model.name}"
        order = self.released.table("popularity", (n, 2), place).astype(int).tolist()
        rank = {(layer, expert): n - i for i, (layer, expert) in enumerate(order)}
        every = [[(layer, expert) for expert in range(model.n_experts)] for layer in range(model.n_layers)]
        missing = next((pair for pairs in every for pair in pairs if pair not in rank), None)
        if missing is not None:
            raise ConfigError(
                f"{place}: released ({self.released.source}): popularity: expected each pair [layer, expert] once, got none for "
                f"{list(missing)}; add it"
            )
        return [[float(rank[pair]) for pair in pairs] for pairs in every]

    def plan(self, layer: int, loads: Any) -> Plan:
        resident = self._resident[layer]
        if self.rule == "code":
            return fiddler_code_assignment(loads, resident)
        return threshold_layer_plan(loads, self._waiting[layer], self._gpu_ns, self._cpu_ns)

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        resident = self._resident[event.layer]
        plan = self.plan(event.layer, event.rows)
        streamed = [e for e in plan.gpu if not resident[e]]
        actions: list[Action] = []
        if streamed:
            actions.append(Fetch(event.layer, streamed, self._gpu, DEMAND, PLACEHOLDER))
        if plan.gpu:
            actions.append(Run(event.layer, [e for e in plan.gpu if resident[e]] + streamed, self._gpu))
        self._held.difference_update(plan.gpu)  # the GPU takes the rows of all micro-batches so far
        if self.serial:  # with several micro-batches an expert may still be in its placeholder
            self._awaited.update(e for e in streamed if not view.is_resident(event.layer, e, self._gpu))
        if plan.cpu and self._awaited:
            self._held.update(plan.cpu)
        elif plan.cpu:
            actions.append(Run(event.layer, plan.cpu, self._cpu))
        return actions

    def on_fetched(self, event: Fetched, view: View) -> Iterable[Action]:
        self._awaited.discard(event.expert)
        if self._awaited or not self._held:
            return ()
        held = sorted(self._held)
        self._held.clear()
        return (Run(event.layer, held, self._cpu),)
