"""What seeing some layers ahead is worth: a cache filled on demand, and by an oracle that knows the token's next layers.

Without prefetching a run takes the time T, of which its link or its GPU works B, whichever works longer. A prefetcher that made
neither of them wait would save T - B, with the same copies: that is the gap. The next token is not known. What is predicted and
is in the cache already counts as used: otherwise one expert of a layer puts out another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moesim.errors import MoesimError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.workers import Workers
from moesim.model import load_model
from moesim.trace.made import trace_label

if TYPE_CHECKING:
    from moesim.metrics import Value
    from moesim.trace import Trace

LAYERS: Final = (1, 2, 3, 4, 8)
"""Layers ahead whose routing is known."""
SHARES: Final = (0.25, 0.5)
"""Shares of the experts that are cached."""
BITS: Final = 4
"""Of experts."""
_TOKENS, _REQUESTS = 32, 4
_PLACE: Final = "trace lookahead"


@dataclass(frozen=True)
class Sight:
    """What knowing some layers ahead gave one trace and size of cache."""

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
        """Give everything by name."""
        return {
            "model": self.model, "trace": self.trace, "hardware": self.hardware, "cached_share": self.share,
            "layers": self.layers, "decode_tokens_per_s": self.tokens_per_s, "on_demand_tokens_per_s": self.on_demand,
            "closed": self.closed, "source_label": self.label,
        }  # fmt: skip


def see_layers(
    written: str | Mapping[str, Any], trace: Trace, hardware: str, workers: Workers, *, layers: Sequence[int] = LAYERS,
    shares: Sequence[float] = SHARES,
) -> tuple[list[Sight], list[str]]:  # fmt: skip
    """Simulate one request after the other, with experts of 4 bits; return what came out, and why sizes are missing."""
    model = str(trace.header.get("miniature_of", trace.model))
    found: list[Sight] = []
    missing = []
    for share in shares:
        rows, errors = _run(_experiment(written, trace, model, hardware, share, layers), workers)
        if errors:
            missing.append(f"{trace_label(written)}, {share:.0%} cached: {errors[0]}")
            continue
        first, *others = rows
        gap = 1 - max(float(str(first[key] or 0)) for key in first if key.startswith("utilisation."))
        found += [
            Sight(
                model, trace_label(written), str(row["hardware"]), share, n, _speed(row), _speed(first),
                (1 - _time(row) / _time(first)) / gap if gap else 0.0, str(row["source_label"]),
            )
            for n, row in zip(layers, others, strict=True)
        ]  # fmt: skip
    return found, missing


def _experiment(
    written: str | Mapping[str, Any], trace: Trace, model: str, hardware: str, share: float, layers: Sequence[int]
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
    return Experiment(parse_config(raw, _PLACE), _PLACE)


def _run(experiment: Experiment, workers: Workers) -> tuple[list[Mapping[str, Value]], list[MoesimError]]:
    outcomes = run_experiment(experiment, workers=workers, may_fail=True).outcomes
    return [one.row for one in outcomes], [one.failure for one in outcomes if one.failure is not None]


def _speed(row: Mapping[str, Value]) -> float:
    return float(str(row["decode_tokens_per_s"]))


def _time(row: Mapping[str, Value]) -> int:
    return int(str(row["makespan_ns"]))
