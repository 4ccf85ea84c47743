"""The page on public measurements shows numbers of its tables: sums, the aims, every large error, every known choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.research.tables.public_choices import NOW, TOGETHER, WITHOUT, read_choices
from experiments.research.tables.public_identified import identified_groups
from moesim.core.table import Format, render
from moesim.studies.validation.public import checks_file, groups, read_checks, read_sweeps, run_public, shipped_table, sweeps_file

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "background"
PAGE = (FOLDER / "validation-public.md").read_text(encoding="utf-8")
FIGURES, SWEEPS, IDENTIFIED, CHOICES = (
    pd.read_csv(FOLDER / f"{name}.csv") for name in ("public", "public_sweeps", "public_identified", "public_choices")
)
DECODE = SWEEPS[(SWEEPS["status"] == "predicted") & (SWEEPS["ubatch"] == 0)]
KINDS = {
    "llama.cpp, experts on the CPU of one socket": "1a 1b 5b 6 7a 7b 9 20",
    "KTransformers, one socket": "12 15a",
    "Fiddler": "8a-L 8a-R",
    "llama.cpp, all on the GPU": "5a 13a 13b 13c 13d 13e 13f 21",
    "KTransformers, two sockets or prefill": "15b 15c 15d",
    "Mixtral-Offloading": "8b-L 8b-R",
    "Transformers, eager, all on the GPU": "19",
}
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
MACHINES = [
    "a100-epyc7j13", "gtx1060-i5-7600k", "rtx3070ti-6core", "ryzen-ai-max-395", "rtx2070s-i5-12400f", "srv1-6gb",
    "epyc9355-rtx3090", "epyc9654-48threads", "rtx5070ti-ryzen9800x3d", "rx6700xt-ryzen5800x", "rx9070xt-8core", "m4-max",
    "rtx2060m-i7-10750h", "rtxa1000-i9-9900t",
]  # fmt: skip
GROUPS = [
    "machines with a measured memory rate", "of these, well described", "of these, all experts on the GPU", "of these, mixed",
    "of these, all on the CPU", "machines without",
]  # fmt: skip
PROMPTED = [
    "rtx5070ti-ryzen9800x3d", "ryzen-ai-max-395", "rx6700xt-ryzen5800x", "gtx1060-i5-7600k", "rtxa1000-i9-9900t",
    "rtx2070s-i5-12400f", "rtx2060m-i7-10750h", "rx9070xt-8core",
]  # fmt: skip
AFTER = [
    "machines with a measured memory rate", "of these, inside the sweep", "the same, by a straight line through its ends",
    "of these, other models, weights and settings", "machines without",
]  # fmt: skip


def signed(value: float) -> str:
    return f"{100 * value:+.1f}"


def size(value: float) -> str:
    return f"{100 * value:.1f}"


def done() -> pd.DataFrame:
    return FIGURES[FIGURES["status"] == "predicted"].set_index("check")


def figures_table() -> str:
    frame = done()
    cells = []
    for name, rows in {"all": " ".join(frame.index), **KINDS}.items():
        errors = frame.loc[rows.split(), "error"]
        worst = errors.abs().idxmax()
        listed = "" if name == "all" else rows.replace(" ", ", ")
        cells.append([name, listed, str(len(errors)), size(errors.abs().median()), f"{signed(errors[worst])} ({worst})"])
    return render(
        ["figures", "checks", "n", "median error, %", "worst, %"], cells, Format.MD, right=["n", "median error, %", "worst, %"]
    )


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


def sums(frame: pd.DataFrame, names: list[str]) -> str:
    known = frame.set_index("group")
    heads = ["rows", "n", "median error, %", "90 % within, %", "worst, %"]
    cells = [
        [name, str(row["rows"]), size(row["median"]), size(row["p90"]), signed(row["worst"])]
        for name, row in known.loc[names].iterrows()
    ]
    return render(heads, cells, Format.MD, right=heads[1:])


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
        ("of these, other models and settings", after[after["part"] != "inside"], "10; 28", ""),
        ("of these, inside the sweep", inside, "", f"{pair(inside['straight'].astype(float))} (straight line)"),
        ("prompts", prompts, "20; 50", ""),
    ]
    cells = [[name, str(len(frame)), aim, pair(frame["error"]), other] for name, frame, aim, other in rows]
    heads = ["rows", "n", "aim", "reached", "bytes over bandwidth"]
    return render(heads, cells, Format.MD, right=heads[1:])


def choices_table() -> str:
    """Write the choices made with the errors known, below the result as it is."""
    shown = CHOICES[CHOICES["known"] | (CHOICES["choice"] == NOW)]
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


TABLES = {
    "expect": expect_table(),
    "figures": figures_table(),
    "worst": worst_table(),
    "sweeps": sums(groups(SWEEPS), [*GROUPS, *MACHINES]),
    "prompts": sums(groups(SWEEPS), ["prompts", *(f"prompts, {name}" for name in PROMPTED)]),
    "identified": sums(identified_groups(IDENTIFIED), [*AFTER, "gtx1060-i5-7600k"]),
    "choices": choices_table(),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_page_are_those_of_the_files(name: str):
    assert TABLES[name] in PAGE


def test_every_figure_is_of_one_kind():
    assert sorted(" ".join(KINDS.values()).split()) == sorted(done().index)


def test_every_large_error_of_a_machine_is_in_the_table_of_sums():
    swept = DECODE
    assert set(swept.loc[swept["error"].abs() > 0.2, "machine"]) <= set(MACHINES)


def test_the_first_lines_count_as_the_files_do():
    frame, swept = done(), DECODE
    near = frame["ratio"].map(lambda ratio: max(ratio, 1 / ratio) <= 1.3).sum()
    worst = frame["error"].loc[frame["error"].abs().idxmax()]
    head = " ".join(PAGE.split())
    rest = swept[(swept["rate"] == "measured") & (swept["machine"] != WITHOUT)]["error"].abs()
    assert f"Without the GTX 1060, {size(rest.median())} and {size(rest.quantile(0.9))} %" in head
    assert f"**{len(frame)} single figures**: median absolute error {100 * frame['error'].abs().median():.0f} %" in head
    assert f"worst {100 * worst:+.0f} %; {near} are within a factor of 1.3" in head
    assert f"**{len(swept)} settings of {swept['machine'].nunique()} machines**" in head
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
        cells = (one.intervals, one.rows, one.machines, f"{100 * one.level:.0f}", f"{100 * one.inside:.0f}")
        assert f"| {' | '.join(map(str, cells))} | {100 * one.low:.0f} to {100 * one.high:.0f} | {one.width:.2f} |" in PAGE
        assert one.low <= one.level <= one.high, "too narrow or too wide"
