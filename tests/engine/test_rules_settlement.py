"""How routed pairs are served: fresh and stale rows, substitutes, skips.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import PolicyError
from moesim.policy import Run, Skip
from moesim.records import InexactRecord
from tests.engine.engine_kit import ALL, ONE, TWO, Script, crossings, on_gpu, play, tasks, workload


def _inexact(on: dict[Any, Any], work: Any = ONE, **more: Any) -> Any:
    return play(Script(on, copies=ALL, routed=on_gpu, exact=False, **more), work)


def test_settlement_fresh_rows_leave_no_record() -> None:
    # Expert 1 serves both rows, one on each device.
    script = {("Routed", 0, 0, 0): [Run(0, [0, 2], "gpu0"), Run(0, [1], "cpu0", [1]), Run(0, [1], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO)
    assert records.inexact == []
    assert [t.rows for t in records.tasks if t.expert == 1] == [1, 1]


def test_settlement_a_substitute_takes_the_next_open_slot_in_rank_order() -> None:
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [3], "gpu0", [0])]}
    records = _inexact(script)
    assert records.inexact == [InexactRecord(0, 0, "substituted", 1, 0.25)]  # the slot of expert 1
    assert records.steps[0].gate_mass == 2.0
    records = _inexact({("Routed", 0, 0, 0): [Run(0, [3, 2], "gpu0", [0])]})
    assert records.inexact == [InexactRecord(0, 0, "substituted", 2, 1.0)]


def test_settlement_stale_runs_start_early_and_delay_only_their_own_layer() -> None:
    # Expert 2 of layer 1 for row 0, on the state of layer 0, from 100 on:
    # gpu0       |DDDDD|00000|11111|DDDDD|33333|       layer 0 ends at 300
    # cpu0       |      |2: 400          |
    # cpu0->gpu0 |                             |out      layer 1 ends at 540
    #            0    100   200   300   400   500 520 540
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Run(1, [2], "cpu0", [0], inputs_from=0)],
        ("Routed", 0, 1, 0): [Run(1, [3], "gpu0")],
    }
    records = _inexact(script)
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (520, 540, "cpu0->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 300), (300, 540)]
    assert records.inexact == [InexactRecord(0, 1, "stale", 1, 0.75)]


def test_settlement_a_stale_run_at_the_end_of_the_layer_before() -> None:
    # At LayerEnd(0) the state of layer 0 is there: nothing to wait for.
    script = {
        ("LayerEnd", 0, 0): [Run(1, [2], "cpu0", [0], inputs_from=0)],
        ("Routed", 0, 1, 0): [Run(1, [3], "gpu0")],
    }
    records = _inexact(script)
    assert (320, 720, "cpu0", "E2x1") in tasks(records)
    assert records.makespan_ns == 740


def test_settlement_stale_and_not_routed() -> None:
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Run(1, [1], "cpu0", [0], inputs_from=0)],
        ("Routed", 0, 1, 0): [Run(1, [2], "gpu0")],
    }
    assert _inexact(script).inexact == [InexactRecord(0, 1, "substituted-stale", 1, 0.25)]


def test_settlement_an_early_run_on_its_own_layers_state_is_fresh() -> None:
    # Asked for at 0, before layer 0 is routed; its inputs are there at 100.
    script = {("LayerBegin", 0, 0): [Run(0, [1], "gpu0", [0])], ("Routed", 0, 0, 0): [Run(0, [0], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), ONE)
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E1x1"), (200, 300, "gpu0", "E0x1")]
    assert records.inexact == []


def test_settlement_fresh_and_stale_runs_of_one_answer_cross_apart() -> None:
    # Both on the CPU at Routed(1): 2 reads layer 0's state, 3 its own.
    script = {("Routed", 0, 1, 0): [Run(1, [2], "cpu0", [0], inputs_from=0), Run(1, [3], "cpu0")]}
    records = _inexact(script)
    assert [c[3:] for c in crossings(records)] == [("in", 1), ("in", 1), ("out", 1), ("out", 1)]
    same = {("Routed", 0, 1, 0): [Run(1, [2], "cpu0", [0], inputs_from=1), Run(1, [3], "cpu0")]}
    assert [c[3:] for c in crossings(_inexact(same))] == [("in", 1), ("out", 1)]


def test_settlement_skip() -> None:
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Skip(0, [1])]}
    records = _inexact(script)
    assert records.inexact == [InexactRecord(0, 0, "skipped", 1, 0.25)]
    assert records.layers[0].end == 200
    one_row = {("Routed", 0, 0, 0): [Skip(0, [1], [1]), Run(0, [0, 1, 2], "gpu0")]}
    records = _inexact(one_row, TWO)
    assert records.inexact == [InexactRecord(0, 0, "skipped", 1, 0.75)]
    assert [t.rows for t in records.tasks if t.layer == 0 and t.expert == 1] == [1]


def test_settlement_rows_none_after_rows_marks_the_rest() -> None:
    # Row 0: 0 by rows, 1 by rows=None: no slot is left for 3.
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0", [0]), Run(0, [1], "gpu0"), Run(0, [3], "gpu0", [0])]}
    with pytest.raises(PolicyError, match=r"Run\(E3\) for row 0: every slot of that row is served already"):
        _inexact(script)


def test_settlement_with_micro_batches_keeps_what_earlier_ones_took() -> None:
    # Both micro-batches use expert 1; skipping it in the second leaves the first's run alone.
    work = workload([[[[0, 1], [2, 3]]], [[[2, 1], [2, 3]]]], micro_batches=2)
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0")],
        ("Routed", 0, 0, 1): [Run(0, [2], "gpu0"), Skip(0, [1])],
    }
    records = _inexact(script, work)
    assert records.inexact == [InexactRecord(0, 0, "skipped", 1, 0.25)]


def test_settlement_rows_may_be_numpy_integers() -> None:
    n = 70  # beyond 63 bits
    work = workload([[[[0, 1], [2, 3]]]] * n)
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [1], "cpu0", np.arange(n))]}
    records = play(Script(script, copies=ALL, routed=on_gpu), work)
    assert [c[4] for c in crossings(records)] == [n, n]


@pytest.mark.parametrize(
    ("actions", "kinds"),
    [
        ([Run(0, [0], "gpu0"), Run(0, [3], "gpu0", [0])], "1 substituted"),
        ([Run(0, [0], "gpu0"), Skip(0, [1])], "1 skipped"),
    ],
)
def test_settlement_an_exact_policy_must_be_exact(actions: list[Any], kinds: str) -> None:
    with pytest.raises(PolicyError) as error:
        play(Script({("Routed", 0, 0, 0): actions}, copies=ALL, routed=on_gpu), ONE, name="liar")
    assert "step 0, layer 0" in str(error.value) and kinds in str(error.value) and "[policy=liar]" in str(error.value)
