"""An answer on one screen: at most 40 lines of 80 columns; more of it, and plain values for programs."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import yaml

from moesim import __version__
from moesim.core.files import OutputFolder
from moesim.core.table import Format, render, render_records
from moesim.core.units import digits
from moesim.hardware.rates import BY_RULES
from moesim.metrics.naming import model_label
from moesim.studies.advice.candidates import gib
from moesim.studies.advice.llama_cpp import UBATCHES, Gain, Place, Point, Quant, Speed, file_bytes
from moesim.studies.advice.others import Placed
from moesim.studies.advice.question import ENGINE, PREFILL_CHUNK, model_yaml
from moesim.studies.advice.recommend import IDENTIFIED, Recommendation
from moesim.studies.advice.support import formats_of
from moesim.studies.identify.model_error import LEVEL, shipped_rows
from moesim.studies.identify.report import remarks

WIDTH: Final = 79
LINES: Final = 40
NOTHING: Final = 1.03
"""A change that gives less than this factor does nothing."""
COVERAGE: Final = (29, 11, 0.97)
"""Recommended settings of public sweeps, their machines, and the share whose measured speed was in its interval of 90 %, each
with its machine left out: docs/background/public_coverage.csv."""
FROM_PARTS: Final = (169, 16, 0.90)
"""Public speeds of machines that the names of their parts describe, and the share inside: docs/guide/questions.md."""
OBSERVED: Final = (129, 10, 0.88)
"""The same of speeds of machines of which two others were observed."""


ANSWER: Final = "recommendation.json"


def output(answer: Recommendation, form: Format, *, long: bool = False) -> str:
    """Write an answer in a format; `long` with all that is known."""
    if form is Format.JSON:
        return json.dumps(document(answer), indent=2) + "\n"
    if form in (Format.TABLE, Format.MD):
        return text(answer, form, long=long)
    return render_records(rows_of(answer), form)


def text(answer: Recommendation, form: Format = Format.TABLE, *, long: bool = False, pictured: bool = False) -> str:
    """Write an answer for people."""
    above = [_head(answer) + (_nothing_fits(answer) if answer.command is None else _command(answer))]
    above += [] if answer.command is None else [_speeds(answer)]
    below = [_gains(answer) + _quants(answer), _other(answer) + (_sure(answer) if answer.command is not None else "")]
    others = "\n".join(part for part in (*above, *below) if part)
    table = _table(answer, LINES - others.count("\n") - 3)  # a line between, two of headings
    found = "\n".join(part for part in (*above, table, *below, _long(answer) if long else "") if part)
    if form is Format.MD:
        found = f"```text\n{found}```\n" + ("\n![speed over --n-cpu-moe by context](curve.png)\n" if pictured else "")
    if not answer.all_engines:
        return found
    n = len(answer.setting.gpus)
    why = _wrapped(f"All engines are compared on a machine with one GPU; this one has {n}.", "  ")
    return found + "\n" + (why if answer.others is None else _all_engines(answer, form))


def _wrapped(line: str, indent: str = "") -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _head(answer: Recommendation) -> str:
    setting = answer.setting
    name = f"{setting.model.name} {setting.quant}" if setting.quant else model_label(setting.model)
    room = f"{gib(setting.ram_bytes)} RAM" if setting.host_computes else f"experts on {setting.host}"
    if setting.has_gpu and not setting.one_memory:
        n = len(setting.gpus)
        room = f"{f'{n} x ' if n > 1 else ''}{gib(setting.vram_bytes)} GPU, {room}"
    return _wrapped(f"{name}, {gib(file_bytes(setting.model))}, on {setting.hardware.name} ({room}), {answer.engine.name}", "  ")


def _command(answer: Recommendation) -> str:
    assert answer.command is not None
    lines, line = [], ""
    for phrase in _phrases(answer.command.words):
        if line and len(line) + len(phrase) > WIDTH - len("       \\ "):
            lines.append(line)
            line = ""
        line += (" " if line else "") + phrase
    joined = " \\\n      ".join([*lines, line])
    first = f"  {joined}\n"
    if answer.doubt:
        first += _wrapped(f"  {answer.doubt}", "  ")
    if answer.paging:
        first += _wrapped(f"  {answer.paging}", "  ")
    if answer.command.condition:
        first += _wrapped(f"  if {answer.command.condition}", "  ")
    return first


def _phrases(words: Sequence[str]) -> list[str]:
    """Join each option with its value, which stay on one line."""
    found: list[str] = []
    for word in words:
        if found and found[-1].startswith("-") and " " not in found[-1] and not word.startswith("-"):
            found[-1] += f" {shlex.join([word])}"
        else:
            found.append(shlex.join([word]))
    return found


def _nothing_fits(answer: Recommendation) -> str:
    context = answer.setting.context
    if answer.doubt:
        return _wrapped(f"{answer.misfit}: --engine names another", "  ")
    fits = [one for one in answer.quants if one.point is not None and not one.paging]
    lines = _wrapped(f"It does not fit with {context:,} tokens: {answer.misfit}.", "  ")
    if fits:
        lines += _wrapped(f"{fits[0].name} would ({gib(fits[0].n_bytes)}): --bits {fits[0].name}", "  ")
    else:
        lines += "" if answer.fits_with else _wrapped("A shorter --context, fewer bits (--bits) or a smaller model may.", "  ")
    lines += _wrapped(f"It fits with {answer.fits_with}.", "  ") if answer.fits_with else ""
    return lines


def _range(speed: Speed, n: int = 3) -> str:
    return f"{digits(speed.value, n)} ({digits(speed.low, n)} to {digits(speed.high, n)})"


def _speeds(answer: Recommendation) -> str:
    setting, asked = answer.setting, answer.setting.asked
    lines = []
    if answer.point is not None and answer.point.place == Place(False, setting.model.positions[0]):
        lines.append("all of it on the GPU: do not offload")
    else:
        lines.append(answer.what)
    batch = f" of {asked.batch} requests" if asked.batch > 1 else ""
    if answer.decode is not None:
        lines.append(f"decode      {_range(answer.decode)} tokens/s{batch}, {setting.context:,} tokens in context")
    if answer.begin is not None:
        lines.append(f"            {_range(answer.begin)} tokens/s{batch} after a prompt of {asked.prompt:,}")
    first = answer.first_token_s
    if answer.prompt is not None and first is not None:
        lines.append(f"prompt      {_range(answer.prompt)} tokens/s; first token {_range(first, 2)} s")
    shares = [f"{name} {100 * share:.0f} %" for name, share in answer.limits.items() if share >= 0.05]
    lines.append(f"limited by  {', '.join(shares)}{_tied(answer)}")
    return "".join(_wrapped(line, "            ") for line in lines)


_ALONE: Final = {"CPU compute": "CPU 1.5 times as fast, same RAM", "CPU memory": "RAM 1.5 times as fast"}


def _tied(answer: Recommendation) -> str:
    """Say where CPU and RAM take about as long, so that a share is not what one of them alone would save."""
    gains = {one.change: one.decode for one in answer.gains}
    for name, change in _ALONE.items():
        share = answer.limits.get(name, 0.0)
        if share >= 0.2 and change in gains and gains[change] - 1 < (1 / (1 - share / 3) - 1) / 2:
            return "; reading and computing on the CPU take about as long, so only both faster help in full"
    return ""


def _table(answer: Recommendation, most: int) -> str:
    """Write settings by context; of more than `most` the recommended one stays, then the last and the first."""
    points = answer.points
    if len(points) < 2:
        return ""
    contexts = list(dict.fromkeys(one.context for one in points))
    at = {(one.place.number, one.context): one for one in points}
    numbers = sorted({one.place.number for one in points})
    best = [] if answer.point is None else [answer.point.place.number]
    numbers = sorted([*dict.fromkeys([*best, numbers[-1], *numbers])][: max(2, most)])
    whole = points[0].place.whole
    head = [f"{'-ngl' if whole else '--n-cpu-moe'}", *(f"{context:,} tokens" for context in contexts)]
    rows = [[str(n), *(_cell(at.get((n, context))) for context in contexts)] for n in numbers]
    table = [line.rstrip() for line in render(head, rows, Format.TABLE, head).splitlines()]
    return "\n".join(["tokens/s, context full; -: beyond memory, loading fails or is 2 to 5x slower", *table]) + "\n"


def _cell(one: Point | None) -> str:
    return "-" if one is None or one.misfit else _range(one.decode, 2)


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):+.0f} %"


def _gains(answer: Recommendation) -> str:
    some = [one for one in answer.gains if max(one.decode, one.prompt or 1.0) >= NOTHING]
    none = [one.change for one in answer.gains if one not in some]
    if not answer.gains:
        return ""
    wide = max((len(one.change) for one in some), default=0)
    lines = [f"  {one.change:<{wide}}  decode {_percent(one.decode):>6}{_of_prompt(one)}{_moved(one)}" for one in some]
    of = "" if all(one.prompt is not None for one in answer.gains) else " for decoding"  # prompts were not simulated
    lines += [f"  no gain{of}: {'; '.join(none)}"] if none else []
    lines += ["  not varied with several GPUs: PCIe, GPU, memory of a GPU"] if len(answer.setting.gpus) > 1 else []
    return "".join(_wrapped(line, "    ") for line in ["would help" if some else "would not help", *lines])


def _of_prompt(one: Gain) -> str:
    return "" if one.prompt is None else f"  prompt {_percent(one.prompt):>6}"


def _moved(one: Gain) -> str:
    return "" if one.place is None else f"  {one.place.title}"


def _quants(answer: Recommendation) -> str:
    if len(answer.quants) < 2:
        return ""
    wide = max(len(one.name) for one in answer.quants)
    lines = [f"  {one.name:<{wide}}  {gib(one.n_bytes):>8}  {_best_of(one)}" for one in answer.quants]
    return "".join(_wrapped(line, "    ") for line in ["by quantisation", *lines])


def _best_of(one: Quant) -> str:
    if one.point is None:
        return f"does not fit: {one.misfit.partition(':')[0]}"
    return f"{_range(one.point.decode)} tokens/s, {one.point.place.title}{', pages read again' if one.paging else ''}"


def _other(answer: Recommendation) -> str:
    others = answer.others
    other = None if others is None else others.best(answer.engine.name)
    if other is None or others is None:
        why = next(iter(others.without.values()), "") if others is not None else ""
        return _wrapped(f"no other engine runs it at once: {why}; --long says more", "  ") if why else ""
    gain = (
        f"x{other.ratio:.2f}, {_range(other.decode)} tokens/s at {answer.setting.asked.prompt}"
        if other.ratio >= NOTHING
        else f"not faster (x{other.ratio:.2f})"
    )
    words = f"best other engine: {other.engine.name} ({placement(other)}), {gain}"
    if other.command is not None and other.ratio >= NOTHING:
        words += f"; if {other.command.condition}" if other.command.condition else ""
        words += f"; reads {', '.join(formats_of(other.engine.name))}"
    return _wrapped(words + ("" if answer.all_engines else "; --all-engines compares"), "  ")


def placement(one: Placed) -> str:
    """Name an engine's placement."""
    return "all on the GPU" if one.candidate.family == "all-gpu" else one.candidate.title


