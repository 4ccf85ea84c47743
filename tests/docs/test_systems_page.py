"""The page of systems at equal memory shows the fastest of its table, and its table is what the experiment gives.

After ``moesim run experiments/equal-memory.yaml --out results/equal-memory`` this test, with --regenerate, writes both anew.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from moesim.cli.main import main
from moesim.experiment.config import load_config

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "experiments" / "equal-memory.yaml"
TABLE = ROOT / "docs" / "background" / "systems.csv"
PAGE = TABLE.with_suffix(".md")
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
BATCHES = (1, 8, 64)
SPEED = "decode_tokens_per_s"
ALWAYS = ("on-demand", "lru", "llama-cpp")  # next to the fastest three of each column


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return mean and 95 % interval over the draws of requests, one row a policy and setting."""
    frame = runs.assign(model=runs["model"].str.partition(" ")[0])
    rows = []
    for (policy, model, batch), one in frame.groupby(["policy", "model", "batch_size"], sort=False):
        n, mean, sem = len(one), one[SPEED].mean(), one[SPEED].sem() if len(one) > 1 else 0.0
        half = sem * stats.t.ppf(0.975, n - 1) if n > 1 else 0.0
        rows.append(
            {
                "policy": policy, "model": model, "batch": batch, "draws": n, SPEED: f"{mean:.4g}",
                "half_interval": f"{half:.2g}",
                "ttft_s": f"{one['ttft_mean_ns'].mean() / 1e9:.3g}", "fresh": f"{one['fidelity_fresh'].mean():.4f}",
                "late": f"{one['fidelity_late'].mean():.4f}", "reduced": f"{one['fidelity_reduced'].mean():.4f}",
                "slots": int(one["cache_slots"].iloc[0]), "label": one["source_label"].iloc[0],
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def fidelity(row: Any) -> str:
    """Write how much is served as routed, and how much of the rest at a lower width."""
    reduced = f", {100 * row.reduced:.0f} % low" if row.reduced else ""
    return f"{100 * row.fresh:.0f} %{reduced}"


def fastest(frame: pd.DataFrame) -> set[str]:
    """Name the systems among the three fastest exact ones at some model and batch."""
    exact = frame.groupby("policy").filter(lambda rows: (rows[["fresh", "late", "reduced"]] == [1, 0, 0]).all(axis=None))
    return {name for _, rows in exact.groupby(["model", "batch"]) for name in rows.nlargest(3, SPEED)["policy"]}


def lines(frame: pd.DataFrame, *, exact: bool) -> str:
    """Write the table of the fastest exact systems, or that of all others with their fidelity."""
    shown = {*fastest(frame), *ALWAYS}
    heads = [f"{model}, {batch}" for model in MODELS for batch in BATCHES]
    written = ["| system | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for policy, rows in frame.groupby("policy", sort=False):
        if (rows[["fresh", "late", "reduced"]] == [1, 0, 0]).all(axis=None) != exact or (exact and policy not in shown):
            continue
        by = {(row.model, row.batch): row for row in rows.itertuples()}
        cells = []
        for model in MODELS:
            for batch in BATCHES:
                row = by.get((model, batch))
                if row is None or math.isnan(row.decode_tokens_per_s):
                    cells.append("-")
                else:
                    cells.append(speed(row.decode_tokens_per_s) + ("" if exact else f" ({fidelity(row)})"))
        name = f"{policy} (oracle)" if "oracle" in set(rows["label"]) else policy
        written.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(written) + "\n"


def test_the_page_shows_the_fastest_of_the_table(regenerate: bool) -> None:
    if regenerate:
        runs = pd.read_parquet(ROOT / "results" / "equal-memory" / "runs.parquet")
        summary(runs).to_csv(TABLE, index=False)
    frame = pd.read_csv(TABLE)
    page = PAGE.read_text(encoding="utf-8")
    tables = [lines(frame, exact=True), lines(frame, exact=False)]
    if regenerate:
        found = iter(tables)
        page = re.sub(r"(?:^\| system .*\n)(?:^\|.*\n)+", lambda _: next(found), page, flags=re.M)
        PAGE.write_text(page, encoding="utf-8")
    assert all(table in page for table in tables)


def test_every_policy_of_the_experiment_is_in_the_table() -> None:
    named = {policy if isinstance(policy, str) else policy["name"] for policy in load_config(EXPERIMENT).policies}
    frame = pd.read_csv(TABLE)
    assert {str(policy).partition("(")[0] for policy in frame["policy"]} == named
    assert set(zip(frame["model"], frame["batch"], strict=True)) == {(model, batch) for model in MODELS for batch in BATCHES}


def test_the_table_is_that_of_today(tmp_path: Path) -> None:
    sets = ["policies=[on-demand, kt-layer]", "workload.batch_size=1", "plots=[]", "exclude=[]"]
    assert main(["run", str(EXPERIMENT), *(f"--set={one}" for one in sets), "--out", str(tmp_path / "out")]) == 0
    found = summary(pd.read_parquet(tmp_path / "out" / "runs.parquet"))
    kept = pd.read_csv(TABLE, dtype=str)
    assert len(found) == 4
    for row in found.astype(str).to_dict("records"):
        one = kept[(kept["policy"] == row["policy"]) & (kept["model"] == row["model"]) & (kept["batch"] == row["batch"])]
        assert [one[name].item() for name in (SPEED, "ttft_s", "slots")] == [row[name] for name in (SPEED, "ttft_s", "slots")]
