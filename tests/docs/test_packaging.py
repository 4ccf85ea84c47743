"""What a wheel must not hold, and what the Makefile must watch: both were wrong without a sign of it."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import moesim

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "moesim/engine/native"


def test_an_extension_module_built_in_the_checkout_stays_out_of_wheels() -> None:
    """It is of one Python and one platform. What git ignores is left out, unless a list of what to include brings it in."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert "include" not in settings.get("sdist", {})
    for name in ("_native.cpython-311-x86_64-linux-gnu.so", "_native.cp311-win_amd64.pyd"):
        assert any(fnmatch(name, pattern) for pattern in ignored)


def test_the_makefile_watches_every_native_source() -> None:
    (patterns,) = re.findall(r"^NATIVE := \S+ \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    watched = {path for pattern in patterns.split() for path in ROOT.glob(pattern)}
    assert watched == {path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".hpp", ".h", ".c", ".cc")} != set()


def test_wheels_of_cibuildwheel_have_the_native_engine() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    for place in (settings, settings["macos"], settings["linux"]):
        assert place.get("environment", settings["environment"])["MOESIM_NATIVE"] == "1"
    assert "--engine native" in settings["test-command"]


def test_one_version_is_named_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heading is not None
    assert {project["version"], str(citation["version"]), heading[1]} == {moesim.__version__}
    assert citation["license"] == project["license"]


def test_the_extra_all_has_what_users_may_want() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.findall(r"\w+", everything.partition("[")[2])) == set(extras) - {"all", "dev", "docs"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and all(one["attributes"]["label"] for one in form["body"])
