"""The common checks of a policy, for authors here and elsewhere.

>>> from moesim.policies.systems.on_demand import OnDemand
>>> print(check_policy(OnDemand, slots=(4, 32)))
OnDemand() on tiny: 4 layers of 8 experts, prompts of 12 tokens, 8 decode steps
passed   it declares exact, listens and needs as the contract asks
passed   its constructor stores its options unchanged: staging_slots
passed   4 cache slots, 1 a layer: 5 of 5 workloads
passed   32 cache slots, 8 a layer: 5 of 5 workloads
workloads: batch 1; batch 4; batch 4 in 2 micro-batches; batch 4 in 4 micro-batches, 0.7 us a decision; batch 4, top-1
each: every routed row is served once, weights are there while they are read, and a second object, which has been through a
  pickle, and the first one once more give the same records
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.core.own_code import is_ours
from moesim.errors import CapacityError, InputError, MoesimError, SimulationError, describe_exception
from moesim.experiment.runner import initial_placement
from moesim.fits import backing_devices
from moesim.hardware import HardwareProfile
from moesim.policies.composed import Composed
from moesim.policies.options import misspelt, options_of, wrong_declaration
from moesim.records import Records
from moesim.testing.fakes import tiny_model
from moesim.testing.runs import N_DECODE, N_PROMPT, machine_of, run_inputs, run_tiny, tiny_workload
from moesim.trace.workload import Workload

if TYPE_CHECKING:
    from moesim.trace import Trace

SLOTS = (1, 4, 12, 32)
"""Cache slots that are tried: fewer than layers, one a layer, three a layer, all experts."""


_NO_ROOM = re.compile(r"waits for memory|pool '[^']*' (holds \d+ bytes, the expert has|is full|of \S+ is too small)")
"""What the engine says of an expert for which there is no place."""


class _Setting(NamedTuple):
    batch_size: int
    micro_batches: int = 1
    decision_ns: int = 0
    shape: Mapping[str, int] = MappingProxyType({})  # other than the tiny model's

    def __str__(self) -> str:
        split = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        others = [f"{self.decision_ns / 1000:g} us a decision"] if self.decision_ns else []
        others += [f"top-{self.shape['top_k']}"] if self.shape else []
        return ", ".join([f"batch {self.batch_size}{split}", *others])


_SETTINGS = (_Setting(1), _Setting(4), _Setting(4, 2), _Setting(4, 4, 700), _Setting(4, shape={"top_k": 1}))


class Check(NamedTuple):
    """One thing that was checked.

    Attributes
    ----------
    verdict : str
        ``"passed"``, ``"refused"`` (the policy says that the cache is too small for it, which it may) or ``"failed"``.
    what : str
        What was checked.
    detail : str
        What went wrong, what a policy says that refuses, or how much was tried.
    remedy : str
        What to do about a failure, where that is known.
    cause : Exception or None
        What a failure came from.
    """

    verdict: str
    what: str
    detail: str = ""
    remedy: str = ""
    cause: Exception | None = None

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.verdict:<8} {self.what}{detail}" + (f"\n{'':<8} {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Report:
    """Checks of a policy and their results; ``str`` of it is for people.

    Attributes
    ----------
    policy : str
        The policy with its options.
    machine : str
        Name of the hardware profile.
    checks : tuple of Check
        In the order in which they were made.
    """

    policy: str
    machine: str
    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed; empty if the policy passes."""
        return tuple(check for check in self.checks if check.verdict == "failed")

    def __str__(self) -> str:
        model = tiny_model()
        shape = f"{model.n_layers} layers of {model.n_experts} experts, prompts of {N_PROMPT} tokens, {N_DECODE} decode steps"
        each = (
            "each: every routed row is served once, weights are there while they are read, and a second object, which has been "
            "through a pickle, and the first one once more give the same records"
        )
        lines = [f"{self.policy} on {self.machine}: {shape}", *map(str, self.checks)]
        lines += [f"workloads: {'; '.join(map(str, _SETTINGS))}", *textwrap.wrap(each, 125, subsequent_indent="  ")]
        return "\n".join(lines)


