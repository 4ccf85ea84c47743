"""From an experiment with lists to single runs: the grid product, in an order that depends on the file alone.

Fields named in ``zip`` vary together, and slowest. Settings vary slowest in the order model, hardware, trace, transfer,
decision, extrapolation, warm-up, predictors, workload, cache, repeat; policies vary fastest, so that the rows to compare stand
together. Combinations that ``exclude`` describes are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from moesim.core.units import as_share, parse_bytes
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import CacheConfig, Config, TransferConfig, WorkloadConfig, listed, parse_config
from moesim.experiment.spec import KEYS, MAPPINGS, PLAIN, SEEDED, VALUES, Point
from moesim.hardware.read import flatten, is_number
from moesim.metrics.naming import policy_label, read_policy_label
from moesim.policies.options import Option, options_of
from moesim.policies.registry import policy_class
from moesim.policies.user_code import foreign
from moesim.trace.made import no_more_than
from moesim.trace.workload.spec import shortened, size_of

MAX_RUNS = 100_000
"""Of an experiment: more would take weeks, and the memory to write them down."""
_WHOLE = ("model", "hardware", "trace", "policies", *(KEYS[name] for name in PLAIN if KEYS[name] in Config.model_fields))
_SECTIONS = ("workload", "cache", "transfer")
_OPEN = ("model", "hardware", "trace", *(name for name in MAPPINGS if name not in _SECTIONS))
"""Mappings whose keys are not known here."""


class _Field(NamedTuple):
    holder: tuple[str, ...]  # keys of the mapping
    key: str
    values: list[Any]


def zipped(config: Config, place: str) -> Iterator[Config]:
    """Return one experiment for each place of the lists that vary together; groups multiply."""
    if not config.zip:
        yield config
        return
    raw = config.model_dump(mode="python", exclude_unset=True)
    raw["zip"] = []
    choices, named = [], set[str]()
    for number, names in enumerate(config.zip):
        where = f"{place}: zip[{number}]"
        for name in names:
            if name in named:
                raise ConfigError(f"{where}: expected each field once, got {name} again; remove one")
            named.add(name)
        fields = [_zipped_field(config, raw, name, where) for name in names]
        if len({len(field.values) for field in fields}) != 1:
            lengths = ", ".join(f"{name} {len(field.values)}" for name, field in zip(names, fields, strict=True))
            raise ConfigError(f"{where}: expected lists of one length, got {lengths}")
        choices.append([[(field, i) for field in fields] for i in range(len(fields[0].values))])
    if prod(map(len, choices)) > MAX_RUNS:
        raise ConfigError(f"{place}: zip: expected at most {MAX_RUNS} combinations, got more; sweep fewer values")
    for field, _ in (pair for group in choices for pair in group[0]):
        _holder(raw, field)[field.key] = None  # the lists are not copied each time
    for together in product(*choices):
        one = copy.deepcopy(raw)
        for field, i in (pair for group in together for pair in group):
            value = field.values[i]
            _holder(one, field)[field.key] = [value] if (field.holder, field.key) == ((), "policies") else value
        yield parse_config(one, place)


def _holder(raw: dict[str, Any], field: _Field) -> Any:
    holder: Any = raw
    for step in field.holder:
        holder = holder[step]
    return holder


def _zipped_field(config: Config, raw: dict[str, Any], name: str, where: str) -> _Field:
    known = [*_WHOLE, *(f"{part}.{key}" for part in _SECTIONS for key in type(getattr(config, part)).model_fields)]
    section, _, key = name.partition(".")
    if name not in known and not (key and section in _OPEN):
        raise ConfigError(f"{where}: {unknown_name('field', name, [*known, *(f'{part}.KEY' for part in _OPEN)])}")
    holder, last = _place(raw, section, key) if key else ((), name)
    inside: Any = raw
    for step in holder:
        inside = inside.get(step) if isinstance(inside, dict) else None
    value = inside.get(last) if isinstance(inside, dict) else None
    if value is None and name in known:  # not given: its default is no list, which the message shows
        value = getattr(getattr(config, section), key) if key else getattr(config, name)
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {name}: expected a list, got {value!r}; give it one, or remove it from zip")
    return _Field(holder, last, value)


def _place(raw: dict[str, Any], section: str, key: str) -> tuple[tuple[str, ...], str]:
    """Return the mapping that holds a key, and its name there: ``a.b`` is one key or two."""
    inside = raw.get(section)
    if isinstance(inside, dict) and key in inside:
        return (section,), key
    *above, last = key.split(".")
    return (section, *above), last


_ONE = {KEYS[name]: name for name in VALUES}
_NAMED = {"model": "base", "hardware": "base", "trace": "synthesize", "policies": "name"}
_SIZES = tuple(key for key, name in _ONE.items() if name.endswith("_bytes"))
_MISSING = object()


class Excluded:
    """The combinations that ``exclude`` leaves out."""

    def __init__(self, rules: Sequence[Mapping[str, Any]], place: str) -> None:
        self._rules = [
            {key: _wanted_values(key, value, f"{place}: exclude[{i}]") for key, value in rule.items()}
            for i, rule in enumerate(rules)
        ]
        self._place = place
        self._used = [False] * len(rules)

    def covers(self, point: Point) -> bool:
        found = False
        for i, rule in enumerate(self._rules):
            if all(_fits(point, key, values) for key, values in rule.items()):
                found = self._used[i] = True
        return found

    def check_used(self) -> None:
        """Refuse a rule that fitted no point, for it is a slip."""
        for i, used in enumerate(self._used):
            if not used:
                rule = ", ".join(f"{key}: {' or '.join(str(v) for v in values)}" for key, values in self._rules[i].items())
                raise ConfigError(
                    f"{self._place}: exclude[{i}]: expected a combination of the grid, got {rule}; "
                    "mend it, or give --set 'exclude=[]'"
                )


def _wanted_values(key: str, value: Any, place: str) -> list[Any]:
    section, _, inside = key.partition(".")
    if key not in _ONE and key not in _NAMED and not (inside and section in (*_NAMED, *MAPPINGS)):
        known = [*_NAMED, *_ONE, *(f"{name}.{word}" for name, word in MAPPINGS.items()), *(f"{name}.KEY" for name in _NAMED)]
        raise ConfigError(f"{place}: {unknown_name('field', key, known)}")
    values = value if isinstance(value, list) else [value]
    if key == "cache.ratio":
        return [as_share(v) for v in values]
    return [parse_bytes(v, f"{place}: {key}") if isinstance(v, str) and key in _SIZES else v for v in values]


def _fits(point: Point, key: str, values: Sequence[Any]) -> bool:
    if key in _ONE:
        return any(_same(getattr(point, _ONE[key]), wanted) for wanted in values)
    section, _, inside = key.partition(".")
    written: Any = point.policy if section == "policies" else getattr(point, section)
    if inside:
        value = written.get(inside, _MISSING) if isinstance(written, Mapping) else _MISSING
        return any(_same(value, wanted) for wanted in values)
    names = [written]
    if isinstance(written, Mapping):
        names.append(written[_NAMED[section]])
    if section == "policies":
        names.append(policy_label(written))
    return any(name == wanted for name in names for wanted in values)


def _same(value: Any, wanted: Any) -> bool:
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)  # YAML's 1 is not its true


_ONE_MODEL_LISTS = ("expert_bytes_by_layer",)  # fields of a model whose value is a list


def expand(config: Config, place: str, *, imports: bool = True) -> list[Point]:
    """Return all runs of an experiment."""
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
    """Return the first place in the file of each policy of a sweep, by its ``repr``."""
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
    try:
        yield
    except _TooManyError:
        raise ConfigError(f"{place}: expected at most {MAX_RUNS} combinations, got more; sweep fewer values") from None


def _check_size(n: int) -> None:
    if n > MAX_RUNS:
        raise _TooManyError


def _settings(config: Config, place: str) -> Iterator[dict[str, Any]]:
    _check_one_seed(config, place)
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
            "repeat": range(config.repeat),
        }
    )
    for setting in grid:
        yield _reseeded({**setting.pop("cache"), **setting})


def _check_one_seed(config: Config, place: str) -> None:
    seeds: list[tuple[str, Any]] = [("workload.seed", config.workload.seed)]
    seeds += [("trace.seed", trace.get("seed")) for trace in listed(config.trace) if isinstance(trace, Mapping)]
    for field, seed in seeds:
        if config.repeat > 1 and isinstance(seed, list):
            raise ConfigError(f"{place}: repeat: expected one {field}, the first of {config.repeat}, got {seed}; remove either")


def _reseeded(setting: dict[str, Any]) -> dict[str, Any]:
    """Draw other requests for a repeat, and other routing where it is made up."""
    for name in SEEDED if setting["repeat"] else ():
        if isinstance(written := setting[name], Mapping):
            setting[name] = {**written, "seed": written.get("seed", 0) + setting["repeat"]}
    return setting


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
    """Return every model that a name, or a mapping with lists, stands for."""
    if isinstance(model, str):
        return iter([model])
    nested = {key: isinstance(value, list) and any(isinstance(v, list) for v in value) for key, value in model.items()}
    sweeps = {key: nested[key] or key not in _ONE_MODEL_LISTS for key in model}
    return _grid({key: listed(value) if sweeps[key] else [value] for key, value in model.items()})


def each_machine(config: Config) -> Iterator[Any]:
    """Yield machines with swept overrides; other lists in them are lists by nature."""
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
    """Yield a policy for each value of options that are given as a list and are none."""
    if isinstance(spec, str):
        spec = read_policy_label(spec, place)
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ConfigError(f"{place}: expected the name of a policy, or a mapping with the key name, got {spec!r}")
    known: Mapping[str, Option] = {}
    if imports or not foreign(spec["name"]):
        known = options_of(policy_class(spec["name"], place))

    def choices(key: str, value: Any) -> list[Any]:
        swept = isinstance(value, list) and value and not (key in known and known[key].fits(value))
        return value if swept else [value]

    return _grid({key: choices(key, value) for key, value in spec.items()})


QUICK_DECODE_TOKENS = 4


def quick(config: Config, place: str = "experiment", *, imports: bool = True) -> Config:
    """Take the first setting with all its policies, one batch and a few decode tokens."""
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
