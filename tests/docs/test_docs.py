"""What the pages show is valid."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from moesim.experiment.config import load_config
from moesim.experiment.sweep import expand

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_grid_of_the_page_on_sweeps(tmp_path: Path):
    """4 bits on one machine and 8 on the other; lru without batch 16, dali's w_size 2 on one machine only."""
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "guide" / "sweeps.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "machine.yaml").write_text(yaml.safe_dump({"extrapolate": True}))
    (tmp_path / "page.yaml").write_text(block)
    points = expand(load_config(tmp_path / "page.yaml"), "page.yaml")
    machines, batches, sizes, repeats = 2, 3, 3, 5
    per_policy = {"lru": machines * (batches - 1), "fiddler": machines * batches, "dali": batches * (4 + 2)}
    assert len(points) == sum(per_policy.values()) * sizes * repeats
    assert all(point.extrapolate for point in points)
