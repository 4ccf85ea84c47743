"""Run interventions next to the exact model, window by window, and put damage and fidelity into rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fidelity.calibration import Calibration
from fidelity.intervened import Intervened, RoutingHooks
from fidelity.interventions import Daop, Defer, Intervention, Skip
from fidelity.settlement import Ledger
from moesim.core.progress import Progress

RATIOS = (0.25, 0.375, 0.5, 0.75)
SKIPPED = (0.1, 0.25, 0.5, 0.75, 1.0)
DEFERRED = (1, 2, 4)
FIRST_PREDICTED = 5
BATCH_TOKENS = 2048
RESAMPLES = 4000
ALL = "all"


@dataclass(frozen=True)
class Case:
    """An intervention at one strength.

    Attributes
    ----------
    series : str
        What is done; cases of one series differ in strength.
    strength : float
        Cache ratio, or for skips the share of the experts but the first that is skipped on calibration text.
    intervention : Intervention
    """

    series: str
    strength: float
    intervention: Intervention


@dataclass
class Outcome:
    """What one case did to the windows of one kind of text; lists have an entry a window, in nats or shares of tokens."""

    nll: list[float]
    kl: list[float]
    agreement: list[float]
    replayed: Ledger
    executed: Ledger


def cases(calibration: Calibration, ratios: Sequence[float] = RATIOS, first: int = FIRST_PREDICTED) -> list[Case]:
    """List the interventions, see `docs/background/fidelity.md`.

    Parameters
    ----------
    calibration : Calibration
    ratios : sequence of float
        Cache ratios.
    first : int
        MoE layer from which on DAOP predicts.
    """
    found = []
    for series, parts in {
        "substitution": {"predict": False, "stale": False},
        "stale input": {"predict": False, "degrade": False},
        "predicted, stale input": {"degrade": False},
        "DAOP": {},
    }.items():
        found += [Case(series, r, Daop(calibration.resident(r), first=first, **parts)) for r in ratios]
    found.append(Case("DAOP", 1.0, Daop(calibration.resident(1.0), first=first)))  # nothing absent: the prediction alone
    found += [Case("DAOP, from block 1", r, Daop(calibration.resident(r), first=1)) for r in ratios if first > 1]
    for series, by_sensitivity, rescale in (
        ("AdapMoE skip", True, True),
        ("skip, one threshold", False, True),
        ("AdapMoE skip, not rescaled", True, False),
    ):
        found += [Case(series, p, Skip(calibration.thresholds(p, by_sensitivity), rescale)) for p in SKIPPED]
    for n_deferred in (n for n in DEFERRED if n <= calibration.top_k):
        found += [Case(f"deferral of {n_deferred}", r, Defer(calibration.resident(r), n_deferred)) for r in ratios]
    return found


def measure(
    model: Any, windows: Mapping[str, Tensor], listed: Sequence[Case], progress: Progress
) -> tuple[dict[str, list[float]], dict[str, list[Outcome]]]:
    """Run every case on the same windows, teacher-forced.

    Parameters
    ----------
    model : transformers causal language model
    windows : mapping of str to Tensor of int64, (n_windows, window)
        By kind of text.
    listed : sequence of Case
    progress : Progress
        Counts passes.

    Returns
    -------
    exact : dict of str to list of float
        By kind: nats a token of the unmodified model, one a window.
    outcomes : dict of str to list of Outcome
        By kind, in the order of the cases.
    """
    exact: dict[str, list[float]] = {kind: [] for kind in windows}
    outcomes = {kind: [Outcome([], [], [], Ledger(), Ledger()) for _ in listed] for kind in windows}
    for kind, batch in ((kind, b) for kind, rows in windows.items() for b in batches(rows)):
        with torch.no_grad():
            progress.describe(f"{kind}: unmodified")
            with RoutingHooks(model) as hooks:
                reference = _log_probabilities(model, batch)
            routed = hooks.take()
            exact[kind] += _nll(reference, batch)
            progress.advance(1)
            for case, outcome in zip(listed, outcomes[kind], strict=True):
                progress.describe(f"{kind}: {case.series} {case.strength:g}")
                for routing in routed:  # as the simulator replays it: the exact model's routing, whatever came of it
                    case.intervention.plan(routing).record(routing, outcome.replayed)
                with Intervened(model, case.intervention, outcome.executed):
                    got = _log_probabilities(model, batch)
                outcome.nll += _nll(got, batch)
                outcome.kl += (reference.exp() * (reference - got)).sum(-1).mean(1).double().tolist()
                outcome.agreement += (reference.argmax(-1) == got.argmax(-1)).double().mean(1).tolist()
                progress.advance(1)
    return exact, outcomes


def batches(windows: Tensor) -> Iterator[Tensor]:
    """Split windows into passes of at most `BATCH_TOKENS` tokens, one window at least."""
    return iter(torch.split(windows, max(1, BATCH_TOKENS // windows.shape[1])))


def rows(
    listed: Sequence[Case], exact: Mapping[str, list[float]], outcomes: Mapping[str, Sequence[Outcome]], seed: int
) -> list[dict[str, Any]]:
    """One row a case and kind of text, and one for all text; `docs/background/fidelity.md` has the columns."""
    found = []
    for number, case in enumerate(listed):
        for kind in (*exact, ALL):
            of = list(exact) if kind == ALL else [kind]
            some = [outcomes[k][number] for k in of]
            before = np.concatenate([exact[k] for k in of])
            after = np.concatenate([o.nll for o in some])
            low, high = paired_bootstrap(after - before, seed)
            replayed = Ledger.merged([o.replayed for o in some]).shares()
            lost = 1 - float(replayed["fidelity_fresh"] or 0.0)
            step = float((after - before).mean())
            found.append(
                {
                    "series": case.series,
                    "strength": case.strength,
                    "text": kind,
                    "n_windows": len(before),
                    "perplexity_exact": float(np.exp(before.mean())),
                    "perplexity": float(np.exp(after.mean())),
                    "change": float(np.expm1(step)),
                    "change_low": float(np.expm1(low)),
                    "change_high": float(np.expm1(high)),
                    "kl": float(np.mean([v for o in some for v in o.kl])),
                    "top1_agreement": float(np.mean([v for o in some for v in o.agreement])),
                    **replayed,
                    "executed_fidelity_fresh": Ledger.merged([o.executed for o in some]).shares()["fidelity_fresh"],
                    "nats_per_lost_mass": step / lost if lost > 0 else None,
                    "label": "measured",
                }
            )
    return found


def paired_bootstrap(differences: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % percentile interval of the mean of paired differences, one a window, resampling windows."""
    drawn = np.random.default_rng(seed).integers(len(differences), size=(RESAMPLES, len(differences)))
    low, high = np.quantile(differences[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _log_probabilities(model: Any, batch: Tensor) -> Tensor:
    """Of every next token but the last, which has none to be compared with: (n_windows, window - 1, vocabulary)."""
    return F.log_softmax(model(input_ids=batch, use_cache=False).logits[:, :-1].float(), dim=-1)


def _nll(log_probabilities: Tensor, batch: Tensor) -> list[float]:
    picked = log_probabilities.gather(2, batch[:, 1:].unsqueeze(2)).squeeze(2)
    means: list[float] = (-picked.double().mean(dim=1)).tolist()
    return means
