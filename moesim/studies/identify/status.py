"""Which rows move constants: those marked so that fit into the GPU's memory. Rows that are one setting must agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from moesim.core.units import format_memory
from moesim.errors import ConfigError, InputError
from moesim.hardware import HardwareProfile
from moesim.studies.identify.cases import Case, decode_workload, needed_bytes, placement_of
from moesim.studies.identify.constants import Machine
from moesim.studies.identify.observations import Observation
from moesim.studies.identify.quants import read_bits

_AGREE: Final = 0.02
"""Two rows of one setting may differ by this share, or by three of their spreads, before they contradict each other."""

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
        f"expected a row for identification that fits into the {format_memory(memory)} of {machine.gpu}, got none: "
        f"{', '.join(marked)} would page over the link; add a row with fewer experts there, or correct the profile's memory_bytes"
    )


def statuses(cases: Sequence[Case], machine: Machine) -> list[str]:
    """Say of each row whether it is used, a check, or beyond memory."""
    memory = machine.base.devices[machine.gpu].memory_bytes
    found = []
    for case in cases:
        need = needed_bytes(case, machine.with_room, machine.gpu)
        beyond = need is not None and need > _CLIFF * memory
        found.append("beyond memory" if beyond else "used" if case.observation.role == "identification" else "check")
    names = {case.name: status for case, status in zip(cases, found, strict=True)}
    for index, case in enumerate(cases):  # a ratio is worth what its other row is
        if case.observation.of and names[case.observation.of] == "beyond memory":
            found[index] = "beyond memory"
    return found


# ----------------------------------------------------------------------------------------------------------- agreement


def check_agreement(cases: Sequence[Case], room: HardwareProfile) -> None:
    """Refuse rows of one setting that contradict each other, unless both are only predicted."""
    for before, one in _pairs(cases, room):
        if "identification" in (one.role, before.role):
            _refuse(before, one)


def contradictions(cases: Sequence[Case], room: HardwareProfile) -> list[tuple[Observation, Observation]]:
    """List pairs of checks of one setting that contradict each other: a source may measure a setting twice."""
    return [pair for pair in _pairs(cases, room) if all(one.role == "check" for one in pair)]


def _pairs(cases: Sequence[Case], room: HardwareProfile) -> Iterator[tuple[Observation, Observation]]:
    """Give pairs of rows of one setting that differ by more than rows may."""
    groups: dict[Any, list[Observation]] = {}
    for case in cases:
        one = case.observation
        group = groups.setdefault(setting_key(case, room), [])
        yield from ((before, one) for before in group if _apart(before, one))
        group.append(one)


def setting_key(case: Case, room: HardwareProfile) -> tuple[Any, ...]:
    """Give what is the same for rows of one setting, however they are written."""
    one = case.observation
    chosen = read_bits(one.bits, one.place)
    open_bits = json.dumps(chosen) if len(chosen) > 1 else ""
    model = replace(case.model, name="any", source="", labels=())
    length = (one.context, one.decode) if one.kind == "decode" else (one.context, one.ubatch)
    return model, open_bits, _where(case, room), one.kind, one.batch, length, one.of


def _where(case: Case, room: HardwareProfile) -> Any:
    """Say where experts and layers are; the policy with its options, where something moves."""
    if case.static:
        try:
            placement = placement_of(case, room, decode_workload(case))
        except InputError:
            pass  # what is wrong is told where the row is predicted
        else:
            experts = frozenset((copy.layer, expert, copy.device) for copy in placement.copies for expert in copy.experts)
            parts = {part: device for part, device in placement.parts.items() if part[0] != "embedding"}  # a few rows a token
            return experts, frozenset((part, device) for part, device in parts.items() if device != room.compute)
    return json.dumps([dict(case.setting.policy), dict(case.setting.cache)], sort_keys=True, default=str)


def _apart(before: Observation, one: Observation) -> bool:
    spread = sum((each.spread or 0) / each.value for each in (one, before))
    return abs(one.log_time - before.log_time) > max(_AGREE, 3 * spread)


def _refuse(before: Observation, one: Observation) -> NoReturn:
    written = "" if one.setting == before.setting else f" (setting '{one.setting}' is '{before.setting}' there)"
    theirs = dict(before.told)
    differ = [f"{key} ({theirs[key]}, then {value})" for key, value in one.told if theirs.get(key, value) != value]
    if differ:
        why = f"they differ in {', '.join(differ)}, which the model does not know: keep the rows of one"
    else:
        why = "remove one" + ("" if one.spread and before.spread else ", or give their spread")
    raise ConfigError(
        f"{one.place}: expected rows of one setting to agree, got {one.value:g} {one.unit} after {before.value:g} {before.unit} "
        f"at {before.place}{written}; {why}"
    )
