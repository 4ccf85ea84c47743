"""One colour for each cause of time, in plots and timelines alike.

The palette is Okabe and Ito's, safe for common colour blindness; hatches serve grey print.
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

_CAUSES: Final = {  # fill, hatch, words in legends, and the nearest colour name of the trace event format
    "dense": (BLUE, "", "dense part", "rail_response"),
    "gpu_experts": (SKY, "", "GPU experts", "thread_state_runnable"),
    "cpu_experts": (GREEN, "..", "CPU experts", "thread_state_running"),
    "exposed_demand": (VERMILION, "//", "demand fetch", "terrible"),
    "exposed_prefetch": (ORANGE, "\\\\", "late prefetch", "thread_state_iowait"),
    "exposed_other_transfer": (YELLOW, "xx", "other transfer", "yellow"),
    "decision": (PURPLE, "++", "decision", "detailed_memory_dump"),
    "activation": (BLACK, "", "activations", "black"),
    "predict": (GREY, "--", "prediction", "grey"),
    "host": (GREY, "oo", "host code", "generic_work"),
    "idle": (WHITE, "", "idle", "white"),
}
FILL, HATCH, LABEL, CHROME = ({cause: row[place] for cause, row in _CAUSES.items()} for place in range(4))


def text_on(fill: str) -> str:
    """Choose black or white for text on a fill.

    >>> text_on(BLUE), text_on(YELLOW)
    ('#FFFFFF', '#000000')
    """
    red, green, blue = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return BLACK if luminance > 0.18 else WHITE
