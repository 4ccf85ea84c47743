"""Answers of the page: one simulated run at once; curves, policies and upgrades a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from moesim.errors import MoesimError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import run_one
from moesim.explore.question import LLAMA_CPP, PLACE, Question, Run, llama_of, run_of, setting_of
from moesim.explore.worker import Asking
from moesim.hardware.parts import counted
from moesim.metrics.naming import notes_of
from moesim.metrics.outcome import Outcome
from moesim.studies.advice.engines import describe
from moesim.studies.advice.llama_cpp import LlamaCpp, Point, Speed
from moesim.studies.advice.recommend import candidate_of
from moesim.studies.advice.vary import AS_IS, varied
from moesim.studies.identify.model_error import shipped, time_shares
from moesim.studies.whatif.limits import limits_of
from moesim.studies.whatif.settings import parse_vary
from moesim.trace import Trace

_TRACES: dict[str, Trace] = {}
"""Routing that was made up, by how it is written: the same for every answer."""
_MOST: Final = 24
"""Traces that are kept."""
_MEMORY: Final = {"accelerator": "GPU memory", "host": "RAM"}
NOTHING: Final = Speed(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Answer:
    """Speed of one run, and what takes its time."""

    run: Run
    decode: Speed | None  # of all users; None: it did not run
    prompt: Speed | None = None
    first_token_s: float = 0.0
    what: str = ""  # where experts are, in words
    memory: Sequence[tuple[str, int, int]] = ()  # device, peak and whole bytes
    limits: Mapping[str, float] = field(default_factory=dict)  # shares of a decode step's time, largest first
    notes: Sequence[str] = ()  # the routing, what was assumed, then those of the run
    misfit: str = ""  # why it did not run
    outcome: Outcome | None = None


def speed(question: Question, asking: Asking) -> Answer:
    """Simulate a question."""
    run = run_of(question)
    asking.check()
    experiment = Experiment(parse_config(run.raw, PLACE), PLACE, known=_TRACES)
    while len(_TRACES) > _MOST:
        del _TRACES[next(iter(_TRACES))]
    asking.check()
    spec = experiment.specs[0]
    outcome = run_one(experiment, spec, keep=True, progress=asking.check)
    row: Mapping[str, Any] = outcome.row
    if outcome.failure is not None:
        return Answer(run, None, misfit=str(outcome.failure).partition(" [policy=")[0])
    shares = time_shares(row, spec.hardware)
    decode, prompt = (
        _speed(row[f"{phase}_tokens_per_s"], shipped().factors(spec.hardware, shares, prompt=phase == "prefill"))
        for phase in ("decode", "prefill")
    )
    limits = limits_of(experiment, spec, outcome).shares
    used = [
        (_MEMORY.get(device.role, name), int(float(peak)), device.memory_bytes)
        for name, device in spec.hardware.devices.items() if (peak := row.get(f"peak_memory_bytes.{name}"))
    ]  # fmt: skip
    setting, model = setting_of(question), spec.model
    if run.place is None:
        what = f"{int(float(row['cache_slots_used'])):,} of {model.n_layers * model.n_experts:,} experts on the GPU"
    else:
        what = describe(candidate_of(Point(run.place, question.context, decode or NOTHING, 0, 0), setting), setting)
    assumed = setting.hardware.machine.get("assumed", "")
    notes = [run.note, *([f"assumed: {assumed}"] if assumed else []), *notes_of([str(row["notes"])])]
    return Answer(
        run, decode, prompt, float(row["ttft_mean_ns"]) / 1e9, what, used,
        dict(sorted(((name, share) for name, share in limits.items() if share >= 0.005), key=lambda one: -one[1])),
        notes, outcome=outcome,
    )  # fmt: skip


def _speed(value: Any, ends: tuple[float, float]) -> Speed | None:
    return None if value is None else Speed(float(value), float(value) * ends[0], float(value) * ends[1])


_AT_ONCE: Final = 6
"""Points of the curve that are predicted together."""


def curve(question: Question, asking: Asking) -> Iterator[tuple[float, list[Point]]]:
    """Yield the share that is done, and llama.cpp's speed by ``--n-cpu-moe`` so far; what fits depends on the whole context."""
    llama = llama_of(question)
    numbers, found = list(range(llama.first, llama.last + 1)) if llama.setting.has_gpu else [], list[Point]()
    for at in range(0, len(numbers), _AT_ONCE):
        asking.check()
        places = [llama.place(n, question.context) for n in numbers[at : at + _AT_ONCE]]
        speeds = llama.decode([llama.case(place, question.prompt + question.answer // 2) for place in places])
        found += [Point(place, 0, one, *llama.memory(place, question.context)) for place, one in zip(places, speeds, strict=True)]
        yield len(found) / len(numbers), list(found)


def side_by_side(question: Question, systems: Sequence[str], asking: Asking) -> Iterator[tuple[float, str, Answer | str]]:
    """Yield the share that is done, a system, and its answer or why it has none."""
    for number, system in enumerate(systems, 1):
        asking.check()
        found: Answer | str
        try:
            found = speed(replace(question, system=system, n_cpu_moe=question.n_cpu_moe if system == LLAMA_CPP else None), asking)
        except MoesimError as error:
            found = str(error)
        yield number / len(systems), system, found if isinstance(found, str) or found.decode else found.misfit


@dataclass(frozen=True)
class Upgrade:
    """The speed with one change."""

    name: str
    decode: Speed | None
    prompt: Speed | None = None
    what: str = ""  # the setting then, or why there is none


def upgrades(question: Question, texts: Sequence[str], asking: Asking) -> Iterator[tuple[float, Upgrade]]:
    """Yield the share that is done, and llama.cpp's best setting on the machine as it is, then with each change."""
    if not texts:
        yield from _usual_upgrades(question, asking)
        return
    variations = [together for text in texts for together in parse_vary(text)]
    for number, one in enumerate(varied(question.asked, variations), 1):
        asking.check()
        if one.point is None:
            yield number / (len(variations) + 1), Upgrade(one.name, None, what=f"does not fit: {one.misfit}")
        else:
            yield number / (len(variations) + 1), Upgrade(one.name, one.point.decode, one.prompt, one.point.place.title)


_ROWS: Final = 10
"""Usual upgrades at most, for the share that is done."""


def _usual_upgrades(question: Question, asking: Asking) -> Iterator[tuple[float, Upgrade]]:
    """Yield what would help in the words of `moesim recommend`, then more RAM and a second GPU."""
    llama = llama_of(question)
    setting, best = llama.setting, llama.best
    own = _upgrade(AS_IS, llama, best)
    yield 1 / _ROWS, own
    if own.decode is not None and own.prompt is not None:
        for number, gain in enumerate(llama.gains(), 2):
            asking.check()
            decode, prompt = own.decode.times(gain.decode), own.prompt.times(gain.prompt or 1.0)
            yield number / _ROWS, Upgrade(gain.change, decode, prompt, own.what if gain.place is None else gain.place.title)
    if setting.one_memory:
        return
    if (more := llama.more_ram()) is not None:
        yield 1 - 1 / _ROWS, _upgrade(f"{more[0]} GiB of RAM", llama, more[1])
    if len(setting.gpus) == 1 and not question.profile:
        two = llama_of(replace(question, gpu=f"2x {counted(question.gpu)[1]}"))
        yield 1.0, _upgrade("a second GPU of this kind", two, two.best)


def _upgrade(name: str, llama: LlamaCpp, best: Point | None) -> Upgrade:
    if best is None:
        return Upgrade(name, None, what=f"does not fit: {llama.misfit(llama.setting.context)}")
    return Upgrade(name, best.decode, llama.prompt(best.place), best.place.title)
