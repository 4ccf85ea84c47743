"""The routing of an experiment: its trace, or one that fits, and what policies read of it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.core.progress import Progress
from moesim.core.text import note
from moesim.errors import ConfigError, TraceError, unknown_name
from moesim.experiment.config import Config, WorkloadConfig, listed, parse_config, served_by
from moesim.experiment.sweep import each_model, entries_of, expand
from moesim.model import load_model
from moesim.model.load import model_names
from moesim.policies.parts import source_needs
from moesim.policies.registry import POLICIES, code_names, make_policy
from moesim.policies.user_code import foreign
from moesim.policy import Predicted
from moesim.trace import SUFFIX, Trace, find_trace, trace_names
from moesim.trace.format import read_facts
from moesim.trace.made import ASSUMED, EVEN, MADE, MAX_TOKENS, ROUTING, read_made
from moesim.trace.predictors import ALWAYS, stand_in
from moesim.trace.stats.calibration import EMBEDDING
from moesim.trace.workload.spec import ANSWER, LEAST, PROMPT, size_of

if TYPE_CHECKING:
    from moesim.experiment.sweep import Point
    from moesim.model import ModelSpec
    from moesim.trace.synthesis.lift import Lift
    from moesim.trace.workload import Workload


GIVEN = "given:"
"""How the name of a trace begins that came from Python as an object."""


def name_of_given(trace: Trace) -> str:
    """Name a trace by its content."""
    return f"{GIVEN}{trace.digest[:16]}"


def read_trace(written: str | Mapping[str, Any], place: str, *, progress: bool = True) -> Trace:
    """Read a trace, or make one."""
    if isinstance(written, str):
        if written.startswith(GIVEN):
            raise TraceError(f"{place}: trace: expected the object {written} from Python, got none; run it from Python again")
        try:
            path = find_trace(written)
        except TraceError as error:
            raise TraceError(f"{place}: trace: {error}") from None
        return Trace.read(path)
    from moesim.trace.synthesis import synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.lift import even, parameters_for

    made = read_made(written, place)
    if made.synthesize in (ASSUMED, EVEN) and made.shape is None:
        raise ConfigError(f"{place}: trace.shape: expected layers x experts x top_k such as 48x128x8, got none; add it")
    try:
        if made.synthesize == EVEN:
            return even(made)
        with Progress(made.n_tokens, enabled=progress) as bar:
            bar.describe("making up assumed routing" if made.synthesize == ASSUMED else f"making up routing of {made.synthesize}")
            return synthesize(
                parameters_for(made),
                n_requests=made.requests,
                n_prompt=made.prompt,
                n_decode=made.decode,
                seed=made.seed,
                scores=made.scores,
                progress=bar.advance,
            )
    except ConfigError as error:
        raise ConfigError(f"{place}: trace: {error}") from None


SCORES = frozenset({"scores", "scores-or-weights"})
"""What a policy needs that goes by the router's scores."""
# By moesim trace calibrate; the latter also where a trace has others.
_LATER = ("activation_matrices", "expert_maps")
_COUNTED = ("activation_frequency", "activation_frequency_decode", "coactivation", *_LATER)
_SHARE = 0.25  # of the requests, in the command that messages name


FUTURE = "oracle:routing"  # the need of policies that read it


class Wants(NamedTuple):
    """Needs of a policy from the trace and the workload."""

    needs: frozenset[str] = frozenset()
    prompt_rows: int | None = None  # the most rows of a prefill step that its engine takes; None: any number
    engine: str = ""  # the engine whose costs it has; empty: the machine's


def wants_of(point: Point, place: str, entry: str) -> Wants:
    """Return what the policy of a run, an ``entry`` of the file, asks for."""
    policy, predictors = point.reading
    made = make_policy(policy, entry)
    needs = {n for n in made.needs if not n.startswith("signal:") or stand_in(n, predictors) == n}
    if Predicted in made.listens:  # what answers may be a recorded signal too, which every request must have then
        needs.update(*(_stand_in_needs(source, predictors, place) for source in predictors))
    rows = getattr(made, "prompt_rows", None)
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ConfigError(f"{entry}: prompt_rows: expected a number of at least 1, or None, got {rows!r}; correct the policy")
    engine = getattr(made, "engine", "")
    if not isinstance(engine, str):
        raise ConfigError(f"{entry}: engine: expected the name of an engine, or nothing, got {engine!r}; correct the policy")
    return Wants(frozenset(needs), rows, engine)


