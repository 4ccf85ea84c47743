"""A run with some of its decisions made by oracles: predictions, replacement, assignment, and links without time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moesim.experiment.spec import RunSpec
from moesim.hardware import HardwareProfile
from moesim.hardware.types import Transfer
from moesim.policies.registry import make_policy
from moesim.policy import Predicted

DECISIONS = ("prediction", "replacement", "assignment", "bandwidth")
"""In the order in which they are replaced; ``reversed`` takes them from the end."""

Decisions = frozenset[str]
NONE: Decisions = frozenset()
_INSTANT = 10**18  # bytes a second: an expert takes a nanosecond


def replaceable(spec: RunSpec) -> tuple[str, ...]:
    """List the decisions of a run that an oracle can make."""
    policy: Any = make_policy(spec.point.policy)
    oracles = getattr(policy, "oracles", {})
    has = {
        "prediction": Predicted in policy.listens,
        "replacement": "replacement" in oracles,
        "assignment": "assignment" in oracles,
        "bandwidth": True,
    }
    return tuple(decision for decision in DECISIONS if has[decision])


def derive(spec: RunSpec, decisions: Decisions) -> RunSpec:
    """Give some decisions of a run to their oracles."""
    point, hardware = spec.point, spec.hardware
    options = dict(point.policy)
    oracles = make_policy(point.policy).oracles if decisions & {"replacement", "assignment"} else {}  # type: ignore[attr-defined]
    for decision in ("replacement", "assignment"):
        if decision in decisions:
            options |= oracles[decision]
            options = {key: value for key, value in options.items() if oracles[decision].get(key, value) is not None}
    if "prediction" in decisions:
        point = replace(point, predictors={"*": "oracle"})
    if "bandwidth" in decisions:
        hardware = instant_links(hardware)
    return replace(spec, point=replace(point, policy=options), hardware=hardware)


def instant_links(hardware: HardwareProfile) -> HardwareProfile:
    """Return a machine whose links move weights in no time but a nanosecond a transfer; activations cross as before."""
    links = []
    for link in hardware.links:
        curves = {kind: Transfer(curve.key, curve.latency_us * 0, _INSTANT) for kind, curve in link.curves.items()}
        activation = link.activation or next(iter(link.curves.values()))  # what the cost model falls back on
        links.append(replace(link, curves=curves, activation=activation))
    return replace(hardware, links=tuple(links))


def combinations(decisions: Sequence[str]) -> dict[tuple[str, str], tuple[Decisions, Decisions]]:
    """List what is compared: for each order and decision, what is replaced before it, and with it.

    >>> [sorted(pair[1]) for pair in combinations(["assignment", "bandwidth"]).values()]
    [['assignment'], ['assignment', 'bandwidth'], ['bandwidth'], ['assignment', 'bandwidth'], ['assignment'], ['bandwidth']]
    """
    found: dict[tuple[str, str], tuple[Decisions, Decisions]] = {}
    for order, names in (("forward", list(decisions)), ("reversed", list(reversed(decisions)))):
        for i, name in enumerate(names):
            found[order, name] = (frozenset(names[:i]), frozenset(names[: i + 1]))
    for name in decisions:
        found["alone", name] = (NONE, frozenset({name}))
    return found
