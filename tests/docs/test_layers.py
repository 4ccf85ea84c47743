"""Imports point down, and what is heavy or optional is imported in one place only."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.docs.imports_kit import ALL, PACKAGE, Import, all_imports

# From the bottom up. A module may import from its own group and from those below, patterns of one line being one group;
# groups of one level do not know each other unless they are the same group. The longest pattern that fits counts.
LEVELS: list[dict[str, str]] = [
    {"basics": "__init__ errors core core.*"},
    {"model": "model model.*"},
    {
        "inputs": "hardware hardware.* hardware.costs.curves trace trace.* "
        "experiment.config experiment.config_errors experiment.forms experiment.include",
    },
    {"serving": "serving serving.*"},
    {"facts": "policy records fits metrics.machine"},
    {"costs": "hardware.costs hardware.costs.*", "kernels": "live.kernels live.kernels.*"},
    {
        "policies": "policies policies.*",
        "engine": "engine engine.*",
        "predictors": "trace.predictors trace.predictors.*",
        "result": "experiment.result",
    },
    {"metrics": "metrics metrics.*"},  # the native engine has compiled twins of some of their functions
    {
        "experiment": "experiment experiment.* plots plots.* testing testing.* studies.bench",
        "live": "live live.*",
    },
    {"identify": "studies.identify studies.identify.*"},
    {
        "validation": "studies.validation studies.validation.*",
        "profiler": "live.profiler live.profiler.*",
        "studies": "studies studies.*",
    },
    {"recorder": "recorder recorder.*", "advice": "studies.advice studies.advice.*", "report": "reporting reporting.*"},
    {"measured engines": "studies.validation.engines"},  # predicted with the routing that advice chooses
    {"api": "api api.* profile"},
    {"explore": "explore explore.*"},
    {"cli": "cli cli.* __main__"},
]

ONLY = {  # who may import what
    "simpy": ["engine.*", "studies.bench"],
    "torch": ["recorder.*", "live.kernels.*", "trace.formats.sglang"],
    "transformers": ["recorder.*"],
    "tokenizers": ["recorder.*"],
    "accelerate": ["recorder.*"],
    "matplotlib": ["plots.*", "live.profiler.figure"],
    "typer": ["cli.*"],
    "rich": ["core.table", "core.progress"],
    "safetensors": ["recorder.*", "trace.format"],
    "pydantic": [
        "studies.identify.observations",
        "experiment.config",
        "experiment.config_errors",
        "experiment.forms",
        "experiment.quick",
        "hardware.*",
        "model.parts",
        "policies.*",
        "trace.recordings",
    ],
    "distributed": ["experiment.workers"],
    "jinja2": ["reporting.*"],
    "nicegui": ["explore.page", "explore.server"],
    "starlette": ["explore.server"],
    "pickle": [],
    "requests": [],
    "urllib": [],
    "datetime": [],
}


def place(name: str) -> tuple[int, str]:
    fits = [
        (len(pattern), level, group)
        for level, groups in enumerate(LEVELS)
        for group, patterns in groups.items()
        for pattern in patterns.split()
        if fnmatch(name, pattern)
    ]
    if not fits:
        pytest.fail(f"moesim.{name} has no place in the layers: give it one in this test")
    _, level, group = max(fits, key=lambda fit: fit[0])
    return level, group


def test_the_parser_sees_imports():
    assert Import("engine.clock", "simpy", False, False) in all_imports()
    assert any(i.importer == "engine.entry" and i.imported == "engine.setup" for i in all_imports())
    assert any(i.importer == "policy" and i.imported == "hardware.costs" and i.for_types for i in all_imports())


@pytest.mark.parametrize("name", list(ALL))
def test_imports_point_down(name: str):
    level, group = place(name)
    wrong = []
    for found in all_imports():
        if found.importer != name or not found.ours or found.for_types:
            continue
        other_level, other_group = place(found.imported)
        if other_level > level or (other_level == level and other_group != group):
            wrong.append(f"{found.imported} ({other_group})")
    assert not wrong, f"{name} ({group}) imports {', '.join(wrong)}"


def test_policies_and_engine_never_import_each_other_not_even_for_types():
    for found in all_imports():
        groups = {found.importer.split(".")[0], found.imported.split(".")[0]}
        assert not (found.ours and groups == {"policies", "engine"}), found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def graph(group: Callable[[str], str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in all_imports():
        if one.ours and group(one.importer) != group(one.imported):
            found.setdefault(group(one.importer), set()).add(group(one.imported))
    return found


def room(name: str) -> str:
    return name.partition(".")[0]


def test_rooms_and_modules_form_no_circle_types_included():
    assert cycle(graph(room)) == []
    assert cycle(graph(lambda name: name)) == []
    assert cycle({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("package", list(ONLY))
def test_only_some_import(package: str):
    users = {i.importer for i in all_imports() if not i.ours and i.imported == package and not i.for_types}
    strangers = [user for user in users if not any(fnmatch(user, p) or fnmatch(f"{user}.", p) for p in ONLY[package])]
    assert not strangers, f"{package} is imported by {strangers}; allowed: {ONLY[package]}"


def test_nothing_is_imported_that_an_installation_lacks():
    """The tests, for example, which lie next to the package in a checkout only."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for name, extra in project["optional-dependencies"].items() for one in extra if name not in ("dev", "docs")]
    named = {match[0].lower() for one in (*project["dependencies"], *extras) if (match := re.match(r"[\w-]+", one))}
    assert {"pyyaml", "matplotlib", "jinja2"} <= named
    named |= {"yaml", "fonttools", "markupsafe"}  # what is imported of these, and what they bring themselves
    found = {one.imported for one in all_imports() if not one.ours} - sys.stdlib_module_names
    assert {name for name in found if name.lower() not in named} == set()


@pytest.mark.long
def test_no_test_module_lends_anything():
    """What several test modules share stands in a kit or a conftest file next to them."""
    tests = Path(__file__).resolve().parents[1]
    lent = [
        f"{path.relative_to(tests)}: {name}"
        for path in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _imported(node)
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert lent == []


def _imported(node: ast.AST) -> list[str]:
    """Return modules that a statement may import: `from package import name` may mean a module `package.name`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names] if (node.module or "").startswith("tests") else []
        return [node.module or "", *names]
    return []
