"""Placements of all engines on a machine: each with most on the GPU, simulated on the same requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesim.core.processes import usable_cores
from moesim.errors import ConfigError, TraceError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.routing import fits, fitted_parameters, is_of, lift_to_assume, shape_of, traces_of_shape
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec
from moesim.studies.advice.candidates import Candidate, Space, experiment_of
from moesim.studies.advice.engines import COUNTS, Command, Engine, commands, engines
from moesim.studies.advice.llama_cpp import Speed
from moesim.studies.advice.question import PLACE, Asked, Routing, Setting
from moesim.studies.advice.support import UNVERIFIED, why_unsupported
from moesim.studies.identify.cases import repeated
from moesim.studies.identify.model_error import shipped, time_shares
from moesim.trace import Trace, find_trace
from moesim.trace.derived import subset
from moesim.trace.workload import WorkloadSpec, compose

MADE: Final = 8
"""Layers of routing that is made up; a model with more has them in turn."""


@dataclass(frozen=True)
class Placed:
    """An engine's placement with its speed after a prompt."""

    engine: Engine
    candidate: Candidate
    decode: Speed  # tokens/s of the batch
    prompt: Speed
    shares: Mapping[str, float]  # of a decode step's time: cpu, gpu, copies or disk
    command: Command | None
    ratio: float = 1.0  # decode speed over that of the placement it is compared with, on the same requests
    label: str = ""  # weakest source of its numbers
    doubt: str = ""  # why it is not sure that the engine can run it

    @property
    def at_once(self) -> bool:
        """Whether it can be typed, surely runs, and needs nothing that has to be recorded first."""
        return self.command is not None and COUNTS not in self.command.words and not self.doubt


@dataclass(frozen=True)
class Others:
    """Placements of engines, fastest first, and why others have none."""

    placed: Sequence[Placed]
    without: Mapping[str, str]  # engines without a placement, and why
    routing: Routing
    also: Sequence[Routing] = field(default_factory=tuple)  # other routing that intervals cover

    def best(self, without: str = "") -> Placed | None:
        """Return the fastest that can be typed and runs at once, of other engines than one."""
        return next((one for one in self.placed if one.at_once and one.engine.name != without), None)


def routings(model: ModelSpec, asked: Asked) -> list[Routing]:
    """Choose routing of one batch, and other routing to compare with: recorded, with a model's statistics, or assumed."""
    if (first := given(model, asked)) is not None:
        return [first, *([] if first.origin == "recorded" else [*_made_up(model, asked)][:1])]
    for name, found in traces_of_shape(model) if asked.hit_rate is None else ():
        if found.origin == "recorded" and is_of(found, model) and len(chosen := _long_enough(found, asked)) >= asked.batch:
            return [Routing(name, found.origin, subset(found, sorted(chosen[: asked.batch])))]
    return [*_made_up(model, asked)]


def given(model: ModelSpec, asked: Asked) -> Routing | None:
    """Read the routing that a question names; None if it names none."""
    if asked.trace is None:
        return None
    if asked.hit_rate is not None:
        raise ConfigError(f"{PLACE}: expected --trace or --hit-rate, got both; a hit rate is for routing nobody recorded")
    found = Trace.read(find_trace(asked.trace))
    if not fits(found, model):
        raise TraceError(
            f"{PLACE}: --trace {asked.trace}: expected {shape_of(model)}, as {model.name} has, got {shape_of(found)}; leave "
            "--trace out or give another"
        )
    chosen = _long_enough(found, asked)
    if len(chosen) < asked.batch:
        compose(found, WorkloadSpec(batch_size=asked.batch, prompt_tokens=asked.prompt, decode_tokens=asked.decode))  # says why
        got = f"expected {asked.batch} requests of {asked.prompt} + {asked.decode} tokens, got {len(chosen)}"
        raise TraceError(f"{PLACE}: --trace {asked.trace}: {got}")
    return Routing(str(asked.trace), found.origin, subset(found, sorted(chosen[: asked.batch])))


def _long_enough(trace: Trace, asked: Asked) -> list[int]:
    """List requests that do: uncut prompts first, then by number."""
    requests = trace.requests
    length = requests.n_prompt + requests.prompt_offset
    will_do = np.flatnonzero((length >= asked.prompt) & (requests.n_decode >= asked.decode)).tolist()
    return sorted(will_do, key=lambda r: (int(length[r]) != asked.prompt, r))


def _made_up(model: ModelSpec, asked: Asked) -> Iterator[Routing]:
    """Make routing with a model's statistics at two seeds, or assumed routing at three lifts, the middle first."""
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import
    from moesim.trace.synthesis.lift import assumed

    name = fitted_parameters(model) if asked.hit_rate is None else None
    if name is not None:
        kinds = [(read_parameters(name), f"synthetic {name}" + ", seed 1" * seed, seed, "") for seed in (0, 1)]
    else:
        lift = lift_to_assume(model, asked.hit_rate)
        why = f"LRU lift {lift.why}" + ("; --hit-rate narrows it" if asked.hit_rate is None else "")
        sizes = model.n_layers, model.n_experts, model.top_k
        lifts = dict.fromkeys((lift.middle, lift.low, lift.high))
        kinds = [(assumed(*sizes, one), f"assumed, lift {one:g}", 0, why) for one in lifts]
    for parameters, label, seed, why in kinds:
        made = synthesize(
            parameters.replace(n_layers=min(model.n_layers, MADE)), n_requests=asked.batch, n_prompt=asked.prompt,
            n_decode=asked.decode, seed=seed, n_signal_requests=0,
        )  # fmt: skip
        yield Routing(label, "synthetic", repeated(made, model.n_layers), why)


