"""An advice as plain values, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moesim import __version__
from moesim.metrics.naming import model_label
from moesim.studies.advice.advice import Advice, Judged
from moesim.studies.advice.engines import describe, engines
from moesim.studies.advice.interval import LEVEL
from moesim.studies.advice.search import speed
from moesim.studies.advice.show_launches import fewer_values


def document(advice: Advice) -> dict[str, Any]:
    """Give an advice as plain values, complete."""
    setting, found, limits = advice.setting, advice.found, advice.found.limits[advice.best.candidate]
    asked = {key: str(value) if key == "gguf" and value else value for key, value in asdict(setting.asked).items()}
    return {
        "moesim": __version__,
        "asked": asked,
        "model": {"name": model_label(setting.model), "source": setting.model.source, "bytes": model_bytes(advice)},
        "hardware": {
            "name": setting.hardware.name, "labels": list(setting.hardware.labels), "gpu": setting.gpu, "host": setting.host,
            "vram_bytes": setting.vram_bytes, "ram_bytes": setting.ram_bytes,
        },
        "context": setting.context,
        "routing": {
            "name": advice.routing.label, "origin": advice.routing.origin, "groups": len(advice.routing.groups),
            "why": advice.routing.why, "other": advice.other.label if advice.other else None,
        },
        "level": LEVEL,
        "evidence": [asdict(one) for one in advice.evidence],
        "best": flat(advice, advice.best),
        "runnable": [flat(advice, one) for one in advice.runnable],
        "papers": [flat(advice, one) for one in advice.papers],
        "limit": {"largest": limits.limit, "shares": dict(limits.shares)},
        "curve": [
            {
                "placement": one.title, "policy": dict(one.policy), "gpu_experts": one.gpu_experts,
                "decode_tokens_per_s": speed(row), "decode_tokens": row["decode_tokens"],
                "ttft_s": float(row["ttft_mean_ns"]) / 1e9,
            }
            for one, row in found.screened.items()
        ],
        "engines": [
            {
                "name": one.name, "checked": one.checked, "date": one.date, "expresses": list(one.expresses),
                "cannot": one.cannot, "unknown": one.unknown,
            }
            for one in engines()
        ],
        "left_out": found.no_fit,
        "failed": found.failed,
        "n_simulations": found.n_simulations,
        "caution": advice.caution,
        "fewer_launches": fewer_values(advice),
        "warnings": advice.warnings,
        **({} if advice.observed is None else advice.observed.values()),
    }  # fmt: skip


def model_bytes(advice: Advice) -> int:
    """Count the bytes of all weights."""
    model = advice.setting.model
    return model.experts_bytes_total + model.non_expert_bytes


def flat(advice: Advice, one: Judged) -> dict[str, Any]:
    """Give a finalist as one line of a table."""
    candidate = one.candidate
    return {
        "placement": candidate.title, "runnable": candidate.runnable, "what": describe(candidate, advice.setting),
        "policy": json.dumps(dict(candidate.policy), sort_keys=True), "gpu_experts": candidate.gpu_experts,
        "gpu_bytes": candidate.gpu_bytes, "host_bytes": candidate.host_bytes,
        "decode_tokens_per_s": one.speed.value, "low": one.low, "high": one.high, "requests_factor": one.speed.factor,
        "groups": one.speed.n, "ratio_to_best": one.ratio, "indistinguishable": one.same, "ttft_s": one.ttft_s,
        "fidelity_fresh_decode": one.fresh, "gpu_share": one.gpu_share, "launch_share": one.launch_share,
        "other_routing_ratio": one.crossed, "label": one.label,
        "notes": "; ".join(part for part in (candidate.note, one.notes) if part), "commands": [str(c) for c in one.commands],
        "conditions": [c.condition for c in one.commands],
    }  # fmt: skip


def rows_of(advice: Advice) -> list[Mapping[str, Any]]:
    """List the rows of all finalists' runs, for a result folder."""
    runs: Sequence[Mapping[str, Any]] = [row for rows in advice.found.final.values() for row in rows]
    return [{**row, "run": number} for number, row in enumerate(runs)]