_HEADINGS: Final = ("engine", "placement", "on GPU", "GPU", "RAM", "first token s", "tokens/s", "x this")


def _all_engines(answer: Recommendation, form: Format) -> str:
    """Write the placements of all engines, with what to type."""
    others, setting = answer.others, answer.setting
    assert others is not None
    asked, every = setting.asked, setting.model.n_layers * setting.model.n_experts
    on_gpu = [max(one.candidate.gpu_experts, one.candidate.slots) for one in others.placed]  # once caches are full
    rows = [
        [
            one.engine.name, placement(one), f"{100 * n / every:.0f} %", gib(one.candidate.gpu_bytes),
            gib(one.candidate.host_bytes), digits(asked.batch * asked.prompt / one.prompt.value, 2), _range(one.decode),
            f"{one.ratio:.2f}",
        ]
        for one, n in zip(others.placed, on_gpu, strict=True)
    ]  # fmt: skip
    also = f"; intervals cover {' and '.join(one.label for one in others.also)}" if others.also else ""
    why = f" ({others.routing.why})" if others.routing.why else ""
    lines = [
        f"All engines after a prompt of {asked.prompt:,}, {asked.decode} tokens decoded; caches begin empty; each placement has "
        f"most on the GPU. Routing: {others.routing.label}{why}{also}.",
    ]
    typed = []
    for one in others.placed:
        if one.command is not None:
            typed += [f"{one.engine.name} ({one.engine.checked}), {placement(one)}:", f"  {one.command}"]
            typed += [f"  if {one.command.condition}"] if one.command.condition else []
            typed += [f"  {line}" for line in (one.command.remark, one.doubt) if line]
        elif one.engine.unknown:
            typed.append(f"{one.engine.name}, {placement(one)}: {one.engine.unknown}")
    typed += [f"{name}: {why}" for name, why in others.without.items()]
    commands = "".join(f"{line}\n" for line in typed)
    fenced = f"```text\n{commands}```\n" if form is Format.MD else commands
    return "".join(_wrapped(line) for line in lines) + "\n" + render(_HEADINGS, rows, form, _HEADINGS[2:]) + "\n" + fenced


