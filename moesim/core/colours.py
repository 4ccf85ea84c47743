"""One colour for each cause of time, in plots and timelines alike.

The palette is Okabe and Ito's, safe for common colour blindness; hatches tell apart what grey print does not.
"""

from __future__ import annotations

from typing import Final

BLACK: Final = "#000000"
ORANGE: Final = "#E69F00"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GREY: Final = "#999999"
WHITE: Final = "#FFFFFF"

SERIES: Final = (
    BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY,
    "#9900FF", "#AAEE88", "#DD0044", "#7755DD", "#00EEAA", "#775577", "#BBAA55", "#CCCCEE",
    "#8899FF", "#556633", "#CC00AA", "#77BB77", "#88DDCC", "#AA4411", "#667777", "#FF77DD",
    "#DD11FF", "#AA6655", "#BB55CC", "#BB5599", "#22CC99", "#BB1155", "#EE8833", "#EEBB55",
)  # fmt: skip
"""Colours of policies, in the order in which they appear.

Each after the palette's is the one that is farthest from all before it, to the eye and to colour-blind eyes, among those on which
black hatches are seen. Two that are 20 places apart differ in lightness.
"""

FILL: Final = {
    "dense": BLUE,
    "gpu_experts": SKY,
    "cpu_experts": GREEN,
    "exposed_demand": VERMILION,
    "exposed_prefetch": ORANGE,
    "exposed_other_transfer": YELLOW,
    "decision": PURPLE,
    "activation": BLACK,
    "predict": GREY,
    "idle": WHITE,
}
"""Fill of each cause."""

HATCH: Final = {
    "dense": "",
    "gpu_experts": "",
    "cpu_experts": "..",
    "exposed_demand": "//",
    "exposed_prefetch": "\\\\",
    "exposed_other_transfer": "xx",
    "decision": "++",
    "activation": "",
    "predict": "--",
    "idle": "",
}
"""Hatch of each cause."""

LABEL: Final = {
    "dense": "dense part",
    "gpu_experts": "GPU experts",
    "cpu_experts": "CPU experts",
    "exposed_demand": "demand fetch",
    "exposed_prefetch": "late prefetch",
    "exposed_other_transfer": "other transfer",
    "decision": "decision",
    "activation": "activations",
    "predict": "prediction",
    "idle": "idle",
}
"""Words for each cause, in legends."""

CHROME: Final = {
    "dense": "rail_response",
    "gpu_experts": "thread_state_runnable",
    "cpu_experts": "thread_state_running",
    "exposed_demand": "terrible",
    "exposed_prefetch": "thread_state_iowait",
    "exposed_other_transfer": "yellow",
    "decision": "detailed_memory_dump",
    "activation": "black",
    "predict": "grey",
    "idle": "white",
}
"""The nearest of the few colour names of the trace event format; Perfetto chooses its own instead."""


def text_on(fill: str) -> str:
    """Choose black or white for text on a fill.

    >>> text_on(BLUE), text_on(YELLOW)
    ('#FFFFFF', '#000000')
    """
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return BLACK if luminance > 0.18 else WHITE
