"""Which measurement would tell most of what is not identified: llama-bench lines, by what each would narrow."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesim.hardware import build_profile
from moesim.identify.cases import Case, make_cases, needed_bytes, roomy
from moesim.identify.fit import UNKNOWN_SPREAD
from moesim.identify.observations import Observation, observation
from moesim.identify.predictor import Memo, Predictor
from moesim.identify.results import Identified


@dataclass(frozen=True)
class NextLine:
    """A measurement that is not there yet.

    Attributes
    ----------
    command : str
        What to run.
    constant : str
        What it would tell most of.
    narrows : float
        Share of that constant's interval that would be left.
    """

    command: str
    constant: str
    narrows: float


def next_lines(found: Identified, *, most: int = 3) -> list[NextLine]:
    """Rank llama-bench lines by how much they narrow what is not identified.

    Parameters
    ----------
    found : Identified
    most : int
        How many to give.

    Returns
    -------
    list of NextLine
        The one that narrows most first; each beside a constant of its own. Empty if everything is identified, or nothing that
        llama-bench can measure would narrow it.
    """
    weak = [k for k, one in enumerate(found.constants) if one.moves and not one.identified]
    if not weak:
        return []
    machine = found.predictor.machine
    if machine.base.devices[machine.gpu].role != "accelerator":
        return []  # llama-bench's settings are where layers are: on a GPU, or not
    room = build_profile(roomy(machine.raw, machine.base, machine.place), machine.place)
    memory = machine.base.devices[machine.gpu].memory_bytes
    known = {_key(case) for case in found.predictor.cases}
    cases = [case for case in make_cases(_candidates(found.predictor.cases)) if _key(case) not in known]
    cases = [case for case in cases if (needed_bytes(case, room, machine.gpu) or 0) <= memory]
    if not cases:
        return []
    slopes = Predictor(machine, cases, Memo()).slopes(found.fit.logs)
    covariance = found.fit.covariance
    left = np.empty((len(cases), len(weak)))
    for index, slope in enumerate(slopes):
        along = covariance @ slope
        left[index] = np.sqrt(1 - along[weak] ** 2 / (UNKNOWN_SPREAD**2 + slope @ along) / np.diag(covariance)[weak])
    lines: list[NextLine] = []
    for index in np.argsort(np.log(left).sum(axis=1), kind="stable"):
        k = int(np.argmin(left[index]))
        name = found.constants[weak[k]].constant.name
        if left[index, k] > 0.95 or any(line.constant == name for line in lines):
            continue
        lines.append(NextLine(command(cases[index]), name, float(left[index, k])))
        if len(lines) == most:
            break
    return lines


def _key(case: Case) -> tuple[Any, ...]:
    one = case.observation
    return case.model.name, case.bits, str(dict(case.setting.policy)), one.context, one.kind, one.batch


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
    words = ["llama-bench", "-m", f"{case.model.name}.gguf"]
    if "n_gpu_layers" in policy:
        words += ["-ngl", str(policy["n_gpu_layers"])]
    else:
        words += ["-ngl", "99", "--n-cpu-moe", str(policy.get("n_cpu_moe", 0))]
    words += ["-p", "0", "-n", "128"] + (["-d", str(one.context)] if one.context else [])
    return shlex.join([*words, "-o", "json"])
