"""Tables of public measurements: choices the other way, machines identified from two rows, and the evidence for intervals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.research.tables.model_error import Rows, coverage, estimate
from experiments.research.tables.public_choices import (
    CHOICES,
    NOW,
    TOGETHER,
    Choice,
    other_hardware,
    read_choices,
    run_choices,
    together,
)
from experiments.research.tables.public_identified import ends, identified_groups, identified_sweeps, identified_table
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.hardware import load_hardware
from moesim.studies.identify.model_error import ModelError
from moesim.studies.validation.public import Sweep, checks_file, read_checks, read_sweeps, shipped_table, sweeps_file

SHIPPED = read_choices(shipped_table(CHOICES, "choices"))
SWEEPS = {one.check: one for one in read_sweeps(sweeps_file())}
CHECKS = {one.check: one for one in read_checks(checks_file())}


def choice(name: str, known: bool = True, **numbers: Any) -> Choice:
    return Choice(
        choice=name, value="", other="", known=known, numbers={key.replace("_", "-"): one for key, one in numbers.items()}
    )


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: f"{one.choice}: {one.other}")
def test_an_alternative_is_another_number_than_the_profile_has(one: Choice):
    for machine, values in one.numbers.items():
        now, then = load_hardware(machine), load_hardware({"base": machine, **values})
        for key, value in values.items():
            if isinstance(value, str):
                assert getattr(now.devices["gpu0"], key.rpartition(".")[2]) != value
                continue
            was, will = now.numbers[key].value, then.numbers[key].value
            assert will == value
            assert was != will


def test_a_row_keeps_its_own_numbers_but_for_those_of_the_choice():
    assert other_hardware("srv1-6gb", choice("x", a10_xeon8358={"devices.cpu0.flops": 1})) is None
    own = {"base": "srv1-6gb", "devices.cpu0.flops": 5, "devices.cpu0.operation_us": 2}
    assert other_hardware(own, choice("x", srv1_6gb={"devices.cpu0.flops": 1})) == {**own, "devices.cpu0.flops": 1}
    assert own["devices.cpu0.flops"] == 5


def test_together_takes_the_first_alternative_of_each_known_choice():
    found = together(
        [
            choice("a", srv1_6gb={"x": 1}),
            choice("a", srv1_6gb={"x": 2}, a10_xeon8358={"x": 3}),
            choice("b", srv1_6gb={"y": 4}),
            choice("c", known=False, srv1_6gb={"z": 5}),
        ]
    )
    assert found.numbers == {"srv1-6gb": {"x": 1, "y": 4}}
    assert found.choice == TOGETHER


def test_errors_with_a_choice_are_those_of_a_machine_that_has_it():
    """A CPU that reads at 4/3 of its rate: where all is reading, as in check 6, speed grows by nearly as much."""
    sweeps = [SWEEPS["srv1-6gb-1"], SWEEPS["gtx1060-i5-7600k-1"]]
    faster = choice(
        "rate", srv1_6gb={"devices.cpu0.memory_bytes_per_s": 47.6e9}, xeon_e5_2683v4={"devices.cpu0.memory_bytes_per_s": 75e9}
    )
    one, other = run_choices([faster], sweeps, [CHECKS["6"]], progress=False).to_dict("records")
    assert (one["choice"], one["rows"], one["checks"]) == (NOW, 0, 0)
    assert (other["choice"], other["rows"], other["checks"]) == ("rate", 1, 1)
    now = float(load_hardware("xeon-e5-2683v4").devices["cpu0"].memory_bytes_per_s)
    assert 1 - one["checks_worst"] == pytest.approx(0.941, abs=2e-3)  # 6: 0.94 of what was measured
    assert 1 + other["checks_worst"] == pytest.approx((1 - one["checks_worst"]) * 75e9 / now, rel=0.02)
    # Without the GTX 1060 one row is left: its own error, the worst of that machine.
    assert one["median_without"] == one["p90_without"] == pytest.approx(0.219, abs=1e-3)
    assert other["median_without"] > one["median_without"] + 0.1
    assert one["median"] == pytest.approx((one["median_without"] + 0.1816) / 2, abs=2e-3)


BAD = {
    "a: 1": "expected a list of choices, got dict",
    "- {choice: a, value: b, other: c, known: true}": "choice 1: numbers: expected this key, got nothing; add it",
    "- {choice: a, value: b, other: c, known: true, numbers: {}, more: 1}": "choice 1: more: unknown key 'more'; known: ",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=list(BAD))
def test_a_file_that_is_no_list_of_choices_is_one_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_choices(tmp_path / "c.yaml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def machine() -> list[Sweep]:
    return [row for row in SWEEPS.values() if row.spec and row.machine == "rtx2070s-i5-12400f" and "Coder" in row.model]


def test_ends_are_those_of_the_sweep_over_most_layers(machine: list[Sweep]):
    chosen = ends(machine)
    assert chosen is not None
    assert [row.layers_on_cpu for row in chosen] == [32, 48] and {row.weights for row in chosen} == {"Q4_K_M"}
    assert ends(machine[:1]) is None
    assert ends([replace(row, layers_on_cpu=40) for row in machine]) is None


def test_other_rows_are_predicted_from_two(machine: list[Sweep]):
    frame = identified_sweeps(machine)
    assert frame["part"].tolist() == ["used", "inside", "used", "other", "other", "other", "other"]
    used, rest = frame[frame["part"] == "used"], frame[frame["part"] != "used"]
    assert used["error"].abs().max() < 0.04 and rest["error"].abs().max() < 0.1
    straight = float(frame["straight"].dropna().iloc[0])
    slow, middle, fast = (float(frame["measured"].iloc[place]) for place in (0, 1, 2))
    assert straight == pytest.approx(2 / (1 / slow + 1 / fast) / middle - 1)
    by_group = identified_groups(frame).set_index("group")["rows"].to_dict()
    assert by_group["of these, inside the sweep"] == 1 and by_group["of these, other models, weights and settings"] == 4
    assert "rtx2070s-i5-12400f" in identified_table(frame, Format.MD)


def test_a_changed_speed_of_a_row_that_is_not_used_changes_no_prediction(machine: list[Sweep]):
    plain = identified_sweeps(machine)
    changed = identified_sweeps([replace(row, measured=2 * row.measured) if row.weights == "IQ4_XS" else row for row in machine])
    assert changed["predicted"].tolist() == pytest.approx(plain["predicted"].tolist(), rel=1e-9)


def test_coverage_counts_rows_and_draws_machines():
    rows = [("a", 10.0)] * 3 + [("b", 10.0), ("b", 20.0), ("c", 11.9)]
    frame = pd.DataFrame(rows, columns=["machine", "measured"]).assign(predicted=10.0, low=8.0, high=12.5, narrower=0.5)
    wide, narrow = (coverage(frame, level) for level in (0.9, 0.8))
    assert (wide["inside"], narrow["inside"]) == (pytest.approx(5 / 6), pytest.approx(4 / 6))
    assert wide["width"] == pytest.approx(1.25) and narrow["width"] == pytest.approx(1.25**0.5)
    assert 0.5 <= wide["low"] < wide["inside"] < wide["high"] <= 1.0


def test_a_model_error_is_found_again_from_machines_drawn_with_it():
    true, draw = ModelError(machine=0.1, model=0.05, row=0.03, freedom=6.0), np.random.default_rng(3)
    alike = np.kron(np.eye(3), np.ones((4, 4)))
    shared = true.machine**2 + true.model**2 * alike + true.row**2 * np.eye(12)
    lower = np.linalg.cholesky(shared)
    scales = np.sqrt(true.freedom / draw.chisquare(true.freedom, 300))
    machines = [Rows(scale * lower @ draw.standard_normal(12), np.zeros((12, 12)), alike) for scale in scales]
    found = estimate(machines)
    for name in ("machine", "model", "row"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15)
    assert 4 < found.freedom < 9
