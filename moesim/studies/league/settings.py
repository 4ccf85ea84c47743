"""The settings of a league: those of its experiment, and for the map machines with other links and other memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from moesim.capacity import required_bytes
from moesim.errors import ConfigError
from moesim.experiment.config import Config
from moesim.experiment.runner import at_end
from moesim.experiment.spec import Point
from moesim.experiment.sweep import expand
from moesim.hardware import HardwareProfile, load_hardware
from moesim.metrics.naming import hardware_label, model_label
from moesim.model import ModelSpec, load_model
from moesim.policy import Placement
from moesim.studies.whatif.knobs import knob_of
from moesim.studies.whatif.machines import rate_of
from moesim.studies.whatif.settings import Base, raw_at

Raw = Mapping[str, Any]
_LINK = knob_of("link.bytes_per_s")
_CPU_COST = "expert_cost.few_row_flops"


@dataclass(frozen=True)
class Setting:
    """One setting in which systems meet: everything but the system and the draw of routing."""

    spec: ModelSpec
    hardware: str  # label
    batch: int
    memory_bytes: int | None  # of the GPU, for everything; None: `share` says how many experts are cached
    share: float | None  # of all experts; None: what the memory has room for
    ratio: float  # rate of the link over the rate at which the CPU reads experts
    own_ratio: float  # that of the machine as it is
    draws: tuple[str, ...]  # experiments without policies, as JSON; one a draw

    def raws(self) -> list[dict[str, Any]]:
        """Return the experiments, one a draw."""
        return [json.loads(draw) for draw in self.draws]

    @property
    def model(self) -> str:
        """Name of the model."""
        return model_label(self.spec)

    @property
    def panel(self) -> tuple[str, int]:
        """Model and batch, which have one map."""
        return self.model, self.batch


def settings_of(config: Config, place: str) -> list[Setting]:
    """List the settings of an experiment; points that differ in policy, trace or seed alone are one."""
    groups: dict[str, list[Point]] = {}
    for point in expand(config, place):
        workload = {key: value for key, value in point.workload.items() if key != "seed"}
        key = json.dumps([point.model, point.hardware, point.ratio, point.budget_bytes, workload], sort_keys=True, default=str)
        groups.setdefault(key, []).append(point)
    return [_setting(config, points, place) for points in groups.values()]


def _setting(config: Config, points: Sequence[Point], place: str) -> Setting:
    first = points[0]
    model, machine = load_model(first.model, f"{place}: model"), load_hardware(first.hardware, f"{place}: hardware")
    draws = dict.fromkeys(json.dumps(raw_at(config, point), sort_keys=True) for point in points)
    own = float(ratio_of(machine, place))
    return Setting(
        model, hardware_label(machine), first.workload["batch_size"], first.budget_bytes, first.ratio,
        own, own, tuple(draws),
    )  # fmt: skip


def ratio_of(machine: HardwareProfile, place: str) -> Fraction:
    """Return the rate of large copies from host to GPU over the rate at which the host reads experts."""
    hosts = [device for name, device in machine.devices.items() if name in machine.backing and device.role == "host"]
    links = [link for link in machine.links if link.dst == machine.compute and link.src in machine.backing]
    if not hosts or not links:
        raise ConfigError(
            f"{place}: hardware {machine.name}: expected a host that computes and a link from it to {machine.compute}, got none; "
            "name another machine"
        )
    cost = hosts[0].expert_cost
    reading = cost.read_bytes_per_s if cost is not None else hosts[0].memory_bytes_per_s
    curves = links[0].curves
    return rate_of(curves.get("pinned") or next(iter(curves.values()))) / Fraction(reading)


def map_of(setting: Setting, ratios: Iterable[float], shares: Iterable[float], place: str) -> list[Setting]:
    """Return a setting on machines with other link rates and memory for other shares of the experts."""
    found = []
    room = {share: _memory(setting, share, place) for share in shares}
    for ratio in ratios:
        factor = Fraction(ratio).limit_denominator(10**6) / Fraction(setting.ratio).limit_denominator(10**9)
        for share, n_bytes in room.items():
            draws = []
            for raw in setting.raws():
                faster = Base(_LINK.scale(Base(raw, place), factor).raw, place)  # type: ignore[misc]
                gpu = faster.profile.compute
                room_there = max(n_bytes, faster.profile.devices[gpu].memory_bytes)
                changed = faster.machine({f"devices.{gpu}.memory_bytes": room_there})
                draws.append(json.dumps({**changed, "cache": {"budget": n_bytes}}, sort_keys=True))
            found.append(replace(setting, memory_bytes=n_bytes, share=share, ratio=ratio, draws=tuple(draws)))
    return found


def _memory(setting: Setting, share: float, place: str) -> int:
    """Count the bytes of the GPU that hold all but the experts, and a share of these."""
    raw, model = setting.raws()[0], setting.spec
    machine = load_hardware(raw["hardware"], f"{place}: hardware")
    work = raw["workload"]
    kv_tokens = work["batch_size"] * (int(work["prompt_tokens"] or 0) + int(work["decode_tokens"] or 0))
    around = sum(required_bytes(model, machine, kv_tokens, Placement())[machine.compute].values())
    experts = model.n_experts * sum(model.expert_bytes(layer) for layer in range(model.n_layers))  # at their full width alone
    return around + math.ceil(share * experts)


def cpu_cost_ends(raw: Raw, place: str) -> list[dict[str, Any]]:
    """Return an experiment at both ends of the interval of the CPU's cost a row; none if none is stated."""
    machine = load_hardware(raw["hardware"], f"{place}: hardware")
    numbers = {key: one for key, one in machine.numbers.items() if key.endswith(_CPU_COST) and one.interval is not None}
    return [
        {**raw, "hardware": at_end(raw["hardware"], machine, key, end)}
        for key, one in numbers.items()
        for end in one.interval or ()
    ]
