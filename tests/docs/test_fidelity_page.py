"""The page on fidelity shows numbers of the shipped results, the worst of each model among them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from moesim.core.table import Format, render

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "background" / "fidelity.md").read_text(encoding="utf-8")
RESULTS = ROOT / "experiments" / "research" / "results"
MODELS = ("mini-mixtral", "mini-deepseek-v2-lite", "mini-qwen3")
SHOWN = [
    ("substitution", 0.25), ("stale input", 0.25), ("predicted, stale input", 0.25), ("DAOP", 0.25), ("DAOP", 1),
    ("DAOP, from block 1", 0.25), ("AdapMoE skip", 0.75), ("skip, one threshold", 0.75), ("AdapMoE skip", 1),
    ("AdapMoE skip, not rescaled", 1),
]  # fmt: skip
DEFERRED = [(f"deferral of {n}", 0.25) for n in (1, 2, 4)]


def results(model: str) -> pd.DataFrame:
    """Read the rows over all text, by series and strength."""
    found = pd.read_csv(RESULTS / f"fidelity-{model}.csv")
    return found[found["text"] == "all"].set_index(["series", "strength"])


def cell(frame: pd.DataFrame, key: tuple[str, float], share: str) -> str:
    if key not in frame.index:
        return "-"
    row = 100 * frame.loc[key, [share, "change", "change_low", "change_high"]].astype(float)
    return "{:.1f}; {:+.2f} [{:+.2f}, {:+.2f}]".format(*row)


def page_table(keys: list[tuple[str, float]], share: str) -> str:
    """Write rows as the page has them: a share, and the change of perplexity with its interval, in per cent."""
    cells = [[key[0], f"{key[1]:g}", *(cell(results(model), key, share) for model in MODELS)] for key in keys]
    heads = ["series", "strength", *MODELS]
    return render(heads, cells, Format.MD, right=heads[1:])


@pytest.mark.parametrize(("keys", "share"), [(SHOWN, "fidelity_fresh"), (DEFERRED, "deferred")])
def test_the_tables_have_the_shipped_numbers(keys: list[tuple[str, float]], share: str):
    assert page_table(keys, share) in PAGE


def test_every_shipped_model_is_on_the_page():
    assert sorted(path.stem.removeprefix("fidelity-") for path in RESULTS.glob("*.csv")) == sorted(MODELS)
    assert all(f"images/fidelity-{model}.png" in PAGE for model in MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_the_worst_change_and_every_series_of_a_model_are_shown(model: str):
    found = results(model)
    series, strength = found["change"].idxmax()
    assert (series, strength) in SHOWN
    assert {name for name, _ in found.index} <= {name for name, _ in (*SHOWN, *DEFERRED)}
