"""Pages of the guide show numbers of shipped files."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

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


def test_the_readme_has_the_errors_of_the_public_measurements():
    folder = ROOT / "docs" / "background"
    swept, after, figures = (pd.read_csv(folder / f"{name}.csv") for name in ("public_sweeps", "public_identified", "public"))
    done = swept[(swept["status"] == "predicted") & (swept["ubatch"] == 0)]
    prompts = swept.loc[(swept["status"] == "predicted") & (swept["ubatch"] > 0), "error"]
    rest = after[after["part"] != "used"]
    mine, others = done[done["rate"] == "measured"], done[done["rate"] != "measured"]
    known, unknown = rest[rest["rate"] == "measured"], rest[rest["rate"] != "measured"]
    single = figures.loc[figures["status"] == "predicted", "error"]
    size = {len(frame): 100 * frame["error"].abs().median() for frame in (mine, others, known, unknown)}
    wide = [f"{100 * frame['error'].abs().quantile(0.9):.0f}" for frame in (mine, known)]
    worst = [f"{100 * errors.loc[errors.abs().idxmax()]:+.0f}" for errors in (mine["error"], known["error"], single)]
    for told in (
        f"{len(mine)} settings on machines with a measured memory rate, median {size[len(mine)]:.1f} %, nine of ten within "
        f"{wide[0]} %, worst {worst[0]} %. {len(others)} elsewhere: {size[len(others)]:.1f} %. "
        f"{(swept['status'] == 'not predicted').sum()} are not predicted.",
        f"{len(known)} other settings, {size[len(known)]:.1f} %, nine of ten within {wide[1]} %, worst {worst[1]} %; "
        f"{len(unknown)} without measured memory rate, {size[len(unknown)]:.1f} %. "
        f"{len(prompts)} prompts: {100 * prompts.abs().median():.0f} %.",
        f"{len(single)} other published speeds: median {100 * single.abs().median():.0f} %, worst {worst[2]} %.",
    ):
        assert told in README
