"""The evidence for intervals: measured speeds beside what the simulator said, one line a figure, kept in ``residuals.csv``.

Two sources, both of this project: ``moesim validate --public`` (derived profiles beside published decode speeds) and the
validation of the measured profiles (simulated beside replayed). `collect` makes the table anew; a test compares it with the file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.core import data
from moesim.core.files import write_bytes
from moesim.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

FILE: Final = "residuals.csv"
MEASURED_PROFILES: Final = ("zen4-2core", "zen4-2core-disk")
NO_CPU_EXPERTS: Final = ("all-gpu", "mixtral-offloading")
"""Policies among the public checks with which no processor computes an expert."""


@dataclass(frozen=True)
class Residual:
    """One decode speed, measured and simulated."""

    figure: str  # `public 5a`, `zen4-2core 17`
    profile: str  # whether every cost of the profile was measured, or any was taken over, published, counted or assumed
    experts: str  # where experts were computed: some or all on the processor, none there; "any" where both sides are processors
    ratio: float  # measured speed over simulated speed


def read_residuals(path: Path | None = None) -> list[Residual]:
    """Read a table of residuals."""
    text = (path or resources.files("moesim.studies.advice").joinpath(FILE)).read_text(encoding="utf-8")
    found = []
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            one = Residual(row["figure"], row["profile"], row["experts"], float(row["ratio"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path or FILE}:{number}: expected figure,profile,experts,ratio, got {dict(row)}") from None
        if one.profile not in ("derived", "measured") or one.experts not in ("cpu", "gpu", "any") or not one.ratio > 0:
            raise ConfigError(f"{path or FILE}:{number}: expected derived or measured, cpu, gpu or any, and a positive ratio")
        found.append(one)
    return found


def of_public(frame: pd.DataFrame, policies: dict[str, Any]) -> list[Residual]:
    """Take the decode speeds out of the result of ``moesim validate --public``; calibration does not count."""
    chosen = frame[(frame["status"] == "predicted") & (frame["metric"] == "decode_tokens_per_s")]
    residuals = []
    for row in chosen.to_dict("records"):
        policy = policies[str(row["check"])]
        name = policy if isinstance(policy, str) else policy["name"]
        experts = "gpu" if name in NO_CPU_EXPERTS else "cpu"
        residuals.append(Residual(f"public {row['check']}", "derived", experts, round(1 / float(row["ratio"]), 4)))
    return residuals


def of_validation(profile: str) -> list[Residual]:
    """Read the shipped validation of a measured profile: every run, as the median of its replays."""
    import pandas as pd  # takes most of a second to import, and an advice needs none

    folders = [folder / profile / "validation" / "results.csv" for folder in data.data_dirs("hardware_profiles")]
    frame = pd.read_csv(next(path for path in folders if path.is_file()))
    ratios = frame["decode_step_ns_predicted"] / frame["decode_step_ns_measured"]  # of times, so the other way round
    return [
        Residual(f"{profile} {run}", "measured", "any", round(float(ratio), 4))
        for run, ratio in zip(frame["run"], ratios, strict=True)
    ]


def collect() -> list[Residual]:
    """Make the table anew; half a minute, for the public checks are simulated."""
    from moesim.studies.validation.public import run_public
    from moesim.studies.validation.public_checks import checks_file, read_checks

    policies = {check.check: check.policy for check in read_checks(checks_file())}
    public = of_public(run_public(plot=False).frame, policies)
    return public + [one for profile in MEASURED_PROFILES for one in of_validation(profile)]


def write_residuals(residuals: Sequence[Residual], path: Path) -> None:
    """Write a table of residuals."""
    names = [field.name for field in fields(Residual)]
    lines: Iterable[str] = (",".join(str(getattr(one, name)) for name in names) for one in residuals)
    write_bytes(path, ("\n".join([",".join(names), *lines]) + "\n").encode())
