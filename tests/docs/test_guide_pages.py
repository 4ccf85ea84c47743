"""Pages of the guide show numbers of shipped files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.docs import engines_kit

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MACHINES = {"memory": "zen4-2core", "disk": "zen4-2core-disk"}


def words(name: str) -> str:
    return " ".join((ROOT / "docs" / "guide" / f"{name}.md").read_text(encoding="utf-8").split())


def shipped(machine: str, table: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "hardware_profiles" / machine / "validation" / f"{table}.csv")


@pytest.mark.parametrize("kind", MACHINES)
def test_errors_of_a_measured_machine_are_those_of_its_validation(kind: str):
    found = shipped(MACHINES[kind], "results")
    errors, repeats = 100 * found["decode_step_ns_error"].abs(), 100 * found["decode_step_ns_repeat_error"]
    (row,) = [line for line in (ROOT / "docs" / "guide" / "replay.md").read_text().splitlines() if line.startswith(f"| {kind}: ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == str(len(found))
    assert cells[3].startswith(f"**{errors.median():.1f} %**")
    assert cells[4:6] == [f"{errors.max():.1f} %", f"{repeats.median():.1f} %"]
    equal = found["must_be_equal"] & found["equal"]
    assert cells[6] == f"equal in {equal.sum()} of {found['must_be_equal'].sum()}"
    for number in (errors.median(), errors.max(), repeats.median()):
        assert f"{number:.1f} " in README, "the README has the same"


def test_residuals_on_the_page_of_replay_are_means_of_the_shipped_ones():
    found = shipped("zen4-2core", "residuals")
    means = 100 * found.groupby("policy").mean(numeric_only=True)
    whole = 100 * found.mean(numeric_only=True)
    page = words("replay")
    assert f"experts, {whole['gpu_experts_share']:.1f}.**" in page
    assert f"**Waiting, {whole['waiting_share']:+.1f}, and the runtime, {whole['gap_share']:+.1f}.**" in page
    worst, second = means["gpu_experts_share"].nsmallest(2).items()
    assert f"shows most with `{worst[0]}` ({worst[1]:.0f}) and `{second[0]}` ({second[1]:.0f})" in page


def test_the_page_on_engines_has_the_numbers_of_the_profiles():
    made = engines_kit.table()
    assert len(made.splitlines()) > 15 and made in engines_kit.PAGE.read_text(encoding="utf-8"), (
        "python -m tests.docs.engines_kit"
    )


def readme_lines() -> list[str]:
    """Write README's rows on public measurements from their files."""
    folder = ROOT / "docs" / "background"
    swept, after, inside = (pd.read_csv(folder / f"public{name}.csv") for name in ("_sweeps", "_identified", "_coverage"))
    done = swept[swept["status"] == "predicted"]
    decode, prompts = done[done["ubatch"] == 0], done[done["ubatch"] > 0]
    mine, others = decode[decode["rate"] == "measured"], decode[decode["rate"] != "measured"]
    known = after[(after["part"] != "used") & (after["rate"] == "measured")]

    def pair(frame: pd.DataFrame) -> str:
        errors = 100 * frame["error"].abs()
        return f"{errors.median():.1f}; {errors.quantile(0.9):.0f}"

    share = 100 * inside[(inside["intervals"] == "run") & (inside["level"] == 0.9)]["inside"].iloc[0]
    return [
        f"| {len(mine)} published speeds, of machines with a measured memory rate | {pair(mine)} % |",
        f"| {len(known)} more of these | {pair(known)} % |",
        f"({len(others)} speeds: {pair(others)} %)",
        f"of prompts ({len(prompts)}: {pair(prompts)} %)",
        f"{(swept['status'] == 'not predicted').sum()} rows are not predicted",
        f"Intervals of 90 % contain {share:.0f} % of decode speeds on machines left out",
    ]


def test_the_readme_has_the_errors_of_the_public_measurements():
    shown = " ".join(README.split())
    assert not [line for line in readme_lines() if line not in shown]
