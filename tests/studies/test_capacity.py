"""`moesim capacity`: the search, its interval against queues whose capacity is known, and the command on small runs."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import moesim
from moesim.cli.main import main
from moesim.errors import ConfigError, InputError
from moesim.metrics.naming import NOT_VARIED
from moesim.serving.requests import RequestRecord
from moesim.serving.steps import Served
from moesim.studies.capacity import WITHIN, Search, enclose, ended_per_s, estimate, judge
from tests.experiment.experiment_kit import write_trace


def searched(ends: list[float], *, whole: bool, start: float = 1.0) -> list[Search]:
    """Search servers that are good up to these loads."""
    searches = {place: Search(whole, start) for place in range(len(ends))}
    enclose(searches, lambda asked: [(load <= ends[place], None) for place, load in asked])
    return list(searches.values())


@pytest.mark.parametrize("end", [0.013, 0.7, 1.0, 1.9, 333.0])
def test_a_rate_is_enclosed(end: float):
    (one,) = searched([end], whole=False)
    assert one.good <= end < one.bad <= WITHIN * one.good
    assert len(one.tried) < 20


@pytest.mark.parametrize("end", [1, 2, 3, 7, 8, 100])
def test_users_are_found_exactly(end: int):
    (one,) = searched([end], whole=True)
    assert (one.good, one.bad) == (end, end + 1)


def test_an_answer_over_seeds():
    users = estimate(searched([4, 5, 6], whole=True))
    assert users == (5, 2, 8, "")  # 5 - 2.48 and 5 + 2.48, outwards
    rates = estimate(searched([0.4, 0.5, 0.625], whole=False))
    assert rates.value == pytest.approx(0.5, rel=0.05)
    half = 4.303 * math.log(1.25) / math.sqrt(3)
    assert math.log(rates.high / rates.low) == pytest.approx(2 * half, abs=0.2)
    alone = estimate(searched([0.5], whole=False))
    assert math.isnan(alone.low) and math.isnan(alone.high)


def test_no_end_and_no_beginning():
    assert estimate(searched([math.inf, 3.0], whole=False)).bound == "at least"
    assert estimate(searched([math.inf], whole=True))[0::3] == (1024, "at least")
    assert estimate(searched([0, 0], whole=True)).bound == "none"
    assert estimate(searched([0.0], whole=False)).bound == "none"


def test_what_cannot_be_tried_is_given_up():
    searches = {"a": Search(True, 1), "b": Search(True, 1)}
    enclose(searches, lambda asked: [None if key == "a" else (load <= 3, None) for key, load in asked])
    assert searches["b"].good == 3 and not searches["a"].tried


def share_within(rate: float, seed: int, n: int, limit: float, *, equal: bool) -> float:
    """Return the share of n customers of a queue whose time is at most a limit, in mean service times."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1.0, n)) / rate
    services = np.ones(n) if equal else draw.exponential(1.0, n)
    free, good = 0.0, 0
    for arrival, service in zip(arrivals, services, strict=True):
        free = max(free, arrival) + service
        good += free - arrival <= limit
    return good / n


def test_the_interval_contains_the_capacity_of_a_queue_that_is_known():
    """M/M/1: the time is exponential with rate 1 - load, so 90 % are within 5 up to a load of 1 - log(10) / 5."""
    true, n_trials, hits, ratios = 1 - math.log(10) / 5, 40, 0, []
    for trial in range(n_trials):
        searches = {seed: Search(False, 1.0) for seed in range(5)}

        def ask(asked, trial=trial):
            return [(share_within(load, 5 * trial + seed, 200, 5.0, equal=False) >= 0.9, None) for seed, load in asked]

        enclose(searches, ask)
        found = estimate(list(searches.values()))
        hits += found.low <= true <= found.high
        ratios.append(found.value / true)
    assert hits >= 0.85 * n_trials
    assert 1.0 < np.mean(ratios) < 1.12  # a run begins with an empty queue


def request(number: int, first: int, end: int, generated: int = 2) -> RequestRecord:
    return RequestRecord(number, 0, 0, 0, first, end, 1, 2, generated, 0, 0, 0)


