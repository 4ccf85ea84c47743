"""Single runs of an experiment: names of their fields, and how lists expand to them.

A `Point` is a run as written, a `RunSpec` the same with everything looked up: it travels to workers, engine, rows and keys. A
new parameter is added to `Point`, one of the workload to `moesim.trace.workload.spec`. Fields in ``zip`` vary together, and
slowest; then model, hardware, trace, transfer, decision, extrapolation, warm-up, predictors, workload, cache, repeat; policies
fastest, so that rows to compare are neighbours.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.core.copies import Copies
from moesim.core.units import as_share, ceil_div, format_size, parse_bytes, slots_of, us_to_ns
from moesim.engine import EngineOptions
from moesim.errors import ConfigError, InputError, unknown_name
from moesim.experiment.config import CacheConfig, Config, TransferConfig, WorkloadConfig, listed, parse_config
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.model import check_chunk, most_chunks
from moesim.hardware.engines import transfer_of
from moesim.hardware.read import flatten, is_number
from moesim.metrics.naming import LABEL, fingerprint, hardware_label, model_label, policy_label, read_policy_label
from moesim.metrics.serving import measures
from moesim.policies.options import Option, options_of
from moesim.policies.registry import code_names, policy_class
from moesim.policies.user_code import foreign
from moesim.serving import RequestFile, ServedWorkload
from moesim.trace.made import no_more_than, trace_label
from moesim.trace.predictors import PredictorSet
from moesim.trace.workload import WorkloadSpec
from moesim.trace.workload.spec import own_scheduler, shortened, size_of

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.metrics import Summary, Value
    from moesim.model import ModelSpec
    from moesim.trace import Trace
    from moesim.trace.workload import Workload


def _setting(
    key: str = "", column: str = "", *, to: Callable[[Any], Any] = lambda value: value, grid: bool = False, inside: str = ""
) -> Any:
    """Make a field: key in a file, column and form in a row, whether it sweeps, its word."""
    return field(metadata={"key": key, "column": column, "to": to, "grid": grid, "inside": inside})


def _one(value: Any) -> Any:
    """Write a mapping so that a list in it is no sweep."""
    return {key: [one] if isinstance(one, list) else one for key, one in value.items()} if isinstance(value, dict) else value


def _json(value: Any) -> str | None:
    return json.dumps(value, sort_keys=True) if value else None


def _short(option: Any) -> Any:
    """Write an option for a row: of tables their source and a hash."""
    tables = isinstance(option, Mapping) and "source" in option
    return {"source": option["source"], "sha256": fingerprint(option)[:16]} if tables else option


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run as written: no field is a list to sweep any more."""

    # model, hardware: as in the file
    model: Any
    hardware: Any
    trace: Any  # name or path, or how to synthesize it
    ratio: float | None = _setting("cache.ratio", "cache_ratio")  # share of all experts that each GPU may cache
    budget_bytes: int | None = _setting("cache.budget", "cache_budget_bytes")  # or the memory that everything must fit into
    workload: Mapping[str, Any] = field(metadata={"inside": "KEY"})  # keyword arguments of `moesim.trace.workload.WorkloadSpec`
    curve: str = _setting("transfer.curve", "transfer_curve", grid=True)
    chunk_bytes: int | None = _setting("transfer.chunk", grid=True)  # largest piece of a transfer
    predictors: Mapping[str, str] = _setting(to=_json, inside="SOURCE")  # prediction sources that another one stands in for
    decision_us: float = _setting(column="decision_ns", to=us_to_ns, grid=True)  # time charged for a decision
    extrapolate: bool = _setting(grid=True)  # whether curves may be read outside of what was measured
    engine_profile: str = _setting("engine", grid=True)  # whose costs: "own" of each policy, "machine", or a name
    warm_up_steps: int | None = _setting(column="warm_up", grid=True)  # steps that count as cold in hit rates
    repeat: int = _setting()  # which of the experiment's repeats; its seeds are those of the first, plus this
    policy: Mapping[str, Any] = field(metadata={"key": "policies"})  # `name` and options
    intervals: bool  # whether to repeat runs at the ends of the intervals of the profile's numbers

    @property
    def setting(self) -> tuple[Any, ...]:
        """All but the policy: two points with the same one compare policies."""
        return tuple(value for name, value in vars(self).items() if name != "policy")

    @property
    def code(self) -> tuple[str, ...]:
        """Names of its code: the policy, and ``package.module:Class`` of its parts and of a scheduler."""
        return (*code_names(self.policy), *own_scheduler(self.workload))

    @property
    def reading(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        return self.policy, self.predictors

    @property
    def share_outside(self) -> float:
        """Share of all experts without room in the cache; 1 for a budget."""
        return 1 - (self.ratio or 0)

    def cache_slots(self, model: ModelSpec) -> int | None:
        """Count the slots of a cache over all layers; None: to be found from the budget."""
        if self.ratio is None:
            return None
        return slots_of(self.ratio, model.n_layers * model.n_experts)

    def written(self) -> dict[str, Any]:
        """Return the keys of an experiment that has this setting alone, without its policies."""
        found: dict[str, Any] = {}
        for name, key in KEYS.items():
            section, _, inside = key.partition(".")
            value = getattr(self, name)
            if inside and (section != "cache" or value is not None):  # a cache has a share or a budget
                found.setdefault(section, {})[inside] = value
            elif not inside and name not in ("policy", "repeat"):
                found[key] = _one(value) if name == "model" else dict(value) if name in MAPPINGS else value
        return found

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for one in fields(self):
            if one.name == "workload":
                row |= self.workload
            elif "to" in one.metadata:
                row[one.metadata["column"] or one.name] = one.metadata["to"](getattr(self, one.name))
        return row


KEYS: Final[Mapping[str, str]] = {one.name: one.metadata.get("key") or one.name for one in fields(Point)}
"""Fields of a point -> keys of an experiment."""
PLAIN: Final = tuple(one.name for one in fields(Point) if one.metadata.get("grid"))
"""Fields that an experiment gives one value or several of, in the order in which sweeps vary them."""
VALUES: Final = ("ratio", "budget_bytes", *PLAIN, "repeat")
"""Fields whose value is a number, a word or nothing."""
MAPPINGS: Final = {one.name: one.metadata["inside"] for one in fields(Point) if one.metadata.get("inside")}
"""Fields that are mappings whose every value may be swept, with the word for their keys."""


SEEDED: Final = ("workload", "trace")
"""Fields of a point that have a seed."""


def seedless(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run and its repeats have in common."""
    common = {name: value for name, value in setting.items() if name != "repeat"}
    for name in SEEDED:
        if isinstance(written := common[name], Mapping):
            common[name] = {key: value for key, value in written.items() if key != "seed"}
    return common


@dataclass(frozen=True)
class Ends:
    """A number of a profile with an interval, and the machines at its ends."""

    key: str
    interval: tuple[float, float]
    machines: tuple[HardwareProfile, HardwareProfile]


@dataclass(frozen=True)
class RunSpec:
    """One run with everything looked up."""

    index: int  # its place in the experiment, from 0
    point: Point  # as written
    # model, hardware, workload: what the names meant
    model: ModelSpec
    hardware: HardwareProfile
    workload: WorkloadSpec
    cache_slots: int | None  # slots of each GPU over all layers; None: to be found from the budget
    policy_name: str  # name with its options, unique within the experiment
    refusal: InputError | None = None  # why it cannot be run: the trace lacks what the policy needs
    prompt_rows: int | None = None  # most rows of a prefill step that the policy's engine takes; None: any number
    file: RequestFile | None = None  # of requests that arrive, which the workload names
    ends: tuple[Ends, ...] = ()  # machines at the ends of the intervals of the profile's numbers, if the experiment asks for them

    def check(self, place: str) -> None:
        if self.point.chunk_bytes is not None:
            check_chunk(self.model, self.point.chunk_bytes, f"{place}: {KEYS['chunk_bytes']}")

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(decision_ns=us_to_ns(self.point.decision_us))

    @property
    def assumes(self) -> bool:
        """Whether the experiment itself adds a time that nobody measured, or tokens that nobody counted."""
        return bool(self.point.decision_us) or (self.file is not None and bool(self.file.assumed))

    def transfer(self, policy: Any) -> Copies:
        return transfer_of(policy, self.model, self.hardware, self.point.curve, self.point.chunk_bytes)

    def in_pieces(self, most: int) -> RunSpec:
        """Return the run with transfers cut into so many pieces at most."""
        if self.point.chunk_bytes is None:
            return self
        larger = max(self.point.chunk_bytes, ceil_div(most_chunks(self.model, 1), most))
        return replace(self, point=replace(self.point, chunk_bytes=larger))

    def own_transfer(self, policy: Any) -> str | None:
        """Name the transfers that belong to the policy, where they are not the experiment's."""
        curve, piece, _ = self.transfer(policy)
        usual = "pinned" if self.point.curve == "own" else self.point.curve
        if (curve, piece) == (usual, self.point.chunk_bytes):
            return None
        return curve + (f" in {format_size(piece)}" if piece else "")

    def costs(self, policy: Any) -> CostModel:
        """Make a cost model, one for each use: it remembers what it was asked for."""
        return CostModel.of(policy, self.model, self.hardware, self.transfer(policy), self.point.extrapolate)

    def sources(self, trace: Trace, workload: Workload) -> PredictorSet:
        return PredictorSet(trace, workload, self.point.predictors, self.workload.seed)

    def metrics(self, found: Summary, workload: Workload) -> dict[str, Value]:
        if isinstance(workload, ServedWorkload):
            row = found.row(warm_up_steps=self.point.warm_up_steps)
            assert found.served is not None
            return row | measures(found.served, workload.scheduler.most_requests, self.workload.limit_seconds)
        return found.row(steps=workload.steps.of_prefill(), warm_up_steps=self.point.warm_up_steps)

    def notes(self) -> list[str]:
        """List changes of the model, and sources that others stand in for."""
        changed = [f"model {label}" for label in self.model.labels]
        engine = self.hardware.machine.get("engine")
        changed += [f"costs of {engine.replace(',', '')}"] if engine else []
        return changed + [f"{source} = {actual}" for source, actual in self.point.predictors.items()]

    def row(self) -> dict[str, Value]:
        """Describe in a row what a run is: everything that was set, by name."""
        options = {key: _short(value) for key, value in self.point.policy.items() if key not in ("name", LABEL)}
        row: dict[str, Value] = {
            "run": self.index,
            "policy": self.policy_name,
            "policy_name": str(self.point.policy["name"]),
            "policy_options": json.dumps(options, sort_keys=True, default=str),
            "model": model_label(self.model),
            "hardware": hardware_label(self.hardware),
            "trace": trace_label(self.point.trace),
        }
        asked = asdict(self.workload)
        by = policy_label(self.workload.scheduler_options) if self.workload.served else None
        return row | self.point.row() | asked | {"requests": _json(asked["requests"]), "scheduler": by}

    def asked(self) -> dict[str, Any]:
        """Return what a run's key hashes in addition to the contents of its inputs."""
        without = ("model", "hardware", "trace", "repeat")
        file = {} if self.file is None else {"file": self.file.sha256}
        return {k: v for k, v in vars(self.point).items() if k not in without} | {"workload": asdict(self.workload)} | file

    @property
    def group(self) -> str:
        """Hash of all that was written but the seeds: a run and its repeats share it."""
        return fingerprint(seedless(vars(self.point)))[:16]


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
        lists = [_zipped_field(config, raw, name, where) for name in names]
        if len({len(one.values) for one in lists}) != 1:
            lengths = ", ".join(f"{name} {len(one.values)}" for name, one in zip(names, lists, strict=True))
            raise ConfigError(f"{where}: expected lists of one length, got {lengths}")
        choices.append([[(one, i) for one in lists] for i in range(len(lists[0].values))])
    if prod(map(len, choices)) > MAX_RUNS:
        raise ConfigError(f"{place}: zip: expected at most {MAX_RUNS} combinations, got more; sweep fewer values")
    for found, _ in (pair for group in choices for pair in group[0]):
        _holder(raw, found)[found.key] = None  # the lists are not copied each time
    for together in product(*choices):
        one = copy.deepcopy(raw)
        for found, i in (pair for group in together for pair in group):
            value = found.values[i]
            _holder(one, found)[found.key] = [value] if (found.holder, found.key) == ((), "policies") else value
        yield parse_config(one, place)


def _holder(raw: dict[str, Any], place: _Field) -> Any:
    holder: Any = raw
    for step in place.holder:
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
    for name, seed in seeds:
        if config.repeat > 1 and isinstance(seed, list):
            raise ConfigError(f"{place}: repeat: expected one {name}, the first of {config.repeat}, got {seed}; remove either")


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
    if not isinstance(trace, Mapping):
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
    if imports or not foreign([spec["name"]]):
        known = options_of(policy_class(spec["name"], place))

    def choices(key: str, value: Any) -> list[Any]:
        swept = isinstance(value, list) and value and not (key in known and known[key].fits(value))
        return value if swept else [value]

    asked = {key: choices(key, value) for key, value in spec.items() if key != LABEL}
    for policy in _grid(asked):
        if LABEL in spec:
            swept = {key: value for key, value in policy.items() if len(asked[key]) > 1}
            policy[LABEL] = policy_label({"name": _label(spec[LABEL], place), **swept})
        yield policy


def _label(text: Any, place: str) -> str:
    """Check the name that a policy has in tables and figures."""
    if not isinstance(text, str) or not text.strip() or not text.isprintable() or len(text) > _LONGEST_LABEL:
        raise ConfigError(f"{place}: label: expected a text of one line, at most {_LONGEST_LABEL} characters, got {text!r}")
    return text


_LONGEST_LABEL: Final = 60
QUICK_DECODE_TOKENS = 4


def quick(config: Config, place: str = "experiment", *, imports: bool = True) -> Config:
    """Take the first setting with all its policies, one batch and a few decode tokens."""
    points = expand(config, place, imports=imports)
    first = points[0]
    workload = shortened(first.workload, QUICK_DECODE_TOKENS)
    # no more synthetic routing than that takes
    trace = no_more_than(first.trace, size_of(workload)) if isinstance(first.trace, Mapping) else first.trace
    small = {**first.written(), "workload": workload, "trace": trace}
    sections = {"workload": WorkloadConfig, "cache": CacheConfig, "transfer": TransferConfig}
    update = {key: sections[key](**value) if key in sections else value for key, value in small.items()}
    policies = [dict(point.policy) for point in points if point.setting == first.setting]
    return config.model_copy(update={**update, "zip": [], "exclude": [], "repeat": 1, "policies": policies})
