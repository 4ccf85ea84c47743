"""The best of what was varied, by two other settings."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from moesim.errors import ConfigError
from moesim.plots.best_setting import best_setting
from moesim.plots.catalogue import figures_of
from tests.plots.plots_kit import rows

SPEEDS = {(1, 8): (10.0, 9.0), (2, 8): (10.0, 9.95), (1, 64): (5.0, 7.0)}  # batch, prompt: of a and b; (2, 64) failed


def frame() -> pd.DataFrame:
    return rows(*(
        (policy, speed, {"batch_size": batch, "prompt_tokens": prompt, "tpot_p50_ns": 1e9 / speed})
        for (batch, prompt), speeds in SPEEDS.items() for policy, speed in zip("ab", speeds, strict=True)
    ))  # fmt: skip


@pytest.mark.parametrize("metric", ["decode_tokens_per_s", "tpot_p50_ns"])
def test_each_cell_has_the_best_of_its_runs(metric: str):
    drawing = best_setting.drawing(frame(), y="batch_size", metric=metric)
    found = {(row["batch_size"], row["prompt_tokens"]): row["setting"] for _, row in drawing.data.iterrows()}
    assert found == {(1, 8): "a", (2, 8): "a", (1, 64): "b"}
    texts = {text.get_text() for text in drawing.figure.axes[0].texts}
    assert {text.partition("\n")[2] for text in texts} == {"×1.11", "×1.01", "×1.40"}
    assert sum(patch.get_hatch() == "////" for patch in drawing.figure.axes[0].patches) == 1, "less than 2 % better"


def test_machines_have_figures_of_their_own():
    both = pd.concat([frame(), frame().assign(hardware="another")], ignore_index=True)
    assert [name for name, _ in figures_of("best_setting", both, {"y": "batch_size"})] == [
        "best_setting.hardware=h", "best_setting.hardware=another"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": None}, "expected prompt_tokens of every run, got runs without"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        best_setting(frame().drop_duplicates("prompt_tokens").assign(**changes), y="batch_size")
