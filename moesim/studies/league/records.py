"""What a league leaves behind: one record a setting and phase, and one a cell of the map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from moesim.core.units import NS_PER_S
from moesim.experiment.report import split_notes, waited
from moesim.studies.league.standing import PHASES, Standing

if TYPE_CHECKING:
    from moesim.studies.league.meetings import Row

UNITS: Final = {"decode": "tokens/s", "prompt": "first tokens/s"}


def records(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """Write settings as rows of a table, every number unrounded."""
    return [_record(one) for one in standings]


def _record(one: Standing) -> dict[str, Any]:
    setting, contest, row = one.setting, one.contest, one.first
    margin = contest.margin
    return {
        "model": setting.model,
        "hardware": setting.hardware,
        "memory_bytes": setting.memory_bytes,
        "cached_share": setting.share,
        "link_over_cpu": setting.ratio,
        "machine_ratio": setting.own_ratio,
        "batch_size": setting.batch,
        "phase": one.phase,
        "best": contest.best,
        "speed": contest.speed,
        "speed_least": contest.least,
        "speed_most": contest.most,
        "unit": UNITS[one.phase],
        "second": contest.second,
        "margin": margin.value if margin else None,
        "margin_low": margin.value / margin.factor if margin else None,
        "margin_high": margin.value * margin.factor if margin else None,
        "ttft_s": float(str(row["ttft_mean_ns"])) / NS_PER_S,
        "draws": len(setting.draws),
        "certain": contest.certain,
        "doubts": "; ".join(contest.doubts),
        "waited_for": waited(row, one.phase),
        "bound_share": one.bound,
        "slots": row.get("cache_slots_used"),
        "source_label": row.get("source_label"),
        "labels": ", ".join(split_notes(row)[0]),
        **_inexact(one.inexact, one.phase),
    }


def _inexact(row: Row | None, phase: str) -> dict[str, Any]:
    if row is None:
        return {"inexact": "", "inexact_speed": None, "inexact_fresh": None}
    return {"inexact": row["policy"], "inexact_speed": PHASES[phase](row), "inexact_fresh": row.get("fidelity_fresh")}
