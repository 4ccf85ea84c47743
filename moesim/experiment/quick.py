"""Make an experiment small, to see whether it works at all."""

from __future__ import annotations

from moesim.experiment.config import CacheConfig, Config, TransferConfig, WorkloadConfig
from moesim.experiment.sweep import expand
from moesim.trace.made import no_more_than
from moesim.trace.workload.spec import shortened, size_of

QUICK_DECODE_TOKENS = 4


def quick(config: Config, place: str = "experiment", *, imports: bool = True) -> Config:
    """Take the first setting of the grid, one batch, and at most a few decode tokens; all its policies stay."""
    points = expand(config, place, imports=imports)
    first = points[0]
    workload = shortened(first.workload, QUICK_DECODE_TOKENS)
    # no more synthetic routing than that takes
    trace = first.trace if isinstance(first.trace, str) else no_more_than(first.trace, size_of(workload))
    small = {**first.written(), "workload": workload, "trace": trace}
    sections = {"workload": WorkloadConfig, "cache": CacheConfig, "transfer": TransferConfig}
    update = {key: sections[key](**value) if key in sections else value for key, value in small.items()}
    policies = [dict(point.policy) for point in points if point.setting == first.setting]
    return config.model_copy(update={**update, "zip": [], "exclude": [], "repeat": 1, "policies": policies})