def check_future(point: Point, wanted: Wants, entry: str) -> None:
    """Raise `ConfigError` if a policy needs the future of a workload whose requests arrive, which nobody knows."""
    asked = point.workload
    if FUTURE in wanted.needs and (asked["arrivals"] is not None or asked["closed"] is not None):
        others = ", ".join(name for name in POLICIES if FUTURE in make_policy(name).needs)
        raise ConfigError(
            f"{entry}: {point.policy['name']}: expected a policy that does not need the future, unknown where requests arrive, "
            f"got an oracle; take lru or any other but {others}"
        )


def check_stand_ins(point: Point, trace: Trace, place: str) -> None:
    """Refuse a predictor that needs a signal the trace does not have, whatever the policy."""
    for source, actual in point.predictors.items():
        signals = [need.removeprefix("signal:") for need in _stand_in_needs(source, point.predictors, place)]
        if not set(signals) <= set(trace.signals):
            raise ConfigError(f"{place}: predictors.{source}: {unknown_name('predictor', actual, (*ALWAYS, *trace.signals))}")


def _stand_in_needs(source: str, predictors: Mapping[str, str], place: str) -> frozenset[str]:
    """Name what the predictor in a source's place needs; without one, raise `ConfigError`."""
    try:
        return source_needs(predictors[source])
    except ConfigError as error:
        raise ConfigError(f"{place}: predictors.{source}: {error}") from None


def lacking(trace: Trace, needs: Iterable[str]) -> list[str]:
    """Name what a policy needs and a trace does not hold at all."""
    has = {FUTURE, *(f"signal:{name}" for name in trace.signals), *(f"table:{name}" for name in trace.tables)}
    has |= SCORES if trace.scores is not None else set()
    has |= {"scores-or-weights"} if trace.weights is not None else set()
    return sorted(set(needs) - has)


def served(trace: Trace, label: str) -> list[str]:
    """Describe how many policies a trace can serve itself, and what serves the others."""
    short = {name: missing for name in POLICIES if (missing := lacking(trace, make_policy(name).needs))}
    lines = [f"serves {len(POLICIES) - len(short)} of {len(POLICIES)} policies"]
    for of_signals in (False, True):  # tables and scores by a command, signals by another source
        needs = {name: [one for one in missing if one.startswith("signal:") == of_signals] for name, missing in short.items()}
        names = [name for name, missing in needs.items() if missing]
        if names:
            every = sorted({one for missing in needs.values() for one in missing})
            lines.append(f"{', '.join(names)}: {explain(trace, label, every)}")
    return lines


def explain(trace: Trace, label: str, missing: Collection[str]) -> str:
    """Explain that a trace lacks what a policy needs, and the way out."""
    signals = [need.removeprefix("signal:") for need in missing if need.startswith("signal:")]
    tables = [need.removeprefix("table:") for need in missing if need.startswith("table:")]
    ways = [_by_command(trace, label, tables, set(SCORES.intersection(missing)))] if len(signals) < len(missing) else []
    ways += [_signals_remedy(trace, signals)] if signals else []
    return f"needs {', '.join(missing)}; trace '{label}' has none; {'; '.join(ways)}"


def _by_command(trace: Trace, label: str, tables: Collection[str], scores: Collection[str]) -> str:
    """Name the command that adds tables and scores to a trace, or say why none can."""
    if "scores" in scores and trace.weights is not None:
        return "choose a trace with the scores of all experts: moesim trace record --scores, or scores: true of a synthetic one"
    if not (tables or scores) or not set(tables) <= set(_COUNTED):
        return "choose a trace that has it"
    if tables and trace.tables and not set(tables) <= set(_LATER):
        return "what its tables were counted from has nothing of the kind; choose another trace"
    ends = " --hold-back ends" if trace.n_requests < 2 else ""
    options = [f"--share {_SHARE:g}{ends}"] if tables else []
    what = ["count it from tokens that are then left out"] if tables else []
    out = Path(label).stem + ("-calibrated" if tables else "")
    if scores:
        options.append(f"--{'scores' if 'scores' in scores else 'weights'} uniform")
        what.append("make up weights that nobody recorded")
        out += "-uniform"
    command = f"moesim trace calibrate {shlex.quote(label)} {' '.join(options)} --out {shlex.quote(out + SUFFIX)}"
    return f"{' and '.join(what)}: {command}"


