"""What fewer launches of GPU kernels would change, as a table for people and as plain values for programs."""

from __future__ import annotations

from typing import Any

from moesim.core.table import Format, render
from moesim.core.units import digits
from moesim.studies.advice.advice import Advice
from moesim.studies.advice.candidates import Candidate
from moesim.studies.advice.engines import Command, commands
from moesim.studies.advice.launches import FEW_US, LARGE_SHARE, WHY, Fewer


def fewer_values(advice: Advice) -> dict[str, Any] | None:
    """Give the speeds with fewer launches as plain values; None where launches decide nothing."""
    fewer = advice.found.fewer
    if fewer is None:
        return None
    return {
        "layer_us": fewer.layer_us,
        "assumed_layer_us": FEW_US,
        "source_label": "assumed",
        "why": WHY,
        "flips": fewer.flips,
        "fastest": fewer.fastest.title,
        "commands": [str(typed) for _, typed in _typed(advice, fewer)],
        "speeds": [
            {"placement": one.title, "launch_share": fewer.shares.get(one), "as_profile": before, "fewer": after}
            for one, (before, after) in fewer.speeds.items()
        ],
    }


def fewer_table(advice: Advice, form: Format) -> str:
    """Write the speeds with fewer launches beside those of the profile, and what to type if another is the best then."""
    fewer = advice.found.fewer
    if fewer is None:
        return ""
    headings = "first request only", "GPU launches", f"tok/s, {fewer.layer_us:.3g} us a layer", f"{FEW_US:g} us (assumed)"
    shares = {one: f"{100 * share:.0f} %" for one, share in fewer.shares.items()}
    order = sorted(fewer.speeds, key=lambda one: fewer.speeds[one], reverse=True)
    rows = [[one.title, shares.get(one, "-"), *(digits(value) for value in fewer.speeds[one])] for one in order]
    table = render(headings, rows, form, headings[1:])
    if not fewer.flips:
        return table
    lines = "".join(f"{typed.engine}, {one.title}:\n  {typed}\n" for one, typed in _typed(advice, fewer))
    fence = "```\n" if form is Format.MD else ""
    return f"{table}\nwith fewer launches the fastest of each engine would be\n\n{fence}{lines}{fence}"


def _typed(advice: Advice, fewer: Fewer) -> list[tuple[Candidate, Command]]:
    """Give each engine's fastest placement with fewer launches, fastest first, and what to type for it."""
    found: dict[str, tuple[Candidate, Command]] = {}
    for one in sorted(fewer.speeds, key=lambda one: fewer.speeds[one][::-1], reverse=True):
        for typed in commands(one, advice.setting):
            found.setdefault(typed.engine, (one, typed))
    return list(found.values())


def unlike(advice: Advice) -> list[str]:
    """Name the finalists whose ratio to the best hangs on what launches cost."""
    finalists = (*advice.runnable, *advice.papers)
    return [one.candidate.title for one in finalists if abs(one.launch_share - advice.best.launch_share) >= LARGE_SHARE]
