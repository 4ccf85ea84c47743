"""A source that a section of a profile states for all numbers below it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from moesim.errors import HardwareError
from moesim.hardware import hardware_names, load_hardware, read_profile
from moesim.hardware.read import with_sources
from tests.hardware.nonsense_kit import good

TABLE = {"source": "published", "ref": "Table 1"}
SHEET = {"source": "spec-sheet", "ref": "a sheet"}


def plain(raw: Any) -> Any:
    """Take the sources off all numbers."""
    if isinstance(raw, dict):
        return raw["value"] if "value" in raw else {key: plain(one) for key, one in raw.items()}
    return [plain(one) for one in raw] if isinstance(raw, list) else raw


def test_one_source_for_a_whole_file():
    found, whole = load_hardware(plain(good()) | {"source": TABLE}), load_hardware(good())
    assert found.labels == ("published",)
    assert {key: number.value for key, number in found.numbers.items()} == {k: n.value for k, n in whole.numbers.items()}
    assert (found.devices, found.links) == (whole.devices, whole.links)
    assert {number.ref for number in found.numbers.values()} == {"Table 1"}


def test_the_nearest_source_counts_and_a_numbers_own_before_it():
    raw = plain(good()) | {"source": TABLE}
    raw["devices"]["gpu0"]["source"] = SHEET
    raw["devices"]["gpu0"]["flops"] = {"value": 1e11, "source": "assumed", "why": "mine"}
    raw["devices"]["gpu0"]["experts"][0]["source"] = {"source": "derived", "how": "by hand"}
    raw["links"]["core1->gpu0"]["pinned"]["source"] = {"source": "assumed", "why": "another"}
    raw["contention"][0]["source"] = {"source": "derived", "how": "from a kin"}
    found = {key: number.source for key, number in load_hardware(raw).numbers.items()}
    for key, label in {
        "devices.gpu0.memory_bytes": "spec-sheet",
        "devices.gpu0.flops": "assumed",
        "devices.gpu0.launches.attention": "spec-sheet",
        "devices.gpu0.experts.0.base_us": "derived",
        "devices.gpu0.experts.1.points": "spec-sheet",
        "devices.core0.flops": "published",
        "links.core1->gpu0.pinned.bytes_per_s": "assumed",
        "links.core1->gpu0.activation.points": "published",
        "contention.0.a_rate": "derived",
        "platform_w": "published",
    }.items():
        assert found[key] == label, key


def test_a_number_may_have_an_interval_and_take_the_source():
    raw = plain(good()) | {"source": TABLE}
    raw["devices"]["gpu0"]["launch_us"] = {"value": 5, "interval": [4, 6]}
    number = load_hardware(raw).numbers["devices.gpu0.launch_us"]
    assert (number.source, number.interval) == ("published", (4, 6))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"source": "published"}, "devices.gpu0.flops: expected ref next to source: published, got nothing; add it"),
        (
            {"source": "measured", "method": "a clock"},
            "expected date and repeats and spread next to source: measured, got nothing",
        ),
        ({"source": "guessed"}, "devices.gpu0.flops.source: expected 'measured', "),
        ("published", "devices.gpu0.source: expected a source for the numbers below, such as source: {source: published, ref: "),
        ({"ref": "a table"}, "devices.gpu0.source: expected a source for the numbers below"),
        (TABLE | {"value": 5}, "devices.gpu0.source: expected a source for the numbers below"),
    ],
)
def test_a_source_needs_its_proof_there_as_well(source: Any, said: str):
    raw = good()
    raw["devices"]["gpu0"]["flops"] = 1e11
    raw["devices"]["gpu0"]["source"] = source
    with pytest.raises(HardwareError) as caught:
        load_hardware(raw)
    assert said in str(caught.value)


def test_a_plain_number_without_any_source_is_refused_as_ever():
    raw = good()
    raw["devices"]["gpu0"]["flops"] = 1e11
    raw["links"]["core1->gpu0"]["source"] = TABLE
    with pytest.raises(HardwareError, match=r"devices.gpu0.flops: expected \{value: ..., source: ..., ref: ...\}"):
        load_hardware(raw)


def test_overrides_take_the_source_that_is_given_with_them():
    found = load_hardware({"base": "rtx3090-epyc7532", "source": TABLE, "devices.gpu0.flops": 7e13}).numbers
    assert (found["devices.gpu0.flops"].source, found["devices.gpu0.flops"].ref) == ("published", "Table 1")
    assert found["devices.gpu0.launch_us"].ref != "Table 1", "only what is given here"
    nested = load_hardware({"base": "rtx3090-epyc7532", "devices": {"gpu0": {"source": SHEET, "flops": 7e13}}}).numbers
    assert nested["devices.gpu0.flops"].source == "spec-sheet"


def test_shipped_profiles_have_none_and_stay_as_they_are():
    for name in hardware_names():
        raw, _, _ = read_profile(name)
        assert with_sources(copy.deepcopy(raw)) == raw
