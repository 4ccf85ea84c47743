"""Figures hold what they should: bars, lines, labels, legends. What they look like was judged by eye."""

from __future__ import annotations

import re
import zlib
from io import BytesIO

import matplotlib
import numpy as np
import pandas as pd
import pytest
from fontTools.subset import Options
from fontTools.ttLib import TTFont
from matplotlib.figure import Figure

from moesim import plots
from moesim.core.colours import BLACK, FILL, LABEL, SERIES, WHITE, text_on
from moesim.errors import ConfigError
from moesim.metrics.breakdown import CAUSES
from moesim.metrics.machine import Machine
from moesim.metrics.naming import SETTINGS
from moesim.plots.catalogue import figures_of
from moesim.plots.gantt import chart
from moesim.plots.lines import hit_rate
from moesim.plots.style import _wrapped, add_corner, rendered, series_look
from moesim.records import LayerRecord, Records, StepRecord, TaskRecord, TransferRecord

MACHINE = Machine({"gpu0": "gpu", "cpu0": "cpu"}, ("cpu0->gpu0", "gpu0->cpu0"))


def results():
    """Rows of three policies at two cache ratios."""
    rows = []
    for number, policy in enumerate(["lru", "daop", "belady"]):
        for ratio in (0.25, 0.5):
            row = {
                "policy": policy, "cache_ratio": ratio, "batch_size": 4, "model": "mixtral-8x7b", "hardware": "rtx3090-epyc7532",
                "trace": "mini-mixtral", "source_label": ["measured", "published", "spec-sheet"][number],
                "decode_tokens_per_s": 10.0 * (number + 1) * (1 + ratio), "hit_rate_decode": ratio + 0.1 * number,
                "fidelity_fresh_decode": 0.9567 if policy == "daop" else 1.0, "n_decode_tokens": 10,
            }  # fmt: skip
            row |= {f"time_{cause}_ns": 1_000_000 * i for i, cause in enumerate(CAUSES)}
            row |= {f"decode_time_{cause}_ns": 2_000_000 * i for i, cause in enumerate(CAUSES)}
            rows.append(row)
    return pd.DataFrame(rows)


def with_oracle(frame):
    return frame.assign(source_label=["oracle" if p == "belady" else s for p, s in zip(frame.policy, frame.source_label)])


def texts(figure):
    """All texts of a figure, drawn first so that tick labels are there."""
    figure.canvas.draw()
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]


def legend(figure):
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()] + figure.legends
    return [t.get_text() for t in legends[0].get_texts()]


def test_decode_speed():
    figure = plots.decode_speed(results())
    (axes,) = figure.axes
    assert [round(bar.get_height(), 6) for bar in axes.patches] == [12.5, 25, 37.5, 15, 30, 45]
    assert legend(figure) == ["lru", "daop*", "belady"]
    found = texts(figure)
    assert "decode speed\n(tokens/s, whole batch)" in found
    assert {"25.0", "12.5"} <= set(found) and not any("%*" in text for text in found)
    corner = next(t for t in found if "rtx3090" in t).replace("\n", " ")
    assert "computed as routed: daop 95.6 %; the rest is approximated, and the replayed routing ignores it" in corner
    assert "mixtral-8x7b · rtx3090-epyc7532 · mini-mixtral" in corner
    assert "weakest source: spec-sheet" in corner
    exact = results()[lambda frame: frame["policy"] != "daop"]
    assert not any("*" in t for t in texts(plots.decode_speed(exact)))
    assert legend(plots.decode_speed(results().iloc[1:])) == ["lru", "daop*", "belady"]  # one has no bar in the first group


def test_what_else_is_swept_becomes_panels_and_is_not_averaged():
    figure = plots.decode_speed(results(), "batch_size")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["cache 0.25", "cache 0.5"]
    assert [[round(bar.get_height(), 6) for bar in axes.patches] for axes in figure.axes] == [[12.5, 25, 37.5], [15, 30, 45]]
    assert not any("mean over" in t for t in texts(figure))
    frame = pd.concat([results(), results().assign(prompt_tokens=[8, 8, 16, 16, 8, 16], batch_size=8)])
    assert any("mean over batch 4, 8" in t.replace("\n", " ") for t in texts(plots.hit_rate(frame)))