def test_requests_within_limits_of_all_that_arrived():
    s = 10**9
    requests = [request(0, s, 2 * s), request(1, 3 * s, 4 * s), request(2, s, 5 * s), request(3, s, -1, 1)]
    served = Served(requests, None, 0, 0, 0, 1, 5 * s)  # type: ignore[arg-type]
    limits = {"ttft_s": 2.0, "tpot_s": 1.5}
    assert judge(served, limits, 0) == (0.25, Counter(ttft_s=1, tpot_s=1))  # the last has not ended
    assert judge(served, limits, 1) == (0.0, Counter(ttft_s=1, tpot_s=1))


def small(folder: Path, **changes):
    """Ask for the capacity of a small machine's policies."""
    trace = folder / "small.safetensors"
    if not trace.exists():
        write_trace(trace)
    asked = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "trace": str(trace), "prompt": 4,
        "answer": 3, "ttft": 3.0, "tpot": 1.0, "seeds": 2, "requests": 12, "cache": 0.5, "jobs": 1, "progress": False,
    } | changes  # fmt: skip
    return moesim.capacity(asked.pop("policies", ["lru", "fiddler"]), **asked)


def test_users_of_two_policies(tmp_path: Path):
    found = small(tmp_path, users=True)
    lru, fiddler = found.found
    assert 1 <= lru.found.value < fiddler.found.value
    assert {trial.row["closed"] for trial in fiddler.at} == {fiddler.found.value}
    assert all(trial.share >= 0.9 for trial in (*lru.at, *fiddler.at))
    text = found.text()
    assert "TTFT p50" in text and "tok/s" in text and "90 % within ttft_s: 3.0, tpot_s: 1.0" in text
    assert "of which one value was used: capacity.csv of --out lists them" in text and NOT_VARIED not in text
    folder = found.save(tmp_path / "out")
    assert {"capacity.csv", "capacity.png", "capacity.txt"} <= {path.name for path in folder.iterdir()}
    assert small(tmp_path, users=True).rows == found.rows  # the same question has the same answer


def test_limits_that_nobody_keeps_and_a_policy_that_cannot_run(tmp_path: Path):
    found = small(tmp_path, ttft=0.001, policies=["lru", "all-gpu"], cache="12GiB")
    assert [one.found and one.found.bound for one in found.found] == ["none", None]
    assert found.found[0].missed == "ttft_s"
    assert len(found.failures) == 1 and "all-gpu" in found.failures[0]
    assert "none" in found.text() and "failed: all-gpu" in found.text()


def test_a_run_at_a_rate_is_as_long_as_its_limits_need(tmp_path: Path):
    found = small(tmp_path, policies=["lru"], ttft=30, tpot=30)
    (lru,) = found.found
    for trial in lru.at:
        assert trial.row["n_requests"] == max(12, math.ceil(10 * 30 * trial.row["rate"]))
        assert lru.found.value < 1.3 * trial.row["requests_per_s"]
    assert lru.found.low <= np.mean([trial.ended_per_s for trial in lru.at])


def test_requests_that_ended_while_others_came():
    s = 10**9
    requests = [RequestRecord(i, 0, i * s, i * s, i * s, end * s, 1, 2, 2, 0, 0, 0) for i, end in enumerate([1, 3, 4, 9, 9])]
    assert ended_per_s(Served(requests, None, 0, 0, 0, 0, 9 * s)) == 3 / 4  # type: ignore[arg-type]
    assert ended_per_s(Served(requests[:1], None, 0, 0, 0, 0, 9 * s)) == 0.0  # type: ignore[arg-type]


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="share: expected above 0"):
        small(tmp_path, share=1.5)
    with pytest.raises(InputError, match=r"ttft: expected seconds above 0"):
        small(tmp_path, ttft=-1)
    with pytest.raises(ConfigError, match="think: expected it with users, got 3 s and a rate"):
        small(tmp_path, think=3)
    assert (
        main(["capacity", "--model", "mixtral-8x7b", "--hardware", "rtx3090-epyc7532", "--policies", "lru", "--scheduler", "x"])
        == 2
    )
    assert "scheduler" in capsys.readouterr().err
