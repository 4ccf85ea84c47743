"""What each choice behind public machines' profiles is worth: the file of choices, and the errors with one the other way."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from experiments.research.tables.public_choices import (
    CHOICES,
    NOW,
    TOGETHER,
    Choice,
    choice_table,
    other_hardware,
    read_choices,
    run_choices,
    together,
)
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.hardware import load_hardware
from moesim.studies.validation.public_tables import checks_file, read_checks, read_sweeps, shipped_table, sweeps_file

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
    assert 1 - one["checks_worst"] == pytest.approx(0.943, abs=2e-3)  # 6: 0.94 of what was measured
    assert 1 + other["checks_worst"] == pytest.approx((1 - one["checks_worst"]) * 75e9 / now, rel=0.02)
    # Without the GTX 1060 one row is left: its own error, which the page gives as 21.6 % (the worst of that machine).
    assert one["median_without"] == one["p90_without"] == pytest.approx(0.216, abs=1e-3)
    assert other["median_without"] > one["median_without"] + 0.1
    assert one["median"] == pytest.approx((one["median_without"] + 0.1757) / 2, abs=2e-3)


def test_the_table_says_what_is_known_and_of_how_many_rows():
    frame = run_choices([], [SWEEPS["srv1-6gb-1"]], [CHECKS["6"]], progress=False)
    lines = choice_table(frame).splitlines()
    assert lines[2].startswith(f"| {NOW} |  |  |  | 0 | 21.6 % | 21.6 % |")
    assert lines[2].endswith("| 0 | 5.7 %, 6 % |")
    (row,) = csv.DictReader(io.StringIO(choice_table(frame, Format.CSV)))
    assert (row["choice"], float(row["median"])) == (NOW, frame["median"][0])


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


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="expected a list of choices, got: "):
        read_choices(tmp_path / "none.yaml")
