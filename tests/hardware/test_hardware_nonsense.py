"""Profiles edited by hand into nonsense: each is refused in one line that says where, what was expected, and what to do."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import HardwareError
from moesim.hardware import HardwareProfile, build_profile
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from tests.hardware.nonsense_kit import good, number

FILE = "hardware_profiles/mine.yaml"


def steps_of(key: str) -> list[Any]:
    return [int(step) if step.isdecimal() else step for step in key.split("/")]


def changed(edits: dict[str, Any]) -> dict[str, Any]:
    """Set keys, written with slashes, of a good profile; ``...`` removes one."""
    raw = good()
    for key, value in edits.items():
        *path, last = steps_of(key)
        here: Any = raw
        for step in path:
            here = here[step]
        if value is ...:
            del here[last]
        elif isinstance(here, list) and last == len(here):
            here.append(value)
        else:
            here[last] = value
    return raw


def test_the_unedited_profile_is_good() -> None:
    profile = build_profile(good(), FILE)
    assert profile.devices["disk0"].role == "storage"
    assert profile.link("core1->core0").cores == (1,)


GPU, EXPERT, POINTS = "devices/gpu0", "devices/gpu0/experts/0", "devices/gpu0/experts/1/points/value"
SAME_SHAPE = {"hidden": 64, "intermediate": 128, "bits": 16}


def second(first: int, last: int, base_us: float, per_token_us: float, **more: Any) -> dict[str, Any]:
    """Add a second curve of the shape of the first: 10 us and 0.5 a row, from 1 to 64 rows."""
    line = {"form": "linear", "range": [first, last], "base_us": number(base_us), "per_token_us": number(per_token_us)}
    return {"devices/gpu0/experts/2": {"shape": {**SAME_SHAPE, **more}, **line}}


def measured(**changes: Any) -> dict[str, Any]:
    return {
        f"{GPU}/launch_us": {"value": 1, "source": "measured", "date": "2025-11-20", "method": "m", "repeats": 9, "spread": "0"}
        | changes
    }


BUMP = {"shape": SAME_SHAPE, "form": "points", "range": [1, 64], "points": number([[1, 10.5], [32, 60], [64, 42]])}
LEVEL = {
    "model": "tiny", "part": "context", "form": "linear", "range": [512, 999], "base_us": number(1),
    "per_token_us": number(0),
}  # fmt: skip

NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    # ---- numbers
    ("a yes as a rate", {f"{GPU}/flops/value": True},
     "devices.gpu0.flops.value: expected a number of operations per second such as 71e12 (the unit is in the key), got True"),
    ("half a byte", {f"{GPU}/memory_bytes/value": 1.5},
     "devices.gpu0.memory_bytes.value: expected bytes as an integer or a string such as '8 GiB', got 1.5"),
    ("no word where a number is from", {f"{GPU}/flops/source": ...},
     "devices.gpu0.flops.source: expected this key, got nothing; add it"),
    ("an unknown source", {f"{GPU}/flops/source": "guess"},
     "devices.gpu0.flops.source: expected 'measured', 'published', 'derived', 'identified', 'spec-sheet' or 'assumed', got "
     "'guess'"),
    ("launches without a source", {f"{GPU}/launches/attention": {}},
     "devices.gpu0.launches.attention.source: expected this key, got nothing; add it (and 1 more)"),
    ("a negative time", {f"{GPU}/launch_us/value": -5},
     "devices.gpu0.launch_us.value: expected a number of at least 0.0, got -5; correct it"),
    ("a negative rate", {f"{GPU}/flops/value": -1e12},
     "devices.gpu0.flops.value: expected a number above 0.0, got -1000000000000.0; correct it"),
    ("a negative slope", {f"{EXPERT}/per_token_us/value": -0.5},
     "devices.gpu0.experts.0.per_token_us.value: expected a number of at least 0.0, got -0.5; correct it"),
    ("a negative knee", {"devices/gpu0/predict/gate/knee_tokens/value": -1},
     "devices.gpu0.predict.gate.knee_tokens.value: expected a number of at least 0, got -1; correct it"),
    ("a negative size", {f"{GPU}/memory_bytes/value": -1},
     "devices.gpu0.memory_bytes.value: expected a size of at least 0 bytes, got -1"),
    ("no memory", {f"{GPU}/memory_bytes/value": 0},
     "devices.gpu0.memory_bytes.value: expected a size above 0 bytes, got 0; write for example '24 GiB'"),
    ("a power of nothing", {"platform_w/value": math.nan},
     "platform_w.value: expected a number of watts (the unit is in the key), got nan"),
    ("an infinite rate", {"links/core1->gpu0/pinned/bytes_per_s/value": math.inf},
     "links.core1->gpu0.pinned.bytes_per_s.value: expected a number of bytes per second such as 25e9 (the unit is in the key), "
     "got inf"),
    ("a rate that rounds to none", {f"{GPU}/memory_bytes_per_s/value": 0.3},
     "devices.gpu0.memory_bytes_per_s.value: expected bytes per second such as 25e9, got 0.3; if these are GB/s, write "
     "0.3e9"),
    ("operations in tera", {f"{GPU}/flops/value": 71.2},
     "devices.gpu0.flops.value: expected operations per second such as 71e12, got 71.2; if these are TFLOP/s, write 71.2e12"),
    ("a rate beyond any memory's", {f"{GPU}/memory_bytes_per_s/value": 1e308},
     "devices.gpu0.memory_bytes_per_s.value: expected at most 1e+18, got 1e+308; correct it"),
    ("a launch of eleven days", {f"{GPU}/launch_us/value": 1e12},
     "devices.gpu0.launch_us.value: expected at most 1e+09, got 1000000000000.0; correct it"),
    ("a point of eleven days", {POINTS: [[1, 10], [8, 1e12]]},
     "devices.gpu0.experts.1.points.value: expected times of at most 1e+09 us, got 1e+12 at 8 rows; check the unit"),
    ("a point of too many rows", {POINTS: [[1, 10], [1e300, 12]]},
     "devices.gpu0.experts.1.points.value: expected at most 1e+09 rows, got 1e+300; measure less"),
    ("a memory beyond any", {f"{GPU}/memory_bytes/value": "1e99999999 GiB"},
     "devices.gpu0.memory_bytes.value: expected a size of at most 9007199254740992 bytes (8 PiB), got '1e99999999 GiB'"),
    ("a rate of a link in GB/s", {"links/core1->gpu0/pinned/bytes_per_s/value": 23.8},
     "links.core1->gpu0.pinned.bytes_per_s.value: expected bytes per second such as 25e9, got 23.8; if these are GB/s, write "
     "23.8e9"),
    ("a fraction of a launch", {f"{GPU}/launches/attention/value": 1.5},
     "devices.gpu0.launches.attention.value: expected a whole number, got 1.5"),
    ("weights of 400 bits", {f"{EXPERT}/shape/bits": 400},
     "devices.gpu0.experts.0.shape.bits: expected at most 64, got 400; correct it"),
    ("more workspace than memory", {f"{GPU}/workspace_bytes/value": "5 GiB"},
     "devices.gpu0.workspace_bytes: expected less than memory_bytes, 4294967296, got 5368709120; correct one"),
    ("idle above busy", {f"{GPU}/idle_w/value": 400},
     "devices.gpu0.idle_w: expected at most busy_w, 300, got 400; exchange them"),
    ("a date in words", measured(date="today"),
     "devices.gpu0.launch_us.date: expected a date such as 2025-11-20, got 'today'"),
    ("no repeats", measured(repeats=0),
     "devices.gpu0.launch_us.repeats: expected a number of at least 1, got 0; correct it"),
    # ---- units
    ("a unit inside a number", {f"{GPU}/launch_us/value": "5 us"},
     "devices.gpu0.launch_us.value: expected a number of microseconds (the unit is in the key), got '5 us'; write the number "
     "alone"),
    ("no unit in a key", {"links/core1->gpu0/pinned": {"latency": 28, "bytes_per_s": number(1e10)}},
     "links.core1->gpu0.pinned.latency: unknown key 'latency'; the unit belongs into the key: did you mean 'latency_us'? "
     "known: latency_us, bytes_per_s, points"),
    ("a time without unit", {"links/core1->gpu0/pinned/time": 3},
     "links.core1->gpu0.pinned.time: unknown key 'time'; times are in microseconds (_us); known: latency_us, bytes_per_s, "
     "points"),
    ("milliseconds", {"links/core1->gpu0/pinned/latency_ms": number(3)},
     "links.core1->gpu0.pinned.latency_ms: unknown key 'latency_ms'; times are in microseconds (_us); did you mean "
     "'latency_us'? "
     "known: latency_us, bytes_per_s, points"),
    ("a bandwidth", {"links/core1->gpu0/pinned/bandwidth_gbps": number(25)},
     "links.core1->gpu0.pinned.bandwidth_gbps: unknown key 'bandwidth_gbps'; rates are in bytes per second (bytes_per_s); "
     "known: latency_us, bytes_per_s, points"),
    ("a rate next to the curve that has it", {"links/core1->gpu0/bytes_per_s": number(1e10)},
     "links.core1->gpu0.bytes_per_s: unknown key 'bytes_per_s'; it belongs into 'pinned' or 'pageable' or 'chunked' or 'any' or "
     "'activation'; known: medium, cores, pinned, pageable, chunked, any, activation"),
    ("a size with an unknown unit", {f"{GPU}/memory_bytes/value": "24 gigs"},
     "devices.gpu0.memory_bytes.value: expected a size with a unit (b, kb, mb, gb, tb, kib, mib, gib, tib), got '24 gigs'; "
     "write for "
     "example '8 GiB'"),
    ("no source", {f"{GPU}/launch_us": 5},
     "devices.gpu0.launch_us: expected {value: ..., source: ..., ref: ...} (every number carries its source), got 5"),
    # ---- curves
    ("an unknown form", {f"{EXPERT}/form": "cubic"},
     "devices.gpu0.experts.0.form: expected 'linear', 'flat_linear' or 'points', got 'cubic'"),
    ("half a form", {f"{EXPERT}/base_us": ...},
     "devices.gpu0.experts.0: expected the keys base_us, per_token_us with form: linear, got nothing; add base_us"),
    ("a shape without bits", {f"{EXPERT}/shape/bits": ...},
     "devices.gpu0.experts.0.shape.bits: expected this key, got nothing; add it"),
    ("a point of no rows", {POINTS: [[0, 2], [1, 3]]},
     "devices.gpu0.experts.1.points.value: expected whole, ascending numbers of rows from 1, got [0.0, 1.0]; sort them, and "
     "give each once"),
    ("experts that get faster", {POINTS: [[1, 10], [4, 16], [8, 7]]},
     "devices.gpu0.experts.1.points.value: expected no fall below half of an earlier time, got 7 us at 8 rows after 16; "
     "measure it again"),
    ("points out of order", {POINTS: [[1, 10], [8, 16], [4, 12]]},
     "devices.gpu0.experts.1.points.value: expected whole, ascending numbers of rows from 1, got [1.0, 8.0, 4.0]; sort them, "
     "and give "
     "each once"),
    ("a point twice", {POINTS: [[1, 10], [1, 11], [8, 12]]},
     "devices.gpu0.experts.1.points.value: expected whole, ascending numbers of rows from 1, got [1.0, 1.0, 8.0]; sort them, "
     "and give "
     "each once"),
    ("a negative point", {POINTS: [[1, 10], [8, -1]]},
     "devices.gpu0.experts.1.points.value: expected times of at least 0 us, got a negative one, -1 at 8 rows; measure it again"),
    ("half a pair", {POINTS: [[1, 10], [8]]},
     "devices.gpu0.experts.1.points.value: expected at least two pairs [rows, us], got [[1.0, 10.0], [8.0]]"),
    ("a point that is not a number", {f"{POINTS}/1/1": math.nan},
     "devices.gpu0.experts.1.points.value.1.1: expected a finite number, got nan"),
    ("a range beyond the points", {"devices/gpu0/experts/1/range": [1, 16]},
     "devices.gpu0.experts.1: expected a range within the points [1.0, 8.0], got [1, 16]; narrow it or measure more"),
    ("points beyond the range", {"devices/gpu0/experts/1/range": [1, 4]},
     "devices.gpu0.experts.1: expected points for the range [1, 4] only, got one at 8, which nothing uses; widen the range or "
     "remove it"),
    ("last before first", {f"{EXPERT}/range": [64, 1]},
     "devices.gpu0.experts.0: expected range: [first, last] with 1 <= first <= last, got [64, 1]; exchange or correct them"),
    ("a range of one number", {f"{EXPERT}/range": 64},
     "devices.gpu0.experts.0.range: expected a pair such as [1, 64], got 64"),
    ("keys of two forms", {f"{EXPERT}/knee_tokens": number(4)},
     "devices.gpu0.experts.0: expected the keys base_us, per_token_us with form: linear, got knee_tokens as well; remove it"),
    ("two curves of a shape that disagree", second(64, 256, 50, 1),
     "devices.gpu0.experts.2: expected what devices.gpu0.experts.0 says where both hold, 64..64, got 114 us instead of 42 at "
     "64 rows; let "
     "their ranges not overlap"),
    ("two curves that disagree between the ends", {"devices/gpu0/experts/2": BUMP},
     "devices.gpu0.experts.2: expected what devices.gpu0.experts.0 says where both hold, 1..64, got 60 us instead of 26 at 32 "
     "rows; let "
     "their ranges not overlap"),
    ("two curves of a part that disagree", {"devices/gpu0/parts/2": LEVEL},
     "devices.gpu0.parts.2: expected what devices.gpu0.parts.1 says where both hold, 512..512, got 1 us instead of 511 at 512 "
     "rows; let "
     "their ranges not overlap"),
    ("an unknown part", {"devices/gpu0/parts/0/part": "atention"},
     "devices.gpu0.parts.0.part: expected 'attention', 'context', 'dense', 'shared', 'head', 'embedding' or 'leading', got "
     "'atention'"),
    ("launches of an unknown part", {f"{GPU}/launches/atention": number(3)},
     "devices.gpu0.launches: unknown part 'atention'; did you mean 'attention'? known: attention, dense, embedding, expert, "
     "head, leading, "
     "predict, shared"),
    ("a context without attention", {"devices/gpu0/parts/0": ...},
     "devices.gpu0.parts.0: expected a curve 'attention' of tiny next to its 'context', got none; add it"),
    # ---- links
    ("a link without a curve", {"links/gpu0->core1": {}},
     "links.gpu0->core1: expected at least one of pinned, pageable, chunked, any, got none; add it"),
    ("a link to itself", {"links/core1->core1": good()["links"]["core1->gpu0"]},
     "links.core1->core1: expected two devices, got the same twice"),
    ("copies that get faster", {"links/disk0->core1/any/points/value": [[4096, 90], [1048576, 600], [16777216, 599]]},
     "links.disk0->core1.any.points.value: expected times that do not fall as bytes grow, got 599 us at 1.67772e+07 bytes "
     "after 600; measure "
     "it again"),
    ("two forms of a copy", {"links/disk0->core1/any/latency_us": number(9)},
     "links.disk0->core1.any: expected either points, or latency_us and bytes_per_s, got both; remove one"),
    ("half a form of a copy", {"links/core1->gpu0/pinned/bytes_per_s": ...},
     "links.core1->gpu0.pinned: expected latency_us and bytes_per_s, or points, got no bytes_per_s; add it"),
    ("a disk that copies to a disk",
     {"devices/disk1": {"kind": "disk", "memory_bytes": number("1 TB")}, "links/disk0->disk1": good()["links"]["disk0->core1"]},
     "links.disk0->disk1: expected a disk at one end at most, got two; copy by way of a device with memory"),
    ("a link to nowhere", {"links/core1->gpu9": good()["links"]["core1->gpu0"]},
     "links.core1->gpu9: unknown device 'gpu9'; did you mean 'gpu0'? known: core0, core1, disk0, gpu0"),
    ("no way back", {"links/gpu0->core1": ...},
     "links: expected a path gpu0 -> core1, got none; add a link (and 1 more)"),
    ("a name of two lines", {"backing": ["core\n1"]},
     "backing: unknown device 'core 1'; did you mean 'core1'? known: core0, core1, disk0, gpu0"),
    ("an arrow that is none", {"links/core1=>gpu0": good()["links"]["core1->gpu0"]},
     "links.core1=>gpu0: expected a name such as 'cpu0->gpu0', got 'core1=>gpu0'; rename it"),
    # ---- devices and roles
    ("an unknown kind", {f"{GPU}/kind": "tpu"},
     "devices.gpu0.kind: expected 'gpu', 'cpu' or 'disk', got 'tpu'"),
    ("no device that computes", {"compute": ...},
     "compute: expected this key, got nothing; add it"),
    ("an unknown device that computes", {"compute": "gpu1"},
     "compute: unknown device 'gpu1'; did you mean 'gpu0'? known: core0, core1, disk0, gpu0"),
    ("no backing", {"backing": []},
     "backing: expected at least 1, got []; add one"),
    ("a disk with a rate", {"devices/disk0/memory_bytes_per_s": number(3e9)},
     "devices.disk0.memory_bytes_per_s: a disk stores and does not compute: expected no memory_bytes_per_s, got one; remove it"),
    ("a disk with experts", {"devices/disk0/experts": good()["devices"]["gpu0"]["experts"]},
     "devices.disk0.experts: a disk stores and does not compute: expected no experts, got one; remove it"),
    ("a disk with cores", {"devices/disk0/cores": [3]},
     "devices.disk0.cores: a disk stores and does not compute: expected no cores, got one; remove it"),
    ("the dense part on a disk", {"compute": "disk0"},
     "compute: expected a device that computes, got 'disk0', which is a disk; name a GPU or CPU"),
    ("an accelerator that holds all experts", {"backing": ["core0"]},
     "backing: expected a host or a disk, got 'core0', which is an accelerator"),
    ("a backing device twice", {"backing": ["core1", "core1"]},
     "backing: expected each once, got 'core1' twice; remove one"),
    ("a disk as a host", {"devices/disk0/role": "host"},
     "devices.disk0.role: expected storage for a disk, got 'host'; correct kind or role"),
    ("a GPU as a disk", {f"{GPU}/role": "storage"},
     "devices.gpu0.role: expected accelerator or host for a GPU, got 'storage'; correct kind or role"),
    ("an unknown role", {f"{GPU}/role": "helper"},
     "devices.gpu0.role: expected 'accelerator', 'host' or 'storage', got 'helper'"),
    ("a core of two devices", {"devices/core0/cores": [0, 2]},
     "devices.core1.cores: expected cores of its own, got 2, which is core0's as well; give it to one of them"),
    ("a core twice", {"devices/core1/cores": [1, 1]},
     "devices.core1.cores: expected each once, got 1 twice; remove one"),
    ("a negative core", {"devices/core1/cores": [-1]},
     "devices.core1.cores.0: expected a number of at least 0, got -1; correct it"),
    ("no cores", {"devices/core1/cores": []},
     "devices.core1.cores: expected at least 1, got []; add one"),
    ("cores of a GPU", {f"{GPU}/cores": [3]},
     "devices.gpu0.cores: expected none for a GPU, got [3]; a GPU has no processor cores: remove it"),
    ("a processor without a rate", {"devices/core1/flops": ...},
     "devices.core1.flops: expected this key, got nothing; add it"),
    ("a device that is no mapping", {"devices/core1": "fast"},
     "devices.core1: expected a mapping with keys such as kind, role, host, got 'fast'"),
    ("devices as a list", {"devices": []},
     "devices: expected a mapping, got []"),
    ("a machine described by numbers", {"machine/cores": 2},
     "machine.cores: expected a text, got 2; put it in quotes"),
    # ---- contention
    ("an activity beside itself", {"contention/0/b": "core1.experts"},
     "contention.0: expected two activities, got 'core1.experts' twice"),
    ("a rate above one", {"contention/0/a_rate/value": 1.2},
     "contention.0.a_rate.value: expected a share in (0, 1], got 1.2; correct it"),
    ("a rate of zero", {"contention/0/b_rate/value": 0},
     "contention.0.b_rate.value: expected a number above 0.0, got 0; correct it"),
    ("a rate that rounds to zero", {"contention/0/b_rate/value": 1e-9},
     "contention.0.b_rate.value: expected a share of at least 1e-06, got 1e-09; an activity that stands still never ends"),
    ("an unknown activity", {"contention/0/a": "core1.expert"},
     "contention.0: unknown activity 'core1.expert'; did you mean 'core1.experts'? known: core0->core1, core0.dense, "
     "core0.experts, "
     "core0.side, core1->core0, core1->disk0, core1->gpu0, core1.dense, core1.experts, core1.side, disk0->core1, gpu0->core1, "
     "gpu0.dense, "
     "gpu0.experts, gpu0.side"),
    ("a pair twice",
     {"contention/1": {"a": "core1->gpu0", "b": "core1.experts", "a_rate": number(1.0), "b_rate": number(1.0)}},
     "contention.1: expected each pair once, got 'core1->gpu0' and 'core1.experts' as in contention.0; remove one"),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "expected"), [case[1:] for case in NONSENSE], ids=[case[0] for case in NONSENSE])
def test_nonsense_is_refused_in_one_line(edits: dict[str, Any], expected: str) -> None:
    with pytest.raises(HardwareError) as caught:
        build_profile(changed(edits), FILE)
    assert str(caught.value) == f"{FILE}: {expected}"


@pytest.mark.parametrize("key", ["base", "launch", "idle", "memory", "router"])
def test_a_key_without_its_unit_is_told_the_unit(key: str) -> None:
    place = EXPERT if key == "base" else GPU
    with pytest.raises(HardwareError, match=rf"unknown key '{key}'; the unit belongs into the key: did you mean '{key}_"):
        build_profile(changed({f"{place}/{key}": number(1)}), FILE)


@pytest.mark.parametrize(
    "edits",
    [
        {"devices/core1/cores": [0, 2], "devices/core1/host": "host1"},  # another machine has a core 0 too
        {POINTS: [[1, 10], [4, 16], [8, 8]]},  # exactly half: a library changed its method
        {"links/disk0->core1/any/points/value": [[4096, 90], [8192, 90]]},  # a disk reads whole blocks
        {"devices/gpu0/experts/1/range": [2, 7]},  # both ends lie between points
        second(64, 256, 14, 0.5),  # 46 us instead of 42: measured apart
        second(65, 256, 500, 0.5),  # another method from 65 rows on
        second(1, 256, 500, 0.5, bits=4),  # another precision
        {"devices/gpu0/parts/1": ...},  # attention without context: keys and values at the memory's rate
    ],
)  # fmt: skip
def test_what_a_machine_may_be(edits: dict[str, Any]) -> None:
    build_profile(changed(edits), FILE)


def test_a_point_is_used_by_both_segments_it_ends() -> None:
    """A range between two points needs both; a third beyond them is of no use."""
    build_profile(changed({"devices/gpu0/experts/1/range": [5, 7], POINTS: [[4, 16], [8, 15]]}), FILE)
    with pytest.raises(HardwareError, match=r"got one at 1, which nothing uses"):
        build_profile(changed({"devices/gpu0/experts/1/range": [5, 7]}), FILE)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Find the places of all numbers, also of those in strings and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    elif path[-1] == "value" or isinstance(value, (int, float)):
        yield path


LEAVES = sorted(leaves(good()), key=repr)
ANYTHING = st.one_of(
    st.floats(),
    st.floats(0, 1e-300),
    st.integers(-(10**30), 10**30),
    st.sampled_from(
        [0, -0.0, 1, -1, 1e308, 5e-324, 10**400, 2**63, True, None, "", "5 us", "24 GiB", "1e9 GiB", "nan", [], {}, [1], [[1, 2]]]
    ),
    st.text(max_size=4),
)


def loaded(raw: dict[str, Any]) -> HardwareProfile | None:
    """Load a profile; None if it is refused as it should be: in one line that begins with the file."""
    try:
        return build_profile(raw, FILE)
    except HardwareError as error:
        text = str(error)
    assert text.startswith(f"{FILE}: ")
    assert "\n" not in text
    assert len(text) < 1000
    return None


def ask_everything(profile: HardwareProfile) -> None:
    """Cost something of each kind; only a `HardwareError` may come of it."""
    model = load_model({"base": "mixtral-8x7b", "hidden": 64, "expert_intermediate": 128, "name": "tiny"}, "model")
    costs = CostModel(model, profile, extrapolate=True)
    for device in profile.devices:
        for ask in (costs.expert_ns, costs.dense_ns, costs.head_ns, lambda d, n: costs.attention_ns(d, n, 2 * n * n)):
            for n_rows in (1, 3, 100):
                with suppress(HardwareError):
                    assert ask(device, n_rows) >= 0
    for link in profile.links:
        with suppress(HardwareError):
            assert costs.transfer_ns(link, 100_000) >= 0
    for pair in profile.contention:
        assert 1 <= pair.a_rate_ppm <= 10**6
        assert 1 <= pair.b_rate_ppm <= 10**6


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(LEAVES), ANYTHING), min_size=1, max_size=3))
def test_random_edits_of_numbers_load_or_are_refused(edits: list[tuple[tuple[Any, ...], Any]]) -> None:
    raw = good()
    for path, value in edits:
        here: Any = raw
        for step in path[:-1]:
            here = here[step] if not isinstance(here, list) or step < len(here) else {}
            if not isinstance(here, (dict, list)):
                here = {}
        if isinstance(here, dict) or path[-1] < len(here):
            here[path[-1]] = copy.deepcopy(value)
    profile = loaded(raw)
    if profile is not None:
        ask_everything(profile)


@settings(max_examples=200)
@given(st.data())
def test_random_edits_of_structure_load_or_are_refused(data: st.DataObject) -> None:
    """Any part of a profile replaced by anything, or put under another key."""
    raw = copy.deepcopy(good())
    here: Any = raw
    for _ in range(data.draw(st.integers(0, 5))):
        inner = [
            key
            for key in (here if isinstance(here, dict) else range(len(here)))
            if isinstance(here[key], (dict, list)) and here[key]
        ]
        if not inner:
            break
        here = here[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else list(range(len(here)))))
    if isinstance(here, dict) and data.draw(st.booleans()):
        here[data.draw(st.one_of(st.text(max_size=4), st.integers(), st.just("a->b"), st.just("\n->gpu0")))] = here.pop(key)
    else:
        here[key] = data.draw(ANYTHING)
    profile = loaded(raw)
    if profile is not None:
        ask_everything(profile)
