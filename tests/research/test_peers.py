"""The run of another simulator: GPUs in step, the law of a step, requests drawn, and the published figures of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.research.tables import peers, serving
from experiments.research.tables.peers import Law, drawn, read, scheduled, serve
from moesim.core.table import Format
from moesim.serving.arrivals import Arrival
from moesim.serving.steps import ServedStep

A, B = Arrival(0, 3, 2), Arrival(0, 5, 1)


def test_gpus_begin_each_step_together():
    seen: list[list[int]] = []

    def law(steps: Sequence[ServedStep | None]) -> int:
        seen.append([0 if step is None else step.n_tokens for step in steps])
        return 10 * max(seen[-1])

    a, b = (one.requests[0] for one in serve([[A], [B]], law))
    assert seen == [[3, 5], [1, 0]], "an answer of one token comes with its prompt"
    assert (a.first, a.end, b.first, b.end) == (50, 60, 50, 50)
    (alone,) = (one.requests[0] for one in serve([[A]], law))
    assert (alone.first, alone.end) == (30, 40)


def test_a_step_of_one_answer_takes_what_the_peer_printed():
    seen: list[int] = []

    def law(steps: Sequence[ServedStep | None]) -> int:
        seen.append(Law().ns(steps))
        return seen[-1]

    serve([[Arrival(0, 2361, 4)], [Arrival(10**12, 1, 1)]], law)  # the second GPU has no request yet
    assert seen[2] / 1e6 == pytest.approx(6.74, rel=0.02)  # outputs/sim.csv at acc57c4a


def test_each_cause_changes_the_time_in_its_direction():
    asked = drawn(0)[:80]
    laws = (Law(), Law(link="later"), Law(link="none"), Law(mixed=False))
    base, later, none, one = (scheduled(asked, law)[4] for law in laws)
    assert base > later > none and base > one


def test_requests_have_the_published_quantiles():
    one = drawn(1)
    prompt, answer = (np.array([getattr(each, name) for each in one]) for name in ("prompt", "answer"))
    assert np.percentile(prompt, 50) == pytest.approx(728, abs=3) and np.percentile(answer, 90) == pytest.approx(785, abs=3)
    assert len(one) == 300 and one[-1].ns == pytest.approx(29.12e9)
    assert one != drawn(2)


def test_requests_of_a_recorded_benchmark(tmp_path: Path):
    rows = [{"arrival_time": 5.0 + i, "input_toks": 7, "output_toks": 3 + i} for i in range(2)]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    assert read(tmp_path / "requests.jsonl") == [Arrival(0, 7, 3), Arrival(10**9, 7, 4)]


def test_a_draw_is_near_the_measurement_and_the_page_has_the_published_rows():
    (measured,) = [one for name, one in peers.PUBLISHED.items() if name.startswith("vLLM")]
    own = scheduled(drawn(0), Law())
    assert own[4] == pytest.approx(measured[4], rel=0.03) and own[8] == pytest.approx(measured[8], rel=0.03)
    page = serving.PAGE.read_text(encoding="utf-8")
    for line in peers.table({name: [list(one)] for name, one in peers.PUBLISHED.items()}, Format.MD).splitlines()[2:]:
        assert line in page