def _sure(answer: Recommendation) -> str:
    n, machines, share = COVERAGE if answer.identified is None else OBSERVED
    what = "recommended settings" if answer.identified is None else "speeds after two observed ones"
    whose = "machines that had no part in them"
    if answer.identified is None and answer.setting.hardware.description.endswith(BY_RULES):
        (n, machines, share), what, whose = FROM_PARTS, "public speeds", "machines known by their parts alone"
    measured = (
        f"of {n} {what} on {machines} {whose} {100 * share:.0f} % were measured inside"
        if answer.point is not None
        else f"as wide as those of {ENGINE} have to be, as no public speeds of {answer.engine.name} were compared"
    )
    assumed = answer.setting.hardware.machine.get("assumed", "")
    lines = [f"assumed: {assumed}"] if assumed else []
    if answer.point is not None and any(one.role == "storage" for one in answer.setting.hardware.devices.values()):
        lines.append("the disk is left out: llama.cpp computes from RAM")
    lines += [f"how sure: intervals of {100 * LEVEL:.0f} %; {measured}. Rests on {rates(answer)}."]
    bench = None if answer.identified is None else answer.identified.bench
    if bench is not None:
        used = sum(one.status == "used" for one in answer.identified.predictions) if answer.identified is not None else 0
        lines.append(f"observed: {bench.n_read} rows read, {used} used; --long says why not the others")
    if answer.point is not None and len(answer.setting.gpus) == 1:  # --calibrate takes no other machine
        place, numbers = answer.point.place, _to_measure(answer)
        if not numbers:
            return "".join(_wrapped(line, "  ") if line.startswith(("how", "assumed")) else f"{line}\n" for line in lines)
        option = f"-ngl {place.number}" if place.whole else f"-ngl 99 -ncmoe {','.join(map(str, numbers))}"
        file = answer.setting.asked.gguf.name if answer.setting.asked.gguf else "MODEL.gguf"
        lines.append("to be surer, run this and ask again with --calibrate speeds.md:")
        lines.append(f"  llama-bench -m {file} {option} -p {PREFILL_CHUNK} -n 128 > speeds.md")
    return "".join(_wrapped(line, "  ") if line.startswith(("how", "assumed")) else f"{line}\n" for line in lines)


