"""The runtime's own time: found in hand-made records exactly, and measured by a real replay."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from moesim.hardware import load_hardware
from moesim.live import LiveMachine
from moesim.live.profiler.plan import variants_of
from moesim.live.profiler.probes import layout_of
from moesim.live.profiler.runtime import _between_copies, _idle, runtime_gaps, skeleton
from moesim.records import LayerRecord, Records, StepRecord, TaskRecord, TransferRecord
from tests.live.live_kit import two_parts, with_disk


def task(start: int, end: int, kind: str, step: int, expert: int = -1) -> TaskRecord:
    return TaskRecord(start, end, "fast", "main", kind, step, 0, 0, expert, 1, end - start, start, start)


def copied(start: int, end: int, layer: int, submitted: int) -> TransferRecord:
    return TransferRecord(start, end, "host->fast", "demand", layer, 0, 100, 0, submitted, 0, True, False)


def test_idle_time_of_a_layer_by_hand() -> None:
    """A layer from 10,000 to 20,000 ns: dense 1 us in, experts 2 us later, 0.5 us apart, 0.7 us to the end."""
    records = Records()
    for step in range(5):
        records.layers.append(LayerRecord(10_000, 20_000, step, 0))
        experts = [task(14_000, 16_000, "expert", step, 3), task(16_500, 19_300, "expert", step, 5)]
        records.tasks += [task(11_000, 12_000, "dense", step), *experts]
    assert _idle(records) == ([1 + 2 + 0.7], [0.5])  # four steps warm up


def test_time_between_copies_by_hand() -> None:
    records = Records()
    records.steps = [StepRecord(0, 100 * (i + 1), i, "decode", 0, 1, 1, 0.0) for i in range(5)]
    records.transfers = [copied(50, 90, 0, 40), copied(500, 900, 0, 450), copied(1_000, 1_400, 0, 450)]
    records.transfers += [copied(1_600, 1_900, 0, 1_500), copied(2_000, 2_300, 1, 450)]
    # Of a warm-up step; queued behind the one before; asked for only after it had ended; of the next layer.
    assert _between_copies(records) == [0.1]


@pytest.mark.long
@pytest.mark.parametrize("profile", [two_parts(), with_disk()], ids=["memory", "disk"])
def test_a_replay_tells(profile: dict[str, object], tmp_path: Path) -> None:
    hardware = load_hardware(profile)
    disk = tmp_path if "disk" in hardware.devices else None
    with LiveMachine(hardware, memory_bytes=150_000_000, disk=disk) as machine:
        found = runtime_gaps(machine, hardware, "resident", steps=2)
        assert set(found) == {"resident", "between"}
        assert len(found["resident"]) == 16
        assert len(found["between"]) == 16 * 3
        assert all(gap > 0 for gap in found["resident"])
        assert all(gap >= 0 for gap in found["between"])
        fetched = runtime_gaps(machine, hardware, "fetched", steps=2)["fetched"]
        assert 0 < len(fetched) <= 16 * 3


def test_a_skeleton_has_the_devices_and_links_of_its_tier(tmp_path: Path) -> None:
    memory, disk = layout_of([0, 1], disk=tmp_path).tiers
    found = skeleton(memory)
    assert {name: device.cores for name, device in found.devices.items()} == {"core0": (0,), "core1": (1,)}
    assert found.link("core1->core0").cores == (1,)
    assert skeleton(disk).devices["disk0"].role == "storage"
    assert variants_of(memory) == ("resident", "host", "fetched")
    assert variants_of(disk) == ("resident", "fetched")  # nothing runs on a disk