def check_policy(
    make: Callable[[], Any], *, slots: Sequence[int] = SLOTS, hardware: HardwareProfile | None = None
) -> Report:  # fmt: skip
    """Check a policy as the registry's own are checked.

    Parameters
    ----------
    make, slots, hardware
        As for `examine_policy`, which says what is checked.

    Returns
    -------
    Report
        What was checked.

    Raises
    ------
    CheckError
        If a check or a run fails, an AssertionError: with all failures, caused by the first of them.
    InputError
        As of `examine_policy`.
    """
    report = examine_policy(make, slots=slots, hardware=hardware)
    if report.failures:
        lines = [": ".join([report.policy, *filter(None, check[1:4])]) for check in report.failures]
        raise CheckError("\n".join(lines)) from report.failures[0].cause
    return report


def examine_policy(
    make: Callable[[], Any],
    *,
    slots: Sequence[int] = SLOTS,
    hardware: HardwareProfile | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check a policy, and report what fails instead of raising it.

    It must declare what the contract asks, store its options unchanged, place what fits, and run tiny workloads on the engine:
    prefill and decode, one request and several, one micro-batch and several, one expert a token, with and without decision
    time. Each runs again, by a copy that has been through a pickle, with the same result, and at last the same object does. In
    every run each top-k place is served once - each routed expert executed for exactly its rows, if the policy is ``exact`` -
    and nothing computes with weights that are not there. The engine itself checks every action.

    Parameters
    ----------
    make : callable
        The class, ``functools.partial`` of it with options, or a function without parameters that returns a new policy.
    slots : sequence of int
        Cache slots to try, of 32 experts in 4 layers: 4 are one a layer, 1 leaves layers without any. A policy may refuse
        fewer than 32 by raising CapacityError in ``place``.
    hardware : HardwareProfile or None
        The machine; None: the ``profile`` that the policy names, else `tiny_machine`.
    tell : callable
        Called before each check: a policy may never come back from one.

    Returns
    -------
    Report
        What was checked.

    Raises
    ------
    InputError
        If the policy cannot run on this machine, or needs a table that the made-up trace does not hold.
    """
    policy = make()
    tell(f"checking {_called(policy)}")
    checks = [_declaration(policy)]
    if checks[0].verdict == "passed":
        checks += [*_constructor(make), *_methods(policy)]
        caches = {n: _cache(make, n, hardware, tell) for n in slots}
        ample = caches[max(slots)].verdict != "failed" or not _each(max(slots))
        checks += _merged({n: check if ample else check._replace(remedy="") for n, check in caches.items()})
    return Report(_called(policy), (hardware or machine_of(policy)).name, tuple(checks))


def _merged(caches: Mapping[int, Check]) -> list[Check]:
    """Report a failure that several caches have once, at the first of them."""
    found: dict[tuple[str, ...], list[int]] = {}
    for slots, check in caches.items():
        alike = check[2:4] if check.verdict == "failed" else (check.what,)
        found.setdefault(alike, []).append(slots)
    several = {some[0]: f"{', '.join(map(str, some[:-1]))} and {some[-1]} cache slots" for some in found.values() if some[1:]}
    return [caches[some[0]]._replace(what=several.get(some[0], caches[some[0]].what)) for some in found.values()]


def _declaration(policy: Any) -> Check:
    what = "it declares exact, listens and needs as the contract asks"
    return _tried(what, partial(check_declaration, policy))


def _constructor(make: Any) -> list[Check]:
    """Check the constructor where it is known with which options it was called."""
    cls = make.func if isinstance(make, partial) else make
    if not inspect.isclass(cls):
        return []
    given = make.keywords if isinstance(make, partial) else {}
    names = ", ".join(options_of(cls)) or "it has none"
    return [_tried(f"its constructor stores its options unchanged: {names}", partial(check_constructor, cls, given))]


def _methods(policy: Any) -> list[Check]:
    """Check names of methods and attributes in modules of the policy and of its parts that are not moesim's."""
    given = [str(value).partition(":")[0] for value in getattr(policy, "__dict__", {}).values()]
    parts = policy.parts if isinstance(policy, Composed) else ()
    names = dict.fromkeys([*(type(one).__module__ for one in (policy, *parts)), *given])
    classes = [
        one for name in names if name in sys.modules and not is_ours(name)
        for one in vars(sys.modules[name]).values() if inspect.isclass(one) and one.__module__ == name
    ]  # fmt: skip
    wrong = misspelt(classes)
    return [Check("failed", "no name is nearly that of a method or an option", wrong)] if wrong else []


def _cache(make: Callable[[], Any], slots: int, hardware: HardwareProfile | None, tell: Callable[[str], None]) -> Check:
    """Check all settings with a cache of some slots."""
    refusals: list[str] = []
    remedies: list[str] = []  # of the one failure that there is
    what = f"{slots} cache slot{'s' if slots != 1 else ''}, {_each(slots)} a layer"

    def run() -> None:
        for setting in _SETTINGS:
            tell(f"checking {what}: {setting}")
            try:
                _check_setting(make, setting, slots, hardware)
            except CapacityError as error:
                expect(slots < _n_units(), f"{setting}: it does not fit even with a slot for every expert: {error}")
                refusals.append(str(error))
            except InputError:
                raise
            except Exception as error:  # a policy raises whatever it likes
                remedies.append(_remedy(error, setting, slots))
                raise CheckError(f"{setting}: {_said(error)}") from error

    check = _tried(what, run)
    if check.verdict == "failed":
        return check._replace(remedy="".join(remedies))
    if len(refusals) == len(_SETTINGS):
        return check._replace(verdict="refused", detail=refusals[0])
    return check._replace(detail=f"{len(_SETTINGS) - len(refusals)} of {len(_SETTINGS)} workloads")


def _check_setting(make: Callable[[], Any], setting: _Setting, slots: int, hardware: HardwareProfile | None) -> None:
    def run(policy: Any) -> Records:
        return run_tiny(policy, workload, slots, setting.decision_ns, hardware=hardware, **setting.shape)

    policy = make()
    workload = tiny_workload(policy, setting.batch_size, setting.micro_batches, **setting.shape)
    records = run(policy)
    expect(records == run(_pickled(make())), "two runs of the same inputs differ")
    expect(records == run(policy), "an object that has run differs from a new one; build its state in place()")
    check_slots(policy, workload, records)
    check_weights(policy, workload, records, slots, hardware, **setting.shape)


def _tried(what: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except InputError:
        raise
    except Exception as error:
        return Check("failed", what, _said(error), cause=error)
    return Check("passed", what)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CheckError | MoesimError) else describe_exception(error)


def _remedy(error: Exception, setting: _Setting, slots: int) -> str:
    """Suggest that a policy may refuse a cache that holds less of a layer than a row needs."""
    model = tiny_model(**setting.shape)
    if _each(slots) >= model.top_k or not isinstance(error, SimulationError) or not _NO_ROOM.search(str(error)):
        return ""
    few = f"{slots} over {model.n_layers} layers are {_each(slots)} a layer, and a row needs {model.top_k} experts"
    return (
        f"{few}; a policy may refuse so few, by raising moesim.errors.CapacityError in place(), or keep a pool next to the cache"
    )


def _each(slots: int) -> int:
    return slots // tiny_model().n_layers


def _n_units() -> int:
    model = tiny_model()
    return model.n_layers * model.n_experts


def _called(policy: Any) -> str:
    """Write a policy with its options, or by its name where it has no text of its own."""
    try:
        text = repr(policy)
    except Exception:  # one that has not stored its options
        text = object.__repr__(policy)
    return f"{type(policy).__name__}()" if text == object.__repr__(policy) else text


def _pickled(policy: Any) -> Any:
    """Send a policy through a pickle, as runs in other processes do, if its class can be found."""
    cls = type(policy)
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not cls:
        return policy
    try:
        return ForkingPickler.loads(ForkingPickler.dumps(policy))
    except Exception as error:  # pickling raises whatever it meets
        raise CheckError(f"it cannot be sent to another process: {describe_exception(error)}") from error


# --------------------------------------------------------------- what every run is checked for, and what a class must declare
class CheckError(AssertionError):
    """A policy does not do what the contract asks of it."""


def expect(holds: bool, message: str) -> None:
    """Raise a CheckError unless something holds."""
    if not holds:
        raise CheckError(message)


def check_slots(policy: Any, workload: tuple[Trace, Workload], records: Records) -> None:
    """Check that each slot of each layer visit was served once, and as the policy declares."""
    ran: Counter[tuple[int, int, int]] = Counter()
    for task in records.tasks:
        if task.kind == "expert":
            ran[task.step, task.layer, task.expert] += task.rows
    wanted: Counter[tuple[int, int, int]] = Counter()
    mass: dict[int, float] = defaultdict(float)
    for step in workload[1].steps:
        for micro in step.micro:
            for layer, routing in enumerate(micro.layers):
                wanted.update({(step.index, layer, expert): routing.rows[expert] for expert in routing.active})
                mass[step.index] += 0 if routing.weights is None else routing.weights.sum(dtype=np.float64)
    if policy.exact:
        expect(ran == wanted, "experts were executed for other rows than were routed to them")
        expect(not records.inexact, "exact, and yet not all slots are fresh")
        return
    served, slots = _by_visit(ran), _by_visit(wanted)
    for inexact in records.inexact:
        if inexact.kind == "skipped":
            served[inexact.step, inexact.layer] += inexact.slots
    expect(served == slots, "rows executed and slots skipped are not the slots there were")
    lost: dict[int, float] = defaultdict(float)
    for inexact in records.inexact:
        lost[inexact.step] += inexact.mass or 0
    for done in records.steps:
        expect(math.isclose(done.gate_mass, mass[done.step], rel_tol=1e-9), f"gate weights of step {done.step}")
        expect(lost[done.step] <= done.gate_mass * (1 + 1e-9), f"more than all of step {done.step} is not fresh")


def check_weights(
    policy: Any,
    workload: tuple[Trace, Workload],
    records: Records,
    slots: int,
    hardware: HardwareProfile | None = None,
    **changes: Any,
) -> None:
    """Check that all that ran had its weights throughout; arguments are those of `run_tiny`."""
    inputs = run_inputs(policy, workload, slots, hardware, changes)
    machine = inputs["costs"].hardware
    placement = initial_placement(**inputs)
    stays: dict[tuple[Any, ...], list[tuple[int, str]]] = {}  # device, layer, expert, bits -> when it came and went
    for copy in placement.copies:
        for expert in copy.experts:
            stays[copy.device, copy.layer, expert, copy.bits] = [(0, "come")]
    for transfer in records.transfers:
        if transfer.last and transfer.expert >= 0:
            unit = (machine.link(transfer.link).dst, transfer.layer, transfer.expert, transfer.bits)
            stays.setdefault(unit, []).append((transfer.end, "come"))
    for eviction in records.evictions:
        stays.setdefault((eviction.device, eviction.layer, eviction.expert, eviction.bits), []).append((eviction.time, "go"))
    for task in records.tasks:
        if task.kind == "expert" and task.device not in backing_devices(machine, placement):
            history = stays.get((task.device, task.layer, task.expert, task.bits), [])
            before = [what for time, what in sorted(history) if time <= task.start]
            within = [what for time, what in history if task.start < time < task.end]
            there = before[-1:] == ["come"] and "go" not in within
            expect(there, f"{task.device} computed expert {task.expert} of layer {task.layer} without its weights")


def _by_visit(of_expert: Mapping[tuple[int, int, int], int]) -> Counter[tuple[int, int]]:
    total: Counter[tuple[int, int]] = Counter()
    for (step, layer, _), rows in of_expert.items():
        total[step, layer] += rows
    return total


def check_declaration(policy: Any) -> None:
    """Check that ``exact``, ``listens`` and ``needs`` are there and are what the contract says."""
    lacking = [name for name in ("place", "decide", "evict") if not callable(getattr(policy, name, None))]
    expect(not lacking, f"expected the methods place, decide and evict, got no {', no '.join(lacking)}")
    wrong = wrong_declaration(policy)
    expect(not wrong, wrong)


def check_constructor(cls: Any, given: Mapping[str, Any]) -> None:
    """Check that a class stores every option under its own name, as it was given."""
    policy = cls(**given)
    for name, parameter in options_of(cls).items():
        wanted = given.get(name, parameter.default)
        expect(hasattr(policy, name), f"option {name}: expected the attribute {name}, got none; store it in __init__")
        stored = getattr(policy, name)
        expect(stored is wanted, f"option {name}: stored {stored!r}, got {wanted!r}; change it in place()")