def _to_measure(answer: Recommendation) -> list[int]:
    """List the numbers of the setting and of all experts on the CPU, but for those that were observed or do not fit."""
    assert answer.point is not None
    setting, place, last = answer.setting, answer.point.place, answer.setting.model.positions[-1] + 1
    key = "ngl" if place.whole else "n_cpu_moe"
    seen = set()
    for one in () if answer.identified is None else answer.identified.predictions:
        case = one.case
        if case.model.name == setting.model.name and case.setting.family == key and one.status in ("used", "check"):
            seen.add(case.setting.policy.get("n_gpu_layers" if place.whole else "n_cpu_moe", 0))
    wrong = {one.place.number for one in answer.points if one.misfit and one.context <= setting.context and not place.whole}
    wanted = (place.number,) if place.whole else (place.number, last)
    return [n for n in dict.fromkeys(wanted) if n not in seen and (n == place.number or n not in wrong)]


_RATES: Final = {"RAM": "devices.{host}.memory_bytes_per_s", "GPU": "devices.{gpu}.memory_bytes_per_s"}


def rates(answer: Recommendation) -> str:
    """Name the rates that an answer rests on, with their labels."""
    setting, found = answer.setting, []
    for name, pattern in _RATES.items():
        number = setting.hardware.numbers.get(pattern.format(host=setting.host, gpu=setting.gpu))
        if number is not None and not (name == "GPU" and not setting.has_gpu):
            ends = number.interval
            wide = "" if ends is None else f", {digits(ends[0] / 1e9)} to {digits(ends[1] / 1e9)}"
            name = "GPU, as kernels read," if name == "GPU" else name
            found.append(f"{name} {digits(float(str(number.value)) / 1e9)} GB/s ({number.source}{wide})")
    return ", ".join(found)


