"""Pictures of the page as HTML and SVG: bars of shares, memory, and the timeline of a token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from moesim.core.colours import FILL, LABEL
from moesim.core.units import NS_PER_MS, digits
from moesim.metrics.outcome import Outcome
from moesim.plots.gantt import Box, Chart, chart, gantt_window
from moesim.studies.advice.candidates import gib
from moesim.studies.advice.llama_cpp import Point, Speed

COLOURS: Final = {
    "CPU memory": "#009E73", "CPU compute": "#66C2A5", "CPU start-up": "#B3E2CD", "GPU memory": "#0072B2",
    "GPU compute": "#56B4E9", "GPU launches": "#B3D9F2", "link": "#D55E00", "activations": "#000000", "decisions": "#CC79A7",
    "predictor": "#999999", "host code": "#777777", "waiting": "#DDDDDD",
}  # fmt: skip
"""Of what limits a run: greens for the CPU, blues for the GPU, as in the timeline."""


def between(speed: Speed) -> str:
    """Write an interval.

    >>> between(Speed(28.91, 20.63, 41.6))
    '20.6 to 41.6'
    """
    return f"{digits(speed.low, 3)} to {digits(speed.high, 3)}"


def shares(limits: Mapping[str, float]) -> str:
    """Draw shares of a time as one bar with a legend that says all of it."""
    parts = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{COLOURS[name]}" title="{name} {100 * share:.0f} %"></span>'
        for name, share in limits.items()
    )
    words = "".join(
        f'<li><i style="background:{COLOURS[name]}"></i>{name} <b>{100 * share:.0f} %</b></li>'
        for name, share in limits.items() if share >= 0.01
    )  # fmt: skip
    return f'<div class="bar" aria-hidden="true">{parts}</div><ul class="legend">{words}</ul>'


def memory(used: Iterable[tuple[str, int, int]]) -> str:
    """Draw how full the memories are."""
    lines = [
        f'<li>{escape(name)}<span class="bar thin" aria-hidden="true"><span style="width:{min(100, 100 * peak / whole):.1f}%">'
        f"</span></span>{gib(peak)} of {gib(whole)}</li>"
        for name, peak, whole in used
    ]
    return f'<ul class="memory">{"".join(lines)}</ul>'


_WIDE: Final = 1000
_NARROW: Final = 700
"""Boxes of one cause are drawn as one if what is between them is less than this part of the picture."""


def timeline(outcome: Outcome) -> list[tuple[str, str]]:
    """Draw a token in the middle of decoding, and two layers of it: titles and pictures."""
    records = outcome.records
    assert records is not None
    step, layers = gantt_window({"": records})
    last = max(visit.layer for visit in records.layers)
    whole = chart(records, outcome.machine, step, (0, last))
    some = chart(records, outcome.machine, step, layers)
    return [
        (f"One token: {digits(whole.length / NS_PER_MS)} ms, {last + 1} layers", _lanes(_joined(whole))),
        (f"Layers {layers[0]} and {layers[1]} of it: {digits(some.length / NS_PER_MS)} ms", _lanes(some) + _causes(whole)),
    ]


def _joined(drawn: Chart) -> Chart:
    """Join neighbours of a lane that have one cause, so that a token of a thousand tasks is a small picture."""
    boxes = list[Box]()
    for lane in drawn.lanes:
        of_lane = list[Box]()
        for one in sorted((box for box in drawn.boxes if box.lane == lane), key=lambda box: box.start):
            last = of_lane[-1] if of_lane else None
            if last is not None and last.cause == one.cause and one.start - last.end < drawn.length / _NARROW:
                of_lane[-1] = last._replace(end=max(one.end, last.end), text="")
            else:
                of_lane.append(one._replace(text=""))
        boxes += of_lane
    return drawn._replace(boxes=tuple(boxes))


def _lanes(drawn: Chart) -> str:
    """Draw each lane under its name; the width of a picture is that of the page."""
    found = []
    for lane in drawn.lanes:
        boxes = "".join(_box(one, drawn.length) for one in drawn.boxes if one.lane == lane)
        svg = f'<svg viewBox="0 0 {_WIDE} 10" preserveAspectRatio="none" aria-hidden="true">{boxes}</svg>'
        busy = sum(one.end - one.start for one in drawn.boxes if one.lane == lane) / drawn.length
        found.append(
            f'<div class="lane"><span>{escape(named(lane))} <small>{100 * min(1, busy):.0f} % busy</small></span>{svg}</div>'
        )
    return "".join(found)


def named(lane: str) -> str:
    """Name a device or a link in words.

    >>> named("cpu0->gpu0 act."), named("gpu1")
    ('CPU to GPU, activations', 'GPU 1')
    """
    words = re.sub(r"([a-z]+)(\d+)", lambda found: found[1].upper() + (f" {found[2]}" if found[2] != "0" else ""), lane)
    return words.replace("->", " to ").replace(" act.", ", activations")


def _box(one: Box, length: int) -> str:
    x, wide = _WIDE * one.start / length, max(1.0, _WIDE * (one.end - one.start) / length)
    words = f"{LABEL[one.cause]}{', expert ' + one.text if one.text else ''}: {digits((one.end - one.start) / 1000)} us"
    return f'<rect x="{x:.1f}" width="{wide:.1f}" height="10" fill="{FILL[one.cause]}"><title>{escape(words)}</title></rect>'


def _causes(drawn: Chart) -> str:
    causes = dict.fromkeys(one.cause for one in drawn.boxes)
    words = "".join(f'<li><i style="background:{FILL[cause]}"></i>{LABEL[cause]}</li>' for cause in causes)
    return f'<ul class="legend">{words}</ul>'


def curve(points: Sequence[Point], chosen: int | None) -> dict[str, Any]:
    """Describe speed by ``--n-cpu-moe`` for the library's chart: the line, its interval, and what does not fit."""
    found = [[one.place.number, round(one.decode.value, 3)] for one in points]
    beyond = [one.place.number for one in points if one.misfit]
    band = {"type": "line", "symbol": "none", "lineStyle": {"opacity": 0}, "stack": "interval", "silent": True}
    area = [[{"xAxis": min(beyond), "name": "does not fit"}, {"xAxis": max(beyond) + 0.5}]] if beyond else []
    return {
        "animation": False,
        "grid": {"left": 44, "right": 16, "top": 30, "bottom": 44},
        "xAxis": {"type": "value", "name": "--n-cpu-moe", "nameLocation": "middle", "nameGap": 28, "min": "dataMin",
                  "max": "dataMax"},
        "yAxis": {"type": "value", "name": "tokens/s", "min": 0},
        "tooltip": {"trigger": "axis"},
        "series": [
            {**band, "data": [[one.place.number, one.decode.low] for one in points], "tooltip": {"show": False}},
            {**band, "data": [[one.place.number, one.decode.high - one.decode.low] for one in points],
             "areaStyle": {"color": "#0072B2", "opacity": 0.15}, "tooltip": {"show": False}},
            {"name": "tokens/s", "type": "line", "data": found, "color": "#0072B2", "symbolSize": 5,
             "markArea": {"data": area, "itemStyle": {"color": "#D55E00", "opacity": 0.12}, "label": {"color": "#7a3400"}},
             "markLine": {"symbol": "none", "data": [] if chosen is None else [{"xAxis": chosen}],
                          "label": {"formatter": "chosen"}, "lineStyle": {"color": "#333333"}}},
        ],
    }  # fmt: skip