def _signals_remedy(trace: Trace, signals: Sequence[str]) -> str:
    """Name another source: a finished trace cannot get signals, but for those of embeddings."""
    known = "".join(f"{unknown_name('signal', name, trace.signals)}; " for name in signals) if trace.signals else ""
    source = signals[0] if len(signals) == 1 else "*"
    recorded = "of this trace" if trace.embeddings is not None else "of one recorded with --keep-embeddings"
    made = f"moesim trace calibrate makes {EMBEDDING} {recorded}; or " if EMBEDDING in signals else ""
    return (
        f"{known}{made}let another source answer, such as one counted from routing: predictors: {{'{source}': coactivation}}, or "
        f"--set 'predictors.{source}=coactivation'"
    )


_SIGNALS = frozenset({"signal:gate_next1", "signal:gate_next2", "signal:gate_next3", "signal:residual"})
"""Signals of routing that is made up; a policy that reads others needs a recorded trace."""
_SHAPE = ("n_layers", "n_experts", "top_k")
_LEAST = 16
"""Requests that are made up at least, and twice as many as a workload takes: other seeds draw others."""
_TOKENS = 64  # of a prompt and of a decode whose length is left to the trace
_ORIGINS = ("recorded", "miniature", "synthetic")  # what is taken first


def shape_of(what: ModelSpec | Trace) -> str:
    """Write the shape of a model's routing, or of a trace.

    >>> from moesim.model import load_model
    >>> shape_of(load_model("mixtral-8x7b"))
    '32 layers of 8 experts, top 2'
    """
    return f"{what.n_layers} layers of {what.n_experts} experts, top {what.top_k}"


def fits(trace: Trace, model: ModelSpec) -> bool:
    """Whether a trace has the shape of a model's routing."""
    return all(getattr(trace, name) == getattr(model, name) for name in _SHAPE)


def traces_of_shape(model: ModelSpec) -> Iterator[tuple[str, Trace]]:
    """Yield traces that fit a model: its own first, then recordings, miniatures, synthetic ones."""
    found = []
    for name in trace_names():
        with suppress(TraceError):  # damaged, or being written: it is not asked for by name
            path = find_trace(name)
            if _may_fit(path, model) and fits(trace := Trace.read(path, verify=False), model):
                own = is_of(trace, model)
                found.append((not own, _ORIGINS.index(trace.origin), name, trace))
    for *_, name, trace in sorted(found, key=lambda one: one[:3]):
        yield name, trace


def is_of(trace: Trace, model: ModelSpec) -> bool:
    """Whether a trace is of a model, or of one with the same sizes."""
    name = str(trace.header.get("miniature_of", trace.model))
    return name == model.name or (name in model_names() and _same_sizes(load_model(name), model))


def _may_fit(path: Path, model: ModelSpec) -> bool:
    """Whether a file's header has a model's shape; arrays take most of a second to unpack."""
    facts = {} if path.is_dir() else read_facts(path)
    return all(facts.get(name, wanted) == wanted for name in _SHAPE for wanted in (getattr(model, name),))


def fitted_parameters(model: ModelSpec) -> str | None:
    """Name the shipped parameters of a model, or of one with the same sizes; None if there are none."""
    from moesim.trace.synthesis import parameter_names  # SciPy takes most of a second to import

    return next((name for name in parameter_names() if _same_sizes(load_model(name), model)), None)


def _same_sizes(one: ModelSpec, other: ModelSpec) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in (*_SHAPE, "hidden", "expert_intermediate"))


