"""Rule 9: activities that slow each other down.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

import pytest

from moesim.policy import PREFETCH, UPDATE, Copy, Fetch, Run
from tests.engine.engine_kit import ALL, ONE, Script, cpu, gpu, link, machine, on_gpu, pair, play, tasks, transfers, workload


def test_rule_9_overlapping_activities_slow_each_other_down_and_work_is_conserved() -> None:
    # CPU experts at 0.5 and the link at 0.8 while both go on:
    # cpu0->gpu0 |20 of 1000 alone|640 at 0.8 until 920        |340 alone |
    # cpu0                        |1: 400 at 0.5               |
    #           100              120                          920       1260
    toy = machine(contention=[pair("cpu0.experts", "cpu0->gpu0", 0.5, 0.8)])
    script = {("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]}
    records = play(Script(script, copies=[ALL[1]], routed=on_gpu), ONE, toy)
    assert transfers(records) == [(100, 1260, "cpu0->gpu0", "demand 0/0")]
    assert tasks(records)[1:3] == [(120, 920, "cpu0", "E1x1"), (1260, 1360, "gpu0", "E0x1")]
    assert records.tasks[1].work == 400


@pytest.mark.parametrize(
    ("base", "cpu_end", "link_end"),
    [
        (0, 1750, 1206),  # 400 of 1600 ns are reading: at half the rate it still hides. The link: 50 + 950 / (1 - 0.2 * 0.5)
        (300, 950, 1260),  # 400 of 700: reading at half the rate takes 800, drawing all it can; 50 + 800 * 0.8 + 310
    ],
)
def test_rule_9_an_expert_of_many_rows_is_slowed_only_where_reading_its_weights_takes_longer(
    base: int, cpu_end: int, link_end: int
) -> None:
    per_row = 400 if base == 0 else 100
    toy = machine(
        {"gpu0": gpu(), "cpu0": cpu(expert_ns=base, per_row_ns=per_row)},
        contention=[pair("cpu0.experts", "cpu0->gpu0", 0.5, 0.8)],
    )
    script = {("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]}
    four = workload([[[[0, 1], [2, 3]]]] * 4)
    records = play(Script(script, copies=[ALL[1]], routed=on_gpu), four, toy)
    assert transfers(records)[0][1] == link_end
    assert (150, cpu_end, "cpu0", "E1x4") in tasks(records)


def test_rule_9_with_several_overlaps_the_smallest_rate_counts() -> None:
    # cpu0->gpu0 |1/0 1000    |            slows CPU experts to 0.5
    # gpu0->cpu0 |1/3 back 500|            at 2 bytes/ns; slows them to 0.25
    # cpu0        |0: 120-600: 120 of 400; 600-1100: 250; then 30 alone: 1130|
    pairs = [pair("cpu0.experts", "cpu0->gpu0", 0.5, 1.0), pair("cpu0.experts", "gpu0->cpu0", 0.25, 1.0)]
    toy = machine(links={"cpu0->gpu0": link(), "gpu0->cpu0": link(2)}, contention=pairs)
    script = {
        ("Routed", 0, 0, 0): [
            Run(0, [0], "cpu0"), Run(0, [1], "gpu0"), Fetch(1, [0], "gpu0", PREFETCH), Fetch(1, [3], "cpu0", UPDATE),
        ]
    }  # fmt: skip
    records = play(Script(script, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu), ONE, toy)
    assert transfers(records) == [(100, 600, "gpu0->cpu0", "write-back 1/3"), (100, 1100, "cpu0->gpu0", "prefetch 1/0")]
    assert (120, 1130, "cpu0", "E0x1") in tasks(records)


def test_rule_9_rates_are_parts_per_million_and_completions_round_up() -> None:
    # 400 ns at 333333 ppm: 1200.0012 ns, so 1201.
    toy = machine(contention=[pair("cpu0.experts", "cpu0->gpu0", 1 / 3, 1.0)])
    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1], "gpu0"), Fetch(1, [0, 1], "gpu0", PREFETCH)]}
    records = play(Script(script, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu), ONE, toy)
    assert (120, 1321, "cpu0", "E0x1") in tasks(records)
