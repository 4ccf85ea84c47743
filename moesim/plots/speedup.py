"""Speed-up over a baseline policy, setting by setting and in geometric mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from moesim.errors import ConfigError, unknown_name
from moesim.hardware import weakest
from moesim.plots.bars import AXES, legend_names, value_texts
from moesim.plots.captions import caption, corner_label, n_repeats, repeats_sentence, seeds_words
from moesim.plots.ends import not_drawn
from moesim.plots.exactness import inexact, meaning
from moesim.plots.failures import not_shown, not_shown_sentences
from moesim.plots.grouped import Bar, Words, grouped_bars
from moesim.plots.kinds import Drawing, kind
from moesim.plots.means import interval, over_draws
from moesim.plots.rows import REPEATS, group_name, levels, named, policies_of, prepared, qualified, settings_in, varying
from moesim.plots.style import add_corner

MEAN: Final = "geo. mean"
"""Group at the end: the geometric mean over all settings."""
BOTH_MOVE: Final = "the speeds of both policies move with them"
"""Why speed-ups have no intervals of the profile."""
_ROW: Final = 34  # bars that stand side by side
_LESS_IS_BETTER: Final = ("_ns", "energy_j", "energy_j_per_token")


def paired(rows: pd.DataFrame, baseline: str, metric: str, what: str) -> pd.DataFrame:
    """Give the rows of all policies but a baseline which that one has at the same setting and seed, with their speed-up."""
    rows = rows[pd.to_numeric(rows[metric], errors="coerce") > 0].reset_index(drop=True)
    same = [name for name in (*settings_in(rows), *REPEATS) if name in rows]
    keys = [tuple(group_name(value) for value in values) for values in rows[same].itertuples(index=False)]
    names = rows["policy"].tolist()
    base = {key: i for i, (key, name) in enumerate(zip(keys, names, strict=True)) if name == baseline}
    both = [(i, base[key]) for i, (key, name) in enumerate(zip(keys, names, strict=True)) if name != baseline and key in base]
    if not both:
        raise ConfigError(f"plot {what}: expected another policy at a setting of {baseline}, got none; name another --baseline")
    values = rows[metric].astype(float).tolist()
    ratios = rows.iloc[[i for i, _ in both]].assign(speedup=[_ratio(values[i], values[j], metric) for i, j in both])
    if "source_label" in ratios:
        labels = [label if isinstance(label, str) else None for label in rows["source_label"]]
        ratios["source_label"] = [_weaker(labels[i], labels[j]) for i, j in both]
    return ratios


def _compared(rows: pd.DataFrame, baseline: str, metric: str) -> pd.DataFrame:
    """Compare every policy with a baseline, in those settings in which both ran.

    The interval is over those repeats of one setting that drew other requests; the baseline itself is 1 and left out.
    """
    ratios, found = paired(rows, baseline, metric, "speedup"), varying(rows)
    panels, groups = _arranged(found, ratios)
    orders = [levels(ratios, name) for name in (*panels, *groups)]
    places = [[order.index(v) if v in order else -1 for v in ratios[name].tolist()]
              for name, order in zip((*panels, *groups), orders, strict=True)]  # fmt: skip
    if places:
        ratios = ratios.iloc[[i for _, i in sorted(zip(zip(*places, strict=True), range(len(ratios)), strict=True))]]
    ratios = ratios.assign(panel=_worded(ratios, panels), group=_worded(ratios, groups))
    settings = [geometric(part, {"panel": p, "group": g, "policy": name})
                for (p, g, name), part in ratios.groupby(["panel", "group", "policy"], sort=False)]  # fmt: skip
    table = pd.DataFrame(settings)
    last = str(table["panel"].iloc[-1])  # beside the last settings: a panel of its own would be mostly empty
    several = len(table[["panel", "group"]].drop_duplicates()) > 1  # the mean of one setting is that setting once more
    for name, part in table.groupby("policy", sort=False) if several else ():
        whole = geometric(part, {"panel": last, "group": MEAN, "policy": name})
        settings.append({**whole, "low": math.nan, "high": math.nan})
    return _sorted(pd.DataFrame(settings), policies_of(rows))


def baseline_of(rows: pd.DataFrame, baseline: str | None, what: str) -> str:
    """Choose the baseline: the one asked for, else the first policy."""
    known = policies_of(rows)
    if baseline is not None and baseline not in known:
        raise ConfigError(f"plot {what}: --baseline: {unknown_name('policy of these results', baseline, known)}")
    return known[0] if baseline is None else baseline


def labelled(rows: pd.DataFrame, data: pd.DataFrame) -> pd.DataFrame:
    """Give rows the weakest label of their policy's speed-ups, which counts the baseline's runs; the baseline has none."""
    if "source_label" not in rows:
        return rows
    found = {name: _weaker(*part["source_label"]) for name, part in data.groupby("policy", sort=False)}
    return rows.assign(source_label=rows["policy"].map(found))


def _weaker(*labels: str | None) -> str | None:
    known = [label for label in labels if label is not None]
    return weakest(known) if known else None


def _worded(ratios: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """Write the settings of each row in words."""
    if not columns:
        return [""] * len(ratios)
    words = [[named(value, name) for value in ratios[name].tolist()] for name in columns]
    return [", ".join(parts) for parts in zip(*words, strict=True)]


def _ratio(value: float, base: float, metric: str) -> float:
    return base / value if metric.endswith(_LESS_IS_BETTER) else value / base


def _arranged(found: Sequence[str], ratios: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Choose which settings divide the figure into panels, so that no row of bars gets too long."""
    panels = [name for name in found if name in ("model", "hardware")]
    groups = [name for name in found if name not in panels]
    while groups:
        texts = ratios[[*panels, *groups]].astype(str).drop_duplicates()
        most = texts.groupby(panels).size().max() if panels else len(texts)
        if most * ratios["policy"].nunique() <= _ROW:
            break
        panels.append(groups.pop(0))
    return panels, groups


