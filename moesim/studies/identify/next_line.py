"""Which measurement would tell most of what is not identified: llama-bench lines, by what each would narrow."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from moesim.hardware import HardwareProfile
from moesim.studies.identify.cases import Case, make_cases, needed_bytes
from moesim.studies.identify.fit import UNKNOWN_SPREAD
from moesim.studies.identify.observations import Observation, observation
from moesim.studies.identify.predictor import Memo, Predictor
from moesim.studies.identify.results import Identified
from moesim.studies.identify.status import setting_key

USEFUL: Final = 0.8
"""A line that leaves more than this of every interval is not worth a run."""


@dataclass(frozen=True)
class NextLine:
    """A measurement that is not there yet."""

    command: str  # what to run
    constant: str  # what it would tell most of
    narrows: float  # share of that constant's interval that would be left, the lines before it measured


def next_lines(found: Identified, *, most: int = 3) -> list[NextLine]:
    """Rank llama-bench lines by how much they narrow what is not identified.

    Each by what it tells after those before it, and beside a constant of its own; none repeats a row.
    """
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
    slopes = Predictor(machine, new, Memo()).slopes(found.fit.logs)
    covariance = np.array(found.fit.covariance)
    lines: list[NextLine] = []
    while weak and new and len(lines) < most:
        along = slopes @ covariance  # (lines, constants)
        noise = UNKNOWN_SPREAD**2 + np.einsum("ij,ij->i", along, slopes)
        left = np.sqrt(1 - along[:, weak] ** 2 / noise[:, None] / np.diag(covariance)[weak])
        index = int(np.argmin(np.log(left).sum(axis=1)))
        if left[index].min() > USEFUL:
            index = int(np.argmin(left.min(axis=1)))  # none tells much of several constants; one may tell of one
        k = int(np.argmin(left[index]))
        if left[index, k] > USEFUL:
            break
        lines.append(NextLine(command(new.pop(index)), found.constants[weak.pop(k)].constant.name, float(left[index, k])))
        covariance -= np.outer(along[index], along[index]) / noise[index]
        slopes = np.delete(slopes, index, axis=0)
    return lines


def _key(case: Case, room: HardwareProfile) -> tuple[Any, ...]:
    """Give what is the same for lines that measure the same, however long they decode."""
    usual = case.observation.model_copy(update={"decode": 128})
    return setting_key(replace(case, observation=usual), room)


def _candidates(cases: Sequence[Case]) -> list[Observation]:
    """Settings of each model and bits that were observed: ends and middle of both ways of splitting, short and long contexts."""
    seen: dict[tuple[str, str], Case] = {}
    for case in cases:
        seen.setdefault((case.observation.model, case.observation.bits), case)
    rows: list[Observation] = []
    for (model, bits), case in seen.items():
        n_layers = case.model.n_dense_layers + case.model.n_layers
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
