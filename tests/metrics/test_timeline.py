"""Trace events of hand-made records, and the validator's complaints about broken ones."""

from __future__ import annotations

import copy
import json

import pytest

from moesim.core.colours import CHROME, FILL, HATCH, LABEL
from moesim.errors import ConfigError
from moesim.metrics.breakdown import CAUSES
from moesim.metrics.machine import Machine
from moesim.metrics.timeline import check_timeline, timeline_events, timeline_json, write_timeline
from moesim.records import (
    ActivationRecord,
    DecisionRecord,
    LayerRecord,
    MemoryRecord,
    Records,
    StepRecord,
    TaskRecord,
    TransferRecord,
)  # fmt: skip

H2D = "cpu0->gpu0"
MACHINE = Machine({"gpu0": "gpu", "cpu0": "cpu"}, (H2D, "gpu0->cpu0"))


def two_steps():
    """The same layer twice; E2 is fetched in the first step and still there in the second.

    gpu0  |dense 10000|......|E2 5001|dense 10000|E2 5001|
    link  ............|E2 two chunks |E9 prefetch, late  ...
    """
    run = Records(makespan_ns=50_003)
    run.tasks += [
        TaskRecord(0, 10_000, "gpu0", "main", "dense", 0, 0, 0, -1, 1, 10_000, 0, 0),
        TaskRecord(30_001, 35_002, "gpu0", "main", "expert", 0, 0, 0, 2, 1, 5001, 10_000, 30_001),
        TaskRecord(35_002, 45_002, "gpu0", "main", "dense", 1, 0, 0, -1, 1, 10_000, 35_002, 35_002),
        TaskRecord(36_000, 37_000, "gpu0", "side", "predict", 1, 0, 0, -1, 1, 1000, 36_000, 36_000),
        TaskRecord(45_002, 50_003, "gpu0", "main", "expert", 1, 0, 0, 2, 1, 5001, 45_002, 45_002),
    ]
    run.transfers += [
        TransferRecord(10_000, 20_000, H2D, "demand", 0, 2, 64, 0, 10_000, 7, False, False),
        TransferRecord(20_000, 30_001, H2D, "demand", 0, 2, 64, 0, 10_000, 7, True, False),
        TransferRecord(30_001, 50_000, H2D, "prefetch", 1, 9, 128, 1, 12_000, 8, True, False),
    ]
    run.activations.append(ActivationRecord(1000, 1500, H2D, 0, 0, 1, 8, "hidden", 1000))
    run.decisions += [DecisionRecord(10_000, 10_500, 0, 0), DecisionRecord(10_200, 10_700, 0, 0)]
    run.layers += [LayerRecord(0, 35_002, 0, 0), LayerRecord(35_002, 50_003, 1, 0)]
    run.steps += [StepRecord(0, 35_002, 0, "prefill", 0, 1, 1, 1.0), StepRecord(35_002, 50_003, 1, "decode", 0, 1, 1, 1.0)]
    run.memory += [MemoryRecord(0, "gpu0", 100), MemoryRecord(10_000, "gpu0", 180), MemoryRecord(10_000, "gpu0", 228)]
    return run


def of(events, **fields):
    """Events with these fields."""
    return [e for e in events if all(e.get(key) == value for key, value in fields.items())]


def lane_names(events):
    return {e["tid"]: e["args"]["name"] for e in of(events, ph="M", name="thread_name")}


def test_lanes_slices_and_arguments():
    events = timeline_events(two_steps(), MACHINE)
    assert check_timeline(events) == []
    names = lane_names(events)
    assert list(names.values()) == [
        "gpu0", "gpu0 side", "cpu0", H2D, f"{H2D} activations", "gpu0->cpu0",
        "steps", "layers", "decisions", "decisions 2",
    ]  # fmt: skip
    lanes: dict[str, list] = {}
    for e in of(events, ph="X"):
        lanes.setdefault(names[e["tid"]], []).append((e["ts"], e["dur"], e["name"]))
    assert lanes["gpu0"] == [(0, 10, "dense L0"), (30.001, 5.001, "L0/E2"), (35.002, 10, "dense L0"), (45.002, 5.001, "L0/E2")]
    assert lanes[H2D] == [(10, 10, "demand L0/E2"), (20, 10.001, "demand L0/E2"), (30.001, 19.999, "prefetch L1/E9")]
    assert lanes["steps"] == [(0, 35.002, "prefill 0"), (35.002, 15.001, "decode 1")]
    assert lanes["decisions"] == [(10, 0.5, "decision L0")]
    assert lanes["decisions 2"] == [(10.2, 0.5, "decision L0")]
    run = of(events, name="L0/E2")[0]
    assert run["args"] | {"step": 0, "layer": 0, "expert": 2, "rows": 1, "cause": "gpu_experts"} == run["args"]
    prefetch = of(events, name="prefetch L1/E9")[0]
    assert (prefetch["args"]["step"], prefetch["args"]["cause"], prefetch["args"]["bytes"]) == (0, "prefetch", 128)
    assert prefetch["cname"] == CHROME["exposed_prefetch"]
    assert all(list(table) == list(CAUSES) for table in (FILL, HATCH, LABEL, CHROME))


