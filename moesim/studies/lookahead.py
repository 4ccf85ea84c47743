"""Worth of looking ahead: for a cache some tokens, or a token's next layers.

The gap is between a cache that goes by decayed frequency and the fewest possible misses; moe-speed-of-light states a power law
for the window that closes half of it. For layers ahead, it is the time in which neither link nor GPU, whichever works
longer, works; what is predicted and cached counts as used, else one expert of a layer puts out another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moesim.core.student import line
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.run import run_experiment
from moesim.experiment.workers import Workers
from moesim.model import load_model
from moesim.trace.made import trace_label
from moesim.trace.stats.balance import main_phase, select
from moesim.trace.stats.lookahead import HALF_GAP, misses_by_window

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.trace import Trace


WINDOWS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens ahead whose routing is known."""
SHARES: Final = (0.125, 0.25, 0.375, 0.5, 0.625)
"""Shares of the experts of a layer that are cached."""
MOST_TOKENS: Final = 1024
"""Decoded tokens of a trace that are counted."""
_RESAMPLES: Final = 2000


@dataclass(frozen=True)
class Line:
    """Misses of one cache size of one trace, by window."""

    model: str
    trace: str
    slots: int  # of a layer
    share: float  # of the experts of a layer
    top_k: int
    tokens: int
    misses: Mapping[int, int]  # by window
    fewest: int  # of a cache that knows everything

    def closed(self, window: int) -> float:
        """Return the share of the gap that a window closes; nan where there is no gap."""
        gap = self.misses[0] - self.fewest
        return (self.misses[0] - self.misses[window]) / gap if gap else math.nan

    @property
    def half(self) -> float | None:
        """The window that closes half of the gap, on straight lines; None if none does."""
        before = None
        for window in self.misses:
            closed = self.closed(window)
            if closed >= 0.5:
                if before is None:
                    return float(window)
                at, was = before
                return at + (window - at) * (0.5 - was) / (closed - was)
            before = window, closed
        return None


@dataclass(frozen=True)
class Relation:
    """The window that closes half of the gap is ``factor * (slots / top_k) ** exponent``."""

    factor: float
    exponent: float
    # low, high: 95 % interval of the exponent, from models drawn with replacement
    low: float
    high: float
    n: int  # cache sizes of traces that it rests on

    @property
    def confirms(self) -> bool:
        return self.low <= HALF_GAP[1] <= self.high


def look_ahead(
    trace: Trace, label: str, *, shares: Sequence[float] = SHARES, windows: Sequence[int] = WINDOWS, max_tokens: int = MOST_TOKENS
) -> list[Line]:
    """Count the misses of decoded tokens for each cache size."""
    sample = select(trace, main_phase(trace), max_tokens)
    n_experts, top_k = trace.n_experts, int(sample.experts.shape[2])
    slots = sorted({max(top_k, round(share * n_experts)) for share in shares})
    experts = sample.experts[:max_tokens]
    known = [*sorted({0, *windows}), len(experts)]
    found = misses_by_window(experts, n_experts, slots, known).sum(axis=2)
    return [
        Line(
            trace.model, label, size, size / n_experts, top_k, len(experts),
            {window: int(found[i, place]) for i, window in enumerate(known[:-1])}, int(found[-1, place]),
        )
        for place, size in enumerate(slots)
    ]  # fmt: skip


def relation(lines: Sequence[Line], seed: int = 0) -> Relation | None:
    """Fit the power law; None with fewer than three known halves, or one ratio only."""
    points = [(one.model, math.log(one.slots / one.top_k), math.log(one.half)) for one in lines if one.half and one.half > 0]
    by_model: dict[str, list[tuple[float, float]]] = {}  # its traces are not independent
    for model, x, y in points:
        by_model.setdefault(model, []).append((x, y))
    fitted = _line([point for mine in by_model.values() for point in mine])
    if fitted is None:
        return None
    draw, names, slopes = random.Random(seed), list(by_model), []
    for _ in range(_RESAMPLES):
        chosen = _line([point for name in draw.choices(names, k=len(names)) for point in by_model[name]])
        if chosen is not None:
            slopes.append(chosen[1])
    low, high = np.quantile(slopes, [0.025, 0.975])
    return Relation(math.exp(fitted[0]), fitted[1], float(low), float(high), len(points))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fit a straight line by least squares; None where the points do not determine one."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    return line(points)


