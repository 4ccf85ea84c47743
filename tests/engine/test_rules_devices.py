"""Rule 4: what a device runs next, and predictions on its lanes.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policy import Copy, Fetch, Predict, Run, Send
from tests.engine.engine_kit import ALL, ONE, Oracle, Script, cpu, gpu, machine, on_gpu, pair, play, tasks, workload


def test_rule_4_a_device_skips_what_is_not_ready() -> None:
    # cpu0->gpu0 |     |0/0 1000 ns ............|
    # gpu0       |DDDDD|11111|                  |00000|     Run(0) was submitted before Run(1)
    #            0    100   200               1100  1200
    script = {("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0, 1], "gpu0")]}
    records = play(Script(script, copies=[Copy(0, [1], "gpu0"), ALL[1]], routed=on_gpu), ONE)
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E1x1"), (1100, 1200, "gpu0", "E0x1")]
    late = records.tasks[2]
    assert (late.submitted, late.ready) == (100, 1100)


def test_rule_4_a_prediction_on_the_main_lane_goes_ahead_of_queued_runs() -> None:
    # gpu0 |DDDDD|P|00000|11111|      returned together: P, 20 ns, is first though it was returned last
    on = {("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Predict(0, 1, "told", "gpu0")]}
    toy = machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu()})
    script = Script(on, copies=ALL, routed=on_gpu, hear=["Predicted"])
    records = play(script, ONE, toy, predictors={"told": Oracle(None)})
    assert tasks(records)[1:4] == [(100, 120, "gpu0", "predict"), (120, 220, "gpu0", "E0x1"), (220, 320, "gpu0", "E1x1")]


@pytest.mark.parametrize(("message", "ahead_of"), [(50, 1), (100, 1), (101, 2), (200, 2)])
def test_rule_4_a_prediction_goes_behind_what_runs_also_in_a_chain(message: int, ahead_of: int) -> None:
    # A message arrives at 150, 200, 201 or 300, and its answer is a prediction.
    # gpu0 |DDDDD|00000|P|11111|22222|33333|    at 150, and at 200, when 1 has not started yet
    # gpu0 |DDDDD|00000|11111|P|22222|33333|    at 201, and at 300
    work = workload([[[[0, 1], [2, 3]]], [[[2, 3], [2, 3]]]])
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1, 2, 3], "gpu0"), Send(message, "cpu0", "gpu0", "now")],
        ("Sent", "now"): [Predict(0, 1, "told", "gpu0")],
    }
    toy = machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu()})
    records = play(Script(script, copies=ALL, routed=on_gpu), work, toy, predictors={"told": Oracle(None)})
    names = [t[3] for t in tasks(records)[1:6]]
    expected = ["E0x1", "E1x1", "E2x1", "E3x1"]
    assert names == [*expected[:ahead_of], "predict", *expected[ahead_of:]]
    assert records.tasks[1 + ahead_of][:2] == (100 + 100 * ahead_of, 120 + 100 * ahead_of)


def test_rule_4_a_waiting_prediction_that_wakes_goes_ahead_of_a_chain() -> None:
    # The dense part is on the CPU, and there are two micro-batches of two rows, which cross in 30. The first runs
    # 0, 1, 2, 3 on gpu0. A prediction is asked for at 330; it needs all of the layer, which is routed at 430.
    # cpu0 |h |D(mb0) 200|D(mb1) 200|
    # gpu0               |in|00000|11111|P|22222|33333|
    #      0  30        230 260   360   460   580   680
    work = workload([[[[0, 1], [2, 3]]], [[[2, 3], [2, 3]]], [[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    parts = {(part, 0): "cpu0" for part in ("attention", "dense")}
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1, 2, 3], "gpu0"), Send(100, "cpu0", "gpu0", "now")],
        ("Sent", "now"): [Predict(0, 1, "told", "gpu0")],
    }
    toy = machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu()})
    records = play(Script(script, copies=ALL, parts=parts, routed=on_gpu), work, toy, predictors={"told": Oracle(1)})
    assert [t for t in tasks(records) if t[2] == "gpu0"][:5] == [
        (260, 360, "gpu0", "E0x1"), (360, 460, "gpu0", "E1x1"), (460, 480, "gpu0", "predict"),
        (480, 580, "gpu0", "E2x1"), (580, 680, "gpu0", "E3x1"),
    ]  # fmt: skip


def test_rule_4_the_side_lane_runs_beside_the_main_one_at_its_measured_rate() -> None:
    # gpu0  |DDDDD|000000 120|11111|    0 at 0.8 while P runs: 80 of 100 by 200, the rest by 220
    # gpu0* |     |PPPPP|               50 ns of work at rate 0.5
    #       0    100   200 220    320
    pairs = [pair("gpu0.experts", "gpu0.side", 0.8, 0.5)]
    toy = machine({"gpu0": gpu(predict={"told": 50}), "cpu0": cpu()}, contention=pairs)
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Predict(0, 1, "told", "gpu0", "side")]}
    records = play(Script(script, copies=ALL, routed=on_gpu, hear=["Predicted"]), ONE, toy, predictors={"told": Oracle(1)})
    assert tasks(records)[1:4] == [(100, 200, "gpu0*", "predict"), (100, 220, "gpu0", "E0x1"), (220, 320, "gpu0", "E1x1")]


@pytest.mark.parametrize("when", [("LayerBegin", 0, 0), ("Routed", 0, 0, 0), ("LayerEnd", 0, 0)])
def test_rule_4_a_prediction_waits_for_the_state_it_needs_and_no_longer(when: tuple[Any, ...]) -> None:
    # The state of layer 0 exists from 100 on, also between two layers (at LayerEnd, 300).
    toy = machine({"gpu0": gpu(), "cpu0": cpu(predict={"told": 10})})
    actions = [Predict(0, 1, "told", "cpu0")]
    script = Script(
        {when: [Run(0, [0, 1], "gpu0"), *actions] if when[0] == "Routed" else actions},
        copies=ALL, routed=on_gpu, hear=["Predicted"],
    )  # fmt: skip
    play(script, ONE, toy, predictors={"told": Oracle(1)})
    told = [now for now, key in script.log if key[0] == "Predicted"]
    assert told == [310 if when[0] == "LayerEnd" else 110]