def test_one_arrow_a_fetch_from_its_last_slice_to_the_first_run():
    events = timeline_events(two_steps(), MACHINE)
    names = lane_names(events)
    (start,), (end,) = of(events, ph="s"), of(events, ph="f")
    assert start["id"] == end["id"] == 7
    assert (names[start["tid"]], start["ts"]) == (H2D, 30.0)  # the last ns of the second chunk
    assert (names[end["tid"]], end["ts"], end["bp"]) == ("gpu0", 30.001, "e")


def test_decisions_that_overlap_are_in_lanes_of_their_own_and_a_lane_that_is_free_is_used_again():
    run = two_steps()
    spans = [(0, 10), (1, 100), (2, 20), (30, 50), (35, 60), (50, 55)]
    run.decisions[:] = [DecisionRecord(begin * 1000, end * 1000, 0, 0) for begin, end in spans]
    run.makespan_ns = 100_000
    events = timeline_events(run, MACHINE)
    names = lane_names(events)
    found = [names[e["tid"]] for e in of(events, ph="X") if e["name"].startswith("decision")]
    assert found == ["decisions", "decisions 2", "decisions 3", "decisions", "decisions 3", "decisions"]


def test_a_copy_that_is_replaced_before_its_use_has_no_arrow():
    run = two_steps()
    run.transfers.insert(0, TransferRecord(0, 9_000, H2D, "prefetch", 0, 2, 64, 1, 0, 3, True, False))
    arrows = of(timeline_events(run, MACHINE), ph="s")
    assert [e["id"] for e in arrows] == [7]


def test_counters():
    events = timeline_events(two_steps(), MACHINE)
    memory = [(e["ts"], e["args"]["bytes"]) for e in of(events, ph="C", name="memory gpu0")]
    assert memory == [(0, 100), (10, 228)]
    queue = [(e["ts"], e["args"]["fetches"]) for e in of(events, ph="C", name=f"queue {H2D}")]
    assert queue == [(12, 1), (30.001, 0)]  # the prefetch; a demand fetch that starts at once never queues


def test_a_fetch_queues_for_its_second_hop_from_the_end_of_the_first():
    run = two_steps()
    run.transfers.insert(0, TransferRecord(4_000, 6_000, "disk0->cpu0", "demand", 0, 3, 64, 0, 1_000, 5, False, False))
    run.transfers.insert(1, TransferRecord(9_000, 10_000, H2D, "demand", 0, 3, 64, 0, 1_000, 5, True, False))
    machine = Machine({"gpu0": "gpu", "cpu0": "cpu", "disk0": "disk"}, ("disk0->cpu0", H2D))
    events = timeline_events(run, machine)
    found = {link: [(e["ts"], e["args"]["fetches"]) for e in of(events, ph="C", name=f"queue {link}")] for link in machine.links}
    assert found == {"disk0->cpu0": [(1, 1), (4, 0)], H2D: [(6, 1), (9, 0), (12, 1), (30.001, 0)]}


def test_window_of_steps():
    events = timeline_events(two_steps(), MACHINE, steps=(1, 1))
    assert check_timeline(events) == []
    assert {e["args"]["step"] for e in of(events, ph="X") if e["args"].get("kind")} == {1}
    assert [e["name"] for e in of(events, ph="X") if e["name"].startswith(("demand", "prefetch"))] == ["prefetch L1/E9"]
    assert of(events, ph="s") == []  # its fetch was before
    assert [e["args"]["bytes"] for e in of(events, ph="C", name="memory gpu0")] == [228]  # the level at its begin
    both = timeline_events(two_steps(), MACHINE, steps=(0, 1))
    assert {e["args"]["step"] for e in of(both, ph="X") if e["args"].get("kind")} == {0, 1}
    with pytest.raises(ConfigError, match="expected steps of the run"):
        timeline_events(two_steps(), MACHINE, steps=(5, 9))


def test_bytes_are_deterministic_and_exact(tmp_path):
    one = timeline_json(timeline_events(two_steps(), MACHINE))
    assert one == timeline_json(timeline_events(two_steps(), MACHINE))
    path = write_timeline(tmp_path / "sub" / "timeline.json", two_steps(), MACHINE)
    assert path.read_bytes() == one
    assert [p.name for p in path.parent.iterdir()] == ["timeline.json"]  # nothing temporary is left
    read = json.loads(one)
    assert read["displayTimeUnit"] == "ns"
    assert check_timeline(read) == []


