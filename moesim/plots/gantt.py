"""Gantt charts of a few layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moesim.core.colours import BLACK, FILL, HATCH, LABEL, text_on
from moesim.core.units import NS_PER_MS
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile
from moesim.metrics.breakdown import CAUSES, task_cause, transfer_cause
from moesim.metrics.fidelity import fidelity_fresh_decode
from moesim.metrics.machine import Machine, machine_of
from moesim.plots.captions import meaning
from moesim.plots.result_rows import is_exact
from moesim.plots.style import (
    SMALL,
    TEXT,
    Drawing,
    add_corner,
    capital,
    kind,
    legend_above,
    panel_title,
    sentence,
    swatch,
    text_width,
    width_for,
)
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
    """Lay out some layers of a step, without idle lanes."""
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
        add(m.link, m.start, m.end, transfer_cause(m.cause), f"{text}{UNFINISHED}" if m.left else text)
    for a in records.activations:
        add(f"{a.link} act.", a.start, a.end, "activation", "")
    used = {box.lane for box in boxes}
    devices = sorted(machine.kinds, key=lambda name: machine.kinds[name] != "cpu")  # stable: CPUs first
    known = [lane for name in devices for lane in (name, f"{name} side")]
    known += [lane for link in machine.links for lane in (link, f"{link} act.")]
    lanes = tuple(lane for lane in known if lane in used) or tuple(devices)  # a chart has a lane at least
    visited = tuple((v.begin - begin, v.end - begin, v.layer) for v in visits)
    return Chart(lanes, tuple(boxes), visited, end - begin)


# On a lane, a transfer is not yet known to be exposed or late.
_GANTT_LABEL: Final = {
    "exposed_demand": "demand fetch",
    "exposed_prefetch": "prefetch",
    "exposed_other_transfer": "other transfer",
}

_EDGE: Final = 0.3  # points: short boxes keep their colour
_LAYER_END: Final[Any] = {"color": BLACK, "linewidth": 0.8, "linestyle": "--"}
_LANE: Final = 0.19  # inches
_HATCHED: Final = ("exposed_demand", "exposed_prefetch", "exposed_other_transfer", "cpu_experts")  # alike in grey without
_LAYERS: Final = 2

Runs = Mapping[str, Records]


def gantt_window(runs: Runs, step: int | None = None, layers: Sequence[int] | int | None = None) -> tuple[int, tuple[int, int]]:
    """Choose a step, and its first and last layer."""
    if not runs:
        raise ConfigError("plot gantt: expected at least one run, got none")
    first = next(iter(runs.values()))
    if step is None:
        steps = [s.step for s in first.steps if s.phase == "decode"] or [s.step for s in first.steps]
        step = steps[len(steps) // 2]
    if layers is None:
        n_layers = 1 + max(visit.layer for visit in first.layers)
        low = max(0, n_layers // 2 - _LAYERS // 2)
        return step, (low, min(low + _LAYERS, n_layers) - 1)
    asked = [layers] if isinstance(layers, int) else list(layers)
    if len(asked) not in (1, 2) or asked != sorted(asked):
        raise ConfigError(f"plot gantt: layers: expected one layer, or the first and the last, got {asked}")
    return step, (asked[0], asked[-1])


@kind("records", "what devices and links did in a few layers")
def gantt(
    runs: Runs,
    hardware: HardwareProfile | Machine,
    step: int | None = None,
    layers: Sequence[int] | int | None = None,
    label: str = "",
) -> Drawing:
    """Gantt charts of a few layers, one above another on the same axis of time."""
    step, (first, last) = gantt_window(runs, step, layers)
    machine = machine_of(hardware)
    steps = {policy: _step_of(records, next(iter(runs.values())), step) for policy, records in runs.items()}
    charts = {policy: chart(records, machine, steps[policy], (first, last)) for policy, records in runs.items()}
    starred = _not_exact(runs)
    heights = [len(c.lanes) for c in charts.values()]
    width = width_for(TEXT)
    figure = Figure(figsize=(width, 0.45 + _LANE * sum(heights) + 0.24 * len(heights)), layout="constrained")
    grid = figure.subplots(len(charts), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    longest = max(c.length for c in charts.values()) / NS_PER_MS
    inches = width - 0.25 - max(text_width(lane, 7.0) for c in charts.values() for lane in c.lanes)
    for axes, (policy, drawn) in zip(grid[:, 0], charts.items(), strict=True):
        axes.set_xlim(0, longest)
        _draw_chart(axes, drawn, longest / inches)
        panel_title(axes, _name(policy, drawn, policy in starred), pad=2.5)
    grid[-1, 0].set_xlabel(f"time since layer {first} of step {step} started (ms)")
    shown = {box.cause for c in charts.values() for box in c.boxes}
    handles: list[Artist] = [
        swatch(FILL[cause], _GANTT_LABEL.get(cause, LABEL[cause]), _hatch(cause), _EDGE) for cause in CAUSES if cause in shown
    ]
    handles.append(Line2D([], [], **_LAYER_END, label="layer end"))
    legend_above(figure, handles, "What each device and link did")
    on_links = any("/" in box.text for c in charts.values() for box in c.boxes)
    unfinished = any(box.text.endswith(UNFINISHED) for c in charts.values() for box in c.boxes)
    numbers = "numbers: expert; layer/expert on links" if on_links else "numbers: expert"
    cut_off = f"'{UNFINISHED}': the run ended before this copy did" if unfinished else ""
    add_corner(figure, label, [numbers, cut_off, meaning(starred)])
    where = f"layer {first}" if first == last else f"layers {first} to {last}"
    phase = next(s.phase for s in next(iter(runs.values())).steps if s.step == step)
    lengths = ", ".join(_name(policy, drawn, policy in starred).replace(":", "", 1) for policy, drawn in charts.items())
    sentences = [
        f"What CPU, GPU and links did in {where} of step {step} ({phase}): {lengths}.",
        f"{capital(numbers)}. Dashed: end of a layer. Lanes without work are left out; a box that reaches out of "
        "the window is cut off.",
        sentence(cut_off),
        sentence(meaning(starred)),
        sentence(label),
    ]
    return Drawing(_data(charts, steps), figure, " ".join(text for text in sentences if text))


def _step_of(records: Records, other: Records, step: int) -> int:
    """Return the step of a run with as many of its phase before it."""
    phases = {s.step: s.phase for s in other.steps}
    if step not in phases:
        return step  # the message about it is that of any run
    before = sum(phase == phases[step] for number, phase in phases.items() if number < step)
    same = sorted(s.step for s in records.steps if s.phase == phases[step])
    return same[min(before, len(same) - 1)] if same else step


def _data(charts: Mapping[str, Chart], steps: Mapping[str, int]) -> pd.DataFrame:
    rows = []
    for policy, drawn in charts.items():
        visits = [("layer", begin, end, "layer", str(number)) for begin, end, number in drawn.layers]
        rows += [(policy, steps[policy], *box) for box in [*visits, *drawn.boxes]]
    return pd.DataFrame(rows, columns=["policy", "step", "lane", "start_ns", "end_ns", "cause", "text"])


def _not_exact(runs: Runs) -> dict[str, tuple[float, float]]:
    shares = {policy: fidelity_fresh_decode(records) for policy, records in runs.items() if records.inexact}
    known = {policy: math.nan if share is None else share for policy, share in shares.items()}
    return {policy: (share, share) for policy, share in known.items() if math.isnan(share) or not is_exact(share)}


def _name(policy: str, drawn: Chart, starred: bool) -> str:
    return f"{policy}{'*' if starred else ''}: {drawn.length / NS_PER_MS:.3g} ms"


def _hatch(cause: str) -> str:
    return HATCH[cause] * 2 if cause in _HATCHED else ""


def _draw_chart(axes: Axes, drawn: Chart, ms_per_inch: float) -> None:
    for box in drawn.boxes:
        start, width = box.start / NS_PER_MS, (box.end - box.start) / NS_PER_MS
        lane = drawn.lanes.index(box.lane)
        fill = FILL[box.cause]
        axes.barh(lane, width, left=start, height=0.84, color=fill, hatch=_hatch(box.cause), edgecolor=BLACK, linewidth=_EDGE)
        if box.text and width >= ms_per_inch * (text_width(box.text) + 0.04):
            axes.text(
                start + width / 2, lane, box.text, ha="center", va="center_baseline", fontsize=SMALL, color=text_on(fill),
                clip_on=True, bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.6} if _hatch(box.cause) else None,
            )  # fmt: skip
    for _, end, _ in drawn.layers:
        axes.axvline(end / NS_PER_MS, **_LAYER_END)
    axes.set_yticks(range(len(drawn.lanes)), drawn.lanes)
    axes.set_ylim(len(drawn.lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
