"""From a question to an advice: routing, search, intervals, ranking, flags."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import tee
from pathlib import Path

from moesim.core.student import mean
from moesim.experiment.routing import traces_of_shape
from moesim.studies.advice.advice import Advice, Judged
from moesim.studies.advice.candidates import LOSSY, Candidate, Space, gib
from moesim.studies.advice.engines import commands
from moesim.studies.advice.interval import LEVEL, Evidence, evidence, indistinguishable, interval, mixed
from moesim.studies.advice.launches import caution, gpu_share, launch_share
from moesim.studies.advice.residuals import Residual, read_residuals
from moesim.studies.advice.routing import Routing, find_routing, other_routing
from moesim.studies.advice.search import Found, Search, speed
from moesim.studies.advice.setting import PLACE, Asked, Setting, look_up


def recommend(
    asked: Asked, *, jobs: int | None = 1, progress: bool = False, residuals: Sequence[Residual] | None = None
) -> Advice:
    """Search placements and policies for a model on a machine.

    Parameters
    ----------
    asked : Asked
        The question.
    jobs : int or None
        Processes; None: all cores where that is worth while. The answer does not depend on it.
    progress : bool
        Show a bar on a terminal.
    residuals : sequence of Residual, optional
        Other evidence than the shipped.

    Returns
    -------
    Advice

    Raises
    ------
    InputError
        If something that was asked for is wrong, or nothing fits.
    """
    known = read_residuals() if residuals is None else residuals
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        setting = look_up(asked, Path(folder))
        shipped, again = tee(traces_of_shape(setting.model))  # each is unpacked once, when it is asked for
        routing = find_routing(setting.model, asked.trace, asked.batch, asked.prompt, asked.decode, PLACE, shipped)
        other = other_routing(setting.model, routing, asked.batch, asked.prompt, asked.decode, again)
        found = Search(Space(setting, routing), other=other, jobs=jobs, progress=progress).run()
    rest = _evidence(known, found)
    ranked = [*found.ranked(True), *found.ranked(False)]
    judged = [_judge(one, ranked[0], found, rest, setting) for one in ranked]
    runnable = [one for one in judged if one.candidate.runnable]
    papers = [one for one in judged if not one.candidate.runnable]
    return Advice(
        setting, routing, other, found, runnable, papers, list(rest.values()), caution(setting, found.fewer),
        _warnings(setting, routing, other, found),
    )  # fmt: skip


def _kept(setting: Setting) -> str:
    key = f"devices.{setting.gpu}.workspace_bytes"
    kept = setting.hardware.numbers.get(key)
    if kept is None:
        return f"the profile says nothing of the engine's own buffers on {setting.gpu}: leave some of its memory free"
    n_bytes = setting.hardware.devices[setting.gpu].workspace_bytes
    return f"{gib(n_bytes)} on {setting.gpu} is kept for the engine's own buffers ({kept.source})"


def _evidence(residuals: Sequence[Residual], found: Found) -> dict[str, Evidence]:
    """Choose what intervals rest on, by what the costs of the runs rest on."""
    rows = [row for rows in found.final.values() for row in rows]
    if rows and all(row["costs_measured"] for row in rows):
        return {"any": evidence(residuals, "measured", "cpu")}
    return {where: evidence(residuals, "derived", where) for where in ("cpu", "gpu")}


def _judge(one: Candidate, best: Candidate, found: Found, rest: Mapping[str, Evidence], setting: Setting) -> Judged:
    rows = found.final[one]
    speeds, bests = [speed(row) for row in rows], [speed(row) for row in found.final[best]]
    share = gpu_share(found.limits[one])
    costs = (rest["any"].low, rest["any"].high) if "any" in rest else mixed(rest["cpu"], rest["gpu"], share)
    middle, crossed = mean(speeds, LEVEL), found.crossed.get(one)
    low, high = interval(middle, costs, crossed or 1.0)
    fresh = rows[0].get("fidelity_fresh_decode")
    return Judged(
        candidate=one,
        speed=middle,
        low=low,
        high=high,
        ratio=mean([b / a for a, b in zip(bests, speeds, strict=True)], LEVEL).value,
        same=one is not best and indistinguishable(bests, speeds),
        ttft_s=sum(float(row["ttft_mean_ns"]) for row in rows) / len(rows) / 1e9,
        fresh=None if fresh is None or one.family not in LOSSY else min(float(row["fidelity_fresh_decode"]) for row in rows),
        gpu_share=share,
        launch_share=launch_share(found.limits[one]),
        crossed=crossed,
        label=str(rows[0]["source_label"]),
        notes=str(rows[0]["notes"]),
        commands=tuple(commands(one, setting)),
    )


def _warnings(setting: Setting, routing: Routing, other: Routing | None, found: Found) -> list[str]:
    lines = []
    if routing.origin == "synthetic":
        lines.append("routing is synthetic: made up by parameters fitted to the model's published statistics")
    if routing.origin == "miniature":
        lines.append("routing is that of a small model with this model's routing shape, which is easier to predict")
    if routing.origin != "recorded" and other is None:
        lines.append("there is no other routing of this shape to compare with, so the intervals leave out what hangs on it")
    if "prompt-truncated" in str(next(iter(found.screened.values()))["notes"]):
        lines.append("recorded prompts are longer than asked for and were cut")
    if len(routing.groups) < 2:
        lines.append("one group of requests only: how much speeds vary between requests is not known")
    lines.append(_kept(setting))
    lines.append("RAM for the system and for other programs is not counted")
    return lines
