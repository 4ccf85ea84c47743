"""The report as a whole: what it holds, what it leaves out and why, how it is printed and drawn."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from matplotlib.text import Text
from typer.testing import CliRunner

from moesim.cli.trace_stats import trace_stats
from moesim.errors import TraceError
from moesim.plots.trace_report import FIGURES, draw, left_out
from moesim.testing.traces import synthetic_trace
from moesim.trace import GateInputs, Trace
from moesim.trace.stats.report import QUESTIONS, plain, report, summary
from moesim.trace.stats.trace_stats import stats
from tests.helpers_shared import gpt_oss

APP = typer.Typer()
APP.command()(trace_stats)

Json = dict[str, Any]


@pytest.fixture(scope="module")
def everything() -> Trace:
    """A trace that has all there is to describe."""
    shape = {"n_layers": 3, "n_experts": 16, "top_k": 4, "n_requests": 9, "prompt": 20, "decode": 40}
    trace = synthetic_trace(**shape, scores=True, calibration=True, signals={"gate_next1": 0.8, "residual": 0.9})
    rng = np.random.default_rng(0)
    rows = np.arange(30, dtype=np.int32)
    inputs = GateInputs(rows, rng.normal(size=(30, 3, 8)).astype(np.float16))
    tables = {**trace.tables, "residual": np.zeros((3, 8), np.float32)}
    return replace(trace, inputs=inputs, tables=tables)


@pytest.fixture(scope="module")
def found(everything: Trace) -> Json:
    return {"trace": "everything", **report(everything)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in nested dicts, and in lists of them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from leaves(item, path)
    else:
        yield path, value


def bare(trace: Trace) -> Trace:
    """Take away all that a source may not record."""
    return replace(trace, weights=None, scores=None, signals={}, tables={}, inputs=None)


# ------------------------------------------------------------------------------------------------- the report


def test_a_trace_that_has_all_leaves_nothing_out(found: Json):
    assert found["absent"] == {}
    empty = [path for path, value in leaves({q: found[q] for q in QUESTIONS}) if value is None]
    assert empty == []
    assert found["shape"] == {"n_layers": 3, "n_experts": 16, "top_k": 4}
    assert (found["phase"], found["n_rows"], found["n_requests"], found["sampled"]) == ("decode", 360, 9, False)


def test_every_key_is_on_the_page_of_statistics(found: Json):
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "statistics.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    names = [set(re.findall(r"`([a-z0-9_.@-]+)`", row)) for row in rows]
    free = {"gate_next1", "residual", "coactivation", "mean", "low", "high"}  # names of signals; parts of `null`
    for path, _ in leaves({key: value for key, value in found.items() if key != "absent"}):
        parts = path.split(".")
        if parts[0] not in QUESTIONS:
            assert any(parts[0] in row for row in names), path
            continue
        row = next((row for row in names if ".".join(parts[:2]) in row), None)
        assert row is not None, path
        if parts[1] != "hit_rate_by_layer":
            assert set(parts[2:]) - free <= row, path
    assert {"mean", "low", "high"} <= set(re.findall(r"`(\w+)`", page))


def test_values_agree_with_those_of_stats(everything: Trace, found: Json):
    old = stats(everything)
    assert found["locality"]["reuse"]["value"][0] == pytest.approx(old["reuse@1"])
    assert found["locality"]["reuse"]["value"][7] == pytest.approx(old["reuse@8"])
    assert found["locality"]["reuse"]["baseline"] == old["reuse_baseline"]
    assert found["balance"]["entropy"]["value"] == pytest.approx(old["entropy"])
    assert found["balance"]["top_over_uniform"]["value"] == pytest.approx(old["top_over_uniform"])
    assert found["caches"]["hit_rate"]["belady"] == pytest.approx(old["hit_rate"]["belady"])
    for name, recall in old["next_layer_recall"].items():
        assert found["prediction"]["activated"][name]["value"] == pytest.approx(recall), name


@pytest.mark.long
def test_a_uniform_router_lies_within_its_own_null():
    made = synthetic_trace(n_layers=4, n_experts=16, top_k=4, n_requests=8, prompt=0, decode=250, skew=0, reuse=0, seed=7)
    balance = report(made)["balance"]
    for name in ("entropy", "top_over_uniform", "gini"):
        null = balance[name]["null"]
        width = null["high"] - null["low"]
        assert null["low"] - width < balance[name]["value"] < null["high"] + width
        assert null["low"] < null["mean"] < null["high"]
    skewed = report(synthetic_trace(n_layers=4, n_experts=16, top_k=4, skew=1.0))["balance"]
    assert skewed["gini"]["value"] > skewed["gini"]["null"]["high"]


def test_caches_of_segments_are_smaller_than_a_layer():
    for n_experts, sizes in ((16, [4, 8]), (32, [4, 8, 16])):
        made = report(synthetic_trace(n_layers=2, n_experts=n_experts, top_k=4, n_requests=2, prompt=8, decode=20))
        assert made["locality"]["segments"]["cache_sizes"] == sizes


def test_what_is_absent_has_a_reason(everything: Trace):
    result = report(bare(everything))
    assert result["absent"] == {
        "prediction.workload": "the trace has no signals",
        "prediction.states": "the trace has no gate inputs",
        "caches.hit_rate.mrs": "the trace has neither scores nor weights",
        "caches.hit_rate.static": "the trace has no activation frequencies of other requests",
    }
    assert result["prediction"]["states"] is result["caches"]["hit_rate"]["mrs"] is None
    rates, by_layer = result["caches"]["hit_rate"], result["caches"]["hit_rate_by_layer"]
    assert set(by_layer) == {name for name, rate in rates.items() if rate is not None} == set(rates) - {"mrs", "static"}
    assert all(rates[name] == pytest.approx(np.mean(by_layer[name], axis=1)) for name in by_layer)
    ranks = {row.figure: row.value for row in summary(result) if row.figure.startswith("reuse of the expert of rank")}
    values = result["locality"]["reuse_by_rank"]["value"]
    assert ranks == {f"reuse of the expert of rank {rank}": values[rank - 1] for rank in (1, 2, 4)}
    alone = summary({**result, "locality": {**result["locality"], "reuse_by_rank": None}})
    assert not [row for row in alone if row.figure.startswith("reuse of the expert of rank")]
    assert len(result["locality"]["reuse_by_rank"]["value"]) == 4
    assert result["locality"]["reuse_by_rank"]["basis"] == "rank among the chosen"
    notes = {row.figure: row.note for row in summary(result) if row.value is None}
    assert notes["mrs hit rate"] == "the trace has neither scores nor weights"
    assert notes["cosine of h[l] with h[l+1]"] == "the trace has no gate inputs"
    assert notes.keys() >= {"static hit rate", "recall of the busiest experts of a batch"}


def test_what_the_summary_shows_of_predictions(everything: Trace):
    """One batch size, and all if it is full; the cosine with the residual where there is one."""
    result = report(everything)
    entries = result["prediction"]["workload"]["residual"]
    assert {entry["batch_size"] for entry in entries} == {1, 2, 4, 8}
    for full, wanted in ((False, [entry for entry in entries if entry["batch_size"] == 8]), (True, entries)):
        shown = [row.value for row in summary(result, full=full) if row.figure.startswith("recall of residual, top ")]
        assert shown == [entry["value"] for entry in wanted]
    for residual, values in (({"value": 0.5, "by_layer": [0.5]}, [0.5]), (None, [])):
        states = {**result["prediction"]["states"], "residual": residual}
        rows = summary({**result, "prediction": {**result["prediction"], "states": states}})
        assert [row.value for row in rows if row.figure == "cosine of h[l] + res[l] with h[l+1]"] == values


@pytest.mark.long
def test_decode_only_prefill_only_and_one_request():
    decode = report(synthetic_trace(prompt=0, decode=30))
    assert decode["balance"]["prefill_load"] is decode["locality"]["window_similarity"] is None
    assert decode["absent"]["balance.prefill_load"] == "the trace has no prefill rows"
    assert "both prefill and decode" in decode["absent"]["locality.prefill_decode_similarity"]
    prefill = report(synthetic_trace(prompt=30, decode=0))
    assert (prefill["phase"], prefill["n_rows"]) == ("prefill", 120)
    assert prefill["balance"]["prefill_load"]["n_prompts"] == 4
    alone = report(synthetic_trace(n_requests=1, prompt=20, decode=40))
    assert alone["locality"]["prefill_decode_similarity"]["other_requests"] is None
    assert alone["prediction"]["activated"]["coactivation"] is None
    assert {"batching.distinct.larger", "prediction.activated.coactivation"} <= alone["absent"].keys()
    token = report(synthetic_trace(n_requests=1, prompt=1, decode=1))
    assert token["locality"]["reuse"] is token["locality"]["segments"] is None
    assert token["absent"]["locality.reuse"] == "no request has two decode rows"
    for result in (decode, prefill, alone, token):
        rows = summary(result)
        assert sum(row.value is None for row in rows) >= len(result["absent"])
        assert not [row.figure for row in rows if "_" in row.figure.replace("top_k", "") or "." in row.figure]
        summary(result, full=True)
        json.dumps(result, allow_nan=False)


def test_one_request_makes_no_larger_batches():
    alone = report(synthetic_trace(n_layers=2, n_requests=1, prompt=2, decode=6))
    assert alone["batching"]["batch_sizes"] == [1]
    assert alone["absent"]["batching.distinct.larger"].startswith("batches are composed of different requests")


def test_a_signal_that_covers_other_rows_only(everything: Trace):
    signal = everything.signals["residual"]
    prompts = np.flatnonzero(everything.phase[signal.rows] == 0)
    assert signal.ids is None
    signals = {"residual": replace(signal, rows=signal.rows[prompts], scores=signal.scores[prompts])}
    result = report(replace(everything, signals=signals))
    assert result["prediction"]["activated"]["residual"] is None
    assert result["prediction"]["workload"]["residual"] == []
    assert result["absent"]["prediction.activated.residual"] == "the signal covers none of these decode rows"
    assert report(replace(everything, signals=signals), "prefill")["prediction"]["activated"]["residual"]["value"] > 0.5


def test_notes_of_the_summary_in_words(everything: Trace):
    signal = everything.signals["residual"]
    shadow = replace(signal, lookahead=0, needs_layer_offset=None)
    result = report(replace(everything, signals={"shadow-int8": shadow, "gate_next2": replace(signal, lookahead=2)}))
    result["balance"]["prefill_load"]["mean_tokens"] = 39.81
    notes = {row.figure: row.note for row in summary(result)}
    assert notes["recall of shadow-int8"].startswith("ahead of all layers, ")
    assert notes["recall of gate_next2"].startswith("2 layers ahead, ")
    assert notes["recall of coactivation"].startswith("1 layer ahead, ")
    assert notes["prefill load: largest / mean"] == "9 prompts of 40 tokens on average"


def test_a_sample_the_same_again_and_plain_values(everything: Trace):
    some = report(everything, max_rows=50)
    assert (some["n_rows"], some["n_requests"], some["sampled"]) == (80, 2, True)
    assert report(everything) == report(everything)
    with pytest.raises(TraceError, match="expected phase 'prefill' or 'decode', got 'x'"):
        report(everything, "x")
    assert plain({"a": (np.float32(1.5), math.nan), "b": np.array([[1, 2]])}) == {"a": [1.5, None], "b": [[1, 2]]}


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def file(everything: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything.write(tmp_path_factory.mktemp("trace") / "all.safetensors")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(APP, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_all_of_the_report_and_goes_by_phase(file: Path, found: Json):
    assert json.loads(printed(str(file), "-o", "json")) == {**found, "trace": str(file)}
    assert json.loads(printed(str(file), "-o", "json", "--phase", "prefill"))["n_rows"] == 180


def test_the_table_is_grouped_by_question(file: Path):
    lines = printed(str(file), "-o", "md").splitlines()
    groups = [line.split("|")[1].strip() for line in lines[2:]]
    assert [g for g in groups if g] == ["trace", *QUESTIONS]
    text = "\n".join(lines)
    assert re.findall(r"\| reuse@(\d+) ", text) == ["1", "2", "4", "8", "16"]
    assert "| entropy" not in text and "popularity: normalised entropy" in text
    assert re.search(r"\| lru hit rate at 25 % \| 0\.\d{4} \| 0\.2500 \| beside: uniform router \|", text)
    assert printed(str(file)).splitlines()[0].split() == ["figure", "value", "beside", "note"]


def test_csv_has_every_size_and_raw_numbers(file: Path, found: Json):
    rows = list(csv.DictReader(io.StringIO(printed(str(file), "-o", "csv"))))
    assert list(rows[0]) == ["question", "figure", "value", "beside", "which_is", "note"]
    by_name = {row["figure"]: row for row in rows}
    assert len(by_name) == len(rows)
    assert float(by_name["reuse@3"]["value"]) == found["locality"]["reuse"]["value"][2]
    assert float(by_name["lru hit rate at 12.5 %"]["value"]) == found["caches"]["hit_rate"]["lru"][0]
    assert {row["question"] for row in rows} == set(QUESTIONS)


# ------------------------------------------------------------------------------------------------ the figures


def test_every_figure_is_drawn_with_words_on_its_axes(found: Json):
    for name, make in FIGURES.items():
        figure = make(found)
        assert figure is not None, name
        axes = figure.axes[0]
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title(loc="left"), name
        words = " ".join(text.get_text() for text in figure.findobj(Text))
        assert "everything" in words and "synthetic" in words, name


def test_figures_show_the_numbers_of_the_report(found: Json):
    figure = FIGURES["reuse_by_lag"](found)
    assert list(figure.axes[0].lines[0].get_ydata()) == found["locality"]["reuse"]["value"]
    figure = FIGURES["cache_hit_rate"](found)
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    for name, label in (("belady", "belady (oracle)"), ("mrs", "mrs"), ("static", "static")):
        assert drawn[label] == pytest.approx([100 * v for v in found["caches"]["hit_rate"][name]])
    looks_of = [(line.get_marker(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(looks_of)) == len(looks_of)  # not colour alone
    figure = FIGURES["prefill_load"](found)
    assert figure.axes[0].lines[-1].get_ydata()[-1] == pytest.approx(100)


@pytest.mark.long
def test_nothing_reaches_out_of_a_figure(found: Json):
    for name, make in FIGURES.items():
        figure = make(found)
        figure.draw_without_rendering()
        for axes in figure.axes:
            for text in (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label):
                box = text.get_window_extent()
                assert not text.get_text() or (box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1), (name, text)
                assert box.y1 <= figure.bbox.y1 + 1, (name, text)


@pytest.mark.parametrize("name", ["popularity", "reuse_by_rank", "workload_correlation", "signal_recall", "state_cosine"])
def test_layers_ranks_and_steps_are_whole(name: str, found: Json):
    figure = FIGURES[name](found)
    ticks = figure.axes[0].get_xticks()
    assert len(ticks) > 1 and all(tick == round(tick) for tick in ticks)


def looks(report: Json, name: str) -> dict[str, tuple[Any, Any, Any]]:
    figure = FIGURES[name](report)
    lines = figure.axes[0].lines
    return {str(line.get_label()): (line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}


def test_a_signal_looks_the_same_whatever_others_there_are(found: Json):
    names = ["coactivation", "other", "shadow-int8", "shadow-int4", "residual", "learned", "gate_next3", "gate_next1"]
    recall, entries = found["prediction"]["activated"]["residual"], found["prediction"]["workload"]["residual"]

    def having(names: list[str]) -> Json:
        signals = {"activated": dict.fromkeys(names, recall), "workload": dict.fromkeys(names, entries)}
        return {**found, "prediction": {**found["prediction"], **signals}}

    everyone = looks(having(names), "signal_recall")
    order = ["gate_next1", "gate_next3", "residual", "learned", "shadow-int4", "coactivation", "other", "shadow-int8", "chance"]
    assert list(everyone) == order
    assert len(set(everyone.values())) == len(everyone)
    assert everyone["shadow-int4"][0] != everyone["shadow-int8"][0]
    for name in set(names) - {"shadow-int8"}:
        alone = having([name])
        assert looks(alone, "signal_recall")[name] == looks(alone, "workload_recall")[name] == everyone[name]


@pytest.mark.parametrize(
    ("n_requests", "shown"), [([40, 9, 8, 7, 1], 3), ([40, 40], 2), ([8, 7], 1), ([7, 7, 3, 1], 4), ([1, 1], 2)]
)
def test_windows_of_few_requests_are_not_drawn(n_requests: list[int], shown: int, found: Json):
    values = [0.9 - 0.01 * i for i in range(len(n_requests))]
    windows = {"window": 15, "value": values, "other_requests": values, "n_requests": n_requests}
    figure = FIGURES["prefill_decode_similarity"]({**found, "locality": {**found["locality"], "window_similarity": windows}})
    axes = figure.axes[0]
    assert list(axes.lines[0].get_ydata()) == list(axes.lines[1].get_ydata()) == values[:shown]
    assert axes.get_ylim()[0] == 0
    words = " ".join(text.get_text() for text in figure.findobj(Text))
    assert ("not drawn" in words) == (shown < len(n_requests))
    assert (f"the last of {n_requests[shown - 1]}" in words) == (n_requests[shown - 1] < n_requests[0])


def test_figures_without_their_numbers_are_not_drawn(found: Json, monkeypatch: pytest.MonkeyPatch):
    none = {**found["prediction"], "activated": {"residual": None}, "workload": {"residual": []}}
    reason = "the signal covers none of these decode rows"
    uncovered = {**found, "prediction": none, "absent": {"prediction.activated.residual": reason}}
    assert left_out(uncovered) == dict.fromkeys(("signal_recall", "workload_recall"), reason)
    assert left_out(found) == {}
    result = {"trace": "t", **report(bare(synthetic_trace(n_requests=1, prompt=0, decode=20)))}
    absent = {"prefill_load", "prefill_decode_similarity", "signal_recall", "workload_recall", "state_cosine"}
    assert {name for name, make in FIGURES.items() if make(result) is None} == absent
    assert left_out(result) == {
        "prefill_load": "the trace has no prefill rows",
        "prefill_decode_similarity": result["absent"]["locality.prefill_decode_similarity"],
        "signal_recall": result["absent"]["prediction.activated.coactivation"],
        "workload_recall": "the trace has no signals",
        "state_cosine": "the trace has no gate inputs",
    }
    two = {name: FIGURES[name] for name in ("prefill_load", "distinct_experts")}
    monkeypatch.setattr("moesim.plots.trace_report.FIGURES", two)
    assert left_out(result).keys() == {"prefill_load"}
    written = draw(result)
    assert list(written) == ["distinct_experts.png", "distinct_experts.pdf"]
    assert written["distinct_experts.png"].startswith(b"\x89PNG") and written["distinct_experts.pdf"].startswith(b"%PDF")


# ----------------------------------------------------------------------------------------- recorded elsewhere


@pytest.mark.long
def test_a_sample_of_gpt_oss_in_full():
    """Decode of a few sequences: no prompts, no scores, no signals, yet all that ids and weights can tell."""
    found = report(gpt_oss(), max_rows=600)
    gone = "balance.prefill_load locality.prefill_decode_similarity locality.window_similarity prediction.workload"
    assert found["absent"].keys() == {*gone.split(), "prediction.states", "caches.hit_rate.static"}
    assert found["caches"]["mrs_basis"] == "weights of the chosen only, p = k"
    by_rank = found["locality"]["reuse_by_rank"]["value"]
    assert by_rank == sorted(by_rank, reverse=True)  # the better an expert's rank, the likelier it is used again
    rates = found["caches"]["hit_rate"]
    assert all(b >= max(others) for b, *others in zip(*(rates[n] for n in ("belady", "lru", "lfu", "mrs")), strict=True))
    assert found["balance"]["gini"]["value"] > found["balance"]["gini"]["null"]["high"]
    distinct, independent = (found["batching"][name][-1] for name in ("distinct", "independent"))
    assert distinct < found["batching"]["uniform"][-1] and independent < found["batching"]["uniform"][-1]
