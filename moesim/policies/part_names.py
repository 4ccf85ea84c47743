"""Names to parts, so that a composition can be written in YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moesim.errors import ConfigError, mistyped, unknown_name
from moesim.policies import (
    activation_aware,
    adaptive,
    cross_layer,
    fixed_threshold,
    impact_part,
    layer_distance,
    no_prefetch,
    queue_parts,
    ranking,
    score_parts,
)
from moesim.policies.declaration import wrong_needs
from moesim.policies.declare import option_hints
from moesim.policies.importing import check_target, import_class
from moesim.policies.options import construct, describe, matches
from moesim.policies.parts import AssignmentPart, PlacementPart, PrefetchPart, ReplacementPart, placement, replacement
from moesim.policies.parts import assignment as assigning
from moesim.policies.parts import prefetch as prefetching
from moesim.policies.systems import two_generations

PARTS: dict[str, dict[str, type]] = {
    "placement": {
        "none": placement.Empty,
        "random": placement.Random,
        "lowest-ids": placement.LowestIds,
        "highest-ids": placement.HighestIds,
        "frequency-global": placement.FrequencyGlobal,
        "frequency-per-layer": placement.FrequencyPerLayer,
    },
    "assignment": {
        "all-gpu": assigning.AllGpu,
        "all-cpu": assigning.AllCpu,
        "greedy": assigning.Greedy,
        "threshold": assigning.Threshold,
        "fixed-threshold": fixed_threshold.FixedThreshold,
        "exact": assigning.Exact,
        "beam": assigning.Beam,
        "resident": assigning.Resident,
        "resident-in-decode": assigning.ResidentInDecode,
        "queues": queue_parts.Queues,
        "hss": queue_parts.TwoEnded,
    },
    "prefetch": {
        "none": no_prefetch.NoPrefetch,
        "predicted": prefetching.TopPredicted,
        "random": prefetching.RandomAhead,
        "impact-driven": impact_part.ImpactDriven,
        "mrs-score": score_parts.MRSScore,
        "cross-layer": cross_layer.CrossLayer,
    },
    "replacement": {
        "lru": replacement.LRU,
        "fifo": replacement.FIFO,
        "lfu": ranking.LFU,
        "random": replacement.RandomVictim,
        "mrs": score_parts.MRS,
        "belady": ranking.Belady,
        "static": replacement.Static,
        "workload-aware": replacement.WorkloadAware,
        "arc": adaptive.ArcVictim,
        "s3-fifo": adaptive.S3FifoVictim,
        "activation-aware": activation_aware.ActivationAware,
        "least-stale": layer_distance.LeastStale,
        "least-stale-2gen": two_generations.LeastStaleByGeneration,
    },
}

PROTOCOLS: dict[str, type] = {
    "placement": PlacementPart,
    "assignment": AssignmentPart,
    "prefetch": PrefetchPart,
    "replacement": ReplacementPart,
}
PART_OPTIONS = frozenset({*PROTOCOLS, "scheduler"})
"""Options of policies whose values are parts."""


def make_part(kind: str, spec: Any) -> Any:
    """Build a part from a name or ``package.module:Class``, or from a mapping of ``name`` and its options; an object stays.

    >>> make_part("assignment", {"name": "beam", "width": 3})
    Beam(width=3)
    """
    options: dict[str, Any] = {}
    if isinstance(spec, Mapping):
        options = {key: value for key, value in spec.items() if key != "name"}
        spec = spec.get("name")
        if not isinstance(spec, str):
            raise ConfigError(
                f"{kind}: expected a mapping with the key name, got the keys {sorted(options)}; write {{name: PART}}"
            )
    if not isinstance(spec, str):
        return spec
    known = PARTS[kind]
    if ":" in spec:
        part = _construct(_own_class(kind, spec), options, f"{kind} {spec}", kind)
        if wrong := wrong_needs(part):
            raise ConfigError(f"{kind} {spec}: {wrong}")
        return part
    if spec not in known:
        others = [other for other, parts in PARTS.items() if spec in parts]
        is_another = f"'{spec}' is a part for {' and '.join(others)}; " if others else ""
        raise ConfigError(f"{kind}: {is_another}{unknown_name(kind, spec, known)}")
    return _construct(known[spec], options, f"{kind} {spec}", kind)


def _construct(cls: type, options: Mapping[str, Any], what: str, kind: str) -> Any:
    """Build a part; of an option that is a list to sweep, say that the part is what is listed."""
    hints = option_hints(cls)
    for name, value in options.items():
        hint = hints.get(name, Any)
        if isinstance(value, list) and value and not matches(value, hint) and all(matches(one, hint) for one in value):
            parts = ", ".join(f"{{..., {name}: {json.dumps(one, default=str)}}}" for one in value[:3])
            more = ", ..." if len(value) > 3 else ""
            raise ConfigError(
                f"{kind}: {what}: option {name}: {mistyped(describe(hint), value)}; to sweep it, list the part: [{parts}{more}]"
            )
    return construct(cls, options, what, kind)


def _own_class(kind: str, target: str) -> type:
    """Import a part that is not moesim's own, and check that it has what its kind must have."""
    cls = import_class(check_target(target, kind), kind)
    wanted = methods_of(kind)
    lacking = [name for name in wanted if not callable(getattr(cls, name, None))]
    if lacking:
        raise ConfigError(
            f"{kind} {target}: expected a class with {', '.join(wanted)} (see moesim.policies.parts.{PROTOCOLS[kind].__name__}), "
            f"got no {', no '.join(lacking)} in {cls.__name__}; {_remedy(cls)}"
        )
    return cls


def _remedy(cls: type) -> str:
    """Say what else a class may be."""
    fits = [kind for kind in PROTOCOLS if all(callable(getattr(cls, name, None)) for name in methods_of(kind))]
    return f"it can be named as {' or '.join(fits)}" if fits else "add them"


def methods_of(kind: str) -> list[str]:
    """Name the methods that a part of a kind must have."""
    return [name for name, one in vars(PROTOCOLS[kind]).items() if not name.startswith("_") and callable(one)]


def part_targets(policy: Mapping[str, Any]) -> list[str]:
    """Return the classes ``package.module:Class`` that a policy's options name as parts, without importing any."""
    named = {key: value.get("name") if isinstance(value, Mapping) else value for key, value in policy.items() if key != "name"}
    return [
        name for key, name in named.items()
        if isinstance(name, str) and ":" in name and (key in PART_OPTIONS or isinstance(policy[key], Mapping))
    ]  # fmt: skip
