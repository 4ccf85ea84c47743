"""From an experiment with lists to single runs: the grid product, in an order that depends on the file alone.

Settings vary slowest in the order model, hardware, trace, transfer, decision, predictors,
workload, cache; policies vary fastest, so that the rows to compare stand together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_type_hints

from moesim.experiment.config import Config, WorkloadConfig
from moesim.hardware.schema import is_number
from moesim.policies.base import option_parameters
from moesim.policies.options import matches
from moesim.policies.registry import policy_class

_ONE_MODEL_LISTS = ("expert_bytes_by_layer",)  # fields of a model whose value is a list


@dataclass(frozen=True)
class Point:
    """One run as written: no field is a list to sweep any more.

    Attributes
    ----------
    model, hardware : str or mapping
        As in the file.
    trace : str
        Name or path.
    workload : mapping of str to object
        Keyword arguments of `moesim.workload.WorkloadSpec`.
    ratio : float or None
        Share of all experts that each GPU may cache.
    budget_bytes : int or None, bytes
        Or the memory of each GPU that everything must fit into.
    curve : str
        Transfer curve.
    chunk_bytes : int or None, bytes
        Largest piece of a transfer.
    decision_us : float, us
        Time charged for a decision.
    predictors : mapping of str to str
        Prediction sources that another one stands in for.
    policy : mapping of str to object
        ``name`` and options.
    """

    model: Any
    hardware: Any
    trace: str
    workload: Mapping[str, Any]
    ratio: float | None
    budget_bytes: int | None
    curve: str
    chunk_bytes: int | None
    decision_us: float
    predictors: Mapping[str, str]
    policy: Mapping[str, Any]


def expand(config: Config, place: str) -> list[Point]:
    """Give all runs of an experiment.

    Parameters
    ----------
    config : Config
        The experiment.
    place : str
        The file, for messages.

    Returns
    -------
    list of Point
        In order.

    Raises
    ------
    ConfigError
        If a policy is unknown, which shows here because its options say which of them are lists by nature.
    """
    policies = [one for i, spec in enumerate(config.policies) for one in _policies(spec, f"{place}: policies[{i}]")]
    budgets = [(None, budget) for budget in _listed(config.cache.budget)]
    settings = product(
        [one for model in _listed(config.model) for one in _models(model)],
        [one for hardware in _listed(config.hardware) for one in _machines(hardware)],
        _listed(config.trace),
        _listed(config.transfer.curve),
        _listed(config.transfer.chunk),
        _listed(config.decision_us),
        list(_grid({source: _listed(stand_in) for source, stand_in in config.predictors.items()})),
        list(_workloads(config.workload)),
        budgets if config.cache.ratio is None else [(ratio, None) for ratio in _listed(config.cache.ratio)],
    )
    return [
        Point(model, hardware, trace, workload, ratio, budget, curve, chunk, decision, predictors, policy)
        for model, hardware, trace, curve, chunk, decision, predictors, workload, (ratio, budget) in settings
        for policy in policies
    ]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _grid(choices: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _workloads(workload: WorkloadConfig) -> Iterator[dict[str, Any]]:
    return _grid({name: _listed(getattr(workload, name)) for name in WorkloadConfig.model_fields})


def _models(model: Any) -> Iterator[Any]:
    if isinstance(model, str):
        return iter([model])
    nested = {key: isinstance(value, list) and any(isinstance(v, list) for v in value) for key, value in model.items()}
    sweeps = {key: nested[key] or key not in _ONE_MODEL_LISTS for key in model}
    return _grid({key: _listed(value) if sweeps[key] else [value] for key, value in model.items()})


def _machines(hardware: Any) -> Iterator[Any]:
    """Sweep the overridden numbers of a profile; lists elsewhere in it are lists by nature."""
    if isinstance(hardware, str):
        return iter([hardware])
    flat = dict(_flatten(hardware))
    return _grid({key: value if _is_sweep(key, value) else [value] for key, value in flat.items()})


def _is_sweep(key: str, value: Any) -> bool:
    steps = [int(step) if step.isdecimal() else step for step in key.split(".")]
    return isinstance(value, list) and bool(value) and is_number(steps)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and "value" not in value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _policies(spec: Any, place: str) -> Iterator[dict[str, Any]]:
    """Sweep the options of a policy that are given as a list though they are none."""
    if isinstance(spec, str):
        spec = {"name": spec}
    cls = policy_class(spec["name"], place)
    constructor = vars(cls).get("__init__", cls.__init__)  # type: ignore[misc]
    hints = get_type_hints(constructor, include_extras=True) if option_parameters(cls) else {}

    def choices(key: str, value: Any) -> list[Any]:
        by_nature = key not in hints or matches(value, hints[key])
        return value if isinstance(value, list) and value and not by_nature else [value]

    return _grid({key: choices(key, value) for key, value in spec.items()})
