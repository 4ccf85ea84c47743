"""Changes of a machine or its bits, in the words of ``moesim whatif``: llama.cpp's best setting before and after each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from moesim.core.table import Format, render, render_records
from moesim.core.units import digits
from moesim.experiment.config import parse_config
from moesim.model import load_model
from moesim.studies.advice.llama_cpp import LlamaCpp, Point, Speed
from moesim.studies.advice.question import Asked, is_open, look_up
from moesim.studies.advice.screen import point_record
from moesim.studies.whatif import drafts
from moesim.studies.whatif.knobs import change
from moesim.studies.whatif.settings import Base, Setting, single

USUAL: Final = ("link.bytes_per_s x2", "cpu.memory_bandwidth x2", "gpu.memory_bandwidth x2", "bits Q8_0,Q2_K")
"""Changes of a machine where none is named."""
AS_IS: Final = "as it is"
_HEAD: Final = ("what if", "options", "tokens/s", "change", "prompt tokens/s", "change ")


@dataclass(frozen=True)
class Variation:
    """A machine with its best setting; without one nothing fits."""

    name: str
    point: Point | None
    prompt: Speed | None
    misfit: str = ""
    note: str = ""  # why nothing changed; what the speed leaves out


def vary(asked: Asked, variations: Sequence[Sequence[Setting]]) -> list[Variation]:
    """Answer a question for the machine as it is and for each change of it."""
    return list(varied(asked, variations))


def varied(asked: Asked, variations: Sequence[Sequence[Setting]]) -> Iterator[Variation]:
    """Yield the answers one by one, that of the machine as it is first."""
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        base = _base(asked, Path(folder))
        yield _answer(asked, base.raw, AS_IS, Path(folder))
        for together in variations:
            changed = change(base, together)
            answer = _answer(asked, changed.raw, changed.name, Path(folder))
            yield answer if changed.keys else replace(answer, note="; ".join(filter(None, (changed.note, answer.note))))


def drafts_of(asked: Asked, setting: Setting) -> list[drafts.Line]:
    """Answer whether drafts pay with llama.cpp's best setting, which makes room for their head and for the context."""
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:
        base = _base(asked, Path(folder))
        workload = drafts.served(base.raw["workload"])
        workload["scheduler"] |= {"kv_tokens": asked.room * workload["closed"]}
        raw = {key: value for key, value in base.raw.items() if key != "trace"}  # neighbouring tokens share experts
        memory = min((one.memory_bytes for one in base.profile.devices.values() if one.role == "accelerator"), default=0)
        raw |= {"workload": workload, "cache": {"budget": memory}}
        return drafts.drafts(replace(base, raw=raw), setting)


def _base(asked: Asked, folder: Path) -> Base:
    """Write the question as an experiment with one setting, which knobs change."""
    setting = look_up(asked, folder)
    hardware = asked.hardware if asked.vram is None and asked.ram is None else setting.hardware_ref
    raw: dict[str, Any] = {
        "model": setting.model_ref, "hardware": hardware,
        "workload": {"batch_size": asked.batch, "prompt_tokens": asked.prompt, "decode_tokens": asked.decode},
        "cache": {"ratio": 1.0}, "policies": ["llama-cpp-fit"], "trace": {"synthesize": "even"},
    }  # fmt: skip
    return single(parse_config(raw, "whatif"), "whatif")


def _answer(asked: Asked, raw: Any, name: str, folder: Path) -> Variation:
    hardware, workload = raw["hardware"], raw["workload"]
    model = json.loads(json.dumps(raw["model"]))
    plain = load_model(model, "whatif: model")
    bits = f"{plain.expert_bits:g}/{plain.other_bits:g}" if is_open(plain) else ""  # as they are, high ones too
    sizes = {"batch": workload["batch_size"], "prompt": workload["prompt_tokens"], "decode": workload["decode_tokens"]}
    question = replace(asked, model=model, hardware=hardware, bits=bits, vram=None, ram=None, **sizes)
    llama = LlamaCpp(look_up(question, folder))
    if llama.best is None:
        return Variation(name, None, None, llama.misfit(llama.setting.context))
    return Variation(name, llama.best, llama.prompt(llama.best.place), note=llama.paging(llama.best))


def records(found: Sequence[Variation]) -> list[dict[str, Any]]:
    """Return one row a variation."""
    first = found[0]
    rows = []
    for one in found:
        row: dict[str, Any] = {"what_if": one.name, "misfit": one.misfit, "note": one.note}
        if one.point is not None and one.prompt is not None:
            row |= point_record(one.point) | {"prompt_tokens_per_s": one.prompt.value}
            row |= {"prompt_low_tokens_per_s": one.prompt.low, "prompt_high_tokens_per_s": one.prompt.high}
            if first.point is not None and first.prompt is not None:
                row["change"] = one.point.decode.value / first.point.decode.value
                row["prompt_change"] = one.prompt.value / first.prompt.value
        rows.append(row)
    return rows


def table(found: Sequence[Variation], form: Format) -> str:
    """Write variations for people, or for programs."""
    rows = records(found)
    if form.for_programs:
        return render_records(rows, form)
    cells = []
    for one, row in zip(found, rows, strict=True):
        if one.point is None or one.prompt is None:
            cells.append([one.name, f"does not fit: {one.misfit.partition(':')[0]}", "-", "-", "-", "-"])
            continue
        ratios = [f"x{row[key]:.2f}" if key in row else "-" for key in ("change", "prompt_change")]
        speeds = [f"{digits(each.value)} ({digits(each.low)} to {digits(each.high)})" for each in (one.point.decode, one.prompt)]
        cells.append([one.name, one.point.place.title, speeds[0], ratios[0], speeds[1], ratios[1]])
    notes = "".join(f"{one.name}: {one.note}\n" for one in found if one.note)
    return render(_HEAD, cells, form, right=_HEAD[2:]) + (f"\n{notes}" if notes else "")
