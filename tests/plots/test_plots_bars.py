"""Bars say what failed, and how far they reach over the intervals of a profile's numbers."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
import yaml
from matplotlib.patches import Rectangle

from moesim.cli.main import main
from moesim.metrics.breakdown import CAUSES
from moesim.plots.bars import ENDS, decode_speed, energy, ladder, speedup
from moesim.plots.catalogue import KINDS, figures_of
from moesim.plots.drawing import chosen
from moesim.plots.style import drawn_for, drawn_wide
from tests.plots.plots_kit import rows

LATE = "cache.budget: expected at least 4.5 GB, got {} GB; raise the budget"
NOTE = "miniature, speed -20 to +30 % over cpu0.flops 900 to 1,300 GFLOP/s; energy -5 to +5 % over cpu0.idle_w 40 to 110 W"


def ends(least, most, **more):
    return {"decode_tokens_per_s_least": least, "decode_tokens_per_s_most": most, "notes": NOTE} | more


def texts(figure):
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def boxes(figure):
    """What stands for failed runs, from the left."""
    return [patch for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle) and not patch.get_fill()]


# ------------------------------------------------------------------------------------------------------------------- intervals
def test_bars_reach_over_the_intervals_of_the_profile():
    frame = rows(("lru", 10.0, ends(8.0, 13.0)), ("dali", 20.0, ends(None, None)))
    assert decode_speed.drawing(frame).data[["least", "most"]].fillna(0).to_numpy().tolist() == [[8, 13], [0, 0]]
    figure = decode_speed(frame)
    (line,) = figure.axes[0].lines
    assert line.get_ydata().tolist() == [8, 13]
    assert ENDS in texts(figure)
    assert figure.axes[0].get_ylim()[1] > 20, "room for what is written above"
    assert "(cpu0.flops 900 to 1,300 GFLOP/s)" in decode_speed.drawing(frame).caption, "watts decide no speed"
    assert "-20 to" not in decode_speed.drawing(frame).caption, "whose that is the caption cannot say"


def test_repeats_have_the_mean_of_their_ends_beside_their_own_interval():
    frame = rows(*(("lru", 10.0 + 2 * i, ends(8.0 + i, 12.0 + 4 * i, seed=i, repeat=i)) for i in range(2)))
    (row,) = decode_speed.drawing(frame).data.to_dict("records")
    assert (row["decode_tokens_per_s"], row["least"], row["most"]) == (11, 8.5, 14)
    assert row["low"] < row["least"]
    caption = decode_speed.drawing(frame).caption
    assert "error bars: 95 % interval" in caption and "Thick lines" in caption


def test_the_most_energy_is_the_fewest_tokens():
    joules = {
        "energy_j_per_token": 4.0,
        "energy_j_per_token_least": 2.0,
        "energy_j_per_token_most": 5.0,
        "energy_label": "assumed",
    }
    frame = rows(("lru", 10.0, {**joules, "notes": NOTE}))
    (row,) = energy.drawing(frame).data.to_dict("records")
    assert (row["least"], row["tokens_per_kj"], row["most"]) == (200, 250, 500)
    assert ENDS in texts(energy(frame))
    assert "(cpu0.flops 900 to 1,300 GFLOP/s; cpu0.idle_w 40 to 110 W)" in energy.drawing(frame).caption
    assert not {"least", "failed"} & set(decode_speed.drawing(rows(("lru", 10.0, {}))).data)  # without intervals, no ends


# ---------------------------------------------------------------------------------------------------------------------- failed
def test_a_failed_run_is_an_empty_box_with_its_reason():
    frame = rows(("lru", 10.0, {}), ("dali", None, {"error": LATE.format(4)}), ("late", None, {"error": LATE.format(3)}))
    data = decode_speed.drawing(frame).data
    assert data["policy"].tolist() == ["lru", "dali", "late"]
    assert data[["n", "failed"]].to_numpy().tolist() == [[1, 0], [0, 1], [0, 1]]
    assert data["why"][1] == "cache.budget: expected at least 4.5 GB, got 4 GB"
    figure = decode_speed(frame)
    assert [box.get_x() for box in boxes(figure)] == pytest.approx([0.55, 1.55])
    found = texts(figure)
    assert found.count("failed") == 2, "one reason needs no number"
    assert "failed, 2 runs, such as: cache.budget: expected at least 4.5 GB, got 4 GB" in " ".join(found).replace("\n", " ")
    assert {"dali", "late"} <= set(found), "in the legend"
    with drawn_for("paper"):
        assert texts(decode_speed(frame)).count("failed") == 2
    assert "Hatched boxes are no values: failed, 2 runs" in decode_speed.drawing(frame).caption


def test_different_reasons_have_numbers():
    frame = rows(("lru", 10.0, {}), ("a", None, {"error": LATE.format(4)}), ("b", None, {"error": "PolicyError: x"}))
    found = texts(decode_speed(frame))
    assert {"failed (1)", "failed (2)"} <= set(found)
    assert "failed (2), 1 run: PolicyError: x" in decode_speed.drawing(frame).caption


def test_repeats_that_failed_are_counted_at_the_bar_of_the_others():
    change = [{"seed": i, "repeat": i} for i in range(3)]
    frame = rows(("lru", 10.0, change[0]), ("lru", 12.0, change[1]), ("lru", None, {**change[2], "error": "PolicyError: x"}))
    figure = decode_speed(frame)
    assert boxes(figure) == []
    assert any("1 failed" in text and "11" in text for text in texts(figure))
    assert decode_speed.drawing(frame).data["n"].tolist() == [2]


def test_a_setting_at_which_all_failed_keeps_its_place():
    frame = rows(("lru", 100.0, {}), ("lru", None, {"batch_size": 8, "error": "x"}), ("lru", None, {"model": "n", "error": "x"}))
    (part,) = (part for _, part in figures_of("decode_speed", frame, {}))
    figure = decode_speed(part)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["m", "n"]
    assert len(boxes(figure)) == 2
    assert len({axes.get_ylim() for axes in figure.axes}) == 1, "an axis without a value is like the others"


def test_a_failed_run_that_another_folder_repeats_is_none():
    frame = rows(("lru", None, {"error": "x"}), ("lru", 10.0, {}), ("dali", None, {"error": "y"}), ("dali", None, {"error": "y"}))
    ((_, part),) = figures_of("decode_speed", frame, {})
    data = decode_speed.drawing(part).data
    assert data[["n", "failed"]].to_numpy().tolist() == [[1, 0], [0, 1]]


def test_speed_ups_name_what_failed():
    frame = rows(("lru", 10.0, {}), ("dali", 20.0, {}), ("dali", None, {"batch_size": 8, "error": "x y"}))
    for text in (" ".join(texts(speedup(frame))), speedup.drawing(frame).caption):
        assert "not shown: dali (1 run)" in text.lower() and "failed, 1 run: x y" in text.lower()
    twice = rows(("lru", 10.0, {}), ("dali", 20.0, {}), *(("dali", None, {"batch_size": n, "error": f"{n} y"}) for n in (8, 9)))
    assert "Failed, 2 runs, such as: 8 y." in speedup.drawing(twice).caption, "that differs in its number alone"
    assert "not shown" not in speedup.drawing(frame[:2]).caption.lower()


def test_a_rung_after_a_failed_one_has_no_gain():
    frame = rows(("a", 10.0, {}), ("b", None, {"error": "x"}), ("c", 30.0, {}), ("d", 33.0, {}))
    gains = ladder.drawing(frame).data["gain"].tolist()
    assert [math.isnan(gain) for gain in gains] == [True, True, True, False]
    assert gains[3] == pytest.approx(0.1)


@pytest.mark.parametrize(("n_policies", "width", "turned"), [(7, None, 90), (3, 7.0, 0), (4, 3.35, 90), (7, 3.35, None)])
def test_no_two_numbers_at_bars_overlap(n_policies: int, width: float | None, turned: int | None):
    """Bars of the same height, whose numbers stand side by side: they are turned, or left out where even that is too wide."""
    settings = [{"batch_size": batch} for batch in (1, 2, 4, 8)]
    frame = rows(*((f"p{i}", 11.9 + 0.1 * i, one) for one in settings for i in range(n_policies)))
    with drawn_wide(width):
        figure = decode_speed(frame)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert {text.get_rotation() for text in axes.texts if text.get_text()} == ({turned} if turned is not None else set())
    assert len(boxes) == (4 * n_policies if turned is not None else 0)
    assert not [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]


@pytest.mark.long
def test_an_experiment_draws_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    experiment = {
        "name": "x", "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "trace": "mini-mixtral",
        "workload": {"batch_size": 2, "prompt_tokens": 8, "decode_tokens": 1}, "cache": {"budget": "4GiB"},
        "policies": ["llama-cpp", "fiddler"], "intervals": True, "plots": ["decode_speed", "breakdown"],
    }  # fmt: skip
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(experiment))
    out = tmp_path / "out"
    assert main(["run", str(tmp_path / "x.yaml"), "--out", str(out), "--jobs", "1"]) == 1
    capsys.readouterr()
    data = pd.read_csv(out / "plots" / "decode_speed.csv")
    llama, fiddler = data.to_dict("records")
    assert llama["least"] < llama["decode_tokens_per_s"] < llama["most"]
    assert fiddler["failed"] == 1 and "expected at least" in fiddler["why"]
    assert main(["plot", "decode_speed", str(out), "--out", str(tmp_path / "figures")]) == 0
    capsys.readouterr()
    for suffix in ("png", "csv", "txt"):
        again = (tmp_path / "figures" / f"decode_speed.{suffix}").read_bytes()
        assert again == (out / "plots" / f"decode_speed.{suffix}").read_bytes()


def drawn(kind, frame, options=None):
    """All texts of the figures of a kind, wrapped lines joined, and their captions."""
    found = []
    for _, part in figures_of(kind, frame, options or {}):
        _, figure, caption = KINDS[kind].drawing(part, **(options or {}))
        found.append((" ".join(texts(figure)).replace("\n", " "), caption))
    return found


CAUSE_TIMES = {f"decode_time_{cause}_ns": 1e6 for cause in CAUSES}
WHOLE = {"hit_rate_decode": 0.5, "n_decode_tokens": 8, "peak_memory_bytes.gpu0": 1 << 30, **CAUSE_TIMES}


@pytest.mark.parametrize("kind", ["breakdown", "hit_rate", "vram"])
def test_figures_without_a_place_for_failed_runs_name_them(kind):
    frame = rows(("lru", 10.0, WHOLE), ("lru", 20.0, {**WHOLE, "batch_size": 4}), ("late", None, {"error": LATE.format(4)}))
    found = drawn(kind, frame)
    for text, caption in found[:1]:
        assert "not shown: late (1 run) failed, 1 run: cache.budget: expected at least 4.5 GB, got 4 GB" in text
        assert "Not shown: late (1 run). Failed, 1 run: cache.budget: expected at least 4.5 GB, got 4 GB." in caption
    assert all("not shown" not in text for text, _ in found[1:]), "each figure names its own"
    lost = rows(("lru", 10.0, WHOLE), ("lru", 9.0, {**WHOLE, "batch_size": 4}), ("lru", None, {"batch_size": 64, "error": "x"}))
    if kind == "hit_rate":  # a failed run at a setting without a figure is named in the first
        assert ["not shown: lru (1 run)" in text for text, _ in drawn(kind, lost)] == [True, False]


def test_a_heat_map_names_failed_runs_of_its_policy_alone():
    options = [json.dumps({"w_size": w, "u_size": u}) for u in (1, 2) for w in (2, 4)]
    given = [
        (f"dali{i}", speed, {"policy_name": "dali", "policy_options": text, "error": None if speed else "x"})
        for i, (text, speed) in enumerate(zip(options, [10.0, 11.0, 12.0, None], strict=True))
    ]
    other = ("lru", None, {"policy_name": "lru", "policy_options": "{}", "error": "y"})
    ((text, caption),) = drawn("heatmap", rows(*given, other), {"x": "w_size", "y": "u_size"})
    assert "not shown: dali3 (1 run) failed, 1 run: x" in text and "Not shown: dali3 (1 run). Failed, 1 run: x." in caption
    assert "lru" not in text and "chooses them itself" not in text


def test_the_speed_up_of_one_setting_is_drawn_once():
    frame = rows(("lru", 10.0, {}), ("dali", 20.0, {}))
    figure = speedup(frame)
    assert sum(len(axes.patches) for axes in figure.axes) == 1
    assert not any("geo. mean" in text for text in texts(figure))
    assert "geometric mean" not in speedup.drawing(frame).caption.lower()
    assert "; 1 batch a run. " in decode_speed.drawing(rows(("lru", 10.0, {"n_batches": 1}))).caption
    assert "2 batches" in decode_speed.drawing(rows(("lru", 10.0, {"n_batches": 2}))).caption


@pytest.mark.parametrize(
    ("kind", "column", "values"),
    [("decode_speed", "model", "za"), ("breakdown", "model", "za"), ("ladder", "model", "za"),
     ("hit_rate", "cache_ratio", (0.25, 0.5)), ("vram", "cache_ratio", (0.25, 0.5))],
)  # fmt: skip
def test_the_order_is_that_of_the_experiment_where_the_first_runs_failed(kind, column, values):
    """At two settings policies c, b and a; c fails at the first of them, b at the second."""
    table = rows(*((p, 10.0 + i, {**WHOLE, column: v}) for v in values for i, p in enumerate("cba")))
    table["error"] = ["x" if i in (0, 4) else None for i in range(6)]
    made = [KINDS[kind].drawing(part) for _, part in figures_of(kind, table, {})]
    (data, figure, _) = made[0]
    assert len(made) == 1
    if kind == "breakdown":
        assert list(dict.fromkeys(data["bar"])) == ["b, z", "a, z", "c, a", "a, a"]
        return
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name for name in legend if name in "cba"] == ["c", "b", "a"]
    groups = [value for value in data[column] if value in values]
    assert kind in ("hit_rate", "vram") or list(dict.fromkeys(groups)) == list(values)


def test_groups_of_speed_ups_are_in_the_order_of_the_experiment():
    """The first policy that is compared failed at the first model; rows go policy by policy, as `--policies` leaves them."""
    table = rows(*((p, 10.0 + i, {"model": m}) for m in "za" for i, p in enumerate("cba")))
    table["error"] = ["x" if i == 1 else None for i in range(6)]
    data = speedup.drawing(pd.concat([table[table["policy"] == p] for p in "cba"])).data
    assert list(dict.fromkeys(data["panel"]))[:2] == ["z", "a"]


def test_policies_of_a_command_go_in_the_order_that_it_names():
    """`--policies` orders the policies alone: the groups stay in the order of the experiment."""
    table = rows(*((p, 10.0, {"trace": t}) for t in ("z", "a") for p in ("c", "b", "a")))
    table.loc[0, "error"] = "x"
    data = decode_speed.drawing(chosen(table, ["a", "c"], [], "x")).data
    assert data["policy"].tolist() == ["a", "c", "a", "c"]
    assert list(dict.fromkeys(data["trace"])) == ["z", "a"]
