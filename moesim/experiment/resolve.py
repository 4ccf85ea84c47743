"""Load and check everything an experiment needs, before anything runs or is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from moesim.core.data import noting
from moesim.core.progress import Progress
from moesim.errors import ConfigError, InputError, TraceError, WorkloadError
from moesim.experiment.config import Config, parse_config
from moesim.experiment.routing import (
    Wants,
    check_future,
    check_stand_ins,
    explain,
    fitting,
    for_model,
    lacking,
    read_trace,
    wants_of,
    with_routing,
)
from moesim.experiment.runner import ends_of
from moesim.experiment.store import SmallInputs, code_digest
from moesim.experiment.sweep import Ends, Point, RunSpec, entries_of, expand
from moesim.hardware import load_hardware
from moesim.hardware.engines import MACHINE, OWN, check_engine
from moesim.metrics.naming import fingerprint, hardware_label, model_label, policy_label
from moesim.model import load_model
from moesim.policies.registry import code_names, make_policy
from moesim.policies.user_code import WouldImport, foreign, sources_digest, would_import
from moesim.serving import RequestFile, composed, file_of
from moesim.trace.made import trace_label
from moesim.trace.workload import Workload, WorkloadSpec
from moesim.trace.workload.compose import drawn, select
from moesim.trace.workload.spec import own_scheduler

if TYPE_CHECKING:
    from moesim.core.copies import Copies
    from moesim.hardware import HardwareProfile
    from moesim.model import ModelSpec
    from moesim.trace import Trace


T = TypeVar("T")


class Experiment:
    """All runs of an experiment, with the traces and workloads they share.

    Parameters
    ----------
    config : Config
        The experiment.
    place : str
        The file, for messages.
    imports : bool
        Whether policies and schedulers that are not moesim's own are imported, which runs their code. Without it they are
        listed in ``not_imported``, what they need counts as nothing, and nothing can be run.
    known : dict of str to Trace, optional
        Traces of other experiments, which are not read or made up again; what this one reads is added.
    small : SmallInputs, optional
        Models, and files of machines and parameters, that are not looked for.
    points : sequence of Point, optional
        The runs to resolve; default: all.
    files : dict of str to RequestFile or None, optional
        Files of requests, by the key of `WorkloadSpec.file`, that are not read.

    Attributes
    ----------
    not_imported : dict of str to WouldImport or None
        Policies by name, with their options, and schedulers, and their code, None in a result; empty if they are imported.
    small : SmallInputs
        Those that were looked for, and the models.

    Raises
    ------
    InputError
        If anything the experiment names is missing, damaged, or does not fit together; if no policy can be served. Where some
        can, the runs of the others have a `RunSpec.refusal`.
    """

    def __init__(
        self, config: Config, place: str, *, imports: bool = True, known: dict[str, Trace] | None = None,
        small: SmallInputs | None = None, points: Sequence[Point] | None = None,
        files: dict[str, RequestFile | None] | None = None,
    ) -> None:  # fmt: skip
        if config.trace is None:
            config = with_routing(config, place, imports=imports)
        self.config = config
        self.place = place
        self.not_imported: dict[str, WouldImport | None] = {}
        self._transfers: dict[tuple[str, str, Copies], Copies] = {}
        self._wants: dict[str, Wants] = {}  # a policy is made once, not for each of its settings
        self._models: dict[str, ModelSpec] = {} if small is None else dict(small.models)
        self._machines: dict[str, HardwareProfile] = {}
        self._ends: dict[str, tuple[Ends, ...]] = {}
        self.traces: dict[str, Trace] = {}
        self._known = {} if known is None else known
        self._files = {} if files is None else files
        self._workloads: dict[tuple[str, WorkloadSpec, RequestFile | None, frozenset[str]], Workload] = {}
        entries = entries_of(config, place, imports=imports)
        points = expand(config, place, imports=imports) if points is None else points
        looked_for = small is None  # a result may be read without the code of its runs
        for point in () if imports else points:  # refuses a name that nothing has before routing is made up
            if foreign(code_names(point.policy)) and (label := policy_label(point.policy)) not in self.not_imported:
                self.not_imported[label] = would_import(point.policy, entries[repr(point.policy)]) if looked_for else None
        wants = [self._policy_wants(point, entries[repr(point.policy)]) for point in points]
        for point, wanted in zip(points, wants, strict=True):
            check_future(point, wanted, entries[repr(point.policy)])
        with noting({} if small is None else small.texts) as texts:
            specs = [self._resolve(i, p, wanted) for i, (p, wanted) in enumerate(zip(points, wants, strict=True))]
        self.small = SmallInputs(self._models, texts)
        for spec in () if imports else specs:
            for name in foreign(own_scheduler(spec.point.workload)):
                self.not_imported[name] = would_import(name, f"{place}: workload.scheduler") if looked_for else None
        self._check_unique(specs)
        for spec in specs:
            check_stand_ins(spec.point, self.trace(spec), place)
        self.specs, self._signals = self._served(specs, [wanted.needs for wanted in wants])
        refusals = [spec.refusal for spec in self.specs if spec.refusal is not None]
        if len(refusals) == len(self.specs):
            raise type(refusals[0])(f"{place}: {refusals[0]}")
        with Progress(len(self.specs)) as bar:
            bar.describe("composing workloads")
            for spec in self.specs:
                self.workload(spec)
                bar.advance(1)

    def _policy_wants(self, point: Point, entry: str) -> Wants:
        if policy_label(point.policy) in self.not_imported:
            return Wants()
        return remembered(self._wants, point.reading, lambda: wants_of(point, self.place, entry))

    def _resolve(self, index: int, point: Point, wanted: Wants) -> RunSpec:
        place = self.place
        named = isinstance(point.hardware, Mapping) and "engine" in point.hardware
        own = MACHINE if named else wanted.engine or MACHINE
        engine = own if point.engine_profile == OWN else point.engine_profile
        model = remembered(self._models, point.model, lambda: load_model(point.model, f"{place}: model"))
        costed = [point.hardware, engine]
        machine = remembered(self._machines, costed, lambda: load_hardware(point.hardware, f"{place}: hardware", engine))
        check_engine(machine.machine, point.engine_profile, f"{place}: hardware")
        point = replace(point, trace=for_model(point.trace, model))
        trace = remembered(self.traces, point.trace, lambda: self._read(point.trace))
        check_shape(trace, point.trace, model, place)
        try:
            workload = WorkloadSpec(**point.workload)
            file = remembered(self._files, workload.file, lambda: file_of(workload))
        except WorkloadError as error:
            raise WorkloadError(f"{place}: {error}") from None
        name, ends = policy_label(point.policy), self._ends_of(point, machine, engine)
        slots, rows = point.cache_slots(model), wanted.prompt_rows
        spec = RunSpec(index, point, model, machine, workload, slots, name, ends=ends, prompt_rows=rows, file=file)
        spec.check(place)
        return spec

    def _ends_of(self, point: Point, machine: HardwareProfile, engine: str) -> tuple[Ends, ...]:
        if not point.intervals:
            return ()
        place, costed = f"{self.place}: hardware", [point.hardware, engine]
        return remembered(self._ends, costed, lambda: ends_of(point.hardware, machine, place, engine))

    def _check_unique(self, specs: Sequence[RunSpec]) -> None:
        names: dict[str, str] = {}
        for spec in specs:
            written = json.dumps(spec.point.policy, sort_keys=True, default=str)
            if names.setdefault(spec.policy_name, written) != written:
                raise ConfigError(
                    f"{self.place}: policies: expected distinct policies and labels, got '{spec.policy_name}' twice"
                )
        first = [s.policy_name for s in specs if s.point.setting == specs[0].point.setting]
        for name in dict.fromkeys(first):
            if first.count(name) > 1:
                raise ConfigError(f"{self.place}: policies: expected each policy once, got '{name}' {first.count(name)} times")

    def _served(self, specs: Sequence[RunSpec], needs: Sequence[frozenset[str]]) -> tuple[list[RunSpec], list[frozenset[str]]]:
        """Refuse what traces cannot serve, and find signals that requests need, for all policies."""
        served: list[RunSpec] = []
        short: dict[tuple[str, WorkloadSpec, frozenset[str]], InputError | None] = {}
        signals: dict[tuple[str, WorkloadSpec], frozenset[str]] = {}
        for spec, found in zip(specs, needs, strict=True):
            trace, key = self.trace(spec), (written_key(spec.point.trace), spec.workload)
            own = frozenset(need.removeprefix("signal:") for need in found if need.startswith("signal:"))
            refusal: InputError | None = None
            if missing := lacking(trace, found):
                why = explain(trace, trace_label(spec.point.trace), missing)
                refusal = TraceError(f"policy {spec.policy_name} {why}")
            elif own:
                if (*key, own) not in short:
                    short[*key, own] = _too_few(trace, spec.workload, own)
                refusal = short[*key, own]
            served.append(replace(spec, refusal=refusal))
            signals[key] = signals.get(key, frozenset()) | (own if refusal is None else frozenset())
        return served, [signals[written_key(spec.point.trace), spec.workload] for spec in served]

    def _read(self, written: str | dict[str, Any]) -> Trace:
        return remembered(self._known, written, lambda: read_trace(written, self.place))

    def of(self, specs: Sequence[RunSpec]) -> Experiment:
        """Return an experiment of these runs alone, perhaps on other machines or with other bits."""
        found = copy(self)
        found.specs = [replace(spec, index=i) for i, spec in enumerate(specs)]
        found._signals = [self._signals[spec.index] for spec in specs]
        return found

    @staticmethod
    def joined(runs: Sequence[tuple[Experiment, RunSpec]]) -> Experiment:
        """Return one experiment of runs of several, which all come from one place."""
        found = copy(runs[0][0])
        found.specs = [replace(spec, index=i) for i, (_, spec) in enumerate(runs)]
        found._signals = [experiment.signals(spec) for experiment, spec in runs]
        found.traces = {key: trace for experiment, _ in runs for key, trace in experiment.traces.items()}
        found._workloads = {key: workload for experiment, _ in runs for key, workload in experiment._workloads.items()}
        return found

    def trace(self, spec: RunSpec) -> Trace:
        """Return the trace of a run."""
        return self.traces[written_key(spec.point.trace)]

    def inputs(self) -> dict[str, Any]:
        """Name every input with a sha256 of what was read.

        Returns
        -------
        dict
            ``models``, ``hardware`` and ``traces`` by name, in the order of the experiment; no path of this machine is in it.
            ``requests`` (files of requests that arrive, as they are named), ``policies`` and ``schedulers`` that are not
            moesim's own, if any.
        """
        models, machines, traces, files = {}, {}, {}, {}
        policies: dict[str, Any] = {}
        schedulers: dict[str, Any] = {}
        for spec in self.specs:
            models[model_label(spec.model)] = {"sha256": fingerprint(spec.model.figures()), "source": spec.model.source}
            machines[hardware_label(spec.hardware)] = {
                "sha256": fingerprint(spec.hardware.figures()),
                "labels": list(spec.hardware.labels),
            }
            trace = self.trace(spec)
            traces[trace_label(spec.point.trace)] = {"sha256": trace.digest, "model": trace.model, "label": trace.label}
            if spec.file is not None:
                files[spec.file.name] = {"sha256": spec.file.sha256, "requests": len(spec.file)}
            for name in spec.point.code:
                if name not in policies | schedulers and (digest := sources_digest([name])) is not None:
                    kind = schedulers if name in own_scheduler(spec.point.workload) else policies
                    kind[name] = {"sha256": digest}
        found: dict[str, Any] = {"models": models, "hardware": machines, "traces": traces}
        return found | {k: v for k, v in (("requests", files), ("policies", policies), ("schedulers", schedulers)) if v}

    def imported(self, spec: RunSpec) -> bool:
        """Whether all code of a run is imported, so that it can be tried."""
        return not self.not_imported.keys() & {spec.policy_name, *own_scheduler(spec.point.workload)}

    def transfer(self, spec: RunSpec) -> Copies:
        """Return how weights travel in a run: the experiment's way, or the policy's own."""
        written = spec.transfer(None)
        key = (spec.policy_name, model_label(spec.model), written)
        if key not in self._transfers:
            self._transfers[key] = written
            if spec.policy_name not in self.not_imported:
                with suppress(Exception):  # anybody's code; the run itself will say what is wrong with it
                    self._transfers[key] = spec.transfer(make_policy(spec.point.policy))
        return self._transfers[key]

    def signals(self, spec: RunSpec) -> frozenset[str]:
        """Return the recorded signals that every request must have, for any policy of the workload."""
        return self._signals[spec.index]

    def workload(self, spec: RunSpec) -> Workload:
        """Return the workload of a run; runs that differ in something else share it."""
        return self._composed(spec, self._composed(spec, spec.workload).within(spec.prompt_rows))

    def _composed(self, spec: RunSpec, asked: WorkloadSpec) -> Workload:
        signals = self.signals(spec)
        if not self.imported(spec):
            asked = asked.usual()  # stands in
        key = (written_key(spec.point.trace), asked, spec.file, signals)
        if key not in self._workloads:
            try:
                self._workloads[key] = composed(self.trace(spec), asked, require_signals=signals, file=spec.file)
            except WorkloadError as error:
                raise WorkloadError(f"{self.place}: {error}") from None
        return self._workloads[key]


def read_inputs(raw: Mapping[str, Any], place: str, known: dict[str, Trace], *, progress: bool = True) -> None:
    """Read model, machine and trace of one setting, so that errors come before the first run."""
    point = expand(parse_config({"policies": ["on-demand"], **raw}, place), place)[0]
    if point.trace is None:
        raise ConfigError(f"{place}: trace: expected the routing of every setting, got none; add it")
    model = load_model(point.model, f"{place}: model")
    load_hardware(point.hardware, f"{place}: hardware")
    written = for_model(point.trace, model)
    check_shape(remembered(known, written, lambda: read_trace(written, place, progress=progress)), written, model, place)


def check_shape(trace: Trace, written: str | dict[str, Any], model: ModelSpec, place: str) -> None:
    """Raise `TraceError` if a trace has another shape than a model."""
    wanted = {"layers": model.n_layers, "experts": model.n_experts, "top_k": model.top_k}
    recorded = {"layers": trace.n_layers, "experts": trace.n_experts, "top_k": trace.top_k}
    for what, expected in wanted.items():
        if recorded[what] != expected:
            raise TraceError(
                f"{place}: trace: expected {expected} {what} as model {model.name} has, got {recorded[what]} in "
                f"trace '{trace_label(written)}'; {fitting(model)}, or choose another model"
            )


def _too_few(trace: Trace, workload: WorkloadSpec, signals: frozenset[str]) -> InputError | None:
    """Explain why requests with some signals are too few, if others would do."""

    def look(wanted: Collection[str]) -> object:
        return composed(trace, workload.usual(), require_signals=wanted) if workload.served else select(trace, workload, wanted)

    try:
        look(signals)
    except WorkloadError as error:
        try:
            look(())
        except WorkloadError:
            return None  # which every policy is told
        return error
    return None


def written_key(written: Any) -> str:
    """Return the cache key of a model, machine or trace."""
    return json.dumps(written, sort_keys=True, default=str)


def remembered(known: dict[str, T], written: Any, make: Callable[[], T]) -> T:
    """Return a model, machine or trace by how it is written, made once."""
    key = written_key(written)
    if key not in known:
        known[key] = make()
    return known[key]


def run_keys(experiment: Experiment) -> list[str]:
    """Return the key of every run."""
    hashes: dict[int, str] = {}  # by identity: runs share models and machines

    def content(thing: ModelSpec | HardwareProfile) -> str:
        if id(thing) not in hashes:
            hashes[id(thing)] = fingerprint(thing.figures())
        return hashes[id(thing)]

    used = {spec.point.code for spec in experiment.specs}
    sources = {names: sources_digest(names) for names in used}

    def key(spec: RunSpec) -> str:
        inputs = {
            "code": code_digest(),
            "model": content(spec.model),
            "hardware": content(spec.hardware),
            "trace": experiment.trace(spec).digest,
            "requests": _requests(experiment, spec),
            "policy_source": sources[spec.point.code],
        }
        return fingerprint({**inputs, **spec.asked()})

    return [key(spec) for spec in experiment.specs]


def _requests(experiment: Experiment, spec: RunSpec) -> list[object]:
    """Return what was drawn, which often does not change with the signals that others need."""
    workload = experiment.workload(spec)
    return [list(workload.requests), drawn(experiment.trace(spec), workload, experiment.signals(spec))]
