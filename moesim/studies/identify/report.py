"""Report of an identification: table, page, files, and the most useful next measurement."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import expm1
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pandas as pd
import yaml

from moesim import __version__
from moesim.core.files import OutputFolder
from moesim.core.table import Format, render, render_records
from moesim.experiment.store import SUMMARY
from moesim.hardware import HardwareProfile
from moesim.studies.identify.bench import Bench
from moesim.studies.identify.cases import Case, make_cases, needed_bytes
from moesim.studies.identify.fit import Z90
from moesim.studies.identify.identify import NARROWS, UNEXPLAINED, Estimate, Identified, contradictions, setting_key
from moesim.studies.identify.observations import NOT_COLUMNS, Observation, observation
from moesim.studies.identify.predictor import MEMO, OWNER, Memo, Predictor

USEFUL: Final = 0.8
"""A line that leaves more than this of every interval is not worth a run."""


@dataclass(frozen=True)
class NextLine:
    """A measurement that is not there yet."""

    command: str  # what to run
    constant: str  # what it would narrow most
    narrows: float  # share of that constant's interval that would be left, the lines before it measured


def next_lines(found: Identified, *, most: int = 3) -> list[NextLine]:
    """Rank llama-bench lines by what they add on constants not identified, one a constant."""
    weak = [k for k, one in enumerate(found.constants) if one.moves and not one.identified]
    if not weak:
        return []
    machine = found.predictor.machine
    if machine.base.devices[machine.gpu].role != "accelerator":
        return []  # llama-bench's settings are where layers are: on a GPU, or not
    room = machine.with_room
    memory = machine.base.devices[machine.gpu].memory_bytes
    known = {_key(case, room) for case in found.predictor.cases}
    cases = {_key(case, room): case for case in make_cases(_candidates(found.predictor.cases))}
    new = [case for key, case in cases.items() if key not in known and (needed_bytes(case, room, machine.gpu) or 0) <= memory]
    if not new:
        return []
    speeds, across = found.posterior.joint(Predictor(machine, new, Memo()))
    both = np.block([[found.fit.covariance, across.T], [across, speeds]])  # of constants and lines
    n = len(found.fit.covariance)
    lines: list[NextLine] = []
    while weak and len(lines) < most:
        spread = np.maximum(np.diag(both), 1e-12)
        left = np.sqrt(np.maximum(0, 1 - both[n:, weak] ** 2 / spread[n:, None] / spread[weak]))
        index = int(np.argmin(np.log(left).sum(axis=1)))
        if left[index].min() > USEFUL:
            index = int(np.argmin(left.min(axis=1)))  # none narrows several constants much; one may narrow one
        k = int(np.argmin(left[index]))
        if left[index, k] > USEFUL:
            break
        lines.append(NextLine(command(new[index]), found.constants[weak.pop(k)].constant.name, float(left[index, k])))
        both = both - np.outer(both[:, n + index], both[n + index]) / spread[n + index]
    return lines


def _key(case: Case, room: HardwareProfile) -> tuple[Any, ...]:
    """Return the key that lines share that measure the same, however long they decode."""
    usual = case.observation.model_copy(update={"decode": 128})
    return setting_key(replace(case, observation=usual), room)


def _candidates(cases: Sequence[Case]) -> list[Observation]:
    """Vary each observed model: ends and middle of both splits, short and long contexts."""
    seen: dict[tuple[str, str], Case] = {}
    for case in cases:
        seen.setdefault((case.observation.model, case.observation.bits), case)
    rows: list[Observation] = []
    for (model, bits), case in seen.items():
        n_layers = len(case.model.blocks)
        told = [f"n_cpu_moe={n}" for n in (0, n_layers // 2, n_layers)] + ["ngl=0", f"ngl={n_layers // 2}"]
        bits = case.bits if "|" in bits else bits
        for setting in told:
            for context in (0, 8192):
                rows.append(
                    observation(
                        {"row": str(len(rows)), "model": model, "bits": bits, "setting": setting, "context": context, "value": 1,
                         "unit": "tokens/s"}
                    )
                )  # fmt: skip
    return rows


def command(case: Case) -> str:
    """Write the llama-bench line of a case."""
    one, policy = case.observation, case.setting.policy
    quant = f"-{one.bits}" if re.fullmatch(r"[A-Z]\w*", one.bits) else ""
    words = ["llama-bench", "-m", f"{case.model.name}{quant}.gguf"]
    if "n_gpu_layers" in policy:
        words += ["-ngl", str(policy["n_gpu_layers"])]
    else:
        words += ["-ngl", "99", "--n-cpu-moe", str(policy.get("n_cpu_moe", 0))]
    words += ["-p", "0", "-n", "128"] + (["-d", str(one.context)] if one.context else [])
    return shlex.join([*words, "-o", "json"])


_SCALES = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e9, "GFLOP/s"), "us": (1.0, "us")}


def constant_records(found: Identified) -> list[dict[str, Any]]:
    """Return the constants for programs."""
    return [
        {
            "constant": one.constant.name, "keys": " ".join(one.constant.keys), "unit": one.constant.unit, "value": one.value,
            "low": one.low, "high": one.high, "base": one.constant.base, "base_label": one.constant.label,
            "base_low": one.prior_low, "base_high": one.prior_high, "verdict": verdict(one), "beside": one.beside,
        }
        for one in found.constants
    ]  # fmt: skip


def verdict(one: Estimate) -> str:
    """Return whether rows identify a constant."""
    if not one.moves:
        return "no row depends on it"
    return "identified" if one.identified else "not identified"


def row_records(found: Identified) -> list[dict[str, Any]]:
    """Return the rows for programs."""
    return [
        {
            "row": one.case.name, "model": one.case.observation.model, "bits": one.case.bits,
            "setting": one.case.observation.setting, "batch": one.case.observation.batch,
            "context": one.case.observation.context, "kind": one.case.observation.kind, "unit": one.case.observation.unit,
            "observed": one.observed, "predicted": one.predicted, "low": one.low, "high": one.high, "ratio": one.ratio,
            "z": one.z, "status": one.status, "ratio_left_out": one.left_out, "block": one.case.block,
            "source": one.case.observation.source,
        }
        for one in found.predictions
    ]  # fmt: skip


def text(found: Identified, lines: Sequence[NextLine], form: Format) -> str:
    """Write constants, and for people rows and remarks."""
    if form is Format.JSON:
        return json.dumps(summary(found, lines), indent=2) + "\n"
    constants = constants_table(found, form)
    if form.for_programs:
        return constants
    tables = f"{_machine_line(found)}{constants}\n{rows_table(found, form)}\n"
    return tables + "".join(f"{one}\n" for one in remarks(found, lines))


def _machine_line(found: Identified) -> str:
    """Say first which parts were assumed, as the constants begin at their rates."""
    machine = found.profile.machine
    if not machine.get("assumed"):
        return ""
    parts = " + ".join(machine[key] for key in ("gpu", "cpu", "memory") if machine.get(key))
    return f"machine: {parts}; assumed: {machine['assumed']}; name what differs: --hardware 'GPU + CPU + RAM'\n\n"


def constants_table(found: Identified, form: Format) -> str:
    """Write the constants."""
    if form.for_programs:
        return render_records(constant_records(found), form)
    rows = []
    for one in found.constants:
        scale, unit = _SCALES[one.constant.unit]
        value, low, high, below, above = (
            f"{number / scale:.3g}" for number in (one.value, one.low, one.high, one.prior_low, one.prior_high)
        )
        said = verdict(one) + (f", cannot be told from {one.beside}" if one.beside else "")
        base = f"{one.constant.base / scale:.3g} ({below} to {above}, {one.constant.label})"
        rows.append([one.constant.name, value, f"{low} to {high}", unit, base, said])
    return render(["constant", "value", "90 % interval", "unit", "before", "verdict"], rows, form, ["value"])


def rows_table(found: Identified, form: Format) -> str:
    """Write observed and predicted values."""
    if form.for_programs:
        return render_records(row_records(found), form)
    rows = []
    for one in found.predictions:
        o = one.case.observation
        said = one.status + (" (!)" if abs(one.z) > UNEXPLAINED and one.status in ("used", "check") else "")
        rows.append(
            [one.case.name, o.model, one.case.bits, o.setting, f"{one.observed:g}", f"{one.predicted:.4g}",
             f"{one.low:.3g} to {one.high:.3g}", o.unit, f"{one.ratio:.3f}",
             "-" if one.left_out is None else f"{one.left_out:.3f}", said]
        )  # fmt: skip
    head = ["row", "model", "bits", "setting", "observed", "predicted", "90 % interval", "unit", "ratio", "left out", "status"]
    return render(head, rows, form, ["observed", "predicted", "ratio", "left out"])


def errors(found: Identified) -> list[str]:
    """Describe the errors of rows: those used, those left out in turn, and checks."""

    def line(what: str, ratios: list[float]) -> str:
        apart = sorted(100 * abs(ratio - 1) for ratio in ratios)
        tenth = apart[min(len(apart) - 1, int(0.9 * len(apart)))]
        return (
            f"{what}: {len(apart)} rows, median {median(apart):.1f} %, nine of ten within {tenth:.1f} %, worst {apart[-1]:.1f} %"
        )

    rows = found.predictions
    lines = []
    for what, ratios in (
        ("used", [one.ratio for one in rows if one.status == "used"]),
        (f"left out in turn ({found.left_out_by})", [one.left_out for one in rows if one.left_out is not None]),
        ("checks, never used", [one.ratio for one in rows if one.status == "check"]),
    ):
        if ratios:
            lines.append(line(what, [float(ratio) for ratio in ratios]))
    return lines


def remarks(found: Identified, lines: Sequence[NextLine]) -> list[str]:
    """List in sentences what a reader must know."""
    said = [*(found.bench.lines() if found.bench else []), *errors(found)]
    blocks = block_errors(found)
    if len(blocks) > 1 and found.left_out_by == "blocks":
        said += [f"left out: {block}: median {value:.1f} %" for block, value in blocks.items()]
    if found.engine_difference > 0.01:
        said.append(f"closed form and engine differed by {100 * found.engine_difference:.1f} %: the engine's values were used")
    if found.fit.inflation > 1.05:
        said.append(f"rows are {found.fit.inflation:.1f} times as far off as those of other machines; intervals are wider")
    odd = [one for one in found.predictions if one.status == "set aside" or (one.status == "used" and abs(one.z) > UNEXPLAINED)]
    for one in odd:
        aside = ", set aside" if one.status == "set aside" else ""
        off = f"{one.observed:g} observed, {one.predicted:.3g} predicted, {abs(one.z):.1f} standard deviations{aside}"
        said.append(f"no constants explain row {one.case.name}: {off}")
    for one in found.predictions:
        if one.status == "beyond memory":
            said.append(f"row {one.case.name} needs more than the GPU's memory: it belongs to the cliff and moves no constant")
    for before, other in contradictions(found.predictor.cases, found.predictor.machine.with_room):
        apart = 100 * expm1(abs(before.log_time - other.log_time))
        said.append(
            f"checks {before.row} and {other.row} are one setting, observed {apart:.0f} % apart: no prediction meets both"
        )
    for (model, bits), table in found.bits.items():
        best, *others = table
        near = [name for name, worse in others if worse < Z90**2]
        rest = f"; {', '.join(near)} cannot be told from it" if near else ""
        said.append(f"bits of {model} ({bits}): {best[0]} fits best{rest}")
    weak = [one.constant.name for one in found.constants if one.moves and not one.identified]
    if weak:
        said.append(f"not identified: {', '.join(weak)}")
    said += [
        f"next, for {line.constant} ({100 * line.narrows:.0f} % of its interval would be left): {line.command}" for line in lines
    ]
    return said


def block_errors(found: Identified) -> dict[str, float]:
    """Return the median error, %, of each block that was left out."""
    blocks: dict[str, list[float]] = {}
    for one in found.predictions:
        if one.left_out is not None:
            blocks.setdefault(one.case.block, []).append(100 * abs(one.left_out - 1))
    return {block: median(values) for block, values in blocks.items()}


def page(found: Identified, lines: Sequence[NextLine]) -> str:
    """Write the page in Markdown."""
    parts = [
        f"# {found.profile.name}: a machine identified from observed speeds\n",
        f"Base: {found.base}. moesim {__version__}. A constant counts as identified if its interval is at most {NARROWS:g} of "
        "what it was before. Predictions follow what their rows share with those used (see the guide, model error). Rows that "
        "were used are no predictions.\n",
        "![measured and predicted](identified.png)\n",
        "## What is known now\n",
        constants_table(found, Format.MD),
        "\n".join(f"* {one}" for one in remarks(found, lines)) + "\n",
        "## Rows\n",
        "Ratio: predicted over observed speed. Left out: the same where the row's block had no part in the identification.\n",
        rows_table(found, Format.MD),
    ]
    return "\n".join(parts)


def frame(found: Identified) -> pd.DataFrame:
    """Return the data of the figure."""
    records: list[dict[str, Any]] = []
    settings: dict[str, list[float]] = {}
    for one in found.predictions:
        o = one.case.observation
        numbers = re.findall(r"(n_cpu_moe|ncmoe|n-cpu-moe|ngl|gpu_experts|cache)[= ](\d+\.?\d*)", o.setting)
        kind = one.case.setting.family
        panel = f"{o.model} {o.bits or one.case.bits} {o.kind}" + (f" x{o.batch}" if o.batch > 1 else "") + f"\n{kind}"
        x = float(numbers[-1][1]) if numbers else float(len(settings.setdefault(panel, [])))
        settings.setdefault(panel, []).append(x)
        x = min(x, len(one.case.model.blocks) + 1) if kind in ("n_cpu_moe", "ngl") else x
        unit = "speed over another row's" if o.of else o.unit
        records.append(
            {"panel": panel, "unit": unit, "x": x, "setting": kind, "observed": one.observed, "predicted": one.predicted,
             "low": one.low, "high": one.high, "status": one.status}
        )  # fmt: skip
    return pd.DataFrame(records)


def summary(found: Identified, lines: Sequence[NextLine]) -> dict[str, Any]:
    """Return constants, rows used and skipped, and remarks for programs."""
    bench = found.bench or Bench(found.observations)
    skipped = [dict(zip(("place", "row", "reason"), one, strict=True)) for one in bench.skipped]
    return {
        "moesim": __version__, "base": found.base, "constants": constant_records(found), "rows": row_records(found),
        "read": bench.n_read, "used": len(bench.rows), "group": dict(bench.group), "skipped": skipped,
        "remarks": remarks(found, lines), "next": [line.command for line in lines],
    }  # fmt: skip


def contribution(found: Identified, date: str) -> dict[str, Any]:
    """Return rows, machine and version for the public rows; no path, no words of the user's own."""
    bench, profile = found.bench or Bench(found.observations), found.profile
    rows = [
        {
            "model": one.model.name, "weights": o.bits or one.bits, "engine": o.source if bench.group else "",
            "setting": o.setting, "kind": o.kind, "batch": o.batch, "depth": o.context, "tokens": o.decode, "ubatch": o.ubatch,
            "measured": o.value, "unit": o.unit, "spread": o.spread,
        }
        for one in found.predictor.cases
        for o in (one.observation,)
    ]  # fmt: skip
    machine = {"parts": dict(bench.machine), "words": dict(profile.machine), "group": dict(bench.group)}
    return {"moesim": __version__, "date": date, "machine": machine, "rows": rows}


def files(found: Identified, lines: Sequence[NextLine]) -> dict[str, bytes]:
    """Return all files of the result by name, the summary last."""
    from moesim.plots.identified import identified  # Matplotlib takes a second to import
    from moesim.plots.style import pictures

    used = [{key: value for key, value in one.model_dump().items() if key not in NOT_COLUMNS} for one in found.observations]
    return {
        f"{found.profile.name}.yaml": yaml.safe_dump(found.raw, sort_keys=False, width=120).encode(),
        "page.md": page(found, lines).encode(),
        "constants.csv": render_records(constant_records(found), Format.CSV).encode(),
        "rows.csv": render_records(row_records(found), Format.CSV).encode(),
        "observations.csv": render_records(used, Format.CSV).encode(),
        **pictures(identified(frame(found), found.profile.name), "identified"),
        SUMMARY: (json.dumps(summary(found, lines), indent=2) + "\n").encode(),
    }


def write(found: Identified, lines: Sequence[NextLine], out: Path) -> None:
    """Write a folder, in which the engine's values stay."""
    OutputFolder(out, OWNER).replace(files(found, lines), last=SUMMARY, keep=(MEMO,))
