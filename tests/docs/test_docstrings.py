"""Parameter sections are for what may be imported, which one page and its table list; elsewhere a docstring is short."""

from __future__ import annotations

import ast
import csv
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
TABLE = csv.DictReader((ROOT / "docs" / "reference" / "api.csv").read_text(encoding="utf-8").splitlines())
LISTED = [
    *((module, name) for module, names in re.findall(r"^\| `(moesim[\w.]*)` \| (.*) \|$", PAGE, re.M)
      for name in re.findall(r"`(\w+)`", names)),
    *((row["module"], name) for row in TABLE for name in row["names"].split()),
]  # fmt: skip
SECTION = re.compile(r"^ *(Parameters|Returns|Yields|Raises|Attributes)\n *-{3,}$", re.M)
NEED_TORCH = ("moesim.recorder", "moesim.live", "moesim.live.profiler")


def found(module: str, name: str) -> object:
    if module.startswith(NEED_TORCH):
        pytest.importorskip("torch", reason="needs torch")
    return getattr(importlib.import_module(module), name)


def test_the_page_lists_names_once():
    assert len(LISTED) == len(set(LISTED)) > 150


@pytest.mark.parametrize("module", list(dict.fromkeys(module for module, _ in LISTED)))
def test_what_is_listed_can_be_imported_and_says_what_it_is(module: str):
    for name in (name for other, name in LISTED if other == module):
        thing = found(module, name)
        assert not (inspect.isclass(thing) or inspect.isfunction(thing)) or inspect.getdoc(thing), f"{module}.{name}"


def public() -> set[tuple[str, str]]:
    """Where the listed names are defined."""
    things = [(module, name, found(module, name)) for module, name in LISTED]
    return {(getattr(thing, "__module__", module), getattr(thing, "__name__", name)) for module, name, thing in things}


def with_sections(path: Path) -> Iterator[str]:
    """Name the outermost functions and classes of a module that have a docstring with sections, in it or inside them."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = [one for one in ast.walk(node) if isinstance(one, ast.FunctionDef | ast.ClassDef)]
        if any(SECTION.search(ast.get_docstring(one) or "") for one in inner):
            yield node.name  # type: ignore[union-attr]


def test_sections_are_for_what_is_listed():
    known = public()
    for path in sorted((ROOT / "moesim").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        strangers = [name for name in with_sections(path) if (module, name) not in known]
        assert not strangers, f"{module}: {', '.join(strangers)}: one sentence, or a line in docs/reference/api.csv"


BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{i}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_an_example_imports_what_is_listed_and_uses_nothing_private(block: str):
    nodes = list(ast.walk(ast.parse(block)))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names = [(str(node.module), alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    ours = [one for one in names if one[0].partition(".")[0] == "moesim"]
    assert not set(ours) - set(LISTED), "a line in docs/reference/api.csv, or another example"
    used = {(node.value.id, node.attr) for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    assert not {one for one in used if one[0] == "moesim"} - set(LISTED), "a line in docs/reference/api.csv, or another example"
    plain = [name for name in plain if name != "moesim"]
    others = {module.partition(".")[0] for module in [*plain, *(module for module, _ in set(names) - set(ours))]}
    assert "moesim" not in others and all(one in sys.stdlib_module_names or find_spec(one) for one in others)
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)]
    own = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    assert {node.attr for node in attributes} <= own


def test_there_are_examples():
    assert len([block for block in BLOCKS if re.search(r"(from|import) moesim", block.values[0])]) >= 5
