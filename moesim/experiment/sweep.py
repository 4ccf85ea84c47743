"""From an experiment with lists to single runs: the grid product, in an order that depends on the file alone.

Fields named in ``zip`` vary together, and slowest. Settings vary slowest in the order model, hardware, trace, transfer,
decision, predictors, workload, cache; policies vary fastest, so that the rows to compare stand together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_type_hints

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import Config, WorkloadConfig
from moesim.hardware.schema import is_number
from moesim.policies.base import option_parameters
from moesim.policies.options import matches
from moesim.policies.registry import policy_class

_FIELDS, _SECTIONS = ("model", "hardware", "trace", "decision_us"), ("workload", "cache", "transfer")  # what may be zipped
_ONE_MODEL_LISTS = ("expert_bytes_by_layer",)  # fields of a model whose value is a list


@dataclass(frozen=True)
class Point:
    """One run as written: no field is a list to sweep any more.

    Attributes
    ----------
    model, hardware : str or mapping
        As in the file.
    trace : str or mapping
        Name or path, or how to synthesize it.
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
    trace: Any
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
    return [
        Point(**setting, policy=policy) for one in _zipped(config, place) for setting in _settings(one) for policy in policies
    ]


def _settings(config: Config) -> Iterator[dict[str, Any]]:
    """Give all fields of a point but the policy, by name."""
    budgets = [(None, budget) for budget in _listed(config.cache.budget)]
    settings = product(
        [one for model in _listed(config.model) for one in _models(model)],
        [one for hardware in _listed(config.hardware) for one in _machines(hardware)],
        [one for trace in _listed(config.trace) for one in _traces(trace)],
        _listed(config.transfer.curve),
        _listed(config.transfer.chunk),
        _listed(config.decision_us),
        list(_grid({source: _listed(stand_in) for source, stand_in in config.predictors.items()})),
        list(_workloads(config.workload)),
        budgets if config.cache.ratio is None else [(ratio, None) for ratio in _listed(config.cache.ratio)],
    )
    for model, hardware, trace, curve, chunk, decision, predictors, workload, (ratio, budget) in settings:
        yield {
            "model": model, "hardware": hardware, "trace": trace, "workload": workload, "ratio": ratio, "budget_bytes": budget,
            "curve": curve, "chunk_bytes": chunk, "decision_us": decision, "predictors": predictors,
        }  # fmt: skip


def _zipped(config: Config, place: str) -> Iterator[Config]:
    """Give one experiment for each place of the lists that vary together; their groups multiply."""
    choices = []
    for number, fields in enumerate(config.zip):
        where = f"{place}: zip[{number}]"
        lists = [_field(config, field, where) for field in fields]
        if len({len(values) for values in lists}) != 1:
            lengths = ", ".join(f"{field} {len(values)}" for field, values in zip(fields, lists, strict=True))
            raise ConfigError(f"{where}: expected lists of one length, got {lengths}")
        choices.append([dict(zip(fields, values, strict=True)) for values in zip(*lists, strict=True)])
    for together in product(*choices):
        one = config
        for field, value in (pair for group in together for pair in group.items()):
            section, _, key = field.rpartition(".")
            changed = {key: value} if not section else {section: getattr(one, section).model_copy(update={key: value})}
            one = one.model_copy(update=changed)
        yield one


def _field(config: Config, field: str, where: str) -> list[Any]:
    section, _, key = field.rpartition(".")
    inside = [f"{part}.{name}" for part in _SECTIONS for name in type(getattr(config, part)).model_fields]
    if field not in (*_FIELDS, *inside):
        raise ConfigError(f"{where}: {unknown_name('field', field, [*_FIELDS, *inside])}")
    value = getattr(getattr(config, section) if section else config, key)
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {field}: expected a list, got {value!r}")
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _grid(choices: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _workloads(workload: WorkloadConfig) -> Iterator[dict[str, Any]]:
    return _grid({name: _listed(getattr(workload, name)) for name in WorkloadConfig.model_fields})


def _traces(trace: Any) -> Iterator[Any]:
    if isinstance(trace, str):
        return iter([trace])
    return _grid({key: _listed(value) for key, value in trace.items()})


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
