"""The table of README's quickstart: ``docs/guide/quickstart.csv``, means of several draws of requests and routing.

``moesim run experiments/quickstart.yaml --set repeat=8 --set intervals=true --set plots=[] --set timeline=null --out FOLDER`` and
``python -m tests.docs.quickstart_kit FOLDER`` write it anew, and the table in README.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd

from moesim.experiment.report import CI

ROOT = Path(__file__).resolve().parents[2]
README, TABLE = ROOT / "README.md", ROOT / "docs" / "guide" / "quickstart.csv"
SETTING = ["policy", "batch_size", "cache_ratio"]
SPEED = "decode_tokens_per_s"
HALF = f"{SPEED}_half"  # half the width of the 95 % interval of the mean over draws
COLUMNS = [
    *SETTING, SPEED, HALF, f"{SPEED}_least", f"{SPEED}_most", "ttft_mean_ns", "pcie_share", "fidelity_fresh_decode",
    "source_label",
]  # fmt: skip
DRAWS = 8


def means(folder: Path) -> pd.DataFrame:
    """Read the means of a run with repeats."""
    found = pd.read_parquet(folder / "repeats.parquet").rename(columns={CI + SPEED: HALF})
    assert (found["repeats"] == DRAWS).all()
    return found


def cells(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Write the speeds of each policy, by batch and cache, with half of their interval."""
    found: dict[str, list[str]] = {}
    for _, row in rows.sort_values(SETTING[1:]).iterrows():
        found.setdefault(str(row["policy"]), []).append(f"{row[SPEED]:.1f}±{row[HALF]:.1f}")
    return found


def with_table(page: str, rows: pd.DataFrame) -> str:
    """Put the speeds into the table of a page that names each policy in the first cell of a line."""
    for policy, speeds in cells(rows).items():
        line = rf"^(\| {re.escape(policy)}(?: \([^)]*\))? \|)(?: [\d.±]+ \|){{{len(speeds)}}}"
        page, n = re.subn(line, lambda match, s=speeds: match[1] + "".join(f" {one} |" for one in s), page, flags=re.M)
        assert n == 1, f"{policy}: no line in the table"
    return page


if __name__ == "__main__":
    new = means(Path(sys.argv[1]))[COLUMNS]
    new.to_csv(TABLE, index=False, lineterminator="\n")
    README.write_text(with_table(README.read_text(encoding="utf-8"), new), encoding="utf-8")