def test_hit_rate_has_belady_and_the_null():
    figure = plots.hit_rate(with_oracle(results()))
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["lru", "daop*", "belady (oracle)", "chance (cached share)"]
    assert lines["belady (oracle)"].get_color() == BLACK
    assert lines["belady (oracle)"].get_linewidth() > lines["lru"].get_linewidth()
    assert np.allclose(lines["daop*"].get_xydata(), [(25, 35), (50, 60)])
    assert np.allclose(lines["chance (cached share)"].get_xydata(), [(0, 0), (100, 100)])
    assert legend(figure) == list(lines), "in the order of the experiment"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("cache ratio (% of all experts)", "decode hit rate (%)")
    assert (axes.get_xlim(), axes.get_ylim()) == ((20, 55), (0, 103))
    wide = results().replace({"cache_ratio": {0.5: 0.75}})  # ratios that span half of the axis have it whole
    assert plots.hit_rate(wide).axes[0].get_xlim() == (0, 100)
    said = "belady bounds replacement only: prefetching can exceed it"
    assert said in figure.get_supxlabel()
    assert said not in plots.hit_rate(results()[lambda frame: frame["policy"] != "belady"]).get_supxlabel()
    chance = lines["chance (cached share)"]
    assert chance.get_color() not in {series_look(number).colour for number in range(32)}  # it looks like no policy
    assert chance.is_dashed() and chance.get_marker() == "None"  # belady's is black, too, and whole


def test_hit_rate_tells_hits_of_the_cache_from_prefetched_ones():
    """Of 35 and 60 % hits, prefetches brought 25 and 30: the cache alone hits 10 and 30 %."""
    frame = results().assign(prefetch_hit_share_decode=[0.0, 0.0, 0.25, 0.3, None, None])
    drawn = hit_rate.drawing(frame)
    (axes,) = drawn.figure.axes
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == WHITE]
    assert [line.get_xydata().round(9).tolist() for line in hollow] == [[[25, 10], [50, 30]]]
    assert "cache hits alone" in legend(drawn.figure)
    assert "Hollow marks: without the hits of a copy that a prefetch has brought" in drawn.caption
    parts = drawn.data.set_index(["policy", "cache_ratio"])["prefetched"]
    assert parts["daop"].tolist() == [0.25, 0.3]
    assert parts["lru"].tolist() == [0, 0]
    assert parts["belady"].isna().all()
    for plain in (results(), frame.assign(hit_rate_warm=0.5)):
        drawn = hit_rate.drawing(plain, **({"metric": "hit_rate_warm"} if "hit_rate_warm" in plain else {}))
        assert "cache hits alone" not in legend(drawn.figure)
        assert "Hollow" not in drawn.caption


def with_budgets(frame):
    """Budgets instead of ratios: each policy gets its own share of the experts from the same budget."""
    budgets = [(8 if ratio == 0.25 else 12) << 30 for ratio in frame["cache_ratio"]]
    return frame.assign(cache_budget_bytes=budgets, cache_ratio=[0.1 + 0.01 * i for i in range(len(frame))])


