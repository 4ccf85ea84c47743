"""The boxes of a Gantt chart of a few layers, ready to be drawn."""

from __future__ import annotations

from typing import NamedTuple

from moesim.errors import ConfigError
from moesim.metrics.causes import task_cause, transfer_cause
from moesim.metrics.machine import Machine
from moesim.records import Records

UNFINISHED = "..."
"""Ends the text of a transfer that the end of the run cut off."""


class Box(NamedTuple):
    """One box of a Gantt chart."""

    lane: str
    start: int  # ns since the begin of the window
    end: int
    cause: str
    text: str  # expert id, with dots if the run ended before its copy; empty for what is not an expert


class Chart(NamedTuple):
    """All boxes of a window, and its lanes from the top."""

    lanes: tuple[str, ...]
    boxes: tuple[Box, ...]
    layers: tuple[tuple[int, int, int], ...]  # begin, end (ns since the begin of the window), number
    length: int  # ns


def chart(records: Records, machine: Machine, step: int, layers: tuple[int, int]) -> Chart:
    """Lay out some layers of a step: CPU lanes, GPU lanes, links, without those that are idle."""
    visits = sorted(v for v in records.layers if v.step == step and layers[0] <= v.layer <= layers[1])
    if not visits:
        raise ConfigError(f"gantt: expected a run with layers {layers[0]}..{layers[1]} in step {step}, got no such layer")
    begin, end = visits[0].begin, max(v.end for v in visits)
    boxes: list[Box] = []

    def add(lane: str, start: int, stop: int, cause: str, text: str) -> None:
        if start < min(stop, end) and stop > begin:
            boxes.append(Box(lane, max(start, begin) - begin, min(stop, end) - begin, cause, text))

    for t in records.tasks:
        lane = t.device if t.lane == "main" else f"{t.device} {t.lane}"
        add(lane, t.start, t.end, task_cause(t, machine.kinds), str(t.expert) if t.expert >= 0 else "")
    for m in records.transfers:
        text = ""
        if m.expert >= 0:  # of another layer: say which
            text = str(m.expert) if m.layer == visits[0].layer == visits[-1].layer else f"{m.layer}/{m.expert}"
        add(m.link, m.start, m.end, transfer_cause(m), f"{text}{UNFINISHED}" if m.left else text)
    for a in records.activations:
        add(f"{a.link} act.", a.start, a.end, "activation", "")
    used = {box.lane for box in boxes}
    devices = sorted(machine.kinds, key=lambda name: machine.kinds[name] != "cpu")  # stable: CPUs first
    known = [lane for name in devices for lane in (name, f"{name} side")]
    known += [lane for link in machine.links for lane in (link, f"{link} act.")]
    lanes = tuple(lane for lane in known if lane in used) or tuple(devices)  # a chart has a lane at least
    visited = tuple((v.begin - begin, v.end - begin, v.layer) for v in visits)
    return Chart(lanes, tuple(boxes), visited, end - begin)
