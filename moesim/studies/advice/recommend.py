"""From a question to an answer: an engine's best setting, what limits it, what would help, and the best other engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core.files import write_bytes
from moesim.core.progress import telling
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name
from moesim.hardware import load_hardware
from moesim.hardware.engines import same_engine
from moesim.studies.advice.candidates import Candidate
from moesim.studies.advice.engines import Command, Engine, commands, describe, engines
from moesim.studies.advice.llama_cpp import Gain, LlamaCpp, Place, Point, Quant, Speed
from moesim.studies.advice.others import Others, Placed, compare, given, unsupported
from moesim.studies.advice.question import ENGINE, PLACE, Asked, Setting, look_up
from moesim.studies.advice.support import UNVERIFIED
from moesim.studies.identify.bench import Bench, read_speeds
from moesim.studies.identify.identify import Identified, identify

_PROMPTS: Final = 2
"""Observed prompts that an answer rests on, those nearest its own: each is simulated for each constant."""
IDENTIFIED: Final = "identified.yaml"
"""The identified machine in the folder of an answer."""


@dataclass(frozen=True)
class Recommendation:
    """An answer; without a command nothing fits."""

    setting: Setting  # the question, looked up
    engine: Engine
    command: Command | None
    what: str  # where experts are, in words
    misfit: str = ""  # why nothing fits, or why the engine cannot run it
    doubt: str = ""  # why it is not sure that the engine can run it
    fits_with: str = ""  # memory with which it would fit, where it does not
    point: Point | None = None  # llama.cpp's setting
    paging: str = ""  # why pages of its file are read again from the disk
    # decode, begin, prompt: tokens/s of the batch with the context full, after the prompt alone, and of the prompts
    decode: Speed | None = None
    begin: Speed | None = None
    prompt: Speed | None = None
    limits: Mapping[str, float] = field(default_factory=dict)  # shares of a decode step's time
    points: Sequence[Point] = ()  # settings by context
    gains: Sequence[Gain] = ()
    quants: Sequence[Quant] = ()
    ubatches: Sequence[tuple[int, int, Place | None]] = ()  # context, ``-ub``, the first setting that fits
    placed: Placed | None = None  # another engine's placement
    others: Others | None = None  # placements of engines, on the same few requests
    all_engines: bool = False  # whether all of them were asked for
    identified: Identified | None = None
    profile: bytes = b""  # file of the identified machine

    @property
    def first_token_s(self) -> Speed | None:
        """Seconds until the first token of a prompt."""
        if self.prompt is None:
            return None
        return self.prompt.times(1 / self.setting.asked.batch / self.setting.asked.prompt).inverse


def recommend(
    asked: Asked,
    *,
    calibrate: Path | None = None,
    all_engines: bool = False,
    quick: bool = False,
    jobs: int | None = 1,
    progress: bool = False,
) -> Recommendation:
    """Answer a question; `quick` leaves out what has to be simulated, other engines above all."""
    engine = _engine(asked.engine)
    with telling(lines=True, enabled=progress) as tell, tempfile.TemporaryDirectory(prefix="moesim.") as name:
        folder, found, contents, doubt, bench = Path(name), None, b"", "", None
        if calibrate is not None:
            bench, asked = _speeds(calibrate, asked)
        setting = look_up(asked, folder)  # what is wrong with the question is known before the machine is identified
        if not setting.host_computes and not all_engines:
            got = f"expected a processor next to the GPU, got experts on {setting.host}; compare with --all-engines"
            raise ConfigError(f"{PLACE}: --hardware {setting.hardware.name}: {got}")
        given(setting.model, asked)  # a trace that is wrong, too
        if bench is not None:
            found, contents = _identified(asked, bench, setting, tell)
            asked = replace(asked, hardware=str(write_bytes(folder / IDENTIFIED, contents)))
            setting = look_up(asked, folder)
        if not setting.host_computes:
            answer = Recommendation(setting, engine, None, "", f"experts lie on {setting.host}, not in memory")
        elif (doubt := unsupported(engine, setting)) and not doubt.startswith(UNVERIFIED):
            answer = Recommendation(setting, engine, None, "", doubt)
        elif engine.name == ENGINE:
            tell("settings of llama.cpp")
            answer = _of_llama_cpp(LlamaCpp(setting, found), engine, quick=quick)
        else:
            answer = _of_another(setting, engine, folder, jobs)
        answer = replace(answer, doubt=doubt, identified=found, profile=contents, all_engines=all_engines)
        if (quick and not all_engines) or len(setting.gpus) != 1 or not (answer.command or doubt or all_engines):
            return answer
        tell("other engines")
        return replace(answer, others=compare(setting, _given(answer), folder / "others", every=all_engines, jobs=jobs))


def _given(answer: Recommendation) -> dict[Candidate, Engine]:
    """Return the answer's placement, and llama.cpp's best, which others are compared with."""
    point = answer.point or (LlamaCpp(answer.setting).best if answer.setting.host_computes else None)
    own = {} if answer.placed is None else {answer.placed.candidate: answer.engine}
    return own | ({} if point is None else {candidate_of(point, answer.setting): _engine(ENGINE)})


def _engine(named: str) -> Engine:
    """Find the engine that a question names, with or without a build."""
    known = {one.name: one for one in engines() if not one.unknown}
    found = next((one for name, one in known.items() if same_engine(named, name)), None)
    if found is None:
        raise ConfigError(f"{PLACE}: --engine: {unknown_name('engine', named, known)}")
    return found


def _speeds(file: Path, asked: Asked) -> tuple[Bench, Asked]:
    """Read observed speeds; without a machine, the question is of the one that the file names."""
    machine = None if asked.hardware is None else load_hardware(asked.hardware, f"{PLACE}: --hardware")
    try:
        bench = read_speeds(file, (), machine)
    except ConfigError:
        if not isinstance(asked.model, str) or asked.gguf is not None:
            raise
        bench = read_speeds(file, [asked.model], machine)  # rows that do not say what they are of
    if asked.model is None:
        named = list(dict.fromkeys(row.model for row in bench.rows))
        if len(named) != 1:
            got = f"expected one, as the speeds are of {', '.join(named)}; name it"
            raise ConfigError(f"{PLACE}: --model: {got}")
        asked = replace(asked, model=read_yaml_value(named[0], f"{file}: model") if named[0].startswith("{") else named[0])
    if machine is None and not bench.machine:
        raise ConfigError(f"{PLACE}: {file}: expected lines that name GPU or CPU, got none; name the machine with --hardware")
    return bench, asked if machine is not None else replace(asked, hardware={"parts": dict(bench.machine)})


def _identified(asked: Asked, bench: Bench, setting: Setting, tell: Any) -> tuple[Identified, bytes]:
    if not setting.has_gpu or len(setting.gpus) > 1:
        raise ConfigError(
            f"{PLACE}: --calibrate: expected a machine with one GPU, got {len(setting.gpus)}; leave --calibrate out"
        )
    decode = [row for row in bench.rows if row.kind == "decode"]
    prompts = sorted((row for row in bench.rows if row.kind == "prefill"), key=lambda row: abs(row.context - asked.prompt))
    rows = [*decode, *prompts[:_PROMPTS]] if not any(row.of for row in bench.rows) else bench.rows
    found = replace(identify(asked.hardware, rows, leave_out=False, intervals=False, tell=tell), bench=bench)
    raw = {**found.raw, "name": f"{found.predictor.machine.base.name}-identified"}
    return found, yaml.safe_dump(raw, sort_keys=False, width=120).encode()


def _of_llama_cpp(llama: LlamaCpp, engine: Engine, *, quick: bool) -> Recommendation:
    setting, best = llama.setting, llama.best
    quants = llama.quants()
    if best is None:
        why = llama.misfit(setting.context)
        more = None if setting.one_memory else llama.more_ram()
        speed = "" if more is None else "{0.value:.3g} ({0.low:.3g} to {0.high:.3g})".format(more[1].decode)
        fits = "" if more is None else f"{more[0]} GiB of RAM: {speed} tokens/s"
        return Recommendation(setting, engine, None, "", why, quants=quants, fits_with=fits)
    one = candidate_of(best, setting)
    command = next(each for each in commands(one, setting) if each.engine == engine.name)
    begin = llama.points([(best.place, setting.asked.prompt)])[0].decode
    return Recommendation(
        setting, engine, command, describe(one, setting), point=best, paging=llama.paging(best), decode=best.decode, begin=begin,
        prompt=llama.prompt(best.place), limits=llama.limits(best.place, best.context), points=llama.table(),
        gains=list(llama.gains(prompts=not quick)), quants=quants, ubatches=llama.by_ubatch(),
    )  # fmt: skip


def candidate_of(point: Point, setting: Setting) -> Candidate:
    """Describe a setting of llama.cpp as the placement of a comparison."""
    place, model = point.place, setting.model
    first = len(model.blocks) + 1 - place.number if place.whole else place.number
    on_gpu = model.n_experts * sum(block >= first for block in model.positions)
    family = "whole-layers" if place.whole else "expert-layers"
    return Candidate(family, place.number, place.policy, on_gpu, point.gpu_bytes, point.host_bytes)


def _of_another(setting: Setting, engine: Engine, folder: Path, jobs: int | None) -> Recommendation:
    """Take the fastest placement that another engine's flags express."""
    found = compare(setting, {}, folder / "own", only=engine.name, jobs=jobs)
    one = found.best() or next(iter(found.placed), None)
    if one is None:
        return Recommendation(setting, engine, None, "", found.without.get(engine.name, engine.cannot))
    return Recommendation(
        setting, engine, one.command, describe(one.candidate, setting), begin=one.decode, prompt=one.prompt,
        limits=dict(sorted(one.shares.items(), key=lambda item: -item[1])), placed=one,
    )  # fmt: skip
