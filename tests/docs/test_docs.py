"""What the pages show is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moesim.experiment.config import load_config
from moesim.experiment.sweep import expand

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


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


def named_modules(text: str) -> set[str]:
    """Give the dotted names of moesim on a page; from import statements module and name together."""
    found = set(re.findall(r"(?<![\w/.])moesim(?:\.\w+)+", text)) - {"moesim.schema.json"}
    for module, names in re.findall(r"^from (moesim[\w.]*) import ([\w, ]+)", text, flags=re.M):
        found |= {f"{module}.{name.strip()}" for name in names.split(",")}
    return found


def exists(dotted: str) -> bool:
    """Look for a module, or for a name that a module defines or imports; nothing is imported."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:n])
        source = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        if source is not None:
            text = source.read_text(encoding="utf-8")
            return all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in parts[n:])
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_that_a_page_names_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"(?<![\w/.*-])((?:moesim|tests|experiments)/[\w./-]*\w/?)", text))
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {name for name in named_modules(text) if not exists(name)} == set()


def test_what_is_missing_is_seen():
    assert not exists("moesim.policy.Nothing")
    assert exists("moesim.policy.Routed")
    assert named_modules("from moesim.plots import save, no_such\n") >= {"moesim.plots.no_such"}


def test_the_files_of_the_design_page_exist():
    """A path stands below moesim/, or below the folder of the path before it in the same cell."""
    table = (
        (DOCS / "background" / "design.md")
        .read_text(encoding="utf-8")
        .partition("## Where a thing")[2]
        .partition("\nA module")[0]
    )
    named = 0
    for line in table.splitlines():
        folder = DOCS.parent / "moesim"
        for path in re.findall(r"`([\w/*.]+(?:\.py|/))`", line) if line.startswith("| ") and "question" not in line else []:
            starts = [DOCS.parent / "moesim", DOCS.parent, folder]
            found = [one for start in starts for one in start.glob(path.rstrip("/"))]
            assert found, path
            folder, named = found[-1] if path.endswith("/") else found[-1].parent, named + 1
    assert named > 40