def speeds(rows: Sequence[tuple[str, Speed | None, Speed | None, str]]) -> str:
    """Write a table of speeds, each decode speed with a bar and its interval; without one, why."""
    most = max((one.value for _, one, _, _ in rows if one is not None), default=1.0)
    first = rows[0][1] if rows else None  # without a speed there, no ratio
    lines = []
    for name, decode, prompt, words in rows:
        if decode is None:
            lines.append(f'<tr><th scope="row">{escape(name)}</th><td colspan="4" class="why">{escape(words)}</td></tr>')
            continue
        ratio = "" if first is None else f"×{decode.value / first.value:.2f}"
        bar = f'<span class="bar thin" aria-hidden="true"><span style="width:{100 * decode.value / most:.1f}%"></span></span>'
        lines.append(
            f'<tr><th scope="row">{escape(name)}<small>{escape(words)}</small></th>'
            f"<td><b>{digits(decode.value, 3)}</b> <small>{between(decode)}</small>{bar}</td>"
            f"<td>{ratio}</td><td>{'' if prompt is None else digits(prompt.value, 3)}</td></tr>"
        )
    head = "".join(f'<th scope="col">{words}</th>' for words in ("", "decode, tokens/s", "ratio", "prompt, tokens/s"))
    return f'<table class="speeds"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
