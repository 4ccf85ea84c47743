"""What figures of result rows draw, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from moesim.errors import ConfigError
from moesim.plots.bars import MEAN, decode_speed, energy, ladder, speedup
from moesim.plots.captions import corner_label, setting_label
from moesim.plots.catalogue import figures_of
from moesim.plots.heatmap import heatmap
from moesim.plots.lines import CHANCE, hit_rate, vram
from moesim.plots.result_rows import cache_column, prepared, shared_setting, varying
from moesim.plots.stacks import breakdown
from moesim.plots.studies import regret, tornado
from moesim.plots.style import drawn_among, looks_of, series_look
from moesim.plots.validation import validation
from tests.plots.plots_kit import rows


# ----------------------------------------------------------------------------------------------------------- means and repeats
def test_repeats_become_means_with_the_interval_of_students_t():
    frame = rows(*(("lru", speed, {"seed": i, "repeat": i}) for i, speed in enumerate((10.0, 12.0, 14.0))), ("dali", 20.0, {}))
    lru, dali = decode_speed.drawing(frame).data.to_dict("records")
    half = 4.302652729911275 * 2 / math.sqrt(3)  # t of 0.975 with 2 degrees of freedom, deviation 2
    assert (lru["decode_tokens_per_s"], lru["n"]) == (12, 3)
    assert (lru["low"], lru["high"]) == pytest.approx((12 - half, 12 + half))
    assert dali["n"] == 1
    assert math.isnan(dali["low"])
    assert "Means over 3 seeds; error bars: 95 % interval of the mean (Student's t)." in decode_speed.drawing(frame).caption


def test_made_up_routing_of_a_repeat_is_a_repeat():
    changes = [("lru", 10.0 + i, {"seed": i, "repeat": i, "trace": f"synthetic-x-4x8+8-seed{i + 3}"}) for i in range(2)]
    assert decode_speed.drawing(rows(*changes)).data["n"].tolist() == [2]
    assert varying(prepared(rows(*changes), "x")) == []


def test_a_mean_over_settings_has_no_interval():
    frame = rows(("lru", 10.0, {"hit_rate_decode": 0.2}), ("lru", 20.0, {"hit_rate_decode": 0.4, "batch_size": 4}))
    data = hit_rate.drawing(frame).data
    assert data["hit_rate_decode"].tolist() == pytest.approx([0.3, 0, 1])
    assert data["low"].isna().all()
    assert data["policy"].tolist() == ["lru", CHANCE, CHANCE]


def test_failed_runs_are_left_out_of_lines_and_results_of_none_refused():
    frame = rows(("lru", 10.0, {"hit_rate_decode": 0.2}), ("dali", None, {"error": "DeadlockError: x"}))
    assert hit_rate.drawing(frame).data["policy"].tolist() == ["lru", CHANCE, CHANCE]
    for name in ("decode_speed", "hit_rate"):
        with pytest.raises(ConfigError, match="expected at least one run that succeeded, got none"):
            list(figures_of(name, frame[frame["policy"] == "dali"], {}))


def test_two_results_of_one_setting_are_no_repeats():
    frame = rows(("lru", 10.0, {"workload_digest": "a"}), ("lru", 20.0, {"workload_digest": "b"}))
    with pytest.raises(ConfigError, match=r"got two of lru .batch 1, cache ratio 0.25. with other inputs; draw one folder"):
        decode_speed(frame)
    cold = frame.assign(warm_up_steps=[0, 4], hit_rate_warm=[0.1, 0.2], hit_rate_decode=0.3, workload_digest="a")
    assert [name for name, _ in figures_of("hit_rate", cold, {})] == ["hit_rate.warm_up=0", "hit_rate.warm_up=4"]


def test_groups_are_batches_and_panels_models_and_nothing_else_is_averaged():
    settings = [(m, b, c) for m in ("big", "small") for b in (4, 1) for c in (0.25, 0.5)]
    frame = rows(*(("lru", 1.0 + i, {"model": m, "batch_size": b, "cache_ratio": c}) for i, (m, b, c) in enumerate(settings)))
    parts = dict(figures_of("decode_speed", frame, {}))
    assert list(parts) == ["decode_speed.cache_ratio=0.25", "decode_speed.cache_ratio=0.5"]
    data = decode_speed.drawing(parts["decode_speed.cache_ratio=0.5"]).data
    assert data[["model", "batch_size", "decode_tokens_per_s"]].to_numpy().tolist() == [
        ["big", 1, 4], ["big", 4, 2], ["small", 1, 8], ["small", 4, 6],
    ]  # fmt: skip
    by_cache = dict(figures_of("decode_speed", frame, {"x": "cache_ratio"}))
    assert list(by_cache) == ["decode_speed.batch_size=4", "decode_speed.batch_size=1"]


def test_what_varies_together_is_one_setting():
    frame = rows(("lru", 1.0, {"trace": "a"}), ("lru", 2.0, {"model": "n", "trace": "b"}))
    assert varying(frame) == ["model"]
    assert [name for name, _ in figures_of("breakdown", frame, {})] == ["breakdown"]


def test_ratios_and_budgets_stand_side_by_side():
    frame = rows(("lru", 1.0, {}), ("lru", 2.0, {"cache_ratio": None, "cache_budget_bytes": 4 << 30, "cache_share": 0.4}))
    ready = prepared(frame, "x")
    assert cache_column(ready) == "cache"
    assert ready["cache_ratio"].tolist() == [0.25, 0.4]
    assert decode_speed.drawing(frame).data["cache"].tolist() == ["0.25", "4 GiB"]


# ------------------------------------------------------------------------------------------------------------------- speed-up
def sweep():
    """Baseline, a policy at all four settings, and one at two of them."""
    speeds = {"base": (1.0, 2.0, 4.0, 8.0), "fast": (2.0, 8.0, 8.0, 8.0), "half": (1.0, 1.0)}
    settings = [(b, c) for b in (1, 4) for c in (0.25, 0.5)]
    runs = ((name, speed, at) for name, found in speeds.items() for speed, at in zip(found, settings, strict=False))
    return rows(*(
        (name, speed, {"batch_size": b, "cache_ratio": c, "fidelity_fresh_decode": 0.5 if name == "half" else 1.0})
        for name, speed, (b, c) in runs
    ))  # fmt: skip


def test_speedups_are_like_with_like_and_end_with_the_geometric_mean():
    data = speedup.drawing(sweep(), "base").data
    fast = data[data["policy"] == "fast"]
    assert fast["speedup"].tolist() == pytest.approx([2, 4, 2, 1, 2])  # (2 * 4 * 2 * 1) ** (1 / 4)
    assert fast["group"].tolist()[-1] == MEAN
    half = data[data["policy"] == "half"]
    assert half["speedup"].tolist() == pytest.approx([1, 0.5, math.sqrt(0.5)])
    assert half["n"].tolist() == [1, 1, 2]
    assert "base" not in set(data["policy"])
    shown = [text.get_text() for axes in speedup(sweep(), "base").axes for text in axes.texts]
    assert any("n=4" in text for text in shown)
    assert any("n=2" in text for text in shown) and not any("%" in text for text in shown)
    frame = rows(("base", 1.0, {"makespan_ns": 80}), ("fast", 1.0, {"makespan_ns": 20}))  # times are sped up by being short
    assert speedup.drawing(frame, None, "makespan_ns").data["speedup"].tolist() == pytest.approx([4])
    assert "fast 4, half 2" in speedup.drawing(sweep(), "base").caption
    assert "not exact, share of decoding's gate weight computed as routed: half 50 %" in speedup.drawing(sweep(), "base").caption


def test_speedup_of_repeats_pairs_the_seeds():
    pairs = ((10.0, 20.0), (5.0, 40.0))
    each = ((s, name, speed) for s, pair in enumerate(pairs) for name, speed in zip(("base", "fast"), pair, strict=True))
    first = speedup.drawing(rows(*((name, speed, {"seed": s, "repeat": s}) for s, name, speed in each)), "base").data.iloc[0]
    assert first["speedup"] == pytest.approx(4)  # of 2 and 8
    deviation = math.log(8 / 2) / math.sqrt(2)
    assert first["high"] == pytest.approx(4 * math.exp(12.706204736432095 * deviation / math.sqrt(2)))


def test_a_baseline_must_be_there_and_meet_others():
    with pytest.raises(ConfigError, match="--baseline: unknown policy of these results 'bas'; did you mean 'base'"):
        speedup(sweep(), "bas")
    alone = rows(("base", 1.0, {}), ("fast", 1.0, {"batch_size": 2}))
    with pytest.raises(ConfigError, match="expected another policy at a setting of base, got none"):
        speedup(alone, "base")


def test_many_settings_are_divided_into_panels():
    settings = [(b, c) for b in range(1, 9) for c in (0.1, 0.2, 0.3, 0.4, 0.5)]
    names = [("base", 1.0), ("fast", 2.0)]
    frame = rows(*((name, v, {"batch_size": b, "cache_ratio": c}) for b, c in settings for name, v in names))
    data = speedup.drawing(frame, "base").data
    assert data["panel"].nunique() == 8
    assert data[["panel", "group"]].iloc[-1].tolist() == ["batch 8", MEAN], "the last group, in no panel of its own"
    assert data["n"].max() == 40


# ------------------------------------------------------------------------------------------------------------ ladder and energy
def test_steps_of_a_ladder_compare_with_the_one_before_in_their_group():
    variants = [(b, name, s) for b, speeds in ((1, (10.0, 15.0, 12.0)), (4, (20.0, 20.0))) for name, s in zip("abc", speeds)]
    data = ladder.drawing(rows(*((name, speed, {"batch_size": b}) for b, name, speed in variants))).data
    assert data["gain"].fillna(0).tolist() == pytest.approx([0, 0.5, -0.2, 0, 0])
    figure = ladder(rows(("a", 10.0, {}), ("b", 15.0, {"fidelity_fresh_decode": 0.9})))
    assert [text.get_text().replace(" · ", "\n") for text in figure.axes[0].texts] == ["10", "15\n+50%"]


def test_energy_is_tokens_per_kilojoule_with_the_label_of_the_power():
    frame = rows(
        ("a", 1.0, {"energy_j_per_token": 4.0, "energy_label": "assumed"}),
        ("b", 1.0, {"energy_j_per_token": None, "energy_label": None}),
    )
    data = energy.drawing(frame).data
    assert data[["policy", "tokens_per_kj", "source_label"]].to_numpy().tolist() == [["a", 250, "assumed"]]
    assert "Power figures: assumed" in energy.drawing(frame).caption
    with pytest.raises(ConfigError, match="idle and busy power of every device, got none"):
        energy(frame[frame["policy"] == "b"])


def test_breakdown_is_per_token_and_adds_up():
    from moesim.metrics.breakdown import CAUSES

    times = {f"decode_time_{cause}_ns": {"dense": 4e6, "exposed_demand": 12e6}.get(cause, 0) for cause in CAUSES}
    data = breakdown.drawing(rows(("lru", 1.0, times | {"fidelity_fresh_decode": 0.5}))).data
    assert data["ms"].sum() == pytest.approx(4)  # 16 ms for 4 tokens
    assert dict(zip(data["cause"], data["share"], strict=True))["exposed_demand"] == pytest.approx(0.75)
    assert set(data["bar"]) == {"lru*"}


# ----------------------------------------------------------------------------------------------------------- heat map and Pareto
def variants():
    """A policy over w and u; one run leaves both at a default of its own, one has another third option."""
    found = [(f"p(w={w},u={u})", 10.0 * w + u, {"policy_options": json.dumps({"w": w, "u": u})}) for w in (2, 1) for u in (0, 5)]
    return rows(*found, ("p", 9.0, {}))


def test_a_heat_map_of_two_options():
    data = heatmap.drawing(variants(), "w", "u").data
    assert {(row["w"], row["u"]): row["decode_tokens_per_s"] for _, row in data.iterrows()} == {
        (2, 0): 20, (2, 5): 25, (1, 0): 10, (1, 5): 15,
    }  # fmt: skip
    figure = heatmap(variants(), "w", "u")
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0", "5"]
    numbers = {((1, 0), "20"), ((1, 1), "25"), ((0, 0), "10"), ((0, 1), "15")}
    assert {(t.get_position(), t.get_text()) for t in axes.texts} == numbers
    assert axes.patches[0].get_xy() == (0.5, 0.5)  # the largest is framed
    (_, part), *others = figures_of("heatmap", variants(), {"x": "w", "y": "u"})
    assert not others
    assert "Not shown: p, which chooses them itself." in heatmap.drawing(part, "w", "u").caption


def test_a_heat_map_knows_defaults_and_settings_and_other_options():
    found = [("dali(prefetch_size=0)", 1.0, {"policy_options": '{"prefetch_size": 0}', "batch_size": b}) for b in (1, 4)]
    found += [("dali(prefetch_size=0,extra=true)", 3.0, {"policy_options": '{"prefetch_size": 0, "extra": true}'})]
    names = [name for name, _ in figures_of("heatmap", rows(*found), {"x": "batch_size", "y": "prefetch_size"})]
    assert names == ["heatmap.policy=dali", "heatmap.policy=dali-extra=true"]
    fiddler = rows(("fiddler", 1.0, {}), ("fiddler", 2.0, {"batch_size": 4}))
    with pytest.raises(ConfigError, match="unknown option or setting 'w'"):
        heatmap(fiddler, "batch_size", "w")
    with pytest.raises(ConfigError, match="expected two options that vary, got none; name them with --x and --y"):
        heatmap(fiddler)
    with pytest.raises(ConfigError, match="expected two different options"):
        heatmap(fiddler, "batch_size", "batch_size")


def test_the_front_has_what_no_other_beats_and_only_what_can_be_had():
    gib = float(1 << 30)
    points = {"a": (1, 10, {}), "b": (2, 20, {}), "c": (2, 15, {}), "d": (3, 20, {})}
    points |= {"loose": (1, 99, {"fidelity_fresh_decode": 0.4}), "belady": (1, 50, {"source_label": "oracle"})}
    frame = rows(*((name, v, {"peak_memory_bytes.gpu0": m * gib / 2, "peak_memory_bytes.gpu1": m * gib / 2} | more)
                   for name, (m, v, more) in points.items()))  # fmt: skip
    data = vram.drawing(frame).data.set_index("policy")
    assert data.index[data["on_front"]].tolist() == ["a", "b"]
    assert data["gpu_memory_gib"].tolist() == [1, 2, 2, 3, 1, 1]
    assert data.index[~data["comparable"]].tolist() == ["loose", "belady"]
    assert "40%*" not in [text.get_text() for text in vram(frame).axes[0].texts]
    assert "computed as routed: loose 40 %" in vram.drawing(frame).caption
    with pytest.raises(ConfigError, match=r"expected columns peak_memory_bytes.gpu0"):
        vram(rows(("a", 1.0, {})))


# ------------------------------------------------------------------------------------------------- studies of other commands
def test_a_tornado_is_sorted_by_swing():
    settings = [("link", "x0.5", 0.5, 8.0), ("link", "x2", 2.0, 11.0), ("cpu", "x2", 2.0, 15.0), ("gpu", "h100", None, 10.0)]
    frame = pd.DataFrame(
        [{"policy": "p", "knob": k, "setting": s, "factor": f, "decode_tokens_per_s": v, "base_decode_tokens_per_s": 10.0}
         for k, s, f, v in settings]
    )  # fmt: skip
    data = tornado.drawing(frame).data
    assert data["knob"].tolist() == ["cpu", "link", "link", "gpu"]
    assert data["swing"].tolist() == pytest.approx([0.5, 0.3, 0.3, 0])
    assert data["side"].tolist() == ["more", "less", "more", "other"]
    axes = tornado(frame.assign(fidelity_fresh_decode=0.7)).axes[0]
    assert [t.get_text() for t in axes.texts] == ["x2 (+50%)", "x0.5 (-20%)", "x2 (+10%)", "h100 (±0%)"]
    assert axes.get_title(loc="left") == "p*: 10 tokens/s as it is"


def test_regret_in_seconds():
    record = {"policy": "p", "decision": "prediction", "replaced": True, "base_ns": 4e9, "before_ns": 4e9, "after_ns": 3e9}
    frame = pd.DataFrame([record | {"order": order} for order in ("forward", "reversed", "alone")])
    data = regret.drawing(frame).data
    assert data["order"].tolist() == ["forward", "reversed"]
    assert data["saved_s"].tolist() == [1, 1]


def test_simulated_beside_measured_in_ms():
    times = {"predicted": 9e6, "measured": 10e6, "low": 8e6, "high": 11e6}
    frame = pd.DataFrame([{"policy": "p", "repeats": 3} | {f"decode_step_ns_{side}": ns for side, ns in times.items()}])
    data, _, caption = validation.drawing(frame)
    assert data[["simulated_ms", "measured_ms", "low_ms", "high_ms"]].to_numpy().tolist() == [[9, 10, 8, 11]]
    assert "Median absolute error 10.0 %" in caption


# ------------------------------------------------------------------------------------------------------------------------ looks
BLIND = {  # what is left of linear red, green and blue: Machado, Oliveira and Fernandes, 2009, table 1
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "none": np.eye(3).tolist(),
}


def lab(colour: str, blind: str) -> np.ndarray:
    """CIE L*a*b* as somebody sees it."""
    linear = np.array([v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour)])
    seen = np.clip(np.array(BLIND[blind]) @ linear, 0, 1)
    xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = np.cbrt(np.array(xyz) @ seen / np.array([0.95047, 1, 1.08883]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_twenty_policies_have_colours_and_hatches_of_their_own():
    looks = [series_look(i) for i in range(20)]
    assert len({one.hatch for one in looks}) == 20, "in grey, hatches tell bars apart"
    assert len({(one.marker, one.dash) for one in looks}) == 20, "and markers with dashes lines"
    for a, b in combinations(looks, 2):
        for blind in BLIND:
            assert np.linalg.norm(lab(a.colour, blind) - lab(b.colour, blind)) > 7, (a, b, blind)


def test_policies_can_be_told_apart_in_colour_and_in_grey():
    for a, b in combinations([series_look(i) for i in range(32)], 2):
        assert a.colour != b.colour
        assert (a.marker, a.dash) != (b.marker, b.dash)
        assert a.hatch != b.hatch or abs(lab(a.colour, "none")[0] - lab(b.colour, "none")[0]) > 8
    with pytest.raises(ConfigError, match="at most 32 policies in one figure, got 33; choose some with --policies"):
        looks_of([str(i) for i in range(33)])


def test_a_policy_keeps_its_look_whichever_others_are_in_the_figure():
    whole = [str(i) for i in range(40)]
    with drawn_among(whole):
        assert looks_of(["7", "3"]) == {"7": series_look(7), "3": series_look(3)}
        late = looks_of(["0", "35", "31", "36", "new"])  # places from 32 on have no colours of their own
        assert (late["0"], late["31"]) == (series_look(0), series_look(31))
        assert len({one.colour for one in late.values()}) == 5
        with drawn_among(["3"]):
            assert looks_of(["3"])["3"] == series_look(3)
    assert looks_of(["7"]) == {"7": series_look(0)}


def test_an_oracle_among_the_policies_is_named_apart_from_the_weakest_source():
    frame = rows(("lru", 1.0, {}), ("dali", 2.0, {"source_label": "derived"}), ("belady", 3.0, {"source_label": "oracle"}))
    assert corner_label(frame).endswith("simulated, weakest source: derived · oracle: belady")
    assert corner_label(frame[:2]).endswith("simulated, weakest source: derived")
    assert corner_label(frame[2:]).endswith("simulated, weakest source: oracle")
    both = rows(("lru", 1.0, {}), ("lru", 2.0, {"source_label": "oracle"}))
    assert corner_label(both).endswith("weakest source: measured · oracle: lru at some settings")
    assert "derived (dali), oracle (belady)" in decode_speed.drawing(frame).caption


def test_a_figure_of_one_setting_takes_the_first_at_which_most_policies_ran():
    """At batch 1 b failed, at batch 2 none of the two did in repeat 1; c has no run that succeeded."""
    lost = {"error": "does not fit", "decode_tokens_per_s": None}
    one, two = ({"repeat": n, "seed": n} for n in (0, 1))
    frame = rows(
        ("a", 1.0, {}), ("b", None, lost), ("c", None, lost),
        ("a", 2.0, {"batch_size": 2, **one}), ("b", None, {"batch_size": 2, **one, **lost}),
        ("a", 3.0, {"batch_size": 2, **two}), ("b", 4.0, {"batch_size": 2, **two}),
        ("a", 5.0, {"batch_size": 4}), ("b", 6.0, {"batch_size": 4}),
    )  # fmt: skip
    shown, missing = shared_setting(frame, "gantt")
    assert shown["run"].tolist() == [5, 6]
    assert missing == ["c"]
    assert setting_label(shown, missing).endswith(" · did not run here: c")
    shown, missing = shared_setting(frame[frame["policy"] == "a"], "gantt")
    assert (shown["run"].tolist(), missing) == ([0], [])
    assert "did not run" not in setting_label(shown, missing)
