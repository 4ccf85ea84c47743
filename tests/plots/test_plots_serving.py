"""Figures of served workloads: knees, panels, parts of requests, levels, capacity."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pandas as pd
import pytest

from moesim.errors import ConfigError
from moesim.plots.catalogue import KINDS
from moesim.plots.serving import capacity, goodput, latency_by_load, request_gantt, slots_over_time
from moesim.serving.requests import RequestRecord
from moesim.serving.steps import Served

S = 10**9


def rows(times: dict[float, float], **more: Any) -> pd.DataFrame:
    """Make rows of one policy: mean times in seconds of requests by rate."""
    found = [
        {
            "policy": "a", "rate": rate, "requests_per_s": min(rate, 1.0), "e2e_mean_ns": time * S, "ttft_p50_ns": time * S / 2,
            "goodput_per_s": 0.5, "source_label": "derived", "limits": '{"ttft_s": 1}', **more,
        }
        for rate, time in times.items()
    ]  # fmt: skip
    return pd.DataFrame(found)


def test_the_knee_is_where_throughput_over_latency_is_largest():
    drawing = latency_by_load.drawing(rows({0.2: 1.0, 0.5: 1.2, 1.0: 4.0, 2.0: 20.0}))  # powers 0.2, 0.42, 0.25, 0.05
    assert drawing.data.set_index("rate")["knee"].to_dict() == {0.2: False, 0.5: True, 1.0: False, 2.0: False}
    assert "Kleinrock" in drawing.caption
    (axes,) = drawing.figure.axes
    assert axes.get_yscale() == "log"


def test_no_knee_at_the_ends_of_what_was_tried():
    assert not latency_by_load.drawing(rows({0.2: 1.0, 0.5: 1.0, 1.0: 1.0})).data["knee"].any()
    assert not latency_by_load.drawing(rows({1.0: 1.0, 2.0: 9.0, 4.0: 99.0})).data["knee"].any()


def test_users_are_a_load_too():
    frame = rows({1: 1.0, 2: 1.5, 4: 3.0}).rename(columns={"rate": "closed"})
    (axes,) = latency_by_load.drawing(frame).figure.axes
    assert axes.get_xlabel() == "users"


def test_goodput_needs_limits_and_a_load():
    with pytest.raises(ConfigError, match=r"give workload\.limits"):
        goodput(rows({1.0: 1.0}, goodput_per_s=math.nan))
    with pytest.raises(ConfigError, match="served workload"):
        goodput(rows({1.0: 1.0}).drop(columns="rate"))
    assert goodput.drawing(rows({1.0: 1.0, 2.0: 2.0})).data["goodput_per_s"].tolist() == [0.5, 0.5]


def served(*requests: tuple[int, int, int, int], preempted: int = 0, end: int = 9) -> Served:
    """Make requests of their arrival, first step, first token and end, in seconds; -1: not so far."""
    made = [
        RequestRecord(i, -1, *(time * S if time >= 0 else -1 for time in one), 4, 2, 2, 0, preempted, 0)
        for i, one in enumerate(requests)
    ]
    return Served(made, array("q"), 0, 0, 0, 0, end * S)


def test_the_parts_of_requests():
    drawing = request_gantt.drawing({"a": served((0, 1, 3, 5), (2, 6, -1, -1), (3, -1, -1, -1))})
    found = [tuple(one) for one in drawing.data[["request", "part", "begin_s", "end_s"]].itertuples(index=False)]
    assert found == [
        (0, "queue", 0, 1), (0, "prompt", 1, 3), (0, "answer", 3, 5), (1, "queue", 2, 6), (1, "prompt", 6, 9), (2, "queue", 3, 9)
    ]  # fmt: skip
    some = request_gantt.drawing({"a": served((0, 1, 3, 5), (2, 6, 7, 8), preempted=1)}, first=1)
    assert some.data["part"].tolist() == ["queue", "prompt", "answer", "preempted"]
    assert "The first 1 requests." in some.caption
    with pytest.raises(ConfigError, match="at least 1"):
        request_gantt({"a": served((0, 1, 3, 5))}, first=0)


def test_levels_over_time():
    data = slots_over_time.drawing({"a": served((0, 0, 3, 5), (2, 4, 6, 7), end=7)}).data
    running = data[data["state"] == "running"]
    assert list(zip(running["time_s"], running["requests"], strict=True)) == [(0, 0), (0, 1), (4, 2), (5, 1), (7, 0), (7, 0)]
    waiting = data[data["state"] == "waiting"]
    assert list(zip(waiting["time_s"], waiting["requests"], strict=True)) == [(0, 0), (0, 0), (2, 1), (4, 0), (7, 0)]


def test_capacity_with_and_without_ends():
    more = {"unit": "users", "share": 0.9, "asked": "a model", "label": "derived"}
    frame = pd.DataFrame(
        [
            {"policy": "a", "capacity": 5.0, "low": 4.0, "high": 7.0, "bound": "", "ttft_p50_s": 1.0, **more},
            {"policy": "b", "capacity": 64.0, "low": math.nan, "high": math.nan, "bound": "at least", "ttft_p50_s": 2.0, **more},
            {"policy": "c", "capacity": 0.0, "low": math.nan, "high": math.nan, "bound": "none", "ttft_p50_s": 9.0, **more},
        ]
    )
    drawing = capacity.drawing(frame)
    texts = [text.get_text() for text in drawing.figure.axes[0].texts]
    assert texts == ["5", "at least 64", "none"]
    with pytest.raises(ConfigError, match="expected the columns"):
        capacity(frame.drop(columns="share"))


def test_all_of_them_are_in_the_catalogue():
    kinds = {"latency_by_load": "rows", "goodput": "rows", "request_gantt": "requests", "slots_over_time": "requests"}
    assert {name: KINDS[name].source for name in kinds} == kinds and KINDS["capacity"].source == "capacity"
