"""Rule 8: activations that cross between devices.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from moesim.policy import PREFETCH, Copy, Fetch, Run, Send
from tests.engine.engine_kit import ALL, ONE, TWO, Script, cpu, crossings, gpu, link, machine, on_gpu, play, tasks


def test_rule_8_a_group_crosses_once_for_the_union_of_its_rows() -> None:
    # Rows 0 -> 0, 1 and 1 -> 1, 2. On the CPU: 0 and 1, of rows 0 and 1; on the GPU: 2.
    # gpu0->cpu0 |     |in 30|                                          10 + 2 x 10
    # cpu0       |           |0 400     |1 500 (two rows) |
    # cpu0->gpu0 |                                        |out 30|
    #            0    100   130        530              1030   1060
    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [2], "gpu0"), Run(0, [1], "cpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO)
    assert crossings(records) == [(100, 130, "gpu0->cpu0", "in", 2), (1030, 1060, "cpu0->gpu0", "out", 2)]
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [(130, 530, "cpu0", "E0x1"), (530, 1030, "cpu0", "E1x2")]
    assert records.layers[0].end == 1060
    assert [a.n_bytes for a in records.activations] == [20, 20]


def test_rule_8_runs_returned_apart_cross_apart_and_queue_on_the_control_lane() -> None:
    # Both answers come at 100 ns: Routed, and a message that has arrived. 0: rows {0}; 1: rows {0, 1}.
    # gpu0->cpu0 |     |in 20|in 30|
    script = {
        ("LayerBegin", 0, 0): [Send(100, "cpu0", "gpu0", "m")],
        ("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [2], "gpu0"), Send(5, "cpu0", "gpu0", "n")],
        ("Sent", "n"): [Run(0, [1], "cpu0")],
    }
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO)
    assert crossings(records)[:2] == [(100, 120, "gpu0->cpu0", "in", 1), (120, 150, "gpu0->cpu0", "in", 2)]


def test_rule_8_parts_cross_one_after_the_other_while_the_one_before_is_computed() -> None:
    # 0 and 1 of row 0, then 1 of row 1.
    # gpu0->cpu0 |     |in 20|in 20|
    # cpu0       |           |0 400      |1 400      |1 400      |
    # cpu0->gpu0 |                                   |out 20|    |out 20|
    #            0    100   120   520         920   940   1320  1340
    apart = [Run(0, [0], "cpu0", [0]), Run(0, [1], "cpu0", [0]), Run(0, [1], "cpu0", [1], part=1), Run(0, [2], "gpu0")]
    records = play(Script({("Routed", 0, 0, 0): apart}, copies=ALL, routed=on_gpu), TWO)
    assert crossings(records) == [
        (100, 120, "gpu0->cpu0", "in", 1),
        (120, 140, "gpu0->cpu0", "in", 1),
        (920, 940, "cpu0->gpu0", "out", 1),
        (1320, 1340, "cpu0->gpu0", "out", 1),
    ]
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [
        (120, 520, "cpu0", "E0x1"),
        (520, 920, "cpu0", "E1x1"),
        (920, 1320, "cpu0", "E1x1"),
    ]
    assert records.layers[0].end == 1340


def test_rule_8_the_first_expert_of_a_group_pays_the_extra() -> None:
    # cpu0 |0 400 + 35|1 500|
    toy = machine({"gpu0": gpu(), "cpu0": cpu(first_extra_ns=35)})
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "cpu0"), Run(0, [2], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO, toy)
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [(130, 565, "cpu0", "E0x1"), (565, 1065, "cpu0", "E1x2")]


def test_rule_8_a_group_of_more_rows_takes_what_other_kernels_take() -> None:
    # Both rows: 35 + 50 for the first expert. Row 0 alone: 35. Points from 3 rows on: 2 rows as 3.
    both = {("Routed", 0, 0, 0): [Run(0, [0, 1], "cpu0"), Run(0, [2], "gpu0")]}
    alone = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1, 2], "gpu0")]}
    for script, end in ((both, 615), (alone, 120 + 435)):
        toy = machine({"gpu0": gpu(), "cpu0": cpu(first_extra_ns=35, more_rows=(50, 70))})
        records = play(Script(script, copies=ALL, routed=on_gpu), TWO, toy)
        assert next(t for t in tasks(records) if t[2] == "cpu0")[1] == end


def test_rule_8_share_link_queues_activations_behind_weights() -> None:
    # cpu0->gpu0 |     |1/0 prefetch 1000    |out 20|1/1 ...    the outputs wait for what is in flight, not for 1/1
    # cpu0       |      |0 400   |
    #            0    100 120   520        1100   1120
    shared = machine(links={"cpu0->gpu0": link(share_link=True, latency_ns=7, act_latency_ns=10), "gpu0->cpu0": link()})
    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1], "gpu0"), Fetch(1, [0, 1], "gpu0", PREFETCH)]}
    records = play(Script(script, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu), ONE, shared)
    moved = [t[:3] for t in records.transfers]
    assert moved == [(start, end, "cpu0->gpu0") for start, end in ((100, 1107), (1107, 1127), (1127, 1427))]
    assert records.transfers[2].left > 0  # the run is over before 1/1 arrives
    assert records.transfers[1].cause == "activation" and records.transfers[1].n_bytes == 10
    assert records.layers[0].end == 1127
