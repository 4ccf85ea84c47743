"""Advice for a machine with observed speeds, and llama.cpp's speed over ``--n-cpu-moe``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from moesim.core.table import Format, render, render_records
from moesim.core.units import digits
from moesim.errors import ConfigError
from moesim.policies.systems.llama_cpp import own_bytes
from moesim.studies.advice.candidates import gib
from moesim.studies.advice.question import Setting
from moesim.studies.identify.cases import Case, needed_bytes, read_setting
from moesim.studies.identify.identify import Identified
from moesim.studies.identify.observations import observation
from moesim.studies.identify.predictor import Memo, Predictor
from moesim.studies.identify.report import remarks

OBSERVED: Final = "llama.cpp"
"""The engine whose settings and costs the curve is of."""
IDENTIFIED: Final = "identified.yaml"
"""The identified machine in the folder of an advice."""
UBATCHES: Final = (512, 1024, 2048)
CONTEXTS: Final = (1, 4, 16)
"""Times the context that was asked for."""
_POINTS: Final = 9
_SAME_BITS: Final = 0.03
"""Experts whose bits differ by no more than this share are as fast as one another in a figure."""


@dataclass(frozen=True)
class Point:
    """One setting of llama.cpp."""

    # n_cpu_moe, context, ubatch: layers whose experts are on the CPU; tokens of each request in the KV cache; most tokens of a
    # prefill step
    n_cpu_moe: int
    context: int
    ubatch: int
    # speed, low, high: tokens/s of the whole batch when the context is full, and its interval of 90 %
    speed: float
    low: float
    high: float
    gpu_bytes: int  # what the GPU must hold: weights, KV cache, the software's workspace and compute buffers
    fits: bool


def _workspace(setting: Setting, ubatch: int) -> int:
    """Count the engine's own memory on the GPU for so many rows, at least the profile's."""
    backend = setting.hardware.machine.get("backend", "cuda")
    return max(setting.hardware.devices[setting.gpu].workspace_bytes, own_bytes(setting.model, ubatch, backend))


def curve(setting: Setting, found: Identified) -> list[Point]:
    """Predict llama.cpp by context, ``-ub`` and ``--n-cpu-moe``: the range, the first to fit."""
    model = setting.model
    least, most = model.positions[0], model.positions[-1] + 1
    room = found.predictor.machine.with_room
    copied = model.n_experts * max(model.expert_bytes(layer) for layer in range(model.n_layers))  # for large batches
    points: list[Point] = []
    for times in CONTEXTS:
        context = times * setting.context
        needs = [needed_bytes(_case(setting, n, context), room, setting.gpu) or 0 for n in (least, most)]  # at the first -ub
        each = (needs[0] - needs[1]) / max(1, model.n_layers)  # experts of a layer, which are alike
        chosen: dict[int, set[int]] = {}
        memory: dict[tuple[int, int], int] = {}
        for ubatch in UBATCHES:
            for n in range(least, most + 1):
                buffers = _workspace(setting, ubatch) - _workspace(setting, UBATCHES[0]) + (copied if n > least else 0)
                memory[ubatch, n] = round(needs[0] - each * bisect_left(model.positions, n)) + buffers
            first = next((n for n in range(least, most + 1) if memory[ubatch, n] <= setting.vram_bytes), None)
            grid = set(np.linspace(least, most, _POINTS).round().astype(int).tolist())
            near = set() if first is None else {n for n in (first - 1, first) if n >= least}
            chosen[ubatch] = grid | near
        speeds = _speeds(setting, found, sorted(set().union(*chosen.values())), context)
        points += [
            Point(n, context, ubatch, *speeds[n], memory[ubatch, n], memory[ubatch, n] <= setting.vram_bytes)
            for ubatch in UBATCHES
            for n in sorted(chosen[ubatch])
        ]
    return points


def _case(setting: Setting, n: int, context: int) -> Case:
    model = setting.model
    words = f"n_cpu_moe={n} op_offload=false"
    one = observation(
        {"row": str(n), "model": model.name, "setting": words, "batch": setting.asked.batch, "context": context, "decode": 1,
         "value": 1.0, "unit": "tokens/s"}
    )  # fmt: skip
    return Case(one, model, setting.model_ref, "", read_setting(words, model, "curve"), True, "")


def _speeds(setting: Setting, found: Identified, numbers: Sequence[int], context: int) -> dict[int, tuple[float, float, float]]:
    cases = [_case(setting, n, context) for n in numbers]
    predictor = Predictor(found.predictor.machine, cases, Memo())
    told = {}
    for n, value, wide in zip(numbers, *found.posterior.at(predictor), strict=True):
        speed = setting.asked.batch / math.exp(value) * 1e9
        told[n] = (speed, speed * math.exp(-wide), speed * math.exp(wide))
    return told


def best(points: Sequence[Point], context: int, ubatch: int) -> Point | None:
    """Choose the fastest setting that fits; None if none does."""
    fitting = [one for one in points if one.fits and (one.context, one.ubatch) == (context, ubatch)]
    return max(fitting, key=lambda one: one.speed, default=None)


def curve_text(points: Sequence[Point], setting: Setting, form: Format) -> str:
    """Write speed by layers and context, the cliff by context and ``-ub``, and the best setting."""
    contexts = list(dict.fromkeys(one.context for one in points))
    numbers = sorted({one.n_cpu_moe for one in points if one.ubatch == UBATCHES[0]})
    at = {(one.n_cpu_moe, one.context): one for one in points if one.ubatch == UBATCHES[0]}
    cells = [[str(n), *(_cell(at.get((n, context))) for context in contexts)] for n in numbers]
    head = ["--n-cpu-moe", *(f"tok/s at {context} tokens" for context in contexts)]
    cliff = []
    for context in contexts:
        for ubatch in UBATCHES:
            one = best(points, context, ubatch)
            told = ["-", "nothing fits", "-"] if one is None else [str(one.n_cpu_moe), _speed(one), gib(one.gpu_bytes)]
            cliff.append([str(context), str(ubatch), *told])
    first = best(points, contexts[0], UBATCHES[0])
    lines = [
        _best_line(first, setting),
        "Speed when the context is full, on the identified machine, with its interval of 90 %. What does not fit needs more than "
        f"the GPU's memory at -ub {UBATCHES[0]}: speed falls 2 to 5 times, or loading fails.",
        render(head, cells, form, head),
        "The least --n-cpu-moe that fits; KV cache and compute buffers grow with context and -ub.",
        render(["context", "-ub", "--n-cpu-moe", "tok/s", "on the GPU"], cliff, form, ["context", "-ub", "--n-cpu-moe"]),
    ]
    title = f"{OBSERVED}, whose speeds were observed"
    return f"## {title}\n\n" + "\n".join(lines) if form is Format.MD else f"{title}\n\n" + "\n".join(lines)


def _best_line(first: Point | None, setting: Setting) -> str:
    if first is None:
        return f"Best of --n-cpu-moe: nothing fits at {setting.context} tokens and -ub {UBATCHES[0]}.\n"
    return (
        f"Best of --n-cpu-moe: -ngl 99 --n-cpu-moe {first.n_cpu_moe} -c {first.context * setting.asked.batch} "
        f"-ub {first.ubatch}: {digits(first.speed)} tokens/s when the context is full, {digits(first.low)} to "
        f"{digits(first.high)} (90 %, by the observed speeds). Placements for any engine, below, may hold single experts of a "
        "layer, which this option cannot; their intervals do not use what these rows share with the observed ones.\n"
    )


def _cell(one: Point | None) -> str:
    if one is None:
        return "-"
    return _speed(one) if one.fits else "does not fit"


def _speed(one: Point) -> str:
    return f"{digits(one.speed)} ({digits(one.low)} to {digits(one.high)})"


def curve_records(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the points for programs."""
    return [
        {"n_cpu_moe": one.n_cpu_moe, "context": one.context, "ubatch": one.ubatch, "tokens_per_s": one.speed, "low": one.low,
         "high": one.high, "gpu_bytes": one.gpu_bytes, "fits": one.fits}
        for one in points
    ]  # fmt: skip