@pytest.mark.parametrize("ns", [1, 999, 1001, 123_456_789_012_345, 999_999_999_999_999])
def test_times_are_exact_to_the_nanosecond(ns):
    run = Records(makespan_ns=ns + 1)
    run.tasks.append(TaskRecord(ns, ns + 1, "gpu0", "main", "head", 0, -1, 0, -1, 1, 1, ns, ns))
    text = timeline_json(timeline_events(run, MACHINE)).decode()
    assert f'"ts":{ns // 1000}.{ns % 1000:03d}'.rstrip("0").rstrip(".") in text
    assert check_timeline(json.loads(text)) == []


DENSE, ARROW, COUNTER = {"name": "dense L0"}, {"ph": "s"}, {"ph": "C"}
TOLD = {"ph": "B", "name": "open", "pid": 1, "tid": 1, "ts": 60}


@pytest.mark.parametrize(
    ("which", "changes", "words"),
    [
        (DENSE, {"dur": 30.002}, "before dense L0 ends"),
        (DENSE, {"dur": 0.0005}, "whole ns"),
        (DENSE, {"dur": -1}, "at least 0"),
        ({"ph": "M", "name": "thread_name"}, None, "expected a thread_name"),
        ({"ph": "f"}, None, "expected one start and one end, got 1 and 0"),
        (ARROW, {"ts": 5}, "no slice of lane"),
        (ARROW, {"id": ...}, "expected an id on an arrow, got none"),
        ({"ph": "f"}, {"ts": 5}, "before its start"),
        (COUNTER, {"args": {"bytes": "many"}}, "expected numbers in the args"),
        (
            COUNTER,
            {"args": {"bytes": 1, "more": "many"}},
            "expected numbers in the args of a counter, got",
        ),
        (COUNTER, {"args": {}}, "expected numbers in the args"),
        (COUNTER, {"args": [1]}, "expected numbers in the args"),
        (DENSE, {"tid": True}, "expected tid of the right type, got {'tid': True}"),
        (DENSE, {"dur": None}, "expected dur in us, whole ns and at least 0, got None"),
        (DENSE, {"ts": -0.001}, "expected ts in us, whole ns and at least 0, got -0.001"),
        (COUNTER, {"ph": "Q"}, "expected ph among"),
        (COUNTER, {"ts": ...}, "expected ts of the right type"),
        (None, {**DENSE, "ts": 2, "dur": 1, "name": "inner"}, "inner begins at 2000 ns, before dense L0 ends"),
        (None, TOLD, "open begins at 60000 ns and never ends"),
    ],
)
def test_the_validator_complains(which: dict | None, changes: dict | None, words: str):
    """An event is changed, or gone, or another one comes, which otherwise is like the first of the dense part."""
    events = copy.deepcopy(timeline_events(two_steps(), MACHINE))
    event = of(events, **(which or DENSE))[0]
    if which is None:
        events.append(event | changes if "dur" in changes else changes)
    elif changes is None:
        events.remove(event)
    else:
        event.update(changes)
        for name in [name for name, value in changes.items() if value is ...]:
            del event[name]
    found = check_timeline(events)
    assert any(words in line for line in found), found


def test_the_validator_wants_events():
    assert check_timeline("events") == ["expected a list of events, got str"]
    assert check_timeline([1]) == ["event 0: expected an object, got int"]
    assert [len(check_timeline([1] * n)) for n in (99, 100, 101)] == [99, 100, 100]
    slices = [{"ph": "X", "name": "x", "pid": 1, "tid": n, "ts": 0, "dur": 0} for n in range(101)]
    assert check_timeline(slices) == [f"lane (1, {n}): expected a thread_name, got none" for n in range(100)]


def cut_off(run):
    """Another prefetch, which the end of the run cuts off."""
    run.transfers.append(TransferRecord(50_000, 50_003, H2D, "prefetch", 1, 3, 0, 1, 13_000, 9, False, False, left=128))
    return run


def test_what_the_end_of_the_run_cuts_off_is_marked():
    events = timeline_events(cut_off(two_steps()), MACHINE)
    assert check_timeline(events) == []
    (last,) = [e for e in events if "left_bytes" in e.get("args", {})]
    assert (last["name"], last["ts"], last["dur"]) == ("prefetch L1/E3 (unfinished)", 50.0, 0.003)
    assert (last["args"]["bytes"], last["args"]["left_bytes"]) == (0, 128)
    assert of(events, ph="s", id=9) == [], "no run follows from it"


def test_the_validator_names_what_comes_after_the_end_of_the_run():
    run = cut_off(two_steps())
    run.transfers.append(TransferRecord(50_010, 50_020, H2D, "prefetch", 1, 4, 128, 1, 13_000, 10, True, False))
    (found,) = check_timeline(timeline_events(run, MACHINE))
    assert found.endswith("prefetch L1/E4 comes after prefetch L1/E3 (unfinished)")
    run = cut_off(two_steps())
    run.transfers.append(TransferRecord(0, 9, "gpu0->cpu0", "update", 1, 4, 1, 1, 0, 10, False, False, left=128))
    found = check_timeline(timeline_events(run, MACHINE))
    assert found == ["expected all that is unfinished to end with the run, got ends at [9, 50003] ns"]
