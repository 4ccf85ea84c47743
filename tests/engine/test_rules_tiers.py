"""Three tiers: a disk that a placement names as backing, a pool in the host's memory, a pool on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moesim.errors import PolicyError
from moesim.fits import required_bytes
from moesim.policy import Copy, Drop, Fetch, Placement, Pool, Run
from tests.engine.engine_kit import ONE, Script, cpu, gpu, idle, link, machine, play, sure, tasks, tiny_model, transfers

TIERS = machine(
    {"gpu0": gpu(), "cpu0": cpu(), "disk0": {"kind": "disk", "memory_bytes": sure(1_000_000)}},
    {"cpu0->gpu0": link(2), "gpu0->cpu0": link(), "disk0->cpu0": link(0.5), "cpu0->disk0": link()},
)
POOLS = [Pool("gpu0", "cache", 1000), Pool("cpu0", "cache", 2000)]
ON_CPU = [Copy(0, [0], "cpu0")]


def tiered(on: Any, copies: Any = ON_CPU, backing: Any = ("disk0",)) -> Script:
    script = Script(on, copies=copies, pools=POOLS, evict=idle)
    script._placement = replace(script._placement, backing=backing)
    return script


def test_each_tier_is_the_source_of_the_next() -> None:
    # Layer 0 uses 0, which is in memory, and 1, which is read into memory, 2000 ns, and computed there. Layer 1 uses 2 and 3: the
    # reads make 0 and 1 leave memory; then 2 is copied to the GPU, and leaves it again for 3, whose source is memory, too.
    def second(event: Any, view: Any) -> list[Any]:
        return [Fetch(1, [2, 3], "cpu0"), Run(1, [3], "cpu0")]

    on = {
        ("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0], "gpu0"), Fetch(0, [1], "cpu0"), Run(0, [1], "cpu0")],
        ("Routed", 0, 1, 0): second,
        ("Fetched", 1, 2, "cpu0"): [Fetch(1, [2], "gpu0"), Run(1, [2], "gpu0")],
    }
    records = play(tiered(on), ONE, TIERS)
    assert transfers(records) == [
        (100, 600, "cpu0->gpu0", "demand 0/0"), (100, 2100, "disk0->cpu0", "demand 0/1"),
        (2620, 4620, "disk0->cpu0", "demand 1/2"), (4620, 5120, "cpu0->gpu0", "demand 1/2"),
        (4620, 6620, "disk0->cpu0", "demand 1/3"),
    ]  # fmt: skip
    assert [(gone.device, gone.layer, gone.expert) for gone in records.evictions] == [
        ("cpu0", 0, 0), ("cpu0", 0, 1), ("gpu0", 0, 0)
    ]  # fmt: skip
    assert [task for task in tasks(records) if task[3].startswith("E")] == [
        (600, 700, "gpu0", "E0x1"), (2100, 2500, "cpu0", "E1x1"), (5120, 5220, "gpu0", "E2x1"), (6620, 7020, "cpu0", "E3x1")
    ]  # fmt: skip


def test_what_is_not_in_memory_is_read_through_it() -> None:
    on = {
        ("Routed", 0, 0, 0): [Fetch(0, [1, 0], "gpu0"), Run(0, [0], "gpu0"), Run(0, [1], "gpu0")],
        ("Routed", 0, 1, 0): [Fetch(1, [2, 3], "cpu0"), Run(1, [2, 3], "cpu0")],
    }
    records = play(tiered(on), ONE, TIERS)
    assert transfers(records)[:3] == [
        (100, 600, "cpu0->gpu0", "demand 0/0"), (100, 2100, "disk0->cpu0", "demand 0/1"), (2100, 2600, "cpu0->gpu0", "demand 0/1")
    ]  # fmt: skip
    assert {(gone.device, gone.expert) for gone in records.evictions} == {("gpu0", 0), ("cpu0", 0)}, "memory never had 1"


def test_memory_holds_its_pool_and_the_disk_all_experts() -> None:
    need = required_bytes(tiny_model(), TIERS, 1, Placement(pools=POOLS, backing=["disk0"]))
    assert (need["cpu0"], need["disk0"]) == ({"pool:cache": 2000}, {"experts": 8000})


@pytest.mark.parametrize(
    ("on", "copies", "backing", "expected"),
    [
        ({}, ON_CPU, ("gpu0",), "backing: expected a host or a disk of toy, got 'gpu0'"),
        ({}, ON_CPU, ("disk1",), "backing: expected a host or a disk of toy, got 'disk1'"),
        ({}, ON_CPU, (), "on a device that backs no weights"),
        ({("Routed", 0, 0, 0): [Drop(0, [1], "disk0")]}, ON_CPU, ("disk0",), "copies on a backing device stay"),
        ({("Routed", 0, 0, 0): [Run(0, [1], "cpu0")]}, ON_CPU, ("disk0",), "Run(L0/E1, cpu0)"),
    ],
)
def test_what_tiers_refuse(on: Any, copies: Any, backing: Any, expected: str) -> None:
    with pytest.raises(PolicyError) as caught:
        play(tiered(on, copies, backing), ONE, TIERS)
    assert expected in str(caught.value)
