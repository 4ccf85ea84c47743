"""From an experiment with lists to single runs: the grid product, in an order that depends on the file alone.

Fields named in ``zip`` vary together, and slowest. Settings vary slowest in the order model, hardware, trace, transfer,
decision, extrapolation, warm-up, predictors, workload, cache, repeat; policies vary fastest, so that the rows to compare stand
together. Combinations that ``exclude`` describes are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any

from moesim.errors import ConfigError
from moesim.experiment.config import Config, WorkloadConfig
from moesim.experiment.exclude import Excluded
from moesim.experiment.forms import listed
from moesim.experiment.repeats import check_one_seed, repeats_of, reseeded
from moesim.experiment.spec import KEYS, PLAIN, Point
from moesim.experiment.zipped import MAX_RUNS, zipped
from moesim.hardware.overrides import flatten
from moesim.hardware.places import is_number
from moesim.metrics.naming import read_policy_label
from moesim.policies.declare import option_hints
from moesim.policies.imports import foreign
from moesim.policies.options import matches
from moesim.policies.registry import policy_class

_ONE_MODEL_LISTS = ("expert_bytes_by_layer",)  # fields of a model whose value is a list


def expand(config: Config, place: str, *, imports: bool = True) -> list[Point]:
    """Give all runs of an experiment."""
    excluded = Excluded(config.exclude, place)
    points: list[Point] = []
    n_combinations = 0
    with _bounded(place):
        for one in zipped(config, place):
            policies = [
                p for i, spec in enumerate(one.policies) for p in policies_of(spec, f"{place}: policies[{i}]", imports=imports)
            ]
            for setting in _settings(one, place):
                n_combinations += len(policies)
                _check_size(n_combinations)
                made = (Point(**setting, policy=policy) for policy in policies)
                points += [point for point in made if not excluded.covers(point)]
    excluded.check_used()
    if not points:
        raise ConfigError(f"{place}: exclude: expected to leave a combination to run, got none; exclude less")
    return points


def entries_of(config: Config, place: str, *, imports: bool = True) -> dict[str, str]:
    """Name the place in the file that each policy of a sweep comes from, by its ``repr``: the first, if it stands in several."""
    found: dict[str, str] = {}
    with _bounded(place):
        for i, spec in enumerate(config.policies):
            entry = f"{place}: policies[{i}]"
            for policy in policies_of(spec, entry, imports=imports):
                found.setdefault(repr(policy), entry)
            _check_size(len(found))
    return found


class _TooManyError(Exception):
    pass


@contextmanager
def _bounded(place: str) -> Iterator[None]:
    """Say that there are too many combinations."""
    try:
        yield
    except _TooManyError:
        raise ConfigError(f"{place}: expected at most {MAX_RUNS} combinations, got more; sweep fewer values") from None


def _check_size(n: int) -> None:
    if n > MAX_RUNS:
        raise _TooManyError


def _settings(config: Config, place: str) -> Iterator[dict[str, Any]]:
    """Give all fields of a point but the policy, by name."""
    check_one_seed(config, place)
    grid = _grid(
        {
            "model": [one for model in listed(config.model) for one in each_model(model)],
            "hardware": list(each_machine(config)),
            "trace": [one for trace in listed(config.trace) for one in _traces(trace)],
            "intervals": [config.intervals],
            **{name: listed(attrgetter(KEYS[name])(config)) for name in PLAIN},
            "predictors": list(_grid({source: listed(stand_in) for source, stand_in in config.predictors.items()})),
            "workload": list(_workloads(config.workload)),
            "cache": config.cache.sizes(),
            **repeats_of(config),
        }
    )
    for setting in grid:
        yield reseeded({**setting.pop("cache"), **setting})


def _grid(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    _check_size(prod(len(values) for values in choices.values()))
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _workloads(workload: WorkloadConfig) -> Iterator[dict[str, Any]]:
    choices = {name: listed(getattr(workload, name)) for name in WorkloadConfig.model_fields}
    if isinstance(choices["requests"][0], int):
        choices["requests"] = [choices["requests"]]  # a list by nature; several are lists in a list
    return _grid(choices)


def _traces(trace: Any) -> Iterator[Any]:
    if isinstance(trace, str):
        return iter([trace])
    return _grid({key: listed(value) for key, value in trace.items()})


def each_model(model: Any) -> Iterator[Any]:
    """Give every model that a name, or a mapping with lists, stands for."""
    if isinstance(model, str):
        return iter([model])
    nested = {key: isinstance(value, list) and any(isinstance(v, list) for v in value) for key, value in model.items()}
    sweeps = {key: nested[key] or key not in _ONE_MODEL_LISTS for key in model}
    return _grid({key: listed(value) if sweeps[key] else [value] for key, value in model.items()})


def each_machine(config: Config) -> Iterator[Any]:
    """Sweep the overridden numbers of the profiles; lists elsewhere in them are lists by nature."""
    for hardware in listed(config.hardware):
        yield from _machines(hardware)


def _machines(hardware: Any) -> Iterator[Any]:
    if isinstance(hardware, str) or "base" not in hardware:
        return iter([hardware])
    flat = dict(flatten(hardware))
    return _grid({key: value if _is_sweep(key, value) else [value] for key, value in flat.items()})


def _is_sweep(key: str, value: Any) -> bool:
    steps = [int(step) if step.isdecimal() else step for step in key.split(".")]
    return isinstance(value, list) and bool(value) and is_number(steps)


def policies_of(spec: Any, place: str, *, imports: bool = True) -> Iterator[dict[str, Any]]:
    """Sweep the options of a policy that are given as a list though they are none."""
    if isinstance(spec, str):
        spec = read_policy_label(spec, place)
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ConfigError(f"{place}: expected the name of a policy, or a mapping with the key name, got {spec!r}")
    if imports or not foreign(spec["name"]):
        cls = policy_class(spec["name"], place)
        hints = dict(option_hints(cls))
    else:
        hints = dict.fromkeys(spec, float)

    def choices(key: str, value: Any) -> list[Any]:
        by_nature = key not in hints or matches(value, hints[key])
        return value if isinstance(value, list) and value and not by_nature else [value]

    return _grid({key: choices(key, value) for key, value in spec.items()})
