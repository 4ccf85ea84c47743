"""Make the evidence for the intervals of an advice: measured speeds over simulated ones, ``moesim/studies/advice/residuals.csv``.

Two sources, both of this project: ``moesim validate --public`` (derived profiles against published decode speeds) and the
validation of the measured profiles (simulated against replayed).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import pandas as pd

from experiments.research.tables.command import parser, run
from moesim.core import data
from moesim.core.table import render_records
from moesim.studies.advice.recommend import Residual
from moesim.studies.validation.public import checks_file, read_checks, run_public

MEASURED_PROFILES: Final = ("zen4-2core", "zen4-2core-disk")
NO_CPU_EXPERTS: Final = ("all-gpu", "mixtral-offloading")
"""Policies among the public checks with which no processor computes an expert."""


def of_public(frame: pd.DataFrame, policies: Mapping[str, Any]) -> list[Residual]:
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
    folders = [folder / profile / "validation" / "results.csv" for folder in data.data_dirs("hardware_profiles")]
    frame = pd.read_csv(next(path for path in folders if path.is_file()))
    ratios = frame["decode_step_ns_predicted"] / frame["decode_step_ns_measured"]  # of times, so the other way round
    return [
        Residual(f"{profile} {run}", "measured", "any", round(float(ratio), 4))
        for run, ratio in zip(frame["run"], ratios, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of residuals; takes half a minute, since the public checks are simulated."""
    return run(_collect, parser("experiments.research.tables.residuals", main.__doc__), arguments)


def _collect(given: Namespace) -> None:
    policies = {check.check: check.policy for check in read_checks(checks_file())}
    public = of_public(run_public(plot=False).frame, policies)
    found = public + [one for profile in MEASURED_PROFILES for one in of_validation(profile)]
    sys.stdout.write(render_records([asdict(one) for one in found], given.form))


if __name__ == "__main__":
    sys.exit(main())
