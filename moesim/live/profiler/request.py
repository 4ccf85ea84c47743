"""Request of a measurement, checked before anything is done."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from moesim.core.units import format_memory
from moesim.errors import CapacityError, ConfigError, HardwareError
from moesim.live.kernels.host import describe, n_gpus, usable_cores
from moesim.live.profiler.plan import Plan, estimate_s, make_plan
from moesim.live.profiler.probes import Host, Layout, Wanted, layout_of
from moesim.live.profiler.samples import check_free
from moesim.model import ModelSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHARE = {"gpu": 0.9, "disk": 0.5}  # share of what is free of a GPU's memory, or of a disk, that may be used


@dataclass(frozen=True)
class Request:
    """Options of ``moesim profile measure``.

    Attributes
    ----------
    name : str
        Of the profile.
    models : tuple of ModelSpec
        Whose experts and dense parts are measured.
    bits : tuple of float
        Precisions of the experts; none: each model's own.
    mode : {"quick", "full"}
        How fine the grids are.
    memory_bytes : int or None, bytes
        Of host memory; None: half of what is available.
    disk : Path or None
        Folder for a file to read and write; None: no disk.
    gpu : int or None
        Which GPU; None: none.
    out : Path
        Folder of profiles.
    seed, repeats
        As for `moesim.live.profiler.plan.make_plan`.
    resume : bool
        Go on with an unfinished measurement of this name.
    overwrite : bool
        Replace a profile of this name.
    """

    name: str
    models: tuple[ModelSpec, ...]
    bits: tuple[float, ...] = ()
    mode: str = "full"
    memory_bytes: int | None = None
    disk: Path | None = None
    gpu: int | None = None
    out: Path = Path("hardware_profiles")
    seed: int = 0
    repeats: int | None = None
    resume: bool = True
    overwrite: bool = False

    @property
    def command(self) -> str:
        words = ["moesim profile measure", self.name]
        words += [f"--model {model.name}" for model in self.models] + [f"--bits {bits:g}" for bits in self.bits]
        words += [f"--mode {self.mode}", f"--seed {self.seed}"]
        words += [f"--memory {self.memory_bytes}"] if self.memory_bytes is not None else []
        words += [f"--repeats {self.repeats}"] if self.repeats is not None else []
        words += ["--no-gpu" if self.gpu is None else f"--gpu {self.gpu}"] + (["--no-disk"] if self.disk is None else [])
        return " ".join(words)


@dataclass(frozen=True)
class Prepared:
    """A checked request: plan, usable bytes of each place, and the machine, also in words."""

    request: Request
    plan: Plan
    budgets: dict[str, int]
    machine: Host
    words: dict[str, str]


def find_gpu(wanted: int | None) -> int | None:
    """Return which GPU to measure: the wanted one, else the first, else none."""
    n = n_gpus()
    if wanted is None:
        return 0 if n else None
    if not 0 <= wanted < n:
        raise ConfigError(
            f"--gpu: expected one of the {n} GPUs that PyTorch finds, got {wanted}; add --no-gpu to measure without one"
        )
    return wanted


def prepare(request: Request, machine: Host | None = None) -> Prepared:
    """Check a request and make its plan; nothing is allocated or written.

    Parameters
    ----------
    request : Request
        What is asked for.
    machine : Host, optional
        By default this one, as far as a plan needs it.

    Returns
    -------
    Prepared

    Raises
    ------
    InputError
        If a name, model, GPU, folder or budget is wrong, or memory does not suffice.
    """
    if machine is None and not hasattr(os, "sysconf"):
        raise HardwareError(
            "profile: expected Linux or macOS to measure on, got Windows; use WSL 2, or `moesim profile new --os windows`"
        )
    machine = machine or Host()
    if not _NAME.fullmatch(request.name):
        raise ConfigError(f"NAME: expected letters, digits, '.', '_' and '-', got {request.name!r}; choose another")
    names = [model.name for model in request.models]
    if len(set(names)) < len(names):
        raise ConfigError(f"--model: expected each model once, got {', '.join(names)}; leave one out")
    if request.disk is not None and not request.disk.is_dir():
        raise ConfigError(f"--disk: expected a folder, got {request.disk}; make it, or add --no-disk")
    layout = layout_of(usable_cores(), gpu=request.gpu, disk=request.disk)
    for tier in layout.tiers:
        path = request.out / f"{request.name}{tier.suffix}.yaml"
        if path.exists() and not request.overwrite:
            raise ConfigError(f"{path}: expected nothing there, got a file; add --overwrite or choose another name")
    check_free(request.out, request.name, [f"{request.name}{tier.suffix}" for tier in layout.tiers])
    budgets = _budgets(request, layout, machine)
    wanted = [Wanted.of(model, request.bits) for model in request.models]
    powered = machine.powered(list(layout.devices.values()))
    plan = make_plan(
        layout, wanted, mode=request.mode, seed=request.seed, repeats=request.repeats, budgets=budgets, powered=powered
    )
    plan.check_memory(budgets)
    return Prepared(request, plan, budgets, machine, describe())


def _budgets(request: Request, layout: Layout, machine: Host) -> dict[str, int]:
    available, memory = machine.free_bytes("cpu"), request.memory_bytes
    if memory is None:
        if available is None:
            raise CapacityError("--memory: expected a size such as '8 GB', since this system does not tell, got nothing")
        memory = available // 2
    elif available is not None and memory > available:
        raise CapacityError(
            f"--memory: expected at most {format_memory(available)}, which is available, got {format_memory(memory)}; give less"
        )
    found = {"cpu": memory}
    for device in layout.devices.values():
        if device.kind in _SHARE:
            free = machine.free_bytes(device.place, layout.disk)
            if free is not None:
                found[device.place] = int(free * _SHARE[device.kind])
    return found


def describe_plan(prepared: Prepared) -> str:
    """Describe what would be measured, with about how much time and memory."""
    plan = prepared.plan
    lines = [f"{prepared.request.name}: {plan.mode}, {len(plan.probes)} probes of {plan.repeats} repeats"]
    for block in plan.blocks:
        kinds: dict[str, int] = {}
        for probe in block.probes:
            kinds[probe.kind] = kinds.get(probe.kind, 0) + 1
        lines.append(f"  {block.name}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    for place, (n_bytes, most) in sorted(plan.required_bytes().items()):
        of = f" of {format_memory(prepared.budgets[place])}" if place in prepared.budgets else ""
        lines.append(f"  {'memory' if place == 'cpu' else place}: {format_memory(n_bytes)}{of} (most in '{most}')")
    lines.append(f"  time: about {_minutes(estimate_s(plan))}, a guess")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines) + "\n"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