def _long(answer: Recommendation) -> str:
    """Write what does not fit on the screen."""
    lines = [f"{answer.engine.name} {answer.engine.checked}, flags of {answer.engine.date}"]
    if answer.command is not None and answer.command.remark:
        lines.append(answer.command.remark)
    if answer.point is not None:
        lines.append(f"memory: {gib(answer.point.gpu_bytes)} on the fullest GPU, {gib(answer.point.host_bytes)} of RAM")
    if answer.others is not None and not answer.all_engines:
        lines += [f"{name}: {why}" for name, why in answer.others.without.items()]
        shown = [one for one in answer.others.placed[:3] if one.command and one.engine != answer.engine]
        lines += [f"{one.engine.name}: {one.command}" for one in shown]
    if answer.identified is not None:
        lines += [*(answer.identified.bench.lines() if answer.identified.bench else ()), *remarks(answer.identified, [])]
    lines.append(answer.setting.hardware.description.strip())
    found = "".join(_wrapped(f"- {' '.join(line.split())}", "  ") for line in lines if line)
    cells = [
        [f"{context:,}", str(ubatch), "nothing fits" if place is None else place.title]
        for context, ubatch, place in answer.ubatches
    ]
    if cells:
        found += "\n" + render(["context", "-ub", "the most on the GPU that fits"], cells, Format.TABLE, ["context", "-ub"])
    return found


def rows_of(answer: Recommendation) -> list[dict[str, Any]]:
    """List settings of an answer, its own first, as rows of a table."""
    points = ([] if answer.point is None else [answer.point]) + [one for one in answer.points if one != answer.point]
    return [point_record(one) for one in points]


def point_record(one: Point) -> dict[str, Any]:
    """Return a setting as one line of a table."""
    return {
        "options": one.place.title, "number": one.place.number, "whole_layers": one.place.whole,
        "context_tokens": one.context, "tokens_per_s": one.decode.value, "low_tokens_per_s": one.decode.low,
        "high_tokens_per_s": one.decode.high, "gpu_bytes": one.gpu_bytes, "host_bytes": one.host_bytes, "fits": not one.misfit,
    }  # fmt: skip


