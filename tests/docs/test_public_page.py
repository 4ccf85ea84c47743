"""The page on public measurements shows numbers of its tables: the aims, every large error, the choices that matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.research.tables.public_choices import NOW, TOGETHER, WITHOUT, read_choices
from moesim.core.table import Format, render
from moesim.studies.validation.public import checks_file, read_checks, read_sweeps, run_public, shipped_table, sweeps_file

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "background"
PAGE = (FOLDER / "validation-public.md").read_text(encoding="utf-8")
FIGURES, SWEEPS, IDENTIFIED, CHOICES = (
    pd.read_csv(FOLDER / f"{name}.csv") for name in ("public", "public_sweeps", "public_identified", "public_choices")
)
DECODE = SWEEPS[(SWEEPS["status"] == "predicted") & (SWEEPS["ubatch"] == 0)]
REASONS = {
    "5a": "an older path stops three times a layer (1.04 with it); which path ran is not recorded",
    "8b-L": "copies of 28.5 ms; with the 70 ms of Fiddler's code 0.88",
    "8b-R": "the same on the other possible machine",
    "13a": "no rate of one-row products with MXFP4 was measured on a V100",
    "13b": "nor on an A100; 54 % of the data sheet's rate, 4-bit Marlin's share, gave 1.17",
    "13c": "the same; it gave 1.29",
    "15c": "slope from llama.cpp on a 7950X (41 % of the peak); the peak gave 1.68",
    "15d": "operations of two sockets count as 1.5 of one's; twice gave 0.92",
    "19": "operators counted in Mixtral's code; 16 instead of 9 us each would meet it",
}
MACHINES = {
    "a100-epyc7j13": "latent attention takes twice the assumed time; Qwen2-57B lacks 15.5 ms a token, mostly unexplained",
    "gtx1060-i5-7600k": "its own rows contradict each other; whole layers on the CPU are unexplained",
    "rx6700xt-ryzen5800x": "operations under Vulkan are known within 0.88 to 10 us only",
    "rx9070xt-8core": "graphs are perhaps not replayed under HIP; the processor is not named",
    "m4-max": "the indexer of DeepSeek-V4's attention is not counted",
    "rtx2060m-i7-10750h": "its memory modules are not stated; nearly half of each token's time is missing",
}


def signed(value: float) -> str:
    return f"{100 * value:+.1f}"


def size(value: float) -> str:
    return f"{100 * value:.1f}"


def done() -> pd.DataFrame:
    return FIGURES[FIGURES["status"] == "predicted"].set_index("check")


def worst_table() -> str:
    frame = done()
    large = frame[frame["ratio"].map(lambda ratio: max(ratio, 1 / ratio)) > 1.3]
    assert set(large.index) == set(REASONS)
    cells = [
        [str(check), f"{row['model']}, {row['machine'].split(' (')[0]}", f"{row['measured']:.3g}", f"{row['predicted']:.3g}",
         f"{row['ratio']:.2f}", REASONS[str(check)]]
        for check, row in large.iterrows()
    ]  # fmt: skip
    heads = ["check", "model, machine", "measured", "predicted", "ratio", "probable reason"]
    return render(heads, cells, Format.MD, right=heads[2:5])


def machines_table() -> str:
    """Write every machine with a decode speed more than 30 % off."""
    cells = []
    for machine, rows in DECODE.groupby("machine"):
        errors = rows["error"]
        worst = errors[errors.abs().idxmax()]
        if abs(worst) > 0.3:
            cells.append([str(machine), str(len(errors)), size(errors.abs().median()), signed(worst), MACHINES[str(machine)]])
    assert [one[0] for one in cells] == sorted(MACHINES)
    heads = ["machine", "n", "median error, %", "worst, %", "probable reason"]
    return render(heads, cells, Format.MD, right=heads[1:4])


def expect_table() -> str:
    """Write what to expect of settings, with the aims, and the two yardsticks."""
    measured, other = (DECODE[(DECODE["rate"] == "measured") == known] for known in (True, False))
    after = IDENTIFIED[(IDENTIFIED["part"] != "used") & (IDENTIFIED["rate"] == "measured")]
    inside = after[after["part"] == "inside"]
    prompts = SWEEPS[(SWEEPS["status"] == "predicted") & (SWEEPS["ubatch"] > 0)]

    def pair(errors: pd.Series) -> str:
        return f"{size(errors.abs().median())}; {size(errors.abs().quantile(0.9))}"

    def bare(frame: pd.DataFrame) -> str:
        return pair(frame["bytes_alone"] / frame["measured"] - 1)

    rows = [
        ("decode, measured memory rate", measured, "8; 25", bare(measured)),
        ("decode, from data sheets", other, "15; 45", bare(other)),
        ("after two speeds, measured rate", after, "5; 18", ""),
        ("of these, other models and configurations", after[after["part"] != "inside"], "10; 28", ""),
        ("of these, inside the sweep", inside, "", f"{pair(inside['straight'].astype(float))} (straight line)"),
        ("prompts", prompts, "20; 50", ""),
    ]
    cells = [[name, str(len(frame)), aim, pair(frame["error"]), other] for name, frame, aim, other in rows]
    heads = ["rows", "n", "aim", "reached", "bytes over bandwidth"]
    return render(heads, cells, Format.MD, right=heads[1:])


def choices_table() -> str:
    """Write the choices made with errors known that move the median by 1.5 points, below the result as it is."""
    far = (CHOICES["median"] - CHOICES["median"][0]).abs() > 0.015
    shown = CHOICES[CHOICES["known"] & far | (CHOICES["choice"] == NOW)]
    cells = [
        [
            row["choice"] if pd.isna(row["other"]) else f"{row['choice']}: {row['value']}",
            "" if pd.isna(row["other"]) else row["other"],
            f"{size(row['median'])}; {size(row['p90'])}",
        ]
        for _, row in shown.iterrows()
    ]
    heads = ["choice", "alternative", "median; 90 % within, %"]
    return render(heads, cells, Format.MD, right=heads[2:])


TABLES = {"expect": expect_table(), "machines": machines_table(), "worst": worst_table(), "choices": choices_table()}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_page_are_those_of_the_files(name: str):
    assert TABLES[name] in PAGE


def test_the_first_lines_count_as_the_files_do():
    frame, swept = done(), DECODE
    near = frame["ratio"].map(lambda ratio: max(ratio, 1 / ratio) <= 1.3).sum()
    worst = frame["error"].loc[frame["error"].abs().idxmax()]
    head = " ".join(PAGE.split())
    rest = swept[(swept["rate"] == "measured") & (swept["machine"] != WITHOUT)]["error"].abs()
    assert f"Without the GTX 1060, {size(rest.median())} and {size(rest.quantile(0.9))} %" in head
    assert f"**{len(frame)} single figures**: median absolute error {100 * frame['error'].abs().median():.0f} %" in head
    assert f"worst {100 * worst:+.0f} %; {near} are within a factor of 1.3" in head
    assert f"**{len(swept)} configurations of {swept['machine'].nunique()} machines**" in head
    assert f"{100 * frame['error'].mean():.0f} % too fast on average" in head
    told = CHOICES[CHOICES["choice"] == TOGETHER].iloc[0]
    assert f"the median is {size(told['median'])} % instead of {size(CHOICES.iloc[0]['median'])} %" in head
    kinds = np.log(swept["ratio"]).groupby([swept["rate"], swept["place"], swept["machine"]]).mean().groupby(level=[0, 1]).mean()
    bias = [round(100 * kinds["measured"][place]) for place in ("cpu", "mixed", "gpu")]
    assert "{} % with everything on the CPU, {} % with mixed placements and {} % with everything on the GPU".format(*bias) in head


def test_the_files_have_every_row_of_their_sources():
    assert list(FIGURES["check"]) == [one.check for one in read_checks(checks_file())]
    assert list(SWEEPS["check"]) == [one.check for one in read_sweeps(sweeps_file())]
    choices = read_choices(shipped_table("_choices.yaml", "choices"))
    assert list(CHOICES["other"])[1:-1] == [one.other for one in choices]


def test_the_files_are_what_the_simulator_says_now():
    """A few quick rows; `moesim validate --public --out FOLDER` writes all of them."""
    now = run_public(rows=["6", "7", "srv1-6gb"], progress=False)
    for frame, shipped in ((now.frame, FIGURES), (now.sweeps, SWEEPS)):
        known = shipped.set_index("check").loc[list(frame["check"]), "predicted"]
        assert frame["predicted"].astype(float).tolist() == pytest.approx(known.tolist(), rel=1e-3, nan_ok=True)


def test_nominal_shares_lie_in_the_intervals_of_what_is_inside():
    found = pd.read_csv(FOLDER / "public_coverage.csv")
    for one in found.itertuples():
        cells = (one.intervals, one.rows, one.machines, f"{100 * one.inside:.0f}")
        line = f"| {' | '.join(map(str, cells))} | {100 * one.low:.0f} to {100 * one.high:.0f} | {one.width:.2f} |"
        assert (line in PAGE) == (one.level == 0.9)
        assert one.low <= one.level <= one.high, "too narrow or too wide"
