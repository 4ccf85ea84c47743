"""No text of any figure covers another one or leaves the figure, with few and many policies of long names."""

from __future__ import annotations

import pandas as pd
import pytest

from moesim.errors import ConfigError
from moesim.plots.bars import decode_speed
from moesim.plots.catalogue import KINDS, figures_of
from moesim.plots.style import WIDTHS, drawn_for, drawn_wide, looks_of, series_look
from tests.plots.layout_kit import collisions, inputs
from tests.plots.plots_kit import rows


def _collisions(kind: str, n: int, width: str, medium: str) -> list[str]:
    given, options = inputs(kind, n)
    with drawn_wide(WIDTHS[width]), drawn_for(medium):
        return collisions(KINDS[kind].drawing(*given, **options).figure)


ALIKE = {"prefill_speed", "energy", "ladder", "signal_accuracy_by_layer", "popularity_drift", "coactivation_ranks", "balance_cdf"}
"""Kinds that are drawn as another one is: the test at any width has them."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ALIKE])
def test_no_text_covers_another(kind: str):
    assert _collisions(kind, 8, "column", "screen") == []


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [3, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_covers_another_at_any_width(kind: str, n: int, width: str):
    assert _collisions(kind, n, width, "paper" if n == 8 else "screen") == []


PARTS = "composed(replacement=my.caches:Newest,prefetch=predicted)"


def test_a_composition_has_a_short_name_in_the_figure_and_its_whole_one_in_the_data():
    drawn = decode_speed.drawing(rows(("lru", 10.0, {}), (PARTS, 20.0, {})))
    assert [text.get_text() for text in drawn.figure.legends[0].get_texts()] == ["lru", "Newest + predicted"]
    assert drawn.data["policy"].tolist() == ["lru", PARTS]
    assert drawn.caption.endswith(f"Newest + predicted: {PARTS}.")
    (bars,) = KINDS["speedup"].drawing(rows(("lru", 10.0, {}), (PARTS, 20.0, {})), baseline=PARTS).figure.axes
    assert bars.get_ylabel().replace("\n", " ") == "speed-up over Newest + predicted"


def test_a_well_known_policy_looks_the_same_in_every_result():
    assert looks_of(["ours", "dali"])["dali"] == looks_of(["dali"])["dali"] == series_look(3)
    assert looks_of(["ours"])["ours"] == series_look(0)


def test_any_setting_divides_the_panels():
    frame = rows(*(("lru", 10.0 + b, {"batch_size": b, "prompt_tokens": p}) for b in (1, 2) for p in (8, 16)))
    for kind in ("decode_speed", "throughput"):
        options = {"panel": "prompt_tokens"}
        ((name, part),) = figures_of(kind, frame, options)
        axes = KINDS[kind].drawing(part, **options).figure.axes
        assert (name, [one.get_title("left") for one in axes]) == (kind, ["prompt 8", "prompt 16"])
    ratios = frame.assign(policy="base", policy_name="base", decode_tokens_per_s=5.0)
    drawn = KINDS["speedup"].drawing(pd.concat([ratios, frame]), baseline="base", panel="prompt_tokens")
    assert [one.get_title("left") for one in drawn.figure.axes] == ["prompt 8", "prompt 16"]
    together = pd.concat([ratios, frame]).query("batch_size * 8 == prompt_tokens")  # as large as the batch
    drawn = KINDS["speedup"].drawing(together, baseline="base", panel="prompt_tokens")
    assert [one.get_title("left") for one in drawn.figure.axes] == ["prompt 8", "prompt 16"]
    panels = decode_speed.drawing(frame, panel="batch").figure.axes
    assert [one.get_title("left") for one in panels] == ["batch 1", "batch 2"]
    with pytest.raises(ConfigError, match="panel: expected another setting than that of x, got 'batch_size' twice"):
        decode_speed(frame, x="batch_size", panel="batch")
    with pytest.raises(ConfigError, match="panel: unknown setting 'batches'"):
        decode_speed(frame, panel="batches")


def test_panels_of_a_breakdown_share_their_names_and_their_axis():
    (frame,), _ = inputs("breakdown", 3)
    options = {"panel": "cache_ratio"}
    ((name, part),) = figures_of("breakdown", frame, options)
    drawn = KINDS["breakdown"].drawing(part, **options)
    first, second = drawn.figure.axes
    assert (name, [one.get_title("left") for one in (first, second)]) == ("breakdown", ["cache 0.125", "cache 0.25"])
    assert first.get_xlim() == second.get_xlim() and first.get_position().y0 == second.get_position().y0
    assert not any(tick.label1.get_visible() for tick in second.yaxis.get_major_ticks())
    assert collisions(drawn.figure) == []
    shares = drawn.data.groupby(["cache_ratio", "bar"])["share"].sum()
    assert len(shares) == 6 and shares.tolist() == pytest.approx([1.0] * 6)
    without = part.assign(cache_ratio=part["cache_ratio"].where(part["cache_ratio"] != 0.25))
    titles = [one.get_title("left") for one in KINDS["breakdown"].drawing(without, **options).figure.axes]
    assert titles == ["cache -", "cache 0.125"]
    uneven = part[(part["cache_ratio"] != 0.25) | (part["policy"] != part["policy"].iloc[0])]  # a policy ran at one of them alone
    below = KINDS["breakdown"].drawing(uneven, **options).figure.axes
    assert [len(one.get_yticks()) for one in below] == [3, 2] and below[0].get_position().y0 > below[1].get_position().y0


def test_more_panels_than_a_page_is_high_stand_side_by_side():
    frame = rows(*(("lru", 10.0, {"batch_size": b, "prompt_tokens": p}) for b in (1, 2) for p in range(8, 14)))
    with drawn_wide(WIDTHS["column"]):
        figure = KINDS["throughput"].drawing(frame).figure
    assert len({round(axes.get_position().x0, 1) for axes in figure.axes}) == 2
