"""Where a replay begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moesim.engine.loop import run
from moesim.engine.setup import connect, place, put
from moesim.engine.state import EngineOptions, State
from moesim.errors import InputError
from moesim.live.carrier import Live
from moesim.live.kernels.affinity import pinned
from moesim.live.kernels.workers import one_thread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.hardware.costs import CostModel
    from moesim.live.machine import LiveMachine
    from moesim.model import ModelSpec
    from moesim.policy import Policy
    from moesim.records import Records
    from moesim.trace.predictors import Predictor
    from moesim.trace.workload import Workload


_SWITCH_S = 1e-5
"""How long the thread that decides may keep a worker from its next operator: the interpreter's default is 5 ms."""


def replay(
    machine: LiveMachine, *, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy,
    cache_slots: Mapping[str, int], predictors: Mapping[str, Predictor] | None = None,
    tables: Mapping[str, NDArray[Any]] | None = None, options: EngineOptions | None = None, policy_name: str = "",
    progress: Callable[[int], None] | None = None,
) -> Records:  # fmt: skip
    """Carry out one policy over one workload on this machine.

    Parameters
    ----------
    machine : LiveMachine
        Where. Its profile must be that of ``costs``.
    model, costs, workload, policy, cache_slots, predictors, tables, policy_name, progress
        As for `moesim.engine.simulate`; the costs are only what the policy is told.
    options : EngineOptions, optional
        Decisions take the time they take: ``decision_ns`` must be 0.

    Returns
    -------
    Records
        As of a simulation, with the times that were measured. `TaskRecord.work` is the task's own time, and
        ``decisions`` holds how long the policy thought at each Routed.

    Raises
    ------
    InputError
        If a decision time is set, or the model does not fit.
    SimulationError
        As for `moesim.engine.simulate`, or if a call on the machine fails.
    """
    if options is not None and options.decision_ns:
        raise InputError(
            f"decision time: expected none in a replay, where decisions take the time they take, got {options.decision_ns} ns"
        )
    if model.low_bits:
        widths = ", ".join(f"{bits:g}" for bits in model.widths)
        raise InputError(f"model.expert_bits: expected one width, since a replay holds experts at one, got {widths}; name one")
    machine.outputs.clear()
    state = State(
        model, costs, workload, policy, cache_slots, predictors or {}, tables or {}, EngineOptions(), policy_name, progress
    )
    connect(state)
    put(state, place(state))
    streams = [one.streams for one in state.layouts if one.streams is not None]
    if streams:
        raise InputError(
            f"policy {state.policy_name}: expected parts that stay where they run, since a replay streams no weights, got "
            f"{', '.join(streams[0].parts)} streamed in some step; set op_offload: false of llama-cpp, replay another policy, or "
            f"simulate this one with moesim run"
        )
    live = Live(state, machine)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        with pinned(machine.spare_cores), one_thread():
            live.start()
            return run(state)
    finally:
        sys.setswitchinterval(interval)
        live.drain()
