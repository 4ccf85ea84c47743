"""How a setting came out in one phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moesim.core.units import NS_PER_S
from moesim.studies.league.contest import Contest
from moesim.studies.league.meetings import Row
from moesim.studies.league.settings import Setting


def decode_speed(row: Row) -> float:
    """Tokens a second of the whole batch while decoding."""
    return float(row.get("decode_tokens_per_s") or 0)


def prompt_speed(row: Row) -> float:
    """First tokens a second of a request."""
    return NS_PER_S / float(row["ttft_mean_ns"])  # type: ignore[arg-type]


PHASES: Final[dict[str, Callable[[Row], float]]] = {"decode": decode_speed, "prompt": prompt_speed}


@dataclass(frozen=True)
class Standing:
    """How a setting came out in one phase."""

    setting: Setting
    phase: str  # one of `PHASES`
    contest: Contest
    first: Row  # of the best on the first draw
    inexact: Row | None = None  # the fastest of those that change what the model computes, on the first draw
    bound: float | None = None  # lower bound of the makespan over that of the best, on the first draw