def lift_to_assume(model: ModelSpec, hit_rate: str | None = None, place: str = "--hit-rate") -> Lift:
    """Return the lift of a model that nobody recorded: of a counted hit rate such as ``61%@16``, or by the law."""
    from moesim.trace.synthesis.lift import counted, expected

    if hit_rate is None:
        return expected(model.name, model.n_experts)
    rate, slots = read_hit_rate(hit_rate, place)
    if not slots < model.n_experts:
        raise ConfigError(f"{place}: expected fewer slots than the {model.n_experts} experts of a layer, got {slots}")
    try:
        lift = counted(rate, slots, model.n_experts)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    least, most = math.ceil(1.5 * model.top_k), model.n_experts // 2
    why = "" if least <= slots <= most else f"; sizes from {least} to {most} are less uncertain"
    return lift._replace(why=lift.why + why)


def read_hit_rate(text: str, place: str) -> tuple[float, int]:
    """Read an LRU hit rate with the slots of each layer at which it was counted.

    >>> read_hit_rate("61%@16", "--hit-rate")
    (0.61, 16)
    """
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,9})?|\.\d{1,9})\s*(%?)\s*@\s*(\d{1,6})\s*", text)
    rate = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if found is None or not 0 < rate < 1 or not int(found[3]):
        raise ConfigError(f"{place}: expected a hit rate and the slots of each layer, such as 61%@16 or 0.61@16, got {text!r}")
    return rate, int(found[3])


def for_model(written: Any, model: ModelSpec) -> Any:
    """Complete assumed or even routing by a model's shape and the lift to expect of it."""
    if not isinstance(written, Mapping) or written.get(MADE) not in (ASSUMED, EVEN):
        return written
    found = {"shape": f"{model.n_layers}x{model.n_experts}x{model.top_k}", **written}
    if written[MADE] == ASSUMED and written.get("lift") is None and written.get("hit_rate") is None:
        found["lift"] = lift_to_assume(model).middle
    return found


def routing_labels(trace: Trace, workload: Workload) -> list[str]:
    """Return the source labels of a run's routing; none where it makes no difference."""
    if trace.model.startswith(ROUTING[ASSUMED]):
        return ["assumed"]
    if trace.model == ROUTING[EVEN]:
        return ["assumed"] if any(workload.steps.of_prefill()) else []
    return [trace.label]


def routing_notes(trace: Trace, workload: Workload, model: ModelSpec) -> list[str]:
    """State in a few words whose routing a run has, where it is not a recording of the model."""
    if trace.model == ROUTING[EVEN]:
        return ["prompts use experts evenly" if any(workload.steps.of_prefill()) else "no routing assumed"]
    if trace.origin == "synthetic":
        return [trace.model if trace.model.startswith(ROUTING[ASSUMED]) else f"synthetic routing of {trace.model}"]
    if trace.origin == "miniature":
        of = trace.header.get("miniature_of", model.name)
        return ["miniature" + (f" of {of}" if of != model.name else "")]
    return [f"routing of {trace.model}"] if trace.model != model.name else []


def choose_trace(
    model: ModelSpec,
    sizes: Mapping[str, int | bool],
    *,
    signals: bool = False,
    fixed: bool = False,
    hit_rate: str | None = None,
    ends: bool = True,
) -> tuple[str | dict[str, Any], str]:
    """Choose routing for a model: recorded, fitted to its statistics, or assumed, which is swept over a range."""
    if hit_rate is None:
        for name, trace in traces_of_shape(model):
            if signals or (trace.origin == "recorded" and is_of(trace, model)):
                what = {"miniature": "a miniature in the shape of ", "synthetic": "synthetic routing of "}.get(trace.origin, "")
                of = trace.header.get("miniature_of", trace.model) if trace.origin == "miniature" else trace.model
                why = "" if trace.origin == "recorded" else "; it has the signals that are asked for, not the model's hit rates"
                return name, f"trace {name}, routing of {what}{of}; it fits {model.name}: {shape_of(model)}{why}"
        if (parameters := fitted_parameters(model)) is not None:
            written = {MADE: parameters, **sizes}
            return written, f"trace {_yaml(written)}, synthetic, with the statistics of {parameters}"
    if fixed:
        plain = {MADE: EVEN, **{key: value for key, value in sizes.items() if key != "scores"}}
        said = "decoding one row at a time does not depend on routing with these placements, and none is assumed"
        return plain, said + ("; a prompt is assumed to use experts evenly" if sizes["prompt"] else "")
    lift = lift_to_assume(model, hit_rate)
    lifts = list(dict.fromkeys((lift.middle, lift.low, lift.high)))
    runs = f"{len(lifts)} runs for each setting" if ends else "the middle lift alone"
    written = {MADE: ASSUMED, "lift": lifts if ends else lift.middle, **sizes}
    return written, f"assumed routing, {runs}: no recorded one fits {model.name}; LRU lift {lift.why}"


