"""Gantt charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from moesim.colours import BLACK, FILL, LABEL, text_on
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile
from moesim.metrics.causes import CAUSES
from moesim.metrics.machine import Machine, machine_of
from moesim.plots.chart import Chart, chart
from moesim.plots.style import add_corner, styled
from moesim.records import Records
from moesim.units import NS_PER_MS

# On a lane, a transfer is not yet known to be exposed or late.
_GANTT_LABEL: Final = {
    "exposed_demand": "demand fetch",
    "exposed_prefetch": "prefetch",
    "exposed_other_transfer": "other transfer",
}

_EDGE: Final = 0.3  # points: short boxes keep their colour
_LAYER_END: Final[Any] = {"color": BLACK, "linewidth": 0.8, "linestyle": "--"}


@styled
def gantt(
    runs: Mapping[str, Records],
    hardware: HardwareProfile | Machine,
    step: int,
    layers: tuple[int, int],
    label: str = "",
) -> Figure:
    """Gantt charts of a few layers, one above another on the same axis of time.

    Parameters
    ----------
    runs : mapping of str to Records
        Records of each policy.
    hardware : HardwareProfile or Machine
        What they ran on.
    step : int
        Number of the step.
    layers : (int, int)
        First and last layer; two fit well.
    label : str
        The corner label, as from `corner_label`.

    Returns
    -------
    Figure
        For each policy the CPU, GPU and link lanes that it uses, with expert ids in the boxes (layer/id on links).

    Raises
    ------
    ConfigError
        If a run lacks the step or the layers.
    """
    machine = machine_of(hardware)
    charts = {policy: chart(records, machine, step, layers) for policy, records in runs.items()}
    if not charts:
        raise ConfigError("plot gantt: expected at least one run, got none")
    heights = [len(c.lanes) for c in charts.values()]
    figure = Figure(figsize=(9, 1.2 + 0.34 * sum(heights) + 0.3 * len(heights)), layout="constrained")
    grid = figure.subplots(len(charts), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    longest = max(c.length for c in charts.values()) / NS_PER_MS
    for axes, (policy, drawn) in zip(grid[:, 0], charts.items(), strict=True):
        axes.set_xlim(0, longest)
        _draw_chart(axes, drawn, longest)
        axes.set_title(f"{policy}: {drawn.length / NS_PER_MS:.3g} ms")
    grid[-1, 0].set_xlabel(f"time since layer {layers[0]} of step {step} started (ms)")
    shown = {box.cause for c in charts.values() for box in c.boxes}
    handles: list[Artist] = [
        Patch(
            facecolor=FILL[cause],
            edgecolor=BLACK,
            linewidth=_EDGE,
            label=_GANTT_LABEL.get(cause, LABEL[cause]),
        )
        for cause in CAUSES
        if cause in shown
    ]
    handles.append(Line2D([], [], **_LAYER_END, label="layer end"))
    figure.legend(handles=handles, loc="outside right upper")
    on_links = any("/" in box.text for c in charts.values() for box in c.boxes)
    add_corner(figure, label, ["numbers: expert; layer/expert on links" if on_links else "numbers: expert"])
    return figure


def _draw_chart(axes: Axes, drawn: Chart, longest_ms: float) -> None:
    """Draw lanes from the top; text only in boxes wide enough for it."""
    per_character = longest_ms / 110  # ms that one character of a box takes, as wide as these axes are
    for box in drawn.boxes:
        start, width = box.start / NS_PER_MS, (box.end - box.start) / NS_PER_MS
        lane = drawn.lanes.index(box.lane)
        axes.barh(
            lane,
            width,
            left=start,
            height=0.8,
            color=FILL[box.cause],
            edgecolor=BLACK,
            linewidth=_EDGE,
        )
        if box.text and width >= per_character * (len(box.text) + 0.6):
            axes.text(
                start + width / 2,
                lane,
                box.text,
                ha="center",
                va="center",
                fontsize=6.5,
                color=text_on(FILL[box.cause]),
                clip_on=True,
            )
    for _, end, _ in drawn.layers:
        axes.axvline(end / NS_PER_MS, **_LAYER_END)
    axes.set_yticks(range(len(drawn.lanes)), drawn.lanes)
    axes.set_ylim(len(drawn.lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