def test_a_sweep_of_budgets_is_grouped_by_budget():
    figure = plots.decode_speed(with_budgets(results()), "cache_budget_bytes")
    (axes,) = figure.axes
    assert len(axes.patches) == 6
    assert legend(figure) == ["lru", "daop*", "belady"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["8 GiB", "12 GiB"]
    assert axes.get_xlabel() == "GPU memory budget"
    assert not any("mean over" in t for t in texts(figure))
    frame = with_budgets(results()).assign(**{c: 1 for c in SETTINGS if c not in results()})
    for name in ("decode_speed", "hit_rate"):
        assert [(file, len(part)) for file, part in figures_of(name, frame, {})] == [(name, 6)]


def test_policies_keep_their_colours_from_figure_to_figure():
    bars = plots.decode_speed(results()).axes[0].patches
    lines = {line.get_label(): line for line in plots.hit_rate(results()).axes[0].lines}
    for bar, name in zip(bars, ("lru", "daop*"), strict=False):
        assert matplotlib.colors.same_color(bar.get_facecolor(), lines[name].get_color())
    assert lines["lru"].get_color() == SERIES[1], "in every result, whichever policies it has"


def test_breakdown_stacks_all_causes():
    figure = plots.breakdown(results(), "time", "cache_ratio")
    (axes,) = figure.axes
    total = sum(range(len(CAUSES)))
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(total)
    widths = {}
    for bar in axes.patches:
        widths.setdefault(round(bar.get_y() + bar.get_height() / 2, 1), []).append(bar.get_width())
    assert len(widths) == 6
    assert all(sum(row) == pytest.approx(total) for row in widths.values())
    found = texts(figure)
    assert "time (ms)" in found
    assert "daop*, cache 0.25" in found
    assert "dense part" not in legend(figure)  # no time, no entry
    assert "demand fetch" in legend(figure)
    frame = results().assign(time_predict_ns=10)
    assert LABEL["predict"] not in legend(plots.breakdown(frame, "time"))  # no bar shows it
    frame.loc[0, "time_predict_ns"] = 1_000_000
    assert LABEL["predict"] in legend(plots.breakdown(frame, "time"))


def test_breakdown_of_decoding_is_per_token():
    frame = results()
    figure = plots.breakdown(frame[frame["cache_ratio"] == 0.5], "decode_time")
    assert max(bar.get_x() + bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(11.0)
    assert "time per decode token of the batch (ms)" in texts(figure)


def two_layers():
    run = Records(makespan_ns=8_000_000)
    for layer, at in ((0, 0), (1, 4_000_000)):
        run.tasks += [
            TaskRecord(at, at + 1_000_000, "gpu0", "main", "dense", 0, layer, 0, -1, 1, 1, at, at),
            TaskRecord(at + 3_000_000, at + 4_000_000, "gpu0", "main", "expert", 0, layer, 0, 5, 1, 1, at, at),
            TaskRecord(at + 1_000_000, at + 3_500_000, "cpu0", "main", "expert", 0, layer, 0, 17, 1, 1, at, at),
        ]
        run.layers.append(LayerRecord(at, at + 4_000_000, 0, layer))
    run.transfers.append(TransferRecord(1_000_000, 3_000_000, "cpu0->gpu0", "demand", 0, 5, 9, 0, 1, 1, True, False))
    run.transfers.append(TransferRecord(3_000_000, 7_000_000, "cpu0->gpu0", "prefetch", 1, 5, 9, 1, 1, 2, True, False))
    run.steps.append(StepRecord(0, 8_000_000, 0, "decode", 0, 1, 1, 1.0))
    return run


def test_gantt():
    figure = plots.gantt({"lru": two_layers(), "dali": two_layers()}, MACHINE, 0, (0, 1), "model · machine")
    assert len(figure.axes) == 2
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["cpu0", "gpu0", "cpu0->gpu0"]
    assert {t.get_text() for t in axes.texts} == {"5", "17", "0/5", "1/5"}
    assert axes.get_title(loc="left") == "lru: 8 ms"
    assert legend(figure) == ["dense part", "GPU experts", "CPU experts", "demand fetch", "prefetch", "layer end"]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert matplotlib.colors.same_color(colours[0], FILL["dense"])
    assert "numbers: expert; layer/expert on links\nmodel · machine" in texts(figure)
    assert figure.axes[1].get_xlabel() == "time since layer 0 of step 0 started (ms)"
    on_gpu = two_layers()  # each policy has rows for the lanes that it uses
    on_gpu.tasks = [t for t in on_gpu.tasks if t.device == "gpu0"]
    drawn = plots.gantt({"lru": on_gpu, "dali": two_layers()}, MACHINE, 0, (0, 1)).axes
    assert [t.get_text() for t in drawn[0].get_yticklabels()] == ["gpu0", "cpu0->gpu0"]
    assert [t.get_text() for t in drawn[1].get_yticklabels()] == ["cpu0", "gpu0", "cpu0->gpu0"]


def test_gantt_marks_what_the_end_of_the_run_cuts_off():
    run = two_layers()
    run.transfers.append(TransferRecord(7_000_000, 8_000_000, "cpu0->gpu0", "prefetch", 0, 6, 3, 1, 1, 3, False, False, left=6))
    drawn = plots.gantt({"lru": run}, MACHINE, 0, (0, 1), "model")
    assert {t.get_text() for t in drawn.axes[0].texts} == {"5", "17", "0/5", "1/5", "0/6..."}
    assert any("'...': the run ended before this copy did" in text for text in texts(drawn.axes[0].figure))


def test_the_corner_is_wrapped_between_its_parts():
    figure = Figure(figsize=(2, 2))
    add_corner(figure, "a-long-model · a-machine · simulated, weakest source: oracle")
    assert figure.get_supxlabel().splitlines() == ["a-long-model · a-machine ·", "simulated, weakest source: oracle"]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three four five six seven eight it", 40, ["one two three four five six", "seven eight it"]),
        ("one two three four five", 40, ["one two three four five"]),
        ("a one-long-name-of-something-or-other it", 38, ["a one-long-name-of-something-or-other", "it"]),  # no other way
    ],
)
def test_a_footer_does_not_end_in_a_lone_word(text, width, lines):
    assert _wrapped(text, width) == lines


