"""Rates at which experts of several sizes are read: worked numbers, labels, refusals, and changes of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.engine.native import AVAILABLE
from moesim.errors import HardwareError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.types import ExpertCost
from moesim.live.profiler.show import compare, facts
from moesim.policy import Fetch, Run
from moesim.studies.whatif.machines import Told, faster_device, faster_devices
from tests.engine import engine_kit as kit
from tests.hardware.costs_kit import costs, machine, number, tiny_model
from tests.hardware.nonsense_kit import good

RATE = "expert_cost.read_rates.{}.bytes_per_s"
EXPERT = 49_152  # bytes of an expert of the tiny model


def point(size: Any, rate: Any, **more: Any) -> dict[str, Any]:
    return {"bytes": size, "bytes_per_s": number(rate) | more}


def read_at(*points: dict[str, Any], **more: Any) -> HardwareProfile:
    return machine(cpu={"expert_cost": {"read_rates": list(points), "few_row_flops": number(1e12)} | more})


def test_time_is_linear_in_bytes_between_points():
    # 40,000 bytes at 1 GB/s take 40 us, 60,000 at 1.25 GB/s 48 us: 49,152 bytes 40 + 8 x 9152 / 20,000 = 43.6608 us
    assert costs(read_at(point(40_000, 1e9), point(60_000, 1.25e9))).expert_ns("cpu0", 1) == 43_661


def test_a_point_is_met():
    assert costs(read_at(point(100, 1e8), point(EXPERT, 2e9), point(10**6, 4e9))).expert_ns("cpu0", 1) == 24_576


@pytest.mark.parametrize(
    ("points", "ns"),
    [
        ([point(98_304, 2e9), point(10**6, 4e9)], 24_576),  # the smallest point's 2 GB/s; its line would go on to 37,568 ns
        ([point(1_000, 1e9), point(24_576, 1.5e9)], 32_768),  # the largest point's 1.5 GB/s; its line would go on to 32,441 ns
    ],
)
def test_outside_the_rate_is_the_nearest_points(points: list[dict[str, Any]], ns: int):
    found = costs(read_at(*points))
    assert found.expert_ns("cpu0", 1) == ns
    assert found.label() == "extrapolated"
    near = "98.3 kB" if ns == 24_576 else "24.6 kB"
    assert found.notes() == [f"experts of 49.2 kB read on cpu0 at the rate of {near} (extrapolated)"]


def test_inside_nothing_is_extrapolated_and_the_weakest_point_counts():
    strong, weak = point(40_000, 1e9), {"bytes": 60_000, "bytes_per_s": number(1.25e9, "assumed") | {"interval": [1e9, 2e9]}}
    found = costs(read_at(strong, weak, point(10**6, 2e9)))
    found.expert_ns("cpu0", 1)
    assert (found.label(), found.notes()) == ("assumed", [])
    assert found.intervals() == {"devices.cpu0.expert_cost.read_rates.1.bytes_per_s": (1e9, 2e9)}
    used = [key for key in found.provenance()["expert @cpu0"]["numbers"] if "read_rates" in key]
    assert [key.split(".")[4] for key in used] == ["0", "1"]


def test_equal_rates_are_one_rate():
    one = costs(machine(cpu={"expert_cost": {"read_bytes_per_s": number(3e9), "few_row_flops": number(1e12)}}))
    many = costs(read_at(point(40_000, 3e9), point(60_000, 3e9)))
    assert many.expert_table("cpu0", 9) == one.expert_table("cpu0", 9)


RATES = st.lists(st.tuples(st.integers(1, 10**9), st.integers(10**6, 10**13)), min_size=2, max_size=6, unique_by=lambda p: p[0])


@given(RATES.map(sorted), st.integers(1, 2 * 10**9), st.integers(1, 10**6))
def test_time_never_falls_and_no_rate_is_beyond_its_neighbours(points, size, more):
    kept = points[:1]
    for n, rate in points[1:]:
        kept += [(n, rate)] if Fraction(n, rate) >= Fraction(*kept[-1]) else []
    cost = ExpertCost(Fraction(0), Fraction(0), 1, 1, read_rates=tuple(kept))
    assert 0 < cost.reading_s(size) <= cost.reading_s(size + more)
    near = [kept[i][1] for i in cost.points_of(size)]
    assert min(near) <= size / cost.reading_s(size) <= max(near)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(10**6, 1e9)], "expected at least two sizes, got one"),
        ([(10**6, 1e9), (10**6, 2e9)], "expected ascending bytes, got 1000000 after 1000000"),
        (
            [(10**6, 1e9), (2 * 10**6, 5e9)],
            "expected no fall below half of an earlier time, got 400 us for 2000000 bytes after 1000 us",
        ),
        ([(0, 1e9), (10**6, 2e9)], "read_rates.0.bytes: expected a number of at least 1"),
        ([(10**6, 1e9), (1e30, 2e9)], "read_rates.1.bytes: expected a size of at most 9007199254740992 bytes"),
        ([(1.5, 1e9), (10**6, 2e9)], "read_rates.0.bytes: expected bytes as an integer"),
        ([(10**6, 70), (10**8, 121)], "if these are GB/s, write 70e9"),
        ([(10**6, 1e9), (10**8, 1e30)], "read_rates.1.bytes_per_s.value: expected at most 1e+18"),
        ([(n, 1e9) for n in range(1, 66)], "expected at most 64 sizes, got 65"),
    ],
)
def test_impossible_points_are_refused_in_one_line(points: list[tuple[Any, Any]], words: str):
    with pytest.raises(HardwareError) as caught:
        read_at(*(point(*one) for one in points))
    message = str(caught.value)
    assert "devices.cpu0.expert_cost.read_rates" in message and words in message and "\n" not in message


def test_one_rate_and_several_contradict_each_other():
    with pytest.raises(HardwareError, match=r"expert_cost.read_rates: expected either read_bytes_per_s or read_rates, got both"):
        read_at(point(1, 1e9), point(10**6, 2e9), read_bytes_per_s=number(1e9))


def test_a_file_may_name_the_source_once_and_a_point_may_be_changed():
    raw = good()
    raw["devices"]["core0"]["expert_cost"] = {
        "source": {"source": "published", "ref": "a table"},
        "read_rates": [{"bytes": "2.9 MB", "bytes_per_s": 70e9}, {"bytes": 107e6, "bytes_per_s": 121e9}],
        "few_row_flops": 9e10,
    }
    found = load_hardware(raw | {"devices.core0.expert_cost.read_rates.1.bytes_per_s": 130e9})
    assert found.devices["core0"].expert_cost.read_rates == ((2_900_000, 70 * 10**9), (107_000_000, 130 * 10**9))
    labels = [found.numbers[f"devices.core0.expert_cost.read_rates.{i}.bytes_per_s"].source for i in range(2)]
    assert labels == ["published", "assumed"]


def test_experts_of_other_bits_are_other_sizes():
    found = costs(read_at(point(12_288, 1e9), point(EXPERT, 2e9)), tiny_model())
    assert (found.expert_ns("cpu0", 1), found.at_bits(4).expert_ns("cpu0", 1)) == (24_576, 12_288)


@pytest.mark.parametrize("seed", range(12))
def test_both_engines_take_the_same_time_and_ask_for_it_once_by_rows(seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(seed)
    rates = [point(200, int(rng.integers(10**8, 10**9))), point(3_000, int(rng.integers(10**9, 3 * 10**9)))]
    host = {**kit.cpu(), "memory_bytes_per_s": number(1e9), "flops": number(1e12), "experts": []}
    host["expert_cost"] = {"read_rates": rates, "few_row_flops": number(1e9), "per_row_us": number(0.25)}
    toy = kit.machine({"gpu0": kit.gpu(), "cpu0": host})
    routing = [[[rng.permutation(4)[:2].tolist() for _ in range(2)] for _ in range(20)] for _ in range(3)]
    asked: list[int] = []
    reading = ExpertCost.reading_s
    monkeypatch.setattr(ExpertCost, "reading_s", lambda cost, size: (asked.append(size), reading(cost, size))[1])

    def run(event: Any, view: Any) -> list[Any]:
        there, here = ([expert for expert in event.active if expert % 2 == odd] for odd in (1, 0))
        return [Run(event.layer, there, "cpu0"), Fetch(event.layer, here, "gpu0"), Run(event.layer, here, "gpu0")]

    work = kit.workload(routing, prompt=int(rng.integers(1, 9)))
    found = kit.play(kit.Script(routed=run), work, toy, engine="simpy")
    on_host = [task for task in found.tasks if task.kind == "expert" and task.device == "cpu0"]
    assert len(on_host) > 40 and len(asked) <= 20  # a few a number of rows: no look-up an expert
    if AVAILABLE:
        kit.assert_same(found, kit.play(kit.Script(routed=run), work, toy, engine="native"))


def test_a_faster_memory_scales_every_point_and_nothing_else():
    rates = [point(40_000, 1e9), point(60_000, 1.25e9, interval=[1e9, 2e9])]
    raw = good()
    raw["devices"]["core0"]["expert_cost"] = {"read_rates": rates, "few_row_flops": number(1e10), "per_expert_us": number(3)}
    before = load_hardware(raw)
    device = before.devices["core0"]
    told = Told("--vary")
    written = faster_devices(before, [device], Fraction(3, 2), Fraction(1), told)
    after = load_hardware(raw | written).devices["core0"]
    assert after == faster_device(device, Fraction(3, 2))
    assert after.expert_cost.read_rates == ((40_000, 1_500_000_000), (60_000, 1_875_000_000))
    assert after.expert_cost.per_expert_us == device.expert_cost.per_expert_us
    assert set(written) == {"devices.core0.memory_bytes_per_s", *(f"devices.core0.{RATE.format(i)}" for i in range(2))}


def test_the_points_are_shown_and_compared():
    one, two = read_at(point(40_000, 1e9), point(60_000, 1.25e9)), machine(cpu={"expert_cost": {"few_row_flops": number(1e12)}})
    (cpu,) = [device for device in facts(one)["devices"] if device["device"] == "cpu0"]
    assert [(row["value"], row["unit"]) for row in cpu["numbers"] if row["quantity"] == "experts of 60 kB read at"] == [
        (1.25e9, "bytes/s")
    ]
    rows = {row.quantity: row for row in compare(one, two, tiny_model())}
    row = rows["reading of an expert of 60 kB, host"]
    assert (row.a, row.b, row.a_source, row.b_source) == (48, 60, "published", "published")
