"""Public sweeps after two rows: which rows are chosen, what a straight line says, and one machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.research.tables.public_identified import ends, identified_groups, identified_sweeps, identified_table
from moesim.core.table import Format
from moesim.studies.validation.public_tables import Sweep, read_sweeps, sweeps_file


@pytest.fixture(scope="module")
def machine() -> list[Sweep]:
    return [row for row in read_sweeps(sweeps_file()) if row.machine == "rtx2070s-i5-12400f" and row.status == "predicted"]


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
    assert used["error"].abs().max() < 0.04 and rest["error"].abs().max() < 0.08
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


def test_what_was_measured_twice_is_predicted_twice(machine: list[Sweep]):
    chosen = ends(machine)
    assert chosen is not None
    again = replace(chosen[1], check="again", measured=chosen[1].measured / 2)
    frame = identified_sweeps([*machine, again]).set_index("check")
    assert frame.loc["again", "predicted"] == pytest.approx(frame.loc[chosen[1].check, "predicted"], rel=1e-9)
    assert len(frame) == len(identified_sweeps(machine)) + 1