def test_chart_is_clipped_to_its_layers():
    drawn = chart(two_layers(), MACHINE, 0, (1, 1))
    assert drawn.length == 4_000_000
    assert drawn.layers == ((0, 4_000_000, 1),)
    (link,) = [box for box in drawn.boxes if box.lane == "cpu0->gpu0"]
    assert link[1:] == (0, 3_000_000, "exposed_prefetch", "5")
    with pytest.raises(ConfigError, match="got no such layer"):
        chart(two_layers(), MACHINE, 3, (0, 1))


def test_wrong_frames_are_refused():
    with pytest.raises(ConfigError, match="plot hit_rate: expected the columns hit_rate_decode"):
        plots.hit_rate(results().drop(columns="hit_rate_decode"))
    with pytest.raises(ConfigError, match="at least one result"):
        plots.decode_speed(results().iloc[:0])
    with pytest.raises(ConfigError, match="at least one run"):
        plots.gantt({}, MACHINE, 0, (0, 1))


def test_saving_is_deterministic_and_embeds_fonts(tmp_path):
    first = plots.save(plots.hit_rate(results()), tmp_path / "a" / "hit_rate")
    second = plots.save(plots.hit_rate(results()), tmp_path / "b" / "hit_rate")
    assert [p.name for p in first] == ["hit_rate.png", "hit_rate.pdf"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    pdf = first[1].read_bytes()
    assert b"/FontFile2" in pdf  # TrueType, with the file
    assert b"/CreationDate" not in pdf
    assert b"/Type3" not in pdf


def test_embedded_fonts_hold_glyphs_and_nothing_that_sets_text():
    usual = list(Options().drop_tables)
    pdf = rendered(plots.hit_rate(results()), ("pdf",))["pdf"]
    streams = [zlib.decompressobj().decompress(part) for part in re.findall(rb"/Length1 .*?stream\n(.*?)\nendstream", pdf, re.S)]
    fonts = [TTFont(BytesIO(stream)) for stream in streams]
    assert fonts
    for font in fonts:
        assert {"glyf", "loca", "hmtx", "head", "maxp"} <= set(font.keys())  # what a reader draws from
        assert not {"GDEF", "GPOS", "GSUB", "kern"} & set(font.keys())
        assert font["maxp"].numGlyphs < 100
    assert Options().drop_tables == usual


def test_the_users_settings_neither_matter_nor_change(tmp_path):
    expected = plots.save(plots.decode_speed(results()), tmp_path / "a")[0].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        figure = plots.decode_speed(results())
        written = plots.save(figure, tmp_path / "b")[0].read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert isinstance(figure, Figure)
    assert written == expected


def test_text_is_readable_on_its_fill():
    assert [text_on(colour) for colour in ("#FFFFFF", "#000000", "#0072B2", "#F0E442")] == [
        "#000000", "#FFFFFF", "#FFFFFF", "#000000",
    ]  # fmt: skip


def test_the_corner_says_what_kind_of_routing_it_was() -> None:
    rows = pd.DataFrame({"trace": ["a", "b"], "routing": ["synthetic", "miniature"], "source_label": ["oracle", "oracle"]})
    assert plots.corner_label(rows) == "a, b · miniature and synthetic routing · simulated, weakest source: oracle"
    assert "routing" not in plots.corner_label(rows.assign(routing="recorded"))
