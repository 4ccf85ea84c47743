"""One run as written: the only place that says which keys of an experiment it has, and what they are called in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final


@dataclass(frozen=True)
class Point:
    """One run as written: no field is a list to sweep any more."""

    # model, hardware: as in the file
    model: Any
    hardware: Any
    trace: Any  # name or path, or how to synthesize it
    workload: Mapping[str, Any]  # keyword arguments of `moesim.trace.workload.WorkloadSpec`
    ratio: float | None  # share of all experts that each GPU may cache
    budget_bytes: int | None  # or the memory of each GPU that everything must fit into
    curve: str  # transfer curve
    chunk_bytes: int | None  # largest piece of a transfer
    decision_us: float  # time charged for a decision
    predictors: Mapping[str, str]  # prediction sources that another one stands in for
    policy: Mapping[str, Any]  # `name` and options
    extrapolate: bool = False  # whether curves may be read outside of what was measured
    warm_up_steps: int | None = None  # steps that count as cold in hit rates
    repeat: int = 0  # which of the experiment's repeats; its seeds are those of the first, plus this
    intervals: bool = False  # whether to repeat runs at the ends of the intervals of the profile's numbers

    @property
    def setting(self) -> tuple[Any, ...]:
        """All but the policy: two points with the same one compare policies."""
        return tuple(value for name, value in vars(self).items() if name != "policy")

    def written(self) -> dict[str, Any]:
        """Give the keys of an experiment that has this setting alone, without its policies."""
        found: dict[str, Any] = {}
        for name, key in KEYS.items():
            section, _, inside = key.partition(".")
            value = getattr(self, name)
            if inside and (section != "cache" or value is not None):  # a cache has a share or a budget
                found.setdefault(section, {})[inside] = value
            elif not inside and name not in ("policy", "repeat"):
                found[key] = dict(value) if name in ("workload", "predictors") else value
        return found


_INSIDE = {
    "ratio": "cache.ratio", "budget_bytes": "cache.budget", "curve": "transfer.curve", "chunk_bytes": "transfer.chunk",
    "policy": "policies",
}  # fmt: skip
KEYS: Final[Mapping[str, str]] = {one.name: _INSIDE.get(one.name, one.name) for one in fields(Point)}
"""Fields of a point -> keys of an experiment."""

PLAIN: Final = ("curve", "chunk_bytes", "decision_us", "extrapolate", "warm_up_steps")
"""Fields that an experiment gives one value or several of, in the order in which sweeps vary them."""