def document(answer: Recommendation) -> dict[str, Any]:
    """Return an answer as plain values, complete."""
    setting, command, others = answer.setting, answer.command, answer.others
    return {
        "moesim": __version__,
        "asked": asdict(setting.asked) | ({} if answer.profile is None else {"hardware": IDENTIFIED}),
        "model": {"name": setting.model.name, "quantisation": setting.quant, "bytes": file_bytes(setting.model)},
        "hardware": {
            "name": setting.hardware.name, "labels": list(setting.hardware.labels), "gpus": setting.gpus, "host": setting.host,
            "vram_bytes": setting.vram_bytes, "ram_bytes": setting.ram_bytes,
        },
        "engine": answer.engine.name, "checked": answer.engine.checked,
        "command": None if command is None else str(command), "condition": "" if command is None else command.condition,
        "what": answer.what, "misfit": answer.misfit,
        "fits_with": answer.fits_with, "paging": answer.paging, "doubt": answer.doubt, "context_tokens": setting.context,
        "decode_tokens_per_s": _plain(answer.decode), "decode_tokens_per_s_after_prompt": _plain(answer.begin),
        "prompt_tokens_per_s": _plain(answer.prompt), "first_token_s": _plain(answer.first_token_s),
        "limits": dict(answer.limits), "level": LEVEL, "model_error": shipped_rows(),
        "settings": rows_of(answer),
        "gains": [
            {"change": one.change, "decode": one.decode, "prompt": one.prompt,
             "options": None if one.place is None else one.place.title} for one in answer.gains
        ],
        "quantisations": [
            {"name": one.name, "bytes": one.n_bytes, "misfit": one.misfit,
             **({} if one.point is None else point_record(one.point))} for one in answer.quants
        ],
        "ubatches": [
            {"context_tokens": context, "ubatch": ubatch, "options": None if place is None else place.title}
            for context, ubatch, place in answer.ubatches
        ],
        "engines": [
            {
                "engine": one.engine.name, "checked": one.engine.checked, "placement": one.candidate.title,
                "policy": dict(one.candidate.policy), "gpu_experts": one.candidate.gpu_experts,
                "gpu_bytes": one.candidate.gpu_bytes, "host_bytes": one.candidate.host_bytes,
                "decode_tokens_per_s": _plain(one.decode), "prompt_tokens_per_s": _plain(one.prompt), "ratio": one.ratio,
                "command": None if one.command is None else str(one.command),
                "condition": "" if one.command is None else one.command.condition, "doubt": one.doubt, "label": one.label,
            }
            for one in ([] if others is None else others.placed)
        ],
        "engines_without": {} if others is None else dict(others.without),
        "routing": "" if others is None else others.routing.label,
        "other_routing": [] if others is None else [one.label for one in others.also],
        "identified": [] if answer.identified is None else remarks(answer.identified, []),
    }  # fmt: skip


def _plain(speed: Speed | None) -> Mapping[str, float] | None:
    return None if speed is None else asdict(speed)


def pictures(answer: Recommendation) -> dict[str, bytes]:
    """Draw speed over ``--n-cpu-moe`` by context, with observed speeds; none without a table of it."""
    rows = curve_records(answer)
    if len({row["n_cpu_moe"] for row in rows}) < 2:
        return {}
    import pandas as pd

    from moesim.plots.identified import MEASURED, calibrated_curve  # Matplotlib takes a second to import
    from moesim.plots.style import pictures as drawn

    setting, measured = answer.setting, measured_records(answer)
    corner = f"{setting.hardware.name} · {model_label(setting.model)} · batch {setting.asked.batch}"
    frame = pd.DataFrame(measured, columns=None if measured else list(MEASURED))
    return drawn(calibrated_curve(pd.DataFrame(rows), frame, corner), "curve")