def geometric(part: pd.DataFrame, names: dict[str, Any]) -> dict[str, Any]:
    """Geometric mean with the interval of the mean logarithm."""
    logs = over_draws(part, [math.log(value) for value in part["speedup"]])
    mean, low, high = (float(np.exp(value)) for value in interval(logs))
    told = qualified(part)
    if "fresh" in part:
        told["fresh"] = float(part["fresh"].mean())
    return {**names, "speedup": mean, "low": low, "high": high, "n": len(logs), **told}


def _sorted(data: pd.DataFrame, policies: Sequence[str]) -> pd.DataFrame:
    order = {name: list(dict.fromkeys(data[name])) for name in ("panel", "group")} | {"policy": list(policies)}
    ranks = [[order[name].index(value) for value in data[name]] for name in order]
    places = sorted(range(len(data)), key=list(zip(*ranks, strict=True)).__getitem__)
    return data.iloc[places].reset_index(drop=True)


@kind("rows", "speed-up over a baseline policy, with the geometric mean")
def speedup(frame: pd.DataFrame, baseline: str | None = None, metric: str = "decode_tokens_per_s") -> Drawing:
    """Bars of speed-ups over a baseline, the geometric mean at the end."""
    rows = prepared(frame, "speedup", [metric])
    baseline = baseline_of(rows, baseline, "speedup")
    data = _compared(rows, baseline, metric)
    whole = data[data["group"] == MEAN]
    counts = sorted(set(whole["n"]))
    differ = len(counts) > 1  # then each bar says of how many
    texts = value_texts(data, "speedup")
    bars = []
    for (_, row), text in zip(data.iterrows(), texts, strict=True):
        group, of = str(row["group"]).replace(", ", "\n"), ""
        if group == MEAN:
            group, of = (MEAN, f"n={row['n']}") if differ else (f"{MEAN}\nof all {row['n']}", "")
        bars.append(Bar(row["panel"], group, row["policy"], row["speedup"], row["low"], row["high"], (*text, of) if of else text))
    words = Words(f"Speed-up over {baseline}", "", f"speed-up over\n{baseline}{'*' if baseline in inexact(rows) else ''}")
    figure = grouped_bars(bars, words, legend_names(data, policies_of(rows)), level=1.0)
    repeats = [f"geometric mean of {seeds_words(rows)}"] if n_repeats(rows) else []
    add_corner(figure, corner_label(labelled(rows, data)), [*repeats, *not_shown(frame), meaning(inexact(rows))])
    if len(counts) < 2:
        settings = f"{counts[0]} settings in which both ran" if counts else ""
    else:
        each = ", ".join(f"{row['policy']} {row['n']}" for _, row in whole.iterrows())
        settings = f"the settings in which both ran ({each}); means over different settings do not compare"
    sentences = [
        f"The last group is the geometric mean over {settings}." if settings else "",
        repeats_sentence(rows, "Geometric means", "Student's t, logarithms"),
        not_drawn(rows, BOTH_MOVE),
        not_shown_sentences(frame),
    ]
    metric_words = AXES.get(metric, metric).replace("\n", " ")
    told = caption(f"Speed-up over {baseline} ({metric_words}), like with like.", labelled(rows, data), varying(rows), *sentences)
    return Drawing(data, figure, told)