def measured_records(points: Sequence[Point], setting: Setting, found: Identified) -> list[dict[str, Any]]:
    """Return observed decode speeds at the same bits and batch, at the nearest context."""
    contexts = sorted({one.context for one in points})
    records = []
    for one in found.predictions:
        case, row = one.case, one.case.observation
        same = (case.model.name, row.batch, row.kind) == (setting.model.name, setting.asked.batch, "decode")
        apart = abs(math.log((case.model.expert_bits or 16) / (setting.model.expert_bits or 16)))
        if not same or row.of or case.setting.family != "n_cpu_moe" or apart >= _SAME_BITS:
            continue
        tokens = max(1, case.mean_context)
        records.append(
            {"row": case.name, "n_cpu_moe": case.setting.policy.get("n_cpu_moe", 0),
             "context": min(contexts, key=lambda context: abs(math.log(context / tokens))), "tokens": tokens,
             "tokens_per_s": row.batch / math.exp(row.log_time) * 1e9, "status": one.status}
        )  # fmt: skip
    return records


def curve_pictures(points: Sequence[Point], setting: Setting, found: Identified) -> dict[str, bytes]:
    """Draw the curve; gives files by name."""
    import pandas as pd

    from moesim.plots.identified import MEASURED, calibrated_curve  # Matplotlib takes a second to import
    from moesim.plots.style import pictures

    rows = measured_records(points, setting, found)
    told = [
        f"{found.predictor.machine.base.name}, identified",
        setting.model.name,
        f"{setting.model.expert_bits:g} bits",
        f"batch {setting.asked.batch}",
    ]
    if rows:
        tokens = [row["tokens"] for row in rows]
        low, high = min(tokens), max(tokens)
        told.append(f"measured with {low}{f' to {high}' if high > low else ''} tokens in the context")
    figure = calibrated_curve(
        pd.DataFrame(curve_records(points)), pd.DataFrame(rows, columns=None if rows else list(MEASURED)), " · ".join(told)
    )
    return pictures(figure, "curve")


