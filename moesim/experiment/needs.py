"""What a policy reads of a trace, whether it is there, and how it can be had."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moesim.errors import ConfigError, unknown_name
from moesim.policies.parts import source_needs
from moesim.policies.registry import POLICIES, make_policy
from moesim.policy import Predicted
from moesim.trace import SUFFIX
from moesim.trace.predictors.chosen import ALWAYS, stand_in
from moesim.trace.stats.calibration import EMBEDDING

if TYPE_CHECKING:
    from moesim.experiment.spec import Point
    from moesim.trace import Trace

SCORES = frozenset({"scores", "scores-or-weights"})
"""What a policy needs that goes by the router's scores."""
# By moesim trace calibrate; the latter also where a trace has others.
_LATER = ("activation_matrices", "expert_maps")
_COUNTED = ("activation_frequency", "activation_frequency_decode", "coactivation", *_LATER)
_SHARE = 0.25  # of the requests, in the command that messages name


class Wants(NamedTuple):
    """What a policy asks of the trace and of the workload."""

    needs: frozenset[str] = frozenset()
    prompt_rows: int | None = None  # the most rows of a prefill step that its engine takes; None: any number


def wants_of(point: Point, place: str, entry: str) -> Wants:
    """Name what a run's policy, an ``entry`` of the file, asks for, with predictors that stand in for others."""
    policy, predictors = point.reading
    made = make_policy(policy, entry)
    needs = {n for n in made.needs if not n.startswith("signal:") or stand_in(n, predictors) == n}
    if Predicted in made.listens:  # what answers may be a recorded signal too, which every request must have then
        needs.update(*(_stand_in_needs(source, predictors, place) for source in predictors))
    rows = getattr(made, "prompt_rows", None)
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ConfigError(f"{entry}: prompt_rows: expected a number of at least 1, or None, got {rows!r}; correct the policy")
    return Wants(frozenset(needs), rows)


def check_stand_ins(point: Point, trace: Trace, place: str) -> None:
    """Refuse a predictor that needs a signal the trace does not have, whatever the policy."""
    for source, actual in point.predictors.items():
        signals = [need.removeprefix("signal:") for need in _stand_in_needs(source, point.predictors, place)]
        if not set(signals) <= set(trace.signals):
            raise ConfigError(f"{place}: predictors.{source}: {unknown_name('predictor', actual, (*ALWAYS, *trace.signals))}")


def _stand_in_needs(source: str, predictors: Mapping[str, str], place: str) -> frozenset[str]:
    """Name what the predictor needs that answers in the place of a source. Raises `ConfigError` if it cannot be had."""
    try:
        return source_needs(predictors[source])
    except ConfigError as error:
        raise ConfigError(f"{place}: predictors.{source}: {error}") from None


def lacking(trace: Trace, needs: Iterable[str]) -> list[str]:
    """Name what a policy needs and a trace does not hold at all."""
    has = {"oracle:routing", *(f"signal:{name}" for name in trace.signals), *(f"table:{name}" for name in trace.tables)}
    has |= SCORES if trace.scores is not None else set()
    has |= {"scores-or-weights"} if trace.weights is not None else set()
    return sorted(set(needs) - has)


def served(trace: Trace, label: str) -> list[str]:
    """Say how many policies, with their own options, can run on a trace, and what would serve the others."""
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
    """Say that a trace lacks what a policy needs, and the way out."""
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
    """Signals come from a model's routers and hidden states: a finished trace cannot get them, so another source must answer.

    The one of embeddings is made by calibration where these were recorded.
    """
    known = "".join(f"{unknown_name('signal', name, trace.signals)}; " for name in signals) if trace.signals else ""
    source = signals[0] if len(signals) == 1 else "*"
    recorded = "of this trace" if trace.embeddings is not None else "of one recorded with --keep-embeddings"
    made = f"moesim trace calibrate makes {EMBEDDING} {recorded}; or " if EMBEDDING in signals else ""
    return (
        f"{known}{made}let another source answer, such as one counted from routing: predictors: {{'{source}': coactivation}}, or "
        f"--set 'predictors.{source}=coactivation'"
    )
