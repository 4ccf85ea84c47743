"""An ablation as a ladder: variants in a given order, and what each step gains over the one before."""

from __future__ import annotations

import math

import pandas as pd

from moesim.plots.bars import AXES, caption_of, draw_means, means_of, value_texts
from moesim.plots.kinds import Drawing, kind
from moesim.plots.rows import prepared


@kind("rows", "ablation: what each variant gains over the one before")
def ladder(frame: pd.DataFrame, metric: str = "decode_tokens_per_s", x: str | None = None) -> Drawing:
    """Bars of variants, with what each gains over the one before written on it."""
    means = means_of(prepared(frame, "ladder", [metric], failed=True), "ladder", metric, x)
    by = [name for name in means.shown if name != "policy"]
    before = means.data.groupby(by, sort=False)[metric].shift(1) if by else means.data[metric].shift(1)
    means = means._replace(data=means.data.assign(gain=means.data[metric] / before - 1))
    texts = [
        (value, *([] if math.isnan(gain) else [f"{round(100 * gain):+d}%".replace("+0%", "±0%")]), *rest)
        for (value, *rest), gain in zip(value_texts(means.data, metric), means.data["gain"], strict=True)
    ]
    words = AXES.get(metric, metric).replace("\n", " ")
    order = ", then ".join(means.policies)
    what = f"Ablation of {words}: {order}; percentages are gains over the variant before in the same group."
    return Drawing(means.data, draw_means(means, texts, "What each step gains over the one before"), caption_of(means, what))
