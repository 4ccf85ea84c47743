"""Rule 5: order on links, chunks, common media, sources and hops.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from moesim.policy import DEMAND, PREFETCH, UPDATE, Copy, Fetch, Pool, Run, Send
from tests.engine.engine_kit import (
    ALL,
    ONE,
    POOLS,
    Script,
    cpu,
    gpu,
    idle,
    link,
    machine,
    on_demand,
    on_gpu,
    pair,
    play,
    transfers,
    two_gpus,
    workload,
)


def test_rule_5_demand_goes_first_but_what_is_in_flight_completes() -> None:
    # cpu0->gpu0 |1/0 prefetch|0/0 demand|1/1 prefetch|     submitted at 0, 100, 0
    #            0          1000       2000         3000
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0, 1], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0, 1], "gpu0")],
        ("Routed", 0, 1, 0): [Run(1, [0, 1], "gpu0")],
    }
    work = workload([[[[0, 1], [0, 1]]]])
    records = play(Script(script, copies=[Copy(0, [1], "gpu0")]), work)
    assert transfers(records) == [
        (0, 1000, "cpu0->gpu0", "prefetch 1/0"),
        (1000, 2000, "cpu0->gpu0", "demand 0/0"),
        (2000, 3000, "cpu0->gpu0", "prefetch 1/1"),
    ]
    assert records.makespan_ns == 3100


@pytest.mark.parametrize(("repeat", "order"), [(DEMAND, [0, 2, 1]), (PREFETCH, [0, 1, 2]), (UPDATE, [0, 1, 2])])
def test_rule_5_a_repeat_may_only_lower_the_urgency(repeat: int, order: list[int]) -> None:
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0, 1, 2], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Fetch(1, [2], "gpu0", repeat), Run(0, [0, 1], "gpu0")],
    }
    work = workload([[[[0, 1], [1, 2]]]])
    records = play(Script(script, copies=[ALL[0]], routed=on_gpu), work)
    assert [t.expert for t in records.transfers] == order
    assert [t.end for t in records.transfers] == [1000, 2000, 3000]
    assert [t.cause for t in records.transfers if t.expert == 2] == ["demand" if repeat == DEMAND else "prefetch"]


def test_rule_5_chunks_let_a_demand_fetch_in_and_each_pays_the_latency() -> None:
    # chunks of 400 bytes and a latency of 10: 410, 410, 210
    # cpu0->gpu0 |1/0 a|0/0 a|0/0 b|0/0 c|1/0 b|1/0 c|      0/0 is wanted from 100 on
    #            0    410   820  1230  1440  1850  2060
    toy = machine(links={"cpu0->gpu0": link(latency_ns=10), "gpu0->cpu0": link()})
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0, 1], "gpu0")],
    }
    work = workload([[[[0, 1], [0, 1]]]])
    records = play(Script(script, copies=[Copy(0, [1], "gpu0"), Copy(1, [1], "gpu0")], routed=on_gpu), work, toy,
                   chunk_bytes=400)  # fmt: skip
    assert [(t.start, t.end, t.layer, t.n_bytes, t.last) for t in records.transfers] == [
        (0, 410, 1, 400, False), (410, 820, 0, 400, False), (820, 1230, 0, 400, False), (1230, 1440, 0, 200, True),
        (1440, 1850, 1, 400, False), (1850, 2060, 1, 200, True),
    ]  # fmt: skip
    assert len({t.fetch for t in records.transfers}) == 2


def test_rule_5_links_of_one_medium_are_serial_together() -> None:
    # cpu0->gpu0 |0/0       |          |0/1      |      one root complex
    # cpu0->gpu1 |          |1/0 demand|               1/1 (prefetch) comes last
    #            100      1100       2100      3100
    root = link(medium="root")
    toy = two_gpus(**{"cpu0->gpu0": root, "cpu0->gpu1": root, "gpu0->cpu0": link(), "gpu1->cpu0": link()})
    script = {
        ("Routed", 0, 0, 0): [
            Fetch(1, [1], "gpu1", PREFETCH), Fetch(0, [0], "gpu0"), Fetch(1, [0], "gpu1"), Fetch(0, [1], "gpu0"),
            Run(0, [0, 1], "gpu0"),
        ],
        ("Routed", 0, 1, 0): [Run(1, [0, 1], "gpu1")],
    }  # fmt: skip
    work = workload([[[[0, 1], [0, 1]]]])
    records = play(Script(script, pools=POOLS), work, toy)
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu0", "demand 0/0"), (1100, 2100, "cpu0->gpu1", "demand 1/0"),
        (2100, 3100, "cpu0->gpu0", "demand 0/1"), (3100, 4100, "cpu0->gpu1", "prefetch 1/1"),
    ]  # fmt: skip


def test_rule_5_no_victim_is_asked_for_a_transfer_that_another_link_of_the_medium_precedes() -> None:
    root = link(medium="root")
    toy = two_gpus(**{"cpu0->gpu0": root, "cpu0->gpu1": root, "gpu0->cpu0": link(), "gpu1->cpu0": link()})

    script = Script(
        {
            ("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", PREFETCH), Fetch(1, [1], "gpu1", DEMAND)],
            ("Routed", 0, 1, 0): [Run(1, [0], "gpu0"), Run(1, [1], "gpu1")],
        },
        copies=[Copy(0, [0, 1], "gpu0")], pools=[Pool("gpu0", "cache", 2000), Pool("gpu1", "cache", 2000)],
        routed=on_gpu, evict=idle,
    )  # fmt: skip
    records = play(script, workload([[[[0, 1], [0, 1]]]]), toy)
    assert transfers(records)[0] == (0, 1000, "cpu0->gpu1", "demand 1/1")
    assert script.asked == [(1000, 1, 0, PREFETCH)]  # gpu0 was full at 0 too, but its turn came at 1000
    assert [(e.time, e.expert) for e in records.evictions] == [(1000, 0)]


def test_rule_5_the_source_is_the_nearest_copy_then_the_first_by_name() -> None:
    near = {"cpu0->gpu1": link(), "gpu1->cpu0": link(), "gpu1->gpu0": link(4), "gpu0->gpu1": link()}  # no cpu0->gpu0
    both_ways = near | {"cpu0->gpu0": link(2), "gpu0->cpu0": link()}

    def first(links: dict[str, Any], copies: list[Copy], source: str | None = None) -> str:
        script = {("Routed", 0, 0, 0): [Fetch(0, [0, 1], "gpu0", source=source), Run(0, [0, 1], "gpu0")]}
        records = play(Script(script, copies=[*copies, ALL[1]], pools=POOLS, routed=on_gpu), ONE, two_gpus(**links))
        return records.transfers[0].link

    there = [Copy(0, [0, 1], "gpu1")]
    assert first(near, there) == "gpu1->gpu0"  # one hop, against two from cpu0
    assert first(near, []) == "cpu0->gpu1"  # the only copy, over gpu1
    assert first(both_ways, there) == "cpu0->gpu0"  # one hop each: by name, though gpu1 is faster
    assert first(both_ways, there, "gpu1") == "gpu1->gpu0"


def test_rule_5_several_hops_store_and_forward_and_hold_memory_at_each() -> None:
    # cpu0->gpu1 |     |0/0       |0/1       |
    # gpu1->gpu0 |                |0/0       |0/1       |
    #            0    100       1100       2100       3100      on gpu1: 1000 from 100, 2000 from 1100, 1000 from 2100
    toy = two_gpus(**{n: link() for n in ("cpu0->gpu1", "gpu1->cpu0", "gpu1->gpu0", "gpu0->gpu1")})
    records = play(Script({("Routed", 0, 0, 0): on_demand}, copies=[ALL[1]], pools=POOLS[:1], routed=on_gpu), ONE, toy)
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu1", "demand 0/0"), (1100, 2100, "cpu0->gpu1", "demand 0/1"),
        (1100, 2100, "gpu1->gpu0", "demand 0/0"), (2100, 3100, "gpu1->gpu0", "demand 0/1"),
    ]  # fmt: skip
    assert [t.last for t in records.transfers] == [False, False, True, True]
    assert [(m.time, m.n_bytes) for m in records.memory if m.device == "gpu1"] == [
        (100, 1000), (1100, 2000), (2100, 1000), (3100, 0)
    ]  # fmt: skip
    level = [m.n_bytes for m in records.memory if m.device == "gpu0" and m.time == 0][-1]
    assert [(m.time, m.n_bytes - level) for m in records.memory if m.device == "gpu0" and m.time > 0] == [
        (1100, 1000), (2100, 2000)
    ]  # fmt: skip


def test_rule_5_a_hop_waits_for_memory_that_nobody_claims() -> None:
    # gpu1 has 1000 bytes to spare next to its empty pool: one copy in transit at a time.
    # cpu0->gpu1 |     |0/0       |          |0/1       |
    # gpu1->gpu0 |                |0/0       |          |0/1      |
    devices = {"gpu0": gpu(), "gpu1": gpu(memory=5000), "cpu0": cpu()}
    names = ("cpu0->gpu1", "gpu1->cpu0", "gpu1->gpu0", "gpu0->gpu1")
    toy = machine(devices, {n: link() for n in names})
    pools = [POOLS[0], Pool("gpu1", "cache", 4000)]
    records = play(Script({("Routed", 0, 0, 0): on_demand}, copies=[ALL[1]], pools=pools, routed=on_gpu), ONE, toy)
    assert [t[:3] for t in transfers(records)] == [
        (100, 1100, "cpu0->gpu1"), (1100, 2100, "gpu1->gpu0"), (2100, 3100, "cpu0->gpu1"), (3100, 4100, "gpu1->gpu0")
    ]  # fmt: skip


def cut(records: Any) -> list[tuple[Any, ...]]:
    """Return (start, end, link, what moved, what was left) of what the end of the run cut off."""
    return [(t.start, t.end, t.link, t.n_bytes, t.left) for t in records.transfers if t.left]


@pytest.mark.parametrize(
    ("bytes_per_ns", "latency_ns", "chunk", "moved", "began"),
    [
        (1, 0, None, 600, 0),
        (1, 200, None, 400, 0),  # no byte moves before the latency has passed
        (1, 600, None, 0, 0),
        (1, 700, None, 0, 0),
        (0.3, 0, None, 179, 0),  # 1000 bytes take 3334 ns: 179.96, rounded down
        (1, 40, 500, 20, 540),  # the first chunk is done
    ],
)
def test_rule_5_what_the_end_of_a_run_cuts_off_is_recorded_until_then(
    bytes_per_ns: float, latency_ns: int, chunk: int | None, moved: int, began: int
) -> None:
    # gpu0       |DDDDD|00000|11111|DDDDD|22222|33333|     the run is over at 600
    # cpu0->gpu0 |1/0 ...
    script = Script(
        {("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", UPDATE)]}, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu
    )
    toy = machine(links={"cpu0->gpu0": link(bytes_per_ns, latency_ns), "gpu0->cpu0": link()})
    records = play(script, ONE, toy, chunk_bytes=chunk)
    assert records.makespan_ns == 600
    whole = 1000 if chunk is None else chunk
    assert cut(records) == [(began, 600, "cpu0->gpu0", moved, whole - moved)]
    (last,) = records.transfers[-1:]
    assert (last.cause, last.layer, last.expert, last.last, last.fetch) == ("update", 1, 0, False, 1)
    assert [m.n_bytes - before.n_bytes for before, m in pairwise(records.memory) if m.time == 0 and m.device == "gpu0"][
        -1
    ] == 1000


def test_rule_5_what_was_slowed_down_and_is_cut_off_has_moved_less() -> None:
    # gpu0       |DDDDD|00000|11111|DDDDD|22222|33333|     experts leave the link half of its rate: 100 + 100 + 100 + 100
    # cpu0->gpu0 |1/0 ...                                  200 ns of dense parts at the full rate, 400 at half of it
    toy = machine(contention=[pair("gpu0.experts", "cpu0->gpu0", 1.0, 0.5)])
    script = Script(
        {("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", UPDATE)]}, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu
    )
    assert cut(play(script, ONE, toy)) == [(0, 600, "cpu0->gpu0", 400, 600)]


def test_rule_5_each_link_has_one_that_is_cut_off_and_a_message_is_too() -> None:
    script = Script(
        {("LayerBegin", 0, 1): [Fetch(1, [0, 1], "gpu0", UPDATE), Send(900, "gpu0", "cpu0", "m")]},
        copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu,
    )  # fmt: skip
    records = play(script, ONE)
    assert cut(records) == [(300, 600, "cpu0->gpu0", 300, 700), (300, 600, "gpu0->cpu0", 300, 600)]
    assert [t.cause for t in records.transfers] == ["update", "message"]
