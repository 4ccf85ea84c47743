"""One run, said once: what each field of it is called in a file, in a result row and in the engine, and what its key hashes.

A `Point` is a run as written, a `RunSpec` the same with everything looked up: it travels from an experiment to workers, engine,
rows and keys. A parameter that is to be added is added to `Point`, one of the workload to `moesim.trace.workload.spec`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from moesim.core.units import ceil_div, format_size, slots_of, us_to_ns
from moesim.engine import EngineOptions
from moesim.errors import InputError
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.model import check_chunk, most_chunks
from moesim.metrics.naming import fingerprint, hardware_label, model_label
from moesim.trace.made import trace_label
from moesim.trace.predictors import PredictorSet
from moesim.trace.workload import WorkloadSpec

if TYPE_CHECKING:
    from moesim.hardware import HardwareProfile
    from moesim.metrics import Summary, Value
    from moesim.model import ModelSpec
    from moesim.trace import Trace
    from moesim.trace.workload import Workload


def _setting(
    key: str = "", column: str = "", *, to: Callable[[Any], Any] = lambda value: value, grid: bool = False, inside: str = ""
) -> Any:
    """Make a field: key in a file, column and form in a row, whether it sweeps, word for its keys."""
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
    warm_up_steps: int | None = _setting(column="warm_up", grid=True)  # steps that count as cold in hit rates
    repeat: int = _setting()  # which of the experiment's repeats; its seeds are those of the first, plus this
    policy: Mapping[str, Any] = field(metadata={"key": "policies"})  # `name` and options
    intervals: bool  # whether to repeat runs at the ends of the intervals of the profile's numbers

    @property
    def setting(self) -> tuple[Any, ...]:
        """All but the policy: two points with the same one compare policies."""
        return tuple(value for name, value in vars(self).items() if name != "policy")

    @property
    def reading(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Policy and predictors, which decide what signals of a trace are read."""
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
    refusal: InputError | None = None  # why it cannot be carried out: the trace lacks what the policy needs
    prompt_rows: int | None = None  # most rows of a prefill step that the policy's engine takes; None: any number
    ends: tuple[Ends, ...] = ()  # machines at the ends of the intervals of the profile's numbers, if the experiment asks for them

    def check(self, place: str) -> None:
        if self.point.chunk_bytes is not None:
            check_chunk(self.model, self.point.chunk_bytes, f"{place}: {KEYS['chunk_bytes']}")

    @property
    def options(self) -> EngineOptions:
        return EngineOptions(decision_ns=us_to_ns(self.point.decision_us))

    @property
    def assumes(self) -> bool:
        """Whether the experiment itself adds a time that nobody measured."""
        return bool(self.point.decision_us)

    def transfer(self, policy: Any) -> tuple[str, int | None]:
        """Return how weights travel: the policy's own way, or the experiment's."""
        own: tuple[str, int | None] | None = policy.transfer(self.model) if hasattr(policy, "transfer") else None
        return own or (self.point.curve, self.point.chunk_bytes)

    def in_pieces(self, most: int) -> RunSpec:
        """Return the run with transfers cut into so many pieces at most."""
        if self.point.chunk_bytes is None:
            return self
        larger = max(self.point.chunk_bytes, ceil_div(most_chunks(self.model, 1), most))
        return replace(self, point=replace(self.point, chunk_bytes=larger))

    def own_transfer(self, policy: Any) -> str | None:
        """Name the transfers that belong to the policy, where they are not the experiment's."""
        curve, piece = self.transfer(policy)
        if (curve, piece) == (self.point.curve, self.point.chunk_bytes):
            return None
        return curve + (f" in {format_size(piece)}" if piece else "")

    def costs(self, policy: Any) -> CostModel:
        """Make a cost model, one for each use: it remembers what it was asked for."""
        curve, piece = self.transfer(policy)
        return CostModel(self.model, self.hardware, transfer=curve, chunk_bytes=piece, extrapolate=self.point.extrapolate)

    def sources(self, trace: Trace, workload: Workload) -> PredictorSet:
        return PredictorSet(trace, workload, self.point.predictors, self.workload.seed)

    def metrics(self, found: Summary, workload: Workload) -> dict[str, Value]:
        return found.row(steps=workload.steps.of_prefill(), warm_up_steps=self.point.warm_up_steps)

    def notes(self) -> list[str]:
        """List changes of the model, and sources that others stand in for."""
        changed = [f"model {label}" for label in self.model.labels]
        return changed + [f"{source} = {actual}" for source, actual in self.point.predictors.items()]

    def row(self) -> dict[str, Value]:
        """Describe in a row what a run is: everything that was set, by name."""
        options = {key: _short(value) for key, value in self.point.policy.items() if key != "name"}
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
        return row | self.point.row() | asked | {"requests": _json(asked["requests"])}

    def asked(self) -> dict[str, Any]:
        """Return what a run's key hashes in addition to the contents of its inputs."""
        without = ("model", "hardware", "trace", "repeat")
        return {k: v for k, v in vars(self.point).items() if k not in without} | {"workload": asdict(self.workload)}

    @property
    def group(self) -> str:
        """Hash of all that was written but the seeds: a run and its repeats share it."""
        return fingerprint(seedless(vars(self.point)))[:16]
