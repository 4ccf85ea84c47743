"""A part alone is no machine: its message shows how to write one."""

from __future__ import annotations

import pytest

from moesim.errors import HardwareError
from moesim.hardware import load_hardware


@pytest.mark.parametrize(("part", "written"), [("4070", "4070 + CPU + RAM"), ("5700x", "GPU + 5700x + RAM")])
def test_a_bare_part_is_written_as_a_machine(part: str, written: str):
    with pytest.raises(HardwareError, match=f"write '{written}'".replace("+", r"\+")):
        load_hardware(part)


def test_a_disk_may_name_its_link():
    assert "disk0" in load_hardware("RTX 4070 + Ryzen 7 5700X + 32GB DDR4-3600 + NVMe gen4").devices