def records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Write every window of every line as a row."""
    return [
        {
            "model": one.model, "trace": one.trace, "slots": one.slots, "cached_share": one.share, "top_k": one.top_k,
            "tokens": one.tokens, "window_tokens": window, "misses_per_token": misses / one.tokens,
            "fewest_per_token": one.fewest / one.tokens, "closed": one.closed(window), "half_window_tokens": one.half,
        }
        for one in lines
        for window, misses in one.misses.items()
    ]  # fmt: skip


LAYERS: Final = (1, 2, 3, 4, 8)
"""Layers ahead whose routing is known."""
LAYER_SHARES: Final = (0.25, 0.5)
"""Shares of the experts that are cached."""
BITS: Final = 4
"""Of experts."""
_TOKENS, _REQUESTS = 32, 4
_PLACE: Final = "trace lookahead"


@dataclass(frozen=True)
class Sight:
    """The speed of one trace and cache with some layers known ahead."""

    model: str
    trace: str
    hardware: str
    share: float  # of the experts that are cached
    layers: int  # ahead
    tokens_per_s: float
    on_demand: float  # tokens/s without prefetching
    closed: float  # share of the gap; more than 1 where the oracle also spares copies
    label: str  # weakest source

    def record(self) -> dict[str, Any]:
        return {
            "model": self.model, "trace": self.trace, "hardware": self.hardware, "cached_share": self.share,
            "layers": self.layers, "decode_tokens_per_s": self.tokens_per_s, "on_demand_tokens_per_s": self.on_demand,
            "closed": self.closed, "source_label": self.label,
        }  # fmt: skip


def see_layers(
    written: str | Mapping[str, Any], trace: Trace, hardware: str | Mapping[str, Any], workers: Workers, *,
    layers: Sequence[int] = LAYERS, shares: Sequence[float] = LAYER_SHARES,
) -> tuple[list[Sight], list[str]]:  # fmt: skip
    """Simulate requests one by one with 4-bit experts; return results, and why sizes lack."""

    def number(row: Mapping[str, Value], key: str) -> float:
        return float(str(row[key]))

    model = str(trace.header.get("miniature_of", trace.model))
    found: list[Sight] = []
    missing = []
    for share in shares:
        experiment = _experiment(written, trace, model, hardware, share, layers)
        outcomes = run_experiment(experiment, workers=workers, may_fail=True).outcomes
        errors = [one.failure for one in outcomes if one.failure is not None]
        if errors:
            missing.append(f"{trace_label(written)}, {share:.0%} cached: {errors[0]}")
            continue
        first, *others = (one.row for one in outcomes)
        gap = 1 - max(float(str(first[key] or 0)) for key in first if key.startswith("utilisation."))
        found += [
            Sight(
                model, trace_label(written), str(row["hardware"]), share, n, number(row, "decode_tokens_per_s"),
                number(first, "decode_tokens_per_s"),
                (1 - number(row, "makespan_ns") / number(first, "makespan_ns")) / gap if gap else 0.0, str(row["source_label"]),
            )
            for n, row in zip(layers, others, strict=True)
        ]  # fmt: skip
    return found, missing


def _experiment(
    written: str | Mapping[str, Any],
    trace: Trace,
    model: str,
    hardware: str | Mapping[str, Any],
    share: float,
    layers: Sequence[int],
) -> Experiment:
    top_k = load_model(model).top_k
    tokens, requests = min(_TOKENS, int(trace.requests.n_decode.min())), min(_REQUESTS, len(trace.requests.n_decode))
    known = {"name": "predicted", "source": "oracle", "size": top_k, "pool": "cache", "residents": "used"}
    ahead = [{**known, "lookahead": n, **({"nearer": "ask"} if n > 1 else {})} for n in layers]
    raw = {
        "name": "lookahead-layers", "model": {"base": model, "expert_bits": BITS}, "trace": written, "hardware": hardware,
        "workload": {"batch_size": 1, "prompt_tokens": 1, "decode_tokens": tokens, "n_batches": requests},
        "cache": {"ratio": share}, "plots": [], "timeline": None,
        "policies": [{"name": "composed", "placement": "none", "prefetch": one} for one in ("none", *ahead)],
    }  # fmt: skip
    return Experiment(parse_config(raw, _PLACE), _PLACE, known={written_key(written): trace})
