"""Means and intervals over draws of requests, and settings whose names are equal."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from moesim.errors import ConfigError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.metrics.breakdown import CAUSES
from moesim.plots.bars import decode_speed, energy, speedup
from moesim.plots.catalogue import KINDS
from moesim.plots.drawing import chosen, files_of
from moesim.plots.lines import hit_rate, vram
from moesim.plots.result_rows import settings_in
from moesim.plots.studies import tornado
from moesim.plots.style import drawn_for, rendered
from tests.plots.plots_kit import rows

ROOT = Path(__file__).resolve().parents[2]


def drawn(*requests, policy="lru", first=10.0, **more):
    """Repeats of one setting, 2 tokens/s apart, which drew these requests."""
    return [
        (policy, first + 2 * i, {"seed": i, "repeat": i, "requests_drawn": r, "workload_digest": f"{r}-{i}", **more})
        for i, r in enumerate(requests)
    ]


# ----------------------------------------------------------------------------------------------------------------------- draws
def test_seeds_that_drew_the_same_requests_have_a_mean_and_no_interval():
    frame = rows(*drawn("1,2", "1,2", "1,2"))
    (row,) = decode_speed.drawing(frame).data.to_dict("records")
    assert (row["decode_tokens_per_s"], row["n"]) == (12, 1)
    assert math.isnan(row["low"])
    assert math.isnan(row["high"])
    assert "Means over 3 seeds that drew the same requests: no interval." in decode_speed.drawing(frame).caption
    assert "error bars" not in decode_speed.drawing(frame).caption
    assert "mean of 3 seeds that drew the same requests" in " ".join(text.get_text() for text in decode_speed(frame).texts)


def test_an_interval_is_over_draws_not_over_seeds():
    frame = rows(*drawn("1,2", "1,2", "3,4"))  # 10 and 12, 14: the draws are 11 and 14
    (row,) = decode_speed.drawing(frame).data.to_dict("records")
    half = 12.706204736432095 * math.sqrt(4.5 / 2)  # t of 0.975 with 1 degree of freedom, variance 4.5
    assert (row["decode_tokens_per_s"], row["n"]) == (12.5, 2)
    assert (row["low"], row["high"]) == pytest.approx((12.5 - half, 12.5 + half))
    told = "Means over 3 seeds that drew 2 different sets of requests; error bars: 95 % interval of the mean (Student's t)"
    assert f"{told} over these." in decode_speed.drawing(frame).caption


def test_draws_are_counted_where_a_setting_has_no_value():
    frame = rows(*drawn("1,2", "1,2", "1,2", transfer_curve=None, chunk_bytes=None, predictors=None))
    assert decode_speed.drawing(frame).data["n"].tolist() == [1]
    assert "Means over 3 seeds that drew the same requests: no interval." in decode_speed.drawing(frame).caption
    mixed = rows(*drawn("1", "2", chunk_bytes=None), *drawn("1", "1", chunk_bytes=4096))
    assert "2 seeds that drew 1 to 2 different sets of requests" in decode_speed.drawing(mixed).caption


def test_made_up_routing_is_another_draw_with_each_seed():
    changes = drawn("0,1", "0,1")
    changes = [(name, speed, more | {"trace": f"synthetic-x-4x8+8-seed{i}"}) for i, (name, speed, more) in enumerate(changes)]
    assert decode_speed.drawing(rows(*changes)).data["n"].tolist() == [2]
    assert "Means over 2 seeds; error bars: 95 %" in decode_speed.drawing(rows(*changes)).caption


def test_speed_ups_and_memory_are_over_draws_too():
    memory = {"peak_memory_bytes.gpu0": 2 << 30}
    frame = rows(*drawn("1", "1", "2", **memory), *drawn("1", "1", "2", policy="dali", first=30.0, **memory))
    one = speedup.drawing(frame).data.iloc[0]
    logs = [(math.log(30 / 10) + math.log(32 / 12)) / 2, math.log(34 / 14)]
    assert (one["speedup"], one["n"]) == (pytest.approx(math.exp(sum(logs) / 2)), 2)
    assert "Geometric means over 3 seeds that drew 2 different sets of requests; error bars" in speedup.drawing(frame).caption
    uneven = frame.assign(**{"peak_memory_bytes.gpu0": [1 << 30, 1 << 30, 3 << 30] * 2})
    assert vram.drawing(uneven).data["gpu_memory_gib"].tolist() == [2, 2]
    assert "Means over 3 seeds that drew 2 different sets of requests; error bars" in vram.drawing(uneven).caption


def test_settings_with_equal_names_are_not_taken_for_repeats():
    frame = rows(*drawn("1", "2"))
    assert decode_speed.drawing(frame.assign(group="a")).data["n"].tolist() == [2]
    with pytest.raises(
        ConfigError, match=r"expected one result a setting, got two of lru .* of an experiment that has one of them"
    ):
        decode_speed(frame.assign(group=["a", "b"]))
    by_policy = rows(*drawn("1", "2"), *drawn("1", "2", policy="dali"))
    assert decode_speed.drawing(by_policy.assign(group=["a", "a", "b", "b"])).data["n"].tolist() == [2, 2]


# ------------------------------------------------------------------------------------------------------------------ captions
RATIOS = ("speedup", "speedup_lines")
SPEEDS = ("throughput", "speed_by_context", "vram", "prefill_speed")
INTERVALS = "Intervals of the profile are not drawn: "
MEMORY = {"peak_memory_bytes.gpu0": 1 << 30, "prefill_tokens_per_s": 3.0}
TWO = rows(("lru", 10.0, MEMORY), ("dali", 12.1, MEMORY))
VARIED = TWO.assign(decode_tokens_per_s_least=9.0, decode_tokens_per_s_most=13.0)
NOT_VARIED = TWO.assign(notes="interval not varied (set intervals: true): x 1 to 2 us")
BELADY = rows(("fiddler", 10.0, {"hit_rate_decode": 0.46}), ("belady", 10.0, {"hit_rate_decode": 0.43}))
NOTES = "1 request of 64, 2 units per expert, speed -3 to +4 % over link.bytes_per_s 1 to 2 GB/s"
LABELS = rows(("lru", 10.0, {"source_label": "assumed"}), ("dali", 20.0, {}), ("belady", 30.0, {"source_label": "oracle"}))
MADE_UP = [("lru", 10.0, {"seed": i, "repeat": i, "trace": f"synthetic-x-4x8+8-seed{3 + i}"}) for i in range(3)]
SEVERAL = rows(*drawn("1", "2", "3"), *drawn("1,2", "1,2", "1,2", batch_size=8))
DRAWN_TWICE = rows(*drawn("1", "1", "2", **{f"time_{cause}_ns": 1e6 for cause in CAUSES}))
DRAWS = "Means over 3 seeds that drew 2 different sets of requests. "


@pytest.mark.parametrize(
    ("kind", "frame", "has", "lacks"),
    [
        ("decode_speed", SEVERAL, "3 seeds that drew 1 to 3 different sets of requests; error bars", INTERVALS),
        ("decode_speed", SEVERAL, "over these, where there is more than one.", "no interval"),
        ("breakdown", DRAWN_TWICE, DRAWS.replace(". ", "; error bars: 95 %"), "no interval"),
        ("heatmap", DRAWN_TWICE, DRAWS, "error bars"),
        ("decode_speed", rows(("lru", 10.0, {"notes": NOTES})), "Notes: 1 request of 64, 2 units per expert.", "speed -3"),
        (
            "decode_speed",
            TWO.assign(notes="3 requests of the 9 with signal x"),
            "Notes: 3 requests of the 9 with signal x.",
            "-3",
        ),
        *((k, LABELS, "weakest source among the numbers used: assumed (dali), oracle (belady).", INTERVALS) for k in RATIOS),
        *((kind, NOT_VARIED, "Notes: interval not varied (set intervals: true): x 1 to 2 us.", INTERVALS) for kind in RATIOS),
        *((kind, VARIED, f"{INTERVALS}the speeds of both policies move with them.", "Notes") for kind in RATIOS),
        *((kind, VARIED, f"{INTERVALS}`decode_speed` draws those of decoding.", "both") for kind in SPEEDS),
        *((kind, TWO, "machine: h", INTERVALS) for kind in SPEEDS),
        ("decode_speed", rows(*MADE_UP), "routing: synthetic-x-4x8+8-seed3 to 5 (recorded)", INTERVALS),
        ("decode_speed", rows(*MADE_UP[:1]), "routing: synthetic-x-4x8+8-seed3 (recorded)", " to 5"),
        ("hit_rate", BELADY, "the best of the caches that fetch on demand and admit every miss", INTERVALS),
        ("hit_rate", BELADY[:1], "One lookup per layer visit", "admit every miss"),
    ],
)
def test_captions(kind, frame, has, lacks):
    options = {"heatmap": {"x": "batch_size", "y": "cache_ratio"}, "breakdown": {"metric": "time"}}.get(kind, {})
    caption = KINDS[kind].drawing(frame, **options).caption
    assert has in caption and lacks not in caption


def test_the_weaker_label_of_the_two_runs_is_that_of_a_speed_up():
    assert speedup.drawing(LABELS).data["source_label"].tolist()[0] == "assumed"
    for kind in RATIOS:
        assert "weakest source: assumed · oracle: belady" in " ".join(text.get_text() for text in KINDS[kind](LABELS).texts)


# ------------------------------------------------------------------------------------------------------------------ a figure
@pytest.mark.parametrize("kind", ["speedup", "decode_speed"])
def test_a_figure_is_the_same_with_and_without_a_pdf(kind):
    frame = rows(*drawn("1", "2"), *drawn("1", "2", policy="dali"))
    both, one = files_of(kind, "f", [frame], {}), files_of(kind, "f", [frame], {}, suffixes=["png"])
    assert set(both) == {"f.png", "f.pdf", "f.csv", "f.txt"}
    assert one == {name: data for name, data in both.items() if name != "f.pdf"}
    assert both["f.csv"].decode() == KINDS[kind].drawing(frame).data.to_csv(index=False, lineterminator="\n")


def test_grids_are_drawn_both_ways():
    memory = {"peak_memory_bytes.gpu0": 1 << 30, "hit_rate_decode": 0.5}
    frame = rows(("lru", 10.0, memory), ("lru", 11.0, memory | {"cache_ratio": 0.5}))
    for figure in (hit_rate(frame), vram(frame)):
        (axes,) = figure.axes
        assert all(line.get_visible() for line in (*axes.get_xgridlines(), *axes.get_ygridlines()))


@pytest.mark.parametrize("changes", [{"x0.5": -0.47, "x2": 1.03}, {"x0.5": -0.004, "x2": 0.006}, {"x2": 0.9}, {"x0.5": -0.3}])
def test_a_tornado_shows_no_more_than_its_bars_and_their_texts(changes):
    frame = pd.DataFrame(
        [{"policy": "p", "knob": "link.bytes_per_s", "setting": s, "factor": float(s[1:]),
          "decode_tokens_per_s": 10 * (1 + change), "base_decode_tokens_per_s": 10.0} for s, change in changes.items()]
    )  # fmt: skip
    figure = tornado(frame)
    (axes,) = figure.axes
    figure.canvas.draw()
    low, high = axes.get_xlim()
    first, last = 100 * min(0, *changes.values(), 0), 100 * max(0, *changes.values(), 0)
    assert last - first >= 0.5 * (high - low)
    assert all(first - 1e-9 <= tick <= last + 1e-9 for tick in axes.get_xticks())
    box = axes.get_window_extent()
    assert all(t.get_window_extent().x0 >= box.x0 and t.get_window_extent().x1 <= box.x1 for t in axes.texts)
    assert "±" not in "".join(text.get_text() for text in axes.texts)  # changes below 1 % are told


# ---------------------------------------------------------------------------------------------------------------------- energy
def test_the_example_of_energy_in_the_docs_works():
    text = (ROOT / "docs" / "guide" / "figures.md").read_text(encoding="utf-8").partition("## Energy")[2]
    found = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])

    def frame(experiment):
        return pd.DataFrame(run_experiment(Experiment(parse_config(experiment, "docs"), "docs"), jobs=1).rows)

    rows = frame(found)
    data = energy.drawing(rows).data
    assert data["policy"].tolist() == ["on-demand", "fiddler"]
    assert (data["tokens_per_kj"] > 0).all()
    assert "Power figures: assumed" in energy.drawing(rows).caption
    with pytest.raises(ConfigError, match=r"expected runs on hardware whose profile has idle and busy power of every device"):
        energy(frame(found | {"hardware": "l4-cascadelake"}))


def test_a_policy_looks_alike_with_and_without_a_baseline_among_the_bars():
    """Figures of one set of results are read together: dropping the baseline must not shift the colours of the others."""
    colours = {}
    for kind in ("decode_speed", "speedup"):
        (legend,) = KINDS[kind](rows(("a", 1.0, {}), ("b", 2.0, {}), ("c", 4.0, {}))).legends
        pairs = zip(legend.get_texts(), legend.get_patches(), strict=True)
        colours[kind] = {text.get_text(): patch.get_facecolor() for text, patch in pairs}
    assert colours["speedup"] == {name: colours["decode_speed"][name] for name in ("b", "c")}


def test_a_png_for_a_paper_has_300_dots_an_inch():
    frame = rows(("lru", 10.0, {}))
    wide = {}
    for medium in ("screen", "paper"):
        with drawn_for(medium):
            figure = decode_speed(frame)
            png = rendered(figure, ["png"])["png"]
        wide[medium] = int.from_bytes(png[16:20], "big") / figure.get_figwidth()  # the header's width in dots
    assert wide == pytest.approx({"screen": 240, "paper": 300}, rel=0.01)


@pytest.mark.parametrize(("column", "short"), [("batch_size", "batch"), ("cache_ratio", "cache")])
def test_rows_are_chosen_by_the_names_of_the_table(column, short):
    frame = rows(("lru", 10.0, {"batch_size": 1, "cache_ratio": 2}), ("lru", 11.0, {"batch_size": 2, "cache_ratio": 1}))
    assert chosen(frame, [], [(short, "2")], "x").equals(chosen(frame, [], [(column, "2")], "x"))
    assert len(chosen(frame, [], [(short, "2")], "x")) == 1
    assert settings_in(rows(("lru", 10.0, {"warm_up": 1, "transfer_curve": "pinned"}))).count("warm_up") == 1
