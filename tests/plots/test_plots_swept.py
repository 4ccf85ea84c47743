"""Lines over a swept setting, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from moesim.core.colours import BLACK
from moesim.errors import ConfigError
from moesim.plots.bars import decode_speed
from moesim.plots.catalogue import KINDS, figures_of
from moesim.plots.heatmap import heatmap
from moesim.plots.lines import speed_by_context, speedup_lines, throughput
from moesim.plots.style import drawn_wide
from tests.plots.plots_kit import rows

FEW = {"batch_size": 2}
MANY = {"batch_size": 16}


def lines(figure):
    (axes,) = figure.axes
    return drawn_in(axes)


def drawn_in(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines if not line.get_label().startswith("_")}


def test_speed_ups_over_an_axis_pair_seeds_and_have_no_mean():
    """At batch 2 the two seeds are 2 and 8 times as fast, 4 in geometric mean; at 16 they run at half the speed."""
    one, two = ({"seed": n, "repeat": n} for n in (0, 1))
    frame = rows(
        ("a", 1.0, FEW | one), ("a", 10.0, FEW | two), ("b", 2.0, FEW | one), ("b", 80.0, FEW | two),
        ("a", 6.0, MANY | one), ("a", 8.0, MANY | two), ("b", 3.0, MANY | one), ("b", 4.0, MANY | two),
        ("b", 9.0, {"batch_size": 4, **one}),
    )  # fmt: skip
    drawn = speedup_lines.drawing(frame)
    assert lines(drawn.figure) == {"b": [[2, pytest.approx(4)], [16, pytest.approx(0.5)]]}
    assert drawn.data[["policy", "batch_size", "n"]].to_numpy().tolist() == [["b", 2, 2], ["b", 16, 2]]
    (axes,) = drawn.figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["2", "16"]
    assert axes.get_xscale() == "log"
    assert "geo. mean" not in drawn.caption
    assert "Speed-up over a (decode speed (tokens/s, whole batch)) against batch, like with like; dashed: a." in drawn.caption
    flipped = speedup_lines.drawing(frame, baseline="b").data
    assert flipped["speedup"].tolist() == pytest.approx([0.25, 2])


def test_speed_ups_over_names_stand_in_the_order_of_the_experiment():
    found = [("a", 1.0), ("b", 3.0)], [("a", 2.0), ("b", 1.0)]
    frame = rows(*((*run, {"hardware": name}) for name, runs in zip(("new", "his"), found, strict=True) for run in runs))
    drawn = speedup_lines.drawing(frame, x="hardware")
    assert lines(drawn.figure) == {"b": [[0, pytest.approx(3)], [1, 0.5]]}
    assert [t.get_text() for t in drawn.figure.axes[0].get_xticklabels()] == ["new", "his"]
    with pytest.raises(ConfigError, match="plot speedup_lines: x: unknown setting 'hardwar'; did you mean 'hardware'"):
        speedup_lines.drawing(frame, x="hardwar")


def test_throughput_is_over_streams_and_another_setting_divides_panels():
    frame = rows(
        ("a", 3.0, FEW), ("a", 9.0, MANY), ("b", 4.0, FEW), ("b", None, MANY | {"error": "does not fit"}),
        ("belady", 5.0, MANY | {"source_label": "oracle"}), ("a", 2.0, MANY | {"cache_ratio": 0.5}),
    )  # fmt: skip
    ((name, part),) = figures_of("throughput", frame, {})
    assert name == "throughput"
    drawn = throughput.drawing(part)
    left, right = drawn.figure.axes
    assert [axes.get_title(loc="left") for axes in (left, right)] == ["cache 0.25", "cache 0.5"]
    assert drawn_in(left) == {"a": [[2, 3], [16, 9]], "b": [[2, 4]], "belady (oracle)": [[16, 5]]}
    assert drawn_in(right) == {"a": [[16, 2]], "b": [], "belady (oracle)": []}
    assert drawn.data["cache_ratio"].tolist() == [0.25] * 4 + [0.5]
    assert [t.get_text() for t in drawn.figure.legends[0].get_texts()] == ["a", "b", "belady (oracle)"]
    best = next(line for line in left.lines if line.get_label() == "belady (oracle)")
    assert best.get_color() == BLACK
    assert "Not shown: b (1 run). Failed, 1 run: does not fit." in drawn.caption
    assert "mean over" not in drawn.caption.lower()


def test_batches_beside_the_axis_are_panels_and_a_third_setting_is_another_figure():
    settings = [{"batch_size": b, "prompt_tokens": p, "transfer_curve": t} for b in (1, 4) for p in (8, 16) for t in ("x", "y")]
    frame = rows(*((name, speed, one) for one in settings for name, speed in (("a", 1.0), ("b", 2.0))))
    parts = dict(figures_of("speed_by_context", frame, {}))
    assert list(parts) == ["speed_by_context.transfer_curve=x", "speed_by_context.transfer_curve=y"]
    with drawn_wide(3.35):
        figure = speed_by_context(parts["speed_by_context.transfer_curve=x"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["batch 1", "batch 4"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "prompt (tokens)"]  # one above another in a column
    ratios = speedup_lines.drawing(frame, x="prompt_tokens").data
    assert ratios[["batch_size", "prompt_tokens", "speedup"]].to_numpy().tolist() == [
        [1, 8, 2],
        [1, 16, 2],
        [4, 8, 2],
        [4, 16, 2],
    ]


def test_times_at_an_axis_have_a_unit_and_the_title_names_them():
    frame = rows(("a", 3.0, FEW), ("a", 9.0, MANY)).assign(ttft_mean_ns=[7_000_000, 8_500_000])
    drawn = throughput.drawing(frame, metric="ttft_mean_ns")
    assert lines(drawn.figure) == {"a": [[2, 7], [16, 8.5]]}
    assert drawn.figure.axes[0].get_ylabel() == "time to the first token (ms)"
    assert drawn.figure.axes[0].get_ylim()[1] == pytest.approx(1.08 * 8.5)
    assert drawn.figure.legends[0].get_title().get_text() == "Time to the first token by concurrent streams"
    assert drawn.data["ttft_mean_ns"].tolist() == [7_000_000, 8_500_000]
    slow = frame.assign(ttft_mean_ns=[7e9, 8.5e9], prompt_tokens=[16, 32], batch_size=2)
    drawn = speed_by_context.drawing(slow, metric="ttft_mean_ns")
    assert lines(drawn.figure) == {"a": [[16, 7], [32, 8.5]]}
    assert drawn.figure.axes[0].get_ylabel() == "time to the first token (s)"
    assert "Time to the first token by context length: time to the first token (s)." in drawn.caption
    assert "hardly depends on the context" not in drawn.caption
    two = heatmap.drawing(slow, x="prompt_tokens", y="cache_ratio", metric="ttft_mean_ns").figure
    assert [text.get_text() for text in two.axes[0].texts] == ["7.00", "8.50"]
    assert two.axes[1].get_ylabel() == "time to the first token (s)"
    repeats = [("a", 3.0, {"seed": i, "repeat": i, **FEW}) for i in range(2)]
    (bars,) = throughput.drawing(rows(*repeats).assign(ttft_mean_ns=[1e6, 3e6]), metric="ttft_mean_ns").figure.axes[0].collections
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([2 - 12.706204736432095, 2 + 12.706204736432095])


def test_speed_by_context_needs_prompts_of_a_length():
    frame = rows(("a", 3.0, {}), ("a", 1.0, {"prompt_tokens": 1024})).assign(decode_tokens=32)
    drawn = speed_by_context.drawing(frame)
    assert lines(drawn.figure) == {"a": [[8, 3], [1024, 1]]}
    assert "Decoding adds 32 tokens to the context." in drawn.caption
    assert "hardly depends on the context where a layer's attention takes less than its launches" in drawn.caption
    assert "repeat rows" not in drawn.caption
    shifted = speed_by_context.drawing(frame.assign(reuse="shifted")).caption
    assert "Prompts longer than recorded ones repeat rows (`reuse: shifted`)." in shifted
    with pytest.raises(ConfigError, match="speed_by_context: expected runs with a value of prompt_tokens, got none"):
        speed_by_context.drawing(frame.assign(prompt_tokens=None))


def test_runs_without_a_value_of_the_setting_have_their_place():
    """A sweep over `prefill_chunk: [null, 64]` has runs without chunks: they stand first, and none is left out."""
    frame = rows(
        ("a", 1.0, {"prefill_chunk": 64}), ("b", 3.0, {"prefill_chunk": 64}),
        ("a", 2.0, {"prefill_chunk": None}), ("b", 4.0, {"prefill_chunk": None}),
    )  # fmt: skip
    drawn = speedup_lines.drawing(frame)
    assert lines(drawn.figure) == {"b": [[0, pytest.approx(2)], [1, pytest.approx(3)]]}
    assert [t.get_text() for t in drawn.figure.axes[0].get_xticklabels()] == ["-", "64"]
    assert decode_speed.drawing(frame).data["decode_tokens_per_s"].tolist() == [2, 4, 1, 3]


def test_panels_of_hit_rates_and_memory_are_those_that_are_asked_for():
    settings = [{"batch_size": b, "cache_ratio": c} for b in (4, 1) for c in (0.25, 0.5)]
    frame = rows(*(("a", one["batch_size"] + one["cache_ratio"], one) for one in settings), ("b", 9.0, settings[0]))
    frame = frame.assign(**{"hit_rate_decode": frame["cache_ratio"] / 2, "peak_memory_bytes.gpu0": frame["cache_ratio"] * 2**30})
    for name, label in (("hit_rate", "cache ratio (% of all experts)"), ("vram", "peak GPU memory (GiB)")):
        assert len(list(figures_of(name, frame, {}))) == 2  # a figure for each batch size
        ((_, part),) = figures_of(name, frame, {"panel": "batch"})
        drawn = KINDS[name].drawing(part, panel="batch")
        left, right = drawn.figure.axes
        assert [axes.get_title(loc="left") for axes in (left, right)] == ["batch 1", "batch 4"]
        assert (left.get_xlabel(), right.get_ylabel()) == (label, "")
        assert "mean over" not in drawn.caption.lower()
        with pytest.raises(ConfigError, match="panel: expected another setting than that of x"):
            KINDS[name].drawing(part, panel="cache")
    assert drawn.data[["batch_size", "policy", "on_front"]].to_numpy().tolist() == [
        [1, "a", True], [1, "a", True], [4, "a", False], [4, "a", False], [4, "b", True],
    ]  # fmt: skip
