"""Which rows move constants: those marked so that fit into the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moesim.core.units import format_bytes
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile, build_profile
from moesim.studies.identify.cases import Case, roomy
from moesim.studies.identify.constants import Machine
from moesim.studies.identify.memory import needed_bytes
from moesim.studies.identify.observations import Observation

_CLIFF: Final = 1.05
"""A row that needs more than this times the GPU's memory is beyond the cliff."""


def where(rows: Sequence[Observation]) -> str:
    """Name the file of the rows."""
    return rows[0].place.rpartition(":")[0] if rows and rows[0].place else "observations"


def check_gpu(cases: Sequence[Case], machine: Machine) -> None:
    """Refuse settings that need a GPU where the profile has none."""
    if machine.base.devices[machine.gpu].role == "accelerator":
        return
    for case in cases:
        one = case.observation
        if case.setting.policy["name"] != "all-cpu":
            raise ConfigError(
                f"{one.place or 'row ' + one.row}: setting: expected all_cpu beside a profile without a GPU, "
                f"{machine.place}, got '{one.setting}'; write all_cpu, or name a profile with a GPU"
            )


def none_used(cases: Sequence[Case], machine: Machine) -> str:
    """Say why no row is left: none is marked, or all need too much memory."""
    marked = [case.name for case in cases if case.observation.role == "identification"]
    if not marked:
        return "expected at least one row for identification, got none; mark one"
    memory = machine.base.devices[machine.gpu].memory_bytes
    return (
        f"expected a row for identification that fits into the {format_bytes(memory)} of {machine.gpu}, got none: "
        f"{', '.join(marked)} would page over the link; add a row with fewer experts there, or correct the profile's memory_bytes"
    )


def with_room(machine: Machine) -> HardwareProfile:
    """Give the machine with memory for everything."""
    return build_profile(roomy(machine.raw, machine.base, machine.place), machine.place)


def statuses(cases: Sequence[Case], machine: Machine) -> list[str]:
    """Say of each row whether it is used, a check, or beyond memory."""
    room = with_room(machine)
    memory = machine.base.devices[machine.gpu].memory_bytes
    found = []
    for case in cases:
        need = needed_bytes(case, room, machine.gpu)
        beyond = need is not None and need > _CLIFF * memory
        found.append("beyond memory" if beyond else "used" if case.observation.role == "identification" else "check")
    names = {case.name: status for case, status in zip(cases, found, strict=True)}
    for index, case in enumerate(cases):  # a ratio is worth what its other row is
        if case.observation.of and names[case.observation.of] == "beyond memory":
            found[index] = "beyond memory"
    return found