def check_machine(setting: Setting) -> None:
    """Refuse machines without a processor next to the GPU. Raises `ConfigError`."""
    if not setting.host_computes:
        raise ConfigError("recommend: --calibrate: expected a processor next to the GPU, got a disk; leave --calibrate out")


@dataclass(frozen=True)
class Observed:
    """Results of observed speeds."""

    identified: Identified
    profile: bytes  # file of the machine that placements were searched on: of its GPU the engine's buffers are taken
    setting: Setting  # the question, on the machine before that
    points: list[Point]  # settings of llama.cpp

    def text(self, form: Format, *, pictured: bool = False) -> str:
        """Write it for people; in Markdown with the picture of the folder, if wanted."""
        mark = "- " if form is Format.MD else ""
        image = "![speed over --n-cpu-moe by context](curve.png)\n\n" if pictured else ""
        said = "".join(f"{mark}{one}\n" for one in remarks(self.identified, []))
        return f"{curve_text(self.points, self.setting, form)}\n{image}{said}"

    def values(self) -> dict[str, Any]:
        return {"identified": remarks(self.identified, []), "curve": curve_records(self.points)}

    def files(self) -> dict[str, bytes]:
        table = render_records(curve_records(self.points), Format.CSV).encode()
        return {IDENTIFIED: self.profile, "curve.csv": table, **curve_pictures(self.points, self.setting, self.identified)}
