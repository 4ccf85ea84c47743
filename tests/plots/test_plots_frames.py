"""Figures of steps, layers, records and traces: what they draw by hand, and every one on real data. Looks were judged by eye."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.metrics.breakdown import CAUSES
from moesim.metrics.frames import layer_frame, step_frame
from moesim.metrics.machine import Machine
from moesim.plots.captions import corner_label
from moesim.plots.catalogue import KINDS, figures_of
from moesim.plots.distributions import balance_cdf, latency_cdf, one_sided
from moesim.plots.drawing import parse_option
from moesim.plots.gantt import gantt, gantt_window
from moesim.plots.lines import CHANCE, hit_rate_by_token
from moesim.plots.stacks import time_by_layer
from moesim.plots.style import COLUMN, SMALL, TEXT, drawn_for, drawn_wide, styled
from moesim.plots.trace_maps import (
    Panel,
    coactivation,
    coactivation_ranks,
    heat_maps,
    popularity_drift,
    reuse_map,
    signal_accuracy,
    signal_accuracy_by_layer,
)  # fmt: skip
from moesim.records import InexactRecord, LayerRecord, Records, StepRecord, TaskRecord, TransferRecord
from moesim.trace import Signal, Trace, find_trace
from moesim.trace.stats.balance import select
from moesim.trace.stats.locality import reuse
from moesim.trace.stats.prediction import signal_recall_by_layer
from tests.experiment.experiment_kit import resolve

MACHINE = Machine({"gpu0": "gpu", "cpu0": "cpu"}, ("cpu0->gpu0", "gpu0->cpu0"))
TRACE_KINDS = [name for name, kind in KINDS.items() if kind.source == "trace"]


def texts(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]


def check_for_paper(figure: Figure) -> None:
    """The width is that of a column or of both, no text is too small, and none is cut off."""
    assert figure.get_figwidth() in (COLUMN, TEXT)
    figure.draw_without_rendering()
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_text() and text.get_visible():
            assert text.get_fontsize() >= SMALL, text.get_text()
    box, whole = figure.get_tightbbox(), figure.bbox_inches
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < whole.x1 + 0.02 and box.y1 < whole.y1 + 0.02


# ------------------------------------------------------------------------------------------------------------- hit rate by token


def steps(**changes) -> pd.DataFrame:
    """Two batches of lru: 1 of 4, 2 of 4, 4 of 4 hits and 3 of 4, 2 of 4, none of 4; and a prefill step."""
    rows = [{"phase": "prefill", "token": None, "lookups": 8, "hits": 8}]
    for hits in ((1, 2, 4), (3, 2, 0)):
        rows += [{"phase": "decode", "token": i + 1, "lookups": 4, "hits": h} for i, h in enumerate(hits)]
    base = {"policy": "lru", "cache_ratio": 0.25, "cache_share": 0.25, "source_label": "derived"}
    return pd.DataFrame(rows).assign(**base | changes)


def test_hit_rate_by_token_takes_all_batches_together():
    data = hit_rate_by_token.drawing(steps()).data
    lru = data[data["policy"] == "lru"]
    assert lru["token"].tolist() == [1, 2, 3]
    assert lru["hit_rate"].tolist() == [0.5, 0.5, 0.5]
    assert lru["lookups"].tolist() == [8, 8, 8]
    chance = data[data["policy"] == CHANCE]
    assert (chance["token"].tolist(), chance["hit_rate"].tolist()) == ([1, 3], [0.25, 0.25])


def test_smoothing_is_over_lookups_and_only_if_asked():
    frame = steps().iloc[:4]
    frame.loc[frame["token"] == 2, ["lookups", "hits"]] = [16, 0]
    plain = hit_rate_by_token.drawing(frame).data["hit_rate"].tolist()[:3]
    smooth = hit_rate_by_token.drawing(frame, smooth=3).data["hit_rate"].tolist()[:3]
    assert plain == [0.25, 0, 1]
    assert smooth == [1 / 20, 5 / 24, 4 / 20]
    assert "moving mean of 3 tokens" in "".join(texts(hit_rate_by_token(frame, smooth=3)))
    assert not any("moving mean" in text for text in texts(hit_rate_by_token(frame)))
    assert "over 3 neighbouring tokens" in hit_rate_by_token.drawing(frame, smooth=3).caption


def test_hit_rate_by_token_emphasises_the_optimum_and_says_what_is_averaged():
    frame = pd.concat([steps(), steps(policy="belady", source_label="oracle"), steps(cache_ratio=0.5, cache_share=0.5)])
    figure = hit_rate_by_token(frame)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["belady (oracle)"].get_linewidth() > lines["lru"].get_linewidth()
    assert lines["lru"].get_ydata().tolist() == [50, 50, 50]
    assert [line.get_ydata()[0] for line in axes.get_lines() if line.get_label() == CHANCE] == [25, 50]
    assert any("mean over cache" in text for text in texts(figure))
    caption = hit_rate_by_token.drawing(frame).caption
    assert "belady knows the future" in caption
    assert "oracle (belady)" in caption


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (steps(token=None), {}, "expected decode steps with a token index, got none; runs with refill have none"),
        (steps(), {"smooth": 4}, "smooth: expected an odd number of tokens from 1, got 4"),
        (steps().drop(columns="hits"), {}, "expected the columns hits"),
    ],
)
def test_hit_rate_by_token_refuses(frame: pd.DataFrame, options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        hit_rate_by_token(frame, **options)


def test_drift_on_cases_by_hand():
    """Windows of one token, whose expert is 0 and 1 in turn; then of four, which have both equally often."""
    data = popularity_drift.drawing(traced(), windows=8).data
    told = data[data["layer"] == 1].pivot(index="window", columns="from", values="distance")
    assert told.index.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert told["before"].tolist() == [1] * 7
    assert told["first"].tolist() == [1, 0, 1, 0, 1, 0, 1]
    halves = popularity_drift.drawing(traced(), windows=2)
    assert halves.data[["from", "layer", "window", "first_token", "distance"]].to_numpy().tolist() == [
        ["before", 0, 2, 5, 0], ["before", 1, 2, 5, 0], ["first", 0, 2, 5, 0], ["first", 1, 2, 5, 0],
    ]  # fmt: skip
    assert "cut into 2 windows (4 tokens a window)" in halves.caption
    assert "cut into 3 windows (2 or 3 tokens a window)" in popularity_drift.drawing(traced(), windows=3).caption
    for asked in (1, 9):
        with pytest.raises(ConfigError, match=f"windows: expected 2 to 8, the tokens of the phase, got {asked}"):
            popularity_drift(traced(), windows=asked)


def test_what_moves_is_told_from_chance():
    """One half of the tokens uses expert 0 alone, the other expert 1: a random order has both in each window."""
    ids = np.repeat([0, 1], 50).astype(np.uint8)
    experts = np.stack([ids, ids], axis=1)[:, :, None]
    moved = Trace.build(experts=experts, weights=np.ones(experts.shape), n_prompt=[0, 0], n_decode=[50, 50], n_experts=4,
                        model="by-hand", label="synthetic", prompt_offset=1)  # fmt: skip
    data = popularity_drift.drawing(moved, windows=2).data
    assert (data["distance"] == 1).all()
    assert data["shuffled"].between(0, 0.3).all()


# ------------------------------------------------------------------------------------------------------------- latency of tokens


def test_latency_is_that_of_each_token_and_counts_sequences():
    """Two sequences wait 20 ms for their token after the prompt's, then 10 ms; a second run's one sequence waits 40 ms."""
    columns = ["run", "step", "phase", "begin", "end", "batch", "n_tokens", "n_sequences"]
    ms = 1_000_000
    told = [
        (0, 0, "prefill", 0, 10 * ms, 0, 8, 2), (0, 1, "decode", 10 * ms, 30 * ms, 0, 2, 2),
        (0, 2, "decode", 30 * ms, 40 * ms, 0, 2, 2),
        (1, 0, "prefill", 0, 10 * ms, 0, 8, 1), (1, 1, "decode", 10 * ms, 50 * ms, 0, 1, 1),
    ]  # fmt: skip
    frame = pd.DataFrame(told, columns=columns).assign(policy="lru", cache_ratio=0.25, source_label="derived")
    drawn = latency_cdf.drawing(frame)
    assert drawn.data[["ms", "tokens", "share"]].to_numpy().tolist() == [[10, 2, 0.4], [20, 2, 0.8], [40, 1, 1]]
    assert drawn.data[["p50_ms", "p90_ms", "p99_ms"]].iloc[0].tolist() == [20, 40, 40]
    (line,) = drawn.figure.axes[0].lines
    assert line.get_xydata().tolist() == [[10, 0], [10, 40], [20, 80], [40, 100]]
    assert line.get_markevery() == [2, 3, 3]
    assert "Distribution over 5 tokens of decoding" in drawn.caption
    assert "p50, p90 and p99 by nearest rank, in ms: lru 20, 40, 40." in drawn.caption
    with pytest.raises(ConfigError, match="latency_cdf: expected decode steps, got none"):
        latency_cdf(frame[frame["phase"] == "prefill"])


def test_latencies_far_apart_have_plain_numbers_on_their_axis():
    columns = ["run", "step", "phase", "begin", "end", "batch", "n_tokens", "n_sequences"]
    ms, told = 1_000_000, []
    for run, end in enumerate((140, 280, 480, 690, 1300)):
        told += [(run, 0, "prefill", 0, 10 * ms, 0, 8, 1), (run, 1, "decode", 10 * ms, (10 + end) * ms, 0, 1, 1)]
    frame = pd.DataFrame(told, columns=columns).assign(policy=[f"p{run}" for run, *_ in told], source_label="derived")
    figure = latency_cdf.drawing(frame).figure
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)) if label.get_text()]
    assert {"200", "500", "1000"} <= set(labels) and all(float(label) > 0 for label in labels)


def test_tokens_of_seeds_that_drew_the_same_requests_count_once():
    """Two runs of one draw wait 20 and 40 ms for two tokens, which weigh one each; another draw waits 10 ms for two."""
    ms = 1_000_000
    told = []
    for run, (requests, wait, n) in enumerate([("1,2", 20, 2), ("1,2", 40, 2), ("3,4", 10, 2)]):
        told += [(run, requests, 0, "prefill", 0, 5 * ms, n), (run, requests, 1, "decode", 5 * ms, (5 + wait) * ms, n)]
    columns = ["run", "requests_drawn", "step", "phase", "begin", "end", "n_sequences"]
    frame = pd.DataFrame(told, columns=columns).assign(policy="lru", trace="t", cache_ratio=0.25, batch=0, n_tokens=2)
    frame = frame.assign(seed=frame["run"], repeat=frame["run"], source_label="derived", chunk_bytes=None)
    drawn = latency_cdf.drawing(frame)
    assert drawn.data[["ms", "tokens", "share"]].to_numpy().tolist() == [[10, 2, 0.5], [20, 1, 0.75], [40, 1, 1]]
    assert drawn.data["p50_ms"].iloc[0] == 10
    assert "Distribution over 4 tokens of decoding" in drawn.caption
    assert "Tokens over 3 seeds that drew 2 different sets of requests." in drawn.caption
    odd = latency_cdf.drawing(frame.assign(n_sequences=1)).data
    assert odd[["tokens", "share"]].to_numpy().tolist() == [[1, 0.5], [0.5, 0.75], [0.5, 1]]
    separate = latency_cdf.drawing(frame.assign(requests_drawn=["1", "1", "2", "2", "3", "3"])).data
    assert separate["share"].tolist() == pytest.approx([1 / 3, 2 / 3, 1])


def test_percentiles_of_tokens_are_those_of_the_rows(sweep):
    steps = pd.DataFrame(row for one in sweep.outcomes for row in step_frame(one))
    each = latency_cdf.drawing(steps).data.drop_duplicates("policy").set_index("policy")
    for row in sweep.rows:
        told = each.loc[row["policy"]]
        assert [told[f"p{p}_ms"] * 1e6 for p in (50, 90, 99)] == pytest.approx([row[f"tpot_p{p}_ns"] for p in (50, 90, 99)])


# ----------------------------------------------------------------------------------------------------------------- time by layer


def timed(layer: int, phase: str = "decode", **ms: float) -> dict:
    """One visit of a layer."""
    return {"layer": layer, "phase": phase, "policy": "lru", "cache_ratio": 0.25, "source_label": "derived"} | {
        f"time_{cause}_ns": 1_000_000 * ms.get(cause, 0) for cause in CAUSES
    }


def test_time_by_layer_is_the_mean_of_its_visits():
    visited = [timed(0, dense=1, exposed_demand=2), timed(0, dense=1), timed(1, dense=2, exposed_demand=4)]
    frame = pd.DataFrame([*visited, timed(0, "prefill", dense=9)])
    drawn = time_by_layer.drawing(frame)
    data = drawn.data[drawn.data["ms"] > 0]
    assert data[["layer", "cause", "ms", "visits"]].to_numpy().tolist() == [
        [0, "dense", 1, 2], [0, "exposed_demand", 1, 2], [1, "dense", 2, 1], [1, "exposed_demand", 4, 1],
    ]  # fmt: skip
    assert len(drawn.data) == 2 * len(CAUSES)
    boxes = {(bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()) for bar in drawn.figure.axes[0].patches}
    assert {(0, 0, 1), (0, 1, 1), (1, 0, 2), (1, 2, 4)} == {box for box in boxes if box[2]}
    assert [text.get_text() for text in drawn.figure.legends[0].get_texts()] == ["dense part", "demand fetch"]
    assert "The slowest layer is 1 with 6 ms, the fastest 0 with 2 ms." in drawn.caption
    assert time_by_layer.drawing(frame, "prefill").data["ms"].sum() == 9
    both = pd.concat([frame, frame.assign(policy="dali")])
    names = [name for name, _ in figures_of("time_by_layer", both, {})]
    assert names == ["time_by_layer.policy=lru", "time_by_layer.policy=dali"]
    with pytest.raises(ConfigError, match="time_by_layer: expected one policy, got lru, dali; choose one"):
        time_by_layer(both)
    with pytest.raises(ConfigError, match="time_by_layer: expected layer visits in prefill, got none"):
        time_by_layer(frame[frame["phase"] == "decode"], "prefill")


# ------------------------------------------------------------------------------------------------------- balance of CPU and GPU


def visits(policy: str, *times: tuple[int, int], phase: str = "decode") -> pd.DataFrame:
    """Layer visits whose experts take so long on the CPU and on the GPU; half of it beyond copies."""
    rows = [{"cpu_done_ns": c, "gpu_done_ns": g, "cpu_longest_ns": c, "gpu_longest_ns": g // 2} for c, g in times]
    return pd.DataFrame(rows).assign(policy=policy, phase=phase, cache_ratio=0.25, source_label="derived")


def test_balance_is_the_difference_over_the_longer():
    data = balance_cdf.drawing(visits("dali", (100, 100), (50, 100), (100, 0), (0, 0), (100, 100))).data
    done = data[data["measure"] == "done"]
    assert done["imbalance"].tolist() == [0, 0.5, 1]
    assert done["share"].tolist() == [0.5, 0.75, 1]
    assert set(data["visits"]) == {4}  # nothing ran in one
    for axes in balance_cdf(visits("dali", (5, 10), (10, 20))).axes:
        (line,) = axes.get_lines()
        assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (100, 100)  # every line ends at all visits
    busy = data[data["measure"] == "longest"]
    assert busy["imbalance"].tolist() == [0, 0.5, 1]
    assert busy["share"].tolist() == [0.25, 0.75, 1]


def test_policies_of_one_side_are_named_and_not_drawn_unless_all_are():
    lru, dali = visits("lru", (0, 10), (0, 20)), visits("dali", (5, 10), (10, 20))
    both = pd.concat([lru, dali])
    assert one_sided(balance_cdf.drawing(both).data) == ["lru"]
    figure = balance_cdf(both)
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["dali"]
    assert any("all experts on one side: lru" in text for text in texts(figure))
    assert "as always with lru" in balance_cdf.drawing(both).caption
    assert [line.get_label() for line in balance_cdf(lru).axes[0].get_lines()] == ["lru"]


def test_balance_takes_decode_unless_there_is_none():
    both = pd.concat([visits("dali", (5, 10)), visits("dali", (8, 10), phase="prefill")])
    assert balance_cdf.drawing(both).data["imbalance"].iloc[0] == 0.5
    assert balance_cdf.drawing(both, "prefill").data["imbalance"].iloc[0] == pytest.approx(0.2)
    assert balance_cdf.drawing(both[both["phase"] == "prefill"]).data["imbalance"].iloc[0] == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="visits in prefill, got none"):
        balance_cdf(visits("dali", (5, 10)), "prefill")
    with pytest.raises(ConfigError, match="unknown phase 'decod'; did you mean 'decode'"):
        balance_cdf(both, "decod")
    with pytest.raises(ConfigError, match="experts ran, got none"):
        balance_cdf(visits("dali", (0, 0)))


# ------------------------------------------------------------------------------------------------------------------- Gantt charts


def three_layers() -> Records:
    """One decode step of three layers of 4 ms, each with a dense part, an expert on each side, and a copy for the next layer."""
    run = Records(makespan_ns=12_000_000)
    run.steps.append(StepRecord(0, 12_000_000, 0, "decode", 0, 1, 1, 1.0))
    for layer in range(3):
        at = 4_000_000 * layer
        run.layers.append(LayerRecord(at, at + 4_000_000, 0, layer))
        run.tasks += [
            TaskRecord(at, at + 1_000_000, "gpu0", "main", "dense", 0, layer, 0, -1, 1, 1, at, at),
            TaskRecord(at + 1_000_000, at + 4_000_000, "cpu0", "main", "expert", 0, layer, 0, 17, 1, 1, at, at),
            TaskRecord(at + 1_000_000, at + 2_000_000, "gpu0", "main", "expert", 0, layer, 0, 3, 1, 1, at, at),
        ]
        copy = ("cpu0->gpu0", "prefetch", layer + 1, 3, 9, 1, 1, layer, True, False)
        run.transfers.append(TransferRecord(at + 2_000_000, at + 5_000_000, *copy))
    return run


def test_the_boxes_of_a_gantt_chart():
    data = gantt.drawing({"dali": three_layers()}, MACHINE, layers=1).data
    boxes = data[["lane", "start_ns", "end_ns", "cause", "text"]].sort_values(["lane", "start_ns"]).to_numpy().tolist()
    ms = 1_000_000
    assert boxes == [
        ["cpu0", ms, 4 * ms, "cpu_experts", "17"],
        ["cpu0->gpu0", 0, ms, "exposed_prefetch", "3"],  # begun before the layer
        ["cpu0->gpu0", 2 * ms, 4 * ms, "exposed_prefetch", "2/3"],  # of another layer
        ["gpu0", 0, ms, "dense", ""],
        ["gpu0", ms, 2 * ms, "gpu_experts", "3"],
        ["layer", 0, 4 * ms, "layer", "1"],
    ]
    assert set(data["policy"]) == {"dali"}


def test_a_gantt_chart_shows_the_middle_unless_told():
    runs = {"dali": three_layers()}
    runs["dali"].steps.insert(0, StepRecord(0, 0, 9, "prefill", 0, 1, 1, 1.0))
    assert gantt_window(runs) == (0, (0, 1))
    assert gantt_window(runs, 9, [1, 2]) == (9, (1, 2))
    assert gantt_window(runs, layers=2) == (0, (2, 2))
    figure = gantt(runs, MACHINE, layers=(1, 2))
    assert figure.axes[0].get_xlabel() == "time since layer 1 of step 0 started (ms)"
    assert figure.axes[0].get_title(loc="left") == "dali: 8 ms"
    with pytest.raises(ConfigError, match=r"layers: expected one layer, or the first and the last, got \[2, 1\]"):
        gantt(runs, MACHINE, layers=[2, 1])
    with pytest.raises(ConfigError, match=r"layers 5..5 in step 0, got no such layer"):
        gantt(runs, MACHINE, layers=5)
    with pytest.raises(ConfigError, match="at least one run"):
        gantt({}, MACHINE)


def test_a_gantt_chart_shows_the_same_decode_step_of_runs_whose_prompts_went_in_fewer_steps():
    """Steps of the first: a prompt and two of decoding. Of the other: two pieces of it, then the same."""
    runs = {"lru": Records(), "llama-cpp": Records()}
    for run, phases in zip(runs.values(), (["prefill"] + ["decode"] * 2, ["prefill"] * 2 + ["decode"] * 2), strict=True):
        for step, phase in enumerate(phases):
            run.steps.append(StepRecord(step, step + 1, step, phase, 0, 1, 1, 1.0))
            run.layers.append(LayerRecord(step, step + 1, step, 0))
    shown = gantt.drawing(runs, MACHINE, step=2).data
    assert shown[["policy", "step"]].drop_duplicates().to_numpy().tolist() == [["lru", 2], ["llama-cpp", 3]]
    shown = gantt.drawing(runs, MACHINE, step=0).data
    assert set(shown["step"]) == {0}


def test_times_of_a_policy_that_is_not_exact_never_stand_alone():
    lossy = three_layers()
    lossy.inexact.append(InexactRecord(0, 1, "stale", 1, 0.25))
    runs = {"daop": lossy, "dali": three_layers()}
    figure = gantt(runs, MACHINE)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["daop*: 8 ms", "dali: 8 ms"]
    assert any("computed as routed: daop 75 %" in text.replace("\n", " ") for text in texts(figure))
    assert any("the replayed routing ignores" in text.replace("\n", " ") for text in texts(figure))
    assert "daop* 8 ms, dali 8 ms" in gantt.drawing(runs, MACHINE).caption
    assert "the replayed routing ignores" in gantt.drawing(runs, MACHINE).caption
    assert not any("replayed" in text for text in texts(gantt({"dali": three_layers()}, MACHINE)))


def test_figures_of_frames_mark_what_is_not_exact():
    frame = pd.concat([steps(), steps(policy="daop", fidelity_fresh_decode=0.5)])
    with drawn_for("paper"):
        found = texts(hit_rate_by_token(frame))
        both = pd.concat([visits("dali", (5, 10)), visits("daop", (8, 10)).assign(fidelity_fresh_decode=0.5)])
        balance = texts(balance_cdf(both))
    for drawn in (found, balance):
        assert "daop*" in drawn
        assert any("not exact" in text for text in drawn)
    assert "computed as routed: daop 50 %" in hit_rate_by_token.drawing(frame).caption
    assert "computed as routed: daop 50 %" in balance_cdf.drawing(both).caption


def test_what_is_alike_in_grey_is_hatched():
    hatches = {patch.get_hatch() for patch in gantt({"dali": three_layers()}, MACHINE).axes[0].patches}
    assert len(hatches - {None, ""}) == 2  # CPU experts, and prefetches
    caption = gantt.drawing({"dali": three_layers()}, MACHINE, label="simulated, weakest source: derived").caption
    assert "layers 0 to 1 of step 0 (decode): dali 8 ms" in caption
    assert "Simulated, weakest source: derived." in caption


# ---------------------------------------------------------------------------------------------------- accuracy of signals


def traced(n_decode: tuple[int, ...] = (4, 4), **more) -> Trace:
    """Two layers of four experts, top 1: every request uses expert 0 and 1 in turn."""
    ids = np.concatenate([np.arange(n) % 2 for n in n_decode]).astype(np.uint8)
    experts = np.stack([ids, ids], axis=1)[:, :, None]
    return Trace.build(
        experts=experts, weights=np.ones(experts.shape), n_prompt=[0] * len(n_decode), n_decode=list(n_decode), n_experts=4,
        model="by-hand", label="synthetic", prompt_offset=1, **more,
    )  # fmt: skip


def signal(ids: list[int], **more) -> Signal:
    """Say the same about both layers, or about the second only."""
    named = np.array(ids, np.uint8)[:, None, None].repeat(2, axis=1)
    rows, scores = np.arange(len(ids), dtype=np.int32), np.ones(named.shape, np.float16)
    return Signal(**{"name": "told", "rows": rows, "scores": scores, "ids": named, "lookahead": 0, "first_layer": 0} | more)


def test_accuracy_by_layer_and_token_index():
    """Right are tokens 1 and 2 of the first request, and 1 of the second."""
    trace = traced(signals={"shadow": signal([0, 1, 3, 3, 0, 3, 3, 3])})
    data = signal_accuracy.drawing(trace).data
    assert data[data["layer"] == 1][["token", "last_token", "accuracy", "n"]].to_numpy().tolist() == [
        [1, 1, 1.0, 2], [2, 2, 0.5, 2], [3, 3, 0, 2], [4, 4, 0, 2],
    ]  # fmt: skip


def test_layers_without_a_signal_are_left_out_and_crossed_out():
    trace = traced(signals={"gate_next1": signal([0, 1, 0, 1, 0, 1, 0, 1], lookahead=1, first_layer=1)})
    assert set(signal_accuracy.drawing(trace).data["layer"]) == {1}
    assert set(signal_accuracy_by_layer.drawing(trace).data["layer"]) == {1}
    axes = signal_accuracy(trace).axes[0]
    assert [patch.get_hatch() for patch in axes.patches] == ["xxxx"]
    assert axes.get_title(loc="left") == "gate_next1: 1.00"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": ["shadw"]}, "unknown signal of this trace 'shadw'; did you mean 'shadow'"),
        ({"phase": "prefill"}, "expected a trace with prefill tokens, got none in by-hand"),
    ],
)
def test_signal_accuracy_refuses(options: dict, message: str):
    trace = traced(signals={"shadow": signal([0] * 8)})
    with pytest.raises(ConfigError, match=message):
        signal_accuracy(trace, **options)
    with pytest.raises(ConfigError, match=r"expected a trace with signals of its decode tokens, got none \(by-hand\)"):
        signal_accuracy(traced())


# ----------------------------------------------------------------------------------------------------------- heat maps of a trace


def test_reuse_by_layer_on_a_case_by_hand():
    """Experts take turns: nothing is used again after one token, everything after two."""
    data = reuse_map.drawing(traced(), lags=2).data
    assert data[data["by"] == "lag"][["layer", "x", "probability"]].to_numpy().tolist() == [
        [0, 1, 0], [1, 1, 0], [0, 2, 1], [1, 2, 1],
    ]  # fmt: skip
    assert data[data["by"] == "rank"][["layer", "x", "probability"]].to_numpy().tolist() == [[0, 1, 0], [1, 1, 0]]
    with pytest.raises(ConfigError, match="lags: expected 1 to 3 tokens, got 4"):
        reuse_map(traced(), lags=4)
    with pytest.raises(ConfigError, match="a request with two decode tokens, got none"):
        reuse_map(traced((1, 1)), lags=1)


def test_experts_that_follow_each_other_on_a_case_by_hand():
    """Five tokens use 0, three use 1, in both layers: each is followed by itself, 2 and 3 are never used."""
    data = coactivation.drawing(traced((5, 3)), layers=0).data
    wide = data.pivot(index="expert", columns="next_expert", values="probability").to_numpy()
    assert wide[:2].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert np.isnan(wide[2:]).all()
    places = data.drop_duplicates("expert").set_index("expert")["place"]
    assert places.to_dict() == {0: 1, 1: 2, 2: 3, 3: 4}
    with pytest.raises(ConfigError, match="layers: expected layers from 0 to 0, which have a next one, got 1"):
        coactivation(traced(), layers=1)
    assert "layers 0 and 1; both by popularity" in coactivation.drawing(traced()).caption


def test_ranks_are_counted_on_other_requests_than_they_are_tried_on():
    data = coactivation_ranks.drawing(traced()).data
    expert, popular = (data[data["by"] == name]["probability"].tolist() for name in ("expert", "popularity"))
    assert expert == [1, 0, 0, 0]
    assert popular == [0.5, 0.5, 0, 0]
    with pytest.raises(ConfigError, match="two layers and two requests or more, got fewer"):
        coactivation_ranks(traced((4,)))


def test_a_scale_that_does_not_begin_at_zero_says_so():
    values = np.linspace(0.5, 1, 100).reshape(10, 10)
    panel = Panel("a", values, (0, 10), (0, 10), "x", "y")

    def scale(**options) -> tuple[float, str]:
        figure = styled(heat_maps)([panel], "t", "p", size=(COLUMN, 2), n_columns=1, **options)
        image = figure.axes[0].images[0]
        return image.norm.vmin, image.colorbar.extend

    assert scale() == (0, "neither")
    assert scale(from_zero=False) == (pytest.approx(np.percentile(values, 2)), "min")


# ------------------------------------------------------------------------------------------------------------------- on real data


@pytest.fixture(scope="module", params=["mini-mixtral", pytest.param("mini-qwen3", marks=pytest.mark.long)])
def trace(request: pytest.FixtureRequest) -> Trace:
    return Trace.read(find_trace(request.param))


@pytest.mark.long
@pytest.mark.parametrize("name", TRACE_KINDS)
def test_figures_of_shipped_traces(trace: Trace, name: str):
    kind = KINDS[name]
    data, figure, caption = kind.drawing(trace)
    check_for_paper(figure)
    assert len(data) > trace.n_layers - 2
    assert f"Routing of {trace.model} (measured, miniature)" in caption
    assert any(trace.model in text for text in texts(figure))
    with drawn_for("paper"):
        paper = kind(trace)
    assert paper.get_figheight() < figure.get_figheight()
    assert not any(trace.model in text for text in texts(paper))  # the caption says it


def test_maps_of_signals_agree_with_the_statistics(trace: Trace):
    rows = np.flatnonzero(trace.phase == 1)
    cells = signal_accuracy.drawing(trace).data
    for name, recorded in trace.signals.items():
        mine = cells[cells["signal"] == name]
        mean = mine.groupby("layer").apply(lambda part: np.average(part["accuracy"], weights=part["n"]), include_groups=False)
        assert mean.to_numpy() == pytest.approx(signal_recall_by_layer(trace, recorded, rows)[mean.index])
    lines = signal_accuracy_by_layer.drawing(trace).data
    assert lines["accuracy"].between(0, 1).all()
    assert (lines["chance"] < lines["accuracy"].mean()).all()


def test_maps_of_reuse_agree_with_the_statistics(trace: Trace):
    sample = select(trace, "decode")
    data = reuse_map.drawing(trace, lags=2).data
    by_lag, by_rank = (data[data["by"] == by].groupby("x")["probability"].mean().tolist() for by in ("lag", "rank"))
    expected = [reuse(sample.experts, sample.request, lag, trace.n_experts) for lag in (1, 2)]
    assert by_lag == pytest.approx(expected)
    if trace.scores is None:  # the chosen experts, each once: their mean is the reuse of the next token
        assert np.mean(by_rank) == pytest.approx(expected[0])
    else:
        assert sum(by_rank) == pytest.approx(trace.top_k)


def test_probabilities_of_the_next_layer_add_up_to_the_experts_of_a_token(trace: Trace):
    rows = coactivation.drawing(trace).data.groupby(["layer", "expert"])["probability"].sum(min_count=trace.n_experts).dropna()
    assert rows.to_numpy() == pytest.approx(trace.top_k)
    ranks = coactivation_ranks.drawing(trace).data
    sums = ranks.groupby(["by", "layer"])["probability"].sum().to_numpy()
    drawn = ranks["rank"].max()
    assert sums == pytest.approx(trace.top_k) if drawn == trace.n_experts else (sums < trace.top_k).all()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory):
    experiment = resolve(tmp_path_factory.mktemp("sweep"), policies=["lru", "fiddler", "dali", "belady"])
    return run_experiment(experiment, keep=lambda index: True)


@pytest.mark.long
def test_figures_of_a_sweep(sweep):
    steps, layers = (pd.DataFrame(row for one in sweep.outcomes for row in make(one)) for make in (step_frame, layer_frame))
    runs = {one.row["policy"]: one.records for one in sweep.outcomes}
    label = corner_label(pd.DataFrame(sweep.rows))
    given = {"steps": (steps,), "layers": (layers,), "records": (runs, sweep.outcomes[0].machine)}
    drawn = 0
    for name, kind in KINDS.items():
        if kind.source not in given:
            continue
        options = {"label": label} if kind.source == "records" else {}
        for medium, width in (("screen", None), ("paper", COLUMN)):
            with drawn_for(medium), drawn_wide(width):
                shown = given[kind.source]
                if kind.source != "records":
                    *_, (_, part) = figures_of(name, shown[0], {})  # that of the last policy, if each has its own
                    shown = (part,)
                data, figure, caption = kind.drawing(*shown, **options)
                check_for_paper(figure)
        assert "oracle" in caption and "rtx3090-epyc7532" in caption, name
        assert len(data)
        drawn += 1
    assert drawn == 5


def test_hits_by_token_are_those_of_the_rows(sweep):
    steps = pd.DataFrame(row for one in sweep.outcomes for row in step_frame(one))
    data = hit_rate_by_token.drawing(steps).data
    for row in sweep.rows:
        mine = data[data["policy"] == row["policy"]]
        assert mine["hits"].sum() / mine["lookups"].sum() == pytest.approx(row["hit_rate_decode"])


def test_options_are_read_as_the_kind_takes_them():
    assert parse_option(KINDS["coactivation"], "layers", "3, 7") == [3, 7]
    assert parse_option(KINDS["signal_accuracy"], "signals", "residual,learned") == ["residual", "learned"]
    assert parse_option(KINDS["reuse_map"], "lags", "4") == 4
    assert parse_option(KINDS["signal_accuracy"], "phase", "prefill") == "prefill"
    with pytest.raises(ConfigError, match="plot: step: expected a whole number, got 'two'"):
        parse_option(KINDS["gantt"], "step", "two")
    with pytest.raises(ConfigError, match="plot: unknown option 'layer'; did you mean 'layers'"):
        parse_option(KINDS["gantt"], "layer", "2")