def compare(
    setting: Setting, given: Mapping[Candidate, Engine], folder: Path, *,
    only: str = "", every: bool = False, jobs: int | None = None,
) -> Others:  # fmt: skip
    """Simulate each engine's placements with most on the GPU; the first of those `given` is what they are compared with.

    `only` one engine's. The interval of the best, with `every` of all, covers other routing, too.
    """
    first, *also = routings(setting.model, setting.asked)
    space = Space(setting, first)
    own = next(iter(given), None)
    able, without = _able(space, given, only)
    seen = _simulated(space, [*able], folder, jobs)
    order = sorted(seen, key=lambda one: (-_speed(seen[one][0]), one.gpu_bytes, one.family))
    base = None if own is None or own not in seen else _speed(seen[own][0])
    placed = [_placed(one, able[one], *seen[one], setting, base) for one in order]
    crossed = order if every else [one.candidate for one in placed if one.at_once and one.candidate is not own][:1]
    changes: dict[Candidate, list[float]] = {one: [] for one in crossed}
    for number, other in enumerate(also if crossed else ()):
        there = _simulated(Space(setting, other), crossed, folder / f"other{number}", jobs)
        for one in there:
            changes[one].append(_speed(there[one][0]) / _speed(seen[one][0]))
    for number, each in enumerate(placed):
        spread = max((abs(math.log(change)) for change in changes.get(each.candidate, ())), default=0.0)
        factors = each.decode.low / each.decode.value, each.decode.high / each.decode.value
        placed[number] = replace(each, decode=_ranged(each.decode.value, factors, spread))
    return Others(placed, without, first, also if every else ())


def _placed(
    one: Candidate, engine: Engine, row: Mapping[str, Any], hardware: HardwareProfile, setting: Setting, base: float | None
) -> Placed:
    """Judge a simulated placement."""
    shares = time_shares(row, hardware)
    value, prompt = _speed(row), setting.asked.batch * setting.asked.prompt / float(str(row["ttft_mean_ns"])) * 1e9
    doubt = unsupported(engine, setting)
    return Placed(
        engine, one, _ranged(value, shipped().factors(hardware, shares)),
        _ranged(prompt, shipped().factors(hardware, shares, prompt=True)), shares, _command(one, engine, setting),
        1.0 if base is None else value / base, str(row["source_label"]), doubt,
    )  # fmt: skip


def _able(space: Space, given: Mapping[Candidate, Engine], only: str) -> tuple[dict[Candidate, Engine], dict[str, str]]:
    """Find the placements of each engine, and why the others have none."""
    able, known = dict(given), {engine.name for engine in given.values()}
    without: dict[str, str] = {}
    shipped_ones, misfits = space.shipped()
    for engine in engines():
        if engine.name in known or only not in ("", engine.name):
            continue
        if (why := unsupported(engine, space.setting)) and not why.startswith(UNVERIFIED):
            without[engine.name] = why
            continue
        mine = [one for one in shipped_ones if one.family in engine.expresses]
        whys = [misfits[name] for name in engine.expresses if name in misfits]
        for family in (one for one in space.families if one.name in engine.expresses):
            numbers = space.feasible(family)
            placed = space.candidate(family, numbers[-1]) if numbers else None
            mine += [placed] if isinstance(placed, Candidate) else []
            whys += [] if numbers else [space.misfit(family)]
        able |= dict.fromkeys(mine, engine)
        if not mine:
            without[engine.name] = next(iter(whys), engine.cannot)
    return able, without


def unsupported(engine: Engine, setting: Setting) -> str:
    """Say why an engine cannot run the model on the machine, or why that is not sure; empty if it can."""
    return why_unsupported(engine.name, setting.model, setting.hardware, one_file_gguf=setting.asked.gguf is not None)


def _command(one: Candidate, engine: Engine, setting: Setting) -> Command | None:
    return next((each for each in commands(one, setting) if each.engine == engine.name), None)


def _simulated(space: Space, candidates: Sequence[Candidate], folder: Path, jobs: int | None) -> dict[Candidate, tuple[Any, Any]]:
    """Simulate candidates once each: their rows and machines; those that fail are left out."""
    if not candidates:
        return {}
    folder.mkdir(exist_ok=True)
    path = space.routing.trace.write(folder / "routing.safetensors")
    known = {written_key(str(path)): space.routing.trace}
    runs: list[tuple[Candidate, Experiment, Any]] = []
    for budget in dict.fromkeys(one.budget for one in candidates):
        some = [one for one in candidates if one.budget == budget]
        experiment = Experiment(parse_config(experiment_of(space.setting, [str(path)], some), PLACE), PLACE, known=known)
        runs += [(one, experiment, spec) for one, spec in zip(some, experiment.specs, strict=True)]
    with Workers(jobs or usable_cores()) as workers:
        done = run_experiment(Experiment.joined([run[1:] for run in runs]), workers=workers, may_fail=True)
    return {
        one: (outcome.row, spec.hardware)
        for (one, _, spec), outcome in zip(runs, done.outcomes, strict=True)
        if outcome.failure is None
    }


def _speed(row: Mapping[str, Any]) -> float:
    return float(str(row["decode_tokens_per_s"]))


def _ranged(value: float, factors: tuple[float, float], spread: float = 0.0) -> Speed:
    """Widen an interval by independent errors: half widths of logarithms add up as squares."""
    low, high = (math.hypot(math.log(one), spread) for one in factors)
    return Speed(value, value * math.exp(-low), value * math.exp(high))
