"""Where a run begins: which of the two engines runs it, `simulate`, and whether both agree."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from moesim.core.processes import paused
from moesim.core.record_table import RecordTable
from moesim.engine import native
from moesim.engine.clock import Clock
from moesim.engine.loop import run
from moesim.engine.setup import connect, place, put
from moesim.engine.state import PIECE, EngineOptions, Sink, State
from moesim.errors import ConfigError, SimulationError
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec
from moesim.policy import Placement, Policy, View
from moesim.records import Records
from moesim.serving.steps import Serving
from moesim.trace.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.predictors import Predictor

ENGINES = ("simpy", "native")
VARIABLE = "MOESIM_ENGINE"
"""Environment variable that forces an engine in a process and in those that it starts."""
VERIFY = "MOESIM_VERIFY"
"""Environment variable with the share of runs, from 0 to 1, that a process and those that it starts play on both engines."""


def chosen(asked: str | None = None) -> str:
    """Name the engine: the one asked for or forced by `VARIABLE`, else the native one if built."""
    forced, place = (asked, "engine") if asked is not None else (os.environ.get(VARIABLE, ""), VARIABLE)
    if not forced:
        return "native" if native.AVAILABLE else "simpy"
    if forced not in ENGINES:
        raise ConfigError(f"{place}: expected simpy or native, got {forced!r}; leave it out for the fastest that is there")
    if forced == "native" and not native.AVAILABLE:
        raise ConfigError(f"{place}: the native engine is not built here; install moesim with a C++ compiler, or use simpy")
    return forced


def force(engine: str | None) -> str | None:
    """Make all runs of this process and of its workers use an engine; None changes nothing."""
    if engine is not None:
        os.environ[VARIABLE] = chosen(engine)
    return engine


def verify_share(share: float | None) -> float | None:
    """Set the share of runs to verify; None changes nothing."""
    if share:
        if not native.AVAILABLE:
            raise ConfigError(
                "verify: expected two engines, got simpy alone; install moesim with a C++ compiler, or leave it out"
            )
        os.environ[VERIFY] = str(share)
    return share


@contextmanager
def played_by(engine: str | None, share: float | None) -> Iterator[None]:
    """Use an engine, and verify a share of the runs, within a block."""
    before = {name: os.environ.get(name) for name in (VARIABLE, VERIFY)}
    try:
        force(engine)
        verify_share(share)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def among_verified(run: object) -> bool:
    """Whether a run is in the share to verify, by its content and not by the order of a sweep."""
    share = float(os.environ.get(VERIFY) or 0)
    drawn = int.from_bytes(hashlib.sha256(repr(run).encode()).digest()[:8]) / 2**64
    return drawn < share


def check_equal(python: Records, compiled: Records) -> None:
    """Compare the records of one run on both engines; refuse the first that differs."""
    for name in (field.name for field in fields(Records)):
        left, right = getattr(python, name), getattr(compiled, name)
        if left == right:
            continue
        place = name
        if isinstance(left, RecordTable):
            pairs = enumerate(zip_longest(left, right))
            at, (left, right) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            place = f"{name}[{at}]"
        raise SimulationError(f"engines differ: {place}: simpy {left!r}, native {right!r}; report it, and use --simulator simpy")


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
        If the policy returns an action that cannot be run.
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
        if isinstance(state.steps, Serving) and getattr(policy, "moves_memory", False):
            mover: Any = policy
            state.steps.let_move(lambda use: mover.at_idle(use, state.view), state.policy_name)
        found = _ENGINES[by](state)
        if isinstance(state.steps, Serving):
            found.served = state.steps.served()
        return found

    records = play(name, policy, progress, None if verified else sink, piece, placed)
    if again is not None:
        other = play("simpy" if name == "native" else "native", again)
        check_equal(*((records, other) if name == "simpy" else (other, records)))
    if sink is not None:
        sink(records, records.makespan_ns)
        records.clear()
    return records


def _run_simpy(state: State) -> Records:
    connect(state)
    put(state, place(state))
    state.carrier = Clock(state)
    return run(state)


def _run_native(state: State) -> Records:
    from moesim.engine.native._native import Engine

    connect(state)
    engine = Engine()
    try:
        state.view = engine.connect(state)
        copies = place(state)
        describe = getattr(state.policy, "native_parts", None)
        with paused():
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
