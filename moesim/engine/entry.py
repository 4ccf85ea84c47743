"""Where a run begins: `simulate` and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from moesim.core import collector
from moesim.engine.choice import among_verified, check_equal, chosen
from moesim.engine.clock import Clock
from moesim.engine.loop import run
from moesim.engine.setup import connect, place, put
from moesim.engine.state import PIECE, EngineOptions, Sink, State
from moesim.errors import ConfigError
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec
from moesim.policy import Placement, Policy, View
from moesim.records import Records
from moesim.trace.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.predictors import Predictor


def simulate(
    *, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy, cache_slots: Mapping[str, int],
    predictors: Mapping[str, Predictor] | None = None, tables: Mapping[str, NDArray[Any]] | None = None,
    options: EngineOptions | None = None, policy_name: str = "", progress: Callable[[int], None] | None = None,
    engine: str | None = None, sink: Sink | None = None, piece: int = PIECE, placed: Callable[[Placement], None] | None = None,
) -> Records:  # fmt: skip
    """Run one policy over one workload on one machine.

    Parameters
    ----------
    model : ModelSpec
        Shapes and bytes.
    costs : CostModel
        What everything takes, from a hardware profile; ``costs.hardware`` is the machine.
    workload : Workload
        Batched steps with their routing.
    policy : Policy
        What to do.
    cache_slots : mapping of str to int
        Expert slots granted to the cache of each device, over all layers.
    predictors, tables : mapping
        Prediction sources by name; calibration tables by name.
    options : EngineOptions, optional
    policy_name : str
        For messages.
    progress : callable, optional
        Called with the index of each finished step.
    engine : {"simpy", "native"}, optional
        Which engine; both leave the same records. Without it `chosen` decides.
    sink : callable, optional
        Takes the records piece by piece, each up to the end of a step, so that memory holds one piece at a time; and with
        each the time in ns before which no record of a later piece starts. The last piece has the run's end and largest
        sizes, too.
    piece : int
        Tasks of a piece at least.
    placed : callable, optional
        Takes the policy's placement, once it is checked.

    Returns
    -------
    Records
        Everything that happened; with a sink only the run's end and largest sizes.

    Raises
    ------
    ConfigError
        If the engine asked for is not known or not built, or the workload's trace has another shape than the model.
    CapacityError
        If a device's memory cannot hold what must be there.
    PolicyError
        If the policy returns an action that cannot be carried out.
    DeadlockError
        If nothing can happen any more and work remains.
    SimulationError
        If the run is verified and the engines differ.
    """
    name = chosen(engine)
    if (routed := workload.steps.shape) != (shape := (model.n_layers, model.n_experts, model.top_k)):
        raise ConfigError(
            f"workload: expected routing over {shape} layers, experts and top_k, as {model.name} has, got {routed}; use a trace "
            f"of that model"
        )
    verified = among_verified((policy_name, workload.digest, sorted(cache_slots.items()), costs.hardware.name, model.name))
    again = deepcopy(policy) if verified else None

    def play(by: str, policy: Policy, *more: Any) -> Records:
        state = State(
            model, costs, workload, policy, cache_slots, predictors or {}, tables or {}, options or EngineOptions(), policy_name,
            *more,
        )  # fmt: skip
        return _ENGINES[by](state)

    records = play(name, policy, progress, None if verified else sink, piece, placed)
    if again is not None:
        other = play("simpy" if name == "native" else "native", again)
        check_equal(*((records, other) if name == "simpy" else (other, records)))
    if sink is not None:
        sink(records, records.makespan_ns)
        records.clear()
    return records


def _run_simpy(state: State) -> Records:
    """Let SimPy's clock run."""
    connect(state)
    put(state, place(state))
    state.carrier = Clock(state)
    return run(state)


def _run_native(state: State) -> Records:
    """Let the compiled engine carry the run out, from Python's setup."""
    from moesim.engine.native._native import Engine

    connect(state)
    engine = Engine()
    try:
        state.view = engine.connect(state)
        copies = place(state)
        describe = getattr(state.policy, "native_parts", None)
        with collector.paused():
            engine.run(state.records, copies, None if describe is None else describe())
    finally:
        engine.close()
    return state.records


_ENGINES = {"simpy": _run_simpy, "native": _run_native}


def empty_view(
    model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy, cache_slots: Mapping[str, int],
    tables: Mapping[str, NDArray[Any]],
) -> View:  # fmt: skip
    """Show a machine on which nothing is placed yet, as `Policy.place` sees it."""
    state = State(model, costs, workload, policy, cache_slots, {}, tables)
    connect(state)
    return state.view
