"""An ablation as a ladder: variants in a given order, and what each step gains over the one before."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from moesim.plots.bars import AXES, Means, caption_of, draw_means, means_of, value_texts
from moesim.plots.rows import prepared
from moesim.plots.style import styled


def ladder_data(frame: pd.DataFrame, metric: str = "decode_tokens_per_s", x: str | None = None) -> pd.DataFrame:
    """Average a metric by variant, and compare each with the one before."""
    return _steps(frame, metric, x).data


def _steps(frame: pd.DataFrame, metric: str, x: str | None) -> Means:
    means = means_of(prepared(frame, "ladder", [metric], failed=True), "ladder", metric, x)
    by = [name for name in means.shown if name != "policy"]
    before = means.data.groupby(by, sort=False)[metric].shift(1) if by else means.data[metric].shift(1)
    return means._replace(data=means.data.assign(gain=means.data[metric] / before - 1))


@styled
def ladder(frame: pd.DataFrame, metric: str = "decode_tokens_per_s", x: str | None = None) -> Figure:
    """Bars of variants with the gain of each step written on it; arguments as of `ladder_data`."""
    means = _steps(frame, metric, x)
    texts = [
        (value, *([] if math.isnan(gain) else [f"{round(100 * gain):+d}%".replace("+0%", "±0%")]), *rest)
        for (value, *rest), gain in zip(value_texts(means.data, metric), means.data["gain"], strict=True)
    ]
    return draw_means(means, texts, "What each step gains over the one before")


def ladder_caption(frame: pd.DataFrame, metric: str = "decode_tokens_per_s", x: str | None = None) -> str:
    """Write the caption of `ladder`."""
    means = _steps(frame, metric, x)
    words = AXES.get(metric, metric).replace("\n", " ")
    order = ", then ".join(means.policies)
    return caption_of(means, f"Ablation of {words}: {order}; percentages are gains over the variant before in the same group.")