def curve_records(answer: Recommendation) -> list[dict[str, Any]]:
    """List settings of ``--n-cpu-moe`` by context and ``-ub``, and whether they fit."""
    first = {(context, ubatch): place for context, ubatch, place in answer.ubatches}
    return [
        {
            "n_cpu_moe": one.place.number, "context_tokens": one.context, "ubatch": ubatch, "tokens_per_s": one.decode.value,
            "low_tokens_per_s": one.decode.low, "high_tokens_per_s": one.decode.high,
            "fits": place is not None and not place.whole and one.place.number >= place.number,
        }
        for one in answer.points if not one.place.whole
        for ubatch, place in ((ubatch, first.get((one.context, ubatch))) for ubatch in UBATCHES)
    ]  # fmt: skip


_SAME_BITS: Final = 0.03
"""Experts whose bits differ by no more than this share are as fast as one another in a figure."""


def measured_records(answer: Recommendation) -> list[dict[str, Any]]:
    """Return observed decode speeds at the same bits and batch, at the nearest context of the table."""
    setting = answer.setting
    contexts = sorted({one.context for one in answer.points})
    records = []
    for one in () if answer.identified is None else answer.identified.predictions:
        case, row = one.case, one.case.observation
        same = (case.model.name, row.batch, row.kind) == (setting.model.name, setting.asked.batch, "decode")
        apart = abs(math.log((case.model.expert_bits or 16) / (setting.model.expert_bits or 16)))
        if not same or row.of or case.setting.family != "n_cpu_moe" or apart >= _SAME_BITS:
            continue
        tokens = max(1, case.mean_context)
        records.append(
            {"row": case.name, "n_cpu_moe": case.setting.policy.get("n_cpu_moe", 0),
             "context_tokens": min(contexts, key=lambda context: abs(math.log(context / tokens))), "tokens": tokens,
             "tokens_per_s": row.batch / math.exp(row.log_time) * 1e9, "status": one.status}
        )  # fmt: skip
    return records


def experiment(answer: Recommendation, folder: Path) -> dict[str, Any]:
    """Write the answer's placement as an experiment that runs."""
    setting, asked = answer.setting, answer.setting.asked
    policy: Mapping[str, Any] = {"name": "all-cpu"}
    if answer.placed is not None:
        policy = answer.placed.candidate.policy
    elif answer.point is not None and setting.has_gpu:
        policy = answer.point.place.policy
    cache: dict[str, Any] = {"ratio": 1.0}
    if answer.placed is not None and answer.placed.candidate.budget is not None:
        cache = {"budget": answer.placed.candidate.budget}
    hardware = dict(setting.hardware_ref)
    if answer.identified is not None:
        hardware["base"] = str(folder / IDENTIFIED)
    return {
        "name": "best",
        "model": str(folder / "model.yaml") if asked.gguf is not None else setting.model_ref,
        "hardware": hardware,
        "workload": {
            "batch_size": asked.batch, "prompt_tokens": asked.prompt, "decode_tokens": asked.decode,
            "prefill_chunk": PREFILL_CHUNK,
        },
        "cache": cache,
        "policies": [dict(policy)],
    }  # fmt: skip


def write_folder(answer: Recommendation, out: Path) -> None:
    """Write an answer; an earlier result in the folder is replaced at the end."""
    files = pictures(answer)
    if answer.identified is not None:
        files[IDENTIFIED] = answer.profile
    if answer.setting.asked.gguf is not None:
        files["model.yaml"] = model_yaml(answer.setting.model).encode()
    if answer.command is not None:
        files["best.yaml"] = yaml.safe_dump(experiment(answer, out), sort_keys=False).encode()
    files["settings.csv"] = render_records(rows_of(answer), Format.CSV).encode()
    files["recommendation.md"] = text(answer, Format.MD, long=True, pictured="curve.png" in files).encode()
    files[ANSWER] = (json.dumps(document(answer), indent=2) + "\n").encode()
    if answer.identified is not None:  # where the machine was while it was simulated is of no use to a reader
        path = answer.setting.hardware.path.encode()
        files = {name: content.replace(path, IDENTIFIED.encode()) for name, content in files.items()}
    OutputFolder(out, "recommend").replace(files, last=ANSWER)
