"""What the README and the first pages show works: the policy, YAML, commands, pictures and links."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim.cli.main import main
from moesim.experiment.config import parse_config
from moesim.experiment.sweep import expand
from moesim.live.profiler import probes
from moesim.policies.registry import make_policy
from moesim.studies.validation import public
from moesim.studies.validation.public import read_checks, read_sweeps
from moesim.testing import check_policy
from tests.docs.readme_kit import (
    HAS_TRACE,
    OWN,
    README,
    ROOT,
    START,
    blocks,
    commands,
    different_commands,
    make_recordings,
    make_routes,
    shortened,
    usable_cores,
)


@pytest.mark.parametrize(("page", "name"), [(README, "FewRowsOnCpu"), (OWN, "FirstExperts")])
def test_a_policy_on_a_page_passes_the_common_checks(page: str, name: str):
    block = next(block for block in blocks("python", page) if f"class {name}" in block)
    space: dict[str, Any] = {"__name__": "my_module"}
    exec(block, space)
    report = check_policy(space[name])
    assert [check.verdict for check in report.checks[2:]] == ["passed"] * 4, "no size of the cache is refused"


def test_the_experiment_of_the_readme_is_valid():
    (whole,), (part,) = ([yaml.safe_load(block) for block in blocks("yaml", page)] for page in (README, START))
    for raw in (whole, whole | part):
        expand(parse_config(raw, "README.md"), "README.md")
        for policy in raw["policies"]:
            plain = isinstance(policy, str) or not any(isinstance(value, list) for value in policy.values())
            assert not plain or make_policy(policy)


def test_the_readme_shows_the_main_commands():
    assert {c[0] for c in commands()} == {
        "demo",
        "run", "compare", "check", "list", "trace", "schema", "bench", "regret", "league", "papers", "profile",
        "replay", "validate", "recommend", "calibrate", "whatif", "diff", "plot", "report",
    }  # fmt: skip


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the quickstart, shortened; it is copied, not changed."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    assert main(["run", str(ROOT / "experiments" / "quickstart.yaml"), "--quick", "--set", "plots=[]", "--out", str(out)]) == 0
    return out


# Each takes many times as long as what else there is to test of it.
LONG = {"validate", "replay", "report", "bench", "calibrate", "trace stats", "plot signal_accuracy"}
RUNS = [
    pytest.param(words, marks=[pytest.mark.long] if {words[0], " ".join(words[:2])} & LONG else [])
    for words in different_commands()
]


@pytest.mark.parametrize("command", RUNS, ids=" ".join)
def test_a_command_of_the_readme_runs(
    command: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    if not HAS_TRACE and command[0] in ("run", "compare", "trace"):
        pytest.skip("the shipped trace mini-mixtral is not here")
    monkeypatch.chdir(tmp_path)
    if command[:2] in (["trace", "record"], ["trace", "learn"]):
        make_recordings(tmp_path, record=command[1] == "learn")
    if command[:2] in (["trace", "import"], ["trace", "calibrate"]):
        make_routes(tmp_path, imported=command[1] == "calibrate")
    if command[0] == "check":
        (tmp_path / "my_module.py").write_text("".join([*blocks("python"), *blocks("python", OWN)]))
        monkeypatch.delitem(sys.modules, "my_module", raising=False)
        monkeypatch.setattr(sys, "path", [*sys.path])
    if command[:2] == ["profile", "measure"]:
        pretend_machine(monkeypatch, 2**25)
    if command[0] in ("replay", "validate"):
        pytest.importorskip("torch", reason="measuring and replaying need torch: the extra profile")
        if len(usable_cores()) < 2:
            pytest.skip("two devices need two cores")
    if "--public" in command:  # some settings and figures; tests/studies and tests/docs hold them all
        monkeypatch.setattr(public, "read_sweeps", lambda path: read_sweeps(path)[::25])
        monkeypatch.setattr(public, "read_checks", lambda path: read_checks(path)[::9])
    if any(word.startswith("results/quickstart") for word in command):
        shutil.copytree(request.getfixturevalue("quickstart"), tmp_path / "results" / "quickstart")
    command = [str(ROOT / word) if word.startswith("experiments/") else word for word in command]
    assert main(shortened(command)) == 0
    printed = capsys.readouterr().out
    if command[0] in ("run", "replay"):
        assert ("replayed on this machine" in printed) == (command[0] == "replay")
    if command[0] == "demo":
        assert not set(blocks("text", START)[0].splitlines()) - set(printed.splitlines())


# The commands of a page's first block run one after the other, shortened. Other pages are tested by their own tests.
OPENINGS = ["model", "engines", "machines", "importing", "recording", "sweeps", "synthesis"]
LONGER = ["recommend", "questions", "whatif", "users", "calibrate", "routing"]


@pytest.mark.parametrize("page", [*OPENINGS, *(pytest.param(page, marks=pytest.mark.long) for page in LONGER)])
def test_the_commands_that_a_page_opens_with_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if not HAS_TRACE and page in ("importing", "sweeps", "users"):
        pytest.skip("the shipped traces are not here")
    monkeypatch.chdir(tmp_path)
    if page == "recording":
        make_recordings(tmp_path, record=False)
    if page == "importing":
        make_routes(tmp_path, imported=False)
    text = (ROOT / "docs" / "guide" / f"{page}.md").read_text(encoding="utf-8")
    block = blocks("sh", text)[0]
    commands = [shlex.split(line, comments=True)[1:] for line in block.replace("\\\n", "").splitlines()]
    assert commands
    for command in commands:
        words = [str(ROOT / word) if word.startswith("experiments/") else word for word in command]
        assert main(shortened(words)) == 0, command
    if page in ("model", "machines", "whatif"):  # shortening changes no number
        printed = "".join(capsys.readouterr()).splitlines()
        assert not set(blocks("text", text)[0].splitlines()) - set(printed)


def pretend_machine(monkeypatch: pytest.MonkeyPatch, cache: int | None) -> None:
    """Let this machine report eight cores, what is free of 8 GB, and a cache."""
    monkeypatch.setattr(probes, "l3_bytes", lambda: cache)
    monkeypatch.setattr(probes, "available_memory_bytes", lambda: 6_500_000_000)
    monkeypatch.setattr("moesim.live.profiler.request.usable_cores", lambda: range(8))


PAGES = [ROOT / "README.md", ROOT / "moesim" / "cli" / "profile.py", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
MEASURING = re.findall(r"moesim (profile measure [^`#\n]*--memory [^`#\n]*)", "".join(page.read_text() for page in PAGES))


@pytest.mark.parametrize("cache", [None, 2**15, 480 * 2**20, 2**30])
@pytest.mark.parametrize("command", MEASURING)
def test_a_machine_of_8_gb_is_measured_whatever_cache_it_reports(
    command: str, cache: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretend_machine(monkeypatch, cache)
    assert main([*command.split(), "--dry-run", "--no-gpu", "--out", str(tmp_path)]) == 0
    assert ("takes turns" in capsys.readouterr().out) == ((cache or 0) > 2**27)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_links_exist(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_answer_of_the_readme_is_what_is_printed(capsys: pytest.CaptureFixture[str]):
    asked = next(block for block in blocks("sh") if "recommend" in block)
    shown = blocks("text")[0].splitlines()
    assert main(shlex.split(asked)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) > 5
    assert all(line in printed for line in shown)


def test_the_readme_is_short():
    assert len(README.splitlines()) < 145, "with an answer as it is printed"
    assert len(README.split()) < 1345  # a row on the papers, the demo, one choice of requests