def choose_traces(
    raw: dict[str, Any], place: str, *, hit_rate: str | None = None, imports: bool = True, ends: bool = True
) -> list[str]:
    """Set the traces of an experiment without one; model and trace vary together if they differ."""
    config = parse_config({**raw, "trace": "to be chosen"}, place)
    models = [one for model in listed(config.model) for one in each_model(model)]
    sizes = _sizes(config.workload)
    signals, fixed = _asked_of_routing(config, place, imports)
    found = [
        choose_trace(load_model(model, f"{place}: model"), sizes, signals=signals, fixed=fixed, hit_rate=hit_rate, ends=ends)
        for model in models
    ]
    traces = [written for written, _ in found]
    if all(written == traces[0] for written in traces):
        raw["trace"] = traces[0]
    else:
        raw |= {"model": models, "trace": traces, "zip": [*config.zip, ["model", "trace"]]}
    return list(dict.fromkeys(why for _, why in found))


def with_routing(config: Config, place: str, *, imports: bool = True, ends: bool = True) -> Config:
    """Choose the routing of an experiment without a trace, and report which; without `ends` at the middle lift alone."""
    raw = config.model_dump(mode="json", exclude_unset=True)
    for line in choose_traces(raw, place, imports=imports, ends=ends):
        note(line)
    return parse_config(raw, place)


def _asked_of_routing(config: Config, place: str, imports: bool) -> tuple[bool, bool]:
    """Whether policies read signals that only recordings have, and whether decoding depends on no routing at all."""
    needs: set[str] = set()
    seen: set[str] = set()
    fixed = served_by(config.workload) is None and all(rows == 1 for rows in listed(config.workload.batch_size))
    entries = entries_of(config, place, imports=imports)
    for point in expand(config, place, imports=imports):
        written, entry = repr(point.reading), entries[repr(point.policy)]
        if written in seen or (not imports and foreign(code_names(point.policy))):
            continue
        seen.add(written)
        wanted = wants_of(point, place, entry)
        check_future(point, wanted, entry)
        needs |= wanted.needs
        fixed = fixed and bool(getattr(make_policy(point.policy, entry), "routing_free", False))
    return any(need.startswith("signal:") and need not in _SIGNALS for need in needs), fixed


def _sizes(workload: WorkloadConfig) -> dict[str, int | bool]:
    """Requests, and tokens of each, that suffice for every workload of a sweep."""
    served = served_by(workload) is not None
    usual = {"prompt_tokens": PROMPT, "answer_tokens": ANSWER} if served else {}
    asked: dict[str, int | None] = {
        name: max(usual.get(name, _TOKENS) if value is None else int(value) for value in listed(getattr(workload, name)))
        for name in LEAST
    }
    largest = size_of(asked if served else asked | {"closed": None})
    tokens = (largest.prompt or 0) + (largest.decode or 0)
    requests = max(_LEAST, 2 * largest.requests)
    if requests * tokens > MAX_TOKENS:
        requests = largest.requests
    return {"requests": requests, "prompt": largest.prompt or 0, "decode": largest.decode or 0, "scores": True}


def fitting(model: ModelSpec) -> str:
    """Name the routing that fits a model, as the remedy of a message."""
    for name, _ in traces_of_shape(model):
        return f"choose one of that shape, such as {name}"
    made = {MADE: fitted_parameters(model) or ASSUMED, "requests": 8, "prompt": 64, "decode": 64}
    return f"make one of that shape up: trace: {_yaml(made)}"


def _yaml(written: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {str(value).lower() if value is True else value}" for key, value in written.items()) + "}"
