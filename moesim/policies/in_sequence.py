"""What a layer visit does, one after the other: copies arrive, the GPU computes, then the CPU, or that beside all the rest."""

from __future__ import annotations

from collections.abc import Iterable

from moesim.policy import Action, Fetched, Ran, Run


class InSequence:
    """Holds the Runs of a layer until those before them are over; those of several micro-batches go together.

    With ``cpu_beside`` nothing is held for the CPU.
    """

    def __init__(self, gpu: str, cpu: str, *, cpu_beside: bool = False) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._cpu_beside = cpu_beside
        self._layer = -1
        self._copies: set[int] = set()  # on their way
        self._on_gpu: dict[int, None] = {}
        self._running: set[int] = set()  # on the GPU
        self._on_cpu: dict[int, None] = {}

    def hold(self, layer: int, copies: Iterable[int], on_gpu: Iterable[int], on_cpu: Iterable[int]) -> list[Action]:
        """Take the experts of a micro-batch; return what may begin."""
        self._layer = layer
        self._copies.update(copies)
        self._on_gpu.update(dict.fromkeys(on_gpu))
        if self._cpu_beside:
            at_once = sorted(on_cpu)
            return [*([Run(layer, at_once, self._cpu)] if at_once else []), *self._go_on()]
        self._on_cpu.update(dict.fromkeys(on_cpu))
        for expert in self._on_gpu:  # the GPU takes the rows of all micro-batches so far
            self._on_cpu.pop(expert, None)
        return self._go_on()

    def happened(self, event: Fetched | Ran) -> list[Action]:
        """Note that a copy has arrived, or what has run; return what may begin."""
        if event.layer == self._layer and event.device == self._gpu:
            if isinstance(event, Ran):
                self._running.difference_update(event.experts)
            else:
                self._copies.discard(event.expert)
        return self._go_on()

    def _go_on(self) -> list[Action]:
        if self._copies or self._running:
            return []
        held, device = (self._on_gpu, self._gpu) if self._on_gpu else (self._on_cpu, self._cpu)
        experts = sorted(held)
        held.clear()
        if device == self._gpu:
            self._running.update(experts)
        return [Run(self._layer, experts, device)] if experts else []
